"""Decode beside transformers, and beside the memory that one step must read: all weights once, all cached KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from kvlab.arithmetic import kv_bytes
from kvlab.experiments.bench.model import model_and_text, weight_bytes, weight_products
from kvlab.experiments.bench.rows import Progress, Row, interleave, ratio_interval
from kvlab.experiments.peers import transformers_decode
from kvlab.experiments.rig import Rig
from kvlab.model import Model
from kvlab.records import median

__all__ = ["bench_decode", "decode_rows"]

_CACHED = 1024
_READ_BYTES = 2**28  # what the memory rate is measured with: far more than any cache holds


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
    """The whole step, and its weight matrices alone, which bound it. `peer` is `peers.transformers_decode`, or None."""
    prompts = [tokens[97 * i : 97 * i + cached] for i in range(batch)]
    with Rig(model, block_size=16, max_tokens=cached + steps, tables=batch) as rig:
        tables = [rig.table(cached + steps) for _ in prompts]
        for prompt, table in zip(prompts, tables, strict=True):
            rig.prefill(prompt, table)

        def ours() -> float:
            newest = torch.tensor([prompt[-1] for prompt in prompts])
            begin = time.perf_counter()
            for step in range(steps):
                logits = model.decode(newest, rig.pool, tables, [cached - 1 + step] * batch)
                newest = logits.argmax(-1).cpu()
            return (time.perf_counter() - begin) / steps

        memory = torch.ones(_READ_BYTES // 4, device=model.device)
        products = weight_products(model, batch, all_rows=True)
        arms: dict[str, Callable[[], object]] = {"ours": ours, "read": lambda: memory.sum().cpu()}
        arms["products"] = lambda: products().cpu()
        if peer is not None:
            theirs = peer(torch.tensor(prompts, device=model.device))

            def per_step() -> float:
                begin = time.perf_counter()
                theirs(steps)
                return (time.perf_counter() - begin) / steps

            arms["transformers"] = per_step
        seconds = interleave(arms, rounds)
    weights_bytes = weight_bytes(model)
    kv = batch * kv_bytes(model.arch, cached + steps // 2, model.dtype)
    name = f"decode, batch {batch}, {cached} cached tokens, {model.dtype}"
    yield _row(name, "ours", seconds, weights_bytes + kv)
    yield _row(f"{name}: the weight matrices alone", "products", seconds, weights_bytes)


def _row(name: str, arm: str, seconds: dict[str, list[float]], nbytes: int) -> Row:
    """An arm against reading `nbytes` at the memory's measured rate, and a whole step against transformers too."""
    ours, floors = median(seconds[arm]), [s * nbytes / _READ_BYTES for s in seconds["read"]]
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
    if arm != "ours":
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
