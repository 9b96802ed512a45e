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
from kvlab.simulate import (
    DEVICE_MEMORY_GB_PER_S,
    SAMPLE,
    Cluster,
    Simulator,
    Turn,
    make_policy,
    read_trace,
    simulate,
)
from kvlab.verdict import decide

__all__ = ["bench_growth", "exponent", "exponent_row", "steady_simulator"]

_ROUNDS = 7
_WHERE = "h100-sxm-pcie5"
_SESSIONS, _FILLING = 20, 10  # of a unit of the simulator's requests, and the units until all its tiers are full


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


def simulator_rows(units: Sequence[int] = (1, 10, 100), requests: Sequence[int] = (20, 200, 2_000)) -> Iterator[Row]:
    """CPU seconds of a simulation in its steady state against its requests; the most bytes that whole ones keep.

    What a request takes must not depend on how many came before it. So each asks for the same as one in every other
    unit does, and none finds caches that are still filling: the first 40 of the sample evict 3 blocks each where later
    ones evict 26, in 1,200 Python calls instead of 1,900, and that says nothing of growth.
    """

    def cpu_s(units: int) -> float:
        simulator, end_s = steady_simulator(units)
        begin = time.process_time()
        simulator.run(end_s)
        return time.process_time() - begin

    each = 2 * _SESSIONS
    arms = {each * count: partial(cpu_s, count) for count in units}
    yield exponent_row("the simulator's time with requests, tiers full", _timed(arms), 1, 0.1, "linear")
    cluster = _cluster(60 * 2**30, 512 * 2**30, 4 * 2**40)
    sample = read_trace(SAMPLE)
    whole = sample.repeated(-(-requests[-1] // sample.requests)).at_rate(0.3)
    cut = {count: replace(whole, sessions=whole.sessions[:count]) for count in requests}
    kept = {count: _most_bytes(partial(simulate, trace, cluster, ["calibrated"])) for count, trace in cut.items()}
    yield _memory_row("the simulator's memory with requests", kept)


def steady_simulator(units: int) -> tuple[Simulator, float]:
    """One with full tiers, and until when it has `units` times 2 · `_SESSIONS` requests to serve, alike in each unit.

    Sessions of the sample, with other blocks in each unit, come back once when they have long left the pool: there are
    hits, decisions, loads, evictions and demotions in every unit.
    """
    sample, back = read_trace(SAMPLE, limit=_SESSIONS).at_rate(0.1), Turn(60.0, 512, 128)
    unit = replace(sample, sessions=tuple(replace(s, turns=(*s.turns, back)) for s in sample.sessions))
    trace = unit.repeated(_FILLING + units + 1)  # the last one only goes on, so that the end is like the beginning
    cluster = _cluster(30 * 2**30, 192 * 2**30, 64 * 2**30)
    simulator = Simulator(trace, cluster, make_policy("calibrated", cluster.machine))
    begin_s, end_s = (trace.sessions[_SESSIONS * place].turns[0].gap_s for place in (_FILLING, _FILLING + units))
    simulator.run(begin_s)
    return simulator, end_s


def _cluster(pool_bytes: int, host_bytes: int, disk_bytes: int) -> Cluster:
    return Cluster(
        ModelArch.preset("llama-3.1-8b"), Machine.load(_WHERE), pool_bytes, host_bytes, disk_bytes,
        memory_gb_per_s=DEVICE_MEMORY_GB_PER_S[_WHERE],
    )  # fmt: skip


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
