"""What `kvlab simulate` says: policies beside each other as tables of 80 columns, and what they may be compared by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvlab.cli.console import out
from kvlab.cli.report import narrow_table
from kvlab.units import format_bytes, format_s

if TYPE_CHECKING:
    from kvlab.simulate import Cluster, PolicyReport, Trace

__all__ = ["say", "show"]

REASONS_SHOWN = 8
# What a server can be set to; calibrated is kvlab's, and an oracle nobody has.
FIXED = ("reload", "recompute", "threshold")


def say(text: str) -> None:
    """Print a line as it is."""
    out.print(text, markup=False)


def show(trace: Trace, cluster: Cluster, reports: Mapping[str, PolicyReport]) -> None:
    """Print times, hits, bytes, utilisation, decisions and the comparison."""
    skipped = f", {trace.skipped} bad lines skipped" if trace.skipped else ""
    behind = f", {cluster.replicas} replicas behind router {cluster.router}" if cluster.replicas > 1 else ""
    say(
        f"{trace.name}: {trace.requests:,} requests{skipped}; {cluster.arch.name} on {cluster.machine.name}{behind}, KV"
        f" {cluster.kv_dtype}, blocks of {cluster.block_size}, pool of {cluster.pool_blocks:,} blocks a replica"
    )
    _show_times(reports)
    _show_tokens(reports)
    _show_load(reports)
    _show_decisions(reports)
    for line in _comparison(reports):
        say(line)
    if cluster.memory_gb_per_s is None and not cluster.decodes_measured:
        say(
            "Decodes are priced by FLOPs alone, which is too little for an accelerator: give --memory-bandwidth, or a"
            " machine that was calibrated with this model."
        )


def _show_times(reports: Mapping[str, PolicyReport]) -> None:
    from kvlab.simulate.judging import THRESHOLD_TOKENS

    shown = narrow_table(
        "Time to first token", ["mean", "half", "90 %", "99 %", "regret", "out tok/s"], ["policy", "state"]
    )
    for name, report in reports.items():
        times = (report.ttft_mean_s, report.ttft_p50_s, report.ttft_p90_s, report.ttft_p99_s, report.regret_s)
        state = "unstable" if report.unstable else ""
        shown.add_row(*map(format_s, times), f"{report.output_tokens_per_s:,.0f}", name, state)
    out.print(shown)
    requests = next(iter(reports.values())).requests
    say(f"regret: seconds that choices cost beyond the oracle's, summed over all {requests:,} requests")
    if "threshold" in reports:
        say(f"threshold: reload from {THRESHOLD_TOKENS} tokens up (threshold:TOKENS for another)")


def _show_tokens(reports: Mapping[str, PolicyReport]) -> None:
    sources = list(dict.fromkeys(source for report in reports.values() for source in report.hit_tokens))
    columns = ["computed", *sources, "reloaded", "offloaded"]
    shown = narrow_table("Tokens computed, and hit by where they were; bytes over the links", columns, ["policy"])
    for name, report in reports.items():
        hits = [f"{report.hit_tokens.get(source, 0):,}" for source in sources]
        moved = [format_bytes(report.reload_bytes), format_bytes(report.offload_bytes)]
        shown.add_row(f"{report.computed_tokens:,}", *hits, *moved, name)
    out.print(shown)


def _show_load(reports: Mapping[str, PolicyReport]) -> None:
    servers = list(next(iter(reports.values())).rho)
    shown = narrow_table("Utilisation ρ: work asked of it ÷ time (1 or more: unstable)", servers, ["policy"])
    for name, report in reports.items():
        shown.add_row(*("all at once" if rho is None else f"{rho:.2f}" for rho in report.rho.values()), name)
    out.print(shown)


def _show_decisions(reports: Mapping[str, PolicyReport]) -> None:
    shown = narrow_table("Decisions by reason", ["requests"], ["policy", "decision"])
    for name, report in reports.items():
        for reason, count in list(report.decisions.items())[:REASONS_SHOWN]:
            shown.add_row(f"{count:,}", name, reason)
    if shown.row_count:
        out.print(shown)


def _comparison(reports: Mapping[str, PolicyReport]) -> list[str]:
    """Means of stable policies beside that of the best fixed one; unstable ones have none worth comparing."""
    unstable = [name for name, report in reports.items() if report.unstable]
    lines = []
    if unstable:
        lines.append(f"Not compared, since a queue grows without end: {', '.join(unstable)}.")
    stable = {name: report.ttft_mean_s for name, report in reports.items() if not report.unstable}
    fixed = [name for name in stable if name.partition(":")[0] in FIXED]
    if not fixed:
        return lines
    best = min(fixed, key=stable.__getitem__)
    for name in stable:
        if name not in fixed:
            lines.append(
                f"{name}: mean {format_s(stable[name])}, {stable[name] / stable[best] - 1:+.1%} against {best}, the"
                " best fixed policy."
            )
    return lines
