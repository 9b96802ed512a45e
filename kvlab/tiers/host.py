"""Host memory as a tier: slots in power-of-two slabs, where copies land and leave directly.

Pinned where the streams pin. Does not know files.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvlab.fingerprint import Fingerprint
from kvlab.streams import Streams
from kvlab.tiers.base import Counters, Extents, Geometry, Load, Piece, Store, Tier, checksum, in_pieces, whole_bytes
from kvlab.tiers.lifetime import Lifetime

__all__ = ["HostTier"]

# Pinned allocations are rounded up to a power of two, and one huge one fails where many small ones do not.
_SLAB_BYTES = 64 << 20


@dataclass(eq=False)
class _Slab:
    """Memory [group][slot][extent] of slots [first, first + slots): a run of slots is contiguous within each group."""

    memory: Tensor
    first: int
    slots: int


@dataclass
class _HostStore(Store):
    tier: HostTier = field(kw_only=True)
    slots: list[int] = field(kw_only=True)
    fingerprint: Fingerprint = field(kw_only=True)

    def write(self, piece: Piece, extents: Extents) -> None:
        sums = self.tier._checksums
        for block, extent in enumerate(extents, start=piece.first):
            sums[self.slots[block], piece.group] = checksum(extent, self.hashes[block], piece.group)

    def publish(self) -> None:
        self.tier._publish(self)

    def abandon(self) -> None:
        self.tier._release(self.slots)


@dataclass
class _HostLoad(Load):
    tier: HostTier = field(kw_only=True)
    slots: list[int] = field(kw_only=True)

    def checksum(self, group: int, block: int) -> int:
        return self.tier._checksums[self.slots[block], group]

    def close(self) -> None:
        self.tier._unread(self.slots)
        self.slots = []


class HostTier(Tier):
    """`capacity_bytes` of host memory, allocated on demand and kept. Owns slabs and index; evicts the LRU block.

    `verify` keeps a checksum per (block, group) and checks it at load, which about doubles the time of a copy.
    `ttl_s`: seconds on `clock` after which a stored block is a miss; its room is free with the next load or store.
    Plain dicts by slot instead of one object per block: a thousand objects an offload would wake the garbage collector.
    """

    name = "host"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        verify: bool = True,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity_bytes = whole_bytes(capacity_bytes)
        self.counters = Counters()
        self._verify = verify
        self._lifetime = Lifetime(ttl_s, clock)
        self._geometry: Geometry | None = None
        self._slabs: list[_Slab] = []
        self._free: list[int] = []  # a heap, so that the lowest slots go first and runs stay long
        self._taken = 0
        self._index: OrderedDict[bytes, int] = OrderedDict()  # hash → slot, least recently used first
        self._fingerprints: dict[int, Fingerprint] = {}  # of each slot in the index
        self._stored_s: dict[bytes, float] = {}  # of each block in the index, in the order of storing
        self._checksums: dict[tuple[int, int], int] = {}  # of (slot, group)
        self._readers: dict[int, int] = {}  # how many loads use a slot
        self._dropped: set[int] = set()  # no longer in the index, to be freed after the last reader

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots taken, those being filled included."""
        return self._taken * self._open_geometry.block_bytes if self._geometry else 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of host memory held, used or not."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def _open_geometry(self) -> Geometry:
        if self._geometry is None:
            raise ValueError("this tier is not open; call Transfer.open first")
        return self._geometry

    def open(self, geometry: Geometry, streams: Streams) -> None:
        """Raises ValueError when not even one block fits, or when it is open for blocks that are cut otherwise."""
        if self._geometry is not None and self._geometry.extents != geometry.extents:
            raise ValueError(
                f"the host tier is open for extents of {self._geometry.extents} bytes, not {geometry.extents}; "
                "use another HostTier"
            )
        if geometry.block_bytes > self.capacity_bytes:
            raise ValueError(
                f"a host tier of {self.capacity_bytes} bytes holds no block of {geometry.block_bytes} bytes; enlarge it"
            )
        self._geometry, self._streams = geometry, streams
        self._bases = [sum(geometry.extents[:group]) for group in range(len(geometry.extents))]

    def contains(self, block_hash: bytes, fingerprint: Fingerprint) -> bool:
        """Whether the block is here under this fingerprint, and not too old."""
        slot = self._index.get(block_hash)
        if slot is None or self._lifetime.over(self._stored_s[block_hash]):
            return False
        stored = self._fingerprints[slot]
        return stored is fingerprint or stored == fingerprint

    def differences(self, fingerprint: Fingerprint) -> list[str]:
        """Fields in which the most similar stored fingerprint differs."""
        stored = set(self._fingerprints.values())
        return min((fingerprint.differences(other.to_dict()) for other in stored), key=len, default=[])

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark as used, head last."""
        for block_hash in reversed(hashes):
            if block_hash in self._index:
                self._index.move_to_end(block_hash)

    def victims(self, nbytes: int, protect: Collection[bytes] = ()) -> list[bytes]:
        """Least recently used blocks to evict for `nbytes` more; as many as there are, if those are too few."""
        block_bytes = self._open_geometry.block_bytes
        need = -(-nbytes // block_bytes) - len(self._free)
        allocated = self.allocated_bytes
        while need > 0 and (slab_bytes := self._next_slab_bytes(allocated)):
            need -= slab_bytes // block_bytes
            allocated += slab_bytes
        keep = frozenset(protect)
        idle = (h for h, slot in self._index.items() if slot not in self._readers and h not in keep)
        return list(itertools.islice(idle, max(0, need)))

    def _next_slab_bytes(self, allocated: int) -> int:
        """The largest power of two within what is left of the capacity; 0 when no block fits in that."""
        block_bytes = self._open_geometry.block_bytes
        left = self.capacity_bytes - allocated
        if left < block_bytes:
            return 0
        most = max(_SLAB_BYTES, 1 << (block_bytes - 1).bit_length())
        # The last block may fit what is left, but no power of two in it; there, exact beats wasted.
        return max(min(most, 1 << (left.bit_length() - 1)), block_bytes)

    def reserve(self, hashes: Sequence[bytes], fingerprint: Fingerprint, protect: Collection[bytes] = ()) -> Store:
        """Slots for the leading blocks that fit; what is too old goes first, then new memory, then eviction."""
        self._sweep()
        block_bytes = self._open_geometry.block_bytes
        while len(self._free) < len(hashes) and (nbytes := self._next_slab_bytes(self.allocated_bytes)):
            first = self._slabs[-1].first + self._slabs[-1].slots if self._slabs else 0
            self._slabs.append(_Slab(self._streams.buffer(nbytes), first, nbytes // block_bytes))
            self._free += range(first, first + nbytes // block_bytes)  # larger than all before: still a heap
        if len(self._free) < len(hashes):
            for block_hash in self.victims(len(hashes) * block_bytes, protect):
                self.counters.evicted_blocks += 1
                self.drop(block_hash)
        fits = list(hashes[: len(self._free)])
        slots = [heapq.heappop(self._free) for _ in fits]
        self._taken += len(slots)
        return _HostStore(
            fits, self._pieces(slots), works=self._verify, tier=self, slots=slots, fingerprint=fingerprint
        )

    def _pieces(self, slots: Sequence[int]) -> list[Piece]:
        """One piece per group and run of neighbouring slots, with its memory."""
        runs: list[tuple[int, int, int, int]] = []
        starts = [slab.first for slab in self._slabs]
        begin = part = place = end = 0  # of the current run; `end` is where its slab ends
        following = -1
        for block, slot in enumerate(slots):
            if slot != following or slot == end:
                if block:
                    runs.append((begin, block - begin, part, place))
                part = bisect.bisect_right(starts, slot) - 1
                begin, place, end = block, slot - starts[part], starts[part] + self._slabs[part].slots
            following = slot + 1
        if slots:
            runs.append((begin, len(slots) - begin, part, place))
        extents = self._open_geometry.extents
        pieces = in_pieces(runs, extents, self.capacity_bytes)
        for piece in pieces:
            slab = self._slabs[piece.part]
            start = slab.slots * self._bases[piece.group] + piece.position * extents[piece.group]
            piece.memory = slab.memory[start : start + piece.nbytes]
        return pieces

    def _publish(self, store: _HostStore) -> None:
        now = self._lifetime.clock()
        # In reverse: the head of the chain becomes the most recently used.
        for block_hash, slot in zip(reversed(store.hashes), reversed(store.slots), strict=True):
            if block_hash in self._index:  # stored twice at the same time; the first one stays
                self._release([slot])
            else:
                self._index[block_hash] = slot
                self._fingerprints[slot] = store.fingerprint
                self._stored_s[block_hash] = now
        self.counters.stored_blocks += len(store.hashes)
        self.counters.stored_bytes += len(store.hashes) * self._open_geometry.block_bytes

    def load(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> Load:
        """The blocks' own memory, in runs; nothing is read.

        A block that `contains` has just found is here, even if its time has run out meanwhile.
        """
        index, stored, readers = self._index, self._fingerprints, self._readers
        slots = [index.get(block_hash, -1) for block_hash in hashes]
        for block_hash, slot in zip(hashes, slots, strict=True):
            if slot < 0 or (stored[slot] is not fingerprint and stored[slot] != fingerprint):
                raise KeyError(f"block {block_hash.hex()[:16]} is not in the host tier under this fingerprint")
        for slot in slots:
            readers[slot] = readers.get(slot, 0) + 1
        self._sweep()  # only now that these have a reader
        return _HostLoad(self._pieces(slots), checked=self._verify, tier=self, slots=slots)

    def _unread(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if slot in self._dropped:
                    self._dropped.remove(slot)
                    self._release([slot])

    def drop(self, block_hash: bytes, *, corrupt: bool = False) -> None:  # noqa: ARG002
        """Forget one block; memory beside it is no worse for it."""
        slot = self._index.pop(block_hash, None)
        if slot is not None:
            del self._fingerprints[slot], self._stored_s[block_hash]
            if slot in self._readers:
                self._dropped.add(slot)
            else:
                self._release([slot])

    def clear(self) -> None:
        """Forget every block that is not being read; the memory stays allocated for reuse."""
        for block_hash in [h for h, slot in self._index.items() if slot not in self._readers]:
            self.drop(block_hash)

    def _sweep(self) -> None:
        """Drop what is too old, in the order of storing: it ends at the first that is not."""
        while self._stored_s and self._lifetime.over(self._stored_s[oldest := next(iter(self._stored_s))]):
            self.counters.expired_blocks += 1
            self.drop(oldest)

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            heapq.heappush(self._free, slot)
            self._taken -= 1
