"""What a scheduler has done, in numbers that only grow.

Plain data. Does not know who counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counts"]


@dataclass
class Counts:
    """What the scheduler has done. `hit_tokens` of prompts by source, "pool" or a tier's name: each once a turn.

    `failed_loads` did not bring all, `timed_out_loads` of them because a tier was too slow; `second_loads` began in the
    turn of a failed one, from another tier.
    """

    steps: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    copied_blocks: int = 0
    loads: int = 0
    failed_loads: int = 0
    timed_out_loads: int = 0
    second_loads: int = 0
    joined_loads: int = 0
    estimated_regret_s: float = 0.0
    decisions: Counter[str] = field(default_factory=Counter)
