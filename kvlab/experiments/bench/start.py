"""What a user waits for before anything happens: imports, the shell, one decision, a plan."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from kvlab.arch import ModelArch
from kvlab.experiments.bench.rows import Progress, Row
from kvlab.machine import Machine
from kvlab.records import median
from kvlab.verdict import decide

__all__ = ["bench_start"]

_MAIN = "from kvlab.cli import main; main()"


def bench_start(device: str, dtype: str, progress: Progress) -> Iterator[Row]:  # noqa: ARG001
    """Seconds from the shell, less an empty Python, and microseconds of one `decide` after the first."""
    progress("start: imports and the shell")
    code = "import sys, kvlab; assert 'torch' not in sys.modules"
    yield _seconds_row("import kvlab, without torch", ["-c", code], 0.2)
    yield _seconds_row("kvlab --help", ["-c", _MAIN, "--help"], 0.3)
    plan = ["plan", "--model", "llama-3.1-8b", "--machine", "h100-sxm-pcie5"]
    yield _seconds_row("kvlab plan, 8B on H100", ["-c", _MAIN, *plan], 1.0)
    progress("decide")
    for model, machine in (("llama-3.1-8b", "h100-sxm-pcie5"), ("qwen3-8b", "a100-sxm-pcie4")):
        yield _decide_row(model, machine)


def _seconds_row(name: str, arguments: Sequence[str], most_s: float) -> Row:
    """Whole-process seconds; the floor is an interpreter that does nothing."""

    def run(arguments: Sequence[str]) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env={**os.environ})
        return time.perf_counter() - begin

    ours, empty = [], []
    for _ in range(7):
        ours.append(run(arguments))
        empty.append(run(["-c", "pass"]))
    took_s = median(ours) - median(empty)
    return Row(
        f"{name} (beyond an empty interpreter)",
        took_s,
        "s",
        floor=median(empty),
        goal=f"≤ {most_s:g} s",
        met=took_s <= most_s,
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
    took_s = median(batches)
    return Row(f"decide, {model} on {profile}", took_s * 1e6, "µs", goal="≤ 20 µs", met=took_s <= 20e-6)
