"""Lesson 03: what a link gives: pieces and their bytes, the bandwidth that overhead leaves, and runs of blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.lab.task import Mistake, Task
from kvlab.machine import Curve, Link

__all__ = ["TASKS"]

_Pairs = list[tuple[int, int]]
_Runs = list[list[int]]


# --- type the number --------------------------------------------------------------------------------------------------


def _pool(rng: random.Random) -> list[tuple[Any, ...]]:
    block = rng.choice((16, 32, 64))
    return [
        (
            {
                "layers": rng.randrange(12, 64),
                "kv_heads": rng.choice((3, 5, 6)),
                "head_dim": rng.choice((64, 128)),
                "block_tokens": block,
                "dtype_bytes": 2,
                "prefix_tokens": block * rng.randrange(30, 300) + rng.randrange(1, block),
            },
        )
    ]


def _copies(pool: dict[str, int], pieces: int, prefix: int | None = None) -> int:
    """Copies of a prefix that fills blocks from the front, `pieces` for each block."""
    return -(-(prefix or pool["prefix_tokens"]) // pool["block_tokens"]) * pieces


copies_of_a_prefix = Task(
    "copies_of_a_prefix",
    _pool,
    lambda pool: _copies(pool, 2 * pool["layers"]),
    (
        Mistake(
            "K and V lie apart in each layer of this pool: that is two copies, not one.",
            lambda pool: _copies(pool, pool["layers"]),
        ),
        Mistake(
            "That is one copy per block, as if all layers lay together. Layer-major means that they do not.",
            lambda pool: _copies(pool, 1),
        ),
        Mistake(
            "That copies each token for itself. The tokens of one block lie together within a layer.",
            lambda pool: 2 * pool["layers"] * pool["prefix_tokens"],
        ),
        Mistake(
            "The last block is partly filled, and it moves as well: round up.",
            lambda pool: pool["prefix_tokens"] // pool["block_tokens"] * 2 * pool["layers"],
        ),
        Mistake(
            "The heads of one token lie together: they do not add copies.",
            lambda pool: _copies(pool, 2 * pool["layers"] * pool["kv_heads"]),
        ),
    ),
    value=True,
)


# --- the bandwidth that overhead leaves -------------------------------------------------------------------------------


def _transfers(rng: random.Random) -> list[tuple[Any, ...]]:
    """Small, middling and large copies; never a single one, where "overhead once" would be right.

    The first are few and small: there no two of the mistakes below can give the same number.
    """
    return [
        (
            rng.randrange(8, 17) * unit_bytes,
            rng.randrange(*copies),
            round(rng.uniform(20, 60), 1),
            round(rng.uniform(5, 9), 2) * 1e-6,
        )
        for unit_bytes, copies in ((512, (3, 9)), (2**13, (40, 4000)), (2**17, (40, 4000)))
    ]


def _effective(block_bytes: int, n: int, peak: float, overhead_s: float) -> float:
    link = Link(Curve(((1.0, peak),)), per_copy_s=overhead_s, copy="block")
    return n * block_bytes / link.transfer_s(n * block_bytes, n, 1) / 1e9


effective_gb_per_s = Task(
    "effective_gb_per_s",
    _transfers,
    _effective,
    (
        Mistake(
            "That pays the overhead once. Every copy pays it.",
            lambda block_bytes, n, peak, overhead_s: (
                n * block_bytes / (overhead_s + n * block_bytes / (peak * 1e9)) / 1e9
            ),
        ),
        Mistake(
            "That pays the overhead alone and leaves out the time that the bytes take at peak.",
            lambda block_bytes, _, __, overhead_s: block_bytes / overhead_s / 1e9,
        ),
        Mistake(
            "That is the peak: what remains if copies cost nothing but their bytes, or if peak is taken for bytes per "
            "second (it is in GB/s of 1e9 bytes).",
            lambda _, __, peak, ___: peak,
        ),
        Mistake(
            "That is Gb/s: bytes were multiplied by 8. GB/s counts bytes.",
            lambda block_bytes, n, peak, overhead_s: 8 * _effective(block_bytes, n, peak, overhead_s),
        ),
        Mistake(
            "That is bytes per second: divide by 1e9 for GB/s.",
            lambda block_bytes, n, peak, overhead_s: 1e9 * _effective(block_bytes, n, peak, overhead_s),
        ),
    ),
)


# --- runs -------------------------------------------------------------------------------------------------------------


def _scattered_pairs(rng: random.Random) -> list[tuple[Any, ...]]:
    """Blocks in runs on both sides, in runs on one side alone, with gaps, and shuffled."""
    cases: list[tuple[Any, ...]] = []
    for shuffled in (True, False, True):
        pairs: _Pairs = []
        src, dst = rng.randrange(4), rng.randrange(100, 120)
        # Between two pieces: nothing is skipped, only targets are, only sources are, and as many on both sides.
        for skipped in (*rng.sample([(0, 0), (0, 6), (4, 0), (2, 2)], 4), (1, 1)):
            for _ in range(rng.randrange(2, 4)):
                src, dst = src + 1, dst + 1
                pairs.append((src, dst))
            src, dst = src + skipped[0], dst + skipped[1]
        offset = 200 + max(dst for _, dst in pairs)
        # At the end sources go on and targets count down.
        pairs += [(src + 1 + i, offset - i) for i in range(3)]
        if shuffled:
            rng.shuffle(pairs)
        cases.append(([a for a, _ in pairs], [b for _, b in pairs]))
    return [*cases, ([], [])]


def _merge(pairs: _Pairs, joins: Callable[[tuple[int, int], tuple[int, int]], bool]) -> _Runs:
    """Runs [src, dst, count] of pairs in the given order; `joins(last, next)` says which go on."""
    runs: _Runs = []
    last = (0, 0)
    for pair in pairs:
        if runs and joins(last, pair):
            runs[-1][2] += 1
        else:
            runs.append([*pair, 1])
        last = pair
    return runs


def _both(last: tuple[int, int], pair: tuple[int, int]) -> bool:
    return pair == (last[0] + 1, last[1] + 1)


def _coalesce(src: Sequence[int], dst: Sequence[int]) -> _Runs:
    return _merge(sorted(zip(src, dst, strict=True)), _both)


def _spans(src: Sequence[int], dst: Sequence[int]) -> _Runs:
    runs: _Runs = []
    for a, b in sorted(zip(src, dst, strict=True)):
        if runs and a - runs[-1][0] == b - runs[-1][1]:
            runs[-1][2] = a - runs[-1][0] + 1
        else:
            runs.append([a, b, 1])
    return runs


def _explain_runs(_: tuple[Any, ...], expected: _Runs, given: _Runs) -> str:
    if sorted(given) == expected:
        return "These are the runs, in another order: sort them by src."
    fewer = len(given) > len(expected)
    return "Fewer runs are possible: sort the pairs, then join those that go on by one on both sides." if fewer else ""


coalesce = Task(
    "coalesce",
    _scattered_pairs,
    _coalesce,
    (
        Mistake(
            "Each side was sorted for itself, so blocks land at the wrong targets: sort the pairs.",
            lambda src, dst: _merge(list(zip(sorted(src), sorted(dst), strict=True)), _both),
        ),
        Mistake(
            "Only src was looked at. Both sides must go on: a run is one copy to one place.",
            lambda src, dst: _merge(sorted(zip(src, dst, strict=True)), lambda a, b: b[0] == a[0] + 1),
        ),
        Mistake(
            "Only dst was looked at. Both sides must go on: a run is one copy from one place.",
            lambda src, dst: _merge(sorted(zip(src, dst, strict=True)), lambda a, b: b[1] == a[1] + 1),
        ),
        Mistake(
            "That merges across a gap: both sides jump equally far, but the blocks between them are not asked for.",
            lambda src, dst: _merge(sorted(zip(src, dst, strict=True)), lambda a, b: b[0] - a[0] == b[1] - a[1] > 0),
        ),
        Mistake("That merges across a gap, and counts blocks in it that are not asked for.", _spans),
        Mistake(
            "The last run is missing: after the loop one is still open.",
            lambda src, dst: _coalesce(src, dst)[:-1],
        ),
        Mistake(
            "The pairs were taken in the order given. Copies may run in any order: sort the pairs by src first.",
            lambda src, dst: _merge(list(zip(src, dst, strict=True)), _both),
        ),
    ),
    explain=_explain_runs,
)

TASKS = (copies_of_a_prefix, effective_gb_per_s, coalesce)
