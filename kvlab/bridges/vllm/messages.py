"""What the scheduler's half of the connector and the workers' halves tell each other, around the inner one's words.

Plain picklable data: with several workers it travels between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

__all__ = ["Load", "StepDone", "StepOrder"]


@dataclass(frozen=True)
class Load:
    """A load that a step waits for: `tokens` positions into the last of `block_ids`, which begin at position 0.

    `names` are the chained names of those blocks (empty: nobody can check them).
    """

    request_id: str
    tokens: int
    block_ids: tuple[int, ...]
    names: tuple[bytes, ...] = ()


@dataclass
class StepOrder(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers. `computed`: {request id: ((name, block id), …)} of the blocks that this step fills.

    `heard` is the latest step whose news the scheduler had when it scheduled this one.
    """

    inner: Any
    step: int
    loads: tuple[Load, ...] = ()
    computed: dict[str, tuple[tuple[bytes, int], ...]] = field(default_factory=dict)
    heard: int = 0


@dataclass
class StepDone(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler: seconds that the step's loads took, and {request id: why} of those that failed."""

    inner: Any
    step: int
    load_s: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    unchecked_blocks: int = 0

    def aggregate(self, other: StepDone) -> StepDone:
        """Both ranks' news: the slower load counts, and one rank's failure is everybody's."""
        inner = self.inner if other.inner is None else other.inner
        if self.inner is not None and other.inner is not None:
            inner = self.inner.aggregate(other.inner)
        return StepDone(
            inner,
            max(self.step, other.step),
            max(self.load_s, other.load_s),
            {**self.failed, **other.failed},
            self.unchecked_blocks + other.unchecked_blocks,
        )
