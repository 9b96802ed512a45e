"""Causal attention of new queries over a prefix: the one place that picks how it is computed.

Knows queries, keys and values. Does not know blocks, layers or weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Padding", "attend", "attend_each", "attend_whole", "attend_within", "causal_mask", "pad"]

# Queries per masked call. Each call stops at the last key that its queries see, so small blocks skip more of the
# triangle above the diagonal. A GPU wants fewer and larger calls.
_QUERY_BLOCK = {"cpu": 64, "cuda": 512}


def causal_mask(rows: int, keys: int, group: int, like: Tensor) -> Tensor:
    """0 where the newest of `rows` queries may look, −∞ where not; `group` query heads of each are rows of their own.

    → [min(rows, query block) · group, keys], dtype and device of `like`. Serves every block of a prefill: see `attend`.
    """
    rows = min(rows, _QUERY_BLOCK[like.device.type])
    mask = torch.zeros(rows, keys, dtype=like.dtype, device=like.device)
    mask[:, keys - rows :].fill_(-torch.inf).triu_(1)
    return mask.repeat_interleave(group, dim=0)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention of q [T, heads, head_dim] over k and v [S, kv_heads, head_dim] → [T, heads · head_dim].

    The queries are the newest T of the S positions: query t sees keys [0, S − T + t].
    `mask` is `causal_mask(T, S, heads / kv_heads)`, needed where T > 1.
    """
    rows, keys = len(q), len(k)
    if rows == 1:
        return _folded(q, k, v, None)
    group, block = q.shape[1] // k.shape[1], _QUERY_BLOCK[q.device.type]
    if rows == keys and rows not in _blocked_prompts(group, q.device.type):
        return _causal(q, k, v)
    assert mask is not None, "several rows need their causal mask"
    out = q.new_empty(rows, q.shape[1] * q.shape[2])
    # Blocks are laid from the end, so that only the first is short; any block's mask is the end of the largest one's.
    for stop in range(rows, 0, -block):
        start = max(0, stop - block)
        seen = keys - rows + stop
        part = mask[len(mask) - (stop - start) * group :, mask.shape[1] - seen :]
        out[start:stop] = _folded(q[start:stop], k[:seen], v[:seen], part)
    return out


def _blocked_prompts(group: int, device: str) -> range:
    """Rows of the whole prompts that go through in blocks; shorter and longer ones are one causal call.

    On two AVX2 cores in fp32 blocks took 0.65 to 0.97 of its time at 384 and 512 rows, and 1.3 at 128. From there on
    it depends on the query heads of a KV head: one: 1.1 at 768, 1.3 at 1,536; three: 0.8 at 1,024, 1.0 at 2,032; four:
    1.0 at 1,024, 1.1 at 2,032.
    """
    return range(257, min(640 * group, 2048)) if device == "cpu" else range(0)


def attend_each(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, padding: Padding | None = None) -> Tensor:
    """One query per sequence: q [B, heads, head_dim], k and v [B · L, kv_heads, head_dim] → [B, heads · head_dim].

    Sequence b sees its first `lengths[b]` (on the CPU) of L keys. What lies beyond is overwritten, in place, since a
    stale NaN would survive any mask: 0 · NaN is NaN. `padding` is `pad(lengths, L)`, made here when it is not given.
    """
    padding = padding or pad(lengths, len(k) // len(q), q)
    if padding.mask is not None:
        for t in (k, v):
            t.index_fill_(0, padding.beyond, 0)
    k, v = (t.view(len(q), -1, *t.shape[1:])[:, : int(lengths.max())] for t in (k, v))
    return attend_whole(q, k, v, padding.mask)


def attend_within(q: Tensor, k: Tensor, v: Tensor, beyond: Tensor, mask: Tensor) -> Tensor:
    """`attend_each` for a step that is recorded: no shape depends on a value, and no value is read on the host.

    `beyond` [B, L] (bool) says which keys a sequence may not see, `mask` [B, 1, 1, L] is −∞ there and 0 elsewhere; each
    sequence sees one key at least. All L are read, and what lies beyond is overwritten, as there.
    """
    k, v = (t.masked_fill_(beyond.view(-1, 1, 1), 0).view(*beyond.shape, *t.shape[1:]) for t in (k, v))
    return attend_whole(q, k, v, mask)


def attend_whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """One query per sequence to all its keys, folded: k and v [B, L, kv_heads, head_dim], else as `attend_each`."""
    batch, heads, dim = q.shape
    folded = q.reshape(batch, k.shape[2], -1, dim)
    out = _fused(folded, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return out.reshape(batch, heads * dim)


@dataclass(frozen=True)
class Padding:
    """What no sequence of a batch may see: `beyond` [n], among its B · L keys, up to the longest; None: nothing."""

    beyond: Tensor
    mask: Tensor | None  # [B, 1, 1, longest]: 0, or −∞ beyond


def pad(lengths: Tensor, keys: int, like: Tensor) -> Padding:
    """The padding of sequences of `lengths` [B] (on the CPU) in `keys` positions each; the same for every layer."""
    longest = int(lengths.max())
    sequence, position = (torch.arange(longest) >= lengths[:, None]).nonzero(as_tuple=True)
    if not len(position):
        return Padding(position, None)
    sequence, position = sequence.to(like.device), position.to(like.device)
    mask = torch.zeros(len(lengths), 1, 1, longest, dtype=like.dtype, device=like.device)
    mask[sequence, 0, 0, position] = -torch.inf
    return Padding(sequence * keys + position, mask)


def _folded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention with a KV head's query heads as rows of one matrix, so that K and V are read once, never expanded.

    q [T, heads, head_dim], k and v [S, kv_heads, head_dim], mask [T · heads / kv_heads, S] → [T, heads · head_dim].
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    folded = q.view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(1, kv_heads, -1, dim)
    out = _fused(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask)
    return out[0].view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads * dim)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Torch's fused causal attention over as many keys as queries; shapes as in `attend`.

    Of the kernels for CUDA only that in half precision takes grouped heads; the others would fall back to one that
    writes all scores out, so K and V are expanded for them.
    """
    group = q.shape[1] // k.shape[1]
    grouped = not q.is_cuda or q.dtype.itemsize == 2
    if not grouped and group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = _fused(query, key, value, is_causal=True, enable_gqa=grouped and group > 1)
    return out[0].transpose(0, 1).flatten(1)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Torch's attention, but on CUDA never cuDNN's, which torch asks first on Hopper and Blackwell.

    For each pair of lengths that it has not met cuDNN builds a plan, and here every pass may have others: 0.44 s on a
    B200 (https://github.com/modelscope/FunASR/issues/3704).
    """
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, **options)
    enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(q, k, v, **options)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
