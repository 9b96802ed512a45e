"""The trace simulator: the same hits as the real engine, queues as theory has them, nothing lost, nothing for free."""

import json
import math
import random
import sys
import tracemalloc
from collections import deque
from dataclasses import replace

import pytest
from tiny_engine import one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab import policies
from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, kv_bytes
from kvlab.experiments.bench.growth import steady_simulator
from kvlab.experiments.replay import agent_trace
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.scheduler import Scheduler
from kvlab.simulate import (
    POLICIES,
    SAMPLE,
    BilledTier,
    BillingExecutor,
    Cluster,
    DecodeCost,
    Session,
    Simulator,
    Trace,
    Turn,
    drawn_away,
    make_policy,
    read_trace,
    report,
    simulate,
)
from kvlab.simulate.judging import Judge, Oracle
from kvlab.simulate.simulator import Replica, _Asked
from kvlab.streams import ThreadStreams
from kvlab.tiers import DiskTier, HostTier
from kvlab.torch_executor import TorchExecutor
from kvlab.waiting import mean_wait

ARCH = ModelArch.preset("llama-3.1-8b")
H100 = Machine.load("h100-sxm-pcie5")
BLOCK = kv_bytes(ARCH, 512, "bf16")


def machine(gb_per_s=10.0, flops_per_s=1e18, per_request_s=0.0, **link):
    load = Link(Curve(((1.0, gb_per_s),)), per_request_s=per_request_s, **link)
    store = Link(Curve(((1.0, 1e6),)))
    rate = Curve(((1.0, flops_per_s),))
    tiers = {tier: {"load": load, "store": store} for tier in ("host", "disk")}
    return Machine("test", Prefill(0.0, rate, rate, "tiny"), tiers)


def cluster(blocks=400, host=0, disk=0, where=H100, **other):
    return Cluster(ARCH, where, blocks * BLOCK, host * BLOCK, disk * BLOCK, **other)


def one_turn(number, at_s, blocks, output=1, tail=1):
    """A request for whole blocks with these ids, and `tail` tokens of its own."""
    tokens = 512 * len(blocks) + tail
    return Session(number, (Turn(at_s, tokens, output),), blocks, 512 * len(blocks))


def ends(simulated):
    return simulated.replicas[0].scheduler.counts


# The real engine --------------------------------------------------------------------------------------------------


class Paced(TorchExecutor):
    """The real executor, real bytes and all, on a clock that `bill` moves as it would without a model."""

    def __init__(self, bill, tiers, streams):
        super().__init__(
            tiny_model(), bill.num_blocks, bill.block_size, tiers, streams, bill.groups, poison=True, clock=bill.now
        )
        self.bill, self.in_run = bill, False
        assert self.block_bytes == bill.block_bytes

    def holds(self, tier, block_hash, salt):
        held = super().holds(tier, block_hash, salt)
        assert held == self.bill.holds(tier, block_hash, salt), "a billed tier holds other blocks than the real one"
        return held

    def store(self, hashes, blocks, salt):
        super().store(hashes, blocks, salt)
        self.drain()  # what is under way is found by both, but is evicted by neither the same way
        self.bill.store(hashes, blocks, salt)

    def storing_bytes(self, tier, hashes):
        assert super().storing_bytes(tier, hashes) == 0, "it was drained"
        return self.bill.storing_bytes(tier, hashes)

    def load(self, tier, hashes, blocks, salt):
        handle = super().load(tier, hashes, blocks, salt)
        handle.billed = self.bill.load(tier, hashes, blocks, salt)
        return handle

    def remaining_bytes(self, handle):
        return self.bill.remaining_bytes(handle.billed)

    def arrived(self, handle):
        return self.bill.arrived(handle.billed)

    def finish(self, handle):
        if not self.in_run:
            self.bill.finish(handle.billed)
        return super().finish(handle)

    def run(self, chunks, decodes):
        self.bill.horizon_s = self.bill.clock_s  # a real model makes one token at a time
        billed = [
            replace(chunk, load=chunk.load and replace(chunk.load, handle=chunk.load.handle.billed)) for chunk in chunks
        ]
        self.in_run = True
        outcome = super().run(chunks, decodes)
        self.in_run = False
        return replace(outcome, waited_s=self.bill.run(billed, decodes).waited_s)


