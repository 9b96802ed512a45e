"""The other half of the decision: when is writing an idle request's cache to a tier worth it at all?

Arithmetic on a `Verdict` and the tier's store link. Storing costs now; a reload saves later, if the request returns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvlab.units import format_s
from kvlab.verdict import Verdict

__all__ = ["Storing", "storing"]


@dataclass(frozen=True)
class Storing:
    """What storing costs and what it can save. Seconds; `store_cost_s` is charged to others, `saved_s` to the request.

    `break_even_return_chance`: the chance of return above which storing pays (inf: never, reload does not win).
    `break_even_idle_gap_s`: a shorter pause frees no memory, since the blocks are busy leaving or coming back.
    """

    store_s: float
    store_cost_s: float
    saved_s: float
    break_even_return_chance: float
    break_even_idle_gap_s: float

    def worth_it(self, return_chance: float = 1.0, idle_gap_s: float = math.inf) -> bool:
        """Whether to store a cache that returns with `return_chance` after `idle_gap_s`."""
        return return_chance > self.break_even_return_chance and idle_gap_s > self.break_even_idle_gap_s

    @property
    def reason(self) -> str:
        """One sentence with the two break-even points."""
        if math.isinf(self.break_even_return_chance):
            return "do not store: recomputing is as cheap as reloading"
        return (
            f"store when the chance of return is above {self.break_even_return_chance:.1%} and the pause is longer than"
            f" {format_s(self.break_even_idle_gap_s)}"
        )


def storing(verdict: Verdict, *, store_cost_per_s: float | None = None) -> Storing:
    """Price the store that a later reload needs.

    `store_cost_per_s`: seconds of others' time that one second of storing costs. By default what the machine's store
    link says it takes from active work (`decode_slowdown`), valued as in the verdict, or like the request's own
    time where the verdict gave it no value. Raises ValueError when the machine has no store link for the tier.
    """
    link = verdict.machine.link(verdict.tier, "store")
    blocks = verdict.reload_tokens // verdict.block_size
    store_s = link.transfer_s(verdict.kv_bytes, blocks, len(verdict.arch.layers), verdict.link_share, verdict.tp)
    if store_cost_per_s is None:
        store_cost_per_s = link.decode_slowdown * (verdict.decode_delay_value or 1.0)
    saved_s = verdict.cost_recompute_s - verdict.cost_reload_s
    store_cost_s = store_s * store_cost_per_s
    return Storing(
        store_s=store_s,
        store_cost_s=store_cost_s,
        saved_s=saved_s,
        break_even_return_chance=store_cost_s / saved_s if saved_s > 0 else math.inf,
        break_even_idle_gap_s=store_s + verdict.reload_s,
    )
