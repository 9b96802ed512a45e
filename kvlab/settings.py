"""From a plan to the options of real servers: exact names and values, and where each name was seen.

Knows option names of vLLM, LMCache, SGLang and llm-d. A knob that a system does not have is listed as such, with what
to do instead; none is invented. Thresholds are rounded up to whole blocks, chunks or pages of that system.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.plan import Plan, Row, TierPlan
from kvlab.units import format_bytes

__all__ = ["SYSTEMS", "Setting", "settings"]

VLLM = "vLLM 0.33.0"
LMCACHE = "LMCache 0.5.6"
SGLANG = "SGLang 0.5.23"
SGLANG_DTYPE = "SGLang at 0116c606, srt/arg_groups/fields/model.py"
LLMD_P2P = "llm-d-router, p2psource/README.md at 34698b8a"
LLMD_COST = "llm-d-router, p2psource/README.md, a later revision"
LLMD_SELECTIVE = "llm-d-router, selectivekv/README.md at 248dbdf5 (alpha; --allow-experimental-plugins)"
LLMD_PD = "llm-d-router, prefix_based_pd_decider.go at 00ae0814"

# vLLM's words for kvlab's KV dtypes (vllm/config/cache.py, CacheDType). Its int8 and int4 add a scale per token and
# head, which kvlab's int8 does not count, and GGML's formats are not among them.
_VLLM_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8", "nvfp4": "nvfp4"}
# SGLang's; it has no word for fp16, which "auto" means where the model is in fp16.
_SGLANG_DTYPES = {"bf16": "bfloat16", "fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


@dataclass(frozen=True)
class Setting:
    """One option. `value` None: leave it out, or there is no such option; `note` says which and what to do instead."""

    option: str
    value: str | int | float | bool | None
    seen: str
    note: str


def settings(plan: Plan, system: str, conversations: int = 16) -> tuple[Setting, ...]:
    """What the plan means for "vllm", "lmcache", "sglang" or "llm-d", with room for `conversations` idle ones.

    Room is for conversations of the plan's longest prefix. Host options follow from the tier "host" (or the plan's
    first), storage options from "disk" (or the first network), peer options from the plan's first network tier.
    Raises ValueError for another system or fewer than one conversation.
    """
    if system not in _SYSTEMS:
        raise ValueError(f"no settings for {system!r}; known systems: {', '.join(_SYSTEMS)}")
    if conversations < 1:
        raise ValueError(f"conversations is {conversations}; expected at least 1")
    return tuple(_SYSTEMS[system](plan, conversations))


def _vllm(plan: Plan, conversations: int) -> list[Setting]:
    host, size = _host(plan), plan.sizes[-1]
    found = [
        Setting("--block-size", plan.block_size, f"{VLLM}, vllm/config/cache.py", "tokens; the plan's block"),
        _dtype(plan, _VLLM_DTYPES, f"{VLLM}, vllm/config/cache.py"),
    ]
    seen = f"{VLLM}, vllm/config/cache.py and vllm/engine/arg_utils.py"
    if not _ever(host):
        found.append(Setting("--kv-offloading-size", None, seen, f"leave it out: {_never(host)}"))
        return found
    copies = ""
    if plan.distinct_share < 1:
        copies = "; replicated heads or latents are counted on every rank, as vLLM stores them by default"
    found += [
        Setting(
            "--kv-offloading-size",
            _round_up(size.total_bytes * conversations / 2**30),
            seen,
            f"GiB, sum over ranks: {_room(conversations, size.prefix_tokens, size.total_bytes)}{copies}",
        ),
        Setting("--kv-offloading-backend", "native", f"{VLLM}, vllm/config/cache.py", "the default"),
    ]
    threshold = _threshold(host, plan.block_size)
    where = f"{VLLM}, kv_connector/v1/offloading/scheduler.py"
    param = "kv_transfer_params.max_load_tokens"
    if threshold:
        found.append(
            Setting(
                param, 0, where, f"per request: send 0 with cached prefixes below {threshold:,} tokens, else omit it"
            )
        )
    else:
        found.append(Setting(param, None, where, "leave it out: reload wins at every length"))
    instead = "hits of less than one block are not loaded, all others are"
    if threshold:
        instead += "; decide in the client or router (llm-d: selective-kv-policy) and send max_load_tokens"
    found.append(Setting("a server-wide least hit to load", None, VLLM, f"no such option: {instead}"))
    return found


def _lmcache(plan: Plan, conversations: int) -> list[Setting]:
    host, size = _host(plan), plan.sizes[-1]
    chunk = math.lcm(256, plan.block_size)
    config, adapter = f"{LMCACHE}, lmcache/v1/config.py", "integration/vllm/vllm_v1_adapter.py"
    found = [Setting("chunk_size", chunk, config, "tokens; the default, in whole blocks of the engine")]
    tiers = [host]
    if _ever(host):
        room = _room(conversations, size.prefix_tokens, size.bytes_per_rank)
        if plan.distinct_share < 1:
            room += "; MLA latents are stored by the first rank alone (save_only_first_rank)"
        found += [
            Setting("local_cpu", True, config, "the default"),
            Setting(
                "max_local_cpu_size",
                _round_up(size.bytes_per_rank * conversations / 2**30),
                f"{config}, cache_engine.py",
                f"GiB (its documents say GB, its code multiplies by 2^30), for each worker: {room}",
            ),
        ]
    else:
        found.append(Setting("local_cpu", False, config, _never(host)))
    disk = _named(plan, "disk")
    if disk is not None and disk is not host:
        seen = f"{config}, storage_backend/local_disk_backend.py"
        if _ever(disk):
            tiers.append(disk)
            value = _round_up(size.bytes_per_rank * conversations / 2**30)
            found.append(Setting("max_local_disk_size", value, seen, "GiB; set local_disk to a path as well"))
        else:
            found.append(Setting("local_disk", None, seen, f"leave it out: {_never(disk)}"))
    used = [tier for tier in tiers if _ever(tier)]
    least = [_threshold(tier, chunk) for tier in used]
    note = "tokens beyond the engine's own hit, in whole chunks; less is not loaded, equal is; in-process adapter only"
    if len(set(least)) > 1:
        note += "; one number for all tiers, and " + ", ".join(
            f"{tier.tier} alone would ask for {tokens:,}" for tier, tokens in zip(used, least, strict=True)
        )
    if used:
        found += [
            Setting("min_retrieve_tokens", max(least), f"{config}, {adapter}", note),
            Setting(
                "min_retrieve_tokens under LMCacheMPConnector",
                None,
                f"{LMCACHE}, vllm_multi_process_adapter.py",
                "no such option: only the in-process adapter reads it; decide in the router",
            ),
        ]
    return found


def _sglang(plan: Plan, conversations: int) -> list[Setting]:
    host, size = _host(plan), plan.sizes[-1]
    memory = f"{SGLANG}, srt/arg_groups/fields/memory.py"
    found = [
        Setting("--page-size", plan.block_size, memory, "tokens; the plan's block (the default is 1)"),
        _dtype(plan, _SGLANG_DTYPES, SGLANG_DTYPE),
    ]
    if not _ever(host):
        found.append(Setting("--enable-hierarchical-cache", None, memory, f"leave it off: {_never(host)}"))
        return found
    room = _room(conversations, size.prefix_tokens, size.bytes_per_rank)
    found += [
        Setting("--enable-hierarchical-cache", True, memory, "a flag without a value"),
        Setting(
            "--hicache-size",
            math.ceil(size.bytes_per_rank * conversations / 1e9),
            f"{memory}, mem_cache/pool_host/base.py",
            f"1e9 bytes, for each rank: {room}",
        ),
        Setting("--hicache-ratio", None, memory, "leave it out: --hicache-size overrides it"),
    ]
    threshold = _threshold(host, plan.block_size)
    note = "no such option: 10 tokens, hard-coded"
    if threshold > 10:
        note += f"; host hits of 10 to {threshold - 1:,} tokens are loaded although computing them is faster."
        note += " Where those prevail, leave the hierarchical cache off"
    found.append(Setting("load_back_threshold", None, f"{SGLANG}, mem_cache/unified_radix_cache.py", note))
    storage = _named(plan, "disk") or _network(plan)
    if storage is None or storage is host:
        return found
    if not _ever(storage):
        found.append(Setting("--hicache-storage-backend", None, memory, f"leave it out: {_never(storage)}"))
        return found
    least = max(_threshold(storage, plan.block_size), plan.block_size)
    found.append(
        Setting(
            "--hicache-storage-backend-extra-config",
            json.dumps({"prefetch_threshold": least}),
            f"{SGLANG}, managers/cache_controller.py",
            f"tokens, at least a page; from the tier {storage.tier}, for storage to host only (the default is 256)",
        )
    )
    return found


def _llm_d(plan: Plan, conversations: int) -> list[Setting]:
    del conversations  # the router stores nothing
    host, peer = _host(plan), _network(plan)
    policy, pull = "selective-kv-policy", "p2p-source-producer"
    threshold = _threshold(host, plan.block_size)
    load = "threshold" if threshold else "preserve" if _ever(host) else "disable"
    found = [Setting(f"{policy}.loadPolicy", load, LLMD_SELECTIVE, f"from the tier {host.tier}")]
    if threshold:
        note = "tokens, inclusive; less is computed again (it sends vLLM's max_load_tokens 0)"
        found.append(Setting(f"{policy}.minExternalReusableTokens", threshold, LLMD_SELECTIVE, note))
    if peer is None:
        found.append(Setting(pull, None, LLMD_P2P, "the plan has no network tier: plan with a machine that has one"))
    elif not _ever(peer):
        found.append(Setting(pull, None, LLMD_P2P, f"leave the plugin out: {_never(peer)}"))
    else:
        least = max(1, _threshold(peer, plan.block_size))
        found.append(
            Setting(f"{pull}.minCachedTokenDelta", least, LLMD_P2P, f"tokens, inclusive; from the tier {peer.tier}")
        )
        found += _cost_model(f"{pull}.costModel", peer.rows, plan.suffix_tokens)
    found.append(
        Setting(
            "prefix-based-pd-decider.nonCachedTokens",
            None,
            LLMD_PD,
            "does not follow from this plan: it weighs a prefill's delay to active decodes; 0, the default, keeps"
            " disaggregation off",
        )
    )
    return found


def _cost_model(name: str, rows: tuple[Row, ...], suffix_tokens: int) -> list[Setting]:
    first, last = rows[0], rows[-1]
    per_token_s, fixed_s = last.transfer_s / last.prefix_tokens, 0.0
    if len(rows) > 1:
        per_token_s = (last.transfer_s - first.transfer_s) / (last.prefix_tokens - first.prefix_tokens)
        fixed_s = max(0.0, last.transfer_s - per_token_s * last.prefix_tokens)
    prefill_s = last.recompute_s / (last.prefix_tokens + suffix_tokens)
    if per_token_s >= prefill_s:
        note = "leave it out: it needs a transfer that is faster a token than a prefill"
        return [Setting(name, None, LLMD_COST, note)]
    mean = f"mean up to {last.prefix_tokens:,} tokens; shorter prompts cost less a token"
    return [
        Setting(f"{name}.prefillMicrosecondsPerToken", _three(prefill_s * 1e6), LLMD_COST, mean),
        Setting(f"{name}.transferMicrosecondsPerToken", _three(per_token_s * 1e6), LLMD_COST, "the link's bytes only"),
        Setting(
            f"{name}.transferFixedMs",
            _three(fixed_s * 1e3),
            LLMD_COST,
            "the link's own overhead; measure what the engine adds (llm-d's example has 15 ms)",
        ),
    ]


_SYSTEMS: dict[str, Callable[[Plan, int], list[Setting]]] = {
    "vllm": _vllm,
    "lmcache": _lmcache,
    "sglang": _sglang,
    "llm-d": _llm_d,
}
SYSTEMS = tuple(_SYSTEMS)


def _dtype(plan: Plan, words: dict[str, str], seen: str) -> Setting:
    word = words.get(plan.kv_dtype)
    note = "the plan's KV dtype" if word else f"no value means {plan.kv_dtype}: plan with another --kv-dtype"
    return Setting("--kv-cache-dtype", word, seen, note)


def _named(plan: Plan, name: str) -> TierPlan | None:
    return next((tier for tier in plan.tiers if tier.tier == name), None)


def _host(plan: Plan) -> TierPlan:
    return _named(plan, "host") or plan.tiers[0]


def _network(plan: Plan) -> TierPlan | None:
    return next((tier for tier in plan.tiers if tier.tier.startswith(("net", "tcp"))), None)


def _ever(tier: TierPlan) -> bool:
    """Whether a reload from this tier wins from some length on."""
    return tier.crossover_tokens is not None


def _never(tier: TierPlan) -> str:
    return f"computing again is faster than the tier {tier.tier} at long prefixes"


def _threshold(tier: TierPlan, unit: int) -> int:
    """The length from which reload wins for good, up to whole units; 0: at every length, or at none."""
    return -(-(tier.crossover_tokens or 0) // unit) * unit


def _room(conversations: int, tokens: int, size_bytes: int) -> str:
    return f"{conversations} idle conversations of {tokens:,} tokens, {format_bytes(size_bytes)} each"


def _round_up(gib: float) -> float:
    """Up to a tenth: what was asked for must fit."""
    return math.ceil(gib * 10) / 10


def _three(value: float) -> float:
    return float(f"{value:.3g}")
