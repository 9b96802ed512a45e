"""Bench rows as words: the cells of a table, a line of the shell, and the Markdown page of a whole record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.experiments.bench import GROUPS
from kvlab.experiments.bench.rows import ratios
from kvlab.units import format_bytes

__all__ = ["COLUMNS", "by_group", "cells", "line", "markdown", "markdown_rows"]

COLUMNS = ("what", "ours", "ratio [95 %]", "goal", "")


def _number(value: float) -> str:
    """Three digits, without an exponent where a reader would rather have the number."""
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e7 else f"{value:.3g}"


def _ours(row: Mapping[str, Any]) -> str:
    return "n/a" if row["ours"] is None else f"{_number(row['ours'])} {row['unit']}".rstrip()


def _ratio(row: Mapping[str, Any]) -> str:
    shown = " / ".join(f"{ratio:.2f}" for ratio in ratios(row).values())
    if row["interval"] and None not in row["interval"]:
        low, high = row["interval"]
        plain = bool(ratios(row)) or 0.1 <= low <= high < 10
        shown += f" [{low:.2f}, {high:.2f}]" if plain else f" [{_number(low)}, {_number(high)}]"
    return shown.strip()


def _met(row: Mapping[str, Any]) -> str:
    return {True: "met", False: "missed", None: "-"}[row["met"]]


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A plain row under `COLUMNS`. The interval is that of the first ratio; without one, that of `ours`."""
    what = f"{row['name']}: {row['note']}" if row.get("note") else row["name"]
    return (what, _ours(row), _ratio(row), row["goal"], _met(row))


def line(row: Mapping[str, Any]) -> str:
    """A plain row in one line, with the floor and the peers."""
    floor = [] if row["floor"] is None else [f"floor {_number(row['floor'])}"]
    peers = [f"{name} {_number(value)}" for name, value in row["peers"].items() if value is not None]
    name, ours, ratio, goal, met = cells(row)
    kind = "ratio" if ratios(row) else "95 %"
    parts = [f"{name}: {ours}", ", ".join(floor + peers), ratio and f"{kind} {ratio}", goal, met]
    return "; ".join(part for part in parts if part)


def markdown_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table's lines, its head first."""
    yield "| " + " | ".join(COLUMNS[:-1]) + " | |"
    yield "|" + "---|" * len(COLUMNS)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |"


def by_group(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Plain rows by group, in the order of `GROUPS` whatever the order in which they were measured."""
    names = dict.fromkeys(row.get("group", "") for row in rows)
    for name in sorted(names, key=lambda group: list(GROUPS).index(group) if group in GROUPS else -1):
        yield name, [row for row in rows if row.get("group", "") == name]


def markdown(record: Mapping[str, Any]) -> str:
    """The page of a record: machine facts, commands, and one table for each group."""
    facts = record["facts"]
    machine = f"{facts['cpu']}, {facts['cores']} cores, {facts['torch_threads']} torch threads"
    memory = format_bytes(facts["memory_bytes"]) if facts.get("memory_bytes") else "unknown memory"
    gpu = f", {facts['gpu']}" if facts.get("gpu") else ""
    missed = sum(row["met"] is False for row in record["rows"])
    met = sum(row["met"] is True for row in record["rows"])
    lines = [
        "# The last recorded runs of kvlab bench",
        "",
        f"{record['when']}, {machine} ({facts['cpu_capability']}), {memory}{gpu}; Python {facts['python']}, torch"
        f" {facts['torch']}, {facts['system']}. Goals: {met} met, {missed} missed.",
        "",
        "A ratio above 1 means that kvlab is faster; in brackets its 95 % interval, or that of our own figure where a"
        " row has no ratio. Where there is a floor its ratio comes first.",
        "",
        "```sh",
        *(f"{command} --add --out docs/bench.json" for command in record.get("commands", ())),
        "kvlab bench --from docs/bench.json --markdown > docs/bench.md   # this page",
        "```",
    ]
    for name, rows in by_group(record["rows"]):
        about = f": {GROUPS[name].measures}" if name in GROUPS else ""
        title = [f"## {name}{about}", ""] if name else []
        lines += ["", *title, *markdown_rows(rows)]
    return "\n".join(lines) + "\n"
