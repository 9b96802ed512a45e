"""The bench: what a record says about another one, what is kept of a run, and that no table is typed by hand."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.experiments import bench, peers
from kvlab.experiments.bench import GROUPS, start
from kvlab.experiments.bench.compare import compare, other_machine, read_record
from kvlab.experiments.bench.rows import Row, ratios
from kvlab.experiments.bench.table import cells, markdown, markdown_rows
from kvlab.experiments.turns import in_turn

ROOT = Path(__file__).resolve().parent.parent
FACTS = {
    "cpu": "a cpu", "cpu_capability": "AVX2", "cores": 2, "torch_threads": 2, "device": "cpu", "torch": "2.13",
    "python": "3.11", "system": "Linux", "kvlab": "0.1.0", "memory_bytes": 2**34,
}  # fmt: skip


def kvlab(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def record(*rows, **facts):
    plain = [row.plain() for row in rows]
    when = "2026-01-01T00:00:00+00:00"
    return {"schema": "kvlab.bench/1", "when": when, "facts": {**FACTS, **facts}, "complete": True, "rows": plain}


def ratio_row(name, low, high, **more):
    middle = (low + high) / 2
    return Row(
        name, 1.0, "ms", of_peer={"transformers": middle}, interval=(low, high), goal="≥ 1 × transformers",
        met=middle >= 1, group="prefill", **more,
    )  # fmt: skip


def time_row(low, high, goal="≤ 20 µs", unit="µs"):
    return Row("decide", (low + high) / 2, unit, interval=(low, high), goal=goal, group="start")


def saved(folder, name, content):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def verdicts(old, new):
    return [change.verdict for change in compare(old, new).changes]


# What got slower -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (ratio_row("p", 1.2, 1.4), ratio_row("p", 1.0, 1.1), "slower"),
        (ratio_row("p", 1.0, 1.1), ratio_row("p", 1.2, 1.4), "faster"),
        (ratio_row("p", 1.0, 1.3), ratio_row("p", 1.2, 1.4), "same"),
        (time_row(10, 11), time_row(12, 13), "slower"),  # less is better, says the goal
        (time_row(12, 13), time_row(10, 11), "faster"),
        (time_row(10, 11, "≥ 5 GB/s", "GB/s"), time_row(12, 13, "≥ 5 GB/s", "GB/s"), "faster"),
        (time_row(10, 11, "", "GB/s"), time_row(12, 13, "", "GB/s"), "faster"),  # and without a goal the unit
        (time_row(10, 11, "", "ms"), time_row(12, 13, "", "ms"), "slower"),
        (time_row(0.9, 1.0, "within 15 %", "×"), time_row(1.2, 1.3, "within 15 %", "×"), "unjudged"),
        (Row("d", 1.0, "s", goal="≤ 2 s"), Row("d", 9.0, "s", goal="≤ 2 s"), "unjudged"),  # no interval, no verdict
    ],
)
def test_a_row_is_slower_only_beyond_both_spreads(old, new, verdict):
    assert verdicts(record(old), record(new)) == [verdict]


def test_on_another_machine_only_ratios_are_judged_and_it_says_so():
    old = record(ratio_row("p", 1.2, 1.4), time_row(10, 11))
    new = record(ratio_row("p", 1.0, 1.1), time_row(20, 21), cores=8)
    assert other_machine(old, new) == ["cores 2, now 8"]
    assert verdicts(old, new) == ["slower", "unjudged"]
    assert "another machine (cores 2, now 8)" in compare(old, new).notes[0]
    newer = record(ratio_row("p", 1.2, 1.4), torch="2.14")
    assert compare(old, newer).notes == ["other versions: torch 2.13, now 2.14"]


def test_rows_that_are_missing_or_new_are_named_but_groups_that_were_not_run_are_not_missed():
    old = record(ratio_row("p", 1.2, 1.4), ratio_row("gone", 1.2, 1.4), time_row(10, 11))
    found = compare(old, record(ratio_row("p", 1.2, 1.4), ratio_row("fresh", 1.2, 1.4)))
    assert (found.missing, found.added) == (["gone"], ["fresh"])


def test_the_shell_exits_with_1_when_something_got_slower_and_names_it(tmp_path):
    old = saved(tmp_path, "old.json", record(ratio_row("prefill, 16 tokens", 1.2, 1.4)))
    new = saved(tmp_path, "new.json", record(ratio_row("prefill, 16 tokens", 0.8, 0.9)))
    result = kvlab("--from", new, "--compare", old)
    assert result.exit_code == 1
    assert "slower: prefill, 16 tokens: 1.3 → 0.85 × transformers, the goal was met and is now missed" in result.output
    assert kvlab("--from", old, "--compare", new).exit_code == 0
    assert kvlab("--from", old, "--compare", old).exit_code == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "schema None"),
        ('{"schema": "kvlab.crossover/1"}', "schema 'kvlab.crossover/1'"),
        ('{"schema": "kvlab.bench/1", "rows": 3, "facts": {}}', "no list of rows"),
        ('{"schema": "kvlab.bench/1", "rows": [{"name": "a"}], "facts": {}}', "row 0 lacks ours"),
    ],
)
def test_a_file_that_is_no_bench_record_is_one_line(tmp_path, content, said):
    result = kvlab("--from", saved(tmp_path, "bad.json", content))
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


# What is kept of a run -----------------------------------------------------------------------------------------------


def rows_then(*after):
    """A group that measures two rows, and then what is given: an error, or nothing."""

    def measured(device, dtype, progress):
        yield time_row(10, 11)
        yield ratio_row("second", 1.2, 1.4)
        for error in after:
            raise error

    return measured


def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "bench_start", rows_then(KeyboardInterrupt()))
    out = tmp_path / "out.json"
    result = kvlab("start", "--dtype", "fp32", "--out", out)
    assert result.exit_code == 130
    assert f"2 rows are in {out}" in " ".join(result.output.split())
    kept = read_record(out)
    assert [row["name"] for row in kept["rows"]] == ["decide", "second"]
    assert [row["group"] for row in kept["rows"]] == ["start", "start"]
    assert kept["complete"] is False
    assert kept["took_s"] == {}


def test_a_run_that_fails_keeps_its_rows_too(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "bench_start", rows_then(ValueError("no more room")))
    result = kvlab("start", "--dtype", "fp32", "--out", tmp_path / "out.json")
    assert result.exit_code == 2
    assert len(read_record(tmp_path / "out.json")["rows"]) == 2


def test_add_keeps_other_groups_and_refuses_another_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "bench_start", rows_then())
    out = tmp_path / "out.json"
    assert kvlab("start", "--dtype", "fp32", "--out", out).exit_code == 0
    other = read_record(out)
    other["rows"].append(ratio_row("of prefill", 1.2, 1.4).plain())
    other["commands"] = ["kvlab bench prefill"]
    saved(tmp_path, "out.json", other)
    assert kvlab("start", "--dtype", "fp32", "--out", out, "--add").exit_code == 0
    merged = read_record(out)
    assert [row["name"] for row in merged["rows"]] == ["of prefill", "decide", "second"]
    assert merged["commands"] == ["kvlab bench prefill", "kvlab bench start --dtype=fp32"]
    for row in merged["rows"]:
        row["name"] += " in fp32"
    saved(tmp_path, "out.json", merged)
    assert kvlab("start", "--dtype", "bf16", "--out", out, "--add").exit_code == 0
    both = read_record(out)
    assert [(row["name"], row["dtype"]) for row in both["rows"][1:]] == [
        ("decide in fp32", "fp32"), ("second in fp32", "fp32"), ("decide", "bf16"), ("second", "bf16")
    ]  # fmt: skip
    assert list(both["took_s"]) == ["start fp32", "start bf16"]
    assert kvlab("start", "--dtype", "fp32", "--out", out, "--add").exit_code == 0
    # What has nothing to do with a dtype keeps its name, and is there once.
    assert [row["name"] for row in read_record(out)["rows"]] == ["of prefill in fp32", "decide", "second"]
    other["facts"]["cpu"] = "another"
    saved(tmp_path, "out.json", other)
    assert "another machine" in kvlab("start", "--dtype", "fp32", "--out", out, "--add").output


def test_json_is_the_list_of_rows_and_nothing_else(monkeypatch):
    monkeypatch.setattr(start, "bench_start", rows_then())
    result = kvlab("start", "--dtype", "fp32", "--json")
    assert [row["name"] for row in json.loads(result.stdout)] == ["decide", "second"]


def test_help_says_of_every_group_what_it_measures():
    text = kvlab("--help").output
    for name, group in GROUPS.items():
        assert re.search(rf"^ +{name} +[\d.]+ min  {re.escape(group.measures)}$", text, re.MULTILINE)


def test_every_group_has_its_function_and_needs_only_the_core_packages():
    """In a process that has none of the optional packages; the peers that are then missing are named with a remedy."""
    code = """
