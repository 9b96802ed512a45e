"""Causal attention of new queries over a prefix: the one place that picks how it is computed.

Knows queries, keys and values. Does not know blocks, layers or weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attend", "attend_each", "causal_mask"]

# Queries per masked call: bounds the mask's memory, and lets early queries skip the keys of late ones.
_QUERY_BLOCK = 512


def causal_mask(rows: int, keys: int, like: Tensor) -> Tensor:
    """0 where the newest of `rows` queries may look, −∞ where not → [min(rows, query block), keys], dtype of `like`."""
    rows = min(rows, _QUERY_BLOCK)
    mask = torch.zeros(rows, keys, dtype=like.dtype, device=like.device)
    mask[:, keys - rows :].fill_(-torch.inf).triu_(1)
    return mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over k and v [S, kv_heads, head_dim] → [T, heads · head_dim].

    The queries are the newest T of the S positions: query t sees keys [0, S − T + t].
    `mask` is `causal_mask(T, S)`, needed only for 1 < T < S.
    """
    rows, keys = len(q), len(k)
    if rows == 1 or rows == keys:
        return _sdpa(q, k, v, None, causal=rows > 1)
    assert mask is not None, "a suffix of several rows needs its causal mask"
    pieces = []
    # Blocks are laid from the end, so that only the first is short: then every block's mask is a slice of the last's.
    for stop in range(rows, 0, -_QUERY_BLOCK):
        start = max(0, stop - _QUERY_BLOCK)
        seen = keys - rows + stop
        first = keys - len(mask) - (seen - (stop - start))
        piece = mask[: stop - start, first : first + seen]
        pieces.append(_sdpa(q[start:stop], k[:seen], v[:seen], piece, causal=False))
    return torch.cat(pieces[::-1])


def attend_each(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """One query per sequence: q [B, heads, head_dim], k and v [B · L, kv_heads, head_dim] → [B, heads · head_dim].

    Sequence b sees its first `lengths[b]` (on the CPU) of L keys. What lies beyond is overwritten, in place, since a
    stale NaN would survive any mask: 0 · NaN is NaN.
    """
    batch, heads, dim = q.shape
    kv_heads, longest = k.shape[1], int(lengths.max())
    k, v = (t.view(batch, -1, kv_heads, dim)[:, :longest] for t in (k, v))
    mask = None
    if int(lengths.min()) < longest:
        beyond = (torch.arange(longest) >= lengths[:, None]).to(q.device)
        for t in (k, v):
            t.masked_fill_(beyond[:, :, None, None], 0)
        mask = torch.zeros(batch, 1, 1, longest, dtype=q.dtype, device=q.device)
        mask.masked_fill_(beyond[:, None, None], -torch.inf)
    # a KV head's query heads become rows of one matrix, so that K and V are read once and never expanded
    folded = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.reshape(batch, heads * dim)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Torch's fused attention over [T, heads, head_dim] and [S, kv_heads, head_dim] → [T, heads · head_dim].

    On CUDA only the half-precision, unmasked kernel takes grouped heads; the others would fall back to one that
    writes all scores out, so K and V are expanded for them.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    grouped = not q.is_cuda or (mask is None and q.dtype.itemsize == 2)
    if not grouped and heads != kv_heads:
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped and heads != kv_heads
    )
    return out[0].transpose(0, 1).flatten(1)
