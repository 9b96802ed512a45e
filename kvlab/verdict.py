"""Reload or recompute: both times to first token, which is smaller, and where the answer flips.

Arithmetic on a `ModelArch` and a `Machine`. Does not know requests, queues' contents, or how a copy is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, kv_bytes, linear_flops
from kvlab.machine import Machine
from kvlab.prefix import reloadable_tokens
from kvlab.units import format_bytes, format_gb_per_s, format_s

__all__ = [
    "Choice",
    "Crossing",
    "Split",
    "Verdict",
    "crossings_of",
    "decide",
    "interpolated_crossover",
    "settled_crossover",
]

Choice = Literal["reload", "recompute", "split"]

# How far flips are looked for in models that state no longest sequence.
HORIZON_TOKENS = 2**20


@dataclass(frozen=True)
class Crossing:
    """The winner changes at `tokens`: from there up (to the next crossing) it is `winner_above`."""

    tokens: int
    winner_above: Choice


@dataclass(frozen=True)
class Split:
    """Recompute the head [0, `recompute_tokens`) while the tail of the prefix loads.

    `cost_s` adds to `ttft_s` the delay inflicted on others, as the verdict's other costs do.
    """

    recompute_tokens: int
    reload_tokens: int
    ttft_s: float
    cost_s: float


def crossings_of(tokens: Sequence[int], reload_s: Sequence[float], recompute_s: Sequence[float]) -> list[Crossing]:
    """Every change of the winner along `tokens` (increasing), reported at the first length where the new one wins.

    A tie counts for recompute: it moves no bytes. Works on predicted and on measured times alike.
    """
    wins = [a < b for a, b in zip(reload_s, recompute_s, strict=True)]
    return [
        Crossing(tokens[i], "reload" if wins[i] else "recompute") for i in range(1, len(wins)) if wins[i] != wins[i - 1]
    ]


def interpolated_crossover(
    tokens: Sequence[int], reload_s: Sequence[float], recompute_s: Sequence[float]
) -> float | None:
    """The length from which reload wins for good, interpolated between lengths; 0: always; None: never.

    Between two lengths both times are taken as power laws (straight in log-log, as such curves nearly are): a straight
    line through a wide gap would be biased towards its short end, since recompute bends upwards.
    """
    at = settled_crossover(tokens, reload_s, recompute_s)
    if not at:
        return at
    above = tokens.index(at)
    # log(reload ÷ recompute): at first >= 0 (recompute wins or ties), then < 0.
    before, after = (math.log(reload_s[i] / recompute_s[i]) for i in (above - 1, above))
    return float(tokens[above - 1] * (at / tokens[above - 1]) ** (before / (before - after)))


def settled_crossover(tokens: Sequence[int], reload_s: Sequence[float], recompute_s: Sequence[float]) -> int | None:
    """The smallest of `tokens` from which reload wins at every longer one; 0: at all of them; None: not at the last."""
    wins = [a < b for a, b in zip(reload_s, recompute_s, strict=True)]
    if not wins or not wins[-1]:
        return None
    losses = [i for i, win in enumerate(wins) if not win]
    return tokens[losses[-1] + 1] if losses else 0


@dataclass(frozen=True)
class Verdict:
    """What `decide` answers. The times are computed at once; crossings, split and explanation when asked for.

    `ttft_reload_s` = wait + reload of the prefix's whole blocks + prefill of the rest; `ttft_recompute_s` = prefill of
    everything. `cost_*_s` adds the delay each way inflicts on active decodes, and on those who load after it, times its
    value; `choice` compares costs.
    """

    arch: ModelArch
    machine: Machine
    prefix: int
    suffix: int
    tier: str
    tp: int
    kv_dtype: str | None
    block_size: int
    queued_bytes: int
    link_share: float
    decode_delay_value: float
    overlap_groups: int
    choice: Choice
    ttft_reload_s: float
    ttft_recompute_s: float
    cost_reload_s: float
    cost_recompute_s: float
    spread_s: float
    wait_s: float
    reload_s: float
    suffix_s: float
    kv_bytes: int
    resident: int = 0
    link_delay_value: float = 0.0

    @property
    def too_close(self) -> bool:
        """Whether the two costs differ by less than the spread of the measurements behind them."""
        return abs(self.cost_reload_s - self.cost_recompute_s) < self.spread_s

    @property
    def reload_tokens(self) -> int:
        """Tokens that a reload brings: the prefix's whole blocks that are not resident, and never the last token."""
        return max(0, reloadable_tokens(self.prefix, self.prefix + self.suffix, self.block_size) - self.resident)

    @cached_property
    def _scan(self) -> tuple[list[int], list[float], list[float]]:
        # Exact over whole blocks by looking at each: the curves are measured, so no root formula can be trusted.
        most = (min(self.arch.max_positions, HORIZON_TOKENS) - self.suffix) // self.block_size
        tokens = [k * self.block_size for k in range(1, most + 1)]
        verdicts = [self._at(prefix) for prefix in tokens]
        return tokens, [v.cost_reload_s for v in verdicts], [v.cost_recompute_s for v in verdicts]

    def _at(self, prefix: int) -> Verdict:
        return decide(
            self.arch,
            self.machine,
            prefix=prefix,
            suffix=self.suffix,
            tier=self.tier,
            tp=self.tp,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
            queued_bytes=self.queued_bytes,
            link_share=self.link_share,
            decode_delay_value=self.decode_delay_value,
            link_delay_value=self.link_delay_value,
            overlap_groups=self.overlap_groups,
            resident=min(self.resident, prefix),
        )

    @cached_property
    def crossings(self) -> list[Crossing]:
        """Every sign change over whole blocks up to the model's positions: none, one or several."""
        return crossings_of(*self._scan)

    @cached_property
    def crossover_tokens(self) -> int | None:
        """The smallest prefix (whole blocks) from which reload always wins; 0: always; None: never."""
        return settled_crossover(*self._scan)

    @cached_property
    def break_even_gb_per_s(self) -> float:
        """The link speed in GB/s at which the two times tie; inf when overheads alone already lose."""
        link = self.machine.link(self.tier)
        blocks = self.reload_tokens // self.block_size
        if blocks == 0:
            return math.inf
        copy_bytes = link.copy_bytes(self.kv_bytes, blocks, len(self.arch.layers))
        overhead_s = link.overhead_s(self.kv_bytes, blocks, copy_bytes)
        slack_s = self.ttft_recompute_s - self.suffix_s
        shown = 1 / self.overlap_groups  # the share of the shorter of loading and computing that is not hidden
        # Loading longer than the suffix: all of it is seen, and 1 - shown of the suffix's compute is hidden.
        speed = _speed(self.kv_bytes + self.queued_bytes, slack_s + (1 - shown) * self.suffix_s - overhead_s)
        ahead_s = link.per_request_s  # before the first group comes
        if shown < 1 and overhead_s - ahead_s + self.kv_bytes / (speed * 1e9) < self.suffix_s:
            overhead_s = ahead_s + (overhead_s - ahead_s) * shown
            speed = _speed(self.kv_bytes * shown + self.queued_bytes, slack_s - overhead_s)
        return speed * min(self.tp, link.ranks_per_link) / self.link_share

    @cached_property
    def split(self) -> Split | None:
        """The best head/tail split, or None where it does not beat both whole ways (or fewer than two blocks exist).

        Models with recurrent states have none: a state is reloaded whole, and then its head needs no computing.
        """
        if any(component.fixed_elements for component, _ in self.arch.cache_groups):
            return None
        size, total = self.block_size, self.prefix + self.suffix
        blocks = self.reload_tokens // size
        link, layers = self.machine.link(self.tier), len(self.arch.layers)

        def load_s(head: int) -> float:
            # The tail's own bytes, not a difference: a full window is loaded whole, however short the head.
            tail_bytes = kv_bytes(self.arch, (blocks - head) * size, self.kv_dtype, self.tp, size)
            return self.wait_s + link.transfer_s(tail_bytes, blocks - head, layers, self.link_share, self.tp)

        def compute_s(head: int) -> float:
            return self.machine.prefill_s(self.arch, self.resident, self.resident + head * size, self.tp)

        # Loading falls and computing rises with the head, so the best split is on one side of where they cross.
        low, high = 0, blocks
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if compute_s(middle) >= load_s(middle) else (middle + 1, high)
        rest_s = self.machine.prefill_s(self.arch, self.resident + blocks * size, total, self.tp)
        best: Split | None = None
        for head in (low - 1, low):
            if 0 < head < blocks:
                ttft_s = max(load_s(head), compute_s(head)) + rest_s
                loading_s = load_s(head) - self.wait_s
                delay_s = compute_s(head) + rest_s + link.decode_slowdown * loading_s
                cost_s = ttft_s + self.decode_delay_value * delay_s + self.link_delay_value * loading_s
                if best is None or cost_s < best.cost_s:
                    best = Split(head * size, (blocks - head) * size, ttft_s, cost_s)
        if best is None or best.cost_s >= min(self.cost_reload_s, self.cost_recompute_s):
            return None
        return best

    @property
    def reason(self) -> str:
        """One sentence: what won, by how much, and why."""
        if self.reload_tokens == 0:
            return f"recompute: a prefix of {self.prefix} tokens has no whole block of {self.block_size} to reload"
        faster, slower = sorted((self.cost_reload_s, self.cost_recompute_s))
        loser = "recompute" if self.choice == "reload" else "reload"
        close = "; too close to call within the measured spread" if self.too_close else ""
        return f"{self.choice}: {format_s(faster)} against {format_s(slower)} for {loser}{close}"

    def explain(self) -> str:
        """The arithmetic, line by line with units, so that it can be checked by hand."""
        link, total = self.machine.link(self.tier), self.prefix + self.suffix
        kept, prefill = self.reload_tokens, self.machine.prefill
        blocks = kept // self.block_size
        ranks = f" on each of {self.tp} ranks" if self.tp > 1 else ""
        lines = [
            f"{self.arch.name} on {self.machine.name}: prefix {self.prefix} + suffix {self.suffix} tokens,"
            f" tier {self.tier}"
        ]
        if self.machine.extrapolated(self.arch):
            lines.append(f"(extrapolated: the prefill rates were measured on {prefill.calibrated_on})")
        if blocks:
            copy_bytes = link.copy_bytes(self.kv_bytes, blocks, len(self.arch.layers))
            rate = link.rate_gb_per_s(copy_bytes, self.link_share, self.tp)
            lines += [
                f"reload   {kept} tokens = {blocks} blocks of {self.block_size} = {format_bytes(self.kv_bytes)}{ranks}",
                f"  wait      {self.queued_bytes} B queued ahead ÷ {format_gb_per_s(rate)} = {format_s(self.wait_s)}",
                f"  software  {format_s(link.per_request_s)} per request"
                f" + {blocks} × {format_s(link.per_block_s)} per block"
                f" + {math.ceil(self.kv_bytes / copy_bytes)} × {format_s(link.per_copy_s)} per copy"
                f" = {format_s(link.overhead_s(self.kv_bytes, blocks, copy_bytes))}",
                f"  bytes     {self.kv_bytes} B ÷ {format_gb_per_s(rate)} in copies of {format_bytes(copy_bytes)}"
                f" = {format_s(self.kv_bytes / (rate * 1e9))}",
            ]
        lines += [
            *self._prefill_lines("prefill ", self.resident + kept, total),
            *self._overlap_lines(),
            f"  time to first token by reload    {format_s(self.ttft_reload_s)}",
            *self._prefill_lines("recompute", self.resident, total),
            f"  time to first token by recompute {format_s(self.ttft_recompute_s)}",
        ]
        if self.decode_delay_value or self.link_delay_value:
            lines.append(
                f"delay to others, valued {self.decode_delay_value:g} s per s of computing and"
                f" {self.link_delay_value:g} s per s of the link: reload costs"
                f" {format_s(self.cost_reload_s)}, recompute costs {format_s(self.cost_recompute_s)}"
            )
        lines += [
            f"the two tie at a link of {format_gb_per_s(self.break_even_gb_per_s)}",
            f"spread of the difference {format_s(self.spread_s)}",
            self.reason,
        ]
        return "\n".join(lines)

    def _overlap_lines(self) -> list[str]:
        hidden_s = self.wait_s + self.reload_s + self.suffix_s - self.ttft_reload_s
        if self.overlap_groups == 1:
            return []
        return [f"  overlap   in {self.overlap_groups} layer groups hides {format_s(hidden_s)}"]

    def _prefill_lines(self, title: str, start: int, stop: int) -> list[str]:
        prefill, rows = self.machine.prefill, stop - start
        chunks = 1 if prefill.chunk_tokens is None else math.ceil(rows / prefill.chunk_tokens)
        step = min(rows, prefill.chunk_tokens or rows)
        return [
            f"{title} positions {start} to {stop}: {chunks} × {format_s(prefill.per_chunk_s)} fixed"
            f" + {linear_flops(self.arch, rows) / 1e9:.4g} linear GFLOP ÷"
            f" {prefill.linear_flops_per_s(step) / 1e9:.4g} GFLOP/s"
            f" + {attention_flops(self.arch, start, stop) / 1e9:.4g} attention GFLOP ÷"
            f" {prefill.attention_flops_per_s(step) / 1e9:.4g} GFLOP/s"
            f" + {2 * self.arch.head_macs / 1e9:.4g} head GFLOP ÷ {prefill.linear_flops_per_s(1) / 1e9:.4g} GFLOP/s"
            f" = {format_s(self.machine.prefill_s(self.arch, start, stop, self.tp))}"
        ]


