"""What a prefix costs to compute: FLOPs by position, seconds by length, and FLOPs for each byte of KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, kv_bytes, linear_flops
from kvlab.lab.draw.style import FLIP, PREDICTED, PUBLISHED, QUIET, RECOMPUTE, RELOAD, new_figure, stamp, token_axis
from kvlab.lab.published import Published
from kvlab.machine import Machine

__all__ = ["flops_per_byte_figure", "growth_figure", "overtakes_at", "published_growth_figure", "token_cost_figure"]

_ATTENTION = "#8C5A00"  # the darker part of recompute
_POINTS = 240
_COUNT = FuncFormatter(lambda value, _: f"{value:,.0f}")


def overtakes_at(arch: ModelArch) -> float:
    """The position from which a token's attention costs more FLOPs than its weight matmuls (full attention only)."""
    return linear_flops(arch, 1) / attention_flops(arch, 0, 1)


def token_cost_figure(arch: ModelArch, start: int, stop: int, longest: int) -> Figure:
    """Position against FLOPs per token, attention on top of the linear layers, with [start, stop) shaded.

    The two ends may come in either order, as sliders do.
    """
    start, stop = min(start, stop), max(start, stop)
    figure, axis = new_figure("Why is a late token dearer than the first one?", width=8.0)
    at = np.linspace(0, longest - 1, _POINTS)
    linear = np.full_like(at, linear_flops(arch, 1) / 1e9)
    attention = np.array([attention_flops(arch, int(i), int(i) + 1) / 1e9 for i in at])
    inside = (at >= start) & (at <= stop)
    for low, high, colour, label in (
        (np.zeros_like(at), linear, RECOMPUTE, "linear layers: each token meets every weight once"),
        (linear, linear + attention, _ATTENTION, "attention: each token meets every token before it"),
    ):
        axis.fill_between(at, low, high, color=colour, alpha=0.22, linewidth=0)
        axis.fill_between(at, low, high, where=inside, color=colour, linewidth=0, label=label)
        axis.plot(at, high, color=colour, linewidth=1.4)
    even = overtakes_at(arch)
    if even < longest:
        axis.axvline(even, ymax=0.78, color=FLIP, linewidth=1.2, linestyle=PREDICTED)
        axis.annotate(
            f" half each at {even:,.0f}", (even, 0.03), xycoords=axis.get_xaxis_transform(), fontsize=9, color=FLIP
        )
    axis.set_xlim(0, longest)
    axis.set_ylim(0, 1.35 * float(linear[0] + attention[-1]))
    axis.xaxis.set_major_formatter(_COUNT)
    axis.set_xlabel("position of the token")
    axis.set_ylabel("GFLOP for this token")
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.set_title(_range_words(arch, start, stop), fontsize=10)
    stamp(figure, f"computed: FLOPs counted from the shape of {arch.name}, nothing measured")
    return figure


def _range_words(arch: ModelArch, start: int, stop: int) -> str:
    total = linear_flops(arch, stop - start) + attention_flops(arch, start, stop)
    share = attention_flops(arch, start, stop) / total if total else 0.0
    return f"positions {start:,} to {stop:,}: {total / 1e12:,.3g} TFLOP, {share:.0%} of it attention"


