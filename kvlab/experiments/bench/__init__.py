"""Every speed claim of the project, re-made: ours beside a floor and beside peers, interleaved in one process.

A floor is the least work the task needs, done alone (the same bytes in one contiguous copy, the same file read raw).
A peer is another library doing the same task. Ratios above 1 mean that we are faster. Medians over interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvlab.experiments.bench.engine import bench_engine
from kvlab.experiments.bench.memory import bench_disk, bench_host
from kvlab.experiments.bench.model import bench_prediction, bench_prefill, bench_resume
from kvlab.experiments.bench.rows import Progress, Row
from kvlab.experiments.bench.simulate import bench_simulate
from kvlab.experiments.bench.start import bench_start

__all__ = ["GROUPS", "Row", "run"]

GROUPS: dict[str, Callable[[str, str, Progress], Iterator[Row]]] = {
    "start": bench_start,
    "host": bench_host,
    "disk": bench_disk,
    "prefill": bench_prefill,
    "resume": bench_resume,
    "prediction": bench_prediction,
    "engine": bench_engine,
    "simulate": bench_simulate,
}


def run(groups: Sequence[str], device: str, dtype: str, progress: Progress = lambda _: None) -> Iterator[Row]:
    """The rows of the named groups, as they are measured. Raises ValueError naming the known groups."""
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"unknown bench group {group!r}; known groups: {', '.join(GROUPS)}")
    for group in groups:
        yield from GROUPS[group](device, dtype, progress)
