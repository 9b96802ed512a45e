"""What carries out a scheduler's decisions: computes chunks and decodes, moves blocks, owns the clock. The protocol.

`torch_executor` does it with a model and real bytes. Does not know what is decided, or why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvlab.blocks import BlockTable
from kvlab.request import Request

__all__ = ["Chunk", "Executor", "Load", "Outcome"]


@dataclass(eq=False)
class Load:
    """Blocks [first, first + n) of a chain on their way into the pool. `hashes` is the chain from its beginning.

    `table` owns the target blocks until the load is over, whatever becomes of those who wait; after that, those that a
    copy which is late may still write to. `driver` computes behind it, layer by layer; `waiters` want the same blocks
    and find them in the index afterwards.
    """

    tier: str
    salt: str
    hashes: list[bytes]
    first: int
    table: BlockTable
    handle: Any
    driver: Request | None
    waiters: list[Request] = field(default_factory=list)

    @property
    def start(self) -> int:
        """The first token that it brings."""
        return self.first * self.table.block_size

    @property
    def stop(self) -> int:
        """The end of what it brings."""
        return self.start + self.table.capacity


@dataclass(frozen=True, eq=False)
class Chunk:
    """Compute positions [start, stop) of a request; with `load`, layer by layer behind it."""

    request: Request
    start: int
    stop: int
    load: Load | None = None


@dataclass(frozen=True)
class Outcome:
    """The next token of each request whose last known position was computed; how many blocks of each load are valid.

    Where a load is not valid to its end, the chunk behind it counts for nothing. `repeats`: how many decode steps were
    run at once, by an executor to which all tokens are alike; only in a step without chunks, and within the blocks that
    the decodes have. `waited_s`: for how long of the step nothing was computed, as bytes were still to come.
    """

    tokens: Mapping[Request, int]
    valid: Mapping[Load, int] = field(default_factory=dict)
    repeats: int = 1
    waited_s: float = 0.0


class Executor(Protocol):
    """What carries out the scheduler's decisions, on a clock of its own."""

    num_blocks: int
    block_size: int
    groups: int
    tiers: tuple[str, ...]  # fastest first

    def now(self) -> float:
        """Seconds on its clock."""

    def hashes(self, request: Request, first: int, last: int) -> list[bytes]:
        """Hashes of the request's full blocks [first, last); `request.hashes` has those before."""

    def look_up(self, tier: str, hashes: Sequence[bytes], salt: str) -> None:
        """`holds` is about to be asked for these blocks of a tier: what takes time is done here, for all at once."""

    def holds(self, tier: str, block_hash: bytes, salt: str) -> bool:
        """Whether a tier holds the block, or will when a store that has begun is over. No, while the tier hangs."""

    def storing_bytes(self, tier: str, hashes: Sequence[bytes]) -> int:
        """What stores still have to write to a tier before all these blocks, which it `holds`, can be loaded."""

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> None:
        """Copy blocks to the tiers, as many as they take; on return the blocks may be written again."""

    def bytes_of(self, blocks: int) -> int:
        """What so many blocks of one chain are on a link, in one transfer."""

    def load(self, tier: str, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> Any:
        """Begin to fill `blocks` from a tier; returns a handle."""

    def remaining_bytes(self, handle: Any) -> int:
        """What a load still has to bring, as far as that is known without waiting."""

    def arrived(self, handle: Any) -> bool:
        """Go on with a load as far as that takes no waiting; whether `finish` would not wait."""

    def finish(self, handle: Any) -> int:
        """Wait for a load, but not beyond its time-out; returns how many leading blocks are valid."""

    def timed_out(self, handle: Any) -> bool:
        """Whether `finish` has stopped waiting. Asked only of a load that has not brought all."""

    def settled(self, handle: Any, wait_s: float = 0.0) -> bool:
        """Whether nothing is written to its blocks any more; waits for that up to `wait_s`. Asked only then, too."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy-on-write."""

    def freed(self, blocks: list[int]) -> None:
        """Nobody holds these blocks any more."""

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request]) -> Outcome:
        """Compute one step: the chunks, and the last token of each of `decodes` in one batch."""
