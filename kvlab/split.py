"""The best split: recompute the head of the prefix while its tail loads. A search over heads; knows no machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

__all__ = ["Split", "best_split"]

# The search begins with so many heads, evenly spaced.
_FIRST_HEADS = 8


@dataclass(frozen=True)
class Split:
    """Recompute the next `recompute_tokens` of the prefix, for `compute_s`, while the tail behind them loads.

    `load_s` is the tail's, the wait included. `cost_s` adds to `ttft_s` the delay inflicted on others, as the verdict's
    other costs do.
    """

    recompute_tokens: int
    reload_tokens: int
    ttft_s: float
    cost_s: float
    load_s: float
    compute_s: float


def best_split(split: Callable[[int], Split], blocks: int, *, delays_cost: bool) -> Split:
    """The split of least cost among heads of 1 to `blocks` - 1 blocks; `split` prices one, `blocks` is at least 2.

    Unless `delays_cost`, the fastest is the cheapest, and it is where loading (which falls with the head) and computing
    (which rises) cross. Else the cheapest may be anywhere: evenly spaced heads, then half the distance on both sides of
    the best, and so on, about 8 + 2 log2(blocks ÷ 8) of them. That is exact where the cost is convex, which it is
    where loading and computing are; measured curves dent them, and the evenly spaced heads keep out of the dents.
    """
    split = cache(split)
    low, high = 1, blocks
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if split(middle).compute_s >= split(middle).load_s else (middle + 1, high)
    heads = [low - 1, low]
    if delays_cost:
        step = max(1, blocks // _FIRST_HEADS)
        best = min(range(1, blocks, step), key=lambda head: split(head).cost_s)
        while step > 1:
            step = -(-step // 2)
            near = [head for head in (best - step, best, best + step) if 0 < head < blocks]
            best = min(near, key=lambda head: split(head).cost_s)
        heads.append(best)
    return min((split(head) for head in heads if 0 < head < blocks), key=lambda one: one.cost_s)
