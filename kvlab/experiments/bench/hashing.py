"""Names and checksums of blocks beside the bare hash functions, and look-ups in indexes of several sizes."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence

import torch
import xxhash

from kvlab.arch import ModelArch
from kvlab.blocks import BlockAllocator
from kvlab.experiments.bench.rows import Progress, Row, interleave, ratio_interval
from kvlab.fingerprint import Fingerprint, block_hashes
from kvlab.pool import KVLayout
from kvlab.prefix import PrefixIndex
from kvlab.records import median
from kvlab.tiers.base import checksum

__all__ = ["bench_hashing", "filled_index", "lookups"]

_BLOCK = 16
_ROUNDS = 41


def bench_hashing(
    device: str,  # noqa: ARG001
    dtype: str,
    progress: Progress,
    *,
    tokens: int = 8192,
    indexes: Sequence[int] = (1_000, 100_000, 1_000_000),
) -> Iterator[Row]:
    """Rates of one core. Floors: the hash function over the same bytes at once, and a plain dict of as many keys."""
    progress("hashing")
    yield _names_row(tokens)
    yield _checksum_row(dtype)
    for blocks in indexes:
        progress(f"look-ups among {blocks:,} blocks")
        yield _lookup_row(blocks)


def _rate_row(name: str, unit: str, seconds: Mapping[str, Sequence[float]], amount: float, goal: float | None) -> Row:
    """`amount` of `unit` are done in `seconds["ours"]` and in `seconds["floor"]`."""
    ours, floor = median(seconds["ours"]), median(seconds["floor"])
    return Row(
        name,
        amount / ours,
        unit,
        floor=amount / floor,
        of_floor=floor / ours,
        interval=ratio_interval(seconds["floor"], seconds["ours"]),
        goal="reported" if goal is None else f"≥ {goal:g} × the floor",
        met=None if goal is None else floor >= goal * ours,
    )


def _names_row(tokens: int) -> Row:
    ids = list(range(tokens))
    raw = array("q", ids).tobytes()
    fingerprint = Fingerprint("bench", "bench", "bench", "bench", "fp32", "bench")
    seconds = interleave(
        {
            "ours": lambda: block_hashes(fingerprint, ids, _BLOCK),
            "floor": lambda: hashlib.sha256(raw).digest(),
        },
        _ROUNDS,
    )
    name = f"block hashes (chained SHA-256), {tokens:,} tokens in blocks of {_BLOCK}; floor: SHA-256 of the same bytes"
    return _rate_row(name, "tokens/s", seconds, tokens, None)


def _checksum_row(dtype: str) -> Row:
    decoder = ModelArch.preset("smollm2-135m").decoder
    assert decoder is not None, "the preset has a decoder"
    block_bytes = KVLayout(decoder.layers, decoder.kv_heads, decoder.head_dim, _BLOCK, dtype).block_bytes
    blocks = [torch.full((block_bytes,), i, dtype=torch.uint8).numpy() for i in range(2**26 // block_bytes)]
    names = [i.to_bytes(32, "big") for i in range(len(blocks))]

    def ours() -> None:
        for block, name in zip(blocks, names, strict=True):
            checksum(block, name, 0)

    def floor() -> None:
        for block in blocks:
            xxhash.xxh3_64_intdigest(block.data)

    seconds = interleave({"ours": ours, "floor": floor}, _ROUNDS)
    name = f"checksums (xxh3_64) of {len(blocks)} SmolLM2 blocks, {dtype}"
    return _rate_row(name, "GB/s", seconds, len(blocks) * block_bytes / 1e9, 0.9)


# Look-ups ------------------------------------------------------------------------------------------------------------


def filled_index(blocks: int) -> tuple[PrefixIndex, list[bytes]]:
    """An index that holds one chain of `blocks` blocks, and their hashes in order (made up, evenly spread)."""
    allocator = BlockAllocator(blocks, _BLOCK)
    index, table = PrefixIndex(allocator), allocator.new_table()
    hashes = [hashlib.sha256(place.to_bytes(8, "big")).digest() for place in range(blocks)]
    for place, block in enumerate(allocator.grow(table, blocks * _BLOCK)):
        index.insert(hashes, place, block, "", 0.0)
    return index, hashes


def lookups(hashes: Sequence[bytes], run: int, count: int, seed: int) -> list[list[bytes]]:
    """`count` runs of known hashes at random places: each finds memory that the caches may not hold.

    The bytes are copies, as those of a new request are.
    """
    generator = random.Random(seed)
    starts = (generator.randrange(len(hashes) - run + 1) for _ in range(count))
    return [[bytes(bytearray(block_hash)) for block_hash in hashes[start : start + run]] for start in starts]


def _lookup_row(blocks: int, run: int = 512, count: int = 8) -> Row:
    index, hashes = filled_index(blocks)
    plain = dict.fromkeys(hashes)
    turns = iter(range(10**9))

    def ours() -> None:
        for wanted in lookups_of[next(turns) % len(lookups_of)]:
            assert len(index.match(wanted, 1.0)) == run, "a block that was put into the index is missing"

    def floor() -> None:
        for wanted in lookups_of[next(turns) % len(lookups_of)]:
            for block_hash in wanted:
                plain[block_hash]

    lookups_of = [lookups(hashes, run, count, seed) for seed in range(16)]
    seconds = interleave({"ours": ours, "floor": floor}, _ROUNDS)
    name = f"prefix look-up of {run} blocks among {blocks:,} in the pool; floor: as many in a plain dict"
    return _rate_row(name, "blocks/s", seconds, run * count, None)
