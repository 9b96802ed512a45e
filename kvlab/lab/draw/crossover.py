"""Measured and predicted crossovers: the picture of a `kvlab.crossover/1` record."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.lab.draw.style import (
    FLIP,
    PREDICTED,
    RECOMPUTE,
    RELOAD,
    plain_axes,
    seconds_axis,
    shade_interval,
    stamp,
    token_axis,
)

__all__ = ["crossover_figure"]

_QUESTION = "From which prefix length is reloading the KV cache faster than computing it again?"


def crossover_figure(record: Mapping[str, Any]) -> Figure:
    """Prefix length against time to first token, one panel per tier of a `kvlab.crossover/1` record."""
    tiers = record["tiers"]
    columns = len(tiers) if len(tiers) <= 3 else 2
    rows = -(-len(tiers) // columns)
    figure = Figure(figsize=(4.8 * columns + 1, 5.0 * rows + 0.6), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axis, tier in zip(axes, tiers, strict=False):
        _tier_panel(axis, tier)
    for axis in axes[len(tiers) :]:
        axis.remove()
    model, facts = record["model"], record["provenance"]["facts"]
    # One panel is too narrow for a title or a source of one line.
    lines = 2 if columns == 1 else 1
    figure.suptitle(fill(_QUESTION, len(_QUESTION) // lines + 8), fontsize=12)
    source = (
        f"{record['provenance']['kind']} on {facts.get('gpu') or facts['cpu']} ({facts['torch_threads']} threads),"
        f" {model['name']} {model['dtype']}, {record['rounds']} rounds, {record['provenance']['when'][:10]}"
    )
    stamp(figure, fill(source, 80 * columns))
    return figure


def _tier_panel(axis: Axes, tier: Mapping[str, Any]) -> None:
    tokens = tier["tokens"]
    for name, colour, marker in (("recompute", RECOMPUTE, "s"), ("reload", RELOAD, "o")):
        samples = tier[f"{name}_s"]
        axis.plot(tokens, samples, color=colour, marker=marker, markersize=5, linewidth=2, label=f"{name}, measured")
        axis.plot(
            tokens, tier[f"predicted_{name}_s"], color=colour, linestyle=PREDICTED, linewidth=1.4,
            label=f"{name}, predicted",
        )  # fmt: skip
    token_axis(axis, tokens)
    seconds_axis(axis)
    plain_axes(axis)
    axis.tick_params(labelbottom=True, labelleft=True)
    axis.set_title(f"{tier['name']}\n{_flip_words(tier)}", fontsize=10)
    _mark_flip(axis, tier)
    # Below the panel: inside it would hide a curve or a flip.
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)


def _mark_flip(axis: Axes, tier: Mapping[str, Any]) -> None:
    first, last = tier["tokens"][0], tier["tokens"][-1]
    shade_interval(axis, tier["crossover_interval"], first, last)
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
