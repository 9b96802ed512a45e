"""What every tier is: blocks kept by hash outside the pool, stored and loaded in pieces. Protocol and shared counters.

A block is cut into extents, one per layer group; a `Piece` is a run of blocks' extents of one group that lie together.
A tier's index is touched by the calling thread alone; `Store.write`, `Store.seal` and `Load.read` run on the io lane,
but for blocks that are copied from one tier to another: the calling thread itself writes those, and waits.
Does not know pools, streams of compute, or who asked.
"""

from __future__ import annotations

import logging
import operator
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from kvlab.fingerprint import Fingerprint
from kvlab.streams import PAGE, Event, Streams

__all__ = [
    "Counters",
    "Extents",
    "Geometry",
    "Load",
    "Lost",
    "Piece",
    "Staging",
    "StagingBuffer",
    "Store",
    "Tier",
    "TierError",
    "checksum",
    "defect",
    "guarded",
    "in_pieces",
    "whole_bytes",
]

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Extents = Bytes | list[Bytes]  # one row a block: [count, extent], or rows that lie wherever they lie


class TierError(OSError):
    """A tier cannot be opened or written; the message says where, why, and what to do."""


@dataclass(frozen=True)
class Geometry:
    """`extents`: bytes of each layer group's part of one block. `piece_bytes`: the most that passes staging at once.

    `in_place_bytes`: the most that is read at once where files are read into the pool itself; 0 where they are not.
    """

    extents: tuple[int, ...]
    piece_bytes: int
    in_place_bytes: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all groups."""
        return sum(self.extents)


@dataclass
class Counters:
    """What a tier has done since it was made. Failures are misses: none of them is an exception for the reader.

    `defects`: exceptions where, or of a kind that, a tier may not raise: see `defect`.
    """

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    expired_blocks: int = 0
    failed_stores: int = 0
    failed_blocks: int = 0
    checksum_failures: int = 0
    read_failures: int = 0
    defects: int = 0


@dataclass(eq=False)
class Piece:
    """Extents of layer group `group` for blocks [first, first + count) of a store or load, contiguous.

    `memory` is where they lie in host memory, uint8 [nbytes]; None: they are in a file, or will be.
    `part` and `position` are the tier's own: which slab or file, and the first block's place in it.
    `due_s`: before this `perf_counter` instant an emulated link has not delivered them.
    """

    group: int
    first: int
    count: int
    nbytes: int
    part: int = 0
    position: int = 0
    memory: Tensor | None = None
    due_s: float = 0.0


@dataclass
class Store(ABC):
    """Room for the blocks `hashes`, a leading part of those asked for; filled piece by piece, unseen until `publish`.

    `works`: whether `write` has anything to do (else the copy into `Piece.memory` is all there is).
    """

    hashes: list[bytes]
    pieces: list[Piece]
    works: bool = True
    due_s: float = 0.0

    def waited_for(self) -> None:  # noqa: B027  (most tiers do not hang)
        """The calling thread writes now, and waits: the time for which one write may hang is that of all together."""

    def write(self, piece: Piece, extents: Extents) -> None:  # noqa: B027  (memory is filled by the copy itself)
        """Take in the bytes of `piece`; where it has `memory`, they have been copied there before.

        Runs on the io lane, unless it is `waited_for`; raises OSError.
        """

    def seal(self) -> None:  # noqa: B027  (memory is not durable)
        """Make what was written durable, after the last `write` and where that ran; raises OSError."""

    @abstractmethod
    def publish(self) -> None:
        """Let the blocks be found."""

    @abstractmethod
    def abandon(self) -> None:
        """Give the room back; nothing stays behind."""


@dataclass(frozen=True)
class Lost:
    """A load's block that cannot be had, and why. `corrupt`: what is left of it is of no use to anybody else either."""

    block: int
    why: str
    corrupt: bool


@dataclass
class Load(ABC):
    """Blocks that are being read, in pieces, group by group; they cannot be evicted until `close`.

    `checked`: whether there are checksums to compare with. `in_place`: pieces go straight to where they belong.
    """

    pieces: list[Piece] = field(default_factory=list)
    checked: bool = True
    in_place: bool = False

    @abstractmethod
    def checksum(self, group: int, block: int) -> int:
        """What `checksum` must give for the extent of the load's `block`-th block."""

    def read(self, piece: Piece, buffer: Tensor) -> Tensor:
        """Read `piece` into `buffer` (uint8, 4 KiB-aligned) and return where in it the nbytes lie. Runs on the io lane.

        Raises OSError when they cannot be read, ValueError when what is there is not what was stored.
        """
        raise NotImplementedError(f"{piece} lies in memory and is not read into {buffer.shape}")

    def read_in_place(self, piece: Piece, extents: list[Bytes]) -> None:
        """Fill `extents` with those of `piece`. Otherwise like `read`."""
        raise NotImplementedError(f"{piece} cannot be read in place, into {len(extents)} extents")

    def lost(self, piece: Piece) -> Lost | None:  # noqa: ARG002  (files are read whole, or not)
        """The first block of `piece`, which has been read, that could not be had; those before it could."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of files and let the blocks be evicted again."""


