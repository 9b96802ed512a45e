"""Every graded task: the answer passes, each plausible mistake fails and is told apart, the notebooks agree with it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("IPython")

from kvlab.lab import notebooks, submission
from kvlab.lab.task import CheckFailed, Mistake, Task, set_learner
from kvlab.lab.tasks import BY_LESSON, TASKS

ROOT = Path(__file__).resolve().parent.parent
SEEDS = [f"learner {number}" for number in range(24)]
LESSONS = sorted((ROOT / "lessons").glob("*.ipynb"))
SOLUTIONS = sorted((ROOT / "solutions").glob("*.ipynb"))
NAMES = [path.stem for path in SOLUTIONS]


def by_number(lesson):
    return next(path for path in SOLUTIONS if path.name.startswith(f"{lesson}_"))


def plain(value):
    """As it travels from a kernel to the grader."""
    return json.loads(json.dumps(value))


def answers(task, function, seed):
    """What a learner's kernel would hand out whose function this is."""
    call = (lambda *args: task.drive(function, *args)) if task.drive else function
    return [{"value": plain(call(*plain(args)))} for args in task.questions(seed)]


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_right_answer_passes_whatever_the_seed(task):
    for seed in SEEDS:
        right = [{"value": plain(task.answer(*args))} for args in task.questions(seed)]
        assert task.judge(seed, right) is None
        assert task.judge(seed, [*right[:-1], {"value": None if right[-1]["value"] is not None else 7}]) is not None
        assert task.judge(seed, right[:-1]) is not None
        assert task.questions(seed) == task.questions(seed)


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_every_mistake_fails_and_its_own_sentence_is_shown(task):
    assert len(task.mistakes) >= 3
    assert len({mistake.why for mistake in task.mistakes}) == len(task.mistakes)
    for mistake in task.mistakes:
        for seed in SEEDS:
            said = task.judge(seed, answers(task, mistake.answer, seed))
            assert said is not None, f"{task.name} accepts {mistake.why!r} for {seed!r}"
            assert mistake.why in said, f"{task.name} says {said!r} instead of {mistake.why!r} for {seed!r}"


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_numbers_differ_from_learner_to_learner(task):
    assert len({repr(task.questions(seed)) for seed in SEEDS}) > 1


def test_a_check_prints_one_fixed_line_or_says_what_was_expected(capsys, monkeypatch):
    monkeypatch.setenv("KVLAB_LEARNER", "")
    set_learner("Ada")
    square = Task(
        "square", lambda rng: [(rng.randrange(2, 9),)], lambda x: x * x, (Mistake("That doubles.", lambda x: 2 * x),)
    )
    square(lambda x: x**2)
    assert capsys.readouterr().out == "passed: square\n"
    for wrong, says in {
        (lambda x: 2 * x): "That doubles.",
        (lambda x: 1 // 0): "ZeroDivisionError",
        (lambda x: object()): "expected plain numbers and lists",
        (lambda x: float("nan")): "got nan",
        "x": "expected a function, got str",
    }.items():
        if says == "That doubles." and square.questions("Ada") == [(2,)]:
            continue
        with pytest.raises(CheckFailed, match=re.escape(says)):
            square(wrong)


def test_loading_the_tasks_does_not_load_torch():
    """A check runs in every learner's kernel and in every notebook that is graded: it must not cost seconds."""
    code = "import sys, kvlab.lab.check; assert 'torch' not in sys.modules; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("lesson", BY_LESSON)
def test_each_task_of_a_lesson_is_in_its_solution_with_hints_answer_and_check(lesson):
    cells = notebooks.read(by_number(lesson)).cells
    exercise = submission.exercises(ROOT / "solutions")[by_number(lesson).stem]
    assert [asked.task for asked in exercise.asked] == [task.name for task in BY_LESSON[lesson]]
    assert len(BY_LESSON[lesson]) >= 3
    where = {cell.id: index for index, cell in enumerate(cells)}
    for asked in exercise.asked:
        answer, check = where[asked.answer_id], where[asked.check_id]
        between = "\n".join(cell.source for cell in cells[answer:check])
        assert answer < check
        assert between.count("<details><summary>Hint") == 2
        assert "### BEGIN SOLUTION" in cells[answer].source
        assert cells[answer - 1].cell_type == "markdown"


def test_the_lessons_have_eighteen_tasks():
    first_half = [task for lesson, tasks in BY_LESSON.items() if lesson <= "05" for task in tasks]
    assert len(first_half) >= 18
    assert len({task.name for task in first_half}) == len(first_half)


@pytest.mark.parametrize("path", SOLUTIONS, ids=NAMES)
def test_a_solutions_own_answers_pass(path, monkeypatch):
    """Run cell by cell in this process; nbval runs the whole notebook in a kernel, in CI."""
    monkeypatch.chdir(ROOT / "solutions")
    monkeypatch.setenv("KVLAB_LEARNER", "0")
    names = {}
    for cell in notebooks.read(path).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, str(path), "exec"), names)


