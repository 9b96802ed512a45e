"""Layers that only look back so far: the simulator bills them alike wherever it bills, and as the verdict does."""

import pytest

from kvlab import policies
from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.machine import Machine
from kvlab.policy import Option, Situation
from kvlab.simulate import BilledTier, BillingExecutor
from kvlab.simulate.judging import Judge, Oracle

H100 = Machine.load("h100-sxm-pcie5")
# google/gemma-3-12b-it's config.json, as far as it matters: five layers of six see 1,024 tokens.
GEMMA = ModelArch.from_hf(
    {
        "model_type": "gemma3_text", "hidden_size": 3840, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 15360, "vocab_size": 262208,
        "max_position_embeddings": 131072, "sliding_window": 1024, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "rope_theta": 1e6,
        "rope_local_base_freq": 10000,
    }
)  # fmt: skip
TOKENS, BLOCKS = 32768, 2048
BYTES = kv_bytes(GEMMA, TOKENS, "bf16", 1, 16)
NAMES = [b"%d" % n for n in range(BLOCKS)]


def billed():
    tier = BilledTier("disk", 10_000, H100.link("disk"), H100.link("disk", "store"), 48)
    return tier, BillingExecutor(GEMMA, H100, "bf16", pool_blocks=4000, block_size=16, tiers=[tier], groups=4)


def test_a_window_is_stored_loaded_and_queued_with_as_many_bytes_as_the_verdict_counts():
    tier, executor = billed()
    assert executor.block_bytes * BLOCKS > 5 * BYTES
    executor.store(NAMES, range(BLOCKS), "")
    assert tier.store_clock.moved_bytes == BYTES
    assert tier.store_clock.busy_s == H100.link("disk", "store").transfer_s(BYTES, BLOCKS, 48)
    executor.wait_until(tier.store_clock.free_s)
    loading = executor.load("disk", NAMES, range(BLOCKS), "")
    assert tier.load_clock.moved_bytes == executor.remaining_bytes(loading) == BYTES


def test_an_oracle_and_a_verdict_on_the_true_machine_price_a_window_alike():
    tier, executor = billed()
    tier.put(NAMES, 0.0)
    oracle = Oracle(executor)
    situation = Situation((0, 1), GEMMA, "bf16", 16, TOKENS + 64, 0, (Option("disk", TOKENS),), groups=4)
    for split in (False, True):
        decision = policies.Calibrated(H100, allow_split=split).decide(situation)
        assert decision.choice == ("split" if split else "reload")
        predicted_s = decision.ttft_split_s if split else decision.ttft_reload_s
        assert oracle.cost_s(decision) == pytest.approx(predicted_s, rel=1e-9)
    judge = Judge(policies.Recompute(), oracle)
    best = oracle.decide(situation)
    judge.decide(situation)
    computed_s = H100.prefill_s(GEMMA, 0, TOKENS + 64)
    assert computed_s > best.ttft_reload_s
    assert judge.regret_s == pytest.approx(computed_s - min(best.ttft_reload_s, best.ttft_split_s or 9.0), rel=1e-9)
