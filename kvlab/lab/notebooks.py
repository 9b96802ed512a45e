"""Notebooks as files: exercises made from solutions, lessons run and cleaned for committing.

    python -m kvlab.lab.notebooks exercises [--check]      # solutions/*.ipynb -> exercises/*.ipynb
    python -m kvlab.lab.notebooks run lessons/00_….ipynb   # run top to bottom, keep the outputs, strip widget state

A solution's answers stand between `### BEGIN SOLUTION` and `### END SOLUTION`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat

__all__ = ["clean", "exercise", "read", "run", "write"]

_SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION *\n(.*?)^[ \t]*### END SOLUTION *\n?", re.MULTILINE | re.DOTALL)
_KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
# What a learner must not see before having guessed.
MEASURE = "measure"


def read(path: Path) -> Any:
    """The notebook in format 4.5. Raises ValueError when the file is not one."""
    try:
        return nbformat.read(path, as_version=4)
    except (UnicodeDecodeError, ValueError, KeyError, AttributeError, TypeError, nbformat.ValidationError) as error:
        raise ValueError(f"{path} is not a notebook: {' '.join(str(error).split())[:200]}") from error


def write(notebook: Any, path: Path) -> None:
    """Write it the one way that we commit: validated, one trailing newline."""
    nbformat.validate(notebook)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")


def exercise(solution: Any) -> Any:
    """The learner's notebook: answers become NotImplementedError, outputs are gone, everything else stays."""
    notebook = nbformat.from_dict(solution)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = _SOLUTION.sub(_blank, cell.source + "\n").removesuffix("\n")
            cell.outputs, cell.execution_count = [], None
    return clean(notebook)


def _blank(found: re.Match[str]) -> str:
    indent, body = found.groups()
    lines = sum(bool(line.strip()) for line in body.splitlines())
    about = f"about {lines} line{'s' if lines > 1 else ''}"
    if not indent:
        # A value that is not written yet; the check says so.
        return (
            "\n".join(f"{name} = None  # your answer" for name in re.findall(r"^(\w+) = ", body, re.MULTILINE)) + "\n"
        )
    return f'{indent}raise NotImplementedError("your code here: {about}")\n'


def clean(notebook: Any) -> Any:
    """Without widget state, widget views, run times, and editors' metadata: what may be committed."""
    notebook.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in ("kvlab", "tags") if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            output.pop("transient", None)
            if output.get("metadata"):
                output.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.output_type not in ("display_data",) or _shows(o.data)]
    return notebook


def _shows(data: Any) -> bool:
    """Whether anything but a widget's name is left to show."""
    return bool(set(data) - {"text/plain"})


def without_results(lesson: Any) -> Any:
    """The lesson for a learner: what the measuring cells once printed elsewhere is gone, other first frames stay."""
    for cell in lesson.cells:
        if cell.cell_type == "code" and MEASURE in cell.metadata.get("tags", ()):
            cell.outputs, cell.execution_count = [], None
    return lesson


def run(path: Path, timeout_s: int = 180) -> None:
    """Run a notebook top to bottom in its own folder with typical guesses, clean it, and write it back.

    Raises nbclient's CellExecutionError when a cell fails, and ValueError when a cell warns.
    """
    from nbclient import NotebookClient

    notebook = read(path)
    environment = {**os.environ, "KVLAB_AUTO": "1"}
    client = NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(path.resolve().parent)}}
    )
    client.execute(env=environment)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise ValueError(f"{path}: a cell wrote to stderr: {output.text[:500]}")
    write(clean(notebook), path)


def main(arguments: list[str] | None = None) -> int:
    """The command line above; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.lab.notebooks", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("exercises", help="make exercises/ from solutions/")
    make.add_argument("--check", action="store_true", help="change nothing; exit 1 when an exercise is out of date")
    make.add_argument("--root", type=Path, default=Path(), help="the folder that holds solutions/ and exercises/")
    runs = commands.add_parser("run", help="run notebooks and keep their outputs")
    runs.add_argument("paths", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "run":
        for path in options.paths:
            run(path)
        return 0
    stale = 0
    for source in sorted((options.root / "solutions").glob("*.ipynb")):
        target = options.root / "exercises" / source.name
        text = nbformat.writes(exercise(read(source))) + "\n"
        if target.is_file() and target.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if options.check:
            sys.stderr.write(f"{target} is out of date: python -m kvlab.lab.notebooks exercises\n")
        else:
            write(nbformat.from_dict(nbformat.reads(text, 4)), target)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
