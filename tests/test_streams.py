"""A backend runs jobs in order, after what they wait for, times them apart, and passes on what they raise."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from kvlab.adversaries import EarlyStreams, LateStreams
from kvlab.streams import CudaStreams, Event, ThreadStreams, copy_rows, streams_for
from kvlab.tiers.base import Staging

BACKENDS = [ThreadStreams, LateStreams, EarlyStreams]


def rows(n=8, k=3):
    return torch.arange(n * k * 2, dtype=torch.float64).view(n, -1).view(torch.complex128)


def host(matrix):
    return matrix.contiguous().view(torch.uint8).flatten()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [slice(None), slice(1, 3)])
def test_gather_and_scatter_move_the_rows_that_were_named(backend, columns):
    with backend() as streams:
        pool = rows()
        streams.watch(pool)
        view, index = pool[:, columns], torch.tensor([5, 0, 7])
        expected = view[index].clone()
        out = streams.buffer(host(expected).numel())
        event = streams.gather(view, index, out, [streams.compute_event()])
        streams.wait_host(event)
        assert torch.equal(out, host(expected))
        target = torch.tensor([1, 2, 3])
        untouched = pool[4:].clone()
        streams.wait_compute(streams.scatter(view, target, out, [streams.compute_event()]))
        assert torch.equal(view[target], expected)
        assert torch.equal(pool[4:], untouched)
        assert (event.op, event.done()) == ("gather", True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_jobs_run_in_the_order_that_events_ask_for(backend):
    with backend() as streams:
        order = []
        first = streams.io(lambda: (time.sleep(0.01), order.append(1)), [])
        second = streams.io(lambda: order.append(2), [first])
        streams.wait_host(second)
        assert order == [1, 2]
        assert first.done()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_job_raised_is_raised_where_it_is_waited_for_and_spoils_what_depends_on_it(backend):
    with backend() as streams:
        ran = []

        def fail():
            raise OSError("no such luck")

        failed = streams.io(fail, [])
        dependent = streams.io(lambda: ran.append(1), [failed])
        unrelated = streams.io(lambda: ran.append(2), [])
        streams.wait_host(unrelated)
        for event in (failed, dependent):
            with pytest.raises(OSError, match="no such luck"):
                streams.wait_host(event)
        assert ran == [2]


def test_io_runs_on_one_worker_thread_and_copies_on_the_calling_one():
    with ThreadStreams() as streams:
        threads = []
        for _ in range(3):
            streams.wait_host(streams.io(lambda: threads.append(threading.current_thread()), []))
        assert len(set(threads)) == 1
        assert threads[0] is not threading.current_thread()
        assert threads[0].daemon


def test_closing_finishes_queued_io_and_ends_the_thread():
    streams = ThreadStreams()
    done = []
    for i in range(5):
        streams.io(lambda i=i: (time.sleep(0.002), done.append(i)), [])
    streams.close()
    assert done == [0, 1, 2, 3, 4]
    assert not [t for t in threading.enumerate() if t.name == "kvlab-io"]
    streams.close()
    streams.wait_host(streams.io(lambda: done.append(5), []))  # a closed one starts again
    streams.close()
    assert done[-1] == 5


def test_streams_that_are_forgotten_end_their_thread():
    streams = ThreadStreams()
    streams.wait_host(streams.io(lambda: None, []))
    (thread,) = [t for t in threading.enumerate() if t.name == "kvlab-io"]
    gone = weakref.ref(streams)
    del streams
    gc.collect()
    thread.join(5)
    assert gone() is None
    assert not thread.is_alive()


def test_an_interpreter_that_ends_finishes_the_file_it_is_writing(tmp_path):
    code = """
import sys, time
from kvlab.streams import ThreadStreams
streams = ThreadStreams()
streams.io(lambda: (time.sleep(0.2), open(sys.argv[1], "w").write("whole")), [])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "whole"


def test_queue_enqueue_device_and_notice_seconds_are_apart():
    with ThreadStreams() as streams:
        streams.wait_host(streams.io(lambda: None, []))
        slow = streams.io(lambda: time.sleep(0.03), [])
        event = streams.io(lambda: time.sleep(0.02), [slow])
        time.sleep(0.15)
        streams.wait_host(event)
        assert 0.025 <= event.queue_s < 0.12
        assert 0.019 <= event.device_s < 0.12
        assert 0.03 <= event.notice_s < 0.15
        assert event.enqueue_s < 0.02
        noticed = event.notice_s
        streams.wait_host(event)
        assert event.notice_s == noticed
        pool, index = rows(), torch.tensor([0])
        blocked = streams.io(lambda: time.sleep(0.03), [])
        copy = streams.gather(pool, index, streams.buffer(48), [blocked])
        assert copy.queue_s >= 0.025
        assert copy.device_s < 0.02


