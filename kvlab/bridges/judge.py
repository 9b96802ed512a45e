"""What to answer a server that asks how much of a prompt it should load: kvlab's verdict, said once and kept.

Knows requests by id, bytes in flight, and prefixes whose load has failed. Knows no server.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

from kvlab.bridges.learning import CALIBRATING, Learner
from kvlab.units import format_bytes, format_s
from kvlab.verdict import decide

__all__ = ["Answer", "Judge", "Question"]

# A prefix whose load failed is remembered, the latest of this many.
REMEMBERED_FAILURES = 4096
# A way that looks more than this many times slower is not tried again just to measure it.
RETRY_WITHIN = 4.0


@dataclass(frozen=True)
class Question:
    """Request `request_id` has `total` tokens; [0, `resident`) are in the server's cache, `available` more could load.

    `attempt` counts preemptions: after one the question is a new one. `prefix` names the tokens that would be loaded
    and all before them (a chained hash). `active_decodes` wait while this request computes.
    """

    request_id: str
    attempt: int
    resident: int
    available: int
    total: int
    prefix: Hashable
    active_decodes: int = 0


@dataclass(frozen=True)
class Answer:
    """Load `tokens` (0: recompute), and why in one line. Both times to first token where they were predicted."""

    choice: Literal["reload", "recompute"]
    tokens: int
    reason: str
    ttft_reload_s: float | None = None
    ttft_recompute_s: float | None = None


class Judge:
    """Answers questions by `learner`'s machine; None: the model cannot be judged, so everything is loaded.

    `max_load_tokens` caps a load (None: no cap). What a second of delay to one active decode is worth is
    `decode_delay_value`, times how many decode (`decide` takes the sum). After `retry_every` recomputes in a row a load
    is tried once to measure the link again, if it looks at most four times slower (0: never).
    """

    def __init__(
        self,
        learner: Learner | None,
        *,
        block_size: int,
        max_load_tokens: int | None = None,
        decode_delay_value: float = 0.0,
        retry_every: int = 64,
    ) -> None:
        if (max_load_tokens is not None and max_load_tokens < 0) or retry_every < 0 or decode_delay_value < 0:
            raise ValueError(
                f"max_load_tokens {max_load_tokens}, retry_every {retry_every} and decode_delay_value"
                f" {decode_delay_value} must be at least 0"
            )
        self.learner = learner
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._block_size = block_size
        self._cap = max_load_tokens
        self._decode_delay_value = decode_delay_value
        self._retry_every = retry_every
        self._recomputed_in_a_row = 0
        self._said: dict[str, tuple[Question, Answer]] = {}
        self._in_flight: dict[str, int] = {}
        self._failed: OrderedDict[Hashable, None] = OrderedDict()

    @property
    def queued_bytes(self) -> int:
        """Bytes of one rank that the loads in flight still have to bring."""
        return sum(self._in_flight.values())

    def answer(self, question: Question) -> tuple[Answer, bool]:
        """The answer, and whether it is a new one: a question that was asked before gets the same answer again."""
        asked = replace(question, active_decodes=0)
        if question.request_id in self._said and self._said[question.request_id][0] == asked:
            return self._said[question.request_id][1], False
        answer = self._judge(question)
        self._said[question.request_id] = (asked, answer)
        self.counts[f"{answer.choice}_decisions"] += 1
        self.counts["loaded_tokens" if answer.tokens else "declined_tokens"] += answer.tokens or question.available
        return answer, True

    def load_began(self, request_id: str, tokens: int) -> bool:
        """Its load of `tokens` joins the queue; whether the link was idle before, so that its time can be learned."""
        alone = not self._in_flight
        self._in_flight[request_id] = self.learner.load_bytes(tokens) if self.learner else 0
        return alone

    def load_ended(self, request_id: str) -> None:
        """Its load is over, well or not."""
        self._in_flight.pop(request_id, None)

    def load_failed(self, request_id: str) -> None:
        """Its load brought nothing or wrong bytes: this prefix is not loaded again, whoever asks, it included."""
        self.load_ended(request_id)
        self.counts["failed_loads"] += 1
        if request_id in self._said:
            question, _ = self._said.pop(request_id)
            self._failed[question.prefix] = None
            while len(self._failed) > REMEMBERED_FAILURES:
                self._failed.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self._said.pop(request_id, None)
        self._in_flight.pop(request_id, None)

    def forgive(self) -> None:
        """The outside cache was reset: what failed in it is gone."""
        self._failed.clear()

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        counts, self.counts = dict(self.counts), defaultdict(float)
        return counts

    def _judge(self, question: Question) -> Answer:
        tokens, learner = question.available, self.learner
        if self._cap is not None:
            tokens = min(tokens, self._cap // self._block_size * self._block_size)
        capped = "" if tokens == question.available else f"; max_load_tokens allows {tokens} of {question.available}"
        if question.prefix in self._failed:
            return Answer("recompute", 0, "recompute: loading this prefix failed before")
        if tokens <= 0:
            return Answer("recompute", 0, f"recompute: nothing to load{capped}")
        if learner is None:
            return Answer("reload", tokens, f"reload: kvlab cannot judge this model{capped}")
        if not learner.ready:
            seen = f"{learner.loads} of {CALIBRATING} loads, {learner.prefills} of {CALIBRATING} prefills seen"
            return Answer("reload", tokens, f"reload: calibrating, {seen}{capped}")
        resident = question.resident // self._block_size * self._block_size
        prefix = question.resident + tokens
        verdict = decide(
            learner.arch,
            learner.machine,
            prefix=prefix,
            suffix=question.total - prefix,
            tier=learner.tier,
            tp=learner.tp,
            kv_dtype=learner.kv_dtype,
            block_size=self._block_size,
            queued_bytes=self.queued_bytes,
            decode_delay_value=self._decode_delay_value * question.active_decodes,
            resident=resident,
        )
        queued = f"; {format_bytes(self.queued_bytes)} queued ahead" if self.queued_bytes else ""
        answer = Answer(
            "reload" if verdict.choice == "reload" else "recompute",
            tokens if verdict.choice == "reload" else 0,
            f"{verdict.reason}{queued}{capped}",
            verdict.ttft_reload_s,
            verdict.ttft_recompute_s,
        )
        return self._tried_again(answer, tokens)

    def _tried_again(self, answer: Answer, tokens: int) -> Answer:
        """The same, or a load instead of the latest of many recomputes: a link that is never used is never learned."""
        if answer.choice == "reload":
            self._recomputed_in_a_row = 0
            return answer
        self._recomputed_in_a_row += 1
        reload_s, recompute_s = answer.ttft_reload_s or math.inf, answer.ttft_recompute_s or 0.0
        if not self._retry_every or self._recomputed_in_a_row < self._retry_every:
            return answer
        if reload_s > RETRY_WITHIN * recompute_s:
            return answer
        self._recomputed_in_a_row = 0
        why = f"reload: to measure the link again; {format_s(reload_s)} against {format_s(recompute_s)} is expected"
        return replace(answer, choice="reload", tokens=tokens, reason=why)
