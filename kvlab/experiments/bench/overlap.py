"""Loading while computing: a layer-wise reload and a split against their bounds; what of a disk reload is hidden."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvlab.engine import Engine
from kvlab.experiments.bench.memory import ColdReads, aligned, read_file
from kvlab.experiments.bench.rows import Progress, Row, interleave, judged, ratio_interval
from kvlab.experiments.calibrate import TierFactory
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import block_hashes
from kvlab.machine import Machine
from kvlab.model import Model
from kvlab.pipeline import default_groups
from kvlab.policy import Calibrated, Policy, Reload
from kvlab.records import bootstrap_interval
from kvlab.request import Request
from kvlab.tiers import DiskTier, HostTier, LinkTier
from kvlab.units import format_gb_per_s
from kvlab.verdict import Choice, decide

__all__ = ["BLOCK", "hidden_row", "hidden_rows", "layer_groups", "overlap_rows"]

BLOCK = 16
_TIER_BYTES = 2**32


def layer_groups(model: Model) -> int:
    """Layer groups of a reload, as the engine has them by default."""
    return default_groups(model.decoder.layers)


def overlap_rows(
    model: Model, tokens: Sequence[int], machine: Machine, progress: Progress, *, prefix: int = 384, rounds: int = 7
) -> Iterator[Row]:
    """A layer-wise reload and a split, each over the link that makes it matter most: both parts take equally long."""
    name = f"{model.arch.name} {model.dtype}"
    suffix = prefix // 4
    progress("layer-wise reload against its bound")
    gb_per_s = _link_that_takes(machine.prefill_s(model.arch, prefix, prefix + suffix), model, machine, prefix)
    with _Overlap(model, tokens, Reload(), partial(_tier, gb_per_s), prefix, suffix) as overlap:
        yield _bound_row(
            f"layer-wise reload, {name}, {prefix} + {suffix} tokens, an emulated link",
            "max(load, compute the rest), each alone",
            interleave({"ours": partial(overlap.resume, "reload", suffix), **overlap.parts(0, suffix)}, rounds),
            format_gb_per_s(gb_per_s),
        )
    suffix = BLOCK
    progress("split against its bound")
    gb_per_s = _link_that_takes(machine.prefill_s(model.arch, 0, prefix), model, machine, prefix)
    title = f"split, {name}, {prefix} + {suffix} tokens, an emulated link"
    tier = _tier(gb_per_s)
    machine = machine.with_link(tier.name, machine.link("host").behind(gb_per_s))
    split = decide(
        model.arch,
        machine,
        prefix=prefix,
        suffix=suffix,
        tier=tier.name,
        kv_dtype=model.dtype,
        block_size=BLOCK,
        overlap_groups=layer_groups(model),
    ).split
    if split is None:
        yield Row(title, math.nan, "ms", note="none is predicted to beat both whole ways")
        return
    with _Overlap(model, tokens, Calibrated(machine), partial(_tier, gb_per_s), prefix, suffix) as overlap:
        parts = overlap.parts(split.recompute_tokens, suffix)
        yield _bound_row(
            title,
            "max(load the tail, compute the head) + compute the rest, each alone",
            interleave({"ours": partial(overlap.resume, "split", suffix), **parts}, rounds),
            f"{format_gb_per_s(gb_per_s)}, {split.recompute_tokens} tokens computed",
        )


def hidden_rows(
    model: Model,
    tokens: Sequence[int],
    folder: Path,
    progress: Progress,
    *,
    prefix: int = 2048,
    suffixes: Sequence[int] = (16, 32, 64),
    rounds: int = 24,
) -> Iterator[Row]:
    """A prefix that comes from cold files under `folder`, each time behind the computing of a short suffix.

    The note says what plain reads of the same files hide, on which nobody waits and which nobody checks: computing is
    slower while a disk is read, and that no engine can hide.
    """
    folders = (folder / f"tier-{number}" for number in itertools.count())
    with _Overlap(
        model, tokens, Reload(), lambda: DiskTier(next(folders), _TIER_BYTES), prefix, max(suffixes)
    ) as overlap:
        for suffix in suffixes:
            progress(f"disk reload of {prefix} tokens behind a suffix of {suffix}")
            overlap.cold = ColdReads(prefix // BLOCK * model.layout(BLOCK).block_bytes)
            arms: dict[str, Callable[[], object]] = {
                "ours": partial(overlap.resume, "reload", suffix),
                **overlap.parts(0, suffix),
                "plain": partial(overlap.beside_plain_reads, suffix),
            }
            seconds = interleave(arms, rounds)
            name = f"disk reload of {prefix} tokens hidden behind a suffix of {suffix}, {model.arch.name} {model.dtype}"
            yield judged(hidden_row(name, str(overlap.cold), seconds), model.device, model.dtype)


def _tier(gb_per_s: float) -> LinkTier:
    return LinkTier(HostTier(_TIER_BYTES), gb_per_s)


def _link_that_takes(seconds: float, model: Model, machine: Machine, prefix: int) -> float:
    """GB/s that carry the prefix in `seconds`, the software of a transfer included."""
    size_bytes = prefix // BLOCK * model.layout(BLOCK).block_bytes
    overhead_s = machine.link("host").overhead_s(size_bytes, prefix // BLOCK, len(model.arch.layers))
    return float(f"{size_bytes / max(seconds - overhead_s, 0.1 * seconds) / 1e9:.3g}")


class _Overlap:
    """A prefix in two tiers: one of an engine that resumes it, and one of a rig that times the parts alone.

    `most`: tokens of the longest suffix. Files are made cold before they are read; `cold` says whether they were.
    """

    def __init__(
        self, model: Model, tokens: Sequence[int], policy: Policy, make_tier: TierFactory, prefix: int, most: int
    ) -> None:
        self.tokens, self.prefix, self.cold = tokens, prefix, ColdReads(0)
        self.engines_tier = make_tier()
        self.engine = Engine(model, 2 * (prefix + most) // BLOCK + 2, BLOCK, [self.engines_tier], policy)
        self.rig = Rig(model, block_size=BLOCK, max_tokens=prefix + most, tables=2, groups=layer_groups(model))
        self._away(self.engine.submit(tokens[:prefix], 1))
        self.tier, self.home = self.rig.open(make_tier()), self.rig.table(prefix + most)
        self.rig.prefill(tokens[:prefix], self.home)
        self.rig.offload(self.tier, tokens[:prefix], self.home)
        # Every resume brings tokens of its own, so that none finds the suffix of one before.
        self._fresh = itertools.count(prefix, most)

    def __enter__(self) -> _Overlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self.rig.close()

    def _away(self, request: Request) -> None:
        """Run a request, and leave nothing of it in the pool."""
        self.engine.run()
        self.engine.cancel(request)
        self.engine.evict(len(self.engine.scheduler.index))
        self.engine.executor.drain()

    def resume(self, choice: Choice, suffix: int) -> float:
        """The engine's time to first token with the prefix in the tier; it must have made this choice."""
        start = next(self._fresh)
        own = self.tokens[start : start + suffix]
        assert len(own) == suffix, "the text is too short for another suffix of its own"
        self.engines_tier.drop_pages()
        return self.cold.timed(lambda: self._resume(choice, [*self.tokens[: self.prefix], *own]))

    def _resume(self, choice: Choice, prompt: Sequence[int]) -> float:
        request = self.engine.submit(prompt, 1)
        self._away(request)
        decision, ttft_s = request.decision, request.timing.ttft_s
        assert decision is not None, "nothing was found in the tier"
        assert decision.choice == choice, f"to {choice} was expected; the engine chose {decision.reason}"
        assert ttft_s is not None, "a turn has ended without a token"
        return ttft_s

    def parts(self, head: int, suffix: int) -> dict[str, Callable[[], float]]:
        """Alone: loading the prefix from token `head` on, computing what comes behind it, and computing the head."""
        rig, tokens, prefix = self.rig, self.tokens, self.prefix
        hashes = block_hashes(rig.fingerprint, tokens[:prefix], BLOCK)[head // BLOCK :]

        def load() -> float:
            table = rig.table(prefix - head)
            report = rig.transfer.reload(self.tier, hashes, table.blocks).wait()
            rig.release(table)
            assert report.valid_blocks == len(hashes), f"the tier lost blocks: {report.failures}"
            return report.wall_s

        def cold_load() -> float:
            self.tier.drop_pages()
            return self.cold.timed(load)

        parts: dict[str, Callable[[], float]] = {"load": cold_load, "rest": partial(self._rest, suffix)}
        return parts | {"head": lambda: rig.recompute(tokens[:head]).ttft_s} if head else parts

    def _rest(self, suffix: int) -> float:
        """Computing the suffix behind the prefix, which is in the pool."""
        return self.rig.prefill(self.tokens[self.prefix : self.prefix + suffix], self.home, self.prefix).ttft_s

    def beside_plain_reads(self, suffix: int) -> float:
        """The same while a thread reads the files of the rig's tier, until both are over."""
        assert isinstance(self.tier, DiskTier), "only files can be read"
        self.tier.drop_pages()
        files = [(path, aligned(path.stat().st_size)) for path in self.tier.folder.iterdir() if path.is_file()]

        def read() -> None:
            for path, target in files:
                read_file(path, target, direct=hasattr(os, "O_DIRECT"))

        thread = threading.Thread(target=read)
        begin = time.perf_counter()
        thread.start()
        self._rest(suffix)
        thread.join()
        return time.perf_counter() - begin


def _bound_row(name: str, bound: str, seconds: Mapping[str, Sequence[float]], note: str) -> Row:
    """`bound` says in words what is computed here from the parts, round by round."""
    ours, load, rest = (np.asarray(seconds[arm]) for arm in ("ours", "load", "rest"))
    head = np.asarray(seconds["head"]) if "head" in seconds else None
    least = np.maximum(load, rest) if head is None else np.maximum(load, head) + rest
    serial = load + rest + (0 if head is None else head)
    ours_s, least_s, serial_s = (float(np.median(samples)) for samples in (ours, least, serial))
    return Row(
        f"{name}; floor: {bound}",
        ours_s * 1e3,
        "ms",
        floor=least_s * 1e3,
        of_floor=least_s / ours_s,
        peers={"one after the other": serial_s * 1e3},
        of_peer={"one after the other": serial_s / ours_s},
        interval=ratio_interval(least.tolist(), ours.tolist()),
        goal="reported",
        note=note,
    )


def hidden_row(name: str, cold: str, seconds: Mapping[str, Sequence[float]]) -> Row:
    """The share of a load's own time that the time to first token does not show: (load + rest - ours) ÷ load.

    The floor is the most that could be hidden: all of the load, or as much of it as the rest takes to compute.
    """
    arms = {arm: np.asarray(samples) for arm, samples in seconds.items()}

    def shares(rounds: Any) -> tuple[float, float, float]:
        ours, load, rest, plain = (float(np.median(arms[arm][rounds])) for arm in ("ours", "load", "rest", "plain"))
        return (load + rest - ours) / load, min(load, rest) / load, (load + rest - plain) / load

    def of_most(rounds: Any) -> float:
        hidden, most, _ = shares(rounds)
        return hidden / most

    every = np.arange(len(arms["ours"]))
    hidden, most, plain = shares(every)
    shown = {"ours": "together, ms", "load": "load alone, ms", "rest": "suffix alone, ms", "plain": "plain reads, ms"}
    return Row(
        name,
        100 * hidden,
        "%",
        floor=100 * most,
        of_floor=of_most(every),
        peers={what: float(np.median(arms[arm])) * 1e3 for arm, what in shown.items()},
        interval=bootstrap_interval(of_most, len(every)),
        goal="≥ 75 %",
        met=hidden >= 0.75,
        note=f"{cold}; plain reads hide {100 * plain:.0f} %",
    )
