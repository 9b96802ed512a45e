"""Eviction may ask whether writing a block to a tier pays; what does not is dropped, and counted."""

from dataclasses import replace

import pytest
from tiny_engine import check_tokens, one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab import policies
from kvlab.engine import Engine
from kvlab.machine import Curve, Link
from kvlab.storing import storing
from kvlab.tiers import HostTier
from kvlab.verdict import decide

P = text(40, seed=4)  # ten blocks of four tokens


def machine_that_stores(decode_slowdown, load_gb_per_s=0.05, flops_per_s=1e9):
    """`tiny_machine` with a link for stores, each second of which takes `decode_slowdown` from the work of others."""
    machine = tiny_machine(load_gb_per_s, flops_per_s)
    store = Link(Curve(((1.0, 0.05),)), per_request_s=2e-5, decode_slowdown=decode_slowdown)
    return replace(machine, links={"host": {**machine.links["host"], "store": store}})


def evicted(machine, return_chance):
    """(engine metrics, blocks stored) after ten blocks were evicted."""
    model, host = tiny_model(), HostTier(1 << 20)
    eviction = policies.CostAware(machine, model.arch, "fp64", 4, return_chance)
    with Engine(model, 32, 4, [host], poison=True, eviction=eviction) as engine:
        request = engine.submit(P, 1)
        engine.run()
        engine.cancel(request)
        assert engine.evict(100) == 10
        engine.check_integrity()
        engine.executor.drain()
        again = engine.submit([*P, 1], 3)
        engine.run()
        check_tokens(model, again, range(again.prompt, len(again.tokens)))
        return engine.metrics(), host.counters.stored_blocks


def break_even(machine):
    """The chance of return above which storing the ten blocks pays, by the arithmetic of `storing` alone."""
    verdict = decide(tiny_model().arch, machine, prefix=40, suffix=1, tier="host", kv_dtype="fp64", block_size=4)
    return storing(verdict).break_even_return_chance


def test_what_costs_more_to_store_than_it_saves_is_dropped_and_counted():
    machine = machine_that_stores(decode_slowdown=0.5)
    chance = break_even(machine)
    assert 0 < chance < 1
    metrics, stored = evicted(machine, chance * 1.01)
    assert (metrics["unstored_blocks"], stored, metrics["hit_tokens"].get("host")) == (0, 10, 40)
    metrics, stored = evicted(machine, chance * 0.99)
    assert (metrics["unstored_blocks"], stored, metrics["loads"]) == (10, 0, 0)


def test_where_recomputing_is_as_cheap_nothing_is_stored():
    machine = machine_that_stores(decode_slowdown=0.1, load_gb_per_s=1e-4)
    metrics, stored = evicted(machine, 1.0)
    assert (metrics["unstored_blocks"], stored) == (10, 0)


def test_all_is_stored_unless_the_question_is_asked():
    metrics, stored = evicted(tiny_machine(gb_per_s=1e-4), None)
    assert (metrics["unstored_blocks"], stored) == (0, 10)


def test_an_offload_that_was_asked_for_is_stored_whatever_it_costs():
    model, host = tiny_model(), HostTier(1 << 20)
    eviction = policies.CostAware(machine_that_stores(0.5, load_gb_per_s=1e-4), model.arch, "fp64", 4, 1.0)
    with Engine(model, 32, 4, [host], eviction=eviction) as engine:
        request = engine.submit(P, 1)
        engine.run()
        engine.offload(request)
        engine.executor.drain()
        assert host.counters.stored_blocks == 10
        assert engine.metrics()["unstored_blocks"] == 0


def test_a_tier_that_cannot_be_judged_is_named_at_once():
    model = tiny_model()
    with pytest.raises(ValueError, match="store"):
        Engine(
            model,
            32,
            4,
            [HostTier(1 << 20)],
            eviction=policies.CostAware(tiny_machine(), model.arch, "fp64", 4, return_chance=0.5),
        )
