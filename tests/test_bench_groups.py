"""The bench's own groups: rows that small sizes give, exponents that are known, and a vLLM that is played."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_engine import text, tiny_model

from kvlab.arch import ModelArch
from kvlab.experiments import peers
from kvlab.experiments.bench import growth, rows, vllm
from kvlab.experiments.bench.growth import exponent, exponent_row
from kvlab.experiments.bench.hashing import bench_hashing, filled_index, lookups
from kvlab.experiments.bench.memory import ColdReads
from kvlab.experiments.bench.overlap import hidden_row, hidden_rows, layer_groups
from kvlab.experiments.bench.rows import Row, judged, median_interval
from kvlab.experiments.bench.vllm_peer import matrix_products
from kvlab.gguf_file import GgufFile
from kvlab.reload import Reload
from kvlab.tiers import DiskTier
from kvlab.weights import fetch

# Growth --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_that_power(power):
    samples = {size: [3e-6 * size**power * noise for noise in (0.9, 1.0, 1.3)] for size in (10, 100, 1000)}
    assert exponent(samples) == pytest.approx(power)


def test_an_exponent_is_judged_against_its_theory_and_has_an_interval():
    samples = {size: [size * (1 + 0.01 * i) for i in range(7)] for size in (10, 100, 1000)}
    row = exponent_row("a thing with its size", samples, 1, 0.1, "linear")
    assert (row.ours, row.met, row.goal) == (pytest.approx(1), True, "≤ 1.10 (linear: 1.00)")
    assert row.interval[0] <= 1 <= row.interval[1]
    assert exponent_row("a thing with its size", samples, 0.5, 0.1, "a root").met is False
    assert row.name == "growth of a thing with its size, 10 to 1,000"


def test_small_sizes_give_every_row_of_growth(monkeypatch):
    monkeypatch.setattr(growth, "model_and_text", lambda name, device, dtype: (tiny_model(), text(64)))
    monkeypatch.setattr(growth, "_FILLING", 1)
    rows = [
        growth.prefill_row("tiny", "cpu", "fp64", (8, 16, 64)),
        *growth.lookup_rows((10, 100), (100, 400)),
        *growth.simulator_rows((1, 2), (4, 40)),
        growth.index_memory_row((100, 1000)),
    ]
    for row in rows:
        json.dumps(row.plain(), allow_nan=False)
        assert row.met in (True, False)
        assert row.goal.startswith("≤ ")
    memory = rows[-1]  # bytes of Python objects are the same on every machine
    assert memory.met
    assert all(100 < each < 2000 for each in memory.peers.values())


def test_the_median_of_seven_rounds_has_an_interval_around_it():
    low, high = median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert 1 <= low < 4 < high <= 7
    assert median_interval([1.0] * 6) is None


# Hashing -------------------------------------------------------------------------------------------------------------


def test_hashing_has_a_floor_in_every_row():
    rows = list(bench_hashing("cpu", "fp32", lambda _: None, tokens=256, indexes=(600,)))
    assert [row.unit for row in rows] == ["tokens/s", "GB/s", "blocks/s"]
    for row in rows:
        assert row.of_floor == pytest.approx(row.ours / row.floor)
        assert row.interval[0] <= row.interval[1]


def test_look_ups_find_runs_of_blocks_that_are_in_the_index():
    index, hashes = filled_index(64)
    for wanted in lookups(hashes, run=8, count=5, seed=1):
        assert index.matched(wanted) == 8
        assert not any(mine is theirs for mine in wanted for theirs in hashes)


# Goals ---------------------------------------------------------------------------------------------------------------

GOAL = Row("r", 1.0, "ms", goal="≥ 2 × sdpa", met=False)


@pytest.mark.parametrize(
    ("device", "dtype", "faster", "goal", "met"),
    [
        ("cpu", "fp32", "fp32", "≥ 2 × sdpa", False),
        ("cpu", "bf16", "bf16", "≥ 2 × sdpa", False),
        ("cpu", "bf16", "fp32", "≥ 2 × sdpa (bf16 emulated)", False),  # judged, and it says on what
        ("cuda:0", "bf16", "bf16", "reported", None),
    ],
)
def test_a_goal_is_that_of_a_cpu_and_says_when_bf16_is_emulated(monkeypatch, device, dtype, faster, goal, met):
    monkeypatch.setattr(rows, "resolve_dtype", lambda dtype, device: faster)
    row = judged(GOAL, device, dtype)
    assert (row.goal, row.met) == (goal, met)


# Hidden behind a suffix ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "load", "rest", "plain", "hidden", "most", "said"),
    [
        (22.0, 10.0, 20.0, 21.0, 80.0, 100.0, "90 %"),  # two of ten are seen, where plain reads show one
        (30.0, 10.0, 20.0, 20.0, 0.0, 100.0, "100 %"),  # one after the other
        (33.0, 10.0, 20.0, 31.0, -30.0, 100.0, "-10 %"),  # worse than that
        (12.0, 10.0, 5.0, 10.0, 30.0, 50.0, "50 %"),  # five of computing hide five at most
    ],
)
def test_the_hidden_share_is_what_of_the_load_the_first_token_does_not_wait_for(
    ours, load, rest, plain, hidden, most, said
):
    seconds = {"ours": ours, "load": load, "rest": rest, "plain": plain}
    row = hidden_row("r", "cold files", {arm: [s / 1e3] * 7 for arm, s in seconds.items()})
    assert (row.ours, row.floor) == (pytest.approx(hidden), pytest.approx(most))
    assert row.of_floor == pytest.approx(hidden / most)
    assert row.interval == (pytest.approx(hidden / most), pytest.approx(hidden / most))
    assert row.met == (hidden >= 75)
    assert row.note == f"cold files; plain reads hide {said}"
    assert row.peers["together, ms"] == pytest.approx(ours)


def test_disk_reloads_are_hidden_by_the_engines_own_layer_groups(tmp_path, monkeypatch):
    waits, drops = [], []
    wait, drop = Reload.wait_group, DiskTier.drop_pages
    monkeypatch.setattr(Reload, "wait_group", lambda self, group: waits.append(group) or wait(self, group))
    monkeypatch.setattr(DiskTier, "drop_pages", lambda self: drops.append(self.folder) or drop(self))
    model = tiny_model()
    rows = list(hidden_rows(model, text(400), tmp_path, lambda _: None, prefix=64, suffixes=(4, 8), rounds=7))
    assert [row.name for row in rows] == [
        f"disk reload of 64 tokens hidden behind a suffix of {suffix}, tiny-2 fp64" for suffix in (4, 8)
    ]
    for row in rows:
        json.dumps(row.plain(), allow_nan=False)
        assert row.note.startswith(("cold files; ", "cold: unproven; "))
        assert row.interval[0] <= row.interval[1]
        assert row.ours == pytest.approx(
            100 - 100 * (row.peers["together, ms"] - row.peers["suffix alone, ms"]) / row.peers["load alone, ms"]
        )
    assert layer_groups(model) == 2
    assert waits.count(1) == 2 * 8  # each resume waits for each group; a load alone waits for all of them at its end
    assert len(drops) == 3 * 2 * 8  # before every resume, load, and plain read


def test_a_read_is_cold_when_the_device_has_counted_nine_tenths_of_it():
    reads = ColdReads(1000)
    assert reads.timed(lambda: 0.5) == 0.5
    assert str(reads) == "cold: unproven"  # nothing was read
    for nbytes, said in ((900, "cold files"), (899, "cold: unproven"), (None, "cold: unproven")):
        reads = ColdReads(1000)
        reads.note(4000)
        reads.note(nbytes)
        assert str(reads) == said


# vLLM ----------------------------------------------------------------------------------------------------------------

PLAYED = """
import json, sys, time, types
from types import SimpleNamespace

