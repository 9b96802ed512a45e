"""Conversations with a model on an engine: branches by name, answers as they come, and what each of them cost.

Knows engines, tokenizers and how answers look on a terminal. Does not know options, input, or where things are kept.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from kvlab.cli.console import INTERRUPTED, out, visible
from kvlab.tokenizer import TextStream
from kvlab.units import format_bytes, format_s

if TYPE_CHECKING:
    from kvlab.engine import Engine
    from kvlab.request import Request, Sampling

__all__ = ["Conversations", "CtrlC"]

_HARD_PRESSES = 3


class CtrlC:
    """While entered, Ctrl-C is counted: the exception could leave an engine half way through a step.

    The third one ends the process all the same, and nothing is stored.
    """

    def __enter__(self) -> CtrlC:
        self.presses = 0
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.presses += 1
        if self.presses >= _HARD_PRESSES:
            raise SystemExit(INTERRUPTED)


class Conversations:
    """Owns the requests of one engine, by name; one of them is current. Methods print what they did.

    A conversation begins with the messages of `opening`. They raise ValueError for what cannot be done, which leaves
    everything as it was, and KeyboardInterrupt when an answer was interrupted twice.
    """

    def __init__(
        self,
        engine: Engine,
        block_size: int,
        opening: Sequence[dict[str, str]],
        max_new_tokens: int,
        sampling: Sampling,
    ) -> None:
        self.engine, self.opening, self.max_new_tokens, self.sampling = engine, opening, max_new_tokens, sampling
        self.tokenizer = engine.model.tokenizer
        self.tokenizer.chat(opening)  # raises now what it would raise at the first message
        self.block_bytes = engine.model.layout(block_size).block_bytes
        self.most_tokens: int = min(engine.model.arch.max_positions, engine.metrics()["pool_blocks"] * block_size)
        self.name = "main"
        self._requests: dict[str, Request | None] = {self.name: None}
        self._stream: TextStream | None = None

    def _current(self) -> Request:
        request = self._requests[self.name]
        if request is None:
            raise ValueError(f"nothing has been said in {self.name} yet")
        return request

    def _ended(self, request: Request) -> bool:
        """Whether the model has ended its answer itself."""
        return request.tokens[-1] == self.tokenizer.eos

    # Talking ----------------------------------------------------------------------------------------------------------

    def say(self, message: str) -> None:
        """Send the user's message and print the answer as it comes."""
        request = self._requests[self.name]
        if request is None:
            prompt = self.tokenizer.chat([*self.opening, {"role": "user", "content": message}])
            tokens = self.tokenizer.encode(prompt)
            room = self._room(len(tokens))
            before = self._hits()
            request = self._requests[self.name] = self.engine.submit(
                tokens,
                room,
                sampling=self.sampling,
                stop_tokens=[] if self.tokenizer.eos is None else [self.tokenizer.eos],
                on_token=self._hear,
            )
        else:
            more = self.tokenizer.encode(self.tokenizer.next_turn(message), special=False)
            more = more[1:] if self._ended(request) else more
            room = self._room(len(request.tokens) + len(more))
            before = self._hits()
            self.engine.resume(request, more, room)
        self._answer(request, before)

    def resume(self) -> None:
        """Go on with an answer that was stopped; one that has ended is only brought back into the pool."""
        request = self._current()
        if not self._ended(request):
            room, before = self._room(len(request.tokens)), self._hits()
            self.engine.resume(request, max_new_tokens=room)
            self._answer(request, before)
            return
        # Something has to be computed for a request to run: the next turn's first token, on a branch that then ends.
        more = self.tokenizer.encode(self.tokenizer.next_turn(""), special=False)[1:2]
        self._room(len(request.tokens) + len(more))
        before, probe = self._hits(), self.engine.branch(request)
        self.engine.resume(probe, more, max_new_tokens=1)
        self._run(probe)
        out.print(self._status(probe, before, []), markup=False, style="dim", soft_wrap=True)
        self.engine.cancel(probe)

    def _room(self, tokens: int) -> int:
        """How many new tokens may follow `tokens`."""
        room = self.most_tokens - tokens + 1  # the last one is never computed
        if room < 1:
            raise ValueError(
                f"with this the conversation has {tokens:,} tokens, and pool and model hold {self.most_tokens:,}:"
                " nothing was sent, and the conversation is kept; /new NAME begins another, /branch NAME goes to one,"
                " and a larger --pool-blocks holds more, up to the model's"
                f" {self.engine.model.arch.max_positions:,} positions"
            )
        return min(room, self.max_new_tokens)

    def _hear(self, request: Request, token: int) -> None:
        if self._stream is not None and token not in request.stop_tokens:
            out.out(visible(self._stream.push(token)), end="", highlight=False)

    def _answer(self, request: Request, before: Counter[str]) -> None:
        """Print an answer and its cost; raises KeyboardInterrupt when it was interrupted twice."""
        self._stream = TextStream(self.tokenizer.decode, request.tokens[-1:])
        presses = self._run(request)
        out.out(visible(self._stream.finish()), highlight=False)
        self._stream = None
        notes = []
        if presses:
            notes.append("stopped; /resume goes on")
        elif not self._ended(request):
            notes.append(f"cut at {len(request.output_tokens)} tokens; /resume goes on")
        out.print(self._status(request, before, notes), markup=False, style="dim", soft_wrap=True)
        if presses > 1:
            raise KeyboardInterrupt

    def _run(self, request: Request) -> int:
        """Step until the request has finished, or Ctrl-C pauses it; returns how often that was pressed."""
        with CtrlC() as ctrl_c:
            while request.state in ("waiting", "loading", "running"):
                if ctrl_c.presses:
                    self.engine.pause(request)
                else:
                    self.engine.step()
        return ctrl_c.presses

    # What it costs ----------------------------------------------------------------------------------------------------

    def _hits(self) -> Counter[str]:
        return Counter(self.engine.metrics()["hit_tokens"])

    def _status(self, request: Request, before: Counter[str], notes: list[str]) -> str:
        """One line: tokens, time to first token, where the prompt's tokens came from, what was decided."""
        hits = {source: tokens - before[source] for source, tokens in self._hits().items()}
        found = [f"{hits.get(source, 0)} from {source}" for source in ("pool", *(t.name for t in self.engine.tiers))]
        timing, decision = request.timing, request.decision
        ttft = "none yet" if timing.ttft_s is None else format_s(timing.ttft_s)
        parts = [
            self.name,
            f"{len(request.output_tokens)} of {len(request.tokens):,} tokens are new",
            f"TTFT {ttft}",
            f"prompt: {', '.join(found)}, {max(0, request.prompt - sum(hits.values()))} computed",
            "nothing to decide" if decision is None else f"choice: {decision.choice} (/why)",
            *notes,
        ]
        return f"[{' · '.join(parts)}]"

    def why(self) -> None:
        """Print the arithmetic behind the last decision."""
        if not self.engine.decisions:
            raise ValueError(
                "nothing was decided yet: a decision is due when a tier holds a part of a prompt that the pool does"
                " not; try /offload, and then say something"
            )
        decision = self.engine.decisions[-1]
        verdict = decision.verdict
        out.print(decision.reason if verdict is None else verdict.explain(), markup=False, soft_wrap=True)
        if decision.actual_s is not None:
            regret = decision.estimated_regret_s
            more = "" if regret is None else f"; estimated regret {format_s(regret)}"
            out.print(f"it then took {format_s(decision.actual_s)}{more}", markup=False, soft_wrap=True)

    def stats(self) -> None:
        """Print the engine's counters, briefly."""
        m = self.engine.metrics()
        hits = ", ".join(f"{tokens:,} from {source}" for source, tokens in m["hit_tokens"].items()) or "none"
        made = ", ".join(f"{count} {choice}" for choice, count in m["decisions"].items()) or "none"
        lines = [
            f"tokens     {m['computed_tokens']:,} computed, {m['generated_tokens']:,} generated; hits: {hits}",
            f"decisions  {made}; estimated regret {format_s(m['estimated_regret_s'])}",
            f"pool       {m['pool_blocks'] - m['free_blocks']} of {m['pool_blocks']} blocks in use,"
            f" {m['cached_blocks']} cached, {m['evicted_blocks']} evicted, {m['copied_blocks']} copied on write",
        ]
        for name, tier in m["tiers"].items():
            failed = tier["failed_stores"] + tier["failed_blocks"]
            lines.append(
                f"{name:10} {format_bytes(tier['used_bytes'])} of {format_bytes(tier['capacity_bytes'])};"
                f" {tier['stored_blocks']} blocks stored in {format_s(tier['store_s'])},"
                f" {tier['loaded_blocks']} loaded in {format_s(tier['load_s'])},"
                f" {tier['expired_blocks']} expired, {tier['evicted_blocks']} evicted, {failed} failed"
            )
        out.print("\n".join(lines), markup=False, soft_wrap=True)

    # Coming and going -------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Pause the conversation: its blocks stay in the pool until their room is needed."""
        request = self._current()
        if request.state != "paused":
            self.engine.pause(request)
        out.print(f"paused: {request.computed} tokens stay in the pool until their room is needed")

    def offload(self) -> None:
        """Push the conversation's blocks out of the pool, to the tiers."""
        request = self._current()
        blocks = self.engine.offload(request)
        tiers = ", ".join(tier.name for tier in self.engine.tiers)
        out.print(
            f"{blocks} blocks ({format_bytes(blocks * self.block_bytes)}) left the pool for: {tiers};"
            " those that another branch uses stay, and what is behind the last whole block is computed again",
            soft_wrap=True,
        )

    def branch(self, name: str) -> None:
        """Go to the branch `name`, made from the current conversation if it is new; without a name, list them all."""
        if not name:
            for each, request in self._requests.items():
                state = "empty" if request is None else f"{len(request.tokens):,} tokens, {request.state}"
                pool = "" if request is None else f", {request.computed:,} of its own in the pool"
                out.print(f"{'*' if each == self.name else ' '} {each}: {state}{pool}", markup=False)
            return
        if name not in self._requests:
            self._requests[name] = self.engine.branch(self._current())
            out.print(f"{name} is a branch of {self.name}: they share their blocks until either goes on", markup=False)
        self.name = name

    def new(self, name: str) -> None:
        """Begin an empty conversation."""
        if not name or name in self._requests:
            raise ValueError(f"/new needs a name that is free; taken: {', '.join(self._requests)}")
        self._requests[name] = None
        self.name = name

    def store(self) -> None:
        """Push every conversation to the tiers, for another day."""
        for request in self._requests.values():
            if request is not None:
                if request.state not in ("paused", "finished"):  # Ctrl-C came before its first step
                    self.engine.pause(request)
                self.engine.offload(request)
