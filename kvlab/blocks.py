"""Who owns which KV block: a free list, reference counts, block tables, copy-on-write.

Block ids only. Does not know tensors, tokens' contents, or where the bytes are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["BlockAllocator", "BlockTable", "OutOfBlocksError", "blocks_for"]


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; nothing was taken."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens: ceil, so that k·block_size tokens take exactly k blocks."""
    return -(-tokens // block_size)


@dataclass
class BlockTable:
    """The blocks of one sequence, in order: token i lives in `blocks[i // block_size]` at slot `i % block_size`.

    `tokens` counts the positions whose KV is (or is being) written. Mutable; changed only by its `BlockAllocator`,
    and `tokens` by whoever writes the KV.
    """

    block_size: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit in the blocks held."""
        return len(self.blocks) * self.block_size

    def slots(self, start: int, stop: int) -> list[int]:
        """The pool slot (block · block_size + offset) of each position in [start, stop)."""
        if not 0 <= start <= stop <= self.capacity:
            raise ValueError(f"positions [{start}, {stop}) are outside the {self.capacity} slots of this table")
        return [
            self.blocks[position // self.block_size] * self.block_size + position % self.block_size
            for position in range(start, stop)
        ]


class BlockAllocator:
    """Hands out `num_blocks` block ids to tables, by reference. Owns the free list, the counts and its tables."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a positive integer")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A stack: the block freed last is reused first, while its lines are still in the cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_count = [0] * num_blocks
        self._tables: dict[int, BlockTable] = {}
        self._kept: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """How many hold `block`: tables, and a cache that keeps it."""
        return self._ref_count[block]

    def new_table(self) -> BlockTable:
        """An empty table that this allocator keeps count of."""
        table = BlockTable(self.block_size)
        self._tables[id(table)] = table
        return table

    def grow(self, table: BlockTable, tokens: int) -> list[int]:
        """Extend `table` to hold `tokens` tokens; returns the new blocks. All or nothing: raises OutOfBlocksError."""
        self._own(table)
        need = blocks_for(tokens, self.block_size) - len(table.blocks)
        if need > len(self._free):
            raise OutOfBlocksError(f"{need} more blocks are needed, {len(self._free)} of {self.num_blocks} are free")
        new = [self._free.pop() for _ in range(need)]
        for block in new:
            self._ref_count[block] = 1
        table.blocks.extend(new)
        return new

    def share(self, table: BlockTable, blocks: Iterable[int]) -> None:
        """Append blocks that are already held elsewhere; each gains a reference."""
        self._own(table)
        blocks = list(blocks)
        for block in blocks:
            if self._ref_count[block] < 1:
                raise ValueError(f"block {block} is free; only a held block can be shared")
        for block in blocks:
            self._ref_count[block] += 1
        table.blocks.extend(blocks)

    def keep(self, block: int) -> None:
        """Hold one more reference to a held block, without a table: at most one for each block, a cache's."""
        if self._ref_count[block] < 1 or block in self._kept:
            raise ValueError(f"block {block} is free or kept already; only a held block can be kept, and once")
        self._kept.add(block)
        self._ref_count[block] += 1

    def let_go(self, block: int) -> bool:
        """End `keep`; returns whether the block became free. Raises KeyError for a block that is not kept."""
        self._kept.remove(block)
        return bool(self._unref((block,)))

    def fork(self, parent: BlockTable) -> BlockTable:
        """A second table over the same blocks and tokens (a branch); call `writable` before writing into either."""
        self._own(parent)
        child = self.new_table()
        self.share(child, parent.blocks)
        child.tokens = parent.tokens
        return child

    def writable(self, table: BlockTable, position: int) -> tuple[int, int] | None:
        """Make the block of `position` private to `table`.

        Returns (old, new) when it was shared: the caller copies the bytes old → new first. Raises OutOfBlocksError.
        """
        self._own(table)
        index = position // self.block_size
        old = table.blocks[index]
        if self._ref_count[old] == 1:
            return None
        if not self._free:
            raise OutOfBlocksError(f"block {old} is shared and no block is free to copy it into")
        new = self._free.pop()
        self._ref_count[old] -= 1
        self._ref_count[new] = 1
        table.blocks[index] = new
        return old, new

    def truncate(self, table: BlockTable, tokens: int) -> list[int]:
        """Drop the references behind the first `tokens` tokens; returns the blocks that became free."""
        self._own(table)
        keep = blocks_for(tokens, self.block_size)
        if not 0 <= keep <= len(table.blocks):
            raise ValueError(f"cannot truncate a table of {table.capacity} slots to {tokens} tokens")
        dropped = table.blocks[keep:]
        del table.blocks[keep:]
        table.tokens = min(table.tokens, tokens)
        return self._unref(dropped)

    def release(self, table: BlockTable) -> list[int]:
        """Drop the table and its references; returns the blocks that became free. The table must not be used again."""
        self._own(table)
        del self._tables[id(table)]
        freed = self._unref(table.blocks)
        table.blocks, table.tokens = [], 0
        return freed

    def _unref(self, blocks: Iterable[int]) -> list[int]:
        freed = []
        for block in blocks:
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._free.append(block)
                freed.append(block)
        return freed

    def check_integrity(self) -> None:
        """Assert that free + held = total, no block is free twice, and counts are what tables hold and caches keep."""
        held: Counter[int] = Counter(self._kept)
        for table in self._tables.values():
            assert len(set(table.blocks)) == len(table.blocks), f"a table holds a block twice: {table.blocks}"
            assert table.tokens <= table.capacity, f"a table claims {table.tokens} tokens in {table.capacity} slots"
            held.update(table.blocks)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & held.keys(), f"blocks are both free and held: {sorted(free & held.keys())}"
        assert len(free) + len(held) == self.num_blocks, (
            f"{len(free)} free + {len(held)} held is not {self.num_blocks}: blocks leaked"
        )
        for block in range(self.num_blocks):
            assert self._ref_count[block] == held[block], (
                f"block {block} counts {self._ref_count[block]} references, but {held[block]} hold it"
            )

    def _own(self, table: BlockTable) -> None:
        if self._tables.get(id(table)) is not table:
            raise ValueError("this table is not (or no longer) one of this allocator's tables")
