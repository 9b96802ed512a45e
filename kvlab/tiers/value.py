"""One KV block as values of a server: its format, its keys, and where in which value each layer group's extent lies.

    magic "kvlab.bk" | version u16 | groups u16 | facts bytes u32 | created f64 | block hash 32 B
    | SHA-256 of the facts 32 B | checksums u64 [group] | xxh3_64 of all before u64 | facts | payload [group]

`created`: seconds since the epoch. The facts are JSON: fingerprint and extents. Integers are little-endian, and nothing
is unpickled. What would be longer than VALUE_BYTES goes on in further values; the first one, with the header, is
written last, so that a block is not found before it is whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from kvlab.fingerprint import Fingerprint
from kvlab.tiers.base import Bytes

__all__ = ["VALUE_BYTES", "BlockForm", "BlockHeader", "BlockKeys", "Range"]

VALUE_BYTES = 4 << 20  # payload of one value: below some 200 KiB each reply costs too much, above 4 MiB a server slows
_MAGIC = b"kvlab.bk"
_VERSION = 1
_FIXED = struct.Struct("<8sHHId32s32s")


def value_count(extents: Sequence[int]) -> int:
    """How many values a block takes."""
    return -(-sum(extents) // VALUE_BYTES)


@dataclass(frozen=True)
class BlockKeys:
    """The names of blocks' values in a `namespace`; blocks that are cut otherwise have others."""

    namespace: str
    extents: tuple[int, ...]

    @cached_property
    def _cut(self) -> str:
        return hashlib.sha256(repr((_VERSION, self.extents)).encode()).hexdigest()[:8]

    def of(self, block_hash: bytes) -> list[bytes]:
        """The keys of a block's values, in order."""
        first = f"{self.namespace}:{block_hash.hex()}:{self._cut}".encode()
        return [first, *(b"%b:%d" % (first, part) for part in range(1, value_count(self.extents)))]


@dataclass(frozen=True)
class Range:
    """Bytes [start, stop) of a block's value number `part`."""

    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class BlockHeader:
    """What a block says of itself; `digest` is that of its facts, `raw` what it was read from, without the facts."""

    block_hash: bytes
    digest: bytes
    created: float
    facts_bytes: int
    checksums: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True)
class BlockForm:
    """The form of all blocks that are stored under one fingerprint and cut into the same `extents`."""

    fingerprint: Fingerprint
    extents: tuple[int, ...]

    @cached_property
    def facts(self) -> bytes:
        """The JSON, the same for all of them."""
        facts = {"fingerprint": self.fingerprint.to_dict(), "extents": self.extents}
        return json.dumps(facts, sort_keys=True).encode()

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the facts."""
        return hashlib.sha256(self.facts).digest()

    @property
    def fixed_bytes(self) -> int:
        """Length of the header without the facts: what a look-up reads."""
        return _FIXED.size + 8 * len(self.extents) + 8

    @cached_property
    def header_bytes(self) -> int:
        """Where the payload begins in the first value."""
        return self.fixed_bytes + len(self.facts)

    @property
    def block_bytes(self) -> int:
        """All values of one block together."""
        return self.header_bytes + sum(self.extents)

    def ranges(self, group: int) -> list[Range]:
        """Where the extent of a layer group lies, in order."""
        start = sum(self.extents[:group])
        stop, found = start + self.extents[group], []
        while start < stop:
            part = start // VALUE_BYTES
            end = min(stop, (part + 1) * VALUE_BYTES)
            # The header stands in front of the payload of the first value, and there only.
            shift = self.header_bytes if part == 0 else -part * VALUE_BYTES
            found.append(Range(part, start + shift, end + shift))
            start = end
        return found

    def header(self, block_hash: bytes, created: float, checksums: Sequence[int]) -> BlockHeader:
        """The header of a block that is yet to be written."""
        fixed = _FIXED.pack(
            _MAGIC, _VERSION, len(checksums), len(self.facts), created, block_hash, self.digest
        ) + struct.pack(f"<{len(checksums)}Q", *checksums)
        raw = fixed + struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed))
        return BlockHeader(block_hash, self.digest, created, len(self.facts), tuple(checksums), raw)

    def decode(self, raw: bytes, block_hash: bytes) -> BlockHeader:
        """Read the header of a block, `fixed_bytes` long. Raises ValueError saying what is wrong with it."""
        if len(raw) != self.fixed_bytes or raw[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is not a kvlab block")
        _, version, groups, facts_bytes, created, found, digest = _FIXED.unpack_from(raw)
        if (version, groups) != (_VERSION, len(self.extents)):
            raise ValueError(f"it is of version {version} with {groups} groups, not {_VERSION} and {len(self.extents)}")
        *checksums, expected = struct.unpack_from(f"<{groups + 1}Q", raw, _FIXED.size)
        if xxhash.xxh3_64_intdigest(raw[:-8]) != expected:
            raise ValueError("its header is damaged (its checksum differs)")
        if found != block_hash:
            raise ValueError("it is another block")
        return BlockHeader(block_hash, digest, created, facts_bytes, tuple(checksums), raw)

    def differences(self, facts: bytes) -> list[str]:
        """The fields in which another block's facts differ from these."""
        try:
            stored = json.loads(facts)
            fields = self.fingerprint.differences(stored["fingerprint"])
            return fields + ([] if tuple(stored["extents"]) == self.extents else ["extents"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return ["facts"]

    def cut(self, extents: Sequence[Bytes]) -> list[list[memoryview]]:
        """The payloads of a block's values, from its extents; nothing is copied."""
        payloads: list[list[memoryview]] = [[] for _ in range(value_count(self.extents))]
        for group, extent in enumerate(extents):
            done = 0
            for place in self.ranges(group):
                payloads[place.part].append(extent.data[done : done + place.stop - place.start])
                done += place.stop - place.start
        return payloads
