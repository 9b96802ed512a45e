"""Which blocks of a stored prefix may be used for a prompt: the strip of blocks, green up to the first change."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvlab.lab.draw.style import CACHED, QUIET, WRONG, stamp

__all__ = ["prefix_figure"]

_COLUMNS = 16
_UNUSABLE = "#bbbbbb"


def prefix_figure(usable: Sequence[bool], block_size: int, changed: int | None = None) -> Figure:
    """One square per block: green where `usable`, grey where not; the block of token `changed` is framed."""
    rows = -(-len(usable) // _COLUMNS)
    figure = Figure(figsize=(7.2, 1.5 + 0.42 * rows), layout="constrained")
    figure.suptitle("Which stored blocks may this prompt use?", fontsize=12)
    axis = figure.subplots()
    for block, fits in enumerate(usable):
        corner = (block % _COLUMNS, block // _COLUMNS)
        colour = CACHED if fits else _UNUSABLE
        axis.add_patch(Rectangle(corner, 0.9, 0.9, facecolor=colour, linewidth=0))
    if changed is not None:
        corner = (changed // block_size % _COLUMNS, changed // block_size // _COLUMNS)
        axis.add_patch(Rectangle(corner, 0.9, 0.9, fill=False, edgecolor=WRONG, linewidth=3))
        middle = (corner[0] + 0.45, corner[1] + 0.45)
        axis.annotate("×", middle, ha="center", va="center", fontsize=13, color=WRONG, fontweight="bold")
    axis.set_xlim(-0.1, _COLUMNS)
    axis.set_ylim(rows, -0.1)
    axis.set_xticks([])
    axis.set_yticks(
        [row + 0.45 for row in range(rows)], [f"token {row * _COLUMNS * block_size:,}" for row in range(rows)]
    )
    axis.tick_params(length=0, labelcolor=QUIET)
    axis.spines[:].set_visible(False)
    where = "nothing changed" if changed is None else f"token {changed:,} changed (×)"
    axis.set_title(f"{where}: {sum(usable)} of {len(usable)} blocks may be used", fontsize=10)
    stamp(figure, f"a square is {block_size} tokens; green: same chained hash (computed by kvlab), grey: another hash")
    return figure