class Tier(ABC):
    """Blocks by hash, within `capacity_bytes`. A hash names tokens and fingerprint; the fingerprint is checked too.

    What a tier raises though nothing here says that it may is a miss or a failed store as well, and a `defect`.
    """

    name: str
    emulated = False
    capacity_bytes: int
    counters: Counters

    @property
    def unlinked(self) -> Tier:
        """This tier without an emulated link in front of it."""
        return self

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that count against the capacity now."""

    @abstractmethod
    def open(self, geometry: Geometry, streams: Streams) -> None:
        """Prepare to hold blocks of this geometry. Raises TierError, or ValueError if already open for another one."""

    def look_up(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> None:  # noqa: B027  (an index is at hand)
        """`contains` is about to be asked for these: a tier that must ask somebody else for them does it here, once."""

    @abstractmethod
    def contains(self, block_hash: bytes, fingerprint: Fingerprint) -> bool:
        """Whether the block is here, was stored under this very fingerprint, and is not too old."""

    @abstractmethod
    def differences(self, fingerprint: Fingerprint) -> list[str]:
        """Fields in which the most similar stored fingerprint differs; [] if one agrees or none is there."""

    @abstractmethod
    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a chain as used just now, its head last, so that tails are evicted before the heads they depend on."""

    @abstractmethod
    def victims(self, nbytes: int, protect: Collection[bytes] = ()) -> list[bytes]:
        """The blocks to evict for `nbytes` more: least recently used first, none that is being read or in `protect`."""

    @abstractmethod
    def reserve(self, hashes: Sequence[bytes], fingerprint: Fingerprint, protect: Collection[bytes] = ()) -> Store:
        """Make room for as many leading blocks of `hashes` as fit, evicting all but `protect`."""

    @abstractmethod
    def load(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> Load:
        """Begin to read blocks that are all contained. Raises KeyError for one that is not."""

    @abstractmethod
    def drop(self, block_hash: bytes, *, corrupt: bool = False) -> None:
        """Forget a block, so that it is not tried again; `corrupt`: what lies beside it is not trusted either."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block that is not being read."""

    def drop_pages(self) -> bool:
        """Make the next reload cold; False where there is nothing to drop, or no way to."""
        return False


def whole_bytes(capacity_bytes: int) -> int:
    """A tier's capacity as an int of Python's own. Raises ValueError for one that is not positive, or a float."""
    try:
        nbytes = 0 if isinstance(capacity_bytes, bool) else operator.index(capacity_bytes)
    except TypeError:
        nbytes = 0
    if nbytes < 1:
        raise ValueError(f"capacity_bytes is {capacity_bytes!r}; expected a positive int, such as 2**30")
    return nbytes


def defect(tier: Tier, doing: str, error: Exception) -> None:
    """Count what a tier has raised where it may not, and log it, traceback included: the 1st, 2nd, 4th, 8th … time."""
    tier.counters.defects += 1
    count = tier.counters.defects
    if count & (count - 1) == 0:
        logger.warning(
            "the %s tier raised %r while asked to %s, which no tier may: taken for a miss or a failed store (no. %d)",
            tier.name, error, doing, count, exc_info=error,
        )  # fmt: skip


@contextmanager
def guarded(tier: Tier, doing: str) -> Iterator[None]:
    """Whatever `tier` raises in here is a `defect`, and no more than that."""
    try:
        yield
    except Exception as error:
        defect(tier, doing, error)


def checksum(extent: Bytes, block_hash: bytes, group: int) -> int:
    """xxh3_64 of one extent, seeded with the block's hash and group: right bytes in the wrong place fail as well.

    It finds corruption; it is no proof of identity against somebody who means harm.
    """
    seed = (int.from_bytes(block_hash[:8], "big") + group) % 2**64
    return int(xxhash.xxh3_64_intdigest(extent.data, seed))


def in_pieces(
    runs: Sequence[tuple[int, int, int, int]], extents: Sequence[int], piece_bytes: int, last_bytes: int | None = None
) -> list[Piece]:
    """Cut runs of blocks (first, count, part, position) into pieces of at most `piece_bytes`, group by group.

    `last_bytes`: towards the end of a group they halve down to this, for whoever must still work on the last piece when
    all has been read.
    """
    pieces = []
    for group, extent in enumerate(extents):
        most = max(1, piece_bytes // extent)
        least = most if last_bytes is None else max(1, last_bytes // extent)
        for first, count, part, position in runs:
            halve = first == runs[-1][0]
            done = 0
            while done < count:
                left = count - done
                size = min(most, max(least, left // 2) if halve and left >= 2 * least else left)
                pieces.append(Piece(group, first + done, size, size * extent, part, position + done))
                done += size
    return pieces


def sleep_until(due_s: float) -> None:
    """Wait for an instant of `perf_counter`, such as a `Piece.due_s`."""
    while (left := due_s - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass(eq=False)
class StagingBuffer:
    """Host memory between a tier that is not memory and the pool."""

    memory: Tensor  # uint8, 4 KiB-aligned
    last: Event | None = None  # the job that last used it


class Staging:
    """Host buffers of one size for tiers that are not memory, used in turn. Owns at most `most` of them, if it can."""

    def __init__(self, streams: Streams, nbytes: int, most: int) -> None:
        self._streams, self._nbytes, self._most = streams, nbytes, most
        self._idle: deque[StagingBuffer] = deque()
        self._made = 0

    @property
    def free(self) -> bool:
        """Whether `take` stays within the limit."""
        return bool(self._idle) or self._made < self._most

    def take(self) -> StagingBuffer:
        """A buffer; whoever fills it does so after its `last` job. Beyond the limit only if all are in use."""
        busy = not self._idle or not (self._idle[0].last is None or self._idle[0].last.done())
        if not self._idle or (busy and self._made < self._most):
            self._made += 1
            memory = self._streams.buffer(self._nbytes)
            skip = -memory.data_ptr() % PAGE
            return StagingBuffer(memory[skip : self._nbytes - PAGE + skip])
        return self._idle.popleft()

    def put(self, buffer: StagingBuffer, last: Event | None) -> None:
        """Give a buffer back with the job that used it last (None: nothing did)."""
        buffer.last = last
        self._idle.append(buffer)
