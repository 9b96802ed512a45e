"""Real engines in processes of their own that share nothing but a folder: their disk tiers open the same one.

A replica is told what to do over a pipe and answers there. Nothing but its own clock measures it, from the moment at
which its engine has a request. Does not route: whoever asks decides which replica is asked.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from kvlab.engine import Engine
from kvlab.loading import load_model
from kvlab.tiers import DiskTier

__all__ = ["Answer", "Replica", "burst", "expected_waits", "measure_moves", "measure_waits"]

_BLOCK = 16


@dataclass(frozen=True)
class Answer:
    """What came of one prompt: seconds to its first token since its replica got it, and the new tokens."""

    ttft_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class _Settings:
    folder: str
    model: str
    threads: int
    pool_tokens: int
    step_tokens: int
    disk_bytes: int


class Replica:
    """An engine in a child process, with a disk tier in `folder`, which other replicas may use as well.

    It serves one request at a time; others wait.

    `threads`: processor threads that it computes with; `pool_tokens`: room in its pool; `step_tokens`: computed in a
    step, so that a longer prompt is prefilled in chunks. Use it as a context manager, or call `close`. The child has
    begun when the constructor returns, and is ready when the first answer comes.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: str = "wide-kv",
        threads: int = 1,
        pool_tokens: int = 8192,
        step_tokens: int = 256,
        disk_bytes: int = 1 << 30,
    ) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
        self._pipe, theirs = context.Pipe()
        settings = _Settings(str(folder), model, threads, pool_tokens, step_tokens, disk_bytes)
        self._process = context.Process(target=_serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()  # so that a dead child is an end of file here

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the child finish what it is doing, and end."""
        self._pipe.close()
        self._process.join(timeout=30)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def begin(self, prompts: Sequence[Sequence[int]], new_tokens: int = 8) -> None:
        """Hand over prompts, all at once, and do not wait: `answers` does."""
        self._send("ask", [list(prompt) for prompt in prompts], new_tokens)

    def answers(self) -> list[Answer]:
        """What came of the prompts that were handed over last, in their order."""
        return [Answer(ttft_s, tuple(tokens)) for ttft_s, tokens in self._receive()]

    def ask(self, prompt: Sequence[int], new_tokens: int = 8) -> Answer:
        """One prompt and its answer."""
        self.begin([prompt], new_tokens)
        return self.answers()[0]

    def hit_tokens(self) -> dict[str, int]:
        """Prompt tokens that have not been computed so far, by where they were."""
        self._send("hits")
        return dict(self._receive())

    def empty_pool(self) -> int:
        """Store all idle blocks in the folder and drop them from the pool; returns how many left it."""
        self._send("empty")
        return int(self._receive())

    def _send(self, *message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _died(self) -> RuntimeError:
        self._process.join(timeout=5)
        return RuntimeError(
            f"a replica's process has ended (exit code {self._process.exitcode}); its own error is on the terminal"
        )


def _serve(pipe: Connection, settings: _Settings) -> None:
    """The child: do what comes over the pipe until its other end is closed."""
    torch.set_num_threads(settings.threads)
    tier = DiskTier(settings.folder, settings.disk_bytes, label="replica")
    blocks = -(-settings.pool_tokens // _BLOCK)
    # One request after the other: those that are admitted together would each look for a prefix that none has yet.
    with Engine(
        load_model(settings.model), blocks, _BLOCK, [tier], token_budget=settings.step_tokens, max_running=1
    ) as engine:
        while True:
            try:
                what, *arguments = pipe.recv()
            except (EOFError, OSError):
                return
            try:
                tier.refresh()  # what the other replicas have stored since
                pipe.send(_DOES[what](engine, *arguments))
            except Exception as error:
                pipe.send(error)


def _ask(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[tuple[float, list[int]]]:
    requests = [engine.submit(prompt, new_tokens) for prompt in prompts]
    engine.run()
    answers = []
    for request in requests:
        assert request.timing.ttft_s is not None, "a request has ended without a token"
        answers.append((request.timing.ttft_s, list(request.output_tokens)))
        engine.cancel(request)  # its full blocks stay cached
    return answers


def _hits(engine: Engine) -> dict[str, int]:
    return dict(engine.metrics()["hit_tokens"])


def _empty(engine: Engine) -> int:
    left = engine.evict(engine.scheduler.allocator.num_blocks)
    engine.executor.drain()  # stored, so that others find it
    return left


_DOES: dict[str, Callable[..., Any]] = {"ask": _ask, "hits": _hits, "empty": _empty}


# Two of them ----------------------------------------------------------------------------------------------------------


def burst(replicas: Sequence[Replica], prompts: Sequence[Sequence[int]], places: Sequence[int]) -> list[Answer]:
    """All prompts at one instant, each to its place, for one new token; the replicas work side by side.

    Answers in the prompts' order.
    """
    for place, replica in enumerate(replicas):
        replica.begin([prompt for prompt, at in zip(prompts, places, strict=True) if at == place], new_tokens=1)
    found = [iter(replica.answers()) for replica in replicas]
    return [next(found[place]) for place in places]


def measure_moves(
    a: Replica, b: Replica, documents: Sequence[Sequence[int]], questions: Iterator[Sequence[int]]
) -> dict[str, Any]:
    """For each document: A computes it, stores it, B answers a question about it, and so does A from its own pool.

    Seconds to first token are the fastest over the documents. `same_tokens`: A and B gave the same answers.
    `b_hit_tokens`: what B did not compute, by where it was. Afterwards A holds the last document in its pool.
    """
    computed, moved, resident = [], [], []
    for document in documents:
        computed.append(a.ask([*document, *next(questions)]))
        a.empty_pool()
        asked = [*document, *next(questions)]
        moved.append(b.ask(asked))
        a.ask([*document, *next(questions)])  # back into A's pool
        resident.append(a.ask(asked))
    return {
        "computed_s": min(answer.ttft_s for answer in computed),
        "moved_s": min(answer.ttft_s for answer in moved),
        "resident_s": min(answer.ttft_s for answer in resident),
        "same_tokens": [answer.tokens for answer in moved] == [answer.tokens for answer in resident],
        "b_hit_tokens": b.hit_tokens(),
    }


def measure_waits(
    a: Replica,
    b: Replica,
    document: Sequence[int],
    strangers: Sequence[Sequence[int]],
    questions: Iterator[Sequence[int]],
    count: int = 6,
) -> dict[str, list[float]]:
    """Seconds to first token of `count` questions at once, in three ways; per question the fastest of all rounds.

    A has `document` in its pool, and it is stored. "route": all to A. "move": by turns, B loads it. "compute": by
    turns, and B has to compute, for which a document that nobody has stored stands in; one of `strangers` each round.
    """
    turns = [number % 2 for number in range(count)]
    rounds: dict[str, list[list[float]]] = {"route": [], "move": [], "compute": []}
    for stranger in strangers:
        for way, places, at_b in (
            ("route", [0] * count, document),
            ("move", turns, document),
            ("compute", turns, stranger),
        ):
            b.empty_pool()
            prompts = [[*(at_b if place else document), *next(questions)] for place in places]
            rounds[way].append([answer.ttft_s for answer in burst([a, b], prompts, places)])
    return {way: [min(seconds) for seconds in zip(*found, strict=True)] for way, found in rounds.items()}


def expected_waits(measured: Mapping[str, Any], count: int = 6) -> dict[str, list[float]]:
    """The same by arithmetic from `measure_moves`, on replicas that do not disturb each other."""
    question_s = measured["resident_s"]
    late_s = {"move": measured["moved_s"] - question_s, "compute": measured["computed_s"] - question_s}
    by_turns = {
        way: [question_s * (number // 2 + 1) + number % 2 * seconds for number in range(count)]
        for way, seconds in late_s.items()
    }
    return {"route": [question_s * (number + 1) for number in range(count)], **by_turns}