def growth_figure(record: Mapping[str, Any], fit: tuple[float, float, float]) -> Figure:
    """Prefix length against measured seconds of a `kvlab.lengths/1` record, its fitted curve, and two wrong guesses."""
    tokens, seconds = record["tokens"], record["seconds"]
    t0, a, b = fit
    figure, axis = new_figure("What does a prefix of four times the length cost?", width=8.0, height=4.8)
    n = np.geomspace(tokens[0], tokens[-1] * 1.5, _POINTS)
    axis.plot(tokens, seconds, color=RECOMPUTE, marker="s", markersize=6, linewidth=2, label="prefill, measured")
    axis.plot(
        n, t0 + a * n + b * n**2, color=RECOMPUTE, linestyle=PREDICTED, label="fixed + linear + quadratic, fitted"
    )
    axis.plot(n, a * n, color=QUIET, linestyle=":", linewidth=1.2, label="the linear part alone")
    if b > 0:  # else the times scatter too much to tell
        axis.plot(n, b * n**2, color=_ATTENTION, linestyle=":", linewidth=1.6, label="the quadratic part alone")
    ends = np.array(tokens[-3::2], dtype=float)
    bare = {"color": "white", "pad": 0.5}  # the fit may pass behind a label
    for factor, words in ((4, "4 times"), (16, "16 times")):
        axis.plot(ends, [seconds[-3], factor * seconds[-3]], color=FLIP, linewidth=0.9)
        axis.annotate(f" {words}", (ends[-1], factor * seconds[-3]), fontsize=9, color=FLIP, va="center", bbox=bare)
    token_axis(axis, tokens)
    axis.set_xlim(tokens[0] / 1.1, tokens[-1] * 1.5)
    axis.set_yscale("log")
    axis.set_ylim(seconds[0] / 8, 25 * seconds[-3])
    axis.set_ylabel("time to first token (s)")
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.set_title(
        f"{tokens[-3]:,} to {tokens[-1]:,} tokens: {seconds[-1] / seconds[-3]:.1f} times as long", fontsize=10
    )
    facts, model = record["provenance"]["facts"], record["model"]
    stamp(
        figure,
        f"{record['provenance']['kind']} on {facts.get('gpu') or facts['cpu']} ({facts['torch_threads']} threads),"
        f" {model['name']} {model['dtype']}, fastest of up to {max(len(times) for times in record['samples_s'])}",
    )
    return figure


def published_growth_figure(arch: ModelArch, machine: Machine, figures: Published) -> Figure:
    """Published prefill and reload of an 8B on an H100, beside what FLOPs at two fitted rates say."""
    figure, axis = new_figure("Does a large GPU show the same two parts?", width=8.0)
    n = np.linspace(1000, figures["tokens"][-1], 60).astype(int)
    whole = [machine.prefill_s(arch, 0, int(i)) for i in n]
    rate = machine.prefill.linear_flops_per_s
    axis.plot(figures["tokens"], figures["recompute_s"], color=RECOMPUTE, linestyle=PUBLISHED, linewidth=1.8,
              label="recompute, published")  # fmt: skip
    axis.plot(figures["tokens"], figures["reload_s"], color=RELOAD, linestyle=PUBLISHED, linewidth=1.8,
              label="reload from host RAM, published")  # fmt: skip
    axis.plot(n, whole, color=RECOMPUTE, linestyle=PREDICTED, linewidth=1.1, label="FLOPs ÷ two fitted rates")
    axis.plot(n, [linear_flops(arch, int(i)) / rate(i) for i in n], color=QUIET, linestyle=":", linewidth=1.4,
              label="the linear part of it")  # fmt: skip
    axis.set_xlim(0, figures["tokens"][-1] * 1.02)
    axis.set_ylim(0)
    axis.xaxis.set_major_formatter(_COUNT)
    axis.set_xlabel("prefix (tokens)")
    axis.set_ylabel("time to first token (s)")
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    stamp(figure, f"published: {figures.source}; {figures.about}")
    return figure


def flops_per_byte_figure(archs: Sequence[ModelArch], kv_dtype: str = "bf16") -> Figure:
    """One bar per model: FLOPs of its weight matmuls for each KV byte that they leave, over its FLOPs per token."""
    figure, axis = new_figure("Do bigger models favour reload, or recompute?", width=8.0, height=0.5 * len(archs) + 1.8)
    ratios = [linear_flops(arch, 1) / kv_bytes(arch, 1, kv_dtype) / 1e3 for arch in archs]
    places = range(len(archs), 0, -1)
    axis.barh(places, ratios, color=RECOMPUTE, height=0.6)
    for place, ratio, arch in zip(places, ratios, archs, strict=True):
        flops, size = linear_flops(arch, 1) / 1e9, kv_bytes(arch, 1, kv_dtype) / 2**10
        words = f" {ratio:,.0f} k  ({flops:.3g} GFLOP for {size:,.4g} KiB)"
        axis.annotate(words, (ratio, place), va="center", fontsize=9)
    axis.set_yticks(list(places), [arch.name for arch in archs])
    axis.grid(visible=False, axis="y")
    axis.set_xlim(0, 1.5 * max(ratios))
    axis.set_xlabel("thousand FLOPs to compute again, for each byte of KV cache")
    stamp(figure, f"computed: per token, {kv_dtype}, without attention; from the sizes in each config.json")
    return figure
