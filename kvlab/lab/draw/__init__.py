"""The pictures of the lab, in one visual language, as pure functions from records and numbers to figures."""

from kvlab.lab.draw.bench import bench_figure
from kvlab.lab.draw.crossover import crossover_figure
from kvlab.lab.draw.plan import plan_figure
from kvlab.lab.draw.probe import probe_figure
from kvlab.lab.draw.simulate import simulate_figure
from kvlab.lab.draw.style import FLIP, RECOMPUTE, RELOAD, save

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
