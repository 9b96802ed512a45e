"""The exercise that belongs to `toy_tasks`, as a solution; and ways to hand it in."""

import json
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from kvlab.lab import notebooks

VALUE = """\
### BEGIN SOLUTION
toy_weight = first * second
### END SOLUTION"""
BLOCKS = '''\
def toy_blocks(tokens, block):
    """Whole blocks for `tokens`."""
    ### BEGIN SOLUTION
    return -(-tokens // block)
    ### END SOLUTION'''
COUNTER = """\
class ToyCounter:
    ### BEGIN SOLUTION
    total = 0

    def add(self, step):
        self.total += step
        return self.total
    ### END SOLUTION"""


def _task(task, source, given):
    marks = {"task": task}
    return [
        new_markdown_cell(f"## {task}", id=f"{task}-text"),
        new_code_cell(source, id=f"{task}-answer", metadata={"kvlab": {**marks, "role": "answer"}}),
        new_code_cell(f"check.{task}({given})", id=f"{task}-check", metadata={"kvlab": {**marks, "role": "check"}}),
    ]


def solution():
    """The whole solution, as a notebook in format 4.5."""
    start = 'import toy_tasks\nfrom kvlab.lab import check\n\ncheck.learner("your name")'
    return new_notebook(
        cells=[
            new_code_cell(start, id="start"),
            new_code_cell('first, second = toy_tasks.given("toy_weight")', id="given"),
            *_task("toy_weight", VALUE, "toy_weight"),
            *_task("toy_blocks", BLOCKS, "toy_blocks"),
            *_task("toy_counter", COUNTER, "ToyCounter"),
        ]
    )


def cell(notebook, name):
    """The cell with that id."""
    return next(cell for cell in notebook.cells if cell.id == name)


def before(notebook, name, source):
    """Put a new code cell before the one with that id."""
    index = [cell.id for cell in notebook.cells].index(name)
    notebook.cells.insert(index, new_code_cell(source))


def hand_in(notebook, path: Path, minor=5):
    """Write it as its learner's editor would; formats before 4.5 have no cell ids."""
    plain = json.loads(json.dumps(notebook))
    plain["nbformat_minor"] = minor
    if minor < 5:
        for each in plain["cells"]:
            each.pop("id")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain), encoding="utf-8")


def exercises(folder: Path) -> Path:
    """A course's exercises folder that holds the one exercise."""
    notebooks.write(notebooks.exercise(solution()), folder / "07_toy.ipynb")
    return folder
