"""Reload or recompute: both times to first token, which is smaller, and where the answer flips.

Arithmetic on a `ModelArch` and a `Machine`. Does not know requests, queues' contents, or how a copy is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from kvlab.arch import ModelArch
from kvlab.arithmetic import checked_arch, checked_count, kv_bytes, kv_dtype_for
from kvlab.crossings import Crossing, crossings_of, settled_crossover
from kvlab.machine import Machine
from kvlab.pipeline import hidden_s, layer_bounds
from kvlab.prefix import reloadable_tokens
from kvlab.split import Split, best_split
from kvlab.units import format_bytes, format_gb_per_s, format_s

__all__ = ["Choice", "Verdict", "decide"]

Choice = Literal["reload", "recompute", "split"]

# How far flips are looked for in models that state no longest sequence.
HORIZON_TOKENS = 2**20


@dataclass(frozen=True)
class Verdict:
    """What `decide` answers. The times are computed at once; crossings, split and explanation when asked for.

    `ttft_reload_s` = wait + reload of the prefix's whole blocks + prefill of the rest; `ttft_recompute_s` = prefill of
    everything. `cost_*_s` adds the delay each way inflicts on active decodes, and on those who load after it, times its
    value; `choice` compares costs.
    """

    arch: ModelArch = field(repr=False)
    machine: Machine = field(repr=False)
    prefix: int
    suffix: int
    tier: str
    tp: int
    kv_dtype: str
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
    wait_s: float
    reload_s: float
    suffix_s: float
    kv_bytes: int
    resident: int = 0
    link_delay_value: float = 0.0

    @property
    def spread_s(self) -> float:
        """One standard deviation of the difference between the choice and the best other way."""
        # Only what the two do not share adds to it; the suffix's prefill is in every way.
        load_s, prefill_s = self.reload_s, self.ttft_recompute_s - self.suffix_s
        if self.choice == "split" and (split := self.split):
            tail_s = split.load_s - self.wait_s
            if self.cost_reload_s < self.cost_recompute_s:
                load_s, prefill_s = load_s - tail_s, split.compute_s
            else:
                load_s, prefill_s = tail_s, prefill_s - split.compute_s
        return math.hypot(self.machine.link(self.tier).spread * load_s, self.machine.prefill.spread * prefill_s)

    @property
    def too_close(self) -> bool:
        """Whether the choice and the best other way differ by less than the spread of the measurements behind them."""
        if self.choice == "split" and (split := self.split):
            return min(self.cost_reload_s, self.cost_recompute_s) - split.cost_s < self.spread_s
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
            # What of it is left to this prefix: its last token is computed where there is no suffix.
            resident=min(self.resident, reloadable_tokens(prefix, prefix + self.suffix, self.block_size)),
        )

    @cached_property
    def crossings(self) -> list[Crossing]:
        """Every sign change over whole blocks up to the model's positions: none, one or several."""
        return crossings_of(*self._scan)

    @cached_property
    def crossover_tokens(self) -> int | None:
        """The smallest prefix (whole blocks) from which reload always wins; 0: always; None: never."""
        return settled_crossover(*self._scan)

    @property
    def layer_bounds(self) -> tuple[int, ...]:
        """Where each layer group of the load ends: see `pipeline.layer_bounds`."""
        return _layer_bounds(self.arch, self.overlap_groups)

    @cached_property
    def break_even_gb_per_s(self) -> float:
        """The link speed in GB/s at which the two times tie; inf when overheads alone already lose."""
        link = self.machine.link(self.tier)
        blocks = self.reload_tokens // self.block_size
        if blocks == 0:
            return math.inf
        layers, ahead_s = len(self.arch.layers), link.per_request_s  # before the first group comes
        overhead_s = link.overhead_s(self.kv_bytes, blocks, layers) - ahead_s
        speed = 0.0
        # The group without a gap on either side: behind the load up to its end comes the computing of it and the rest.
        for start, stop in pairwise((0, *self.layer_bounds)):
            left_s = self.ttft_recompute_s - self.suffix_s * (1 - start / layers) - ahead_s - overhead_s * stop / layers
            speed = max(speed, _speed(self.kv_bytes * stop / layers + self.queued_bytes, left_s))
        return speed * min(self.tp, link.ranks_per_link) / self.link_share

    @cached_property
    def split(self) -> Split | None:
        """The head/tail split of least cost, or None where it does not beat both whole ways (or has under 2 blocks).

        Models with recurrent states have none: a state is reloaded whole, and then its head needs no computing.
        """
        size, total = self.block_size, self.prefix + self.suffix
        blocks = self.reload_tokens // size
        if blocks < 2 or any(component.fixed_elements for component, _ in self.arch.cache_groups):
            return None
        link, layers = self.machine.link(self.tier), len(self.arch.layers)

        def load_s(head: int) -> float:
            # The tail's own bytes, not a difference: a full window is loaded whole, however short the head.
            tail_bytes = kv_bytes(self.arch, (blocks - head) * size, self.kv_dtype, self.tp, size)
            return self.wait_s + link.transfer_s(tail_bytes, blocks - head, layers, self.link_share, self.tp)

        def compute_s(head: int) -> float:
            return self.machine.prefill_s(self.arch, self.resident, self.resident + head * size, self.tp)

        rest_s = self.machine.prefill_s(self.arch, self.resident + blocks * size, total, self.tp)

        def split(head: int) -> Split:
            tail_s, head_s = load_s(head), compute_s(head)
            ttft_s, loading_s = max(tail_s, head_s) + rest_s, tail_s - self.wait_s
            delay_s = head_s + rest_s + link.decode_slowdown * loading_s
            cost_s = ttft_s + self.decode_delay_value * delay_s + self.link_delay_value * loading_s
            return Split(head * size, (blocks - head) * size, ttft_s, cost_s, tail_s, head_s)

        best = best_split(split, blocks, delays_cost=self.decode_delay_value > 0 or self.link_delay_value > 0)
        return best if best.cost_s < min(self.cost_reload_s, self.cost_recompute_s) else None

    @property
    def reason(self) -> str:
        """One sentence: what won, by how much, and why."""
        if self.reload_tokens == 0:
            behind = f" behind the {self.resident} resident ones" if self.resident else ""
            last = " before the last token, which is always computed" if not self.suffix else ""
            return (
                f"recompute: a prefix of {self.prefix} tokens has no whole block of {self.block_size} to reload"
                f"{behind}{last}"
            )
        close = "; too close to call within the measured spread" if self.too_close else ""
        if self.choice == "split" and (split := self.split):
            return (
                f"split: {format_s(split.cost_s)}, {split.recompute_tokens} tokens computed while"
                f" {split.reload_tokens} load; against {format_s(self.cost_reload_s)} for reload and"
                f" {format_s(self.cost_recompute_s)} for recompute{close}"
            )
        faster, slower = sorted((self.cost_reload_s, self.cost_recompute_s))
        loser = "recompute" if self.choice == "reload" else "reload"
        return f"{self.choice}: {format_s(faster)} against {format_s(slower)} for {loser}{close}"

    def explain(self) -> str:
        """The arithmetic, line by line with units, so that it can be checked by hand."""
        link, total = self.machine.link(self.tier), self.prefix + self.suffix
        kept, prefill = self.reload_tokens, self.machine.prefill
        blocks = kept // self.block_size
        users = min(self.tp, link.ranks_per_link)
        shared = f" × share {self.link_share:g}" if self.link_share < 1 else ""
        shared += f" ÷ {users} ranks" if users > 1 else ""
        ranks = f" on each of {self.tp} ranks" if self.tp > 1 else ""
        lines = [
            f"{self.arch.name} on {self.machine.name}: prefix {self.prefix} + suffix {self.suffix} tokens,"
            f" tier {self.tier}"
        ]
        if self.machine.extrapolated(self.arch):
            lines.append(f"(extrapolated: the prefill rates were measured on {prefill.calibrated_on})")
        if blocks:
            copying = self.kv_bytes, blocks, len(self.arch.layers)
            copy_bytes = link.copy_bytes(*copying)
            rate = link.rate_gb_per_s(copy_bytes, self.link_share, self.tp)
            lines.append(
                f"reload   {kept} tokens = {blocks} blocks of {self.block_size} = {format_bytes(self.kv_bytes)}{ranks}"
            )
            if shared:
                whole = format_gb_per_s(link.gb_per_s(copy_bytes))
                lines.append(f"  link      {whole}{shared} = {format_gb_per_s(rate)}")
            lines += [
                f"  wait      {self.queued_bytes} B queued ahead ÷ {format_gb_per_s(rate)} = {format_s(self.wait_s)}",
                f"  software  {format_s(link.per_request_s)} per request"
                f" + {blocks} × {format_s(link.per_block_s)} per block"
                f" + {link.copies(*copying)} × {format_s(link.per_copy_s)} per copy"
                f" = {format_s(link.overhead_s(*copying))}",
                f"  bytes     {self.kv_bytes} B ÷ {format_gb_per_s(rate)} in copies of {format_bytes(copy_bytes)}"
                f" = {format_s(self.kv_bytes / (rate * 1e9))}",
            ]
        lines += [
            *self._prefill_lines("prefill ", self.resident + kept, total),
            *self._overlap_lines(),
            f"  time to first token by reload    {format_s(self.ttft_reload_s)}",
            *self._prefill_lines("recompute", self.resident, total),
            f"  time to first token by recompute {format_s(self.ttft_recompute_s)}",
            *self._split_lines(),
        ]
        if self.decode_delay_value or self.link_delay_value:
            lines.append(
                f"delay to others, valued {self.decode_delay_value:g} s per s of computing and"
                f" {self.link_delay_value:g} s per s of the link: reload costs"
                f" {format_s(self.cost_reload_s)}, recompute costs {format_s(self.cost_recompute_s)}"
            )
        lines += [
            self._tie(shared),
            f"spread of the difference {format_s(self.spread_s)}",
            self.reason,
        ]
        return "\n".join(lines)

    def _tie(self, shared: str) -> str:
        if math.isinf(self.break_even_gb_per_s):
            return "no link speed makes the two tie"
        before = " (before share and ranks)" if shared else ""
        return f"the two tie at a link of {format_gb_per_s(self.break_even_gb_per_s)}{before}"

    def _overlap_lines(self) -> list[str]:
        overlap_s = self.wait_s + self.reload_s + self.suffix_s - self.ttft_reload_s
        if self.overlap_groups == 1:
            return []
        return [f"  overlap   in {len(self.layer_bounds)} layer groups hides {format_s(overlap_s)}"]

    def _split_lines(self) -> list[str]:
        split = self.split
        if split is None:
            return []
        rest_s = split.ttft_s - max(split.load_s, split.compute_s)
        wait = " (wait included)" if self.wait_s else ""
        cost = f", costs {format_s(split.cost_s)}" if split.cost_s != split.ttft_s else ""
        return [
            f"split    {split.recompute_tokens} tokens computed in {format_s(split.compute_s)} while"
            f" {split.reload_tokens} load in {format_s(split.load_s)}{wait}; the longer + {format_s(rest_s)} for the"
            " rest",
            f"  time to first token by split     {format_s(split.ttft_s)}{cost}",
        ]

    def _prefill_lines(self, title: str, start: int, stop: int) -> list[str]:
        prefill, speedup = self.machine.prefill, self.machine.speedup(self.tp)
        passes, linear, linear_s, attention, attention_s, head_s = prefill.terms(self.arch, start, stop)
        head = 2 * self.arch.head_macs
        terms = (linear, "linear", linear_s), (attention, "attention", attention_s), (head, "head", head_s)
        fast = any(seconds and flops / seconds >= 1e12 for flops, _, seconds in terms)
        unit = (1e12, "TFLOP") if fast else (1e9, "GFLOP")
        flops = " + ".join(_term(*term, *unit) for term in terms)
        if self.tp > 1:
            flops = f"({flops}) ÷ {speedup:.4g} for {self.tp} ranks"
        seconds = format_s(prefill.seconds(self.arch, start, stop, speedup))
        rates = " (rates are means over the passes)" if passes > 1 else ""
        return [
            f"{title} positions {start} to {stop}: {passes} × {format_s(prefill.per_chunk_s)} fixed + {flops}"
            f" = {seconds}{rates}"
        ]


