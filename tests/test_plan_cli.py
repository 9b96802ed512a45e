"""`kvlab plan` in the shell: 80 columns, JSON, a chart, and one clear line for whatever cannot be planned."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab.cli import main

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = Path(__file__).parent / "data" / "configs"
H100 = ("--model", "llama-3.1-8b", "--machine", "h100-sxm-pcie5")


@pytest.fixture
def kvlab_plan(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code, *capsys.readouterr()

    return run


def test_a_plan_and_its_settings_fit_eighty_columns_without_torch(tmp_path):
    code = "from kvlab.cli import main\ntry: main()\nfinally: import sys; print('torch' in sys.modules)"
    arguments = [*H100, "--load", "0.7", "--ttft-slo", "500ms", "--settings", "vllm", "--tp", "2"]
    result = subprocess.run(
        [sys.executable, "-c", code, "plan", *arguments],
        cwd=tmp_path, capture_output=True, text=True, encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    *lines, torch_loaded = result.stdout.splitlines()
    assert torch_loaded == "False"
    assert max(map(len, lines)) <= 80
    text = " ".join(result.stdout.split())
    for words in (
        "llama-3.1-8b on h100-sxm-pcie5 (published): TP 2, KV bf16",
        "64.0 KiB a token a rank",
        "99 % of requests meet at load 0.7",
        "Within 500 ms for 99 % of requests at load 0.7",
        "(digitised)",
        "20 to 25 ms more than the link explains",
        "--kv-offloading-size 250.0",
        "no such option",
    ):
        assert words in text


def test_where_an_answer_is_extrapolated_or_estimated_it_says_so(kvlab_plan):
    code, text, _ = kvlab_plan("--model", CONFIGS / "Qwen3-8B.json", "--machine", "gb300-c2c")
    text = " ".join(text.split())
    assert code == 0
    assert "Qwen3-8B on gb300-c2c (published)" in text
    assert "(estimate)" in text
    assert "extrapolated to Qwen3-8B" in text
    assert "128,000" not in text, "the default prefixes stop at the model's 40,960 positions"
    _, text, _ = kvlab_plan("--model", CONFIGS / "Llama-3.1-8B-Instruct.json", "--machine", "h100-sxm-pcie5")
    assert "extrapolated" not in text, "the same shape under its own name"


def test_json_is_the_whole_plan_with_sources(kvlab_plan):
    code, text, _ = kvlab_plan(*H100, "--prefix", "1Ki,8k", "--json", "--settings", "lmcache")
    data = json.loads(text)
    assert code == 0
    assert data["schema"] == "kvlab.plan/1"
    assert [size["prefix_tokens"] for size in data["sizes"]] == [1024, 8000]
    assert data["provenance"]["numbers"]["links.host.load.gb_per_s"]["basis"] == "digitised"
    assert data["settings"]["system"] == "lmcache"
    assert {"option", "value", "seen", "note"} == set(data["settings"]["options"][0])


def test_two_numbers_make_a_machine(kvlab_plan):
    code, text, _ = kvlab_plan(
        "--model", "llama-3.1-8b", "--peak", "989TFLOP/s", "--mfu", "0.5", "--link", "400Gb/s", "--link", "1GB/s",
        "--prefix", "8k", "--json",
    )  # fmt: skip
    data = json.loads(text)
    assert code == 0
    assert data["machine_kind"] == "estimate"
    assert {tier["tier"]: tier["gb_per_s"] for tier in data["tiers"]} == {"link 400Gb/s": 50, "link 1GB/s": 1}
    row = data["tiers"][0]["rows"][0]
    assert row["transfer_s"] == pytest.approx(8000 * 131072 / 50e9)
    assert "50% of the peak" in data["prefill_source"]


def test_a_link_may_be_added_to_a_machine(kvlab_plan):
    _, text, _ = kvlab_plan(*H100, "--link", "2GB/s", "--json")
    assert [tier["tier"] for tier in json.loads(text)["tiers"]][-1] == "link"


def test_links_of_nearly_one_rate_are_two_tiers(kvlab_plan):
    _, text, _ = kvlab_plan(*H100, "--link", "50GB/s", "--link", "50.01GB/s", "--prefix", "8k", "--json")
    assert [tier["gb_per_s"] for tier in json.loads(text)["tiers"]][-2:] == [50, 50.01]


def test_with_ranks_it_says_what_they_share_and_how_fast_they_are_together(kvlab_plan):
    code, text, _ = kvlab_plan(*H100, "--tp", "8", "--prefix", "32k")
    text = " ".join(text.split())
    assert code == 0
    assert "8 ranks compute like 6.8 (an efficiency of 0.85)" in text
    shared = "of one link that 8 ranks share on disk, net-100g, tcp"
    assert f"rate and ties at: for each rank on host, net-400g; {shared}" in text
    assert "KV heads do not divide" not in text
    _, text, _ = kvlab_plan(*H100, "--prefix", "32k")
    assert "ranks" not in text.partition("Where the numbers")[0].replace("per rank", "")


def test_heads_that_do_not_divide_over_the_ranks_are_pointed_out(kvlab_plan):
    code, text, _ = kvlab_plan(*H100, "--tp", "3", "--prefix", "8k")
    assert code == 0
    assert "8 KV heads do not divide over 3 ranks: servers refuse to start so" in " ".join(text.split())
    _, text, _ = kvlab_plan(*H100, "--tp", "16", "--prefix", "8k")
    assert "do not divide" not in text, "each head on two ranks is what servers do"


def test_what_a_store_is_charged_with_is_said(kvlab_plan):
    _, text, _ = kvlab_plan(*H100, "--prefix", "32k")
    text = " ".join(text.split())
    assert "Storing 32,000 tokens pays" in text
    assert "store takes chance of return pause tier" in text
    assert "charged with every second that it keeps the link" in text


def test_a_chart_is_written(kvlab_plan, tmp_path):
    pytest.importorskip("matplotlib")
    code, text, _ = kvlab_plan(*H100, "--plot", tmp_path / "p" / "plan.png", "--ttft-slo", "1s", "--load", "0.5")
    assert code == 0
    assert "plan.png" in "".join(text.split())
    assert (tmp_path / "p" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_the_chart_labels_every_way_and_has_no_markers():
    pytest.importorskip("matplotlib")
    from kvlab.arch import ModelArch
    from kvlab.lab.draw import RECOMPUTE, RELOAD, plan_figure
    from kvlab.machine import Machine
    from kvlab.plan import plan

    made = plan(ModelArch.preset("llama-3.1-8b"), Machine.load("h100-sxm-pcie5"), prefixes=[1000, 32_000])
    axis = plan_figure(made.to_dict()).axes[0]
    curves = [line for line in axis.lines if len(line.get_xdata()) > 2]
    assert [line.get_color() for line in curves] == [RECOMPUTE, *[RELOAD] * 5]
    assert {line.get_marker() for line in axis.lines} == {"None"}
    labels = {text.get_text().strip() for text in axis.texts}
    assert {"recompute", *(tier.tier for tier in made.tiers)} <= labels
    assert f"disk from {made.tier('disk').crossover_tokens:,}" in labels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "llama-3.1-8b"), "either --machine NAME|FILE, or --peak"),
        ((*H100, "--peak", "1TFLOP/s"), "either --machine NAME|FILE, or --peak"),
        (("--model", "llama-3.1-8b", "--peak", "1TFLOP/s"), "--peak needs at least one --link"),
        (("--model", "llama-3.1-8b", "--peak", "989TFLOPS", "--link", "1GB/s"), "needs a unit: one of GFLOP/s"),
        (("--model", "llama-3.1-8b", "--peak", "1TFLOP/s", "--mfu", "2", "--link", "1GB/s"), "--mfu is 2"),
        ((*H100, "--link", "50"), "write 50Gb/s (bits) or 50GB/s (bytes)"),
        (("--model", "llama-3.1-8b", "--machine", "abacus"), "published profiles: a100-sxm-pcie4"),
        (("--model", "llama-3.1-8b", "--machine", "no-such.json"), "no machine file at no-such.json"),
        (("--model", "gpt-9", "--machine", "h100-sxm-pcie5"), "unknown model 'gpt-9'; expected a config.json"),
        (("--model", "no/config.json", "--machine", "h100-sxm-pcie5"), "no model config at no/config.json"),
        ((*H100, "--prefix", "1k,many"), "--prefix: 'many' is not a count"),
        ((*H100, "--prefix", "0"), "--prefix is 0; expected a positive integer"),
        ((*H100, "--prefix", "1M"), "beyond the 131072 positions"),
        ((*H100, "--kv-dtype", "bf17"), "unknown KV dtype 'bf17'"),
        ((*H100, "--tp", "0"), "tp is 0; expected an integer of at least 1"),
        ((*H100, "--load", "1"), "load is 1"),
        ((*H100, "--percentile", "100"), "percentile is 100"),
        ((*H100, "--percentile", "0.99"), "percentile is 0.99; expected a share in %, from 1 to below 100"),
        ((*H100, "--ttft-slo", "fast"), "'fast' is not a time"),
        ((*H100, "--ttft-slo", "0.5"), "needs a unit: one of"),
        ((*H100, "--settings", "tgi"), "known systems: vllm, lmcache, sglang, llm-d"),
        ((*H100, "--settings", "vllm", "--conversations", "0"), "conversations is 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_2(kvlab_plan, arguments, message):
    code, text, errors = kvlab_plan(*arguments)
    assert code == 2
    assert text == ""
    assert message in errors
    assert errors.startswith("kvlab: ")
    assert errors.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_one_line(kvlab_plan, monkeypatch):
    import huggingface_hub

    def refuse(repo, allow_patterns):
        assert (repo, allow_patterns) == ("org/model", ["config.json"]), "the config alone is fetched"
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    code, _, errors = kvlab_plan("--model", "org/model", "--machine", "h100-sxm-pcie5")
    assert code == 2
    assert "cannot get 'org/model' from the Hugging Face hub" in errors
    assert errors.count("\n") == 1


def test_a_hub_id_names_the_model(kvlab_plan, monkeypatch, tmp_path):
    import huggingface_hub

    shutil.copy(CONFIGS / "Qwen2.5-7B.json", tmp_path / "config.json")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, allow_patterns: str(tmp_path))
    code, text, _ = kvlab_plan("--model", "Qwen/Qwen2.5-7B", "--machine", "a100-sxm-pcie4", "--prefix", "1k", "--json")
    assert code == 0
    assert json.loads(text)["model"] == "Qwen2.5-7B"
    assert json.loads(text)["growing_bytes_per_token"] == 57344
