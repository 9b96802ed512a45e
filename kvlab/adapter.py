"""LoRA adapters in PEFT's format, kept beside the base weights and never merged into them.

An adapted layer computes x·Wᵀ + scale · (x·Aᵀ)·Bᵀ (Hu et al. 2021, https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvlab.layers import Decoder
from kvlab.weights import digest_tensors

__all__ = ["Adapter", "LowRank", "read_adapter"]

_KEY = re.compile(
    r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+_proj)\.lora_(A|B)(?:\.default)?\.weight"
)


@dataclass(frozen=True)
class LowRank:
    """What one projection gains: `b @ a` (scale folded into `b`), added to columns [start, start + len(b)) of its
    fused matrix's output.
    """

    start: int
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


@dataclass(frozen=True)
class Adapter:
    """(layer, fused matrix name) → its low-rank additions; `digest` is the SHA-256 (hex) of their content."""

    parts: Mapping[tuple[int, str], tuple[LowRank, ...]]
    digest: str


def read_adapter(
    source: str | Path | Mapping[str, Tensor],
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    scale: float | None = None,
) -> Adapter:
    """An adapter from a PEFT folder (adapter_config.json, adapter_model.safetensors) or from tensors by PEFT's names.

    `scale` defaults to what the folder's config says (lora_alpha ÷ r, or ÷ √r with rsLoRA), or 1 for bare tensors.
    Raises ValueError for a PEFT feature that kvlab does not run, an unknown tensor name, or a wrong shape.
    """
    if isinstance(source, Mapping):
        name, tensors = "adapter", dict(source)
    else:
        name, tensors = str(source), _load(Path(source))
        scale = _scale(Path(source)) if scale is None else scale
    factor = 1.0 if scale is None else scale
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"{name}: {key} is no LoRA tensor of a decoder projection; kvlab adapts only those")
        pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    places = _places(decoder)
    parts: dict[tuple[int, str], tuple[LowRank, ...]] = {}
    for (layer, projection), pair in pairs.items():
        if projection not in places or layer >= decoder.layers or pair.keys() != {"A", "B"}:
            raise ValueError(
                f"{name}: layer {layer} {projection} has lora_{'/'.join(pair)}; expected A and B, "
                f"a layer below {decoder.layers}, and one of {', '.join(places)}"
            )
        fused, start, out, inner = places[projection]
        a, b = pair["A"], pair["B"]
        rank = a.shape[0]
        if a.shape != (rank, inner) or b.shape != (out, rank):
            raise ValueError(
                f"{name}: layer {layer} {projection} has A {list(a.shape)} and B {list(b.shape)}; "
                f"expected [r, {inner}] and [{out}, r]"
            )
        part = LowRank(start, a.to(device, dtype), (b.double() * factor).to(device, dtype))
        parts[layer, fused] = (*parts.get((layer, fused), ()), part)
    return Adapter(parts, _digest(parts))


def _digest(parts: Mapping[tuple[int, str], tuple[LowRank, ...]]) -> str:
    named = []
    for (layer, fused), lows in sorted(parts.items()):
        for low in lows:
            named += [(f"{layer}.{fused}.{low.start}.a", low.a), (f"{layer}.{fused}.{low.start}.b", low.b)]
    return digest_tensors(named)


def _places(decoder: Decoder) -> dict[str, tuple[str, int, int, int]]:
    """Projection → (fused matrix, first output column in it, outputs, inputs)."""
    q, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    return {
        "q_proj": ("qkv", 0, q, decoder.hidden),
        "k_proj": ("qkv", q, kv, decoder.hidden),
        "v_proj": ("qkv", q + kv, kv, decoder.hidden),
        "o_proj": ("out", 0, decoder.hidden, q),
        "gate_proj": ("gate_up", 0, decoder.ffn, decoder.hidden),
        "up_proj": ("gate_up", decoder.ffn, decoder.ffn, decoder.hidden),
        "down_proj": ("down", 0, decoder.hidden, decoder.ffn),
    }


def _load(folder: Path) -> dict[str, Tensor]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"no {file.name} in {folder}; expected a PEFT adapter folder")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not readable safetensors (truncated?): {error}") from error


def _scale(folder: Path) -> float:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    # Each of these changes what is computed, so an adapter that uses one is refused rather than run wrongly.
    for field in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"):
        if config.get(field):
            raise ValueError(f"{folder}: adapter field {field!r} is {config[field]!r}; kvlab runs plain LoRA only")
    if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none":
        raise ValueError(
            f"{folder}: peft_type {config.get('peft_type')!r}, bias {config.get('bias')!r}; "
            "kvlab runs LORA with bias 'none'"
        )
    rank = config["r"]
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)
