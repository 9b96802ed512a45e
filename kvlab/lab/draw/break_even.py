"""How slow may a link be? A `kvlab.break_even/1` record against one link, and against a ladder of known links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.lab.class_records import Measured
from kvlab.lab.draw.style import FLIP, PREDICTED, PUBLISHED, QUIET, RECOMPUTE, RELOAD, new_figure, stamp, token_axis
from kvlab.units import format_gb_per_s, format_s

__all__ = ["LINE_RATES_GB_PER_S", "break_even_figure", "class_figure", "ladder_figure", "tried_links_figure"]

# Nominal line rates, ÷ 8 (SATA: 8b/10b coding; PCIe 4.0: 16 GT/s a lane, 128b/130b). What arrives is always less.
LINE_RATES_GB_PER_S: dict[str, float] = {
    "Wi-Fi 802.11g, 54 Mb/s": 0.00675,
    "Ethernet, 100 Mb/s": 0.0125,
    "USB 2.0, 480 Mb/s": 0.06,
    "Ethernet, 1 Gb/s": 0.125,
    "SATA disk, 6 Gb/s": 0.6,
    "Ethernet, 10 Gb/s": 1.25,
    "NVMe disk, PCIe 4.0 ×4": 7.88,
    "Ethernet, 100 Gb/s": 12.5,
    "GPU slot, PCIe 4.0 ×16": 31.5,
}


def break_even_figure(record: Mapping[str, Any], link_mb_per_s: float) -> Figure:
    """Prefix length against time to first token: recompute as measured, and reload over a link of this speed."""
    tokens, link_gb_per_s = record["tokens"], link_mb_per_s / 1e3
    over_link = [
        size / (link_gb_per_s * 1e9) + rest for size, rest in zip(record["kv_bytes"], record["resident_s"], strict=True)
    ]
    figure, axis = new_figure("How slow must a link be before recomputing wins?")
    axis.plot(tokens, record["recompute_s"], color=RECOMPUTE, marker="s", linewidth=2, label="recompute, measured")
    axis.plot(tokens, record["host_s"], color=RELOAD, marker="o", linewidth=2, label="reload from host RAM, measured")
    axis.plot(
        tokens,
        over_link,
        color=RELOAD,
        linestyle=PREDICTED,
        linewidth=2,
        label=f"reload over {format_gb_per_s(link_gb_per_s)}",
    )
    _shade_winner(axis, tokens, over_link, record["recompute_s"])
    token_axis(axis, tokens)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    # Fixed, so that it is the line that moves and not the paper: from the fastest reload to a link of 1 MB/s.
    axis.set_ylim(min(record["host_s"]) / 2, record["kv_bytes"][-1] / 1e6 * 1.5)
    axis.set_ylabel("time to first token (s)")
    axis.set_title(_verdict(over_link[-1], record["recompute_s"][-1], tokens[-1]), fontsize=10)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    stamp(figure, f"{_live(record)}; the dashed line is bytes ÷ speed + the new tokens")
    return figure


def _shade_winner(axis: Axes, tokens: list[int], reload_s: list[float], recompute_s: list[float]) -> None:
    for wins, colour in (([a <= b for a, b in zip(reload_s, recompute_s, strict=True)], RELOAD),
                         ([a >= b for a, b in zip(reload_s, recompute_s, strict=True)], RECOMPUTE)):  # fmt: skip
        axis.fill_between(
            tokens, reload_s, recompute_s, where=wins, interpolate=True, color=colour, alpha=0.13, linewidth=0
        )


def _verdict(reload_s: float, recompute_s: float, tokens: int) -> str:
    name, factor = (
        ("reload", recompute_s / reload_s) if reload_s < recompute_s else ("recompute", reload_s / recompute_s)
    )
    if factor < 1.05:
        return f"at {tokens:,} tokens the two tie: this is the break-even link"
    return f"at {tokens:,} tokens {name} is {factor:.2g} × faster"


def ladder_figure(record: Mapping[str, Any], published: Mapping[str, float], source: str) -> Figure:
    """Known links by speed, on either side of this machine's break-even; `published`: break-evens (GB/s) of others."""
    figure, axis = new_figure("Which of these links beat this machine's prefill?", height=4.8)
    speeds = [speed for speed in record["break_even_gb_per_s"] if speed is not None]
    at = speeds[-1]
    rows = sorted(LINE_RATES_GB_PER_S.items(), key=lambda row: row[1])
    for row, (_, speed) in enumerate(rows):
        axis.barh(row, speed, left=0, height=0.55, color=RELOAD if speed > at else RECOMPUTE)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows])
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(min(rows[0][1], *speeds) / 3, rows[-1][1] * 3)
    axis.set_xlabel("link (GB/s)")
    axis.grid(visible=False, axis="y")
    axis.axvspan(min(speeds), max(speeds), color=FLIP, alpha=0.12, linewidth=0)
    axis.axvline(at, color=FLIP, linewidth=1.4)
    marks: list[tuple[float, str, str]] = [(at, f"break-even here\n{format_gb_per_s(at)}", FLIP)]
    for name, speed in published.items():
        axis.axvline(speed, color=QUIET, linewidth=1.2, linestyle=PUBLISHED)
        marks.append((speed, f"{name}\n{format_gb_per_s(speed)}", QUIET))
    for speed, words, colour in marks:
        place = (speed, len(rows) - 0.4)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
        axis.annotate(words, place, fontsize=9, color=colour, va="bottom", ha="center", bbox=box)
    axis.set_ylim(-0.6, len(rows) + 0.9)
    stamp(
        figure,
        f"break-even {_live(record)}, {record['tokens'][-1]:,} tokens (band: all lengths)\n"
        f"bars: nominal line rates, blue beats this machine's prefill\ndash-dotted, published: {source}",
    )
    return figure


