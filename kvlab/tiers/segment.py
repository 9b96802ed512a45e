"""One file of KV blocks: its format, how it is written so that a crash leaves nothing half-done, how it is read.

    magic "kvlab.kv" | version u32 | json bytes u32 | json | hashes 32 B each | checksums u64 [group][block]
    | with a codec: stored lengths u64 [group][block] | xxh3_64 of all before u64 | zeros to 4 KiB
    | payload [group][block]

The JSON names fingerprint, extents, blocks, codec, when it was written, and perhaps a label. Integers are
little-endian. Nothing is unpickled. Written under a temporary name that the writer keeps locked; then fsync, rename,
fsync of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import lzma
import mmap
import os
import struct
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from kvlab.fingerprint import HASH_BYTES
from kvlab.streams import PAGE
from kvlab.tiers.base import Bytes, Extents
from kvlab.tiers.file_io import ends_in_memory, lock, read_into, write_from

if sys.platform != "win32":
    import fcntl

__all__ = [
    "SUFFIX",
    "TEMPORARY",
    "Codec",
    "DamagedSegment",
    "Header",
    "SegmentReader",
    "SegmentWriter",
    "confirm_header",
    "remove_stale",
    "stale",
]

SUFFIX = ".kv"
TEMPORARY = ".tmp-"
_MAGIC = b"kvlab.kv"
_VERSION = 1
_FIXED = struct.Struct("<8sII")
_MAX_JSON = 1 << 20
_READ_AHEAD_BYTES = 32 << 20  # from here on the kernel's read-ahead beats one direct read after another
_ABANDONED_S = 3600.0  # where files cannot be locked: a temporary this old has no writer

Codec = Literal["xz"]


class DamagedSegment(ValueError):  # noqa: N818
    """A kvlab segment that is not what was written."""


Table = npt.NDArray[np.uint64]  # [group][block]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@dataclass(eq=False)
class Header:
    """What a segment says of itself. `checksums` and `lengths` are uint64 [groups, blocks].

    `label`: what people call whose blocks these are, for listings; never compared, unlike the fingerprint.
    """

    fingerprint: Mapping[str, Any]
    extents: tuple[int, ...]
    hashes: list[bytes]
    codec: Codec | None
    created: float  # seconds since the epoch
    label: str
    checksums: Table
    lengths: Table

    @classmethod
    def new(
        cls,
        fingerprint: Mapping[str, Any],
        extents: Sequence[int],
        hashes: Sequence[bytes],
        codec: Codec | None,
        created: float = 0.0,
        label: str = "",
    ) -> Header:
        """A header for blocks that are yet to be written; lengths are final unless there is a codec."""
        lengths = np.repeat(np.array(extents, np.uint64)[:, None], len(hashes), axis=1)
        sums = np.zeros_like(lengths)
        return cls(dict(fingerprint), tuple(extents), list(hashes), codec, created, label, sums, lengths)

    @cached_property
    def _json(self) -> bytes:
        facts = {
            "fingerprint": self.fingerprint,
            "extents": self.extents,
            "blocks": len(self.hashes),
            "codec": self.codec,
            "created": self.created,
            **({"label": self.label} if self.label else {}),
        }
        return json.dumps(facts, sort_keys=True).encode()

    @cached_property
    def payload_start(self) -> int:
        """Offset of the first extent; known before anything is written."""
        tables = (2 if self.codec else 1) * self.checksums.nbytes
        return _aligned(_FIXED.size + len(self._json) + HASH_BYTES * len(self.hashes) + tables + 8)

    @property
    def offsets(self) -> Table:
        """Where each extent begins, uint64 [groups, blocks]: they follow each other."""
        ends = np.cumsum(self.lengths.ravel(), dtype=np.uint64).reshape(self.lengths.shape)
        return ends - self.lengths + np.uint64(self.payload_start)

    @property
    def file_bytes(self) -> int:
        """Size of the whole file; before writing with a codec, the most that is expected."""
        return self.payload_start + int(self.lengths.sum())

    def encode(self) -> bytes:
        """All bytes before the payload."""
        tables = [self.checksums, self.lengths] if self.codec else [self.checksums]
        body = _FIXED.pack(_MAGIC, _VERSION, len(self._json)) + self._json + b"".join(self.hashes)
        body += b"".join(table.astype("<u8").tobytes() for table in tables)
        return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(self.payload_start, b"\0")

    @classmethod
    def decode(cls, raw: bytes) -> Header:
        """Parse bytes that begin with a header. Raises ValueError saying what is wrong with it."""
        if len(raw) < _FIXED.size or raw[: len(_MAGIC)] != _MAGIC:
            raise ValueError("not a kvlab segment")
        _, version, json_bytes = _FIXED.unpack_from(raw)
        if version != _VERSION:
            raise ValueError(f"segment version {version}; this kvlab reads version {_VERSION}")
        try:
            facts = json.loads(raw[_FIXED.size : _FIXED.size + json_bytes])
            blocks, codec, extents = int(facts["blocks"]), facts["codec"], tuple(int(n) for n in facts["extents"])
            at = _FIXED.size + json_bytes
            hashes = [raw[at + HASH_BYTES * i : at + HASH_BYTES * (i + 1)] for i in range(blocks)]
            created, label = float(facts["created"]), str(facts.get("label", ""))
            header = cls.new(facts["fingerprint"], extents, hashes, codec, created, label)
            at += HASH_BYTES * blocks
            names = ("checksums", "lengths") if codec else ("checksums",)
            for name in names:
                table = np.frombuffer(raw, "<u8", header.checksums.size, at).astype(np.uint64)
                setattr(header, name, table.reshape(header.checksums.shape))
                at += table.nbytes
            (expected,) = struct.unpack_from("<Q", raw, at)
        except (KeyError, TypeError, ValueError, struct.error) as error:
            raise DamagedSegment(f"damaged segment header ({error})") from error
        if xxhash.xxh3_64_intdigest(raw[:at]) != expected:
            raise DamagedSegment("damaged segment header (its checksum differs)")
        return header

    @classmethod
    def read(cls, path: Path) -> tuple[Header, int]:
        """The header of a file and a digest of its bytes. Raises OSError, or ValueError if the file is not whole."""
        with path.open("rb", buffering=0) as file:
            raw = file.read(PAGE)
            if len(raw) >= _FIXED.size:
                json_bytes = min(_FIXED.unpack_from(raw)[2], _MAX_JSON)
                raw += file.read(json_bytes)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    facts = json.loads(raw[_FIXED.size : _FIXED.size + json_bytes])
                    tables = 8 * len(facts["extents"]) * (2 if facts["codec"] else 1)
                    raw += file.read(min(int(facts["blocks"]) * (HASH_BYTES + tables), os.fstat(file.fileno()).st_size))
            header = cls.decode(raw)
            size = os.fstat(file.fileno()).st_size
        if size != header.file_bytes:
            raise DamagedSegment(f"segment of {size} bytes; its header says {header.file_bytes}")
        return header, xxhash.xxh3_64_intdigest(header.encode())


def _whole_pages(header: Header) -> bool:
    """Whether each extent takes up whole pages of the file."""
    return header.codec is None and not any(extent % PAGE for extent in header.extents)


def stale(folder: Path) -> Iterator[Path]:
    """Temporaries whose writer is gone, each locked until the next is asked for; those of live writers are not ours."""
    for path in folder.glob(TEMPORARY + "*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if sys.platform == "win32" and time.time() - path.stat().st_mtime < _ABANDONED_S:
                continue
            if lock(file.fileno()):
                yield path


def remove_stale(folder: Path) -> int:
    """Remove temporaries whose writer is gone. Returns how many."""
    removed = 0
    for path in stale(folder):
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed


class SegmentWriter:
    """Writes one segment, from a temporary name to its final one. Owns the file until `finish` or `abandon`."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.header = header
        self.path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
        self._temporary: Path | None = None
        self._fd = -1
        self._end = header.payload_start  # with a codec: where the next extent goes
        self._missing = len(header.hashes) * len(header.extents)
        self.reserved_bytes = header.file_bytes  # with a codec the file ends up smaller

    def write(self, group: int, position: int, extents: Extents, sums: Sequence[int]) -> bool:
        """`extents` of `group` for the blocks from `position` on; True when the file is whole. Raises OSError."""
        if self._temporary is None:
            self._create()
        header, count = self.header, len(sums)
        header.checksums[group, position : position + count] = sums
        if header.codec is None:
            together = [extents.reshape(-1)] if isinstance(extents, np.ndarray) else extents
            self._write_at(int(header.offsets[group, position]), [extent.data for extent in together])
        else:
            for row, extent in enumerate(extents, start=position):
                packed = lzma.compress(extent, check=lzma.CHECK_NONE, preset=0)
                header.lengths[group, row] = len(packed)
                self._write_at(self._end, [memoryview(packed)])
                self._end += len(packed)
        self._missing -= count
        if self._missing == 0:
            self._finish()
        return self._missing == 0

    def _create(self) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        # Past the page cache where all writes are whole pages: faster, no core is kept busy, and nothing is held twice.
        if _whole_pages(self.header):
            flags |= getattr(os, "O_DIRECT", 0)
        # Somebody who cleans up may find the file before it is locked, and remove it: then it is made again.
        while self._temporary is None:
            temporary = self.path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
            try:
                self._fd = os.open(temporary, flags, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL or not flags & getattr(os, "O_DIRECT", 0):
                    raise
                flags &= ~os.O_DIRECT  # this file system has none
                temporary.unlink(missing_ok=True)
                continue
            if lock(self._fd) and temporary.exists():
                self._temporary = temporary
            else:
                os.close(self._fd)

    def _write_at(self, offset: int, sources: list[memoryview]) -> None:
        try:
            write_from(self._fd, offset, sources)
        except OSError as error:
            direct = getattr(os, "O_DIRECT", 0)
            if error.errno != errno.EINVAL or not (direct and fcntl.fcntl(self._fd, fcntl.F_GETFL) & direct):
                raise
            # Opened for direct writes, yet it does none of memory that lies so: then through the page cache.
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~direct)
            write_from(self._fd, offset, sources)

    def _finish(self) -> None:
        assert self._temporary is not None, "finished before it was begun"
        with mmap.mmap(-1, self.header.payload_start) as page:  # aligned, as direct writes want it
            page[:] = self.header.encode()
            with memoryview(page) as raw:
                self._write_at(0, [raw])
        os.fsync(self._fd)
        self._temporary.rename(self.path)
        os.close(self._fd)
        self._temporary, self._fd = None, -1

    def abandon(self) -> None:
        """Remove whatever has been written, under either name."""
        if self._fd >= 0:
            os.close(self._fd)
        for path in (self._temporary, self.path):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
        self._temporary, self._fd = None, -1


