"""The part of the server bridges that needs no server: what to answer, what to learn, which bytes to believe."""

import dataclasses
import json
import math
import os
import random
import re
from pathlib import Path

import pytest

import kvlab
from kvlab.bridges.checksums import Checksums
from kvlab.bridges.judge import Judge, Question
from kvlab.bridges.learning import CALIBRATING, Chunk, Learner, StepClock
from kvlab.bridges.options import Options

ARCH = kvlab.ModelArch.preset("llama-3.1-8b")
H100 = kvlab.Machine.load("h100-sxm-pcie5")
INNER = {"kv_connector": "ExampleConnector"}


def slow(gb_per_s: float, latency_s: float = 0.0) -> kvlab.Machine:
    return H100.with_link("disk", H100.link("host").behind(gb_per_s, latency_s))


def learner(machine: kvlab.Machine | None, tier: str = "disk") -> Learner:
    return Learner(ARCH, tier, machine, kv_dtype="fp32", block_size=128)


def judge(machine: kvlab.Machine | None, **options) -> Judge:
    return Judge(learner(machine), block_size=128, **options)


def ask(name: str = "a", available: int = 1024, resident: int = 0, total: int = 2000, **rest) -> Question:
    return Question(name, rest.pop("attempt", 0), resident, available, total, rest.pop("prefix", name), **rest)


