"""The segments of one folder: which there are, where in them a block lies, who was used last, what else is there.

Other processes may add files and remove them at any time. Does not know capacities, transfers, or who asks.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from kvlab.fingerprint import Fingerprint
from kvlab.tiers.lifetime import Lifetime
from kvlab.tiers.segment import SUFFIX, TEMPORARY, DamagedSegment, Header, stale

__all__ = ["Found", "Segment", "SegmentFolder", "examine", "segment_folder", "survey"]

Kind = Literal["segment", "damaged", "foreign", "being written", "abandoned"]


def segment_folder(path: Path) -> Path:
    """Where the segments of a disk tier at `path` are: a folder of our own, so that its permissions are ours to set."""
    return path / "segments"


@dataclass(frozen=True, eq=False)
class Found:
    """A file and what it is; `header` and `digest` (of the header) of a whole segment, else `why` it is none.

    "damaged": a segment of ours that is not what was written; "abandoned": a temporary whose writer is gone.
    """

    path: Path
    nbytes: int
    kind: Kind
    header: Header | None = None
    digest: int = 0
    why: str = ""


def examine(path: Path, nbytes: int) -> Found:
    """Look at a file that could be a segment. Raises OSError when it is gone or cannot be read."""
    try:
        header, digest = Header.read(path)
    except DamagedSegment as error:
        return Found(path, nbytes, "damaged", why=str(error))
    except ValueError as error:
        return Found(path, nbytes, "foreign", why=str(error))
    return Found(path, nbytes, "segment", header, digest)


def survey(folder: Path) -> list[Found]:
    """Every file of a segment folder, by name; nothing is changed. Raises OSError when the folder cannot be read."""
    dead, found = set(stale(folder)), []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            nbytes = path.stat().st_size
            if path.name.startswith(TEMPORARY):
                found.append(Found(path, nbytes, "abandoned" if path in dead else "being written"))
            elif path.suffix != SUFFIX:
                found.append(Found(path, nbytes, "foreign", why="not a kvlab segment"))
            else:
                found.append(_examine_any(path, nbytes))
    return found


def _examine_any(path: Path, nbytes: int) -> Found:
    try:
        return examine(path, nbytes)
    except FileNotFoundError:
        raise
    except OSError as error:  # a folder, or not ours to read
        return Found(path, nbytes, "foreign", why=error.strerror or str(error))


@dataclass(eq=False)
class Segment:
    """A whole file and what its header said when it was indexed."""

    path: Path
    header: Header
    digest: int
    nbytes: int
    live: set[bytes] = field(default_factory=set)  # its blocks that are in the index
    readers: int = 0

    @cached_property
    def fingerprint(self) -> Fingerprint | None:
        """What it was stored under; None when that has fields unknown here."""
        try:
            return Fingerprint(**self.header.fingerprint)
        except TypeError:
            return None


class SegmentFolder:
    """Owns the index of the segments in `path`, least recently used first; only blocks cut into `extents` are in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.extents: tuple[int, ...] = ()
        self._segments: OrderedDict[Path, Segment] = OrderedDict()
        self._index: dict[bytes, tuple[Segment, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(segment.nbytes for segment in self._segments.values())

    def __iter__(self) -> Iterator[Segment]:
        """A copy, so that segments can be removed meanwhile."""
        return iter(list(self._segments.values()))

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._index

    def __getitem__(self, block_hash: bytes) -> tuple[Segment, int]:
        """The segment that holds a block, and its place there. Raises KeyError."""
        return self._index[block_hash]

    def refresh(self) -> None:
        """Index segments that other processes have added since, forget those that are gone. Raises OSError."""
        there = {}
        for entry in os.scandir(self.path):
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    there[entry.name] = entry.stat()
        for segment in self:
            if segment.path.name not in there:
                self._forget(segment)
        known = {path.name for path in self._segments}
        for name in sorted(there.keys() - known, key=lambda name: there[name].st_mtime_ns):
            with contextlib.suppress(OSError):  # gone again, or not ours to read
                found = examine(self.path / name, there[name].st_size)
                if found.header is not None:
                    self.add(Segment(found.path, found.header, found.digest, found.nbytes))
                elif found.kind == "damaged":
                    found.path.unlink()  # it was whole when it was renamed; nobody can use it any more

    def add(self, segment: Segment) -> None:
        """Index a whole segment as the most recently used."""
        self._segments[segment.path] = segment
        if segment.header.extents == self.extents:
            for position, block_hash in enumerate(segment.header.hashes):
                self._index[block_hash] = (segment, position)
                segment.live.add(block_hash)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark the segments as used, that of the head last."""
        for block_hash in reversed(hashes):
            if block_hash in self._index:
                self._segments.move_to_end(self._index[block_hash][0].path)

    def victims(self, nbytes: int, protect: Collection[bytes]) -> list[Segment]:
        """The least recently used segments of `nbytes` together, none that is being read or holds one of `protect`."""
        keep, chosen = frozenset(protect), []
        for segment in self._segments.values():
            if nbytes <= 0:
                break
            if not segment.readers and not segment.live & keep:
                chosen.append(segment)
                nbytes -= segment.nbytes
        return chosen

    def sweep(self, lifetime: Lifetime) -> int:
        """Remove what is too old and not being read, by when its header says that it was written; returns the blocks.

        Not by the time of the file, which says when it was last used and which copying it would change.
        """
        swept = 0
        for segment in self:
            if not segment.readers and lifetime.over(segment.header.created):
                swept += len(segment.live)
                self.remove(segment)
        return swept

    def drop(self, block_hash: bytes, *, corrupt: bool) -> None:
        """Forget a block; a segment that is corrupt, or has no block left, is removed whole."""
        if block_hash in self._index:
            segment, _ = self._index.pop(block_hash)
            segment.live.discard(block_hash)
            if corrupt or not segment.live:
                self.remove(segment)

    def remove(self, segment: Segment) -> None:
        """Delete the file and forget it."""
        with contextlib.suppress(OSError):  # gone already, or no longer ours: either way it is not used again
            segment.path.unlink()
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        self._segments.pop(segment.path, None)
        for block_hash in segment.live:
            if self._index.get(block_hash, (None, 0))[0] is segment:
                del self._index[block_hash]
        segment.live.clear()
