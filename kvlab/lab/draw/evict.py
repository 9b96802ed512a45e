"""Idle caches: who holds the pool, what evicting them costs, whether hits make answers soon, when saving pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.arch import ModelArch
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
    token_axis,
)
from kvlab.machine import Machine
from kvlab.storing import Storing, storing
from kvlab.units import format_gb_per_s
from kvlab.verdict import decide

__all__ = ["hits_figure", "pool_figure", "saving_figure", "waits_figure"]

# Okabe and Ito's: of owners or policies, to whom none of the lab's meanings belongs.
_COLOURS = (CACHED, RELOAD, RECOMPUTE, "#CC79A7", "#56B4E9", "#F0E442", WRONG)
_GIB, _MIB = 2**30, 2**20


def pool_figure(record: Mapping[str, Any]) -> Figure:
    """A `kvlab.occupancy/1`: what each owner has in the pool over time, stacked up to the pool's size."""
    figure, axis = new_figure("Whose cache lies in the pool while agents wait for their tools?", width=8.6, height=4.6)
    scale, unit = (_GIB, "GiB") if record["pool_bytes"] >= _GIB else (_MIB, "MiB")
    owned = {name: [size / scale for size in sizes] for name, sizes in record["owned_bytes"].items()}
    axis.stackplot(
        record["time_s"], list(owned.values()), labels=list(owned), colors=_COLOURS, step="post", alpha=0.85,
        edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    top = record["pool_bytes"] / scale
    axis.axhline(top, color=FLIP, linewidth=1.2)
    axis.annotate("the pool is full", (0.01, top), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    for turn in record["turns"]:
        place = (turn["begin_s"], 1.09 * top)
        axis.annotate(_initials(turn["owner"]), place, fontsize=9, color=QUIET, ha="left", annotation_clip=False)
        axis.axvline(turn["begin_s"], color=QUIET, linewidth=0.6, linestyle=":")
    axis.set_ylim(0, 1.18 * top)
    axis.set_xlim(0, record["time_s"][-1])
    axis.set_xlabel("time (s); letters: whose turn begins")
    axis.set_ylabel(f"full blocks in the pool ({unit})")
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    stamp(figure, f"live on this machine: {record['model']}, least recently used out first")
    return figure


def _initials(owner: str) -> str:
    name, _, branch = owner.removeprefix("agent ").partition(",")
    return f"{name}'" if branch else name


def hits_figure(result: Mapping[str, Any], *, source: str) -> Figure:
    """Policies by name with "hit_rate" and "ttft_mean_s": does the one with the most hits answer soonest?"""
    figure, axis = new_figure("Does the best hit rate give the best time to first token?", height=4.0)
    soonest = min(result, key=lambda name: result[name]["ttft_mean_s"])
    most_hits = max(result, key=lambda name: result[name]["hit_rate"])
    for name, report in result.items():
        colour = CACHED if name == soonest else WRONG if name == most_hits else QUIET
        place = (100 * report["hit_rate"], report["ttft_mean_s"])
        axis.scatter(*place, s=70, color=colour, zorder=3)
        note = " (soonest)" if name == soonest else ""
        note += " (most hits)" if name == most_hits else ""
        axis.annotate(f"{name}{note}", place, (0, 9), textcoords="offset points", ha="center", fontsize=9)
    axis.margins(0.22, 0.2)
    axis.set_xlabel("prompt tokens found in the pool or a tier and used (%)")
    axis.set_ylabel("mean time to first token (s)")
    stamp(figure, source)
    return figure


def waits_figure(record: Mapping[str, Any]) -> Figure:
    """A `kvlab.waits/1`: regret of each eviction, summed up answer by answer."""
    figure, axis = new_figure("How long have callers waited because their cache had left?", width=8.2, height=4.6)
    count = record["requests"]
    ends = []
    for (name, lost_s), colour in zip(record["lost_s"].items(), (QUIET, *_COLOURS), strict=False):
        axis.plot(range(1, count + 1), lost_s, color=colour, linewidth=1.8)
        ends.append((lost_s[-1], f"{name}: {lost_s[-1]:.0f} s", colour))
    _label_ends(axis, count, ends)
    axis.axhline(0, color=FLIP, linewidth=0.8, linestyle=PREDICTED)
    axis.set_xlim(0, count)
    axis.set_xlabel("answers so far")
    axis.set_ylabel("regret, summed up (s)")
    best = f"a pool that holds everything needs {record['best_mean_s'] * 1e3:.0f} ms an answer"
    stamp(figure, f"simulated: {record['model']} on {record['machine']}; {best}")
    return figure


def _label_ends(axis: Axes, at: float, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right ends of lines, pushed apart upwards where they would overlap."""
    low, high = axis.get_ylim()
    apart, lowest = (high - low) * 0.055, low
    for height, name, colour in sorted(ends):
        place = max(height, lowest)
        axis.annotate(
            f" {name}", (at, height), (at, place), fontsize=9, color=colour, va="center", annotation_clip=False
        )
        lowest = place + apart


# When saving pays ----------------------------------------------------------------------------------------------------

_PAUSES_S = {"read a file": 0.05, "fetch a page": 1.0, "run the tests": 30.0, "ask a person": 120.0}


def saving_figure(
    arch: ModelArch, machine: Machine, gb_per_s: float, cost_percent: float, *, kv_dtype: str = "bf16"
) -> Figure:
    """When storing behind a link of `gb_per_s` pays: the shortest pause, and the smallest chance of return.

    `cost_percent`: of each second of storing, how much is lost to others.
    """
    load, store = (machine.link("host", way).behind(gb_per_s) for way in ("load", "store"))
    behind = machine.with_link("link", load, store)
    tokens = [2**power for power in range(9, 17) if 2**power < arch.max_positions - 16]
    found = [
        storing(
            decide(arch, behind, prefix=n, suffix=16, tier="link", kv_dtype=kv_dtype),
            store_cost_per_s=cost_percent / 100,
        )
        for n in tokens
    ]
    figure = Figure(figsize=(10, 4.3))  # fixed margins: the picture does not jump under a slider
    figure.subplots_adjust(left=0.08, right=0.97, top=0.83, bottom=0.17, wspace=0.22)
    figure.suptitle("When is saving an idle cache worth it?", fontsize=12)
    pauses, chances = figure.subplots(1, 2)
    _pauses_panel(pauses, tokens, found)
    _chances_panel(chances, tokens, found)
    stamp(
        figure,
        f"predicted from published rates: {arch.name} on {machine.name}; link of {format_gb_per_s(gb_per_s)} both ways",
    )
    return figure


def _pauses_panel(axis: Axes, tokens: Sequence[int], found: Sequence[Storing]) -> None:
    gaps_s = [each.break_even_idle_gap_s for each in found]
    axis.plot(tokens, gaps_s, color=RELOAD, linestyle=PREDICTED, linewidth=1.8)
    axis.fill_between(tokens, gaps_s, 1000, color=CACHED, alpha=0.10, linewidth=0)
    for name, pause_s in _PAUSES_S.items():
        axis.axhline(pause_s, color=QUIET, linewidth=0.7, linestyle=":")
        axis.annotate(name, (tokens[0], pause_s), fontsize=8, color=QUIET, va="bottom")
    axis.set_title("memory is free for a while above the line", fontsize=10)
    axis.set_yscale("log")
    axis.set_ylim(0.001, 1000)
    axis.set_ylabel("pause (s)")
    token_axis(axis, tokens[::2], "cached prefix (tokens)")
    plain_axes(axis)


def _chances_panel(axis: Axes, tokens: Sequence[int], found: Sequence[Storing]) -> None:
    chances = [min(100 * each.break_even_return_chance, 1000) for each in found]
    axis.plot(tokens, chances, color=RELOAD, linestyle=PREDICTED, linewidth=1.8)
    axis.fill_between(tokens, chances, 100, where=[c < 100 for c in chances], color=CACHED, alpha=0.10, linewidth=0)
    never = [n for n, chance in zip(tokens, chances, strict=True) if chance > 100]
    title = "storing pays above the line"
    if never:
        title = "storing never pays" if len(never) == len(tokens) else f"never pays at {len(never)} of these lengths"
    axis.set_title(title, fontsize=10)
    axis.set_ylim(0, 100)
    axis.set_ylabel("chance of return (%)")
    token_axis(axis, tokens[::2], "cached prefix (tokens)")
    plain_axes(axis)
