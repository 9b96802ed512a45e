"""One hot prefix in a cluster, simulated: times to first token by router, arrival rate, and share of hot requests.

Hot requests all begin with the same prefix, a system prompt or a popular document, and come once. The others belong to
conversations of a few turns, each with a long context of its own, which its next turn needs again. So a router that
knows nothing of caches loses the conversations' contexts, and one that knows only caches sends all hot requests to one
place. Returns a plain record; does not draw.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, get_args

from kvlab.arch import ModelArch
from kvlab.machine import Machine
from kvlab.simulate import (
    BLOCK_TOKENS,
    DEVICE_MEMORY_GB_PER_S,
    Cluster,
    Router,
    Session,
    Simulator,
    Trace,
    Turn,
    make_policy,
    report,
)

__all__ = ["PREFIX_TOKENS", "QUESTION_TOKENS", "SCHEMA", "hot_trace", "sweep"]

SCHEMA = "kvlab.hot_prefix/1"

PREFIX_TOKENS = 16 * BLOCK_TOKENS
QUESTION_TOKENS = 1024
_TURNS, _GAP_S, _OUTPUT_TOKENS = 3, 5.0, 16


def hot_trace(requests_per_s: float, hot_share: float, seconds: float, seed: int) -> Trace:
    """Requests at random (Poisson) for so many `seconds`, a share of them hot. Raises ValueError for other shares.

    A hot request has the common prefix and a question of its own. A conversation begins with as many tokens that
    nobody else has, and each of its turns adds a question, after a pause of 5 s on average.
    """
    if not (0 <= hot_share <= 1 and requests_per_s > 0 and seconds > 0):
        raise ValueError(
            f"a hot share of {hot_share:g} at {requests_per_s:g} requests/s for {seconds:g} s; expected a share from 0"
            " to 1, and a rate and a time above 0"
        )
    draw = random.Random(seed)
    # A conversation asks several times: fewer of them must begin.
    begins_hot = hot_share / (hot_share + (1 - hot_share) / _TURNS)
    begins_per_s = requests_per_s / (begins_hot + (1 - begins_hot) * _TURNS)
    hot_blocks = array("q", range(PREFIX_TOKENS // BLOCK_TOKENS))
    sessions: list[Session] = []
    at_s = draw.expovariate(begins_per_s)
    while at_s < seconds:
        first = Turn(at_s, PREFIX_TOKENS + QUESTION_TOKENS, _OUTPUT_TOKENS)
        if draw.random() < begins_hot:
            sessions.append(Session(len(sessions), (first,), hot_blocks, PREFIX_TOKENS))
        else:
            more = (Turn(draw.expovariate(1 / _GAP_S), QUESTION_TOKENS, _OUTPUT_TOKENS) for _ in range(_TURNS - 1))
            sessions.append(Session(len(sessions), (first, *more)))
        at_s += draw.expovariate(begins_per_s)
    return Trace(f"{hot_share:.0%} hot", tuple(sessions))


def sweep(
    arch: ModelArch,
    machine: Machine,
    requests_per_s: Sequence[float],
    hot_shares: Sequence[float],
    *,
    replicas: int = 16,
    seconds: float = 8.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Every router at every rate and share, on `replicas` that decide alike (kvlab's load-aware verdict).

    Each has 40 GiB of KV in its pool and 100 GiB in host RAM. The record has `ttft_p99_s` and `ttft_mean_s` by router
    as [share][rate], and `hit_share`, the part of all prompt tokens that was not computed. A queue that never settles
    shows as the length to which it grew within `seconds`.
    """
    begin = time.perf_counter()
    routers = get_args(Router)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "model": arch.name,
        "machine": machine.name,
        "replicas": replicas,
        "seconds": seconds,
        "requests_per_s": list(requests_per_s),
        "hot_shares": list(hot_shares),
        # Of the one replica to which a router that knows only caches sends what is hot.
        "question_s": machine.prefill_s(arch, PREFIX_TOKENS, PREFIX_TOKENS + QUESTION_TOKENS),
        **{key: {router: [] for router in routers} for key in ("ttft_p99_s", "ttft_mean_s", "hit_share")},
    }
    for share in hot_shares:
        traces = [hot_trace(rate, share, seconds, seed) for rate in requests_per_s]
        for router in routers:
            progress(f"{share:.0%} hot, router {router}")
            cluster = Cluster(
                arch,
                machine,
                pool_bytes=40 << 30,
                host_bytes=100 << 30,
                replicas=replicas,
                router=router,
                memory_gb_per_s=DEVICE_MEMORY_GB_PER_S.get(machine.name),
            )
            reports = [
                report(Simulator(trace, cluster, make_policy("calibrated", machine)).run(), 0.0) for trace in traces
            ]
            record["ttft_p99_s"][router].append([made.ttft_p99_s for made in reports])
            record["ttft_mean_s"][router].append([made.ttft_mean_s for made in reports])
            hits = [sum(made.hit_tokens.values()) for made in reports]
            asked = [hit + made.computed_tokens for hit, made in zip(hits, reports, strict=True)]
            record["hit_share"][router].append([hit / all_ for hit, all_ in zip(hits, asked, strict=True)])
    record["wall_s"] = time.perf_counter() - begin
    return record
