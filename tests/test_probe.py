"""The probe against a stand-in that bills known times: flips, machines, proofs, and what it asks of a server."""

import json
import math
import random

import pytest
from stand_in_server import BLOCK, StandIn, running

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.experiments import probe
from kvlab.experiments.probe.results import levels
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.plan import plan
from kvlab.server import Endpoint, Server, ServerError
from kvlab.server.metrics import parse

WORDS = [f"word{i}" for i in range(400)]
LENGTHS = (128, 256, 512, 1024, 2048)
SUFFIX = 16


def linear(per_token_s=1e-3, tier_fixed_s=0.4, tier_token_s=2e-4, fixed_s=0.02, noise=0.0):
    """Bills whose flip is at tier_fixed_s ÷ (per_token_s - tier_token_s) tokens."""
    wobble = random.Random(7)

    def bill(device, tier, total):
        seconds = fixed_s + per_token_s * (total - device - tier)
        if tier:
            seconds += tier_fixed_s + tier_token_s * tier
        return seconds * (1 + wobble.uniform(-noise, noise))

    return bill


def run(server: StandIn, lengths=LENGTHS, **options):
    """Rehearse and measure on the stand-in's own clock; (client, rehearsal, measured)."""
    with running(server) as url:
        client = Server(Endpoint(url, clock=server.clock, sleep=server.clock.sleep), "toy")
        asked = {"suffix": SUFFIX, "reload": True, **options}
        ask = probe.Ask(lengths, **asked)
        prompts = probe.Prompts(range(1000, 3000), 1), probe.Prompts(WORDS, 1)
        rehearsal = probe.rehearse(client, *prompts, ask, lambda _: None)
        measured = probe.measure(client, rehearsal, ask)
        record = probe.record(client, rehearsal, measured, None, {"no_machine": None})
    json.dumps(record, allow_nan=False)
    return client, rehearsal, measured, record


def test_the_known_flip_is_found_and_lies_in_its_interval():
    server = StandIn(bill=linear(noise=0.05))
    client, rehearsal, _, record = run(server)
    assert (rehearsal.proof, rehearsal.tier) == ("usage", "external")
    found = record["levels"][0]["against_recompute"]["reload"]
    low, high = found["crossover_interval"]
    assert low <= 500 <= high
    assert found["crossover_tokens"] == pytest.approx(500, rel=0.1)
    assert found["crossings"] == [{"tokens": 512, "winner_above": "reload"}]
    assert record["levels"][0]["against_recompute"]["resident"]["crossover_tokens"] == 0
    assert record["discarded"] == {}
    assert record["rounds"] == 7
    assert client.requests == len(server.prompts) == record["sent"]["requests"]


def test_no_more_is_sent_than_was_announced():
    server = StandIn(bill=linear())
    client, _, measured, _ = run(server, (64, 128), rounds=2, concurrency=(1, 3))
    cost = measured.ask.cost
    assert cost.requests - 2 <= client.requests <= cost.requests  # two settling tries were not needed
    assert client.prompt_tokens == sum(map(len, server.prompts)) <= cost.prompt_tokens
    resets = sum(path == "/reset_prefix_cache" for _, path, _ in server.requests)
    assert resets <= cost.resets
    computed = sum(len(prompt) for prompt in server.prompts) - server.counted["device"] - server.counted["external"]
    assert computed <= cost.computed_tokens


def test_every_cold_prefix_is_new_and_hits_have_suffixes_of_their_own():
    server = StandIn(bill=linear())
    run(server, (64, 128), rounds=3)
    heads = [tuple(prompt[:BLOCK]) for prompt in server.prompts]
    assert all(heads.count(head) in (2, 3) for head in heads)
    assert len({tuple(prompt) for prompt in server.prompts}) == len(server.prompts)


def test_two_runs_never_share_prompts(monkeypatch):
    from kvlab.cli.probe import _prompts

    monkeypatch.setattr("kvlab.loading.default_text", lambda: " ".join(WORDS))
    with running(StandIn()) as url:
        first, second = (_prompts(Server(Endpoint(url), "toy"))[0] for _ in range(2))
    assert set(first.pieces) == set(range(300, 900))  # the server's own vocabulary
    assert first.fresh(64) != second.fresh(64)


