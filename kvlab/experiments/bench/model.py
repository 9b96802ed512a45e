"""Prefill beside transformers, a resume beside a full prefill, and predictions beside what was then measured."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from kvlab.attention import attend, causal_mask
from kvlab.experiments import crossover
from kvlab.experiments.bench.attention import sdpa, synchronised
from kvlab.experiments.bench.overlap import hidden_rows
from kvlab.experiments.bench.rows import Progress, Row, interleave, judged, ratio_interval
from kvlab.experiments.calibrate import calibrate
from kvlab.experiments.peers import transformers_prefill
from kvlab.experiments.rig import Rig
from kvlab.linear import linear
from kvlab.loading import load_model
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES
from kvlab.records import median
from kvlab.tiers import DiskTier, HostTier, LinkTier, Tier

__all__ = [
    "bench_prediction",
    "bench_prefill",
    "bench_resume",
    "model_and_text",
    "prefill_row",
    "weight_bytes",
    "weight_products",
]

_PREFILL_LENGTHS = (16, 128, 512, 1024, 2048, 4096)


def model_and_text(name: str, device: str, dtype: str) -> tuple[Model, list[int]]:
    """The model, and the built-in text in its tokens."""
    model = load_model(name, device=device, dtype=dtype)
    text = resources.files("kvlab").joinpath("data", "text.txt").read_text(encoding="utf-8")
    return model, model.tokenizer.encode(text)


def bench_prefill(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Time to the first token's logits against transformers (sdpa), same weights, dtype and threads; and the floor."""
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    try:
        peer = transformers_prefill(model)
    except ModuleNotFoundError:
        progress("transformers is not installed (pip install 'kvlab[test]'): prefill has no peer")
        peer = None
    for length in _PREFILL_LENGTHS:
        progress(f"prefill, {length} tokens")
        yield prefill_row(model, tokens[:length], peer, rounds=9 if length <= 1024 else 7)


def prefill_row(
    model: Model, ids: Sequence[int], peer: Callable[[Sequence[int]], object] | None, *, rounds: int
) -> Row:
    """One prefill from nothing. The floor: all its matrix products, and the faster of two attentions, each alone."""
    length = len(ids)
    with Rig(model, block_size=16, max_tokens=length, tables=1) as rig:
        ours_alone, sdpa_alone = _attentions(model, length)
        # A GPU is given all layers before it is waited for, as in a pass; one alone is over before the wait begins.
        # Recorded, where it can be: the floor has no launches in it.
        layers, record = model.decoder.layers if model.device.type == "cuda" else 1, rig.streams.recorder()
        arms: dict[str, Callable[[], object]] = {"ours": lambda: rig.recompute(ids).ttft_s}
        alone: dict[str, Callable[[], Tensor]] = {
            "products": weight_products(model, length),
            "attend": partial(_last_of, ours_alone, layers),
            "sdpa": partial(_last_of, sdpa_alone, layers),
        }
        for part, run in alone.items():
            arms[part] = synchronised(run if record is None else record(run), model.device)
        if peer is not None:
            arms["transformers"] = lambda: peer(ids)
        seconds = interleave(arms, rounds)
    best = min("attend", "sdpa", key=lambda arm: median(seconds[arm]))
    share = model.decoder.layers / layers
    floors = [a + share * b for a, b in zip(seconds["products"], seconds[best], strict=True)]
    ours, floor = median(seconds["ours"]), median(floors)
    near = 512 <= length <= 2048
    row = Row(
        f"prefill, {length} tokens, {model.dtype}",
        ours * 1e3,
        "ms",
        floor=floor * 1e3,
        of_floor=floor / ours,
        interval=ratio_interval(floors, seconds["ours"]),
        goal="≥ 0.85 of the floor" if near else "reported",
        met=floor >= 0.85 * ours if near else None,
    )
    if peer is not None:
        theirs, least = median(seconds["transformers"]), _least_of_transformers(model.dtype, length)
        row = replace(
            row,
            peers={"transformers": theirs * 1e3},
            of_peer={"transformers": theirs / ours},
            goal=f"≥ {least:g} × transformers" + (f", {row.goal}" if near else ""),
            met=theirs >= least * ours and row.met is not False,
        )
    return judged(row, model.device, model.dtype)


