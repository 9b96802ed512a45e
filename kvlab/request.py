"""A request: its tokens, what state it is in, how it samples, and when things happened to it.

Plain data. Does not know blocks' contents, policies, or what runs next.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal

from kvlab.blocks import BlockTable
from kvlab.policy import Decision

__all__ = ["Request", "Sampling", "State", "Timing"]

State = Literal["waiting", "loading", "running", "paused", "finished", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is taken: the likeliest (`temperature` 0), or drawn with `seed`.

    A draw depends on seed and position alone, so that neither batching nor preemption changes it. Raises ValueError
    unless one is a number of at least 0 and the other an integer.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        temperature: object = self.temperature
        if not (isinstance(temperature, Real) and float(temperature) >= 0):
            raise ValueError(f"temperature is {temperature!r}; expected 0 (greedy) or more")
        try:
            object.__setattr__(self, "seed", operator.index(self.seed))  # numpy's would overflow
        except TypeError as error:
            raise ValueError(f"seed is {self.seed!r}; expected an integer") from error


@dataclass
class Timing:
    """Instants on the engine's clock, in seconds, of the current turn: a resume begins a new one."""

    submitted_s: float
    first_token_s: float | None = None
    ended_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token of this turn; None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.submitted_s


@dataclass(eq=False)
class Request:
    """One conversation. Changed by its engine alone; `tokens` are prompt and output of all turns so far.

    `prompt` tokens of `tokens` came from the caller up to this turn; what follows was generated in it, at most
    `max_new_tokens`. `table` holds the blocks of its computed positions while it has any. `hashes` names its full
    blocks. `failed_tiers`: loads from them went wrong in this turn, so they are not asked again in it. `reached`: the
    most tokens that were `computed` in this turn, before any preemption. `on_token` sees each new token.
    """

    id: int
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    salt: str = ""
    on_token: Callable[[Request, int], None] | None = None
    state: State = "waiting"
    turn: int = 0
    arrival: int = 0  # order of service: first come, first served, and the last to come is preempted first
    prompt: int = 0
    table: BlockTable | None = None
    hashes: list[bytes] = field(default_factory=list)
    failed_tiers: set[str] = field(default_factory=set)
    reached: int = 0
    decision: Decision | None = None
    timing: Timing = field(default_factory=lambda: Timing(0.0))
    preemptions: int = 0

    @property
    def output_tokens(self) -> list[int]:
        """What was generated in this turn."""
        return self.tokens[self.prompt :]

    @property
    def computed(self) -> int:
        """Leading tokens whose KV is in the pool."""
        return self.table.tokens if self.table is not None else 0

    def begin_turn(self, more: Sequence[int], max_new_tokens: int, arrival: int, now_s: float) -> None:
        """Append the caller's tokens and wait to be served."""
        self.tokens.extend(more)
        self.prompt, self.max_new_tokens, self.arrival = len(self.tokens), max_new_tokens, arrival
        self.timing, self.state, self.failed_tiers, self.decision = Timing(now_s), "waiting", set(), None
        self.turn, self.reached = self.turn + 1, 0

    def append(self, token: int, now_s: float, repeats: int = 1) -> bool:
        """Take a generated token, or `repeats` of which all are alike; returns whether the request has ended."""
        self.tokens.extend([token] * repeats)
        if self.timing.first_token_s is None:
            self.timing.first_token_s = now_s
        return token in self.stop_tokens or len(self.tokens) >= self.prompt + self.max_new_tokens
