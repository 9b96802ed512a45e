"""The experiment: a wrong byte fails it, lengths fit the budget, and the record says only what was measured."""

import math
from dataclasses import replace

import pytest
import torch

from kvlab.arch import ModelArch
from kvlab.experiments import crossover
from kvlab.experiments.rig import Rig
from kvlab.loading import load_model
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.tiers import DiskTier, HostTier, LinkTier
from kvlab.transfer import Transfer

TEXT = [(i * 7919 + i // 3) % 500 for i in range(1200)]


@pytest.fixture(scope="module")
def model():
    return load_model("tiny", dtype="fp32")


def machine(gb_per_s=0.02) -> Machine:
    rate = Curve(((1.0, 2e9),))
    return Machine("test", Prefill(1e-3, rate, rate, "tiny"), {"host": {"load": Link(Curve(((1.0, gb_per_s),)))}})


def test_reloaded_logits_equal_the_resident_ones_bit_for_bit_on_every_tier(model, tmp_path):
    tiers = {
        "host": lambda: HostTier(2**26),
        "disk": lambda: DiskTier(tmp_path / "d", 2**26),
        "xz": lambda: DiskTier(tmp_path / "x", 2**26, codec="xz"),
        "slow": lambda: LinkTier(HostTier(2**26), 0.05),
    }
    measured = crossover.measure(model, TEXT, tiers, [16, 100, 256], suffix=8, block_size=16, rounds=2)
    assert measured.rounds == 2
    assert [check.tokens for check in measured.checks] == [16, 100, 256]
    assert all(len(samples) == 2 for result in measured.tiers.values() for samples in result.reload_s)
    assert measured.tiers["host"].cold == "memory"
    assert measured.tiers["disk"].cold in ("proven", "unproven")
    # 256 tokens = 128 KiB at 0.05 GB/s
    assert min(measured.tiers["slow"].reload_s[2]) >= 131_072 / 0.05e9


@pytest.mark.parametrize("wrong", ["one bit of one key", "another block's bytes"])
def test_a_reload_that_is_not_byte_identical_fails_the_experiment(model, monkeypatch, wrong):
    reload = Transfer.reload

    def spoilt(self, tier, hashes, blocks, fingerprint=None):
        pending = reload(self, tier, hashes, blocks, fingerprint)
        pending.wait()
        if wrong == "one bit of one key":
            index = self.pool.group_index(torch.tensor(blocks[:1]), 0, 1)
            row = self.pool.rows[index[0]].view(torch.int32)
            row[3] ^= 1 << 22
        else:
            self.pool.copy_block(blocks[1], blocks[0])
        return pending

    monkeypatch.setattr(Transfer, "reload", spoilt)
    with pytest.raises(crossover.MismatchError, match="64 tokens from host"):
        crossover.measure(model, TEXT, {"host": lambda: HostTier(2**26)}, [64], suffix=8, block_size=16, rounds=1)


def test_logits_that_are_far_from_fp32_fail_the_experiment(model, monkeypatch):
    """The second check: not only equal to the resident cache, but right."""
    prefill = type(model).prefill

    def drifting(self, tokens, pool, blocks, start=0, **options):
        logits = prefill(self, tokens, pool, blocks, start, **options)
        return logits + 0.1 * logits.roll(1) if start else logits  # wrong behind a cached prefix, resident or reloaded

    monkeypatch.setattr(type(model), "prefill", drifting)
    with pytest.raises(crossover.MismatchError, match="from fp32"):
        crossover.measure(model, TEXT, {"host": lambda: HostTier(2**26)}, [64], suffix=8, block_size=16, rounds=1)


def test_a_miss_is_never_timed_as_a_reload(model):
    with Rig(model, block_size=16, max_tokens=128) as rig:
        tier = rig.open(HostTier(2**26))
        with pytest.raises(RuntimeError, match="0 of 4 blocks"):
            rig.resume(tier, TEXT[:80], 64)
        assert rig.allocator.free_blocks == rig.allocator.num_blocks, "a miss gives its blocks back"


def test_the_reload_goes_into_other_blocks_than_before(model, monkeypatch):
    seen = []
    reload, offload = Transfer.reload, Transfer.offload

    def seen_reload(self, tier, hashes, blocks, fingerprint=None):
        seen.append(blocks)
        return reload(self, tier, hashes, blocks, fingerprint)

    def seen_offload(self, tier, blocks, hashes, fingerprint=None, **options):
        seen.append(blocks)
        return offload(self, tier, blocks, hashes, fingerprint, **options)

    monkeypatch.setattr(Transfer, "reload", seen_reload)
    monkeypatch.setattr(Transfer, "offload", seen_offload)
    crossover.measure(model, TEXT, {"host": lambda: HostTier(2**26)}, [64], suffix=8, block_size=16, rounds=1)
    stored, *loaded = seen
    assert len(loaded) == 2
    assert not any(set(stored) & set(blocks) for blocks in loaded)


def test_no_round_starts_beyond_the_budget(model):
    measured = crossover.measure(
        model, TEXT, {"host": lambda: HostTier(2**26)}, [64], suffix=8, block_size=16, rounds=50, budget_s=0.0
    )
    assert measured.rounds == 1
    assert crossover.crossover_interval(measured, "host") is None


def test_auto_lengths_fit_budget_text_and_positions():
    arch = ModelArch.preset("smollm2-135m")
    m = replace(machine(), prefill=replace(machine().prefill, linear_flops_per_s=Curve(((1.0, 1e11),))))
    common = {"suffix": 16, "block_size": 16, "slow_tiers": 1, "fast_tiers": 2, "rounds": 7}
    short = crossover.auto_lengths(arch, m, tokens=9000, budget_s=30, **common)
    long = crossover.auto_lengths(arch, m, tokens=9000, budget_s=3000, **common)
    assert short[-1] < long[-1]
    for lengths in (short, long):
        assert len(lengths) >= 4
        assert lengths == sorted(set(lengths))
        assert all(length % 16 == 0 for length in lengths)
        assert lengths[-1] + 16 <= arch.max_positions
    assert crossover.auto_lengths(arch, m, tokens=200, budget_s=3000, **common)[-1] <= 184
    with pytest.raises(ValueError, match="has 20 tokens"):
        crossover.auto_lengths(arch, m, tokens=20, budget_s=30, **common)


def fake_measured(reload_s, recompute_s, lengths=(64, 128, 256)) -> crossover.Measured:
    result = crossover.TierResult("host", False, reload_s, [[None] * len(s) for s in reload_s], [0] * len(lengths))
    return crossover.Measured(list(lengths), recompute_s, [[0.001] * len(s) for s in reload_s], {"host": result})


def test_the_measured_flip_is_where_the_medians_cross_not_a_measured_length():
    measured = fake_measured([[2.0] * 7] * 3, [[1.0] * 7, [1.5] * 7, [2.5] * 7])
    # log(2/1.5) = 0.2877 at 128, log(2/2.5) = -0.2231 at 256: 0.5632 of the way, on a log scale
    assert crossover.measured_crossover(measured, "host") == pytest.approx(128 * 2**0.56319, rel=1e-4)
    low, high = crossover.crossover_interval(measured, "host")
    assert low == high == crossover.measured_crossover(measured, "host"), "equal rounds leave no doubt"


def test_the_interval_covers_always_and_never():
    noisy = [[1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0]] * 3
    measured = fake_measured(noisy, [[2.0] * 7] * 3)
    assert crossover.crossover_interval(measured, "host") == (0.0, math.inf)


def test_the_record_says_never_as_null_and_always_as_zero(model):
    predictions = crossover.predict(model, machine(), ["host"], [64, 128, 256], suffix=8, block_size=16)
    always = fake_measured([[1.0] * 7] * 3, [[2.0] * 7] * 3)
    never = fake_measured([[3.0] * 7] * 3, [[2.0] * 7] * 3)
    for measured, expected in ((always, 0), (never, None)):
        record = crossover.record(model, machine(), predictions, measured, {})
        assert record["tiers"][0]["crossover_tokens"] == expected
        assert record["tiers"][0]["crossover_interval"] == [expected, expected]
        # bytes ÷ (recompute − resident): 64 tokens × 512 B a token in 2 s − 1 ms
        assert record["tiers"][0]["break_even_gb_per_s"][0] == pytest.approx(64 * 512 / 1.999e9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_experiment_runs_on_cuda(tmp_path):
    model = load_model("tiny", device="cuda", dtype="bf16")
    tiers = {"host": lambda: HostTier(2**26), "disk": lambda: DiskTier(tmp_path, 2**26)}
    measured = crossover.measure(
        model, TEXT, tiers, [64, 256], suffix=8, block_size=16, rounds=2, reference=load_model("tiny", "cuda", "fp32")
    )
    assert measured.rounds == 2
    assert all(check.bit_exact for check in measured.checks)
