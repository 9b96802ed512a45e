"""Agents that pause for their tools, as plain data: who comes when with how much, and what arithmetic says about it.

Knows token counts and machines. Does not know engines, models or texts: `agents` plays it on a real engine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvlab.arch import ModelArch
from kvlab.blocks import blocks_for
from kvlab.machine import Machine
from kvlab.verdict import Choice, Verdict, decide

__all__ = ["Turn", "Workload", "agent_workload", "mixing_link", "predict", "ways_won"]

# Of the bandwidth at which the longest resume ties. The larger, the more the latency alone tells the lengths apart.
_TIMES_THE_TIE = 8


@dataclass(frozen=True)
class Turn:
    """After a pause of `gap_s`, `agent` goes on with `new_tokens` more: its first prompt, later a tool's output."""

    agent: int
    gap_s: float
    new_tokens: int


@dataclass(frozen=True)
class Workload:
    """Turns in the order in which they come: one start per agent, then the resumes.

    All agents share the first `preamble` tokens. Each turn generates `output_tokens`.
    """

    preamble: int
    turns: tuple[Turn, ...]
    output_tokens: int = 2

    @property
    def agents(self) -> int:
        """How many there are."""
        return len({turn.agent for turn in self.turns})

    @property
    def starts(self) -> tuple[Turn, ...]:
        """The first turn of each agent."""
        return self.turns[: self.agents]

    @property
    def resumes(self) -> tuple[Turn, ...]:
        """The turns that come back from a tool."""
        return self.turns[self.agents :]

    def prompts(self) -> Iterator[tuple[Turn, int, int]]:
        """Each resume with the tokens that its agent has already and those of its prompt."""
        has = {turn.agent: self.preamble + turn.new_tokens + self.output_tokens for turn in self.starts}
        for turn in self.resumes:
            prompt = has[turn.agent] + turn.new_tokens
            yield turn, has[turn.agent], prompt
            has[turn.agent] = prompt + self.output_tokens

    def tokens_needed(self, rounds: int) -> int:
        """The text that `rounds` rounds of resumes take, each with tool outputs of its own."""
        once = self.preamble + sum(turn.new_tokens for turn in self.starts)
        return once + rounds * sum(turn.new_tokens for turn in self.resumes)

    def pool_blocks(self, block_size: int, share: float = 1 / 3) -> int:
        """Blocks for the preamble and `share` of what the agents have of their own at the end; the longest turn fits.

        The preamble counts once: it is shared, and always in use.
        """
        last = {turn.agent: prompt + self.output_tokens - self.preamble for turn, _, prompt in self.prompts()}
        return blocks_for(self.preamble, block_size) + max(
            math.ceil(share * sum(blocks_for(own, block_size) for own in last.values())), self.turn_blocks(block_size)
        )

    def turn_blocks(self, block_size: int) -> int:
        """The most blocks that one turn needs besides the preamble's."""
        longest = max(prompt for _, _, prompt in self.prompts()) + self.output_tokens
        return blocks_for(longest, block_size) - self.preamble // block_size


def agent_workload(
    seed: int = 0,
    *,
    agents: int = 8,
    resumes: int = 24,
    preamble: int = 1024,
    own: tuple[int, int] = (12, 96),
    tool: tuple[int, int] = (2, 12),
    gap_s: tuple[float, float] = (1.0, 8.0),
) -> Workload:
    """`agents` with first prompts of even ratios from own[0] to own[1] tokens behind the preamble, in random order.

    They resume in turns, each after a random gap and with a random number of new tokens, both within the bounds.
    """
    rng = random.Random(seed)
    step = (own[1] / own[0]) ** (1 / max(1, agents - 1))
    firsts = [round(own[0] * step**place) for place in range(agents)]
    rng.shuffle(firsts)
    starts = [Turn(agent, 0.0, first) for agent, first in enumerate(firsts)]
    later = [Turn(i % agents, round(rng.uniform(*gap_s), 3), rng.randint(*tool)) for i in range(resumes)]
    return Workload(preamble, (*starts, *later))


# Predicting ----------------------------------------------------------------------------------------------------------


def predict(
    workload: Workload, arch: ModelArch, machine: Machine, tier: str, *, kv_dtype: str, block_size: int, groups: int
) -> list[Verdict]:
    """One verdict per resume, if the preamble's whole blocks are resident, and in `tier` all others that are whole."""
    return [
        decide(
            arch,
            machine,
            prefix=(prefix := (has - 1) // block_size * block_size),  # the last token generated was never computed
            suffix=prompt - prefix,
            tier=tier,
            kv_dtype=kv_dtype,
            block_size=block_size,
            overlap_groups=groups,
            resident=workload.preamble // block_size * block_size,
        )
        for _, has, prompt in workload.prompts()
    ]


def ways_won(verdicts: Sequence[Verdict]) -> dict[Choice, int]:
    """How many resumes each whole way is predicted to win."""
    reload = sum(verdict.choice == "reload" for verdict in verdicts)
    return {"reload": reload, "recompute": len(verdicts) - reload}


def mixing_link(
    workload: Workload, arch: ModelArch, machine: Machine, *, kv_dtype: str, block_size: int, groups: int
) -> tuple[float, float]:
    """(GB/s, latency in seconds) of a link in front of host RAM with which each way wins half of the resumes.

    It carries the longest resume's bytes eight times as fast as ties, as a data centre's network may; the latency, like
    an object store's, then costs the shorter half of the resumes more than that saves.
    Raises ValueError where even without latency reload wins less than a third.
    """

    def at(gb_per_s: float, latency_s: float) -> list[Verdict]:
        behind = machine.with_link("link", machine.link("host").behind(gb_per_s, latency_s))
        return predict(workload, arch, behind, "link", kv_dtype=kv_dtype, block_size=block_size, groups=groups)

    host = predict(workload, arch, machine, "host", kv_dtype=kv_dtype, block_size=block_size, groups=groups)
    longest = max(host, key=lambda verdict: verdict.reload_tokens)
    gb_per_s = _TIMES_THE_TIE * longest.break_even_gb_per_s
    if not math.isfinite(gb_per_s) or 3 * ways_won(at(gb_per_s, 0.0))["reload"] < len(host):
        raise ValueError(
            f"no link in front of host RAM makes reload win a third of these {len(host)} resumes of {arch.name};"
            " give the agents longer prompts of their own"
        )
    low, high = 0.0, max(verdict.ttft_recompute_s for verdict in host)
    for _ in range(40):
        middle = (low + high) / 2
        wins = ways_won(at(gb_per_s, middle))
        low, high = (middle, high) if wins["reload"] > wins["recompute"] else (low, middle)
    return float(f"{gb_per_s:.3g}"), high
