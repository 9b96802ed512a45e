"""In which groups a model's layers load, one behind the other, and what of a load is hidden behind computing them.

Knows no machine and moves nothing.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise

__all__ = ["default_groups", "hidden_s", "layer_bounds"]

_GROUPS = 6


def default_groups(layers: int) -> int:
    """How many groups, where nobody says so: more of them hide more, and each costs a wait and copies of its own."""
    return min(_GROUPS, layers)


@cache
def layer_bounds(layers: int, groups: int) -> tuple[int, ...]:
    """Where each group ends: group i holds the layers from the bound before it up to bound i, and none is empty.

    The first group is small, since nothing computes before it has come. Each is twice the one before it, as long as
    that is no more than a good `groups`-th of all layers: what comes in meanwhile need not wait for one large group.
    Raises ValueError unless 1 <= groups <= layers.
    """
    if not 1 <= groups <= layers:
        raise ValueError(f"groups is {groups}; expected 1 to {layers}, the number of layers")
    ends = list(accumulate(min(2**group, max(1, groups - 1)) for group in range(groups)))
    bounds = [0]
    for group, end in enumerate(ends, 1):
        bounds.append(min(max(layers * end // ends[-1], bounds[-1] + 1), layers - groups + group))
    return tuple(bounds[1:])


def hidden_s(load_s: float, compute_s: float, bounds: tuple[int, ...]) -> float:
    """Of load_s + compute_s, what a pipeline saves: each group computes when it is there and the one before it is done.

    Some group is the one without a gap on either side: all before it loads, all from it on computes.
    """
    layers = bounds[-1]
    return min(load_s * (layers - stop) + compute_s * start for start, stop in pairwise((0, *bounds))) / layers
