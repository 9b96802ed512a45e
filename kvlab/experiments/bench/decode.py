"""Decode beside transformers, and beside the memory that one step must read: all weights once, all cached KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from kvlab.arithmetic import kv_bytes
from kvlab.attention import attend_whole
from kvlab.experiments.bench.attention import synchronised
from kvlab.experiments.bench.model import model_and_text, weight_bytes, weight_products
from kvlab.experiments.bench.rows import Progress, Row, interleave, judged, ratio_interval
from kvlab.experiments.peers import transformers_decode
from kvlab.experiments.rig import Rig
from kvlab.graphs import Decode, decode_with
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES
from kvlab.records import median

__all__ = ["bench_decode", "decode_rows"]

_CACHED = 1024
# What the memory rate is measured with: far more than any cache holds, and on a GPU enough to outlast the launch.
_READ_BYTES = {"cpu": 2**28, "cuda": 2**31}


def bench_decode(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Seconds per step with 1,024 cached tokens a sequence, batch 1 and 8; one greedy token for each sequence."""
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    try:
        peer = transformers_decode(model)
    except ModuleNotFoundError:
        progress("transformers is not installed (pip install 'kvlab[test]'): decode has no peer")
        peer = None
    for batch in (1, 8):
        progress(f"decode, batch {batch}")
        yield from decode_rows(model, tokens, batch, _CACHED, peer)


def decode_rows(
    model: Model,
    tokens: Sequence[int],
    batch: int,
    cached: int,
    peer: Callable[[torch.Tensor], Callable[[int], object]] | None,
    *,
    steps: int = 8,
    rounds: int = 9,
) -> Iterator[Row]:
    """The whole step, launched kernel by kernel and on CUDA as a graph; its matrices and its attention, each alone.

    `peer` is `peers.transformers_decode`, or None.
    """
    prompts = [tokens[97 * i : 97 * i + cached] for i in range(batch)]
    with Rig(model, block_size=16, max_tokens=cached + steps, tables=batch) as rig:
        tables = [rig.table(cached + steps) for _ in prompts]
        for prompt, table in zip(prompts, tables, strict=True):
            rig.prefill(prompt, table)

        def per_step(decode: Decode) -> float:
            newest = torch.tensor([prompt[-1] for prompt in prompts])
            begin = time.perf_counter()
            for step in range(steps):
                logits = decode(newest, rig.pool, tables, [cached - 1 + step] * batch)
                newest = logits.argmax(-1).cpu()
            return (time.perf_counter() - begin) / steps

        memory = torch.ones(_READ_BYTES[model.device.type] // 4, device=model.device)
        record = rig.streams.recorder()
        alone = {
            "products": weight_products(model, batch, all_rows=True),
            "attention": _attention(model, batch, cached),
        }
        arms: dict[str, Callable[[], object]] = {
            "ours": partial(per_step, model.decode),
            "read": lambda: memory.sum().cpu(),
        }
        for part, run in alone.items():
            arms[part] = synchronised(run if record is None else record(run), model.device)
        if record is not None:
            arms["graph"] = partial(per_step, decode_with(model, record))
        if peer is not None:
            theirs = peer(torch.tensor(prompts, device=model.device))

            def their_step() -> float:
                begin = time.perf_counter()
                theirs(steps)
                return (time.perf_counter() - begin) / steps

            arms["transformers"] = their_step
        seconds = interleave(arms, rounds)
    seconds["read"] = [s / memory.nbytes for s in seconds["read"]]  # per byte
    weights_bytes = weight_bytes(model)
    kv = batch * kv_bytes(model.arch, cached + steps // 2, model.dtype)
    name = f"decode, batch {batch}, {cached} cached tokens, {model.dtype}"
    for row in (
        _row(name, "ours", seconds, weights_bytes + kv),
        *([_row(f"{name}: as a CUDA graph", "graph", seconds, weights_bytes + kv)] if "graph" in seconds else []),
        _row(f"{name}: the weight matrices alone", "products", seconds, weights_bytes),
        _row(f"{name}: the attention alone", "attention", seconds, kv),
    ):
        yield judged(row, model.device, model.dtype)


def _attention(model: Model, batch: int, cached: int) -> Callable[[], torch.Tensor]:
    """One query's attention for each sequence, in all layers: each reads its own keys and values, gathered before."""
    d, dtype = model.decoder, TORCH_DTYPES[model.dtype]
    query = torch.ones(batch, d.heads, d.head_dim, dtype=dtype, device=model.device)
    kv = torch.ones(d.layers, 2, batch, d.kv_heads, cached, d.head_dim, dtype=dtype, device=model.device)
    kv = kv.transpose(3, 4)  # each head's in one piece, as a `Window` reads them
    return torch.inference_mode()(lambda: [attend_whole(query, k, v) for k, v in kv][-1])


def _row(name: str, arm: str, seconds: dict[str, list[float]], nbytes: int) -> Row:
    """An arm against reading `nbytes` at the memory's measured rate, and a whole step against transformers too."""
    ours, floors = median(seconds[arm]), [s * nbytes for s in seconds["read"]]
    floor = median(floors)
    row = Row(
        name,
        ours * 1e3,
        "ms",
        floor=floor * 1e3,
        of_floor=floor / ours,
        interval=ratio_interval(floors, seconds[arm]),
        goal="reported",
    )
    if arm in ("products", "attention"):
        return row
    goal, met = "≥ 0.7 of the floor", floor >= 0.7 * ours
    if "transformers" not in seconds:
        return replace(row, goal=goal, met=met)
    theirs = median(seconds["transformers"])
    return replace(
        row,
        peers={"transformers": theirs * 1e3},
        of_peer={"transformers": theirs / ours},
        goal=f"≥ 1.5 × transformers, {goal}",
        met=met and theirs >= 1.5 * ours,
    )
