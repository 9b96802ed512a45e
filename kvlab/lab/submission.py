"""A notebook that was handed in, as a file and as cells: whose it is, which exercise, and what of it is run.

What is run are the learner's code cells, in order, with the exercise's own check cells in their places. A cell is
recognised by its id, its metadata, its place, or by what it says: editors drop some of these. Runs nothing itself.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from kvlab.lab import scan
from kvlab.lab.notebooks import read
from kvlab.units import format_bytes

__all__ = ["Asked", "Exercise", "Found", "Prepared", "Unreadable", "code_cells", "exercises", "find", "prepare"]

# An exercise weighs about 20 KB; one with pictures of a whole lesson stays far below this.
_MOST_BYTES = 20 * 2**20
# What browsers and Jupyter add to the name of a copy, and `kvlab lab --reset`.
_COPY = re.compile(r"(-Copy\d*| ?\(\d+\)|\.fresh-\d+)+$")
# Folders of ours: they say nothing about whose notebook it is.
_OURS = ("lessons", "exercises", "solutions")


class Unreadable(ValueError):  # noqa: N818  (a state of a file, and a status in the grades)
    """The file is no notebook that can be graded; the message says why."""


@dataclass(frozen=True)
class Cell:
    """A code cell: its source and the marks by which it may be recognised ("" where there are none)."""

    source: str
    id: str = ""
    task: str = ""
    role: str = ""


@dataclass(frozen=True)
class Asked:
    """A task as its exercise asks it: the ids of its cells, what is handed to the check, the names that this uses."""

    task: str
    answer_id: str
    check_id: str
    given: str
    names: frozenset[str]


@dataclass(frozen=True)
class Exercise:
    """A canonical exercise: file stem, code cells, tasks in order."""

    stem: str
    cells: tuple[Cell, ...]
    asked: tuple[Asked, ...]


@dataclass(frozen=True)
class Found:
    """A notebook that was handed in, whose it is, and its name as people see it (below the folder that was named)."""

    path: Path
    learner: str
    name: str


@dataclass(frozen=True)
class Prepared:
    """Sources to run in order. Per task: the index of its check, the indices of the cells that may hold its answer.

    `given`: the indices of cells that stand as the exercise has them.
    """

    sources: tuple[str, ...]
    checks: dict[str, int]
    answers: dict[str, tuple[int, ...]]
    given: frozenset[int]

    def learners(self) -> list[str]:
        """The sources that the learner wrote or changed; what the exercise brought along is blank."""
        ours = self.given | set(self.checks.values())
        return ["" if index in ours else source for index, source in enumerate(self.sources)]


def exercises(folder: Path) -> dict[str, Exercise]:
    """The canonical exercises of a folder, by stem."""
    return {path.stem: _exercise(path) for path in sorted(folder.glob("*.ipynb"))}


def _exercise(path: Path) -> Exercise:
    cells = tuple(_cell(cell) for cell in read(path).cells if cell.cell_type == "code")
    answer_ids = {cell.task: cell.id for cell in cells if cell.role == "answer"}
    asked = []
    for cell in cells:
        if cell.role == "check":
            call = _check_call(cell.source)
            if call is None or call[0] != cell.task or cell.task not in answer_ids:
                raise ValueError(
                    f"{path}: cell {cell.id!r} must be the line check.{cell.task}(…), and an answer cell exist"
                )
            names = {node.id for node in ast.walk(ast.parse(call[1])) if isinstance(node, ast.Name)}
            asked.append(Asked(cell.task, answer_ids[cell.task], cell.id, call[1], frozenset(names)))
    return Exercise(path.stem, cells, tuple(asked))


def find(paths: Iterable[Path], known: Iterable[str]) -> list[Found]:
    """All notebooks below the paths, each once, with whose they are. Links inside folders are listed, not followed.

    The learner is the file's folder; a file in a folder that was named itself, or one of several there that are not
    called as the exercise is, stands for itself. Raises ValueError when a path is missing or there is no notebook.
    """
    roots: dict[Path, Path] = {}
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give the notebooks or the folders that were handed in")
        if path.is_file():
            roots.setdefault(path.absolute(), path.absolute().parent)
            continue
        for where, folders, names in os.walk(path.absolute()):
            folders[:] = sorted(name for name in folders if name != ".ipynb_checkpoints")
            for name in sorted(names):
                if name.endswith(".ipynb"):
                    roots.setdefault(Path(where) / name, path.absolute())
    if not roots:
        raise ValueError(f"no notebook (*.ipynb) in {', '.join(map(str, paths))}")
    known = set(known)
    renamed = [file.parent for file in roots if _bare(file) not in known]
    return [
        Found(
            file,
            _whose(file, root, _bare(file) in known, renamed.count(file.parent)),
            file.relative_to(root).as_posix(),
        )
        for file, root in roots.items()
    ]


def _whose(file: Path, root: Path, named: bool, renamed: int) -> str:
    if not named and (file.parent == root or renamed > 1):
        return file.stem
    folder = file.parent
    while folder.name in _OURS and folder != root:
        folder = folder.parent
    return folder.name or file.stem


def _bare(file: Path) -> str:
    return _COPY.sub("", file.stem)


def code_cells(path: Path) -> list[Cell]:
    """The code cells of any notebook from format 3 on, however damaged its other parts. Raises Unreadable."""
    if path.is_symlink() or not path.is_file():
        raise Unreadable("is a link or not a file; hand in the notebook itself")
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise Unreadable(
                f"weighs {format_bytes(size)}, more than {format_bytes(_MOST_BYTES)}; clear its outputs first"
            )
        notebook = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable(f"is not JSON: {error}") from error
    try:
        major = notebook["nbformat"]
        if major < 4:
            notebook = nbformat.convert(nbformat.from_dict(notebook), 4)
        return [_cell(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    except Exception as error:  # nbformat raises whatever its old formats meet
        raise Unreadable(f"is not a notebook: {type(error).__name__}: {error}") from error


def _cell(cell: Any) -> Cell:
    source = cell["source"]
    marks = cell.get("metadata")
    marks = marks.get("kvlab") if isinstance(marks, dict) else None
    marks = marks if isinstance(marks, dict) else {}
    return Cell(
        source if isinstance(source, str) else "".join(source),
        *(str(text) for text in (cell.get("id") or "", marks.get("task") or "", marks.get("role") or "")),
    )


def match(stem: str, cells: Sequence[Cell], known: dict[str, Exercise]) -> Exercise | None:
    """The exercise that a notebook is of: the one whose tasks it carries, else the one that it is called after."""
    traces = {name: _traces(cells, exercise) for name, exercise in known.items()}
    most = max(traces.values(), default=0)
    best = [name for name, count in traces.items() if count == most > 0]
    called = [name for name in known if name == _COPY.sub("", stem)] or [name for name in known if name in stem]
    chosen = [name for name in called if name in best] or best or called
    return known[chosen[0]] if chosen else None


def _traces(cells: Sequence[Cell], exercise: Exercise) -> int:
    tasks = {asked.task for asked in exercise.asked}
    ids = {name for asked in exercise.asked for name in (asked.answer_id, asked.check_id) if name}
    names = set().union(*(asked.names for asked in exercise.asked))
    return sum(
        cell.task in tasks or cell.id in ids or bool(_defines(cell.source, names)) or _checked(cell.source) in tasks
        for cell in cells
    )


def prepare(cells: Sequence[Cell], exercise: Exercise, tasks: str, seed: str) -> Prepared:
    """The cells to run (`tasks`: the module that holds the tasks).

    A check stands after the last cell that defines its answer or that stood for the check.
    """
    places = _places(cells, exercise)
    roles = {index: _role(cells, index, place, exercise) for index, place in enumerate(places)}
    answers: dict[str, list[int]] = {}
    after: dict[int, list[Asked]] = {}
    for asked in exercise.asked:
        answers[asked.task] = [
            index
            for index, cell in enumerate(cells)
            if roles[index] == ("answer", asked.task)
            or (roles[index][0] != "check" and _defines(cell.source, asked.names))
        ]
        checks = [index for index, role in roles.items() if role == ("check", asked.task)]
        after.setdefault(max(answers[asked.task] + checks, default=len(cells) - 1), []).append(asked)
    sources: list[str] = []
    moved: dict[int, int] = {}
    checked: dict[str, int] = {}
    for index in range(len(cells)) if cells else (-1,):
        if cells and roles[index][0] != "check":
            moved[index] = len(sources)
            sources.append(cells[index].source)
        for asked in after.get(index, []):
            checked[asked.task] = len(sources)
            sources.append(_CHECK.format(module=tasks, task=asked.task, given=asked.given, seed=seed))
    canonical = {cell.source.strip() for cell in exercise.cells if not cell.role}
    return Prepared(
        tuple(sources),
        checked,
        {task: tuple(moved[index] for index in found) for task, found in answers.items()},
        frozenset(moved[index] for index in moved if cells[index].source.strip() in canonical),
    )


# The check as the grader asks it: modules that the notebook may have patched are loaded anew, nothing else is trusted
# to have its name. The learner's function (or value) is looked up last, so that its absence is a plain NameError.
_CHECK = """\
import importlib, sys
_ours = ("kvlab.lab.task.", "kvlab.lab.tasks.", "{module}.")
for _name in [name for name in sys.modules if (name + ".").startswith(_ours)]:
    del sys.modules[_name]