@pytest.mark.parametrize("gb_per_s", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("available", [128, 1024, 1920])
def test_it_answers_with_the_verdict_of_decide_and_loads_all_or_nothing(gb_per_s, available):
    machine = slow(gb_per_s)
    verdict = kvlab.decide(
        ARCH, machine, prefix=available, suffix=2000 - available, tier="disk", kv_dtype="fp32", block_size=128
    )
    answer, new = judge(machine).answer(ask(available=available))
    assert new
    assert (answer.choice, answer.tokens) == (verdict.choice, available if verdict.choice == "reload" else 0)
    assert (answer.ttft_reload_s, answer.ttft_recompute_s) == (verdict.ttft_reload_s, verdict.ttft_recompute_s)


def test_a_question_asked_again_gets_the_same_answer_though_the_queue_has_grown_and_counts_once():
    one = judge(slow(50.0))
    first, new = one.answer(ask())
    assert first.choice == "reload"
    one.load_began("other", 10**6)  # no link could be faster than computing behind this
    again, new_again = one.answer(ask(active_decodes=9))
    assert (again, new, new_again) == (first, True, False)
    assert one.take_counts() == {"reload_decisions": 1, "loaded_tokens": 1024}
    assert one.answer(ask("b"))[0].choice == "recompute"
    assert one.answer(ask(attempt=1))[0].choice == "recompute", "after a preemption it is a new question"


def test_loads_count_as_many_bytes_as_verdicts_when_nobody_said_what_the_cache_holds():
    fp32 = dataclasses.replace(slow(1.0), prefill=dataclasses.replace(H100.prefill, dtype="fp32"))
    one = Learner(ARCH, "disk", fp32, block_size=128)
    verdict = kvlab.decide(ARCH, fp32, prefix=1024, suffix=976, tier="disk", block_size=128)
    assert one.load_bytes(1024) == verdict.kv_bytes == learner(fp32).load_bytes(1024)


def test_bytes_in_flight_are_waited_for_until_their_load_ends_or_fails_or_its_request_goes():
    one = judge(slow(1.0))
    for end in (one.load_ended, one.load_failed, one.forget):
        one.load_began("ahead", 1024)
        assert one.queued_bytes == kvlab.kv_bytes(ARCH, 1024, kv_dtype="fp32", block_size=128)
        end("ahead")
        assert one.queued_bytes == 0
    assert one.load_began("x", 128)
    assert not one.load_began("y", 128), "the link was busy: its time says nothing about the link"


def test_a_prefix_whose_load_failed_is_computed_until_the_cache_is_reset():
    one = judge(slow(100.0))
    assert one.answer(ask(prefix="p"))[0].choice == "reload"
    one.load_failed("a")
    assert one.answer(ask("b", prefix="p"))[0].reason == "recompute: loading this prefix failed before"
    assert one.answer(ask("c", prefix="q"))[0].choice == "reload"
    one.forgive()
    assert one.answer(ask("d", prefix="p"))[0].choice == "reload"


def test_a_request_whose_load_failed_is_not_told_to_load_when_it_asks_again():
    one = judge(slow(100.0))
    assert one.answer(ask())[0].choice == "reload"
    one.load_began("a", 1024)
    one.load_failed("a")
    again, new = one.answer(ask())  # vLLM starts it again from 0 tokens, without a preemption
    assert (again.choice, again.tokens, new) == ("recompute", 0, True)


def test_a_cap_loads_whole_blocks_of_the_head_and_a_cap_of_zero_loads_nothing():
    answer, _ = judge(slow(100.0), max_load_tokens=300).answer(ask())
    assert answer.tokens == 256
    assert "max_load_tokens allows 256 of 1024" in answer.reason
    assert judge(slow(100.0), max_load_tokens=0).answer(ask())[0].tokens == 0
    assert Judge(None, block_size=128, max_load_tokens=300).answer(ask())[0].tokens == 256


def test_a_model_that_cannot_be_judged_is_always_loaded():
    answer, _ = Judge(None, block_size=128).answer(ask())
    assert (answer.choice, answer.tokens) == ("reload", 1024)


def test_a_whole_prompt_offered_and_a_resident_part_are_both_judged():
    assert judge(slow(100.0)).answer(ask(available=2000))[0].tokens == 2000
    assert judge(slow(100.0)).answer(ask(resident=1024, available=512))[0].tokens == 512


def test_active_decodes_shift_the_answer_by_their_value():
    at_tie = kvlab.decide(ARCH, slow(1.0), prefix=1024, suffix=976, tier="disk", kv_dtype="fp32", block_size=128)
    machine = slow(at_tie.break_even_gb_per_s * 0.9)
    assert judge(machine, decode_delay_value=1.0).answer(ask(active_decodes=0))[0].choice == "recompute"
    assert judge(machine, decode_delay_value=1.0).answer(ask(active_decodes=8))[0].choice == "reload"


def test_after_many_recomputes_a_link_is_tried_again_unless_it_is_hopeless():
    tie = kvlab.decide(ARCH, slow(1.0), prefix=1024, suffix=976, tier="disk", kv_dtype="fp32", block_size=128)
    near = judge(slow(tie.break_even_gb_per_s / 2), retry_every=4)
    choices = [near.answer(ask(str(n)))[0].choice for n in range(8)]
    assert choices == ["recompute"] * 3 + ["reload"] + ["recompute"] * 3 + ["reload"]
    hopeless = judge(slow(tie.break_even_gb_per_s / 50), retry_every=4)
    assert {hopeless.answer(ask(str(n)))[0].choice for n in range(8)} == {"recompute"}
    never = judge(slow(tie.break_even_gb_per_s / 2), retry_every=0)
    assert {never.answer(ask(str(n)))[0].choice for n in range(99)} == {"recompute"}


def test_without_a_machine_it_loads_until_it_has_seen_enough_and_then_judges():
    one = judge(None)
    for n in range(CALIBRATING):
        assert one.answer(ask(str(n)))[0].choice == "reload"
        one.learner.saw_prefill(0, 1000, 1.0)
        one.learner.saw_load(512, 60.0)
    assert one.answer(ask("then"))[0].choice == "recompute"


def test_the_first_observation_sets_an_unmeasured_scale_exactly():
    fresh = learner(None)
    fresh.saw_prefill(0, 1000, 3.0)
    fresh.saw_load(1024, 0.5)
    assert not fresh.machine.extrapolated(ARCH)
    another = dataclasses.replace(ARCH, layers=ARCH.layers[1:])
    assert fresh.machine.extrapolated(another), "another model of the same name"
    assert fresh.machine.prefill_s(ARCH, 0, 1000) == pytest.approx(3.0)
    load_s = fresh.machine.link("disk").transfer_s(fresh.load_bytes(1024), 8, len(ARCH.layers))
    assert load_s == pytest.approx(0.5)


def test_it_follows_a_machine_that_is_slower_than_its_file_says_through_noise():
    noise = random.Random(5)
    truth = slow(0.05)
    following = learner(slow(2.0))
    for _ in range(60):
        tokens = noise.choice([256, 512, 1024])
        seconds = truth.link("disk").transfer_s(following.load_bytes(tokens), tokens // 128, len(ARCH.layers))
        following.saw_load(tokens, seconds * math.exp(noise.gauss(0, 0.1)))
    ratio = following.machine.link("disk").gb_per_s(1e8) / truth.link("disk").gb_per_s(1e8)
    assert 0.8 < ratio < 1.25


def test_short_prefills_and_impossible_times_teach_nothing():
    one = learner(slow(1.0))
    before = one.machine
    one.saw_prefill(0, 100, 9.0)
    one.saw_prefill(0, 1000, 0.0)
    one.saw_load(64, 1.0)
    one.saw_load(512, -1.0)
    assert one.machine == before


def seen(chunks, took_s=2.0, load_s=0.5, failed=()):
    clock, one = StepClock(), learner(None)
    clock.begin(1, tuple(chunks), 10.0)
    clock.end(1, 10.0 + took_s, load_s, one, dict.fromkeys(failed, "why"))
    return one


def test_a_step_teaches_what_can_be_told_apart():
    alone = seen([Chunk("a", 0, 1000, prefill=True)], load_s=0.0)
    assert alone.machine.prefill_s(ARCH, 0, 1000) == pytest.approx(2.0)
    with_load = seen([Chunk("a", 1024, 300, prefill=True, loaded=1024)])
    assert (with_load.prefills, with_load.loads) == (1, 1)
    assert with_load.machine.prefill_s(ARCH, 1024, 1324) == pytest.approx(1.5), "less what the load took"
    decodes = [Chunk(f"d{n}", 500, 1, prefill=False) for n in range(30)]
    assert seen([Chunk("a", 0, 1000, prefill=True), *decodes]).prefills == 1
    assert seen([Chunk("a", 0, 200, prefill=True), *decodes]).prefills == 0
    assert seen([Chunk("a", 0, 1000, prefill=True), Chunk("b", 0, 1000, prefill=True)]).prefills == 0
    two_loads = [Chunk("a", 128, 1, prefill=True, loaded=128), Chunk("b", 128, 1, prefill=True, loaded=128)]
    assert seen(two_loads).loads == 0
    failed = seen([Chunk("a", 1024, 300, prefill=True, loaded=1024)], failed=["a"])
    assert (failed.prefills, failed.loads) == (0, 0)


def test_overlapping_steps_are_billed_from_the_end_of_the_one_before():
    clock, one = StepClock(), learner(None)
    clock.begin(1, (Chunk("a", 0, 10, prefill=True),), 0.0)
    clock.begin(2, (Chunk("b", 0, 1000, prefill=True),), 0.1)  # prepared while step 1 runs
    clock.end(1, 3.0, 0.0, one, {})
    clock.end(2, 5.0, 0.0, one, {})
    assert one.machine.prefill_s(ARCH, 0, 1000) == pytest.approx(2.0)


def test_checksums_tell_right_wrong_and_unknown_and_outlive_a_restart(tmp_path):
    file = tmp_path / "sums" / "a.sums"
    first, other = Checksums(file), Checksums(file)
    assert first.look(b"n" * 32, 5) == "unknown"
    first.record([(b"n" * 32, 5), (b"m" * 32, 2**64 - 1)])
    first.record([(b"n" * 32, 5), (b"n" * 32, 6)])  # computed in another batch: both are right
    assert file.stat().st_size == 3 * 40
    for one in (first, other, Checksums(file)):
        assert [one.look(b"n" * 32, value) for value in (5, 6, 7)] == ["right", "right", "wrong"]
        assert one.look(b"m" * 32, 2**64 - 1) == "right"
    with file.open("ab") as torn:
        torn.write(b"x" * 39)
    assert first.look(b"m" * 32, 2**64 - 1) == "right"
    assert Checksums(file).look(b"m" * 32, 2**64 - 1) == "right"
    memory = Checksums()
    memory.record([(b"n" * 32, 5)])
    assert not memory.persistent
    assert [memory.look(b"n" * 32, value) for value in (5, 6)] == ["right", "wrong"]


def test_a_torn_record_does_not_shift_what_another_process_appends(tmp_path):
    file = tmp_path / "a.sums"
    Checksums(file).record([(b"n" * 32, 5)])
    with file.open("ab") as torn:
        torn.write(b"x" * 7)
    Checksums(file).record([(b"m" * 32, 9)])
    again = Checksums(file)
    assert (again.look(b"n" * 32, 5), again.look(b"m" * 32, 9)) == ("right", "right")


def test_a_folder_that_goes_away_is_warned_about_once_and_checksums_go_on_in_memory(tmp_path):
    warned = []
    file = tmp_path / "sums" / "a.sums"
    one = Checksums(file, warn=lambda line, *values: warned.append(line % values))
    one.record([(b"n" * 32, 5)])
    file.unlink()
    file.parent.rmdir()
    one.record([(b"m" * 32, 6)])
    one.record([(b"o" * 32, 7)])
    assert [one.look(name * 32, value) for name, value in ((b"n", 5), (b"m", 6), (b"o", 7))] == ["right"] * 3
    assert one.look(b"?" * 32, 8) == "unknown"
    assert one.persistent, "so a block that is not known is still not believed"
    assert len(warned) == 1
    assert "a.sums" in warned[0]


def test_a_file_that_cannot_be_read_is_warned_about_once(tmp_path):
    warned = []
    one = Checksums(tmp_path / "a.sums", warn=lambda line, *values: warned.append(line % values))
    (tmp_path / "a.sums").mkdir()  # opening it raises, for root as well
    assert [one.look(b"n" * 32, 5), one.look(b"n" * 32, 6)] == ["unknown", "unknown"]
    assert len(warned) == 1


def test_a_write_that_the_disk_cut_short_leaves_nothing_behind(tmp_path, monkeypatch):
    warned = []
    file = tmp_path / "a.sums"
    one = Checksums(file, warn=lambda line, *values: warned.append(line % values))
    one.record([(b"n" * 32, 5)])
    whole = file.read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:47]))
    one.record([(b"m" * 32, 6), (b"o" * 32, 7)])
    monkeypatch.undo()
    assert file.read_bytes() == whole
    assert len(warned) == 1
    one.record([(b"p" * 32, 8)])
    again = Checksums(file)
    assert [again.look(name * 32, value) for name, value in ((b"n", 5), (b"p", 8))] == ["right", "right"]
    assert again.look(b"m" * 32, 6) == "unknown"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "inner is None; expected the connector to wrap"),
        ({"inner": {"kv_role": "kv_both"}}, "expected the connector to wrap"),
        ({"inner": {"kv_connector": "CrossoverConnector"}}, "is CrossoverConnector itself"),
        (
            {"inner": INNER, "shared_storage_path": "/x"},
            "has 'shared_storage_path'; CrossoverConnector knows checksums",
        ),
        ({"inner": INNER, "max_load_tokens": "9"}, "max_load_tokens is '9'; expected int"),
        ({"inner": INNER, "retry_every": True}, "retry_every is True"),
        ({"inner": INNER, "max_load_tokens": -1}, "max_load_tokens -1"),
    ],
)
def test_a_wrong_extra_config_is_refused_in_one_line(extra, message):
    with pytest.raises(ValueError, match=message) as refused:
        Options.read(extra)
    assert "\n" not in str(refused.value)


