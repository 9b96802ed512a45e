"""Pause, offload, resume, branch: what each promises about tokens, blocks, bytes and the decision behind it."""

import re
from dataclasses import replace

import pytest
import torch
from tiny_engine import (  # noqa: F401
    BACKENDS,
    VOCAB,
    check_tokens,
    logits_without_cache,
    one_thread,
    text,
    tiny_machine,
    tiny_model,
)

from kvlab import policies
from kvlab.blocks import BlockAllocator
from kvlab.engine import Engine
from kvlab.fingerprint import block_hashes
from kvlab.policy import Option, Situation
from kvlab.pool import BlockPool, Window
from kvlab.prefix import PrefixIndex
from kvlab.request import Sampling
from kvlab.tiers import DiskTier, HostTier, LinkTier
from kvlab.transfer import Reload, Transfer
from kvlab.verdict import decide

P = text(40, seed=4)


@pytest.fixture
def make():
    """Engines over `tiny_model`, blocks of four tokens, closed at the end and leaving nothing behind."""
    engines = []

    def engine(pool_blocks=64, block_size=4, tiers=(), policy=None, model=None, **options):
        engines.append(Engine(model or tiny_model(), pool_blocks, block_size, tiers, policy, poison=True, **options))
        return engines[-1]

    yield engine
    for each in engines:
        each.check_integrity()
        each.close()


def finish(engine, *requests):
    while engine.step():
        engine.check_integrity()
    for request in requests:
        assert request.state == "finished"
        check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("budget", [1, 5, 512])
def test_many_requests_in_flight_give_the_tokens_of_runs_without_cache(make, kv_heads, budget):
    engine = make(model=tiny_model(kv_heads), token_budget=budget)
    finish(engine, *[engine.submit(text(n, seed=n), max_new_tokens=5) for n in (1, 2, 4, 17, 30)])


def test_a_prefix_is_computed_once_for_all_who_share_it(make):
    engine = make()
    finish(engine, engine.submit(P, 3))
    before = engine.metrics()["computed_tokens"]
    second = engine.submit([*P[:30], 1, 2, 3], 1)
    finish(engine, second)
    assert engine.metrics()["hit_tokens"]["pool"] == 28  # seven whole blocks of the thirty tokens in common
    assert engine.metrics()["computed_tokens"] - before == 33 - 28


def test_a_wholly_cached_prompt_computes_its_last_token_and_writes_to_no_shared_block(make):
    engine = make()
    first = engine.submit(P, 1)  # ten whole blocks
    finish(engine, first)
    shared = [entry.block for entry in engine.scheduler.index]
    assert len(shared) == 10
    rows = engine.executor.pool.group_index(torch.tensor(shared), 0, 2)
    before = engine.executor.pool.rows[rows].clone()
    second = engine.submit(P, 1)
    finish(engine, second)
    assert second.output_tokens == first.output_tokens
    assert engine.metrics()["hit_tokens"]["pool"] == 36
    assert torch.equal(engine.executor.pool.rows[rows], before)


def test_tokens_stream_in_order_and_a_stop_token_ends_the_request(make):
    engine, seen = make(), []
    whole = engine.submit(P, 8)
    finish(engine, whole)
    stop = whole.output_tokens[3]
    request = engine.submit(P, 8, stop_tokens=[stop], on_token=lambda r, token: seen.append(token))
    finish(engine, request)
    assert seen == request.output_tokens == whole.output_tokens[: whole.output_tokens.index(stop) + 1]
    assert request.timing.ttft_s > 0


def test_a_seeded_draw_depends_on_seed_and_position_alone(make):
    def draw(seed, **options):
        engine = make(**options)
        request = engine.submit(P, 12, sampling=Sampling(1.0, seed))
        others = [engine.submit(text(9, seed=n), 12, sampling=Sampling(1.0, n)) for n in range(3)]
        finish(engine, request, *others)
        return request.output_tokens

    assert draw(1) == draw(1, token_budget=3, pool_blocks=16)
    assert draw(1) != draw(2)
    with pytest.raises(ValueError, match=r"temperature is -1"):
        Sampling(-1.0)


