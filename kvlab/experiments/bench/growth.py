"""How time and memory grow with size: exponents fitted on logarithms, against what the theory says."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvlab.arch import ModelArch
from kvlab.arithmetic import prefill_flops
from kvlab.experiments.bench.hashing import filled_index, lookups
from kvlab.experiments.bench.model import model_and_text
from kvlab.experiments.bench.rows import Progress, Row, interleave
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import Fingerprint, block_hashes
from kvlab.machine import Machine
from kvlab.prefix import PrefixIndex
from kvlab.records import bootstrap_interval, median
from kvlab.simulate import DEVICE_MEMORY_GB_PER_S, SAMPLE, Cluster, read_trace, simulate
from kvlab.verdict import decide

__all__ = ["bench_growth", "exponent", "exponent_row"]

_ROUNDS = 7
_WHERE = "h100-sxm-pcie5"


def exponent(samples: Mapping[int, Sequence[float]]) -> float:
    """The slope of log(median) over log(size), least squares; `samples` by size."""
    sizes = np.log(np.asarray(list(samples), dtype=np.float64))
    return float(np.polyfit(sizes, np.log([median(values) for values in samples.values()]), 1)[0])


def exponent_row(name: str, samples: Mapping[int, Sequence[float]], theory: float, slack: float, about: str) -> Row:
    """The exponent against `theory` + `slack`, its interval over rounds, and the median seconds at each size."""

    def fitted(rounds: Any) -> float:
        return exponent({size: [values[i] for i in rounds] for size, values in samples.items()})

    found, sizes = exponent(samples), list(samples)
    most = theory + slack
    return Row(
        f"growth of {name}, {sizes[0]:,} to {sizes[-1]:,}",
        found,
        "exponent",
        peers={f"at {size:,}, ms": median(values) * 1e3 for size, values in samples.items()},
        interval=bootstrap_interval(fitted, len(samples[sizes[0]])),
        goal=f"≤ {most:.2f} ({about}: {theory:.2f})",
        met=found <= most,
    )


def bench_growth(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Prefill, look-ups, decisions, the simulator, and what the index and the simulator keep in memory."""
    for name, lengths in (("wide-kv", (64, 256, 1024, 4096)), ("smollm2-135m", (64, 256, 1024))):
        progress(f"growth of prefill, {name}")
        yield prefill_row(name, device, dtype, lengths)
    progress("growth of look-ups and decisions")
    yield from lookup_rows()
    yield from decision_rows()
    progress("growth of the simulator")
    yield from simulator_rows()
    yield index_memory_row()


def _timed(arms: Mapping[int, Callable[[], object]]) -> dict[int, list[float]]:
    """Seconds of each arm, by size, in interleaved rounds."""
    seconds = interleave({str(size): arm for size, arm in arms.items()}, _ROUNDS)
    return {size: seconds[str(size)] for size in arms}


def prefill_row(name: str, device: str, dtype: str, lengths: Sequence[int]) -> Row:
    """Prefill against tokens; the theory is the exponent of its FLOPs over the same lengths."""
    model, tokens = model_and_text(name, device, dtype)
    flops = {length: [float(prefill_flops(model.arch, 0, length))] for length in lengths}
    with Rig(model, block_size=16, max_tokens=lengths[-1], tables=1) as rig:
        samples = _timed({n: partial(lambda n: rig.recompute(tokens[:n]).ttft_s, n) for n in lengths})
    return exponent_row(f"prefill time with tokens, {name} {model.dtype}", samples, exponent(flops), 0.1, "its FLOPs")


def lookup_rows(
    blocks: Sequence[int] = (1_000, 10_000, 100_000), tokens: Sequence[int] = (1_000, 10_000, 100_000)
) -> Iterator[Row]:
    """One look-up of 512 blocks against the blocks in the index; hashing and finding a prompt against its tokens."""
    arms: dict[int, Callable[[], object]] = {}
    for count in blocks:
        index, hashes = filled_index(count)
        turns = iter(lookups(hashes, min(512, count), _ROUNDS + 1, seed=0))
        arms[count] = partial(lambda index, turns: index.match(next(turns), 1.0), index, turns)
    yield exponent_row("a look-up of 512 blocks with blocks in the pool", _timed(arms), 0, 0.2, "constant; caches miss")
    fingerprint = Fingerprint("bench", "bench", "bench", "bench", "fp32", "bench")

    def find(index: PrefixIndex, ids: list[int]) -> None:
        index.match(block_hashes(fingerprint, ids, 16), 1.0)

    index, _ = filled_index(1)
    prompts = {count: partial(find, index, list(range(count))) for count in tokens}
    yield exponent_row("hashing and finding a prompt with its tokens", _timed(prompts), 1, 0.1, "linear")


