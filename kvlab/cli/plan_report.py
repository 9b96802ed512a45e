"""What `kvlab plan` says: a plan as tables of 80 columns and sentences, settings as lines to copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.text import Text

from kvlab.cli.console import out
from kvlab.cli.report import narrow_table
from kvlab.units import format_bytes, format_gb_per_s, format_s

if TYPE_CHECKING:
    from kvlab.plan import Plan, Row, TierPlan
    from kvlab.settings import Setting

__all__ = ["say", "show_plan", "show_settings"]

TIERS_ABREAST = 5


def say(text: str) -> None:
    """Print a line as it is."""
    out.print(text, markup=False)


def show_plan(plan: Plan) -> None:
    """Print sizes, times, tiers, deadlines and where the numbers come from."""
    ranks = f"TP {plan.tp}, " if plan.tp > 1 else ""
    say(
        f"{plan.model} on {plan.machine} ({plan.machine_kind}): {ranks}KV {plan.kv_dtype},"
        f" blocks of {plan.block_size}, {plan.suffix_tokens} new tokens behind the prefix"
    )
    _show_sizes(plan)
    _show_times(plan, "Time to first token, idle machine", loaded=False)
    if plan.load:
        title = f"Time to first token that {plan.percentile:g} % of requests meet at load {plan.load:g}"
        _show_times(plan, title, loaded=True)
    say("* faster than recompute   ~ too close to call")
    _show_tiers(plan)
    if plan.ttft_slo_s is not None:
        _show_deadline(plan, plan.ttft_slo_s)
    _show_sources(plan)


def _show_sizes(plan: Plan) -> None:
    columns = ["prefix", "KV per rank", "KV in total", "idle ones per GiB"]
    shown = narrow_table("KV cache", [c for c in columns if plan.tp > 1 or c != "KV in total"])
    for size in plan.sizes:
        total = [format_bytes(size.total_bytes)] if plan.tp > 1 else []
        per_gib = f"{size.conversations_per_gib:,.3g}"
        shown.add_row(f"{size.prefix_tokens:,}", format_bytes(size.bytes_per_rank), *total, per_gib)
    out.print(shown)
    each = " a rank" if plan.tp > 1 else ""
    fixed = f" + {format_bytes(plan.fixed_bytes)} that do not grow (full windows, states)" if plan.fixed_bytes else ""
    say(f"{format_bytes(plan.growing_bytes_per_token)} a token{each}{fixed}")
    if plan.distinct_share < 1:
        say(f"ranks hold copies: only {plan.distinct_share:.0%} of the bytes in total are distinct")


def _show_times(plan: Plan, title: str, *, loaded: bool) -> None:
    for first in range(0, len(plan.tiers), TIERS_ABREAST):
        tiers = plan.tiers[first : first + TIERS_ABREAST]
        shown = narrow_table(title, ["prefix", "recompute", *(tier.tier for tier in tiers)])
        for i, row in enumerate(tiers[0].rows):
            recompute_s = row.loaded_recompute_s if loaded else row.recompute_s
            cells = [_reload_cell(tier.rows[i], loaded=loaded) for tier in tiers]
            shown.add_row(f"{row.prefix_tokens:,}", format_s(recompute_s), *cells)
        out.print(shown)


def _reload_cell(row: Row, *, loaded: bool) -> str:
    reload_s, recompute_s = (row.loaded_reload_s, row.loaded_recompute_s) if loaded else (row.reload_s, row.recompute_s)
    close = (row.too_close_loaded if loaded else row.too_close) and row.transfer_s > 0
    return f"{format_s(reload_s)}{'~' if close else '*' if reload_s < recompute_s else ' '}"


def _show_tiers(plan: Plan) -> None:
    last = plan.sizes[-1].prefix_tokens
    condition = f"; reload wins: at load {plan.load:g}, the rest: idle" if plan.load else ""
    shown = narrow_table(
        f"Tiers, for {last:,} tokens{condition}",
        ["rate", "reload wins", "ties at", "best split", "saves"],
        ["tier"],
    )
    stores = narrow_table(f"Storing {last:,} tokens pays", ["store takes", "chance of return", "pause"], ["tier"])
    for tier in plan.tiers:
        row = tier.rows[-1]
        shown.add_row(
            _rate(tier.gb_per_s),
            _wins(tier),
            "no speed" if row.break_even_gb_per_s is None else _rate(row.break_even_gb_per_s),
            "none" if row.split_recompute_tokens is None else f"after {row.split_recompute_tokens:,}",
            "" if row.split_saves_s is None else format_s(row.split_saves_s),
            tier.tier,
        )
        if row.store_s is not None and row.break_even_idle_gap_s is not None:
            chance = row.break_even_return_chance
            pays = chance is not None and chance < 1
            stores.add_row(
                format_s(row.store_s),
                f"above {chance:.1%}" if pays else "never",
                f"above {format_s(row.break_even_idle_gap_s)}" if pays else "",
                tier.tier,
            )
    out.print(shown)
    if plan.tp > 1:
        say(_whose_rates(plan))
    say("best split: recompute the head up to there while the rest loads")
    for tier in plan.tiers:
        if len(tier.crossings) > 1:
            flips = ", ".join(f"{c.winner_above} from {c.tokens:,}" for c in tier.crossings)
            say(f"{tier.tier} flips more than once: {flips}")
    if stores.row_count:
        out.print(stores)
        say("a store is charged with every second that it keeps the link, since others may wait for it")


def _whose_rates(plan: Plan) -> str:
    tiers: dict[int, list[str]] = {}
    for tier in plan.tiers:
        tiers.setdefault(min(plan.tp, tier.ranks_per_link), []).append(tier.tier)
    parts = []
    for ranks, names in sorted(tiers.items()):
        whose = "for each rank" if ranks == 1 else f"of one link that {ranks} ranks share"
        parts.append(f"{whose} on {', '.join(names)}")
    return f"rate and ties at: {'; '.join(parts)}"


def _wins(tier: TierPlan) -> str:
    if tier.crossover_tokens is None:
        return "not for good" if tier.crossings else "never"
    return "always" if tier.crossover_tokens == 0 else f"from {tier.crossover_tokens:,}"


def _show_deadline(plan: Plan, limit_s: float) -> None:
    condition = f"{format_s(limit_s)} for {plan.percentile:g} % of requests at load {plan.load:g}"
    shown = narrow_table(f"Within {condition}", ["longest prefix"], ["way", "prefixes above that meet it"])
    lengths = [size.prefix_tokens for size in plan.sizes]
    ways = [("recompute", plan.recompute_slo_tokens, [row.loaded_recompute_s for row in plan.tiers[0].rows])]
    ways += [
        (f"reload, {tier.tier}", tier.slo_tokens, [row.loaded_reload_s for row in tier.rows]) for tier in plan.tiers
    ]
    for name, longest, times in ways:
        met = [f"{n:,}" for n, seconds in zip(lengths, times, strict=True) if seconds <= limit_s]
        shown.add_row(f"{longest:,}" if longest else "none", name, ", ".join(met) or "none")
    out.print(shown)


def _show_sources(plan: Plan) -> None:
    out.print("\nWhere the numbers come from", style="bold")
    say(f"prefill ±{plan.prefill_spread:.0%}")
    _indent(plan.prefill_source or "no source given")
    if plan.tp > 1:
        together = f"{plan.tp * plan.tp_efficiency:.3g} (an efficiency of {plan.tp_efficiency:g})"
        _indent(f"{plan.tp} ranks compute like {together}")
    if plan.extrapolated_from:
        _indent(f"extrapolated to {plan.model}: rates and ± were measured on {plan.extrapolated_from}")
    for source, names in _by_source(plan):
        say(names)
        _indent(source)
    for note in plan.notes:
        say("note")
        _indent(note)


def _indent(text: str) -> None:
    out.print(Padding(Text(text), (0, 0, 0, 4)))


def _by_source(plan: Plan) -> Iterator[tuple[str, str]]:
    names: dict[str, list[str]] = {}
    for tier in plan.tiers:
        names.setdefault(tier.source or "no source given", []).append(f"{tier.tier} ±{tier.spread:.0%}")
    for source, tiers in names.items():
        yield source, ", ".join(tiers)


def show_settings(system: str, chosen: Sequence[Setting]) -> None:
    """Print options as lines to copy, each with why and where its name was seen."""
    out.print(f"\nSettings for {system}", style="bold", markup=False)
    for setting in chosen:
        say(f"{setting.option}{_value(setting.value)}")
        _indent(f"{setting.note} [{setting.seen}]")


def _value(value: str | int | float | bool | None) -> str:
    if value is None:
        return ": not set"
    if isinstance(value, bool):
        return f" {str(value).lower()}"
    return f" '{value}'" if isinstance(value, str) and " " in value else f" {value}"


def _rate(gb_per_s: float) -> str:
    return format_gb_per_s(gb_per_s).split(" (")[0]
