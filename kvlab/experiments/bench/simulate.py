"""The simulator's claims: a long trace in seconds, the real engine's times, and a verdict near the best fixed policy.

The table of policies says where each loses, and by how much.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvlab.arch import ModelArch
from kvlab.engine import Engine
from kvlab.experiments.bench.model import model_and_text
from kvlab.experiments.bench.rows import Progress, Row
from kvlab.experiments.calibrate import calibrate
from kvlab.experiments.policies import FIXED, Cell, policy_cells
from kvlab.experiments.replay import agent_trace, replay
from kvlab.machine import Machine
from kvlab.model import Model
from kvlab.policy import Calibrated
from kvlab.records import median
from kvlab.simulate import DEVICE_MEMORY_GB_PER_S, SAMPLE, Cluster, Simulator, Trace, read_trace, report, simulate
from kvlab.tiers import HostTier

__all__ = ["bench_simulate"]

_BLOCK, _POOL_BLOCKS, _TIER_BYTES = 16, 160, 2**31  # a pool for three or four of the agents
_COPIES = 12  # of a thousand requests each
_ENGINE_RUNS = 3
_JUDGED = (*FIXED, "idle-blind", "calibrated")


def bench_simulate(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Seconds for 12,000 requests; the real engine beside it; one row for each machine, model and load; the losses."""
    yield _speed_row(progress)
    yield _engine_row(device, dtype, progress)
    cells = []
    agents = agent_trace(150, 8, preamble=4096, new_tokens=1024, gap_s=8.0)
    for cell in policy_cells(agents, progress=progress):
        cells.append(cell)
        yield _cell_row(cell)
    yield _worst_row(cells)
    for name in _JUDGED:
        yield _loss_row(cells, name)


def _speed_row(progress: Progress) -> Row:
    trace = read_trace(SAMPLE).repeated(_COPIES).at_rate(0.3)
    where = "h100-sxm-pcie5"
    cluster = Cluster(
        ModelArch.preset("llama-3.1-8b"), Machine.load(where), 60 * 2**30, 512 * 2**30, 4 * 2**40,
        memory_gb_per_s=DEVICE_MEMORY_GB_PER_S[where],
    )  # fmt: skip
    progress(f"simulating {trace.requests:,} requests")
    begin = time.process_time()
    simulate(trace, cluster, ["calibrated"])
    took_s = time.process_time() - begin
    return Row(f"simulate {trace.requests:,} requests, one policy", took_s, "s of CPU", goal="≤ 10 s", met=took_s <= 10)


def _engine_row(device: str, dtype: str, progress: Progress) -> Row:
    """Agents on SmolLM2 and the wall clock, against their simulation; a median, since the machine's pace changes."""
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    ratios, busy = [], []
    for run in range(_ENGINE_RUNS):
        trace = agent_trace(12, 3, preamble=256, new_tokens=128, gap_s=20.0, seed=run)
        progress(f"run {run + 1} of {_ENGINE_RUNS}: {trace.requests} turns of agents on the real engine")
        ratio, load = _simulated_to_measured(model, tokens, trace)
        ratios.append(ratio)
        busy.append(load)
    middle = median(ratios)
    return Row(
        "mean TTFT of agents on the engine (SmolLM2), simulated ÷ measured",
        middle,
        "",
        goal="median within 10 % of 1",
        met=abs(middle - 1) <= 0.1,
        note=f"{', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))} in {len(ratios)} runs; {median(busy):.0%} busy",
    )


def _simulated_to_measured(model: Model, tokens: Sequence[int], trace: Trace) -> tuple[float, float]:
    """The ratio of the mean times to first token, from a calibration made just before; how busy the simulation was."""
    machine = calibrate(model, tokens, {"host": lambda: HostTier(_TIER_BYTES)}, block_size=_BLOCK)
    block_bytes = model.layout(_BLOCK).block_bytes
    policy, tier = Calibrated(machine, queue_delay_value=1.0), HostTier(_TIER_BYTES)
    with Engine(model, _POOL_BLOCKS, _BLOCK, [tier], policy) as engine:
        # Others in a hurry first, as many: the tier takes its memory from the system as it grows, and does so once.
        replay(engine, _others(trace))
        engine.evict(_POOL_BLOCKS)
        engine.executor.drain()
        tier.clear()
        measured = replay(engine, trace)
    cluster = Cluster(
        model.arch, machine, _POOL_BLOCKS * block_bytes, _TIER_BYTES, kv_dtype=model.dtype, block_size=_BLOCK,
        token_budget=512, max_running=64, watermarks=(0.0, 0.0),
    )  # fmt: skip
    simulated = Simulator(trace, cluster, policy).run()
    ratio = (sum(simulated.ttfts_s) / len(simulated.ttfts_s)) / (sum(measured) / len(measured))
    return ratio, report(simulated, 0.0).accelerator_busy


def _others(trace: Trace) -> Trace:
    """As much work from sessions that share nothing with the trace's, all at once."""
    far = 1 + max(session.id for session in trace.sessions)
    return Trace(
        "others",
        tuple(
            replace(
                session,
                id=far + session.id,
                blocks=[far + block for block in session.blocks],
                turns=tuple(replace(turn, gap_s=0.0) for turn in session.turns),
            )
            for session in trace.sessions
        ),
    )


def _cell_row(cell: Cell) -> Row:
    ours, best = cell.reports["calibrated"], cell.best_fixed
    ratio = cell.against_best("calibrated")
    return Row(
        _name(cell),
        ours.ttft_mean_s,
        "s mean TTFT, simulated",
        peers={
            name + (" (unstable)" if report.unstable else ""): report.ttft_mean_s
            for name, report in cell.reports.items()
            if name != "calibrated"
        },
        of_peer={} if ratio is None or best is None else {best: 1 / ratio},
        goal="best fixed policy within 2 %",
        met=_met(ratio),
        note=cell.why(),
    )


def _worst_row(cells: Sequence[Cell]) -> Row:
    compared = {cell: ratio for cell in cells if (ratio := cell.against_best("calibrated")) is not None}
    worst, best = max(compared, key=compared.__getitem__), min(compared, key=compared.__getitem__)
    return Row(
        "calibrated against the best fixed policy, in the cell where it does worst",
        compared[worst],
        "of its mean TTFT",
        goal="≤ 1.02",
        met=_met(compared[worst]),
        note=f"of {len(compared)} stable cells {_name(worst)}; it wins most ({1 - compared[best]:.1%} less than"
        f" {best.best_fixed}) in {_name(best)}",
    )


def _loss_row(cells: Sequence[Cell], name: str) -> Row:
    """Where a policy loses most to the best of the others, and in how many cells it loses at all."""
    compared = {cell: ratio for cell in cells if (ratio := cell.against_all(name, _JUDGED)) is not None}
    worst = max(compared, key=compared.__getitem__)
    lost = sum(ratio > 1.02 for ratio in compared.values())
    return Row(
        f"{name} against the best policy, in the cell where it does worst",
        compared[worst],
        "of the best mean TTFT",
        note=f"{_name(worst)}; unstable in {len(cells) - len(compared)} of {len(cells)} cells, more than 2 % behind in"
        f" {lost}",
    )


def _name(cell: Cell) -> str:
    return f"{cell.model} on {cell.machine}, load {cell.load:g}"


def _met(ratio: float | None) -> bool | None:
    return None if ratio is None else ratio <= 1.02
