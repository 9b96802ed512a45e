"""A tier that is slow or hangs: nobody waits for long, nothing is served wrong, and late bytes hit nobody."""

import math
import threading

import pytest
from tiny_engine import BACKENDS, check_tokens, one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab import policies, scheduler
from kvlab.adversaries import OverdueStreams
from kvlab.engine import Engine
from kvlab.fingerprint import Fingerprint
from kvlab.pool import BlockPool, KVLayout
from kvlab.streams import ThreadStreams
from kvlab.tiers import DiskTier, HostTier, LinkTier, TierError
from kvlab.transfer import Transfer

P = text(40, seed=4)  # ten blocks of four tokens


class StagedThreads(ThreadStreams):
    """Files pass through staging, as where the pool is not in CPU memory."""

    in_place = False


ON_THREADS = {"in place": ThreadStreams, "staged": StagedThreads}


class Hang:
    """While it is on, everything asked of one tier is late: its io lane does not move."""

    def __init__(self, streams, tier):
        self._gate = threading.Event()
        streams.io(self._gate.wait, [], None, tier.name)

    def end(self):
        self._gate.set()


@pytest.fixture
def away(tmp_path):
    """(engine, tiers, request): a finished request whose ten blocks are in the first tier and nowhere else."""
    engines, hangs = [], []

    def make(streams, pool_blocks=32, tiers=("disk",), timeout_s=0.1, **options):
        made = [HostTier(1 << 20) if kind == "host" else DiskTier(tmp_path, 1 << 20) for kind in tiers]
        engine = Engine(
            tiny_model(),
            pool_blocks,
            4,
            made,
            poison=True,
            groups=2,
            streams=streams,
            load_timeout_s=timeout_s,
            **options,
        )
        engines.append(engine)
        request = engine.submit(P, 1)
        engine.run()
        assert engine.offload(request) == 10
        engine.executor.drain()
        assert made[0].counters.stored_blocks == 10
        return engine, made, request

    def hang(engine, tier):
        hangs.append(Hang(engine._streams, tier))
        return hangs[-1]

    make.hang = hang
    yield make
    for each in hangs:
        each.end()
    for engine in engines:
        engine.executor.drain()
        engine.close()
        engine.check_integrity()
        engine._streams.close()
        assert not engine.executor.transfer.under_way
        assert engine.metrics()["quarantined_blocks"] == 0
        for tier in engine.tiers:
            tier.clear()
            assert tier.used_bytes == 0  # nothing is still being read


def run(engine, *requests):
    while engine.step():
        engine.check_integrity()
    for request in requests:
        assert request.state == "finished"
        check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_load_that_is_late_is_computed_instead_and_its_blocks_are_nobodys_until_it_has_come(away, in_place):
    engine, (tier,), request = away(OverdueStreams(in_place))
    before = engine.metrics()["computed_tokens"]
    engine.resume(request, [1, 2], 4)
    run(engine, request)
    metrics = engine.metrics()
    assert metrics["loads"] == metrics["failed_loads"] == metrics["timed_out_loads"] == 1
    assert metrics["computed_tokens"] - before == 43 + 3
    assert metrics["quarantined_blocks"] == 10
    assert "kvlab_quarantined_blocks 10" in engine.prometheus()
    # Nothing is wrong with what is stored; but until the tier has delivered it is asked for nothing more.
    assert tier.contains(request.hashes[0], engine.model.fingerprint(4))
    assert tier.counters.failed_blocks == tier.counters.checksum_failures == tier.counters.read_failures == 0
    again = engine.submit([*P[:20], 5], 2)
    engine.evict(100)
    run(engine, again)
    assert engine.metrics()["loads"] == 1
    # Others fill all that is left of the pool, and then the late bytes come.
    others = [engine.submit(text(30, seed=20 + n), 3) for n in range(2)]
    engine.step()
    engine.step()
    engine.executor.drain()
    run(engine, *others)
    assert engine.metrics()["quarantined_blocks"] == 0
    assert tier.counters.loaded_blocks == 0


