"""Quantities mean what they say: bits are not bytes, GB is not GiB, and nothing without a unit is guessed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import units


@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("1Gb/s", 0.125),
        ("1GB/s", 1.0),
        ("0.125GB/s", 0.125),
        ("200Mb/s", 0.025),
        ("25MB/s", 0.025),
        ("1GiB/s", 1.073741824),
    ],
)
def test_bits_and_bytes_per_second_are_told_apart(text, gb_per_s):
    assert units.parse_bandwidth_gb_per_s(text) == pytest.approx(gb_per_s)


@pytest.mark.parametrize("text", ["1", "1Gbps", "1GBps", "fast", "-1Gb/s", "1Gb", "1Gb/h", "nanGb/s", ""])
def test_a_bandwidth_without_a_clear_unit_is_refused(text):
    with pytest.raises(ValueError, match="1Gb/s"):
        units.parse_bandwidth_gb_per_s(text)


@pytest.mark.parametrize("text", ["25Gbps", "25GBps", "25", "25Gbit/s"])
def test_a_refused_bandwidth_is_shown_as_it_would_be_read(text):
    with pytest.raises(ValueError, match=r"write 25Gb/s \(bits\) or 25GB/s \(bytes\)"):
        units.parse_bandwidth_gb_per_s(text)


def test_a_link_that_carries_nothing_is_refused():
    with pytest.raises(ValueError, match="not positive"):
        units.parse_bandwidth_gb_per_s("0Gb/s")


@pytest.mark.parametrize(("text", "count"), [("512MiB", 512 * 2**20), ("4GB", 4 * 10**9), ("1.5KiB", 1536), ("7B", 7)])
def test_sizes(text, count):
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize(("text", "count"), [("512", 512), ("8k", 8000), ("8Ki", 8192), ("1M", 10**6), ("1.5k", 1500)])
def test_counts(text, count):
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["1.5", "8kb", "x", "-3", "1e400"])
def test_bad_counts_are_refused(text):
    with pytest.raises(ValueError, match="write"):
        units.parse_count(text)


def test_times():
    assert units.parse_s("50us") == pytest.approx(50e-6)
    assert units.parse_s("1.5ms") == pytest.approx(1.5e-3)
    assert units.parse_s("2min") == 120
    assert units.parse_s("7d") == 7 * 24 * 3600
    with pytest.raises(ValueError, match="unit"):
        units.parse_s("60")


@given(st.floats(1e-9, 1e6))
def test_a_printed_time_reads_back_within_rounding(seconds):
    assert units.parse_s(units.format_s(seconds).replace(",", "")) == pytest.approx(seconds, rel=6e-3)


@given(st.integers(1, 2**50))
def test_a_printed_size_reads_back_within_rounding(count):
    assert units.parse_bytes(units.format_bytes(count).replace(",", "")) == pytest.approx(count, rel=6e-3, abs=1)


@given(st.floats(1e-6, 1e4))
def test_a_printed_bandwidth_says_the_same_in_bytes_and_bits(rate):
    in_bytes, in_bits = units.format_gb_per_s(rate).replace(",", "").rstrip(")").split(" (")
    assert units.parse_bandwidth_gb_per_s(in_bytes) == pytest.approx(rate, rel=6e-3)
    assert units.parse_bandwidth_gb_per_s(in_bits) == pytest.approx(rate, rel=6e-3)


def test_infinite_quantities_are_words():
    assert units.format_s(math.inf) == "never"
    assert units.format_gb_per_s(math.inf) == "infinite"


@pytest.mark.parametrize(("text", "flops"), [("989TFLOP/s", 989e12), ("2.5 PFLOP/s", 2.5e15), ("80GFLOP/s", 8e10)])
def test_compute_rates(text, flops):
    assert units.parse_flops_per_s(text) == pytest.approx(flops)


@pytest.mark.parametrize("text", ["989", "989TFLOPS", "989TFLOPs", "0TFLOP/s", "fast"])
def test_a_compute_rate_needs_its_unit_and_a_size(text):
    with pytest.raises(ValueError, match="compute rate"):
        units.parse_flops_per_s(text)