def _last_of(run: Callable[[], Tensor], times: int) -> Tensor:
    """What the last of so many runs returns."""
    for _ in range(times - 1):
        run()
    return run()


def _least_of_transformers(dtype: str, tokens: int) -> float:
    """What the goal asks of a CPU."""
    if dtype != "bf16":
        return 1.2
    return 1.35 if tokens >= 128 else 1.8


def weight_products(model: Model, rows: int, *, all_rows: bool = False) -> Callable[[], Tensor]:
    """The products with the model's own (packed) matrices that `rows` tokens need, and nothing else of a pass.

    As in a prefill, what lies above the last layer's attention is done for one row only; `all_rows`: as in a decode.
    """
    layers, dtype = model.weights.layers, TORCH_DTYPES[model.dtype]
    d, last = model.decoder, rows if all_rows else 1
    inner = {"qkv": d.hidden, "out": d.heads * d.head_dim, "gate_up": d.hidden, "down": d.ffn}
    inputs = {name: torch.ones(rows, size, dtype=dtype, device=model.device) for name, size in inner.items()}

    @torch.inference_mode()
    def run() -> Tensor:
        for index, layer in enumerate(layers):
            for name, x in inputs.items():
                top = index == len(layers) - 1 and name != "qkv"
                linear(x[:last] if top else x, getattr(layer, name))
        return linear(inputs["qkv"][:last], model.weights.head)

    return run


def weight_bytes(model: Model) -> int:
    """Bytes of the matrices that one decode step reads."""
    d, itemsize = model.decoder, TORCH_DTYPES[model.dtype].itemsize
    projections = d.layer.projection_macs + d.layer.ffn_macs  # one multiply for each weight
    return (d.layers * projections + model.arch.vocab * d.hidden) * itemsize


def _attentions(model: Model, tokens: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """One layer's attention of a prompt alone: kvlab's, and torch's SDPA."""
    d, dtype = model.decoder, TORCH_DTYPES[model.dtype]
    q, k, v = (
        torch.randn(tokens, heads, d.head_dim, device=model.device).to(dtype)
        for heads in (d.heads, d.kv_heads, d.kv_heads)
    )
    mask = causal_mask(tokens, tokens, d.heads // d.kv_heads, q) if tokens > 1 else None
    return lambda: attend(q, k, v, mask), sdpa(q, k, v)


def bench_resume(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """A 2,048-token prefix comes back: from host RAM, against a full prefill; from disk, behind a short suffix."""
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
    row = Row(
        f"resume {prefix} + {suffix} tokens from host RAM, {model.dtype}",
        ours * 1e3,
        "ms",
        peers={"full prefill": whole * 1e3},
        of_peer={"full prefill": whole / ours},
        interval=ratio_interval(seconds["recompute"], seconds["ours"]),
        goal="≥ 20 × full prefill",
        met=whole >= 20 * ours,
    )
    yield judged(row, model.device, model.dtype)
    with tempfile.TemporaryDirectory(prefix="kvlab-bench-") as name:
        yield from hidden_rows(model, tokens, Path(name), progress)


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
    span = crossover.crossover_interval(measured, "1 Gb/s")
    off = math.inf if not at or not predicted else abs(predicted / at - 1)
    return Row(
        "crossover of wide-kv, emulated 1 Gb/s: predicted ÷ measured",
        ours=predicted / at if at and predicted else math.nan,
        unit="×",
        peers={"measured (tokens)": at or math.nan},
        interval=(predicted / span[1], predicted / span[0]) if span and span[0] and predicted else None,
        goal="within 15 %",
        met=off <= 0.15,
    )
