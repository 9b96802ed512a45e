"""The pieces of a model's shape: what one layer caches and what one token costs in it.

Knows numbers only. Does not know torch, weights, config files, or how a cache is laid out in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["CacheComponent", "Decoder", "Layer", "Pairs"]


@dataclass(frozen=True)
class CacheComponent:
    """One tensor that a layer keeps per sequence; a layer's cache is the sum of its components.

    `entry_elements` counts the elements of one entry over all heads (before tensor parallelism).
    `heads` is the number of heads those elements are split over under tensor parallelism; 0 means that
    every rank holds all of them (MLA latents, index keys). An entry covers `tokens_per_entry` tokens
    (more than 1 for compressed caches; it exists once all of them are there). With `cap_tokens`, only the newest
    `cap_tokens` tokens are held; `chunked` says that they are the tokens of one aligned chunk, not a sliding window.
    `fixed_elements` does not grow with length (SSM, linear-attention and convolution states).
    `dtype` is None where the component follows the KV-cache dtype, else a dtype name of its own.
    """

    name: str
    entry_elements: int = 0
    heads: int = 0
    tokens_per_entry: int = 1
    cap_tokens: int | None = None
    chunked: bool = False
    fixed_elements: int = 0
    dtype: str | None = None


@dataclass(frozen=True)
class Pairs:
    """Attention work that is paid per (query, visible key) pair: `macs` for each.

    A query at position i sees min((i + 1) // tokens_per_key, limit) keys: all of them, the newest `limit`, or the
    `limit` that an indexer picked. With `chunk` it sees the keys since the last multiple of `chunk` (Llama 4).
    """

    macs: int
    limit: int | None = None
    chunk: int | None = None
    tokens_per_key: int = 1


@dataclass(frozen=True)
class Layer:
    """One layer: what it caches and what one token costs in multiply-accumulates (MACs).

    `projection_macs` and `ffn_macs` are the weight matmuls per new token (active experts and the router only).
    `pairs` is the attention itself. `cached_key_macs` is paid once per cached key in each pass (expanded MLA
    projects every cached latent to keys and values again). `scan_macs` is the work per token that has no weight
    matrix: state updates and depthwise convolutions. `absorbed` is the same MLA layer computed on its latents.
    """

    kind: str
    cache: tuple[CacheComponent, ...] = ()
    projection_macs: int = 0
    ffn_macs: int = 0
    pairs: tuple[Pairs, ...] = ()
    cached_key_macs: int = 0
    scan_macs: int = 0
    absorbed: Layer | None = None


@dataclass(frozen=True)
class Decoder:
    """What kvlab's own Llama-family model needs to run, beyond counting."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @cached_property
    def layer(self) -> Layer:
        """The counts of one decoder layer: GQA attention and a gated (three-matrix) FFN."""
        entry = self.kv_heads * self.head_dim
        return Layer(
            kind="full",
            cache=(CacheComponent("k", entry, heads=self.kv_heads), CacheComponent("v", entry, heads=self.kv_heads)),
            projection_macs=self.hidden * (2 * self.heads * self.head_dim + 2 * entry),
            ffn_macs=3 * self.hidden * self.ffn,
            pairs=(Pairs(2 * self.heads * self.head_dim),),
        )
