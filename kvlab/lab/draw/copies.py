"""What a link gives: bytes per copy against GB/s, with a marker for a block; and the same bytes over several ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.lab.draw.style import FLIP, PREDICTED, PUBLISHED, QUIET, RELOAD, new_figure, stamp
from kvlab.lab.published import Published
from kvlab.machine import Curve, Link
from kvlab.units import format_bytes

__all__ = ["ONE_COPY_IS", "bandwidth_figure", "block_size_figure", "copy_bytes", "copy_size_figure"]

ONE_COPY_IS = ("K or V of one layer", "one layer, K and V", "all layers")
_TICKS = [4**step for step in range(4, 14)]


def copy_bytes(arch: ModelArch, block_tokens: int, one_copy_is: str, dtype: str = "bf16") -> int:
    """Bytes of one copy when a block of `block_tokens` moves in the pieces that `one_copy_is` names."""
    pieces = {"K or V of one layer": 2 * len(arch.layers), "one layer, K and V": len(arch.layers), "all layers": 1}
    return kv_bytes(arch, block_tokens, dtype) // pieces[one_copy_is]


def copy_size_figure(record: Mapping[str, Any], link: Link, marks: Mapping[str, int]) -> Figure:
    """Bytes per copy against GB/s: a measured `kvlab.copy_sizes/1`, the two numbers behind it, and marked copies.

    `marks`: bytes of one copy by what it is.
    """
    figure, axis = new_figure("How large must a copy be to get what the link can give?", width=8.0)
    _size_axes(axis)
    axis.plot(record["copy_bytes"], record["gb_per_s"], color=RELOAD, marker="o", linewidth=2, label="measured")
    sizes = np.geomspace(record["copy_bytes"][0], record["copy_bytes"][-1], 100)
    axis.plot(sizes, [_rate(link, size) for size in sizes], color=RELOAD, linestyle=PREDICTED,
              label="peak and overhead per copy")  # fmt: skip
    low, high = min(record["gb_per_s"]) / 1.5, 2.5 * max(record["gb_per_s"])
    axis.set_ylim(low, high)
    for name, size in marks.items():
        axis.axvline(size, color=QUIET, linewidth=1, linestyle=":")
        axis.annotate(f"{name}\n{_size_words(size)}", (size, low), (4, 4), textcoords="offset points", fontsize=8)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    facts = record["provenance"]["facts"]
    stamp(figure, f"{record['provenance']['kind']} on {facts.get('gpu') or facts['cpu']}, to host RAM, one thread;"
                  f" fastest of {record['parameters']['rounds']} rounds")  # fmt: skip
    return figure


def block_size_figure(
    arch: ModelArch, block_tokens: int, one_copy_is: str, figures: Published, dtype: str = "bf16"
) -> Figure:
    """Where the copies of a block lie on the published curves of an H100: copies by its engines, and by a kernel."""
    figure, axis = new_figure("What does the size of a block, and its layout, leave of the link?", width=8.0)
    _size_axes(axis)
    sizes, peak = figures["copy_bytes"], max(figures["dma_gb_per_s"])
    axis.plot(sizes, figures["dma_gb_per_s"], color=RELOAD, linestyle=PUBLISHED, linewidth=1.8,
              label="one copy call for each piece (DMA), published")  # fmt: skip
    axis.plot(sizes, figures["kernel_gb_per_s"], color=QUIET, linestyle=PUBLISHED, linewidth=1.2,
              label="one kernel that gathers all pieces, published")  # fmt: skip
    size = copy_bytes(arch, block_tokens, one_copy_is, dtype)
    axis.set_ylim(0.5, 160)
    axis.axvline(size, ymax=0.78, color=FLIP, linewidth=1)
    if size < sizes[0]:
        words = f"{_size_words(size)}, smaller than any published copy"
    elif size > sizes[-1]:
        words = f"{_size_words(size)}, larger than any published copy"
    else:
        rate = Curve(tuple(zip(sizes, figures["dma_gb_per_s"], strict=True)))(size)
        axis.plot([_TICKS[0] / 1.5, size], [rate, rate], color=FLIP, linewidth=1)
        words = f"{_size_words(size)}, {rate:.1f} GB/s, {rate / peak:.0%} of the best"
    axis.set_title(f"{arch.name} in {dtype}, {block_tokens} tokens, {one_copy_is}: {words}", fontsize=10)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    stamp(figure, f"published: {figures.source}; {figures.about}")
    return figure


def bandwidth_figure(rows: Sequence[tuple[str, float]], peak_gb_per_s: float, source: str) -> Figure:
    """A bar for each (name, GB/s), with its share of the peak."""
    title = "What bandwidth did the same bytes really get?"
    figure, axis = new_figure(title, width=8.0, height=0.5 * len(rows) + 1.6)
    places = range(len(rows), 0, -1)
    axis.barh(places, [rate for _, rate in rows], color=RELOAD, height=0.6)
    for place, (_, rate) in zip(places, rows, strict=True):
        axis.annotate(f" {rate:.3g} GB/s, {rate / peak_gb_per_s:.0%}", (rate, place), va="center", fontsize=9)
    axis.set_yticks(list(places), [name for name, _ in rows])
    axis.grid(visible=False, axis="y")
    axis.set_xlim(0, 1.25 * max(rate for _, rate in rows))
    axis.set_xlabel("GB/s")
    stamp(figure, source)
    return figure


def _rate(link: Link, size_bytes: float) -> float:
    """GB/s of copies of this size, one after another."""
    return size_bytes / link.transfer_s(int(size_bytes), 1, 1) / 1e9


def _size_axes(axis: Axes) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(_TICKS, [_size_words(size) for size in _TICKS], minor=False)
    axis.set_xlim(_TICKS[0] / 1.5, _TICKS[-1] * 1.5)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("bytes of one copy")
    axis.set_ylabel("GB/s")


def _size_words(size_bytes: int) -> str:
    """A size as short as a tick label has to be: "12 KiB"."""
    number, unit = format_bytes(size_bytes).split()
    return f"{float(number):g} {unit}"