class RealReplica(Replica):
    """A replica with the tiny model in it, which is told the tokens that a trace leaves out."""

    def __init__(self, shape, policy, tiers, streams):
        super().__init__(shape, policy, policies.LRU(), shape.disk())
        paced = Paced(self.executor, tiers, streams)
        self.scheduler = Scheduler(
            paced, shape.arch, shape.kv_dtype, self.judge, policies.LRU(),
            token_budget=shape.token_budget, max_running=shape.max_running, watermarks=shape.watermarks,
        )  # fmt: skip

    def ask(self, request, tokens, new_tokens, arrival, at_s, expected_s=0.0):
        session, turn = request.session, request.turn
        shared = session.shared_tokens if turn == 0 else 0
        more = text(512, seed=session.blocks[0])[:shared] if shared else []
        more += text(tokens - shared, seed=1000 + 10 * session.id + turn)
        self.executor.wait_until(at_s)
        if turn == 0:
            request.tokens = []
        request.begin_turn(more, new_tokens, arrival, at_s)
        self.scheduler.enqueue(request)
        self.awaited[request] = expected_s


def agents_of(seed, count=12):
    """Agents with two preambles, tool calls and tokens of their own, for a pool that holds about three of them."""
    draw = random.Random(seed)
    sessions = []
    for number in range(count):
        preamble = draw.choice((0, 1, None))
        shared = 0 if preamble is None else 24
        turns = [Turn(draw.uniform(0, 0.05), shared + draw.randint(4, 30), draw.randint(1, 9))]
        turns += [
            Turn(draw.uniform(0, 0.05), draw.randint(1, 20), draw.randint(1, 9)) for _ in range(draw.randint(0, 4))
        ]
        sessions.append(Session(number, tuple(turns), () if preamble is None else (preamble,), shared))
    sessions.sort(key=lambda session: session.turns[0].gap_s)
    return Trace("agents", tuple(sessions))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["reload", "recompute", "threshold:24", "calibrated", "idle-blind"])
def test_the_real_engine_has_the_same_hits_and_decisions_on_the_same_clock(name, seed, tmp_path):
    arch = tiny_model().arch
    where = tiny_machine()
    where = where.with_link("host", where.link("host"), where.link("host"))
    where = where.with_link("disk", replace(where.link("disk"), gb_per_s=Curve(((1.0, 0.01),))), where.link("disk"))
    shape = Cluster(
        arch, where, 40 * 2048, 32 * 2048, 2000 * 2048, "fp64", 4, token_budget=32, max_running=6, groups=2
    )  # fmt: skip
    trace, policy = agents_of(seed), make_policy(name, where)
    billed = Simulator(trace, shape, policy).run()
    streams = ThreadStreams()
    tiers = [HostTier(32 * 2048), DiskTier(tmp_path / "kv", 1 << 24)]
    simulator = Simulator(trace, shape, policy)
    simulator.replicas[:] = [RealReplica(shape, policy, tiers, streams)]
    try:
        real = simulator.run()
        simulator.replicas[0].scheduler.check_integrity()
    finally:
        streams.close()
    ours, theirs = billed.replicas[0], real.replicas[0]
    for count in ("hit_tokens", "computed_tokens", "generated_tokens", "decisions", "loads", "joined_loads",
                  "preemptions", "copied_blocks"):  # fmt: skip
        assert getattr(ours.scheduler.counts, count) == getattr(theirs.scheduler.counts, count), count
    assert ours.judge.reasons == theirs.judge.reasons
    assert ours.scheduler.cache.evicted_blocks == theirs.scheduler.cache.evicted_blocks
    # Many decode steps at once end when as many single ones would.
    assert billed.ttfts_s == pytest.approx(real.ttfts_s, rel=1e-9)
    assert billed.end_s == pytest.approx(real.end_s, rel=1e-9)
    assert ends(billed).steps < ends(real).steps
    if name == "reload":
        assert ends(real).hit_tokens["host"] > 50
        assert ends(real).hit_tokens["disk"] > 20, "the disk tier was not used: the test is too easy"


