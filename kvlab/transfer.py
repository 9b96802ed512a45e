"""Move blocks between the pool and a tier: which copies, in what order, after which waits, and what arrived whole.

The waits, each of which has a test that fails without it. Offload: a gather after the compute that wrote its blocks,
and after the write that last used its staging; the write after its gather; compute after the gather, before the blocks
are reused. Reload: the check after its read; the scatter after the compute that last used its blocks; compute after the
scatter; a read after the scatter that last used its staging. A file read into the pool itself, or written from it,
asks for the waits of both jobs. Does not know requests or models.
"""

from __future__ import annotations

import errno
import itertools
import math
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvlab.fingerprint import Fingerprint
from kvlab.pending import Lane, Offload, Pending, TransferReport
from kvlab.pool import BlockPool, LayerGroups
from kvlab.reload import NoLoad, Reload
from kvlab.streams import PAGE, Event, Streams
from kvlab.tiers.base import Geometry, Piece, Staging, Store, Tier, TierError, defect

__all__ = ["Offload", "Pending", "Reload", "Transfer", "TransferReport"]

_IN_PLACE_BYTES = 24 << 20  # one read in place: long enough for the disk, short enough to check it during the next


def _ids(blocks: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(blocks, dtype=np.int64))  # four times as fast as torch.tensor on a short list


