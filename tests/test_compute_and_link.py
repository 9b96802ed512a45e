"""What lessons 02 and 03 measure and draw: times by length, copies by layout and size, and the published figures."""

from __future__ import annotations

import csv
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvlab.arch import ModelArch
from kvlab.arithmetic import prefill_flops
from kvlab.experiments import layouts, lengths
from kvlab.lab.draw.compute import growth_figure, overtakes_at, token_cost_figure
from kvlab.lab.draw.copies import ONE_COPY_IS, block_size_figure, copy_bytes
from kvlab.lab.draw.style import png
from kvlab.lab.published import published
from kvlab.loading import load_model

DATA = Path(__file__).parent / "data"
TOKENS = list(range(1, 255)) * 3


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="fp32")


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# --- times by length --------------------------------------------------------------------------------------------------


def test_a_fit_takes_clean_times_apart():
    tokens = [128, 256, 512, 1024, 2048]
    assert lengths.fit_growth(tokens, [0.03 + 8e-4 * n + 2e-7 * n * n for n in tokens]) == pytest.approx(
        (0.03, 8e-4, 2e-7), rel=1e-6
    )


def test_no_pass_costs_less_than_nothing_before_its_first_token():
    tokens = [128, 256, 512, 1024, 2048, 4096]
    seconds = [-0.03 + 8e-4 * n + 2e-7 * n * n for n in tokens]
    t0, a, b = lengths.fit_growth(tokens, seconds)
    assert t0 == 0
    # Refitted, not cut off: no nearby (a, b) has smaller relative errors.
    n, s = np.array(tokens, float), np.array(seconds)

    def error(a: float, b: float) -> float:
        return float((((a * n + b * n**2) / s - 1) ** 2).sum())

    assert all(error(a, b) <= error(a * da, b * db) for da in (0.99, 1, 1.01) for db in (0.99, 1, 1.01))


def test_two_lengths_cannot_tell_three_parts_apart():
    with pytest.raises(ValueError, match="three different lengths"):
        lengths.fit_growth([128, 256, 256], [1.0, 2.0, 2.1])


def test_a_ladder_doubles_and_keeps_to_the_text_and_the_budget(tiny):
    ladder = lengths.lengths_within(tiny, TOKENS, budget_s=1e9)
    assert ladder[-1] == 512  # the text has fewer than 1,024
    assert all(b == 2 * a for a, b in pairwise(ladder))
    long_text = TOKENS * 8
    assert lengths.lengths_within(tiny, long_text, budget_s=1e9)[-1] == 4096
    assert lengths.lengths_within(tiny, long_text, budget_s=0.0)[-1] == 512
    with pytest.raises(ValueError, match="at least 512 tokens"):
        lengths.lengths_within(tiny, TOKENS[:511], budget_s=1.0)


def test_the_two_parts_of_a_record_are_all_flops_of_a_prefill(tiny):
    record = lengths.measure(tiny, TOKENS, [16, 32, 64, 128])
    for n, linear, attention in zip(record["tokens"], record["linear_flops"], record["attention_flops"], strict=True):
        assert linear + attention == prefill_flops(tiny.arch, 0, n)
    assert [len(samples) for samples in record["samples_s"]] == [3, 3, 1, 1]
    assert record["seconds"] == [min(samples) for samples in record["samples_s"]]
    png(growth_figure(record, lengths.fit_growth(record["tokens"], record["seconds"])))


def test_attention_takes_over_where_lesson_02_says():
    # By hand: weights of a layer ÷ (2 × heads × head_dim).
    assert overtakes_at(ModelArch.preset("smollm2-135m")) == (576 * (2 * 576 + 2 * 192) + 3 * 576 * 1536) / (2 * 576)
    assert overtakes_at(ModelArch.preset("llama-3.1-8b")) == (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336) / 8192


def test_the_ends_of_a_range_may_come_in_either_order():
    arch = ModelArch.preset("llama-3.1-8b")
    assert png(token_cost_figure(arch, 300, 9000, 10_000)) == png(token_cost_figure(arch, 9000, 300, 10_000))


# --- copies -----------------------------------------------------------------------------------------------------------


def test_the_same_bytes_move_in_as_many_copies_as_the_layout_asks_for(tiny):
    record = layouts.layouts(tiny, TOKENS[:100], rounds=1)
    copies = {arm["name"]: arm["copies"] for arm in record["arms"]}
    assert copies["layer-major, piece by piece"] == 7 * 2 * 2  # 7 blocks, 2 layers, K and V
    assert copies["block-major, block by block"] == 7
    assert copies["layer-major, one gather"] == copies["one copy"] == 1
    assert all(arm["copies"] * arm["copy_bytes"] == record["size_bytes"] for arm in record["arms"])


