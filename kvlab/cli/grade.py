"""`kvlab grade`: a class of exercise notebooks in a sandbox, judged task by task; and a chart of its machines."""

from __future__ import annotations

import os
import secrets
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvlab.cli.console import err, out, progress

if TYPE_CHECKING:
    from kvlab.lab.gradebook import Row
    from kvlab.lab.task import Task


def grade(
    paths: Annotated[list[Path], typer.Argument(help="Notebooks, or folders that are searched for them.")],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for grades.json, grades.csv and junit.xml.")
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(help="Draw everybody's break-even link from their crossover.json here; alone, it grades nothing."),
    ] = None,
    seed: Annotated[str, typer.Option(help="Text from which the test cases derive; default: a new one.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds that one cell may run.", min=1)] = 30.0,
    jobs: Annotated[int, typer.Option(help="Notebooks at a time; 0: one per core.", min=0)] = 0,
) -> None:
    """Grade the exercises that were handed in. Exits 0 when all were graded, whatever the grades."""
    if out_folder is None and chart is None:
        raise ValueError("say what to make: --out FOLDER for grades, --chart FILE.png for the class chart, or both")
    if chart is not None:
        _draw(paths, chart)
    if out_folder is not None:
        _grade(paths, out_folder, seed, timeout, jobs)


def _draw(paths: list[Path], chart: Path) -> None:
    from kvlab.lab import class_records
    from kvlab.lab.draw.break_even import class_figure
    from kvlab.lab.draw.style import save

    rows, broken = class_records.find(paths)
    for line in broken:
        err.print(line, markup=False, soft_wrap=True)
    out.print(f"{len(rows)} records drawn in {save(class_figure(rows), chart)}", markup=False, soft_wrap=True)


def _grade(paths: list[Path], out_folder: Path, seed: str, timeout: float, jobs: int) -> None:
    if not all(map(find_spec, ("nbval", "nbformat", "IPython"))):
        raise ValueError("grading needs nbval and Jupyter's kernel: pip install 'kvlab[lab]'")
    from kvlab.lab import gradebook, submission
    from kvlab.lab.course import course
    from kvlab.lab.grade import Grader
    from kvlab.lab.grade import grade as grade_all
    from kvlab.lab.sandbox import missing_limits

    _require_writable(out_folder)
    grader = Grader.of(course(), seed or secrets.token_hex(8), timeout)
    found = submission.find(paths, grader.exercises)
    if missing_limits():
        err.print(missing_limits(), markup=False, soft_wrap=True)
    say, left = progress(), [len(found)]

    def done(_: submission.Found) -> None:
        left[0] -= 1
        say(f"grading: {len(found) - left[0]} of {len(found)} notebooks" if left[0] else "")

    rows = grade_all(grader, found, jobs or _cores(), done)
    gradebook.write(rows, out_folder)
    out.print(_points(rows, grader.tasks))
    for row in rows:
        if row.status != "passed":
            line = f"{row.learner} · {row.notebook} · {row.task or '-'}: {row.status}: {row.message}"
            out.print(" ".join(line.split())[:400], markup=False, soft_wrap=True)
    out.print(f"{len(rows)} grades in {out_folder} (the same cases again: --seed {grader.seed})", markup=False)


def _require_writable(folder: Path) -> None:
    """Before an hour of grading, not after it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _points(rows: list[Row], tasks: dict[str, Task]) -> Table:
    """Learner × notebook: points had of points possible."""
    notebooks = sorted({Path(row.notebook).name for row in rows})
    table = Table(title="points", title_justify="left")
    table.add_column("learner")
    for name in notebooks:
        table.add_column(name.removesuffix(".ipynb"), justify="right")
    for learner in dict.fromkeys(row.learner for row in rows):
        cells = []
        for name in notebooks:
            own = [row for row in rows if row.learner == learner and Path(row.notebook).name == name]
            worth = [(tasks[row.task].points if row.task in tasks else 0, row.status == "passed") for row in own]
            cells.append(f"{sum(p for p, had in worth if had)} of {sum(p for p, _ in worth)}" if own else "")
        table.add_row(_escaped(learner), *cells)
    return table


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
