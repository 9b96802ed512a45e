"""`kvlab grade`: right answers pass, nothing else does, and no notebook stops the batch.

Every kernel costs seconds, so one batch holds all notebooks; each test reads its rows.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import psutil
import pytest

pytest.importorskip("nbval")
sys.path.insert(0, str(Path(__file__).parent / "grading"))

import toy_course
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.lab import gradebook, notebooks, sandbox, scan, submission
from kvlab.lab.course import Course
from kvlab.lab.grade import Grader, grade

ROOT = Path(__file__).resolve().parent.parent
TASKS = ("toy_weight", "toy_blocks", "toy_counter")
SLEEPER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(987)'])"
WRONG = "def toy_blocks(tokens, block):\n    return tokens // block"

# What is done to the solution, and the statuses of the three tasks that follow.
CASES = {}


def case(*statuses, minor=5, says=""):
    def keep(change):
        CASES[change.__name__] = (change, statuses, minor, says)
        return change

    return keep


@case("passed", "passed", "passed")
def solution(notebook):
    toy_course.cell(notebook, "start").source += "\ncheck.learner('Ada')"


@case("failed", "failed", "failed", says="not written yet")
def untouched(notebook):
    notebook.cells = notebooks.exercise(notebook).cells


@case("passed", "failed", "passed", says="That drops the last block.")
def wrong(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG


@case("passed", "failed", "passed")
def checks_deleted(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG
    notebook.cells = [cell for cell in notebook.cells if not cell.id.endswith("check")]


@case("passed", "failed", "passed")
def checks_edited_and_line_printed(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG
    toy_course.cell(notebook, "toy_blocks-check").source = "print('passed: toy_blocks')"
    toy_course.cell(notebook, "toy_counter-check").source = "import os; os._exit(0)"


@case("passed", "failed", "passed")
def checks_reassigned(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG
    toy_course.before(notebook, "toy_weight-check", "class check:\n    toy_weight = toy_blocks = toy_counter = print")


@case("passed", "failed", "passed")
def checks_patched_inside_the_module(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG
    patch = """\
import kvlab.lab.task as task
task.Task.judge = task.Task.grade = lambda *a: None
task.Task.__call__ = lambda self, given: print("passed:", self.name)
task.Task.show_answers = lambda self, *a: print("passed:", self.name)
task.Task.run = lambda self, given, seed: [{"value": True}]
task.close = lambda *a: True"""
    toy_course.before(notebook, "toy_weight-check", patch)


@case("passed", "failed", "passed")
def answers_forged_elsewhere(notebook):
    forge = """\
import json
from IPython.display import display
answers = [{"value": 2}] * 6
display({"application/vnd.kvlab.answers+json": json.dumps({"task": "x", "seed": "7", "answers": answers})}, raw=True)
"""
    toy_course.before(notebook, "toy_blocks-check", forge + WRONG)
    notebook.cells.append(nbformat.v4.new_code_cell(forge))


@case("passed", "error", "passed", says="holds no answers")
def right_answers_taken_from_the_task(notebook):
    # The tasks of the kernel that is graded hold no answers; that these are kvlab's is not for the scan to see here.
    source = "def toy_blocks(tokens, block):\n    return toy_tasks.TASKS['toy_blocks'].answer(tokens, block)"
    toy_course.cell(notebook, "toy_blocks-answer").source = source


@case("failed", "failed", "failed", says="reads kvlab's own answers")
def right_answers_read_from_kvlab(notebook):
    toy_course.before(notebook, "toy_weight-check", "from kvlab.lab.tasks import TASKS")


@case("passed", "failed", "failed", says="calls kvlab's own function")
def kvlab_called(notebook):
    toy_course.before(notebook, "toy_weight-text", "import kvlab\nceil = kvlab.blocks.blocks_for")
    toy_course.cell(
        notebook, "toy_blocks-answer"
    ).source = "def toy_blocks(tokens, block):\n    return ceil(tokens, block)"
    counter = toy_course.cell(notebook, "toy_counter-answer")
    counter.source += "\n    def module(self):\n        return __import__('kv' + 'lab')"


@case("passed", "failed", "passed")
def objects_that_lie(notebook):
    lie = """\
class Liar(int):
    __eq__ = lambda self, other: True
    __repr__ = __str__ = lambda self: "3"
    __hash__ = int.__hash__
