"""`kvlab simulate` in the shell: 80 columns, JSON with fixed keys, a chart, one line for what cannot be simulated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.cli import main
from kvlab.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
H100 = ("--model", "llama-3.1-8b", "--machine", "h100-sxm-pcie5", "--pool", "30GiB")
KEYS = {
    "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "hit_tokens", "computed_tokens", "reload_bytes",
    "offload_bytes", "regret_s", "wall_s",
}  # fmt: skip


@pytest.fixture
def kvlab_simulate(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", "simulate", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return run


def test_all_policies_fit_eighty_columns_without_torch(tmp_path):
    code = "from kvlab.cli import main\ntry: main()\nfinally: import sys; print('torch' in sys.modules)"
    arguments = [*H100, "--host", "2GiB", "--disk", "1TiB", "--requests", "150", "--rate", "0.3", "--truth", "20%"]
    result = subprocess.run(
        [sys.executable, "-c", code, "simulate", "mooncake-1k", *arguments],
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *lines, torch_loaded = result.stdout.splitlines()
    assert torch_loaded == "False"
    assert max(map(len, lines)) <= 80
    text = " ".join(result.stdout.split())
    for words in (
        "mooncake-1k: 150 requests; llama-3.1-8b on h100-sxm-pcie5",
        "Utilisation ρ",
        "reload from disk",
        "oracle: mean",
        "the best fixed policy",
    ):
        assert words in text
    assert "…" not in text, "a cell was cut"


def test_json_has_the_promised_keys(kvlab_simulate):
    code, text, errors = kvlab_simulate(
        "mooncake-1k", *H100, "--host", "20GiB", "--requests", "60", "--rate", "0.2", "--json"
    )
    assert (code, errors) == (0, "")
    data = json.loads(text)
    assert data["requests"] == 60
    assert {"reload", "recompute", "threshold", "calibrated", "oracle"} <= data["policies"].keys()
    for report in data["policies"].values():
        assert report.keys() >= KEYS
        assert report["hit_tokens"].keys() == {"pool", "host"}
        assert 0 < report["ttft_p50_s"] <= report["ttft_p90_s"] <= report["ttft_p99_s"]
        assert report["wall_s"] > 0
        assert isinstance(report["unstable"], bool)


def test_words_that_a_table_needs_are_said_below_it(kvlab_simulate):
    _, text, _ = kvlab_simulate("mooncake-1k", *H100, "--requests", "20", "--rate", "0.2")
    text = " ".join(text.split())
    assert "regret: seconds that choices cost beyond the oracle's, summed over all 20 requests" in text
    assert "threshold: reload from 256 tokens up" in text
    _, text, _ = kvlab_simulate("mooncake-1k", *H100, "--requests", "20", "--policy", "reload,threshold:1024")
    assert "tokens up" not in text, "its name says it"


def test_a_record_says_what_was_simulated(kvlab_simulate):
    arguments = ("--host", "2GiB", "--requests", "20", "--rate", "0.5", "--policy", "reload", "--seed", "3")
    _, text, _ = kvlab_simulate("mooncake-1k", *H100, *arguments, "--truth", "10%", "--json")
    data = json.loads(text)
    expected = {
        "pool_bytes": 30 * 2**30, "host_bytes": 2 * 2**30, "disk_bytes": 0, "kv_dtype": "bf16", "block_size": 512,
        "token_budget": 8192, "max_running": 256, "router": "prefix", "shared_disk": False, "rate": 0.5, "truth": 0.1,
        "seed": 3, "memory_gb_per_s": 3350,
    }  # fmt: skip
    assert data["parameters"] == pytest.approx(expected)


def test_a_cache_is_taken_to_hold_what_the_machine_was_measured_in(kvlab_simulate, tmp_path):
    machine = Machine.load("h100-sxm-pcie5").to_dict()
    machine["prefill"]["dtype"] = "fp32"
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine), encoding="utf-8")
    options = (
        "--model",
        "llama-3.1-8b",
        "--machine",
        path,
        "--pool",
        "30GiB",
        "--policy",
        "reload",
        "--requests",
        "20",
    )
    for given, said in (((), " fp32, blocks of"), (("--kv-dtype", "bfloat16"), " bf16, blocks of")):
        code, text, _ = kvlab_simulate("mooncake-1k", *options, *given)
        assert code == 0
        assert said in " ".join(text.split())


def test_what_is_unstable_is_marked_and_not_compared(kvlab_simulate, tmp_path):
    path = tmp_path / "policies.png"
    arguments = ("mooncake-1k", *H100, "--requests", "60", "--rate", "50", "--plot", path)
    code, text, _ = kvlab_simulate(*arguments)
    assert code == 0
    text = " ".join(text.split())
    assert "Not compared, since a queue grows without end: reload, recompute, threshold, idle-blind" in text
    assert "best fixed" not in text
    assert path.read_bytes().startswith(b"\x89PNG")
    code, text, _ = kvlab_simulate(*arguments, "--json", "--policy", "reload,threshold:1024")
    assert {name: report["unstable"] for name, report in json.loads(text)["policies"].items()} == {
        "reload": True,
        "threshold:1024": True,
    }


def test_agents_come_from_a_csv(kvlab_simulate, tmp_path):
    path = tmp_path / "agents.csv"
    rows = [
        f"{agent},{gap},{tokens},30,," for agent in range(8) for gap, tokens in ((agent, 9000), (20, 400), (20, 400))
    ]
    path.write_text(
        "session,gap_s,input_tokens,output_tokens,prefix,prefix_tokens\n" + "\n".join(rows), encoding="utf-8"
    )
    options = ("--model", "llama-3.1-8b", "--machine", "h100-sxm-pcie5", "--pool", "3GiB", "--host", "100GiB")
    code, text, _ = kvlab_simulate(path, *options, "--json", "--policy", "reload")
    report = json.loads(text)["policies"]["reload"]
    assert code == 0
    assert report["requests"] == 24
    # Each comes back twice to 9,000 tokens or more; the pool holds two of the eight.
    assert 16 * 8500 > report["hit_tokens"]["host"] > 8 * 8500


BAD = {
    "no such trace": (["nothing"], "neither a .jsonl or .csv file nor mooncake-1k"),
    "no such file": (["nothing.jsonl"], "nothing.jsonl"),
    "no such policy": (["mooncake-1k", "--policy", "magic"], "unknown policy 'magic'"),
    "a threshold in words": (["mooncake-1k", "--policy", "threshold:few"], "unknown policy 'threshold:few'"),
    "no such router": (["mooncake-1k", "--router", "dice"], "--router is 'dice'; expected prefix, load, kvlab"),
    "no replicas": (["mooncake-1k", "--replicas", "0"], "0 replicas"),
    "no rate": (["mooncake-1k", "--rate", "0"], "rate is 0"),
    "no truth": (["mooncake-1k", "--truth", "a lot"], "--truth is 'a lot'"),
    "too much truth": (["mooncake-1k", "--truth", "150%"], "--truth is '150%'"),
    "a size without unit": (["mooncake-1k", "--host", "12"], "needs a unit"),
    "blocks that traces do not name": (["mooncake-1k", "--block-size", "100"], "blocks of 100 tokens"),
    "a host too small": (["mooncake-1k", "--host", "1MiB"], "the host tier holds 0 blocks"),
    "a memory without unit": (["mooncake-1k", "--memory-bandwidth", "3350"], "needs a unit"),
    "half a request": (["mooncake-1k", "--requests", "0.5"], "--requests"),
    "nothing runs": (["mooncake-1k", "--max-running", "0"], "max_running is 0"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_what_a_user_gets_wrong_is_one_line(kvlab_simulate, arguments, words):
    code, text, errors = kvlab_simulate(arguments[0], *H100, *arguments[1:])
    assert code == 2
    assert text == ""
    assert errors.startswith("kvlab: ")
    assert words in errors
    assert errors.count("\n") == 1


def test_a_bad_line_stops_it_unless_such_lines_are_to_be_counted(kvlab_simulate, tmp_path):
    path = tmp_path / "t.jsonl"
    good = '{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}'
    path.write_text(f"{good}\n{good[:-4]}\n{good}\n", encoding="utf-8")
    code, _, errors = kvlab_simulate(path, *H100)
    assert code == 2
    assert "t.jsonl, line 2: not JSON" in errors
    code, text, _ = kvlab_simulate(path, *H100, "--skip-bad", "--json")
    assert code == 0
    assert (json.loads(text)["requests"], json.loads(text)["skipped"]) == (2, 1)
