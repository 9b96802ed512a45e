"""The executor that does the work: a real model over a paged pool, real bytes to and from the tiers, the wall clock.

Does not know what is decided, or why. One thread calls it; the streams behind it may have others.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.executor import Chunk, Outcome
from kvlab.fingerprint import HASH_BYTES, Fingerprint, block_hashes
from kvlab.memory import check_fits
from kvlab.model import Model
from kvlab.pool import BlockPool
from kvlab.request import Request
from kvlab.streams import Streams
from kvlab.tiers import Tier, checksum
from kvlab.transfer import Offload, Reload, Transfer

__all__ = ["TorchExecutor"]


class _LoadFailedError(Exception):
    """A layer group did not come back whole: what is being computed behind it is void."""


@dataclass(eq=False)
class _Loading:
    """A reload under way; before `due_s` on the clock it is not expected to be over."""

    pending: Reload
    due_s: float


class TorchExecutor:
    """Owns pool, transfer and the tiers' opening. `groups` layer groups load while the ones before them compute."""

    def __init__(
        self,
        model: Model,
        pool_blocks: int,
        block_size: int,
        tiers: Sequence[Tier],
        streams: Streams,
        groups: int,
        *,
        poison: bool,
        clock: Callable[[], float],
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers are named {names}; each needs a name of its own")
        layout = model.layout(block_size)
        check_fits("the KV pool", pool_blocks * layout.block_bytes, model.device)
        self.model, self.num_blocks, self.block_size = model, pool_blocks, block_size
        self.block_bytes, self.groups, self.tiers = layout.block_bytes, groups, tuple(names)
        self.pool = BlockPool(layout, pool_blocks, device=model.device, poison=poison)
        self.streams = streams
        self.transfer = Transfer(self.pool, streams, groups)
        self._clock = clock
        self._tiers = {tier.name: tier for tier in tiers}
        self._fingerprints = {"": model.fingerprint(block_size)}
        for tier in tiers:
            self.transfer.open(tier, self.fingerprint(""))
        self._group_of = {start: group for group, (start, _) in enumerate(self.transfer.groups.layers)}
        self._stores: list[Offload] = []
        self._storing: Counter[tuple[str, bytes]] = Counter()  # blocks that a tier will hold when a store is over
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(
            float
        )  # by tier and direction, over transfers that have ended
        self.demoted_blocks = 0

    def fingerprint(self, salt: str) -> Fingerprint:
        """What must match before a tenant's blocks are attached."""
        if salt not in self._fingerprints:
            self._fingerprints[salt] = replace(self._fingerprints[""], salt=salt)
        return self._fingerprints[salt]

    def now(self) -> float:
        """Seconds on the clock."""
        return self._clock()

    def hashes(self, request: Request, first: int, last: int) -> list[bytes]:
        """Hashes of the request's full blocks [first, last), chained to the one before."""
        size = self.block_size
        parent = request.hashes[first - 1] if first else bytes(HASH_BYTES)
        return block_hashes(self.fingerprint(request.salt), request.tokens[first * size : last * size], size, parent)

    # Tiers ------------------------------------------------------------------------------------------------------------

    def holds(self, tier: str, block_hash: bytes, salt: str) -> bool:
        """Whether the tier holds the block or is just being given it."""
        return (tier, block_hash) in self._storing or self._tiers[tier].contains(block_hash, self.fingerprint(salt))

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> None:
        """Into the first tier, and what finds no room there into the next; a tier that fails is passed over."""
        self._poll()
        for place, tier in enumerate(self._tiers.values()):
            if not hashes:
                return
            self._demote(place, len(hashes) * self.block_bytes, hashes)
            try:
                pending = self.transfer.offload(tier, blocks, hashes, self.fingerprint(salt))
            except OSError:
                tier.counters.failed_stores += 1
                continue
            self._stores.append(pending)
            self._storing.update((tier.name, block_hash) for block_hash in pending.store.hashes)
            hashes, blocks = hashes[pending.held :], blocks[pending.held :]

    def _poll(self) -> None:
        """Account for stores that are over; one that failed has left nothing in its tier."""
        self.transfer.poll()
        for pending in [p for p in self._stores if p.report is not None or p.error is not None]:
            self._stores.remove(pending)
            for block_hash in pending.store.hashes:
                self._storing[pending.tier.name, block_hash] -= 1
                if not self._storing[pending.tier.name, block_hash]:
                    del self._storing[pending.tier.name, block_hash]
            if pending.report is not None:
                self.seconds[pending.tier.name, "store"] += pending.report.wall_s

    def _demote(self, place: int, nbytes: int, keep: Sequence[bytes]) -> None:
        """Copy what a memory tier is about to evict for `nbytes` more to the tier below, unless that has it."""
        upper, *below = list(self._tiers.values())[place:]
        if not below:
            return
        victims = upper.victims(nbytes, keep)
        for fingerprint in self._fingerprints.values() if victims else ():
            wanted = [h for h in victims if upper.contains(h, fingerprint) and not below[0].contains(h, fingerprint)]
            if wanted:
                try:
                    self.demoted_blocks += _copy_down(upper, below[0], wanted, fingerprint)
                except OSError:
                    below[0].counters.failed_stores += 1

    def load(self, tier: str, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> _Loading:
        """Begin a reload, after the stores that it needs."""
        wanted = set(hashes)
        for pending in [p for p in self._stores if p.tier.name == tier and not wanted.isdisjoint(p.store.hashes)]:
            try:
                pending.wait()
            except OSError:
                continue  # counted by the transfer; the reload finds nothing and is a miss
        self._poll()
        reload = self.transfer.reload(self._tiers[tier], hashes, blocks, self.fingerprint(salt))
        loaded = self._tiers[tier].counters.loaded_bytes
        expected_s = self.seconds[tier, "load"] / loaded * len(blocks) * self.block_bytes if loaded else 0.0
        # An emulated link says when it will have delivered; that is real time, whatever clock the scheduler has.
        link_s = max((piece.due_s for piece in reload.load.pieces), default=0.0) - time.perf_counter()
        return _Loading(reload, self.now() + max(expected_s, link_s))

    def arrived(self, handle: Any) -> bool:
        """Whether it is done, or should be by what this tier took before: then somebody must take the rest in."""
        return bool(handle.pending.done()) or self.now() >= handle.due_s

    def finish(self, handle: Any) -> int:
        """Wait for a reload; returns the blocks that came back whole."""
        report = handle.pending.wait()
        self.seconds[handle.pending.tier.name, "load"] += report.wall_s
        return int(report.valid_blocks)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block over all layers."""
        self.pool.copy_block(source, target)

    def freed(self, blocks: list[int]) -> None:
        """Poison them, if the pool does that."""
        self.pool.freed(blocks)

    def drain(self) -> None:
        """End all stores and reloads that have begun."""
        self.transfer.drain()
        self._poll()

    # Compute ----------------------------------------------------------------------------------------------------------

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request]) -> Outcome:
        """Prefill chunks one by one and decodes in a batch; chunks that wait for bytes come last."""
        tokens: dict[Request, int] = {}
        valid = {}
        for chunk in (chunk for chunk in chunks if chunk.load is None):
            self._prefill(chunk, tokens)
        if decodes:
            ids = torch.tensor([request.tokens[request.computed] for request in decodes])
            tables = [request.table.blocks for request in decodes if request.table is not None]
            logits = self.model.decode(ids, self.pool, tables, [request.computed for request in decodes])
            for request, row in zip(decodes, logits, strict=True):
                tokens[request] = sample(row, request)
        for chunk in chunks:
            if chunk.load is not None:
                valid[chunk.load] = self._prefill_behind(chunk, chunk.load.handle, tokens)
        self._poll()
        return Outcome(tokens, valid)

    def _prefill(
        self, chunk: Chunk, tokens: dict[Request, int], before_layer: Callable[[int], None] | None = None
    ) -> None:
        request = chunk.request
        assert request.table is not None, "a chunk of a request without blocks"
        ids, blocks = request.tokens[chunk.start : chunk.stop], request.table.blocks
        logits = self.model.prefill(ids, self.pool, blocks, chunk.start, before_layer=before_layer)
        if chunk.stop == len(request.tokens):
            tokens[request] = sample(logits, request)

    def _prefill_behind(self, chunk: Chunk, handle: _Loading, tokens: dict[Request, int]) -> int:
        """Compute a chunk while what it attends to arrives; returns the blocks that are valid."""

        def before_layer(layer: int) -> None:
            group = self._group_of.get(layer)
            if group is None:
                return
            # The model runs in inference mode; buffers that were made in it could not be written outside later.
            with torch.inference_mode(False):
                valid = handle.pending.wait_group(group)
            if valid < handle.pending.blocks:
                raise _LoadFailedError

        try:
            self._prefill(chunk, tokens, before_layer)
        except _LoadFailedError:
            tokens.pop(chunk.request, None)
        return self.finish(handle)


def sample(logits: Tensor, request: Request) -> int:
    """The request's next token from `logits` [vocab]."""
    sampling = request.sampling
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Seeded by position too: a token drawn again after a preemption is the same token.
    generator = torch.Generator().manual_seed((sampling.seed * 1_000_003 + len(request.tokens)) % 2**63)
    weights = (logits.double().cpu() / sampling.temperature).softmax(-1)
    return int(torch.multinomial(weights, 1, generator=generator))


def _copy_down(upper: Tier, lower: Tier, hashes: Sequence[bytes], fingerprint: Fingerprint) -> int:
    """Copy blocks that lie in `upper`'s memory to files of `lower`; returns how many. Raises OSError from `lower`."""
    load = upper.load(hashes, fingerprint)
    try:
        extents: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}  # by layer group and block
        for piece in load.pieces:
            if piece.memory is None:
                return 0  # a tier of files has nothing to copy from; what it evicts is gone
            for block, extent in enumerate(piece.memory.view(piece.count, -1).numpy(), piece.first):
                extents[piece.group, block] = extent
        # Bytes that rotted in memory must not get a fresh checksum on their way down.
        bad = {
            block
            for (group, block), extent in extents.items()
            if load.checked and checksum(extent, hashes[block], group) != load.checksum(group, block)
        }
        places = [block for block in range(len(hashes)) if block not in bad]
        store = lower.reserve([hashes[block] for block in places], fingerprint)
        try:
            for piece in store.pieces:
                blocks = places[piece.first : piece.first + piece.count]
                store.write(piece, [extents[piece.group, block] for block in blocks])
            if store.pieces:
                store.seal()
        except OSError:
            store.abandon()
            raise
        store.publish()
        return len(store.hashes)
    finally:
        load.close()