def test_the_machine_is_found_or_refused_and_so_is_its_tier(tmp_path):
    missing = str(tmp_path / "m.json")
    with pytest.raises(ValueError, match="no machine file at"):
        Options.read({"inner": INNER, "machine": missing}).load_machine()
    with pytest.raises(ValueError, match=r"tier is missing: machine .* has links to host, .*ExampleConnector"):
        Options.read({"inner": INNER, "machine": "h100-sxm-pcie5"}).load_machine()
    with pytest.raises(ValueError, match="no link to tier 'tape'"):
        Options.read({"inner": INNER, "machine": "h100-sxm-pcie5", "tier": "tape"}).load_machine()
    machine, tier = Options.read({"inner": INNER, "machine": "h100-sxm-pcie5", "tier": "host"}).load_machine()
    assert (machine, tier) == (H100, "host")
    assert Options.read({"inner": INNER}).load_machine() == (None, "outside")
    one_link = dataclasses.replace(H100, links={"host": H100.links["host"]})
    assert next(iter(one_link.links)) == "host"
    linkless = tmp_path / "linkless.json"
    linkless.write_text(json.dumps(dataclasses.replace(H100, links={}).to_dict()), encoding="utf-8")
    with pytest.raises(ValueError, match=r"has no link to load over; probe the server with ExampleConnector"):
        Options.read({"inner": INNER, "machine": str(linkless)}).load_machine()


def test_the_config_in_the_docs_is_taken_with_the_machine_of_a_probe(tmp_path, monkeypatch):
    text = (Path(__file__).parent.parent / "docs" / "vllm.md").read_text(encoding="utf-8")
    config = json.loads(re.search(r"--kv-transfer-config '(.*?)'", text, re.DOTALL).group(1))
    options = Options.read(config["kv_connector_extra_config"])
    monkeypatch.chdir(tmp_path)
    Path(options.machine).parent.mkdir()
    probed = dataclasses.replace(H100, links={"external": H100.links["host"]})
    Path(options.machine).write_text(json.dumps(probed.to_dict()), encoding="utf-8")
    assert options.load_machine()[1] == "external"