def toy_blocks(tokens, block):
    return Liar(tokens // block)"""
    toy_course.cell(notebook, "toy_blocks-answer").source = lie


@case("passed", "error", "error", says="the kernel was ended in code cell 7")
def kernel_exits(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = "import os\ndef toy_blocks(tokens, block): os._exit(0)"
    toy_course.before(notebook, "toy_blocks-text", "import atexit, time; atexit.register(time.sleep, 60)")


@case("passed", "timeout", "passed", says="longer than 15 s")
def endless_loop(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = "while True: pass"


@case("passed", "timeout", "error", says="had to be ended")
def endless_loop_that_ignores_interrupts(notebook):
    loop = """\
def toy_blocks(tokens, block):
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        pass"""
    toy_course.cell(notebook, "toy_blocks-answer").source = loop


# Unread output waits in the kernel's memory: time or memory runs out first, and with memory perhaps the kernel.
@case("passed", "timeout or error", "passed or error")
def endless_output(notebook):
    toy_course.cell(
        notebook, "toy_blocks-answer"
    ).source = "def toy_blocks(tokens, block):\n    while True: print('x' * 9999)"


@case("passed", "passed", "passed")
def much_output(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source += "\nprint('x' * 30_000_000)"
    toy_course.cell(notebook, "toy_counter-answer").source += "\nfor i in range(20_000): print('x' * 100)"


@case("passed", "error", "passed", says="MemoryError")
def huge_allocation(notebook):
    toy_course.cell(
        notebook, "toy_blocks-answer"
    ).source = "def toy_blocks(tokens, block):\n    return len(bytearray(9 * 2**30))"


@case("passed", "error", "error", says="held more than")
def many_allocations(notebook):
    # Each child stays below the limit of a process; together they do not.
    hog = "import subprocess, sys, time\n" + "for _ in range(4):\n    " + (
        "subprocess.Popen([sys.executable, '-c', 'x = b\"1\" * (5 * 2**27); import time; time.sleep(99)'])\n"
    ) + "time.sleep(99)"  # fmt: skip
    toy_course.before(notebook, "toy_blocks-check", hog)


@case("passed", "passed", "passed")
def processes_left_behind(notebook):
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    os.environ.clear()\n"
    )
    toy_course.before(notebook, "toy_blocks-check", daemon + "    time.sleep(987)\n    os._exit(0)")
    toy_course.before(notebook, "toy_blocks-check", SLEEPER)


@case("passed", "error", "error", says="started more than")
def fork_bomb(notebook):
    bomb = """\
import os, time
for _ in range(100):
    if os.fork() == 0:
        time.sleep(987)
        os._exit(0)
time.sleep(9)"""
    toy_course.before(notebook, "toy_blocks-check", bomb)


@case("passed", "error", "error")
def grader_killed(notebook):
    toy_course.before(notebook, "toy_blocks-check", SLEEPER + "\nimport os; os.kill(os.getppid(), 9)")


@case("passed", "failed", "passed")
def files_planted(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG
    plant = """\
from pathlib import Path
for folder in (Path(), Path("..")):
    folder.joinpath("conftest.py").write_text("raise SystemExit")
    folder.joinpath("pytest.ini").write_text("[pytest]\\naddopts = --collect-only")
    for name in ("json.py", "sitecustomize.py", "nbval.py"):
        folder.joinpath(name).write_text("raise RuntimeError('planted')")"""
    toy_course.before(notebook, "toy_weight-check", plant)


@case("passed", "passed", "passed")
def wishes_to_nbval(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source += "\n# NBVAL_SKIP"
    toy_course.cell(notebook, "toy_counter-answer").metadata["tags"] = ["nbval-skip", "raises-exception"]
    notebook.metadata["kernelspec"] = {"name": "julia-1.11", "display_name": "Julia", "language": "julia"}
    notebook.metadata["language_info"] = {"name": "julia"}


@case("passed", "missing", "error", says="no cell defines toy_blocks")
def answers_missing_or_not_python(notebook):
    notebook.cells = [cell for cell in notebook.cells if cell.id != "toy_blocks-answer"]
    toy_course.cell(notebook, "toy_counter-answer").source = "class ToyCounter:\n  def add(self step): return 3"


@case("passed", "passed", "passed", minor=4)
def format_4_4_without_ids(notebook):
    """Neither ids nor metadata: only names are left."""
    for cell in notebook.cells:
        cell.metadata = {}


@case("passed", "failed", "passed", minor=0)
def format_4_0(notebook):
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG
    toy_course.cell(notebook, "toy_blocks-check").source = "print('passed: toy_blocks')"


@case("passed", "passed", "passed")
def cells_twice(notebook):
    """A first try that is wrong stays in the notebook; the last one counts. A copied check became an answer's home."""
    wrong, copy = (nbformat.from_dict(toy_course.cell(notebook, "toy_blocks-answer")) for _ in range(2))
    wrong.source, wrong.id = WRONG, "first-try"
    notebook.cells.insert(3, wrong)
    check = nbformat.from_dict(toy_course.cell(notebook, "toy_blocks-check"))
    check.id = "copied-check"
    notebook.cells.insert(4, check)
    copy.id, copy.metadata = "last-try", nbformat.from_dict(check.metadata)
    notebook.cells.append(copy)
    toy_course.cell(notebook, "toy_blocks-answer").source = WRONG


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = toy_course.exercises(tmp_path_factory.mktemp("course"))
    return Course(lessons=folder, exercises=folder, tasks="toy_tasks")


@pytest.fixture(scope="module")
def graded(course, tmp_path_factory):
    """All cases of one class, two at a time: rows by learner."""
    folder = tmp_path_factory.mktemp("class")
    for name, (change, _, minor, _) in CASES.items():
        notebook = toy_course.solution()
        change(notebook)
        toy_course.hand_in(notebook, folder / name / "07_toy.ipynb", minor)
    (folder / "not_json").mkdir()
    (folder / "not_json" / "07_toy.ipynb").write_text("%PDF-1.7 \x1b[31m", encoding="utf-8")
    scratch = tmp_path_factory.mktemp("scratch")
    grader = Grader.of(course, "7", 15, memory_bytes=3 * 2**29)
    before = set(psutil.pids())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(scratch))
        rows = grade(grader, submission.find([folder], grader.exercises), jobs=2)
    started = [process for process in psutil.process_iter() if process.pid not in before]
    return {name: [row for row in rows if row.learner == name] for name in (*CASES, "not_json")}, scratch, started


@pytest.mark.parametrize("name", CASES)
def test_each_way_to_hand_in_gets_its_rows(graded, name):
    _, statuses, _, says = CASES[name]
    rows = graded[0][name]
    assert [row.task for row in rows] == list(TASKS)
    for row, status in zip(rows, statuses, strict=True):
        assert row.status in status.split(" or "), rows
    assert says in " ".join(row.message for row in rows)
    assert all(row.notebook == f"{name}/07_toy.ipynb" for row in rows)


def test_a_file_that_is_not_json_is_unreadable(graded):
    rows = graded[0]["not_json"]
    assert [row.status for row in rows] == ["unreadable"] * 3
    assert "not JSON" in rows[0].message


def test_nothing_is_left_behind(graded):
    _, scratch, started = graded
    assert not list(scratch.iterdir())
    # A forked process keeps the command line of its kernel, which names a file in the scratch folder.
    marks = ("time.sleep(987)", str(scratch))
    assert not [process for process in started if any(mark in _command(process) for mark in marks)]


def _command(process):
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def code(*sources):
    return [submission.Cell(source) for source in sources]


@pytest.mark.parametrize(
    ("answer", "elsewhere"),
    [
        ("import kvlab\ndef f(x): return x", ""),
        ("def f(x):\n    from kvlab.arithmetic import kv_bytes as k\n    return k(x)", ""),
        ("def f(x): return kv(x)", "import kvlab as lib\nkv = lib.kv_bytes"),
        ("def f(x): return half(x)", "from kvlab import kv_bytes\ndef half(x):\n    return kv_bytes(x)"),
        ("class F:\n    def f(self, x): return importlib.import_module(name)", "import importlib"),
        ("def f(x): return __import__('kv' + 'lab')", ""),
        ("def f(x): return sys.modules[name]", "import sys"),
        ("def f(x): return [c for c in object.__subclasses__()]", ""),
        ("f = check.task.answer", "from kvlab.lab import check"),
        ("def f(x):\n    return eval('kvlab.kv_bytes')(x)", ""),
        ("%run other.py", ""),
    ],
)
def test_the_scan_names_a_way_to_kvlab(answer, elsewhere):
    assert scan.uses_kvlab([elsewhere, answer], {1})


@pytest.mark.parametrize(
    ("answer", "elsewhere"),
    [
        ("def f(model, x):\n    return model + x", "import kvlab\nmodel = kvlab.load_model('tiny')"),
        ('def f(x):\n    """As kvlab.kv_bytes, by hand."""\n    return x', "from kvlab.lab import check"),
        ("import math\ndef f(x): return math.ceil(x)", "import kvlab\nprint(kvlab.kv_bytes)"),
        ("def f(x): return x +", "import kvlab"),
    ],
)
def test_the_scan_leaves_honest_answers_alone(answer, elsewhere):
    assert scan.uses_kvlab([elsewhere, answer], {1}) is None


def test_values_that_the_exercise_hands_out_may_be_used():
    cells = ["import kvlab", "record = kvlab.load()", "def f(): return record"]
    assert scan.uses_kvlab(cells, {2}, given={0, 1}) is None
    assert scan.uses_kvlab(cells, {2}, given={0})


@pytest.mark.parametrize(
    "source", ["from kvlab.lab.tasks import lesson_00", "x = check.toy.answer", "import kvlab.lab.tasks as t"]
)
def test_reading_kvlabs_answers_is_seen(source):
    assert scan.reaches_answers(["from kvlab.lab import check", source]) == 1
    assert scan.reaches_answers(["from kvlab.lab import check", "self.answer = 3"]) is None


def test_the_learner_is_the_folder_or_the_file_where_folders_do_not_tell(tmp_path):
    for name in (
        "ada/07_toy.ipynb", "ada/07_toy-Copy1.ipynb", "bob/exercises/07_toy.ipynb", "cem.ipynb", "dora.ipynb",
        "eve/my work.ipynb", "ada/.ipynb_checkpoints/07_toy-checkpoint.ipynb", "fay/notes.txt",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}", encoding="utf-8")
    (tmp_path / "gus").mkdir()
    (tmp_path / "gus" / "07_toy.ipynb").symlink_to(tmp_path / "ada" / "07_toy.ipynb")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = {each.name: each.learner for each in submission.find([tmp_path], ["07_toy"])}
    assert found == {
        "ada/07_toy.ipynb": "ada", "ada/07_toy-Copy1.ipynb": "ada", "bob/exercises/07_toy.ipynb": "bob",
        "cem.ipynb": "cem", "dora.ipynb": "dora", "eve/my work.ipynb": "eve", "gus/07_toy.ipynb": "gus",
    }  # fmt: skip
    alone = submission.find([tmp_path / "ada" / "07_toy.ipynb", tmp_path / "cem.ipynb"], ["07_toy"])
    assert [each.learner for each in alone] == ["ada", "cem"]
    with pytest.raises(submission.Unreadable, match="link"):
        submission.code_cells(tmp_path / "gus" / "07_toy.ipynb")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"%PDF-1.7", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe{\x00}\x00", "cannot be read"),
        (b"[]", "is not a notebook"),
        (b'{"nbformat": 4, "cells": 3}', "is not a notebook"),
        (b'{"nbformat": 4, "cells": [3]}', "is not a notebook"),
        (b'{"nbformat": 4, "cells": [{"cell_type": "code"}]}', "is not a notebook"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=["pdf", "empty", "utf-16", "list", "no cells", "odd cell", "no source", "deep"],
)
def test_what_is_no_notebook_says_so(tmp_path, content, says):
    file = tmp_path / "x.ipynb"
    file.write_bytes(content)
    with pytest.raises(submission.Unreadable, match=says):
        submission.code_cells(file)


def test_a_huge_file_is_not_even_opened(tmp_path):
    file = tmp_path / "x.ipynb"
    with file.open("wb") as sparse:
        sparse.truncate(200 * 2**20)
    with pytest.raises(submission.Unreadable, match="200 MiB"):
        submission.code_cells(file)


def test_a_notebook_of_format_3_is_read(tmp_path):
    old = nbformat.v3.new_notebook(worksheets=[nbformat.v3.new_worksheet(cells=[nbformat.v3.new_code_cell("x = 1")])])
    (tmp_path / "x.ipynb").write_text(json.dumps(old), encoding="utf-8")
    assert [cell.source for cell in submission.code_cells(tmp_path / "x.ipynb")] == ["x = 1"]


def test_a_renamed_notebook_is_known_by_its_tasks(course, tmp_path):
    known = submission.exercises(course.exercises)
    toy_course.hand_in(toy_course.solution(), tmp_path / "final FINAL.ipynb", minor=2)
    cells = submission.code_cells(tmp_path / "final FINAL.ipynb")
    assert submission.match("final FINAL", cells, known).stem == "07_toy"
    assert submission.match("07_toy (1)", [], known).stem == "07_toy"
    assert submission.match("shopping", code("x = 1"), known) is None


def test_without_any_mark_a_check_is_found_by_its_place(course):
    exercise = submission.exercises(course.exercises)["07_toy"]
    sources = [cell.source for cell in exercise.cells]
    sources[-1] = "import os; os._exit(0)"
    prepared = submission.prepare(code(*sources), exercise, "toy_tasks", "7")
    assert not any("_exit" in source for source in prepared.sources)
    assert len(prepared.sources) == len(sources)


def test_grades_are_written_so_that_nothing_chokes_on_them(tmp_path):
    nasty = gradebook.printable("\x1b[31mred\x1b[0m \x00\x08 \ud800 & <b> 'q' \u2028")
    assert "\x1b" not in nasty
    rows = [
        gradebook.Row("=HYPERLINK(1)", "07.ipynb", "a", "passed"),
        gradebook.Row("Ünal", "07.ipynb", "b", "failed", f"{nasty}\nline, two"),
        gradebook.Row("Ünal", "07.ipynb", "", "unreadable", "not JSON"),
    ]
    gradebook.write(rows, tmp_path)
    assert json.loads((tmp_path / "grades.json").read_text(encoding="utf-8"))[1] == vars(rows[1])
    with (tmp_path / "grades.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["status"] for row in table] == ["passed", "failed", "unreadable"]
    assert table[0]["learner"] == "'=HYPERLINK(1)"
    assert table[1]["message"] == rows[1].message
    suites = ElementTree.parse(tmp_path / "junit.xml").getroot().findall("testsuite")
    assert [(s.get("name"), s.get("tests"), s.get("failures"), s.get("errors")) for s in suites] == [
        ("=HYPERLINK(1)", "1", "0", "0"),
        ("Ünal", "2", "1", "1"),
    ]


def test_a_child_gets_no_secrets_and_a_home_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    environment = sandbox.environment(tmp_path, EXTRA="1")
    assert "secret" not in environment.values()
    assert Path(environment["HOME"]).is_relative_to(tmp_path)
    assert environment["EXTRA"] == "1"


def kvlab(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", "from kvlab.cli import main; main()", "grade", *map(str, arguments)], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", **environment}, capture_output=True, text=True,
        encoding="utf-8", stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "kvlab.lab.course.course", lambda: Course(tmp_path, toy_course.exercises(tmp_path / "c"), "toy_tasks")
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for arguments, says in (
        ([tmp_path / "empty", "--out", tmp_path / "o"], "no notebook"),
        ([tmp_path / "gone", "--out", tmp_path / "o"], "does not exist"),
        ([tmp_path, "--out", tmp_path / "file"], "file"),
    ):
        result = CliRunner().invoke(app, ["grade", *map(str, arguments)])
        assert result.exit_code == 2, result
        assert says in result.stderr
        assert result.stderr.count("\n") == 1


def test_the_shell_grades_a_folder_and_exits_0_whatever_the_grades(tmp_path):
    """The real course's first exercise: its solution, a broken file, and a stranger."""
    for learner in ("ada", "bob"):
        (tmp_path / "class" / learner).mkdir(parents=True)
    source = (ROOT / "solutions" / "00_start.ipynb").read_bytes()
    (tmp_path / "class" / "ada" / "00_start.ipynb").write_bytes(source)
    (tmp_path / "class" / "bob" / "00_start.ipynb").write_bytes(source[:500])
    (tmp_path / "class" / "holiday.ipynb").write_text('{"nbformat": 4, "cells": []}', encoding="utf-8")
    result = kvlab(tmp_path / "class", "--out", tmp_path / "out", "--seed", "s1", "--timeout", "60")
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "out" / "grades.json").read_text(encoding="utf-8"))
    assert {row["status"] for row in rows if row["learner"] == "ada"} == {"passed"}
    assert {row["status"] for row in rows if row["learner"] == "bob"} == {"unreadable"}
    assert [row["status"] for row in rows if row["learner"] == "holiday"] == ["missing"]
    assert set(rows[0]) == {"learner", "notebook", "task", "status", "message"}
    assert (tmp_path / "out" / "grades.csv").is_file()
    assert (tmp_path / "out" / "junit.xml").is_file()
    assert "3 of 3" in result.stdout
    assert "--seed s1" in result.stdout
