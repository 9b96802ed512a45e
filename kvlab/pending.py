"""Transfers under way: what each has begun, waits for and reports; and those out of the pool, to a tier.

Seconds named `deadline_s` and `by_s` are instants of `perf_counter`; inf: no limit. Does not know which copies to make.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from kvlab.fingerprint import Fingerprint
from kvlab.pool import LayerGroups
from kvlab.streams import Event, Streams
from kvlab.tiers.base import Staging, Store, Tier, defect, guarded, sleep_until

__all__ = ["Lane", "Offload", "Pending", "TransferReport"]


@dataclass(frozen=True)
class TransferReport:
    """What one transfer did. Seconds are sums over its jobs, except `wall_s` and `notice_s`.

    `valid_blocks`: leading blocks that arrived whole and verified in every group (offload: that are in the tier now).
    `bytes_moved`: bytes that left the pool, or that arrived there; `copies`: gathers or scatters that moved them, none
    where files are read and written in place.
    Copies: `queue_s` waiting for a turn, `enqueue_s` submitting, `device_s` copying. `io_s`: reading or writing files.
    `verify_s`: checksums on the calling thread. `notice_s`: from the end of the last job until somebody looked.
    """

    tier: str
    emulated: bool
    blocks: int
    valid_blocks: int
    bytes_moved: int
    copies: int
    queue_s: float
    enqueue_s: float
    device_s: float
    io_s: float
    verify_s: float
    notice_s: float
    wall_s: float
    failures: tuple[str, ...] = ()


@dataclass(eq=False)
class Lane:
    """What the transfers of one tier have in common: an io lane and staging of their own, so that a tier that hangs
    holds up no other. `open`: those that still read or write.
    """

    tier: Tier
    fingerprint: Fingerprint
    streams: Streams
    groups: LayerGroups
    staging: Staging
    open: list[Pending] = field(default_factory=list)

    @property
    def late(self) -> bool:
        """Whether a transfer is still under way after its deadline."""
        return any(pending.late for pending in self.open)

    def ends_by(self, event: Event, by_s: float) -> bool:
        """Whether a job ends by then; waits for that, but not where there is no limit: then whoever needs it waits."""
        if math.isinf(by_s) or event.done():
            return True
        left_s = by_s - time.perf_counter()
        return left_s > 0 and self.streams.ends_within(event, left_s)


@dataclass(eq=False)
class Pending(ABC):
    """A transfer that has begun. `wait` ends it; until it is `settled` its blocks stay with it."""

    lane: Lane
    blocks: int
    started: float
    deadline_s: float
    copies: list[Event] = field(default_factory=list)
    ios: list[Event] = field(default_factory=list)
    bytes_moved: int = 0
    verify_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    report: TransferReport | None = None
    error: Exception | None = None

    @property
    def tier(self) -> Tier:
        """Where it goes to or comes from."""
        return self.lane.tier

    def wait(self) -> TransferReport:
        """Block until it is over and account for it. An offload raises what its tier did: TierError if not writable."""
        if self.report is None and self.error is None:
            self._end()
        if self.error is not None:
            raise self.error
        assert self.report is not None, "a transfer ended without a report"
        return self.report

    @property
    def settled(self) -> bool:
        """Whether nothing reads or writes its blocks any more."""
        return self not in self.lane.open

    @property
    @abstractmethod
    def late(self) -> bool:
        """Whether it is still under way after its deadline."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def settle(self, by_s: float = math.inf) -> bool:
        """Wait until it is settled, but not beyond `by_s`; accounts for it, raises nothing; returns whether it is."""

    @abstractmethod
    def _end(self) -> None: ...

    @property
    def _last(self) -> list[Event]:
        return (self.ios or self.copies if isinstance(self, Offload) else self.copies or self.ios)[-1:]

    def _join(self) -> None:
        """Wait for all jobs; raises what one of them raised."""
        for event in (*self._last, *self.copies, *self.ios):  # the last first: when it is over, how late was that seen?
            self.lane.streams.wait_host(event)

    def _close(self, valid_blocks: int) -> None:
        last = self._last
        self.report = TransferReport(
            tier=self.tier.name,
            emulated=self.tier.emulated,
            blocks=self.blocks,
            valid_blocks=valid_blocks,
            bytes_moved=self.bytes_moved,
            copies=len(self.copies),
            queue_s=sum(event.queue_s for event in self.copies),
            enqueue_s=sum(event.enqueue_s for event in self.copies),
            device_s=sum(event.device_s for event in self.copies),
            io_s=sum(event.device_s for event in self.ios),
            verify_s=self.verify_s,
            notice_s=last[0].notice_s if last else 0.0,
            wall_s=time.perf_counter() - self.started,
            failures=tuple(self.failures),
        )
        self.copies, self.ios = [], []


@dataclass(eq=False)
class Offload(Pending):
    """Blocks on their way to a tier. `held`: how many blocks of the call are, or will be, in the tier."""

    store: Store = field(kw_only=True)
    held: int = field(kw_only=True)
    cut: Exception | None = None  # why it was given up half-way
    last_use: Event | None = None  # of the source blocks: lanes are in order, so the last one is after all

    def attempt(self, job: Callable[..., None], *args: object) -> None:
        """A write or a seal, on the io lane. After one that fails nothing is written, and the store is given up."""
        if self.cut is None:
            try:
                job(*args)
            except Exception as error:
                self.cut = error  # raised by `_end`

    def wait_source(self) -> None:
        """Let compute launched from now on reuse the source blocks."""
        if self.last_use is not None:
            self.lane.streams.wait_compute(self.last_use)

    @property
    def late(self) -> bool:
        """Whether it is still being written after its deadline."""
        return time.perf_counter() >= self.deadline_s and not self.done()

    def done(self) -> bool:
        """Whether the last job has ended (and an emulated link has delivered)."""
        last = (self.ios or self.copies)[-1:]
        return all(event.done() for event in last) and time.perf_counter() >= self.store.due_s

    def settle(self, by_s: float = math.inf) -> bool:
        """Wait until it is over, but not beyond `by_s`; what it raises is kept for `wait`."""
        if not self.settled:
            sleep_until(min(self.store.due_s, by_s))
            ended = all(self.lane.ends_by(event, by_s) for event in (self.ios or self.copies)[-1:])
            if ended and time.perf_counter() >= self.store.due_s:
                self._end()
        return self.settled

    def _end(self) -> None:
        try:
            self._join()
            if self.cut is not None:
                raise self.cut
            sleep_until(self.store.due_s)
            self.store.publish()
        except Exception as error:
            self.error = error
            self.tier.counters.failed_stores += 1
            if not isinstance(error, OSError):
                defect(self.tier, "store", error)
            with guarded(self.tier, "abandon a store"):
                self.store.abandon()
        else:
            self._close(self.held)
        self.lane.open.remove(self)
