"""Lesson 04: reload or recompute? Both times to first token, where they cross, and a published crossover by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvlab.crossings import crossings_of
from kvlab.lab.task import Mistake, Task

__all__ = ["TASKS"]

_Numbers = dict[str, float]


def _prefill(rng: random.Random) -> _Numbers:
    return {
        "fixed_s": round(rng.uniform(0.1, 0.2), 3),
        "flops_per_token": rng.randrange(200, 400) * 10**6,
        "flops_per_pair": rng.randrange(60, 90) * 10**3,
        "flops_per_s": rng.randrange(100, 400) * 10**9,
    }


def _link(rng: random.Random) -> _Numbers:
    return {
        "kv_bytes_per_token": rng.randrange(16, 48) * 1024,
        "gb_per_s": round(rng.uniform(0.015, 0.05), 4),
        "overhead_s": round(rng.uniform(0.05, 0.09), 3),
    }


def _seconds(start: int, stop: int, prefill: _Numbers) -> float:
    """One pass over positions [start, stop): a query at position i sees i + 1 keys."""
    pairs = (stop * (stop + 1) - start * (start + 1)) / 2
    flops = prefill["flops_per_token"] * (stop - start) + prefill["flops_per_pair"] * pairs
    return prefill["fixed_s"] + flops / prefill["flops_per_s"]


def _bytes_s(prefix: int, link: _Numbers) -> float:
    return prefix * link["kv_bytes_per_token"] / (link["gb_per_s"] * 1e9)


def _loading_s(prefix: int, link: _Numbers) -> float:
    return link["overhead_s"] + _bytes_s(prefix, link) if prefix else 0.0


def _reload(prefix: int, suffix: int, link: _Numbers, prefill: _Numbers) -> float:
    return _loading_s(prefix, link) + _seconds(prefix, prefix + suffix, prefill)


def _reload_cases(rng: random.Random) -> list[tuple[Any, ...]]:
    # A short prefix first: there the fixed parts show.
    prefixes = (rng.randrange(4, 16) * 16, rng.randrange(32, 512) * 16, 0)
    return [(prefix, rng.randrange(48, 200), _link(rng), _prefill(rng)) for prefix in prefixes]


ttft_reload = Task(
    "ttft_reload",
    _reload_cases,
    _reload,
    (
        Mistake(
            "The suffix is left out: the first new token comes only after the suffix has been computed, in both arms.",
            lambda prefix, _suffix, link, _prefill: _loading_s(prefix, link),
        ),
        Mistake(
            "That computes the suffix as if it stood alone: its tokens attend to the whole reloaded prefix as well,"
            " so its positions are [prefix, prefix + suffix).",
            lambda prefix, suffix, link, prefill: _loading_s(prefix, link) + _seconds(0, suffix, prefill),
        ),
        Mistake(
            "That takes GB/s for Gb/s: bytes over bytes per second, nothing is multiplied by 8.",
            lambda prefix, suffix, link, prefill: _reload(
                prefix, suffix, link | {"gb_per_s": link["gb_per_s"] / 8}, prefill
            ),
        ),
        Mistake(
            "The link's overhead is left out: a request costs that much before its first byte.",
            lambda prefix, suffix, link, prefill: _bytes_s(prefix, link) + _seconds(prefix, prefix + suffix, prefill),
        ),
        Mistake(
            "With no prefix there is nothing to load, so the link's overhead is not paid either.",
            lambda prefix, suffix, link, prefill: (
                link["overhead_s"] + _bytes_s(prefix, link) + _seconds(prefix, prefix + suffix, prefill)
            ),
        ),
    ),
)


ttft_recompute = Task(
    "ttft_recompute",
    lambda rng: [(prefix, suffix, prefill) for prefix, suffix, _, prefill in _reload_cases(rng)],
    lambda prefix, suffix, prefill: _seconds(0, prefix + suffix, prefill),
    (
        Mistake(
            "The suffix is left out: recomputing the prefix alone gives no new token. Both arms must end at the same"
            " point, or the comparison favours one.",
            lambda prefix, _suffix, prefill: _seconds(0, prefix, prefill),
        ),
        Mistake(
            "That is two passes, prefix and suffix apart: recompute is one pass and pays fixed_s once.",
            lambda prefix, suffix, prefill: _seconds(0, prefix, prefill) + _seconds(prefix, prefix + suffix, prefill),
        ),
        Mistake(
            "That adds the suffix as if it stood alone: its tokens attend to the prefix too. Count the pairs of"
            " all prefix + suffix tokens.",
            lambda prefix, suffix, prefill: (
                _seconds(0, prefix, prefill) + _seconds(0, suffix, prefill) - prefill["fixed_s"]
            ),
        ),
        Mistake(
            "That counts the whole square of attention: a token sees itself and what came before,"
            " n (n + 1) / 2 pairs in all.",
            lambda prefix, suffix, prefill: (
                prefill["fixed_s"]
                + (prefix + suffix)
                * (prefill["flops_per_token"] + prefill["flops_per_pair"] * (prefix + suffix))
                / prefill["flops_per_s"]
            ),
        ),
    ),
)


def _curves(rng: random.Random, winners: Sequence[str]) -> tuple[Any, ...]:
    """Lengths and both times; `winners`: one letter a length, "l"oad, "c"ompute or a tie "="."""
    tokens, at = [], rng.randrange(2, 6) * 16
    for _ in winners:
        tokens.append(at)
        at = round(at * rng.uniform(1.4, 2.2) / 16) * 16
    recompute_s = [round(n * rng.uniform(1.0e-3, 1.1e-3), 6) for n in tokens]
    share = {"l": lambda: rng.uniform(0.6, 0.9), "c": lambda: rng.uniform(1.1, 1.5), "=": lambda: 1.0}
    reload_s = [
        b if winner == "=" else round(b * share[winner](), 6) for b, winner in zip(recompute_s, winners, strict=True)
    ]
    return tokens, reload_s, recompute_s


def _changes(reload_s: Sequence[float], recompute_s: Sequence[float]) -> list[int]:
    """Places in the list at which the winner is another one than just before."""
    wins = [a < b for a, b in zip(reload_s, recompute_s, strict=True)]
    return [i for i in range(1, len(wins)) if wins[i] != wins[i - 1]]


def _changed_at(tokens: Sequence[int], reload_s: Sequence[float], recompute_s: Sequence[float]) -> list[int]:
    return [tokens[i] for i in _changes(reload_s, recompute_s)]


crossovers = Task(
    "crossovers",
    lambda rng: [
        _curves(rng, "cc" + "c" * rng.randrange(2) + "lll"),
        _curves(rng, "ll" + "c" * rng.randrange(1, 3) + "ll"),
        _curves(rng, "llll" + "l" * rng.randrange(3)),
        _curves(rng, "ccc" + "c" * rng.randrange(3)),
        _curves(rng, "cc==ll"),
    ],
    # The library's own, which the mistakes below must not call: they are handed in as a learner's would be.
    lambda tokens, a_s, b_s: [crossing.tokens for crossing in crossings_of(tokens, a_s, b_s)],
    (
        Mistake(
            "Those are places in the list: return the prefix lengths that stand there, in tokens.",
            lambda _tokens, reload_s, recompute_s: _changes(reload_s, recompute_s),
        ),
        Mistake(
            "That is the last length of the old winner: report the first length at which the new one wins.",
            lambda tokens, reload_s, recompute_s: [tokens[i - 1] for i in _changes(reload_s, recompute_s)],
        ),
        Mistake(
            "That stops at the first change: curves of real machines may cross twice or more.",
            lambda tokens, reload_s, recompute_s: _changed_at(tokens, reload_s, recompute_s)[:1],
        ),
        Mistake(
            "That reports only where reload begins to win; where recompute wins again is a crossing, too.",
            lambda tokens, reload_s, recompute_s: [
                tokens[i] for i in _changes(reload_s, recompute_s) if reload_s[i] < recompute_s[i]
            ],
        ),
        Mistake(
            "That assumes that there is a crossing. Here one side wins at every length: the answer is an empty list.",
            lambda tokens, reload_s, recompute_s: _changed_at(tokens, reload_s, recompute_s) or [tokens[-1]],
        ),
        Mistake(
            "One side wins at every length here, from the first on: that is no change of the winner, so an empty list.",
            lambda tokens, reload_s, recompute_s: _changed_at(tokens, reload_s, recompute_s) or [tokens[0]],
        ),
        Mistake(
            "A tie counts for recompute: it moves no bytes, so at equal times reload has not won yet.",
            lambda tokens, reload_s, recompute_s: _changed_at(tokens, recompute_s, reload_s),
        ),
    ),
)


def _least_gb_per_s(
    case: _Numbers, gpus: float | None = None, kv: float = 2, pairs: float = 4, macs: float = 1
) -> float:
    """Mooncake, FAST'25, section 2.2: reuse wins above B = G · 2ds / (gqa · (a·p·d + b·d²)), with a = 4 and b = 22."""
    flops_per_s = (gpus or case["gpus"]) * case["peak_tflops"] * 1e12
    d, p = case["hidden"], case["prefix"]
    bytes_per_token = kv * d * case["bytes_per_value"] / case["gqa"]
    return flops_per_s * bytes_per_token / (macs * (pairs * p * d + 22 * d * d)) / 1e9


