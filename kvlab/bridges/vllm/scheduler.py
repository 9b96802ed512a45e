"""The scheduler's half: asks the judge, keeps account of loads in flight, and times steps so that the judge learns.

Reads vLLM's requests and scheduler output by attribute and imports nothing of it but the messages' base classes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvlab.bridges.judge import Judge, Question
from kvlab.bridges.learning import Chunk, StepClock
from kvlab.bridges.vllm.messages import Load, StepDone, StepOrder

__all__ = ["SchedulerHalf"]


@dataclass
class _Pending:
    """A load that vLLM has allocated blocks for. `alone`: nothing else was in flight when it began.

    `failed`: reported before it was over, which vLLM allows for an asynchronous one.
    """

    load: Load
    asynchronous: bool
    began_s: float
    alone: bool
    step: int = 0
    failed: bool = False


class SchedulerHalf:
    """What the connector does in the scheduler's process.

    `block_size` and `hash_block_size` in tokens, as vLLM's scheduler and its block hashes count. `identity` (32 bytes)
    goes into block names: what besides the tokens decides a block's bytes. `checked`: whether workers check blocks.
    `say` and `warn` get a format string and its values; `clock` is seconds that only grow.
    """

    def __init__(
        self,
        judge: Judge,
        *,
        block_size: int,
        hash_block_size: int,
        identity: bytes,
        checked: bool,
        say: Callable[..., None],
        warn: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.judge = judge
        self._block_size = block_size
        self._hash_block_size = hash_block_size
        self._identity = identity
        self._checked = checked and block_size % hash_block_size == 0
        self._say, self._warn, self._clock = say, warn, clock
        self._steps = StepClock()
        self._step = 0
        self._heard = 0
        self._decodes = 0
        self._requests: dict[str, Any] = {}
        self._offered: dict[str, tuple[int, bool]] = {}  # (tokens in the cache, asynchronous) of the latest question
        self._pending: dict[str, _Pending] = {}

    def matched(self, request: Any, resident: int, found: tuple[int | None, bool]) -> tuple[int | None, bool]:
        """Answer a question, `found` being what the inner connector can load beyond `resident` tokens."""
        available, asynchronous = found
        self._requests[request.request_id] = request
        if available is None:
            return found
        if available <= 0 or request.skip_reading_prefix_cache:
            return 0, False  # connectors have answered with negative numbers
        answer, new = self.judge.answer(
            Question(
                request.request_id,
                request.num_preemptions,
                resident,
                available,
                request.num_tokens,
                self._prefix(request, resident + available),
                self._decodes,
            )
        )
        if new:
            self._say(
                "kvlab: request %s: %s (%d tokens resident, %d outside, %d in all)",
                request.request_id,
                answer.reason,
                resident,
                available,
                request.num_tokens,
            )
        self._offered[request.request_id] = resident, asynchronous
        return answer.tokens, asynchronous and answer.tokens > 0

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Note that `tokens` (0: none) will be loaded into the end of `blocks`' first ones."""
        if tokens <= 0:
            return
        resident, asynchronous = self._offered.get(request.request_id, (0, False))
        count = -(-(resident + tokens) // self._block_size)
        ids = tuple(blocks.get_block_ids()[0][:count])
        names = tuple(self._names(request, 0, count)) if self._checked else ()
        alone = self.judge.load_began(request.request_id, tokens)
        load = Load(request.request_id, tokens, ids, names)
        self._pending[request.request_id] = _Pending(load, asynchronous, self._clock(), alone)

    def schedule(self, output: Any, inner: Any) -> StepOrder:
        """The order for the step that vLLM has scheduled, around the inner connector's own."""
        self._step += 1
        chunks = tuple(self._chunks(output))
        self._decodes = sum(not chunk.prefill for chunk in chunks)
        self._steps.begin(self._step, chunks, self._clock())
        loads = []
        for chunk in chunks:
            if chunk.loaded:
                pending = self._pending[chunk.request_id]
                pending.step = self._step
                loads.append(pending.load)
        computed = {}
        state = getattr(output, "kv_connector_block_state", None)
        if self._checked and state is not None:
            for chunk in chunks:
                if filled := tuple(self._filled(chunk, state)):
                    computed[chunk.request_id] = filled
        return StepOrder(inner, self._step, tuple(loads), computed, self._heard)

    def done(self, news: StepDone | None, received: Iterable[str], invalid: set[int], lost: Iterable[str]) -> None:
        """A step's results are in.

        `received`: requests whose asynchronous load is over, `lost`: those whose load brought nothing; `invalid`:
        blocks that failed to load, whoever says so. Both may come before the load is over.
        """
        now_s, learner = self._clock(), self.judge.learner
        failed = dict(news.failed) if news else {}
        ended = [p for p in self._pending.values() if news is not None and 0 < p.step <= news.step]
        ended += [self._pending[one] for one in received if one in self._pending]
        for pending in [*ended, *(p for p in self._pending.values() if p.asynchronous)]:
            hit = pending.load.request_id in lost or not invalid.isdisjoint(pending.load.block_ids)
            pending.failed = pending.failed or hit
        for pending in ended:
            request_id = pending.load.request_id
            if pending.failed:
                failed.setdefault(request_id, "reported by the wrapped connector")
            del self._pending[request_id]
            if request_id in failed:
                self.judge.load_failed(request_id)
                self._warn("kvlab: request %s is computed again: %s", request_id, failed[request_id])
                continue
            self.judge.load_ended(request_id)
            took_s = now_s - pending.began_s if pending.asynchronous else news.load_s if news else 0.0
            self.judge.counts["loads"] += 1
            self.judge.counts["load_seconds"] += took_s
            if pending.asynchronous and pending.alone and learner is not None:
                learner.saw_load(pending.load.tokens, took_s)
        if news is not None:
            self._heard = max(self._heard, news.step)
            if news.unchecked_blocks:
                self.judge.counts["unchecked_blocks"] += news.unchecked_blocks
            self._steps.end(news.step, now_s, news.load_s, learner, failed)

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self.judge.forget(request_id)
        for kept in (self._requests, self._offered, self._pending):
            kept.pop(request_id, None)

    def _chunks(self, output: Any) -> Iterable[Chunk]:
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, rows in output.num_scheduled_tokens.items():
            start, request = starts.get(request_id, 0), self._requests.get(request_id)
            prompt = request.num_prompt_tokens if request is not None else 0
            pending = self._pending.get(request_id)
            synchronous = pending is not None and not pending.asynchronous and pending.step == 0
            loaded = pending.load.tokens if pending is not None and synchronous else 0
            yield Chunk(request_id, start, rows, start < prompt, loaded)

    def _filled(self, chunk: Chunk, state: Any) -> Iterable[tuple[bytes, int]]:
        """Names and ids of the prompt's blocks that are whole once this chunk is computed."""
        request, ids = self._requests.get(chunk.request_id), state.get_block_ids(chunk.request_id)
        if request is None or not chunk.prefill or ids is None:
            return ()
        first = chunk.start // self._block_size
        last = min(chunk.start + chunk.rows, request.num_prompt_tokens) // self._block_size
        return zip(self._names(request, first, last), ids[0][first:last], strict=False)

    def _names(self, request: Any, first: int, last: int) -> Iterable[bytes]:
        """Names of the request's blocks [first, last), as far as vLLM has hashed them."""
        per_block = self._block_size // self._hash_block_size
        for index in range(first, last):
            at = (index + 1) * per_block - 1
            if at < len(request.block_hashes):
                yield hashlib.sha256(self._identity + bytes(request.block_hashes[at])).digest()

    def _prefix(self, request: Any, tokens: int) -> Any:
        at = tokens // self._hash_block_size - 1
        return bytes(request.block_hashes[at]) if 0 <= at < len(request.block_hashes) else request.request_id
