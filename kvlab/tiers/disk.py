"""A folder of segment files as a tier: survives crashes, is shared between processes, evicts whole segments.

Cached prompts are private: files are readable by their owner alone. Does not know host copies or the pool.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import numpy as np
import xxhash
from torch import Tensor

from kvlab.fingerprint import HASH_BYTES, Fingerprint
from kvlab.streams import Streams
from kvlab.tiers.base import (
    Bytes,
    Counters,
    Extents,
    Geometry,
    Load,
    Piece,
    Store,
    Tier,
    TierError,
    checksum,
    in_pieces,
    whole_bytes,
)
from kvlab.tiers.file_io import sync_folder
from kvlab.tiers.lifetime import Lifetime
from kvlab.tiers.segment import Codec, Header, SegmentReader, SegmentWriter, confirm_header, remove_stale
from kvlab.tiers.segment_folder import Segment, SegmentFolder, segment_folder

__all__ = ["DiskTier"]

_SEGMENT_BYTES = 64 << 20  # payload of one file: what is evicted, or lost to one bad byte, at a time
_LAST_BYTES = 4 << 20  # the last read of a load: little to check when the disk has nothing left to do


@dataclass
class _DiskStore(Store):
    tier: DiskTier = field(kw_only=True)
    writers: list[SegmentWriter] = field(kw_only=True)
    failed: OSError | None = field(kw_only=True, default=None)

    def write(self, piece: Piece, extents: Extents) -> None:
        if self.failed is not None:
            return  # `seal` says why
        writer = self.writers[piece.part]
        try:
            hashes = self.hashes[piece.first : piece.first + piece.count]
            sums = [checksum(extent, h, piece.group) for extent, h in zip(extents, hashes, strict=True)]
            writer.write(piece.group, piece.position, extents, sums)
        except OSError as error:
            self.failed = error

    def seal(self) -> None:
        if self.failed is None:
            sync_folder(self.tier.folder)
        else:
            raise self.tier._error("write", self.failed) from self.failed

    def publish(self) -> None:
        self.tier._publish(self)

    def abandon(self) -> None:
        self.tier._abandon(self)


@dataclass
class _DiskLoad(Load):
    segments: list[Segment] = field(kw_only=True)
    places: list[tuple[Segment, int]] = field(kw_only=True)
    readers: dict[int, SegmentReader] = field(kw_only=True, default_factory=dict)

    def checksum(self, group: int, block: int) -> int:
        segment, position = self.places[block]
        return int(segment.header.checksums[group, position])

    def _reader(self, part: int) -> SegmentReader:
        if part not in self.readers:
            segment = self.segments[part]
            # Here, before the first read: asked for while a large one is under way, these few bytes would wait for it.
            confirm_header(segment.path, segment.header, segment.digest)
            expected = sum(piece.nbytes for piece in self.pieces if piece.part == part)
            self.readers[part] = SegmentReader(segment.path, segment.header, expected, in_place=self.in_place)
        return self.readers[part]

    def read(self, piece: Piece, buffer: Tensor) -> Tensor:
        return self._reader(piece.part).read(piece.group, piece.position, piece.count, buffer)

    def read_in_place(self, piece: Piece, extents: list[Bytes]) -> None:
        self._reader(piece.part).read_in_place(piece.group, piece.position, extents)

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()
        for segment in self.segments:
            segment.readers -= 1
        self.readers, self.segments = {}, []


class DiskTier(Tier):
    """Segments under `path`, at most `capacity_bytes` of files; codec "xz" trades time for space (a truly slow tier).

    `ttl_s`: seconds on `clock` (since the epoch, as other processes' files are stamped by it too) after which a stored
    block is a miss; its file goes with the next load or store. `label` is kept with what is stored, for listings.
    Owns its index, of files that other processes may add to and remove. Evicts the least recently used segment.
    """

    def __init__(
        self,
        path: str | Path,
        capacity_bytes: int,
        *,
        codec: Codec | None = None,
        ttl_s: float | None = None,
        label: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not isinstance(path, str | PathLike):
            raise ValueError(f"path is {path!r:.60}; expected the path of a folder, which need not exist yet")
        if codec not in (None, "xz"):
            raise ValueError(f"codec is {codec!r}; expected None or 'xz'")
        if not isinstance(label, str):
            raise ValueError(f"label is {label!r:.60}; expected a str")
        self.name = codec or "disk"
        self.capacity_bytes = whole_bytes(capacity_bytes)
        self.counters = Counters()
        self.folder = segment_folder(Path(path))
        self.codec: Codec | None = codec
        self.label = label
        self._lifetime = Lifetime(ttl_s, clock)
        self._geometry: Geometry | None = None
        self._index = SegmentFolder(self.folder)
        self._reserved_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the files, those being written included."""
        return self._reserved_bytes + self._index.nbytes

    def open(self, geometry: Geometry, streams: Streams) -> None:  # noqa: ARG002
        """Make the folder, clear away what dead writers left, prove that it can be written, index what is there.

        Raises TierError when it cannot, ValueError when it is open for blocks that are cut otherwise.
        """
        if self._geometry not in (None, geometry):
            raise ValueError(f"{self.folder} is open for {self._geometry}, not {geometry}; use another DiskTier")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            remove_stale(self.folder)
            # One of two extents: it never becomes a segment that others could see.
            probe = SegmentWriter(self.folder, Header.new({}, (16, 16), [bytes(HASH_BYTES)], None))
            try:
                probe.write(0, 0, np.zeros((1, 16), np.uint8), [0])
            finally:
                probe.abandon()
        except OSError as error:
            raise self._error("open", error) from error
        self._geometry, self._index.extents = geometry, geometry.extents
        self.refresh()

    def refresh(self) -> None:
        """Index segments that other processes have added since, forget those that are gone, remove those too old."""
        self._index.refresh()
        self._sweep()

    def _sweep(self) -> None:
        self.counters.expired_blocks += self._index.sweep(self._lifetime)

    @property
    def _open_geometry(self) -> Geometry:
        if self._geometry is None:
            raise ValueError("this tier is not open; call Transfer.open(tier) first")
        return self._geometry

    def contains(self, block_hash: bytes, fingerprint: Fingerprint) -> bool:
        """Whether the block is here, not too old, and stored under this fingerprint."""
        if block_hash not in self._index:
            return False
        segment, _ = self._index[block_hash]
        return segment.fingerprint == fingerprint and not self._lifetime.over(segment.header.created)

    def differences(self, fingerprint: Fingerprint) -> list[str]:
        """Fields in which the most similar stored fingerprint differs; "extents" when blocks are cut otherwise."""
        found = []
        for segment in self._index:
            other = [] if segment.header.extents == self._open_geometry.extents else ["extents"]
            found.append(fingerprint.differences(segment.header.fingerprint) + other)
        return min(found, key=len, default=[])

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark the segments as used, that of the head last."""
        self._index.touch(hashes)

    def victims(self, nbytes: int, protect: Collection[bytes] = ()) -> list[bytes]:
        """The blocks of the least recently used segments that would make room for `nbytes` more."""
        return [block_hash for segment in self._victims(nbytes, protect) for block_hash in segment.live]

    def _victims(self, nbytes: int, protect: Collection[bytes]) -> list[Segment]:
        return self._index.victims(self.used_bytes + nbytes - self.capacity_bytes, protect)

    def reserve(self, hashes: Sequence[bytes], fingerprint: Fingerprint, protect: Collection[bytes] = ()) -> Store:
        """Segments for the leading blocks that fit, after eviction."""
        try:
            self.refresh()  # what other processes have written counts against the capacity as well
        except OSError as error:
            raise self._error("write", error) from error
        geometry, facts, now = self._open_geometry, fingerprint.to_dict(), self._lifetime.clock()

        def header_of(hashes: Sequence[bytes]) -> Header:
            return Header.new(facts, geometry.extents, hashes, self.codec, now, self.label)

        most = max(1, _SEGMENT_BYTES // geometry.block_bytes)
        headers = [header_of(hashes[first : first + most]) for first in range(0, len(hashes), most)]
        for segment in self._victims(sum(header.file_bytes for header in headers), protect):
            self.counters.evicted_blocks += len(segment.live)
            self._index.remove(segment)
        writers: list[SegmentWriter] = []
        runs: list[tuple[int, int, int, int]] = []
        fits: list[bytes] = []
        for header in headers:
            room = self.capacity_bytes - self.used_bytes
            if header.file_bytes > room:
                count = max(0, room - header.payload_start) // geometry.block_bytes
                header = header_of(header.hashes[:count])
            if not header.hashes:
                break
            runs.append((len(fits), len(header.hashes), len(writers), 0))
            writers.append(SegmentWriter(self.folder, header))
            fits += header.hashes
            self._reserved_bytes += writers[-1].reserved_bytes
        # Segment by segment, so that each is synced while the next is gathered.
        pieces = [piece for run in runs for piece in in_pieces([run], geometry.extents, geometry.piece_bytes)]
        return _DiskStore(fits, pieces, tier=self, writers=writers)

    def _publish(self, store: _DiskStore) -> None:
        for writer in reversed(store.writers):  # the head of the chain becomes the most recently used
            self._reserved_bytes -= writer.reserved_bytes
            nbytes, header = writer.header.file_bytes, writer.header
            self._index.add(Segment(writer.path, header, xxhash.xxh3_64_intdigest(header.encode()), nbytes))
            self.counters.stored_bytes += nbytes
        self.counters.stored_blocks += len(store.hashes)

    def _abandon(self, store: _DiskStore) -> None:
        for writer in store.writers:
            writer.abandon()
            self._reserved_bytes -= writer.reserved_bytes

    def load(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> Load:
        """Pieces that lie together in one file; each file is opened, and its header checked again, when it is read.

        A block that `contains` has just found is here, even if its time has run out meanwhile.
        """
        places = []
        for block_hash in hashes:
            if block_hash not in self._index or self._index[block_hash][0].fingerprint != fingerprint:
                raise KeyError(f"block {block_hash.hex()[:16]} is not in the {self.name} tier under this fingerprint")
            places.append(self._index[block_hash])
        segments: list[Segment] = []
        runs: list[tuple[int, int, int, int]] = []
        for block, (segment, position) in enumerate(places):
            if not segments or segments[-1] is not segment:
                segments.append(segment)
                segment.readers += 1
                with contextlib.suppress(OSError):
                    os.utime(segment.path, ns=(time.time_ns(),) * 2)  # how recently it was used outlives the process
            if runs and (runs[-1][2], runs[-1][3] + runs[-1][1]) == (len(segments) - 1, position):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, *runs[-1][2:])
            else:
                runs.append((block, 1, len(segments) - 1, position))
        self._sweep()  # only now that these have a reader
        geometry = self._open_geometry
        # What is packed must be unpacked on its way.
        in_place = geometry.in_place_bytes > 0 and all(segment.header.codec is None for segment in segments)
        if in_place:
            pieces = in_pieces(runs, geometry.extents, geometry.in_place_bytes, _LAST_BYTES)
        else:
            pieces = in_pieces(runs, geometry.extents, geometry.piece_bytes)
        return _DiskLoad(pieces, in_place=in_place, segments=segments, places=places)

    def drop(self, block_hash: bytes, *, corrupt: bool = False) -> None:
        """Forget a block; a segment that is corrupt, or has no block left, is removed whole."""
        self._index.drop(block_hash, corrupt=corrupt)

    def clear(self) -> None:
        """Remove every segment that is not being read."""
        for segment in self._index:
            if not segment.readers:
                self._index.remove(segment)

    def drop_pages(self) -> bool:
        """Write all segments out and drop them from the page cache, for honest cold reads; False where it cannot."""
        if not hasattr(os, "posix_fadvise"):
            return False
        for segment in self._index:
            fd = os.open(segment.path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        return True

    def _error(self, doing: str, error: OSError) -> TierError:
        return TierError(
            error.errno,
            f"cannot {doing} the {self.name} tier in {self.folder}: {error.strerror or error}; "
            "it needs a writable folder with free space",
        )
