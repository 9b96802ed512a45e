"""The one visual language of the lab: colours, lines, axes, and where a number comes from.

Reload is blue, recompute is orange; measured is solid with markers, predicted is dashed; the flip is a dark vertical
line with its interval shaded. Published numbers are thin dash-dotted lines without markers, or with hollow
ones where a line would be hidden: nothing in them was measured here. The two colours differ in lightness too, so print
and colour-blind readers can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

__all__ = [
    "CACHED",
    "FLIP",
    "PREDICTED",
    "PUBLISHED",
    "RECOMPUTE",
    "RELOAD",
    "WRONG",
    "new_figure",
    "plain_axes",
    "png",
    "save",
    "seconds_axis",
    "shade_interval",
    "stamp",
    "token_axis",
]

# Okabe and Ito, "Color Universal Design" (2008): these stay apart under every common colour blindness.
RELOAD = "#0072B2"  # blue
RECOMPUTE = "#E69F00"  # orange
WRONG = "#D55E00"  # vermilion: corrupt bytes, a broken promise
CACHED = "#009E73"  # green: what is in the pool and may be used
FLIP = "#222222"
QUIET = "#555555"
PREDICTED = (0, (4, 3))
PUBLISHED = (0, (6, 2, 1, 2))
_DPI = 110


def new_figure(title: str, width: float = 7.2, height: float = 4.4) -> tuple[Figure, Axes]:
    """A figure of one panel (inches) whose title is the question that it answers."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axis = figure.subplots()
    plain_axes(axis)
    return figure, axis


def plain_axes(axis: Axes) -> None:
    """A faint grid, no box."""
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def token_axis(axis: Axes, tokens: Sequence[int], label: str = "prefix (tokens)") -> None:
    """A base-2 logarithmic x axis with a tick at each of `tokens`."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(tokens), [f"{count:,}" for count in tokens], minor=False)
    axis.set_xlabel(label)


def seconds_axis(axis: Axes, label: str = "time to first token, suffix included (s)") -> None:
    """A logarithmic y axis with plain numbers at 1, 2 and 5 of each decade: few curves span many decades."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_ylabel(label)


def stamp(figure: Figure, source: str) -> None:
    """Say in the picture where its numbers come from: "live on …", "recorded on …", "published: …", "emulated"."""
    figure.supxlabel(source, fontsize=8, color=QUIET)


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG (150 dots per inch) and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes, always as many pixels as its size in inches says."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def shade_interval(axis: Axes, interval: Sequence[float | None] | None, first: float, last: float) -> None:
    """Shade where a flip lies: 0 is always, None never. What is outside of the picture ends at its edge."""
    if interval is None or interval[0] is None:
        return
    low, high = max(interval[0], first), last if interval[1] is None else min(interval[1], last)
    if high > low:
        axis.axvspan(low, high, color=FLIP, alpha=0.10, linewidth=0, label="flip, 95 % interval")
