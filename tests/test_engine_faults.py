"""What goes wrong in a tier is a miss: the same tokens, nothing tried twice, nothing leaked, and counters say so."""

import os
import shutil
from dataclasses import replace

import pytest
from tiny_engine import BACKENDS, check_tokens, one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.policy import Calibrated
from kvlab.tiers import DiskTier, HostTier, TierError
from kvlab.tiers.segment import SegmentWriter

P = text(40, seed=4)  # ten blocks of four tokens


def segment(tier):
    (file,) = tier.folder.glob("*.kv")
    return file


def payload(tier):
    """The bytes of the only segment and where the payload begins in them: two groups of ten extents of 1 KiB."""
    raw = bytearray(segment(tier).read_bytes())
    return raw, len(raw) - 10 * tiny_model().layout(4).block_bytes


def flip(tier, share):
    raw, start = payload(tier)
    raw[start + int(share * (len(raw) - start))] ^= 1
    segment(tier).write_bytes(raw)


def wrong_bytes(tier):
    raw, start = payload(tier)
    raw[start:] = bytes(len(raw) - start)
    segment(tier).write_bytes(raw)


def cut(tier, share):
    raw, start = payload(tier)
    os.truncate(segment(tier), start + int(share * (len(raw) - start)))


def no_permission(tier):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    segment(tier).chmod(0)


def damaged_header(tier):
    raw, _ = payload(tier)
    raw[20] ^= 1
    segment(tier).write_bytes(raw)


def a_directory(tier):
    """Reading it is an error of the operating system."""
    file = segment(tier)
    file.unlink()
    file.mkdir()


DISK_FAULTS = {
    "flipped bit at the start": lambda tier: flip(tier, 0.0),
    "flipped bit in the middle of the first group": lambda tier: flip(tier, 0.25),
    "flipped bit in the middle of the last group": lambda tier: flip(tier, 0.75),
    "flipped bit at the end": lambda tier: flip(tier, 0.999),
    "right length, wrong bytes": wrong_bytes,
    "short read": lambda tier: cut(tier, 0.9),
    "truncated to nothing": lambda tier: os.truncate(segment(tier), 0),
    "damaged header": damaged_header,
    "read error": a_directory,
    "file gone": lambda tier: segment(tier).unlink(),
    "tier gone": lambda tier: shutil.rmtree(tier.folder),
    "permission lost": no_permission,
}


@pytest.fixture
def away(tmp_path):
    """(engine, tier, request): a finished request whose ten blocks are in a tier and nowhere else."""
    engines = []

    def make(kind, backend="thread", **options):
        tier = HostTier(1 << 20) if kind == "host" else DiskTier(tmp_path, 1 << 20)
        engine = Engine(tiny_model(), 32, 4, [tier], poison=True, groups=2, streams=BACKENDS[backend](), **options)
        engines.append(engine)
        request = engine.submit(P, 1)
        engine.run()
        assert engine.offload(request) == 10
        engine.executor.drain()
        assert tier.counters.stored_blocks == 10
        return engine, tier, request

    yield make
    for engine in engines:
        engine.check_integrity()
        engine.close()
        engine._streams.close()
        assert not engine.executor.transfer.under_way


def come_back(engine, *requests):
    """Run to the end; every token is that of a run without cache."""
    while engine.step():
        engine.check_integrity()
    for request in requests:
        assert request.state == "finished"
        check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", DISK_FAULTS)
