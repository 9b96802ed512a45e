"""`kvlab grade --chart`: what a class measured, from the records that were handed in."""

import json

import pytest

pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.experiments.crossover import SCHEMA
from kvlab.lab import class_records
from kvlab.lab.class_records import Measured
from kvlab.lab.draw.break_even import class_figure


def record(speeds, model="smollm2-135m", tokens=(256, 1024)):
    tier = {"tokens": list(tokens), "break_even_gb_per_s": list(speeds)}
    return {"schema": SCHEMA, "model": {"name": model, "dtype": "fp32"}, "tiers": [tier, {}]}


@pytest.fixture
def handed_in(tmp_path):
    """A folder by learner, one who ran it twice, one file by name, and JSON of other kinds."""
    files = {
        "ada/crossover.json": record([0.020, 0.025]),
        "bob/first/crossover.json": record([0.5, 0.4], "wide-kv"),
        "bob/second/crossover.json": record([0.5, None], "wide-kv"),
        "eve.json": record([3.0, 5.0]),
        "ada/machine.json": {"schema": "kvlab.machine/1"},
        "grades.json": [],
    }
    for name, content in files.items():
        (tmp_path / "class" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "class" / name).write_text(json.dumps(content), encoding="utf-8")
    return tmp_path / "class"


def test_each_record_counts_at_its_longest_prefix_under_its_owners_name(handed_in):
    rows, broken = class_records.find([handed_in])
    assert rows == [
        Measured("ada", "smollm2-135m fp32", 1024, 0.025),
        Measured("bob/first", "wide-kv fp32", 1024, 0.4),
        Measured("bob/second", "wide-kv fp32", 256, 0.5),
        Measured("eve", "smollm2-135m fp32", 1024, 5.0),
    ]
    assert broken == []
    assert [row.who for row in class_records.find([handed_in / "ada"])[0]] == ["ada"]
    assert [row.who for row in class_records.find([handed_in / "ada" / "crossover.json"])[0]] == ["ada"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        (json.dumps(record([None, None])), "no link ties"),
        (json.dumps(record([0.1])), "not whole"),
        (json.dumps(record(["fast", 1])), "not whole"),
        (json.dumps({"schema": SCHEMA, "tiers": []}), "not whole"),
        (json.dumps({"schema": SCHEMA, "tiers": 3, "model": 3}), "not whole"),
    ],
)
def test_a_broken_record_is_a_line_and_stops_nobody(handed_in, content, says):
    (handed_in / "zoe").mkdir()
    (handed_in / "zoe" / "crossover.json").write_text(content, encoding="utf-8")
    rows, (line,) = class_records.find([handed_in])
    assert len(rows) == 4
    assert "zoe" in line
    assert says in line


def test_the_chart_has_a_dot_for_each_and_takes_any_name():
    rows = [Measured("$a_{b$ <x>", "tiny fp32", 64, 0.02), Measured("bob", "tiny fp32", 64, 2.0)]
    figure = class_figure(rows)
    (axis,) = figure.axes
    dots = axis.collections[0].get_offsets()
    assert [tuple(dot) for dot in dots] == [(0.02, 0), (2.0, 1)]
    assert axis.get_yticklabels()[0].get_text() == "$a_{b$ <x>: tiny fp32, 64 tokens"
    figure.canvas.draw()


def test_the_shell_draws_it_without_grading(handed_in, tmp_path):
    result = CliRunner().invoke(app, ["grade", str(handed_in), "--chart", str(tmp_path / "new" / "class.png")])
    assert result.exit_code == 0, result.output
    assert "4 records drawn in" in result.stdout
    assert (tmp_path / "new" / "class.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_line_and_exit_code_2(handed_in, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, says in (
        ([handed_in], "--out FOLDER for grades, --chart FILE.png"),
        ([tmp_path / "gone", "--chart", tmp_path / "x.png"], "does not exist"),
        ([tmp_path / "empty", "--chart", tmp_path / "x.png"], "everybody hands in a crossover.json"),
    ):
        result = CliRunner().invoke(app, ["grade", *map(str, arguments)])
        assert result.exit_code == 2, result
        assert says in result.stderr
        assert result.stderr.count("\n") == 1
