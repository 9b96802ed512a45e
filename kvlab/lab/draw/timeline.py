"""Link and compute in time: what hides behind what, layer by layer or by halves; and gaps between tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvlab.lab.draw.style import FLIP, QUIET, RECOMPUTE, RELOAD, WRONG, new_figure, stamp

__all__ = ["gaps_figure", "layers_figure", "split_figure"]

_LANES = ("compute", "link")
_COLOUR = {"compute": RECOMPUTE, "link": RELOAD}
# Lane, begin and end in seconds, what it says on it.
_Bar = tuple[str, float, float, str]


def layers_figure(load_s: float, compute_s: float, bounds: Sequence[int], source: str) -> Figure:
    """A prefix that loads in `load_s`, a suffix that computes in `compute_s`, both in layer groups.

    `bounds`: the layer at which each group ends, the last one that of the model.
    """
    bars: list[_Bar] = []
    done_s, layers = 0.0, bounds[-1]
    for group, (start, stop) in enumerate(pairwise((0, *bounds)), 1):
        here_s = stop / layers * load_s
        bars.append(("link", start / layers * load_s, here_s, f"{group}"))
        begin_s = max(done_s, here_s)
        done_s = begin_s + (stop - start) / layers * compute_s
        bars.append(("compute", begin_s, done_s, f"{group}"))
    serial_s = load_s + compute_s
    least_s = max(load_s, compute_s)
    verdict = (
        f"{done_s * 1e3:,.0f} ms; one after the other {serial_s * 1e3:,.0f} ms;"
        f" the longer of the two alone {least_s * 1e3:,.0f} ms"
    )
    return _gantt("What hides behind what, layer group by layer group?", bars, serial_s, verdict, source)


def split_figure(
    load_s: float, compute_s: float, rest_s: float, end_s: float, words: str, source: str, *, reverse: bool = False
) -> Figure:
    """The head of a prefix computes in `compute_s` while its tail loads in `load_s`; then the suffix in `rest_s`.

    `reverse`: the head loads, and the tail, which attends to it, computes behind. `end_s`: the end of the axis.
    """
    loaded, computed = ("head", "tail") if reverse else ("tail", "head")
    begin_s = load_s if reverse else 0.0
    joined_s = max(load_s, begin_s + compute_s)
    bars: list[_Bar] = [("compute", joined_s, joined_s + rest_s, "suffix")]
    if compute_s > 0:
        bars.append(("compute", begin_s, begin_s + compute_s, computed))
    if load_s > 0:
        bars.append(("link", 0.0, load_s, loaded))
    verdict = f"{words}: first token after {(joined_s + rest_s) * 1e3:,.0f} ms"
    figure = _gantt("Which part to compute while the other part loads?", bars, end_s, verdict, source)
    figure.axes[0].axvline(joined_s * 1e3, color=FLIP, linewidth=1)
    return figure


def _gantt(title: str, bars: Sequence[_Bar], end_s: float, verdict: str, source: str) -> Figure:
    figure, axis = new_figure(title, width=8.2, height=2.9)
    figure.set_layout_engine(None)  # fixed margins: the picture does not jump under a slider
    figure.subplots_adjust(left=0.11, right=0.98, top=0.78, bottom=0.3)
    for lane, begin_s, stop_s, text in bars:
        axis.barh(
            _LANES.index(lane), (stop_s - begin_s) * 1e3, left=begin_s * 1e3, height=0.6, color=_COLOUR[lane],
            edgecolor="white",
        )  # fmt: skip
        if stop_s - begin_s > 0.02 * end_s:
            axis.annotate(
                text, ((begin_s + stop_s) / 2 * 1e3, _LANES.index(lane)), ha="center", va="center", fontsize=9,
                color=FLIP,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
            )  # fmt: skip
    axis.set_yticks(range(len(_LANES)), _LANES)
    axis.set_ylim(-0.5, len(_LANES) - 0.5)
    axis.set_xlim(0, 1.03 * end_s * 1e3)
    axis.set_xlabel("time (ms)")
    axis.grid(visible=False, axis="y")
    axis.set_title(verdict, fontsize=10)
    stamp(figure, source)
    return figure


def gaps_figure(ways: Mapping[str, Mapping[str, Any]], source: str) -> Figure:
    """Gaps between a decoding request's tokens (ms), a row for each way; coloured while another one is being served."""
    figure, first_axis = new_figure(
        "How long does a decoding request wait for its next token?", width=8.2, height=1.3 + 1.15 * len(ways)
    )
    figure.delaxes(first_axis)
    axes = figure.subplots(len(ways), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axis, (name, way) in zip(axes, ways.items(), strict=True):
        gaps_ms = [gap * 1e3 for gap in way["gaps_s"]][1:]
        served = range(way["first"] - 1, way["stop"] - 1)
        colours = [WRONG if i in served else QUIET for i in range(len(gaps_ms))]
        axis.bar(range(len(gaps_ms)), gaps_ms, color=colours, width=0.8)
        axis.axhline(way["quiet_s"] * 1e3, color=FLIP, linewidth=1, linestyle=(0, (4, 3)))
        axis.set_title(f"{name}: delayed by {way['delay_s'] * 1e3:,.0f} ms", fontsize=9, loc="left")
        axis.set_ylabel("gap (ms)", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("token; coloured: while the other request is being served; dashed: a quiet gap", fontsize=9)
    stamp(figure, source)
    return figure