def test_a_load_that_fails_is_computed_instead_and_not_tried_again(away, fault, backend):
    engine, tier, request = away("disk", backend)
    DISK_FAULTS[fault](tier)
    before = engine.metrics()["computed_tokens"]
    engine.resume(request, [1, 2], 4)
    come_back(engine, request)
    metrics = engine.metrics()
    hits = metrics["hit_tokens"].get("disk", 0)
    assert metrics["loads"] == metrics["failed_loads"] == 1
    assert metrics["computed_tokens"] - before == 43 - hits + 3
    assert hits < 40
    assert tier.counters.checksum_failures + tier.counters.read_failures >= 1
    # Not again: what failed is forgotten, and a request that wants it computes it.
    assert not tier.contains(request.hashes[hits // 4], engine.model.fingerprint(4))
    engine.cancel(request)
    while engine.scheduler.index:  # throw the blocks away, without storing them anew
        for entry in engine.scheduler.index.victims(100, lambda entry: 0.0):
            if engine.scheduler.index.remove(entry):
                engine.scheduler.cache.free([entry.block])
    again = engine.submit([*P, 1], 2)
    come_back(engine, again)
    assert engine.metrics()["failed_loads"] == 1
    assert engine.scheduler.allocator.free_blocks + len(again.table.blocks) == 32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [0, 1])
def test_rot_in_host_memory_is_found_whichever_layer_group_it_is_in(away, group, backend):
    engine, tier, request = away("host", backend)
    (slab,) = tier._slabs
    extent = tiny_model().layout(4).block_bytes // 2
    slab.memory[(slab.slots * group + 6) * extent] ^= 64
    engine.resume(request, [1], 3)
    come_back(engine, request)
    assert tier.counters.checksum_failures == 1
    assert engine.metrics()["failed_loads"] == 1
    assert engine.metrics()["hit_tokens"]["host"] == 24  # the six blocks before it are used


@pytest.mark.parametrize("backend", BACKENDS)
def test_when_a_load_fails_that_several_wait_for_each_recovers(away, backend):
    engine, tier, _ = away("disk", backend)
    flip(tier, 0.75)
    waiters = [engine.submit([*P, n], 3) for n in range(3)]
    come_back(engine, *waiters)
    assert engine.metrics()["loads"] == engine.metrics()["failed_loads"] == 1
    assert engine.metrics()["joined_loads"] == 2
    assert engine.metrics()["preemptions"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [0, 1])
def test_a_split_whose_tail_fails_in_the_middle_of_a_layer_group_serves_both_who_wanted_it(tmp_path, group, backend):
    """The head was computed while the tail loaded; of the tail, what is valid in every group is used."""
    machine = tiny_machine(gb_per_s=0.02, flops_per_s=5e8)
    machine = replace(machine, links={"disk": machine.links["host"]})
    tier, prompt = DiskTier(tmp_path, 1 << 20), text(200, seed=5)
    with (
        BACKENDS[backend]() as streams,
        Engine(tiny_model(), 128, 4, [tier], Calibrated(machine), groups=2, streams=streams, poison=True) as engine,
    ):
        request = engine.submit(prompt, 1)
        engine.run()
        assert engine.offload(request) == 50
        engine.executor.drain()
        raw = bytearray(segment(tier).read_bytes())
        start = len(raw) - 50 * tiny_model().layout(4).block_bytes
        raw[start + 1024 * (50 * group + 45)] ^= 1  # the 46th block of fifty
        segment(tier).write_bytes(raw)
        sharer = engine.submit([*prompt, 9], 3)
        engine.resume(request, [3], 2)
        come_back(engine, request, sharer)
        decision = engine.decisions[0]
        assert decision.choice == "split"
        assert engine.metrics()["loads"] == engine.metrics()["failed_loads"] == engine.metrics()["joined_loads"] == 1
        assert tier.counters.checksum_failures == 1
        assert engine.metrics()["hit_tokens"]["disk"] == 4 * 45 - decision.start
        assert engine.metrics()["quarantined_blocks"] == 0
        engine.close()


def test_who_lost_its_load_takes_blocks_back_from_a_younger_one_that_was_about_to_decode(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20)
    with Engine(tiny_model(), 13, 4, [tier], poison=True, token_budget=4) as engine:
        request = engine.submit(P, 1)
        engine.run()
        engine.offload(request)
        engine.executor.drain()
        flip(tier, 0.0)
        older = engine.submit([*P, 1], 2)
        younger = engine.submit(text(3, seed=9), 30)  # grows into the room that the failed load gives back
        while not engine.metrics()["failed_loads"]:
            engine.step()
        come_back(engine, older, younger)
        assert younger.preemptions >= 1
        assert older.preemptions == 0


def test_a_store_that_fails_loses_the_copy_and_nothing_else(away, monkeypatch):
    engine, tier, request = away("disk")
    other = engine.submit(text(20, seed=9), 2)
    engine.run()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentWriter, "write", full)
    engine.offload(other)
    engine.executor.drain()
    monkeypatch.undo()
    assert tier.counters.failed_stores == 1
    assert tier.counters.stored_blocks == 10
    assert len(list(tier.folder.iterdir())) == 1  # the half-written file is gone
    engine.resume(other, [3], 2)
    engine.resume(request, [3], 2)
    come_back(engine, other, request)
    assert engine.metrics()["loads"] == 1


def test_a_store_that_fails_while_its_owner_already_comes_back_is_a_miss(away, monkeypatch):
    engine, _, _ = away("disk", "late")
    other = engine.submit(text(20, seed=9), 2)
    engine.run()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentWriter, "write", full)
    engine.offload(other)
    engine.resume(other, [3], 2)
    come_back(engine, other)
    assert engine.metrics()["failed_loads"] == 1


@pytest.mark.parametrize("error", [TierError(28, "full"), PermissionError(13, "permission lost"), OSError(5, "gone")])
def test_a_tier_that_takes_nothing_is_passed_over_for_the_next(tmp_path, error, monkeypatch):
    host, disk = HostTier(1 << 20), DiskTier(tmp_path, 1 << 20)
    with Engine(tiny_model(), 32, 4, [host, disk], poison=True) as engine:

        def refuse(*_, **__):
            raise error

        monkeypatch.setattr(host, "reserve", refuse)
        request = engine.submit(P, 1)
        engine.run()
        engine.offload(request)
        engine.resume(request, [1], 2)
        come_back(engine, request)
        assert engine.metrics()["hit_tokens"]["disk"] == 40
        assert host.counters.failed_stores == 1


def test_rot_in_host_memory_does_not_reach_the_disk_with_a_fresh_checksum(tmp_path):
    block = tiny_model().layout(4).block_bytes
    host, disk = HostTier(10 * block), DiskTier(tmp_path, 1 << 20)
    with Engine(tiny_model(), 32, 4, [host, disk], poison=True) as engine:
        first, second = (engine.submit(text(40, seed=n), 1) for n in range(2))
        engine.run()
        engine.offload(first)
        engine.executor.drain()
        host._slabs[0].memory[block // 2 * 3] ^= 1
        engine.offload(second)
        engine.executor.drain()
        assert engine.metrics()["demoted_blocks"] == disk.counters.stored_blocks == 9
        for request in (first, second):
            engine.resume(request, [1], 2)
        come_back(engine, first, second)
