"""Greedy decoding without and with a KV cache: the same text, another time for each token.

Knows a model and its pool. Returns a plain record; does not print or draw.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kvlab.arithmetic import kv_bytes
from kvlab.blocks import blocks_for
from kvlab.model import Model
from kvlab.pool import BlockPool
from kvlab.records import machine_facts, now_utc

__all__ = ["SCHEMA", "measure"]

SCHEMA = "kvlab.decoding/1"


def measure(model: Model, prompt: Sequence[int], new_tokens: int = 32, block_size: int = 16) -> dict[str, Any]:
    """Continue `prompt` greedily by `new_tokens`, once computing everything anew for each token, once with the cache.

    `first_difference` is the first place where the two texts part (None: nowhere). They add up the same products in
    another order, so in half precision a near tie may fall either way. Raises ValueError for fewer than 2 tokens.
    """
    if new_tokens < 2:
        raise ValueError(f"new_tokens is {new_tokens}; expected at least 2, since the first is a prefill either way")
    blocks = list(range(blocks_for(len(prompt) + new_tokens, block_size)))
    pool = BlockPool(model.layout(block_size), len(blocks), device=model.device)
    model.prefill(prompt, pool, blocks)  # warm-up
    without, without_s = _without_cache(model, prompt, new_tokens, pool, blocks)
    with_cache, with_s = _with_cache(model, prompt, new_tokens, pool, blocks)
    differing = [i for i, (a, b) in enumerate(zip(without, with_cache, strict=True)) if a != b]
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "model": {"name": model.arch.name, "dtype": model.dtype, "source": model.source},
        "prompt_tokens": len(prompt),
        "without_cache": without,
        "with_cache": with_cache,
        "first_difference": differing[0] if differing else None,
        "without_cache_s": without_s,
        "with_cache_s": with_s,
        "cache_bytes": kv_bytes(model.arch, len(prompt) + new_tokens - 1, model.dtype),
    }


def _without_cache(
    model: Model, prompt: Sequence[int], new_tokens: int, pool: BlockPool, blocks: list[int]
) -> tuple[list[int], list[float]]:
    """New tokens and the seconds of each; every step computes all positions from the first."""
    tokens, seconds = list(prompt), []
    for _ in range(new_tokens):
        begin = time.perf_counter()
        tokens.append(int(model.prefill(tokens, pool, blocks).argmax()))
        seconds.append(time.perf_counter() - begin)
    return tokens[len(prompt) :], seconds


def _with_cache(
    model: Model, prompt: Sequence[int], new_tokens: int, pool: BlockPool, blocks: list[int]
) -> tuple[list[int], list[float]]:
    """The same with keys and values kept: one prefill, then one position a step."""
    begin = time.perf_counter()
    new = [int(model.prefill(prompt, pool, blocks).argmax())]
    seconds = [time.perf_counter() - begin]
    while len(new) < new_tokens:
        begin = time.perf_counter()
        position = len(prompt) + len(new) - 1
        new.append(int(model.decode(torch.tensor(new[-1:]), pool, [blocks], [position])[0].argmax()))
        seconds.append(time.perf_counter() - begin)
    return new, seconds
