"""Policies over machines, models and loads: who answers soonest where, and what kvlab's verdict wins or loses.

Every cell replays one trace. True rates are drawn up to 20 % away from what the policies believe, so that the verdict
is not judged by its own model. Cells in which a queue grows without end are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvlab.arch import ModelArch
from kvlab.machine import Machine
from kvlab.simulate import DEVICE_MEMORY_GB_PER_S, POLICIES, Cluster, PolicyReport, Trace, drawn_away, simulate

__all__ = ["MACHINES", "MODELS", "Cell", "policy_cells"]

MACHINES = ("a100-sxm-pcie4", "h100-sxm-pcie5", "gh200-c2c", "gb300-c2c")
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-8b")
LOADS = (0.4, 0.75)
FIXED = ("reload", "recompute", "threshold")

_POOL_BYTES, _HOST_BYTES, _DISK_BYTES = 24 * 2**30, 64 * 2**30, 4 * 2**40
_PROBE_RATE = 0.05  # slow enough that nothing queues: what a request needs does not depend on who else is there


@dataclass(frozen=True, eq=False)
class Cell:
    """One machine, model and load: the accelerator's utilisation under "reload", by choice of the arrival rate."""

    machine: str
    model: str
    load: float
    rate: float
    requests: int
    reports: Mapping[str, PolicyReport]

    @property
    def best_fixed(self) -> str | None:
        """The stable fixed policy with the smallest mean time to first token."""
        stable = [name for name in FIXED if not self.reports[name].unstable]
        return min(stable, key=lambda name: self.reports[name].ttft_mean_s, default=None)

    def against_best(self, name: str) -> float | None:
        """A policy's mean time to first token ÷ that of the best fixed one; None where they cannot be compared."""
        best = self.best_fixed
        if best is None or self.reports[name].unstable:
            return None
        return self.reports[name].ttft_mean_s / self.reports[best].ttft_mean_s

    def why(self, name: str = "calibrated", most: int = 3) -> str:
        """What the policy decided most often, and why."""
        decisions = self.reports[name].decisions
        total = sum(decisions.values())
        return "; ".join(f"{count / total:.0%} {reason}" for reason, count in list(decisions.items())[:most])


def policy_cells(
    trace: Trace,
    machines: Sequence[str] = MACHINES,
    models: Sequence[str] = MODELS,
    loads: Sequence[float] = LOADS,
    *,
    truth_share: float = 0.2,
    seed: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Cell]:
    """One cell after the other. Requests that are longer than a model's positions are left out for that model."""
    for number, (machine, model) in enumerate(product(machines, models)):
        arch, believed = ModelArch.preset(model), Machine.load(machine)
        fitting = tuple(s for s in trace.sessions if s.tokens <= arch.max_positions)
        cluster = Cluster(
            arch,
            believed,
            _POOL_BYTES,
            _HOST_BYTES,
            _DISK_BYTES,
            memory_gb_per_s=DEVICE_MEMORY_GB_PER_S[machine],
            truth=drawn_away(believed, truth_share, seed + number),
        )
        shown = replace(trace, sessions=fitting)
        progress(f"{model} on {machine}")
        alone = simulate(shown.at_rate(_PROBE_RATE), cluster, ["reload"])["reload"].rho["accelerator"]
        assert alone, "requests that come at different times need some work"
        for load in loads:
            rate = load / alone * _PROBE_RATE
            reports = simulate(shown.at_rate(rate), cluster, POLICIES)
            yield Cell(machine, model, load, rate, shown.requests, reports)
