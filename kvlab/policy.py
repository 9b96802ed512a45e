"""Policies: what to do about the part of a prompt that lies in a tier. And which idle blocks to keep in the pool.

Small objects from a `Situation` to a `Decision`; `kvlab.policies` is this module. Arithmetic only: no torch, no clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal

from kvlab.arch import ModelArch
from kvlab.arithmetic import checked_arch, kv_bytes
from kvlab.machine import Machine
from kvlab.prefix import CachedBlock
from kvlab.storing import storing
from kvlab.verdict import Choice, Verdict, decide
from kvlab.waiting import delayed_requests

__all__ = [
    "LRU",
    "Calibrated",
    "CostAware",
    "Decision",
    "Eviction",
    "Option",
    "Oracle",
    "Policy",
    "Recompute",
    "Reload",
    "Score",
    "Scored",
    "Situation",
    "Threshold",
    "delayed_loads",
]

# The fastest tier that holds the block with this hash and salt, if any does.
Holder = Callable[[bytes, str], str | None]
# What a cache is worth, from its bytes, seconds to reload it, seconds to recompute it, and its chance of return.
Score = Callable[[int, float, float, float], float]


@dataclass(frozen=True)
class Option:
    """A tier that holds the prompt's whole blocks from the resident ones up to token `prefix`.

    `queued_bytes`: what the `queued_loads` that were asked for before still have to bring over the same link.
    `bytes_per_s`: what all loads have asked of it lately. `storing_bytes`: what stores still have to write before the
    blocks are there.
    """

    tier: str
    prefix: int
    queued_bytes: int = 0
    queued_loads: int = 0
    bytes_per_s: float = 0.0
    storing_bytes: int = 0


@dataclass(frozen=True)
class Situation:
    """What is known when a request is admitted. Tokens: [0, `resident`) are in the pool, [0, `prompt`) are wanted.

    `key` is (request id, turn). `active_decodes` wait while this request computes, and so do `waiting` requests for
    their turn; `ahead` are those that are served before it and have no first token yet, of which `loading` compute once
    their loads are over. `load`: the share of time that prefills take. `groups`: layer groups that load while the ones
    before them compute.
    """

    key: tuple[int, int]
    arch: ModelArch = field(repr=False)
    kv_dtype: str
    block_size: int
    prompt: int
    resident: int
    options: tuple[Option, ...]
    active_decodes: int = 0
    groups: int = 1
    waiting: int = 0
    ahead: int = 0
    loading: int = 0
    load: float = 0.0

    @property
    def delayed(self) -> float:
        """Others whom a second of this request's computing makes wait a second: now, or before the queue is empty.

        Those that are loading need the accelerator next, and find it taken.
        """
        return self.loading + delayed_requests(self.waiting, self.ahead + 1 + self.waiting, self.load)

    @property
    def longest(self) -> Option:
        """The option that brings most; among equals the first, which is the fastest tier."""
        return max(self.options, key=lambda option: option.prefix)


@dataclass
class Decision:
    """A choice with its inputs, its reason and both predicted times to first token (None: nobody predicted).

    [`start`, `stop`) are the tokens to load from `option` while those before `start` are computed; empty for recompute.
    Filled in at the first token: `actual_s` since `made_s`, and `estimated_regret_s`, by how much that exceeds what
    was predicted for the best other way (never below 0). It is an estimate: only replaying both ways measures regret.
    """

    situation: Situation
    choice: Choice
    reason: str
    option: Option | None = None
    start: int = 0
    stop: int = 0
    ttft_reload_s: float | None = None
    ttft_recompute_s: float | None = None
    ttft_split_s: float | None = None
    verdict: Verdict | None = field(default=None, repr=False)
    made_s: float = 0.0
    actual_s: float | None = None
    estimated_regret_s: float | None = None

    def check(self, situation: Situation, policy: str) -> None:
        """Raises ValueError naming `policy` where it would load what `situation` does not offer, or parts of blocks."""
        if self.option is None:
            return
        tier, size = self.option.tier, situation.block_size
        prefix = max((option.prefix for option in situation.options if option.tier == tier), default=0)
        if not situation.resident <= self.start < self.stop <= prefix or self.start % size or self.stop % size:
            raise ValueError(
                f"{policy} would load tokens [{self.start}, {self.stop}) from tier {tier!r}; expected whole blocks of"
                f" {size} tokens inside [{situation.resident}, {prefix}), which it holds"
            )

    def settle(self, now_s: float) -> None:
        """The first token came at `now_s`."""
        self.actual_s = now_s - self.made_s
        ways = {"reload": self.ttft_reload_s, "recompute": self.ttft_recompute_s, "split": self.ttft_split_s}
        others = [seconds for way, seconds in ways.items() if way != self.choice and seconds is not None]
        if others:
            self.estimated_regret_s = max(0.0, self.actual_s - min(others))


def _reload(situation: Situation, option: Option, reason: str) -> Decision:
    return Decision(situation, "reload", reason, option, situation.resident, option.prefix)


class Policy(ABC):
    """Asked once for each request that could load something."""

    @abstractmethod
    def decide(self, situation: Situation) -> Decision:
        """Reload, recompute or split; at least one option is given."""

    def check(self, tiers: Sequence[str]) -> None:  # noqa: B027  (most policies know nothing of tiers)
        """Raises ValueError when it cannot judge one of these tiers."""


@dataclass(frozen=True)
class Reload(Policy):
    """Always reload what can be had, as vLLM's connectors do."""

    def decide(self, situation: Situation) -> Decision:
        """Reload from the tier that brings most."""
        return _reload(situation, situation.longest, "reload: always")