# Queues ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_waits_for_the_link_are_those_of_an_m_d_1_queue(load):
    """Everybody reloads as much, at random instants, and computing takes no time: Pollaczek and Khinchine hold."""
    draw, at_s, sessions, blocks = random.Random(7), 0.0, [], 4
    service_s = blocks * BLOCK / 10e9
    for number in range(6000):
        at_s += draw.expovariate(load / service_s)
        sessions.append(one_turn(number, at_s, range(blocks * number, blocks * (number + 1))))
    simulator = Simulator(Trace("poisson", tuple(sessions)), cluster(host=10**6, where=machine()), policies.Reload())
    host = simulator.replicas[0].executor.billed_tiers["host"]
    for session in sessions:
        host.put(session.hashes(0, blocks, 512), 0.0)
    simulated = simulator.run()
    waits = [ttft_s / service_s - 1 for ttft_s in simulated.ttfts_s]
    # Waits of neighbours depend on each other: the error comes from means of batches.
    means = [sum(waits[i : i + 300]) / 300 for i in range(0, len(waits), 300)]
    mean = sum(means) / len(means)
    error = math.sqrt(sum((m - mean) ** 2 for m in means) / (len(means) - 1) / len(means))
    assert error < 0.15 * mean_wait(load)
    assert abs(mean - mean_wait(load)) < 3 * error
    rho = report(simulated, 0.0).rho["host load"]
    assert rho == pytest.approx(load, rel=0.05)


def test_where_more_is_asked_than_a_server_can_do_it_is_marked():
    sessions = [one_turn(number, number / 10, [2 * number, 2 * number + 1], output=20) for number in range(100)]
    trace = Trace("busy", tuple(sessions))
    slow = machine(flops_per_s=1e14)
    work_s = slow.prefill_s(ARCH, 0, 1025)
    made = simulate(trace, cluster(where=slow), ["recompute"])["recompute"]
    assert made.rho["accelerator"] > work_s / 0.1 > 1
    assert made.unstable
    made = simulate(trace.at_rate(0.05), cluster(where=slow), ["recompute"])["recompute"]
    assert work_s / 2 < made.rho["accelerator"] < 1.2 * work_s / 2
    assert not made.unstable


def test_a_full_link_is_marked_though_the_accelerator_idles():
    slow = machine(gb_per_s=0.1)
    sessions = [one_turn(number, number / 10, range(4)) for number in range(100)]
    sessions += [
        one_turn(100 + number, 20 + number / 10, range(8 * number + 8, 8 * number + 16)) for number in range(9)
    ]
    sessions += [one_turn(200 + number, 30 + number / 10, range(4), tail=2) for number in range(3)]
    made = simulate(Trace("t", tuple(sessions)), cluster(blocks=12, host=1000, where=slow), ["reload"])["reload"]
    assert made.rho["accelerator"] < 0.1
    assert made.hit_tokens["host"] > 0
    busy = [one_turn(n, n * 1e-3, range(4 * (n % 20), 4 * (n % 20) + 4)) for n in range(200)]
    made = simulate(Trace("t", tuple(busy)), cluster(blocks=12, host=1000, where=slow), ["reload"])["reload"]
    assert made.rho["host load"] > 1
    assert made.unstable


