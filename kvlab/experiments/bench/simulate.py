"""The simulator's claims: a long trace in seconds, and a verdict that is close to the best fixed policy everywhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvlab.arch import ModelArch
from kvlab.engine import Engine
from kvlab.experiments.bench.model import model_and_text
from kvlab.experiments.bench.rows import Progress, Row
from kvlab.experiments.calibrate import calibrate
from kvlab.experiments.policies import Cell, policy_cells
from kvlab.experiments.replay import agent_trace, replay
from kvlab.machine import Machine
from kvlab.policy import Calibrated
from kvlab.simulate import DEVICE_MEMORY_GB_PER_S, SAMPLE, Cluster, Simulator, read_trace, simulate
from kvlab.tiers import HostTier

__all__ = ["bench_simulate"]

_CELL_REQUESTS = 500
_BLOCK, _POOL_BLOCKS, _TIER_BYTES = 16, 160, 2**31  # a pool for three or four of the agents
_COPIES = 12  # of a thousand requests each


def bench_simulate(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Seconds for 12,000 requests; the real engine beside it; then one row for each machine, model and load."""
    yield _speed_row(progress)
    yield _engine_row(device, dtype, progress)
    cells = []
    for cell in policy_cells(read_trace(SAMPLE, limit=_CELL_REQUESTS), progress=progress):
        cells.append(cell)
        yield _cell_row(cell)
    yield _worst_row(cells)


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
    """Agents on SmolLM2 and the wall clock, against their simulation from a calibration made just before."""
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    trace = agent_trace(12, 3, preamble=256, new_tokens=128, gap_s=10.0)
    progress(f"calibrating, then {trace.requests} turns of agents on the real engine")
    machine = calibrate(model, tokens, {"host": lambda: HostTier(_TIER_BYTES)}, block_size=_BLOCK, budget_s=10.0)
    block_bytes = model.layout(_BLOCK).block_bytes
    policy = Calibrated(machine)
    with Engine(model, _POOL_BLOCKS, _BLOCK, [HostTier(_TIER_BYTES)], policy) as engine:
        replay(engine, agent_trace(1, 2, preamble=64, new_tokens=32, gap_s=0.1, seed=1))  # not yet warm
        measured = replay(engine, trace)
    cluster = Cluster(
        model.arch, machine, _POOL_BLOCKS * block_bytes, _TIER_BYTES, kv_dtype=model.dtype, block_size=_BLOCK,
        token_budget=512, max_running=64, watermarks=(0.0, 0.0),
    )  # fmt: skip
    simulated = Simulator(trace, cluster, policy).run().ttfts_s
    ratio = (sum(simulated) / len(simulated)) / (sum(measured) / len(measured))
    return Row(
        "mean TTFT of agents, simulated ÷ measured on the real engine (SmolLM2)",
        ratio,
        "",
        goal="within 10 % of 1",
        met=abs(ratio - 1) <= 0.1,
    )


def _cell_row(cell: Cell) -> Row:
    ours = cell.reports["calibrated"]
    peers = {name: report.ttft_mean_s for name, report in cell.reports.items() if name != "calibrated"}
    comparable = {name: report for name, report in cell.reports.items() if not report.unstable}
    return Row(
        f"{_name(cell)}: {cell.why()}",
        ours.ttft_mean_s,
        "s mean TTFT, simulated",
        peers=peers,
        of_peer={
            name: comparable[name].ttft_mean_s / ours.ttft_mean_s
            for name in peers
            if name in comparable and "calibrated" in comparable
        },
        goal="best fixed policy within 2 %",
        met=_met(cell.against_best("calibrated")),
    )


def _worst_row(cells: list[Cell]) -> Row:
    compared = {cell: ratio for cell in cells if (ratio := cell.against_best("calibrated")) is not None}
    worst, best = max(compared, key=compared.__getitem__), min(compared, key=compared.__getitem__)
    return Row(
        f"calibrated against the best fixed policy, worst of {len(compared)} stable cells ({_name(worst)}); it wins"
        f" most ({1 - compared[best]:.1%}) in {_name(best)}",
        compared[worst],
        "of its mean TTFT",
        goal="≤ 1.02",
        met=_met(compared[worst]),
    )


def _name(cell: Cell) -> str:
    return f"{cell.model} on {cell.machine}, load {cell.load:g}"


def _met(ratio: float | None) -> bool | None:
    return None if ratio is None else ratio <= 1.02
