"""What a simulated policy amounts to: times, hits, bytes, utilisation, regret. Plain numbers from a `Simulated`.

Utilisation ρ of a server is the work that was asked of it ÷ the time in which it was asked. From 1 on a queue grows for
as long as requests come, so that means say how long the trace is rather than how good the policy: `unstable`.
The accelerator's work is its prefill, and its decodes as if in the largest batches that pool and `max_running` allow;
in smaller ones it would be busier, but could take more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.simulate.simulator import Replica, Simulated

__all__ = ["PolicyReport", "report"]


@dataclass(frozen=True)
class PolicyReport:
    """One policy over one trace. `hit_tokens` by where they were: "pool" or a tier's name.

    `computed_tokens` include those generated, but the last of each turn, and those computed again after a preemption.
    `reload_bytes` came from tiers, `offload_bytes` went to them. `regret_s`: see `judging`, 0 for the oracle. `wall_s`
    is what the simulation took, `simulated_s` what it covers. `accelerator_busy` is the share of that in which
    anything was computed, a decode of one row included. `rho` by server: "accelerator", "host load", "disk store", …
    (None: all came at one instant).
    """

    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    hit_tokens: dict[str, int]
    computed_tokens: int
    reload_bytes: int
    offload_bytes: int
    regret_s: float
    wall_s: float
    simulated_s: float
    output_tokens_per_s: float
    accelerator_busy: float
    rho: dict[str, float | None]
    unstable: bool
    decisions: dict[str, int]
    preemptions: int
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def report(simulated: Simulated, wall_s: float) -> PolicyReport:
    """The figures of a finished simulation that took `wall_s`."""
    replicas, times = simulated.replicas, sorted(simulated.ttfts_s)
    hits = Counter(dict.fromkeys(("pool", *replicas[0].executor.tiers), 0))
    reasons: Counter[str] = Counter()
    for replica in replicas:
        hits.update(replica.scheduler.counts.hit_tokens)
        reasons.update(replica.judge.reasons)
    tiers = {id(t): t for r in replicas for t in r.executor.billed_tiers.values()}.values()  # a shared one once
    covered_s = simulated.end_s - simulated.first_s
    counts = [replica.scheduler.counts for replica in replicas]
    rho = _rho(simulated)
    return PolicyReport(
        requests=len(times),
        ttft_mean_s=math.fsum(times) / len(times),
        ttft_p50_s=_quantile(times, 0.5),
        ttft_p90_s=_quantile(times, 0.9),
        ttft_p99_s=_quantile(times, 0.99),
        hit_tokens=dict(hits),
        computed_tokens=sum(c.computed_tokens for c in counts),
        reload_bytes=sum(tier.load_clock.moved_bytes for tier in tiers),
        offload_bytes=sum(tier.store_clock.moved_bytes for tier in tiers),
        regret_s=math.fsum(replica.judge.regret_s for replica in replicas),
        wall_s=wall_s,
        simulated_s=covered_s,
        output_tokens_per_s=sum(c.generated_tokens for c in counts) / covered_s,
        accelerator_busy=sum(replica.executor.busy_s for replica in replicas) / len(replicas) / covered_s,
        rho=rho,
        unstable=any(value >= 1 if value is not None else len(times) > 1 for value in rho.values()),
        decisions=dict(reasons.most_common()),
        preemptions=sum(c.preemptions for c in counts),
        steps=sum(c.steps for c in counts),
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _rho(simulated: Simulated) -> dict[str, float | None]:
    """Work ÷ time in which it was asked, by server; of replicas' like servers the busiest."""
    asked = len(simulated.ttfts_s)
    # n arrivals span n - 1 of the n gaps that belong to them.
    window_s = (simulated.last_s - simulated.first_s) * asked / max(1, asked - 1)
    work: dict[str, float] = {}
    for replica in simulated.replicas:
        servers = {"accelerator": _needed_s(replica)}
        for tier in replica.executor.billed_tiers.values():
            servers[f"{tier.name} load"] = tier.load_clock.busy_s
            servers[f"{tier.name} store"] = tier.store_clock.busy_s
        for name, seconds in servers.items():
            work[name] = max(work.get(name, 0.0), seconds)
    return {name: seconds / window_s if window_s else None for name, seconds in work.items()}


def _needed_s(replica: Replica) -> float:
    """The accelerator's work, with decodes in the largest batches there is room for."""
    executor = replica.executor
    if not executor.decoded_tokens:
        return executor.prefill_s
    mean = executor.decoded_positions / executor.decoded_tokens
    room = executor.num_blocks * executor.block_size / max(1.0, mean)
    rows = max(1, min(replica.scheduler.max_running, int(room)))
    batch_s = executor.decode_cost.seconds(rows, int(mean * rows))
    return executor.prefill_s + executor.decoded_tokens / rows * batch_s
