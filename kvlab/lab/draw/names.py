"""Whose blocks a name lets through: one row for each cache, one square for each of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvlab.lab.draw.style import CACHED, QUIET, WRONG, stamp

__all__ = ["names_figure"]

_REFUSED = "#bbbbbb"


def names_figure(
    rows: Mapping[str, tuple[Sequence[bool], Sequence[bool]]], block_size: int, covers: str, changed: int | None = None
) -> Figure:
    """`rows`: by cache, blocks that the name lets through and blocks that may be: green both, vermilion only the first.

    `changed`: the position of the token that differs in the first row; its block is framed.
    """
    figure = Figure(figsize=(8.6, 1.7 + 0.36 * len(rows)))
    figure.subplots_adjust(left=0.4, right=0.98, top=1 - 0.75 / (1.7 + 0.36 * len(rows)), bottom=0.2)
    figure.suptitle("Which stored blocks does a name let through?", fontsize=12)
    axis = figure.subplots()
    blocks = max(len(through) for through, _ in rows.values())
    false_hits = 0
    for place, (through, may) in enumerate(rows.values()):
        for block, (passes, same) in enumerate(zip(through, may, strict=True)):
            wrong = passes and not same
            false_hits += wrong
            colour = WRONG if wrong else CACHED if passes else _REFUSED
            axis.add_patch(
                Rectangle((block, place), 0.9, 0.84, facecolor=colour, linewidth=0.8, edgecolor="white",
                          hatch="////" if wrong else None)
            )  # fmt: skip
    if changed is not None:
        axis.add_patch(Rectangle((changed // block_size, 0), 0.9, 0.84, fill=False, edgecolor="black", linewidth=2))
    axis.set_xlim(-0.1, blocks)
    axis.set_ylim(len(rows), -0.1)
    axis.set_xticks([block + 0.45 for block in range(0, blocks, 2)], [f"{b * block_size}" for b in range(0, blocks, 2)])
    axis.set_xlabel("position of the block's first token")
    axis.set_yticks([place + 0.42 for place in range(len(rows))], list(rows))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    verdict = f"blocks of another cache that pass: {false_hits}" if false_hits else "no false hit"
    axis.set_title(
        f"the name covers: {covers}  →  {verdict}", fontsize=10, loc="right", color=WRONG if false_hits else QUIET
    )
    stamp(
        figure,
        "hashes computed by kvlab; green: rightly handed out; hatched: handed out, wrong bytes; grey: refused",
    )
    return figure
