"""The main experiment: predict, then measure, at which prefix length reload and recompute trade places.

Knows the rig, a `Machine` and text tokens. Does not print or draw; `cli` and `lab.draw` do.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab.arch import ModelArch
from kvlab.blocks import BlockTable, blocks_for
from kvlab.crossings import crossings_of, interpolated_crossover
from kvlab.experiments.calibrate import TierFactory
from kvlab.experiments.rig import Rig
from kvlab.experiments.turns import in_turn
from kvlab.machine import Machine
from kvlab.model import Model
from kvlab.pool import BlockPool
from kvlab.prefix import reloadable_tokens
from kvlab.records import bootstrap_interval, machine_facts, median, now_utc
from kvlab.tiers import DiskTier, Tier, bytes_read_from_device
from kvlab.verdict import Verdict, decide

__all__ = [
    "SCHEMA",
    "Check",
    "Measured",
    "MismatchError",
    "Prediction",
    "TierResult",
    "auto_lengths",
    "crossover_interval",
    "measure",
    "measured_crossover",
    "mid_range_link",
    "predict",
    "record",
]

SCHEMA = "kvlab.crossover/1"
Progress = Callable[[str], None]


class MismatchError(AssertionError):
    """Reloaded logits are not those of the resident cache, or disagree with a full recompute."""


@dataclass(frozen=True)
class Prediction:
    """What the arithmetic says about one tier before anything is measured; one verdict per length."""

    tier: str
    verdicts: tuple[Verdict, ...]

    @property
    def crossover_tokens(self) -> int | None:
        """Over whole blocks up to the model's positions, not only at the measured lengths."""
        return self.verdicts[0].crossover_tokens


@dataclass
class TierResult:
    """One tier's samples, `[length][round]`: seconds to first token by reload, and bytes the device really read."""

    name: str
    emulated: bool
    reload_s: list[list[float]]
    device_read_bytes: list[list[int | None]]
    stored_bytes: list[int] = field(default_factory=list)

    @property
    def cold(self) -> str:
        """Was the tier cold? "proven": each reload read the stored bytes off the device; "unproven"; or "memory"."""
        if not any(self.stored_bytes):
            return "memory"
        proven = all(
            read is not None and read >= stored
            for stored, reads in zip(self.stored_bytes, self.device_read_bytes, strict=True)
            for read in reads
        )
        return "proven" if proven else "unproven"


@dataclass(frozen=True)
class Check:
    """How logits after a reload compare at one length. Errors are RMS over the vocabulary, relative to fp32's RMS."""

    tokens: int
    bit_exact: bool
    reload_error: float
    recompute_error: float


@dataclass
class Measured:
    """All raw samples of one sweep; `[length][round]` seconds."""

    lengths: list[int]
    recompute_s: list[list[float]]
    resident_s: list[list[float]]
    tiers: dict[str, TierResult]
    checks: list[Check] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Whole rounds measured."""
        return len(self.recompute_s[0])


def auto_lengths(
    arch: ModelArch,
    machine: Machine,
    *,
    tokens: int,
    suffix: int,
    block_size: int,
    slow_tiers: int,
    fast_tiers: int,
    budget_s: float,
    rounds: int,
) -> list[int]:
    """Four or more lengths in even ratios from one block up, as far as text and `budget_s` are predicted to allow.

    A slow tier is taken to cost about what recomputing costs (an emulated link is chosen so), a fast one little more
    than the suffix. How far comes first, since flips are shallow; then how many.
    """
    most = min(tokens, arch.max_positions) - suffix
    first = -(-16 // block_size) * block_size
    if most < first:
        raise ValueError(f"the text has {tokens} tokens; at least {first + suffix} are needed")

    def cost_s(lengths: Sequence[int]) -> float:
        total_s = 0.0
        for length in lengths:
            whole_s = machine.prefill_s(arch, 0, length + suffix)
            rest_s = machine.prefill_s(arch, length, length + suffix)
            once_s = whole_s * (1 + slow_tiers) + rest_s * (1 + fast_tiers)
            total_s += once_s * (rounds + 1) + whole_s  # preparing runs each arm once and prefills the prefix
        return total_s

    def ladder(last: int, count: int) -> list[int]:
        ratio = (last / first) ** (1 / (count - 1))
        return sorted({round(first * ratio**i / block_size) * block_size for i in range(count)})

    lasts = [last for power in range(6, 18) for last in (2**power, 3 * 2 ** (power - 1)) if first < last <= most]
    best = ladder(lasts[0], 2) if lasts else [first]
    for last in lasts:
        for count in (4, 5, 6, 7):
            lengths = ladder(last, count)
            if cost_s(lengths) <= budget_s and (lengths[-1], len(lengths)) > (best[-1], len(best)):
                best = lengths
    return best


def predict(
    model: Model, machine: Machine, tiers: Sequence[str], lengths: Sequence[int], *, suffix: int, block_size: int
) -> list[Prediction]:
    """Both times at every length for every tier, from the calibration and the model's shape only."""
    return [
        Prediction(
            tier,
            tuple(
                decide(
                    model.arch,
                    machine,
                    prefix=length,
                    suffix=suffix,
                    tier=tier,
                    kv_dtype=model.dtype,
                    block_size=block_size,
                )
                for length in lengths
            ),
        )
        for tier in tiers
    ]


