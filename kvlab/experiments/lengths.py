"""How prefill grows with length: the longest ladder of lengths that a budget allows, and a curve through its times.

Knows the rig and clocks. Returns plain records; does not print or draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab.arithmetic import attention_flops, linear_flops, prefill_flops
from kvlab.experiments.rig import Rig
from kvlab.model import Model
from kvlab.records import machine_facts, now_utc

__all__ = ["SCHEMA", "fit_growth", "lengths_within", "measure"]

SCHEMA = "kvlab.lengths/1"
_TRIAL_TOKENS = 256
_LONGEST = (8192, 4096, 2048, 1024, 512)
_STEPS = 6  # each length twice the one before
# Attention runs below the rate of the matrix products, and long passes leave the caches: more time than FLOPs say.
_SLACK = 1.3


def lengths_within(model: Model, tokens: Sequence[int], budget_s: float) -> list[int]:
    """Lengths, each twice the one before, that `measure` takes about `budget_s` seconds for at most.

    Judged by one pass over 256 tokens; the longest is one of 512 to 8,192 and at most the text. 512 is always taken.
    Raises ValueError for a text of fewer than 512 tokens.
    """
    if len(tokens) < _LONGEST[-1]:
        raise ValueError(f"a text of at least {_LONGEST[-1]} tokens is needed, got {len(tokens)}")
    with Rig(model, block_size=16, max_tokens=_TRIAL_TOKENS, tables=1) as rig:
        trial = tokens[:_TRIAL_TOKENS]
        rig.recompute(trial)  # warm-up
        trial_s = min(rig.recompute(trial).ttft_s for _ in range(2))
    flops_per_s = prefill_flops(model.arch, 0, _TRIAL_TOKENS) / trial_s
    ladders = [
        [longest >> step for step in reversed(range(_STEPS))]
        for longest in _LONGEST
        if longest <= min(len(tokens), model.arch.max_positions)
    ]
    for ladder in ladders:
        flops = sum(_rounds(n, ladder) * prefill_flops(model.arch, 0, n) for n in ladder)
        if _SLACK * flops / flops_per_s <= budget_s:
            return ladder
    return ladders[-1]


def _rounds(length: int, lengths: Sequence[int]) -> int:
    """How often `measure` times a length: three times, but the long ones once, since they average over themselves."""
    return 1 if length > max(lengths) // 4 else 3


def measure(model: Model, tokens: Sequence[int], lengths: Sequence[int]) -> dict[str, Any]:
    """Seconds to the first token of `tokens[:n]` for each n of `lengths`, computed in one pass; rounds interleave.

    The record holds the samples, the fastest of them as `seconds` (other programs only ever add time), and the FLOPs
    of each length in two parts, the LM head among the linear ones.
    """
    samples: list[list[float]] = [[] for _ in lengths]
    with Rig(model, block_size=16, max_tokens=max(lengths), tables=1) as rig:
        rig.recompute(tokens[: min(lengths)])  # warm-up
        for done in range(3):
            for times, n in zip(samples, lengths, strict=True):
                if done < _rounds(n, lengths):
                    times.append(rig.recompute(tokens[:n]).ttft_s)
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "model": {"name": model.arch.name, "dtype": model.dtype, "source": model.source},
        "tokens": list(lengths),
        "seconds": [min(times) for times in samples],
        "linear_flops": [linear_flops(model.arch, n) + 2 * model.arch.head_macs for n in lengths],
        "attention_flops": [attention_flops(model.arch, 0, n) for n in lengths],
        "samples_s": samples,
    }


def fit_growth(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    """(t0, a, b) of seconds = t0 + a · tokens + b · tokens², by least squares of relative errors; t0 is not below 0.

    Relative, so that a millisecond at 128 tokens counts as much as a second at 4,096. Where the best t0 is negative,
    which no pass can be, the other two are fitted without it. Raises ValueError for fewer than three different lengths.
    """
    if len(set(tokens)) < 3:
        raise ValueError(f"three different lengths are needed to tell three parts apart, got {sorted(set(tokens))}")
    n, s = np.asarray(tokens, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    columns = np.stack([np.ones_like(n), n, n**2], axis=1) / s[:, None]
    t0, a, b = np.linalg.lstsq(columns, np.ones_like(s), rcond=None)[0]
    if t0 < 0:
        t0, (a, b) = 0.0, np.linalg.lstsq(columns[:, 1:], np.ones_like(s), rcond=None)[0]
    return float(t0), float(a), float(b)