importlib.import_module("{module}").TASKS["{task}"].show_answers({given}, {seed!r})
"""


def _places(cells: Sequence[Cell], exercise: Exercise) -> list[Cell | None]:
    """The canonical cell that each cell stands for: by id, by metadata, or (no id known, as many cells) by place."""
    by_id = {cell.id: cell for cell in exercise.cells if cell.id}
    by_role = {(cell.role, cell.task): cell for cell in exercise.cells if cell.role}
    places = [by_id.get(cell.id) or by_role.get((cell.role, cell.task)) for cell in cells]
    if not any(places) and len(cells) == len(exercise.cells):
        return list(exercise.cells)
    return places


def _role(cells: Sequence[Cell], index: int, place: Cell | None, exercise: Exercise) -> tuple[str, str]:
    """("check" or "answer" or "", task) of a cell; a bare check line is a check wherever it stands."""
    cell, tasks = cells[index], {asked.task for asked in exercise.asked}
    if (task := _checked(cell.source)) in tasks:
        return "check", task
    if place is None or place.role not in ("answer", "check"):
        return "", ""
    if place.role == "check" and place.id != cell.id and any(other.id == place.id for other in cells):
        return "", ""  # a copy of the check that became something else
    return place.role, place.task


def _checked(source: str) -> str:
    """The task of a cell that is nothing but its check line, else ""."""
    call = _check_call(source)
    return call[0] if call else ""


def _check_call(source: str) -> tuple[str, str] | None:
    """(task, what is handed in) of a cell that is one call check.task(…), else None."""
    match scan.parse(source):
        case [ast.Expr(ast.Call(ast.Attribute(ast.Name("check"), task), [given], []))]:
            return task, ast.unparse(given)
    return None


def _defines(source: str, names: Iterable[str]) -> bool:
    """Whether a cell binds one of the names at its top level; a guess by eye when it is not Python."""
    statements = scan.parse(source)
    if not statements:
        return any(re.search(rf"^(def|class) {name}\b|^{name}\s*=", source, re.MULTILINE) for name in names)
    return bool(set(names) & set().union(*(scan.bound(statement) for statement in statements)))