import sys
from importlib import import_module
for name in ("transformers", "matplotlib", "jupyterlab", "ipywidgets", "nbval", "nbformat", "hypothesis"):
    sys.modules[name] = None
from kvlab.experiments.bench import GROUPS
assert "torch" not in sys.modules, "the list of groups, which --help prints, imports torch"
for name, group in GROUPS.items():
    assert callable(getattr(import_module(f"kvlab.experiments.bench.{group.module}"), f"bench_{name}")), name
from kvlab.experiments.peers import missing_peers
left_out = missing_peers({peer for group in GROUPS.values() for peer in group.peers})
assert set(left_out) == {"transformers", "vllm"} and "pip install" in left_out["vllm"], left_out
"""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr


def test_a_missing_peer_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.delenv("KVLAB_VLLM_PYTHON", raising=False)
    result = kvlab("vllm", "--dtype", "fp32")
    assert result.exit_code == 0
    assert "left out: vllm" in result.output
    assert "pip install vllm" in result.output


def test_a_vllm_python_that_is_not_there_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(ValueError, match="is no file"):
        peers.missing_peers({"vllm"})


def test_an_unknown_group_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'teleport'.*known groups: start, "):
        list(bench.run(["start", "teleport"], "cpu", "fp32"))


# Words, tables, pictures ---------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_null_in_json():
    row = Row("r", float("nan"), "×", peers={"p": float("inf")}, interval=(0.0, float("inf"))).plain()
    assert (row["ours"], row["peers"], row["interval"]) == (None, {"p": None}, [0.0, None])


def test_the_floor_is_the_first_ratio():
    row = Row("r", 1.0, "ms", of_floor=0.9, of_peer={"vllm": 1.1}, interval=(0.8, 1.0), goal="reported").plain()
    assert list(ratios(row)) == ["floor", "vllm"]
    assert cells(row) == ("r", "1 ms", "0.90 / 1.10 [0.80, 1.00]", "reported", "-")
    assert cells(Row("r", 2281.4, "ms").plain())[1] == "2,281 ms"
    assert cells(Row("r", 1001.9, "ms").plain())[1] == "1,002 ms"
    assert cells(Row("r", 999.6, "ms").plain())[1] == "1,000 ms"


def test_the_tables_of_the_docs_are_what_the_record_says():
    """README may show a part of the rows; docs/bench.md shows all. Made by kvlab bench --from docs/bench.json."""
    made = read_record(ROOT / "docs" / "bench.json")
    lines = set(markdown_rows(made["rows"]))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| what | ours |") :].split("\n\n")[0].splitlines()
    assert len(table) > 10
    assert [row for row in table if row not in lines] == []
    assert (ROOT / "docs" / "bench.md").read_text(encoding="utf-8") == markdown(made)


def test_the_chart_has_a_dot_for_every_ratio_and_a_line_for_every_interval(tmp_path):
    pytest.importorskip("matplotlib")
    from kvlab.lab.draw import bench_figure

    both = Row("both", 1.0, "ms", of_floor=0.9, of_peer={"vllm": 1.1}, interval=(0.8, 1.0), goal="", group="prefill")
    plain = time_row(10, 11)  # has no ratio: not in the picture
    figure = bench_figure(record(ratio_row("p", 1.25, 1.75), both, plain))
    drawn = [tuple(float(x) for x in line.get_xdata()) for line in figure.axes[0].get_lines()]
    for expected in [(1.5,), (0.9,), (1.1,), (1.25, 1.75), (0.8, 1.0), (1.0, 1.0)]:  # the last is the goal of p
        assert expected in drawn
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["p", "both"]
    source = saved(tmp_path, "record.json", record(ratio_row("p", 1.2, 1.4)))
    assert kvlab("--from", source, "--plot", tmp_path / "chart.svg").exit_code == 0
    assert (tmp_path / "chart.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_rows_that_were_added_later_stand_with_their_group():
    pytest.importorskip("matplotlib")
    from kvlab.lab.draw import bench_figure

    rows = [
        replace(ratio_row(name, 1.2, 1.4), group=name.split()[0])
        for name in ("vllm x", "decode fp32", "host x", "decode bf16")
    ]
    shown = bench_figure(record(*rows)).axes[0]
    assert [label.get_text() for label in shown.get_yticklabels()] == ["host x", "decode fp32", "decode bf16", "vllm x"]
    assert [text.get_text().strip() for text in shown.texts] == ["host", "decode", "vllm"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plot", "chart.gif"), "expected .png or .svg"),
        (("--add",), "give --out"),
        (("--from", "a.json", "--out", "b.json"), "give one of them"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_measuring(arguments, said):
    result = kvlab("start", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("count", range(1, 9))
def test_arms_in_turn_stand_at_every_place_and_behind_every_other_equally_often(count):
    times = 1 + count % 2
    orders = [in_turn(range(count), number) for number in range(times * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in zip(*orders, strict=True):
        assert sorted(place) == sorted([*range(count)] * times)
    followers = Counter(pair for order in orders for pair in pairwise(order))
    assert followers == dict.fromkeys(permutations(range(count), 2), times)
