"""Policies under judgement: what each choice costs by the true machine, and the oracle that knows that beforehand.

An oracle here knows true rates and true queues when it decides, and takes the way that costs least at that moment: its
own time to first token, and the delay of those who wait while it occupies the accelerator. It does not know who will
come next, so that another policy can do better over a whole trace. Regret is what another policy's choice costs beyond
that, so an oracle has none.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvlab.machine import Decode, Link, Machine
from kvlab.pipeline import hidden_s
from kvlab.policy import Calibrated, Decision, Option, Policy, Recompute, Reload, Situation, Threshold, delayed_loads
from kvlab.simulate.executor import BillingExecutor

__all__ = ["POLICIES", "Judge", "Oracle", "drawn_away", "make_policy"]

# SGLang's prefetch_threshold, the same order as the fixed thresholds of LMCache and llm-d (see `kvlab.settings`).
THRESHOLD_TOKENS = 256

# Mean time to first token is what policies are judged by: a second that another waits counts like one's own.
QUEUE_DELAY_VALUE = 1.0

POLICIES = ("reload", "recompute", "threshold", "idle-blind", "calibrated", "oracle")


def drawn_away(machine: Machine, share: float, seed: int) -> Machine:
    """A machine whose every rate is another one: each curve and each overhead times a factor in 1 ± `share`.

    What a policy believes is then wrong, as calibrations are. Raises ValueError for a share out of [0, 1).
    """
    if not 0 <= share < 1:
        raise ValueError(f"the truth is to differ by a share of {share:g}; expected 0 to below 1, as in 20%")
    draw = random.Random(seed)

    def factor() -> float:
        return draw.uniform(1 - share, 1 + share)

    def other(link: Link) -> Link:
        return replace(
            link,
            gb_per_s=link.gb_per_s.scaled(factor()),
            per_request_s=link.per_request_s * factor(),
            per_block_s=link.per_block_s * factor(),
            per_copy_s=link.per_copy_s * factor(),
        )

    prefill = replace(
        machine.prefill,
        per_chunk_s=machine.prefill.per_chunk_s * factor(),
        linear_flops_per_s=machine.prefill.linear_flops_per_s.scaled(factor()),
        attention_flops_per_s=machine.prefill.attention_flops_per_s.scaled(factor()),
    )
    decode, slower = machine.decode, factor()
    if decode is not None:
        parts = (decode.per_pass_s, decode.per_row_s, decode.per_token_s)
        decode = Decode(*(part * slower for part in parts))
    links = {
        tier: {direction: other(link) for direction, link in directions.items()}
        for tier, directions in machine.links.items()
    }
    return replace(machine, prefill=prefill, decode=decode, links=links)


def make_policy(name: str, believed: Machine) -> Policy | None:
    """The policy of a name; "threshold:1024" with its tokens. None: the oracle, which belongs to an executor.

    Raises ValueError naming the known ones.
    """
    kind, _, tokens = name.partition(":")
    if kind == "threshold" and (not tokens or (tokens.isdecimal() and int(tokens))):
        return Threshold(int(tokens or THRESHOLD_TOKENS))
    made: dict[str, Policy | None] = {
        "reload": Reload(),
        "recompute": Recompute(),
        "idle-blind": Calibrated(believed, load_aware=False),
        "calibrated": Calibrated(believed, queue_delay_value=QUEUE_DELAY_VALUE),
        "oracle": None,
    }
    if name not in made:
        raise ValueError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}, all, and threshold:TOKENS")
    return made[name]


@dataclass(frozen=True)
class Oracle(Policy):
    """The least costly way by the executor's own machine and clocks."""

    executor: BillingExecutor

    def decide(self, situation: Situation) -> Decision:
        """The way that costs least now."""
        truth = replace(situation, options=tuple(self._truly(situation, option) for option in situation.options))
        return Calibrated(self.executor.machine, queue_delay_value=QUEUE_DELAY_VALUE).decide(truth)

    def _truly(self, situation: Situation, option: Option) -> Option:
        """The option with the true queue of its link, in bytes."""
        clock = self.executor.billed_tiers[option.tier].load_clock
        blocks = (option.prefix - situation.resident) // situation.block_size
        copy_bytes = clock.link.copy_bytes(self.executor.bytes_of(blocks), blocks, clock.layers)
        rate_gb_per_s = clock.link.rate_gb_per_s(copy_bytes)
        return replace(option, queued_bytes=round(self._wait_s(option) * rate_gb_per_s * 1e9))

    def _wait_s(self, option: Option) -> float:
        """Until a load can begin: behind those before it, and behind the stores that it needs."""
        tier = self.executor.billed_tiers[option.tier]
        store = tier.store_clock
        rate_gb_per_s = store.link.rate_gb_per_s(store.link.copy_bytes(self.executor.block_bytes, 1, store.layers))
        return max(tier.load_clock.wait_s(self.executor.clock_s), option.storing_bytes / (rate_gb_per_s * 1e9))

    def cost_s(self, decision: Decision) -> float:
        """What any choice truly costs: its time to first token, and its delay to those who wait or come soon."""
        executor, situation = self.executor, decision.situation
        machine, arch = executor.machine, executor.arch
        delayed = QUEUE_DELAY_VALUE * situation.delayed
        if decision.option is None:
            return machine.prefill_s(arch, situation.resident, situation.prompt) * (1 + delayed)
        clock = executor.billed_tiers[decision.option.tier].load_clock
        blocks = (decision.stop - decision.start) // situation.block_size
        load_s = clock.link.transfer_s(executor.bytes_of(blocks), blocks, clock.layers)
        wait_s = self._wait_s(decision.option)
        head_s = machine.prefill_s(arch, situation.resident, decision.start)
        rest_s = machine.prefill_s(arch, decision.stop, situation.prompt)
        if head_s:
            ttft_s = max(wait_s + load_s, head_s) + rest_s
        else:  # layer groups load while those before them compute, once the request's own seconds are over
            streamed_s = load_s - clock.link.per_request_s
            ttft_s = wait_s + load_s + rest_s - hidden_s(streamed_s, rest_s, executor.layer_bounds)
        loads = QUEUE_DELAY_VALUE * delayed_loads(machine, situation, decision.option)
        return ttft_s + delayed * (head_s + rest_s + clock.link.decode_slowdown * load_s) + loads * load_s


