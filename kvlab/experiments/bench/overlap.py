"""Loading while computing, against the longer of the two alone: a layer-wise reload, and a split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType

import numpy as np

from kvlab.engine import Engine
from kvlab.experiments.bench.rows import Progress, Row, interleave, ratio_interval
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import block_hashes
from kvlab.machine import Machine
from kvlab.model import Model
from kvlab.policy import Calibrated, Policy, Reload
from kvlab.request import Request
from kvlab.tiers import HostTier, LinkTier
from kvlab.units import format_gb_per_s
from kvlab.verdict import Choice, decide

__all__ = ["BLOCK", "layer_groups", "overlap_rows"]

BLOCK = 16


def layer_groups(model: Model) -> int:
    """Layer groups of a reload, as the engine has them by default."""
    return min(4, model.decoder.layers)


def overlap_rows(
    model: Model, tokens: Sequence[int], machine: Machine, progress: Progress, *, prefix: int = 384, rounds: int = 7
) -> Iterator[Row]:
    """A layer-wise reload and a split, each over the link that makes it matter most: both parts take equally long."""
    name = f"{model.arch.name} {model.dtype}"
    suffix = prefix // 4
    progress("layer-wise reload against its bound")
    gb_per_s = _link_that_takes(machine.prefill_s(model.arch, prefix, prefix + suffix), model, machine, prefix)
    with _Overlap(model, tokens, Reload(), gb_per_s, prefix, suffix) as overlap:
        yield _bound_row(
            f"layer-wise reload, {name}, {prefix} + {suffix} tokens, emulated {format_gb_per_s(gb_per_s)}",
            "max(load, compute the rest), each alone",
            interleave({"ours": partial(overlap.resume, "reload"), **overlap.parts(0)}, rounds),
        )
    suffix = BLOCK
    progress("split against its bound")
    gb_per_s = _link_that_takes(machine.prefill_s(model.arch, 0, prefix), model, machine, prefix)
    title = f"split, {name}, {prefix} + {suffix} tokens, emulated {format_gb_per_s(gb_per_s)}"
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
        yield Row(f"{title}: none is predicted to beat both whole ways", math.nan, "ms")
        return
    with _Overlap(model, tokens, Calibrated(machine), gb_per_s, prefix, suffix) as overlap:
        yield _bound_row(
            f"{title}, {split.recompute_tokens} of them computed",
            "max(load the tail, compute the head) + compute the rest, each alone",
            interleave({"ours": partial(overlap.resume, "split"), **overlap.parts(split.recompute_tokens)}, rounds),
        )


def _tier(gb_per_s: float) -> LinkTier:
    return LinkTier(HostTier(2**32), gb_per_s)


def _link_that_takes(seconds: float, model: Model, machine: Machine, prefix: int) -> float:
    """GB/s that carry the prefix in `seconds`, the software of a transfer included."""
    size_bytes = prefix // BLOCK * model.layout(BLOCK).block_bytes
    overhead_s = machine.link("host").overhead_s(size_bytes, prefix // BLOCK, size_bytes)
    return float(f"{size_bytes / max(seconds - overhead_s, 0.1 * seconds) / 1e9:.3g}")


class _Overlap:
    """A prefix behind an emulated link twice: for an engine that resumes it, and for a rig that times parts alone."""

    def __init__(
        self, model: Model, tokens: Sequence[int], policy: Policy, gb_per_s: float, prefix: int, suffix: int
    ) -> None:
        self.tokens, self.prefix, self.suffix = tokens, prefix, suffix
        blocks = 2 * (prefix + suffix) // BLOCK + 2
        self.engine = Engine(model, blocks, BLOCK, [_tier(gb_per_s)], policy)
        self.rig = Rig(model, block_size=BLOCK, max_tokens=prefix + suffix, tables=2, groups=layer_groups(model))
        self._away(self.engine.submit(tokens[:prefix], 1))
        self.tier, self.home = self.rig.open(_tier(gb_per_s)), self.rig.table(prefix + suffix)
        self.rig.prefill(tokens[:prefix], self.home)
        self.rig.offload(self.tier, tokens[:prefix], self.home)
        # Every resume brings tokens of its own, so that none finds the suffix of one before.
        self._fresh = itertools.count(prefix, suffix)

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

    def resume(self, choice: Choice) -> float:
        """The engine's time to first token with the prefix in the tier; it must have made this choice."""
        start = next(self._fresh)
        request = self.engine.submit([*self.tokens[: self.prefix], *self.tokens[start : start + self.suffix]], 1)
        self._away(request)
        decision, ttft_s = request.decision, request.timing.ttft_s
        assert decision is not None, "nothing was found in the tier"
        assert decision.choice == choice, f"to {choice} was expected; the engine chose {decision.reason}"
        assert ttft_s is not None, "a turn has ended without a token"
        return ttft_s

    def parts(self, head: int) -> dict[str, Callable[[], float]]:
        """Alone: loading the prefix from token `head` on, computing what comes behind it, and computing the head."""
        rig, tokens, prefix = self.rig, self.tokens, self.prefix
        hashes = block_hashes(rig.fingerprint, tokens[:prefix], BLOCK)[head // BLOCK :]

        def load() -> float:
            table = rig.table(prefix - head)
            report = rig.transfer.reload(self.tier, hashes, table.blocks).wait()
            rig.release(table)
            assert report.valid_blocks == len(hashes), f"the tier lost blocks: {report.failures}"
            return report.wall_s

        parts = {
            "load": load,
            "rest": lambda: rig.prefill(tokens[prefix : prefix + self.suffix], self.home, prefix).ttft_s,
        }
        return parts | {"head": lambda: rig.recompute(tokens[:head]).ttft_s} if head else parts


def _bound_row(name: str, bound: str, seconds: Mapping[str, Sequence[float]]) -> Row:
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
    )
