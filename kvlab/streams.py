"""Streams: what runs beside compute, and the events that order it. The only file that knows CUDA streams and events.

`CudaStreams`: a copy stream and pinned buffers. `ThreadStreams`: copies on the calling thread (a second thread of torch
copies fights the compute threads for the cores), file I/O on one worker thread per lane. Does not know pools or tiers.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvlab.jobs import Event, Worker

__all__ = [
    "PAGE",
    "CudaStreams",
    "Event",
    "Recorder",
    "Streams",
    "ThreadStreams",
    "copy_rows",
    "graph_recorder",
    "host_memory",
    "streams_for",
]

CopyOp = Literal["gather", "scatter"]
# Takes a step and returns how to replay it: the same launches on the same memory, then the tensor they leave it in.
Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]

PAGE = 4096  # direct file I/O wants offsets, lengths and memory aligned to this

_STAGING_BYTES = 32 << 20  # device staging of one CUDA copy; more goes in several, so that staging stays small


def host_memory(nbytes: int) -> Tensor:
    """Pageable memory, uint8 [nbytes], at a page boundary. By way of numpy, which asks for huge pages where torch does
    not: fewer of them to pin for a direct read, and fewer misses when blocks are scattered.
    """
    memory = np.zeros(nbytes + PAGE, dtype=np.uint8)
    skip = -memory.ctypes.data % PAGE
    return torch.from_numpy(memory[skip : skip + nbytes])


class Streams(ABC):
    """Jobs are submitted with the events they come `after`, and run in order within their lane.

    One lane of copies (gather, scatter), and io lanes by name, one for each tier: who hangs holds up only its own lane.
    Lanes and compute are ordered among each other by events alone.
    Host memory that a job uses must stay untouched until its event has ended. `in_place`: io jobs may read and write
    what compute uses, the pool itself, so that files need no copy on their way.
    """

    device = torch.device("cpu")
    in_place = False

    def gather(self, rows: Tensor, index: Tensor, out: Tensor, after: Sequence[Event]) -> Event:
        """Copy `rows[index]` to host memory `out`.

        rows [n, k] on the device (16-byte elements copy fastest), index [m] int64 on the CPU, out uint8, contiguous.
        """
        return self._copy("gather", rows, index, out, after)

    def scatter(self, rows: Tensor, index: Tensor, source: Tensor, after: Sequence[Event]) -> Event:
        """Copy host memory `source` to `rows[index]`. Shapes as for `gather`; no row may be named twice."""
        return self._copy("scatter", rows, index, source, after)

    @abstractmethod
    def _copy(self, op: CopyOp, rows: Tensor, index: Tensor, host: Tensor, after: Sequence[Event]) -> Event: ...

    @abstractmethod
    def io(
        self, job: Callable[[], object], after: Sequence[Event], fills: Tensor | None = None, lane: str = ""
    ) -> Event:
        """Run a plain host function, such as file I/O; `fills` is the host memory that it overwrites, if any."""

    @abstractmethod
    def compute_event(self) -> Event:
        """An event that ends when all compute launched so far has ended."""

    @abstractmethod
    def wait_compute(self, event: Event) -> None:
        """Let compute launched from now on run after `event`."""

    @abstractmethod
    def wait_host(self, event: Event) -> None:
        """Block until `event` has ended; raises what its job raised."""

    def ends_within(self, event: Event, timeout_s: float) -> bool:
        """Block until `event` has ended, but (for io) no longer than `timeout_s`; returns whether it has."""
        event.block(timeout_s)
        return event.done()

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory for copies, uint8 [nbytes]; pinned on CUDA, where a power of two wastes nothing."""
        return host_memory(nbytes).fill_(0)  # fill_: map the pages here, not inside a timed copy

    def recorder(self) -> Recorder | None:
        """What makes a graph of a step, to launch it at once; None where there is nothing to gain from that."""
        return None

    def watch(self, rows: Tensor) -> None:  # noqa: B027  (most backends need not know)
        """Tell the backend which memory compute writes (the adversaries of the tests keep snapshots of it)."""

    def close(self) -> None:  # noqa: B027  (nothing to close without a thread)
        """Finish queued jobs and stop the worker thread, if any."""

    def __enter__(self) -> Streams:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_rows(rows: Tensor, index: Tensor, host: Tensor) -> Tensor:
    """Host bytes seen as the [m, k] elements of `rows` that they are to come from or go to."""
    return host.view(rows.dtype).view(index.shape[0], rows.shape[1])


