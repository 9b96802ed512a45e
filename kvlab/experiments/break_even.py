"""The slowest link whose reload still beats this machine's prefill, and the proof: links of chosen speeds, tried.

A prefix's bytes ÷ the seconds that having them saves is a speed; a slower link loses. Knows the rig and clocks. Returns
plain records; does not print or draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvlab.arithmetic import kv_bytes, prefill_flops
from kvlab.experiments.rig import Rig
from kvlab.linear import linear
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES
from kvlab.records import machine_facts, median, now_utc
from kvlab.tiers import HostTier, LinkTier

__all__ = ["SCHEMA", "arithmetic_gb_per_s", "matmul_flops_per_s", "measure", "try_links"]

SCHEMA = "kvlab.break_even/1"
Progress = Callable[[str], None]


# Tokens of one product: some milliseconds on a CPU, and on a GPU more than its launch.
_ROWS = {"cpu": 512, "cuda": 16384}


def matmul_flops_per_s(model: Model) -> float:
    """FLOP/s of one of the model's own matrix products on many tokens: the best of twenty."""
    weight, rows = model.weights.layers[0].gate_up, _ROWS[model.device.type]
    x = torch.ones(rows, weight.shape[1], dtype=TORCH_DTYPES[model.dtype], device=model.device)
    fastest_s = float("inf")
    for _ in range(20):  # the first ones warm up; they are never the fastest
        begin = time.perf_counter()
        float(linear(x, weight)[0, 0])  # a value on the host: nothing is left running
        fastest_s = min(fastest_s, time.perf_counter() - begin)
    return 2 * rows * weight.numel() / fastest_s


def arithmetic_gb_per_s(model: Model, prefix: int, suffix: int = 16) -> float:
    """The break-even speed without running the model: bytes of `prefix` ÷ (FLOPs that they save ÷ FLOP/s of a matmul).

    It takes every FLOP to be as fast as in a large matrix product, so it is too high: real prefill is slower.
    """
    saved = prefill_flops(model.arch, 0, prefix + suffix) - prefill_flops(model.arch, prefix, prefix + suffix)
    return kv_bytes(model.arch, prefix, model.dtype) / (saved / matmul_flops_per_s(model)) / 1e9


def measure(
    model: Model,
    tokens: Sequence[int],
    lengths: Sequence[int] = (64, 128, 256, 512, 1024),
    *,
    suffix: int = 16,
    block_size: int = 16,
    rounds: int = 3,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Time to first token of `suffix` tokens behind each prefix of `tokens`, in interleaved rounds, by three ways.

    "recompute" computes all, "resident" finds the prefix in the pool, "host" reloads it from host RAM. What is saved is
    recompute − resident; `break_even_gb_per_s` = bytes ÷ that (None where nothing was saved). Lengths are whole blocks.
    Raises ValueError for other lengths or too short a text.
    """
    if any(length < 1 or length % block_size for length in lengths):
        raise ValueError(f"lengths {list(lengths)} must be multiples of the block of {block_size} tokens")
    if max(lengths) + suffix > len(tokens):
        raise ValueError(f"{max(lengths)} + {suffix} tokens are needed; the text has {len(tokens)}")
    samples: dict[str, list[list[float]]] = {way: [[] for _ in lengths] for way in ("recompute", "resident", "host")}
    with Rig(model, block_size=block_size, max_tokens=max(lengths) + suffix) as rig:
        tier = rig.open(HostTier(2**32))
        table = rig.table(max(lengths) + suffix)
        rig.prefill(tokens[: max(lengths)], table)  # warms up, and is the cache that never leaves
        rig.offload(tier, tokens[: max(lengths)], table)
        for done in range(rounds):
            progress(f"round {done + 1} of {rounds}")
            for i, length in enumerate(lengths):
                whole = tokens[: length + suffix]
                # Behind a resident prefix the text's own next tokens store the same keys again: the cache stays whole.
                samples["recompute"][i].append(rig.recompute(whole).ttft_s)
                samples["host"][i].append(rig.resume(tier, whole, length).ttft_s)
                samples["resident"][i].append(rig.prefill(whole[length:], table, length).ttft_s)
    seconds = {way: [median(times) for times in by_length] for way, by_length in samples.items()}
    sizes = [kv_bytes(model.arch, length, model.dtype) for length in lengths]
    saved_s = [a - b for a, b in zip(seconds["recompute"], seconds["resident"], strict=True)]
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "parameters": {"suffix": suffix, "block_size": block_size, "rounds": rounds},
        "model": {"name": model.arch.name, "dtype": model.dtype, "source": model.source},
        "tokens": list(lengths),
        "kv_bytes": sizes,
        **{f"{way}_s": values for way, values in seconds.items()},
        "break_even_gb_per_s": [n / s / 1e9 if s > 0 else None for n, s in zip(sizes, saved_s, strict=True)],
        "samples_s": samples,
    }


def try_links(
    model: Model,
    tokens: Sequence[int],
    prefix: int,
    links_gb_per_s: Sequence[float],
    *,
    suffix: int = 16,
    block_size: int = 16,
) -> dict[str, Any]:
    """Reload `prefix` tokens over emulated links of these speeds, one after the other, and recompute them once.

    Real bytes come from host RAM into other blocks; then it waits until such a link would have delivered them. Returns
    {"gb_per_s", "reload_s", "recompute_s", "same_first_token"}; the last says whether all ways chose the same token.
    """
    whole = tokens[: prefix + suffix]
    with Rig(model, block_size=block_size, max_tokens=len(whole)) as rig:
        host, table = HostTier(2**32), rig.table(len(whole))
        recomputed = rig.prefill(whole, table)
        rig.offload(rig.open(host), whole[:prefix], table)
        # One stored copy behind every link: storing over each of them would take as long as the reload.
        resumed = [rig.resume(rig.open(LinkTier(host, speed)), whole, prefix) for speed in links_gb_per_s]
    first = int(recomputed.logits.argmax())
    return {
        "gb_per_s": list(links_gb_per_s),
        "reload_s": [one.ttft_s for one in resumed],
        "recompute_s": recomputed.ttft_s,
        "same_first_token": all(int(one.logits.argmax()) == first for one in resumed),
    }
