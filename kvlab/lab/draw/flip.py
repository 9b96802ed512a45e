"""Where the answer flips: both times to first token against prefix length, the winner shaded; why flips move far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab.arch import ModelArch
from kvlab.crossings import crossings_of, settled_crossover
from kvlab.lab.draw.style import (
    FLIP,
    PREDICTED,
    PUBLISHED,
    QUIET,
    RECOMPUTE,
    RELOAD,
    new_figure,
    seconds_axis,
    shade_interval,
    stamp,
    token_axis,
)
from kvlab.lab.published import Published
from kvlab.machine import Machine
from kvlab.storing import storing
from kvlab.units import format_gb_per_s
from kvlab.verdict import decide

__all__ = ["QUESTION", "FlipCurves", "flip_curves", "flip_figure", "tie_figure"]

QUESTION = "From which prefix length is reloading the KV cache\nfaster than computing it again?"
_POINTS = 96  # along the prefix axis: a flip is found to within a few percent, a redraw stays in milliseconds
_STAMP_WIDTH = 100  # characters of a line under the picture


@dataclass(frozen=True)
class FlipCurves:
    """Seconds to first token at each of `tokens`, suffix included, and one standard deviation of what is known."""

    tokens: tuple[int, ...]
    reload_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    reload_spread_s: tuple[float, ...]
    recompute_spread_s: tuple[float, ...]

    @property
    def flips(self) -> list[int]:
        """The lengths at which the winner changes."""
        return [crossing.tokens for crossing in crossings_of(self.tokens, self.reload_s, self.recompute_s)]

    @property
    def answer(self) -> str:
        """The answer to the question, in words."""
        wins = [a < b for a, b in zip(self.reload_s, self.recompute_s, strict=True)]
        if all(wins):
            return "reload wins at every length"
        if not any(wins):
            return f"recompute wins at every length up to {self.tokens[-1]:,} tokens"
        if len(self.flips) == 1:
            return f"{'reload' if wins[-1] else 'recompute'} wins from {self.flips[0]:,} tokens up"
        return "the winner changes at " + " and ".join(f"{at:,}" for at in self.flips) + " tokens"


def flip_curves(
    arch: ModelArch,
    machine: Machine,
    *,
    tier: str,
    suffix: int,
    longest: int | None = None,
    kv_dtype: str | None = None,
    link_share: float = 1.0,
    offload_share: float = 0.0,
    block_size: int = 16,
) -> FlipCurves:
    """Both times by `decide` from one block up to `longest` tokens (default: the model's positions).

    `offload_share`: how much of the seconds that storing took is charged to the reload (0: stored while nobody waited).
    """
    most = min(arch.max_positions, longest or arch.max_positions) - suffix
    blocks = sorted({round((most // block_size) ** (i / (_POINTS - 1))) for i in range(_POINTS)})
    verdicts = [
        decide(
            arch, machine, prefix=n * block_size, suffix=suffix, tier=tier, kv_dtype=kv_dtype,
            block_size=block_size, link_share=link_share,
        )
        for n in blocks
    ]  # fmt: skip
    stored_s = [storing(v).store_s * offload_share if offload_share else 0.0 for v in verdicts]
    link_spread, prefill_spread = machine.link(tier).spread, machine.prefill.spread
    return FlipCurves(
        tokens=tuple(v.prefix for v in verdicts),
        reload_s=tuple(v.ttft_reload_s + extra_s for v, extra_s in zip(verdicts, stored_s, strict=True)),
        recompute_s=tuple(v.ttft_recompute_s for v in verdicts),
        reload_spread_s=tuple(link_spread * v.reload_s + prefill_spread * v.suffix_s for v in verdicts),
        recompute_spread_s=tuple(prefill_spread * v.ttft_recompute_s for v in verdicts),
    )


def flip_figure(
    curves: FlipCurves, source: str, *, measured: Mapping[str, Any] | None = None, others: Published | None = None
) -> Figure:
    """The seed question's chart: prediction dashed with its band, the predicted winner shaded.

    `measured`: a `kvlab.crossover/1` record whose last tier is drawn on top, solid with markers, its samples as bands.
    `others`: published figures with "tokens", "recompute_s" and "reload_s", drawn dash-dotted with hollow markers.
    """
    figure, axis = new_figure(QUESTION, width=7.6, height=5.2)
    # Fixed margins: the picture does not jump under a slider, and is drawn in half the time.
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.125, right=0.97, top=0.82 if measured else 0.85, bottom=0.155)
    _shade_winner(axis, curves)
    for name, colour, seconds, spread_s in (
        ("recompute", RECOMPUTE, curves.recompute_s, curves.recompute_spread_s),
        ("reload", RELOAD, curves.reload_s, curves.reload_spread_s),
    ):
        # A time is above 0, however wide the spread.
        low = [max(s - d, s / 4) for s, d in zip(seconds, spread_s, strict=True)]
        high = [s + d for s, d in zip(seconds, spread_s, strict=True)]
        axis.fill_between(curves.tokens, low, high, color=colour, alpha=0.22, linewidth=0)
        axis.plot(curves.tokens, seconds, color=colour, linestyle=PREDICTED, linewidth=1.6, label=f"{name}, predicted")
        if others:
            # Hollow markers: a published line that the prediction was fitted to would lie under it, unseen.
            axis.plot(
                others["tokens"], others[f"{name}_s"], color=colour, linestyle=PUBLISHED, linewidth=1.2, marker="D",
                markersize=7, markerfacecolor="white", markeredgewidth=1.6, label=f"{name}, published",
            )  # fmt: skip
    for at in curves.flips:
        axis.axvline(at, color=FLIP, linewidth=1.3, linestyle=PREDICTED, label="flip, predicted")
    answer = f"predicted: {curves.answer}"
    if measured is not None:
        answer += f"\n{_draw_measured(axis, measured)}"
    axis.set_title(answer, fontsize=10, y=1.0)
    token_axis(axis, _ticks(curves.tokens))
    axis.set_xlim(curves.tokens[0], curves.tokens[-1])
    axis.minorticks_off()
    seconds_axis(axis)
    _legend_once(axis)
    stamp(figure, fill(source, _STAMP_WIDTH))
    return figure


def _shade_winner(axis: Axes, curves: FlipCurves) -> None:
    """The background in the winner's colour, its name at the top."""
    wins = [a < b for a, b in zip(curves.reload_s, curves.recompute_s, strict=True)]
    edges = [curves.tokens[0], *curves.flips, curves.tokens[-1]]
    for (reload_wins, _), low, high in zip(groupby(wins), edges, edges[1:], strict=False):
        name, colour = ("reload", RELOAD) if reload_wins else ("recompute", RECOMPUTE)
        axis.axvspan(low, high, color=colour, alpha=0.08, linewidth=0)
        if high > 2.5 * low:
            middle = (low * high) ** 0.5
            axis.annotate(
                f"{name} wins",
                (middle, 0.03),
                xycoords=axis.get_xaxis_transform(),
                ha="center",
                fontsize=9,
                color=QUIET,
            )


def _draw_measured(axis: Axes, record: Mapping[str, Any]) -> str:
    """Medians solid, all samples as a band, the measured flip; returns what was measured, in words."""
    tier = record["tiers"][-1]
    tokens = tier["tokens"]
    for name, colour, marker, samples in (
        ("recompute", RECOMPUTE, "s", record["recompute_samples_s"]),
        ("reload", RELOAD, "o", tier["reload_samples_s"]),
    ):
        low, high = ([bound(times) for times in samples] for bound in (min, max))
        axis.fill_between(tokens, low, high, color=colour, alpha=0.35, linewidth=0)
        axis.plot(
            tokens, tier[f"{name}_s"], color=colour, marker=marker, markersize=6, linewidth=2, label=f"{name}, measured"
        )
    at = tier["crossover_tokens"]
    shade_interval(axis, tier["crossover_interval"], tokens[0], tokens[-1])
    if at is None:
        return f"measured: recompute still wins at {tokens[-1]:,} tokens"
    if at == 0:
        return "measured: reload wins at every measured length"
    axis.axvline(at, color=FLIP, linewidth=1.6, label="flip, measured")
    return f"measured: reload wins from {at:,} tokens up"


def tie_figure(tokens: Sequence[int], tie_gb_per_s: Sequence[float], links: Sequence[float], source: str) -> Figure:
    """The link speed (GB/s) at which both ways tie, against prefix length; `links` as horizontal lines.

    Where a link's line is above the curve, reload wins. A flat curve is crossed far from where a little slower or
    faster link crosses it.
    """
    # Where overheads alone lose there is no such speed (it is infinite).
    tokens, tie_gb_per_s = zip(
        *((n, tie) for n, tie in zip(tokens, tie_gb_per_s, strict=True) if tie < 1e4), strict=True
    )
    figure, axis = new_figure("How fast must a link be for reload to win?", width=7.6, height=4.6)
    shown = (*tie_gb_per_s, *links)
    bottom, top = min(shown) / 2, max(shown) * 2
    axis.fill_between(tokens, tie_gb_per_s, top, color=RELOAD, alpha=0.08, linewidth=0)
    axis.fill_between(tokens, tie_gb_per_s, bottom, color=RECOMPUTE, alpha=0.10, linewidth=0)
    axis.plot(tokens, tie_gb_per_s, color=RECOMPUTE, linewidth=2.2, linestyle=PREDICTED)
    for speed in links:
        axis.axhline(speed, color=RELOAD, linewidth=1.6)
        axis.annotate(
            f"a link of {format_gb_per_s(speed)}", (0.99, speed * 1.05), xycoords=("axes fraction", "data"),
            ha="right", va="bottom", fontsize=9,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip
        at = settled_crossover(tokens, [1 / speed] * len(tokens), [1 / tie for tie in tie_gb_per_s])
        if at:
            axis.vlines(at, bottom, speed, color=FLIP, linewidth=1.3, linestyle=PREDICTED)
            axis.annotate(f" {at:,}", (at, bottom), va="bottom", fontsize=9)
    for name, height in (("reload wins above the curve", 0.93), ("recompute wins below it", 0.04)):
        axis.annotate(name, (0.02, height), xycoords="axes fraction", fontsize=9, color=QUIET)
    token_axis(axis, _ticks(tokens))
    axis.set_xlim(tokens[0], tokens[-1])
    axis.set_yscale("log")
    axis.set_ylim(bottom, top)
    speeds = [10.0**power * step for power in range(-4, 3) for step in (1, 2, 5)]
    inside = [speed for speed in speeds if bottom <= speed <= top]
    axis.set_yticks(inside, [format_gb_per_s(speed) for speed in inside], fontsize=8)
    axis.minorticks_off()
    axis.set_ylabel("link speed at which both tie")
    stamp(figure, source)
    return figure


def _ticks(tokens: Sequence[int]) -> list[int]:
    """Powers of two, every second one where there are many."""
    powers = [2**power for power in range(4, 21) if tokens[0] <= 2**power <= tokens[-1]]
    return powers if len(powers) <= 9 else powers[::2]


def _legend_once(axis: Axes) -> None:
    """A legend in which each name stands once, however many flips there are."""
    handles, labels = axis.get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    axis.legend(list(named.values()), list(named), frameon=False, fontsize=8, loc="upper left")
