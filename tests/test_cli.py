"""The shell: bad input is one clear line and exit code 2, a run leaves whole records, Ctrl-C leaves none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kvlab.cli import app
from kvlab.cli.report import bound_by_launches, sentence, uneven_pace
from kvlab.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
RUN = [sys.executable, "-c", "from kvlab.cli import main; main()"]


def kvlab(*arguments, cwd=ROOT, **environment):
    return subprocess.run(
        [*RUN, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "140", **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=240,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One small but complete run that the tests below look at."""
    folder = tmp_path_factory.mktemp("run")
    result = kvlab(
        "crossover", "--model", "tiny", "--lengths", "64,256,1000", "--tier", "all", "--link", "100Mb/s,latency=2ms",
        "--repeats", 7, "--out", folder / "out", cwd=folder,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result, folder / "out"


def test_a_run_prints_prediction_then_result_and_writes_record_machine_and_chart(quick):
    result, out = quick
    assert result.stdout.index("Predicted before measuring") < result.stdout.index("medians")
    assert "bit for bit" in result.stdout
    assert "emulated" in result.stdout
    assert {path.name for path in out.iterdir()} == {"crossover.json", "machine.json", "crossover.png"}
    assert (out / "crossover.png").read_bytes().startswith(b"\x89PNG")
    assert Machine.load(out / "machine.json") == Machine.load(out / "crossover.json")


def test_the_record_holds_every_field_and_every_sample(quick):
    record = json.loads((quick[1] / "crossover.json").read_text(encoding="utf-8"))
    assert record["schema"] == "kvlab.crossover/1"
    assert record["bit_exact"] is True
    assert record["provenance"]["facts"]["cpu"]
    assert record["model"]["name"] == "tiny"
    assert [tier["emulated"] for tier in record["tiers"]] == [False, False, False, True]
    for tier in record["tiers"]:
        lengths = tier["tokens"]
        assert lengths == [64, 256, 1000]
        for name in (
            "kv_bytes",
            "reload_s",
            "recompute_s",
            "predicted_reload_s",
            "predicted_recompute_s",
            "break_even_gb_per_s",
        ):
            assert len(tier[name]) == len(lengths), name
        # 1,000 tokens have 62 whole blocks of 16; each token is 2 layers × (K, V) × 2 heads × 16 × element size.
        element = {"fp32": 4, "bf16": 2}[record["model"]["dtype"]]
        assert tier["kv_bytes"][-1] == 62 * 16 * 2 * 2 * 2 * 16 * element
        for name in ("crossover_tokens", "crossings", "crossover_interval", "predicted_crossover_tokens", "cold"):
            assert name in tier
        assert [len(samples) for samples in tier["reload_samples_s"]] == [7, 7, 7]
        assert sorted(tier["reload_samples_s"][1])[3] == tier["reload_s"][1]
    assert [len(samples) for samples in record["recompute_samples_s"]] == [7, 7, 7]


def test_the_emulated_link_takes_at_least_the_time_it_claims(quick):
    record = json.loads((quick[1] / "crossover.json").read_text(encoding="utf-8"))
    tier = record["tiers"][-1]
    for kv_bytes, samples in zip(tier["kv_bytes"], tier["reload_samples_s"], strict=True):
        assert min(samples) >= 2e-3 + kv_bytes / 12.5e6


def test_a_calibration_can_be_reused_from_another_folder(quick, tmp_path):
    result = kvlab(
        "crossover", "--model", "tiny", "--lengths", "64", "--tier", "host", "--repeats", 1,
        "--machine", quick[1] / "machine.json", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["machine"] == json.loads((quick[1] / "machine.json").read_text(encoding="utf-8"))
    assert record["rounds"] == 1
    assert record["tiers"][0]["crossover_interval"] is None, "one round gives no interval"


def _text(folder: Path, content: bytes) -> Path:
    path = folder / "text.txt"
    path.write_bytes(content)
    return path


BAD = {
    "unknown model": (["--model", "gpt-9"], "smollm2-135m"),
    "unknown tier": (["--tier", "tape"], "host, disk, xz, all"),
    "text missing": (["--text", "no-such-file.txt"], "no text file at no-such-file.txt"),
    "text empty": (["--text", lambda t: _text(t, b" \n")], "is empty"),
    "text not utf-8": (["--text", lambda t: _text(t, b"\xff\xfe caf\xe9")], "not UTF-8"),
    "too few tokens": (["--text", lambda t: _text(t, b"a" * 100), "--lengths", "512"], "has 100 tokens"),
    "lengths not positive": (["--lengths", "0,64"], "expected a positive integer"),
    "lengths not increasing": (["--lengths", "64,64"], "must increase"),
    "lengths not numbers": (["--lengths", "64,many"], "not a count"),
    "beyond the positions": (["--lengths", "8190"], "beyond the 8192"),
    "block size 0": (["--block-size", "0"], "--block-size is 0"),
    "block size not an integer": (["--block-size", "1.5"], "--block-size"),
    "suffix 0": (["--suffix", "0"], "--suffix is 0"),
    "link without a unit": (["--link", "1"], "needs a unit"),
    "link with an unknown part": (["--link", "1Gb/s,jitter=3ms"], "jitter"),
    "budget without a unit": (["--budget", "60"], "needs a unit"),
    "repeats 0": (["--repeats", "0"], "--repeats is 0"),
    "machine missing": (["--machine", "no-machine.json"], "no machine file"),
    "machine of another schema": (["--machine", lambda t: _text(t, b'{"schema": "x/1"}')], "schema 'x/1'"),
    "mps": (["--device", "mps"], "mps"),
    "unknown device": (["--device", "abacus"], "abacus"),
    "unknown dtype": (["--dtype", "fp7"], "fp7"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(case, tmp_path, monkeypatch):
    arguments, message = BAD[case]
    arguments = [item(tmp_path) if callable(item) else item for item in arguments]
    if "--model" not in arguments:
        arguments = ["--model", "tiny", *arguments]
    monkeypatch.chdir(tmp_path)
    # In this process: torch is imported once for all cases.
    result = CliRunner().invoke(app, ["crossover", *map(str, arguments)])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("kvlab: ")]
    assert len(lines) == 1
    assert not (tmp_path / "kvlab-out").exists(), "a refused run writes nothing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_is_refused():
    result = CliRunner().invoke(app, ["crossover", "--model", "tiny", "--device", "cuda"])
    assert result.exit_code == 2
    assert "CUDA" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_disk_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = ["--model", "tiny", "--tier", "disk", "--directory", str(blocked)]
    result = CliRunner().invoke(app, ["crossover", *options])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert str(blocked) in result.stderr


def test_a_pool_that_does_not_fit_says_bytes_needed_and_free(tmp_path, monkeypatch):
    code = (
        "import psutil, types, kvlab.cli;"
        "psutil.virtual_memory = lambda: types.SimpleNamespace(available=1000, total=2000);"
        "kvlab.cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "crossover", "--model", "tiny", "--device", "cpu"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "1000 are free" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_leaves_no_record_and_exits_130(quick, tmp_path):
    options = ["--model", "tiny", "--repeats", "100000", "--budget", "10min", "--lengths", "64"]
    process = subprocess.Popen(
        [*RUN, "crossover", *options, "--machine", quick[1] / "machine.json"],  # what comes before the rounds is known
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8",
    )  # fmt: skip
    for line in process.stderr:
        if "round" in line:
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert list(tmp_path.rglob("*")) == []


def test_usage_errors_exit_2():
    result = kvlab("crossover", "--no-such-option")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_doctor_says_what_the_machine_has_and_what_it_means():
    result = kvlab("doctor")
    assert result.returncode == 0, result.stderr
    for word in ("torch", "cores", "cold reads", "SmolLM2", "matplotlib", "jupyterlab"):
        assert word in result.stdout
    facts = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert facts["facts"]["cores"] >= 1
    assert facts["findings"]


def test_model_list_names_every_preset():
    result = kvlab("model", "list")
    assert result.returncode == 0, result.stderr
    for name in ("tiny", "wide-kv", "smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "qwen3-8b"):
        assert name in result.stdout


def test_an_unknown_model_to_get_lists_the_known_ones():
    result = kvlab("model", "get", "gpt-9")
    assert result.returncode == 2
    assert "smollm2-135m" in result.stderr


def test_an_unknown_bench_group_lists_the_known_ones():
    result = CliRunner().invoke(app, ["bench", "teleport"])
    assert result.exit_code == 2
    assert "prefill" in result.stderr


def test_the_default_link_lies_above_the_speed_that_ties_at_the_longest_prefix():
    """So that long prefixes reload whatever the noise at one block says, and the flip lies within the sweep."""
    from kvlab.arch import ModelArch
    from kvlab.experiments.crossover import mid_range_link
    from kvlab.machine import Curve, Link, Prefill
    from kvlab.verdict import decide

    arch = ModelArch.preset("smollm2-135m")

    def machine(short_pass_s):
        # 16 and 32 tokens take the same time but for `short_pass_s`: the noise that makes one block's tie speed
        linear = Curve(((16.0, 1e11), (32.0, 3e9 / short_pass_s), (1024.0, 1.2e11)))
        host = Link(Curve(((1.0, 20.0),)))
        return Machine("m", Prefill(0.03, linear, Curve(((1.0, 8e10),)), arch.name), {"host": {"load": host}})

    for m in (machine(0.02), machine(0.2)):
        gb_per_s = mid_range_link(arch, m, [16, 64, 256, 1024], suffix=16, kv_dtype="fp32")
        tie = decide(arch, m, prefix=1024, suffix=16, kv_dtype="fp32").break_even_gb_per_s
        assert gb_per_s >= 1.09 * tie


def test_no_default_link_is_added_where_no_link_can_tie():
    """A prefill of microseconds costs less than a reload's software alone; that was an error, and flaked."""
    from kvlab.arch import ModelArch
    from kvlab.experiments.crossover import mid_range_link
    from kvlab.machine import Curve, Link, Prefill

    arch = ModelArch.preset("tiny")
    slow_software = Link(Curve(((1.0, 20.0),)), per_request_s=1.0)
    prefill = Prefill(1e-4, Curve(((1.0, 1e11),)), Curve(((1.0, 1e11),)), arch.name)
    machine = Machine("m", prefill, {"host": {"load": slow_software}})
    assert mid_range_link(arch, machine, [64, 128], suffix=16, kv_dtype="fp32") is None


def test_bench_refuses_a_folder_to_write_to_before_it_measures(tmp_path):
    result = CliRunner().invoke(app, ["bench", "start", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a folder" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("took_s", "predicted_s", "said"),
    [
        (2.0, 2.9, ""),
        (2.9, 2.0, ""),
        (
            0.577,
            2.72,
            "256 tokens took 577 ms and was predicted to take 2.72 s. The machine was slower while it was cal",
        ),
        (2.72, 0.577, "The machine was slower while it was measured"),
    ],
)
def test_a_machine_that_was_busy_for_half_of_the_time_is_said(took_s, predicted_s, said):
    # Short prefixes are all noise: only the longest one counts.
    tier = {"tokens": [16, 256], "recompute_s": [0.1, took_s], "predicted_recompute_s": [0.9, predicted_s]}
    warning = uneven_pace(tier)
    assert said in warning
    assert bool(said) == bool(warning)


@pytest.mark.parametrize(
    ("gpu", "tokens", "took_s", "said"),
    [
        ("NVIDIA X", 4096, 0.011, "NVIDIA X computes 4,096 tokens in 1.1 times what it takes for 16"),
        ("NVIDIA X", 4096, 0.9, ""),
        ("NVIDIA X", 64, 0.011, ""),  # too near to say
        (None, 4096, 0.011, ""),
    ],
)
def test_a_gpu_whose_time_is_launches_is_said(gpu, tokens, took_s, said):
    facts = {"gpu": gpu} if gpu else {}
    record = {
        "provenance": {"facts": facts},
        "tiers": [{"tokens": [16, 64, tokens], "recompute_s": [0.01, 0.01, took_s]}],
    }
    warning = bound_by_launches(record)
    assert said in warning
    assert bool(said) == bool(warning)


def test_reload_may_win_everywhere_though_no_link_speed_ties():
    tier = {"name": "host RAM", "emulated": False, "crossover_tokens": 0, "crossover_interval": None}
    said = sentence(tier | {"tokens": [16, 64], "break_even_gb_per_s": [None, None]})
    assert said == "host RAM: reload wins at every measured length, by less than the two ways scatter."