# Nothing lost, nothing for free ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [512, 128])
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_and_bytes_are_conserved(name, block_size):
    trace = read_trace(SAMPLE, limit=200).at_rate(0.2)
    shape = cluster(blocks=1500, host=200, disk=2000, block_size=block_size)
    simulated = Simulator(trace, shape, make_policy(name, H100)).run()
    made, counts, executor = report(simulated, 0.0), ends(simulated), simulated.replicas[0].executor
    asked = sum(turn.input_tokens + turn.output_tokens - 1 for s in trace.sessions for turn in s.turns)
    assert counts.preemptions == 0
    assert sum(made.hit_tokens.values()) + made.computed_tokens == asked
    assert counts.generated_tokens == sum(turn.output_tokens for s in trace.sessions for turn in s.turns)
    assert len(simulated.ttfts_s) == simulated.finished == made.requests == 200
    token_bytes = kv_bytes(ARCH, 1, "bf16")
    from_tiers = made.hit_tokens["host"] + made.hit_tokens["disk"]
    assert made.reload_bytes == from_tiers * token_bytes
    held = sum(len(tier) + tier.evicted_blocks for tier in executor.billed_tiers.values())
    assert made.offload_bytes == held * shape.block_bytes
    if name == "recompute":
        assert from_tiers == 0
    else:
        assert from_tiers > 0
    assert executor.busy_s + executor.stalled_s <= simulated.end_s
    simulated.replicas[0].scheduler.check_integrity()


def test_every_hit_is_billed():
    """A link whose every transfer takes a second, bytes aside: as many seconds as loads, and no answer within one."""
    trace = read_trace(SAMPLE, limit=300).at_rate(0.01)
    where = machine(gb_per_s=1e6, flops_per_s=1e16, per_request_s=1.0)
    simulated = Simulator(trace, cluster(blocks=250, host=5000, where=where), policies.Reload()).run()
    counts, executor = ends(simulated), simulated.replicas[0].executor
    clock = executor.billed_tiers["host"].load_clock
    assert counts.loads > 5
    assert clock.busy_s == pytest.approx(counts.loads, rel=1e-2)
    assert clock.moved_bytes == counts.hit_tokens["host"] * kv_bytes(ARCH, 1, "bf16")
    assert sum(ttft_s >= 1.0 for ttft_s in simulated.ttfts_s) >= counts.loads


def test_a_load_waits_for_the_store_of_its_blocks():
    tier = BilledTier("host", 10, H100.link("host"), H100.link("host", "store"), 32)
    executor = BillingExecutor(ARCH, H100, "bf16", pool_blocks=8, block_size=512, tiers=[tier])
    executor.store([b"a", b"b"], [0, 1], "")
    stored_s = tier.store_clock.free_s
    assert stored_s == H100.link("host", "store").transfer_s(2 * BLOCK, 2, 32)
    store = H100.link("host", "store")
    rate_gb_per_s = store.rate_gb_per_s(store.copy_bytes(BLOCK, 1, 32))
    assert executor.storing_bytes("host", [b"b"]) == pytest.approx(stored_s * rate_gb_per_s * 1e9)
    loading = executor.load("host", [b"b"], [2], "")
    assert loading.begin_s == stored_s
    assert loading.due_s == stored_s + H100.link("host").transfer_s(BLOCK, 1, 32)
    assert not executor.arrived(loading)
    assert executor.finish(loading) == 1
    assert executor.now() == loading.due_s


def test_a_tier_keeps_what_is_read_and_evicts_tails_before_heads():
    tier = BilledTier("host", 3, H100.link("host"), H100.link("host", "store"), 32)
    tier.put([b"head", b"middle", b"tail"], 0.0)
    assert tier.victims(1) == [b"tail"]
    tier.pin([b"tail"])
    assert tier.make_room([b"new"]) == [b"new"]
    assert b"middle" not in tier
    tier.unpin([b"tail"])
    assert tier.victims(2) == [b"tail"]
    assert tier.victims(3, protect=[b"tail"]) == [b"head"]


