"""Grading a class: every notebook that was handed in runs in a sandbox and answers; the answers are judged here.

A learner's kernel only says what the learner's functions return. What is right stays in this process, so nothing that
a notebook patches, prints or fakes can pass a task; only right answers do. Solutions are never read.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from kvlab.lab import sandbox, scan, submission
from kvlab.lab.course import Course, python_path
from kvlab.lab.gradebook import Row, printable
from kvlab.lab.task import GRADING, Task

__all__ = ["Grader", "grade"]

# A whole notebook gets as long as this many late cells, and what a kernel needs to start.
_LATE_CELLS = 6
_START_S = 300
# nbformat brings jsonschema, which would build a grammar of web addresses (2 s of CPU) that no notebook needs.
_PYTEST = "import sys; sys.modules['rfc3987_syntax'] = None; import pytest; sys.exit(pytest.main())"


@dataclass(frozen=True)
class Grader:
    """What all submissions of one run are graded with. `timeout_s` is per cell, `memory_bytes` per notebook."""

    course: Course
    exercises: dict[str, submission.Exercise]
    tasks: dict[str, Task]
    seed: str
    timeout_s: float
    memory_bytes: int

    @classmethod
    def of(cls, course: Course, seed: str, timeout_s: float, memory_bytes: int = 4 * 2**30) -> Grader:
        """A grader for the exercises of a course. Raises ValueError when an exercise and its tasks do not agree."""
        tasks = importlib.import_module(course.tasks).TASKS
        known = submission.exercises(course.exercises)
        unknown = {asked.task for exercise in known.values() for asked in exercise.asked} - set(tasks)
        if unknown or not known:
            raise ValueError(f"{course.exercises} asks for tasks that {course.tasks} does not have: {sorted(unknown)}")
        return cls(course, known, tasks, seed, timeout_s, memory_bytes)

    @property
    def limits(self) -> sandbox.Limits:
        """What one submission may use."""
        return sandbox.Limits(_START_S + _LATE_CELLS * self.timeout_s, self.memory_bytes)


def grade(
    grader: Grader,
    found: Sequence[submission.Found],
    jobs: int,
    done: Callable[[submission.Found], None] = lambda _: None,
) -> list[Row]:
    """One row per task of every notebook, in the order of `found`; `jobs` notebooks at a time.

    `done` hears of each notebook that is finished, from any thread. A notebook that cannot be graded gets rows too.
    """
    stop = threading.Event()

    def one(handed_in: submission.Found) -> list[Row]:
        try:
            rows = _grade(grader, handed_in, stop.is_set)
        except Exception as error:  # one notebook never stops the others
            rows = _all(grader, handed_in, "error", f"the grader failed on it: {type(error).__name__}: {error}")
        done(handed_in)
        return [Row(*map(printable, (row.learner, row.notebook, row.task, row.status, row.message))) for row in rows]

    # Threads, not processes: each waits for a child, and none can be killed by what a notebook does.
    with ThreadPoolExecutor(jobs) as pool:
        try:
            return [row for rows in pool.map(one, found) for row in rows]
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _all(grader: Grader, handed_in: submission.Found, status: str, message: str) -> list[Row]:
    """The same row for every task of the exercise after which the file is called; one without a task if it is none."""
    exercise = submission.match(handed_in.path.stem, (), grader.exercises)
    tasks = [asked.task for asked in exercise.asked] if exercise else [""]
    return [Row(handed_in.learner, handed_in.name, task, status, message) for task in tasks]


def _grade(grader: Grader, handed_in: submission.Found, stopped: Callable[[], bool]) -> list[Row]:
    try:
        cells = submission.code_cells(handed_in.path)
    except submission.Unreadable as error:
        return _all(grader, handed_in, "unreadable", f"the file {error}")
    exercise = submission.match(handed_in.path.stem, cells, grader.exercises)
    if exercise is None:
        known = ", ".join(grader.exercises)
        return _all(grader, handed_in, "missing", f"holds no task of any exercise; the exercises are {known}")
    prepared = submission.prepare(cells, exercise, grader.course.tasks, grader.seed)
    lines, reason = _run(grader, prepared.sources, stopped)
    thief = scan.reaches_answers(prepared.learners())
    rows = []
    for asked in exercise.asked:
        if thief is not None:
            status, message = "failed", f"code cell {thief + 1} reads kvlab's own answers; none of the notebook counts"
        else:
            status, message = _Verdict(grader, prepared, lines, reason, asked).status()
        rows.append(Row(handed_in.learner, handed_in.name, asked.task, status, message[:4000]))
    return rows


def _run(grader: Grader, sources: Sequence[str], stopped: Callable[[], bool]) -> tuple[dict[int, dict[str, Any]], str]:
    """Run the cells under nbval in a sandbox: what the plugin wrote by cell, and which limit ended it ("": none)."""
    scratch = Path(tempfile.mkdtemp(prefix="kvlab-grade-"))
    try:
        work, results = scratch / "work", scratch / "results.jsonl"
        work.mkdir()
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        (work / "submission.ipynb").write_text(nbformat.writes(notebook), encoding="utf-8")
        # An empty configuration of its own: pytest looks for one in all folders above.
        (scratch / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        limits = grader.limits
        command = [
            sys.executable, "-P", "-c", _PYTEST, "--noconftest", "-c", str(scratch / "pytest.ini"),
            "--rootdir", str(scratch), "-s", "--tb=no", "-p", "no:cacheprovider",
            "-p", "kvlab.lab.grading_plugin", "-p", "nbval.plugin", "--nbval-lax", "--nbval-current-env",
            "--nbval-kernel-startup-timeout", str(_START_S), "--nbval-cell-timeout", str(grader.timeout_s),
            "--kvlab-results", str(results),
            "--kvlab-cpu-s", str(int(2 * limits.wall_s)), "--kvlab-memory-bytes", str(limits.memory_bytes),
            "--kvlab-file-bytes", str(limits.file_bytes), str(work / "submission.ipynb"),
        ]  # fmt: skip
        tasks_file = sys.modules[grader.course.tasks].__file__ or ""
        folders = [] if grader.course.tasks.startswith("kvlab.") else [Path(tasks_file).resolve().parent]
        extra = {GRADING: grader.seed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        extra["PYTHONPATH"] = python_path(*folders)
        reason = sandbox.run(command, scratch, sandbox.environment(scratch, **extra), limits, stopped)
        return _lines(results), reason
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _lines(results: Path) -> dict[int, dict[str, Any]]:
    """The plugin's lines by cell; whatever else stands in the file (a notebook may find it) is passed over."""
    found: dict[int, dict[str, Any]] = {}
    if not results.is_file() or results.is_symlink():
        return found
    with results.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                found[int(line["cell"])] = {"end": line["end"], "error": str(line["error"]), "answers": line["answers"]}
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
    return found