def test_what_can_never_run_is_refused_with_its_sizes(make):
    engine = make(pool_blocks=4)
    with pytest.raises(ValueError, match=r"16 tokens and 2 new ones need 5 blocks of 4 tokens; the pool has 4"):
        engine.submit(text(16), 2)
    finish(engine, engine.submit(text(16), 1))
    with pytest.raises(ValueError, match="600 positions; tiny-2 has 512"):
        make(pool_blocks=1000).submit(text(590), 11)
    with pytest.raises(ValueError, match="token 97 is not in the vocabulary"):
        engine.submit([VOCAB], 1)
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        engine.submit([], 1)
    assert not engine.scheduler.busy


def test_who_cannot_fit_now_waits_and_then_runs_in_order(make):
    engine = make(pool_blocks=8)
    first, second, third = (engine.submit(text(24, seed=n), 4) for n in range(3))
    engine.step()
    assert [r.state for r in (first, second, third)] == ["running", "waiting", "waiting"]
    finish(engine, first, second, third)
    assert first.timing.ended_s < second.timing.first_token_s < third.timing.first_token_s


def test_the_youngest_gives_way_when_requests_outgrow_the_pool_and_still_ends_right(make):
    engine = make(pool_blocks=10)
    first, second = (engine.submit(text(12, seed=n), 24) for n in range(2))
    finish(engine, first, second)
    assert first.preemptions == 0
    assert second.preemptions >= 1


def test_a_branch_shares_blocks_until_somebody_writes(make):
    engine = make()
    parent = engine.submit(P[:30], 4)
    finish(engine, parent)  # 33 computed positions: eight whole blocks and one token in the ninth
    used = engine.scheduler.allocator.free_blocks
    child = engine.branch(parent)
    assert engine.scheduler.allocator.free_blocks == used
    assert child.state == "paused"
    engine.resume(child, [1, 2, 3], 4)
    engine.resume(parent, [4, 5], 4)
    finish(engine, parent, child)
    assert engine.metrics()["copied_blocks"] == 1  # whoever writes second has the old block for itself
    assert parent.tokens[:34] == child.tokens[:34]
    assert parent.tokens[34:36] == [4, 5]


@pytest.mark.parametrize("pause", [True, False])
def test_a_request_that_comes_back_computes_only_what_is_new(make, pause):
    engine = make()
    request = engine.submit(P, 6)
    finish(engine, request)
    if pause:
        engine.pause(request)
    before = engine.metrics()["computed_tokens"]
    engine.resume(request, [7, 8, 9], 2)
    finish(engine, request)
    assert engine.metrics()["computed_tokens"] - before == 1 + 3 + 1  # the last output token, the new ones, one decode


def test_states_are_checked_and_named(make):
    engine = make()
    request = engine.submit(P, 3)
    with pytest.raises(ValueError, match="request 0 is waiting; only paused, finished ones can be resumed"):
        engine.resume(request, [1])
    with pytest.raises(ValueError, match="only paused, finished ones can be offloaded"):
        engine.offload(request)
    engine.cancel(request)
    assert engine.scheduler.allocator.free_blocks == 64
    with pytest.raises(ValueError, match="request 0 is cancelled"):
        engine.pause(request)
    finished = engine.submit(P, 1)
    finish(engine, finished)
    with pytest.raises(ValueError, match="no tiers to offload to"):
        engine.offload(finished)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_an_offloaded_request_comes_back_by_reload_into_other_blocks(make, tmp_path, kind, backend):
    tier = HostTier(1 << 20) if kind == "host" else DiskTier(tmp_path, 1 << 20)
    with BACKENDS[backend]() as streams:
        engine = make(tiers=[tier], streams=streams)
        request = engine.submit(P, 6)
        finish(engine, request)
        assert engine.offload(request) == 11  # 45 computed positions
        assert engine.scheduler.allocator.free_blocks == 64
        other = engine.submit(text(20, seed=8), 2)  # takes the blocks that the request had
        finish(engine, other)
        before = engine.metrics()["computed_tokens"]
        engine.resume(request, [1, 2], 3)
        finish(engine, request, other)
        assert engine.metrics()["hit_tokens"][kind] == 44
        assert engine.metrics()["computed_tokens"] - before == 48 - 44 + 2
        assert tier.counters.loaded_blocks == 11
        engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_offload_and_reload_give_the_same_tokens_on_cuda(make, tmp_path, kind):
    tier = HostTier(1 << 20) if kind == "host" else DiskTier(tmp_path, 1 << 20)
    engine = make(tiers=[tier], model=tiny_model(device="cuda"))
    request = engine.submit(P, 6)
    finish(engine, request)
    engine.offload(request)
    branch = engine.branch(engine.resume(request, [1, 2], 3))
    engine.resume(branch, [3], 3)
    finish(engine, request, branch)
    assert engine.metrics()["hit_tokens"][kind] == 44


