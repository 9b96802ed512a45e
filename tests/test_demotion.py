"""What a memory tier evicts goes on to the tier below: the same bytes, at the pace of the link on their way."""

import time

import pytest
from real_server import RealServer
from test_engine_random import EngineSchedules, drive, short_naps  # noqa: F401
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.tiers import DiskTier, HostTier, LinkTier, ValkeyTier

BLOCK = tiny_model().layout(4).block_bytes
SLOW_GB_PER_S = BLOCK / 20 / 1e9  # a block in 20 s
LOWER = ["host", "unverified host", "host behind a link", "disk", "disk behind a link", "valkey"]


def host(blocks=64, *, name="host", verify=True):
    tier = HostTier(blocks * BLOCK, verify=verify)
    tier.name = name
    return tier


@pytest.fixture
def lower(request, tmp_path):
    """A tier with room for everything, of the kind that the test asks for."""
    kind = request.param
    if kind == "valkey":
        server = RealServer(tmp_path)
        yield ValkeyTier(server.url, timeout_s=60.0, lookup_timeout_s=60.0)
        server.stop()
        return
    inner = DiskTier(tmp_path, 1 << 20) if "disk" in kind else host(name="far", verify="unverified" not in kind)
    yield LinkTier(inner, 10.0) if "link" in kind else inner


@pytest.fixture
def demoted():
    """An engine, and its two requests of eight blocks each: the second has driven the first from `upper` to `lower`.

    `before`: is called with the engine when only the first is stored.
    """
    engines = []

    def make(upper, lower, before=lambda engine: None):
        engines.append(Engine(tiny_model(), 32, 4, [upper, lower], poison=True))
        engine, requests = engines[-1], [engines[-1].submit(text(32, seed=n), 1) for n in range(2)]
        engine.run()
        for request in requests:
            engine.offload(request)
            for pending in [p for p in engine.executor._stores if p.tier is upper]:
                pending.store.due_s = 0.0
                pending.settle()
            if request is requests[0]:
                before(engine)
        assert engine.metrics()["demoted_blocks"] > 0
        return engine, *requests

    yield make
    for engine in engines:
        arrive(engine)
        engine.close()


def arrive(engine):
    """Whatever an emulated link still carries arrives now."""
    for pending in engine.executor._stores:
        pending.store.due_s = 0.0
    engine.executor.drain()


def finish(engine, *requests):
    while engine.step():
        engine.check_integrity()
    for request in requests:
        check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))


@pytest.mark.parametrize("lower", LOWER, indirect=True)
@pytest.mark.parametrize("behind", [False, True], ids=["above: host", "above: host behind a link"])
def test_what_was_handed_down_comes_back_whole(demoted, lower, behind):
    engine, *requests = demoted(LinkTier(host(8), 10.0) if behind else host(8), lower)
    arrive(engine)
    assert engine.metrics()["demoted_blocks"] == lower.counters.stored_blocks == 8
    for request in requests:
        engine.resume(request, [1], 2)
    finish(engine, *requests)
    assert engine.metrics()["hit_tokens"][lower.name] == 32
    assert lower.counters.loaded_blocks == 8
    assert (lower.counters.failed_blocks, lower.counters.checksum_failures) == (0, 0)


def test_any_schedule_over_two_memories_gives_the_tokens_of_a_run_without_cache():
    made = []

    class MemoryBelowMemory(EngineSchedules):
        def more_tiers(self):
            made.append(host(name="far"))
            return made[-1:]

    for seed in range(20):
        drive(seed, MemoryBelowMemory, tiers="host", policy="reload", host_tokens=100, cost_aware=False)
    assert sum(tier.counters.loaded_blocks for tier in made) > 20


@pytest.mark.parametrize("lower", LOWER[:3], indirect=True)
def test_rot_in_memory_does_not_reach_other_memory_with_a_fresh_checksum(demoted, lower):
    upper = host(8)

    def rot(_):
        upper._slabs[0].memory[BLOCK // 2 * 3] ^= 1  # the fourth block

    engine, *requests = demoted(upper, lower, rot)
    arrive(engine)
    assert engine.metrics()["demoted_blocks"] == lower.counters.stored_blocks == 7
    for request in requests:
        engine.resume(request, [1], 2)
    finish(engine, *requests)
    assert engine.metrics()["hit_tokens"][lower.name] == 12
    assert lower.counters.checksum_failures == 0


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_it_is_there_when_the_link_to_it_has_delivered_and_not_before(demoted, tmp_path, kind):
    lower = LinkTier(host(name="far") if kind == "host" else DiskTier(tmp_path, 1 << 20), SLOW_GB_PER_S)
    engine, first, second = demoted(host(8), lower)
    executor = engine.executor
    assert lower.counters.stored_blocks == 0
    assert not any(lower.contains(h, executor.fingerprint("")) for h in first.hashes)
    assert all(executor.holds(lower.name, h, "") for h in first.hashes)  # it will be there: to be waited for
    assert executor.storing_bytes(lower.name, first.hashes) == 8 * BLOCK
    other = engine.submit(text(5, seed=3), 9)
    engine.resume(first, [1], 2)
    while other.state != "finished":
        engine.step()
    assert (first.state, lower.counters.stored_blocks) == ("loading", 0)  # nobody else waited for the link
    arrive(engine)
    lower.gb_per_s = 10.0
    engine.resume(second, [1], 2)
    finish(engine, first, second, other)
    assert lower.counters.stored_blocks == lower.counters.loaded_blocks == 8
    assert engine.metrics()["hit_tokens"][lower.name] == 32


def test_what_is_on_its_way_down_is_not_sent_again(demoted):
    lower = LinkTier(host(name="far"), SLOW_GB_PER_S)
    engine, first, second = demoted(host(8), lower)
    for request in (first, second):  # again, as from another conversation with the same text; drives the other one out
        engine.executor.store(request.hashes, range(8), "")
        engine.executor._stores[-1].settle()
    arrive(engine)
    assert engine.metrics()["demoted_blocks"] == lower.counters.stored_blocks == 16


def test_reading_for_the_tier_below_takes_no_time_of_the_link_above(demoted):
    """It is the way between that memory and the pool."""
    upper = LinkTier(host(8), SLOW_GB_PER_S)
    engine, _, second = demoted(upper, host(name="far"))
    load = upper.load(second.hashes[:1], engine.executor.fingerprint(""))
    assert load.pieces[-1].due_s - time.perf_counter() <= 20.0
    load.close()
