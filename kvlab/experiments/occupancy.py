"""Who holds the pool while agents take turns: a few real requests on one engine, looked at after every step.

Knows engines and text tokens. Does not judge, and does not print.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvlab.engine import Engine
from kvlab.model import Model
from kvlab.request import Request
from kvlab.tiers import HostTier

__all__ = ["watch"]

_BLOCK = 16
_PREAMBLE, _TOOL_OUTPUT, _NEW = 256, 24, 4
_OWN = {"agent A": 320, "agent B": 128, "agent C": 192, "agent D": 256}
# Who goes on after whom; B comes back soonest, A last. C asks two ways at once.
_ORDER = ("agent A", "agent B", "agent C", "agent B", "agent C, branch", "agent D", "agent B", "agent C", "agent A")


def watch(model: Model, tokens: Sequence[int], *, pool_blocks: int = 64, tool_s: float = 0.2) -> dict[str, Any]:
    """A `kvlab.occupancy/1`: bytes of full blocks in the pool by owner after each step, least recently used out first.

    Each turn ends with a tool call of `tool_s`, in which nobody computes. What leaves goes to host RAM and comes back
    when its agent does. Raises ValueError for a text that is too short.
    """
    need = _PREAMBLE + sum(_OWN.values()) + _TOOL_OUTPUT * len(_ORDER)
    if len(tokens) < need:
        raise ValueError(f"the text has {len(tokens)} tokens; these agents read {need}")
    with Engine(model, pool_blocks, _BLOCK, [HostTier(2**31)]) as engine:
        seen = _Watched(engine, model.layout(_BLOCK).block_bytes)
        prompts: dict[str, list[int]] = {}
        at = _PREAMBLE
        for name in _ORDER:
            parent = name.split(",")[0]
            more = _TOOL_OUTPUT if parent in prompts else _OWN[name]
            prompt = [*prompts.get(parent, tokens[:_PREAMBLE]), *tokens[at : at + more]]
            at += more
            request = engine.submit(prompt, _NEW)
            seen.run(request, name)
            prompts[name] = list(request.tokens)
            engine.cancel(request)  # its full blocks stay, as after any answered request
            time.sleep(tool_s)
            seen.look()
        hits = engine.metrics()["hit_tokens"]
    return {
        "schema": "kvlab.occupancy/1",
        "model": model.arch.name,
        "pool_bytes": pool_blocks * model.layout(_BLOCK).block_bytes,
        "time_s": seen.time_s,
        "owned_bytes": seen.owned_bytes(),
        "turns": seen.turns,
        "hit_tokens": dict(hits),
    }


class _Watched:
    """An engine and what was seen of its pool; a block belongs to whoever first had it."""

    def __init__(self, engine: Engine, block_bytes: int) -> None:
        self._engine, self._block_bytes = engine, block_bytes
        self._begin_s = time.perf_counter()
        self._owner: dict[bytes, str] = {}
        self._counts: list[Counter[str]] = []
        self.time_s: list[float] = []
        self.turns: list[dict[str, Any]] = []

    def run(self, request: Request, name: str) -> None:
        """Step until its answer is there."""
        begin_s = time.perf_counter() - self._begin_s
        while self._engine.step():
            self._own(request, name)
            self.look()
        self._own(request, name)
        self.look()
        self.turns.append({"owner": name, "begin_s": begin_s, "ttft_s": request.timing.ttft_s})

    def _own(self, request: Request, name: str) -> None:
        for index, block_hash in enumerate(request.hashes):
            self._owner.setdefault(block_hash, "shared preamble" if index < _PREAMBLE // _BLOCK else name)

    def look(self) -> None:
        """Count full blocks in the pool by owner, now."""
        self.time_s.append(time.perf_counter() - self._begin_s)
        index = self._engine.scheduler.index
        self._counts.append(Counter(self._owner[entry.block_hash] for entry in index))

    def owned_bytes(self) -> dict[str, list[int]]:
        """Bytes by owner, one for each look."""
        names = dict.fromkeys(self._owner.values())
        return {name: [counts[name] * self._block_bytes for counts in self._counts] for name in names}