def test_the_machine_behind_the_times_is_recovered_and_plans():
    arch, block = ModelArch.preset("llama-3.1-8b"), 16
    truth = Machine(
        "truth",
        Prefill(0.01, Curve(((1.0, 3e14),)), Curve(((1.0, 2e14),)), arch.name),
        {"external": {"load": Link(Curve(((1.0, 0.9),)), per_request_s=0.03)}},
    )

    def bill(device, tier, total):
        blocks = tier // block
        moved_s = truth.link("external").transfer_s(kv_bytes(arch, tier, None, 1, block), blocks, 32) if tier else 0.0
        return moved_s + truth.prefill_s(arch, device + tier, total)

    lengths = (256, 1024, 4096, 16384)
    _, rehearsal, measured, _ = run(StandIn(bill=bill), lengths, rounds=2)
    machine = probe.fit_machine(
        arch, levels(measured)[0], suffix=SUFFIX, block_size=block, tier=rehearsal.tier, kv_dtype=None,
        dtype="bf16", name="probed", provenance={"kind": "live"},
    )  # fmt: skip
    machine = Machine.from_dict(json.loads(json.dumps({"machine": machine.to_dict()})))
    for start, stop in ((0, 600), (0, 8000), (8192, 8208)):
        assert machine.prefill_s(arch, start, stop) == pytest.approx(truth.prefill_s(arch, start, stop), rel=0.02)
    for tokens in (512, 8192):
        moved = (kv_bytes(arch, tokens, None, 1, block), tokens // block, 32)
        assert machine.link("external").transfer_s(*moved) == pytest.approx(
            truth.link("external").transfer_s(*moved), rel=0.05
        )
    probed, true = (plan(arch, m, prefixes=[4096], suffix=SUFFIX).tiers[0].crossover_tokens for m in (machine, truth))
    assert probed == pytest.approx(true, rel=0.05)


def test_the_metrics_prove_hits_where_the_usage_does_not():
    _, rehearsal, measured, record = run(StandIn(bill=linear(), details=False), (128, 512), rounds=2)
    assert rehearsal.proof == "metrics"
    assert rehearsal.tier == "external"
    assert {sample.cached_tokens for sample in measured.samples if sample.arm == "recompute"} == {(0.0,)}
    assert record["discarded"] == {}


def test_metrics_that_others_move_prove_nothing():
    _, rehearsal, _, record = run(StandIn(bill=linear(), details=False, noise_tokens=5), (128, 512), rounds=1)
    assert rehearsal.proof == "none"
    assert "unproven" in " ".join(record["server"]["notes"])


def test_a_count_left_out_where_it_is_zero_is_zero():
    _, rehearsal, _, record = run(StandIn(bill=linear(), zero_details=False, metrics=False), (128, 512), rounds=2)
    assert rehearsal.proof == "usage"
    assert record["discarded"] == {}


def test_without_numbers_everything_is_unproven_and_nothing_is_reset():
    server = StandIn(bill=linear(), usage=False, metrics=False)
    _, rehearsal, measured, record = run(server, (128, 512), rounds=2)
    assert rehearsal.proof == record["server"]["proof"] == "none"
    assert measured.arms == ("recompute", "resident")
    assert record["levels"][0]["proven"] == {"recompute": [2, 2], "resident": [2, 2]}
    assert "--enable-prompt-tokens-details" in record["server"]["notes"][0]
    assert not any(path == "/reset_prefix_cache" for _, path, _ in server.requests)


def test_samples_whose_proof_fails_are_left_out_and_reported():
    server = StandIn(bill=linear())
    keep = server.keep

    def forgetful(tokens):
        if len(tokens) != 512 + SUFFIX:  # this length never stays
            keep(tokens)

    server.keep = forgetful
    _, _, _, record = run(server, (128, 512, 1024), rounds=2)
    level = record["levels"][0]
    assert level["proven"]["reload"] == [2, 0, 2]
    assert level["seconds"]["reload"][1] is None
    assert level["against_recompute"]["reload"]["tokens"] == [128, 1024]
    assert record["discarded"]["reload of 1 × 512 tokens: not a hit: 0 of 512 tokens came from a cache"] == 2


def test_a_cold_prefix_that_hits_does_not_count():
    server = StandIn(bill=linear())
    server.cached = lambda tokens: (len(tokens) // BLOCK * BLOCK, 0)
    _, _, _, record = run(server, (128,), rounds=1)
    assert record["levels"] == []
    assert any(why.startswith("recompute") and "not cold: 144 of 128" in why for why in record["discarded"])


def test_a_server_that_caches_nothing_ends_the_rehearsal():
    server = StandIn(bill=linear())
    server.keep = lambda tokens: None
    with pytest.raises(ServerError, match="0% came from a cache: prefix caching is off"):
        run(server)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (StandIn(bill=linear(), tier=False), "0% of the prefix came from a cache; no tier keeps"),
        (StandIn(bill=linear(), resets=False), "VLLM_SERVER_DEV_MODE=1"),
        (StandIn(bill=linear(), reset_succeeds=False), "did not succeed; other requests hold blocks"),
    ],
    ids=["no tier", "no reset", "reset refused"],
)
def test_without_a_reload_arm_it_says_why(server, said):
    _, rehearsal, measured, record = run(server, (128, 512), rounds=1)
    assert rehearsal.tier is None
    assert measured.arms == ("recompute", "resident")
    assert said in record["server"]["notes"][0]


