"""A trace through replicas on a virtual clock: arrivals, routing, and what each request saw.

Each replica is the engine's own scheduler, cache and policy over a `BillingExecutor`. The replica whose clock is
furthest behind runs next, so that clocks differ by one step at most. Does not know how results are shown.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.machine import Machine
from kvlab.policy import LRU, Calibrated, Eviction, Policy, Situation
from kvlab.prefix import matched_blocks, reloadable_tokens
from kvlab.request import Request
from kvlab.scheduler import Scheduler
from kvlab.simulate.executor import BillingExecutor, DecodeCost
from kvlab.simulate.judging import Judge, Oracle
from kvlab.simulate.tier import BilledTier
from kvlab.simulate.trace import BLOCK_TOKENS, Session, Trace

__all__ = ["Cluster", "Replica", "Router", "Simulated", "Simulator"]

Router = Literal["prefix", "load", "kvlab"]


@dataclass(frozen=True)
class Cluster:
    """What the requests are served by. Bytes and blocks are those of one replica; 0 bytes: no such tier.

    `pool_bytes` for KV in the accelerator, `host_bytes` and `disk_bytes` in tiers; with `shared_disk` there is one disk
    tier behind one link for all replicas. `machine` is what policies and routers believe, `truth` what things take
    (None: they are right). `memory_gb_per_s`: see `DecodeCost`.
    Raises ValueError for what does not fit together.
    """

    arch: ModelArch
    machine: Machine
    pool_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    kv_dtype: str = "bf16"
    block_size: int = BLOCK_TOKENS
    token_budget: int = 8192
    max_running: int = 256
    groups: int = 6
    # Finding what to evict looks at every block of the pool; some at a time, so that this stays cheap for each.
    watermarks: tuple[float, float] = (0.0, 0.05)
    replicas: int = 1
    router: Router = "prefix"
    shared_disk: bool = False
    memory_gb_per_s: float | None = None
    truth: Machine | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= BLOCK_TOKENS or BLOCK_TOKENS % self.block_size:
            raise ValueError(f"blocks of {self.block_size} tokens; expected {BLOCK_TOKENS} or a divisor")
        if self.replicas < 1 or self.router not in ("prefix", "load", "kvlab"):
            raise ValueError(
                f"{self.replicas} replicas behind router {self.router!r}; expected at least 1, and prefix, load or"
                " kvlab"
            )
        if self.pool_blocks < 1:
            raise ValueError(
                f"a pool of {self.pool_bytes} bytes holds no block of {self.block_size} tokens"
                f" ({self.block_bytes} bytes); enlarge it"
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return kv_bytes(self.arch, self.block_size, self.kv_dtype, 1, self.block_size)

    @property
    def decodes_measured(self) -> bool:
        """Whether decode passes of this model were measured on the machine."""
        return DecodeCost(self.machine, self.arch, 0.0).measured is not None

    @property
    def pool_blocks(self) -> int:
        """Blocks in one replica's pool."""
        return self.pool_bytes // self.block_bytes

    def tier(self, name: str, capacity_bytes: int) -> BilledTier:
        """An empty tier on the machine's links."""
        machine = self.truth or self.machine
        load, store = machine.link(name), machine.link(name, "store")
        return BilledTier(name, capacity_bytes // self.block_bytes, load, store, len(self.arch.layers))

    def disk(self) -> BilledTier | None:
        """An empty disk tier, if there is to be one."""
        return self.tier("disk", self.disk_bytes) if self.disk_bytes else None


class _Untold:
    """Tokens of which only the number is known: nobody may look at them, and they take no memory."""

    def __init__(self) -> None:
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, more: Sequence[int]) -> None:
        self._count += len(more)


@dataclass(eq=False)
class _Asked(Request):
    """A request of a session."""

    session: Session = field(kw_only=True)


@dataclass(frozen=True, order=True)
class _Arrival:
    """A session's next turn at `at_s`; ties in the order of sessions. `request`, `replica`: where it was before."""

    at_s: float
    order: int
    session: Session = field(compare=False)
    turn: int = field(compare=False, default=0)
    request: _Asked | None = field(compare=False, default=None)
    replica: Replica | None = field(compare=False, default=None)


