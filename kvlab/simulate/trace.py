"""Request traces: who asks when, for how many tokens, and which blocks of prompts are the same. Tokens are unknown.

Two formats are read. Mooncake's JSONL (Qin et al., FAST'25, github.com/kvcache-ai/Mooncake), one request a line:
    {"timestamp": 1500, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, …]}
with `timestamp` in milliseconds and one id for each 512 tokens of the prompt, the last one being partial. An id names
its block *and all before it*. And a CSV of agent sessions, one turn a row, in order within each session:
    session,gap_s,input_tokens,output_tokens,prefix,prefix_tokens
The first `gap_s` of a session is when it begins; a later one is the tool call: the pause between the end of the turn
before and this one. `input_tokens` are new in the turn; what came before stays in the context. `prefix` (optional)
names a preamble: sessions with the same name begin with the same `prefix_tokens` of their first input.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["BLOCK_TOKENS", "SAMPLE", "Session", "Trace", "Turn", "read_trace"]

BLOCK_TOKENS = 512  # of a block that a trace names
SAMPLE = "mooncake-1k"  # the first 1,000 requests of Mooncake's conversation trace, which ship with kvlab

_REQUEST_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_TURN_COLUMNS = ("session", "gap_s", "input_tokens", "output_tokens")
_PREFIX_COLUMNS = ("prefix", "prefix_tokens")


@dataclass(frozen=True)
class Turn:
    """`input_tokens` more arrive `gap_s` after the turn before (a session's first: after the trace has begun)."""

    gap_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Session:
    """A conversation. `blocks` names the 512-token blocks of its first `shared_tokens`; the rest is its own."""

    id: int
    turns: tuple[Turn, ...]
    blocks: Sequence[int] = ()
    shared_tokens: int = 0

    @property
    def tokens(self) -> int:
        """Of all turns, output included."""
        return sum(turn.input_tokens + turn.output_tokens for turn in self.turns)

    def hashes(self, first: int, last: int, block_size: int) -> list[bytes]:
        """What stands for the hashes of full blocks [first, last): the same name means the same tokens and past."""
        per_name, shared = BLOCK_TOKENS // block_size, min(last, self.shared_tokens // block_size)
        names = [b"trace %d %d" % (self.blocks[index // per_name], index % per_name) for index in range(first, shared)]
        return names + [b"session %d %d" % (self.id, index) for index in range(max(first, shared), last)]


@dataclass(frozen=True)
class Trace:
    """Sessions by arrival, and how many lines were skipped as bad."""

    name: str
    sessions: tuple[Session, ...]
    skipped: int = 0

    @property
    def requests(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def least_gap_s(self) -> float:
        """The shortest pause inside a session; inf where all have one turn."""
        return min((turn.gap_s for session in self.sessions for turn in session.turns[1:]), default=math.inf)

    def at_rate(self, rate: float) -> Trace:
        """The trace with sessions beginning `rate` times as often; pauses inside them stay. Raises ValueError."""
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"rate is {rate:g}; expected a positive factor, 1 for the trace's own pace")
        sessions = []
        for session in self.sessions:
            first = replace(session.turns[0], gap_s=session.turns[0].gap_s / rate)
            sessions.append(replace(session, turns=(first, *session.turns[1:])))
        return replace(self, sessions=tuple(sessions))

    def repeated(self, count: int, *, same_blocks: bool = False) -> Trace:
        """The trace `count` times after itself: other sessions each time and, unless `same_blocks`, other blocks."""
        starts = [session.turns[0].gap_s for session in self.sessions]
        period_s = (starts[-1] - starts[0]) * len(starts) / max(1, len(starts) - 1)
        sessions = []
        for index in range(count):
            for number, session in enumerate(self.sessions):
                first = replace(session.turns[0], gap_s=session.turns[0].gap_s + index * period_s)
                blocks = session.blocks if same_blocks else array("q", (b + (index << 40) for b in session.blocks))
                turns = (first, *session.turns[1:])
                sessions.append(Session(index * len(starts) + number, turns, blocks, session.shared_tokens))
        return replace(self, sessions=tuple(sessions), skipped=self.skipped * count)


def read_trace(source: str | Path, *, skip_bad: bool = False, limit: int | None = None) -> Trace:
    """The trace in a .jsonl or .csv file, or the sample by name; at most `limit` sessions.

    Raises ValueError with the number of the first bad line, unless `skip_bad` counts such lines; OSError without file.
    """
    if str(source) == SAMPLE:
        text = resources.files("kvlab").joinpath("data", "traces", f"{SAMPLE}.jsonl").read_text(encoding="utf-8")
        return _build(SAMPLE, _mooncake, text.splitlines(), skip_bad, limit)
    path = Path(source)
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"trace {str(source)!r} is neither a .jsonl or .csv file nor {SAMPLE}")
    with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a mark first
        try:
            return _build(path.name, _mooncake if path.suffix == ".jsonl" else _agents, file, skip_bad, limit)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error


_Read = TypeVar("_Read")


class _BadLineError(ValueError):
    """What is wrong with a line."""


@dataclass
class _Lines:
    """What a reader sees: it says what is wrong with the current line, and here that is an error or is counted."""

    name: str
    skip_bad: bool
    skipped: int = 0
    number: int = 0

    def parsed(self, read: Callable[..., _Read], *arguments: Any) -> _Read | None:
        """What `read` makes of the current line; None where it is bad and to be skipped."""
        try:
            return read(*arguments)
        except _BadLineError as error:
            if not self.skip_bad:
                raise ValueError(
                    f"{self.name}, line {self.number}: {error}; mend it, or let --skip-bad count such lines"
                ) from error
            self.skipped += 1
            return None


_Reader = Callable[[Iterable[str], _Lines], Iterator[Session]]


def _build(name: str, reader: _Reader, lines: Iterable[str], skip_bad: bool, limit: int | None) -> Trace:
    state = _Lines(name, skip_bad)
    sessions = []
    for session in reader(lines, state):
        sessions.append(session)
        if len(sessions) == limit:
            break
    if not sessions:
        raise ValueError(f"{name} has no request that could be read ({state.skipped} lines were skipped as bad)")
    sessions.sort(key=lambda session: session.turns[0].gap_s)  # stable: those of one instant keep their order
    return Trace(name, tuple(sessions), state.skipped)


def _count(row: Mapping[str, Any], key: str, least: int) -> int:
    value = row[key]
    if isinstance(value, str):  # from a CSV
        try:
            value = int(value)
        except ValueError as error:
            raise _BadLineError(f"{key} is {value!r}; expected a whole number") from error
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _BadLineError(f"{key} is {value!r}; expected a whole number of at least {least}")
    return value


# Mooncake -------------------------------------------------------------------------------------------------------------


@dataclass
class _Chains:
    """The block before each block: an id must name everything up to it, so it always follows the same one."""

    before: dict[int, int] = field(default_factory=dict)

    def check(self, ids: Sequence[int]) -> None:
        for parent, block in zip([-1, *ids], ids, strict=False):
            if self.before.setdefault(block, parent) != parent:
                raise _BadLineError(
                    f"block {block} follows {parent} here and {self.before[block]} before; an id names its block and"
                    " all before it"
                )


def _mooncake(lines: Iterable[str], state: _Lines) -> Iterator[Session]:
    chains, last_ms = _Chains(), 0.0
    for state.number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        session = state.parsed(_request, line, state.number, last_ms, chains)
        if session is not None:
            last_ms = session.turns[0].gap_s * 1e3
            yield session


def _request(line: str, number: int, last_ms: float, chains: _Chains) -> Session:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _BadLineError(f"not JSON ({error})") from error
    missing = [key for key in _REQUEST_KEYS if not isinstance(row, dict) or key not in row]
    if missing:
        raise _BadLineError(f"no {', '.join(missing)}; a request has {', '.join(_REQUEST_KEYS)}")
    at_ms, ids = row["timestamp"], row["hash_ids"]
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not math.isfinite(at_ms) or at_ms < 0:
        raise _BadLineError(f"timestamp is {at_ms!r}; expected milliseconds from 0 on")
    if at_ms < last_ms:
        raise _BadLineError(f"timestamp {at_ms:g} is before {last_ms:g}, that of the request before; time goes on")
    tokens, new_tokens = _count(row, "input_length", 1), _count(row, "output_length", 1)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**63 for i in ids):
        raise _BadLineError("hash_ids is not a list of whole numbers from 0 on")
    if len(ids) != -(-tokens // BLOCK_TOKENS):
        raise _BadLineError(
            f"{len(ids)} hash_ids for {tokens} tokens; expected {-(-tokens // BLOCK_TOKENS)}, one for each"
            f" {BLOCK_TOKENS}"
        )
    chains.check(ids)
    return Session(number, (Turn(at_ms / 1e3, tokens, new_tokens),), array("q", ids), tokens)


# Agents ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Agent:
    turns: list[Turn] = field(default_factory=list)
    prefix: str = ""
    prefix_tokens: int = 0
    broken: bool = False


def _agents(lines: Iterable[str], state: _Lines) -> Iterator[Session]:
    rows = csv.DictReader(lines, skipinitialspace=True)
    columns = rows.fieldnames or []
    if not set(_TURN_COLUMNS) <= set(columns) <= {*_TURN_COLUMNS, *_PREFIX_COLUMNS}:
        raise ValueError(
            f"{state.name}, line 1: columns {', '.join(columns)}; expected {', '.join(_TURN_COLUMNS)} and, if"
            f" sessions share a preamble, {', '.join(_PREFIX_COLUMNS)}"
        )
    agents: dict[str, _Agent] = {}
    for row in rows:
        state.number = rows.line_num
        agent = agents.setdefault(row["session"], _Agent())
        if state.parsed(_turn, row, agent) is None:
            agent.broken = True  # without this turn the context of the next ones is not known
    first_block: dict[tuple[str, int], int] = {}  # ids of the preambles' blocks
    for number, agent in enumerate(agents.values()):
        if agent.turns:
            blocks = [
                first_block.setdefault((agent.prefix, index), len(first_block))
                for index in range(-(-agent.prefix_tokens // BLOCK_TOKENS))
            ]
            yield Session(number, tuple(agent.turns), array("q", blocks), agent.prefix_tokens)


def _turn(row: Mapping[str, Any], agent: _Agent) -> Turn:
    if agent.broken:
        raise _BadLineError(f"an earlier turn of session {row['session']!r} is bad")
    if any(row.get(name) is None for name in _TURN_COLUMNS) or None in row:
        raise _BadLineError(f"it does not have the columns of the first line: {', '.join(_TURN_COLUMNS)}, …")
    try:
        gap_s = float(row["gap_s"])
    except ValueError as error:
        raise _BadLineError(f"gap_s is {row['gap_s']!r}; expected seconds") from error
    if not (math.isfinite(gap_s) and gap_s >= 0):
        raise _BadLineError(f"gap_s is {row['gap_s']}; expected 0 or more seconds: time goes on")
    turn = Turn(gap_s, _count(row, "input_tokens", 1), _count(row, "output_tokens", 1))
    prefix, prefix_tokens = row.get("prefix") or "", row.get("prefix_tokens") or "0"
    length = _count({"prefix_tokens": prefix_tokens}, "prefix_tokens", 0)
    if (prefix or length) and (agent.turns or length > turn.input_tokens or not (prefix and length)):
        raise _BadLineError(
            f"prefix {prefix!r} of {length} tokens; only the first turn of a session has one, by name and length, and"
            f" it is part of its {turn.input_tokens} input_tokens"
        )
    if not agent.turns:
        agent.prefix, agent.prefix_tokens = prefix, length
    agent.turns.append(turn)
    return turn
