"""The pictures of the lab, in one visual language, as pure functions from records to figures.

Reload is blue, recompute is orange; measured is solid with markers, predicted is dashed; the flip is a dark vertical
line with its interval shaded. A plan from published numbers has thin dashed lines with a label and no markers: nothing
in it was measured here. The two colours differ in lightness too, so print and colour-blind readers can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

__all__ = ["RECOMPUTE", "RELOAD", "crossover_figure", "plan_figure", "save"]

# Okabe and Ito, "Color Universal Design" (2008): blue and orange stay apart under every common colour blindness.
RELOAD = "#0072B2"
RECOMPUTE = "#E69F00"
FLIP = "#222222"
PREDICTED = (0, (4, 3))


def crossover_figure(record: Mapping[str, Any]) -> Figure:
    """Prefix length against time to first token, one panel per tier of a `kvlab.crossover/1` record."""
    tiers = record["tiers"]
    columns = len(tiers) if len(tiers) <= 3 else 2
    rows = -(-len(tiers) // columns)
    figure = Figure(figsize=(4.8 * columns + 1, 4.4 * rows + 0.6), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axis, tier in zip(axes, tiers, strict=False):
        _tier_panel(axis, tier)
    for axis in axes[len(tiers) :]:
        axis.remove()
    model, facts = record["model"], record["provenance"]["facts"]
    figure.suptitle("From which prefix length is reloading the KV cache faster than computing it again?", fontsize=12)
    figure.supxlabel(
        f"{record['provenance']['kind']} on {facts.get('gpu') or facts['cpu']} ({facts['torch_threads']} threads),"
        f" {model['name']} {model['dtype']}, {record['rounds']} rounds, {record['provenance']['when'][:10]}",
        fontsize=8,
        color="#555555",
    )
    return figure


def _tier_panel(axis: Axes, tier: Mapping[str, Any]) -> None:
    tokens = tier["tokens"]
    for name, colour, marker in (("recompute", RECOMPUTE, "s"), ("reload", RELOAD, "o")):
        samples = tier[f"{name}_s"]
        axis.plot(tokens, samples, color=colour, marker=marker, markersize=5, linewidth=2, label=f"{name}, measured")
        axis.plot(
            tokens, tier[f"predicted_{name}_s"], color=colour, linestyle=PREDICTED, linewidth=1.4, label="predicted"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(tokens, [f"{count:,}" for count in tokens], minor=False)
    axis.set_xlabel("prefix (tokens)")
    axis.set_ylabel("time to first token, suffix included (s)")
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axis.tick_params(labelbottom=True, labelleft=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(f"{tier['name']}: {_flip_words(tier)}", fontsize=10)
    _mark_flip(axis, tier)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def _mark_flip(axis: Axes, tier: Mapping[str, Any]) -> None:
    first, last = tier["tokens"][0], tier["tokens"][-1]
    interval = tier["crossover_interval"]
    if interval is not None and interval[0] is not None:
        # An end of "always" or "never" lies outside the picture: shade up to its edge.
        low, high = max(interval[0], first), min(interval[1] or last, last)
        if high > low:
            axis.axvspan(low, high, color=FLIP, alpha=0.10, linewidth=0, label="95 % interval")
    if tier["crossover_tokens"]:
        axis.axvline(tier["crossover_tokens"], color=FLIP, linewidth=1.2, label="flip, measured")
    predicted = tier["predicted_crossover_tokens"]
    if predicted and first <= predicted <= last:
        axis.axvline(predicted, color=FLIP, linewidth=1.2, linestyle=PREDICTED, label="flip, predicted")


def _flip_words(tier: Mapping[str, Any]) -> str:
    if tier["crossover_tokens"] is None:
        return "recompute wins at the longest prefix"
    if tier["crossover_tokens"] == 0:
        return "reload wins at every measured length"
    return f"reload wins from {tier['crossover_tokens']:,} tokens up"


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
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [size["prefix_tokens"] for size in plan["sizes"]]
    axis.set_xticks(ticks, [f"{count:,}" for count in ticks], minor=False)
    axis.set_xlabel("prefix (tokens)")
    axis.set_ylabel("time to first token, suffix included (s)")
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    _label_ends(axis, tokens[-1], ends)
    condition = f", {plan['percentile']:g} % of requests at load {plan['load']:g}" if plan["load"] else ", idle machine"
    figure.suptitle(f"{plan['model']} on {plan['machine']}: reload (blue) or recompute (orange)?", fontsize=12)
    figure.supxlabel(f"predicted from {plan['machine_kind']} numbers{condition}", fontsize=8, color="#555555")
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


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG (150 dots per inch) and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