def copy_rows(op: CopyOp, rows: Tensor, index: Tensor, host: Tensor, *, one_core: bool = False) -> None:
    """Gather or scatter where both sides are in CPU memory: one pass, no temporary.

    `one_core`: row by row on this thread, so that torch does not wake its other threads: between two copies they
    would spin on the core that file I/O needs, and each copy would wait for one that has lost its core.
    """
    host_rows = _as_rows(rows, index, host)
    if one_core:
        pool, memory = rows.numpy(), host_rows.numpy()
        for place, row in enumerate(index.tolist()):
            if op == "gather":
                np.copyto(memory[place], pool[row])
            else:
                np.copyto(pool[row], memory[place])
    elif op == "gather":
        torch.index_select(rows, 0, index, out=host_rows)
    else:
        rows.index_copy_(0, index, host_rows)


class ThreadStreams(Streams):
    """CPU: gather and scatter run at once on the calling thread, io on a worker thread for each lane. Owns those."""

    in_place = True

    def __init__(self) -> None:
        self._workers: defaultdict[str, Worker] = defaultdict(Worker)

    def _copy(self, op: CopyOp, rows: Tensor, index: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        event = Event(op)
        for other in after:
            other.block()
        busy = any(worker.busy for worker in self._workers.values())
        event.run(lambda: copy_rows(op, rows, index, host, one_core=busy), after)
        event.enqueue_s = time.perf_counter() - event.submitted - event.queue_s - event.device_s
        return event

    def io(
        self,
        job: Callable[[], object],
        after: Sequence[Event],
        fills: Tensor | None = None,  # noqa: ARG002
        lane: str = "",
    ) -> Event:
        """Run it on the lane's thread, after `after` and in order of submission."""
        return self._workers[lane].submit(job, after)

    def compute_event(self) -> Event:
        """An event that has ended: CPU compute is over when its call returns."""
        event = Event("compute")
        event.ended = True
        return event

    def wait_compute(self, event: Event) -> None:
        """Block: compute is launched by the calling thread."""
        event.block()

    def wait_host(self, event: Event) -> None:
        """Block until `event` has ended; raises what its job raised."""
        event.block()
        event.notice()

    def close(self) -> None:
        """Finish queued io and end the threads; a later `io` starts a new one."""
        for worker in self._workers.values():
            worker.close()


class _CudaEvent(Event):
    """Timed by the device: `asked` is recorded on an idle stream at submission, `start` and `end` on the lane."""

    def __init__(self, op: str) -> None:
        super().__init__(op)
        timed = op != "compute"
        self.asked, self.start, self.end = (torch.cuda.Event(enable_timing=timed) for _ in range(3))  # type: ignore[no-untyped-call]
        self.keeps: tuple[Tensor, ...] = ()  # memory that must not be reused before the end

    def done(self) -> bool:
        """Whether the device has passed it, without waiting."""
        return self.ended or bool(self.end.query())  # type: ignore[no-untyped-call]

    def block(self, timeout_s: float | None = None) -> None:  # noqa: ARG002  (a device copy ends by itself)
        self.end.synchronize()

    def settle(self) -> None:
        """Block until the end, then read the clocks, once."""
        self.block()
        if not self.ended and self.op != "compute":
            self.asked.synchronize()
            self.queue_s = self.asked.elapsed_time(self.start) / 1e3
            self.device_s = self.start.elapsed_time(self.end) / 1e3
            self._ended_s = self.submitted + self.asked.elapsed_time(self.end) / 1e3
        self.keeps = ()
        self.ended = True


class CudaStreams(Streams):
    """CUDA: one copy stream; large copies between pinned host memory and device staging. Owns both.

    Device temporaries are allocated and used on the copy stream alone, so that the caching allocator may hand them
    out again in stream order. Raises ValueError without CUDA.
    """

    def __init__(self, device: str | torch.device = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ValueError("CudaStreams needs a CUDA device and found none; use ThreadStreams on a CPU")
        self.device = torch.device(device)
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # Always idle, so that an event recorded here ends when it is recorded.
        self._clock = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._workers: defaultdict[str, Worker] = defaultdict(Worker)
        self._pageable = False

    def _copy(self, op: CopyOp, rows: Tensor, index: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        event = _CudaEvent(op)
        event.asked.record(self._clock)
        for other in after:
            if isinstance(other, _CudaEvent):
                self._copies.wait_event(other.end)
            else:  # io ends on the host; a stream cannot wait for that
                other.block()
                event.error = event.error or other.error
        pinned = index if self._pageable else index.pin_memory()
        with torch.cuda.stream(self._copies):
            event.start.record(self._copies)
            ids = pinned.to(self.device, non_blocking=True)
            host_rows = _as_rows(rows, index, host)
            step = max(1, _STAGING_BYTES // (rows.shape[1] * rows.element_size()))
            for first in range(0, index.shape[0], step):
                part = slice(first, first + step)
                if op == "gather":
                    host_rows[part].copy_(rows.index_select(0, ids[part]), non_blocking=True)
                else:
                    rows.index_copy_(0, ids[part], host_rows[part].to(self.device, non_blocking=True))
            event.end.record(self._copies)
        rows.record_stream(self._copies)
        event.keeps = (rows, pinned, host)
        event.enqueue_s = time.perf_counter() - event.submitted
        return event

    def io(
        self,
        job: Callable[[], object],
        after: Sequence[Event],
        fills: Tensor | None = None,  # noqa: ARG002
        lane: str = "",
    ) -> Event:
        """Run it on the lane's thread, which blocks for the device events in `after`."""
        return self._workers[lane].submit(job, after)

    def compute_event(self) -> Event:
        """Record the current stream of the calling thread."""
        event = _CudaEvent("compute")
        event.end.record(torch.cuda.current_stream(self.device))
        return event

    def wait_compute(self, event: Event) -> None:
        """Let the current stream of the calling thread wait; the host does not block, except for io."""
        if isinstance(event, _CudaEvent):
            torch.cuda.current_stream(self.device).wait_event(event.end)
        else:
            event.block()

    def wait_host(self, event: Event) -> None:
        """Block until `event` has ended; raises what its job raised."""
        if isinstance(event, _CudaEvent):
            event.settle()
        event.block()
        event.notice()

    def buffer(self, nbytes: int) -> Tensor:
        """Pinned memory, uint8 [nbytes]; pageable with one warning once pinning has failed."""
        if not self._pageable:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pageable = True
                warnings.warn(
                    f"could not pin {nbytes} bytes of host memory ({error}); using pageable memory: copies are slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return super().buffer(nbytes)

    def recorder(self) -> Recorder:
        """CUDA graphs."""
        return graph_recorder(self.device)

    def close(self) -> None:
        """Finish copies and queued io, and end the threads."""
        self._copies.synchronize()
        for worker in self._workers.values():
            worker.close()


def graph_recorder(device: torch.device) -> Recorder:
    """Records CUDA graphs that share one pool of memory for what they compute on the way.

    Replay them on one stream, in any order, and copy a result before any of them is replayed again: it may lie where
    another computes. A step launches kernels only; for what CUDA cannot record it raises RuntimeError. A graph knows
    memory by its address alone, so a replay holds its step, and with it all that the kernels read. Source:
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs (warming up on a side stream, memory that stays,
    one pool for many graphs).
    """
    memory, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        stream.wait_stream(caller)
        # This block gives the caller its stream back also when a recording that failed does not.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            step()  # on the same stream: libraries make their handles and workspaces now, which no graph can record
            caller.wait_stream(stream)
            # thread_local: a tier's thread may pin memory or wait for an event meanwhile. In the global mode such a
            # call of any thread would spoil the recording; this thread makes none while it records. Copies under way on
            # the copy stream go on: they are not recorded, and whoever replays has let its stream wait for them.
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                out = step()

        return partial(_replay, graph, out, step)

    return record


def _replay(graph: torch.cuda.CUDAGraph, out: Tensor, _step: object) -> Tensor:
    graph.replay()
    return out


def streams_for(device: str | torch.device) -> Streams:
    """The backend for a device: `CudaStreams` on CUDA, `ThreadStreams` on the CPU. Raises ValueError for others."""
    kind = torch.device(device).type
    if kind not in {"cpu", "cuda"}:
        raise ValueError(f"device {kind!r} is not supported; use cpu or cuda")
    return CudaStreams(device) if kind == "cuda" else ThreadStreams()