def test_a_policy_that_raises_leaves_the_request_waiting(make):
    engine = make(tiers=[HostTier(1 << 20)], policy=policies.Oracle({}))
    request = engine.submit(P, 1)
    finish(engine, request)
    engine.offload(request)
    engine.resume(request, [3], 1)
    with pytest.raises(KeyError, match="was not replayed"):
        engine.run()
    engine.check_integrity()
    assert request.state == "waiting"
    engine.cancel(request)


def test_a_decision_is_logged_with_its_inputs_predictions_and_what_it_took(make):
    engine = make(tiers=[HostTier(1 << 20)], policy=policies.Calibrated(tiny_machine(), allow_split=False))
    request = engine.submit(P, 6)
    finish(engine, request)
    engine.offload(request)
    engine.resume(request, [1, 2], 3)
    finish(engine, request)
    (decision,) = engine.decisions
    expected = decide(
        engine.model.arch,
        tiny_machine(),
        prefix=44,
        suffix=4,
        tier="host",
        kv_dtype="fp64",
        block_size=4,
        overlap_groups=2,
    )
    assert (decision.ttft_reload_s, decision.ttft_recompute_s) == (expected.ttft_reload_s, expected.ttft_recompute_s)
    assert (decision.choice, decision.reason) == (expected.choice, expected.reason)
    assert decision.situation.prompt == 48
    assert decision.actual_s > 0
    other = decision.ttft_recompute_s if decision.choice == "reload" else decision.ttft_reload_s
    assert decision.estimated_regret_s == max(0.0, decision.actual_s - other)
    assert engine.metrics()["estimated_regret_s"] == decision.estimated_regret_s


def test_one_load_serves_all_who_wait_for_its_blocks(make):
    tier = HostTier(1 << 20)
    engine = make(tiers=[tier])
    request = engine.submit(P, 1)
    finish(engine, request)
    engine.offload(request)
    waiters = [engine.submit([*P, n], 3) for n in range(3)]
    engine.scheduler._admit()
    assert [waiter.state for waiter in waiters] == ["loading"] * 3
    finish(engine, *waiters)
    assert engine.metrics()["loads"] == 1
    assert engine.metrics()["joined_loads"] == 2
    assert tier.counters.loaded_blocks == 10


def test_split_computes_the_head_while_the_tail_loads(make):
    prompt = text(200, seed=5)
    machine = tiny_machine(gb_per_s=0.02, flops_per_s=5e8)
    engine = make(tiers=[HostTier(1 << 20)], policy=policies.Calibrated(machine))
    request = engine.submit(prompt, 1)
    finish(engine, request)
    engine.offload(request)
    before = engine.metrics()["computed_tokens"]
    engine.resume(request, [3], 2)
    finish(engine, request)
    (decision,) = engine.decisions
    assert decision.choice == "split"
    assert 0 < decision.start < decision.stop == 200
    assert decision.ttft_split_s < min(decision.ttft_reload_s, decision.ttft_recompute_s)
    assert engine.metrics()["hit_tokens"]["host"] == 200 - decision.start
    assert engine.metrics()["computed_tokens"] - before == decision.start + 2 + 1


def test_a_layer_group_is_waited_for_only_before_its_first_layer_attends(make, monkeypatch):
    engine = make(tiers=[HostTier(1 << 20)], groups=2)
    request = engine.submit(P, 1)
    finish(engine, request)
    engine.offload(request)
    engine.resume(request, [3], 1)
    log = []
    wait_group, write = Reload.wait_group, Window.write
    monkeypatch.setattr(
        Reload, "wait_group", lambda self, group: (log.append(("wait", group)), wait_group(self, group))[1]
    )
    monkeypatch.setattr(
        Window, "write", lambda self, layer, *rest: (log.append(("layer", layer)), write(self, layer, *rest))
    )
    engine.step()
    assert log[:4] == [("wait", 0), ("layer", 0), ("wait", 1), ("layer", 1)]


