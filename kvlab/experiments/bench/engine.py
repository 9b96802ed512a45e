"""The engine's claims: deciding beats either habit, looking up and scheduling cost little. Loading is in `overlap`."""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.blocks import BlockAllocator
from kvlab.engine import Engine
from kvlab.experiments.agents import Arm, Rounds, mean_ttft_s, measure, regret, replays
from kvlab.experiments.bench.model import model_and_text
from kvlab.experiments.bench.overlap import BLOCK, layer_groups, overlap_rows
from kvlab.experiments.bench.rows import Progress, Row, interleave, judged, median_interval
from kvlab.experiments.calibrate import TierFactory, calibrate
from kvlab.experiments.workload import Workload, agent_workload, mixing_link
from kvlab.fingerprint import Fingerprint, block_hashes
from kvlab.machine import Machine
from kvlab.model import Model
from kvlab.policy import Calibrated, Recompute, Reload
from kvlab.pool import BlockPool, KVLayout
from kvlab.prefix import PrefixIndex, matched_blocks
from kvlab.records import bootstrap_interval, median
from kvlab.streams import streams_for
from kvlab.tiers import DiskTier, HostTier, LinkTier
from kvlab.transfer import Transfer
from kvlab.units import format_gb_per_s, format_s

__all__ = ["agent_rows", "bench_engine", "lookup_rows", "overhead_rows"]

_TIER_BYTES = 2**32
_LINK = "an emulated link"


