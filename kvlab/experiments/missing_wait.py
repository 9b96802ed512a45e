"""What one forgotten wait does to a KV cache that leaves and comes back: real bytes of a real model, counted.

Each round computes a prefix, offloads it to host RAM, lets another request's cache take the blocks, and reloads the
prefix elsewhere, under streams that leave one wait out. Returns a plain record; does not print or draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvlab.adversaries import EarlyStreams, LateStreams
from kvlab.blocks import blocks_for
from kvlab.fingerprint import block_hashes
from kvlab.model import Model
from kvlab.pool import BlockPool
from kvlab.records import machine_facts, now_utc
from kvlab.streams import CopyOp, Event, Streams, ThreadStreams
from kvlab.tiers import HostTier
from kvlab.transfer import Transfer

__all__ = ["SCHEMA", "WAITS", "count_corrupt"]

SCHEMA = "kvlab.missing_wait/1"

# Name → (the job that forgets to wait, what it forgets to wait for).
WAITS: dict[str, tuple[str, str]] = {
    "offload: the copy waits for the kernels that write the blocks": ("gather", "compute"),
    "offload: the next owner waits for the copy": ("compute", "gather"),
    "reload: the copy waits for the last owner's kernels": ("scatter", "compute"),
    "reload: attention waits for the copy": ("compute", "scatter"),
}


class _Forgetful(Streams):
    """Leaves out one kind of wait: jobs of kind `job` do not come after events of kind `awaited`."""

    job = awaited = ""

    def _copy(self, op: CopyOp, rows: Tensor, index: Tensor, host: Tensor, after: Sequence[Event]) -> Event:
        kept = [event for event in after if (op, event.op) != (self.job, self.awaited)]
        return super()._copy(op, rows, index, host, kept)  # type: ignore[safe-super]

    def wait_compute(self, event: Event) -> None:
        if ("compute", event.op) != (self.job, self.awaited):
            super().wait_compute(event)  # type: ignore[safe-super]


class _ForgetfulThread(_Forgetful, ThreadStreams):
    pass


class _ForgetfulEarly(_Forgetful, EarlyStreams):
    pass


class _ForgetfulLate(_Forgetful, LateStreams):
    pass


_STREAMS: dict[str, type[_Forgetful]] = {
    "ordinary": _ForgetfulThread,
    "early": _ForgetfulEarly,
    "late": _ForgetfulLate,
}


def count_corrupt(
    model: Model,
    tokens: Sequence[int],
    *,
    streams: str,
    missing: str | None = None,
    rounds: int = 10,
    prefix: int = 48,
    suffix: int = 8,
    block_size: int = 16,
) -> dict[str, Any]:
    """Run round trips of `prefix` tokens under "ordinary", "early" or "late" streams with one of `WAITS` left out.

    A block is corrupt when its bytes, as attention finds them, are not those that were computed; a round is when one of
    its blocks is. `noticed`: rounds in which the library saw a failure (a checksum, an error). `other_answer`: corrupt
    rounds whose next token is another one than behind the right cache. Raises ValueError for unknown names.
    """
    if streams not in _STREAMS or (missing is not None and missing not in WAITS):
        raise ValueError(f"streams {streams!r}, missing {missing!r}; known: {', '.join(_STREAMS)}; {'; '.join(WAITS)}")
    if prefix % block_size or len(tokens) < (rounds + 3) * prefix + suffix:
        raise ValueError(f"prefix {prefix} must be whole blocks, and {rounds} rounds need more text than {len(tokens)}")
    size = prefix // block_size
    counts = {"corrupt_rounds": 0, "corrupt_blocks": 0, "noticed": 0, "other_answer": 0}
    lanes = _STREAMS[streams]()
    with lanes:
        trips = _RoundTrips(model, lanes, prefix, suffix, block_size)
        others = [trips.cache_of(tokens[-(i + 1) * prefix :][:prefix]) for i in range(2)]
        if missing is not None:
            lanes.job, lanes.awaited = WAITS[missing]
        for done in range(rounds):
            wrong, noticed, other = trips.run(tokens[done * prefix : (done + 1) * prefix + suffix], others[done % 2])
            counts["corrupt_blocks"] += wrong
            counts["corrupt_rounds"] += wrong > 0
            counts["noticed"] += noticed
            counts["other_answer"] += other
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "streams": streams,
        "missing": missing,
        "rounds": rounds,
        "blocks": rounds * size,
        **counts,
    }


class _RoundTrips:
    """A pool of two tables: home, where a prefix is computed, and away, where it comes back."""

    def __init__(self, model: Model, lanes: Streams, prefix: int, suffix: int, block_size: int) -> None:
        self.model, self.prefix, self.block_size = model, prefix, block_size
        self.size = prefix // block_size
        held = self.size + blocks_for(suffix, block_size)
        self.home, self.away = list(range(held)), list(range(held, 2 * held))
        self.pool = BlockPool(model.layout(block_size), 2 * held, device=model.device)
        self.fingerprint = model.fingerprint(block_size)
        self.transfer = Transfer(self.pool, lanes)
        self.tier = HostTier(2**30)
        self.transfer.open(self.tier, self.fingerprint)

    def cache_of(self, tokens: Sequence[int]) -> Tensor:
        """The rows of a prefix's cache, stored once with every wait, so that the copy lane has seen some compute."""
        self.model.prefill(tokens, self.pool, self.home, 0)
        self.transfer.offload(self.tier, self.home[: self.size], self._hashes(tokens)).wait()
        return self.pool.rows[self._rows(self.home)].clone()

    def run(self, tokens: Sequence[int], other: Tensor) -> tuple[int, bool, bool]:
        """One round trip → (corrupt blocks, whether the library noticed, whether the next token is another one).

        `other` is written, as compute would, by whoever owns `home` afterwards and whoever owned `away` before.
        """
        head, tail = tokens[: self.prefix], tokens[self.prefix :]
        self.model.prefill(head, self.pool, self.home, 0)
        computed = self.pool.rows[self._rows(self.home)].clone()
        right = int(self.model.prefill(tail, self.pool, self.home, self.prefix).argmax())
        leaving = self.transfer.offload(self.tier, self.home[: self.size], self._hashes(head))
        self.pool.rows[self._rows(self.home)] = other
        stored = leaving.wait()
        self.pool.rows[self._rows(self.away)] = other
        coming = self.transfer.reload(self.tier, self._hashes(head), self.away[: self.size])
        coming.wait_group(0)
        found = self.pool.rows[self._rows(self.away)].clone()
        answer = int(self.model.prefill(tail, self.pool, self.away, self.prefix).argmax())
        loaded = coming.wait()
        wrong = int((found != computed).view(self.size, -1).any(1).sum())
        return wrong, bool(stored.failures or loaded.failures), answer != right

    def _hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return block_hashes(self.fingerprint, tokens, self.block_size)

    def _rows(self, blocks: Sequence[int]) -> Tensor:
        index = torch.tensor(blocks[: self.size], device=self.pool.device)
        return self.pool.group_index(index, 0, self.pool.layout.layers)