def mid_range_link(
    arch: ModelArch, machine: Machine, lengths: Sequence[int], *, suffix: int, kv_dtype: str, block_size: int = 16
) -> float | None:
    """A link's GB/s midway between the speeds that tie at the shortest and at the longest prefix, to three digits.

    At least a tenth above the latter, which is the surer of the two: one block is recomputed in the time of noise.
    None where no link ties: a model so small that a reload's software alone costs more than its prefill.
    """
    ties = [
        decide(
            arch, machine, prefix=length, suffix=suffix, kv_dtype=kv_dtype, block_size=block_size
        ).break_even_gb_per_s
        for length in (lengths[0], lengths[-1])
    ]
    finite = [tie for tie in ties if math.isfinite(tie)]
    if not finite:
        return None
    return float(f"{max(math.prod(finite) ** (1 / len(finite)), 1.1 * finite[-1]):.3g}")


def measure(
    model: Model,
    tokens: Sequence[int],
    tiers: dict[str, TierFactory],
    lengths: Sequence[int],
    *,
    suffix: int,
    block_size: int,
    rounds: int,
    budget_s: float = math.inf,
    reference: Model | None = None,
    progress: Progress = lambda _: None,
) -> Measured:
    """Whole rounds of interleaved arms: at each length recompute, resident, and one resume per tier.

    Before the rounds every length is prefilled, stored in every tier and checked: the logits after a reload equal,
    bit for bit, those of the resident cache prefilled in the same chunks ([0, p), then the rest), and
    are as close to `reference` (the same weights in fp32) as a full recompute is. Every timed resume is compared too.
    At least one round runs; no further one starts that would not end within `budget_s`. Raises MismatchError.
    """
    if reference is None and model.dtype not in ("fp32", "fp64"):
        raise ValueError(f"logits in {model.dtype} are checked against fp32: pass the fp32 model as reference")
    begin = time.perf_counter()
    longest = max(lengths) + suffix
    room = sum(lengths) + len(lengths) * (suffix + block_size) + 2 * (longest + block_size)
    with Rig(model, block_size=block_size, max_tokens=room, tables=1) as rig:
        sweep = _Sweep(rig, {name: rig.open(make()) for name, make in tiers.items()}, suffix)
        try:
            for length in lengths:
                progress(f"storing and checking {length} tokens")
                sweep.prepare(tokens[: length + suffix], length, reference)
            first = time.perf_counter()
            for done in range(rounds):
                now = time.perf_counter()
                if done and now + (now - first) / done > begin + budget_s:
                    break
                progress(f"measuring round {done + 1} of {rounds}")
                sweep.round(done)
        finally:
            for tier in sweep.tiers.values():
                tier.clear()
    return sweep.measured


