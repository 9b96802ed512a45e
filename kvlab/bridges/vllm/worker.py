"""The workers' half: watches the inner connector load, checks what it brought, and reports what failed.

A load that raises or brings wrong bytes must not end the server, nor reach a reader: its blocks are reported, and vLLM
computes them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from kvlab.bridges.checksums import Checksums
from kvlab.bridges.vllm.messages import Load, StepDone, StepOrder

__all__ = ["WorkerHalf"]


class WorkerHalf:
    """One worker's part of a step: `bind`, `guarded` around whatever loads, `saved`, then `failed_blocks` and `done`.

    `reportable`: whether vLLM can take failed blocks by number (it cannot with several KV cache groups); where not,
    what the inner connector raises goes on to vLLM. `warn` gets a format string and its values.
    """

    def __init__(self, checksums: Checksums, *, reportable: bool, warn: Callable[..., None]) -> None:
        self._checksums = checksums
        self._reportable = reportable
        self._warn = warn
        self._caches: list[torch.Tensor] = []
        self._order = StepOrder(None, 0)
        self._load_s = 0.0
        self._unchecked = 0
        self._failed: dict[str, str] = {}
        self._failed_step = 0
        self._broken = False
        self._bad_blocks: set[int] = set()

    def register(self, caches: Mapping[str, Any], blocks: int) -> None:
        """Remember the caches of all layers, where they lie in host memory with `blocks` blocks in front."""
        tensors = [cache for cache in caches.values() if isinstance(cache, torch.Tensor)]
        same = len(tensors) == len(caches) and all(t.device.type == "cpu" and t.shape[0] == blocks for t in tensors)
        self._caches = tensors if same else []

    def bind(self, order: StepOrder) -> None:
        """A step begins."""
        self._order = order
        self._load_s = 0.0
        self._unchecked = 0
        self._failed = {}
        self._broken = False

    @property
    def spoiled(self) -> bool:
        """Whether what this step computes may rest on blocks that no load has filled, and must not be kept.

        Any request may share them. So until the scheduler has heard of the failure: it may have the next step ready.
        """
        return bool(self._failed) or self._order.heard < self._failed_step

    def guarded(self, load: Callable[[], None], errors: Callable[[], set[int]]) -> None:
        """Run a part of the inner connector's loading on the step's clock; what it raises fails the step's loads.

        So do the blocks that it reports itself (`errors`), asked for now: that must be known before anything is saved.
        """
        if self._broken:
            return  # its blocks are computed again anyway, and the inner connector may be in the middle of something
        began_s = time.perf_counter()
        try:
            load()
        except Exception as error:  # whatever a storage library may raise
            if not self._order.loads or not self._reportable:
                raise
            self._broken = True
            for one in self._order.loads:
                self._fail(one, one.block_ids, f"{type(error).__name__}: {error}")
        finally:
            if self._order.loads:
                self._load_s += time.perf_counter() - began_s
        if self._order.loads:
            self._hear(errors())

    def check(self) -> None:
        """Compare every block that the step's loads may have written with what it is known to hold."""
        if not self._caches:
            return
        for load in self._order.loads:
            if load.request_id in self._failed:
                continue
            wrong = []
            for name, block in zip(load.names, load.block_ids, strict=False):
                found = self._checksums.look(name, self._checksum(block))
                if found == "wrong" or (found == "unknown" and self._checksums.persistent):
                    wrong.append(block)
                elif found == "unknown":
                    self._unchecked += 1
            if wrong:
                self._fail(load, wrong, f"{len(wrong)} of {len(load.block_ids)} blocks have other bytes than stored")

    def saved(self) -> None:
        """The step's forward pass is over: remember the bytes of the blocks that it filled."""
        if not self._caches or self.spoiled:
            return
        for blocks in self._order.computed.values():
            self._checksums.record((name, self._checksum(block)) for name, block in blocks)

    def failed_blocks(self) -> set[int]:
        """Blocks to compute again; asked once a step."""
        blocks, self._bad_blocks = self._bad_blocks, set()
        return blocks

    def done(self, inner: Any) -> StepDone:
        """What the scheduler is told about the step."""
        return StepDone(inner, self._order.step, self._load_s, dict(self._failed), self._unchecked)

    def _hear(self, reported: set[int]) -> None:
        self._bad_blocks |= reported  # handed on with `failed_blocks`, those of other loads too
        for load in self._order.loads:
            blocks = [block for block in load.block_ids if block in reported]
            if blocks and load.request_id not in self._failed:
                self._fail(load, blocks, f"{len(blocks)} blocks were reported by the wrapped connector")

    def _fail(self, load: Load, blocks: Sequence[int], why: str) -> None:
        self._failed[load.request_id] = why
        self._failed_step = self._order.step
        self._bad_blocks |= set(blocks)
        self._warn(
            "kvlab: loading %d tokens for request %s failed (%s); computing them", load.tokens, load.request_id, why
        )

    def _checksum(self, block: int) -> int:
        digest = xxhash.xxh3_64()
        for cache in self._caches:
            digest.update(cache[block].contiguous().view(torch.uint8).numpy().data)
        return digest.intdigest()