@dataclass(frozen=True)
class Recompute(Policy):
    """Never reload."""

    def decide(self, situation: Situation) -> Decision:
        """Recompute."""
        return Decision(situation, "recompute", "recompute: always")


@dataclass(frozen=True)
class Threshold(Policy):
    """Reload from `tokens` tokens on, as SGLang, LMCache and llm-d have it: a constant for all machines and loads."""

    tokens: int

    def check(self, tiers: Sequence[str]) -> None:  # noqa: ARG002
        """Raises ValueError where `tokens` is no number."""
        if not isinstance(self.tokens, Real):
            raise ValueError(f"a Threshold's tokens are {self.tokens!r}; expected a number of them")

    def decide(self, situation: Situation) -> Decision:
        """Compare what a reload would bring with the threshold."""
        option = situation.longest
        brings = option.prefix - situation.resident
        if brings >= self.tokens:
            return _reload(situation, option, f"reload: {brings} tokens are at least {self.tokens}")
        return Decision(situation, "recompute", f"recompute: {brings} tokens are fewer than {self.tokens}")


@dataclass(frozen=True)
class Calibrated(Policy):
    """Predict every way on a measured machine, the link's queue included, and take the cheapest.

    What a second of delay to *one* other is worth, in seconds of this request's time: `decode_delay_value` to an active
    decode, `queue_delay_value` to a request that waits for its turn or for a link, or will: see `Situation.delayed` and
    `delayed_loads`. 0 counts this request alone; 1 aims at the least mean time to first token of all.
    Not `load_aware`: it judges as if nothing else went on, neither on the link nor on the accelerator.
    """

    machine: Machine
    decode_delay_value: float = 0.0
    allow_split: bool = True
    queue_delay_value: float = 0.0
    load_aware: bool = True

    def check(self, tiers: Sequence[str]) -> None:
        """Raises ValueError naming a tier to which the machine has no measured link, or what is no delay's value."""
        _check_links(self.machine, tiers)
        for name in ("decode_delay_value", "queue_delay_value"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0 <= float(value) < math.inf):
                raise ValueError(f"{name} is {value!r}; expected a finite number of at least 0")

    def decide(self, situation: Situation) -> Decision:
        """One verdict for each tier that holds something; the cheapest wins."""
        verdicts = [(self._verdict(situation, option), option) for option in situation.options]
        verdict, option = min(verdicts, key=lambda pair: _cost_s(pair[0]))
        split = verdict.split if verdict.choice == "split" else None
        start = situation.resident + (split.recompute_tokens if split else 0)
        recompute = verdict.choice == "recompute"
        return Decision(
            situation,
            verdict.choice,
            verdict.reason,
            option=None if recompute else option,
            start=0 if recompute else start,
            stop=0 if recompute else option.prefix,
            ttft_reload_s=verdict.ttft_reload_s,
            ttft_recompute_s=verdict.ttft_recompute_s,
            ttft_split_s=split.ttft_s if split else None,
            verdict=verdict,
        )

    def _verdict(self, situation: Situation, option: Option) -> Verdict:
        others = self.decode_delay_value * situation.active_decodes + self.queue_delay_value * situation.delayed
        loads = self.queue_delay_value * delayed_loads(self.machine, situation, option)
        return decide(
            situation.arch,
            self.machine,
            prefix=option.prefix,
            suffix=situation.prompt - option.prefix,
            tier=option.tier,
            kv_dtype=situation.kv_dtype,
            block_size=situation.block_size,
            queued_bytes=self._ahead_bytes(situation, option) if self.load_aware else 0,
            decode_delay_value=others if self.load_aware else 0.0,
            link_delay_value=loads if self.load_aware else 0.0,
            overlap_groups=situation.groups,
            allow_split=self.allow_split,
            resident=situation.resident,
        )

    def _ahead_bytes(self, situation: Situation, option: Option) -> int:
        """What the link would bring until the load begins: behind those before it, and behind the stores it needs."""
        links = self.machine.links.get(option.tier, {})
        if not option.storing_bytes or "store" not in links:
            return option.queued_bytes
        layers = len(situation.arch.layers)
        block_bytes = kv_bytes(situation.arch, situation.block_size, situation.kv_dtype)
        load, store = (
            link.rate_gb_per_s(link.copy_bytes(block_bytes, 1, layers)) for link in (links["load"], links["store"])
        )
        return max(option.queued_bytes, round(option.storing_bytes * load / store))