class _Sweep:
    """The resident caches, the stored copies and the samples of one run of `measure`."""

    def __init__(self, rig: Rig, tiers: dict[str, Tier], suffix: int) -> None:
        self.rig, self.tiers, self.suffix = rig, tiers, suffix
        results = {name: TierResult(name, tier.emulated, [], []) for name, tier in tiers.items()}
        self.measured = Measured([], [], [], results)
        self.resident: list[tuple[Sequence[int], BlockTable, Tensor]] = []

    def prepare(self, tokens: Sequence[int], length: int, reference: Model | None) -> None:
        """Prefill [0, length), store it in every tier, keep it resident, and check what comes back."""
        rig = self.rig
        table = rig.table(len(tokens))
        rig.prefill(tokens[:length], table)
        kept = reloadable_tokens(length, len(tokens), rig.block_size)
        for name, tier in self.tiers.items():
            before = tier.used_bytes
            rig.offload(tier, tokens[:length], table, salt=str(length))
            stored = tier.used_bytes - before if isinstance(tier, DiskTier) else 0
            self.measured.tiers[name].stored_bytes.append(stored)
        logits = rig.prefill(tokens[kept:], table, kept).logits
        whole = rig.recompute(tokens).logits
        for name, tier in self.tiers.items():
            self._compare(name, rig.resume(tier, tokens, length, salt=str(length)).logits, logits, length)
        self.measured.checks.append(_against_reference(reference, tokens, length, rig.block_size, logits, whole))
        self.resident.append((tokens, table, logits))
        self.measured.lengths.append(length)
        self.measured.recompute_s.append([])
        self.measured.resident_s.append([])
        for result in self.measured.tiers.values():
            result.reload_s.append([])
            result.device_read_bytes.append([])

    def round(self, number: int) -> None:
        """Every arm once at every length, in turn."""
        arms = in_turn(["recompute", "resident", *self.tiers], number)
        for i, (tokens, table, logits) in enumerate(self.resident):
            for arm in arms:
                if arm == "recompute":
                    self.measured.recompute_s[i].append(self.rig.recompute(tokens).ttft_s)
                elif arm == "resident":
                    kept = reloadable_tokens(self.measured.lengths[i], len(tokens), self.rig.block_size)
                    self.measured.resident_s[i].append(self.rig.prefill(tokens[kept:], table, kept).ttft_s)
                else:
                    self._resume(arm, i, tokens, logits)

    def _resume(self, name: str, i: int, tokens: Sequence[int], logits: Tensor) -> None:
        tier, length, result = self.tiers[name], self.measured.lengths[i], self.measured.tiers[name]
        tier.drop_pages()
        before = bytes_read_from_device()
        resumed = self.rig.resume(tier, tokens, length, salt=str(length))
        after = bytes_read_from_device()
        self._compare(name, resumed.logits, logits, length)
        result.reload_s[i].append(resumed.ttft_s)
        result.device_read_bytes[i].append(None if before is None or after is None else after - before)

    def _compare(self, name: str, reloaded: Tensor, resident: Tensor, length: int) -> None:
        if not torch.equal(reloaded, resident):
            worst = float((reloaded.double() - resident.double()).abs().max())
            raise MismatchError(
                f"after a reload of {length} tokens from {name} the logits differ from the resident cache's by up to"
                f" {worst:.3g}; the copy is not byte-identical"
            )


# Largest accepted error of resumed logits against fp32, as a multiple of full recompute's own error. Chunking changes
# the order of sums, so the two differ, but neither should be further from fp32 than rounding takes it.
_ERROR_FACTOR = 2.0
# Below this relative RMS error both are fp32-exact for our purpose, and their ratio is noise.
_ERROR_FLOOR = 1e-4


def _against_reference(
    reference: Model | None, tokens: Sequence[int], length: int, block_size: int, resumed: Tensor, whole: Tensor
) -> Check:
    """Compare resumed and recomputed logits with fp32's (without a reference, `whole` is fp32 and serves as one)."""
    exact = whole.double()
    if reference is not None:
        blocks = blocks_for(len(tokens), block_size)
        pool = BlockPool(reference.layout(block_size), blocks, device=reference.device)
        exact = reference.prefill(tokens, pool, list(range(blocks)), 0).double()
    scale = float(exact.square().mean().sqrt())
    resumed_error, whole_error = (
        float((logits.double() - exact).square().mean().sqrt()) / scale for logits in (resumed, whole)
    )
    if not resumed_error <= max(_ERROR_FLOOR, _ERROR_FACTOR * whole_error):
        raise MismatchError(
            f"at {length} tokens the logits behind a cached prefix are {resumed_error:.3g} from fp32 (relative RMS),"
            f" a full recompute is {whole_error:.3g}; expected at most {_ERROR_FACTOR:g} times that"
        )
    return Check(length, True, resumed_error, whole_error)


