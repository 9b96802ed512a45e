"""The executor that does the work: a real model over a paged pool, real bytes to and from the tiers, the wall clock.

Does not know what is decided, or why. One thread calls it; the streams behind it may have others.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.executor import Chunk, Outcome
from kvlab.fingerprint import HASH_BYTES, Fingerprint, block_hashes
from kvlab.graphs import decode_with
from kvlab.memory import check_fits
from kvlab.model import Model
from kvlab.pool import BlockPool
from kvlab.request import Request
from kvlab.streams import Streams
from kvlab.tiers import Store, Tier, checksum
from kvlab.tiers.base import defect, guarded
from kvlab.transfer import Offload, Reload, Transfer

__all__ = ["TorchExecutor"]


class _LoadFailedError(Exception):
    """A layer group did not come back whole: what is being computed behind it is void."""


@dataclass(eq=False)
class _Loading:
    """A reload under way; before the stores of its blocks are over there is nothing to load (`reload` is None).

    `deadline_s`: the instant of `perf_counter` at which it is given up; a tier takes real time, whatever the clock.
    """

    tier: str
    hashes: Sequence[bytes]
    blocks: Sequence[int]
    fingerprint: Fingerprint
    stores: list[Offload]
    deadline_s: float
    reload: Reload | None = None


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
        timeout_s: float = math.inf,
        cuda_graphs: bool = True,
    ) -> None:
        names = [tier.name for tier in tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers are named {names}; each needs a name of its own")
        layout = model.layout(block_size)
        check_fits("the KV pool", pool_blocks * layout.block_bytes, model.device)
        self.model, self.num_blocks, self.block_size = model, pool_blocks, block_size
        self.block_bytes, self.groups, self.tiers = layout.block_bytes, groups, tuple(names)
        self.pool = BlockPool(layout, pool_blocks, device=model.device, poison=poison)
        self._decode = decode_with(model, streams.recorder() if cuda_graphs else None)
        self.streams = streams
        self.transfer = Transfer(self.pool, streams, groups)
        self._clock, self._timeout_s = clock, timeout_s
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

    def look_up(self, tier: str, hashes: Sequence[bytes], salt: str) -> None:
        """Let the tier find out what it holds, unless something of it is late."""
        if not self.transfer.late(self._tiers[tier]):
            with guarded(self._tiers[tier], "look up blocks"):
                self._tiers[tier].look_up(hashes, self.fingerprint(salt))

    def holds(self, tier: str, block_hash: bytes, salt: str) -> bool:
        """Whether the tier holds the block or is just being given it; no, while something of it is late."""
        if self.transfer.late(self._tiers[tier]):
            return False
        return (tier, block_hash) in self._storing or _contains(self._tiers[tier], block_hash, self.fingerprint(salt))

    def storing_bytes(self, tier: str, hashes: Sequence[bytes]) -> int:
        """Of the stores that are not over, in their order, up to the last that brings one of these."""
        self._poll()
        wanted, moving, needed = set(hashes), 0, 0
        for pending in self._stores:
            if pending.tier.name == tier:
                moving += pending.bytes_moved
                if not wanted.isdisjoint(pending.store.hashes):
                    needed = moving
        return needed

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> None:
        """Into the first tier, and what finds no room there into the next; one that fails or hangs is passed over."""
        self._poll()
        for place, tier in enumerate(self._tiers.values()):
            if not hashes:
                return
            if self.transfer.late(tier):
                continue
            self._demote(place, len(hashes) * self.block_bytes, hashes)
            try:
                pending = self.transfer.offload(tier, blocks, hashes, self.fingerprint(salt), timeout_s=self._timeout_s)
            except OSError:
                tier.counters.failed_stores += 1
                continue
            self._await(pending)
            hashes, blocks = hashes[pending.held :], blocks[pending.held :]

    def _await(self, pending: Offload) -> None:
        """Take a store that has begun for blocks that the tier will hold."""
        self._stores.append(pending)
        self._storing.update((pending.tier.name, block_hash) for block_hash in pending.store.hashes)

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
        """Copy what a memory tier is about to evict for `nbytes` more to the tier below, unless that has or gets it."""
        upper, *below = list(self._tiers.values())[place:]
        if not below or self.transfer.late(below[0]):
            return
        lower, victims = below[0], list[bytes]()
        with guarded(upper, "name victims"):
            victims = upper.victims(nbytes, keep)
        for salt, fingerprint in self._fingerprints.items() if victims else ():
            self.look_up(lower.name, victims, salt)
            wanted = [h for h in victims if _contains(upper, h, fingerprint) and not self.holds(lower.name, h, salt)]
            started = time.perf_counter()
            try:
                store = _copy_down(upper, lower, wanted, fingerprint) if wanted else None
            except Exception as error:
                if not isinstance(error, OSError):
                    defect(lower, f"take blocks from the {upper.name} tier", error)
                lower.counters.failed_stores += 1
                continue
            if store is not None:
                self._await(self.transfer.written(lower, store, started, timeout_s=self._timeout_s))
                self._poll()
                self.demoted_blocks += len(store.hashes)

    def load(self, tier: str, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> _Loading:
        """Begin a reload, or as soon as the stores that it needs are over."""
        wanted = set(hashes)
        stores = [p for p in self._stores if p.tier.name == tier and not wanted.isdisjoint(p.store.hashes)]
        deadline_s = time.perf_counter() + self._timeout_s
        loading = _Loading(tier, hashes, blocks, self.fingerprint(salt), stores, deadline_s)
        self._begun(loading, wait=False)
        return loading

    def _begun(self, loading: _Loading, *, wait: bool) -> Reload | None:
        """Its reload; None while it needs a store that is not over. One that failed or is late is a miss: not there."""
        if loading.reload is None:
            now_s = time.perf_counter()
            over = [store.settle(loading.deadline_s if wait else now_s) for store in loading.stores]
            if not (wait or all(over) or now_s >= loading.deadline_s):
                return None
            self._poll()
            left_s = max(0.0, loading.deadline_s - time.perf_counter())
            loading.reload = self.transfer.reload(
                self._tiers[loading.tier], loading.hashes, loading.blocks, loading.fingerprint, timeout_s=left_s
            )
        return loading.reload

    def bytes_of(self, blocks: int) -> int:
        """All layers of so many blocks."""
        return blocks * self.block_bytes

    def remaining_bytes(self, handle: _Loading) -> int:
        """What has not come; that is all while it needs a store which is not over."""
        return self.bytes_of(len(handle.blocks)) if handle.reload is None else handle.reload.remaining_bytes

    def arrived(self, handle: _Loading) -> bool:
        """Take in what has come; whether that was all."""
        reload = self._begun(handle, wait=False)
        return reload is not None and reload.advance()

    def finish(self, handle: _Loading) -> int:
        """Wait for a reload; returns the blocks that came back whole, and in time."""
        reload = self._begun(handle, wait=True)
        assert reload is not None, "a reload that was waited for has not begun"
        report = reload.wait()
        self.seconds[handle.tier, "load"] += report.wall_s
        return report.valid_blocks

    def timed_out(self, handle: _Loading) -> bool:
        """Whether the reload, or a store that it needs, was too late."""
        return (handle.reload is not None and handle.reload.timed_out) or any(not s.settled for s in handle.stores)

    def settled(self, handle: _Loading, wait_s: float = 0.0) -> bool:
        """Whether no read is under way any more."""
        return handle.reload is None or handle.reload.settle(time.perf_counter() + wait_s)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block over all layers."""
        self.pool.copy_block(source, target)

    def freed(self, blocks: list[int]) -> None:
        """Poison them, if the pool does that."""
        self.pool.freed(blocks)

    def drain(self, timeout_s: float = math.inf) -> None:
        """End all stores and reloads that have begun; what hangs is left alone after `timeout_s`."""
        self.transfer.drain(timeout_s)
        self._poll()

    # Compute ----------------------------------------------------------------------------------------------------------

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request]) -> Outcome:
        """Prefill chunks one by one and decodes in a batch; chunks that wait for bytes come last."""
        tokens: dict[Request, int] = {}
        valid = {}
        self._waited_s = 0.0
        for chunk in (chunk for chunk in chunks if chunk.load is None):
            self._prefill(chunk, tokens)
        if decodes:
            ids = torch.tensor([request.tokens[request.computed] for request in decodes])
            tables = [request.table.blocks for request in decodes if request.table is not None]
            logits = self._decode(ids, self.pool, tables, [request.computed for request in decodes])
            for request, row in zip(decodes, logits, strict=True):
                tokens[request] = sample(row, request)
        for chunk in chunks:
            if chunk.load is not None:
                valid[chunk.load] = self._prefill_behind(chunk, chunk.load.handle, tokens)
        self._poll()
        return Outcome(tokens, valid, waited_s=self._waited_s)

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
            begin_s = self.now()
            # The model runs in inference mode; buffers that were made in it could not be written outside later.
            with torch.inference_mode(False):
                reload = self._begun(handle, wait=True)
                assert reload is not None, "a reload that was waited for has not begun"
                valid = reload.wait_group(group)
            self._waited_s += self.now() - begin_s
            if valid < reload.blocks:
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