@dataclass
class Judge(Policy):
    """Lets `policy` decide, and sums up by reason what its choices cost beyond the oracle's."""

    policy: Policy
    oracle: Oracle
    regret_s: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)

    def check(self, tiers: Sequence[str]) -> None:
        """Whatever the judged policy says."""
        self.policy.check(tiers)

    def decide(self, situation: Situation) -> Decision:
        """The judged policy's decision."""
        decision = self.policy.decide(situation)
        self.reasons[_reason(decision)] += 1
        if self.policy is not self.oracle:
            best = self.oracle.decide(situation)
            self.regret_s += max(0.0, self.oracle.cost_s(decision) - self.oracle.cost_s(best))
        return decision


def _reason(decision: Decision) -> str:
    """The decision and what tipped it, in words that repeat."""
    way = decision.choice if decision.option is None else f"{decision.choice} from {decision.option.tier}"
    verdict = decision.verdict
    if verdict is None:
        return way
    if decision.choice == "split":
        return f"{way}: each hides the other"
    faster = "reload" if verdict.ttft_reload_s < verdict.ttft_recompute_s else "recompute"
    if faster != decision.choice:
        return f"{way}: for those who wait"
    if decision.choice == "recompute" and verdict.ttft_reload_s - verdict.wait_s < verdict.ttft_recompute_s:
        return f"{way}: the link is busy"
    return f"{way}: {'too close to call' if verdict.too_close else 'clearly faster'}"