def test_others_decode_while_a_load_is_on_its_way(make):
    engine = make(tiers=[LinkTier(HostTier(1 << 20), gb_per_s=0.0001)])  # 10 blocks of 2 KiB: 200 ms
    request = engine.submit(P, 1)
    finish(engine, request)
    engine.offload(request)
    other = engine.submit(text(5, seed=3), 30)
    engine.step()
    engine.resume(request, [3], 1)
    while request.state != "finished":
        engine.step()
    assert len(other.output_tokens) > 3
    finish(engine, request, other)


@pytest.mark.parametrize("action", ["pause", "cancel"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_load_that_nobody_waits_for_any_more_keeps_its_blocks_until_it_is_over(make, tmp_path, action, backend):
    with BACKENDS[backend]() as streams:
        engine = make(pool_blocks=16, tiers=[DiskTier(tmp_path, 1 << 20)], streams=streams)
        request = engine.submit(P, 1)
        finish(engine, request)
        engine.offload(request)
        engine.resume(request, [3], 1)
        engine.scheduler._admit()
        assert request.state == "loading"
        getattr(engine, action)(request)
        engine.check_integrity()
        other = engine.submit(text(50, seed=6), 8)  # would get blocks that the load is still to fill
        while len(other.output_tokens) < 4:
            engine.step()
        engine.executor.drain()  # whatever is still to come comes now
        finish(engine, other)
        engine.close()


def test_what_the_host_tier_evicts_goes_on_to_disk(make, tmp_path):
    block = tiny_model().layout(4).block_bytes
    host, disk = HostTier(8 * block), DiskTier(tmp_path, 1 << 20)
    engine = make(tiers=[host, disk])
    first, second = (engine.submit(text(32, seed=n), 1) for n in range(2))
    finish(engine, first, second)
    engine.offload(first)
    engine.executor.drain()
    engine.offload(second)
    engine.executor.drain()
    assert engine.metrics()["demoted_blocks"] == disk.counters.stored_blocks == 8
    for request in (first, second):
        engine.resume(request, [1], 2)
    finish(engine, first, second)
    assert engine.metrics()["hit_tokens"]["disk"] == 32
    assert disk.counters.failed_blocks == 0


def test_low_watermark_starts_eviction_and_the_high_one_ends_it(make):
    engine = make(pool_blocks=20, tiers=[HostTier(1 << 20)], watermarks=(0.6, 0.8))
    finish(engine, engine.submit(P, 1))
    assert engine.scheduler.allocator.free_blocks == 16
    engine.executor.drain()
    assert engine.metrics()["tiers"]["host"]["stored_blocks"] == 6


def test_a_chain_is_evicted_from_its_end_and_the_oldest_first():
    allocator = BlockAllocator(8, 4)
    index = PrefixIndex(allocator)
    chains = {}
    for age, name in enumerate(("old", "new")):
        table = allocator.new_table()
        chains[name] = [bytes([age, place]) for place in range(3)]
        for place, block in enumerate(allocator.grow(table, 12)):
            index.insert(chains[name], place, block, "", now_s=age)
        allocator.release(table)
    order = [entry.block_hash for entry in index.victims(4, lambda entry: entry.used_s)]
    assert order == [*reversed(chains["old"]), chains["new"][2]]
    held = allocator.new_table()
    allocator.share(held, index.match(chains["old"][:2], 9.0))
    order = [entry.block_hash for entry in index.victims(9, lambda entry: entry.used_s)]
    assert order == [chains["old"][2], *reversed(chains["new"])]


def test_cost_aware_eviction_gives_up_first_what_is_cheap_to_get_back():
    model = tiny_model()
    allocator = BlockAllocator(8, 4)
    index = PrefixIndex(allocator)
    table = allocator.new_table()
    blocks = allocator.grow(table, 8)
    for place in range(2):
        index.insert([bytes([place])], 0, blocks[place], "", now_s=0.0)
    allocator.release(table)
    eviction = policies.CostAware(tiny_machine(gb_per_s=10.0), model.arch, "fp64", 4)
    in_tier = {bytes([1]): "host"}
    order = index.victims(2, lambda entry: eviction.value(entry, 1.0, lambda h, salt: in_tier.get(h)))
    assert [entry.block_hash for entry in order] == [bytes([1]), bytes([0])]


OPTIONS = (Option("host", 32), Option("disk", 40))


def situation(resident=0, options=OPTIONS):
    return Situation((1, 1), tiny_model().arch, "fp64", 4, 48, resident, options)


def test_each_policy_decides_as_it_says():
    assert policies.Recompute().decide(situation()).choice == "recompute"
    reload = policies.Reload().decide(situation(resident=8))
    assert (reload.option.tier, reload.start, reload.stop) == ("disk", 8, 40)
    assert policies.Threshold(32).decide(situation(resident=8)).choice == "reload"
    assert policies.Threshold(33).decide(situation(resident=8)).choice == "recompute"
    oracle = policies.Oracle({(1, 1): {"reload": 1.0, "recompute": 2.0}})
    assert oracle.decide(situation()).choice == "reload"
    with pytest.raises(KeyError, match="was not replayed"):
        policies.Oracle({}).decide(situation())
    with pytest.raises(ValueError, match="no link to tier 'xz'"):
        policies.Calibrated(tiny_machine()).check(["host", "xz"])


def test_the_calibrated_policy_sees_the_queue_on_the_link_and_what_is_resident():
    policy = policies.Calibrated(tiny_machine(gb_per_s=1.0), allow_split=False)
    free, busy = (policy.decide(situation(options=(Option("host", 40, queued),))) for queued in (0, 10**9))
    assert (free.choice, busy.choice) == ("reload", "recompute")
    resident = policy.decide(situation(resident=36, options=(Option("host", 40),)))
    assert resident.ttft_recompute_s < free.ttft_recompute_s


# Is it the same prefix? -----------------------------------------------------------------------------------------------


def test_two_tenants_never_share_a_block(make):
    tier = HostTier(1 << 20)
    engine = make(tiers=[tier])
    ours = engine.submit(P, 1, salt="ours")
    finish(engine, ours)
    theirs = engine.submit(P, 1, salt="theirs")
    finish(engine, theirs)
    assert engine.metrics()["hit_tokens"]["pool"] == 0
    engine.offload(ours)
    engine.cancel(theirs)
    engine.evict(100)
    again = engine.submit([*P, 1], 1)
    finish(engine, again)
    assert engine.metrics()["loads"] == 0
    engine.executor.drain()
    assert tier.counters.stored_blocks == 20
    engine.resume(ours, [1], 1)
    finish(engine, ours)
    assert engine.metrics()["loads"] == 1


def with_other_adapter(model, kind):
    """The same model in every respect but one."""
    if kind == "rope":
        decoder = replace(model.decoder, rope_theta=500.0)
        arch = replace(model.arch, decoder=decoder)
        rope = replace(model.rope, inv_freq=model.rope.inv_freq * 1.01)
        return replace(model, arch=arch, rope=rope)
    g = torch.Generator().manual_seed(5)
    parts = {
        f"model.layers.0.self_attn.v_proj.lora_{name}.weight": shape for name, shape in (("A", (2, 32)), ("B", (16, 2)))
    }
    return model.with_adapter({name: torch.randn(*shape, generator=g) for name, shape in parts.items()})


@pytest.mark.parametrize("kind", ["adapter", "rope", "token"])
def test_a_cache_of_something_else_changes_the_output_and_is_refused(make, tmp_path, kind):
    """The guard matters: attached by force, the wrong cache gives other logits. And it guards: it is never attached."""
    model = tiny_model()
    other = model if kind == "token" else with_other_adapter(model, kind)
    prompt = [*P, 1, 2]
    stored = [P[0] ^ 1, *P[1:], 1, 2] if kind == "token" else prompt
    pool = BlockPool(model.layout(4), 16)
    blocks = list(range(11))
    other.prefill(stored[:40], pool, blocks)
    forced = model.prefill(prompt[40:], pool, blocks, 40)
    right = logits_without_cache(model, prompt)[-1]
    assert (forced - right).abs().max() > 1e-3

    tier = DiskTier(tmp_path, 1 << 20)
    first = make(tiers=[tier], model=other)
    request = first.submit(stored, 1)
    finish(first, request)
    first.offload(request)
    first.executor.drain()
    assert tier.counters.stored_blocks == 10
    second = make(tiers=[DiskTier(tmp_path, 1 << 20)], model=model)
    request = second.submit(prompt, 4)
    finish(second, request)
    assert not second.decisions
    differing = second.tiers[0].differences(model.fingerprint(4))
    assert differing == {"adapter": ["adapter"], "rope": ["config", "rope"], "token": []}[kind]


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({}, None),
        ({"salt": "tenant"}, ["salt"]),
        ({"seed": 4}, ["weights"]),
        ({"kv_heads": 4}, ["block_layout", "config", "extents", "weights"]),
        ({"block_size": 8}, ["block_layout", "extents"]),
        ({"groups": 1}, ["extents"]),
    ],
    ids=repr,
)
def test_another_engine_gets_what_was_stored_only_if_every_field_agrees(make, tmp_path, change, differing):
    first = make(tiers=[DiskTier(tmp_path, 1 << 20)], groups=2)
    request = first.submit(P, 1)
    finish(first, request)
    first.offload(request)
    first.close()
    model = tiny_model(change.get("kv_heads", 2), change.get("seed", 3))
    block_size, tier, salt = change.get("block_size", 4), DiskTier(tmp_path, 1 << 20), change.get("salt", "")
    second = make(tiers=[tier], groups=change.get("groups", 2), block_size=block_size, model=model)
    again = second.submit([*P, 1, 2], 3, salt=salt)
    finish(second, again)
    if differing is None:
        assert second.metrics()["hit_tokens"]["disk"] == 40
    else:
        assert "disk" not in second.metrics()["hit_tokens"]
        assert sorted(tier.differences(model.fingerprint(block_size, salt=salt))) == differing


