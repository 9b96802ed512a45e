"""Grades as files: JSON for programs, CSV for a spreadsheet, JUnit XML for a CI server.

Messages quote what learners' code said, so they are cleaned here: no control characters, nothing that a spreadsheet
takes for a formula.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from xml.etree import ElementTree

__all__ = ["STATUSES", "Row", "printable", "write"]

STATUSES = ("passed", "failed", "error", "timeout", "missing", "unreadable")
# Escape sequences whole, then what XML 1.0 cannot hold (and no terminal should get).
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Row:
    """One task of one notebook. `status` is one of STATUSES; `message` is empty when passed."""

    learner: str
    notebook: str
    task: str
    status: str
    message: str = ""


def printable(text: str) -> str:
    """The text as any terminal, spreadsheet and XML parser can take it."""
    return _UNPRINTABLE.sub("\ufffd", _ESCAPE.sub("", text))


def write(rows: Sequence[Row], folder: Path) -> None:
    """Write grades.json, grades.csv and junit.xml into an existing folder."""
    table = [asdict(row) for row in rows]
    (folder / "grades.json").write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "grades.csv").write_text(_csv(table), encoding="utf-8", newline="")
    ElementTree.ElementTree(_junit(rows)).write(folder / "junit.xml", encoding="utf-8", xml_declaration=True)


def _csv(table: Sequence[dict[str, str]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)])
    writer.writeheader()
    # A cell that begins like a formula would be run as one.
    writer.writerows(
        {name: f"'{v}" if v.startswith(tuple("=+-@\t\r")) else v for name, v in row.items()} for row in table
    )
    return text.getvalue()


def _junit(rows: Sequence[Row]) -> ElementTree.Element:
    root = ElementTree.Element("testsuites", name="kvlab grade")
    for learner in dict.fromkeys(row.learner for row in rows):
        own = [row for row in rows if row.learner == learner]
        suite = ElementTree.SubElement(root, "testsuite", name=learner, tests=str(len(own)))
        kinds = {"failures": ("failed", "missing"), "errors": ("error", "timeout", "unreadable")}
        for kind, statuses in kinds.items():
            suite.set(kind, str(sum(row.status in statuses for row in own)))
        for row in own:
            case = ElementTree.SubElement(suite, "testcase", classname=row.notebook, name=row.task or row.notebook)
            if row.status != "passed":
                tag = "failure" if row.status in kinds["failures"] else "error"
                found = ElementTree.SubElement(case, tag, type=row.status, message=row.message.split("\n")[0])
                found.text = row.message
    return root