assert "-I" in sys.argv, "without it the folder of the peer's file shadows vllm itself"


class LLM:
    def __init__(self, **config):
        print("noise on standard output")
        assert config["enable_prefix_caching"] is False and config["skip_tokenizer_init"] is True
        if "broken" in config["model"]:
            raise RuntimeError("no kernel for this machine")
        self.storage = config.get("kv_transfer_config")

    def generate(self, prompt, sampling, use_tqdm):
        assert sampling.max_tokens == 1
        time.sleep(0.002)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(prompt["prompt_token_ids"])])])]


sys.modules["vllm"] = types.SimpleNamespace(
    LLM=LLM, SamplingParams=lambda **options: SimpleNamespace(**options), __version__="played"
)
import runpy
runpy.run_path(sys.argv[-1], run_name="__main__")
"""


@pytest.fixture
def python(tmp_path):
    """A program that takes what vLLM's Python is given, and has a vLLM that only sleeps."""
    script = tmp_path / "played.py"
    script.write_text(PLAYED, encoding="utf-8")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    return program


def small(folder, name="model"):
    weights = folder / name
    weights.mkdir()
    return tiny_model(), weights


@pytest.mark.skipif(sys.platform == "win32", reason="the played Python is a shell script")
def test_vllm_is_asked_a_line_at_a_time_and_its_noise_is_not_an_answer(tmp_path, python):
    model, weights = small(tmp_path)
    with vllm._peer(python, model, weights, None) as peer:
        answer = peer.ask([1, 2, 3])
        assert answer["token"] == 3
        assert answer["seconds"] >= 0.002
        assert peer.ask("gemm")["seconds"] > 0
        row = vllm._prefill_row(model, text(32), peer)
    assert row.name == "time to first token beside vLLM, 32 tokens, fp64"
    assert row.peers["vllm"] >= 2
    assert row.goal == "≥ 0.9 × vllm"
    assert row.met == (row.of_peer["vllm"] >= 0.9)