def decision_rows() -> Iterator[Row]:
    """One `decide` against the prefix and against layers; every crossing against the model's positions."""
    arch, machine = ModelArch.preset("llama-3.1-8b"), Machine.load(_WHERE)

    def fifty(arch: ModelArch, prefix: int) -> None:
        for i in range(50):
            decide(arch, machine, prefix=prefix + 16 * i, suffix=64)

    prefixes = {prefix: partial(fifty, arch, prefix) for prefix in (1_000, 10_000, 100_000)}
    yield exponent_row("50 decisions with the prefix's tokens", _timed(prefixes), 0, 0.1, "constant")
    deep = {n: partial(fifty, replace(arch, layers=arch.layers[:1] * n), 4096) for n in (8, 80, 800)}
    yield exponent_row("50 decisions with the model's layers", _timed(deep), 1, 0.1, "at most linear")

    def crossings(positions: int) -> None:
        assert decide(replace(arch, max_positions=positions), machine, prefix=64, suffix=64).crossings is not None

    scanned = {n: partial(crossings, n) for n in (1_000, 10_000, 100_000)}
    yield exponent_row("all crossings with the model's positions", _timed(scanned), 1, 0.1, "linear")


def simulator_rows(requests: Sequence[int] = (40, 400, 4_000)) -> Iterator[Row]:
    """CPU seconds of a simulation against its requests, and the most bytes that it keeps."""
    cluster = Cluster(
        ModelArch.preset("llama-3.1-8b"), Machine.load(_WHERE), 60 * 2**30, 512 * 2**30, 4 * 2**40,
        memory_gb_per_s=DEVICE_MEMORY_GB_PER_S[_WHERE],
    )  # fmt: skip
    sample = read_trace(SAMPLE)
    whole = sample.repeated(-(-requests[-1] // sample.requests)).at_rate(0.3)
    cut = [replace(whole, sessions=whole.sessions[:count]) for count in requests]
    traces = {trace.requests: trace for trace in cut}

    def cpu_s(trace: Any) -> float:
        begin = time.process_time()
        simulate(trace, cluster, ["calibrated"])
        return time.process_time() - begin

    arms = {taken: partial(cpu_s, trace) for taken, trace in traces.items()}
    yield exponent_row("the simulator's time with requests", _timed(arms), 1, 0.1, "linear")
    halves = {taken // 2: replace(trace, sessions=trace.sessions[: taken // 2]) for taken, trace in traces.items()}
    kept = {taken: _most_bytes(partial(cpu_s, trace)) for taken, trace in halves.items()}  # tracing is slow
    yield _memory_row("the simulator's memory with requests", kept)


def index_memory_row(blocks: Sequence[int] = (1_000, 10_000, 100_000)) -> Row:
    """What an index of that many blocks keeps, allocator and hashes included."""
    kept = {count: _most_bytes(partial(filled_index, count)) for count in blocks}
    return _memory_row("the prefix index's memory with its blocks", kept)


def _most_bytes(work: Callable[[], object]) -> int:
    """The most bytes that Python objects held at once while `work` ran."""
    tracemalloc.start()
    try:
        kept = work()  # still held when the peak is read
        return tracemalloc.get_traced_memory()[1] if kept is not None else 0
    finally:
        tracemalloc.stop()


def _memory_row(name: str, kept_bytes: Mapping[int, int]) -> Row:
    sizes = list(kept_bytes)
    found = exponent({size: [float(kept)] for size, kept in kept_bytes.items()})
    return Row(
        f"growth of {name}, {sizes[0]:,} to {sizes[-1]:,}",
        found,
        "exponent",
        peers={f"bytes each at {size:,}": kept / size for size, kept in kept_bytes.items()},
        goal="≤ 1.10 (linear: 1.00)",
        met=found <= 1.1,
    )
