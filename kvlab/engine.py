"""The engine: continuous batching over one paged pool, whose idle requests leave for the tiers and come back.

A thin face on the scheduler and the torch executor. Does not know notebooks or the shell.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from numbers import Real
from types import TracebackType
from typing import Any
from weakref import WeakSet

from kvlab.arithmetic import checked_count
from kvlab.model import Model
from kvlab.pipeline import default_groups
from kvlab.policy import LRU, Decision, Eviction, Policy, Reload
from kvlab.request import Request, Sampling, Timing
from kvlab.scheduler import Scheduler
from kvlab.streams import Streams, streams_for
from kvlab.tiers import Tier
from kvlab.torch_executor import TorchExecutor

__all__ = ["Engine"]

_STUCK_STEPS = 100  # steps in a row that computed nothing: a defect, and better an error than a silent endless loop

_LABELS = {"hit_tokens": "source", "decisions": "choice"}
_GAUGES = {
    "running",
    "waiting",
    "free_blocks",
    "cached_blocks",
    "quarantined_blocks",
    "pool_blocks",
    "tier_used_bytes",
    "tier_capacity_bytes",
}


class Engine:
    """Runs requests for `model` in a pool of `pool_blocks` blocks. Owns the pool and, unless given, the streams.

    `tiers` fastest first; `policy` decides about what they hold, `eviction` about which idle blocks leave the pool:
    when a free block is needed, or when fewer than watermarks[0] of all are free, until watermarks[1] are.
    `token_budget`: tokens computed in a step (chunked prefill); `groups`: layer groups of a reload (default: up to 6).
    `load_timeout_s`: a reload that is not over by then is a miss, and until what it has asked for has come its tier is
    not used and the blocks that it may still write to stay out of use (inf: no limit).
    `poison` fills freed blocks with NaN, for tests. `cuda_graphs`: on CUDA, record a decode step when a batch of its
    size first comes, which takes longer than the step, and launch it as one from then on; nothing changes elsewhere.
    Raises ValueError for what does not fit or go together.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: Model,
        pool_blocks: int,
        block_size: int = 16,
        tiers: Sequence[Tier] = (),
        policy: Policy | None = None,
        *,
        eviction: Eviction | None = None,
        token_budget: int = 512,
        max_running: int = 64,
        watermarks: tuple[float, float] = (0.0, 0.0),
        groups: int | None = None,
        load_timeout_s: float = 60.0,
        streams: Streams | None = None,
        poison: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        cuda_graphs: bool = True,
    ) -> None:
        _check_parts(model, tiers, policy, eviction, streams, clock)
        pool_blocks = checked_count("pool_blocks", pool_blocks, 1)
        block_size = checked_count("block_size", block_size, 1)
        groups = default_groups(model.decoder.layers) if groups is None else checked_count("groups", groups, 1)
        _check_kind("load_timeout_s", load_timeout_s, Real, "seconds, or inf for no limit")
        if not load_timeout_s >= 0:
            raise ValueError(f"load_timeout_s is {load_timeout_s}; expected seconds, or inf for no limit")
        self.model, self.tiers = model, tuple(tiers)
        self._owns_streams = streams is None
        self._streams = streams_for(model.device) if streams is None else streams
        self._timeout_s = load_timeout_s
        self.executor = TorchExecutor(
            model,
            pool_blocks,
            block_size,
            tiers,
            self._streams,
            groups,
            poison=poison,
            clock=clock,
            timeout_s=load_timeout_s,
            cuda_graphs=cuda_graphs,
        )
        self.scheduler = Scheduler(
            self.executor,
            model.arch,
            model.dtype,
            Reload() if policy is None else policy,
            LRU() if eviction is None else eviction,
            token_budget=token_budget,
            max_running=max_running,
            watermarks=watermarks,
        )
        self._requests = 0
        self._arrivals = 0
        self._own: WeakSet[Request] = WeakSet()  # requests that it has made: another's blocks mean something else here

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is being stored, unless a tier hangs, and stop the streams' workers."""
        self.executor.drain(self._timeout_s)
        self.scheduler.loads.release_settled()
        if self._owns_streams:
            self._streams.close()

    # Requests ---------------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        max_new_tokens: int = 16,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Sequence[int] = (),
        salt: str = "",
        on_token: Callable[[Request, int], None] | None = None,
    ) -> Request:
        """A new request. It never shares blocks with one of another `salt`; `on_token` is called after each step.

        Raises ValueError for arguments that are of the wrong kind, for ids outside the vocabulary, or for what could
        never fit the pool or the model's positions.
        """
        tokens, max_new_tokens = self._checked(tokens), checked_count("max_new_tokens", max_new_tokens, 1)
        self.scheduler.check_fits(len(tokens), max_new_tokens)
        for name, given, kind, such_as in (
            ("sampling", sampling, Sampling | None, "Sampling(temperature=0.8, seed=1)"),
            ("salt", salt, str, "a tenant's name, a str"),
            ("on_token", on_token, Callable | None, "a function of request and token"),
        ):
            _check_kind(name, given, kind, such_as)
        request = Request(
            self._requests,
            [],
            max_new_tokens,
            sampling=sampling or Sampling(),
            stop_tokens=frozenset(_ids("stop_tokens", stop_tokens, "[model.tokenizer.eos]")),
            salt=salt,
            on_token=on_token,
            timing=Timing(self.executor.now()),
        )
        self._made(request)
        self._begin(request, tokens, max_new_tokens)
        return request

    def resume(self, request: Request, more_tokens: Sequence[int] = (), max_new_tokens: int = 16) -> Request:
        """Go on with a paused or finished request, after `more_tokens` (a tool's output, the next question)."""
        self._expect(request, "resumed", "paused", "finished")
        more_tokens, max_new_tokens = self._checked(more_tokens), checked_count("max_new_tokens", max_new_tokens, 1)
        self.scheduler.check_fits(len(request.tokens) + len(more_tokens), max_new_tokens)
        self._begin(request, more_tokens, max_new_tokens)
        return request

    def pause(self, request: Request) -> None:
        """Stop a request and keep its blocks until their room is needed; of a finished one too."""
        self._expect(request, "paused", "waiting", "loading", "running", "finished")
        self.scheduler.stop(request)
        request.state = "paused"

    def offload(self, request: Request) -> int:
        """Push the blocks of a paused or finished request to the tiers now; returns how many left the pool.

        Those that others use or go on from stay. A partial last block is dropped: its few tokens are computed again.
        """
        self._expect(request, "offloaded", "paused", "finished")
        if not self.tiers:
            raise ValueError("this engine has no tiers to offload to; give it tiers=[HostTier(...)]")
        return self.scheduler.cache.offload(request)

    def branch(self, request: Request) -> Request:
        """A paused copy of a request that shares its computed blocks until either writes; resume it to go on."""
        self._expect(request, "branched", "waiting", "loading", "running", "paused", "finished")
        child = Request(
            self._requests,
            list(request.tokens),
            request.max_new_tokens,
            sampling=request.sampling,
            stop_tokens=request.stop_tokens,
            salt=request.salt,
            on_token=request.on_token,
            state="paused",
            prompt=len(request.tokens),
            timing=Timing(self.executor.now()),
        )
        self._made(child)
        self.scheduler.cache.fork(request, child)
        return child

    def cancel(self, request: Request) -> None:
        """End a request for good and give its blocks back; full ones stay cached for others."""
        self._expect(request, "cancelled", "waiting", "loading", "running", "paused", "finished")
        self.scheduler.stop(request)
        self.scheduler.cache.drop(request)
        request.state = "cancelled"

    def _made(self, request: Request) -> None:
        self._requests += 1
        self._own.add(request)

    def _begin(self, request: Request, tokens: Sequence[int], max_new_tokens: int) -> None:
        self._arrivals += 1
        request.begin_turn(tokens, max_new_tokens, self._arrivals, self.executor.now())
        self.scheduler.enqueue(request)

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        """`tokens` as plain ints, whichever integers they are: later nobody could say who brought a bad one."""
        ids = _ids("tokens", tokens, "model.tokenizer.encode(text)")
        wrong = [token for token in ids if not 0 <= token < self.model.arch.vocab]
        if wrong:
            raise ValueError(f"token {wrong[0]} is not in the vocabulary [0, {self.model.arch.vocab})")
        return ids

    def _expect(self, request: Request, verb: str, *states: str) -> None:
        _check_kind("request", request, Request, "what submit returned")
        if request not in self._own:
            raise ValueError(f"request {request.id} is another engine's; it can only be {verb} by the one that made it")
        if request.state not in states:
            raise ValueError(f"request {request.id} is {request.state}; only {', '.join(states)} ones can be {verb}")

    # Running ----------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One iteration; returns whether anything is left to do.

        Raises what an `on_token` raised (an ExceptionGroup, if several did) once every other has had its token.
        """
        errors: list[Exception] = []
        for request, token in self.scheduler.step():
            if request.on_token is not None:
                try:
                    request.on_token(request, token)
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0] if len(errors) == 1 else ExceptionGroup("several on_token raised", errors)
        return self.scheduler.busy

    def run(self) -> None:
        """Step until nothing can run: every request is finished, paused or cancelled."""
        idle = 0
        while self.scheduler.busy:
            before = self.scheduler.counts.computed_tokens
            self.step()
            idle = idle + 1 if self.scheduler.counts.computed_tokens == before else 0
            if idle >= _STUCK_STEPS:
                hung = self.scheduler.loads.quarantined_blocks
                raise RuntimeError(
                    f"{_STUCK_STEPS} steps computed nothing, with {len(self.scheduler.waiting)} waiting"
                    + (f" and {hung} blocks that a tier which hangs may still write to" if hung else "")
                )

    def evict(self, blocks: int) -> int:
        """Make up to `blocks` idle cached blocks leave the pool now; returns how many did."""
        return self.scheduler.cache.evict(checked_count("blocks", blocks, 0))

    # Looking in -------------------------------------------------------------------------------------------------------

    @property
    def decisions(self) -> Sequence[Decision]:
        """The last 10,000 decisions, each with inputs, reason and predictions, and once it is known what it took."""
        return self.scheduler.decisions

    def metrics(self) -> dict[str, Any]:
        """Counters since the engine was made (nested plain values), and how full the pool and the tiers are now."""
        allocator, executor = self.scheduler.allocator, self.executor
        counts = self.scheduler.counts
        return {
            **vars(counts),
            "hit_tokens": dict(counts.hit_tokens),
            "decisions": dict(counts.decisions),
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_blocks": allocator.free_blocks,
            "evicted_blocks": self.scheduler.cache.evicted_blocks,
            "unstored_blocks": self.scheduler.cache.unstored_blocks,
            "quarantined_blocks": self.scheduler.loads.quarantined_blocks,
            "cached_blocks": len(self.scheduler.index),
            "pool_blocks": allocator.num_blocks,
            "demoted_blocks": executor.demoted_blocks,
            "tiers": {
                tier.name: {
                    **asdict(tier.counters),
                    "load_s": executor.seconds[tier.name, "load"],
                    "store_s": executor.seconds[tier.name, "store"],
                    "used_bytes": tier.used_bytes,
                    "capacity_bytes": tier.capacity_bytes,
                }
                for tier in self.tiers
            },
        }

    def prometheus(self) -> str:
        """The metrics in Prometheus' text format: names begin with kvlab_, and those of counters end in _total."""
        samples: dict[str, list[str]] = {}

        def add(name: str, value: float, labels: str = "") -> None:
            samples.setdefault(f"kvlab_{name}" if name in _GAUGES else f"kvlab_{name}_total", []).append(
                f"{labels} {value}"
            )

        for name, value in self.metrics().items():
            if name == "tiers":
                for tier, numbers in value.items():
                    for key, number in numbers.items():
                        add(f"tier_{key}", number, f'{{tier="{tier}"}}')
            elif isinstance(value, dict):
                for key, number in value.items():
                    add(name, number, f'{{{_LABELS[name]}="{key}"}}')
            else:
                add(name, value)
        lines = []
        for name, values in samples.items():
            lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines += [name + value for value in values]
        return "\n".join(lines) + "\n"

    def check_integrity(self) -> None:
        """Assert that no block leaked, and that states, tables, index and loads agree."""
        self.scheduler.check_integrity()


