"""Whole workloads by trace: the engine's scheduler, cache and policies with time billed instead of spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvlab.simulate.executor import DEVICE_MEMORY_GB_PER_S, BillingExecutor, DecodeCost
from kvlab.simulate.judging import POLICIES, drawn_away, make_policy
from kvlab.simulate.report import PolicyReport, report
from kvlab.simulate.simulator import Cluster, Router, Simulated, Simulator
from kvlab.simulate.tier import BilledTier, LinkClock
from kvlab.simulate.trace import BLOCK_TOKENS, SAMPLE, Session, Trace, Turn, read_trace

__all__ = [
    "BLOCK_TOKENS",
    "DEVICE_MEMORY_GB_PER_S",
    "POLICIES",
    "SAMPLE",
    "BilledTier",
    "BillingExecutor",
    "Cluster",
    "DecodeCost",
    "LinkClock",
    "PolicyReport",
    "Router",
    "Session",
    "Simulated",
    "Simulator",
    "Trace",
    "Turn",
    "drawn_away",
    "make_policy",
    "read_trace",
    "report",
    "simulate",
]


def simulate(
    trace: Trace, cluster: Cluster, policies: Sequence[str] = POLICIES, progress: Callable[[str], None] = lambda _: None
) -> dict[str, PolicyReport]:
    """Each of the named policies over the whole trace, from empty caches. Raises ValueError for an unknown name."""
    made = {name: make_policy(name, cluster.machine) for name in policies}
    reports = {}
    for name, policy in made.items():
        simulator = Simulator(trace, cluster, policy)
        progress(f"{name}: {trace.requests:,} requests")
        begin = time.perf_counter()
        simulated = simulator.run()
        reports[name] = report(simulated, time.perf_counter() - begin)
    progress("")
    return reports
