"""First-token times of a server: the picture of a `kvlab.probe/1` record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.lab.draw.style import (
    CACHED,
    FLIP,
    RECOMPUTE,
    RELOAD,
    plain_axes,
    seconds_axis,
    shade_interval,
    stamp,
    token_axis,
)

__all__ = ["probe_figure"]

_LOOKS = {
    "recompute": ("computed again (proven miss)", RECOMPUTE, "s"),
    "resident": ("still on the device (proven hit)", CACHED, "^"),
    "reload": ("reloaded from {tier} (proven hit behind a reset)", RELOAD, "o"),
}


def probe_figure(record: Mapping[str, Any]) -> Figure:
    """Prefix length against time to first token, one panel for each number of requests at once."""
    levels, server = record["levels"], record["server"]
    columns = min(3, len(levels))
    rows = -(-len(levels) // columns)
    figure = Figure(figsize=(5.2 * columns + 2, 4.4 * rows + 0.6), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axis, level in zip(axes, levels, strict=False):
        _panel(axis, level, server)
    for axis in axes[len(levels) :]:
        axis.remove()
    figure.suptitle("From which prefix length does a cache hit win on this server?", fontsize=12)
    ended = ", stopped early" if record["stopped"] else ""
    stamp(
        figure,
        f"live on {server['url']}, {server['model']}, {record['rounds']} whole rounds{ended},"
        f" {record['provenance']['when'][:10]}",
    )
    return figure


def _panel(axis: Axes, level: Mapping[str, Any], server: Mapping[str, Any]) -> None:
    for arm, medians in level["seconds"].items():
        points = [(n, s) for n, s in zip(level["tokens"], medians, strict=True) if s is not None]
        if not points:
            continue
        label, colour, marker = _LOOKS[arm]
        label = label.format(tier=server["tier"])
        if server["proof"] == "none":
            label = label.replace("proven", "unproven")
        axis.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=2, label=label)
    token_axis(axis, level["tokens"])
    seconds_axis(axis)
    plain_axes(axis)
    axis.tick_params(labelbottom=True, labelleft=True)
    arm = "reload" if "reload" in level["against_recompute"] else "resident"
    found = level["against_recompute"][arm]
    at_once = "1 request at a time" if level["concurrency"] == 1 else f"{level['concurrency']} requests at once"
    axis.set_title(f"{at_once}: {_flip_words(arm, found)}", fontsize=10)
    _mark_flip(axis, found)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def _mark_flip(axis: Axes, found: Mapping[str, Any]) -> None:
    if not found["tokens"]:
        return
    shade_interval(axis, found["crossover_interval"], found["tokens"][0], found["tokens"][-1])
    if found["crossover_tokens"]:
        axis.axvline(found["crossover_tokens"], color=FLIP, linewidth=1.2, label="flip, measured")


def _flip_words(arm: str, found: Mapping[str, Any]) -> str:
    if not found["tokens"]:
        return "nothing to compare"
    if found["crossover_tokens"] is None:
        return "computing again wins at the longest prefix"
    if found["crossover_tokens"] == 0:
        return f"{arm} wins at every measured length"
    return f"{arm} wins from {found['crossover_tokens']:,} tokens up"
