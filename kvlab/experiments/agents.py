"""The agent workload on real engines, under one policy each, and what deciding was worth there.

The pool has room for the agents' shared preamble and for a third of what they have of their own, so that a resume
finds the preamble resident and the rest in a tier. Turns come one after another: during an agent's tool gap the others
take theirs, and the gap itself is slept `gap_scale` times its length. So every policy finds the same blocks in the
same places, and always reloading and never reloading are replays of both ways at each resume.
Knows engines and text tokens. Does not print.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvlab.engine import Engine
from kvlab.experiments.calibrate import TierFactory
from kvlab.experiments.turns import in_turn
from kvlab.experiments.workload import Turn, Workload
from kvlab.model import Model
from kvlab.policy import Decision, Oracle, Policy
from kvlab.records import median
from kvlab.request import Request
from kvlab.verdict import Choice

__all__ = ["Arm", "Regret", "Replays", "Resume", "Rounds", "mean_ttft_s", "measure", "oracle", "regret", "replays"]

Progress = Callable[[str], None]
Replays = Mapping[tuple[int, int], Mapping[Choice, float]]  # by agent and resume: {way: seconds to first token}


@dataclass(frozen=True)
class Arm:
    """An engine to play the workload: what decides, and the tier behind its pool (made once, kept over rounds)."""

    policy: Policy
    make_tier: TierFactory


@dataclass(frozen=True)
class Resume:
    """One resume as it went: the `turn`-th of `agent`, from 1. `hit_tokens` by source; no `decision`: all was resident.

    `output` are the tokens it generated.
    """

    agent: int
    turn: int
    ttft_s: float
    decision: Decision | None
    hit_tokens: Mapping[str, int]
    output: tuple[int, ...]

    @property
    def choice(self) -> Choice | None:
        """What was decided."""
        return None if self.decision is None else self.decision.choice

    @property
    def state(self) -> tuple[int, int] | None:
        """What was found: tokens resident, and tokens up to which a tier could bring them."""
        if self.decision is None:
            return None
        return self.decision.situation.resident, self.decision.situation.longest.prefix


Rounds = list[list[Resume]]  # [round][resume]


def measure(
    model: Model,
    tokens: Sequence[int],
    workload: Workload,
    arms: Mapping[str, Arm],
    rounds: int,
    *,
    block_size: int = 16,
    gap_scale: float = 0.002,
    progress: Progress = lambda _: None,
) -> dict[str, Rounds]:
    """Play the workload under every arm, in turn, by whole rounds.

    The starts run once per arm, untimed. Each round resumes fresh branches of the agents as their starts left them,
    with tool outputs that no round before had, so that little more is found than what the agents themselves left: the
    last block of a start, where its first resume fills it up as an earlier round did.
    Raises ValueError for a text that is too short.
    """
    need = workload.tokens_needed(rounds)
    if len(tokens) < need:
        raise ValueError(f"the text has {len(tokens)} tokens; {rounds} rounds of this workload take {need}")
    measured: dict[str, Rounds] = {name: [] for name in arms}
    with ExitStack() as stack:
        players = {}
        for name, arm in arms.items():
            progress(f"agents start: {name}")
            players[name] = _Player(stack, model, tokens, workload, arm, block_size, gap_scale)
        for number in range(rounds):
            for name in in_turn(arms, number):
                progress(f"round {number + 1} of {rounds}: {name}")
                measured[name].append(players[name].round())
    return measured


class _Player:
    """One arm's engine and its agents as their first turns left them."""

    def __init__(
        self,
        stack: ExitStack,
        model: Model,
        tokens: Sequence[int],
        workload: Workload,
        arm: Arm,
        block_size: int,
        gap_scale: float,
    ) -> None:
        self._tokens, self._read = tokens, workload.preamble
        self._workload, self._gap_scale = workload, gap_scale
        blocks = workload.pool_blocks(block_size)
        # Room for the longest turn is kept free, so that no first token waits for other agents' blocks to leave.
        free = (workload.turn_blocks(block_size) + 0.5) / blocks
        self._engine = stack.enter_context(
            Engine(model, blocks, block_size, [arm.make_tier()], arm.policy, watermarks=(free, free))
        )
        self._agents: dict[int, Request] = {}
        for turn in workload.starts:
            prompt = [*tokens[: workload.preamble], *self._next(turn.new_tokens)]
            self._agents[turn.agent] = self._engine.submit(prompt, workload.output_tokens)
            self._engine.run()

    def _next(self, count: int) -> Sequence[int]:
        """The next tokens of the text; every arm reads the same."""
        self._read += count
        return self._tokens[self._read - count : self._read]

    def round(self) -> list[Resume]:
        """All resumes, by one fresh branch per agent."""
        branches = {agent: self._engine.branch(request) for agent, request in self._agents.items()}
        resumes = [self._resume(turn, branches[turn.agent]) for turn in self._workload.resumes]
        for branch in branches.values():
            self._engine.cancel(branch)
        self._engine.check_integrity()
        return resumes

    def _resume(self, turn: Turn, request: Request) -> Resume:
        time.sleep(turn.gap_s * self._gap_scale)
        engine, before = self._engine, self._engine.metrics()["hit_tokens"]
        engine.resume(request, self._next(turn.new_tokens), self._workload.output_tokens)
        engine.run()
        hits = {source: tokens - before.get(source, 0) for source, tokens in engine.metrics()["hit_tokens"].items()}
        ttft_s = request.timing.ttft_s
        assert ttft_s is not None, "a turn has ended without a token"
        return Resume(turn.agent, request.turn, ttft_s, request.decision, hits, tuple(request.output_tokens))


