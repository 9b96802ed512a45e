"""Exact counts: the bytes a prefix leaves behind, and the FLOPs that computing it again costs.

Pure arithmetic on a `ModelArch`; knows no clock and no machine.
"""

from __future__ import annotations

import operator

from kvlab.arch import ModelArch
from kvlab.layers import CacheComponent, Pairs

__all__ = [
    "KV_DTYPES",
    "attention_flops",
    "checked_arch",
    "checked_count",
    "element_bytes",
    "kv_bytes",
    "kv_bytes_by_component",
    "kv_dtype_for",
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
# torch's and vLLM's names of them (vllm/config/cache.py, `CacheDType`).
_OTHER_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


def kv_dtype_for(arch: ModelArch, kv_dtype: str | None = None, default: str = "bf16") -> str:
    """The KV dtype that applies, by kvlab's name: the one asked for, else what the config prescribes, else `default`.

    torch's and vLLM's names are understood. Raises ValueError for a dtype that is not known.
    """
    name = kv_dtype or arch.kv_dtype or default
    if name not in KV_DTYPES:
        name = _OTHER_NAMES.get(str(name).removeprefix("torch."), name)
    if name not in KV_DTYPES:
        raise ValueError(f"unknown KV dtype {name!r}; known: {', '.join((*KV_DTYPES, *_OTHER_NAMES))}")
    return name


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
    whole blocks are counted. KV heads are divided over `tp` ranks: at least one a rank (vLLM replicates fewer than
    ranks), and rounded up where they do not divide (which servers refuse); components without heads (MLA latents, index
    keys) are on every rank.
    A window of w tokens holds w of them, and w - 1 + max_batched_tokens while a prompt is computed in chunks; in
    blocks that is ceil((w - 1 + max_batched_tokens) / block) + 1 of them, since a window begins anywhere in a block,
    and for aligned chunks of c tokens ceil((c + max_batched_tokens) / block) (vLLM v1, kv_cache_interface.py).
    A state has a fixed size. Draft (MTP) layers and partly filled groups of compressed caches are left out.
    Raises ValueError on negative or zero sizes.
    """
    dtype = kv_dtype_for(checked_arch(arch), kv_dtype)
    sizes = _checked_sizes(tokens, tp, block_size, max_batched_tokens)
    total = 0
    for c, count in arch.cache_groups:
        total += count * _component_bytes(c, c.dtype or dtype, *sizes)
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
    dtype = kv_dtype_for(checked_arch(arch), kv_dtype)
    sizes = _checked_sizes(tokens, tp, block_size, max_batched_tokens)
    by_name: dict[str, int] = {}
    for layer, count in arch.layer_groups:
        for c in layer.cache:
            by_name[c.name] = by_name.get(c.name, 0) + count * _component_bytes(c, c.dtype or dtype, *sizes)
    return by_name


def checked_arch(arch: ModelArch) -> ModelArch:
    """`arch` itself. Raises ValueError where it is a name, or anything else that is no shape."""
    if not isinstance(arch, ModelArch):
        raise ValueError(f"arch is {arch!r}; expected a ModelArch: ModelArch.preset(name) or ModelArch.from_hf(path)")
    return arch


def checked_count(name: str, value: int, least: int) -> int:
    """`value` as a plain int, numpy's included. Raises ValueError unless it is an integer of at least `least`."""
    if type(value) is int and value >= least:  # by far the most
        return value
    if not isinstance(value, bool) and hasattr(value, "__index__") and operator.index(value) >= least:
        return operator.index(value)
    raise ValueError(f"{name} is {value!r}; expected an integer of at least {least}")


def _checked_sizes(
    tokens: int, tp: int, block_size: int | None, max_batched_tokens: int | None
) -> tuple[int, int, int | None, int | None]:
    """The counts of `kv_bytes`, checked."""
    return (
        checked_count("tokens", tokens, 0),
        checked_count("tp", tp, 1),
        None if block_size is None else checked_count("block_size", block_size, 1),
        None if max_batched_tokens is None else checked_count("max_batched_tokens", max_batched_tokens, 1),
    )


def _component_bytes(
    c: CacheComponent, dtype: str, tokens: int, tp: int, block_size: int | None, max_batched_tokens: int | None
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
    return elements // heads * -(-heads // tp)  # ceil: fewer heads than ranks are replicated


def prefill_flops(arch: ModelArch, start: int, stop: int, mla: str = "expanded") -> int:
    """FLOPs (2 per multiply-accumulate) to compute positions [start, stop) with [0, start) cached.

    Linear layers, attention over the keys each query sees, state updates, and the LM head for the last position only.
    Of experts only the active ones and the router count. `mla` "expanded" projects every cached latent to keys and
    values again in each pass (what servers do in prefill), "absorbed" attends to the latents themselves.
    Left out: softmax, norms, RoPE, activations and embedding look-up (below 1 % for hidden sizes of 1,000 and up);
    the decays, gates and chunk-wise overhead of recurrences (`hf.mixer`). Kernels that do not skip the masked half of
    [start, stop) spend up to twice the attention FLOPs counted here, and more for windows that they do not skip.
    With expanded MLA the FLOPs of two passes exceed those of one by the projection of the cached latents.
    Raises ValueError unless 0 <= start <= stop, both integers.
    """
    checked_arch(arch)
    _check_range(start, stop)
    start, stop = checked_count("start", start, 0), checked_count("stop", stop, 0)
    if mla not in ("expanded", "absorbed"):
        raise ValueError(f"mla is {mla!r}; expected 'expanded' or 'absorbed'")
    if mla == "absorbed":
        arch = arch.absorbed
    if stop == start:
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
