"""Streams that do their worst: backends for tests that find a missing wait every time, on any machine.

A race shows on real hardware once in a thousand runs. `LateStreams` and `EarlyStreams` delay or hasten each job as far
as the given waits allow, so that bytes are right only where every wait is there; under `OverdueStreams` whoever stops
waiting after a time is told so at once. CPU only; not for timing.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvlab.streams import CopyOp, Event, Streams, copy_rows

__all__ = ["EarlyStreams", "LateStreams", "OverdueStreams"]


class _Job(Event):
    """A job that waits in its lane until somebody needs it. `fills` is what it will overwrite, until that is spoilt."""

    def __init__(self, op: str, job: Callable[[], object], after: Sequence[Event], fills: Tensor | None) -> None:
        super().__init__(op)
        self.job, self.after, self.fills = job, tuple(after), fills


class _Adversary(Streams):
    """Lanes of jobs that have been submitted and not yet run; compute runs at once, as it does on a CPU."""

    def __init__(self) -> None:
        self._copies: list[_Job] = []
        self._ios: defaultdict[str, list[_Job]] = defaultdict(list)

    @property
    def _lanes(self) -> list[list[_Job]]:
        return [self._copies, *self._ios.values()]

    def _push(self, lane: list[_Job], job: _Job) -> Event:
        lane.append(job)
        self._spoil()
        return job

    def _finish(self, event: Event) -> None:
        """Run what `event` needs and no more: the jobs before it in its lane, and what each of them comes after."""
        for lane in self._lanes:
            while event in lane:
                job = lane[0]
                for other in job.after:
                    self._finish(other)
                if lane and lane[0] is job:  # else finishing what it comes after has run it too
                    lane.pop(0)
                    job.run(job.job, job.after)
                    self._spoil()

    def _spoil(self) -> None:
        """Overwrite what a job will fill as soon as it could begin: it heads its lane and its waits are over."""
        for lane in self._lanes:
            if lane and lane[0].fills is not None and all(event.done() for event in lane[0].after):
                lane[0].fills.fill_(0xFF)  # NaN in every float dtype
                lane[0].fills = None

    def compute_event(self) -> Event:
        """An event that has ended: compute runs at once."""
        event = Event("compute")
        event.ended = True
        return event

    def wait_compute(self, event: Event) -> None:
        """Run what `event` needs."""
        self._finish(event)

    def wait_host(self, event: Event) -> None:
        """Run what `event` needs; raises what its job raised."""
        self._finish(event)
        event.notice()

    def ends_within(self, event: Event, timeout_s: float) -> bool:  # noqa: ARG002
        """Run what `event` needs: it ends just in time."""
        self._finish(event)
        return True

    def close(self) -> None:
        """Run everything."""
        for lane in self._lanes:
            if lane:
                self._finish(lane[-1])


class LateStreams(_Adversary):
    """Every job runs at the last moment that the waits allow: when somebody waits for it.

    What it will fill is spoilt at the first moment. Catches readers that do not wait for the writer, and
    writers that do not wait for the reader.
    """

    def _copy(self, op: CopyOp, rows: Tensor, index: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        fills = host if op == "gather" else None
        return self._push(self._copies, _Job(op, lambda: copy_rows(op, rows, index, host), after, fills))

    def io(
        self, job: Callable[[], object], after: Sequence[Event], fills: Tensor | None = None, lane: str = ""
    ) -> Event:
        """Queue it."""
        return self._push(self._ios[lane], _Job("io", job, after, fills))


class OverdueStreams(LateStreams):
    """Late, and a wait with a time limit is over before the job is: the job still runs, some time after that.

    `in_place`: files are read into the pool itself, where what comes too late does the most harm.
    """

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def ends_within(self, event: Event, timeout_s: float) -> bool:  # noqa: ARG002
        """Run nothing."""
        return event.done()


class EarlyStreams(_Adversary):
    """Every job reads at the first moment that the waits allow; only what a gather read lands late.

    A gather reads watched memory as it stood at the newest compute event that it, or a copy before it, came after
    (NaN before any). A scatter lands at that moment: where compute has written since, the later write wins.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, Tensor] = {}  # address of a watched storage → all its bytes, as compute sees them
        self._first: dict[int, Tensor] = {}  # … as they stood when it was first watched
        self._states: weakref.WeakKeyDictionary[Event, dict[int, Tensor]] = weakref.WeakKeyDictionary()
        self._seen: Event | None = None  # the newest compute event that the copy lane came after

    def watch(self, rows: Tensor) -> None:
        """Keep snapshots of the storage behind `rows`, one at each compute event."""
        storage = rows.untyped_storage()
        if storage.data_ptr() not in self._live:
            live = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._live[storage.data_ptr()], self._first[storage.data_ptr()] = live, live.clone()

    def compute_event(self) -> Event:
        """An event that has ended, with the memory as it stands now."""
        event = super().compute_event()
        self._states[event] = {address: live.clone() for address, live in self._live.items()}
        return event

    def _copy(self, op: CopyOp, rows: Tensor, index: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        if self._copies:  # the lane is in order: the copy before this one has landed
            self._finish(self._copies[-1])
        for event in after:
            self._finish(event)
            if event in self._states and (self._seen is None or event.submitted > self._seen.submitted):
                self._seen = event
        return self._gather(rows, index, host, after) if op == "gather" else self._scatter(rows, index, host, after)

    def _gather(self, rows: Tensor, index: Tensor, out: Tensor, after: Sequence[Event]) -> Event:
        address = rows.untyped_storage().data_ptr()
        read = torch.full_like(out, 0xFF)
        if self._seen is not None:
            copy_rows("gather", _same_view(self._states[self._seen][address], rows), index, read)
        return self._push(self._copies, _Job("gather", lambda: out.copy_(read), after, out))

    def _scatter(self, rows: Tensor, index: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        address = rows.untyped_storage().data_ptr()
        before = self._first[address] if self._seen is None else self._states[self._seen][address]
        old, now = torch.empty_like(source), torch.empty_like(source)
        copy_rows("gather", _same_view(before, rows), index, old)

        def land() -> None:
            # Into every kept state too: the lane's next gather must see what this scatter wrote.
            for target in (self._live[address], *(state[address] for state in self._states.values())):
                view = _same_view(target, rows)
                copy_rows("gather", view, index, now)
                changed = (now != old).view(-1, 16).any(1, keepdim=True)  # whole elements, never half of one
                landed = torch.where(changed, now.view(-1, 16), source.view(-1, 16))
                copy_rows("scatter", view, index, landed.flatten())

        event = Event("scatter")
        event.run(land, after)
        return event

    def io(
        self,
        job: Callable[[], object],
        after: Sequence[Event],
        fills: Tensor | None = None,  # noqa: ARG002
        lane: str = "",  # noqa: ARG002
    ) -> Event:
        """Run it at once, after `after`."""
        for other in after:
            self._finish(other)
        event = Event("io")
        event.run(job, after)
        return event


def _same_view(stored: Tensor, rows: Tensor) -> Tensor:
    """The bytes of a whole storage, seen as `rows` sees its own."""
    return stored.view(rows.dtype).as_strided(rows.shape, rows.stride(), rows.storage_offset())
