"""Lanes of compute, copies and files in time: which operation runs when, which wait it had, which bytes are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from kvlab.lab.draw.style import CACHED, FLIP, QUIET, RECOMPUTE, RELOAD, WRONG, new_figure, stamp
from kvlab.lab.lanes import LANES, Direction, bars

__all__ = ["lanes_figure"]

_COLOUR = {"compute": RECOMPUTE, "copy": RELOAD, "io": CACHED}
_NAMES = {"compute": "compute", "copy": "copy\n(pool ↔ staging)", "io": "files\n(staging ↔ tier)"}
_QUESTION = {
    "offload": "Who runs before whom while blocks leave?",
    "reload": "Who runs before whom while blocks come back?",
}


def lanes_figure(operations: Sequence[Any], direction: Direction, blocks: Sequence[int]) -> Figure:
    """A list of operations (`kvlab.lab.lanes`) on a clock, every lane as early as its waits allow; wrong bytes red."""
    figure, axis = new_figure(_QUESTION[direction], width=8.6, height=3.9)
    figure.set_layout_engine(None)  # fixed margins: the picture does not jump when a wait is toggled
    figure.subplots_adjust(left=0.16, right=0.98, top=0.83, bottom=0.2)
    found = bars(operations, direction, blocks)
    for bar in found:
        place = LANES[::-1].index(bar.lane)
        axis.barh(
            place, bar.end_ms - bar.begin_ms, left=bar.begin_ms, height=0.62, linewidth=0.8, edgecolor="white",
            color=WRONG if bar.wrong else _COLOUR[bar.lane], hatch="////" if bar.wrong else None,
            alpha=0.55 if bar.verb.endswith("owner") else 1.0,
        )  # fmt: skip
        axis.annotate(
            str(bar.block), ((bar.begin_ms + bar.end_ms) / 2, place), ha="center", va="center", fontsize=9,
            color=FLIP, bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )  # fmt: skip
    for verb in dict.fromkeys(bar.verb for bar in found):
        first = next(bar for bar in found if bar.verb == verb)
        axis.annotate(
            verb, (first.begin_ms, LANES[::-1].index(first.lane) + 0.36), fontsize=8, color=QUIET, va="bottom"
        )
    wrong = sorted({bar.block for bar in found if bar.wrong})
    verdict = f"wrong bytes in blocks {', '.join(map(str, wrong))}" if wrong else "every block is right"
    axis.set_title(verdict, fontsize=10, color=WRONG if wrong else FLIP, y=1.0)
    axis.set_yticks(range(len(LANES)), [_NAMES[lane] for lane in LANES[::-1]])
    axis.set_ylim(-0.5, len(LANES) - 0.25)
    axis.set_xlim(0, max(bar.end_ms for bar in found) * 1.01)
    axis.set_xlabel("time (ms, made up)")
    axis.grid(visible=False, axis="y")
    stamp(figure, "arithmetic on made-up durations; numbers are block ids; hatched: bytes that are not this block's")
    return figure
