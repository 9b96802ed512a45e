"""Jobs: the event that stands for one that was submitted, and a thread that runs them in order.

Host side only: does not know devices, copies, or what a job does.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["Event", "Worker"]

_CLOSE_S = 10.0  # how long closing waits for the worker's last file


class Event:
    """One submitted job, as seen by those who wait for it. `op` is "compute", "gather", "scatter" or "io".

    Seconds, each 0 until known: `queue_s` from submission to start (waits, busy lane), `enqueue_s` spent by the
    submitting call itself, `device_s` running, `notice_s` from its end until the host waited for it.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.submitted = time.perf_counter()
        self.queue_s = self.enqueue_s = self.device_s = self.notice_s = 0.0
        self.error: BaseException | None = None
        self.ended = False
        self._ended_s: float | None = None  # None: nothing to notice (compute), or already noticed

    def done(self) -> bool:
        """Whether it has ended, without waiting."""
        return self.ended

    def block(self, timeout_s: float | None = None) -> None:
        """Block the host until it has ended, or for `timeout_s`. This kind runs where it is submitted, or when an
        adversary says so.
        """

    def run(self, job: Callable[[], object], after: Iterable[Event] = ()) -> None:
        """Run `job` here and now, and time it. What it raised, or what a job before it raised, is kept for `notice`."""
        started = time.perf_counter()
        self.queue_s = started - self.submitted
        try:
            for event in after:
                if event.error is not None:
                    raise event.error
            job()
        except BaseException as error:
            self.error = error  # kept, not swallowed: raised where somebody waits
            if not isinstance(error, Exception):
                raise  # Ctrl-C belongs to the caller
        finally:
            self._ended_s = time.perf_counter()
            self.device_s = self._ended_s - started
            self.ended = True

    def notice(self) -> None:
        """The host has seen that it ended: note how late, and raise what the job raised."""
        if self._ended_s is not None:
            self.notice_s, self._ended_s = time.perf_counter() - self._ended_s, None
        if self.error is not None:
            raise self.error


class WorkerEvent(Event):
    """A job on the worker thread."""

    def __init__(self) -> None:
        super().__init__("io")
        self._flag = threading.Event()

    def block(self, timeout_s: float | None = None) -> None:
        self._flag.wait(timeout_s)

    def run_after(self, job: Callable[[], object], after: Sequence[Event]) -> None:
        """On the worker: wait for `after`, run, and wake who waits."""
        try:
            for other in after:
                other.block()
            self.run(job, after)
        finally:
            self._flag.set()


class Worker:
    """One daemon thread that runs functions in order. It starts with the first of them and ends with its owner."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._stop: Callable[[], Any] | None = None
        self._last: Event | None = None

    @property
    def busy(self) -> bool:
        """Whether jobs are running or waiting."""
        return self._last is not None and not self._last.done()

    def submit(self, job: Callable[[], object], after: Sequence[Event]) -> Event:
        """Queue `job`, to run when all of `after` have ended."""
        event = self._last = WorkerEvent()
        if self._stop is None:
            thread = threading.Thread(target=self._loop, args=(self._jobs,), name="kvlab-io", daemon=True)
            thread.start()
            # Runs at interpreter exit as well, so that a file being written is finished and not cut off.
            self._stop = weakref.finalize(self, Worker._end, self._jobs, thread)
        self._jobs.put(lambda: event.run_after(job, after))
        event.enqueue_s = time.perf_counter() - event.submitted
        return event

    def close(self) -> None:
        """Finish what is queued, for as long as that may take a worker that does not hang, and end the thread."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    @staticmethod
    def _loop(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while (job := jobs.get()) is not None:
            job()
            del job  # or its buffers would live until the next one comes

    @staticmethod
    def _end(jobs: queue.SimpleQueue[Callable[[], object] | None], thread: threading.Thread) -> None:
        jobs.put(None)
        if thread is not threading.current_thread():
            thread.join(_CLOSE_S)
