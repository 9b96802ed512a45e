"""An emulated link in front of a tier: real bytes move, then it waits until such a link would have delivered them.

One busy-until clock per direction, so that transfers at the same time share the link. Always labelled "emulated".
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from kvlab.fingerprint import Fingerprint
from kvlab.streams import Streams
from kvlab.tiers.base import Counters, Geometry, Load, Store, Tier
from kvlab.units import format_gb_per_s

__all__ = ["LinkTier"]


class LinkTier(Tier):
    """`tier` behind a link: `gb_per_s` (1e9 bytes a second) each way, `latency_s` per transfer. Owns two clocks."""

    emulated = True

    def __init__(self, tier: Tier, gb_per_s: float, latency_s: float = 0.0) -> None:
        if not isinstance(tier, Tier):
            raise ValueError(f"tier is {tier!r:.60}; expected the tier behind the link, such as HostTier(2**30)")
        if not (isinstance(gb_per_s, int | float) and gb_per_s > 0):
            raise ValueError(f"gb_per_s is {gb_per_s!r}; expected a number above 0, of 1e9 bytes a second")
        if not (isinstance(latency_s, int | float) and latency_s >= 0):
            raise ValueError(f"latency_s is {latency_s!r}; expected 0 or more seconds")
        self.tier, self.gb_per_s, self.latency_s = tier, gb_per_s, latency_s
        self.name = f"{tier.name} behind an emulated {format_gb_per_s(gb_per_s)} link"
        self._load_free_s = self._store_free_s = 0.0  # perf_counter instants from which each direction is idle

    @property
    def capacity_bytes(self) -> int:  # type: ignore[override]
        """That of the tier behind the link."""
        return self.tier.capacity_bytes

    @property
    def counters(self) -> Counters:  # type: ignore[override]
        """Those of the tier behind the link."""
        return self.tier.counters

    @property
    def used_bytes(self) -> int:
        """Those of the tier behind the link."""
        return self.tier.used_bytes

    @property
    def unlinked(self) -> Tier:
        """The tier behind the link."""
        return self.tier.unlinked

    def open(self, geometry: Geometry, streams: Streams) -> None:
        """Open the tier behind the link."""
        self.tier.open(geometry, streams)

    def reserve(self, hashes: Sequence[bytes], fingerprint: Fingerprint, protect: Collection[bytes] = ()) -> Store:
        """Room behind the link; the store is over when its last byte would have arrived there."""
        store = self.tier.reserve(hashes, fingerprint, protect)
        start = max(time.perf_counter(), self._store_free_s)
        self._store_free_s = start + sum(piece.nbytes for piece in store.pieces) / (self.gb_per_s * 1e9)
        if store.pieces:
            store.due_s = self._store_free_s + self.latency_s
        return store

    def load(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> Load:
        """A load whose pieces arrive one after another at the link's pace."""
        load = self.tier.load(hashes, fingerprint)
        arrives = max(time.perf_counter(), self._load_free_s)
        for piece in load.pieces:
            arrives += piece.nbytes / (self.gb_per_s * 1e9)
            piece.due_s = arrives + self.latency_s
        self._load_free_s = arrives
        return load

    def look_up(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> None:
        """Ask the tier; look-ups cost no time."""
        self.tier.look_up(hashes, fingerprint)

    def contains(self, block_hash: bytes, fingerprint: Fingerprint) -> bool:
        """Ask the tier; look-ups cost no time."""
        return self.tier.contains(block_hash, fingerprint)

    def differences(self, fingerprint: Fingerprint) -> list[str]:
        """Ask the tier."""
        return self.tier.differences(fingerprint)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Tell the tier."""
        self.tier.touch(hashes)

    def victims(self, nbytes: int, protect: Collection[bytes] = ()) -> list[bytes]:
        """Ask the tier."""
        return self.tier.victims(nbytes, protect)

    def drop(self, block_hash: bytes, *, corrupt: bool = False) -> None:
        """Tell the tier."""
        self.tier.drop(block_hash, corrupt=corrupt)

    def clear(self) -> None:
        """Tell the tier."""
        self.tier.clear()

    def drop_pages(self) -> bool:
        """Tell the tier."""
        return self.tier.drop_pages()
