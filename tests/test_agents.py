"""The agent workload is plain data, every policy meets it in the same states with the same tokens, regret adds up."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict

import pytest
from tiny_engine import VOCAB, logits_without_cache, one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab import policies
from kvlab.arch import ModelArch
from kvlab.experiments.agents import Arm, Resume, mean_ttft_s, measure, oracle, regret, replays
from kvlab.experiments.bench.engine import agent_rows, lookup_rows, overhead_rows
from kvlab.experiments.bench.overlap import overlap_rows
from kvlab.experiments.bench.rows import Row
from kvlab.experiments.bench.table import line
from kvlab.experiments.workload import Turn, Workload, agent_workload, mixing_link, predict, ways_won
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.policy import Decision, Option, Situation
from kvlab.tiers import DiskTier, HostTier

SMALL = agent_workload(3, agents=4, resumes=8, preamble=34, own=(4, 24), tool=(1, 6), gap_s=(0.1, 0.2))
SHAPE = {"kv_dtype": "fp64", "block_size": 4, "groups": 2}
TEXT = text(600, seed=9)


def a_machine(gb_per_s=5.0, per_request_s=1e-4) -> Machine:
    """About what a small computer has: short prefills are the less efficient ones."""
    link = Link(Curve(((1.0, gb_per_s),)), per_request_s=per_request_s)
    prefill = Prefill(1e-3, Curve(((1.0, 2e10), (256.0, 1e11))), Curve(((1.0, 4e10),)), "smollm2-135m")
    return Machine("test", prefill, {"host": {"load": link}, "disk": {"load": link}})


# The workload --------------------------------------------------------------------------------------------------------


def test_the_workload_is_plain_data_that_its_seed_alone_decides():
    workload = agent_workload()
    assert workload == agent_workload()
    assert workload != agent_workload(1)
    data = json.loads(json.dumps(asdict(workload)))
    again = Workload(data["preamble"], tuple(Turn(**turn) for turn in data["turns"]), data["output_tokens"])
    assert again == workload


def test_it_is_eight_agents_behind_1024_tokens_with_24_resumes_of_different_lengths():
    workload = agent_workload()
    assert (workload.preamble, workload.agents, len(workload.resumes)) == (1024, 8, 24)
    assert [turn.agent for turn in workload.starts] == list(range(8))
    assert set(Counter(turn.agent for turn in workload.resumes).values()) == {3}
    lengths = [prompt for _, _, prompt in workload.prompts()]
    assert len(set(lengths)) >= 16
    assert max(lengths) - 1024 > 4 * (min(lengths) - 1024)
    assert all(turn.gap_s > 0 and turn.new_tokens > 0 for turn in workload.resumes)


def test_the_pool_holds_the_preamble_and_a_third_of_what_the_agents_have_of_their_own():
    turns = (Turn(0, 0.0, 30), Turn(1, 0.0, 10), Turn(0, 1.0, 8), Turn(1, 1.0, 5))
    workload = Workload(32, turns, output_tokens=2)
    # Agent 0 ends with 30 + 2 + 8 + 2 = 42 tokens of its own, 11 blocks of 4; agent 1 with 19, 5 blocks.
    assert list(workload.prompts()) == [(turns[2], 64, 72), (turns[3], 44, 49)]
    assert workload.turn_blocks(4) == 11
    assert workload.pool_blocks(4) == 8 + 11  # a third would be 6, which the longest turn does not fit
    assert workload.pool_blocks(4, share=0.75) == 8 + 12
    assert workload.tokens_needed(rounds=3) == 32 + 40 + 3 * 13
    full = agent_workload()
    own = {turn.agent: -(-(prompt + 2 - 1024) // 16) for turn, _, prompt in full.prompts()}
    assert full.pool_blocks(16) == 64 + math.ceil(sum(own.values()) / 3)


@pytest.mark.parametrize("name", ["smollm2-135m", "wide-kv"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_mixing_link_lets_each_way_win_at_least_a_third(name, seed):
    arch, workload = ModelArch.preset(name), agent_workload(seed)
    shape = {"kv_dtype": "fp32", "block_size": 16, "groups": 4}
    machine = a_machine()
    gb_per_s, latency_s = mixing_link(workload, arch, machine, **shape)
    assert 0 < gb_per_s < 5.0
    behind = machine.with_link("link", machine.link("host").behind(gb_per_s, latency_s))
    verdicts = predict(workload, arch, behind, "link", **shape)
    wins = ways_won(verdicts)
    assert sum(wins.values()) == len(verdicts) == 24
    assert min(wins.values()) >= 8
    by_length = sorted(verdicts, key=lambda verdict: verdict.reload_tokens)
    assert (by_length[0].choice, by_length[-1].choice) == ("recompute", "reload")


def test_where_no_link_mixes_the_ways_it_says_so():
    with pytest.raises(ValueError, match="no link in front of host RAM makes reload win a third of these 24 resumes"):
        mixing_link(
            agent_workload(),
            ModelArch.preset("wide-kv"),
            a_machine(per_request_s=60.0),
            kv_dtype="fp32",
            block_size=16,
            groups=4,
        )


# Playing it ----------------------------------------------------------------------------------------------------------


def play(arms, rounds=2, workload=SMALL, tokens=TEXT, kv_heads=2):
    return measure(tiny_model(kv_heads), tokens, workload, arms, rounds, block_size=4, gap_scale=0.0)


def greedy(prompt, count):
    """Tokens of a run without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_without_cache(tiny_model(), tokens)[-1].argmax()))
    return tokens


