"""Decode attention recorded once as a CUDA graph: what it saves, and what a pool that moves does to it.

A graph replays kernels with the addresses that they had when it was recorded. Needs CUDA. Knows pools and attention.
Returns a plain record; does not print or draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlab.attention import attend_each
from kvlab.model import Model
from kvlab.pool import BlockPool
from kvlab.records import machine_facts, median, now_utc
from kvlab.streams import graph_recorder

__all__ = ["SCHEMA", "measure"]

SCHEMA = "kvlab.decode_graph/1"
_BLOCK = 16


@torch.inference_mode()
def measure(model: Model, *, prefix: int = 1024, repeats: int = 21) -> dict[str, Any]:
    """One new token's attention over `prefix` tokens in all layers: launched kernel by kernel, and as a graph.

    "eager_s", "replay_s" and "capture_s" in seconds. "follows_the_pool": whether a replay sees what was written into
    the same pool after the recording. "follows_a_new_pool": whether it sees what is in a pool allocated later.
    Raises ValueError without CUDA, and for a prefix that is not whole blocks.
    """
    if model.device.type != "cuda":
        raise ValueError(f"a CUDA graph needs a CUDA device; this model is on {model.device}")
    if prefix < _BLOCK or prefix % _BLOCK:
        raise ValueError(f"prefix is {prefix}; expected whole blocks of {_BLOCK}")
    pool = _pool(model, prefix, seed=0)
    eager_s = _median_s(_attention(model, pool, prefix), model.device, repeats)
    begin = time.perf_counter()
    replay = graph_recorder(model.device)(_attention(model, pool, prefix))
    capture_s = time.perf_counter() - begin
    replay_s = _median_s(replay, model.device, repeats)
    pool.rows.copy_(_pool(model, prefix, seed=1).rows)  # a reload: other bytes at the same addresses
    moved = _pool(model, prefix, seed=2)
    out = replay()
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "parameters": {"prefix": prefix, "layers": model.decoder.layers, "repeats": repeats},
        "eager_s": eager_s,
        "replay_s": replay_s,
        "capture_s": capture_s,
        "follows_the_pool": _alike(out, _attention(model, pool, prefix)()),
        "follows_a_new_pool": _alike(out, _attention(model, moved, prefix)()),
    }


def _pool(model: Model, prefix: int, seed: int) -> BlockPool:
    """A pool of as many blocks, full of numbers that depend on the seed."""
    pool = BlockPool(model.layout(_BLOCK), prefix // _BLOCK, device=model.device)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    pool.rows.copy_(torch.randn(pool.rows.shape, generator=generator, device=model.device))
    return pool


def _attention(model: Model, pool: BlockPool, prefix: int) -> Callable[[], Tensor]:
    """A function of one query's attention to all of the pool, layer by layer → [layers, heads · head_dim]."""
    d, table = model.decoder, torch.arange(pool.num_blocks, device=model.device)
    query = torch.ones(1, d.heads, d.head_dim, dtype=pool.rows.dtype, device=model.device)
    query /= query.numel()
    lengths = torch.tensor([prefix])
    return lambda: torch.cat([attend_each(query, *pool.read(i, table, prefix), lengths) for i in range(d.layers)])


def _median_s(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    step()
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        samples.append(time.perf_counter() - begin)
    return median(samples)


def _alike(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding; pools of other seeds differ by far more."""
    return torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.01)
