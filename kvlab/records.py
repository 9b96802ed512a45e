"""Results as versioned JSON: what was measured, when, on which machine, with every raw sample.

Knows files and machine facts. Does not know how anything is measured or drawn.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from kvlab import __version__

__all__ = ["bootstrap_interval", "machine_facts", "median", "now_utc", "read_json", "write_json"]

# Fewer rounds give no honest interval.
MIN_ROUNDS = 7


def now_utc() -> str:
    """The time as ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def machine_facts(device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to judge a number: processor, cores, memory, versions, threads, affinity, accelerator."""
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kvlab": __version__,
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "cpu_affinity": affinity,
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": device,
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def median(samples: Sequence[float]) -> float:
    """The median of at least one sample."""
    return float(np.median(np.asarray(samples, dtype=np.float64)))


def bootstrap_interval(
    statistic: Any, rounds: int, seed: int = 0, draws: int = 400, coverage: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of `statistic(indices) -> float` over resampled rounds; None with fewer than seven rounds.

    The statistic may return inf (never) or 0 (always); the interval's ends are then those values.
    """
    if rounds < MIN_ROUNDS:
        return None
    generator = np.random.default_rng(seed)
    values = sorted(statistic(generator.integers(0, rounds, rounds)) for _ in range(draws))
    # Order statistics, not interpolation: between a finite length and "never" there is nothing to interpolate.
    tail = (1 - coverage) / 2
    return float(values[int(tail * (draws - 1))]), float(values[round((1 - tail) * (draws - 1))])


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole or not at all: a temporary file beside `path`, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, allow_nan=False, ensure_ascii=False)
            file.write("\n")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Parsed JSON. Raises ValueError naming the file when it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