def test_decodes_at_once_cost_what_single_ones_do():
    cost = DecodeCost(H100, ARCH, BLOCK / 512)
    lengths = [700, 33, 5000]
    single = sum(cost.seconds(3, sum(lengths) + 3 * step) for step in range(50))
    assert cost.seconds(3, sum(lengths), 50) == pytest.approx(single, rel=1e-12)
    rate = H100.prefill.attention_flops_per_s(3)
    attention = sum(attention_flops(ARCH, n, n + 50) for n in lengths) / rate
    short = DecodeCost(H100, ARCH, BLOCK / 512).seconds(3, 0, 50)
    base = 3 * attention_flops(ARCH, 0, 50) / rate
    assert cost.seconds(3, sum(lengths), 50) - short == pytest.approx(attention - base, rel=1e-9)
    for until_s in (1e-9, single / 7.3, single / 2, single, 2 * single):
        steps = cost.steps_until(3, sum(lengths), until_s, 50)
        assert steps == 1 or cost.seconds(3, sum(lengths), steps - 1) < until_s
        assert steps == 50 or cost.seconds(3, sum(lengths), steps) >= until_s


def test_a_decode_step_reads_weights_and_caches_once():
    cost = DecodeCost(H100, ARCH, BLOCK / 512, memory_gb_per_s=3350.0)
    weights = 2 * (ARCH.linear_macs + ARCH.head_macs)
    assert weights == pytest.approx(2 * 7.5e9, rel=0.01)  # 8.03e9 parameters less 0.53e9 of the embedding
    assert cost.seconds(8, 8 * 1000) == pytest.approx((weights + 8 * 1001 * BLOCK / 512) / 3350e9)


# Who judges -----------------------------------------------------------------------------------------------------------


def test_no_rate_is_what_policies_believe_and_a_seed_gives_the_same_truth():
    true = drawn_away(H100, 0.2, seed=1)
    assert true == drawn_away(H100, 0.2, seed=1) != drawn_away(H100, 0.2, seed=2)
    assert drawn_away(H100, 0.0, seed=1) == H100
    ratios = {
        true.prefill_s(ARCH, 0, 8192) / H100.prefill_s(ARCH, 0, 8192),
        *(
            true.link(tier, way).transfer_s(10**9, 100, 32) / H100.link(tier, way).transfer_s(10**9, 100, 32)
            for tier in H100.links
            for way in ("load", "store")
        ),
    }
    assert len(ratios) == 1 + 2 * len(H100.links)
    assert all(1 / 1.2 - 1e-9 <= ratio <= 1 / 0.8 + 1e-9 for ratio in ratios)
    with pytest.raises(ValueError, match="share of 1"):
        drawn_away(H100, 1.0, seed=1)


def test_only_an_oracle_has_no_regret():
    trace = read_trace(SAMPLE, limit=400).at_rate(0.3)
    shape = cluster(blocks=250, host=20, disk=6000, truth=drawn_away(H100, 0.4, seed=5))
    made = simulate(trace, shape)
    assert list(made) == list(POLICIES)
    assert made["oracle"].regret_s == 0
    assert made["recompute"].regret_s > made["calibrated"].regret_s > 0
    assert made["reload"].regret_s > 0
    decided = {name: sum(report.decisions.values()) for name, report in made.items()}
    assert all(count > 20 for count in decided.values())


def test_regret_is_what_replaying_the_other_way_gains():
    """One request that could load: the judge's cost of each way is what it takes when it is run, and the share of a
    second by which each second of computing delays others, at a load of 3 %.
    """
    sessions = (one_turn(0, 0.0, range(6)), one_turn(1, 50.0, range(10, 80)), one_turn(2, 100.0, range(6), tail=300))
    shape = cluster(blocks=75, host=1000, where=H100)
    made = {name: Simulator(Trace("t", sessions), shape, make_policy(name, H100)).run() for name in POLICIES[:2]}
    ttft_s = {name: simulated.ttfts_s[-1] for name, simulated in made.items()}
    regret_s = {name: simulated.replicas[0].judge.regret_s for name, simulated in made.items()}
    assert ttft_s["reload"] < ttft_s["recompute"]
    assert regret_s["reload"] == 0
    at = made["recompute"].replicas[0].scheduler.decisions[-1].situation
    assert 0.01 < at.delayed == at.load / (1 - at.load) < 0.05
    computed_s = ttft_s["recompute"] - H100.prefill_s(ARCH, 6 * 512, 6 * 512 + 300)
    gained_s = ttft_s["recompute"] - ttft_s["reload"] + at.delayed * computed_s
    assert regret_s["recompute"] == pytest.approx(gained_s, rel=1e-9)


