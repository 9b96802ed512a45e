"""Attention alone beside torch's scaled_dot_product_attention, and FlexAttention on CUDA: whole prompts, and a short
suffix on a cached prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab.attention import attend, causal_mask
from kvlab.experiments.bench.rows import Progress, Row, interleave, judged, ratio_interval
from kvlab.pool import TORCH_DTYPES
from kvlab.records import median

__all__ = ["attention_row", "bench_attention", "flex", "products", "sdpa", "synchronised"]

# Query heads, KV heads, head_dim.
_SHAPES = {"SmolLM2": (9, 3, 64), "8B": (32, 8, 128)}
_PROMPTS = (512, 1024, 2048, 4096)
_SUFFIXES, _PREFIX = (1, 16, 64), 2048
# Queries of one block whose rate the floor is measured at: enough for a GEMM to run at full speed.
_BLOCK = 256


def bench_attention(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Each shape: causal prompts, then suffixes of a few rows on 2,048 cached tokens. Masks are made beforehand."""
    for name, shape in _SHAPES.items():
        for tokens in _PROMPTS:
            progress(f"attention, {name} shape, {tokens} tokens")
            title = f"attention, {name} shape, {tokens} tokens, {dtype}"
            yield attention_row(title, shape, tokens, 0, device, dtype, goal=1.5)
        for tokens in _SUFFIXES:
            progress(f"attention, {name} shape, {tokens} on {_PREFIX} cached tokens")
            title = f"attention, {name} shape, {tokens} on {_PREFIX} cached tokens, {dtype}"
            yield attention_row(title, shape, tokens, _PREFIX, device, dtype, goal=2.0)


def attention_row(
    title: str,
    shape: tuple[int, int, int],
    tokens: int,
    cached: int,
    device: str,
    dtype: str,
    *,
    goal: float,
    rounds: int = 9,
) -> Row:
    """`tokens` new queries over `cached` + `tokens` keys: ours, SDPA, and the two products alone."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (
        torch.randn(n, h, dim, generator=generator).to(device, TORCH_DTYPES[dtype])
        for n, h in ((tokens, heads), (cached + tokens, kv_heads), (cached + tokens, kv_heads))
    )
    if cached:  # as they are read from a cache, kvlab's or transformers': each head's in one piece
        k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (k, v))
    mask = causal_mask(tokens, cached + tokens, heads // kv_heads, q) if tokens > 1 else None
    arms: dict[str, Callable[[], object]] = {
        "ours": synchronised(lambda: attend(q, k, v, mask), q.device),
        "sdpa": synchronised(sdpa(q, k, v), q.device),
        "products": synchronised(products(q, k, v), q.device),
    }
    note = ""
    if q.is_cuda:  # elsewhere it needs a C++ compiler
        torch.compiler.reset()  # after some eight shapes of one function it would run that one uncompiled
        flexible = synchronised(flex(q, k, v, torch.compile), q.device)
        try:
            flexible()  # compiles
            arms["flex"] = flexible
        except Exception as error:  # what it takes depends on shape, torch and Triton
            note = f"FlexAttention: {type(error).__name__}"
    seconds = interleave(arms, rounds)
    block = min(tokens, _BLOCK)
    visible = tokens * cached + tokens * (tokens + 1) / 2  # (query, key) pairs, of which `products` computes a block
    share = visible / (block * (cached + tokens))
    ours, least = median(seconds["ours"]), share * median(seconds["products"])
    peers = {name: median(seconds[name]) for name in ("sdpa", "flex") if name in seconds}
    row = Row(
        title,
        ours * 1e3,
        "ms",
        floor=least * 1e3,
        of_floor=least / ours,
        peers={name: theirs * 1e3 for name, theirs in peers.items()},
        of_peer={name: theirs / ours for name, theirs in peers.items()},
        interval=ratio_interval([share * s for s in seconds["products"]], seconds["ours"]),
        goal=f"≥ {goal:g} × sdpa",
        met=peers["sdpa"] >= goal * ours,
        note=note,
    )
    return judged(row, device, dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Torch's fused attention with grouped heads as one would call it; arguments as for `attend`."""
    tokens, keys = len(q), len(k)
    mask = None
    if tokens < keys:
        mask = torch.zeros(tokens, keys, dtype=q.dtype, device=q.device)
        mask[:, keys - tokens :].fill_(-torch.inf).triu_(1)
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    causal = mask is None and tokens > 1
    return lambda: F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


def flex(q: Tensor, k: Tensor, v: Tensor, compiled: Callable[..., Any]) -> Callable[[], Tensor]:
    """Torch's FlexAttention as `compiled` makes it, its block mask made beforehand; arguments as for `attend`."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    cached = len(k) - len(q)
    blocks = create_block_mask(lambda _, __, row, key: key <= row + cached, None, None, len(q), len(k), str(q.device))
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return partial(compiled(flex_attention), query, key, value, block_mask=blocks, enable_gqa=grouped)


def products(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], None]:
    """Q · Kᵀ and P · V over all keys, no softmax, for the first `_BLOCK` queries: heads of a KV head in one matrix."""
    kv_heads, dim = k.shape[1:]
    rows = q[:_BLOCK].view(-1, kv_heads, q.shape[1] // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    keys, values = (t.transpose(0, 1).contiguous() for t in (k, v))
    scores, out = rows.new_empty(kv_heads, rows.shape[1], len(k)), torch.empty_like(rows)

    def run() -> None:
        for head in range(kv_heads):
            torch.mm(rows[head], keys[head].t(), out=scores[head])
            torch.mm(scores[head], values[head], out=out[head])

    def launched_once() -> None:
        torch.bmm(rows, keys.transpose(1, 2), out=scores)
        torch.bmm(scores, values, out=out)

    return launched_once if q.is_cuda else run


def synchronised(run: Callable[[], object], device: torch.device, times: int = 1) -> Callable[[], None]:
    """That many runs, over when the device is; no result is copied, which would take time of its own."""

    def arm() -> None:
        for _ in range(times):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return arm