def _ids(name: str, tokens: Any, such_as: str) -> list[int]:
    """Token ids as plain ints. Raises ValueError, which names them, for anything else."""
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise ValueError(f"{name} are {tokens!r:.60}; expected token ids, such as {such_as}") from error


def _check_kind(name: str, given: Any, kind: Any, such_as: str) -> None:
    if not isinstance(given, kind):
        raise ValueError(f"{name} is {given!r:.60}; expected {such_as}")


def _check_parts(model: Any, tiers: Any, policy: Any, eviction: Any, streams: Any, clock: Any) -> None:
    """Raises ValueError for one that is not what an `Engine` is made of."""
    parts = [
        ("model", model, Model, "kvlab.load_model(name)"),
        ("tiers", tiers, Sequence, "[HostTier(capacity_bytes)]"),
        ("policy", policy, Policy | None, "kvlab.policies.Reload()"),
        ("eviction", eviction, Eviction | None, "kvlab.policies.LRU()"),
        ("streams", streams, Streams | None, "kvlab.streams.ThreadStreams()"),
        ("clock", clock, Callable, "time.perf_counter"),
    ]
    if isinstance(tiers, Sequence):
        parts += [(f"tiers[{place}]", tier, Tier, "HostTier(capacity_bytes)") for place, tier in enumerate(tiers)]
    for name, part, kind, such_as in parts:
        _check_kind(name, part, kind, f"an object such as {such_as}")
