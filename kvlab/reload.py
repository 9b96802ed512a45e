"""Blocks on their way from a tier into the pool: read, verified and scattered piece by piece, layer group by group.

A read that fails, or that has not come by the deadline, is a miss, never an exception. What has been asked of a tier
cannot be called back: after a miss for being late the transfer is over, but the target blocks are its own until it is
settled. Does not know requests or models.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from kvlab.pending import Pending
from kvlab.streams import Event
from kvlab.tiers.base import Bytes, Load, Piece, StagingBuffer, checksum, defect, guarded, sleep_until

__all__ = ["NoLoad", "Reload"]

_READS_AHEAD = 3  # one being copied, one being read, one queued so that the disk never waits for us
_READS_AHEAD_POLLED = 8  # nobody looks again before a step is over


@dataclass
class NoLoad(Load):
    """What there is to read where a tier could not even begin."""

    def checksum(self, group: int, block: int) -> int:
        """Never asked for."""
        raise NotImplementedError(f"nothing is read, and so no block {block} in group {group}")

    def close(self) -> None:
        """Nothing is held."""


@dataclass(eq=False)
class _Read:
    """A piece lying in the tier's memory or on its way into a staging buffer; without `data`: into the pool itself."""

    piece: Piece
    data: Tensor | None  # uint8 [nbytes], to be scattered
    extents: list[Bytes] = field(default_factory=list)  # there
    buffer: StagingBuffer | None = None
    event: Event | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Reload(Pending):
    """Blocks on their way into the pool. Driven by `wait_group` and `wait`, or without waiting by `advance`.

    `valid_blocks` shrinks when a block fails; what was computed with a block that fails in a later group is void. The
    target blocks from there on hold anything at all. Nothing more is written to them, and their owner may free them,
    unless it is driven by `advance`, then when it is over, or `timed_out`: then not before it is `settled`.
    """

    hashes: Sequence[bytes] = field(kw_only=True)
    targets: Tensor = field(kw_only=True)  # [n] int64
    load: Load = field(kw_only=True)
    ready: Event = field(kw_only=True)  # compute that may still use the target blocks
    valid_blocks: int = field(kw_only=True)
    timed_out: bool = False
    _issued: int = 0
    _reads: deque[_Read] = field(default_factory=deque)
    _landed: list[tuple[int, Event, int]] = field(default_factory=list)  # layer group, scatter, its bytes; in order

    def wait_group(self, group: int) -> int:
        """Let compute launched from now on attend to layer group `group`; returns the blocks that are valid so far.

        Blocks the host until that group's bytes are here and verified.
        """
        while (waiting := self._next_group()) is not None and waiting <= group:
            self._advance()
        landed = next((event for landed, event, _ in reversed(self._landed) if landed <= group), None)
        if landed is not None:
            self.lane.streams.wait_compute(landed)
        return self.valid_blocks

    def advance(self) -> bool:
        """Take in what has come, without waiting for more; returns whether it is over.

        Only then are blocks that have failed free: a read that is under way may still write to them.
        """
        self.read_ahead(_READS_AHEAD_POLLED)
        while self._next_group() is not None and self._comes(self._reads[0], time.perf_counter()):
            self._advance(polled=True)
            self.read_ahead(_READS_AHEAD_POLLED)
        if self._next_group() is not None and time.perf_counter() >= self.deadline_s:
            self._give_up()
        return self.done()

    @property
    def remaining_bytes(self) -> int:
        """What has not come over the link: not read, not delivered by an emulated one, or not copied out of memory."""
        now_s, total = time.perf_counter(), 0
        for read in self._reads:
            linked = read.event is not None or read.piece.due_s > 0
            total += 0 if linked and self._comes(read, now_s) else read.piece.nbytes
        total += sum(piece.nbytes for piece in self.load.pieces[self._issued :] if not 0 < piece.due_s <= now_s)
        for _, scattered, nbytes in reversed(self._landed):
            if scattered.done():  # and so are those before it
                break
            total += nbytes
        return total

    def _next_group(self) -> int | None:
        """The layer group of the next piece; None when all have been taken, or nobody waits for them any more."""
        if self.timed_out:
            return None
        if self._reads:
            return self._reads[0].piece.group
        return self.load.pieces[self._issued].group if self._issued < len(self.load.pieces) else None

    def read_ahead(self, most: int = _READS_AHEAD) -> None:
        """Keep a few reads queued; pieces that lie in memory need none."""
        lane, pieces = self.lane, self.load.pieces
        while not self.timed_out and self._issued < len(pieces) and len(self._reads) < most:
            piece = pieces[self._issued]
            staged = piece.memory is None and not self.load.in_place
            if staged and self._reads and not lane.staging.free:
                return
            self._issued += 1
            read = _Read(piece, piece.memory)
            self._reads.append(read)
            if staged:
                read.buffer = buffer = lane.staging.take()
                read.data = buffer.memory[: piece.nbytes]
                # A write that used it last needs no wait: the io lane is in order.
                after = [] if buffer.last is None or buffer.last.op == "io" else [buffer.last]
                read.event = lane.streams.io(partial(self._read, read), after, buffer.memory, lane.tier.name)
            elif piece.memory is None:
                read.extents = lane.groups.extents_of(piece.group, self._targets_of(piece))
                read.event = lane.streams.io(partial(self._read, read), [self.ready], None, lane.tier.name)

    def _targets_of(self, piece: Piece) -> Tensor:
        """The blocks that are still to be filled with `piece`."""
        return self.targets[piece.first : max(piece.first, min(piece.first + piece.count, self.valid_blocks))]

    def _read(self, read: _Read) -> None:
        """On the io lane. What goes wrong is kept: it makes a miss, not an exception."""
        if read.piece.first >= self.valid_blocks and not self.timed_out:
            return  # behind a block that has failed
        try:
            if read.buffer is not None:
                read.data = self.load.read(read.piece, read.buffer.memory)
            else:
                self.load.read_in_place(read.piece, read.extents)
        except Exception as error:
            read.error = error

    def _comes(self, read: _Read, by_s: float) -> bool:
        """Whether a read is over by then, and an emulated link has delivered; waits for that."""
        if read.event is not None and not self.lane.ends_by(read.event, by_s):
            return False
        if read.piece.first >= self.valid_blocks:
            return True  # nobody wants it
        sleep_until(min(read.piece.due_s, by_s))
        return read.piece.due_s <= by_s

    def _advance(self, *, polled: bool = False) -> None:
        """Take the next piece: wait for it, verify it, scatter what is valid. Too late, and nothing more is taken.

        `polled`: it has come, and nothing else is waited for.
        """
        lane = self.lane
        self.read_ahead()
        if not self._comes(self._reads[0], self.deadline_s):
            self._give_up()
            return
        read = self._reads.popleft()
        if read.event is not None:
            self.ios.append(read.event)
            lane.streams.wait_host(read.event)
        last = read.event
        if read.piece.first < self.valid_blocks:
            wanted = self.valid_blocks
            self._verify(read)
            if self.valid_blocks < wanted and not polled:
                self._stop_writing()
            targets = self._targets_of(read.piece)
            nbytes = len(targets) * lane.groups.extents[read.piece.group]
            self.bytes_moved += nbytes
            if nbytes and read.data is not None:
                rows, index = lane.groups.rows(read.piece.group, targets)
                last = lane.streams.scatter(rows, index, read.data[:nbytes], [self.ready])
                self.copies.append(last)
                self._landed.append((read.piece.group, last, nbytes))
        if read.buffer is not None:
            lane.staging.put(read.buffer, last)
        self.read_ahead()

    def _verify(self, read: _Read) -> None:
        piece = read.piece
        if read.error is not None:
            self._unread(piece, read.error)
            return
        try:
            lost = self.load.lost(piece)
            if lost is not None and lost.block < self.valid_blocks:
                self.tier.counters.read_failures += 1
                self._fail(lost.block, 1, lost.why, lost.corrupt)
            if self.load.checked:
                self._compare(read)
        except Exception as error:
            self._unread(piece, error)

    def _unread(self, piece: Piece, error: Exception) -> None:
        """A piece could not be read, or not be checked."""
        self.tier.counters.read_failures += 1
        if not isinstance(error, OSError | ValueError):
            defect(self.tier, "read", error)
        self._fail(piece.first, piece.count, f"{type(error).__name__}: {error}", isinstance(error, ValueError))

    def _compare(self, read: _Read) -> None:
        """Bytes that are not those that were stored make a block fail."""
        piece, started = read.piece, time.perf_counter()
        stop = min(piece.first + piece.count, self.valid_blocks)
        extents = read.extents if read.data is None else read.data.view(piece.count, -1).numpy()
        for block, extent in zip(range(piece.first, stop), extents, strict=False):
            if checksum(extent, self.hashes[block], piece.group) != self.load.checksum(piece.group, block):
                self.tier.counters.checksum_failures += 1
                self._fail(block, 1, "its bytes are not those that were stored (checksum)", corrupt=True)
                break
        self.verify_s += time.perf_counter() - started

    def _fail(self, first: int, count: int, why: str, corrupt: bool) -> None:
        """Blocks [first, first + count) are lost: not valid, and not to be tried again."""
        self.valid_blocks = min(self.valid_blocks, first)
        self.failures.append(f"block {first} of the reload from the {self.tier.name} tier: {why}")
        self.tier.counters.failed_blocks += count
        for block_hash in self.hashes[first : first + count]:
            with guarded(self.tier, "drop a block"):
                self.tier.drop(block_hash, corrupt=corrupt)

    def _stop_writing(self) -> None:
        """Wait for reads under way to where blocks have failed, whose owner may now give them to somebody else."""
        if self.load.in_place:
            for event in [read.event for read in self._reads if read.event is not None]:
                if not self.lane.ends_by(event, self.deadline_s):
                    self._give_up()
                    break
                self.lane.streams.wait_host(event)

    def _give_up(self) -> None:
        """The next piece is late: valid is what has come in every layer group. Nothing is wrong with what is stored."""
        piece, last = self._reads[0].piece, len(self.lane.groups.layers) - 1
        self.valid_blocks = min(self.valid_blocks, piece.first if piece.group == last else 0)
        self.timed_out = True
        limit_s = self.deadline_s - self.started
        self.failures.append(f"the reload from the {self.tier.name} tier was not over within {limit_s:.3g} s")

    @property
    def late(self) -> bool:
        """Whether what nobody waits for any more is still under way."""
        return self.timed_out and not self.settled

    def done(self) -> bool:
        """Whether every piece has been taken and copied; `wait_group`, `advance` and `wait` take them."""
        return self._next_group() is None and all(event.done() for event in self.copies[-1:])

    def settle(self, by_s: float = math.inf) -> bool:
        """End it by then, and wait until then for what is under way after that; whether its blocks are free."""
        if self.settled:
            return True
        if self.report is None:
            self.deadline_s = min(self.deadline_s, by_s)
            self._end()
        while self._reads:
            read = self._reads[0]
            if read.event is not None:
                if not self.lane.ends_by(read.event, by_s):
                    return False
                self.lane.streams.wait_host(read.event)
            self._reads.popleft()
            if read.buffer is not None:
                self.lane.staging.put(read.buffer, read.event)
        if not self.settled:
            self.lane.open.remove(self)
            with guarded(self.tier, "close a load"):
                self.load.close()
        return True

    def _end(self) -> None:
        self.wait_group(len(self.lane.groups.layers))
        counters = self.tier.counters
        counters.loaded_blocks += self.valid_blocks
        counters.loaded_bytes += self.bytes_moved
        self._join()
        self._close(self.valid_blocks)
        self.settle(time.perf_counter())
