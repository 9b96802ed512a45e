"""A trace on the real engine and the wall clock, to hold the simulator against.

Traces do not say tokens: each named block gets random ones of its own, so that whatever is shared there is shared here.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass, field

from kvlab.engine import Engine
from kvlab.request import Request
from kvlab.simulate import BLOCK_TOKENS, Session, Trace, Turn

__all__ = ["agent_trace", "replay"]


@dataclass(frozen=True, order=True)
class _Due:
    """A session's next turn, at an instant of `perf_counter`."""

    at_s: float
    session: int
    turn: int = field(compare=False, default=0)
    request: Request | None = field(compare=False, default=None)


def agent_trace(agents: int, turns: int, *, preamble: int, new_tokens: int, gap_s: float, seed: int = 0) -> Trace:
    """Agents that share a preamble and come back after tool calls, at random instants and with random lengths."""
    draw = random.Random(seed)
    sessions, at_s = [], 0.0
    for number in range(agents):
        at_s += draw.expovariate(agents / gap_s)
        first = Turn(at_s, preamble + draw.randint(new_tokens, 4 * new_tokens), 8)
        later = [
            Turn(gap_s * draw.uniform(0.5, 1.5), draw.randint(new_tokens // 2, 2 * new_tokens), 8)
            for _ in range(turns - 1)
        ]
        blocks = range(-(-preamble // BLOCK_TOKENS))
        sessions.append(Session(number, (first, *later), blocks, preamble))
    return Trace(f"{agents} agents", tuple(sessions))


def replay(engine: Engine, trace: Trace) -> list[float]:
    """Seconds to the first token of each turn, in the order in which they ended; submitted when they are due."""
    begin_s = time.perf_counter()
    pending = [_Due(begin_s + s.turns[0].gap_s, number) for number, s in enumerate(trace.sessions)]
    heapq.heapify(pending)
    running: dict[Request, tuple[_Due, float]] = {}  # with how late it was submitted, which the user waits for as well
    ttfts_s = []
    while pending or running:
        while pending and pending[0].at_s <= time.perf_counter():
            due = heapq.heappop(pending)
            request = _submit(engine, trace.sessions[due.session], due)
            running[request] = (due, time.perf_counter() - due.at_s)
        if engine.scheduler.busy:
            engine.step()
        elif pending:
            time.sleep(max(0.0, pending[0].at_s - time.perf_counter()))
        for request in [request for request in running if request.state == "finished"]:
            due, late_s = running.pop(request)
            ttft_s = request.timing.ttft_s
            assert ttft_s is not None, "a turn has ended without a token"
            ttfts_s.append(ttft_s + late_s)
            turns = trace.sessions[due.session].turns
            if due.turn + 1 < len(turns):
                at_s = time.perf_counter() + turns[due.turn + 1].gap_s
                heapq.heappush(pending, _Due(at_s, due.session, due.turn + 1, request))
            else:
                engine.cancel(request)  # its full blocks stay, for others
    return ttfts_s


def _submit(engine: Engine, session: Session, due: _Due) -> Request:
    turn, vocab = session.turns[due.turn], engine.model.arch.vocab
    shared = session.shared_tokens if due.turn == 0 else 0
    tokens: list[int] = []
    for block in session.blocks if shared else ():
        draw = random.Random(f"block {block}")
        tokens += [draw.randrange(vocab) for _ in range(BLOCK_TOKENS)]
    draw = random.Random(f"session {session.id} {due.turn}")
    tokens = tokens[:shared] + [draw.randrange(vocab) for _ in range(turn.input_tokens - shared)]
    if due.request is None:
        return engine.submit(tokens, turn.output_tokens)
    return engine.resume(due.request, tokens, turn.output_tokens)
