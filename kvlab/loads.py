"""Loads: what is on its way into the pool, who computes behind it, who waits for it, and what is late.

A load that is given up because a tier hangs is over for everybody who waits, but its copy may still come, any time
later. Until it has, the blocks that it may write to are in quarantine: they belong to it and to nobody else. Does not
know who runs, or what is computed instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvlab.blocks import BlockTable
from kvlab.cache import Cache
from kvlab.executor import Executor, Load
from kvlab.policy import Option
from kvlab.request import Request
from kvlab.waiting import RecentRate

__all__ = ["Loads"]


class Loads:
    """The loads of one scheduler. Owns their tables, those in quarantine included."""

    def __init__(self, executor: Executor, cache: Cache) -> None:
        self.executor, self.cache = executor, cache
        self.under_way: list[Load] = []
        self.driven: dict[Request, Load] = {}  # by the request that computes behind it
        self.quarantine: list[Load] = []
        self._asked_bytes = {tier: RecentRate(executor.now()) for tier in executor.tiers}

    @property
    def abandoned(self) -> list[Load]:
        """Those that nobody computes behind any more."""
        return [load for load in self.under_way if load.driver is None]

    @property
    def quarantined_blocks(self) -> int:
        """Blocks that a late copy may still write to."""
        return sum(len(load.table.blocks) for load in self.quarantine)

    def tables(self) -> Iterator[BlockTable]:
        """Those of all target blocks."""
        for load in (*self.under_way, *self.quarantine):
            yield load.table

    def bringing(self, hashes: list[bytes]) -> Load | None:
        """A load under way that brings one of these blocks."""
        missing = set(hashes)
        return next((load for load in self.under_way if not missing.isdisjoint(load.hashes[load.first :])), None)

    def option(self, tier: str, prefix: int, hashes: Sequence[bytes], now_s: float) -> Option:
        """What a load of the blocks with these `hashes`, up to token `prefix`, would find on its way."""
        left = [self.executor.remaining_bytes(load.handle) for load in self.under_way if load.tier == tier]
        queued = [size_bytes for size_bytes in left if size_bytes]
        return Option(
            tier,
            prefix,
            queued_bytes=sum(queued),
            queued_loads=len(queued),
            bytes_per_s=self._asked_bytes[tier].per_second(now_s),
            storing_bytes=self.executor.storing_bytes(tier, hashes),
        )

    def began(self, now_s: float) -> None:
        """A request has begun to be served."""
        for rate in self._asked_bytes.values():
            rate.begin(now_s)

    def begin(self, driver: Request, tier: str, hashes: list[bytes], first: int) -> Load:
        """Load blocks [first, …) of the chain `hashes` for `driver`, whose table gets them too."""
        allocator = self.cache.allocator
        assert driver.table is not None, "a request without blocks drives a load"
        target = allocator.new_table()
        blocks = allocator.grow(target, (len(hashes) - first) * allocator.block_size)
        allocator.share(driver.table, blocks)
        handle = self.executor.load(tier, hashes[first:], blocks, driver.salt)
        self._asked_bytes[tier].add(self.executor.bytes_of(len(blocks)))
        load = Load(tier, driver.salt, hashes, first, target, handle, driver)
        self.under_way.append(load)
        self.driven[driver] = load
        return load

    def leave(self, request: Request) -> None:
        """A request computes behind no load and waits for none; what is under way goes on without it."""
        for load in self.under_way:
            if request in load.waiters:
                load.waiters.remove(request)
        load_driven = self.driven.pop(request, None)
        if load_driven is not None:
            load_driven.driver = None

    def land(self, load: Load, valid: int, now_s: float) -> bool:
        """A load is over: index what is valid, give it to the driver, let go of the rest. Whether it was too late."""
        allocator, complete = self.cache.allocator, valid == len(load.table.blocks)
        self.under_way.remove(load)
        for place, block in enumerate(load.table.blocks[:valid]):
            self.cache.index.insert(load.hashes, load.first + place, block, load.salt, now_s)
        driver, tokens = load.driver, load.start + valid * allocator.block_size
        if driver is not None:
            assert driver.table is not None, "a request without blocks drives a load"
            del self.driven[driver]
            if not complete:
                self.cache.free(allocator.truncate(driver.table, tokens))
            driver.table.tokens = tokens
        over, load.table = load.table, allocator.new_table()
        timed_out = not complete and self.executor.timed_out(load.handle)
        if not complete and not self.executor.settled(load.handle):
            allocator.share(load.table, over.blocks[valid:])
            self.quarantine.append(load)
        else:
            allocator.release(load.table)
        self.cache.free(allocator.release(over))
        return timed_out

    def release_settled(self, wait_s: float = 0.0) -> bool:
        """Free the blocks that no late copy can reach any more, after `wait_s` at most; whether there were any."""
        settled = [load for load in self.quarantine if self.executor.settled(load.handle, wait_s)]
        for load in settled:
            self.quarantine.remove(load)
            self.cache.free(self.cache.allocator.release(load.table))
        return bool(settled)

    def check_integrity(self) -> None:
        """Assert that drivers and loads agree, and that nobody else holds a block that a late copy may write to."""
        for load in self.under_way:
            assert load.driver is None or self.driven[load.driver] is load, "a load's driver drives another"
            assert all(waiter.state == "loading" for waiter in load.waiters), "a waiter of a load does not wait"
        drivers = sum(load.driver is not None for load in self.under_way)
        assert len(self.driven) == drivers, "a driver without a load"
        for load in self.quarantine:
            for block in load.table.blocks:
                assert self.cache.allocator.ref_count(block) == 1, f"block {block} is in quarantine and in use"