mooncake_gb_per_s = Task(
    "mooncake_gb_per_s",
    lambda rng: [
        (
            {
                "gpus": rng.choice((4, 8, 16)),
                "peak_tflops": rng.choice((312, 989, 2250)),
                "hidden": rng.choice((4096, 5120, 8192)),
                "gqa": rng.choice((4, 8)),
                "bytes_per_value": 2,
                "prefix": rng.choice((4096, 8192, 16384, 32768)),
            },
        )
    ],
    _least_gb_per_s,
    (
        Mistake(
            "That is what one GPU needs: G is the peak of all GPUs that share the prefill.",
            lambda case: _least_gb_per_s(case, gpus=1),
        ),
        Mistake(
            "K without V: every token leaves 2 · d · s ÷ gqa bytes in a layer.",
            lambda case: _least_gb_per_s(case, kv=1),
        ),
        Mistake(
            "The attention term is missing: a · p · d FLOPs stand beside b · d².",
            lambda case: _least_gb_per_s(case, pairs=0),
        ),
        Mistake(
            "That counts a multiply-accumulate as one FLOP: the paper's a and b count it as two already.",
            lambda case: _least_gb_per_s(case, macs=0.5),
        ),
    ),
    value=True,
)

TASKS = (ttft_reload, ttft_recompute, crossovers, mooncake_gb_per_s)