def _term(flops: int, kind: str, seconds: float, size: float, unit: str) -> str:
    rate = f" ÷ {flops / seconds / size:.4g} {unit}/s" if seconds else ""
    return f"{flops / size:.4g} {kind} {unit}{rate}"


def _speed(total_bytes: float, seconds: float) -> float:
    """GB/s that move `total_bytes` in `seconds`; inf when no time is left."""
    return total_bytes / seconds / 1e9 if seconds > 0 else math.inf


def _layer_bounds(arch: ModelArch, groups: int) -> tuple[int, ...]:
    return layer_bounds(len(arch.layers), min(groups, len(arch.layers)))


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
    the choice may be "split". With `overlap_groups` layer groups the suffix computes group i while group i + 1 arrives
    (see `pipeline.layer_bounds`; never more than there are layers).
    `resident` tokens of the prefix (whole blocks) are in the pool already: neither way pays for them.
    Without a `kv_dtype` it is what the config prescribes, else what the machine was measured in.
    Raises ValueError for values out of range and for a tier the machine does not know.
    """
    checked_arch(arch)
    if not isinstance(machine, Machine):
        raise ValueError(f"machine is {machine!r}; expected a Machine, as from Machine.load(name or path)")
    prefix, suffix = checked_count("prefix", prefix, 0), checked_count("suffix", suffix, 0)
    tp, block_size = checked_count("tp", tp, 1), checked_count("block_size", block_size, 1)
    overlap_groups = checked_count("overlap_groups", overlap_groups, 1)
    resident, total = checked_count("resident", resident, 0), prefix + suffix
    if total < 1:
        raise ValueError("prefix 0 + suffix 0; expected at least 1 token")
    if total > arch.max_positions:
        raise ValueError(
            f"prefix {prefix} + suffix {suffix} is beyond the {arch.max_positions} positions of {arch.name}"
        )
    if resident > prefix or resident % block_size or resident == total:
        raise ValueError(
            f"resident is {resident}; expected whole blocks of {block_size} of the prefix of {prefix} tokens, and fewer"
            f" tokens than the {total} in all, since the last is always computed"
        )
    if not 0 < link_share <= 1:
        raise ValueError(f"link_share is {link_share!r}; expected above 0 and up to 1")
    if not (0 <= queued_bytes < math.inf and 0 <= decode_delay_value < math.inf and 0 <= link_delay_value < math.inf):
        given = {
            "queued_bytes": queued_bytes,
            "decode_delay_value": decode_delay_value,
            "link_delay_value": link_delay_value,
        }
        name, value = next((name, value) for name, value in given.items() if not 0 <= value < math.inf)
        raise ValueError(f"{name} is {value!r}; expected a finite number of at least 0")
    kv_dtype = kv_dtype_for(arch, kv_dtype, machine.prefill.dtype)
    link = machine.link(tier)
    kept = max(resident, reloadable_tokens(prefix, total, block_size))
    blocks, layers = (kept - resident) // block_size, len(arch.layers)
    size_bytes = kv_bytes(arch, kept - resident, kv_dtype, tp, block_size)
    reload_s = link.transfer_s(size_bytes, blocks, layers, link_share, tp)
    wait_s = 0.0
    if queued_bytes and blocks:
        wait_s = queued_bytes / (link.rate_gb_per_s(link.copy_bytes(size_bytes, blocks, layers), link_share, tp) * 1e9)
    suffix_s = machine.prefill_s(arch, kept, total, tp)
    recompute_s = machine.prefill_s(arch, resident, total, tp)
    ttft_reload_s = wait_s + reload_s + suffix_s
    if overlap_groups > 1:
        # What a request pays once (a link's latency) is over before the first group comes: nothing computes meanwhile.
        streamed_s = max(0.0, reload_s - link.per_request_s)
        ttft_reload_s -= hidden_s(streamed_s, suffix_s, _layer_bounds(arch, overlap_groups))
    cost_reload_s = ttft_reload_s + decode_delay_value * (suffix_s + link.decode_slowdown * reload_s)
    cost_reload_s += link_delay_value * reload_s
    cost_recompute_s = recompute_s + decode_delay_value * recompute_s
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
        wait_s=wait_s,
        reload_s=reload_s,
        suffix_s=suffix_s,
        kv_bytes=size_bytes,
        resident=resident,
        link_delay_value=link_delay_value,
    )
    if allow_split and verdict.split is not None:
        object.__setattr__(verdict, "choice", "split")  # nobody has it yet; a copy would look for the split again
    return verdict