@pytest.mark.skipif(sys.platform == "win32", reason="the played Python is a shell script")
def test_a_resume_beside_vllm_reloads_every_time(tmp_path, python, monkeypatch):
    loads, drops = [], []
    load = DiskTier.load
    monkeypatch.setattr(DiskTier, "load", lambda self, *given: loads.append(1) or load(self, *given))
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "layer.safetensors").write_bytes(b"of vLLM")
    monkeypatch.setattr(vllm, "drop_file", drops.append)
    model, weights = small(tmp_path)
    (tmp_path / "tier").mkdir()
    with vllm._peer(python, model, weights, tmp_path / "stored") as peer:
        row = vllm._resume_row(model, text(100), peer, tmp_path)
    assert len(loads) == 10  # nine rounds and the one that warms up
    assert len(drops) == 20  # vLLM's reloads as well as ours: it must not find in memory what it has read before
    assert row.goal == "≥ 3 × vllm"
    assert "cold" in row.note


@pytest.mark.skipif(sys.platform == "win32", reason="the played Python is a shell script")
def test_a_vllm_that_ends_is_an_error_with_the_end_of_its_log(tmp_path, python):
    model, weights = small(tmp_path, "broken")
    ended = pytest.raises(RuntimeError, match=r"has ended: .*no kernel for this machine")
    with ended, vllm._peer(python, model, weights, None):
        pass


def test_the_ratio_to_vllm_is_of_times_divided_by_each_processs_own_products():
    pace = np.array([1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0])  # from the fourth round on the machine is slow while we run
    seconds = {"ours": 2 * pace, "ours products": pace, "vllm": [3.0] * 7, "vllm products": [2.0] * 7}
    row = vllm._row("r", seconds, 0.9)
    assert row.of_peer["vllm"] == pytest.approx(0.75)  # 3/2 against 2/1: theirs ran on a machine half as fast
    assert row.met is False
    assert row.interval == (pytest.approx(0.75), pytest.approx(0.75))


@pytest.mark.skipif(sys.platform == "win32", reason="the played Python is a shell script")
def test_the_products_are_timed_before_and_after_every_run(tmp_path, python):
    model, weights = small(tmp_path)
    calls, times = [], iter([1.0, 3.0] * 3)
    with vllm._peer(python, model, weights, None) as peer:
        peer.products = lambda: calls.append("products") or next(times)
        seconds = peer.rounds(lambda: calls.append("run") or 7.0, lambda: 9.0, 2)
    assert calls == ["products", "run", "products"] * 3
    assert seconds["ours"] == [7.0, 7.0]
    assert seconds["ours products"] == [2.0, 2.0]
    assert seconds["vllm"] == [9.0, 9.0]
    assert all(s > 0 for s in seconds["vllm products"])


def test_matrix_products_are_timed():
    assert matrix_products([[2, 3, 4], [1, 1, 1]], "float32")() > 0


@pytest.mark.smollm2
def test_the_folder_that_peers_get_holds_the_same_model(tmp_path):
    peers.write_smollm2(tmp_path, "fp32")
    source = GgufFile(fetch("smollm2-135m", quiet=True))
    expected, arch = source.tensors(), source.arch()
    written = ModelArch.from_hf(tmp_path / "config.json")
    assert written.decoder == arch.decoder
    assert (written.vocab, written.tied_embeddings) == (arch.vocab, arch.tied_embeddings)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(expected)
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
            assert torch.equal(file.get_tensor(name), expected[name])