class Replica:
    """One engine without a model. Owns scheduler, executor and judge.

    `awaited` are the requests without a first token, each with the seconds of computing that its router expects of it;
    `backlog_tokens` are those of their prompts.
    """

    def __init__(self, cluster: Cluster, policy: Policy | None, eviction: Eviction, disk: BilledTier | None) -> None:
        tiers = [cluster.tier("host", cluster.host_bytes)] if cluster.host_bytes else []
        if disk is not None:
            tiers.append(disk)
        self.executor = BillingExecutor(
            cluster.arch,
            cluster.truth or cluster.machine,
            cluster.kv_dtype,
            pool_blocks=cluster.pool_blocks,
            block_size=cluster.block_size,
            tiers=tiers,
            groups=cluster.groups,
            memory_gb_per_s=cluster.memory_gb_per_s,
        )
        oracle = Oracle(self.executor)
        self.judge = Judge(oracle if policy is None else policy, oracle)
        self.scheduler = Scheduler(
            self.executor,
            cluster.arch,
            cluster.kv_dtype,
            self.judge,
            eviction,
            token_budget=cluster.token_budget,
            max_running=cluster.max_running,
            watermarks=cluster.watermarks,
        )
        self.cluster = cluster
        self.backlog_tokens = 0
        self.awaited: dict[Request, float] = {}

    def ask(
        self, request: _Asked, tokens: int, new_tokens: int, arrival: int, at_s: float, expected_s: float = 0.0
    ) -> None:
        """Let a request's next turn wait here; it came at `at_s`."""
        self.executor.wait_until(at_s)
        request.begin_turn(range(tokens), new_tokens, arrival, at_s)
        self.scheduler.enqueue(request)
        self.backlog_tokens += len(request.tokens)
        self.awaited[request] = expected_s

    def answered(self, request: Request) -> bool:
        """Whether the token that it has just got is the first of its turn."""
        if request not in self.awaited:
            return False
        del self.awaited[request]
        self.backlog_tokens -= request.prompt
        return True

    def backlog_s(self) -> float:
        """Computing that is expected before all who wait here have their first token."""
        machine, arch = self.cluster.machine, self.cluster.arch
        return sum(
            min(expected_s, machine.prefill_s(arch, request.computed, len(request.tokens)))
            for request, expected_s in self.awaited.items()
        )

    def decode_pass_s(self) -> float:
        """What a decode pass of those who have their first token takes, as far as is believed."""
        rows = [request.computed for request in self.scheduler.running if request not in self.awaited]
        cost = DecodeCost(
            self.cluster.machine, self.cluster.arch.absorbed, self.executor.decode_cost.token_bytes,
            self.cluster.memory_gb_per_s,
        )  # fmt: skip
        return cost.seconds(len(rows), sum(rows)) if rows else 0.0

    def situation(self, session: Session, prompt: int) -> Situation:
        """What a request would find here."""
        executor, size = self.executor, self.executor.block_size
        wanted = session.hashes(0, reloadable_tokens(prompt, prompt, size) // size, size)
        first = self.scheduler.index.matched(wanted)
        options = []
        for tier in executor.billed_tiers.values():
            held = matched_blocks(wanted[first:], tier.__contains__)
            if held:
                found, loads = wanted[first : first + held], self.scheduler.loads
                options.append(loads.option(tier.name, (first + held) * size, found, executor.now()))
        return Situation((session.id, 0), executor.arch, executor.kv_dtype, size, prompt, first * size, tuple(options))


@dataclass
class Simulated:
    """What came out: `ttfts_s` by request in order of first tokens, the replicas as they are at the end, and clocks.

    `first_s`, `last_s`: first and last arrival; `end_s`: the last token.
    """

    cluster: Cluster
    replicas: list[Replica]
    ttfts_s: list[float] = field(default_factory=list)
    first_s: float = math.inf
    last_s: float = 0.0
    end_s: float = 0.0
    finished: int = 0


class Simulator:
    """Runs a trace once, with one policy (None: the oracle) on every replica. Owns replicas and arrivals."""

    def __init__(
        self, trace: Trace, cluster: Cluster, policy: Policy | None, *, eviction: Eviction | None = None
    ) -> None:
        shared = cluster.disk() if cluster.shared_disk else None
        eviction = LRU() if eviction is None else eviction
        self.replicas = [
            Replica(cluster, policy, eviction, cluster.disk() if shared is None else shared)
            for _ in range(cluster.replicas)
        ]
        self._router = _ROUTERS[cluster.router]
        self._arrivals = [_Arrival(s.turns[0].gap_s, order, s) for order, s in enumerate(trace.sessions)]
        heapq.heapify(self._arrivals)
        self._least_gap_s = trace.least_gap_s
        self._asked = 0
        self.result = Simulated(cluster, self.replicas)
        for session in trace.sessions:  # before hours of simulated time, rather than after
            self._check_fits(session)

    def _check_fits(self, session: Session) -> None:
        try:
            self.replicas[0].scheduler.check_fits(session.tokens - 1, 1)
        except ValueError as error:
            raise ValueError(f"session {session.id} of the trace: {error}") from error

    def run(self, until_s: float = math.inf) -> Simulated:
        """Until every session has ended, or one is about to ask at `until_s` or later: another call goes on there."""
        while True:
            busy = [replica for replica in self.replicas if replica.scheduler.busy]
            behind = min(busy, key=_clock, default=None)
            next_s = self._arrivals[0].at_s if self._arrivals else math.inf
            if behind is None and not self._arrivals:
                return self.result
            if behind is None or behind.executor.clock_s >= next_s:
                if next_s >= until_s:
                    return self.result
                self._arrive(heapq.heappop(self._arrivals))
                continue
            # Another replica may end a turn, and its session may come here after the shortest of its pauses.
            others_s = min((r.executor.clock_s for r in busy if r is not behind), default=math.inf)
            behind.executor.horizon_s = min(next_s, others_s + self._least_gap_s)
            self._step(behind)

    def _arrive(self, arrival: _Arrival) -> None:
        session, turn = arrival.session, arrival.session.turns[arrival.turn]
        context = 0 if arrival.request is None else len(arrival.request.tokens)
        replica, expected_s = self.replicas[0], 0.0
        if len(self.replicas) > 1:
            replica, expected_s = self._router(self.replicas, session, context + turn.input_tokens)
        request, tokens = arrival.request, turn.input_tokens
        if request is None or replica is not arrival.replica:
            if request is not None and arrival.replica is not None:
                arrival.replica.scheduler.cache.drop(request)
            # Tokens are Any: they are counted and never read.
            request = _Asked(session.id, cast(Any, _Untold()), 1, session=session, turn=arrival.turn)
            tokens += context
        self._asked += 1
        replica.ask(request, tokens, turn.output_tokens, self._asked, arrival.at_s, expected_s)
        self.result.first_s = min(self.result.first_s, arrival.at_s)
        self.result.last_s = max(self.result.last_s, arrival.at_s)

    def _step(self, replica: Replica) -> None:
        result = self.result
        for request, _ in replica.scheduler.step():
            if replica.answered(request):
                ttft_s = request.timing.ttft_s
                assert ttft_s is not None, "a first token without its time"
                result.ttfts_s.append(ttft_s)
            if request.state == "finished":
                self._end_turn(replica, cast(_Asked, request))

    def _end_turn(self, replica: Replica, request: _Asked) -> None:
        now_s = replica.executor.clock_s
        self.result.finished += 1
        self.result.end_s = max(self.result.end_s, now_s)
        session = request.session
        if request.turn < len(session.turns):
            at_s = now_s + session.turns[request.turn].gap_s
            heapq.heappush(self._arrivals, _Arrival(at_s, self._asked, session, request.turn, request, replica))
        else:
            replica.scheduler.cache.drop(request)  # its full blocks stay, for others


def _clock(replica: Replica) -> float:
    return replica.executor.clock_s


# Routers: where a request goes, and the seconds of computing that are expected of it there (0: nobody asked) ----------


def _by_load(replicas: Sequence[Replica], session: Session, prompt: int) -> tuple[Replica, float]:  # noqa: ARG001
    """Where the fewest prompt tokens wait."""
    return min(replicas, key=lambda replica: replica.backlog_tokens), 0.0


def _by_prefix(replicas: Sequence[Replica], session: Session, prompt: int) -> tuple[Replica, float]:
    """Where most of the prompt is held, in the pool or a tier; among equals where the fewest tokens wait."""

    def worth(replica: Replica) -> tuple[int, int]:
        situation = replica.situation(session, prompt)
        held = max([situation.resident, *(option.prefix for option in situation.options)])
        return -held, replica.backlog_tokens

    return min(replicas, key=worth), 0.0


def _by_verdict(replicas: Sequence[Replica], session: Session, prompt: int) -> tuple[Replica, float]:
    """Where the first token is expected soonest: what waits there is computed first, as far as it is not cached, and
    each step takes a decode pass along.
    """

    def expected_s(replica: Replica) -> tuple[float, float]:
        """Until the first token, and of computing."""
        cluster, situation = replica.cluster, replica.situation(session, prompt)
        machine, arch = cluster.machine, cluster.arch
        ttft_s = work_s = machine.prefill_s(arch, situation.resident, prompt)
        if situation.options:
            decision = Calibrated(machine).decide(situation)
            if decision.option is not None:
                head_s = machine.prefill_s(arch, situation.resident, decision.start)
                work_s = head_s + machine.prefill_s(arch, decision.stop, prompt)
                way_s = decision.ttft_split_s if decision.choice == "split" else decision.ttft_reload_s
                assert way_s is not None, "a verdict without its time"
                ttft_s = way_s
        queue_s = replica.backlog_s()
        steps = (queue_s + work_s) / machine.prefill_s(arch, 0, cluster.token_budget)
        return queue_s + ttft_s + max(1.0, steps) * replica.decode_pass_s(), work_s

    expected = {replica: expected_s(replica) for replica in replicas}
    best = min(replicas, key=lambda replica: expected[replica][0])
    return best, expected[best][1]


_ROUTERS = {"load": _by_load, "prefix": _by_prefix, "kvlab": _by_verdict}
