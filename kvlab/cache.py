"""What stays in the pool when nobody runs on it: tables of stopped requests, full blocks by hash; and how both leave.

Knows tables, hashes, and an `Executor` to store with. Does not know who runs, or why room is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvlab.blocks import BlockAllocator, BlockTable, blocks_for
from kvlab.executor import Executor
from kvlab.policy import Eviction
from kvlab.prefix import CachedBlock, PrefixIndex
from kvlab.request import Request

__all__ = ["Cache"]


class Cache:
    """Owns the block tables and the prefix index. Once it must evict, it goes on until `high_blocks` are free."""

    def __init__(self, executor: Executor, eviction: Eviction, high_blocks: int) -> None:
        self.executor, self.eviction, self.high_blocks = executor, eviction, high_blocks
        self.allocator = BlockAllocator(executor.num_blocks, executor.block_size)
        self.index = PrefixIndex(self.allocator)
        self.idle: dict[Request, None] = {}  # who has a table and does not run, least recently stopped first
        self.evicted_blocks = self.unstored_blocks = 0

    def name(self, request: Request, blocks: int) -> None:
        """Hash the request's first full blocks, those that are not hashed yet."""
        if len(request.hashes) < blocks:
            request.hashes += self.executor.hashes(request, len(request.hashes), blocks)

    def free(self, blocks: list[int]) -> None:
        """Tell the executor that nobody holds these any more."""
        if blocks:
            self.executor.freed(blocks)

    # Tables -----------------------------------------------------------------------------------------------------------

    def attach(self, request: Request, wanted: list[bytes], now_s: float) -> BlockTable:
        """The request's table, no longer idle: its own, or the blocks with the `wanted` hashes where those are more."""
        shared = self.index.match(wanted, now_s)
        self.idle.pop(request, None)
        if request.table is None or request.computed < len(shared) * self.allocator.block_size:
            table = self.allocator.new_table()
            self.allocator.share(table, shared)
            table.tokens = table.capacity
            self.drop(request)
            request.table = table
        return request.table

    def park(self, request: Request) -> None:
        """Keep the computed blocks of a request that does not run, for as long as nobody else needs them."""
        self.idle.pop(request, None)
        if request.table is None:
            return
        self.free(self.allocator.truncate(request.table, request.computed))
        if request.computed:
            self.idle[request] = None  # the most recently stopped
        else:
            self.drop(request)

    def drop(self, request: Request) -> None:
        """Give up the table of a request that does not run; its full blocks stay in the index."""
        self.idle.pop(request, None)
        if request.table is not None:
            self.free(self.allocator.release(request.table))
            request.table = None

    def fork(self, parent: Request, child: Request) -> None:
        """Let `child` share the computed blocks of `parent`, copy-on-write."""
        child.hashes = list(parent.hashes)
        if parent.table is not None and parent.computed:
            child.table = self.allocator.new_table()
            used = blocks_for(parent.computed, self.allocator.block_size)
            self.allocator.share(child.table, parent.table.blocks[:used])  # never one that is still to be written
            child.table.tokens = parent.computed
            self.idle[child] = None

    # Eviction ---------------------------------------------------------------------------------------------------------

    def make_room(self, blocks: int) -> bool:
        """Have `blocks` free: from idle ones, then from the tables of those that stopped first. False: too few."""
        while (short := blocks - self.allocator.free_blocks) > 0:
            # A few at a time at least: finding victims looks at every cached block, and tiers like large writes.
            least = max(short, self.high_blocks - self.allocator.free_blocks, self.allocator.num_blocks // 128)
            if self.evict(least):
                continue
            if not self.idle:
                return False
            self.drop(next(iter(self.idle)))
        return True

    def evict(self, blocks: int) -> int:
        """Give up as many idle blocks, the least valuable first; returns how many there were."""
        now = self.executor.now()
        victims = self.index.victims(blocks, lambda entry: self.eviction.value(entry, now, self.holder))
        return self._give_up(victims, self._worth_storing(self._held_nowhere(victims)))

    def offload(self, request: Request) -> int:
        """Push what an idle request alone still needs out of the pool, now; returns the blocks that left."""
        self.drop(request)
        victims = self.index.victims(len(request.hashes), lambda entry: -entry.position, among=request.hashes)
        return self._give_up(victims, self._held_nowhere(victims))

    def holder(self, block_hash: bytes, salt: str) -> str | None:
        """The fastest tier that holds a block."""
        return next((tier for tier in self.executor.tiers if self.executor.holds(tier, block_hash, salt)), None)

    def _held_nowhere(self, victims: list[CachedBlock]) -> list[CachedBlock]:
        """Those that would be lost."""
        for salt in {entry.salt for entry in victims}:
            hashes = [entry.block_hash for entry in victims if entry.salt == salt]
            for tier in self.executor.tiers:
                self.executor.look_up(tier, hashes, salt)
        lost = victims
        for tier in self.executor.tiers:
            lost = [entry for entry in lost if not self.executor.holds(tier, entry.block_hash, entry.salt)]
        return lost

    def _worth_storing(self, victims: list[CachedBlock]) -> list[CachedBlock]:
        """Those that the eviction would store in the first tier, judged in runs of neighbours."""
        size, tier = self.allocator.block_size, next(iter(self.executor.tiers), None)
        if tier is None:
            return []
        runs: dict[bytes | None, list[CachedBlock]] = {}  # by the hash of their last block
        for entry in sorted(victims, key=lambda entry: entry.position):
            run = runs.pop(entry.parent, [])
            run.append(entry)
            runs[entry.block_hash] = run
        unworthy = {
            entry.block_hash
            for run in runs.values()
            if not self.eviction.worth_storing(run[0].position, run[-1].position + size, tier)
            for entry in run
        }
        self.unstored_blocks += len(unworthy)
        return [entry for entry in victims if entry.block_hash not in unworthy]

    def _give_up(self, victims: list[CachedBlock], wanted: list[CachedBlock]) -> int:
        """Store those of them that are `wanted`, heads first, and free all."""
        by_salt: dict[str, list[CachedBlock]] = {}
        for entry in reversed(wanted):
            by_salt.setdefault(entry.salt, []).append(entry)
        for salt, entries in by_salt.items():
            self.executor.store([e.block_hash for e in entries], [e.block for e in entries], salt)
        self.free([entry.block for entry in victims if self.index.remove(entry)])
        self.evicted_blocks += len(victims)
        return len(victims)

    # Counting ---------------------------------------------------------------------------------------------------------

    def reclaimable(self, keep: BlockTable, busy: Iterable[BlockTable]) -> int:
        """Blocks that are free or that `make_room` could free, those of `keep` and of the `busy` tables aside."""
        held = set(keep.blocks).union(*(table.blocks for table in busy))
        return self.allocator.num_blocks - len(held)

    def check_integrity(self, busy: Iterable[BlockTable]) -> None:
        """Assert that the `busy` tables, the idle ones and the index are all who hold blocks: nothing leaked."""
        self.allocator.check_integrity()
        held: Counter[int] = Counter()
        for table in busy:
            held.update(table.blocks)
        for request in self.idle:
            assert request.table is not None, f"request {request.id} is idle without a table"
            assert request.computed < len(request.tokens), f"request {request.id} has computed what it does not have"
            used = blocks_for(request.computed, self.allocator.block_size)
            assert len(request.table.blocks) == used, (
                f"request {request.id} is idle and keeps blocks that it has not used"
            )
            held.update(request.table.blocks)
        held.update(entry.block for entry in self.index)
        for block in range(self.allocator.num_blocks):
            assert self.allocator.ref_count(block) == held[block], (
                f"block {block} has {self.allocator.ref_count(block)} references, but {held[block]} owners: leaked"
            )
