"""Every speed claim of the project, re-made: ours beside a floor and beside peers, interleaved in one process.

A floor is the least work the task needs, done alone (the same bytes in one contiguous copy, the same file read raw).
A peer is another library doing the same task. Ratios above 1 mean that we are faster. Medians over interleaved rounds.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from kvlab.arch import ModelArch
from kvlab.experiments import crossover
from kvlab.experiments.calibrate import calibrate, scattered
from kvlab.experiments.peers import transformers_prefill
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import Fingerprint
from kvlab.loading import load_model
from kvlab.model import Model
from kvlab.pool import BlockPool, KVLayout
from kvlab.records import bootstrap_interval, median
from kvlab.streams import streams_for
from kvlab.tiers import DiskTier, HostTier, LinkTier, Tier
from kvlab.transfer import Transfer

__all__ = ["GROUPS", "Row", "interleave", "run"]

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One line of the bench. `of_floor`, `of_peer` above 1: we are faster. `met` None: could not be measured here."""

    name: str
    ours: float
    unit: str
    floor: float | None = None
    of_floor: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    of_peer: dict[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    goal: str = ""
    met: bool | None = None


def interleave(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm in each round; the order turns, one warm-up round is dropped, the collector is off.

    An arm that must not count its preparation returns the seconds it took itself.
    """
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                begin = time.perf_counter()
                own_s = arms[name]()
                elapsed_s = own_s if isinstance(own_s, float) else time.perf_counter() - begin
                if number:
                    seconds[name].append(elapsed_s)
    finally:
        gc.enable()
    return seconds


def _ratio_interval(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float] | None:
    """Bootstrap interval over rounds of median(slow) / median(fast)."""
    a, b = np.asarray(slow), np.asarray(fast)
    return bootstrap_interval(lambda rounds: float(np.median(a[rounds]) / np.median(b[rounds])), len(a))


def _against_floor(
    name: str, seconds: dict[str, list[float]], amount_bytes: int, goal: float, floors: Sequence[str] = ("floor",)
) -> Row:
    """A row in GB/s whose floor is the fastest of `floors`."""
    best = min(floors, key=lambda floor: median(seconds[floor]))
    of_floor = median(seconds[best]) / median(seconds["ours"])
    return Row(
        name,
        ours=amount_bytes / median(seconds["ours"]) / 1e9,
        unit="GB/s",
        floor=amount_bytes / median(seconds[best]) / 1e9,
        of_floor=of_floor,
        interval=_ratio_interval(seconds[best], seconds["ours"]),
        goal=f"≥ {goal:g} × the floor" + (f" ({best})" if len(floors) > 1 else ""),
        met=of_floor >= goal,
    )


# Host RAM -------------------------------------------------------------------------------------------------------------


def bench_host(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Offload and reload of scattered 16-token SmolLM2 blocks against one contiguous copy of the same bytes."""
    arch = ModelArch.preset("smollm2-135m")
    assert arch.decoder is not None, "the preset has a decoder"
    layout = KVLayout(arch.decoder.layers, arch.decoder.kv_heads, arch.decoder.head_dim, 16, dtype)
    for target_bytes in (2**20, 2**23, 2**25, 2**27, 2**29):
        blocks = max(1, target_bytes // layout.block_bytes)
        size_bytes = blocks * layout.block_bytes
        progress(f"host RAM, {size_bytes >> 20} MiB")
        goal = 0.95 if target_bytes >= 2**23 else 0.8
        for verify in (False, True):
            for direction, seconds in _host_seconds(layout, blocks, device, verify).items():
                kind = "with checksums" if verify else "bytes alone"
                row = _against_floor(
                    f"host {direction}, {size_bytes / 2**20:.1f} MiB, {kind}", seconds, size_bytes, goal
                )
                if verify:
                    row = Row(**{**asdict(row), "goal": "reported", "met": None})
                yield row


def _host_seconds(layout: KVLayout, blocks: int, device: str, verify: bool) -> dict[str, dict[str, list[float]]]:
    pool = BlockPool(layout, 2 * blocks, device=device)
    pool.rows.normal_()
    order = scattered(list(range(2 * blocks)))
    home, away = order[:blocks], order[blocks:]
    hashes = [i.to_bytes(32, "big") for i in range(blocks)]
    with streams_for(pool.device) as streams:
        transfer = Transfer(pool, streams)
        tier = HostTier(2 * blocks * layout.block_bytes + 2**26, verify=verify)
        transfer.open(tier, _bench_fingerprint(layout))
        host = streams.buffer(blocks * layout.block_bytes).fill_(1)
        near = torch.empty(host.numel(), dtype=torch.uint8, device=device).fill_(2)
        seconds: dict[str, dict[str, list[float]]] = {}

        def synchronise() -> None:
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)

        def offload() -> float:
            tier.clear()
            begin = time.perf_counter()
            transfer.offload(tier, home, hashes).wait()
            return time.perf_counter() - begin

        def reload() -> None:
            report = transfer.reload(tier, hashes, away).wait()
            assert report.valid_blocks == blocks, f"the host tier lost blocks: {report.failures}"

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)
            synchronise()

        rounds = 9 if blocks * layout.block_bytes >= 2**27 else 41
        seconds["offload"] = interleave({"ours": offload, "floor": lambda: copy(host, near)}, rounds)
        seconds["reload"] = interleave({"ours": reload, "floor": lambda: copy(near, host)}, rounds)
        return seconds


# Disk -----------------------------------------------------------------------------------------------------------------


def bench_disk(device: str, dtype: str, progress: Progress, folder: Path | None = None) -> Iterator[Row]:
    """Cold reload, checksums included, against raw reads of the same bytes; offload against a plain write and fsync."""
    arch = ModelArch.preset("smollm2-135m")
    assert arch.decoder is not None, "the preset has a decoder"
    layout = KVLayout(arch.decoder.layers, arch.decoder.kv_heads, arch.decoder.head_dim, 16, dtype)
    with tempfile.TemporaryDirectory(prefix="kvlab-bench-", dir=folder) as name:
        for target_bytes in (2**23, 2**26, 2**27):
            blocks = target_bytes // layout.block_bytes
            progress(f"disk, {target_bytes >> 20} MiB")
            yield from _disk_rows(layout, blocks, device, Path(name))


def _disk_rows(layout: KVLayout, blocks: int, device: str, folder: Path) -> Iterator[Row]:
    size_bytes = blocks * layout.block_bytes
    pool = BlockPool(layout, 2 * blocks, device=device)
    pool.rows.normal_()
    order = scattered(list(range(2 * blocks)))
    hashes = [i.to_bytes(32, "big") for i in range(blocks)]
    raw = folder / "raw.bin"
    page = np.frombuffer(np.random.default_rng(0).bytes(size_bytes), dtype=np.uint8)
    target = _aligned(size_bytes)
    with streams_for(pool.device) as streams:
        transfer = Transfer(pool, streams)
        tier = DiskTier(folder / "tier", 4 * size_bytes + 2**26)
        transfer.open(tier, _bench_fingerprint(layout))

        def offload() -> float:
            tier.clear()
            begin = time.perf_counter()
            transfer.offload(tier, order[:blocks], hashes).wait()
            return time.perf_counter() - begin

        def write() -> float:
            raw.unlink(missing_ok=True)
            begin = time.perf_counter()
            with raw.open("wb") as file:
                file.write(page.data)
                file.flush()
                os.fsync(file.fileno())
            return time.perf_counter() - begin

        def reload() -> float:
            tier.drop_pages()
            begin = time.perf_counter()
            report = transfer.reload(tier, hashes, order[blocks:]).wait()
            elapsed_s = time.perf_counter() - begin
            assert report.valid_blocks == blocks, f"the disk tier lost blocks: {report.failures}"
            return elapsed_s

        def read(flags: int) -> float:
            _drop_file(raw)
            begin = time.perf_counter()
            handle = os.open(raw, os.O_RDONLY | flags)
            try:
                _read_all(handle, target)
            finally:
                os.close(handle)
            return time.perf_counter() - begin

        label = f"{size_bytes / 2**20:.1f} MiB"
        stored = interleave({"ours": offload, "floor": write}, 9)
        yield _against_floor(f"disk offload, {label}", stored, size_bytes, 0.8)
        arms: dict[str, Callable[[], object]] = {"ours": reload, "readinto": lambda: read(0)}
        if hasattr(os, "O_DIRECT"):
            arms["O_DIRECT"] = lambda: read(os.O_DIRECT)
        loaded = interleave(arms, 11)
        yield _against_floor(f"disk reload, cold, {label}", loaded, size_bytes, 0.95, [n for n in arms if n != "ours"])


def _aligned(size_bytes: int) -> memoryview:
    """A buffer at a 4 KiB boundary (O_DIRECT asks for it), rounded up, with its pages mapped."""
    room = -(-size_bytes // 4096) * 4096
    backing = np.ones(room + 4096, dtype=np.uint8)
    offset = -backing.ctypes.data % 4096
    return backing[offset : offset + room].data


def _read_all(handle: int, target: memoryview) -> None:
    at = 0
    while count := os.readv(handle, [target[at:]]):
        at += count


def _drop_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _bench_fingerprint(layout: KVLayout) -> Fingerprint:
    return Fingerprint("bench", "bench", "bench", "bench", layout.dtype, str(layout))


# Prefill and resume ---------------------------------------------------------------------------------------------------


def _smollm2(device: str, dtype: str) -> tuple[Model, list[int]]:
    model = load_model("smollm2-135m", device=device, dtype=dtype)
    text = resources.files("kvlab").joinpath("data", "text.txt").read_text(encoding="utf-8")
    return model, model.tokenizer.encode(text)


def bench_prefill(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Time to the first token's logits against transformers (sdpa), same weights, dtype and threads."""
    model, tokens = _smollm2(device, dtype)
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
                interval=_ratio_interval(seconds["transformers"], seconds["ours"]),
                goal="≥ 1 × transformers",
                met=theirs >= ours,
            )
        yield row


def bench_resume(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """A 2,048-token prefix comes back from host RAM: its first token against a full prefill."""
    model, tokens = _smollm2(device, dtype)
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
        interval=_ratio_interval(seconds["recompute"], seconds["ours"]),
        goal="≥ 20 × full prefill",
        met=whole >= 20 * ours,
    )


# Prediction -----------------------------------------------------------------------------------------------------------

# None of these is a calibration length.
_UNSEEN_LENGTHS = (48, 96, 192, 384, 768, 1536)


def bench_prediction(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Predicted against measured times to first token at lengths the calibration did not use, and one crossover."""
    model, tokens = _smollm2(device, dtype)
    with tempfile.TemporaryDirectory(prefix="kvlab-bench-") as name:
        makers = {"host": lambda: HostTier(2**32), "disk": lambda: DiskTier(Path(name), 2**33)}
        machine = calibrate(model, tokens, makers, progress=progress)
        predictions = crossover.predict(model, machine, list(makers), _UNSEEN_LENGTHS, suffix=16, block_size=16)
        measured = crossover.measure(
            model, tokens, makers, _UNSEEN_LENGTHS, suffix=16, block_size=16, rounds=7, progress=progress
        )
    times = [median(samples) for samples in measured.recompute_s]
    yield _error_row("recompute", [v.ttft_recompute_s for v in predictions[0].verdicts], times, 0.10)
    for prediction in predictions:
        times = [median(samples) for samples in measured.tiers[prediction.tier].reload_s]
        yield _error_row(f"reload, {prediction.tier}", [v.ttft_reload_s for v in prediction.verdicts], times, 0.15)
    yield _wide_kv_row(device, progress)


def _error_row(arm: str, predicted: Sequence[float], measured: Sequence[float], most: float) -> Row:
    error = median([abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)])
    return Row(
        f"prediction error, {arm}, unseen lengths",
        error * 100,
        "%",
        goal=f"median ≤ {most * 100:g} %",
        met=error <= most,
    )


def _wide_kv_row(device: str, progress: Progress) -> Row:
    """The predicted flip of `wide-kv` behind an emulated 1 Gb/s link against the measured one."""
    model = load_model("wide-kv", device=device, dtype="bf16")
    text = resources.files("kvlab").joinpath("data", "text.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text)
    lengths = [64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096]

    def link() -> Tier:
        return LinkTier(HostTier(2**32), 0.125)

    machine = calibrate(model, tokens, {"host": lambda: HostTier(2**32), "1 Gb/s": link}, progress=progress)
    prediction = crossover.predict(model, machine, ["1 Gb/s"], lengths, suffix=16, block_size=16)[0]
    measured = crossover.measure(
        model, tokens, {"1 Gb/s": link}, lengths, suffix=16, block_size=16, rounds=7, progress=progress
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


GROUPS: dict[str, Callable[[str, str, Progress], Iterator[Row]]] = {
    "host": bench_host,
    "disk": bench_disk,
    "prefill": bench_prefill,
    "resume": bench_resume,
    "prediction": bench_prediction,
}


def run(groups: Sequence[str], device: str, dtype: str, progress: Progress = lambda _: None) -> Iterator[Row]:
    """The rows of the named groups, as they are measured. Raises ValueError naming the known groups."""
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"unknown bench group {group!r}; known groups: {', '.join(GROUPS)}")
    for group in groups:
        yield from GROUPS[group](device, dtype, progress)