@pytest.mark.parametrize("kind", [*ON_THREADS, "overdue", "overdue in place"])
def test_bytes_that_come_late_change_no_token(away, kind):
    """Whoever computes while they come, and whoever has the blocks that they were meant for, gets the right tokens."""
    streams = ON_THREADS[kind]() if kind in ON_THREADS else OverdueStreams("in place" in kind)
    engine, (disk,), request = away(streams, pool_blocks=26)
    hang = away.hang(engine, disk) if kind in ON_THREADS else None
    engine.resume(request, [1, 2], 4)
    run(engine, request)
    assert engine.metrics()["timed_out_loads"] == 1
    engine.cancel(request)
    engine.evict(100)
    others = [engine.submit(text(20 + 4 * n, seed=20 + n), 9) for n in range(4)]  # more than the pool holds at a time
    for _ in range(3):
        engine.step()
    if hang is not None:
        hang.end()
    for pending in engine.executor.transfer.under_way:
        pending.settle()
    run(engine, *others)


@pytest.mark.parametrize("kind", ON_THREADS)
def test_a_tier_that_hangs_hangs_nobody_and_serves_again_when_it_is_back(away, kind):
    engine, (disk, host), request = away(ON_THREADS[kind](), tiers=("disk", "host"))
    hang = away.hang(engine, disk)
    other = engine.submit(text(6, seed=8), 3)
    engine.resume(request, [1, 2], 4)
    run(engine, request, other)
    assert engine.metrics()["timed_out_loads"] == 1
    assert engine.metrics()["quarantined_blocks"] == 10
    for each in (other, request):
        engine.offload(each)  # the first tier is passed over
        engine.executor._stores[-1].wait()
    assert (disk.counters.stored_blocks, host.counters.stored_blocks) == (10, 2 + 11)
    hang.end()
    engine.executor.drain()
    engine.step()
    assert engine.metrics()["quarantined_blocks"] == 0
    host.clear()
    again = engine.submit([*P, 7], 2)
    run(engine, again)
    assert engine.metrics()["hit_tokens"]["disk"] == 40


def test_nobody_waits_for_bytes_while_somebody_else_can_run(away):
    engine, (disk,), request = away(ThreadStreams(), timeout_s=math.inf)
    hang = away.hang(engine, disk)
    other = engine.submit(text(6, seed=8), 40)
    engine.step()
    engine.resume(request, [1, 2], 4)
    while other.state != "finished":  # with a blocking wait anywhere this would be for ever
        engine.step()
    assert request.state == "loading"
    assert not engine.metrics()["failed_loads"]
    hang.end()
    run(engine, request, other)
    assert engine.metrics()["hit_tokens"]["disk"] == 40


@pytest.mark.parametrize("kind", ON_THREADS)
@pytest.mark.parametrize("action", ["pause", "cancel"])
def test_a_hanging_load_that_nobody_wants_any_more_keeps_its_blocks_and_no_others(away, action, kind):
    engine, (disk,), request = away(ON_THREADS[kind]())
    hang = away.hang(engine, disk)
    engine.resume(request, [1], 1)
    engine.scheduler._admit()
    assert request.state == "loading"
    getattr(engine, action)(request)
    engine.run()
    assert engine.metrics()["quarantined_blocks"] == 10
    assert engine.scheduler.allocator.free_blocks == 22
    other = engine.submit(text(60, seed=6), 12)  # more than half of the pool
    engine.step()
    hang.end()
    engine.executor.drain()
    run(engine, other)
    assert engine.metrics()["quarantined_blocks"] == 0


def test_waiters_of_a_load_that_is_late_compute_too_and_do_not_ask_the_tier_again(away):
    engine, (tier,), _ = away(OverdueStreams(in_place=True), pool_blocks=64)
    waiters = [engine.submit([*P, n], 3) for n in range(3)]
    engine.scheduler._admit()
    assert [waiter.state for waiter in waiters] == ["loading"] * 3
    run(engine, *waiters)
    assert engine.metrics()["loads"] == engine.metrics()["timed_out_loads"] == 1
    assert engine.metrics()["joined_loads"] == 2
    assert all(waiter.failed_tiers == {tier.name} for waiter in waiters)