def crossover_interval(measured: Measured, tier: str, seed: int = 0) -> tuple[float, float] | None:
    """95 % bootstrap interval of the crossover over whole rounds; inf: never, 0: always. None below seven rounds."""

    def medians(samples: list[list[float]], rounds: list[int]) -> list[float]:
        # Not numpy's: of seven numbers it takes four times as long, and it is taken thousands of times.
        return [statistics.median([one[i] for i in rounds]) for one in samples]

    def crossover(rounds: Any) -> float:
        drawn = rounds.tolist()
        reload_s, recompute_s = medians(measured.tiers[tier].reload_s, drawn), medians(measured.recompute_s, drawn)
        at = interpolated_crossover(measured.lengths, reload_s, recompute_s)
        return math.inf if at is None else at

    return bootstrap_interval(crossover, measured.rounds, seed)


def measured_crossover(measured: Measured, tier: str) -> float | None:
    """The prefix length from which reload wins in the medians; 0: always; None: never (at the longest)."""
    reload_s = [median(samples) for samples in measured.tiers[tier].reload_s]
    return interpolated_crossover(measured.lengths, reload_s, [median(samples) for samples in measured.recompute_s])


def record(
    model: Model, machine: Machine, predictions: Sequence[Prediction], measured: Measured, parameters: dict[str, Any]
) -> dict[str, Any]:
    """The whole run as plain JSON values (schema kvlab.crossover/1). Times are to first token, suffix included."""
    recompute_s = [median(samples) for samples in measured.recompute_s]
    resident_s = [median(samples) for samples in measured.resident_s]
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "parameters": parameters,
        "machine": machine.to_dict(),
        "model": {
            "name": model.arch.name,
            "dtype": model.dtype,
            "source": model.source,
            "weights_digest": model.weights_digest,
        },
        "bit_exact": all(check.bit_exact for check in measured.checks),
        "checks": [asdict(check) for check in measured.checks],
        "rounds": measured.rounds,
        "resident_s": resident_s,
        "resident_samples_s": measured.resident_s,
        "recompute_samples_s": measured.recompute_s,
        "tiers": [_tier_record(prediction, measured, recompute_s, resident_s) for prediction in predictions],
    }


def _tier_record(
    prediction: Prediction, measured: Measured, recompute_s: list[float], resident_s: list[float]
) -> dict[str, Any]:
    result = measured.tiers[prediction.tier]
    reload_s = [median(samples) for samples in result.reload_s]
    verdicts = prediction.verdicts
    interval = crossover_interval(measured, prediction.tier)
    at = measured_crossover(measured, prediction.tier)
    block_size = verdicts[0].block_size
    return {
        "name": prediction.tier,
        "emulated": result.emulated,
        "tokens": measured.lengths,
        "kv_bytes": [verdict.kv_bytes for verdict in verdicts],
        "reload_s": reload_s,
        "recompute_s": recompute_s,
        "predicted_reload_s": [verdict.ttft_reload_s for verdict in verdicts],
        "predicted_recompute_s": [verdict.ttft_recompute_s for verdict in verdicts],
        # What the link must carry, overheads and all, to tie: bytes ÷ (recompute − what a hit still has to compute).
        "break_even_gb_per_s": [
            _ratio(verdict.kv_bytes, (whole - rest) * 1e9)
            for verdict, whole, rest in zip(verdicts, recompute_s, resident_s, strict=True)
        ],
        # Whole blocks: the first block boundary from which reload wins.
        "crossover_tokens": None if at is None else math.ceil(at / block_size) * block_size,
        "crossings": [asdict(c) for c in crossings_of(measured.lengths, reload_s, recompute_s)],
        "crossover_interval": None if interval is None else [None if math.isinf(end) else end for end in interval],
        "predicted_crossover_tokens": prediction.crossover_tokens,
        "predicted_crossings": [asdict(c) for c in verdicts[0].crossings],
        "cold": result.cold,
        "device_read_bytes": result.device_read_bytes,
        "stored_bytes": result.stored_bytes,
        "reload_samples_s": result.reload_s,
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    """Numerator ÷ denominator, or None where recompute is not dearer at all and no link is fast enough."""
    return numerator / denominator if denominator > 0 else None