class Transfer:
    """Moves blocks between one pool and any tiers, over `streams`, in `groups` layer groups. Owns the staging memory.

    `piece_bytes` (a power of two) pass through staging at a time; `staging_bytes` bound what is under way per tier.
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
        self._buffer_bytes, self._most_buffers = nbytes, max(1, staging_bytes // nbytes)
        self._lanes: dict[Tier, Lane] = {}
        streams.watch(pool.rows)

    def open(self, tier: Tier, fingerprint: Fingerprint) -> None:
        """Let `tier` hold this pool's blocks, under `fingerprint` where a transfer names no other.

        Comes before anything else is asked of the tier. Raises TierError, ValueError.
        """
        tier.open(self.geometry, self.streams)
        staging = Staging(self.streams, self._buffer_bytes, self._most_buffers)
        self._lanes[tier] = Lane(tier, fingerprint, self.streams, self.groups, staging)

    def late(self, tier: Tier) -> bool:
        """Whether something of this tier is still under way after its time-out: better not to ask it for more."""
        return self._lanes[tier].late

    @property
    def under_way(self) -> list[Pending]:
        """The transfers that still read or write."""
        return [pending for lane in self._lanes.values() for pending in lane.open]

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
        timeout_s: float = math.inf,
    ) -> Offload:
        """Store those of `blocks` (with their `hashes`) that the tier lacks, as many leading ones as fit.

        They can be found after `wait`, or after `poll` once they are there. On return compute may reuse the source
        blocks; unless `source_held`: then the caller holds them until it has called `wait_source`, compute need not
        wait now, and files are written from the blocks themselves where the streams can. After `timeout_s` it is
        `late`; and if a tier that hangs keeps all staging until then, it fails. Raises KeyError for a tier that was
        not opened.
        """
        lane, started = self._lanes[tier], self._begin(blocks, hashes)
        fingerprint = fingerprint or lane.fingerprint
        try:
            tier.touch(hashes)
            tier.look_up(hashes, fingerprint)
            contains = tier.contains
            wanted = {h: block for h, block in zip(hashes, blocks, strict=True) if not contains(h, fingerprint)}
            store = tier.reserve(list(wanted), fingerprint, hashes)
        except OSError:
            raise
        except Exception as error:
            defect(tier, "make room", error)
            raise TierError(f"cannot write the {tier.name} tier: {type(error).__name__}: {error}") from error
        chosen = _ids([wanted[h] for h in store.hashes])
        held = len(hashes)
        if len(store.hashes) < len(wanted):  # up to the first that found no room
            held = hashes.index(next(itertools.islice(wanted, len(store.hashes), None)))
        pending = Offload(lane, len(blocks), started, started + timeout_s, store=store, held=held)
        lane.open.append(pending)
        written = self.streams.compute_event()
        for piece in store.pieces:
            source = chosen[piece.first : piece.first + piece.count]
            if piece.memory is None and source_held and self.in_place:
                job = partial(pending.attempt, store.write, piece, self.groups.extents_of(piece.group, source))
                pending.last_use = self.streams.io(job, [written], None, tier.name)
                pending.ios.append(pending.last_use)
            elif (gathered := self._gather(pending, piece, source, written)) is not None:
                pending.last_use = gathered
            else:
                pending.cut = TierError(errno.ETIMEDOUT, f"the {tier.name} tier did not write within {timeout_s:.3g} s")
                break
            pending.bytes_moved += piece.nbytes
        if store.works and store.pieces and pending.cut is None:  # the lane is in order: after every write
            pending.ios.append(self.streams.io(partial(pending.attempt, store.seal), [], None, tier.name))
        if not source_held:
            pending.wait_source()
        return pending

    def _gather(self, pending: Offload, piece: Piece, source: Tensor, written: Event) -> Event | None:
        """Copy `piece` out of the pool, to where it stays or to staging and from there to the tier.

        None when no staging has become free by the deadline.
        """
        lane, store, buffer, after = pending.lane, pending.store, None, [written]
        host = piece.memory
        if host is None:
            buffer = lane.staging.take()
            if buffer.last is not None and not lane.ends_by(buffer.last, pending.deadline_s):
                lane.staging.put(buffer, buffer.last)
                return None
            host = buffer.memory[: piece.nbytes]
            after += [] if buffer.last is None else [buffer.last]
        rows, index = self.groups.rows(piece.group, source)
        gathered = last = self.streams.gather(rows, index, host, after)
        pending.copies.append(gathered)
        if store.works:
            job = partial(pending.attempt, store.write, piece, host.view(piece.count, -1).numpy())
            last = self.streams.io(job, [gathered], None, lane.tier.name)
            pending.ios.append(last)
        if buffer is not None:
            lane.staging.put(buffer, last)
        return gathered

    def written(self, tier: Tier, store: Store, started: float, *, timeout_s: float = math.inf) -> Offload:
        """Take over a store that the caller has filled since `started`, from elsewhere than the pool.

        Its blocks can be found after `poll`, once an emulated link has delivered them.
        """
        lane, count, nbytes = self._lanes[tier], len(store.hashes), sum(piece.nbytes for piece in store.pieces)
        pending = Offload(lane, count, started, started + timeout_s, bytes_moved=nbytes, store=store, held=count)
        lane.open.append(pending)
        return pending

    def reload(
        self,
        tier: Tier,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        fingerprint: Fingerprint | None = None,
        *,
        timeout_s: float = math.inf,
    ) -> Reload:
        """Fetch the leading blocks that `tier` holds into the pool's `blocks`. A block it lacks ends the run.

        What has not come within `timeout_s` is a miss; the blocks stay the transfer's until it is `settled`.
        """
        lane, started = self._lanes[tier], self._begin(blocks, hashes)
        fingerprint = fingerprint or lane.fingerprint
        if len(set(blocks)) != len(blocks):
            raise ValueError("a target block is named twice; one block holds one block's bytes")
        failures, held = [], 0
        try:
            tier.look_up(hashes, fingerprint)
            while held < len(hashes) and tier.contains(hashes[held], fingerprint):
                held += 1
            tier.touch(hashes[:held])
            load = tier.load(hashes[:held], fingerprint)
        except Exception as error:
            defect(tier, "begin a load", error)
            tier.counters.read_failures += 1
            failures.append(f"the reload from the {tier.name} tier did not begin: {type(error).__name__}: {error}")
            held, load = 0, NoLoad()
        pending = Reload(
            lane,
            len(blocks),
            started,
            started + timeout_s,
            hashes=hashes,
            targets=_ids(blocks),
            load=load,
            failures=failures,
            ready=self.streams.compute_event(),
            valid_blocks=held,
        )
        if held < len(hashes) and not failures:
            pending.failures.append(f"block {held} of the reload is not in the {tier.name} tier")
        lane.open.append(pending)
        pending.read_ahead()
        return pending

    def poll(self) -> None:
        """Account for the transfers that are over, without blocking; what they raise is kept for their `wait`."""
        for pending in self.under_way:
            if pending.done():
                pending.settle(time.perf_counter())

    def drain(self, timeout_s: float = math.inf) -> None:
        """End every transfer that has begun; those that hang are left alone after `timeout_s`."""
        by_s = time.perf_counter() + timeout_s
        for pending in self.under_way:
            pending.settle(by_s)
