"""Lesson 00: how slow must a link be before recomputing wins?"""

from __future__ import annotations

import random
from typing import Any

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
            "That takes the seconds for milliseconds: recompute_s is in seconds already.",
            lambda kv_bytes, recompute_s: kv_bytes / (recompute_s / 1e3) / 1e9,
        ),
        Mistake(
            "That is upside down: bytes ÷ seconds gives a speed.",
            lambda kv_bytes, recompute_s: recompute_s / kv_bytes * 1e9,
        ),
    ),
)

TASKS = (break_even_gb_per_s,)
