"""Lesson 02: what a prefix costs to compute: FLOPs of a range, where attention takes over, a curve through times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, kv_bytes, linear_flops
from kvlab.arithmetic import prefill_flops as library_prefill_flops
from kvlab.lab.task import Mistake, Task

__all__ = ["TASKS"]

_Shape = dict[str, int]


def _shape(rng: random.Random) -> _Shape:
    """A Llama-like decoder; several query heads share one KV head, and heads × head_dim is not the hidden size."""
    kv_heads, head_dim = rng.choice((2, 4, 8)), rng.choice((64, 128))
    heads = kv_heads * rng.choice((3, 4))  # not 2: two mistakes would give one answer
    return {
        "layers": rng.randrange(8, 48),
        "hidden": heads * head_dim + 64 * rng.randrange(1, 9),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": 256 * rng.randrange(8, 40),
        "vocab": 1000 * rng.randrange(16, 128),
    }


def _arch(shape: _Shape) -> ModelArch:
    return ModelArch.from_hf(
        {
            "model_type": "llama",
            "num_hidden_layers": shape["layers"],
            "hidden_size": shape["hidden"],
            "num_attention_heads": shape["heads"],
            "num_key_value_heads": shape["kv_heads"],
            "head_dim": shape["head_dim"],
            "intermediate_size": shape["ffn"],
            "vocab_size": shape["vocab"],
            "max_position_embeddings": 131072,
        }
    )


# The parts of a prefill in MACs, by hand, for what a learner gets wrong; what is right comes from the library.
def _linear_macs(shape: _Shape, kv_heads: str = "kv_heads", matrices: int = 3) -> int:
    query, key = shape["heads"] * shape["head_dim"], shape[kv_heads] * shape["head_dim"]
    return shape["layers"] * shape["hidden"] * (2 * query + 2 * key + matrices * shape["ffn"])


def _pair_macs(shape: _Shape, heads: str = "heads", products: int = 2) -> int:
    return products * shape["layers"] * shape[heads] * shape["head_dim"]


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _flops(shape: _Shape, start: int, stop: int, pairs: int, heads: int = 1) -> int:
    """FLOPs of a range with this many (query, key) pairs and LM heads."""
    head_macs = heads * shape["hidden"] * shape["vocab"] if stop > start else 0
    return 2 * (_linear_macs(shape) * (stop - start) + _pair_macs(shape) * pairs + head_macs)


# --- type the number --------------------------------------------------------------------------------------------------


def _overtakes(shape: _Shape) -> float:
    arch = _arch(shape)
    return linear_flops(arch, 1) / attention_flops(arch, 0, 1)


def _hidden_for_width(args: tuple[Any, ...], expected: float, given: float) -> str:
    shape = args[0]
    wider = shape["hidden"] - shape["heads"] * shape["head_dim"]
    made = expected + 2 * shape["layers"] * shape["hidden"] * wider / _pair_macs(shape)
    said = "That takes hidden for the width of Q and of the way back. It is heads × head_dim."
    return said if math.isclose(made, given, rel_tol=1e-3) else ""


attention_overtakes_at = Task(
    "attention_overtakes_at",
    lambda rng: [(_shape(rng),)],
    _overtakes,
    (
        Mistake(
            "That counts one product per query and key. There are two: query times key gives a score, and score times "
            "value gives the output.",
            lambda shape: _linear_macs(shape) / _pair_macs(shape, products=1),
        ),
        Mistake(
            "That lets only the KV heads attend. Keys are shared, but every query head computes its own scores.",
            lambda shape: _linear_macs(shape) / _pair_macs(shape, "kv_heads"),
        ),
        Mistake(
            "That gives the feed-forward part two matrices. These models have three: gate, up and down.",
            lambda shape: _linear_macs(shape, matrices=2) / _pair_macs(shape),
        ),
        Mistake(
            "That counts the LM head, which is no part of any layer.",
            lambda shape: (_linear_macs(shape) + shape["hidden"] * shape["vocab"]) / _pair_macs(shape),
        ),
        Mistake(
            "That makes K and V as wide as Q. Their projections have kv_heads × head_dim columns.",
            lambda shape: _linear_macs(shape, "heads") / _pair_macs(shape),
        ),
        Mistake(
            "That is one layer against all of them: count layers on both sides, or on neither.",
            lambda shape: _linear_macs(shape) / shape["layers"] / _pair_macs(shape),
        ),
    ),
    explain=_hidden_for_width,
    value=True,
)


# --- the FLOPs of a range ---------------------------------------------------------------------------------------------


def _ranges(rng: random.Random) -> list[tuple[Any, ...]]:
    start, new = rng.randrange(4096, 9000), rng.randrange(200, 4000)
    return [
        (_shape(rng), start, start + new),
        (_shape(rng), 0, rng.randrange(4096, 16384)),
        (_shape(rng), start, start + 1),  # one decoded token
        (_shape(rng), start, start),  # nothing to compute: no LM head either
    ]


prefill_flops = Task(
    "prefill_flops",
    _ranges,
    lambda shape, start, stop: library_prefill_flops(_arch(shape), start, stop),
    (
        Mistake(
            "That is half: a multiply-accumulate is two FLOPs, one multiplication and one addition.",
            lambda shape, start, stop: _flops(shape, start, stop, _triangle(stop) - _triangle(start)) // 2,
        ),
        Mistake(
            "That is not causal: it lets each query see all keys up to stop. The query at position i sees i + 1 keys.",
            lambda shape, start, stop: _flops(shape, start, stop, (stop - start) * stop),
        ),
        Mistake(
            "That ignores start: the new tokens also attend to the start tokens that are cached.",
            lambda shape, start, stop: _flops(shape, start, stop, _triangle(stop - start)),
        ),
        Mistake(
            "That computes the cached positions again: only positions from start to stop are computed.",
            lambda shape, _, stop: _flops(shape, 0, stop, _triangle(stop)),
        ),
        Mistake(
            "One key is missing for each query: a token also attends to itself, so position i sees i + 1 keys.",
            lambda shape, start, stop: _flops(shape, start, stop, _triangle(stop) - _triangle(start) - (stop - start)),
        ),
        Mistake(
            "That runs the LM head for every position. Only the last one is asked for a next token.",
            lambda shape, start, stop: _flops(shape, start, stop, _triangle(stop) - _triangle(start), stop - start),
        ),
        Mistake(
            "The LM head is missing: the last position is multiplied with hidden × vocab weights.",
            lambda shape, start, stop: _flops(shape, start, stop, _triangle(stop) - _triangle(start), 0),
        ),
        Mistake(
            "That takes new × new pairs: it ignores start and is not causal. The query at position i sees i + 1 keys.",
            lambda shape, start, stop: _flops(shape, start, stop, (stop - start) ** 2),
        ),
        Mistake(
            "That lets only the KV heads attend. Keys are shared, but every query head computes its own scores.",
            lambda shape, start, stop: (
                _flops(shape, start, stop, _triangle(stop) - _triangle(start))
                - 2 * (_pair_macs(shape) - _pair_macs(shape, "kv_heads")) * (_triangle(stop) - _triangle(start))
            ),
        ),
        Mistake(
            "That counts one product per query and key: there is a score, and there is the sum of the values.",
            lambda shape, start, stop: (
                _flops(shape, start, stop, _triangle(stop) - _triangle(start))
                - 2 * _pair_macs(shape, products=1) * (_triangle(stop) - _triangle(start))
            ),
        ),
    ),
    explain=lambda _args, expected, _: (
        "An empty range costs nothing, not even an LM head: no token is asked for." if expected == 0 else ""
    ),
)


# --- what decides -----------------------------------------------------------------------------------------------------


flops_per_kv_byte = Task(
    "flops_per_kv_byte",
    lambda rng: [(_shape(rng), dtype_bytes) for dtype_bytes in (4, 2, 4)],
    lambda shape, dtype_bytes: (
        linear_flops(_arch(shape), 1) / kv_bytes(_arch(shape), 1, {2: "bf16", 4: "fp32"}[dtype_bytes])
    ),
    (
        Mistake(
            "That counts K alone: each token leaves a key and a value in every layer.",
            lambda shape, dtype_bytes: 2 * _linear_macs(shape) / (_pair_macs(shape, "kv_heads", 1) * dtype_bytes),
        ),
        Mistake(
            "That stores a key for every query head. Only kv_heads of them are kept.",
            lambda shape, dtype_bytes: 2 * _linear_macs(shape) / (_pair_macs(shape) * dtype_bytes),
        ),
        Mistake(
            "That counts elements, not bytes: each takes dtype_bytes.",
            lambda shape, _: 2 * _linear_macs(shape) / _pair_macs(shape, "kv_heads"),
        ),
        Mistake(
            "That counts multiply-accumulates: each is two FLOPs.",
            lambda shape, dtype_bytes: _linear_macs(shape) / (_pair_macs(shape, "kv_heads") * dtype_bytes),
        ),
    ),
)


# --- a curve through measured times -----------------------------------------------------------------------------------


def _timings(rng: random.Random) -> list[tuple[Any, ...]]:
    tokens = [128, 256, 512, 1024, 2048, 4096]
    cases = []
    # Noise, since three parts fit clean times in any way of weighting; and times whose best line starts below zero.
    for fixed_s in (rng.uniform(0.02, 0.06), rng.uniform(0.01, 0.02), -rng.uniform(0.01, 0.02)):
        a, b = rng.uniform(3e-4, 9e-4), rng.uniform(1e-7, 3e-7)
        clean = [fixed_s + a * n + b * n * n for n in tokens]
        cases.append((tokens, [round(s * rng.uniform(0.97, 1.03), 5) for s in clean]))
    return cases


def _fit(
    tokens: Sequence[int], seconds: Sequence[float], *, powers: Sequence[int] = (0, 1, 2), relative: bool = True
) -> list[float]:
    n, s = np.asarray(tokens, float), np.asarray(seconds, float)
    weight = 1 / s if relative else np.ones_like(s)
    columns = np.stack([n**power for power in powers], axis=1) * weight[:, None]
    found = dict(zip(powers, np.linalg.lstsq(columns, s * weight, rcond=None)[0], strict=True))
    return [float(found.get(power, 0.0)) for power in (0, 1, 2)]


def _wrong(change: Callable[[list[float]], list[float]], **how: Any) -> Callable[..., list[float]]:
    return lambda tokens, seconds: change(_fit(tokens, seconds, **how))


def _without_negative(tokens: Sequence[int], seconds: Sequence[float], **how: Any) -> list[float]:
    free = _fit(tokens, seconds, **how)
    return free if free[0] >= 0 else _fit(tokens, seconds, powers=(1, 2), **how)


def _growth(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float, float]:
    # Loaded when somebody judges: it brings torch, which would cost each check and each graded notebook seconds.
    from kvlab.experiments.lengths import fit_growth

    return fit_growth(tokens, seconds)


fit_prefill = Task(
    "fit_prefill",
    _timings,
    _growth,
    (
        Mistake(
            "t0 is negative: no pass is over before it began. Where that happens, fit a and b again without t0.",
            _wrong(lambda found: found),
        ),
        Mistake(
            "Setting a negative t0 to 0 is half of it: a and b were chosen to go with that t0. Fit them again without.",
            _wrong(lambda found: [max(0.0, found[0]), *found[1:]]),
        ),
        Mistake(
            "That weighs all seconds alike, so the longest prefill decides alone. Divide each equation by its seconds.",
            lambda tokens, seconds: _without_negative(tokens, seconds, relative=False),
        ),
        Mistake(
            "There is no fixed part in that: where the fit puts t0 above 0, a pass costs something before its first "
            "token.",
            _wrong(lambda found: found, powers=(1, 2)),
        ),
        Mistake(
            "That is a straight line: without the part that grows with tokens² long prefixes come out too cheap.",
            _wrong(lambda found: [max(0.0, found[0]), *found[1:]], powers=(0, 1)),
        ),
        Mistake(
            "That weighs twice. np.polyfit squares w times the error, so relative errors need w = 1 ÷ seconds.",
            lambda tokens, seconds: [
                float(part) for part in np.polyfit(tokens, seconds, 2, w=1 / np.asarray(seconds) ** 2)[::-1]
            ],
        ),
        Mistake(
            "The order is (t0, a, b): seconds, seconds per token, seconds per token².",
            lambda tokens, seconds: _without_negative(tokens, seconds)[::-1],
        ),
    ),
    same=lambda expected, given: (
        len(given) == 3
        and all(math.isclose(want, got, rel_tol=2e-3, abs_tol=1e-12) for want, got in zip(expected, given, strict=True))
    ),
)

TASKS = (attention_overtakes_at, prefill_flops, flops_per_kv_byte, fit_prefill)
