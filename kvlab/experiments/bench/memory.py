"""Moves between the pool and its tiers, beside the same bytes copied, read or written with nothing around them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from kvlab.arch import ModelArch
from kvlab.experiments.bench.rows import Progress, Row, interleave, ratio_interval
from kvlab.experiments.calibrate import scattered
from kvlab.fingerprint import Fingerprint
from kvlab.pool import BlockPool, KVLayout
from kvlab.records import median
from kvlab.streams import streams_for
from kvlab.tiers import DiskTier, HostTier, bytes_read_from_device
from kvlab.transfer import Transfer

__all__ = ["ColdReads", "aligned", "bench_disk", "bench_host", "drop_file", "read_file"]


class ColdReads:
    """Whether all timed reads of `nbytes` came from the device, but for one page in ten."""

    def __init__(self, nbytes: int) -> None:
        self._least_bytes = 0.9 * nbytes
        self._proven: list[bool] = []

    def timed(self, work: Callable[[], float]) -> float:
        """What `work` returns; takes note of what it has made the device read."""
        before = bytes_read_from_device()
        seconds = work()
        after = bytes_read_from_device()
        self.note(None if before is None or after is None else after - before)
        return seconds

    def note(self, nbytes: int | None) -> None:
        """Another process has read once, and counted so many bytes (None: could not count)."""
        self._proven.append(nbytes is not None and nbytes >= self._least_bytes)

    def __str__(self) -> str:
        return "cold files" if all(self._proven) else "cold: unproven"


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
        interval=ratio_interval(seconds[best], seconds["ours"]),
        goal=f"≥ {goal:g} × the floor" + (f" ({best})" if len(floors) > 1 else ""),
        met=of_floor >= goal,
    )


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
    target = aligned(size_bytes)
    with streams_for(pool.device) as streams:
        transfer = Transfer(pool, streams)
        tier = DiskTier(folder / "tier", 4 * size_bytes + 2**26)
        transfer.open(tier, _bench_fingerprint(layout))

        def offload() -> float:
            tier.clear()
            begin = time.perf_counter()
            transfer.offload(tier, order[:blocks], hashes, source_held=True).wait()
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

        def read(*, direct: bool) -> float:
            drop_file(raw)
            begin = time.perf_counter()
            read_file(raw, target, direct=direct)
            return time.perf_counter() - begin

        label = f"{size_bytes / 2**20:.1f} MiB"
        stored = interleave({"ours": offload, "floor": write}, 9)
        yield _against_floor(f"disk offload, {label}", stored, size_bytes, 0.8)
        arms: dict[str, Callable[[], object]] = {"ours": reload, "readinto": lambda: read(direct=False)}
        if hasattr(os, "O_DIRECT"):
            arms["O_DIRECT"] = lambda: read(direct=True)
        loaded = interleave(arms, 11)
        yield _against_floor(f"disk reload, cold, {label}", loaded, size_bytes, 0.95, [n for n in arms if n != "ours"])


def aligned(size_bytes: int) -> memoryview:
    """A buffer at a 4 KiB boundary (O_DIRECT asks for it), rounded up, with its pages mapped."""
    room = -(-size_bytes // 4096) * 4096
    backing = np.ones(room + 4096, dtype=np.uint8)
    offset = -backing.ctypes.data % 4096
    return backing[offset : offset + room].data


def read_file(path: Path, target: memoryview, *, direct: bool) -> None:
    """Read a whole file into `target`, which has room for it; `direct`: past the page cache, where that can be."""
    handle, at = _opened(path, direct), 0
    try:
        size = os.fstat(handle).st_size
        while at < size and (count := os.readv(handle, [target[at:]])):
            at += count
    finally:
        os.close(handle)


def _opened(path: Path, direct: bool) -> int:
    if direct:
        with contextlib.suppress(OSError):  # not every file system has it
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
    return os.open(path, os.O_RDONLY)


def drop_file(path: Path) -> None:
    """Write a file to its device and forget its pages, so that the next read comes from there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _bench_fingerprint(layout: KVLayout) -> Fingerprint:
    return Fingerprint("bench", "bench", "bench", "bench", layout.dtype, str(layout))
