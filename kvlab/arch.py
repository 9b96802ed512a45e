"""A model as its `config.json` describes it: which bytes each layer caches, and what FLOPs need.

Knows numbers only. Does not know torch, weights, or how a cache is laid out in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvlab.hf import config as hf_config
from kvlab.layers import CacheComponent, Decoder, Layer, Pairs

__all__ = ["ModelArch", "preset_names"]


@dataclass(frozen=True)
class ModelArch:
    """A model's shape, frozen. Build it with `ModelArch.from_hf(...)` or `ModelArch.preset(name)`.

    `max_positions` is the longest sequence the config states (2^63 - 1 where it states none). `decoder` is None for a
    model that kvlab can count but not run. `kv_dtype` is the KV-cache dtype that the config itself prescribes, if it
    does. `head_macs` are those of the LM head for one position (0: hidden × vocab), `stem_macs` those per token
    outside layers and head. `notes` say in words what the counts assume.
    """

    name: str
    model_type: str
    hidden: int
    vocab: int
    max_positions: int
    layers: tuple[Layer, ...] = field(repr=False)  # long, and alike
    tied_embeddings: bool
    decoder: Decoder | None = None
    kv_dtype: str | None = None
    head_macs: int = 0
    stem_macs: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.head_macs:
            object.__setattr__(self, "head_macs", self.hidden * self.vocab)

    @cached_property
    def linear_macs(self) -> int:
        """Weight MACs per new token over all layers (no LM head)."""
        return self.stem_macs + sum(layer.projection_macs + layer.ffn_macs for layer in self.layers)

    @cached_property
    def pairs(self) -> tuple[Pairs, ...]:
        """Attention of all layers, one entry per visibility rule: a pass evaluates a few closed forms."""
        macs: dict[Pairs, int] = {}
        for layer in self.layers:
            for pairs in layer.pairs:
                rule = replace(pairs, macs=1)
                macs[rule] = macs.get(rule, 0) + pairs.macs
        return tuple(replace(rule, macs=total) for rule, total in macs.items())

    @cached_property
    def cached_key_macs(self) -> int:
        """MACs per cached token and pass over all layers (expanded MLA)."""
        return sum(layer.cached_key_macs for layer in self.layers)

    @cached_property
    def scan_macs(self) -> int:
        """MACs per new token without a weight matrix (state updates, convolutions) over all layers."""
        return sum(layer.scan_macs for layer in self.layers)

    @cached_property
    def absorbed(self) -> ModelArch:
        """The same model with its MLA layers computed on latents; itself where there are none."""
        if not any(layer.absorbed for layer in self.layers):
            return self
        return replace(self, layers=tuple(layer.absorbed or layer for layer in self.layers))

    @cached_property
    def shape_digest(self) -> str:
        """Equal for models that take the same work, whatever their names, and whether MLA is expanded or absorbed.

        Hashes counts, not the `Layer` objects: a digest in a file stays valid when those get another field.
        """
        shape = self.absorbed
        pairs = sorted((p.tokens_per_key, p.limit or 0, p.chunk or 0, p.macs) for p in shape.pairs)
        macs = (shape.linear_macs, shape.head_macs, shape.cached_key_macs, shape.scan_macs)
        counts = repr((len(shape.layers), shape.hidden, shape.vocab, macs, pairs))
        return hashlib.sha256(counts.encode()).hexdigest()[:16]

    @cached_property
    def layer_groups(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers with how often each occurs: arithmetic loops over kinds, not over layers."""
        counts: dict[Layer, int] = {}
        for layer in self.layers:
            counts[layer] = counts.get(layer, 0) + 1
        return tuple(counts.items())

    @cached_property
    def cache_groups(self) -> tuple[tuple[CacheComponent, int], ...]:
        """Distinct cache components (names set aside) with how often each occurs: K and V of all layers are one."""
        counts: dict[CacheComponent, int] = {}
        for layer, layers in self.layer_groups:
            for component in layer.cache:
                kind = replace(component, name="")
                counts[kind] = counts.get(kind, 0) + layers
        return tuple(counts.items())

    @classmethod
    def preset(cls, name: str) -> ModelArch:
        """A shape that ships with kvlab. Raises ValueError naming the known presets."""
        if name not in _PRESETS:
            raise ValueError(f"unknown model preset {name!r}; known presets: {', '.join(_PRESETS)}")
        return _PRESETS[name]

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> ModelArch:
        """Read a Hugging Face `config.json` (a path, a folder that holds one, or the parsed dict).

        Raises ValueError naming the field and its value for anything it cannot read; it never guesses.
        """
        return cls(**hf_config.read(source))


def preset_names() -> tuple[str, ...]:
    """The names `ModelArch.preset` knows."""
    return tuple(_PRESETS)


def _llama(
    name: str, decoder: Decoder, *, vocab: int, max_positions: int, tied: bool, model_type: str = "llama"
) -> ModelArch:
    return ModelArch(
        name=name,
        model_type=model_type,
        hidden=decoder.hidden,
        vocab=vocab,
        max_positions=max_positions,
        layers=(decoder.layer,) * decoder.layers,
        tied_embeddings=tied,
        decoder=decoder,
    )


# In the order in which a config is read (sorted), so that a preset and its config.json give the same Decoder.
_LLAMA3_SCALING = (
    ("rope_type", "llama3"),
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 8192),
)

# Shapes from the models' own config.json on the Hugging Face hub; `tiny` and `wide-kv` are kvlab's.
_PRESETS: dict[str, ModelArch] = {
    arch.name: arch
    for arch in (
        # Instant: for tests and for a first look.
        _llama(
            "tiny",
            Decoder(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128),
            vocab=512,
            max_positions=8192,
            tied=True,
        ),
        # KV heavy for its FLOPs: 16 KiB a token in bf16, so that a slow link can lose against a CPU.
        _llama(
            "wide-kv",
            Decoder(layers=4, hidden=64, heads=16, kv_heads=16, head_dim=64, ffn=256),
            vocab=512,
            max_positions=8192,
            tied=True,
        ),
        # HuggingFaceTB/SmolLM2-135M-Instruct
        _llama(
            "smollm2-135m",
            Decoder(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, rope_theta=100_000.0),
            vocab=49152,
            max_positions=8192,
            tied=True,
        ),
        # meta-llama/Llama-3.2-1B
        _llama(
            "llama-3.2-1b",
            Decoder(
                layers=16,
                hidden=2048,
                heads=32,
                kv_heads=8,
                head_dim=64,
                ffn=8192,
                rope_theta=500_000.0,
                rope_scaling=(("rope_type", "llama3"), ("factor", 32.0), *_LLAMA3_SCALING[2:]),
            ),
            vocab=128256,
            max_positions=131072,
            tied=True,
        ),
        # meta-llama/Llama-3.1-8B
        _llama(
            "llama-3.1-8b",
            Decoder(
                layers=32,
                hidden=4096,
                heads=32,
                kv_heads=8,
                head_dim=128,
                ffn=14336,
                rope_theta=500_000.0,
                rope_scaling=_LLAMA3_SCALING,
            ),
            vocab=128256,
            max_positions=131072,
            tied=False,
        ),
        # Qwen/Qwen3-8B
        _llama(
            "qwen3-8b",
            Decoder(
                layers=36,
                hidden=4096,
                heads=32,
                kv_heads=8,
                head_dim=128,
                ffn=12288,
                rope_theta=1_000_000.0,
                norm_eps=1e-6,
                qk_norm=True,
            ),
            vocab=151936,
            max_positions=40960,
            tied=False,
            model_type="qwen3",
        ),
    )
}
