"""A measured curve: values at some sizes, and what lies between them. Knows no units and measures nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Curve"]


@dataclass(frozen=True)
class Curve:
    """Positive values against a positive size, interpolated as straight lines in log-log, flat outside the points."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        try:
            pairs = [(x, y) for x, y in self.points]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"curve points are {self.points!r}; expected [size, value] pairs: ((1.0, 25.0),)"
            ) from error
        if not pairs:
            raise ValueError("a curve needs at least one [size, value] point")
        if any(not (math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0) for x, y in pairs):
            raise ValueError(f"curve points must be positive and finite: {list(self.points)}")
        if any(a[0] >= b[0] for a, b in zip(self.points, self.points[1:], strict=False)):
            raise ValueError(f"curve sizes must increase: {[x for x, _ in self.points]}")

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return [math.log(x) for x, _ in self.points], [math.log(y) for _, y in self.points]

    def __call__(self, size: float) -> float:
        """The value at `size`."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1]
        xs, ys = self._logs
        x = math.log(size)
        above = bisect_right(xs, x)
        share = (x - xs[above - 1]) / (xs[above] - xs[above - 1])
        return math.exp(ys[above - 1] + share * (ys[above] - ys[above - 1]))

    def scaled(self, factor: float) -> Curve:
        """The same curve with every value times `factor`."""
        return Curve(tuple((x, y * factor) for x, y in self.points))
