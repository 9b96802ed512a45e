"""A deployment in numbers: cache sizes, both ways' times, flips, splits and deadlines for a model on a machine.

Arithmetic over `decide` for several prefixes and every tier, as plain frozen data. Knows no engine's option names
(`settings` does) and prints nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.arch import ModelArch
from kvlab.arithmetic import checked_arch, kv_bytes, kv_dtype_for
from kvlab.crossings import Crossing
from kvlab.machine import Machine
from kvlab.storing import storing
from kvlab.verdict import HORIZON_TOKENS, Verdict, decide
from kvlab.waiting import wait_quantile

__all__ = ["Plan", "Row", "Size", "TierPlan", "plan"]


@dataclass(frozen=True)
class Size:
    """What the cache of one prefix (in whole blocks) takes. `total_bytes` is the sum over ranks.

    `conversations_per_gib`: idle ones of this length that 2^30 bytes of any tier hold; every rank stores its own part.
    """

    prefix_tokens: int
    bytes_per_rank: int
    total_bytes: int
    conversations_per_gib: float


@dataclass(frozen=True)
class Row:
    """One tier at one prefix. Times are seconds to the first token, suffix included.

    `reload_s` and `recompute_s` are those of an idle machine, `transfer_s` is the link's part of the first;
    `loaded_*_s` are those that the plan's percentile of requests meets under the plan's load, and `choice` compares
    them. `break_even_gb_per_s` and the split are for the idle machine; None where overheads alone lose, and where no
    split beats both ways. A store is charged with every second that it keeps the link: `break_even_return_chance` None
    means that storing never pays (or that the machine's link for it is not known).
    """

    prefix_tokens: int
    choice: str
    too_close: bool
    too_close_loaded: bool
    reload_s: float
    recompute_s: float
    loaded_reload_s: float
    loaded_recompute_s: float
    transfer_s: float
    break_even_gb_per_s: float | None
    split_recompute_tokens: int | None
    split_saves_s: float | None
    store_s: float | None
    break_even_return_chance: float | None
    break_even_idle_gap_s: float | None


@dataclass(frozen=True)
class TierPlan:
    """One tier. `gb_per_s` is the link's rate at the longest prefix's copy size, before `ranks_per_link` share it.

    `crossings` and `crossover_tokens` (0: reload always wins; None: never for good) hold under the plan's load. They
    are looked for at every length of the plan's grid, then refined to the block; two flips inside one step of the
    grid (4 % of the length) are not seen. `slo_tokens` is the longest prefix whose reload meets the deadline.
    """

    tier: str
    gb_per_s: float
    ranks_per_link: int
    spread: float
    source: str
    crossings: tuple[Crossing, ...]
    crossover_tokens: int | None
    slo_tokens: int | None
    rows: tuple[Row, ...]
    curve_s: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """Everything `kvlab plan` says. Bytes are per tensor-parallel rank unless a name says total.

    A prefix of n tokens (a multiple of the block, windows full) takes n · `growing_bytes_per_token` + `fixed_bytes`:
    the second part is full windows and recurrent states. `extrapolated_from` names the shape that the prefill rates
    were measured on where it is another one. `curve_tokens` is the grid of `recompute_curve_s` and the tiers' curves,
    all under the plan's load.
    """

    model: str
    machine: str
    machine_kind: str
    extrapolated_from: str | None
    prefill_spread: float
    prefill_source: str
    tp: int
    kv_dtype: str
    block_size: int
    suffix_tokens: int
    load: float
    percentile: float
    ttft_slo_s: float | None
    growing_bytes_per_token: float
    fixed_bytes: int
    distinct_share: float
    tp_efficiency: float
    sizes: tuple[Size, ...]
    curve_tokens: tuple[int, ...]
    recompute_curve_s: tuple[float, ...]
    recompute_slo_tokens: int | None
    tiers: tuple[TierPlan, ...]
    notes: tuple[str, ...]

    def tier(self, name: str) -> TierPlan:
        """The part about one tier. Raises ValueError naming the tiers of the plan."""
        for tier in self.tiers:
            if tier.tier == name:
                return tier
        raise ValueError(f"the plan has no tier {name!r}; it has {', '.join(tier.tier for tier in self.tiers)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def plan(
    arch: ModelArch,
    machine: Machine,
    *,
    prefixes: Sequence[int],
    suffix: int = 64,
    tp: int = 1,
    kv_dtype: str | None = None,
    block_size: int = 16,
    load: float = 0.0,
    percentile: float = 99.0,
    ttft_slo_s: float | None = None,
) -> Plan:
    """Plan for returning conversations of `prefixes` tokens plus `suffix` new ones, over every tier of the machine.

    `load` is the utilisation (0 <= load < 1) of what each way is limited by, with requests like the one looked at: the
    accelerator for a recompute, the longer of link and accelerator for a reload. Waits are those of M/D/1 queues
    (`waiting.wait_quantile`), so that a way's time at the percentile is its idle time + quantile × its longest part.
    `percentile` % of requests must meet `ttft_slo_s`. Without a `kv_dtype` it is what the config prescribes, else what
    the machine was measured in. Raises ValueError for values out of range, for prefixes that the
    model cannot hold, and for no prefix or no tier at all.
    """
    if not prefixes or min(prefixes) < 1:
        raise ValueError(f"prefixes are {list(prefixes)}; expected at least one, of at least 1 token each")
    if ttft_slo_s is not None and not (math.isfinite(ttft_slo_s) and ttft_slo_s > 0):
        raise ValueError(f"time-to-first-token limit is {ttft_slo_s} seconds; expected a positive, finite time")
    if not machine.links:
        raise ValueError(f"machine {machine.name!r} has no link to any tier; give one, as in --link 50GB/s")
    kv_dtype = kv_dtype_for(checked_arch(arch), kv_dtype, machine.prefill.dtype)
    if 0 < percentile < 1:  # a share taken for a percentage
        raise ValueError(f"percentile is {percentile:g}; expected a share in %, from 1 to below 100")
    ask = _Question(arch, machine, suffix, tp, kv_dtype, block_size, wait_quantile(load, percentile))
    lengths, first = sorted(set(prefixes)), next(iter(machine.links))
    ask.verdict(first, lengths[-1])  # refuses what the model or the machine cannot do, before anything else
    grid = [n * block_size for n in _grid((min(arch.max_positions, HORIZON_TOKENS) - suffix) // block_size)]
    growing, fixed = _growing_and_fixed(arch, kv_dtype, tp, block_size)
    sizes = tuple(_size(arch, prefix, kv_dtype, tp, block_size) for prefix in lengths)

    def recompute_in_time(prefix: int) -> bool:
        return ttft_slo_s is not None and ask.loaded(first, prefix)[1] <= ttft_slo_s

    return Plan(
        model=arch.name,
        machine=machine.name,
        machine_kind=str(machine.provenance.get("kind", "unknown origin")),
        extrapolated_from=machine.prefill.calibrated_on if machine.extrapolated(arch) else None,
        prefill_spread=machine.prefill.spread,
        prefill_source=machine.prefill.source,
        tp=tp,
        kv_dtype=kv_dtype,
        block_size=block_size,
        suffix_tokens=suffix,
        load=load,
        percentile=percentile,
        ttft_slo_s=ttft_slo_s,
        growing_bytes_per_token=growing,
        fixed_bytes=fixed,
        distinct_share=kv_bytes(arch, lengths[-1], kv_dtype, 1, block_size) / max(1, sizes[-1].total_bytes),
        tp_efficiency=machine.tp_efficiency,
        sizes=sizes,
        curve_tokens=tuple(grid),
        recompute_curve_s=tuple(ask.loaded(first, prefix)[1] for prefix in grid),
        recompute_slo_tokens=None if ttft_slo_s is None else _longest(grid, block_size, recompute_in_time),
        tiers=tuple(_tier_plan(ask, tier, lengths, grid, ttft_slo_s) for tier in machine.links),
        notes=(*arch.notes, *_sharding_notes(arch, tp), *machine.provenance.get("notes", ())),
    )


@dataclass(frozen=True)
class _Question:
    """What every tier and prefix of one plan has in common; `wait` is in service times."""

    arch: ModelArch
    machine: Machine
    suffix: int
    tp: int
    kv_dtype: str
    block_size: int
    wait: float

    def verdict(self, tier: str, prefix: int) -> Verdict:
        return decide(
            self.arch,
            self.machine,
            prefix=prefix,
            suffix=self.suffix,
            tier=tier,
            tp=self.tp,
            kv_dtype=self.kv_dtype,
            block_size=self.block_size,
        )

    def loaded(self, tier: str, prefix: int) -> tuple[float, float]:
        """Reload's and recompute's seconds under the load."""
        return _loaded(self.verdict(tier, prefix), self.wait)


def _tier_plan(
    ask: _Question, tier: str, lengths: Sequence[int], grid: Sequence[int], ttft_slo_s: float | None
) -> TierPlan:
    curve = [ask.loaded(tier, prefix) for prefix in grid]
    wins = [reload_s < recompute_s for reload_s, recompute_s in curve]

    def reload_wins(prefix: int) -> bool:
        reload_s, recompute_s = ask.loaded(tier, prefix)
        return reload_s < recompute_s

    def in_time(prefix: int) -> bool:
        return ttft_slo_s is not None and ask.loaded(tier, prefix)[0] <= ttft_slo_s

    crossings = _crossings(grid, wins, ask.block_size, reload_wins)
    verdicts = [ask.verdict(tier, prefix) for prefix in lengths]
    link, longest = ask.machine.link(tier), verdicts[-1]
    blocks = max(1, longest.reload_tokens // ask.block_size)
    copy_bytes = link.copy_bytes(longest.kv_bytes, blocks, len(ask.arch.layers))
    return TierPlan(
        tier=tier,
        gb_per_s=link.gb_per_s(copy_bytes),
        ranks_per_link=link.ranks_per_link,
        spread=link.spread,
        source=link.source,
        crossings=tuple(crossings),
        crossover_tokens=None if not wins or not wins[-1] else crossings[-1].tokens if crossings else 0,
        slo_tokens=None if ttft_slo_s is None else _longest(grid, ask.block_size, in_time),
        rows=tuple(_row(verdict, ask.wait) for verdict in verdicts),
        curve_s=tuple(reload_s for reload_s, _ in curve),
    )


def _loaded(verdict: Verdict, wait: float) -> tuple[float, float]:
    """Both times at the percentile whose wait is `wait` service times."""
    reload_s = verdict.ttft_reload_s + wait * max(verdict.reload_s, verdict.suffix_s)
    return reload_s, verdict.ttft_recompute_s * (1 + wait)


def _row(verdict: Verdict, wait: float) -> Row:
    reload_s, recompute_s = _loaded(verdict, wait)
    split = verdict.split
    has_store = "store" in verdict.machine.links[verdict.tier] and verdict.reload_tokens > 0
    stored = storing(verdict, store_cost_per_s=1.0) if has_store else None
    return Row(
        prefix_tokens=verdict.prefix,
        choice="reload" if verdict.reload_tokens and reload_s < recompute_s else "recompute",
        too_close=verdict.too_close,
        too_close_loaded=abs(reload_s - recompute_s) < verdict.spread_s * (1 + wait),
        reload_s=verdict.ttft_reload_s,
        recompute_s=verdict.ttft_recompute_s,
        loaded_reload_s=reload_s,
        loaded_recompute_s=recompute_s,
        transfer_s=verdict.reload_s,
        break_even_gb_per_s=_finite(verdict.break_even_gb_per_s),
        split_recompute_tokens=split.recompute_tokens if split else None,
        split_saves_s=min(verdict.ttft_reload_s, verdict.ttft_recompute_s) - split.ttft_s if split else None,
        store_s=stored.store_s if stored else None,
        break_even_return_chance=_finite(stored.break_even_return_chance) if stored else None,
        break_even_idle_gap_s=stored.break_even_idle_gap_s if stored else None,
    )


def _size(arch: ModelArch, prefix: int, kv_dtype: str, tp: int, block_size: int) -> Size:
    rank = kv_bytes(arch, prefix, kv_dtype, tp, block_size)
    return Size(prefix, rank, rank * tp, 2**30 / max(1, rank * tp))


def _sharding_notes(arch: ModelArch, tp: int) -> tuple[str, ...]:
    """KV heads that ranks can neither split nor repeat evenly; vLLM's and SGLang's QKVParallelLinear refuse those."""
    heads = {part.heads for part, _ in arch.cache_groups if part.heads and not part.fixed_elements}
    uneven = sorted(count for count in heads if count % tp and tp % count)
    return tuple(f"{count} KV heads do not divide over {tp} ranks: servers refuse to start so" for count in uneven)


def _growing_and_fixed(arch: ModelArch, kv_dtype: str, tp: int, block_size: int) -> tuple[float, int]:
    """Bytes per rank that each token adds once every window is full, and the bytes that do not grow."""
    parts = [component for component, _ in arch.cache_groups]
    step = math.lcm(block_size, *(part.tokens_per_entry for part in parts))
    widest = max((part.cap_tokens or 0 for part in parts), default=0)
    tokens = step * -(-(widest + 2 * block_size) // step)  # two more blocks: a window may begin inside one
    once, twice = (kv_bytes(arch, n, kv_dtype, tp, block_size) for n in (tokens, 2 * tokens))
    return (twice - once) / tokens, 2 * once - twice


def _grid(most: int) -> list[int]:
    """Numbers of blocks from 1 to `most`: all of the first 24, then steps of 4 %."""
    grid: list[int] = []
    blocks = 1
    while blocks < most:
        grid.append(blocks)
        blocks += max(1, blocks // 25)
    return [*grid, most] if most >= 1 else []


def _crossings(
    grid: Sequence[int], wins: Sequence[bool], block_size: int, reload_wins: Callable[[int], bool]
) -> list[Crossing]:
    """The flips between neighbours of the grid, each at the first whole block where the new winner wins."""
    found = []
    for i in range(1, len(grid)):
        if wins[i] and not wins[i - 1]:
            found.append(Crossing(_first(grid[i - 1], grid[i], block_size, reload_wins), "reload"))
        elif wins[i - 1] and not wins[i]:
            at = _first(grid[i - 1], grid[i], block_size, lambda prefix: not reload_wins(prefix))
            found.append(Crossing(at, "recompute"))
    return found


def _longest(grid: Sequence[int], block_size: int, holds: Callable[[int], bool]) -> int:
    """The longest prefix in whole blocks up to the end of the grid's last run of `holds`; 0 where it never holds."""
    for i in range(len(grid) - 1, -1, -1):
        if holds(grid[i]):
            if i == len(grid) - 1:
                return grid[i]
            return _first(grid[i], grid[i + 1], block_size, lambda prefix: not holds(prefix)) - block_size
    return 0


def _first(low: int, high: int, block_size: int, holds: Callable[[int], bool]) -> int:
    """The first whole block in (low, high] where `holds`, which is false at low and true at high."""
    while high - low > block_size:
        middle = (low + high) // 2 // block_size * block_size
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
