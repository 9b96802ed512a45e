"""A bench row, and how arms are timed beside each other. Does not know what is measured."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvlab.experiments.turns import in_turn
from kvlab.loading import resolve_dtype
from kvlab.records import bootstrap_interval

__all__ = ["Progress", "Row", "interleave", "judged", "median_interval", "ratio_interval", "ratios"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One line of the bench. `of_floor`, `of_peer` above 1: we are faster. `met` None: could not be measured here.

    `interval` is the 95 % interval of the row's first ratio (`ratios`), or of `ours` in a row that has none.
    `note`: what belongs to the name but is another in every run; records are compared by name. `group` and `dtype` are
    those of the run, whether the row has to do with a dtype or not.
    """

    name: str
    ours: float
    unit: str
    floor: float | None = None
    of_floor: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    of_peer: dict[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    goal: str = ""
    met: bool | None = None
    group: str = ""
    dtype: str = ""
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """The row as JSON has it; NaN and infinity become null."""
        return {name: _finite(value) for name, value in asdict(self).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """The ratios of a plain row by what they compare with: "floor" first, then the peers."""
    found = {"floor": row["of_floor"], **row["of_peer"]}
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def judged(row: Row, device: str | torch.device, dtype: str) -> Row:
    """The row of a model in `dtype`, under a goal that was set for CPUs; on another device it is only reported.

    A goal for bf16 is for cores with bf16 instructions: where fp32 is faster, the row says that these are emulated.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return replace(row, goal="reported", met=None)
    if dtype == "bf16" and resolve_dtype("auto", device) != "bf16":
        return replace(row, goal=f"{row.goal} (bf16 emulated)")
    return row


def interleave(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round, in balanced order; one warm-up round is dropped, the collector is off.

    An arm that must not count its preparation returns the seconds it took itself.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for name in in_turn(arms, number):
                begin = time.perf_counter()
                own_s = arms[name]()
                elapsed_s = own_s if isinstance(own_s, float) else time.perf_counter() - begin
                if number:
                    seconds[name].append(elapsed_s)
    finally:
        gc.enable()
    return seconds


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Bootstrap interval over rounds of the median."""
    values = np.asarray(samples)
    return bootstrap_interval(lambda rounds: float(np.median(values[rounds])), len(values))


def ratio_interval(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float] | None:
    """Bootstrap interval over rounds of median(slow) ÷ median(fast)."""
    a, b = np.asarray(slow), np.asarray(fast)
    return bootstrap_interval(lambda rounds: float(np.median(a[rounds]) / np.median(b[rounds])), len(a))