def test_ctrl_c_inside_a_copy_is_not_kept_for_later(monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvlab.streams.copy_rows", interrupt)
    with ThreadStreams() as streams, pytest.raises(KeyboardInterrupt):
        streams.gather(rows(), torch.tensor([0]), streams.buffer(48), [])


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_copying_on_one_core_gives_the_same_bytes(op):
    # Rows of 512 KiB and more, and a step that does not divide the number of rows.
    for n, k in ((7, 40_000), (50, 10_000)):
        pool = torch.randn(n, k, dtype=torch.float64).view(torch.complex128)
        index = torch.randperm(n)[: n - 2]
        results = []
        for one_core in (False, True):
            target = pool.clone()
            memory = torch.arange(index.numel() * pool[0].numel() * 16, dtype=torch.int64).to(torch.uint8)
            copy_rows(op, target, index, memory, one_core=one_core)
            results.append((target.view(torch.int64), memory))  # bits: some are NaN
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_late_runs_nothing_before_somebody_waits_and_spoils_what_will_be_filled():
    streams = LateStreams()
    out = streams.buffer(48)
    ran = []
    gather = streams.gather(rows(), torch.tensor([2]), out, [])
    io = streams.io(lambda: ran.append(out.clone()), [])
    assert (out == 0xFF).all()
    streams.wait_host(io)  # does not come after the gather: sees the spoilt buffer
    assert (ran[0] == 0xFF).all()
    assert not gather.done()
    streams.wait_compute(gather)
    assert torch.equal(out, host(rows()[2:3]))


def test_late_does_not_spoil_a_buffer_that_somebody_may_still_read():
    streams = LateStreams()
    out, seen = streams.buffer(48).fill_(3), []
    read = streams.io(lambda: seen.append(out.clone()), [])
    gather = streams.gather(rows(), torch.tensor([2]), out, [read])
    assert (out == 3).all()
    streams.wait_host(gather)
    assert (seen[0] == 3).all()


def test_early_reads_memory_as_it_stood_at_the_newest_event_waited_for():
    streams = EarlyStreams()
    pool = rows()
    streams.watch(pool)
    index = torch.tensor([4])
    out = [streams.buffer(48) for _ in range(4)]
    streams.wait_host(streams.gather(pool, index, out[0], []))
    assert (out[0] == 0xFF).all()  # before any event: NaN
    pool[4] = 1.0
    event = streams.compute_event()
    pool[4] = 2.0
    streams.wait_host(streams.gather(pool, index, out[1], [event]))
    streams.wait_host(streams.gather(pool, index, out[2], []))  # the lane has waited for it
    for seen in out[1:3]:
        assert (seen.view(torch.complex128) == 1.0).all()
    streams.wait_host(streams.gather(pool, index, out[3], [streams.compute_event()]))
    assert (out[3].view(torch.complex128) == 2.0).all()


def test_early_lets_a_later_compute_write_win_over_a_scatter_that_did_not_wait():
    streams = EarlyStreams()
    pool = rows()
    streams.watch(pool)
    before = streams.compute_event()
    pool[3] = 5.0
    streams.scatter(pool, torch.tensor([3, 4]), torch.zeros(96, dtype=torch.uint8), [before])
    assert (pool[3] == 5.0).all()
    assert (pool[4] == 0.0).all()
    streams.scatter(pool, torch.tensor([3]), torch.zeros(48, dtype=torch.uint8), [streams.compute_event()])
    assert (pool[3] == 0.0).all()
    out = streams.buffer(48)
    streams.wait_host(streams.gather(pool, torch.tensor([4]), out, [before]))
    assert (out == 0).all()  # what the lane itself wrote before, it sees


def test_staging_reuses_the_longest_idle_buffer_and_grows_only_while_jobs_need_it():
    with ThreadStreams() as streams:
        staging = Staging(streams, 1 << 14, most=2)
        one = staging.take()
        assert one.memory.data_ptr() % 4096 == 0
        staging.put(one, None)
        assert staging.take() is one  # idle: no second one is made
        busy = Event("io")
        staging.put(one, busy)
        two = staging.take()
        assert two is not one
        staging.put(two, busy)
        assert staging.take() is one  # at the limit: after `busy`
        assert staging.free
        staging.take()
        assert not staging.free
        assert staging.take() not in (one, two)  # somebody must get on


def test_devices_without_a_backend_are_refused():
    with pytest.raises(ValueError, match="'mps' is not supported; use cpu or cuda"):
        streams_for("mps")
    streams_for("cpu").close()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA device and found none"):
            streams_for("cuda")


def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(monkeypatch):
    streams = CudaStreams.__new__(CudaStreams)
    streams._pageable = False
    empty = torch.empty

    def refuse(*args, **kwargs):
        if kwargs.get("pin_memory"):
            raise RuntimeError("cannot pin")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.warns(RuntimeWarning, match="could not pin 64 bytes") as caught:
        first = streams.buffer(64)
    second = streams.buffer(64)  # a second warning would be an error
    assert first.numel() == second.numel() == 64
    assert len(caught) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_cuda_times_the_device_and_not_the_call():
    with CudaStreams() as streams:
        pool = torch.zeros(1024, 1 << 14, dtype=torch.complex128, device="cuda")
        index = torch.arange(1024)
        out = streams.buffer(1 << 28)
        streams.wait_host(streams.gather(pool, index, out, [streams.compute_event()]))
        event = streams.gather(pool, index, out, [streams.compute_event()])
        assert event.enqueue_s < 0.005
        time.sleep(0.1)
        streams.wait_host(event)
        assert event.device_s > 0.002
        assert 0.02 < event.notice_s < time.perf_counter() - event.submitted