def delayed_loads(machine: Machine, situation: Situation, option: Option) -> float:
    """Others whose loads come a second later for each second that this one takes on the link: `delayed_requests`."""
    if not option.bytes_per_s:
        return 0.0
    tokens, arch = option.prefix - situation.resident, situation.arch
    size_bytes = kv_bytes(arch, tokens, situation.kv_dtype, 1, situation.block_size)
    took_s = machine.link(option.tier).transfer_s(size_bytes, tokens // situation.block_size, len(arch.layers))
    load = option.bytes_per_s * took_s / size_bytes
    return delayed_requests(situation.waiting, option.queued_loads + 1 + situation.waiting, load)


def _check_links(machine: Machine, tiers: Sequence[str], direction: Literal["load", "store"] = "load") -> None:
    """Raises ValueError for what is no machine, or has no measured link to one of these tiers."""
    if not isinstance(machine, Machine):
        raise ValueError(f"machine is {machine!r:.60}; expected a Machine: Machine.load(path)")
    for tier in tiers:
        machine.link(tier, direction)


def _cost_s(verdict: Verdict) -> float:
    if verdict.choice == "split" and verdict.split is not None:
        return verdict.split.cost_s
    return min(verdict.cost_reload_s, verdict.cost_recompute_s)


@dataclass(frozen=True)
class Oracle(Policy):
    """Knows how long each way takes, from replays of both: {(request id, turn): {choice: seconds}}."""

    replayed_s: Mapping[tuple[int, int], Mapping[Choice, float]]

    def decide(self, situation: Situation) -> Decision:
        """The way that took least. Raises KeyError for a resume that was not replayed."""
        if situation.key not in self.replayed_s:
            raise KeyError(
                f"request {situation.key[0]}, turn {situation.key[1]} was not replayed; an oracle cannot guess"
            )
        times = self.replayed_s[situation.key]
        reload_s, recompute_s = times["reload"], times["recompute"]
        why = f"replayed: reload {reload_s:g} s, recompute {recompute_s:g} s"
        if reload_s < recompute_s:
            decision = _reload(situation, situation.longest, why)
        else:
            decision = Decision(situation, "recompute", why)
        decision.ttft_reload_s, decision.ttft_recompute_s = reload_s, recompute_s
        return decision


class Eviction(ABC):
    """Which idle blocks the pool gives up first, and which of them are worth a place in a tier."""

    @abstractmethod
    def value(self, block: CachedBlock, now_s: float, holder: Holder) -> float:
        """What keeping a block is worth (any unit; the least goes first). `holder` names a tier that holds it too."""

    def worth_storing(self, start: int, stop: int, tier: str) -> bool:  # noqa: ARG002
        """Whether blocks [start, stop) (in tokens) of one prompt, which are to leave the pool, go to `tier`: always."""
        return True

    def check(self, tiers: Sequence[str]) -> None:  # noqa: B027  (most know nothing of tiers)
        """Raises ValueError when it cannot judge one of these tiers."""


@dataclass(frozen=True)
class LRU(Eviction):
    """The block that was asked for longest ago goes first."""

    def value(self, block: CachedBlock, now_s: float, holder: Holder) -> float:  # noqa: ARG002
        """When it was last used."""
        return block.used_s


@dataclass(frozen=True)
class CostAware(Eviction):
    """Seconds to get a block back ÷ seconds that it has been idle: a block that a fast tier holds, or that is cheap to
    compute because it stands early, goes before one that is dear. `arch`, `kv_dtype` and `block_size` as in the pool.

    With `return_chance`, the chance that a request comes back, what costs more to store than it can then save is
    dropped: see `storing`. It is judged run by run, as if what stands in front of the run were in the pool. None: all
    is stored, and the machine needs no store links.
    """

    machine: Machine
    arch: ModelArch
    kv_dtype: str
    block_size: int
    return_chance: float | None = None

    def check(self, tiers: Sequence[str]) -> None:
        """Raises ValueError naming a tier to which the machine has no measured link, in either direction if needed."""
        _check_links(self.machine, tiers)
        checked_arch(self.arch)
        if self.return_chance is not None:
            _check_links(self.machine, tiers, "store")

    def worth_storing(self, start: int, stop: int, tier: str) -> bool:
        """Whether the chance of return is above the break-even."""
        if self.return_chance is None:
            return True
        verdict = decide(
            self.arch,
            self.machine,
            prefix=min(stop, self.arch.max_positions - 1),  # whoever comes back brings a token at least
            suffix=1,
            tier=tier,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            resident=start,
        )
        return storing(verdict).worth_it(self.return_chance)

    def value(self, block: CachedBlock, now_s: float, holder: Holder) -> float:
        """Seconds to regain it per second idle."""
        back_s = self.machine.prefill_s(self.arch, block.position, block.position + self.block_size)
        tier = holder(block.block_hash, block.salt)
        if tier is not None:
            size_bytes = kv_bytes(self.arch, self.block_size, self.kv_dtype)
            back_s = min(back_s, self.machine.link(tier).transfer_s(size_bytes, 1, len(self.arch.layers)))
        return back_s / max(now_s - block.used_s, 1e-9)


@dataclass(frozen=True)
class Scored(Eviction):
    """Any `score` of the cache that ends with a block, all of it in front included: it comes back as a whole.

    `return_chance(block, seconds idle)` is what is known of its caller. What no tier holds yet would come back from
    `tier` (None: only by computing, a reload takes forever).
    """

    machine: Machine
    arch: ModelArch
    kv_dtype: str
    block_size: int
    score: Score
    return_chance: Callable[[CachedBlock, float], float]
    tier: str | None = None

    def check(self, tiers: Sequence[str]) -> None:
        """Raises ValueError naming a tier to which the machine has no measured link."""
        _check_links(self.machine, tiers)
        checked_arch(self.arch)

    def value(self, block: CachedBlock, now_s: float, holder: Holder) -> float:
        """The score."""
        tokens = block.position + self.block_size
        size_bytes = kv_bytes(self.arch, tokens, self.kv_dtype)
        tier = holder(block.block_hash, block.salt) or self.tier
        reload_s = math.inf
        if tier is not None:
            blocks = tokens // self.block_size
            reload_s = self.machine.link(tier).transfer_s(size_bytes, blocks, len(self.arch.layers))
        recompute_s = self.machine.prefill_s(self.arch, 0, tokens)
        return self.score(size_bytes, reload_s, recompute_s, self.return_chance(block, now_s - block.used_s))