def expected_outputs(workload, rounds):
    """Outputs [round][resume] without engine, pool or tiers; the text is read as `measure` says."""
    words = iter(TEXT[workload.preamble :])
    take = lambda count: [next(words) for _ in range(count)]  # noqa: E731
    started = {
        turn.agent: greedy([*TEXT[: workload.preamble], *take(turn.new_tokens)], workload.output_tokens)
        for turn in workload.starts
    }
    outputs = []
    for _ in range(rounds):
        agents = {agent: list(tokens) for agent, tokens in started.items()}
        outputs.append([])
        for turn in workload.resumes:
            agents[turn.agent] = greedy([*agents[turn.agent], *take(turn.new_tokens)], workload.output_tokens)
            outputs[-1].append(tuple(agents[turn.agent][-workload.output_tokens :]))
    return outputs


def test_every_policy_meets_the_same_states_and_gives_the_tokens_of_a_run_without_cache(tmp_path):
    fast, slow = tiny_machine(1.0, 1e8), tiny_machine(0.02)
    arms = {
        "reload": Arm(policies.Reload(), lambda: HostTier(1 << 22)),
        "recompute": Arm(policies.Recompute(), lambda: HostTier(1 << 22)),
        "threshold": Arm(policies.Threshold(12), lambda: DiskTier(tmp_path / "a", 1 << 22)),
        "calibrated": Arm(policies.Calibrated(fast), lambda: DiskTier(tmp_path / "b", 1 << 22)),
        "splitting": Arm(policies.Calibrated(slow), lambda: HostTier(1 << 22)),
    }
    measured = play(arms)
    expected = expected_outputs(SMALL, 2)
    states = [[resume.state for resume in resumes] for resumes in measured["reload"]]
    chosen = Counter()
    for name, rounds in measured.items():
        assert [[resume.output for resume in resumes] for resumes in rounds] == expected, name
        assert [[resume.state for resume in resumes] for resumes in rounds] == states, name
        chosen.update(resume.choice for resumes in rounds for resume in resumes)
    assert {"reload", "recompute", "split"} <= chosen.keys()
    # What `predict` assumes is what is found: the preamble's whole blocks resident, all others that are whole held.
    assumed = [(32, (has - 1) // 4 * 4) for _, has, _ in SMALL.prompts()]
    assert states[0] == assumed
    # Later rounds find one block more where a start ends on a boundary: its last token has been computed since.
    firsts = len(SMALL.starts)
    more = [
        (32, held + 4 * (has % 4 == 0))
        for (_, held), (_, has, _) in zip(assumed[:firsts], SMALL.prompts(), strict=False)
    ]
    assert states[1] == more + assumed[firsts:]
    verdicts = predict(SMALL, tiny_model().arch, fast, "host", **SHAPE)
    assert [verdict.prefix for verdict in verdicts] == [prefix for _, prefix in assumed]


def test_hits_are_counted_per_resume_by_source():
    measured = play({"reload": Arm(policies.Reload(), lambda: HostTier(1 << 22))}, rounds=1)
    for resume, (_, has, _) in zip(measured["reload"][0], SMALL.prompts(), strict=True):
        assert resume.hit_tokens == {"pool": 32, "host": (has - 1) // 4 * 4 - 32}


def test_a_text_that_is_too_short_is_refused_with_both_numbers():
    arm = {"reload": Arm(policies.Reload(), lambda: HostTier(1 << 22))}
    with pytest.raises(ValueError, match=rf"the text has 50 tokens; 2 rounds .* take {SMALL.tokens_needed(2)}"):
        play(arm, tokens=TEXT[:50])


# Judging it ----------------------------------------------------------------------------------------------------------


def resume(agent, turn, choice, ttft_s, prefix=64):
    situation = Situation((agent, turn), tiny_model().arch, "fp64", 4, 80, 32, (Option("host", prefix),))
    return Resume(agent, turn, ttft_s, Decision(situation, choice, "made up"), {}, (1,))


RELOAD = [[resume(0, 1, "reload", 1.0 + noise), resume(1, 1, "reload", 4.0)] for noise in (0.0, 0.5, -0.25)]
RECOMPUTE = [[resume(0, 1, "recompute", 3.0), resume(1, 1, "recompute", 2.0)] for _ in range(3)]


def test_replays_are_medians_of_both_ways():
    assert replays(RELOAD, RECOMPUTE) == {
        (0, 1): {"reload": 1.0, "recompute": 3.0},
        (1, 1): {"reload": 4.0, "recompute": 2.0},
    }
    assert mean_ttft_s(RELOAD) == [2.5, 2.75, 2.375]


def test_regret_is_what_the_slower_way_costs_more():
    replayed = replays(RELOAD, RECOMPUTE)
    assert (regret(RELOAD, replayed).lost_s, regret(RELOAD, replayed).best_s) == (1.0, 1.5)  # agent 1: 4 s, not 2 s
    assert regret(RECOMPUTE, replayed).share == pytest.approx(1.0 / 1.5)  # agent 0: 3 s, not 1 s
    best = [[resume(0, 1, "reload", 9.0), resume(1, 1, "recompute", 9.0)]]  # noise in its own time is no regret
    assert regret(best, replayed).share == 0.0
    split = [[resume(0, 1, "split", 1.5), resume(1, 1, "split", 1.0)]]  # half a second lost, and none made up for
    assert regret(split, replayed).lost_s == 0.25


def test_what_is_no_replay_is_refused():
    with pytest.raises(ValueError, match=r"and reload at .* are no replays of reload and recompute"):
        replays(RELOAD, RELOAD)
    elsewhere = [[resume(0, 1, "recompute", 3.0, prefix=48), *resumes[1:]] for resumes in RECOMPUTE]
    with pytest.raises(ValueError, match=r"reload at \(32, 64\) \(resident, held\) and recompute at \(32, 48\)"):
        replays(RELOAD, elsewhere)
    with pytest.raises(ValueError, match="resume 7 of agent 5 was not replayed"):
        regret([[resume(5, 7, "reload", 1.0)]], replays(RELOAD, RECOMPUTE))


def test_an_oracle_that_is_fed_by_replays_has_no_regret():
    arms = {
        "reload": Arm(policies.Reload(), lambda: HostTier(1 << 22)),
        "recompute": Arm(policies.Recompute(), lambda: HostTier(1 << 22)),
    }
    measured = play(arms)
    replayed = replays(measured["reload"], measured["recompute"])
    assert len(replayed) == len(SMALL.resumes)
    # Real replays of a tiny model all say the same; these say now this, now that.
    made_up = {
        key: {"reload": float(place % 3), "recompute": 1.5 - place % 2} for place, key in enumerate(sorted(replayed))
    }
    for times in (replayed, made_up):
        played = play({"oracle": Arm(oracle(times, SMALL, 2), lambda: HostTier(1 << 22))})["oracle"]
        assert regret(played, times).lost_s == 0.0
        for resumes in played:
            for each in resumes:
                assert each.choice == min(("recompute", "reload"), key=times[each.agent, each.turn].get)
    assert regret(measured["reload"], made_up).lost_s > 0
    assert {each.choice for each in played[0]} == {"reload", "recompute"}


# The bench -----------------------------------------------------------------------------------------------------------


def well_formed(row):
    plain = json.loads(json.dumps(row.plain(), allow_nan=False))
    assert plain["name"]
    assert plain["unit"]
    assert plain["met"] in (True, False, None)
    assert plain["goal"] or plain["met"] is None
    return plain


def test_agent_rows_judge_each_tier_and_the_tokens(tmp_path):
    model = tiny_model()
    workload = agent_workload(agents=3, resumes=6, preamble=64, own=(16, 96), tool=(4, 24), gap_s=(0.0, 0.0))
    machine = tiny_machine(1.0, 1e9)
    rows = list(agent_rows(model, text(600), machine, tmp_path, lambda _: None, workload=workload, rounds=2))
    assert len(rows) == 5
    for row in map(well_formed, rows):
        assert row["name"].startswith("3 agents in turn, tiny-2 fp64")
        assert row["interval"] is None  # two rounds give none, and without one nothing is met
    assert [row.met for row in rows if "mean TTFT" in row.name] == [None, None]
    assert all(row.met == (row.ours <= 5) for row in rows if "regret" in row.name)
    assert "an emulated link" in rows[2].name
    assert re.fullmatch(r".*B/s .* and .*s", rows[2].note), "the link is another in every run: not in the name"
    assert not rows[0].note
    assert (rows[-1].ours, rows[-1].met) == (0.0, True)


def test_without_a_link_that_mixes_the_row_says_so_and_the_disk_is_still_measured(tmp_path):
    workload = agent_workload(agents=2, resumes=2, preamble=32, own=(16, 32), tool=(4, 8), gap_s=(0.0, 0.0))
    link = Link(Curve(((1.0, 1.0),)), per_request_s=60.0)
    machine = tiny_machine().with_link("host", link)
    rows = list(agent_rows(tiny_model(), text(300), machine, tmp_path, lambda _: None, workload=workload, rounds=1))
    assert math.isnan(rows[0].ours)
    assert rows[0].met is None
    assert [row.name.split(", ")[2][:4] for row in rows[1:3]] == ["disk", "disk"]


def test_look_ups_scheduling_and_overlap_have_their_rows():
    model, machine = tiny_model(), tiny_machine(1.0, 1e8)
    rows = [
        *lookup_rows(lambda _: None, tokens=256),
        *overhead_rows(model, text(400), machine, lambda _: None, prefix=64, resumes=3),
        *overlap_rows(model, text(400), machine, lambda _: None, prefix=64, rounds=2),
    ]
    for row in map(well_formed, rows):
        assert row["ours"] is None or row["ours"] > 0
    assert [row.unit for row in rows] == ["tokens/s"] * 2 + ["%"] * 2 + ["ms"] * 2
    assert all(0 < row.ours < 100 for row in rows if row.unit == "%")
    assert rows[4].of_floor == pytest.approx(rows[4].floor / rows[4].ours)
    assert rows[4].floor < rows[4].peers["one after the other"]


def test_the_interval_of_a_row_without_peers_is_printed_too():
    assert "[0.90, 1.25]" in line(Row("predicted ÷ measured", 1.0, "×", interval=(0.9, 1.25)).plain())
