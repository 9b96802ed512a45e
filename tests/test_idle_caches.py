"""What lesson 08 stands on: a score of one's own evicts, chances are counted, and the pool's owners add up."""

import itertools
import math

import pytest

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.experiments.returns import KINDS, busy_server, draw_callers, scored, waits
from kvlab.machine import Machine
from kvlab.policy import LRU, Scored
from kvlab.prefix import CachedBlock

ARCH, H100 = ModelArch.preset("llama-3.1-8b"), Machine.load("h100-sxm-pcie5")


def block(position, used_s=0.0):
    return CachedBlock(b"name", 0, position, None, "", used_s)


def test_a_score_sees_the_whole_cache_up_to_its_block_the_way_back_and_how_long_it_was_idle():
    def told(size, reload_s, recompute_s, chance):
        return size, reload_s, recompute_s, chance

    eviction = Scored(H100, ARCH, "bf16", 512, told, lambda block, idle_s: (block.block_hash, idle_s))
    size, reload_s, recompute_s, chance = eviction.value(block(1024, used_s=3.0), 10.0, lambda *_: "disk")
    assert size == kv_bytes(ARCH, 1536, "bf16")
    assert reload_s == pytest.approx(size / (H100.link("disk").gb_per_s(size) * 1e9), rel=0.01)
    assert recompute_s == H100.prefill_s(ARCH, 0, 1536)
    assert chance == (b"name", 7.0)
    assert math.isinf(eviction.value(block(1024), 10.0, lambda *_: None)[1])
    with pytest.raises(ValueError, match="tape"):
        eviction.check(["tape"])


def test_chances_are_counted_among_those_that_are_still_away():
    callers = draw_callers(0)
    gaps, many = callers.gaps_s["tools"], callers.callers["tools"]
    assert callers.chance("tools", 0) == pytest.approx(len(gaps) / (len(gaps) + many))
    assert callers.chance("tools", 12) == callers.chance("once", 0) == 0
    assert callers.chance("person", 0) == 0 < callers.chance("person", 60)
    assert draw_callers(0).trace == callers.trace != draw_callers(1).trace


def test_a_turn_begins_with_the_blocks_of_the_turn_before():
    callers = draw_callers(3, tools=1, people=0, once=0)
    turns = callers.trace.sessions
    assert len(turns) > 6
    for before, after in itertools.pairwise(turns):
        whole = before.tokens // 512 - 1
        assert before.hashes(0, whole, 512) == after.hashes(0, whole, 512)


def test_knowing_who_returns_makes_callers_wait_less_than_lru_and_an_endless_pool_costs_nothing():
    callers, server = draw_callers(0), busy_server()
    orders = {
        "LRU": LRU(),
        "score": scored(server, lambda b, l, r, p: p * min(l, r) / b, callers.kinds, callers.chance),  # noqa: E741
        "worst": scored(server, lambda b, l, r, p: -p, callers.kinds, callers.chance),  # noqa: E741
    }
    record = waits(callers, server, orders)
    lost = {name: lost_s[-1] for name, lost_s in record["lost_s"].items()}
    assert 0 < lost["score"] < 0.6 * lost["LRU"] < lost["LRU"] < lost["worst"]
    assert all(len(lost_s) == record["requests"] for lost_s in record["lost_s"].values())
    assert set(callers.kinds.values()) == set(KINDS)


def test_owners_of_the_pool_add_up_and_the_one_longest_away_loses_first():
    torch = pytest.importorskip("torch")
    from kvlab.experiments.occupancy import watch
    from kvlab.loading import load_model

    torch.manual_seed(0)
    model = load_model("tiny")
    record = watch(model, [i % 200 for i in range(1400)], tool_s=0.0)
    owned = record["owned_bytes"]
    totals = [sum(sizes) for sizes in zip(*owned.values(), strict=True)]
    assert max(totals) <= record["pool_bytes"]
    assert max(totals) > 0.9 * record["pool_bytes"]
    assert len(set(owned["shared preamble"][1:])) == 1
    assert min(owned["agent A"][1:-1]) < max(owned["agent A"]) / 2
    assert record["hit_tokens"]["host"] > 0
    with pytest.raises(ValueError, match="these agents read"):
        watch(model, [1] * 100)
