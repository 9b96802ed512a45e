"""Which blocks of a prompt are already somewhere: the longest run of known hashes, and how much of it may be used.

`PrefixIndex` keeps full blocks in the pool after their requests. Hashes, ids and counts only; no tensors, no tiers.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvlab.blocks import BlockAllocator

__all__ = ["CachedBlock", "PrefixIndex", "matched_blocks", "reloadable_tokens"]


def matched_blocks(hashes: Sequence[bytes], known: Callable[[bytes], bool]) -> int:
    """How many leading blocks are known. A block behind a gap is useless: its keys attend to the missing one."""
    for count, block_hash in enumerate(hashes):
        if not known(block_hash):
            return count
    return len(hashes)


def reloadable_tokens(prefix: int, prompt: int, block_size: int) -> int:
    """Tokens that a reload can bring for a cached `prefix` of a `prompt` (both in tokens).

    Whole blocks only: a partial block is never stored. And less than the prompt: its last token is always computed,
    since its logits are what the request came for.
    """
    return min(prefix, prompt - 1) // block_size * block_size


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block that stays in the pool after its request: `block` by id, `position` of its first token.

    `parent` is the hash of the block before it. `used_s`: when it was last asked for, on the engine's clock.
    """

    block_hash: bytes
    block: int
    position: int
    parent: bytes | None
    salt: str
    used_s: float


class PrefixIndex:
    """Full blocks in the pool by chained hash. Owns its entries, and keeps a reference to each of their blocks.

    A block that nobody else holds is idle and can be evicted, but not before the blocks that come right behind it:
    without it they would be useless.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._entries: dict[bytes, CachedBlock] = {}
        self._children: dict[bytes, int] = {}  # entries by the hash of their parent, be that here or not
        self._ends: dict[bytes, CachedBlock] = {}  # entries without children here, which are few

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._entries.values())

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._entries

    def matched(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of `hashes` are here."""
        return matched_blocks(hashes, self._entries.__contains__)

    def match(self, hashes: Sequence[bytes], now_s: float) -> list[int]:
        """The blocks of the longest leading run of `hashes` that is here; marks them as used."""
        blocks = []
        for block_hash in hashes[: self.matched(hashes)]:
            entry = self._entries[block_hash]
            entry.used_s = now_s
            blocks.append(entry.block)
        return blocks

    def insert(self, hashes: Sequence[bytes], index: int, block: int, salt: str, now_s: float) -> None:
        """Keep `block`, held by somebody as the `index`-th of `hashes`; the first copy of a hash stays."""
        block_hash = hashes[index]
        if block_hash in self._entries:
            return
        self._allocator.keep(block)
        parent = hashes[index - 1] if index else None
        position = index * self._allocator.block_size
        entry = CachedBlock(block_hash, block, position, parent, salt, now_s)
        self._entries[block_hash] = entry
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            self._ends.pop(parent, None)
        if block_hash not in self._children:
            self._ends[block_hash] = entry

    def idle(self, entry: CachedBlock) -> bool:
        """Whether nobody but this index holds the block."""
        return self._allocator.ref_count(entry.block) == 1

    def victims(
        self, count: int, value: Callable[[CachedBlock], float], among: Sequence[bytes] | None = None
    ) -> list[CachedBlock]:
        """Up to `count` idle blocks, the least valuable first, each behind its children where they are idle too.

        `among`: only blocks with these hashes, and none that a chain of others goes on from.
        """
        known = self._entries if among is None else {h: self._entries[h] for h in among if h in self._entries}
        ends = (self._ends if among is None else {h: self._ends[h] for h in known if h in self._ends}).values()
        heap = [(value(entry), order, entry) for order, entry in enumerate(ends) if self.idle(entry)]
        heapq.heapify(heap)
        chosen: list[CachedBlock] = []
        gone: defaultdict[bytes, int] = defaultdict(int)
        while heap and len(chosen) < count:
            entry = heapq.heappop(heap)[2]
            chosen.append(entry)
            parent = None if entry.parent is None else known.get(entry.parent)
            if parent is not None and self.idle(parent):
                gone[parent.block_hash] += 1
                if gone[parent.block_hash] == self._children[parent.block_hash]:  # it is the end of its chain now
                    heapq.heappush(heap, (value(parent), len(ends) + len(chosen), parent))
        if among is None and len(chosen) < count:
            # Only blocks in front of one that somebody holds are left: better useless than stuck.
            taken = {entry.block_hash for entry in chosen}
            rest = [entry for h, entry in self._entries.items() if h not in taken and self.idle(entry)]
            chosen += sorted(rest, key=lambda entry: -entry.position)[: count - len(chosen)]
        return chosen

    def remove(self, entry: CachedBlock) -> bool:
        """Forget an entry; returns whether its block has become free."""
        del self._entries[entry.block_hash]
        self._ends.pop(entry.block_hash, None)
        if entry.parent is not None:
            self._children[entry.parent] -= 1
            if not self._children[entry.parent]:
                del self._children[entry.parent]
                if entry.parent in self._entries:
                    self._ends[entry.parent] = self._entries[entry.parent]
        return self._allocator.let_go(entry.block)