# Judging -------------------------------------------------------------------------------------------------------------


def mean_ttft_s(rounds: Rounds) -> list[float]:
    """The mean time to first token of each round."""
    return [sum(resume.ttft_s for resume in resumes) / len(resumes) for resumes in rounds]


def replays(reload: Rounds, recompute: Rounds) -> Replays:
    """Both ways at each resume where there was a choice: medians over rounds of an arm that always reloads and of one
    that never does.

    Raises ValueError where an arm did something else, or where in one round the two found different blocks in
    different places: those would not be two ways out of one situation.
    """
    seconds: dict[tuple[int, int], dict[Choice, list[float]]] = {}
    for one, other in zip(reload, recompute, strict=True):
        for a, b in zip(one, other, strict=True):
            key = a.agent, a.turn
            if a.state != b.state or a.choice not in (None, "reload") or b.choice not in (None, "recompute"):
                raise ValueError(
                    f"resume {a.turn} of agent {a.agent}: {a.choice} at {a.state} (resident, held) and {b.choice} at"
                    f" {b.state} are no replays of reload and recompute"
                )
            if a.state is not None:
                ways = seconds.setdefault(key, {"reload": [], "recompute": []})
                ways["reload"].append(a.ttft_s)
                ways["recompute"].append(b.ttft_s)
    return {key: {way: median(samples) for way, samples in ways.items()} for key, ways in seconds.items()}


def oracle(replayed: Replays, workload: Workload, rounds: int) -> Oracle:
    """The policy that knows the replays, for an arm of `measure` with as many rounds."""
    # Requests are numbered as they are made: the agents, then their branches of each round.
    return Oracle(
        {
            (workload.agents * (number + 1) + agent, turn): times
            for number in range(rounds)
            for (agent, turn), times in replayed.items()
        }
    )


@dataclass(frozen=True)
class Regret:
    """Mean seconds per resume lost to choices, and the mean of the faster whole way, both over all choices made."""

    lost_s: float
    best_s: float

    @property
    def share(self) -> float:
        """What the choices cost, relative to always choosing the faster way."""
        return self.lost_s / self.best_s


def regret(rounds: Rounds, replayed: Replays) -> Regret:
    """What the choices in `rounds` cost against the faster of both replayed ways, each choice priced by its replay.

    A split, which has no replay, costs the median over the rounds of what it took; a faster one makes up for nothing.
    Raises ValueError for a choice that was not replayed.
    """
    lost_s, best_s = [], []
    for same in zip(*rounds, strict=True):
        key = same[0].agent, same[0].turn
        split_s = [resume.ttft_s for resume in same if resume.choice == "split"]
        for choice in (resume.choice for resume in same if resume.choice is not None):
            if key not in replayed:
                raise ValueError(f"resume {key[1]} of agent {key[0]} was not replayed; its regret cannot be known")
            best_s.append(min(replayed[key].values()))
            took_s = median(split_s) if choice == "split" else replayed[key][choice]
            lost_s.append(max(0.0, took_s - best_s[-1]))
    if not best_s:
        raise ValueError("nothing was decided in these rounds: every resume found all of its blocks in the pool")
    return Regret(sum(lost_s) / len(lost_s), sum(best_s) / len(best_s))
