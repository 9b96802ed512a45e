"""Prefill beside transformers, a resume beside a full prefill, and predictions beside what was then measured."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from kvlab.experiments import crossover
from kvlab.experiments.bench.rows import Progress, Row, interleave, ratio_interval
from kvlab.experiments.calibrate import calibrate
from kvlab.experiments.peers import transformers_prefill
from kvlab.experiments.rig import Rig
from kvlab.loading import load_model
from kvlab.model import Model
from kvlab.records import median
from kvlab.tiers import DiskTier, HostTier, LinkTier, Tier

__all__ = ["bench_prediction", "bench_prefill", "bench_resume", "model_and_text"]


def model_and_text(name: str, device: str, dtype: str) -> tuple[Model, list[int]]:
    """The model, and the built-in text in its tokens."""
    model = load_model(name, device=device, dtype=dtype)
    text = resources.files("kvlab").joinpath("data", "text.txt").read_text(encoding="utf-8")
    return model, model.tokenizer.encode(text)


def bench_prefill(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Time to the first token's logits against transformers (sdpa), same weights, dtype and threads."""
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    try:
        peer = transformers_prefill(model)
    except ModuleNotFoundError:
        progress("transformers is not installed (pip install 'kvlab[test]'): prefill has no peer")
        peer = None
    for length in (16, 128, 512, 1024, 2048):
        progress(f"prefill, {length} tokens")
        ids = tokens[:length]
        with Rig(model, block_size=16, max_tokens=length, tables=1) as rig:
            arms: dict[str, Callable[[], object]] = {"ours": lambda: rig.recompute(ids).ttft_s}  # noqa: B023
            if peer is not None:
                arms["transformers"] = lambda: peer(ids)  # noqa: B023
            seconds = interleave(arms, 9 if length <= 1024 else 7)
        ours = median(seconds["ours"])
        row = Row(f"prefill, {length} tokens, {model.dtype}", ours * 1e3, "ms")
        if peer is not None:
            theirs = median(seconds["transformers"])
            row = Row(
                row.name,
                row.ours,
                row.unit,
                peers={"transformers": theirs * 1e3},
                of_peer={"transformers": theirs / ours},
                interval=ratio_interval(seconds["transformers"], seconds["ours"]),
                goal="≥ 1 × transformers",
                met=theirs >= ours,
            )
        yield row


def bench_resume(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """A 2,048-token prefix comes back from host RAM: its first token against a full prefill."""
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    prefix, suffix = 2048, 16
    progress("resume from host RAM, 2,048 tokens")
    with Rig(model, block_size=16, max_tokens=prefix + suffix, tables=3) as rig:
        tier = rig.open(HostTier(2**30))
        table = rig.table(prefix + suffix)
        rig.prefill(tokens[:prefix], table)
        rig.offload(tier, tokens[:prefix], table)
        text = tokens[: prefix + suffix]
        seconds = interleave(
            {"ours": lambda: rig.resume(tier, text, prefix).ttft_s, "recompute": lambda: rig.recompute(text).ttft_s}, 7
        )
    ours, whole = median(seconds["ours"]), median(seconds["recompute"])
    yield Row(
        f"resume {prefix} + {suffix} tokens from host RAM, {model.dtype}",
        ours * 1e3,
        "ms",
        peers={"full prefill": whole * 1e3},
        of_peer={"full prefill": whole / ours},
        interval=ratio_interval(seconds["recompute"], seconds["ours"]),
        goal="≥ 20 × full prefill",
        met=whole >= 20 * ours,
    )


# None of these is a calibration length.
_UNSEEN_LENGTHS = (48, 96, 192, 384, 768, 1536)


def bench_prediction(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Predicted against measured times to first token at lengths the calibration did not use, and one crossover."""
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    with tempfile.TemporaryDirectory(prefix="kvlab-bench-") as name:
        makers = {"host": lambda: HostTier(2**32), "disk": lambda: DiskTier(Path(name), 2**33)}
        machine = calibrate(model, tokens, makers, progress=progress)
        predictions = crossover.predict(model, machine, list(makers), _UNSEEN_LENGTHS, suffix=16, block_size=16)
        measured = crossover.measure(
            model,
            tokens,
            makers,
            _UNSEEN_LENGTHS,
            suffix=16,
            block_size=16,
            rounds=7,
            reference=_reference("smollm2-135m", model),
            progress=progress,
        )
    times = [median(samples) for samples in measured.recompute_s]
    yield _error_row("recompute", [v.ttft_recompute_s for v in predictions[0].verdicts], times, 0.10)
    for prediction in predictions:
        times = [median(samples) for samples in measured.tiers[prediction.tier].reload_s]
        yield _error_row(f"reload, {prediction.tier}", [v.ttft_reload_s for v in prediction.verdicts], times, 0.15)
    yield _wide_kv_row(device, dtype, progress)


def _reference(name: str, model: Model) -> Model | None:
    """The same weights in fp32, which half-precision logits are compared with."""
    return None if model.dtype in ("fp32", "fp64") else load_model(name, device=model.device, dtype="fp32")


def _error_row(arm: str, predicted: Sequence[float], measured: Sequence[float], most: float) -> Row:
    error = median([abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)])
    return Row(
        f"prediction error, {arm}, unseen lengths",
        error * 100,
        "%",
        goal=f"median ≤ {most * 100:g} %",
        met=error <= most,
    )


def _wide_kv_row(device: str, dtype: str, progress: Progress) -> Row:
    """The predicted flip of `wide-kv` behind an emulated 1 Gb/s link against the measured one."""
    model, tokens = model_and_text("wide-kv", device, dtype)
    lengths = [64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096]

    def link() -> Tier:
        return LinkTier(HostTier(2**32), 0.125)

    machine = calibrate(model, tokens, {"host": lambda: HostTier(2**32), "1 Gb/s": link}, progress=progress)
    prediction = crossover.predict(model, machine, ["1 Gb/s"], lengths, suffix=16, block_size=16)[0]
    measured = crossover.measure(
        model,
        tokens,
        {"1 Gb/s": link},
        lengths,
        suffix=16,
        block_size=16,
        rounds=7,
        reference=_reference("wide-kv", model),
        progress=progress,
    )
    at = crossover.measured_crossover(measured, "1 Gb/s")
    predicted = prediction.crossover_tokens
    off = math.inf if not at or not predicted else abs(predicted / at - 1)
    return Row(
        "crossover of wide-kv, emulated 1 Gb/s: predicted ÷ measured",
        ours=predicted / at if at and predicted else math.nan,
        unit="×",
        peers={"measured (tokens)": at or math.nan},
        interval=crossover.crossover_interval(measured, "1 Gb/s"),
        goal="within 15 %",
        met=off <= 0.15,
    )
