"""What a link really gives: the same blocks in pieces and whole, copies of each size, a file cold and warm.

Times are the fastest of a few interleaved rounds: other programs only ever add time. Knows pools, tiers and clocks.
Returns plain records; does not print or draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab.blocks import blocks_for
from kvlab.experiments.bench.rows import interleave
from kvlab.experiments.calibrate import scattered
from kvlab.experiments.rig import Rig
from kvlab.machine import Curve, Link
from kvlab.model import Model
from kvlab.pool import BlockPool, LayerGroups
from kvlab.records import machine_facts, now_utc
from kvlab.streams import host_memory, streams_for
from kvlab.tiers import DiskTier, bytes_read_from_device

__all__ = ["COPY_SIZES", "copy_link", "copy_sizes", "disk_reads", "layouts", "pinned_and_pageable"]

COPY_SIZES = tuple(4**step for step in range(5, 13))  # 1 KiB to 16 MiB
_REGION_BYTES = 64 << 20  # half of it is copied, at any size: more than most processor caches hold


def _record(schema: str, device: torch.device, **results: Any) -> dict[str, Any]:
    provenance = {"kind": "live", "when": now_utc(), "facts": machine_facts(str(device))}
    return {"schema": schema, "provenance": provenance, **results}


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a CPU torch copies large tensors with all threads and small ones with one; here only the pieces may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _copy_each(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """One copy call for each (target, source); returns when all bytes are there."""
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
    _synchronise(device)


def layouts(model: Model, tokens: Sequence[int], *, block_size: int = 16, rounds: int = 7) -> dict[str, Any]:
    """Copy the KV cache of `tokens` out of scattered blocks to host RAM in four ways; "one copy" is the peak.

    Piece by piece out of a layer-major pool: one copy for each row, K or V of one layer in one block. The same rows in
    one gather. Block by block out of a block-major pool. One copy of as many bytes that lie together. What arrives is
    compared with what the model wrote. Raises RuntimeError when it differs.
    """
    layout, blocks = model.layout(block_size), blocks_for(len(tokens), block_size)
    ids = scattered(range(2 * blocks))[:blocks]
    by_block = BlockPool(layout, 2 * blocks, device=model.device)
    by_layer = BlockPool(replace(layout, order="layer_major"), 2 * blocks, device=model.device)
    model.prefill(tokens, by_block, ids, 0)
    where = torch.tensor(ids, device=model.device)
    wanted = by_block.rows[by_block.group_index(where, 0, layout.layers)]
    rows = by_layer.group_index(where, 0, layout.layers)
    by_layer.rows[rows] = wanted
    together = wanted.clone()
    size_bytes = blocks * layout.block_bytes
    with streams_for(model.device) as streams:
        host = streams.buffer(size_bytes).view(wanted.dtype).view(wanted.shape)
        pieces = list(zip(host, (by_layer.rows[row] for row in rows.tolist()), strict=True))
        whole = host.view(blocks, -1), by_block.rows.view(2 * blocks, -1)
        by_id = list(zip(whole[0], (whole[1][block] for block in ids), strict=True))
        source, index = LayerGroups(by_layer, 1).rows(0, torch.tensor(ids))

        def gather() -> None:
            streams.wait_host(streams.gather(source, index, host.view(torch.uint8).view(-1), []))

        arms: dict[str, tuple[int, Callable[[], object]]] = {
            "layer-major, piece by piece": (len(pieces), lambda: _copy_each(pieces, model.device)),
            "layer-major, one gather": (1, gather),
            "block-major, block by block": (blocks, lambda: _copy_each(by_id, model.device)),
            "one copy": (1, lambda: _copy_each([(host, together)], model.device)),
        }
        for name, (_, arm) in arms.items():
            host.zero_()
            arm()
            if not torch.equal(host, wanted.cpu()):
                raise RuntimeError(f"{name}: the copied blocks differ from what the model wrote")
        with _one_thread():
            seconds = interleave({name: arm for name, (_, arm) in arms.items()}, rounds)
    return _record(
        "kvlab.layouts/1",
        model.device,
        parameters={"tokens": len(tokens), "block_size": block_size, "rounds": rounds},
        model={"name": model.arch.name, "dtype": model.dtype, "source": model.source},
        size_bytes=size_bytes,
        row_bytes=layout.row_bytes,
        block_bytes=layout.block_bytes,
        arms=[
            {
                "name": name,
                "copies": copies,
                "copy_bytes": size_bytes // copies,
                "gb_per_s": size_bytes / min(seconds[name]) / 1e9,
                "samples_s": seconds[name],
            }
            for name, (copies, _) in arms.items()
        ],
    )


def copy_sizes(
    device: str | torch.device = "cpu", sizes: Sequence[int] = COPY_SIZES, rounds: int = 5, *, pageable: bool = False
) -> dict[str, Any]:
    """GB/s of copies of each size (bytes) from `device` to host RAM, one call after another, out of scattered places.

    On CUDA host memory is pinned unless `pageable`; on a CPU there is no such difference.
    """
    device = torch.device(device)
    source = host_memory(_REGION_BYTES).fill_(1).to(device)
    with streams_for(device) as streams:
        target = host_memory(_REGION_BYTES).fill_(0) if pageable else streams.buffer(_REGION_BYTES)
        pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for size in sizes:
            places = scattered(range(_REGION_BYTES // size))[: _REGION_BYTES // size // 2]
            starts = [(number * size, place * size) for number, place in enumerate(places)]
            pairs[size] = [(target[to : to + size], source[at : at + size]) for to, at in starts]
        arms: dict[str, Callable[[], object]] = {str(size): partial(_copy_each, pairs[size], device) for size in sizes}
        with _one_thread():
            seconds = interleave(arms, rounds)
    return _record(
        "kvlab.copy_sizes/1",
        device,
        parameters={"rounds": rounds, "pageable": pageable},
        copy_bytes=list(sizes),
        gb_per_s=[size * len(pairs[size]) / min(seconds[str(size)]) / 1e9 for size in sizes],
        samples_s=[seconds[str(size)] for size in sizes],
    )


def copy_link(copy_bytes: Sequence[int], gb_per_s: Sequence[float]) -> Link:
    """The link of two numbers behind a curve: its best rate as peak, and what the smallest copy adds as overhead."""
    peak = max(gb_per_s)
    smallest_s = copy_bytes[0] / (gb_per_s[0] * 1e9)
    overhead_s = max(0.0, smallest_s - copy_bytes[0] / (peak * 1e9))
    return Link(Curve(((1.0, peak),)), per_copy_s=overhead_s, copy="block")


def disk_reads(model: Model, tokens: Sequence[int], folder: Path, rounds: int = 3) -> dict[str, Any]:
    """Reload the cache of `tokens` from a disk tier in `folder`, cold and warm: GB/s, and what the device had to read.

    Cold: written out, and dropped from the page cache. Warm: each file was read just before, so the operating system
    keeps it in RAM. `proven`: while cold, the device was read for at least the cache's bytes (None: not counted here).
    """
    samples: dict[str, list[float]] = {"cold": [], "warm": []}
    device_bytes: dict[str, list[int]] = {"cold": [], "warm": []}
    with Rig(model, block_size=16, max_tokens=len(tokens) + 1) as rig:
        tier = DiskTier(folder, 2**33)
        rig.open(tier)
        table = rig.table(len(tokens))
        rig.prefill(tokens, table)
        stored = rig.offload(tier, tokens, table)
        whole = [*tokens, tokens[0]]  # a resume computes at least one token
        for _ in range(rounds):
            for kind in samples:
                if kind == "cold":
                    tier.drop_pages()
                else:
                    _read_through(folder)
                before = bytes_read_from_device()
                transfer = rig.resume(tier, whole, len(tokens)).transfer
                after = bytes_read_from_device()
                assert transfer is not None, "the resume reloaded"
                samples[kind].append(transfer.bytes_moved / transfer.wall_s / 1e9)
                if before is not None and after is not None:
                    device_bytes[kind].append(after - before)
    return _record(
        "kvlab.disk_reads/1",
        model.device,
        size_bytes=stored.bytes_moved,
        gb_per_s={kind: max(values) for kind, values in samples.items()},
        device_bytes={kind: min(values, default=None) for kind, values in device_bytes.items()},
        proven=min(device_bytes["cold"]) >= stored.bytes_moved if device_bytes["cold"] else None,
        samples_gb_per_s=samples,
    )


def _read_through(folder: Path) -> None:
    """Read every file, so that the operating system has it in RAM."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def pinned_and_pageable(device: str | torch.device, size_bytes: int = 16 << 20) -> dict[str, float]:
    """GB/s of large copies from a CUDA device to pinned and to pageable host memory. Raises ValueError on a CPU."""
    if torch.device(device).type != "cuda":
        raise ValueError(f"pinned memory matters to a CUDA device; {device} is none")
    kinds = {"pinned": False, "pageable": True}
    return {name: copy_sizes(device, [size_bytes], pageable=kind)["gb_per_s"][0] for name, kind in kinds.items()}
