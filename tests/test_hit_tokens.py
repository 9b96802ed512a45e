"""Hits are tokens of a prompt that nobody had to compute: each counts once a turn, however often it comes back."""

import pytest
from tiny_engine import one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.tiers import HostTier, LinkTier


def hits(engine):
    engine.check_integrity()
    return {source: tokens for source, tokens in engine.metrics()["hit_tokens"].items() if tokens}


@pytest.mark.parametrize("blocks", range(19, 38, 3))
def test_what_a_request_has_computed_itself_is_no_hit_after_a_preemption(blocks):
    with Engine(tiny_model(), blocks, 4, token_budget=16) as engine:
        for seed in (1, 2):
            engine.submit(text(36, seed=seed), 40)
        engine.run()
        assert engine.metrics()["preemptions"]
        assert hits(engine) == {}


def test_a_shared_prefix_counts_once_for_a_request_that_is_preempted():
    with Engine(tiny_model(), 24, 4, token_budget=16) as engine:
        first = engine.submit(text(40), 1)
        engine.run()
        engine.scheduler.cache.drop(first)
        for seed in (1, 2):
            engine.submit(text(24) + text(12, seed=seed), 40)
        engine.run()
        assert engine.metrics()["preemptions"]
        assert hits(engine) == {"pool": 2 * 24}


def test_a_second_tier_adds_only_what_the_first_one_could_not_bring():
    upper, lower = HostTier(1 << 20), LinkTier(HostTier(1 << 20), 1e6)
    with Engine(tiny_model(), 64, 4, [upper, lower], groups=2) as engine:
        request = engine.submit(text(40), 1)
        engine.run()
        blocks, hashes = request.table.blocks[:10], request.hashes[:10]
        for tier in (upper, lower):
            engine.executor.transfer.offload(tier, blocks, hashes).wait()
        engine.offload(request)
        for piece in upper._pieces([upper._index[hashes[7]]]):
            piece.memory[0] ^= 1
        engine.resume(request, text(6, seed=1), 3)
        engine.run()
        metrics = engine.metrics()
        assert (metrics["failed_loads"], metrics["second_loads"]) == (1, 1)
        assert hits(engine) == {upper.name: 7 * 4, lower.name: 3 * 4}


def test_every_turn_counts_its_whole_prompt_again():
    with Engine(tiny_model(), 64, 4, [HostTier(1 << 20)]) as engine:
        request = engine.submit(text(40), 5)
        engine.run()
        engine.resume(request, text(3, seed=1), 2)
        engine.run()
        assert hits(engine) == {"pool": 44}
        engine.offload(request)
        engine.resume(request, text(3, seed=2), 2)
        engine.run()
        assert hits(engine) == {"pool": 44, "host": 48}