@dataclass(frozen=True)
class _Verdict:
    """What became of one task, from what its cells did."""

    grader: Grader
    prepared: submission.Prepared
    lines: dict[int, dict[str, Any]]
    reason: str
    asked: submission.Asked

    def status(self) -> tuple[str, str]:
        check = self.lines.get(self.prepared.checks[self.asked.task])
        answers = self.prepared.answers[self.asked.task]
        undefined = check is None or check["error"].startswith("NameError")
        if not answers and undefined:
            return "missing", f"no cell defines {', '.join(sorted(self.asked.names)) or self.asked.task}"
        taken = self._taken(answers)
        if taken:
            return "failed", f"the answer calls kvlab's own function instead of working it out: it {taken}"
        if check is not None and isinstance(check["answers"], str):
            return self._judged(check["answers"])
        cells = [self.lines[index] for index in answers if index in self.lines]
        if check is None or check["end"] in ("died", "unstarted"):
            return self._unfinished(check, cells)
        if check["end"] == "late" or (undefined and any(cell["end"] == "late" for cell in cells)):
            return "timeout", f"a cell ran longer than {self.grader.timeout_s:g} s"
        failing = [cell["error"] for cell in cells if cell["end"] == "error"]
        if undefined and failing and failing[-1].startswith("NotImplementedError"):
            return "failed", f"not written yet{failing[-1].removeprefix('NotImplementedError')}"
        if undefined and failing:
            return "error", f"the answer's cell fails: {failing[-1]}"
        return "error", f"the check got no answers{': ' + check['error'] if check['error'] else ''}"

    def _taken(self, answers: Sequence[int]) -> str | None:
        task = self.grader.tasks[self.asked.task]
        if task.value or task.may_use_kvlab:
            return None
        return scan.uses_kvlab(self.prepared.sources, answers, self.prepared.given, self.prepared.checks.values())

    def _judged(self, text: str) -> tuple[str, str]:
        task = self.grader.tasks[self.asked.task]
        try:
            told = json.loads(text)
            answers, seed = list(told["answers"]), str(told["seed"])[:200] if task.value else self.grader.seed
        except (ValueError, KeyError, TypeError, RecursionError):
            return "error", "the check's answers are not what a check displays"
        status, message = task.grade(seed, answers)
        return status, message or ""

    def _unfinished(self, check: dict[str, Any] | None, cells: Sequence[dict[str, Any]]) -> tuple[str, str]:
        """The check never ran, or its kernel ended under it."""
        if any(cell["end"] == "late" for cell in (*cells, *([check] if check else []))):
            return "timeout", f"a cell ran longer than {self.grader.timeout_s:g} s and could not be interrupted"
        if self.reason.startswith("time"):
            return "timeout", f"the notebook {self.reason.partition(': ')[2]}"
        unstarted = [line["error"] for line in self.lines.values() if line["end"] == "unstarted"]
        if unstarted:
            return "error", f"no kernel started: {unstarted[0]}"
        # A kernel that could not be interrupted was killed: its last cell is late, not dead.
        ends = [index for index, line in sorted(self.lines.items()) if line["end"] == "died"]
        late = bool(ends) and self.lines.get(ends[0] - 1, {}).get("end") == "late"
        where = f" in code cell {ends[0] + (not late)}" if ends else ""
        limit = f": it {self.reason.partition(': ')[2]}" if self.reason else ""
        return "error", f"the kernel {'had to be' if late else 'was'} ended{where}{limit}"