def confirm_header(path: Path, header: Header, digest: int) -> None:
    """Read the header of `path` again: raises ValueError when it is not `header`, of that digest, or OSError."""
    with path.open("rb", buffering=0) as file:
        raw = file.read(header.payload_start)
    if xxhash.xxh3_64_intdigest(raw) != digest:
        changed = Header.decode(raw)  # raises when it is damaged
        raise ValueError(f"{path.name} is another segment now, stored under {dict(changed.fingerprint)}")


class SegmentReader:
    """Reads extents of one segment: from the page cache if it is there, else past it where that is faster.

    `expected_bytes` is how much will be read of it; `in_place`: into extents, by `read_in_place`, else into buffers, by
    `read`. Comes after `confirm_header`.
    """

    def __init__(self, path: Path, header: Header, expected_bytes: int, *, in_place: bool) -> None:
        self._header = header
        self._offsets = header.offsets
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._direct = -1
        # In place, pages must end where extents do. What passes a buffer may be cut from whole pages there.
        pays = _whole_pages(header) if in_place else header.codec is None and expected_bytes < _READ_AHEAD_BYTES
        # The first page is read with every header; the last one tells how the payload came here.
        if pays and hasattr(os, "O_DIRECT") and not ends_in_memory(self._fd, header.file_bytes):
            with contextlib.suppress(OSError):  # not every file system has it
                self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(self, group: int, position: int, count: int, buffer: Tensor) -> Tensor:
        """Extents of `group` of `count` blocks from `position` → where in `buffer` they are. OSError, ValueError."""
        header, extent = self._header, self._header.extents[group]
        start = int(self._offsets[group, position])
        length = int(header.lengths[group, position : position + count].sum())
        if header.codec is None:
            lead = start % PAGE if self._direct >= 0 else 0
            wanted = _aligned(lead + length) if self._direct >= 0 else length
            self._fill([buffer.numpy().data[:wanted]], start - lead, lead + length)
            return buffer[lead : lead + length]
        packed = memoryview(bytearray(length))
        self._fill([packed], start, length)
        for row, size in enumerate(header.lengths[group, position : position + count].tolist()):
            try:
                whole = lzma.LZMADecompressor().decompress(packed[:size], max_length=extent + 1)
            except lzma.LZMAError as error:
                raise ValueError(f"damaged xz data ({error})") from error
            if len(whole) != extent:
                raise ValueError(f"xz data of {len(whole)} bytes or more, where {extent} were stored")
            buffer.numpy()[row * extent : (row + 1) * extent] = np.frombuffer(whole, np.uint8)
            packed = packed[size:]
        return buffer[: count * extent]

    def read_in_place(self, group: int, position: int, extents: list[Bytes]) -> None:
        """Fill `extents` with those of `group` from block `position` on; not with a codec. OSError."""
        length = len(extents) * self._header.extents[group]
        self._fill([extent.data for extent in extents], int(self._offsets[group, position]), length)

    def _fill(self, targets: list[memoryview], offset: int, length: int) -> None:
        """Read at least `length` bytes from `offset` into `targets`; raises OSError when the file is shorter."""
        if self._direct >= 0:
            try:
                got = read_into(self._direct, offset, targets, length)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Opened for direct reads, yet it does none: of memory that lies so, or of what follows a short one.
                os.close(self._direct)
                self._direct = -1
        if self._direct < 0:
            got = read_into(self._fd, offset, targets, length)
        if got < length:
            raise OSError(errno.EIO, f"short read: {got} of {length} bytes at {offset}")

    def close(self) -> None:
        """Close the file."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1