def test_judges_pass_on_what_a_policy_refuses():
    executor = BillingExecutor(ARCH, H100, "bf16", pool_blocks=8, block_size=512, tiers=[])
    judge = Judge(policies.Calibrated(H100), Oracle(executor))
    with pytest.raises(ValueError, match="no link to tier 'tape'"):
        judge.check(["tape"])


# Replicas -------------------------------------------------------------------------------------------------------------


def test_a_router_by_prefix_finds_what_one_by_load_spreads():
    trace = read_trace(SAMPLE, limit=300).at_rate(2.0)
    made = {
        router: simulate(trace, cluster(blocks=1000, replicas=4, router=router), ["reload"])["reload"]
        for router in ("prefix", "load", "kvlab")
    }
    assert made["prefix"].hit_tokens["pool"] > 1.1 * made["load"].hit_tokens["pool"]
    assert made["kvlab"].ttft_mean_s < min(made["prefix"].ttft_mean_s, made["load"].ttft_mean_s)
    assert {report.requests for report in made.values()} == {300}


def test_the_verdicts_router_bills_a_backlog_for_what_it_has_to_compute():
    """A long prompt that is all cached is hardly any work: the next one goes behind it, not behind a short new one."""
    sessions = (
        one_turn(0, 0.0, range(40)),
        one_turn(1, 50.0, range(40), tail=2),
        one_turn(2, 50.0, range(100, 108)),
        one_turn(3, 50.0, range(200, 208)),
    )
    simulated = Simulator(Trace("t", sessions), cluster(replicas=2, router="kvlab"), policies.Reload()).run()
    first, second = (replica.scheduler.counts for replica in simulated.replicas)
    assert first.hit_tokens["pool"] == 40 * 512
    assert first.computed_tokens == (40 * 512 + 1) + 2 + (8 * 512 + 1)
    assert second.computed_tokens == 8 * 512 + 1


def test_a_shared_disk_is_found_by_every_replica():
    trace = read_trace(SAMPLE, limit=300).at_rate(2.0)
    alone, shared = (
        simulate(trace, cluster(blocks=250, disk=5000, replicas=4, router="load", shared_disk=way), ["reload"])[
            "reload"
        ]
        for way in (False, True)
    )
    assert shared.hit_tokens["disk"] > 1.5 * alone.hit_tokens["disk"]


def test_a_session_that_moves_takes_its_whole_context_along():
    """Two replicas by load: the second turn lands on the idle one, and computes or loads all of the first."""
    agents = (
        Session(0, (Turn(0.0, 1000, 1), Turn(1.0, 24, 4))),
        Session(1, (Turn(1.0, 100_000, 1),)),
    )
    shape = cluster(blocks=400, disk=1000, replicas=2, router="load", shared_disk=True)
    simulated = Simulator(Trace("two", agents), shape, policies.Reload()).run()
    assert simulated.finished == 3
    computed = [replica.scheduler.counts.computed_tokens for replica in simulated.replicas]
    assert sum(computed) + sum(sum(r.scheduler.counts.hit_tokens.values()) for r in simulated.replicas) >= 101_000


# Growth ---------------------------------------------------------------------------------------------------------------


