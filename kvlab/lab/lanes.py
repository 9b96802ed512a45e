"""Lanes of operations and the waits between them, in plain Python: what a transfer does, without a device.

Three lanes, "compute", "copy" and "io", run beside each other; each runs its own operations in order. An operation is
a list [lane, verb, …]:

    ["copy", "gather", block, slot]     pool block → staging slot      ["io", "write", slot, block]    slot → tier
    ["copy", "scatter", slot, block]    staging slot → pool block      ["io", "read", block, slot]     tier → slot
    [lane, "record", event]             the event ends when this lane has come so far
    [lane, "wait", event]               this lane goes on when the event has ended

As with CUDA events, a wait is for the newest record of that name earlier in the list; with none, it waits for nothing.
Around the learner's list stand compute's own: it has written the pool blocks and recorded "computed" before, and it
uses the blocks afterwards (an offload's go to the next owner, a reload's are attended to).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal

__all__ = [
    "LANES",
    "Bar",
    "Direction",
    "bars",
    "corrupt_blocks",
    "offload_operations",
    "problem",
    "reload_operations",
]

Direction = Literal["offload", "reload"]
Operation = Sequence[Any]
LANES = ("compute", "copy", "io")
_ARGUMENTS = {"gather": 2, "scatter": 2, "write": 2, "read": 2, "record": 1, "wait": 1}
_LANE_OF = {"gather": "copy", "scatter": "copy", "write": "io", "read": "io"}
_VERBS = {"offload": ("gather", "write"), "reload": ("read", "scatter")}
# What compute does to every block before and after the list.
_AROUND = {"offload": ("prefill", "next owner"), "reload": ("last owner", "attend")}
# Milliseconds of one operation in the picture, such that a missing wait shows: files are slower than copies.
_MS = {
    "prefill": 1,
    "next owner": 1,
    "last owner": 3,
    "attend": 1,
    "gather": 1.5,
    "scatter": 1.5,
    "write": 2.4,
    "read": 2.4,
}


@dataclass(frozen=True)
class Bar:
    """One operation in time: `block` is whose bytes it moves, `wrong` whether they were not the right ones."""

    lane: str
    verb: str
    block: int
    begin_ms: float
    end_ms: float
    wrong: bool


# What the lists look like when they are right ------------------------------------------------------------------------


def offload_operations(blocks: Sequence[int], slots: int, without: str = "") -> list[list[Any]]:
    """Gather each block into one of `slots` staging slots and write it to the tier, with every wait but `without`.

    The waits: "computed" (gather after the kernels that wrote the blocks), "gathered" (write after its gather),
    "written" (gather into a slot after the write that last used it), "reuse" (compute after the gathers).
    """
    operations: list[list[Any]] = [] if without == "computed" else [["copy", "wait", "computed"]]
    for i, block in enumerate(blocks):
        if i >= slots and without != "written":
            operations.append(["copy", "wait", f"written {i - slots}"])
        operations += [["copy", "gather", block, i % slots], ["copy", "record", f"gathered {i}"]]
        if without != "gathered":
            operations.append(["io", "wait", f"gathered {i}"])
        operations += [["io", "write", i % slots, block], ["io", "record", f"written {i}"]]
    if blocks and without != "reuse":
        operations.append(["compute", "wait", f"gathered {len(blocks) - 1}"])
    return operations


def reload_operations(blocks: Sequence[int], slots: int, without: str = "") -> list[list[Any]]:
    """Read each block into a staging slot and scatter it into the pool, with every wait but `without`.

    The waits: "computed" (scatter after the kernels that last used the blocks), "read" (scatter after its read),
    "scattered" (read into a slot after the scatter that last used it), "attend" (compute after the scatters).
    """
    operations: list[list[Any]] = [] if without == "computed" else [["copy", "wait", "computed"]]
    for i, block in enumerate(blocks):
        if i >= slots and without != "scattered":
            operations.append(["io", "wait", f"scattered {i - slots}"])
        operations += [["io", "read", block, i % slots], ["io", "record", f"read {i}"]]
        if without != "read":
            operations.append(["copy", "wait", f"read {i}"])
        operations += [["copy", "scatter", i % slots, block], ["copy", "record", f"scattered {i}"]]
    if blocks and without != "attend":
        operations.append(["compute", "wait", f"scattered {len(blocks) - 1}"])
    return operations


# What they do --------------------------------------------------------------------------------------------------------


def problem(operations: Any, direction: Direction, blocks: Sequence[int], slots: int) -> str:
    """What is wrong with the form of a list of operations, in a sentence; "" when it can be run."""
    if not isinstance(operations, list):
        return f"expected a list of operations, got {operations!r}"
    if len(operations) > 100 * (len(blocks) + 1):
        return f"{len(operations):,} operations for {len(blocks)} blocks: a handful for each block is enough"
    used = dict.fromkeys(blocks, 0)
    for i, operation in enumerate(operations):
        where = f"operation {i}, {operation!r},"
        if not isinstance(operation, list) or len(operation) < 3 or operation[0] not in LANES:
            return f"{where} is not a list [lane, verb, …] with a lane of {', '.join(LANES)}"
        lane, verb, *arguments = operation
        if verb not in _ARGUMENTS or len(arguments) != _ARGUMENTS[verb]:
            return f"{where} is not known: verbs are gather, scatter, write, read (two numbers), record, wait (a name)"
        if verb in ("record", "wait"):
            continue
        if verb not in _VERBS[direction] or lane != _LANE_OF[verb]:
            return f"{where} does not belong here: {direction} uses {' and '.join(_VERBS[direction])}"
        block, slot = arguments if verb in ("gather", "read") else reversed(arguments)
        if type(block) is not int or block not in used or slot not in range(slots):
            return f"{where} names block {block}, slot {slot}; there are blocks {list(blocks)}, slots 0 to {slots - 1}"
        used[block] += 1
    missing = [block for block, times in used.items() if times < 2]
    return f"block {missing[0]} is never moved all the way" if missing else ""


def corrupt_blocks(
    operations: Sequence[Operation], direction: Direction, blocks: Sequence[int]
) -> dict[str, list[int]]:
    """Blocks whose bytes came out wrong, for every order of preference among the lanes, by name ("io, copy, compute").

    Whenever more than one lane could go on, the first in that order does: so each lane is as early, and as late, as the
    waits allow. Nothing that a device does beside that can be worse, as long as an operation is not cut in half.
    """
    found = {}
    for order in permutations(LANES):
        memory = _memory(direction, blocks)
        for operation in _in_order(_program(operations, direction, blocks), order):
            _run(operation, memory)
        found[", ".join(order)] = _wrong(memory, direction, blocks)
    return found


def bars(operations: Sequence[Operation], direction: Direction, blocks: Sequence[int]) -> list[Bar]:
    """The same list on a clock, every lane as early as it may: when each operation runs, and which go wrong.

    An operation reads when it begins and writes when it ends; it is torn when its source changes in between.
    """
    program = _program(operations, direction, blocks)
    free, recorded, times = dict.fromkeys(LANES, 0.0), dict[int, float](), []
    for i, operation in enumerate(program):
        lane, verb = operation[0], operation[1]
        begin = free[lane]
        if verb == "record":
            recorded[i] = begin
        elif verb == "wait":
            source = _record_before(program, i)
            free[lane] = max(begin, recorded[source]) if source is not None else begin
        else:
            free[lane] = begin + _MS[verb]
            times.append((begin, free[lane], operation))
    return _play(times, direction, blocks)


def _play(times: Sequence[tuple[float, float, Operation]], direction: Direction, blocks: Sequence[int]) -> list[Bar]:
    memory = _memory(direction, blocks)
    # Ends before begins at the same instant: what has just been written is there.
    moments = sorted(
        (moment, begins, i) for i, (begin, end, _) in enumerate(times) for moment, begins in ((begin, 1), (end, 0))
    )
    read: dict[int, Any] = {}
    wrong: set[int] = set()
    for _, begins, i in moments:
        operation = times[i][2]
        if begins:
            read[i] = _source(operation, memory)
            continue
        if _source(operation, memory) != read[i]:
            read[i] = "torn"
        _store(operation, memory, read[i])
        block = _block(operation)
        if not operation[1].endswith("owner") and read[i] != f"block {block}":
            wrong.add(i)
    return [
        Bar(operation[0], operation[1], _block(operation), begin, end, i in wrong)
        for i, (begin, end, operation) in enumerate(times)
    ]


# The little machine --------------------------------------------------------------------------------------------------


def _program(operations: Sequence[Operation], direction: Direction, blocks: Sequence[int]) -> list[Operation]:
    """The list between what compute did before and what it does afterwards."""
    before, after = ([["compute", verb, block] for block in blocks] for verb in _AROUND[direction])
    return [*before, ["compute", "record", "computed"], *operations, *after]


def _record_before(program: Sequence[Operation], at: int) -> int | None:
    """The place of the newest record that the wait at `at` is for."""
    name = program[at][2]
    return next((i for i in range(at - 1, -1, -1) if program[i][1] == "record" and program[i][2] == name), None)


def _in_order(program: Sequence[Operation], order: Sequence[str]) -> Iterator[Operation]:
    """The operations as they run when, of the lanes that can go on, the first in `order` does.

    It ends: a wait is only ever for a record that stands before it in the list.
    """
    lanes = {lane: [i for i, operation in enumerate(program) if operation[0] == lane] for lane in LANES}
    recorded: set[int | None] = {None}
    while any(lanes.values()):
        for lane in order:
            if not lanes[lane]:
                continue
            i = lanes[lane][0]
            if program[i][1] == "wait" and _record_before(program, i) not in recorded:
                continue
            lanes[lane].pop(0)
            if program[i][1] == "record":
                recorded.add(i)
            elif program[i][1] != "wait":
                yield program[i]
            break


def _memory(direction: Direction, blocks: Sequence[int]) -> dict[Any, Any]:
    """("pool" | "slot" | "tier" | "seen", number) → whose bytes are there; what is missing holds an older owner's."""
    return {("tier", block): f"block {block}" for block in blocks} if direction == "reload" else {}


def _run(operation: Operation, memory: dict[Any, Any]) -> None:
    _store(operation, memory, _source(operation, memory))


def _source(operation: Operation, memory: dict[Any, Any]) -> Any:
    """What an operation would move now."""
    verb, *arguments = operation[1:]
    if verb == "prefill":
        return f"block {arguments[0]}"
    if verb.endswith("owner"):
        return verb
    place = {"gather": "pool", "write": "slot", "read": "tier", "scatter": "slot", "attend": "pool"}[verb]
    return memory.get((place, arguments[0]), "stale")


def _store(operation: Operation, memory: dict[Any, Any], value: Any) -> None:
    verb, *arguments = operation[1:]
    place = {"gather": "slot", "write": "tier", "read": "slot", "scatter": "pool", "attend": "seen"}.get(verb, "pool")
    memory[place, arguments[-1]] = value


def _block(operation: Operation) -> int:
    verb, *arguments = operation[1:]
    return int(arguments[1] if verb in ("write", "scatter") else arguments[0])


def _wrong(memory: dict[Any, Any], direction: Direction, blocks: Sequence[int]) -> list[int]:
    place = "tier" if direction == "offload" else "seen"
    return [block for block in blocks if memory.get((place, block)) != f"block {block}"]
