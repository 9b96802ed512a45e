"""Route to the cache or move the cache: one request beside a queue, and a cluster with a hot prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.lab.draw.style import CACHED, FLIP, PREDICTED, QUIET, RECOMPUTE, RELOAD, new_figure, plain_axes, stamp
from kvlab.verdict import Verdict
from kvlab.waiting import wait_quantile

__all__ = ["burst_figure", "hot_replica_full_at", "hot_replica_p99_s", "queue_figure", "routing_figure"]

# Green waits where the cache is, orange computes again wherever there is room, blue weighs both.
_ROUTERS = {
    "prefix": (CACHED, "o", "prefix: where the cache is"),
    "load": (RECOMPUTE, "s", "load: where the least waits"),
    "kvlab": (RELOAD, "D", "kvlab: where the first token comes soonest"),
}


def burst_figure(ways: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]], source: str) -> Figure:
    """Seconds to first token of questions that came at once, by question, for "route", "move" and "compute".

    `expected`: the same by arithmetic, dashed.
    """
    figure, axis = new_figure("All questions come at once: how long does each wait?", height=4.0)
    labels = {
        "route": (CACHED, "o", "route: all to the replica that has the prefix"),
        "compute": (RECOMPUTE, "s", "compute: by turns, the other computes the prefix"),
        "move": (RELOAD, "D", "move: by turns, the other loads it from the shared folder"),
    }
    for way, (colour, marker, label) in labels.items():
        numbers = range(1, len(ways[way]) + 1)
        axis.plot(numbers, ways[way], color=colour, marker=marker, linewidth=2, markersize=6, label=label)
        axis.plot(numbers, expected[way], color=colour, linestyle=PREDICTED, linewidth=1.4)
    axis.plot([], [], color=QUIET, linestyle=PREDICTED, linewidth=1.4, label="by arithmetic, on undisturbed replicas")
    axis.set_xticks(range(1, len(ways["route"]) + 1))
    axis.set_xlabel("question")
    axis.set_ylabel("time to first token (s)")
    axis.set_ylim(0, 1.5 * max(max(seconds) for seconds in ways.values()))  # room for the legend
    axis.legend(fontsize=8, loc="upper left", edgecolor="none")
    stamp(figure, source)
    return figure


def queue_figure(verdict: Verdict, source: str) -> Figure:
    """The queue at the replica that holds the prefix against time to first token: wait there, or go elsewhere.

    Elsewhere is an idle replica, which has the cache moved to it over the verdict's tier, or computes the prefix.
    """
    figure, axis = new_figure("How long may the queue at the cache be\nbefore an idle replica is better?", height=4.6)
    figure.set_layout_engine(None)  # fixed margins: the picture does not jump under a slider
    figure.subplots_adjust(left=0.12, right=0.96, top=0.82, bottom=0.16)
    elsewhere_s = min(verdict.ttft_reload_s, verdict.ttft_recompute_s)
    longest_s = 1.6 * max(verdict.ttft_reload_s, verdict.ttft_recompute_s)
    ends = [0.0, longest_s]
    lines = (
        ([verdict.suffix_s, verdict.suffix_s + longest_s], CACHED, "wait where the cache is"),
        ([verdict.ttft_reload_s] * 2, RELOAD, "move the cache to an idle replica"),
        ([verdict.ttft_recompute_s] * 2, RECOMPUTE, "compute it again on an idle replica"),
    )
    for seconds, colour, label in lines:
        axis.plot(ends, seconds, color=colour, linestyle=PREDICTED, linewidth=2, label=label)
    flip_s = elsewhere_s - verdict.suffix_s
    axis.axvline(flip_s, color=FLIP, linewidth=1.3, linestyle=PREDICTED)
    axis.axvspan(0, flip_s, color=CACHED, alpha=0.08, linewidth=0)
    way = "moving the cache" if verdict.ttft_reload_s <= verdict.ttft_recompute_s else "computing it again"
    axis.set_title(f"from {1e3 * flip_s:,.0f} ms of queue on, {way} is better", fontsize=10)
    axis.set_xlim(*ends)
    axis.set_ylim(0, 1.15 * longest_s)
    axis.set_xlabel("queue at the replica that holds the prefix (s)")
    axis.set_ylabel("time to first token (s)")
    axis.legend(fontsize=8, loc="lower right", edgecolor="none")
    stamp(figure, source)
    return figure


def hot_replica_full_at(record: Mapping[str, Any], share: float) -> float:
    """Requests per second at which the one replica that gets all hot requests has no idle second left."""
    return float("inf") if not share else 1 / (share * record["question_s"])


def hot_replica_p99_s(record: Mapping[str, Any], share: float, requests_per_s: float) -> float | None:
    """What 99 % of hot requests do not exceed at that replica by M/D/1, decodes left out; None where it is full."""
    load = requests_per_s / hot_replica_full_at(record, share)
    return record["question_s"] * (1 + wait_quantile(load, 99)) if load < 1 else None


def routing_figure(record: Mapping[str, Any], hot_percent: float) -> Figure:
    """Arrival rate against the 99th percentile of times to first token, and against hits, by router.

    `record`: a `kvlab.hot_prefix/1`; of its shares the one nearest to `hot_percent` is shown.
    """
    shares = record["hot_shares"]
    row = min(range(len(shares)), key=lambda index: abs(shares[index] - hot_percent / 100))
    figure = Figure(figsize=(9.4, 4.8))
    figure.subplots_adjust(left=0.09, right=0.97, top=0.8, bottom=0.27, wspace=0.28)
    figure.suptitle(
        f"Which router answers soonest when {shares[row]:.0%} of requests have one hot prefix?", fontsize=12
    )
    times, hits = figure.subplots(1, 2)
    rates = record["requests_per_s"]
    for router, (colour, marker, label) in _ROUTERS.items():
        style = {"color": colour, "marker": marker, "linewidth": 2, "markersize": 6}
        times.plot(rates, record["ttft_p99_s"][router][row], label=label, **style)
        hits.plot(rates, [100 * share for share in record["hit_share"][router][row]], **style)
    _mark_full(times, record, shares[row])
    times.set_yscale("log")
    every = [s for rows in record["ttft_p99_s"].values() for seconds in rows for s in seconds]
    times.set_ylim(min(every) / 2, max(every) * 2)
    times.yaxis.set_major_formatter("{x:g}")
    times.set_ylabel("time to first token, 99th percentile (s)")
    times.set_title("lower is better", fontsize=9, color=QUIET)
    hits.set_ylim(0, 100)
    hits.set_ylabel("prompt tokens that were not computed (%)")
    hits.set_title("higher looks better", fontsize=9, color=QUIET)
    for axis in (times, hits):
        plain_axes(axis)
        axis.set_xlabel("requests per second, all replicas")
        axis.set_xlim(0.8 * rates[0], 1.05 * rates[-1])
    handles, labels = times.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 0.05), ncols=2)
    stamp(
        figure,
        f"simulated for {record['seconds']:g} s of arrivals: {record['replicas']} replicas of {record['model']} on"
        f" {record['machine']} (published rates)",
    )
    return figure


def _mark_full(axis: Axes, record: Mapping[str, Any], share: float) -> None:
    """What the closed form says about the hot replica: its 99th percentile, and where it is full."""
    rates = record["requests_per_s"]
    steps = [rates[0] + (rates[-1] - rates[0]) * i / 60 for i in range(61)]
    known = [(rate, hot_replica_p99_s(record, share, rate)) for rate in steps]
    curve = [(rate, seconds) for rate, seconds in known if seconds is not None and share]
    if curve:
        axis.plot(*zip(*curve, strict=True), color=CACHED, linestyle=PREDICTED, label="the hot replica's queue, M/D/1")
    full = hot_replica_full_at(record, share)
    if full <= rates[-1]:
        axis.axvline(full, color=FLIP, linewidth=1.3, linestyle=PREDICTED, label="the hot replica is full")
