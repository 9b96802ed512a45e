"""Rotary positions: which angle each pair of dimensions turns by per token, and the turning itself.

Fixed when a model is loaded. A scaling whose angles depend on the sequence's total length (dynamic NTK, longrope)
would change keys that are already cached, so it is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.layers import Decoder

__all__ = ["Rope", "rope_for", "rotate"]


@dataclass(frozen=True)
class Rope:
    """`inv_freq` [head_dim / 2] in radians per token (float32); cos and sin are multiplied by `scale` (YaRN)."""

    inv_freq: Tensor
    scale: float = 1.0

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines at `positions` [T] → two [T, 1, head_dim / 2].

        Angles are float32 whatever the dtype, as in transformers and vLLM: that is what checkpoints were trained with.
        Half precision keeps float32 cos and sin, so that a rotation rounds once.
        """
        angles = positions.float()[:, None, None] * self.inv_freq
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (angles.cos() * self.scale).to(wide), (angles.sin() * self.scale).to(wide)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim/2) of `x` [T, heads, head_dim] by the angles of each token; same dtype."""
    first, second = x.chunk(2, dim=-1)
    half = first.shape[-1]
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out.to(x.dtype)


def rope_for(decoder: Decoder, max_positions: int, device: torch.device) -> Rope:
    """The angles of a model. Raises ValueError for a scaling that kvlab does not run, naming it.

    Formulas: transformers, modeling_rope_utils.py (default, linear, llama3), and YaRN (https://arxiv.org/abs/2309.00071).
    """
    exponents = torch.arange(0, decoder.head_dim, 2, dtype=torch.int64).float() / decoder.head_dim
    inv_freq = 1.0 / (decoder.rope_theta**exponents)
    settings = dict(decoder.rope_scaling)
    kind, scale = settings.get("rope_type", "default"), 1.0
    original = settings.get("original_max_position_embeddings") or max_positions
    if kind == "linear":
        inv_freq = inv_freq / _factor(settings)
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, settings, original)
    elif kind == "yarn":
        inv_freq, scale = _yarn(inv_freq, decoder, settings, original)
    elif kind != "default":
        raise ValueError(f"rope_scaling type is {kind!r}; kvlab runs default, linear, llama3, yarn")
    return Rope(inv_freq.to(device), scale)


def _factor(settings: dict[str, Any]) -> float:
    factor = settings.get("factor")
    if not isinstance(factor, int | float) or factor <= 0:
        raise ValueError(f"rope_scaling factor is {factor!r}; expected a positive number")
    return float(factor)


def _llama3(inv_freq: Tensor, settings: dict[str, Any], original: int) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and blend in between."""
    low, high = float(settings.get("low_freq_factor") or 1.0), float(settings.get("high_freq_factor") or 4.0)
    factor = _factor(settings)
    turns = original * inv_freq / (2 * math.pi)  # over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * inv_freq / factor + keep * inv_freq


def _yarn(inv_freq: Tensor, decoder: Decoder, settings: dict[str, Any], original: int) -> tuple[Tensor, float]:
    """Blend by dimension: fast dimensions keep their frequency, slow ones are divided by the factor."""
    factor, dim = _factor(settings), decoder.head_dim

    def dimension_of(rotations: float) -> float:  # which dimension turns this often over the original context
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(decoder.rope_theta))

    low = dimension_of(settings.get("beta_fast") or 32)
    high = dimension_of(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    scale = settings.get("attention_factor")
    if scale is None:
        mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        scale = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    return inv_freq / factor * slow + inv_freq * (1 - slow), float(scale)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
