"""Lesson 09: route to the cache, or move the cache? A queue, a router, and a server's threshold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvlab.lab.task import Mistake, Task
from kvlab.waiting import mean_wait

__all__ = ["TASKS"]


# The queue at the hot replica -----------------------------------------------------------------------------------------


def _queues(rng: random.Random) -> list[tuple[Any, ...]]:
    """A busy replica first, then an idle one, then one that is asked for more than it can do."""
    cases = []
    for low, high in ((0.7, 0.9), (0.1, 0.4), (1.1, 1.6)):
        service_s, share = round(rng.uniform(0.02, 0.08), 3), round(rng.uniform(0.3, 0.8), 2)
        cases.append((round(rng.uniform(low, high) / (share * service_s), 1), share, service_s))
    return cases


def _hot_wait(requests_per_s: float, hot_share: float, service_s: float) -> float | None:
    load = requests_per_s * hot_share * service_s
    return mean_wait(load) * service_s if load < 1 else None


def _pollaczek(load: float) -> float:
    """The same formula, by hand: mistakes are handed in as a learner's answer would be."""
    return load / (2 * (1 - load))


hot_wait_s = Task(
    "hot_wait_s",
    _queues,
    _hot_wait,
    (
        Mistake(
            "That sends every request of the cluster to the hot replica: only the hot share goes there.",
            lambda rate, _share, service_s: _pollaczek(rate * service_s) * service_s if rate * service_s < 1 else None,
        ),
        Mistake(
            "That is the wait counted in service times: multiply by the seconds that one request is served.",
            lambda rate, share, service_s: (
                _pollaczek(rate * share * service_s) if rate * share * service_s < 1 else None
            ),
        ),
        Mistake(
            "That is the time until the request is *served*: the wait ends where its own service begins.",
            lambda rate, share, service_s: (
                (1 + _pollaczek(rate * share * service_s)) * service_s if rate * share * service_s < 1 else None
            ),
        ),
        Mistake(
            "That forgets the 2: it is the wait when service times vary at random. Here every request takes equally"
            " long, which halves the wait.",
            lambda rate, share, service_s: (
                2 * _pollaczek(rate * share * service_s) * service_s if rate * share * service_s < 1 else None
            ),
        ),
        Mistake(
            "From a load of 1 on the formula is negative and means nothing: the queue grows without end. Return None.",
            lambda rate, share, service_s: _pollaczek(rate * share * service_s) * service_s,
        ),
    ),
)


# The router -----------------------------------------------------------------------------------------------------------

_Cost = Callable[[float, int, int, int, float, float, float], float]


def _routers(rng: random.Random) -> list[tuple[Any, ...]]:
    """Replica 0 holds all but a question, 1 a part, 2 and 3 nothing.

    Made so that the best is to move the cache, to wait for it, to move what is missing of it, and to compute it again.
    """
    cases = []
    for best in ("move", "wait", "rest", "compute"):
        prompt = rng.randrange(300, 500) * 16
        held, part = prompt - rng.randrange(16, 40) * 16, prompt // 32 * 16
        per_token_s = round(rng.uniform(2e-4, 4e-4), 6)
        kv_bytes = rng.choice((73_728, 98_304, 131_072))
        slower = {"move": 0.08, "wait": 0.3, "rest": 0.3, "compute": 1.6}[best] * rng.uniform(0.9, 1.1)
        gb_per_s = round(kv_bytes / (slower * per_token_s) / 1e9, 4)  # a token's bytes take so much of its compute
        whole_s = prompt * per_token_s
        queues = {  # in what the whole prompt takes
            "move": (1.4, 0.6, 0.0, 0.05),
            "wait": (0.15, 0.5, 0.0, 0.05),
            "rest": (1.5, 0.05, 0.4, 0.6),
            "compute": (2.0, 0.9, 0.0, 0.05),
        }[best]
        queue_s = [round(share * whole_s * rng.uniform(0.97, 1.03), 4) for share in queues]
        cases.append((queue_s, [held, part, 0, 0], prompt, per_token_s, kv_bytes, gb_per_s))
    return cases


def _routed(
    cost: _Cost, pick: Callable[[Sequence[float], Sequence[int], Sequence[float]], int] | None = None
) -> Callable[..., list[Any]]:
    """A router from what a replica costs: (queue, own hit, best hit, prompt, s/token, bytes/token, GB/s)."""

    def route(
        queue_s: Sequence[float], hits: Sequence[int], prompt: int, per_token_s: float, kv_bytes: int, gb_per_s: float
    ) -> list[Any]:
        best = max(hits)
        costs = [
            cost(queue, hit, best, prompt, per_token_s, kv_bytes, gb_per_s)
            for queue, hit in zip(queue_s, hits, strict=True)
        ]
        at = costs.index(min(costs)) if pick is None else pick(queue_s, hits, costs)
        return [at, costs[at]]

    return route


