"""Lesson 05: which blocks hold a range, who owns them, and in what order they leave and come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from kvlab.lab.lanes import Direction, corrupt_blocks, offload_operations, problem, reload_operations
from kvlab.lab.task import Mistake, Task

__all__ = ["TASKS"]

# Blocks of a range ---------------------------------------------------------------------------------------------------


def _ranges(rng: random.Random) -> list[tuple[Any, ...]]:
    block = rng.choice((8, 16, 32))
    first, more = rng.randrange(1, 20), rng.randrange(2, 9)
    inside = rng.randrange(1, block - 1)
    return [
        (first * block, (first + more) * block, block),
        (first * block, (first + more) * block + inside, block),
        (first * block + inside, (first + more) * block, block),
        (first * block + inside, first * block + inside, block),
        (first * block + inside, first * block + inside + 1, block),
    ]


blocks_for = Task(
    "blocks_for",
    _ranges,
    lambda start, stop, block: sorted({position // block for position in range(start, stop)}),
    (
        Mistake(
            "No position, no block: where start equals stop the list is empty, inside a block too.",
            lambda start, stop, block: list(range(start // block, -(-stop // block))),
        ),
        Mistake(
            "One block too many where the range ends at a block's edge: position `stop` is not part of [start, stop).",
            lambda start, stop, block: list(range(start // block, stop // block + 1)),
        ),
        Mistake(
            "That begins at block 0: blocks before `start` hold nothing of this range.",
            lambda _start, stop, block: list(range(-(-stop // block))),
        ),
        Mistake(
            "The last block is missing where it is only partly filled: it holds tokens all the same.",
            lambda start, stop, block: list(range(start // block, stop // block)),
        ),
        Mistake(
            "The first block is missing where the range begins inside it.",
            lambda start, stop, block: list(range(-(-start // block), -(-stop // block))),
        ),
    ),
)

# An allocator --------------------------------------------------------------------------------------------------------


class _Right:
    """Lowest free id first, reference counts, all or nothing."""

    def __init__(self, num_blocks: int) -> None:
        self.unused = list(range(num_blocks))
        self.references = [0] * num_blocks

    def alloc(self, n: int) -> list[int] | None:
        if n > len(self.unused):
            return None
        return self._take(n)

    def _take(self, n: int) -> list[int]:
        self.unused.sort()
        taken, self.unused = self.unused[:n], self.unused[n:]
        for block in taken:
            self.references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def free(self, blocks: list[int]) -> list[int]:
        self._refuse(blocks)
        return self._unref(blocks)

    def _refuse(self, blocks: list[int]) -> None:
        for block in set(blocks):
            if self.references[block] < blocks.count(block):
                raise ValueError(f"block {block} is not held")

    def _unref(self, blocks: Iterable[int]) -> list[int]:
        freed = []
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] <= 0:
                freed.append(block)
        self.unused += freed
        return freed


class _IgnoresReferences(_Right):
    def free(self, blocks: list[int]) -> list[int]:
        self._refuse(blocks)
        for block in blocks:
            self.references[block] = 0
        self.unused += blocks
        return blocks


class _TakesWhatThereIs(_Right):
    def alloc(self, n: int) -> list[int] | None:
        taken = self._take(n)
        return taken if len(taken) == n else None


class _RefusesTheLast(_Right):
    def alloc(self, n: int) -> list[int] | None:
        return None if n >= len(self.unused) else self._take(n)


class _FreesTwice(_Right):
    def free(self, blocks: list[int]) -> list[int]:
        return self._unref(blocks)


class _FreesHalf(_Right):
    def free(self, blocks: list[int]) -> list[int]:
        freed = []
        for block in blocks:
            self._refuse([block])
            freed += self._unref([block])
        return freed


def _drive(make: Callable[[int], Any], num_blocks: int, script: list[list[Any]]) -> list[Any]:
    """Run a script on the learner's class; one entry a step: what came back, or "refused" for a ValueError."""
    allocator, held, transcript = make(num_blocks), dict[str, list[int]](), list[Any]()
    for verb, *names in script:
        if verb == "alloc":
            name, count = names
            blocks = allocator.alloc(count)
            held[name] = list(blocks or [])
            transcript.append(blocks)
        elif verb == "share":
            held[names[1]] = list(held[names[0]])
            allocator.share(list(held[names[0]]))
            transcript.append("shared")
        else:  # the names stay: a script may free them again
            try:
                freed = allocator.free([block for name in names for block in held[name]])
                transcript.append(sorted(freed))
            except ValueError:
                transcript.append("refused")
    return transcript


def _scripts(rng: random.Random) -> list[tuple[Any, ...]]:
    a, b = rng.randrange(2, 5), rng.randrange(2, 5)
    return [
        # Two requests share a prefix; one ends.
        (
            a + b,
            [["alloc", "A", a], ["share", "A", "B"], ["free", "A"], ["alloc", "C", b], ["free", "B"], ["free", "C"]],
        ),
        # More than there is: nothing is taken. Then exactly what is left.
        (a + b, [["alloc", "A", a], ["alloc", "B", b + 1], ["alloc", "C", b], ["alloc", "D", 1]]),
        # A block freed twice would be handed out twice.
        (a + b, [["alloc", "A", a], ["free", "A"], ["free", "A"], ["alloc", "B", a], ["alloc", "C", b]]),
        # One bad id among good ones: nothing is freed.
        (a + b, [["alloc", "A", a], ["alloc", "B", b], ["free", "B"], ["free", "A", "B"], ["alloc", "C", b + 1]]),
        # The same id twice in one call, held once.
        (a + b, [["alloc", "A", a], ["free", "A", "A"], ["alloc", "B", b + 1], ["free", "A"]]),
    ]


