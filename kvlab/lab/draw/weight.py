"""What a cache weighs: a token in its four forms, attention designs, agents in an accelerator, bytes on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.lab.draw.style import (
    CACHED,
    FLIP,
    PREDICTED,
    QUIET,
    RECOMPUTE,
    RELOAD,
    WRONG,
    new_figure,
    plain_axes,
    stamp,
)
from kvlab.units import format_bytes, format_s

__all__ = ["agents_figure", "decoding_figure", "designs_figure", "forms_figure", "whereabouts_figure"]

_OTHER = "#999999"
_GIB = 2**30


def decoding_figure(record: Mapping[str, Any]) -> Figure:
    """New token against its seconds, without and with a cache (a record of `experiments.decoding`)."""
    figure, axis = new_figure("What does keeping the KV cache save while a text is written?")
    steps = range(1, len(record["with_cache_s"]) + 1)
    for name, colour, marker in (("without_cache", RECOMPUTE, "s"), ("with_cache", CACHED, "o")):
        seconds = record[f"{name}_s"]
        label = f"{name.replace('_', ' ')}: {format_s(sum(seconds))} in all"
        axis.plot(steps, seconds, color=colour, marker=marker, markersize=4, linewidth=2, label=label)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.set_xlabel("new token")
    axis.set_ylabel("time for this token (s)")
    seconds = [*record["without_cache_s"], *record["with_cache_s"]]
    axis.set_ylim(min(seconds) / 2, 4 * max(seconds))  # room for the legend above the lines
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    facts, model = record["provenance"]["facts"], record["model"]
    stamp(
        figure,
        f"{record['provenance']['kind']} on {facts.get('gpu') or facts['cpu']}, {model['name']} {model['dtype']},"
        f" {record['prompt_tokens']} tokens of prompt",
    )
    return figure


def forms_figure(forms: Mapping[str, float], source: str) -> Figure:
    """One bar per form of the same text, in bytes; the last is its KV cache."""
    figure, axis = new_figure("What does the same text weigh?", height=2.9)
    names, sizes = list(forms), list(forms.values())
    colours = [_OTHER] * (len(names) - 1) + [CACHED]
    axis.barh(names, sizes, height=0.6, color=colours)
    for place, size in enumerate(sizes):
        axis.annotate(f" {format_bytes(size)}", (size, place), va="center", fontsize=10)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(min(sizes) / 4, max(sizes) * 12)
    axis.set_xlabel("bytes")
    axis.grid(visible=False, axis="y")
    stamp(figure, source)
    return figure


def designs_figure(measured: Sequence[Mapping[str, Any]], computed: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Two panels: bytes per token counted on real tensors (solid), and computed sizes of a large model (outlined)."""
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    figure.suptitle("How much of the cache is a choice of the model's designer?", fontsize=12)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    _bars(left, {row["design"]: row["bytes_per_token"] for row in measured}, CACHED, filled=True)
    left.set_xlabel("bytes per token")
    left.set_title("measured: random weights, 4 layers, fp32", fontsize=10)
    _bars(right, {row["design"]: row["bytes"] for row in computed}, CACHED, filled=False)
    right.set_xlabel("bytes")
    right.set_title(f"computed: {title}", fontsize=10)
    stamp(figure, "solid: live, added up on the tensors that hold K and V; dashed outline: arithmetic, nothing was run")
    return figure


def _bars(axis: Axes, sizes: Mapping[str, float], colour: str, *, filled: bool) -> None:
    plain_axes(axis)
    style: dict[str, Any] = {"color": colour}
    if not filled:
        style = {"facecolor": "white", "edgecolor": colour, "linestyle": PREDICTED, "linewidth": 1.6}
    axis.barh(list(sizes), list(sizes.values()), height=0.6, **style)
    for place, size in enumerate(sizes.values()):
        axis.annotate(f" {format_bytes(size)}", (size, place), va="center", fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.35 * max(sizes.values()))
    axis.set_xticks([])
    axis.grid(visible=False, axis="y")


