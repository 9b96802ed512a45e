"""Lesson 07: when does a copy cost nothing, and whom does it delay? Overlap, the best split, a fair verdict."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.lab.task import Mistake, Task

__all__ = ["TASKS"]

# Layer by layer -------------------------------------------------------------------------------------------------------


def _layers(rng: random.Random) -> list[tuple[Any, ...]]:
    def seconds(low: float, high: float, count: int) -> list[float]:
        return [round(rng.uniform(low, high), 4) for _ in range(count)]

    n = rng.randrange(4, 9)
    return [
        (seconds(0.02, 0.03, n), seconds(0.004, 0.008, n)),  # the link is the slower one
        (seconds(0.004, 0.008, n), seconds(0.02, 0.03, n)),  # compute is
        ([0.01, 0.01, 0.09, 0.01, *seconds(0.01, 0.012, n)], [0.04, 0.04, 0.01, 0.01, *seconds(0.02, 0.03, n)]),
        (seconds(0.02, 0.03, 1), seconds(0.02, 0.03, 1)),
    ]


def _layerwise(load_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """Each layer computes once it has come and the layer before it is done."""
    here_s = done_s = 0.0
    for load, compute in zip(load_s, compute_s, strict=True):
        here_s += load
        done_s = max(done_s, here_s) + compute
    return done_s


def _wait_for_each(load_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """The next load is only asked for when the layer that came is being computed, and one waits for both."""
    steps = zip([*load_s[1:], 0.0], compute_s, strict=True)
    return load_s[0] + sum(max(pair) for pair in steps)


layerwise_s = Task(
    "layerwise_s",
    _layers,
    _layerwise,
    (
        Mistake(
            "That is one after the other: the sum hides nothing. While layer i computes, the link carries layer i + 1.",
            lambda load_s, compute_s: sum(load_s) + sum(compute_s),
        ),
        Mistake(
            "That is the longer of the two alone. It leaves out the fill: the first layer cannot compute before it has"
            " come, nor the last one before everything has.",
            lambda load_s, compute_s: max(sum(load_s), sum(compute_s)),
        ),
        Mistake(
            "That counts only the first layer's load. It is right where compute is the slower side throughout; where"
            " the link is, compute waits again at every layer.",
            lambda load_s, compute_s: load_s[0] + sum(compute_s),
        ),
        Mistake(
            "That counts only the last layer's compute. It is right where the link is the slower side throughout; where"
            " compute is, layers that have come wait for their turn.",
            lambda load_s, compute_s: sum(load_s) + compute_s[-1],
        ),
        Mistake(
            "The link does not wait for compute: it goes on with the next layer at once, and gets ahead where layers"
            " compute slowly. Keep one clock for each of the two.",
            _wait_for_each,
        ),
    ),
)

# Which half -----------------------------------------------------------------------------------------------------------


def _splits(rng: random.Random) -> list[tuple[Any, ...]]:
    """Tables by blocks: entry i is the time for the first i blocks (prefill), or for any i (load)."""
    cases = []
    for link, fixed in ((1.35, 0.0), (0.02, 0.0), (60.0, 0.0), (0.5, 0.2)):
        blocks = rng.randrange(8, 14)
        token_s, pair_s = rng.uniform(0.02, 0.03), rng.uniform(0.003, 0.004)
        prefill_s = [round(n * token_s + n * n * pair_s, 5) for n in range(blocks + 1)]
        a_block_s = link * prefill_s[-1] / blocks
        reload_s = [0.0, *(round(fixed * prefill_s[-1] + n * a_block_s, 5) for n in range(1, blocks + 1))]
        cases.append((blocks, reload_s, prefill_s))
    return cases


def _times(blocks: int, reload_s: Sequence[float], prefill_s: Sequence[float]) -> list[float]:
    """Seconds until the prefix is there, by blocks computed at its head."""
    return [max(reload_s[blocks - head], prefill_s[head]) for head in range(blocks + 1)]


def _least(seconds: Sequence[float], first: int = 0) -> int:
    return first + seconds.index(min(seconds))


def _best_split(blocks: int, reload_s: Sequence[float], prefill_s: Sequence[float]) -> int:
    return _least(_times(blocks, reload_s, prefill_s))


def _reversed(blocks: int, reload_s: Sequence[float], prefill_s: Sequence[float]) -> int:
    """Load the head, then compute the tail behind it, which costs more than as many blocks at the start."""
    return _least([reload_s[blocks - n] + prefill_s[blocks] - prefill_s[blocks - n] for n in range(blocks + 1)])


best_split = Task(
    "best_split",
    _splits,
    _best_split,
    (
        Mistake(
            "Those are the halves reversed: the head is loaded and the tail is computed. The tail attends to the head,"
            " so it must wait for it, and its tokens are the dear ones. Compute the head, load the tail.",
            _reversed,
        ),
        Mistake(
            "That is how many blocks are loaded. The answer is how many are computed, from the start on.",
            lambda blocks, *times: blocks - _best_split(blocks, *times),
        ),
        Mistake(
            "The two go on at the same time, so they do not add up: what counts is the longer one.",
            lambda blocks, reload_s, prefill_s: _least(
                [reload_s[blocks - head] + prefill_s[head] for head in range(blocks + 1)]
            ),
        ),
        Mistake(
            "The end points are missing: to load everything (0) or to compute everything can be the best of all.",
            lambda blocks, *times: _least(_times(blocks, *times)[1:-1], 1),
        ),
        Mistake(
            "Half and half is only right by luck: it depends on both tables.",
            lambda blocks, *_times: blocks // 2,
        ),
    ),
)

# A verdict that counts everybody --------------------------------------------------------------------------------------

_Case = dict[str, float]


def _requests(rng: random.Random) -> list[tuple[Any, ...]]:
    def case(reload_s: float, suffix_s: float, recompute_s: float, slowdown: float, active: int, value: float) -> _Case:
        return {
            "reload_s": round(reload_s * rng.uniform(0.98, 1.02), 4),
            "suffix_s": round(suffix_s * rng.uniform(0.98, 1.02), 4),
            "recompute_s": round(recompute_s * rng.uniform(0.98, 1.02), 4),
            "slowdown": slowdown,
            "active": active,
            "value": value,
        }

    return [
        (case(1.3, 0.1, 1.0, 0.1, 4, 1.0),),  # alone recompute wins; it stops four others for a second each
        (case(0.5, 0.1, 0.7, 0.2, 0, 1.0),),  # nobody else is there
        (case(1.3, 0.2, 1.0, 0.9, 6, 0.5),),  # a copy that takes nearly everything from the others
        (case(1.3, 0.3, 1.0, 0.2, 2, 0.0),),  # the others' time is worth nothing
    ]


def _fair(
    case: _Case, *, recompute: bool = True, suffix: bool = True, slowdown: float | None = None, each: bool = True
) -> list[Any]:
    """[cost of reload, cost of recompute, the cheaper one]."""
    others = case["value"] * (case["active"] if each else 1)
    taken = case["slowdown"] if slowdown is None else slowdown
    delay_s = (case["suffix_s"] if suffix else 0.0) + taken * case["reload_s"]
    reload_s = case["reload_s"] + case["suffix_s"] + others * delay_s
    recompute_s = case["recompute_s"] + (others * case["recompute_s"] if recompute else 0.0)
    return [reload_s, recompute_s, "reload" if reload_s < recompute_s else "recompute"]


fair_verdict = Task(
    "fair_verdict",
    _requests,
    _fair,
    (
        Mistake(
            "Only the reload pays for the delay of others. A prefill stops them too, for all of its time.",
            lambda case: _fair(case, recompute=False),
        ),
        Mistake(
            "Only recompute pays for the delay of others. A copy takes a share of their speed, and the suffix stops"
            " them.",
            lambda case: _fair(case, suffix=False, slowdown=0.0),
        ),
        Mistake(
            "That takes the copy to stop the others altogether. It takes the share `slowdown` of their speed.",
            lambda case: _fair(case, slowdown=1.0),
        ),
        Mistake(
            "The suffix is computed behind a reload too, and it stops the others as any prefill does.",
            lambda case: _fair(case, suffix=False),
        ),
        Mistake(
            "A second of delay hits every active request: multiply by how many there are.",
            lambda case: _fair(case, each=False),
        ),
    ),
)

# The link that is shared ----------------------------------------------------------------------------------------------


def _loads(rng: random.Random) -> list[tuple[Any, ...]]:
    gb_per_s = rng.choice((0.02, 0.5, 5.0))
    size = int(gb_per_s * 1e9)
    first, second, third = (rng.randrange(size // 4, size // 2) for _ in range(3))
    return [
        ([[0.05, first], [0.1, second], [0.15, third]], gb_per_s),
        ([[0.0, first], [2.0, second], [2.1, third]], gb_per_s),  # the link was idle in between
        ([[0.5, first]], gb_per_s),
    ]


def _arrivals(loads: Sequence[Sequence[float]], gb_per_s: float) -> list[float]:
    """First come, first served: each is over when the link has carried what came before it, and itself."""
    free_s, over = 0.0, []
    for asked_s, size in loads:
        free_s = max(free_s, asked_s) + size / (gb_per_s * 1e9)
        over.append(free_s)
    return over


def _each(wait: Callable[[float, float, float, float], float]) -> Callable[..., list[float]]:
    """Waits in seconds by (asked, size in seconds, bytes before it in seconds, when all before it is over)."""

    def waits(loads: Sequence[Sequence[float]], gb_per_s: float) -> list[float]:
        own = [size / (gb_per_s * 1e9) for _, size in loads]
        over = [0.0, *_arrivals(loads, gb_per_s)]
        return [wait(asked, own[i], sum(own[:i]), over[i]) for i, (asked, _) in enumerate(loads)]

    return waits


shared_link_s = Task(
    "shared_link_s",
    _loads,
    _each(lambda asked, own, _before, free: max(free, asked) + own - asked),
    (
        Mistake(
            "Each load is given the whole link. One that was asked for earlier is still on it: wait for that first.",
            _each(lambda _asked, own, _before, _free: own),
        ),
        Mistake(
            "That waits for all the bytes before it, as if all had been asked for at once. What has arrived by then"
            " keeps nobody waiting.",
            _each(lambda _asked, own, before, _free: before + own),
        ),
        Mistake(
            "Those are the instants at which the loads are over. The answer is how long each took since it was asked.",
            _each(lambda asked, own, _before, free: max(free, asked) + own),
        ),
        Mistake(
            "That counts the wait and leaves out the load's own bytes.",
            _each(lambda asked, _own, _before, free: max(free, asked) - asked),
        ),
    ),
)

TASKS = (layerwise_s, best_split, fair_verdict, shared_link_s)
