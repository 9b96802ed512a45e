"""The bench that experiments share: one model, one pool, one transfer, some tiers, and honest clocks.

Every timing here ends in a value on the host (a token id, a finished transfer), so no launch is mistaken for work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from kvlab.blocks import BlockAllocator, BlockTable, blocks_for
from kvlab.fingerprint import Fingerprint, block_hashes
from kvlab.memory import check_fits
from kvlab.model import Model
from kvlab.pool import BlockPool
from kvlab.prefix import reloadable_tokens
from kvlab.streams import Streams, streams_for
from kvlab.tiers import Tier
from kvlab.transfer import Transfer, TransferReport

__all__ = ["Resumed", "Rig"]


@dataclass(frozen=True)
class Resumed:
    """One resume: logits [vocab] of the last position, seconds to its first token, and the transfer behind it."""

    logits: Tensor
    ttft_s: float
    transfer: TransferReport | None = None


class Rig:
    """Owns a pool of `tables` × `max_tokens` tokens for `model`, and the streams. Use as a context manager."""

    def __init__(self, model: Model, *, block_size: int, max_tokens: int, tables: int = 3, groups: int = 1) -> None:
        self.model = model
        self.block_size = block_size
        self.layout = model.layout(block_size)
        num_blocks = tables * blocks_for(max_tokens, block_size)
        check_fits("the KV pool", num_blocks * self.layout.block_bytes, model.device)
        self.pool = BlockPool(self.layout, num_blocks, device=model.device)
        self.allocator = BlockAllocator(num_blocks, block_size)
        self.streams: Streams = streams_for(model.device)
        self.transfer = Transfer(self.pool, self.streams, groups=groups)
        self.fingerprint = model.fingerprint(block_size)

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the streams' worker."""
        self.streams.close()

    def open(self, tier: Tier) -> Tier:
        """Prepare `tier` to hold this rig's blocks."""
        self.transfer.open(tier, self.fingerprint)
        return tier

    def table(self, tokens: int) -> BlockTable:
        """A table of fresh blocks for `tokens` tokens."""
        table = self.allocator.new_table()
        self.allocator.grow(table, tokens)
        return table

    def release(self, table: BlockTable) -> None:
        """Give the table's blocks back."""
        self.pool.freed(self.allocator.release(table))

    def copy_of(self, salt: str) -> Fingerprint:
        """The fingerprint under another tenant's salt: names another stored copy of the same text."""
        return replace(self.fingerprint, salt=salt)

    def prefill(self, tokens: Sequence[int], table: BlockTable, start: int = 0) -> Resumed:
        """Compute `tokens` at [start, …) and take the first new token; timed until it is on the host."""
        self._synchronise()
        begin = time.perf_counter()
        logits = self.model.prefill(tokens, self.pool, table.blocks, start)
        int(logits.argmax())  # the first new token: what the user waits for, and a synchronisation
        return Resumed(logits, time.perf_counter() - begin)

    def recompute(self, tokens: Sequence[int]) -> Resumed:
        """Compute all of `tokens` in fresh blocks and take the first new token; the blocks are given back."""
        self._synchronise()
        begin = time.perf_counter()
        table = self.table(len(tokens))
        logits = self.model.prefill(tokens, self.pool, table.blocks, 0)
        int(logits.argmax())
        ttft_s = time.perf_counter() - begin
        self.release(table)
        return Resumed(logits, ttft_s)

    def offload(self, tier: Tier, tokens: Sequence[int], table: BlockTable, salt: str = "") -> TransferReport:
        """Store the whole blocks of `tokens` in `tier`; returns when they are there."""
        fingerprint = self.copy_of(salt)
        hashes = block_hashes(fingerprint, tokens, self.block_size)
        return self.transfer.offload(tier, table.blocks[: len(hashes)], hashes, fingerprint, source_held=True).wait()

    def resume(self, tier: Tier, tokens: Sequence[int], prefix: int, salt: str = "") -> Resumed:
        """Reload the whole blocks of `tokens[:prefix]` into fresh blocks, compute the rest, take the first token.

        Raises RuntimeError when a block did not come back whole: an experiment must not time a miss as a reload.
        """
        kept = reloadable_tokens(prefix, len(tokens), self.block_size)
        fingerprint = self.copy_of(salt)
        hashes = block_hashes(fingerprint, tokens[:kept], self.block_size)
        self._synchronise()
        begin = time.perf_counter()
        table = self.table(len(tokens))
        report = self.transfer.reload(tier, hashes, table.blocks[: len(hashes)], fingerprint).wait()
        if report.valid_blocks < len(hashes):
            self.release(table)
            why = "; ".join(report.failures) or "not stored there"
            raise RuntimeError(f"{tier.name} returned {report.valid_blocks} of {len(hashes)} blocks: {why}")
        logits = self.model.prefill(tokens[kept:], self.pool, table.blocks, kept)
        int(logits.argmax())
        ttft_s = time.perf_counter() - begin
        self.release(table)
        return Resumed(logits, ttft_s, report)

    def _synchronise(self) -> None:
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)