def _contains(tier: Tier, block_hash: bytes, fingerprint: Fingerprint) -> bool:
    """What `tier` says; no, where it raises something instead."""
    try:
        return tier.contains(block_hash, fingerprint)
    except Exception as error:
        defect(tier, "say what it holds", error)
        return False


def _copy_down(upper: Tier, lower: Tier, hashes: Sequence[bytes], fingerprint: Fingerprint) -> Store | None:
    """Copy blocks that lie in `upper`'s memory to `lower`, and wait for that; returns the store, to be published.

    None where `upper` has them in files. Raises OSError from `lower`; one that can hang has one time limit for all.
    """
    # A link in front of `upper` is the way between that memory and the pool, which these blocks do not go.
    load = upper.unlinked.load(hashes, fingerprint)
    try:
        extents: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}  # by layer group and block
        for piece in load.pieces:
            if piece.memory is None:
                return None  # a tier of files has nothing to copy from; what it evicts is gone
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
        store.waited_for()
        try:
            for piece in store.pieces:
                rows = [extents[piece.group, block] for block in places[piece.first : piece.first + piece.count]]
                if piece.memory is not None:
                    np.stack(rows, out=piece.memory.view(piece.count, -1).numpy())
                if store.works:
                    store.write(piece, rows)
            if store.works and store.pieces:
                store.seal()
        except Exception:
            store.abandon()
            raise
        return store
    finally:
        with guarded(upper, "close a load"):
            load.close()
