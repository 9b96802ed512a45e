"""A server on the shell: measured like any tier, its place in a plan, bad input in one line, no secret in a record."""

import json
import os

import pytest
from real_server import RealServer, free_port
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.experiments.bench.valkey import bench_valkey
from kvlab.machine import Machine
from kvlab.policy import Calibrated

FEW = ["--model", "tiny", "--lengths", "16,64", "--repeats", "1", "--budget", "1s"]


def kvlab(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_crossover_against_a_server_leaves_a_machine_that_plans_and_decides(tmp_path):
    server = RealServer(tmp_path, "--requirepass", "s3cret", password="s3cret")
    try:
        url = server.url.replace("//", "//:s3cret@")
        shown = kvlab("crossover", "--tier", url, *FEW, "--out", tmp_path / "out")
        assert shown.exit_code == 0, shown.output
        assert not server.blocks(), "what was measured with is gone"
    finally:
        server.stop()
    record = json.loads((tmp_path / "out" / "crossover.json").read_text(encoding="utf-8"))
    (tier,) = record["tiers"]
    assert (tier["name"], tier["emulated"], tier["cold"]) == ("valkey", False, "memory")
    assert record["bit_exact"]
    assert "s3cret" not in shown.output + json.dumps(record)
    machine = tmp_path / "out" / "machine.json"
    Calibrated(Machine.load(machine)).check(["valkey"])
    planned = kvlab("plan", "--model", "smollm2-135m", "--machine", machine, "--prefix", "64", "--json")
    assert planned.exit_code == 0
    assert "valkey" in [tier["tier"] for tier in json.loads(planned.output)["tiers"]]


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        (["valkey://127.0.0.1:1", "redis://127.0.0.1:2"], "more than one server"),
        (["http://127.0.0.1"], "begins with none of valkey://"),
        ([f"valkey://127.0.0.1:{free_port()}"], "kvlab: cannot open the valkey tier at 127.0.0.1:"),
    ],
)
def test_a_server_that_is_none_is_one_clear_line(tiers, why, tmp_path):
    options = [word for tier in tiers for word in ("--tier", tier)]
    shown = kvlab("crossover", *options, *FEW, "--out", tmp_path)
    assert shown.exit_code == 2
    assert why in shown.output.replace("\n", " ")
    assert not (tmp_path / "crossover.json").exists()


def test_without_a_server_the_bench_says_so(monkeypatch):
    monkeypatch.setitem(os.environ, "PATH", "")
    (row,) = bench_valkey("cpu", "fp32", lambda _: None)
    assert row.name == "valkey: no server is installed"
    assert row.met is None