def whereabouts_figure(rows: Sequence[Mapping[str, Any]], source: str) -> Figure:
    """Bytes in the pool and in host RAM at each moment of a prefix's life."""
    figure, axis = new_figure("Where are the bytes of the prefix?", height=3.6)
    moments = [row["moment"] for row in rows]
    for shift, key, colour, label in (
        (-0.2, "pool_bytes", CACHED, "the pool, where the model reads it"),
        (0.2, "tier_bytes", RELOAD, "host RAM, where it waits"),
    ):
        heights = [row[key] / 2**20 for row in rows]
        axis.bar([i + shift for i in range(len(rows))], heights, width=0.36, color=colour, label=label)
    axis.set_xticks(range(len(rows)), moments)
    axis.set_ylabel("held (MiB)")
    axis.set_ylim(0, 1.35 * max(max(row["pool_bytes"], row["tier_bytes"]) for row in rows) / 2**20)
    axis.grid(visible=False, axis="x")
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper center")
    stamp(figure, source)
    return figure


def agents_figure(
    agents: int, agent_bytes: int, weights_bytes: int, hbm_gib: float, name: str, most_agents: int = 100
) -> Figure:
    """The accelerator's memory as a bar that fills, and paused agents against GiB; `name` says model and context."""
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    figure.suptitle("How many paused agents fit beside the model?", fontsize=12)
    bar, axis = figure.subplots(1, 2, width_ratios=(1, 4), sharey=True)
    weights_gib, agent_gib = weights_bytes / _GIB, agent_bytes / _GIB
    fits = max(0, int((hbm_gib * _GIB - weights_bytes) // agent_bytes))
    inside = min(agents, fits)
    full_gib, wanted_gib = weights_gib + inside * agent_gib, weights_gib + agents * agent_gib
    _fill(bar, weights_gib, full_gib, wanted_gib)

    for low, high, colour in ((0, min(fits, most_agents), CACHED), (fits, most_agents, WRONG)):
        if low < high:
            ends_gib = [weights_gib + low * agent_gib, weights_gib + high * agent_gib]
            axis.plot([low, high], ends_gib, color=colour, linewidth=2, linestyle=PREDICTED)
    axis.plot(agents, wanted_gib, color=WRONG if agents > fits else CACHED, marker="o", markersize=9, clip_on=True)
    axis.set_xlim(0, most_agents)
    axis.set_xlabel("paused agents")
    if fits < most_agents:
        axis.axvline(fits, color=FLIP, linewidth=1.2)
        left_side = fits > most_agents / 2
        axis.annotate(f" full at {fits:,} ", (fits, 0.04 * hbm_gib), color=FLIP, ha="right" if left_side else "left")
    for panel in (bar, axis):
        plain_axes(panel)
        panel.axhline(hbm_gib, color=FLIP, linewidth=1.2, linestyle=":")
    at, side = (0.99, "right") if fits < most_agents / 2 else (0.01, "left")
    at, side, below = (0.99, "right", True) if fits < most_agents / 2 else (0.01, "left", False)
    axis.annotate(
        f"{hbm_gib:g} GiB of device memory",
        (at * most_agents, hbm_gib),
        (0, -4 if below else 3),
        textcoords="offset points",
        fontsize=9,
        color=QUIET,
        ha=side,
        va="top" if below else "bottom",
    )
    bar.set_ylabel("device memory (GiB)")
    bar.set_ylim(0, 1.5 * hbm_gib)  # fixed, so that it is the bar that moves and not the paper
    result = (
        f"{agents - inside:,} of {agents:,} must be offloaded or forgotten" if agents > fits else f"all {agents:,} fit"
    )
    axis.set_title(f"{name}: {format_bytes(agent_bytes)} each; {result}", fontsize=10)
    stamp(figure, "computed: weights and whole KV blocks only; a server needs some room for its work as well")
    return figure


def _fill(bar: Axes, weights_gib: float, full_gib: float, wanted_gib: float) -> None:
    """Weights, agents that fit, and those that do not, on top of each other."""
    bar.bar(0, weights_gib, color=_OTHER, width=0.7)
    bar.bar(0, full_gib - weights_gib, bottom=weights_gib, color=CACHED, width=0.7)
    over_gib = wanted_gib - full_gib
    bar.bar(0, over_gib, bottom=full_gib, color=WRONG, width=0.7, hatch="//", edgecolor="white")
    bar.set_xticks([0], ["weights (grey)\nand agents"])