@pytest.mark.parametrize("path", SOLUTIONS, ids=NAMES)
def test_an_untouched_exercise_passes_nothing(path, monkeypatch):
    monkeypatch.setenv("KVLAB_LEARNER", "0")
    monkeypatch.chdir(ROOT / "exercises")
    names, failed = {}, []
    for cell in notebooks.read(ROOT / "exercises" / path.name).cells:
        if cell.cell_type == "code":
            marks = cell.metadata.get("kvlab", {})
            try:
                exec(compile(cell.source, str(path), "exec"), names)
            except (CheckFailed, NotImplementedError):
                failed.append(marks["task"])
            else:
                assert marks.get("role") != "check", f"{cell.source} passes untouched"
    assert set(failed) == {task.name for task in BY_LESSON[path.stem[:2]]}


def test_exercises_are_up_to_date():
    result = subprocess.run(
        [sys.executable, "-m", "kvlab.lab.notebooks", "exercises", "--check"], cwd=ROOT, capture_output=True, text=True,
        encoding="utf-8", env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert {path.name for path in (ROOT / "exercises").glob("*.ipynb")} == {path.name for path in SOLUTIONS}
    for path in (ROOT / "exercises").glob("*.ipynb"):
        text = path.read_text(encoding="utf-8")
        assert "SOLUTION" not in text
        assert all(not cell.get("outputs") for cell in notebooks.read(path).cells)


@pytest.mark.parametrize("path", LESSONS + SOLUTIONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_committed_notebook_was_run_top_to_bottom_and_is_clean(path):
    notebook = notebooks.read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < 600_000
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.kernelspec.name == "python3"
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    for cell in code:
        assert not re.search(r"^\s*[!%]", cell.source, re.MULTILINE), f"{cell.id} is not plain Python"
        for output in cell.outputs:
            assert output.output_type != "error", f"{cell.id} failed"
            assert output.get("name") != "stderr", f"{cell.id} warned"
            assert "application/vnd.jupyter.widget-view+json" not in output.get("data", {})


BITS, ONE_OFF, TEXT = "bits and bytes", "One too many", "expected a number"
JOINED = ("|", ",", ":", "-", ";", "_", "/", " ", "\n", "=")


def without_name(fields):
    return sorted((key, str(value)) for key, value in fields.items() if key != "adapter_name")


def one_late(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -2) + 1


def gaps_counted(src, dst):
    runs = []
    for a, b in sorted(zip(src, dst, strict=True)):
        if runs and a - runs[-1][0] == b - runs[-1][1]:
            runs[-1][2] = a - runs[-1][0] + 1
        else:
            runs.append([a, b, 1])
    return runs


@pytest.mark.parametrize(
    ("name", "answer", "says"),
    [
        ("break_even_gb_per_s", lambda size, s: size / s / 1e6, "MB/s"),
        ("break_even_gb_per_s", lambda size, s: size / s, "1,000,000,000 times too large: giga"),
        ("break_even_gb_per_s", lambda size, s: f"{size / s / 1e9} GB/s", TEXT),
        ("kv_bytes_per_token", lambda n, q, kv, dim, size: 16 * n * kv * dim * size, BITS),
        ("agents_resident", lambda hbm, weights, agent: max(0, (hbm * 2**30 - weights) / agent), "whole number"),
        ("prefill_flops", lambda shape, start, stop: 2 * shape["hidden"] * shape["vocab"], "empty range"),
        ("flops_per_kv_byte", lambda *a: TASKS["flops_per_kv_byte"].answer(*a) * a[0]["layers"], "layers ("),
        ("effective_gb_per_s", lambda size, n, peak, s: size / (s + size / (peak * 1e9)) / 2**30, "GiB (2^30)"),
        ("coalesce", gaps_counted, "merges across a gap"),
        ("first_mismatch", one_late, ONE_OFF),
        ("block_hashes", lambda print_, ids, block: ["00" * 32] * (len(ids) // block), "32 + 32 + 8 × block"),
        ("fingerprint", lambda fields: str(sorted(value for _, value in without_name(fields))), "adapter_digest"),
        ("fingerprint", lambda fields: "".join(f"{key}{value}" for key, value in without_name(fields)), "tenant"),
        *(("fingerprint", lambda f, j=j: j.join(v for _, v in without_name(f)), "tenant") for j in JOINED),
        *(("fingerprint", lambda f, j=j: j.join(f"{k}={v}" for k, v in without_name(f)), "tenant") for j in JOINED),
    ],
)  # fmt: skip
def test_more_that_learners_write_gets_a_sentence_of_its_own(name, answer, says):
    task = TASKS[name]
    for seed in SEEDS[:6]:
        given = answers(task, answer, seed)
        said = [task._wrong(args, one["value"]) for args, one in zip(task.questions(seed), given, strict=True)]
        assert any(says in (message or "") for message in said), f"{name} for {seed!r} says {said}"


def test_whole_blocks_are_not_what_exactly_the_tokens_leave():
    task = TASKS["prefix_mib"]
    for seed in SEEDS:
        *shape, tokens = task.questions(seed)[0]
        assert "whole blocks" in (task.judge(seed, [{"value": task.answer(*shape, -(-tokens // 16) * 16)}]) or "")


def test_a_wrong_value_is_shown_as_what_came():
    assert TASKS["prefix_mib"].judge("Ada", [{"value": 7.5}]) == "got 7.5"
    assert "expected a number, got a text" in TASKS["prefix_mib"].judge("Ada", [{"value": "7 MiB"}])
