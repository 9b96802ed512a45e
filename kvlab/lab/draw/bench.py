"""A bench record's picture: every ratio as a dot, its interval as a line, the goal as a tick."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from kvlab.experiments.bench.rows import ratios
from kvlab.experiments.bench.table import by_group
from kvlab.lab.draw.style import CACHED, FLIP, QUIET, RECOMPUTE, RELOAD, WRONG, plain_axes, stamp

__all__ = ["bench_figure"]

_LONGEST_NAME = 78
_ROW_INCHES = 0.2
_TICKS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
# Of a peer's own colour; whatever else a row stands beside is grey.
_LOOKS = {
    "floor": (RELOAD, "o", "of the floor (the least work that the task needs)"),
    "transformers": (RECOMPUTE, "s", "transformers"),
    "vllm": (CACHED, "D", "vLLM"),
}
_OTHER = (QUIET, "v", "another way of ours, or another library")


def bench_figure(record: Mapping[str, Any]) -> Figure:
    """One line for each row that has a ratio, by group; `record` is a `kvlab.bench/1`. The axis is logarithmic."""
    rows = [row for row in record["rows"] if ratios(row)]
    figure = Figure(figsize=(11, 1.7 + _ROW_INCHES * max(4, len(rows) + 1.4 * len({r.get("group") for r in rows}))))
    axis = figure.subplots()
    figure.set_layout_engine("constrained")
    figure.suptitle("How many times as fast as the floor and the peers is kvlab?", fontsize=12)
    height, places, names = 0.0, [], []
    seen: set[str] = set()
    for group, members in by_group(rows):
        if group:
            at = (-0.006, height)
            where = axis.get_yaxis_transform()
            axis.annotate(group, at, xycoords=where, fontsize=9, weight="bold", ha="right", va="center")
            axis.axhline(height, color="#dddddd", linewidth=0.6)
            height += 1.2
        for row in members:
            seen |= _draw_row(axis, height, row)
            places.append(height)
            names.append(_short(row["name"]))
            height += 1
        height += 0.2
    _finish(axis, places, names, height, seen)
    facts = record["facts"]
    left_out = len(record["rows"]) - len(rows)
    stamp(
        figure,
        f"live on {facts.get('gpu') or facts['cpu']} ({facts['torch_threads']} threads), {record['when'][:10]}; lines:"
        f" 95 % intervals; {left_out} rows without a ratio are not shown",
    )
    return figure


def _draw_row(axis: Axes, height: float, row: Mapping[str, Any]) -> set[str]:
    """The row's ratios; the interval belongs to the first. Returns what it was compared with."""
    found = ratios(row)
    missed = row["met"] is False
    if row["interval"] and None not in row["interval"]:
        colour = _LOOKS.get(next(iter(found)), _OTHER)[0]
        axis.plot(row["interval"], (height, height), color=colour, linewidth=2.2, solid_capstyle="butt", alpha=0.6)
    for name, ratio in found.items():
        colour, marker, _ = _LOOKS.get(name, _OTHER)
        axis.plot([ratio], [height], marker=marker, color=colour, markersize=5, linestyle="none")
    goal = re.search(r"≥ ([\d.]+) ×", row["goal"])
    if goal:
        mark = [height - 0.38, height + 0.38]
        axis.plot([float(goal[1])] * 2, mark, color=WRONG if missed else FLIP, linewidth=1.6, zorder=3)
    return {name if name in _LOOKS else "" for name in found}


def _finish(axis: Axes, places: list[float], names: list[str], height: float, seen: set[str]) -> None:
    plain_axes(axis)
    axis.grid(visible=False, axis="y")
    axis.axvline(1, color=FLIP, linewidth=0.9)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xticks([tick for tick in _TICKS if low <= tick <= high])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} ×"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_yticks(places, names, fontsize=8)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(height, -0.8)
    axis.set_xlabel("right of 1: kvlab is faster")
    for name in [*(name for name in _LOOKS if name in seen), *([""] if "" in seen else [])]:
        colour, marker, label = _LOOKS.get(name, _OTHER)
        axis.plot([], [], marker=marker, color=colour, linestyle="none", markersize=5, label=label)
    axis.plot([], [], marker="|", color=FLIP, linestyle="none", markersize=9, markeredgewidth=1.6, label="goal, met")
    axis.plot(
        [], [], marker="|", color=WRONG, linestyle="none", markersize=9, markeredgewidth=1.6, label="goal, missed"
    )
    axis.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.35, 1.0), ncols=3)


def _short(name: str) -> str:
    """What stands before a "; floor: …" remark, cut where it would not fit."""
    name = name.partition("; floor")[0]
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
