"""What a user waits for before anything happens: imports, the shell, one decision, a plan; and the first answer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.arch import ModelArch
from kvlab.experiments.bench.rows import Progress, Row, judged, median_interval
from kvlab.machine import Machine
from kvlab.records import bootstrap_interval, median
from kvlab.verdict import decide

__all__ = ["bench_start"]

_MAIN = "from kvlab.cli import main; main()"


def bench_start(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Seconds from the shell, less an empty Python; a whole crossover; microseconds of one `decide` after the first."""
    progress("start: imports and the shell")
    code = "import sys, kvlab; assert 'torch' not in sys.modules"
    yield _seconds_row("import kvlab, without torch", ["-c", code], 0.2)
    yield _seconds_row("kvlab --help", ["-c", _MAIN, "--help"], 0.3)
    plan = ["plan", "--model", "llama-3.1-8b", "--machine", "h100-sxm-pcie5"]
    yield _seconds_row("kvlab plan, 8B on H100", ["-c", _MAIN, *plan], 1.0)
    progress("the smallest crossover")
    yield judged(_crossover_row(device, dtype), device, dtype)
    progress("decide")
    for model, machine in (("llama-3.1-8b", "h100-sxm-pcie5"), ("qwen3-8b", "a100-sxm-pcie4")):
        yield _decide_row(model, machine)


def _seconds_row(name: str, arguments: Sequence[str], most_s: float) -> Row:
    """Whole-process seconds; the floor is an interpreter that does nothing."""
    ours, empty = [], []
    for _ in range(7):
        ours.append(_process_s(arguments))
        empty.append(_process_s(["-c", "pass"]))
    whole, least = np.asarray(ours), np.asarray(empty)

    def beyond(rounds: Any) -> float:
        return float(np.median(whole[rounds]) - np.median(least[rounds]))

    took_s = beyond(np.arange(len(ours)))
    return Row(
        f"{name} (beyond an empty interpreter)",
        took_s,
        "s",
        floor=median(empty),
        interval=bootstrap_interval(beyond, len(ours)),
        goal=f"≤ {most_s:g} s",
        met=took_s <= most_s,
    )


def _process_s(arguments: Sequence[str]) -> float:
    """Seconds of a Python with these arguments, from its start to its end, in a folder that is then removed."""
    with tempfile.TemporaryDirectory(prefix="kvlab-bench-") as folder:
        # The folder above the package, so that a checkout that is not installed is found from there too.
        source = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
        )
        return time.perf_counter() - begin


def _crossover_row(device: str, dtype: str) -> Row:
    """All that `kvlab crossover` does for the smallest model, from the shell to the chart."""
    command = ["-c", _MAIN, "crossover", "--model", "tiny", "--device", device, "--dtype", dtype]
    samples = [_process_s(command) for _ in range(7)]
    took_s = median(samples)
    return Row(
        "kvlab crossover --model tiny, in all",
        took_s,
        "s",
        interval=median_interval(samples),
        goal="≤ 10 s",
        met=took_s <= 10,
    )


def _decide_row(model: str, profile: str) -> Row:
    arch, machine = ModelArch.preset(model), Machine.load(profile)
    batches = []
    for batch in range(41):
        begin = time.perf_counter()
        for i in range(50):
            decide(arch, machine, prefix=4096 + 16 * i, suffix=64)
        if batch:
            batches.append((time.perf_counter() - begin) / 50)
    took_us = [seconds * 1e6 for seconds in batches]
    return Row(
        f"decide, {model} on {profile}",
        median(took_us),
        "µs",
        interval=median_interval(took_us),
        goal="≤ 20 µs",
        met=median(took_us) <= 20,
    )