def test_who_needs_the_room_of_a_load_that_hangs_waits_and_is_told_why(away, monkeypatch):
    monkeypatch.setattr(scheduler, "_NAP_S", 0.001)
    engine, (disk,), request = away(ThreadStreams(), pool_blocks=12)
    hang = away.hang(engine, disk)
    engine.resume(request, [1, 2], 4)
    with pytest.raises(RuntimeError, match="with 1 waiting and 10 blocks that a tier which hangs may still write to"):
        engine.run()
    engine.check_integrity()
    assert request.state == "waiting"
    hang.end()
    run(engine, request)
    assert engine.metrics()["timed_out_loads"] == 1


def test_a_store_that_hangs_makes_a_miss_of_the_reload_that_needs_it(away):
    engine, (disk,), _ = away(ThreadStreams())
    other = engine.submit(text(20, seed=9), 2)
    run(engine, other)
    hang = away.hang(engine, disk)
    engine.offload(other)
    engine.resume(other, [3], 2)
    run(engine, other)
    assert engine.metrics()["timed_out_loads"] == engine.metrics()["failed_loads"] == 1
    assert engine.metrics()["quarantined_blocks"] == 0  # nothing was asked for
    hang.end()


def test_a_link_that_is_too_slow_is_given_up_at_the_limit():
    link = LinkTier(HostTier(1 << 20), gb_per_s=1e-6)  # ten blocks of 2 KiB: 20 s
    with Engine(tiny_model(), 32, 4, [link], poison=True, load_timeout_s=0.05) as engine:
        request = engine.submit(P, 1)
        engine.run()
        engine.offload(request)
        for pending in engine.executor.transfer.under_way:
            pending.store.due_s = 0.0  # what it takes to get there is not what this test is about
        engine.executor.drain()
        engine.resume(request, [1], 3)
        run(engine, request)
        assert engine.metrics()["timed_out_loads"] == 1
        assert engine.metrics()["quarantined_blocks"] == 0  # memory: no copy is under way


def test_a_tail_that_is_late_while_its_head_is_computed_is_computed_after_it(away):
    prompt = text(200, seed=5)
    machine = tiny_machine(gb_per_s=0.02, flops_per_s=5e8)
    machine = machine.__class__(machine.name, machine.prefill, {"disk": machine.links["host"]})
    engine, (disk,), _ = away(
        ThreadStreams(), pool_blocks=128, policy=policies.Calibrated(machine), token_budget=16, timeout_s=0.0
    )
    request = engine.submit(prompt, 1)
    engine.run()
    engine.offload(request)
    engine.executor.drain()
    hang = away.hang(engine, disk)
    engine.resume(request, [3], 2)
    run(engine, request)
    assert engine.decisions[-1].choice == "split"
    assert engine.decisions[-1].start > 16
    assert engine.metrics()["timed_out_loads"] == 1
    hang.end()


@pytest.mark.parametrize("timeout_s", [-1.0, math.nan])
def test_a_limit_that_is_no_time_is_refused(timeout_s):
    with pytest.raises(ValueError, match="expected seconds, or inf for no limit"):
        Engine(tiny_model(), 8, 4, load_timeout_s=timeout_s)


def test_closing_does_not_wait_for_a_tier_that_hangs(away, monkeypatch):
    monkeypatch.setattr("kvlab.jobs._CLOSE_S", 0.01)
    engine, (disk,), request = away(ThreadStreams())
    hang = away.hang(engine, disk)
    engine.resume(request, [1], 1)
    run(engine, request)
    engine.close()
    assert engine.metrics()["quarantined_blocks"] == 10
    hang.end()


# A tier after the other -----------------------------------------------------------------------------------------------


