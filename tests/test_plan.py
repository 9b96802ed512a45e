"""A plan is `decide` over prefixes and tiers, plus queues: sizes add up, flips are the dense scan's, waits are real."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.plan import plan
from kvlab.storing import storing
from kvlab.verdict import decide
from kvlab.waiting import mean_wait, wait_quantile

CONFIGS = Path(__file__).parent / "data" / "configs"
LLAMA, TINY = ModelArch.preset("llama-3.1-8b"), ModelArch.preset("tiny")
H100, GB300 = Machine.load("h100-sxm-pcie5"), Machine.load("gb300-c2c")


def config(name) -> ModelArch:
    return ModelArch.from_hf(CONFIGS / f"{name}.json")


def test_a_cache_is_taken_to_hold_what_the_machine_was_measured_in():
    fp32 = replace(H100, prefill=replace(H100.prefill, dtype="fp32"))
    made = plan(LLAMA, fp32, prefixes=[8192])
    assert (made.kv_dtype, made.sizes[0].bytes_per_rank) == ("fp32", kv_bytes(LLAMA, 8192, "fp32"))
    assert made == plan(LLAMA, fp32, prefixes=[8192], kv_dtype="float32")
    assert plan(LLAMA, fp32, prefixes=[8192], kv_dtype="bf16") == plan(LLAMA, H100, prefixes=[8192])
    assert plan(replace(LLAMA, kv_dtype="fp8"), fp32, prefixes=[8192]).kv_dtype == "fp8"


# The queue ------------------------------------------------------------------------------------------------------------


def simulated_waits(load: float, service_s: list[float], requests: int, seed: int) -> list[float]:
    """Waits of requests that arrive at random and pass servers of fixed service times, one after the other."""
    rng, arrival, free = random.Random(seed), 0.0, [0.0] * len(service_s)
    waits = []
    for _ in range(requests):
        arrival += rng.expovariate(load / max(service_s))
        now = arrival
        for i, seconds in enumerate(service_s):
            now = max(now, free[i]) + seconds
            free[i] = now
        waits.append(now - arrival - sum(service_s))
    return sorted(waits)


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_waits_are_those_of_a_simulated_queue(load):
    waits = simulated_waits(load, [1.0], 200_000, seed=1)
    assert mean_wait(load) == pytest.approx(sum(waits) / len(waits), rel=0.04)
    for percentile in (50, 90, 99):
        expected = waits[int(len(waits) * percentile / 100)]
        assert wait_quantile(load, percentile) == pytest.approx(expected, rel=0.05, abs=0.01)


@pytest.mark.parametrize("parts", [[0.3, 1.0], [1.0, 0.3], [1.0, 1.0]])
def test_link_and_accelerator_in_a_row_wait_like_the_slower_one(parts):
    waits = simulated_waits(0.7, parts, 100_000, seed=2)
    assert waits[99_000] == pytest.approx(wait_quantile(0.7, 99), rel=0.06)


@given(st.floats(0.01, 0.99), st.floats(0.5, 99.9))
def test_waits_grow_with_load_and_percentile(load, percentile):
    wait = wait_quantile(load, percentile)
    assert wait >= 0
    assert wait_quantile(load * 0.9, percentile) <= wait + 1e-9
    assert wait_quantile(load, percentile * 0.99) <= wait + 1e-9
    if percentile < 100 * (1 - load):
        assert wait == 0, "so many find the server idle"


@pytest.mark.parametrize("load", [0.3, 0.6, 0.9, 0.97])
def test_the_exponential_tail_takes_over_without_a_step(load):
    from kvlab import waiting

    missed = 1 - waiting._share_within(load, 8.0)
    below, above = (wait_quantile(load, 100 * (1 - missed * factor)) for factor in (1.0001, 0.9999))
    assert below == pytest.approx(8.0, abs=0.01)
    assert above == pytest.approx(8.0, abs=0.01)


@pytest.mark.parametrize(("load", "percentile"), [(1.0, 99), (-0.1, 99), (float("nan"), 99), (0.5, 100), (0.5, 0)])
def test_a_queue_without_an_answer_is_refused(load, percentile):
    with pytest.raises(ValueError, match=r"load is|percentile is"):
        wait_quantile(load, percentile)


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "growing", "fixed"),
    [
        ("Llama-3.1-8B-Instruct", 131072, 0),
        ("DeepSeek-V3", 61 * 576 * 2, 0),
        # 10 of 62 layers grow: 2 · 16 heads · 128 · 2 bytes; 52 hold ceil(1023 / 16) + 1 = 65 blocks of 16 tokens.
        ("gemma-3-27b-it", 10 * 8192, 52 * 65 * 16 * 8192),
    ],
)
def test_what_grows_and_what_does_not(name, growing, fixed):
    made = plan(config(name), H100, prefixes=[4000])
    assert (made.growing_bytes_per_token, made.fixed_bytes) == (growing, fixed)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["gemma-3-27b-it", "Qwen3-Next-80B-A3B-Instruct", "DeepSeek-V3", "gpt-oss-20b"]),
    st.integers(300, 5000),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["bf16", "fp8"]),
)
def test_a_prefix_is_its_growing_part_plus_its_fixed_part(name, blocks, tp, dtype):
    arch = config(name)
    made = plan(arch, H100, prefixes=[blocks * 16], suffix=1, tp=tp, kv_dtype=dtype)
    size = made.sizes[0]
    assert size.bytes_per_rank == blocks * 16 * made.growing_bytes_per_token + made.fixed_bytes
    assert size.total_bytes == tp * size.bytes_per_rank
    assert size.conversations_per_gib * size.total_bytes == pytest.approx(2**30)


def test_ranks_that_hold_copies_are_said():
    assert plan(LLAMA, H100, prefixes=[1000], tp=8).distinct_share == 1
    assert plan(LLAMA, H100, prefixes=[1000], tp=16).distinct_share == pytest.approx(1 / 2), "8 KV heads on 16 ranks"
    assert plan(config("DeepSeek-V3"), H100, prefixes=[1000], tp=4).distinct_share == pytest.approx(1 / 4)


# Times and flips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 4])
def test_an_idle_plan_is_decide_for_every_tier_and_prefix(tp):
    made = plan(LLAMA, H100, prefixes=[32_000, 1000], suffix=100, tp=tp, kv_dtype="fp8")
    assert [tier.tier for tier in made.tiers] == list(H100.links)
    for tier in made.tiers:
        assert [row.prefix_tokens for row in tier.rows] == [1000, 32_000]
        for row in tier.rows:
            verdict = decide(LLAMA, H100, prefix=row.prefix_tokens, suffix=100, tier=tier.tier, tp=tp, kv_dtype="fp8")
            stored = storing(verdict, store_cost_per_s=1.0)
            assert row.choice == verdict.choice
            assert row.too_close == row.too_close_loaded == verdict.too_close
            assert row.reload_s == row.loaded_reload_s == verdict.ttft_reload_s
            assert row.recompute_s == row.loaded_recompute_s == verdict.ttft_recompute_s
            assert row.break_even_gb_per_s == verdict.break_even_gb_per_s
            assert row.store_s == stored.store_s
            assert row.break_even_idle_gap_s == stored.break_even_idle_gap_s
            if verdict.choice == "reload":
                assert row.break_even_return_chance == stored.store_s / stored.saved_s
            else:
                assert row.break_even_return_chance is None
            if verdict.split is None:
                assert row.split_saves_s is None
            else:
                assert row.split_recompute_tokens == verdict.split.recompute_tokens
                assert row.split_saves_s == pytest.approx(
                    min(verdict.ttft_reload_s, verdict.ttft_recompute_s) - verdict.split.ttft_s
                )


@pytest.mark.parametrize("machine", [H100, GB300], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "name", ["Llama-3.1-8B-Instruct", "gemma-3-27b-it", "DeepSeek-V3", "Qwen3-Next-80B-A3B-Instruct"]
)
def test_the_flips_are_those_of_the_dense_scan(machine, name):
    arch = config(name)
    made = plan(arch, machine, prefixes=[1024], block_size=256)
    for tier in made.tiers:
        verdict = decide(arch, machine, prefix=1024, suffix=64, tier=tier.tier, block_size=256)
        assert list(tier.crossings) == verdict.crossings
        assert tier.crossover_tokens == verdict.crossover_tokens


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-3, 1.0), st.floats(0, 0.05), st.floats(1e9, 1e10))
def test_the_flips_of_any_flat_machine_are_those_of_the_dense_scan(gb_per_s, overhead_s, flops_per_s):
    rate = Curve(((1.0, flops_per_s),))
    link = Link(Curve(((1.0, gb_per_s),)), per_request_s=overhead_s)
    machine = Machine("flat", Prefill(0.0, rate, rate, "tiny"), {"host": {"load": link}})
    tier = plan(TINY, machine, prefixes=[64]).tier("host")
    assert list(tier.crossings) == decide(TINY, machine, prefix=64, suffix=64).crossings
    assert tier.rows[0].store_s is None, "this machine does not know how fast it stores"


def test_load_waits_for_the_longer_part_of_each_way():
    wait = wait_quantile(0.6, 95)
    made = plan(LLAMA, H100, prefixes=[2000, 32_000], suffix=2000, load=0.6, percentile=95)
    for tier in made.tiers:
        for row in tier.rows:
            verdict = decide(LLAMA, H100, prefix=row.prefix_tokens, suffix=2000, tier=tier.tier)
            longer = max(verdict.reload_s, verdict.suffix_s)
            assert row.loaded_reload_s == pytest.approx(verdict.ttft_reload_s + wait * longer)
            assert row.loaded_recompute_s == pytest.approx(verdict.ttft_recompute_s * (1 + wait))
            assert row.choice == ("reload" if row.loaded_reload_s < row.loaded_recompute_s else "recompute")


def test_load_moves_the_flip():
    # The suffix's prefill comes on top of a reload, but waits behind it: load multiplies only the longer part.
    idle = plan(LLAMA, H100, prefixes=[1000], suffix=4000).tier("tcp")
    busy = plan(LLAMA, H100, prefixes=[1000], suffix=4000, load=0.9).tier("tcp")
    assert busy.crossover_tokens is not None
    assert idle.crossover_tokens is not None
    assert busy.crossover_tokens < idle.crossover_tokens


def test_the_crossover_is_the_last_of_several_flips():
    # Under load, short prefixes reload while the suffix is what waits; then the disk is slower, and at last faster.
    made = plan(LLAMA, H100, prefixes=[1000], load=0.7)
    tier = made.tier("disk")
    assert [flip.winner_above for flip in tier.crossings] == ["recompute", "reload"]
    assert tier.crossover_tokens == tier.crossings[-1].tokens
    for flip in tier.crossings:
        before, after = plan(LLAMA, H100, prefixes=[flip.tokens - 16, flip.tokens], load=0.7).tier("disk").rows
        assert before.choice != after.choice == flip.winner_above


@pytest.mark.parametrize("load", [0.0, 0.7])
def test_the_longest_prefix_in_time_is_in_time_and_the_next_block_is_not(load):
    limit_s = 0.2
    made = plan(LLAMA, H100, prefixes=[1000], load=load, ttft_slo_s=limit_s)

    def at(prefix: int) -> dict[str, tuple[float, float]]:
        again = plan(LLAMA, H100, prefixes=[prefix], load=load)
        return {tier.tier: (tier.rows[0].loaded_reload_s, tier.rows[0].loaded_recompute_s) for tier in again.tiers}

    for tier in made.tiers:
        assert at(tier.slo_tokens)[tier.tier][0] <= limit_s < at(tier.slo_tokens + 16)[tier.tier][0]
    assert at(made.recompute_slo_tokens)["host"][1] <= limit_s < at(made.recompute_slo_tokens + 16)["host"][1]


def test_a_limit_that_nothing_meets_is_met_by_no_prefix():
    made = plan(LLAMA, H100, prefixes=[1000], ttft_slo_s=1e-6)
    assert made.recompute_slo_tokens == 0
    assert {tier.slo_tokens for tier in made.tiers} == {0}
    assert plan(LLAMA, H100, prefixes=[1000]).recompute_slo_tokens is None, "no limit, no answer"


# Splits of models that are not plain ----------------------------------------------------------------------------------


def test_a_model_with_recurrent_states_has_no_split():
    # Its state is reloaded whole and already contains the head.
    made = plan(config("Qwen3-Next-80B-A3B-Instruct"), H100, prefixes=[32_000])
    assert all(row.split_recompute_tokens is None for tier in made.tiers for row in tier.rows)


def test_a_split_loads_its_windows_whole():
    arch = config("gemma-3-27b-it")
    verdict = decide(arch, H100, prefix=32_000, suffix=64, tier="tcp")
    split, link = verdict.split, H100.link("tcp")
    tail = kv_bytes(arch, split.reload_tokens, block_size=16)
    assert tail > kv_bytes(arch, 32_000, block_size=16) - kv_bytes(arch, split.recompute_tokens, block_size=16)
    rest_s = H100.prefill_s(arch, 32_000, 32_064)
    assert split.ttft_s - rest_s >= link.transfer_s(tail, split.reload_tokens // 16, 62) * (1 - 1e-9)


# Edges ----------------------------------------------------------------------------------------------------------------


def test_a_plan_is_plain_json():
    made = plan(LLAMA, H100, prefixes=[1, 1000], load=0.5, ttft_slo_s=0.2)
    data = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert data["tiers"][0]["rows"][0]["choice"] == "recompute", "one token has no whole block"
    assert len(data["curve_tokens"]) == len(data["recompute_curve_s"]) == len(data["tiers"][0]["curve_s"])
    assert data["extrapolated_from"] is None
    assert plan(TINY, H100, prefixes=[64]).extrapolated_from == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefixes": []}, "at least one"),
        ({"prefixes": [0]}, "at least 1 token"),
        ({"prefixes": [131_072]}, "beyond the 131072 positions"),
        ({"load": 1.0}, "load is 1"),
        ({"percentile": 100.0}, "percentile is 100"),
        ({"ttft_slo_s": 0.0}, "limit is 0.0"),
        ({"kv_dtype": "bf17"}, "unknown KV dtype 'bf17'"),
        ({"tp": 0}, "tp is 0; expected an integer of at least 1"),
        ({"block_size": 0}, "block_size is 0; expected an integer of at least 1"),
    ],
)
def test_bad_input_is_refused_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(LLAMA, H100, **{"prefixes": [1000], **changes})


def test_an_unknown_tier_names_the_known_ones():
    with pytest.raises(ValueError, match="no tier 'tape'; it has host, disk"):
        plan(LLAMA, H100, prefixes=[1000]).tier("tape")
