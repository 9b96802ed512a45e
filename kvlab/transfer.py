"""Move blocks between the pool and a tier: which copies, in what order, after which waits, and what arrived whole.

The waits, each of which has a test that fails without it. Offload: a gather after the compute that wrote its blocks,
and after the write that last used its staging; the write after its gather; compute after the gather, before the blocks
are reused. Reload: the check after its read; the scatter after the compute that last used its blocks; compute after the
scatter; a read after the scatter that last used its staging. A file read into the pool itself, or written from it,
asks for the waits of both jobs. A failed read is a miss, never an exception. Does not know requests or models.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvlab.fingerprint import Fingerprint
from kvlab.pool import BlockPool, LayerGroups
from kvlab.streams import PAGE, Event, Streams
from kvlab.tiers.base import Bytes, Geometry, Load, Piece, Staging, StagingBuffer, Store, Tier, checksum, sleep_until

__all__ = ["Offload", "Pending", "Reload", "Transfer", "TransferReport"]

_READS_AHEAD = 3  # one being copied, one being read, one queued so that the disk never waits for us
_IN_PLACE_BYTES = 24 << 20  # one read in place: long enough for the disk, short enough to check it during the next


@dataclass(frozen=True)
class TransferReport:
    """What one transfer did. Seconds are sums over its jobs, except `wall_s` and `notice_s`.

    `valid_blocks`: leading blocks that arrived whole and verified in every group (offload: that are in the tier now).
    `bytes_moved`: bytes that left the pool, or that arrived there; `copies`: gathers or scatters that moved them, none
    where files are read and written in place.
    Copies: `queue_s` waiting for a turn, `enqueue_s` submitting, `device_s` copying. `io_s`: reading or writing files.
    `verify_s`: checksums on the calling thread. `notice_s`: from the end of the last job until somebody looked.
    """

    tier: str
    emulated: bool
    blocks: int
    valid_blocks: int
    bytes_moved: int
    copies: int
    queue_s: float
    enqueue_s: float
    device_s: float
    io_s: float
    verify_s: float
    notice_s: float
    wall_s: float
    failures: tuple[str, ...] = ()


@dataclass(eq=False)
class Pending(ABC):
    """A transfer that has begun. `wait` ends it; until then its blocks stay with it."""

    transfer: Transfer
    tier: Tier
    blocks: int
    started: float
    copies: list[Event] = field(default_factory=list)
    ios: list[Event] = field(default_factory=list)
    bytes_moved: int = 0
    verify_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    report: TransferReport | None = None
    error: OSError | None = None

    def wait(self) -> TransferReport:
        """Block until it is over and account for it. An offload raises TierError when the tier cannot be written."""
        if self.report is None and self.error is None:
            self._end()
        if self.error is not None:
            raise self.error
        assert self.report is not None, "a transfer ended without a report"
        return self.report

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def _end(self) -> None: ...

    def _close(self, valid_blocks: int) -> None:
        streams = self.transfer.streams
        last = (self.ios or self.copies if isinstance(self, Offload) else self.copies or self.ios)[-1:]
        for event in (*last, *self.copies, *self.ios):  # the last first: when it is over, how late was that seen?
            streams.wait_host(event)
        self.report = TransferReport(
            tier=self.tier.name,
            emulated=self.tier.emulated,
            blocks=self.blocks,
            valid_blocks=valid_blocks,
            bytes_moved=self.bytes_moved,
            copies=len(self.copies),
            queue_s=sum(event.queue_s for event in self.copies),
            enqueue_s=sum(event.enqueue_s for event in self.copies),
            device_s=sum(event.device_s for event in self.copies),
            io_s=sum(event.device_s for event in self.ios),
            verify_s=self.verify_s,
            notice_s=last[0].notice_s if last else 0.0,
            wall_s=time.perf_counter() - self.started,
            failures=tuple(self.failures),
        )
        self.copies, self.ios = [], []
        self.transfer._open_transfers.remove(self)


@dataclass(eq=False)
class Offload(Pending):
    """Blocks on their way to a tier."""

    store: Store = field(kw_only=True)
    held: int = field(kw_only=True)  # blocks of the call that are, or will be, in the tier
    last_use: Event | None = None  # of the source blocks: lanes are in order, so the last one is after all

    def wait_source(self) -> None:
        """Let compute launched from now on reuse the source blocks."""
        if self.last_use is not None:
            self.transfer.streams.wait_compute(self.last_use)

    def done(self) -> bool:
        """Whether the last job has ended (and an emulated link has delivered)."""
        last = (self.ios or self.copies)[-1:]
        return all(event.done() for event in last) and time.perf_counter() >= self.store.due_s

    def _end(self) -> None:
        try:
            for event in (self.ios or self.copies)[-1:]:
                self.transfer.streams.wait_host(event)
        except OSError as error:
            self.error = error
            self.store.abandon()
            self.tier.counters.failed_stores += 1
            self.transfer._open_transfers.remove(self)
            return
        sleep_until(self.store.due_s)
        self.store.publish()
        self._close(self.held)


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
    """Blocks on their way into the pool, layer group by layer group. Driven by `wait_group` and `wait`.

    `valid_blocks` shrinks when a block fails; what was computed with a block that fails in a later group is void. The
    target blocks from there on hold anything at all, and nothing more is written to them: their owner frees them.
    """

    hashes: Sequence[bytes] = field(kw_only=True)
    targets: Tensor = field(kw_only=True)  # [n] int64
    load: Load = field(kw_only=True)
    ready: Event = field(kw_only=True)  # compute that may still use the target blocks
    valid_blocks: int = field(kw_only=True)
    _issued: int = 0
    _reads: deque[_Read] = field(default_factory=deque)

    def wait_group(self, group: int) -> int:
        """Let compute launched from now on attend to layer group `group`; returns the blocks that are valid so far.

        Blocks the host until that group's bytes are here and verified.
        """
        while (waiting := self._next_group()) is not None and waiting <= group:
            self._advance()
        if self.copies:
            self.transfer.streams.wait_compute(self.copies[-1])
        return self.valid_blocks

    def _next_group(self) -> int | None:
        """The layer group of the next piece; None when all have been taken."""
        if self._reads:
            return self._reads[0].piece.group
        return self.load.pieces[self._issued].group if self._issued < len(self.load.pieces) else None

    def _read_ahead(self) -> None:
        """Keep a few reads queued; pieces that lie in memory need none."""
        transfer, pieces = self.transfer, self.load.pieces
        while self._issued < len(pieces) and len(self._reads) < _READS_AHEAD:
            piece = pieces[self._issued]
            staged = piece.memory is None and not self.load.in_place
            if staged and self._reads and not transfer._staging.free:
                return
            self._issued += 1
            read = _Read(piece, piece.memory)
            self._reads.append(read)
            if staged:
                read.buffer = buffer = transfer._staging.take()
                read.data = buffer.memory[: piece.nbytes]
                # A write that used it last needs no wait: the io lane is in order.
                after = [] if buffer.last is None or buffer.last.op == "io" else [buffer.last]
                read.event = transfer.streams.io(partial(self._read, read), after, buffer.memory)
            elif piece.memory is None:
                read.extents = transfer.groups.extents_of(piece.group, self._targets_of(piece))
                read.event = transfer.streams.io(partial(self._read, read), [self.ready])

    def _targets_of(self, piece: Piece) -> Tensor:
        """The blocks that are still to be filled with `piece`."""
        return self.targets[piece.first : max(piece.first, min(piece.first + piece.count, self.valid_blocks))]

    def _read(self, read: _Read) -> None:
        """On the io lane. What goes wrong is kept: it makes a miss, not an exception."""
        if read.piece.first >= self.valid_blocks:
            return  # behind a block that has failed
        try:
            if read.buffer is not None:
                read.data = self.load.read(read.piece, read.buffer.memory)
            else:
                self.load.read_in_place(read.piece, read.extents)
        except (OSError, ValueError) as error:
            read.error = error

    def _advance(self) -> None:
        """Take the next piece: wait for it, verify it, scatter what is valid."""
        transfer = self.transfer
        self._read_ahead()
        read = self._reads.popleft()
        if read.event is not None:
            self.ios.append(read.event)
            transfer.streams.wait_host(read.event)
        last = read.event
        if read.piece.first < self.valid_blocks:
            sleep_until(read.piece.due_s)
            self._verify(read)
            targets = self._targets_of(read.piece)
            nbytes = len(targets) * transfer.groups.extents[read.piece.group]
            self.bytes_moved += nbytes
            if nbytes and read.data is not None:
                rows, index = transfer.groups.rows(read.piece.group, targets)
                self.copies.append(last := transfer.streams.scatter(rows, index, read.data[:nbytes], [self.ready]))
        if read.buffer is not None:
            transfer._staging.put(read.buffer, last)
        self._read_ahead()

    def _verify(self, read: _Read) -> None:
        piece = read.piece
        try:
            if read.error is None:
                self.load.confirm(piece)
        except (OSError, ValueError) as error:
            read.error = error
        if read.error is not None:
            corrupt = isinstance(read.error, ValueError)
            self.tier.counters.read_failures += 1
            self._fail(piece.first, piece.count, f"{type(read.error).__name__}: {read.error}", corrupt)
            return
        if not self.load.checked:
            return
        started = time.perf_counter()
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
            self.tier.drop(block_hash, corrupt=corrupt)
        if self.load.in_place:  # reads under way still write to blocks that their owner may now give to somebody else
            for event in [read.event for read in self._reads if read.event is not None]:
                self.transfer.streams.wait_host(event)

    def done(self) -> bool:
        """Whether every piece has been taken and copied; `wait_group` and `wait` take them."""
        return self._next_group() is None and all(event.done() for event in self.copies[-1:])

    def _end(self) -> None:
        self.wait_group(len(self.transfer.groups.layers))
        counters = self.tier.counters
        counters.loaded_blocks += self.valid_blocks
        counters.loaded_bytes += self.bytes_moved
        self._close(self.valid_blocks)
        self.load.close()


def _ids(blocks: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(blocks, dtype=np.int64))  # four times as fast as torch.tensor on a short list


class Transfer:
    """Moves blocks between one pool and any tiers, over `streams`, in `groups` layer groups. Owns the staging memory.

    `piece_bytes` (a power of two) pass through staging at a time; `staging_bytes` bound what is under way.
    """

    def __init__(
        self,
        pool: BlockPool,
        streams: Streams,
        groups: int = 1,
        *,
        piece_bytes: int = 4 << 20,
        staging_bytes: int = 64 << 20,
    ) -> None:
        self.pool, self.streams, self.groups = pool, streams, LayerGroups(pool, groups)
        extents = self.groups.extents
        # A page is lost to alignment, and direct reads begin and end up to a page outside of what is wanted.
        nbytes = max(piece_bytes, 1 << (max(extents) + 3 * PAGE - 1).bit_length())
        # Where the streams' io and the pool's order allow it, files are read and written without staging.
        self.in_place = streams.in_place and self.groups.in_place
        self.geometry = Geometry(extents, nbytes - 3 * PAGE, _IN_PLACE_BYTES if self.in_place else 0)
        self._staging = Staging(streams, nbytes, max(1, staging_bytes // nbytes))
        self._open_transfers: list[Pending] = []
        self._fingerprints: dict[Tier, Fingerprint] = {}
        streams.watch(pool.rows)

    def open(self, tier: Tier, fingerprint: Fingerprint) -> None:
        """Let `tier` hold this pool's blocks, under `fingerprint` where a transfer names no other.

        Comes before anything else is asked of the tier. Raises TierError, ValueError.
        """
        tier.open(self.geometry, self.streams)
        self._fingerprints[tier] = fingerprint

    def _begin(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> float:
        """When the transfer began: before the tier is asked for anything, so that an emulated link is in `wall_s`."""
        started = time.perf_counter()
        self.poll()
        if len(blocks) != len(hashes):
            raise ValueError(f"{len(blocks)} blocks and {len(hashes)} hashes; expected one hash for each block")
        if blocks and (min(blocks) < 0 or max(blocks) >= self.pool.num_blocks):
            raise ValueError(f"blocks {min(blocks)} to {max(blocks)}; the pool has 0 to {self.pool.num_blocks - 1}")
        return started

    def offload(
        self,
        tier: Tier,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        fingerprint: Fingerprint | None = None,
        *,
        source_held: bool = False,
    ) -> Offload:
        """Store those of `blocks` (with their `hashes`) that the tier lacks, as many leading ones as fit.

        They can be found after `wait`, or after `poll` once they are there. On return compute may reuse the source
        blocks; unless `source_held`: then the caller holds them until it has called `wait_source`, compute need not
        wait now, and files are written from the blocks themselves where the streams can. Raises KeyError for a tier
        that was not opened.
        """
        started, fingerprint = self._begin(blocks, hashes), fingerprint or self._fingerprints[tier]
        tier.touch(hashes)
        contains = tier.contains
        wanted = {h: block for h, block in zip(hashes, blocks, strict=True) if not contains(h, fingerprint)}
        store = tier.reserve(list(wanted), fingerprint, hashes)
        chosen = _ids([wanted[h] for h in store.hashes])
        held = len(hashes)
        if len(store.hashes) < len(wanted):  # up to the first that found no room
            held = hashes.index(next(itertools.islice(wanted, len(store.hashes), None)))
        pending = Offload(self, tier, len(blocks), started, store=store, held=held)
        self._open_transfers.append(pending)
        written = self.streams.compute_event()
        for piece in store.pieces:
            source = chosen[piece.first : piece.first + piece.count]
            if piece.memory is None and source_held and self.in_place:
                job = partial(store.write, piece, self.groups.extents_of(piece.group, source))
                pending.last_use = self.streams.io(job, [written])
                pending.ios.append(pending.last_use)
            else:
                pending.last_use = self._gather(pending, piece, source, written)
            pending.bytes_moved += piece.nbytes
        if store.works and store.pieces:
            pending.ios.append(self.streams.io(store.seal, []))  # the lane is in order: after every write
        if not source_held:
            pending.wait_source()
        return pending

    def _gather(self, pending: Offload, piece: Piece, source: Tensor, written: Event) -> Event:
        """Copy `piece` out of the pool, to where it stays or to staging and from there to the tier."""
        store, buffer, after = pending.store, None, [written]
        host = piece.memory
        if host is None:
            buffer = self._staging.take()
            host = buffer.memory[: piece.nbytes]
            after += [] if buffer.last is None else [buffer.last]
        rows, index = self.groups.rows(piece.group, source)
        gathered = last = self.streams.gather(rows, index, host, after)
        pending.copies.append(gathered)
        if store.works:
            last = self.streams.io(partial(store.write, piece, host.view(piece.count, -1).numpy()), [gathered])
            pending.ios.append(last)
        if buffer is not None:
            self._staging.put(buffer, last)
        return gathered

    def reload(
        self, tier: Tier, hashes: Sequence[bytes], blocks: Sequence[int], fingerprint: Fingerprint | None = None
    ) -> Reload:
        """Fetch the leading blocks that `tier` holds into the pool's `blocks`. A block it lacks ends the run."""
        started, fingerprint = self._begin(blocks, hashes), fingerprint or self._fingerprints[tier]
        if len(set(blocks)) != len(blocks):
            raise ValueError("a target block is named twice; one block holds one block's bytes")
        held = 0
        while held < len(hashes) and tier.contains(hashes[held], fingerprint):
            held += 1
        tier.touch(hashes[:held])
        pending = Reload(
            self,
            tier,
            len(blocks),
            started,
            hashes=hashes,
            targets=_ids(blocks),
            load=tier.load(hashes[:held], fingerprint),
            ready=self.streams.compute_event(),
            valid_blocks=held,
        )
        if held < len(hashes):
            pending.failures.append(f"block {held} of the reload is not in the {tier.name} tier")
        self._open_transfers.append(pending)
        pending._read_ahead()
        return pending

    def poll(self) -> None:
        """Account for the transfers that are over, without blocking; what they raise is kept for their `wait`."""
        for pending in [pending for pending in self._open_transfers if pending.done()]:
            pending._end()

    def drain(self) -> None:
        """End every transfer that has begun."""
        for pending in list(self._open_transfers):
            pending._end()
