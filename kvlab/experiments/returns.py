"""Callers who come back and callers who do not: what each way to evict makes them wait, in the simulator.

To a server each turn is a new request whose prompt begins with the old one, so a caller is a row of requests here.
Does not know models' weights, engines, or notebooks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any

from kvlab.arch import ModelArch
from kvlab.blocks import blocks_for
from kvlab.machine import Machine
from kvlab.policy import Calibrated, Eviction, Score, Scored
from kvlab.prefix import CachedBlock
from kvlab.simulate import BLOCK_TOKENS, DEVICE_MEMORY_GB_PER_S, Cluster, Session, Simulator, Trace, Turn, report

__all__ = ["KINDS", "Callers", "busy_server", "draw_callers", "scored", "waits"]

# From the most to the least faithful, with what each is.
KINDS = {
    "tools": "an agent whose tools take seconds",
    "person": "a person who reads for a minute or two, or leaves",
    "once": "one question about one document",
}
_PREAMBLE_BLOCKS = 8  # of system prompt and tool definitions, which agents and people share
_OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class Callers:
    """A trace and who is behind it: `kinds` by name of a block, `gaps_s` after which each kind came back, and how many
    callers there were of each.
    """

    trace: Trace
    kinds: Mapping[bytes, str]
    gaps_s: Mapping[str, Sequence[float]]
    callers: Mapping[str, int]

    def chance(self, kind: str, idle_s: float, within_s: float = 20.0) -> float:
        """Of this kind's caches that had been idle for `idle_s`, the share that was asked for `within_s` from then."""
        still = [gap_s for gap_s in self.gaps_s[kind] if gap_s > idle_s]
        return sum(gap_s <= idle_s + within_s for gap_s in still) / (len(still) + self.callers[kind])


def draw_callers(seed: int, *, tools: int = 40, people: int = 30, once: int = 200, span_s: float = 400.0) -> Callers:
    """Callers who begin at random within `span_s`; prompts from 1,000 to 49,000 tokens, even in their logarithms."""
    draw, ids = random.Random(seed), count(_PREAMBLE_BLOCKS)
    sessions: list[Session] = []
    kinds: dict[bytes, str] = {}
    gaps_s: dict[str, list[float]] = {kind: [] for kind in KINDS}
    callers = Counter({"tools": tools, "person": people, "once": once})
    for kind in callers.elements():
        turns = list(_turns(kind, draw, span_s))
        gaps_s[kind] += [gap_s for gap_s, _ in turns[1:]]
        blocks = [] if kind == "once" else list(range(_PREAMBLE_BLOCKS))
        tokens, at_s = BLOCK_TOKENS * len(blocks), 0.0
        for gap_s, new_tokens in turns:
            at_s, tokens = at_s + gap_s, tokens + new_tokens
            blocks += [next(ids) for _ in range(blocks_for(tokens, BLOCK_TOKENS) - len(blocks))]
            session = Session(len(sessions), (Turn(at_s, tokens, _OUTPUT_TOKENS),), tuple(blocks), tokens)
            sessions.append(session)
            for name in session.hashes(0, tokens // BLOCK_TOKENS, BLOCK_TOKENS):
                kinds.setdefault(name, kind)  # the most faithful kind comes first
            tokens += _OUTPUT_TOKENS
    sessions.sort(key=lambda session: session.turns[0].gap_s)
    return Callers(Trace("callers", tuple(sessions)), kinds, gaps_s, callers)


def _turns(kind: str, draw: random.Random, span_s: float) -> Iterator[tuple[float, int]]:
    """(seconds since the turn before, new tokens) of one caller."""

    def first(most: int) -> int:
        return round(math.exp(draw.uniform(math.log(1024), math.log(most))))

    yield draw.uniform(0, span_s), first(16384 if kind == "once" else 49152)
    if kind == "tools":
        for _ in range(draw.randint(6, 12)):
            yield draw.uniform(2, 12), draw.randint(256, 2048)
    elif kind == "person":
        for _ in range(draw.choice((0, 1, 2))):
            yield draw.uniform(40, 120), draw.randint(64, 512)


# Judging -------------------------------------------------------------------------------------------------------------


def busy_server(disk_gb_per_s: float = 2.5) -> Cluster:
    """Llama-3.1-8B on an H100 with 32 GiB for caches, and a disk behind a link of `disk_gb_per_s` (published rates)."""
    where = "h100-sxm-pcie5"
    machine = Machine.load(where)
    load, store = (machine.link("disk", way).behind(disk_gb_per_s) for way in ("load", "store"))
    return Cluster(
        ModelArch.preset("llama-3.1-8b"),
        machine.with_link("disk", load, store),
        pool_bytes=32 * 2**30,
        disk_bytes=2**41,
        memory_gb_per_s=DEVICE_MEMORY_GB_PER_S[where],
    )


def scored(cluster: Cluster, score: Score, known: Mapping[bytes, str], chance: Callable[[str, float], float]) -> Scored:
    """Evict by `score`, with the chance of return of a block's kind; 0 for a block whose kind is not `known`."""

    def return_chance(block: CachedBlock, idle_s: float) -> float:
        kind = known.get(block.block_hash)
        return 0.0 if kind is None else chance(kind, idle_s)

    return Scored(cluster.machine, cluster.arch, cluster.kv_dtype, cluster.block_size, score, return_chance, "disk")


def waits(callers: Callers, cluster: Cluster, evictions: Mapping[str, Eviction]) -> dict[str, Any]:
    """A `kvlab.waits/1`: what the callers wait for because something had left the pool, under each eviction.

    `lost_s`[name][n]: seconds that the first n + 1 answers took, less what they take with a pool that holds everything.
    """
    tokens = sum(session.tokens for session in callers.trace.sessions)
    endless = replace(cluster, pool_bytes=cluster.block_bytes * blocks_for(tokens, cluster.block_size))
    best_s, _ = _played(callers.trace, endless, None)
    record: dict[str, Any] = {
        "schema": "kvlab.waits/1",
        "model": cluster.arch.name,
        "machine": cluster.machine.name,
        "requests": len(best_s),
        "best_mean_s": best_s[-1] / len(best_s),
        "lost_s": {},
        "hit_rate": {},
    }
    for name, eviction in evictions.items():
        took_s, hits = _played(callers.trace, cluster, eviction)
        record["lost_s"][name] = [took - best for took, best in zip(took_s, best_s, strict=True)]
        record["hit_rate"][name] = hits / tokens
    return record


def _played(trace: Trace, cluster: Cluster, eviction: Eviction | None) -> tuple[list[float], int]:
    """Seconds waited for the first 1, 2, … answers, and the tokens that were found somewhere."""
    policy = Calibrated(cluster.machine, queue_delay_value=1.0)
    simulated = Simulator(trace, cluster, policy, eviction=eviction).run()
    return list(accumulate(simulated.ttfts_s)), sum(report(simulated, 0.0).hit_tokens.values())