def tried_links_figure(tried: Mapping[str, Any], record: Mapping[str, Any]) -> Figure:
    """Link speed against time to first token: reloads that were really waited for, and the recompute beside them."""
    figure, axis = new_figure("Does the link that we computed really tie?")
    speeds = [speed * 1e3 for speed in tried["gb_per_s"]]
    axis.axhline(
        tried["recompute_s"], color=RECOMPUTE, linewidth=2, label=f"recompute, {format_s(tried['recompute_s'])}"
    )
    axis.plot(speeds, tried["reload_s"], color=RELOAD, marker="o", linewidth=2, label="reload, measured")
    axis.axvline(record["break_even_gb_per_s"][-1] * 1e3, color=FLIP, linewidth=1.2, linestyle=PREDICTED,
                 label="break-even, from the record")  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(speeds, [f"{speed:.3g}" for speed in speeds])
    axis.set_xlabel("emulated link (MB/s)")
    axis.set_ylabel("time to first token (s)")
    axis.minorticks_off()
    axis.set_yticks([*tried["reload_s"]], [f"{seconds:.2g}" for seconds in tried["reload_s"]])
    axis.legend(frameon=False, fontsize=9)
    stamp(figure, f"emulated links in front of host RAM, {_live(record)}, {record['tokens'][-1]:,} tokens")
    return figure


def class_figure(rows: Sequence[Measured]) -> Figure:
    """One dot for each record of a class: the link at which reload and recompute tie on that machine."""
    figure, axis = new_figure("How slow may a link be on our machines?", width=7.6, height=1.9 + 0.32 * len(rows))
    speeds = [row.gb_per_s for row in rows]
    axis.scatter(speeds, range(len(rows)), s=60, color=FLIP, zorder=3)
    for place, speed in enumerate(speeds):
        axis.annotate(f" {format_gb_per_s(speed)}", (speed, place), (7, 0), textcoords="offset points", fontsize=8,
                      va="center")  # fmt: skip
    low, high = min(speeds) / 3, 8 * max(speeds)
    for name, rate in LINE_RATES_GB_PER_S.items():
        if low < rate < high:
            axis.axvline(rate, color=QUIET, linewidth=0.8, linestyle=":")
            axis.annotate(name, (rate, len(rows) - 0.4), fontsize=8, color=QUIET, rotation=20, va="bottom")
    labels = [f"{row.who}: {row.model}, {row.tokens:,} tokens" for row in rows]
    axis.set_yticks(range(len(rows)), labels, fontsize=9, parse_math=False)
    axis.set_ylim(-0.7, len(rows) + 0.8)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(low, high)
    axis.set_xlabel("link at which reload and recompute tie (GB/s); on slower ones recompute wins")
    axis.grid(visible=False, axis="y")
    stamp(figure, "recorded by the class with kvlab crossover, each at its longest prefix; dotted: nominal line rates")
    return figure


def _live(record: Mapping[str, Any]) -> str:
    facts, model = record["provenance"]["facts"], record["model"]
    return f"{record['provenance']['kind']} on {facts.get('gpu') or facts['cpu']}, {model['name']} {model['dtype']}"