def _first_difference(args: tuple[Any, ...], expected: list[Any], given: Any) -> str:
    """Which step of the script went wrong."""
    script = args[1]
    for step, right, got in zip(script, expected, given if isinstance(given, list) else [], strict=False):
        if right != got:
            return f"The first step that differs is {' '.join(map(str, step))}: expected {right}, got {got}."
    return ""


allocator = Task(
    "Allocator",
    _scripts,
    lambda num_blocks, script: _drive(_Right, num_blocks, script),
    (
        Mistake(
            "A shared block was freed while somebody still held it: count the holders, and free at zero.",
            _IgnoresReferences,
        ),
        Mistake(
            "alloc took blocks although there were too few: it takes all or nothing, or the rest of the pool leaks.",
            _TakesWhatThereIs,
        ),
        Mistake(
            "alloc refused the last free blocks: asking for exactly what is left is fine.",
            _RefusesTheLast,
        ),
        Mistake(
            "A block was freed that nobody held (a double free): it would be handed out twice, to two requests that"
            " overwrite each other. Raise ValueError.",
            _FreesTwice,
        ),
        Mistake(
            "free stopped in the middle: look at every id first, then free all of them or none.",
            _FreesHalf,
        ),
    ),
    drive=_drive,
    explain=_first_difference,
    points=3,
)

# Offload and reload --------------------------------------------------------------------------------------------------


class _Operations(list[Any]):
    """A list of operations that does not give itself away when a check says what it expected."""

    def __repr__(self) -> str:
        return "operations after which every block is right, in whatever order the lanes go on"


def _transfers(rng: random.Random) -> list[tuple[Any, ...]]:
    # No more slots than blocks, so that a right list uses all of them.
    blocks = rng.sample(range(40), 6)
    return [(blocks, 2), (blocks[:3], 3), (blocks, 1), (blocks[:1], 1)]


def _scenario(operations: list[list[Any]]) -> tuple[Direction, list[int], int]:
    """What a list of ours was asked for: direction, blocks, slots."""
    moves = [operation for operation in operations if operation[1] in ("write", "scatter")]
    direction: Direction = "offload" if any(operation[1] == "gather" for operation in operations) else "reload"
    slots = 1 + max(operation[2] for operation in moves)
    return direction, [operation[3] for operation in moves], slots


def _same(expected: list[list[Any]], given: Any) -> bool:
    """Lists are the same when the same blocks go wrong in the same orders of the lanes: in ours, none."""
    direction, blocks, slots = _scenario(expected)
    if problem(given, direction, blocks, slots):
        return False
    return corrupt_blocks(expected, direction, blocks) == corrupt_blocks(given, direction, blocks)


def _what_happened(_args: tuple[Any, ...], expected: list[list[Any]], given: Any) -> str:
    direction, blocks, slots = _scenario(expected)
    wrong_form = problem(given, direction, blocks, slots)
    if wrong_form:
        return wrong_form
    order, wrong = next((order, wrong) for order, wrong in corrupt_blocks(given, direction, blocks).items() if wrong)
    return f"When the lanes go on in the order {order}, whenever the waits allow, these blocks come out wrong: {wrong}."


def _without(build: Callable[..., list[list[Any]]], wait: str) -> Callable[..., list[list[Any]]]:
    return lambda blocks, slots: build(blocks, slots, without=wait)


def _transfer_task(direction: Direction, build: Callable[..., list[list[Any]]], missing: dict[str, str]) -> Task:
    return Task(
        direction,
        _transfers,
        lambda blocks, slots: _Operations(build(blocks, slots)),
        tuple(Mistake(why, _without(build, wait)) for wait, why in missing.items()),
        same=_same,
        explain=_what_happened,
        points=2,
    )


offload = _transfer_task(
    "offload",
    offload_operations,
    {
        "computed": "A gather may begin before the kernels that write its block have ended: the copy lane must wait for"
        ' "computed". This is the wait that vllm#45704 lacked.',
        "gathered": "A write may begin before its block is in the staging slot: the io lane must wait for the gather.",
        "written": "Staging is reused too early: a gather must wait for the write that last used its slot.",
        "reuse": "The next owner may overwrite a block before it has been gathered: compute must wait for the gathers.",
    },
)
reload = _transfer_task(
    "reload",
    reload_operations,
    {
        "computed": "A scatter may land while the last owner of the block still writes to it: the copy lane must wait"
        ' for "computed".',
        "read": "A scatter may begin before its bytes are in the staging slot: the copy lane must wait for the read.",
        "scattered": "Staging is reused too early: a read must wait for the scatter that last used its slot.",
        "attend": "Attention may read a block before it has arrived: compute must wait for the scatters.",
    },
)

TASKS = (blocks_for, allocator, offload, reload)
