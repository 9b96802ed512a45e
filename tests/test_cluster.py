"""Lesson 09: replicas in their own processes share what they store, and a hot prefix in the simulator."""

import pytest

pytest.importorskip("matplotlib")

from kvlab.arch import ModelArch
from kvlab.experiments.hot_prefix import PREFIX_TOKENS, QUESTION_TOKENS, hot_trace, sweep
from kvlab.experiments.replicas import Replica, burst, expected_waits, measure_moves, measure_waits
from kvlab.lab.draw.routing import burst_figure, hot_replica_full_at, hot_replica_p99_s, queue_figure, routing_figure
from kvlab.machine import Machine
from kvlab.verdict import decide

H100 = Machine.load("h100-sxm-pcie5")
ARCH = ModelArch.preset("llama-3.1-8b")


def test_a_replica_answers_from_what_another_has_stored_and_keeps_the_order_of_a_burst(tmp_path):
    text = [(7 * i + i // 5) % 256 for i in range(700)]
    questions = (text[at : at + 16] for at in range(256, 680, 3))
    with Replica(tmp_path, model="tiny", step_tokens=16) as a, Replica(tmp_path, model="tiny", step_tokens=16) as b:
        found = measure_moves(a, b, [text[:64]], questions)
        assert found["same_tokens"]
        assert found["b_hit_tokens"]["disk"] == 64
        prompts = [[*text[:64], *text[i : i + 16]] for i in (100, 120, 140)]
        together = burst([a, b], prompts, [1, 0, 1])
        assert [answer.tokens for answer in together] == [a.ask(prompt, 1).tokens for prompt in prompts]
        waits = measure_waits(a, b, text[:64], [text[64:128]], questions, count=4)
        assert {way: len(seconds) for way, seconds in waits.items()} == {"route": 4, "move": 4, "compute": 4}
        assert waits["route"] == sorted(waits["route"])  # one replica answers them one after the other
        with pytest.raises(ValueError, match="not in the vocabulary"):
            a.ask([10**6])
        assert a.ask(prompts[0], 1).tokens == together[0].tokens  # an error is an answer, not the end


def test_a_replica_that_dies_is_reported(tmp_path):
    replica = Replica(tmp_path, model="no-such-model")
    with pytest.raises(RuntimeError, match=r"process has ended \(exit code 1\)"):
        replica.ask([1, 2, 3])
    replica.close()


def test_expected_waits_are_arithmetic():
    waits = expected_waits({"computed_s": 1.0, "moved_s": 0.3, "resident_s": 0.2}, 4)
    assert waits["route"] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert waits["move"] == pytest.approx([0.2, 0.3, 0.4, 0.5])
    assert waits["compute"] == pytest.approx([0.2, 1.0, 0.4, 1.2])


def test_a_hot_trace_has_its_rate_and_its_share():
    trace = hot_trace(50, 0.6, 200, seed=3)
    hot = [session for session in trace.sessions if session.shared_tokens]
    assert trace.requests / 200 == pytest.approx(50, rel=0.05)
    assert len(hot) / trace.requests == pytest.approx(0.6, rel=0.05)
    assert {tuple(session.blocks) for session in hot} == {tuple(range(PREFIX_TOKENS // 512))}
    assert all(session.turns[0].input_tokens == PREFIX_TOKENS + QUESTION_TOKENS for session in trace.sessions)
    for share, rate in ((1.5, 10), (0.5, 0)):
        with pytest.raises(ValueError, match="expected a share from 0"):
            hot_trace(rate, share, 10, 0)


def test_prefix_routing_overloads_the_hot_replica_and_the_picture_says_so():
    record = sweep(ARCH, H100, [20, 60], [0.0, 0.75], replicas=8, seconds=3)
    assert record["ttft_p99_s"]["prefix"][1][1] > 2 * record["ttft_p99_s"]["kvlab"][1][1]
    assert record["hit_share"]["prefix"][1][1] > record["hit_share"]["load"][1][1]
    service_s = H100.prefill_s(ARCH, PREFIX_TOKENS, PREFIX_TOKENS + QUESTION_TOKENS)
    assert hot_replica_full_at(record, 0.75) == pytest.approx(1 / (0.75 * service_s))
    assert hot_replica_full_at(record, 0.0) == float("inf")
    assert hot_replica_p99_s(record, 0.75, 60) is None
    assert hot_replica_p99_s(record, 0.75, 1e-9) == pytest.approx(service_s)
    for percent, shown in ((0, "0%"), (40, "75%")):
        figure = routing_figure(record, percent)
        assert f"when {shown} of requests" in figure.get_suptitle()
        assert all(axis.get_xlabel() and axis.get_ylabel() for axis in figure.axes)


def test_the_queue_that_moving_is_worth():
    verdict = decide(ARCH, H100, prefix=8192, suffix=1024, tier="net-100g")
    (axis,) = queue_figure(verdict, "predicted").axes
    assert f"from {1e3 * (verdict.ttft_reload_s - verdict.suffix_s):,.0f} ms of queue on, moving" in axis.get_title()
    slow = H100.with_link("slow", H100.link("host").behind(1.0))
    (axis,) = queue_figure(decide(ARCH, slow, prefix=8192, suffix=1024, tier="slow"), "predicted").axes
    assert "computing it again is better" in axis.get_title()
    waits = expected_waits({"computed_s": 1.0, "moved_s": 0.3, "resident_s": 0.2})
    assert len(burst_figure(waits, waits, "live").axes[0].lines) == 7
