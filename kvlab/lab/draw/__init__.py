"""The pictures of the lab, in one visual language, as pure functions from records and numbers to figures.

Each figure is loaded when first used: drawing one needs no torch, though what another one draws may.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvlab.lab.draw.style import FLIP, RECOMPUTE, RELOAD, save

if TYPE_CHECKING:
    from kvlab.lab.draw.bench import bench_figure
    from kvlab.lab.draw.crossover import crossover_figure
    from kvlab.lab.draw.plan import plan_figure
    from kvlab.lab.draw.probe import probe_figure
    from kvlab.lab.draw.simulate import simulate_figure

__all__ = [
    "FLIP",
    "RECOMPUTE",
    "RELOAD",
    "bench_figure",
    "crossover_figure",
    "plan_figure",
    "probe_figure",
    "save",
    "simulate_figure",
]


def __getattr__(name: str) -> Any:
    if name.endswith("_figure") and name in __all__:
        return getattr(import_module(f"kvlab.lab.draw.{name.removesuffix('_figure')}"), name)
    raise AttributeError(f"module 'kvlab.lab.draw' has no attribute {name!r}")
