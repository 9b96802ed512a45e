"""Settings follow from the plan, in each system's own units and steps; names that were not seen do not occur."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.arch import ModelArch
from kvlab.machine import Machine
from kvlab.plan import plan
from kvlab.settings import SYSTEMS, settings

LLAMA = ModelArch.preset("llama-3.1-8b")
H100, GB300 = Machine.load("h100-sxm-pcie5"), Machine.load("gb300-c2c")
PLAN = plan(LLAMA, H100, prefixes=[1000, 32_000], tp=2)

# Every option that may be set, with the release or document in which its name was read.
OPTIONS = {
    "vllm": {
        "--block-size": "vLLM 0.33.0",
        "--kv-cache-dtype": "vLLM 0.33.0",
        "--kv-offloading-size": "vLLM 0.33.0",
        "--kv-offloading-backend": "vLLM 0.33.0",
        "kv_transfer_params.max_load_tokens": "vLLM 0.33.0",
    },
    "lmcache": {
        "chunk_size": "LMCache 0.5.6",
        "local_cpu": "LMCache 0.5.6",
        "max_local_cpu_size": "LMCache 0.5.6",
        "max_local_disk_size": "LMCache 0.5.6",
        "min_retrieve_tokens": "LMCache 0.5.6",
    },
    "sglang": {
        "--page-size": "SGLang 0.5.23",
        "--kv-cache-dtype": "SGLang at 0116c606",
        "--enable-hierarchical-cache": "SGLang 0.5.23",
        "--hicache-size": "SGLang 0.5.23",
        "--hicache-storage-backend-extra-config": "SGLang 0.5.23",
    },
    "llm-d": {
        "selective-kv-policy.loadPolicy": "selectivekv/README.md",
        "selective-kv-policy.minExternalReusableTokens": "selectivekv/README.md",
        "p2p-source-producer.minCachedTokenDelta": "p2psource/README.md",
        "p2p-source-producer.costModel.prefillMicrosecondsPerToken": "p2psource/README.md",
        "p2p-source-producer.costModel.transferMicrosecondsPerToken": "p2psource/README.md",
        "p2p-source-producer.costModel.transferFixedMs": "p2psource/README.md",
    },
}
# What people look for and no release that was read has: listed without a value, with what to do instead.
NO_SUCH_OPTION = {
    "vllm": "a server-wide least hit to load",
    "lmcache": "min_retrieve_tokens under LMCacheMPConnector",
    "sglang": "load_back_threshold",
}


def with_flips(made, **tokens):
    """The plan with other flips: tier name (with _ for -) to tokens (0: reload always wins; None: never)."""
    given = {name.replace("_", "-"): at for name, at in tokens.items()}
    tiers = tuple(replace(tier, crossover_tokens=given.get(tier.tier, tier.crossover_tokens)) for tier in made.tiers)
    return replace(made, tiers=tiers)


def values(made, system, conversations=16):
    return {setting.option: setting.value for setting in settings(made, system, conversations)}


flips = st.one_of(st.none(), st.just(0), st.integers(1, 100_000))


@given(flips, flips, flips, st.sampled_from(SYSTEMS), st.sampled_from([8, 16, 64]))
def test_no_option_is_invented_and_each_says_where_it_was_seen(host, disk, network, system, block):
    made = with_flips(replace(PLAN, block_size=block), host=host, disk=disk, net_100g=network)
    for setting in settings(made, system):
        if setting.value is not None:
            assert setting.option in OPTIONS[system]
            assert OPTIONS[system][setting.option] in setting.seen
        else:
            assert setting.seen
            assert any(
                words in setting.note for words in ("leave", "no such option", "does not follow", "has no network")
            ), setting


@pytest.mark.parametrize("system", NO_SUCH_OPTION)
def test_a_knob_that_does_not_exist_is_refused(system):
    made = with_flips(PLAN, host=1000)
    setting = next(setting for setting in settings(made, system) if setting.option == NO_SUCH_OPTION[system])
    assert setting.value is None
    assert setting.note.startswith("no such option")


@given(st.integers(1, 100_000), st.sampled_from([1, 16, 64]))
def test_thresholds_are_whole_blocks_chunks_and_pages_rounded_up(tokens, block):
    made = with_flips(replace(PLAN, block_size=block), host=tokens, disk=tokens, net_100g=tokens)

    def is_up(value, unit):
        return value % unit == 0 and tokens <= value < tokens + unit

    assert is_up(values(made, "lmcache")["min_retrieve_tokens"], 256)
    storage = json.loads(values(made, "sglang")["--hicache-storage-backend-extra-config"])
    assert is_up(storage["prefetch_threshold"], block)
    router = values(made, "llm-d")
    assert router["selective-kv-policy.loadPolicy"] == "threshold"
    assert is_up(router["selective-kv-policy.minExternalReusableTokens"], block)
    assert is_up(router["p2p-source-producer.minCachedTokenDelta"], block)
    request = next(s for s in settings(made, "vllm") if s.option.endswith("max_load_tokens"))
    assert request.value == 0
    assert f"below {-(-tokens // block) * block:,} tokens" in request.note


def test_lmcache_s_one_number_is_the_larger_of_its_tiers_and_says_so():
    made = with_flips(PLAN, host=300, disk=5000)
    setting = next(s for s in settings(made, "lmcache") if s.option == "min_retrieve_tokens")
    assert setting.value == 5120
    assert "host alone would ask for 512" in setting.note


def test_a_chunk_holds_whole_blocks_of_the_engine():
    assert values(PLAN, "lmcache")["chunk_size"] == 256
    assert values(replace(PLAN, block_size=48), "lmcache")["chunk_size"] == 768


@given(st.integers(1, 500))
def test_room_is_in_each_system_s_own_unit_and_never_short(conversations):
    size = PLAN.sizes[-1]
    total, rank = conversations * size.total_bytes, conversations * size.bytes_per_rank
    assert total == 2 * rank
    for system, option, unit, needed in (
        ("vllm", "--kv-offloading-size", 2**30, total),  # GiB over all ranks
        ("lmcache", "max_local_cpu_size", 2**30, rank),  # GiB a worker
        ("lmcache", "max_local_disk_size", 2**30, rank),
        ("sglang", "--hicache-size", 10**9, rank),  # 1e9 bytes a rank
    ):
        value = values(PLAN, system, conversations)[option]
        assert needed <= value * unit * (1 + 1e-9)
        assert value * unit <= needed + unit


def test_a_tier_that_never_wins_is_left_out():
    made = with_flips(PLAN, host=None, disk=None, net_100g=None)
    assert values(made, "vllm")["--kv-offloading-size"] is None
    assert values(made, "lmcache")["local_cpu"] is False
    assert values(made, "lmcache")["local_disk"] is None
    assert "min_retrieve_tokens" not in values(made, "lmcache")
    assert values(made, "sglang")["--enable-hierarchical-cache"] is None
    assert values(made, "llm-d")["selective-kv-policy.loadPolicy"] == "disable"
    assert values(made, "llm-d")["p2p-source-producer"] is None
    # The host alone may win: storage behind it is still left out.
    assert values(with_flips(made, host=0), "sglang")["--hicache-storage-backend"] is None


def test_a_tier_that_always_wins_needs_no_threshold():
    made = with_flips(PLAN, host=0, disk=0, net_100g=0)
    assert values(made, "vllm")["kv_transfer_params.max_load_tokens"] is None
    assert values(made, "lmcache")["min_retrieve_tokens"] == 0
    assert values(made, "llm-d")["selective-kv-policy.loadPolicy"] == "preserve"
    assert values(made, "llm-d")["p2p-source-producer.minCachedTokenDelta"] == 1, "at least 1 is accepted"


def test_sglang_s_fixed_threshold_is_named_with_what_it_costs():
    notes = {at: settings(with_flips(PLAN, host=at), "sglang") for at in (0, 4096)}
    fixed = {at: next(s.note for s in found if s.option == "load_back_threshold") for at, found in notes.items()}
    assert "10 tokens, hard-coded" in fixed[0]
    assert "10 to 4,095 tokens" in fixed[4096]
    assert "tokens are loaded" not in fixed[0]


def test_the_cost_model_is_the_plan_s_rates():
    found = values(plan(LLAMA, H100, prefixes=[1000, 32_000]), "llm-d")
    # 131,072 bytes a token over 12.1 GB/s; 32,064 tokens in the plan's recompute time.
    assert found["p2p-source-producer.costModel.transferMicrosecondsPerToken"] == pytest.approx(
        131072 / 12.1e3, rel=0.01
    )
    recompute_s = H100.prefill_s(LLAMA, 0, 32_064)
    prefill = found["p2p-source-producer.costModel.prefillMicrosecondsPerToken"]
    assert prefill == pytest.approx(recompute_s / 32_064 * 1e6, rel=0.01)
    fast = plan(LLAMA, GB300, prefixes=[8000, 120_000], suffix=64)
    slow = values(with_flips(replace(fast, tiers=fast.tiers[-1:]), tcp=1000), "llm-d")
    assert slow["p2p-source-producer.costModel"] is None, "a transfer that is dearer a token is refused by its rule"


def test_a_dtype_that_vllm_does_not_have_is_not_renamed():
    assert values(plan(LLAMA, H100, prefixes=[1000], kv_dtype="fp8"), "vllm")["--kv-cache-dtype"] == "fp8"
    setting = settings(plan(LLAMA, H100, prefixes=[1000], kv_dtype="q8_0"), "vllm")[1]
    assert setting.value is None
    assert "q8_0" in setting.note


def test_sglang_is_told_the_dtype_that_its_room_was_counted_in():
    for kv_dtype, value in (("bf16", "bfloat16"), ("fp8", "fp8_e4m3"), ("nvfp4", "nvfp4"), ("q8_0", None)):
        setting = settings(plan(LLAMA, H100, prefixes=[1000], kv_dtype=kv_dtype), "sglang")[1]
        assert (setting.option, setting.value) == ("--kv-cache-dtype", value)
    assert "q8_0" in setting.note


def test_unknown_systems_and_no_conversations_are_refused():
    with pytest.raises(ValueError, match="no settings for 'tgi'; known systems: vllm, lmcache, sglang, llm-d"):
        settings(PLAN, "tgi")
    with pytest.raises(ValueError, match="conversations is 0"):
        settings(PLAN, "vllm", 0)
