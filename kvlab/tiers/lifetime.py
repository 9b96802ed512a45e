"""How long a tier may use what it was given: the time to live of a stored block, on a clock that can be wrong.

Knows times only. Does not know where they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Lifetime"]


@dataclass(frozen=True)
class Lifetime:
    """`ttl_s` seconds on `clock` (in seconds) from when a tier took a block in; None: for ever.

    A block that is handed down to another tier begins anew there. Raises ValueError for a time that is not positive, or
    not finite.
    """

    ttl_s: float | None
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        ttl_s = self.ttl_s
        if ttl_s is not None and not (isinstance(ttl_s, int | float) and ttl_s > 0 and math.isfinite(ttl_s)):
            raise ValueError(f"ttl_s is {ttl_s!r}; expected a positive number of seconds, not infinite, or None")

    def over(self, stored_s: float) -> bool:
        """Whether what was stored at `stored_s` on the clock is too old now.

        The distance counts, in either direction: a block from far ahead was stamped by a clock that has been set back
        since, and would otherwise never grow old. So none lives longer than twice `ttl_s`; a NaN is over.
        """
        return self.ttl_s is not None and not abs(self.clock() - stored_s) <= self.ttl_s
