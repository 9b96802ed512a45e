"""Whole rounds of first-token times on a server: every prefix cold, still on the device, and behind a reset.

Knows the server as a client and clocks. What was measured stays, whatever ends the run: the user, the server, the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvlab.experiments.probe.ask import Arm, Ask
from kvlab.experiments.probe.rehearse import HIT_SHARE, MISS_SHARE, Proof, Rehearsal
from kvlab.server import Completion, Prompt, SampleError, Server, ServerError

__all__ = ["INTERRUPTED", "Measured", "Sample", "measure"]

Progress = Callable[[str], None]
INTERRUPTED = "interrupted"
_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True)
class Sample:
    """One group of `concurrency` requests at once, each with its own prefix of `tokens`.

    Lists hold one entry per request, in no order that means anything; counts are None where the server gave none.
    `fault` says why the sample does not count.
    """

    arm: Arm
    tokens: int
    concurrency: int
    round: int
    ttft_s: tuple[float, ...] = ()
    prompt_tokens: tuple[int | None, ...] = ()
    cached_tokens: tuple[float | None, ...] = ()
    fault: str | None = None


@dataclass
class Measured:
    """Every sample in the order of time. `rounds` are the whole ones.

    `stopped` says what ended the run early; `broken` is whether it was something else than the time that was given.
    """

    ask: Ask
    arms: tuple[Arm, ...]
    samples: list[Sample] = field(default_factory=list)
    rounds: int = 0
    stopped: str | None = None
    broken: bool = False


def measure(server: Server, rehearsal: Rehearsal, ask: Ask, progress: Progress = lambda _: None) -> Measured:
    """Rounds over all lengths and groups until they are done, `ask.budget_s` is spent, or something ends the run.

    In each round and length the cold sample comes first, since it is what fills the caches; the two hits follow, and
    their order turns with the round. Never raises ServerError or KeyboardInterrupt: see `Measured.stopped`.
    """
    arms: tuple[Arm, ...] = ("recompute", "resident") if rehearsal.tier is None else ("recompute", "resident", "reload")
    run = _Run(server, rehearsal, Measured(ask, arms))
    begin = server.endpoint.clock()
    try:
        for done in range(ask.rounds):
            spent_s = server.endpoint.clock() - begin
            if done and spent_s * (done + 1) / done > ask.budget_s:
                run.measured.stopped = f"the time of {ask.budget_s:g} s was over"
                break
            for concurrency in ask.concurrency:
                for tokens in ask.lengths:
                    progress(f"round {done + 1} of {ask.rounds}: {concurrency} × {tokens:,} tokens")
                    run.cell(done, concurrency, tokens)
            run.measured.rounds += 1
    except ServerError as error:
        run.measured.stopped, run.measured.broken = str(error), True
    except KeyboardInterrupt:
        run.measured.stopped, run.measured.broken = INTERRUPTED, True
    return run.measured


class _Run:
    """One run's server, samples and row of failures."""

    def __init__(self, server: Server, rehearsal: Rehearsal, measured: Measured) -> None:
        self.server, self.rehearsal, self.measured = server, rehearsal, measured
        self.failures = 0

    def cell(self, number: int, concurrency: int, tokens: int) -> None:
        """Every arm once, for `concurrency` fresh prefixes of `tokens`."""
        prefixes = [self.rehearsal.prompts.fresh(tokens) for _ in range(concurrency)]
        cold, *hits = self.measured.arms
        if not self._sample(cold, number, tokens, prefixes):
            return  # nobody has these prefixes
        for arm in reversed(hits) if number % 2 else hits:
            if arm == "reload":
                self.server.endpoint.sleep(self.rehearsal.settle_s)
                if not self.server.reset():
                    self._keep(Sample(arm, tokens, concurrency, number, fault="the server did not reset its cache"))
                    continue
            self._sample(arm, number, tokens, prefixes)

    def _sample(self, arm: Arm, number: int, tokens: int, prefixes: Sequence[Sequence[int | str]]) -> bool:
        """Whether every request of the group was answered; the sample is kept either way."""
        prompts = [self.rehearsal.prompts.prompt(prefix, self.measured.ask.suffix) for prefix in prefixes]
        before = self.server.counters() if self.rehearsal.proof == "metrics" else None
        try:
            answers = _at_once(self.server, prompts)
        except SampleError as error:
            self._keep(Sample(arm, tokens, len(prefixes), number, fault=str(error)))
            self.failures += 1
            if self.failures == _FAILURES_IN_A_ROW:
                raise ServerError(f"{_FAILURES_IN_A_ROW} requests in a row failed, the last: {error}") from error
            return False
        self.failures = 0
        cached: list[float | None] = [answer.cached_tokens for answer in answers]
        if self.rehearsal.proof == "usage":  # older vLLM leaves the number out where it is 0
            cached = [count or 0 for count in cached]
        elif before is not None:
            sent = sum(answer.prompt_tokens or 0 for answer in answers)
            added = self.server.counted_since(before, sent)
            each = None if added is None else sum(added.cached.values()) / len(answers)
            cached = [each] * len(answers)
        self._keep(
            Sample(
                arm,
                tokens,
                len(prefixes),
                number,
                tuple(answer.ttft_s for answer in answers),
                tuple(answer.prompt_tokens for answer in answers),
                tuple(cached),
                _fault(arm, tokens, cached, self.rehearsal.proof),
            )
        )
        return True

    def _keep(self, sample: Sample) -> None:
        self.measured.samples.append(sample)


def _fault(arm: Arm, tokens: int, cached: Sequence[float | None], proof: Proof) -> str | None:
    """Why these cached tokens do not prove a miss (recompute) or hits (the other arms); None where they do."""
    if proof == "none":
        return None
    for count in cached:
        if count is None:
            return "the counters moved for others too: nothing is proven"
        share = f"{count:,.0f} of {tokens:,} tokens came from a cache"
        if arm == "recompute" and count > MISS_SHARE * tokens:
            return f"not cold: {share}"
        if arm != "recompute" and count < HIT_SHARE * tokens:
            return f"not a hit: {share}"
    return None


def _at_once(server: Server, prompts: Sequence[Prompt]) -> list[Completion]:
    """One answer for each prompt, all asked at the same time. Whatever interrupts the wait ends every request."""
    if len(prompts) == 1:
        return [server.complete(prompts[0])]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(server.complete, prompt) for prompt in prompts]
        try:
            return [answer.result() for answer in asked]
        except SampleError:
            raise  # the others are answered first
        except BaseException:
            server.endpoint.abort()
            raise
