"""Exact counts: the bytes a prefix leaves behind, and the FLOPs that computing it again costs.

Pure arithmetic on a `ModelArch`; knows no clock and no machine.
"""

from __future__ import annotations

from kvlab.arch import ModelArch
from kvlab.layers import CacheComponent, Pairs

__all__ = [
    "KV_DTYPES",
    "attention_flops",
    "element_bytes",
    "kv_bytes",
    "kv_bytes_by_component",
    "linear_flops",
    "prefill_flops",
]

# (bytes, elements they hold). q8_0 and q4_0 are GGML's: a 2-byte scale beside 32 values (ggml-common.h). nvfp4 has a
# 1-byte scale beside 16 values. Scales per tensor or head (fp8, int8) are left out.
KV_DTYPES: dict[str, tuple[int, int]] = {
    "fp64": (8, 1),
    "fp32": (4, 1),
    "bf16": (2, 1),
    "fp16": (2, 1),
    "fp8": (1, 1),
    "int8": (1, 1),
    "q8_0": (34, 32),
    "q4_0": (18, 32),
    "nvfp4": (9, 16),
}


def element_bytes(elements: int, dtype: str) -> int:
    """Bytes that hold `elements` values of a KV dtype. Raises ValueError for an unknown dtype or a broken group."""
    if dtype not in KV_DTYPES:
        raise ValueError(f"unknown KV dtype {dtype!r}; known: {', '.join(KV_DTYPES)}")
    group_bytes, group = KV_DTYPES[dtype]
    if elements % group:
        raise ValueError(f"{dtype} stores groups of {group} elements, but an entry here has {elements}")
    return elements // group * group_bytes


def kv_bytes(
    arch: ModelArch,
    tokens: int,
    kv_dtype: str | None = None,
    tp: int = 1,
    block_size: int | None = None,
    max_batched_tokens: int | None = None,
) -> int:
    """Bytes per tensor-parallel rank that hold the KV cache of `tokens` positions, summed over all layers.

    `kv_dtype` None means the dtype the config prescribes, else bf16; states keep their own dtype. With `block_size`,
    whole blocks are counted. KV heads are divided over `tp` ranks; where they do not divide, heads are replicated
    (vLLM's rule: at least one head a rank); components without heads (MLA latents, index keys) are on every rank.
    A window of w tokens holds w of them, and w - 1 + max_batched_tokens while a prompt is computed in chunks; in
    blocks that is ceil((w - 1 + max_batched_tokens) / block) + 1 of them, since a window begins anywhere in a block,
    and for aligned chunks of c tokens ceil((c + max_batched_tokens) / block) (vLLM v1, kv_cache_interface.py).
    A state has a fixed size. Draft (MTP) layers and partly filled groups of compressed caches are left out.
    Raises ValueError on negative or zero sizes.
    """
    dtype = _checked_kv_dtype(arch, tokens, kv_dtype, tp, block_size, max_batched_tokens)
    total = 0
    for c, count in arch.cache_groups:
        total += count * _component_bytes(c, tokens, c.dtype or dtype, tp, block_size, max_batched_tokens)
    return total


def kv_bytes_by_component(
    arch: ModelArch,
    tokens: int,
    kv_dtype: str | None = None,
    tp: int = 1,
    block_size: int | None = None,
    max_batched_tokens: int | None = None,
) -> dict[str, int]:
    """`kv_bytes` by component name ("k", "v", "latent", "state", ...), same arguments and errors."""
    dtype = _checked_kv_dtype(arch, tokens, kv_dtype, tp, block_size, max_batched_tokens)
    sizes: dict[str, int] = {}
    for layer, count in arch.layer_groups:
        for c in layer.cache:
            size = count * _component_bytes(c, tokens, c.dtype or dtype, tp, block_size, max_batched_tokens)
            sizes[c.name] = sizes.get(c.name, 0) + size
    return sizes


def _checked_kv_dtype(
    arch: ModelArch, tokens: int, kv_dtype: str | None, tp: int, block_size: int | None, max_batched_tokens: int | None
) -> str:
    """The KV dtype that applies, after checking every argument of `kv_bytes`."""
    _check_count("tokens", tokens, 0)
    _check_count("tp", tp, 1)
    if block_size is not None:
        _check_count("block_size", block_size, 1)
    if max_batched_tokens is not None:
        _check_count("max_batched_tokens", max_batched_tokens, 1)
    dtype = kv_dtype or arch.kv_dtype or "bf16"
    if dtype not in KV_DTYPES:
        raise ValueError(f"unknown KV dtype {dtype!r}; known: {', '.join(KV_DTYPES)}")
    return dtype


