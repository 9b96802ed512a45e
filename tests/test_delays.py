"""Whom a request makes wait: the busy period of theory, recent rates, and the verdicts that follow."""

import random
from dataclasses import replace

import pytest

from kvlab.arch import ModelArch
from kvlab.machine import Machine
from kvlab.policy import Calibrated, Option, Situation, delayed_loads
from kvlab.verdict import decide
from kvlab.waiting import SEEN, RecentRate, delayed_requests

ARCH = ModelArch.preset("llama-3.1-8b")
H100 = Machine.load("h100-sxm-pcie5")


def came_while_busy(unserved, load, draw):
    """Arrivals at rate `load` until a server that begins with `unserved` requests is idle; services of mean 1."""
    came = 0
    while unserved:
        left_s = draw.expovariate(1.0)
        while (gap_s := draw.expovariate(load)) < left_s:
            left_s -= gap_s
            came += 1
            unserved += 1
        unserved -= 1
    return came


@pytest.mark.parametrize(("unserved", "load"), [(1, 0.3), (1, 0.6), (4, 0.5)])
def test_those_who_come_in_a_busy_period_are_as_many_as_simulated(unserved, load):
    draw = random.Random(3)
    runs = [came_while_busy(unserved, load, draw) for _ in range(8000)]
    assert sum(runs) / len(runs) == pytest.approx(delayed_requests(0, unserved, load), rel=0.06)


def test_who_waits_for_an_idle_server_is_not_delayed_by_it():
    assert delayed_requests(7, 8, 0.0) == 0
    assert delayed_requests(7, 8, 0.5) == 7 * 0.5 + 8
    assert delayed_requests(7, 8, 1.0) == delayed_requests(7, 8, 3.0) == 7 + 8 * SEEN
    loads = [n / 100 for n in range(100)]
    values = [delayed_requests(2, 3, load) for load in loads]
    assert values == sorted(values)


def test_a_rate_is_of_the_last_requests_only():
    rate = RecentRate(10.0)
    assert rate.per_second(10.0) == 0
    rate.add(6.0)
    assert rate.per_second(12.0) == 3.0
    for n in range(SEEN):
        rate.begin(20.0 + n)
    assert rate.per_second(20.0 + SEEN) == 0, "what was before the oldest request that is still seen does not count"
    rate.add(SEEN)
    assert rate.per_second(20.0 + SEEN) == 1.0


def situation(**other):
    option = Option(
        "disk",
        8192,
        **{k: other.pop(k) for k in ("queued_bytes", "queued_loads", "bytes_per_s", "storing_bytes") if k in other},
    )
    return Situation((0, 0), ARCH, "bf16", 512, 8192 + 300, 0, (option,), **other)


def test_a_busy_accelerator_turns_the_verdict_to_reload_and_a_busy_link_to_recompute():
    """A disk somewhat slower than computing: alone, computing wins."""
    slow = H100.with_link("disk", replace(H100.link("disk"), gb_per_s=H100.link("disk").gb_per_s.scaled(0.8)))
    policy = Calibrated(slow, queue_delay_value=1.0, allow_split=False)
    assert policy.decide(situation()).choice == "recompute"
    busy = situation(load=0.5, waiting=2)
    assert policy.decide(busy).choice == "reload"
    assert policy.decide(situation(loading=3)).choice == "reload", "their bytes come, and the accelerator is taken"
    assert replace(policy, load_aware=False).decide(busy).choice == "recompute"
    assert replace(policy, queue_delay_value=0.0).decide(busy).choice == "recompute"
    contended = situation(load=0.5, waiting=2, bytes_per_s=3.4e9, queued_loads=3)
    assert policy.decide(contended).choice == "recompute"


def test_a_load_begins_when_its_blocks_are_stored():
    at = situation(storing_bytes=round(4.48e9 / 2))
    assert Calibrated(H100, queue_delay_value=1.0).decide(at).verdict.wait_s == pytest.approx(0.5)
    both = situation(storing_bytes=round(4.48e9 / 2), queued_bytes=round(4.48e9))
    assert Calibrated(H100).decide(both).verdict.wait_s == pytest.approx(1.0), "the two waits go on at once"
    assert Calibrated(H100, load_aware=False).decide(both).verdict.wait_s == 0
    unknown = H100.with_link("disk", H100.link("disk"))
    assert Calibrated(unknown).decide(at).verdict.wait_s == 0


def test_a_links_load_is_what_was_asked_of_it_at_the_pace_of_this_load():
    at = situation(bytes_per_s=4.48e9 / 4, queued_loads=1)  # the published disk is read at 4.48 GB/s
    assert delayed_loads(H100, at, at.options[0]) == pytest.approx(delayed_requests(0, 2, 0.25))
    assert delayed_loads(H100, situation(), situation().options[0]) == 0


def test_a_second_of_the_link_is_worth_what_it_is_said_to_be():
    wanted = {"prefix": 8192, "suffix": 300, "tier": "disk", "block_size": 512}
    plain, valued = decide(ARCH, H100, **wanted), decide(ARCH, H100, link_delay_value=2.0, **wanted)
    assert valued.cost_reload_s == pytest.approx(plain.cost_reload_s + 2.0 * plain.reload_s)
    assert (valued.cost_recompute_s, valued.ttft_reload_s) == (plain.cost_recompute_s, plain.ttft_reload_s)
    assert "2 s per s of the link" in valued.explain()
    with pytest.raises(ValueError, match="link_delay_value is -1; expected a finite number of at least 0"):
        decide(ARCH, H100, link_delay_value=-1, **wanted)
