"""What one request's reload or recompute does to those that are decoding: the gaps between their tokens, on the engine.

Knows the engine and clocks. Returns plain records; does not print or draw.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kvlab.blocks import blocks_for
from kvlab.engine import Engine
from kvlab.model import Model
from kvlab.policy import Policy
from kvlab.records import machine_facts, median, now_utc
from kvlab.request import Request
from kvlab.tiers import Tier

__all__ = ["SCHEMA", "FileWriter", "Way", "measure", "share_link"]

SCHEMA = "kvlab.interference/1"
_BLOCK = 16
_QUIET_TOKENS = 12  # decoded before anybody comes back: what is normal


@dataclass(frozen=True)
class Way:
    """How a request comes back: from which tier, by which policy, and what else runs on the machine meanwhile."""

    make_tier: Callable[[], Tier]
    policy: Policy
    meanwhile: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)


class FileWriter:
    """A thread that writes a file over and over, as an agent's tool may do; starts and stops with its `with`."""

    def __init__(self, folder: Path, size_bytes: int = 2**24) -> None:
        self._file, self._data = folder / "tool-output", b"x" * size_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self.written_bytes = 0

    def __enter__(self) -> FileWriter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        while not self._stop.is_set():
            with self._file.open("wb") as file:
                file.write(self._data)
                file.flush()
                os.fsync(file.fileno())
            self.written_bytes += len(self._data)


def measure(
    model: Model,
    tokens: Sequence[int],
    ways: Mapping[str, Way],
    *,
    prefix: int = 768,
    suffix: int = 16,
    active: int = 2,
    token_budget: int = 128,
) -> dict[str, Any]:
    """`active` requests decode; another comes back whose `prefix` is in a tier; by each way, once.

    Per way: "gaps_s" between the tokens of one that decodes, from which gap on ("first") and up to which ("stop") the
    other is being served, its "ttft_s", and "delay_s": how much longer the gaps between took than as many quiet ones.
    Raises ValueError for too short a text.
    """
    if prefix % _BLOCK or len(tokens) < prefix + suffix + active * 32:
        raise ValueError(f"prefix {prefix} must be whole blocks, and more text than {len(tokens)} tokens is needed")
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "parameters": {"prefix": prefix, "suffix": suffix, "active": active, "token_budget": token_budget},
        "ways": {name: _serve(model, tokens, way, prefix, suffix, active, token_budget) for name, way in ways.items()},
    }


def _serve(
    model: Model, tokens: Sequence[int], way: Way, prefix: int, suffix: int, active: int, token_budget: int
) -> dict[str, Any]:
    longest = 2048
    blocks = blocks_for(prefix + suffix, _BLOCK) + active * blocks_for(longest, _BLOCK) + 4
    at_s: list[float] = []
    with Engine(model, blocks, _BLOCK, [way.make_tier()], way.policy, token_budget=token_budget) as engine:
        _store(engine, tokens[:prefix])
        others = [
            engine.submit(
                tokens[-32 * (i + 1) :][:32],
                longest - 32,
                on_token=None if i else lambda _request, _token: at_s.append(time.perf_counter()),
            )
            for i in range(active)
        ]
        with way.meanwhile():
            while len(at_s) < _QUIET_TOKENS:
                engine.step()
            first = len(at_s)
            comes_back = engine.submit(tokens[: prefix + suffix], 1)
            while comes_back.timing.first_token_s is None:
                engine.step()
            stop = len(at_s)
            while len(at_s) < stop + 3:
                engine.step()
        for request in others:
            engine.cancel(request)
        ttft_s = comes_back.timing.ttft_s
    gaps_s = [b - a for a, b in itertools.pairwise(at_s)]
    # The first gap is behind the others' own prefill. Gap i ends at token i + 1.
    quiet_s, served = median(gaps_s[1 : first - 1]), gaps_s[first - 1 : stop - 1]
    return {
        "gaps_s": gaps_s,
        "first": first - 1,
        "stop": stop - 1,
        "quiet_s": quiet_s,
        "ttft_s": ttft_s,
        "delay_s": sum(served) - len(served) * quiet_s,
    }


def _store(engine: Engine, prefix: Sequence[int]) -> None:
    """Leave the blocks of `prefix` in the tier and nothing of it in the pool."""
    request = engine.submit(prefix, 1)
    engine.run()
    engine.cancel(request)
    engine.evict(len(engine.scheduler.index))
    engine.executor.drain()


def share_link(
    model: Model,
    tokens: Sequence[int],
    make_tier: Callable[[], Tier],
    policy: Policy,
    *,
    prefix: int,
    requests: int = 2,
) -> dict[str, Any]:
    """Time to first token of requests that come back over one link: the first alone, then all of them at once.

    Each has a prefix of its own. Returns {"alone_s", "together_s"}, the second in the order in which they asked.
    """
    suffix = _BLOCK
    if len(tokens) < requests * (prefix + suffix):
        raise ValueError(f"{requests} × ({prefix} + {suffix}) tokens are needed; the text has {len(tokens)}")
    prompts = [tokens[i * (prefix + suffix) :][: prefix + suffix] for i in range(requests)]
    with Engine(model, (requests + 1) * blocks_for(prefix + suffix, _BLOCK), _BLOCK, [make_tier()], policy) as engine:
        for prompt in prompts:
            _store(engine, prompt[:prefix])

        def serve(wanted: Sequence[Sequence[int]]) -> list[float]:
            served: list[Request] = [engine.submit(prompt, 1) for prompt in wanted]
            engine.run()
            seconds = [request.timing.ttft_s for request in served]
            for request in served:
                engine.cancel(request)
            engine.evict(len(engine.scheduler.index))
            engine.executor.drain()
            return [s for s in seconds if s is not None]

        return {"alone_s": serve(prompts[:1])[0], "together_s": serve(prompts)}