def _component_bytes(
    c: CacheComponent, tokens: int, dtype: str, tp: int, block_size: int | None, max_batched_tokens: int | None
) -> int:
    if c.fixed_elements:
        return element_bytes(_per_rank(c.fixed_elements, c.heads, tp), dtype) if tokens else 0
    held = _held_tokens(c, tokens, block_size, max_batched_tokens)
    # Floor: the entry of a group of tokens exists once the whole group does.
    return held // c.tokens_per_entry * element_bytes(_per_rank(c.entry_elements, c.heads, tp), dtype)


def _held_tokens(c: CacheComponent, tokens: int, block_size: int | None, max_batched_tokens: int | None) -> int:
    if c.cap_tokens is None:
        return tokens if block_size is None else -(-tokens // block_size) * block_size
    # A window: the newest of max_batched_tokens queries still needs window - 1 keys before the oldest of them.
    cap = c.cap_tokens + (max_batched_tokens or 0) if c.chunked else c.cap_tokens - 1 + (max_batched_tokens or 1)
    if block_size is None:
        return min(tokens, cap)
    blocks = -(-cap // block_size)
    if not c.chunked:
        # + 1: a window of ceil(n / block) blocks' worth of tokens may begin in the middle of one.
        blocks = -(-(c.cap_tokens - 1 + (max_batched_tokens or 0)) // block_size) + 1
    return min(blocks, -(-tokens // block_size)) * block_size


def _per_rank(elements: int, heads: int, tp: int) -> int:
    if heads == 0 or elements == 0:
        return elements
    return elements // heads * -(-heads // tp)  # ceil: heads that do not divide are replicated


def prefill_flops(arch: ModelArch, start: int, stop: int, mla: str = "expanded") -> int:
    """FLOPs (2 per multiply-accumulate) to compute positions [start, stop) with [0, start) cached.

    Linear layers, attention over the keys each query sees, state updates, and the LM head for the last position only.
    Of experts only the active ones and the router count. `mla` "expanded" projects every cached latent to keys and
    values again in each pass (what servers do in prefill), "absorbed" attends to the latents themselves.
    Left out: softmax, norms, RoPE, activations and embedding look-up (below 1 % for hidden sizes of 1,000 and up);
    the decays, gates and chunk-wise overhead of recurrences (`hf.mixer`). Kernels that do not skip the masked half of
    [start, stop) spend up to twice the attention FLOPs counted here, and more for windows that they do not skip.
    With expanded MLA the FLOPs of two passes exceed those of one by the projection of the cached latents.
    Raises ValueError unless 0 <= start <= stop.
    """
    if mla not in ("expanded", "absorbed"):
        raise ValueError(f"mla is {mla!r}; expected 'expanded' or 'absorbed'")
    if mla == "absorbed":
        arch = arch.absorbed
    if stop == start:
        _check_range(start, stop)
        return 0
    return linear_flops(arch, stop - start) + attention_flops(arch, start, stop) + 2 * arch.head_macs


def linear_flops(arch: ModelArch, tokens: int) -> int:
    """FLOPs of the weight matmuls over `tokens` new positions, without the LM head."""
    return 2 * tokens * arch.linear_macs


def attention_flops(arch: ModelArch, start: int, stop: int) -> int:
    """FLOPs in [start, stop) that are no weight matmul of a new token: attention, re-projected latents, state updates.

    Raises ValueError unless 0 <= start <= stop.
    """
    _check_range(start, stop)
    macs = arch.scan_macs * (stop - start)
    if start < stop:
        macs += arch.cached_key_macs * start
    for pairs in arch.pairs:
        macs += pairs.macs * (_visible(stop, pairs) - _visible(start, pairs))
    return 2 * macs


def _visible(n: int, pairs: Pairs) -> int:
    """(query, key) pairs of the first `n` queries; a query sees itself."""
    if pairs.tokens_per_key > 1:
        return _visible_groups(n, pairs.tokens_per_key, pairs.limit)
    if pairs.limit is not None and n > pairs.limit:
        return pairs.limit * (pairs.limit + 1) // 2 + (n - pairs.limit) * pairs.limit
    if pairs.chunk is not None:
        full, rest = divmod(n, pairs.chunk)
        return full * (pairs.chunk * (pairs.chunk + 1) // 2) + rest * (rest + 1) // 2
    return n * (n + 1) // 2


def _visible_groups(n: int, size: int, limit: int | None) -> int:
    """The sum of min((i + 1) // size, limit) over i < n: keys that stand for whole groups of `size` tokens."""
    if limit is not None and n > size * limit:
        return _visible_groups(size * limit, size, None) + (n - size * limit) * limit
    groups, rest = divmod(n, size)
    # Group g (from 1) becomes visible to its own last token: size queries see g, but the last group has rest + 1.
    return size * (groups * (groups - 1) // 2) + groups * (rest + 1) if groups else 0


def _check_range(start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise ValueError(f"positions [{start}, {stop}) are not a range; expected 0 <= start <= stop")


def _check_count(name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")