def test_copies_that_lose_bytes_are_not_timed(tiny, monkeypatch):
    whole = layouts._copy_each
    monkeypatch.setattr(layouts, "_copy_each", lambda pairs, device: whole(pairs[:-1], device))
    with pytest.raises(RuntimeError, match="piece by piece: the copied blocks differ"):
        layouts.layouts(tiny, TOKENS[:100], rounds=1)


def test_timing_copies_leaves_torch_its_threads(tiny):
    import torch

    before = torch.get_num_threads()
    record = layouts.copy_sizes("cpu", [1 << 20, 1 << 24], rounds=1)
    assert torch.get_num_threads() == before
    assert len(record["gb_per_s"]) == 2
    assert min(record["gb_per_s"]) > 0


def test_half_the_peak_lies_at_overhead_times_peak():
    overhead_s, peak = 4e-6, 50.0
    sizes = [4096, 65536, 2**20, 2**30]
    link = layouts.copy_link(sizes, [size / (overhead_s + size / (peak * 1e9)) / 1e9 for size in sizes])
    assert link.per_copy_s == pytest.approx(overhead_s, rel=0.01)
    half = int(link.per_copy_s * link.rate_gb_per_s(1) * 1e9)
    assert half / link.transfer_s(half, 1, 1) / 1e9 == pytest.approx(peak / 2, rel=0.01)


def test_a_disk_is_read_cold_and_warm(tiny, tmp_path):
    record = layouts.disk_reads(tiny, TOKENS[:512], tmp_path, rounds=1)
    assert set(record["gb_per_s"]) == {"cold", "warm"}
    assert all(rate > 0 for rate in record["gb_per_s"].values())
    assert record["size_bytes"] == 32 * tiny.layout(16).block_bytes
    assert record["proven"] in (True, False, None)


def test_a_cpu_has_no_pinned_memory_to_compare():
    with pytest.raises(ValueError, match="cpu is none"):
        layouts.pinned_and_pageable("cpu")


# Pieces and blocks of 16 bf16 tokens as the vLLM blog (2026-01-08) gives them for Llama-3.1-8B: 32 KB and 2 MB.
def test_copies_of_a_block_have_the_published_sizes():
    arch = ModelArch.preset("llama-3.1-8b")
    assert [copy_bytes(arch, 16, kind) for kind in ONE_COPY_IS] == [32 * 1024, 64 * 1024, 2 * 2**20]


@pytest.mark.parametrize("kind", ONE_COPY_IS)
@pytest.mark.parametrize("tokens", [1, 512])
def test_the_block_picture_holds_at_both_ends_of_its_sliders(kind, tokens):
    for name in ("smollm2-135m", "llama-3.1-8b"):
        arch = ModelArch.preset(name)
        figure = block_size_figure(arch, tokens, kind, published("h100_copy_sizes"))
        low, high = figure.axes[0].get_xlim()
        assert low <= copy_bytes(arch, tokens, kind) <= high, "the marker lies outside the picture"
        assert png(figure).startswith(b"\x89PNG")


# --- published figures ------------------------------------------------------------------------------------------------


def test_shipped_figures_are_the_published_rows():
    shipped, found = published("h100_copy_sizes"), {}
    for row in rows("bandwidth.csv"):
        match = re.match(r"(\d+) KB blocks x1000, DMA", row["case"])
        if match and row["direction"] == "H2D":
            found[int(match[1]) * 1024] = float(row["GB_per_s"])
    assert dict(zip(shipped["copy_bytes"], shipped["dma_gb_per_s"], strict=True)) == found
    prefill = published("h100_prefill_8b")
    seen = [row for row in rows("prefill.csv") if "H100" in row["hardware"] and "3.1-8B" in row["model"]]
    assert prefill["tokens"] == [int(row["prompt_tokens"]) for row in seen]
    assert prefill["recompute_s"] == [int(row["prefill_or_TTFT_ms"]) / 1e3 for row in seen]
    assert prefill["reload_s"] == [int(row["reload_ms"]) / 1e3 for row in seen]


def test_unknown_figures_are_named_with_those_there_are():
    with pytest.raises(ValueError, match="h100_copy_sizes"):
        published("b300")
