"""What a probe asks of a server: lengths, rounds, users at once, and how much that comes to before it starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

__all__ = ["ARMS", "SETTLE_S", "Arm", "Ask", "Cost", "auto_lengths"]

Arm = Literal["recompute", "resident", "reload"]
ARMS: tuple[Arm, ...] = ("recompute", "resident", "reload")
# How long a rehearsal waits for a prefix to reach a tier behind the device, try by try.
SETTLE_S = (0.0, 1.0, 3.0)
_SHORTEST = 256  # the longest block that engines use by default: below it, many servers cache nothing
_LONGEST_UNKNOWN = 8192  # the end of the ladder where the server does not tell its model's


@dataclass(frozen=True)
class Cost:
    """The most that a probe sends: requests of one generated token each, their prompt tokens, and cache resets.

    `computed_tokens` are those that no cache can have: the rest is computed too where the cache misses.
    """

    requests: int
    prompt_tokens: int
    computed_tokens: int
    resets: int


@dataclass(frozen=True)
class Ask:
    """Prefix lengths in tokens (increasing), the new tokens behind them, requests at once, whole rounds, seconds.

    With `reload`, the server's cache is reset before each reload. No round starts that would not end in `budget_s`.
    Raises ValueError for values that make no measurement.
    """

    lengths: tuple[int, ...]
    suffix: int
    concurrency: tuple[int, ...] = (1,)
    rounds: int = 7
    budget_s: float = math.inf
    reload: bool = True

    def __post_init__(self) -> None:
        for name, values in (("lengths", self.lengths), ("concurrency", self.concurrency)):
            if not values or values[0] < 1 or any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"{name} are {list(values)}; expected whole numbers of at least 1 that increase")
        if self.suffix < 1 or self.rounds < 1:
            raise ValueError(f"suffix is {self.suffix} and rounds {self.rounds}; expected at least 1 of each")

    @property
    def cost(self) -> Cost:
        """What the rehearsal at the longest prefix and all rounds come to at most."""
        hits = 2 if self.reload else 1
        cells = self.rounds * sum(self.concurrency)
        tokens = sum(self.lengths) + len(self.lengths) * self.suffix
        tries = 2 + (len(SETTLE_S) if self.reload else 0)
        longest = self.lengths[-1] + self.suffix
        return Cost(
            requests=cells * len(self.lengths) * (1 + hits) + tries,
            prompt_tokens=cells * tokens * (1 + hits) + tries * longest,
            computed_tokens=cells * (tokens + hits * len(self.lengths) * self.suffix)
            + longest
            + (tries - 1) * self.suffix,
            resets=(self.rounds * len(self.concurrency) * len(self.lengths) + len(SETTLE_S)) * self.reload,
        )


def auto_lengths(
    most_tokens: int | None,
    suffix: int,
    concurrency: Sequence[int],
    rounds: int,
    budget_tokens: int,
    *,
    reload: bool,
) -> tuple[int, ...]:
    """Lengths from 256, each twice the one before, as far as the model and `budget_tokens` prompt tokens allow.

    Raises ValueError where not even two fit.
    """
    limit = (most_tokens or _LONGEST_UNKNOWN + suffix + 1) - suffix - 1
    lengths: tuple[int, ...] = ()
    length = _SHORTEST
    while length <= limit:
        wider = (*lengths, length)
        if Ask(wider, suffix, tuple(concurrency), rounds, reload=reload).cost.prompt_tokens > budget_tokens:
            break
        lengths, length = wider, 2 * length
    if len(lengths) < 2:
        raise ValueError(
            f"two lengths from {_SHORTEST} tokens up do not fit: the model takes {limit:,} and the budget is"
            f" {budget_tokens:,} prompt tokens; give --lengths, or a larger --token-budget"
        )
    return lengths