def _compute_s(hit: int, prompt: int, per_token_s: float) -> float:
    return (prompt - hit) * per_token_s


def _move_s(tokens: int, kv_bytes: float, gb_per_s: float) -> float:
    return tokens * kv_bytes / (gb_per_s * 1e9)


def _ttft_s(queue: float, hit: int, best: int, prompt: int, per_token_s: float, kv_bytes: float, link: float) -> float:
    moved_s = _move_s(best - hit, kv_bytes, link) + _compute_s(best, prompt, per_token_s)
    return queue + min(_compute_s(hit, prompt, per_token_s), moved_s)


route = Task(
    "route",
    _routers,
    _routed(_ttft_s),
    (
        Mistake(
            "That looks at hits only: it goes where most of the prompt is cached, however long the queue there.",
            _routed(_ttft_s, lambda _queues, hits, _costs: hits.index(max(hits))),
        ),
        Mistake(
            "That looks at the load only: the shortest queue, whatever has to be computed or moved there.",
            _routed(_ttft_s, lambda queues, _hits, _costs: queues.index(min(queues))),
        ),
        Mistake(
            "That moves the cache for free: the missing tokens' bytes cross the link before the question is computed.",
            _routed(
                lambda queue, _hit, best, prompt, per_token_s, _kv, _link: queue + _compute_s(best, prompt, per_token_s)
            ),
        ),
        Mistake(
            "That never moves the cache: a replica may also have what it lacks brought from the one that holds most.",
            _routed(
                lambda queue, hit, _best, prompt, per_token_s, _kv, _link: queue + _compute_s(hit, prompt, per_token_s)
            ),
        ),
        Mistake(
            "That always moves the cache: where the link is slow, computing the missing tokens again is faster.",
            _routed(
                lambda queue, hit, best, prompt, per_token_s, kv_bytes, link: (
                    queue + _move_s(best - hit, kv_bytes, link) + _compute_s(best, prompt, per_token_s)
                )
            ),
        ),
        Mistake(
            "That moves the whole cache to a replica that has a part of it already: only what is missing must come.",
            _routed(
                lambda queue, hit, best, prompt, per_token_s, kv_bytes, link: (
                    queue
                    + min(
                        _compute_s(hit, prompt, per_token_s),
                        (_move_s(best, kv_bytes, link) if best > hit else 0) + _compute_s(best, prompt, per_token_s),
                    )
                )
            ),
        ),
        Mistake(
            "That takes GB/s for Gb/s: bytes over bytes per second, nothing is multiplied by 8.",
            _routed(
                lambda queue, hit, best, prompt, per_token_s, kv_bytes, link: _ttft_s(
                    queue, hit, best, prompt, per_token_s, 8 * kv_bytes, link
                )
            ),
        ),
    ),
    points=2,
)


# The setting ----------------------------------------------------------------------------------------------------------


def _flips(rng: random.Random) -> list[tuple[Any, ...]]:
    block = rng.choice((16, 32, 64, 256))
    whole = rng.randrange(3, 40) * block
    return [
        (whole + block - rng.randrange(1, block // 4), block),
        (whole + rng.randrange(1, block // 4), block),
        (whole, block),
        (None, block),
        (0, block),
    ]


def _up(tokens: int | None, block: int) -> int | None:
    return None if tokens is None else -(-tokens // block) * block


server_threshold = Task(
    "server_threshold",
    _flips,
    _up,
    (
        Mistake(
            "That rounds to the nearest block. A hit just below the flip would be loaded although computing is faster.",
            lambda tokens, block: None if tokens is None else (tokens + block // 2) // block * block,
        ),
        Mistake(
            "That rounds down. A hit just below the flip would be loaded although computing it is faster: round up.",
            lambda tokens, block: None if tokens is None else tokens // block * block,
        ),
        Mistake(
            "That counts blocks. The option is in tokens.",
            lambda tokens, block: None if tokens is None else -(-tokens // block),
        ),
        Mistake(
            "That adds a block to what is a whole number of blocks already.",
            lambda tokens, block: None if tokens is None else (tokens // block + 1) * block,
        ),
        Mistake(
            "Where reload never wins the answer is None: a threshold of 0 would load every hit.",
            lambda tokens, block: _up(tokens or 0, block),
        ),
        Mistake(
            'That takes 0 for "never": a flip at 0 tokens means that reload always wins, so the threshold is 0.',
            lambda tokens, block: _up(tokens, block) if tokens else None,
        ),
    ),
)

TASKS = (hot_wait_s, route, server_threshold)