def test_hashes_that_grow_block_by_block_are_those_of_the_whole(make):
    engine = make()
    request = engine.submit(P, 9)
    finish(engine, request)
    assert request.hashes == block_hashes(engine.model.fingerprint(4), request.tokens[:48], 4)


# Nothing grows --------------------------------------------------------------------------------------------------------


def test_forty_cycles_leave_pool_tiers_and_files_where_they_were(make, tmp_path):
    block = tiny_model().layout(4).block_bytes
    host, disk = HostTier(24 * block), DiskTier(tmp_path, 64 * block)
    engine = make(pool_blocks=16, tiers=[host, disk])
    seen = set()
    for cycle in range(40):
        request = engine.submit(text(30, seed=cycle % 5), 1)
        engine.run()
        engine.offload(request)
        engine.resume(request, [cycle % 7], 1)
        engine.run()
        engine.cancel(request)
        if cycle % 10 == 9:
            engine.evict(100)
            engine.executor.drain()
            seen.add((engine.scheduler.allocator.free_blocks, len(engine.executor._storing), host.used_bytes))
            assert disk.used_bytes <= disk.capacity_bytes
            assert len(list(disk.folder.iterdir())) <= 64
    assert seen == {(16, 0, 24 * block)}


def test_metrics_have_the_prometheus_form(make):
    engine = make(tiers=[HostTier(1 << 20)])
    finish(engine, engine.submit(P, 3))
    finish(engine, engine.submit(P, 3))
    lines = engine.prometheus().splitlines()
    assert "kvlab_generated_tokens_total 6" in lines
    assert 'kvlab_hit_tokens_total{source="pool"} 36' in lines
    assert 'kvlab_tier_capacity_bytes{tier="host"} 1048576' in lines
    for line in lines:
        assert re.fullmatch(r'# TYPE kvlab_\w+ (counter|gauge)|kvlab_\w+(\{\w+="[^"]*"\})? [-+.e\d]+', line), line


def test_the_engine_refuses_two_tiers_of_one_name_and_closes_its_streams():
    with pytest.raises(ValueError, match="each needs a name of its own"):
        Engine(tiny_model(), 8, 4, [HostTier(1 << 20), HostTier(1 << 20)])
    with Engine(tiny_model(), 8, 4) as engine:
        assert isinstance(engine.executor.transfer, Transfer)
    with pytest.raises(ValueError, match="two shares of free blocks"):
        Engine(tiny_model(), 8, 4, watermarks=(0.5, 0.1))
