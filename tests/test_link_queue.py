"""What is in front of a load on its link: of the loads under way, only what they still have to bring."""

import math
import time

import pytest
from test_simulate import ARCH, BLOCK, machine
from tiny_engine import BACKENDS, one_thread, text, tiny_model  # noqa: F401

from kvlab import policies
from kvlab.adversaries import LateStreams
from kvlab.engine import Engine
from kvlab.policy import Policy
from kvlab.simulate import BilledTier, BillingExecutor
from kvlab.tiers import HostTier, LinkTier


class Watched(Policy):
    """Always reloads, and keeps what it was told about queues."""

    def __init__(self):
        self.queues = []

    def decide(self, situation):
        self.queues.append((situation.longest.queued_bytes, situation.longest.queued_loads))
        return policies.Reload().decide(situation)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_the_engine_counts_the_pieces_that_an_emulated_link_has_not_delivered(backend):
    policy, model, streams = Watched(), tiny_model(), backend()
    tier = LinkTier(HostTier(1 << 20), gb_per_s=math.inf)
    with Engine(model, 64, 4, [tier], policy, groups=2, streams=streams) as engine:
        block_bytes = engine.executor.block_bytes
        requests = [engine.submit(text(40, seed=n), 1) for n in range(4)]
        engine.run()
        for request in requests:
            engine.offload(request)
        engine.executor.drain()
        tier.gb_per_s = 1e-9  # whatever is asked for now comes in hours
        scheduler = engine.scheduler
        engine.resume(requests[0], text(3), 1)
        scheduler._admit()
        pieces = scheduler.loads.under_way[0].handle.reload.load.pieces
        assert len(pieces) == 2
        engine.resume(requests[1], text(3), 1)
        scheduler._admit()
        pieces[0].due_s = time.perf_counter()
        engine.resume(requests[2], text(3), 1)
        scheduler._admit()
        for load in scheduler.loads.under_way[:2]:
            for piece in load.handle.reload.load.pieces:
                piece.due_s = time.perf_counter()
        engine.resume(requests[3], text(3), 1)
        scheduler._admit()
        whole = 10 * block_bytes
        assert policy.queues == [(0, 0), (whole, 1), (whole // 2 + whole, 2), (whole, 1)]
        for load in scheduler.loads.under_way[2:]:
            for piece in load.handle.reload.load.pieces:
                piece.due_s = time.perf_counter()
        engine.run()
        assert engine.metrics()["failed_loads"] == 0
    streams.close()


def test_what_lies_in_memory_is_in_front_until_it_is_copied():
    streams, policy = LateStreams(), Watched()
    with Engine(tiny_model(), 64, 4, [HostTier(1 << 20)], policy, groups=2, streams=streams) as engine:
        requests = [engine.submit(text(40, seed=n), 1) for n in range(2)]
        engine.run()
        for request in requests:
            engine.offload(request)
        engine.executor.drain()
        engine.resume(requests[0], text(3), 1)
        engine.scheduler._admit()
        (load,) = engine.scheduler.loads.under_way
        handle, whole = load.handle, 10 * engine.executor.block_bytes
        assert engine.executor.remaining_bytes(handle) == whole
        assert not engine.executor.arrived(handle)  # but both layer groups are queued for the device
        first, second = handle.reload.copies
        assert engine.executor.remaining_bytes(handle) == whole
        streams.wait_host(first)
        assert engine.executor.remaining_bytes(handle) == whole // 2
        streams.wait_host(second)
        assert engine.executor.remaining_bytes(handle) == 0
        engine.resume(requests[1], text(3), 1)
        engine.run()
        assert policy.queues == [(0, 0), (0, 0)]
    streams.close()


def test_the_simulator_counts_what_its_clock_says_is_left():
    where = machine(gb_per_s=10.0)
    tier = BilledTier("host", 100, where.link("host"), where.link("host", "store"), 32)
    executor = BillingExecutor(ARCH, where, "bf16", pool_blocks=100, block_size=512, tiers=[tier])
    tier.put([b"a", b"b", b"c"], 0.0)
    first, second = executor.load("host", [b"a", b"b"], [0, 1], ""), executor.load("host", [b"c"], [2], "")
    assert [executor.remaining_bytes(load) for load in (first, second)] == [2 * BLOCK, BLOCK]
    executor.wait_until(BLOCK / 2 / 10e9)
    assert [executor.remaining_bytes(load) for load in (first, second)] == [BLOCK * 3 // 2, BLOCK]
    executor.wait_until(BLOCK * 9 / 4 / 10e9)
    assert executor.remaining_bytes(first) == 0
    assert executor.remaining_bytes(second) == pytest.approx(BLOCK * 3 / 4)
    executor.wait_until(second.due_s)
    assert executor.remaining_bytes(second) == 0