def calls(function):
    """How many Python functions are called in it: work that no clock and no neighbour can disturb."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("rate", [0.3, 30.0])  # of which the second is a queue that only grows
def test_ten_times_the_trace_is_at_most_eleven_times_the_work(rate, monkeypatch):
    # A list that is searched compares its requests in C, where nothing would be counted.
    monkeypatch.setattr(_Asked, "__eq__", lambda self, other: self is other)
    # Long enough that pool and tiers fill up early on: the requests that find them empty have less to do.
    trace = read_trace(SAMPLE, limit=120).at_rate(rate)
    shape, policy = cluster(blocks=240, host=50, disk=100), make_policy("calibrated", H100)
    once, ten = (calls(lambda n=n: Simulator(trace.repeated(n), shape, policy).run()) for n in (1, 10))
    assert once > 100_000
    assert ten <= 11 * once


def test_requests_whose_growth_is_timed_are_alike():
    def work(units):
        simulator, end_s = steady_simulator(units)
        replica, result = simulator.replicas[0], simulator.result
        tiers = replica.executor.billed_tiers.values()

        def done():
            evicted = [replica.scheduler.cache.evicted_blocks, *(tier.evicted_blocks for tier in tiers)]
            return [result.finished, *evicted, replica.scheduler.counts.loads]

        before = done()
        count = calls(lambda: simulator.run(end_s))
        assert all(len(tier) == tier.capacity_blocks for tier in tiers)
        return count, [after - earlier for after, earlier in zip(done(), before, strict=True)]

    (once, one), (ten_times, ten) = work(1), work(10)
    assert one[0] == 40
    assert min(one) > 0
    assert ten == pytest.approx([10 * each for each in one], rel=0.1)
    assert 9 * once < ten_times < 11 * once


def test_memory_grows_with_distinct_blocks_only():
    trace = read_trace(SAMPLE, limit=60).at_rate(0.3)
    brief = [replace(s, turns=(replace(s.turns[0], output_tokens=1),)) for s in trace.sessions]  # no blocks of output
    trace, shape = Trace("brief", tuple(brief)), cluster(blocks=300, host=10**6)

    def peak_bytes(trace):
        simulator = Simulator(trace, shape, policies.Recompute())
        simulator.replicas[0].scheduler.decisions = deque(maxlen=1)  # the log has its own limit
        tracemalloc.start()
        try:
            simulator.run()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    some = peak_bytes(trace.repeated(2, same_blocks=True))
    assert peak_bytes(trace.repeated(8, same_blocks=True)) < 1.2 * some
    assert peak_bytes(trace.repeated(8)) > 3 * some


def test_a_simulation_that_stops_now_and_then_is_the_same():
    trace = agent_trace(20, 3, preamble=1024, new_tokens=512, gap_s=8.0)
    shape, policy = cluster(blocks=40, host=20, disk=400), make_policy("calibrated", H100)
    parts = Simulator(trace, shape, policy)
    for stop_s in (5.0, 5.0, 20.0, 30.5):
        assert parts.run(stop_s).last_s < stop_s
    assert 0 < parts.result.finished < trace.requests
    whole = Simulator(trace, shape, policy).run()
    assert report(parts.run(), 0.0) == report(whole, 0.0)
    assert parts.result.ttfts_s == whole.ttfts_s


def test_what_cannot_be_simulated_is_refused_before_it_begins():
    trace = Trace("t", (one_turn(7, 0.0, range(200)),))
    with pytest.raises(ValueError, match=r"session 7 of the trace: .* the pool has 10: it can never run"):
        Simulator(trace, cluster(blocks=10), policies.Reload())
    with pytest.raises(ValueError, match=r"session 7 of the trace: .* positions"):
        Simulator(trace, replace(cluster(), arch=ModelArch.preset("smollm2-135m")), policies.Reload())
    for wrong, words in (
        ({"block_size": 100}, "blocks of 100 tokens"),
        ({"replicas": 0}, "0 replicas"),
        ({"blocks": 0}, "a pool of 0 bytes holds no block"),
    ):
        with pytest.raises(ValueError, match=words):
            cluster(**wrong)
    with pytest.raises(ValueError, match="unknown policy 'magic'; known: reload"):
        simulate(trace, cluster(), ["magic"])
    json.dumps(report(Simulator(Trace("t", (one_turn(0, 0.0, [1]),)), cluster(), None).run(), 0.0).to_dict())