def _speed(total_bytes: float, seconds: float) -> float:
    """GB/s that move `total_bytes` in `seconds`; inf when no time is left."""
    return total_bytes / seconds / 1e9 if seconds > 0 else math.inf


def decide(
    arch: ModelArch,
    machine: Machine,
    *,
    prefix: int,
    suffix: int,
    tier: str = "host",
    tp: int = 1,
    kv_dtype: str | None = None,
    block_size: int = 16,
    queued_bytes: int = 0,
    link_share: float = 1.0,
    decode_delay_value: float = 0.0,
    link_delay_value: float = 0.0,
    overlap_groups: int = 1,
    allow_split: bool = False,
    resident: int = 0,
) -> Verdict:
    """Reload the cached `prefix` from `tier`, or compute it again? Times are time to first token, suffix included.

    `queued_bytes` are ahead on the link; `link_share` (0, 1] is what other traffic leaves. `decode_delay_value` is
    what one second of delay to the active decodes is worth, in seconds of this request's time: recompute delays them
    for the whole prefill, a reload for the suffix's prefill and for `decode_slowdown` of the copy. `link_delay_value`:
    what a second for which the copy keeps the link is worth, to those who load after it. With `allow_split`
    the choice may be "split". With `overlap_groups` layer groups the suffix computes group i while group i + 1 arrives.
    `resident` tokens of the prefix (whole blocks) are in the pool already: neither way pays for them.
    Raises ValueError for values out of range and for a tier the machine does not know.
    """
    if prefix < 0 or suffix < 0 or prefix + suffix < 1:
        raise ValueError(f"prefix {prefix} and suffix {suffix} must be at least 0 and sum to at least 1 token")
    if prefix + suffix > arch.max_positions:
        raise ValueError(
            f"prefix {prefix} + suffix {suffix} is beyond the {arch.max_positions} positions of {arch.name}"
        )
    if (
        block_size < 1
        or tp < 1
        or overlap_groups < 1
        or queued_bytes < 0
        or not 0 < link_share <= 1
        or decode_delay_value < 0
        or link_delay_value < 0
        or not 0 <= resident <= prefix
        or resident % block_size
    ):
        raise ValueError(
            f"block_size {block_size}, tp {tp}, overlap_groups {overlap_groups} must be at least 1;"
            f" queued_bytes {queued_bytes}, decode_delay_value {decode_delay_value}, link_delay_value"
            f" {link_delay_value} at least 0;"
            f" link_share {link_share} in (0, 1]; resident {resident} whole blocks of the prefix"
        )
    link, total = machine.link(tier), prefix + suffix
    kept = max(resident, reloadable_tokens(prefix, total, block_size))
    blocks, layers = (kept - resident) // block_size, len(arch.layers)
    size_bytes = kv_bytes(arch, kept - resident, kv_dtype, tp, block_size)
    reload_s = link.transfer_s(size_bytes, blocks, layers, link_share, tp)
    wait_s = 0.0
    if queued_bytes and blocks:
        wait_s = queued_bytes / (link.rate_gb_per_s(link.copy_bytes(size_bytes, blocks, layers), link_share, tp) * 1e9)
    suffix_s = machine.prefill_s(arch, kept, total, tp)
    recompute_s = machine.prefill_s(arch, resident, total, tp)
    # Equal groups in a pipeline: whichever of loading and computing is longer runs through, the other shows one group.
    # What a request pays once (a link's latency) is over before the first group comes: nothing computes meanwhile.
    hidden_s = (1 - 1 / overlap_groups) * min(max(0.0, reload_s - link.per_request_s), suffix_s)
    ttft_reload_s = wait_s + reload_s + suffix_s - hidden_s
    cost_reload_s = ttft_reload_s + decode_delay_value * (suffix_s + link.decode_slowdown * reload_s)
    cost_reload_s += link_delay_value * reload_s
    cost_recompute_s = recompute_s + decode_delay_value * recompute_s
    # The suffix's prefill is in both arms; only what differs between them adds to the spread of the difference.
    spread_s = math.hypot(link.spread * reload_s, machine.prefill.spread * (recompute_s - suffix_s))
    verdict = Verdict(
        arch=arch,
        machine=machine,
        prefix=prefix,
        suffix=suffix,
        tier=tier,
        tp=tp,
        kv_dtype=kv_dtype,
        block_size=block_size,
        queued_bytes=queued_bytes,
        link_share=link_share,
        decode_delay_value=decode_delay_value,
        overlap_groups=overlap_groups,
        choice="reload" if blocks and cost_reload_s < cost_recompute_s else "recompute",
        ttft_reload_s=ttft_reload_s,
        ttft_recompute_s=recompute_s,
        cost_reload_s=cost_reload_s,
        cost_recompute_s=cost_recompute_s,
        spread_s=spread_s,
        wait_s=wait_s,
        reload_s=reload_s,
        suffix_s=suffix_s,
        kv_bytes=size_bytes,
        resident=resident,
        link_delay_value=link_delay_value,
    )
    if allow_split and verdict.split is not None:
        return replace(verdict, choice="split")
    return verdict
