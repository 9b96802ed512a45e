"""Tiers without bytes: which blocks a tier would hold, and when its link would have moved them.

Behaves like `HostTier`: least recently used out first, a chain's tail before its head, nothing that is being read.
A real disk tier evicts whole segments of blocks; here it evicts block by block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from kvlab.machine import Link

__all__ = ["BilledTier", "LinkClock"]


@dataclass
class LinkClock:
    """One direction of a link: transfers follow each other, and `free_s` is when the last one is over."""

    link: Link
    layers: int
    free_s: float = 0.0
    busy_s: float = 0.0
    moved_bytes: int = 0

    def wait_s(self, now_s: float) -> float:
        """How long a transfer that is asked for now waits."""
        return max(0.0, self.free_s - now_s)

    def book(self, total_bytes: int, blocks: int, not_before_s: float) -> tuple[float, float]:
        """Bill a transfer that may begin at `not_before_s`; returns when it begins and ends."""
        begin_s = max(self.free_s, not_before_s)
        took_s = self.link.transfer_s(total_bytes, blocks, self.layers)
        self.free_s = begin_s + took_s
        self.busy_s += took_s
        self.moved_bytes += total_bytes
        return begin_s, self.free_s


class BilledTier:
    """Block names within `capacity_blocks`, behind a link of two directions. Owns its index and both link clocks.

    Replicas that are given the same one share what it holds and its link.
    """

    def __init__(self, name: str, capacity_blocks: int, load: Link, store: Link, layers: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"the {name} tier holds {capacity_blocks} blocks; enlarge it, or leave it out")
        self.name, self.capacity_blocks = name, capacity_blocks
        self.load_clock, self.store_clock = LinkClock(load, layers), LinkClock(store, layers)
        self.evicted_blocks = 0
        # When each block's store is over; least recently used first.
        self._ready_s: OrderedDict[bytes, float] = OrderedDict()
        self._readers: Counter[bytes] = Counter()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._ready_s

    def __len__(self) -> int:
        return len(self._ready_s)

    def missing(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Those that it does not hold."""
        return [block_hash for block_hash in hashes if block_hash not in self._ready_s]

    def ready_s(self, hashes: Sequence[bytes]) -> float:
        """When the stores of all these blocks are over."""
        return max(map(self._ready_s.__getitem__, hashes))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a chain as used just now, its head last."""
        for block_hash in reversed(hashes):
            if block_hash in self._ready_s:
                self._ready_s.move_to_end(block_hash)

    def victims(self, blocks: int, protect: Collection[bytes] = ()) -> list[bytes]:
        """What would leave for `blocks` more: least recently used first, nothing being read or in `protect`."""
        need = blocks - (self.capacity_blocks - len(self._ready_s))
        if need <= 0:
            return []
        keep = frozenset(protect)
        idle = (h for h in self._ready_s if h not in keep and h not in self._readers)
        return list(islice(idle, need))

    def make_room(self, hashes: Sequence[bytes], protect: Collection[bytes] = ()) -> list[bytes]:
        """Evict for `hashes`; returns the leading ones that fit now."""
        for block_hash in self.victims(len(hashes), protect):
            del self._ready_s[block_hash]
            self.evicted_blocks += 1
        return list(hashes[: self.capacity_blocks - len(self._ready_s)])

    def put(self, hashes: Sequence[bytes], ready_s: float) -> None:
        """Hold `hashes`, for which there is room, from `ready_s` on."""
        for block_hash in reversed(hashes):
            self._ready_s[block_hash] = ready_s

    def pin(self, hashes: Sequence[bytes]) -> None:
        """Keep blocks while they are read."""
        self._readers.update(hashes)

    def unpin(self, hashes: Sequence[bytes]) -> None:
        """Let go of them."""
        for block_hash in hashes:
            self._readers[block_hash] -= 1
            if not self._readers[block_hash]:
                del self._readers[block_hash]