def test_a_tier_that_stores_late_is_given_time():
    server = StandIn(bill=linear(), tier=False)
    real_sleep = server.clock.sleep

    def sleep(seconds):
        real_sleep(seconds)
        if seconds >= 1.0:
            server.stored |= server.device

    server.clock.sleep = sleep
    _, rehearsal, _, record = run(server, (128, 512), rounds=2)
    assert (rehearsal.tier, rehearsal.settle_s) == ("external", 1.0)
    assert record["levels"][0]["proven"]["reload"] == [2, 2]


def test_a_server_that_takes_no_ids_gets_words():
    server = StandIn(bill=linear(), takes_ids=False)
    _, rehearsal, _, record = run(server, (128, 512), rounds=2)
    assert rehearsal.prompts.as_text
    assert record["parameters"]["prompts"] == "text"
    assert record["levels"][0]["proven"]["reload"] == [2, 2]
    assert isinstance(server.prompts[-1], str)


def test_users_at_once_have_prefixes_of_their_own():
    server = StandIn(bill=linear())
    _, _, measured, record = run(server, (64,), rounds=2, concurrency=(1, 4))
    assert [level["concurrency"] for level in record["levels"]] == [1, 4]
    groups = [sample for sample in measured.samples if sample.concurrency == 4]
    assert all(len(sample.ttft_s) == 4 for sample in groups)
    assert record["discarded"] == {}


def test_an_interval_needs_seven_complete_rounds():
    for rounds, given in ((6, False), (7, True)):
        _, _, _, record = run(StandIn(bill=linear()), (128, 1024), rounds=rounds)
        assert (record["levels"][0]["against_recompute"]["reload"]["crossover_interval"] is not None) == given


def test_no_round_starts_that_would_not_end_in_time():
    _, _, measured, _ = run(StandIn(bill=lambda *_: 1.0), (64, 128), rounds=7, budget_s=20.0)
    assert measured.rounds == 3  # of six requests and as many seconds each
    assert "20 s was over" in measured.stopped


def test_the_ladder_keeps_to_the_model_and_to_the_budget():
    assert probe.auto_lengths(4096, 16, (1,), 7, 10**6, reload=True) == (256, 512, 1024, 2048)
    short = probe.auto_lengths(None, 16, (1,), 7, 100_000, reload=True)
    assert probe.Ask(short, 16, (1,)).cost.prompt_tokens <= 100_000
    assert probe.Ask((*short, 2 * short[-1]), 16, (1,)).cost.prompt_tokens > 100_000
    with pytest.raises(ValueError, match="two lengths from 256 tokens up do not fit"):
        probe.auto_lengths(300, 16, (1,), 7, 10**6, reload=True)


@pytest.mark.parametrize("bad", [((), 16), ((64, 64), 16), ((0,), 16), ((64,), 0)])
def test_an_ask_that_measures_nothing_is_refused(bad):
    with pytest.raises(ValueError, match="expected"):
        probe.Ask(*bad)


def test_what_vllm_and_sglang_count():
    # Lines as the servers write them: names from their sources, values made up.
    vllm = parse(
        'vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0\n'
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 32.0\n'
        'vllm:prompt_tokens_cached_by_source_total{engine="0",source="external_unspecified"} 16.0\n'
        'vllm:prefix_cache_hits_total{engine="0"} 32.0\n'
        'vllm:external_prefix_cache_hits_total{engine="0"} 16.0\n'
        'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'
        'vllm:cache_config_info{block_size="32",cache_dtype="auto"} 1.0\n'
    )
    assert vllm.cached == {"device": 32.0, "external": 16.0}
    assert (vllm.prompt_tokens, vllm.busy, vllm.block_tokens) == (100.0, 3.0, 32)
    sglang = parse(
        'sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 90.0\n'
        'sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 10.0\n'
        'sglang:cached_tokens_total{cache_source="host",model_name="m"} 64.0\n'
        'sglang:page_size{model_name="m"} 64.0\n'
    )
    assert (sglang.prompt_tokens, sglang.cached, sglang.block_tokens) == (100.0, {"host": 64.0}, 64)
    assert sglang.busy is None
    assert parse("python_gc_objects_collected_total 3.0\n<html>") is None


def test_never_and_always_are_plain_json():
    _, _, _, never = run(StandIn(bill=linear(tier_fixed_s=9.0)), (128, 256), rounds=7)
    found = never["levels"][0]["against_recompute"]["reload"]
    assert (found["crossover_tokens"], found["crossover_interval"]) == (None, [None, None])
    _, _, _, always = run(StandIn(bill=linear(tier_fixed_s=0.0)), (128, 256), rounds=7)
    assert always["levels"][0]["against_recompute"]["reload"]["crossover_interval"] == [0.0, 0.0]
    assert math.isfinite(always["rehearsal_s"]["cold"])
