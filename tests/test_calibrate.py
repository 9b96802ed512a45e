"""Fits recover the machine that produced the times, and pass through what was measured."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.arch import ModelArch
from kvlab.experiments.calibrate import PrefillSample, fit_link, fit_prefill, scattered
from kvlab.machine import Curve, Link, Prefill

ARCH = ModelArch.preset("smollm2-135m")
GRID = [(16, 0), (32, 0), (64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (16, 1024), (128, 1024), (512, 1024)]


def times_of(prefill: Prefill, grid=GRID) -> list[PrefillSample]:
    return [PrefillSample(rows, cached, (prefill.seconds(ARCH, cached, cached + rows),) * 3) for rows, cached in grid]


def test_a_machine_of_constant_rates_is_recovered_from_its_times():
    true = Prefill(0.003, Curve(((1.0, 1e11),)), Curve(((1.0, 4e10),)), ARCH.name)
    head_s = 2 * ARCH.head_macs / 1e11
    fitted = fit_prefill(ARCH, times_of(true), head_s, "fp32")
    assert (fitted.calibrated_on, fitted.calibrated_shape) == (ARCH.name, ARCH.shape_digest)
    for _, rate in fitted.attention_flops_per_s.points:
        assert rate == pytest.approx(4e10, rel=1e-6)
    assert fitted.per_chunk_s == pytest.approx(0.003, rel=1e-6)
    for start, stop in ((0, 96), (0, 768), (0, 2048), (512, 528), (2048, 2064)):
        assert fitted.seconds(ARCH, start, stop) == pytest.approx(true.seconds(ARCH, start, stop), rel=0.03)


def test_the_fit_passes_through_every_uncached_time():
    rates = Curve(((16, 3e10), (64, 8e10), (256, 1.2e11)))
    true = Prefill(0.002, rates, Curve(((16, 8e9), (512, 5e10))), ARCH.name)
    fitted = fit_prefill(ARCH, times_of(true), 0.004, "fp32")
    for sample in times_of(true):
        if sample.cached == 0:
            assert fitted.seconds(ARCH, 0, sample.rows) == pytest.approx(sample.seconds[0], rel=1e-6)


def test_a_long_prompt_shows_that_whole_prompts_have_faster_attention():
    true = Prefill(0.002, Curve(((1, 1e11),)), Curve(((512, 2e10), (1024, 8e10))), ARCH.name)
    head_s = 2 * ARCH.head_macs / 1e11
    short = fit_prefill(ARCH, times_of(true), head_s, "fp32")
    fitted = fit_prefill(ARCH, times_of(true, [*GRID, (2048, 0)]), head_s, "fp32")
    assert fitted.attention_flops_per_s(2048) == pytest.approx(8e10, rel=0.01)
    assert fitted.seconds(ARCH, 0, 2048) == pytest.approx(true.seconds(ARCH, 0, 2048), rel=1e-6)
    assert fitted.seconds(ARCH, 0, 4096) == pytest.approx(true.seconds(ARCH, 0, 4096), rel=0.01)
    assert short.seconds(ARCH, 0, 4096) > 1.3 * true.seconds(ARCH, 0, 4096)


def launch_bound(grid, longer_s=0.001) -> list[PrefillSample]:
    return [PrefillSample(rows, cached, (0.009 + longer_s * (cached > 0),)) for rows, cached in grid]


@pytest.mark.parametrize("longest", [512, 1024, 2048, 8192])  # of the text: a chat calibrates on 512 tokens
def test_passes_that_all_take_as_long_as_their_launches_are_predicted_so(longest):
    """A small model on a GPU: 9 ms whatever the rows, and 1 ms more behind cached tokens, however many."""
    grid = [(rows, cached) for rows, cached in [*GRID, (2048, 0), (4096, 0), (8192, 0), (16, 16)]]
    grid = [(rows, cached) for rows, cached in grid if rows <= longest]
    fitted = fit_prefill(ARCH, launch_bound(grid), 35e-6, "bf16")
    for tokens in (16, 48, 300, 512, 1040, 2048, 5000):
        assert fitted.seconds(ARCH, 0, min(tokens, longest)) == pytest.approx(0.009, rel=0.02)
    assert fitted.seconds(ARCH, 4096, 4112) == pytest.approx(0.010, rel=0.15)
    assert fitted.seconds(ARCH, 0, 2 * longest) < 2 * 0.009  # nobody knows how far it stays so


def test_attention_that_is_noise_does_not_outgrow_what_was_measured():
    grid = [*GRID, (2048, 0), (4096, 0), (8192, 0), (16, 16)]
    noisy = [
        replace(s, seconds=(s.seconds[0] + {(16, 1024): 250e-6, (128, 1024): 150e-6}.get((s.rows, s.cached), 0.0),))
        for s in launch_bound(grid)
    ]
    fitted = fit_prefill(ARCH, noisy, 35e-6, "bf16")
    for rows, cached in grid:
        if not cached:
            assert fitted.seconds(ARCH, 0, rows) == pytest.approx(0.009, rel=0.02)


def test_a_short_text_too_tells_launches_from_attention():
    grid = [(16, 0), (32, 0), (64, 0), (128, 0), (16, 16), (16, 96)]
    fitted = fit_prefill(ARCH, launch_bound(grid), 35e-6, "bf16")
    assert fitted.seconds(ARCH, 0, 512) < 2 * 0.009


def test_launches_behind_cached_tokens_are_not_taken_for_attention():
    true = Prefill(0.003, Curve(((1.0, 1e13),)), Curve(((1.0, 4e11),)), ARCH.name)
    grid = [*GRID, (16, 16)]
    longer = [PrefillSample(s.rows, s.cached, (s.seconds[0] + 0.001 * (s.cached > 0),)) for s in times_of(true, grid)]
    fitted = fit_prefill(ARCH, longer, 2 * ARCH.head_macs / 1e13, "bf16")
    for _, rate in fitted.attention_flops_per_s.points:
        assert rate == pytest.approx(4e11, rel=0.01)


def test_noise_larger_than_attention_does_not_break_the_fit():
    flat = [PrefillSample(rows, cached, (0.05 + rows * 1e-3,)) for rows, cached in GRID]
    fitted = fit_prefill(ARCH, flat, 0.01, "fp32")
    assert fitted.seconds(ARCH, 0, 1024) == pytest.approx(0.05 + 1.024, rel=0.5)


@given(
    st.floats(1e-6, 1e-3),
    st.floats(0.5, 20),
    st.floats(0, 1e-5),
    st.floats(0, 1e-4),
)
def test_a_fitted_link_predicts_each_measured_transfer(request_s, rate, per_block_s, per_copy_s):
    block_bytes = 368_640
    times = {n: request_s + n * (per_block_s + block_bytes / rate / 1e9) + per_copy_s for n in (1, 2, 4, 8, 16, 32, 64)}
    link = fit_link(times, block_bytes, per_block_s, per_copy_s)
    for n, seconds in times.items():
        assert link.transfer_s(n * block_bytes, n, 30) == pytest.approx(seconds, rel=1e-6)
    assert all(rate > 0 for _, rate in link.gb_per_s.points)


def test_overheads_larger_than_the_times_cannot_make_a_rate_negative():
    link = fit_link({1: 1e-5, 2: 1.2e-5, 4: 1.1e-5}, 4096, per_block_s=1.0, per_copy_s=1.0)
    assert isinstance(link, Link)
    assert link.transfer_s(4096, 1, 2) == pytest.approx(1e-5)


def test_scattered_blocks_have_no_runs():
    blocks = scattered(list(range(64)))
    assert sorted(blocks) == list(range(64))
    assert all(abs(a - b) != 1 for a, b in pairwise(blocks))
