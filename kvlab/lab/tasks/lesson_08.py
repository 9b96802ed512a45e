"""Lesson 08: when saving an idle cache pays, what keeping one is worth, and which blocks leave in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.lab.task import Mistake, Task

__all__ = ["TASKS"]

_Block = dict[str, Any]

# When saving pays ----------------------------------------------------------------------------------------------------


def _stored(rng: random.Random) -> list[tuple[Any, ...]]:
    recompute_s = round(rng.uniform(0.6, 2.0), 2)
    return [
        (
            {
                "gib": rng.randrange(2, 9),
                "store_gb_per_s": rng.choice((3, 4, 5, 6)),
                "others_lose_percent": rng.randrange(2, 9),
                "reload_s": round(recompute_s * rng.uniform(0.2, 0.5), 2),
                "recompute_s": recompute_s,
            },
        )
    ]


def _store_s(case: dict[str, float]) -> float:
    return case["gib"] * 2**30 / (case["store_gb_per_s"] * 1e9)


def _percent(case: dict[str, float], share: float | None = None, saved_s: float | None = None) -> float:
    """100 × what storing costs others ÷ what a return saves."""
    lost = case["others_lose_percent"] / 100 if share is None else share
    return 100 * _store_s(case) * lost / (saved_s or case["recompute_s"] - case["reload_s"])


break_even_percent = Task(
    "break_even_percent",
    _stored,
    _percent,
    (
        Mistake("The cost of storing is ignored: with it for free any chance above 0 would do.", lambda _case: 0.0),
        Mistake(
            "That charges every second of the store. Only the share that others lose in it is a cost.",
            lambda case: _percent(case, share=1.0),
        ),
        Mistake(
            "That divides by the whole recompute. Who comes back still has to reload: the return saves the difference.",
            lambda case: _percent(case, saved_s=case["recompute_s"]),
        ),
        Mistake("That is the chance as a share of 1: the answer is in percent.", lambda case: _percent(case) / 100),
        Mistake(
            "That takes a GiB for 1e9 bytes. It is 2^30; the G of GB/s is 1e9.",
            lambda case: _percent(case) * 1e9 / 2**30,
        ),
    ),
    value=True,
)


def _moves(rng: random.Random) -> list[tuple[Any, ...]]:
    return [
        (
            rng.randrange(1, 8) * 2**29,
            round(rng.uniform(2, 5), 2),
            round(rng.uniform(6, 20), 2),
            round(rng.uniform(0.01, 0.05), 3),
        )
        for _ in range(3)
    ]


def _moved_s(kv_bytes: int, gb_per_s: float) -> float:
    return kv_bytes / (gb_per_s * 1e9)


useful_gap_s = Task(
    "useful_gap_s",
    _moves,
    lambda kv_bytes, store, load, overhead_s: 2 * overhead_s + _moved_s(kv_bytes, store) + _moved_s(kv_bytes, load),
    (
        Mistake(
            "The store is left out: its blocks are not free before their bytes have left.",
            lambda kv_bytes, _store, load, overhead_s: overhead_s + _moved_s(kv_bytes, load),
        ),
        Mistake(
            "The way back is left out: blocks are taken again from the moment in which the reload begins.",
            lambda kv_bytes, store, _load, overhead_s: overhead_s + _moved_s(kv_bytes, store),
        ),
        Mistake(
            "The overhead is paid twice: once for the store and once for the reload.",
            lambda kv_bytes, store, load, overhead_s: overhead_s + _moved_s(kv_bytes, store) + _moved_s(kv_bytes, load),
        ),
        Mistake(
            "That moves both ways at the mean of the two speeds. Times add up, speeds do not: the slow way takes longer"
            " than the fast one gains.",
            lambda kv_bytes, store, load, overhead_s: 2 * overhead_s + 2 * _moved_s(kv_bytes, (store + load) / 2),
        ),
        Mistake(
            "That takes GB/s for Gb/s: bytes over bytes per second, nothing is multiplied by 8.",
            lambda kv_bytes, store, load, overhead_s: (
                2 * overhead_s + 8 * (_moved_s(kv_bytes, store) + _moved_s(kv_bytes, load))
            ),
        ),
    ),
)

# What keeping is worth -----------------------------------------------------------------------------------------------


def _caches(rng: random.Random) -> list[tuple[Any, ...]]:
    def cache(reload_of_recompute: float, chance: float) -> tuple[Any, ...]:
        recompute_s = round(rng.uniform(0.4, 2.0), 3)
        return rng.randrange(24, 60) * 2**28, round(recompute_s * reload_of_recompute, 3), recompute_s, chance

    return [
        cache(rng.uniform(0.2, 0.6), round(rng.uniform(0.7, 0.95), 2)),
        cache(rng.uniform(1.5, 4.0), round(rng.uniform(0.7, 0.95), 2)),
        cache(rng.uniform(0.2, 0.6), 1.0),
        cache(rng.uniform(0.2, 0.6), 0.0),
    ]


def _score(size: int, reload_s: float, recompute_s: float, p_return: float) -> float:
    return p_return * min(reload_s, recompute_s) / (size / 2**30)


score = Task(
    "score",
    _caches,
    _score,
    (
        Mistake(
            "That is what the whole cache is worth, whatever room it takes. A giant would stay and push out ten small"
            " ones that are worth more together: divide by its GiB.",
            lambda _size, reload_s, recompute_s, p_return: p_return * min(reload_s, recompute_s),
        ),
        Mistake(
            "The chance of return is left out: a cache that nobody comes back for is worth nothing.",
            lambda size, reload_s, recompute_s, _p_return: _score(size, reload_s, recompute_s, 1.0),
        ),
        Mistake(
            "That counts on recomputing. Whoever comes back takes the cheaper way, and here that is the reload.",
            lambda size, _reload_s, recompute_s, p_return: _score(size, recompute_s, recompute_s, p_return),
        ),
        Mistake(
            "That counts on the reload. Whoever comes back takes the cheaper way, and here that is to recompute.",
            lambda size, reload_s, _recompute_s, p_return: _score(size, reload_s, reload_s, p_return),
        ),
        Mistake(
            "That adds both ways up: only one of them is taken.",
            lambda size, reload_s, recompute_s, p_return: p_return * (reload_s + recompute_s) / (size / 2**30),
        ),
        Mistake(
            "That is per GB of 1e9 bytes; memory is counted in GiB of 2^30.",
            lambda size, reload_s, recompute_s, p_return: _score(size, reload_s, recompute_s, p_return) * 1e9 / 2**30,
        ),
    ),
)

# Who leaves ----------------------------------------------------------------------------------------------------------


def _evicted(
    blocks: Sequence[_Block],
    high: int,
    low: int,
    *,
    key: Callable[[_Block], Any] = lambda block: block["score"],
    running: bool = False,
    inner: bool = False,
    late: bool = True,
) -> list[int]:
    """The right order, or a wrong one: another `key`, `running` blocks too, `inner` ones too, or not `late` ends of
    chains, which come to be ends when their children have left.
    """
    here = {block["id"]: block for block in blocks}
    gone: list[int] = []
    parents = {block["parent"] for block in blocks}
    while len(blocks) > high and len(blocks) - len(gone) > low:
        if late:
            parents = {block["parent"] for block in here.values()}
        free = [
            block for block in here.values() if (running or not block["refs"]) and (inner or block["id"] not in parents)
        ]
        if not free:
            break
        gone.append(min(free, key=lambda block: (key(block), block["id"]))["id"])
        del here[gone[-1]]
    return gone


def _pool(rng: random.Random) -> tuple[list[_Block], int]:
    """A preamble that four agents share, one of which runs; and how many blocks are idle.

    The running agent's end has the least score of all. Of the idle ones an inner block has the least, the block behind
    it the next. The end that was used longest ago has the most.
    """
    ids = iter(rng.sample(range(100, 1000), 40))
    blocks: list[_Block] = []

    def chain(parent: int | None, scores: Sequence[float], used_s: int, refs: int) -> int:
        for value in scores:
            blocks.append({"id": next(ids), "parent": parent, "refs": refs, "score": round(value, 3), "used_s": used_s})
            parent = blocks[-1]["id"]
        assert parent is not None
        return parent

    ages = rng.sample(range(20, 90), 3)
    preamble = chain(None, [rng.uniform(5, 6), rng.uniform(5, 6)], 99, 1)
    chain(preamble, [rng.uniform(3, 4), rng.uniform(3, 4), rng.uniform(0, 0.1)], 99, 1)
    chain(preamble, [rng.uniform(1, 2), rng.uniform(0.2, 0.3), rng.uniform(0.4, 0.5)], ages[0], 0)
    chain(preamble, [rng.uniform(1, 2) for _ in range(rng.randrange(2, 4))], ages[1], 0)
    asked = chain(preamble, [rng.uniform(1, 2) for _ in range(2)], ages[2], 0)
    chain(asked, [rng.uniform(2, 3)], 10, 0)  # one of two branches
    chain(asked, [rng.uniform(1, 2)], ages[2], 0)
    rng.shuffle(blocks)
    return blocks, sum(not block["refs"] for block in blocks)


def _pools(rng: random.Random) -> list[tuple[Any, ...]]:
    (first, idle), (second, _), (third, more_idle) = (_pool(rng) for _ in range(3))
    return [
        (first, len(first) - 2, len(first) - rng.randrange(4, idle - 1)),
        (second, len(second), len(second) - 4),
        (third, len(third) - 1, len(third) - more_idle - 2),
    ]


def _first_wrong(args: tuple[Any, ...], expected: list[int], given: Any) -> str:
    """Which block should not have left then, or that too few or too many did."""
    blocks = {block["id"]: block for block in args[0]}
    for right, got in zip(expected, given, strict=False):
        if right == got:
            blocks.pop(got)
            continue
        if got not in blocks:
            return f"Block {got} is not there (any more)."
        if blocks[got]["refs"]:
            return f"Block {got} is in use."
        if any(block["parent"] == got for block in blocks.values()):
            return f"Block {got} still has a block behind it."
        return f"Block {right} (score {blocks[right]['score']}) goes before block {got} ({blocks[got]['score']})."
    return f"{len(expected)} blocks have to leave, not {len(given)}."


evict = Task(
    "evict",
    _pools,
    _evicted,
    (
        Mistake(
            "That is LRU: it looks at used_s alone. The least score goes first, however long ago it was used.",
            lambda blocks, high, low: _evicted(blocks, high, low, key=lambda block: block["used_s"]),
        ),
        Mistake(
            "A block with refs above 0 left: a running request reads it, and would read somebody else's bytes.",
            lambda blocks, high, low: _evicted(blocks, high, low, running=True),
        ),
        Mistake(
            "A parent left before its child. That is a score per block: the child is useless without all in front of"
            " it, yet it still takes room.",
            lambda blocks, high, low: _evicted(blocks, high, low, inner=True),
        ),
        Mistake(
            "When its last child has left, a parent is the end of its chain and may go next: look again after each"
            " block.",
            lambda blocks, high, low: _evicted(blocks, high, low, late=False),
        ),
        Mistake(
            "That stops at `high`: once begun, eviction goes on down to `low`, or the next block starts it again.",
            lambda blocks, high, _low: _evicted(blocks, high, high),
        ),
        Mistake(
            "Nothing had to leave: eviction begins only above `high`.",
            lambda blocks, _high, low: _evicted(blocks, low, low),
        ),
    ),
    explain=_first_wrong,
    points=2,
)

TASKS = (break_even_percent, useful_gap_s, score, evict)
