"""What lessons 00 and 01 measure and draw: records that agree with themselves, bytes counted on tensors, refusals."""

import math

import pytest
import torch

import kvlab
from kvlab import loading, weights
from kvlab.arithmetic import kv_bytes
from kvlab.experiments import break_even, decoding, footprint, refusal
from kvlab.lab.draw.break_even import break_even_figure, ladder_figure, tried_links_figure
from kvlab.lab.draw.prefix import prefix_figure
from kvlab.lab.draw.style import CACHED, RECOMPUTE, RELOAD
from kvlab.lab.draw.weight import agents_figure

TEXT = [(i * 7919 + i // 3) % 500 for i in range(300)]


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield kvlab.load_model("tiny", dtype="fp32")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def record(model):
    return break_even.measure(model, TEXT, (32, 256), suffix=8, rounds=2)


# Lesson 00 ------------------------------------------------------------------------------------------------------------


def test_the_default_model_says_why_it_is_not_smollm2(monkeypatch):
    def no_network(name):
        raise OSError("no route to host")

    monkeypatch.setattr(weights, "locate", lambda name: None)
    monkeypatch.setattr(weights, "fetch", no_network)
    said = []
    assert loading.load_default_model("cpu", "fp32", say=said.append).arch.name == "wide-kv"
    assert any("no route to host" in line and "wide-kv" in line for line in said)


def test_break_even_is_bytes_by_seconds_saved(model, record):
    assert record["kv_bytes"] == [n * 2 * 2 * 2 * 16 * 4 for n in (32, 256)]  # K and V, layers, KV heads, dim, fp32
    for size, whole_s, rest_s, speed in zip(
        record["kv_bytes"], record["recompute_s"], record["resident_s"], record["break_even_gb_per_s"], strict=True
    ):
        assert speed is None or speed * 1e9 * (whole_s - rest_s) == pytest.approx(size)
    assert all(len(times) == 2 for times in record["samples_s"]["host"])
    assert 0 < break_even.arithmetic_gb_per_s(model, 256) < math.inf


@pytest.mark.parametrize(("lengths", "word"), [((30,), "multiples"), ((512,), "the text has 300")])
def test_lengths_that_cannot_be_measured_are_refused(model, lengths, word):
    with pytest.raises(ValueError, match=word):
        break_even.measure(model, TEXT, lengths)


def test_a_tried_link_is_really_waited_for(model):
    tried = break_even.try_links(model, TEXT, 256, [0.01, 0.002], suffix=8)
    size = kv_bytes(model.arch, 256, "fp32")
    for speed, seconds in zip(tried["gb_per_s"], tried["reload_s"], strict=True):
        assert seconds >= size / (speed * 1e9)
    assert tried["same_first_token"]


def test_a_changed_token_spoils_its_block_and_all_later_ones(model):
    stored = TEXT[:256]
    changed = [*stored[:100], (stored[100] + 1) % 500, *stored[101:]]
    same, other, tenant = refusal.ask(
        model, stored, {"same": (stored, ""), "other": (changed, ""), "tenant": (stored, "somebody")}
    )
    assert (same["valid_blocks"], same["why"]) == (16, "")
    assert other["valid_blocks"] == 100 // 16
    assert "block 6" in other["why"]
    assert tenant["valid_blocks"] == 0
    assert "salt" in tenant["why"]


def colours(figure):
    """How many squares, bars or patches of each colour the figure's first panel has."""
    faces = [tuple(patch.get_facecolor()) for patch in figure.axes[0].patches]
    return {face: faces.count(face) for face in faces}


def rgba(colour):
    from matplotlib.colors import to_rgba

    return to_rgba(colour)


def test_the_strip_is_green_as_far_as_blocks_are_usable():
    figure = prefix_figure([True] * 6 + [False] * 10, 16, 100)
    assert colours(figure)[rgba(CACHED)] == 6
    assert "6 of 16 blocks" in figure.axes[0].get_title()


def test_the_link_that_ties_is_called_so_and_slower_ones_lose(record):
    record = {
        **record,
        "recompute_s": [0.1, 1.1],
        "resident_s": [0.05, 0.1],
        "break_even_gb_per_s": [record["kv_bytes"][0] / 0.05 / 1e9, record["kv_bytes"][1] / 1e9],
    }
    tie_mb_per_s = record["kv_bytes"][1] / 1e6  # one second
    assert "tie" in break_even_figure(record, tie_mb_per_s).axes[0].get_title()
    assert "reload is" in break_even_figure(record, 10 * tie_mb_per_s).axes[0].get_title()
    assert "recompute is" in break_even_figure(record, tie_mb_per_s / 10).axes[0].get_title()
    seen = colours(ladder_figure({**record, "break_even_gb_per_s": [0.03, 0.02]}, {"another": 5.0}, "somebody"))
    assert (seen[rgba(RECOMPUTE)], seen[rgba(RELOAD)]) == (2, 7)  # two nominal rates lie below 20 MB/s
    tried = {"gb_per_s": [0.01, 0.02], "reload_s": [2.0, 1.0], "recompute_s": 1.0}
    assert "emulated" in tried_links_figure(tried, record).get_supxlabel()


# Lesson 01 ------------------------------------------------------------------------------------------------------------


def test_decoding_with_a_cache_writes_the_same_text(model):
    written = decoding.measure(model, TEXT[:40], new_tokens=12)
    assert written["first_difference"] is None
    assert written["with_cache"] == written["without_cache"]
    assert len(written["with_cache_s"]) == len(written["without_cache_s"]) == 12
    assert written["cache_bytes"] == kv_bytes(model.arch, 51, "fp32")  # the last token is never read back


def test_tensors_weigh_what_the_arithmetic_says(model):
    assert footprint.tensor_bytes(model, TEXT[:100]) == {"k": 25_600, "v": 25_600}
    assert kv_bytes(model.arch, 100, "fp32") == 51_200
    rows = footprint.measured_designs({"MHA": 8, "MQA": 1}, tokens=32)
    assert [row["bytes_per_token"] for row in rows] == [2 * 4 * 8 * 64 * 4, 2 * 4 * 1 * 64 * 4]


def test_computed_designs_of_an_8b():
    sizes = [row["bytes"] for row in footprint.computed_designs(kvlab.ModelArch.preset("llama-3.1-8b"), 32_768)]
    gib = 2**30
    mla, half_window = 32_768 * 32 * 576 * 2, 2 * gib + 4096 * 65_536  # 16 full layers, 16 that keep 4,096 tokens
    assert sizes == [16 * gib, 4 * gib, gib // 2, mla, half_window]


def test_an_offload_empties_the_pool_and_a_reload_keeps_the_copy(model):
    size = kv_bytes(model.arch, 256, "fp32")
    rows = footprint.whereabouts(model, TEXT[:256])
    assert [(row["pool_bytes"], row["tier_bytes"]) for row in rows] == [(0, 0), (size, 0), (0, size), (size, size)]


def test_the_bar_holds_as_many_agents_as_fit():
    gib = 2**30
    assert "all 4 fit" in agents_figure(4, gib, 12 * gib, 16, "x").axes[1].get_title()
    assert "1 of 5 must be offloaded" in agents_figure(5, gib, 12 * gib, 16, "x").axes[1].get_title()
    assert "5 of 5" in agents_figure(5, gib, 20 * gib, 16, "x").axes[1].get_title()  # not even the weights