def bench_engine(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Agents under three policies, with both whole ways as replays; then look-ups, scheduling, and overlap alone."""
    yield from lookup_rows(progress)
    for name in ("wide-kv", "smollm2-135m"):
        model, tokens = model_and_text(name, device, dtype)
        with tempfile.TemporaryDirectory(prefix="kvlab-bench-") as folder:
            makers: dict[str, TierFactory] = {"host": lambda: HostTier(_TIER_BYTES), "disk": _disks(Path(folder))}
            progress(f"calibrating, {name}")
            machine = calibrate(model, tokens, makers, block_size=BLOCK, budget_s=10.0)
            yield from agent_rows(model, tokens, machine, Path(folder), progress)
    yield from overhead_rows(model, tokens, machine, progress)
    yield from overlap_rows(model, tokens, machine, progress)


# Agents --------------------------------------------------------------------------------------------------------------


def agent_rows(
    model: Model,
    tokens: Sequence[int],
    machine: Machine,
    folder: Path,
    progress: Progress,
    *,
    workload: Workload | None = None,
    rounds: int = 7,
) -> Iterator[Row]:
    """Two rows for the disk, two for a link with which each way wins half of the resumes, and one for the tokens.

    Never reloading moves nothing out of a tier, so that one arm of it serves both tiers of its round.
    """
    workload = workload or agent_workload()
    name = f"{workload.agents} agents in turn, {model.arch.name} {model.dtype}"
    tiers, note = {"disk": Arm(Reload(), _disks(folder))}, ""
    try:
        gb_per_s, latency_s = mixing_link(
            workload, model.arch, machine, kv_dtype=model.dtype, block_size=BLOCK, groups=layer_groups(model)
        )
    except ValueError as error:
        progress(str(error))
        yield Row(f"{name}, a link with which each way wins a third: none on this machine", math.nan, "×")
    else:
        note = f"{format_gb_per_s(gb_per_s)} and {format_s(latency_s)}"
        tiers[_LINK] = Arm(Reload(), lambda: LinkTier(HostTier(_TIER_BYTES), gb_per_s, latency_s))
        link = machine.link("host").behind(gb_per_s, latency_s)
        machine = machine.with_link(tiers[_LINK].make_tier().name, link)
    arms = {"never": Arm(Recompute(), tiers["disk"].make_tier)}
    for title, arm in tiers.items():
        arms |= {f"always, {title}": arm, f"calibrated, {title}": Arm(Calibrated(machine), arm.make_tier)}
    measured = measure(model, tokens, workload, arms, rounds, block_size=BLOCK, progress=progress)
    for title in tiers:
        played = (measured[f"calibrated, {title}"], measured[f"always, {title}"], measured["never"])
        for row in _cell_rows(f"{name}, {title}", *played, mixed=title == _LINK):
            yield replace(row, note=note if title == _LINK else "")
    outputs = ([resume.output for resumes in played for resume in resumes] for played in measured.values())
    differ = sum(len(set(same)) > 1 for same in zip(*outputs, strict=True))
    # On a GPU whole and chunked passes are computed by different kernels.
    title = f"{name}: resumes whose tokens differ between policies, of {rounds * len(workload.resumes)}"
    yield judged(Row(title, float(differ), "resumes", goal="0", met=differ == 0), model.device, model.dtype)


def _disks(folder: Path) -> TierFactory:
    """A maker of disk tiers, each in a folder of its own."""
    count = itertools.count()
    return lambda: DiskTier(folder / f"tier-{next(count)}", _TIER_BYTES)


def _cell_rows(cell: str, calibrated: Rounds, reload: Rounds, recompute: Rounds, *, mixed: bool) -> Iterator[Row]:
    """Mean time to first token against the better habit, and the regret of the choices against replays of both."""
    means = {"calibrated": calibrated, "always reload": reload, "never reload": recompute}
    seconds = {name: np.asarray(mean_ttft_s(rounds)) for name, rounds in means.items()}

    def ratio(rounds: Any) -> float:
        ours, *others = (float(samples[rounds].mean()) for samples in seconds.values())
        return ours / min(others)

    def lost(rounds: Any) -> float:
        chosen, *ways = ([played[i] for i in rounds] for played in means.values())
        return 100 * regret(chosen, replays(*ways)).share

    whole = np.arange(len(calibrated))
    interval = bootstrap_interval(ratio, len(calibrated))
    replayed = replays(reload, recompute)
    wins = sum(times["reload"] < times["recompute"] for times in replayed.values())
    most = 1.0 if mixed else 1.02
    yield Row(
        f"{cell}: mean TTFT of {len(calibrated[0])} resumes, calibrated ÷ the better of always and never reloading",
        ratio(whole),
        "×",
        peers={f"{name}, ms": float(samples.mean()) * 1e3 for name, samples in seconds.items()}
        | {"resumes that reload wins": float(wins)},
        interval=interval,
        goal=f"lower end {'<' if mixed else '≤'} {most:g}",
        met=None if interval is None else interval[0] < most or (interval[0] == most and not mixed),
    )
    share = lost(whole)
    yield Row(
        f"{cell}: regret of the choices against replays of both ways",
        share,
        "%",
        interval=bootstrap_interval(lost, len(calibrated)),
        goal="≤ 5 %",
        met=share <= 5,
    )


# Looking up ----------------------------------------------------------------------------------------------------------


def lookup_rows(progress: Progress, tokens: int = 8192) -> Iterator[Row]:
    """Hash a prompt's blocks and find all of them in the pool's index, or in a tier; one core, no model."""
    progress("prefix lookup and hashing")
    ids = list(range(tokens))
    blocks = tokens // BLOCK
    fingerprint = Fingerprint("bench", "bench", "bench", "bench", "fp32", "bench")
    hashes = block_hashes(fingerprint, ids, BLOCK)
    allocator = BlockAllocator(blocks, BLOCK)
    index, table = PrefixIndex(allocator), allocator.new_table()
    for place, block in enumerate(allocator.grow(table, tokens)):
        index.insert(hashes, place, block, "", 0.0)
    pool = BlockPool(KVLayout(1, 1, 8, BLOCK, "fp32"), blocks)
    with streams_for(pool.device) as streams:
        transfer, tier = Transfer(pool, streams), HostTier(2**24)
        transfer.open(tier, fingerprint)
        transfer.offload(tier, list(range(blocks)), hashes).wait()

        def in_pool() -> None:
            assert len(index.match(block_hashes(fingerprint, ids, BLOCK), 1.0)) == blocks, "a cached block is missing"

        def in_tier() -> None:
            known = partial(tier.contains, fingerprint=fingerprint)
            assert matched_blocks(block_hashes(fingerprint, ids, BLOCK), known) == blocks, "a stored block is missing"

        seconds = interleave({"pool": in_pool, "host tier": in_tier}, 41)
    for where, samples in seconds.items():
        rate = tokens / median(samples)
        yield Row(
            f"prefix hashing and lookup, {tokens} tokens in blocks of {BLOCK}, all in the {where}, one core",
            rate,
            "tokens/s",
            interval=median_interval([tokens / seconds for seconds in samples]),
            goal="≥ 200,000 tokens/s",
            met=rate >= 200_000,
        )


# Scheduling ----------------------------------------------------------------------------------------------------------

_WORK = ("run", "load", "finish", "store", "copy_block")  # what an executor does for its scheduler


class _Meter:
    """Counts the seconds that an engine's steps spend in its executor's work, and those that they take in all."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.work_s, self._depth = engine, 0.0, 0
        for name in _WORK:
            setattr(engine.executor, name, self._timed(getattr(engine.executor, name)))

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return work(*args)
            finally:
                self._depth -= 1
                if not self._depth:  # running a chunk behind a load finishes it: counted once
                    self.work_s += time.perf_counter() - begin

        return timed

    def step(self) -> tuple[float, float]:
        """One step: its seconds, and those of them that no work took."""
        before, begin = self.work_s, time.perf_counter()
        self.engine.scheduler.step()
        whole_s = time.perf_counter() - begin
        return whole_s, whole_s - (self.work_s - before)

    def run(self) -> list[tuple[float, float]]:
        """Steps until nothing can run."""
        steps = []
        while self.engine.scheduler.busy:
            steps.append(self.step())
        return steps


def overhead_rows(
    model: Model, tokens: Sequence[int], machine: Machine, progress: Progress, *, prefix: int = 512, resumes: int = 9
) -> Iterator[Row]:
    """What a step costs beyond the executor's work: decodes of eight, and resumes that hash, look up and decide.

    Hashing and look-ups in tiers count as scheduling, although the executor does them.
    """
    progress("scheduler overhead")
    suffix, agents = 16, 8
    blocks = 2 * (prefix + agents * 4 * suffix) // BLOCK
    with Engine(model, blocks, BLOCK, [HostTier(_TIER_BYTES)], Calibrated(machine)) as engine:
        meter = _Meter(engine)
        for agent in range(agents):
            engine.submit(tokens[agent * suffix : (agent + 1) * suffix], 3 * suffix)
        decodes = meter.run()[1:]  # all of them were prefilled in the first step
        steps = []
        for turn in range(resumes):
            fresh = tokens[prefix + turn * suffix : prefix + (turn + 1) * suffix]
            request = engine.submit([*tokens[:prefix], *fresh], 1)
            whole, extra = zip(*meter.run(), strict=True)
            steps += [(sum(whole), sum(extra))] if turn else []  # the first one has computed its prefix
            engine.cancel(request)
            engine.evict(len(engine.scheduler.index))
            engine.executor.drain()
    titles = {
        f"a step that decodes {agents} requests": decodes,
        f"a step that resumes {prefix} + {suffix} tokens from host RAM": steps,
    }
    for title, taken in titles.items():
        spent = np.asarray(taken)  # [steps, 2]: whole, overhead

        def share_of(steps: Any, spent: Any = spent) -> float:
            return float(100 * spent[steps, 1].sum() / spent[steps, 0].sum())

        share = share_of(np.arange(len(taken)))
        yield Row(
            f"scheduler overhead, {model.arch.name} {model.dtype}, {title}",
            share,
            "%",
            peers={
                "step, ms": median([whole for whole, _ in taken]) * 1e3,
                "overhead, ms": median([e for _, e in taken]) * 1e3,
            },
            interval=bootstrap_interval(share_of, len(taken)),
            goal="≤ 5 %",
            met=share <= 5,
        )
