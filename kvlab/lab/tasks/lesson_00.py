"""Lesson 00: how slow must a link be before recomputing wins?"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from kvlab.crossings import settled_crossover
from kvlab.lab.task import Mistake, Task

__all__ = ["TASKS"]


def _links(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(rng.randrange(1, 400) * 2**20, round(rng.uniform(0.01, 4), 3)) for _ in range(4)]


def _break_even(kv_bytes: int, recompute_s: float) -> float:
    return kv_bytes / recompute_s / 1e9


break_even_gb_per_s = Task(
    "break_even_gb_per_s",
    _links,
    _break_even,
    (
        Mistake(
            "That is the answer in Gb/s: the size is in bytes and GB/s counts bytes, so nothing is multiplied by 8.",
            lambda kv_bytes, recompute_s: 8 * _break_even(kv_bytes, recompute_s),
        ),
        Mistake(
            "That is GiB/s (2^30): bandwidth is counted in GB/s of 1e9 bytes.",
            lambda kv_bytes, recompute_s: kv_bytes / recompute_s / 2**30,
        ),
        Mistake(
            "That is MB/s (1e6 bytes), or takes the seconds for milliseconds: GB/s is 1e9 bytes per second.",
            lambda kv_bytes, recompute_s: kv_bytes / (recompute_s / 1e3) / 1e9,
        ),
        Mistake(
            "That is upside down: bytes ÷ seconds gives a speed.",
            lambda kv_bytes, recompute_s: recompute_s / kv_bytes * 1e9,
        ),
    ),
)


def _prefix(rng: random.Random) -> list[tuple[Any, ...]]:
    return [(rng.randrange(20, 400), rng.randrange(300, 4000))]


def _megabits(mib: int, saved_ms: int) -> float:
    return 8 * mib * 2**20 / (saved_ms / 1e3) / 1e6


slowest_useful_mbit_per_s = Task(
    "slowest_useful_mbit_per_s",
    _prefix,
    _megabits,
    (
        Mistake(
            "That is MB/s, in bytes. Networks are sold in Mb/s, in bits: 8 bits are one byte.",
            lambda mib, saved_ms: _megabits(mib, saved_ms) / 8,
        ),
        Mistake(
            "That divides by 8. The size is in bytes and each byte is 8 bits on the link: multiply.",
            lambda mib, saved_ms: _megabits(mib, saved_ms) / 64,
        ),
        Mistake(
            "That counts 1e6 bytes to a MiB. A MiB is 2^20 = 1,048,576 bytes; the M of Mb/s is 1e6.",
            lambda mib, saved_ms: _megabits(mib, saved_ms) * 1e6 / 2**20,
        ),
        Mistake(
            "That divides by milliseconds as if they were seconds, or is in Gb/s: 1 Gb/s is 1,000 Mb/s.",
            lambda mib, saved_ms: _megabits(mib, saved_ms) / 1e3,
        ),
    ),
    value=True,
)


_LENGTHS = (16, 64, 256, 1024, 4096)


def _record(rng: random.Random) -> dict[str, Any]:
    """A small `kvlab.crossover/1`, with the fields that the task reads and those that it could confuse them with."""
    recompute_s = [round(tokens * rng.uniform(1.6, 2.2) / 1e3, 4) for tokens in _LENGTHS]
    flip = rng.randrange(2, len(_LENGTHS) - 1)
    tiers = []
    # From the first, from one in the middle, never, and one that wins once by luck and loses again.
    for name, wins in (
        ("host", {0, 1, 2, 3, 4}),
        ("disk", set(range(flip, 5))),
        ("old phone", set[int]()),
        ("busy network", {0, 3, 4}),
    ):
        reload_s = [
            round(s * (rng.uniform(0.2, 0.8) if i in wins else rng.uniform(1.3, 3)), 4)
            for i, s in enumerate(recompute_s)
        ]
        predicted = [round(s * (0.5 if i >= 1 else 1.5), 4) for i, s in enumerate(recompute_s)]
        tiers.append(
            {
                "name": name,
                "tokens": list(_LENGTHS),
                "reload_s": reload_s,
                "recompute_s": recompute_s,
                "predicted_reload_s": predicted,
                "predicted_recompute_s": recompute_s,
            }
        )
    return {"schema": "kvlab.crossover/1", "tiers": tiers}


def _by_tier(found: Callable[[Mapping[str, Any]], int | None]) -> Callable[[Mapping[str, Any]], dict[str, int | None]]:
    return lambda record: {tier["name"]: found(tier) for tier in record["tiers"]}


def _wins(tier: Mapping[str, Any], reload: str = "reload_s") -> list[int]:
    """Indices of the lengths at which reload is faster."""
    return [i for i, (a, b) in enumerate(zip(tier[reload], tier["recompute_s"], strict=True)) if a < b]


def _settled(tier: Mapping[str, Any], reload: str = "reload_s") -> int | None:
    """The library's rule answers 0 where reload wins everywhere; a record knows nothing below its first length."""
    at = settled_crossover(tier["tokens"], tier[reload], tier["recompute_s"])
    return _LENGTHS[0] if at == 0 else at


def _first_win(tier: Mapping[str, Any]) -> int | None:
    wins = _wins(tier)
    return _LENGTHS[wins[0]] if wins else None


def _index(tier: Mapping[str, Any]) -> int | None:
    at = _settled(tier)
    return None if at is None else _LENGTHS.index(at)


def _last_loss(tier: Mapping[str, Any]) -> int | None:
    losses = [n for i, n in enumerate(_LENGTHS) if i not in _wins(tier)]
    return losses[-1] if losses else _LENGTHS[0]


reload_wins_from = Task(
    "reload_wins_from",
    lambda rng: [(_record(rng),) for _ in range(3)],
    _by_tier(_settled),
    (
        Mistake(
            "That is where reload wins for the first time. On the busy network it loses again at a longer prefix: take"
            " the first length from which it wins at every longer one too.",
            _by_tier(_first_win),
        ),
        Mistake(
            "Those are the predicted times. The record keeps what was measured in reload_s and recompute_s.",
            _by_tier(lambda tier: _settled(tier, "predicted_reload_s")),
        ),
        Mistake(
            "That is the position in the list. The answer is a number of tokens: look it up in tier['tokens'].",
            _by_tier(_index),
        ),
        Mistake(
            "That is where recompute wins: reload wins where its seconds are the smaller ones.",
            _by_tier(lambda tier: _settled({**tier, "reload_s": tier["recompute_s"], "recompute_s": tier["reload_s"]})),
        ),
        Mistake(
            "Where reload never wins the answer is None: 0 would say that it always does.",
            _by_tier(lambda tier: _settled(tier) or 0),
        ),
        Mistake(
            "That is the longest prefix at which recompute still wins; reload wins from the next one on.",
            _by_tier(_last_loss),
        ),
    ),
)

TASKS = (break_even_gb_per_s, slowest_useful_mbit_per_s, reload_wins_from)