def copied_to(engine, tier, request):
    """Let a tier further down hold the ten blocks of `request` as well."""
    with engine_blocks(engine) as blocks:
        engine.executor.transfer.reload(engine.tiers[0], request.hashes[:10], blocks).wait()
        engine.executor.transfer.offload(tier, blocks, request.hashes[:10]).wait()


class engine_blocks:
    """Ten free blocks, borrowed."""

    def __init__(self, engine):
        self.allocator = engine.scheduler.allocator

    def __enter__(self):
        self.table = self.allocator.new_table()
        return self.allocator.grow(self.table, 40)

    def __exit__(self, *_):
        self.allocator.release(self.table)


def rot(host, block, group=0):
    (slab,) = host._slabs
    extent = tiny_model().layout(4).block_bytes // 2
    slab.memory[(slab.slots * group + block) * extent] ^= 64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [0, 1])
def test_what_one_tier_fails_to_bring_another_brings(away, group, backend):
    engine, (host, disk), request = away(BACKENDS[backend](), tiers=("host", "disk"), timeout_s=60.0)
    copied_to(engine, disk, request)
    rot(host, 6, group)
    engine.resume(request, [1, 2], 3)
    run(engine, request)
    metrics = engine.metrics()
    assert (metrics["loads"], metrics["failed_loads"], metrics["second_loads"]) == (2, 1, 1)
    assert metrics["hit_tokens"] == {"host": 24, "disk": 16, "pool": 0}
    assert [decision.option.tier for decision in engine.decisions] == ["host", "disk"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tier_is_asked_twice_in_a_turn(away, backend):
    engine, (host, disk), request = away(BACKENDS[backend](), tiers=("host", "disk"), timeout_s=60.0)
    copied_to(engine, disk, request)
    rot(host, 6)
    (file,) = disk.folder.glob("*.kv")
    raw = bytearray(file.read_bytes())
    raw[-4] ^= 1  # the last block, in the last group
    file.write_bytes(raw)
    others = [engine.submit([*P, n], 2) for n in range(2)]
    engine.resume(request, [1, 2], 3)
    run(engine, request, *others)
    metrics = engine.metrics()
    assert (metrics["loads"], metrics["failed_loads"], metrics["second_loads"]) == (2, 2, 1)
    engine.resume(request, [4], 1)
    assert not request.failed_tiers  # a new turn may ask again


def test_a_tier_that_hangs_is_made_up_for_by_one_that_does_not(away):
    engine, (disk, host), request = away(ThreadStreams(), tiers=("disk", "host"))
    copied_to(engine, host, request)
    away.hang(engine, disk)
    engine.resume(request, [1, 2], 3)
    run(engine, request)
    assert engine.metrics()["timed_out_loads"] == 1
    assert engine.metrics()["hit_tokens"]["host"] == 40
    assert engine.metrics()["quarantined_blocks"] == 10


# The transfer alone ---------------------------------------------------------------------------------------------------


def test_an_offload_that_finds_all_staging_stuck_gives_up_and_leaves_nothing(tmp_path):
    with StagedThreads() as streams:
        pool = BlockPool(KVLayout(4, 2, 8, 4, "fp32"), 12)
        transfer = Transfer(pool, streams, groups=4, piece_bytes=1, staging_bytes=1)
        tier = DiskTier(tmp_path, 1 << 20)
        transfer.open(tier, Fingerprint("w", "c", "t", "r", "fp32", "b"))
        hang = Hang(streams, tier)
        hashes = [bytes([i + 1]) * 32 for i in range(12)]
        pending = transfer.offload(tier, list(range(12)), hashes, timeout_s=0.01)
        assert transfer.late(tier)
        assert not pending.settle(0.0)
        hang.end()
        with pytest.raises(TierError, match=r"the disk tier did not write within 0.01 s"):
            pending.wait()
        assert pending.settled
        assert not transfer.late(tier)
        assert list(tier.folder.iterdir()) == []
        assert tier.used_bytes == 0
        assert transfer.offload(tier, list(range(12)), hashes).wait().valid_blocks == 12
