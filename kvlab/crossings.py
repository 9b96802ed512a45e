"""Where the answer flips along the prefix, from both ways' times at some lengths, be they predicted or measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Crossing", "crossings_of", "interpolated_crossover", "settled_crossover"]


@dataclass(frozen=True)
class Crossing:
    """The winner changes at `tokens`: from there up (to the next crossing) it is `winner_above`."""

    tokens: int
    winner_above: Literal["reload", "recompute"]


def crossings_of(tokens: Sequence[int], reload_s: Sequence[float], recompute_s: Sequence[float]) -> list[Crossing]:
    """Every change of the winner along `tokens` (increasing), reported at the first length where the new one wins.

    A tie counts for recompute: it moves no bytes. Works on predicted and on measured times alike.
    """
    wins = [a < b for a, b in zip(reload_s, recompute_s, strict=True)]
    return [
        Crossing(tokens[i], "reload" if wins[i] else "recompute") for i in range(1, len(wins)) if wins[i] != wins[i - 1]
    ]


def interpolated_crossover(
    tokens: Sequence[int], reload_s: Sequence[float], recompute_s: Sequence[float]
) -> float | None:
    """The length from which reload wins for good, interpolated between lengths; 0: always; None: never.

    Between two lengths both times are taken as power laws (straight in log-log, as such curves nearly are): a straight
    line through a wide gap would be biased towards its short end, since recompute bends upwards.
    """
    at = settled_crossover(tokens, reload_s, recompute_s)
    if not at:
        return at
    above = tokens.index(at)
    # log(reload ÷ recompute): at first >= 0 (recompute wins or ties), then < 0.
    before, after = (math.log(reload_s[i] / recompute_s[i]) for i in (above - 1, above))
    return float(tokens[above - 1] * (at / tokens[above - 1]) ** (before / (before - after)))


def settled_crossover(tokens: Sequence[int], reload_s: Sequence[float], recompute_s: Sequence[float]) -> int | None:
    """The smallest of `tokens` from which reload wins at every longer one; 0: at all of them; None: not at the last."""
    wins = [a < b for a, b in zip(reload_s, recompute_s, strict=True)]
    if not wins or not wins[-1]:
        return None
    losses = [i for i, win in enumerate(wins) if not win]
    return tokens[losses[-1] + 1] if losses else 0
