"""A plan's picture: predicted times to first token per tier, from a `kvlab.plan/1`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from kvlab.lab.draw.style import FLIP, PREDICTED, RECOMPUTE, RELOAD, plain_axes, seconds_axis, stamp, token_axis

__all__ = ["plan_figure"]


def plan_figure(plan: Mapping[str, Any]) -> Figure:
    """Prefix length against time to first token, recompute and every tier of a `kvlab.plan/1`, with its limit."""
    figure = Figure(figsize=(8.4, 5.4), layout=ConstrainedLayoutEngine(w_pad=0.15))
    axis = figure.subplots()
    tokens = plan["curve_tokens"]
    ends: list[tuple[float, str, str]] = []
    lines = [("recompute", RECOMPUTE, plan["recompute_curve_s"])]
    lines += [(tier["tier"], RELOAD, tier["curve_s"]) for tier in plan["tiers"]]
    for name, colour, seconds in lines:
        axis.plot(tokens, seconds, color=colour, linewidth=1.1, linestyle=PREDICTED)
        ends.append((seconds[-1], name, colour))
    for tier in plan["tiers"]:
        at = tier["crossover_tokens"]
        if at:
            axis.axvline(at, color=FLIP, linewidth=0.8, linestyle=PREDICTED)
            low = (at, 0.02)
            where = axis.get_xaxis_transform()
            axis.annotate(f"{tier['tier']} from {at:,}", low, xycoords=where, fontsize=8, rotation=90, ha="right")
    if plan["ttft_slo_s"] is not None:
        axis.axhline(plan["ttft_slo_s"], color=FLIP, linewidth=0.8, linestyle=":")
        axis.annotate("limit", (tokens[0], plan["ttft_slo_s"]), fontsize=8, color=FLIP, va="bottom")
    token_axis(axis, [size["prefix_tokens"] for size in plan["sizes"]])
    seconds_axis(axis)
    plain_axes(axis)
    _label_ends(axis, tokens[-1], ends)
    condition = f", {plan['percentile']:g} % of requests at load {plan['load']:g}" if plan["load"] else ", idle machine"
    figure.suptitle(f"{plan['model']} on {plan['machine']}: reload (blue) or recompute (orange)?", fontsize=12)
    stamp(figure, f"predicted from {plan['machine_kind']} numbers{condition}")
    return figure


def _label_ends(axis: Axes, at: float, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right ends of lines, pushed apart upwards where they would overlap (heights are logarithms)."""
    apart, lowest = 1.3, 0.0
    for height, name, colour in sorted(ends):
        place = max(height, lowest * apart)
        axis.annotate(
            f" {name}", (at, height), (at, place), fontsize=9, color=colour, va="center", annotation_clip=False
        )
        lowest = place
