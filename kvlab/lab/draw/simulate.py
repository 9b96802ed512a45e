"""Policies over one trace: the picture of a `kvlab.simulate/1` result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.lab.draw.style import CACHED, FLIP, RECOMPUTE, RELOAD, plain_axes, stamp

__all__ = ["simulate_figure"]


def simulate_figure(result: Mapping[str, Any]) -> Figure:
    """Time to first token of each policy, and where the tokens of the prompts came from."""
    policies = result["policies"]
    figure = Figure(figsize=(11, 1.8 + 0.5 * len(policies)), layout="constrained")
    times, sources = figure.subplots(1, 2, sharey=True)
    _times_panel(times, policies)
    _sources_panel(sources, policies)
    names = [f"{name} (unstable)" if policies[name]["unstable"] else name for name in policies]
    times.set_yticks(range(len(names)), names)
    times.invert_yaxis()
    figure.suptitle("Which policy answers soonest, and where do its tokens come from?", fontsize=12)
    stamp(
        figure,
        f"simulated: {result['requests']:,} requests of {result['trace']}, {result['model']} on {result['machine']}",
    )
    return figure


def _times_panel(axis: Axes, policies: Mapping[str, Any]) -> None:
    """A line from the median to the 99th percentile; pale where a queue grows without end."""
    for row, report in enumerate(policies.values()):
        faint = 0.35 if report["unstable"] else 1.0
        axis.plot(
            [report["ttft_p50_s"], report["ttft_p99_s"]], [row, row], color=FLIP, linewidth=1.2, alpha=faint, zorder=1
        )
        for key, marker, label in (
            ("ttft_p50_s", "o", "half of requests"),
            ("ttft_mean_s", "D", "mean"),
            ("ttft_p90_s", "s", "90 %"),
            ("ttft_p99_s", "|", "99 %"),
        ):
            axis.scatter(
                report[key], row, marker=marker, s=36, color=FLIP, alpha=faint, label=None if row else label, zorder=2
            )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.set_xlabel("time to first token (s)")
    plain_axes(axis)
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)


def _sources_panel(axis: Axes, policies: Mapping[str, Any]) -> None:
    sources = list(dict.fromkeys(source for report in policies.values() for source in report["hit_tokens"]))
    shades = iter((1.0, 0.6, 0.35))
    bars = [(f"hit in {s}", CACHED if s == "pool" else RELOAD, 1.0 if s == "pool" else next(shades)) for s in sources]
    for row, report in enumerate(policies.values()):
        left = 0.0
        counts = [report["hit_tokens"].get(source, 0) for source in sources] + [report["computed_tokens"]]
        for (label, colour, alpha), tokens in zip([*bars, ("computed", RECOMPUTE, 1.0)], counts, strict=True):
            axis.barh(row, tokens / 1e6, left=left, height=0.6, color=colour, alpha=alpha, label=None if row else label)
            left += tokens / 1e6
    axis.set_xlabel("tokens (millions)")
    plain_axes(axis)
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)
