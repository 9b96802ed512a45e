"""Lesson 06: is it the same prefix? Names of blocks, what they must cover, what may be reused, branches."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from kvlab.lab.task import Mistake, Task

__all__ = ["TASKS"]

_NONE = "00" * 32


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 40_000) for _ in range(count)]


# The chained hash -----------------------------------------------------------------------------------------------------


def _block_hashes(
    fingerprint: str,
    tokens: Sequence[int],
    block: int,
    *,
    chained: bool = True,
    partial: bool = False,
    covered: bool = True,
    text: bool = False,
) -> list[str]:
    stop = len(tokens) if partial else len(tokens) // block * block
    parent, names = _NONE, []
    for at in range(0, stop, block):
        own = tokens[at : at + block]
        packed = "".join(map(str, own)).encode() if text else struct.pack(f"<{len(own)}q", *own)
        start = bytes.fromhex(parent if chained else _NONE) + (bytes.fromhex(fingerprint) if covered else b"")
        parent = hashlib.sha256(start + packed).hexdigest()
        names.append(parent)
    return names


def _hash_cases(rng: random.Random) -> list[tuple[Any, ...]]:
    block = rng.choice((4, 8, 16))
    print_of = [hashlib.sha256(str(rng.random()).encode()).hexdigest() for _ in range(3)]
    return [
        (print_of[0], _ids(rng, 3 * block), block),
        (print_of[1], _ids(rng, 2 * block + rng.randrange(1, block)), block),
        (print_of[2], _ids(rng, block - 1), block),
    ]


block_hashes = Task(
    "block_hashes",
    _hash_cases,
    _block_hashes,
    (
        Mistake(
            "Each block is hashed by itself. Its keys and values have seen every token before it, so its name must"
            " contain the name of the block before it.",
            lambda *args: _block_hashes(*args, chained=False),
        ),
        Mistake(
            "A partial block has a name here. Its bytes still change with the next token: only full blocks have one.",
            lambda *args: _block_hashes(*args, partial=True),
        ),
        Mistake(
            "The fingerprint is missing: the same tokens under another adapter would get the same name.",
            lambda *args: _block_hashes(*args, covered=False),
        ),
        Mistake(
            "The ids are joined as digits, so that 1, 23 and 12, 3 read the same. Give each id its 8 bytes.",
            lambda *args: _block_hashes(*args, text=True),
        ),
        Mistake(
            "Each name stands where the next one belongs: the zeros are the first block's parent.",
            lambda *args: [_NONE, *_block_hashes(*args)][: len(_block_hashes(*args))] or [_NONE],
        ),
    ),
    explain=lambda args, expected, given: (
        "The bytes under the hash are 32 + 32 + 8 × block, in the task's order; ids are signed and little-endian."
        if len(expected) == len(given)
        else f"{len(args[1])} tokens have {len(expected)} full blocks of {args[2]}, not {len(given)}."
    ),
)

# What a name must cover -----------------------------------------------------------------------------------------------

_Fields = dict[str, Any]


def _groups(name: Callable[[_Fields], Any], caches: Sequence[_Fields]) -> list[int]:
    """For each cache the place of the first one that has the same name."""
    names = [str(name(dict(cache))) for cache in caches]
    return [names.index(own) for own in names]


def _tagged(fields: _Fields, without: Sequence[str] = ("adapter_name",)) -> str:
    return json.dumps({name: value for name, value in fields.items() if name not in without}, sort_keys=True)


def _caches(rng: random.Random) -> list[tuple[Any, ...]]:
    def digest() -> str:
        return hashlib.sha256(str(rng.random()).encode()).hexdigest()[:16]

    name = rng.choice(("support", "legal", "poet"))
    base: _Fields = {
        "weights": digest(),
        "rope_theta": rng.choice((10_000, 100_000)),
        "kv_dtype": "bf16",
        "adapter_name": name,
        "adapter_digest": digest(),
        "tenant": "anna",
    }
    cut = rng.randrange(4, 12)
    return [
        # Trained again under the same name; renamed; the same fields in another order.
        ([base, {**base, "adapter_digest": digest()}, {**base, "adapter_name": f"{name}-2"}],),
        ([base, dict(reversed(base.items())), {**base, "weights": digest()}],),
        # Without tags these read the same: characters move from one field into its neighbour.
        (
            [
                base,
                {**base, "tenant": f"anna{base['weights'][:cut]}", "weights": base["weights"][cut:]},
                {**base, "adapter_digest": base["adapter_digest"][:-1], "tenant": f"{base['adapter_digest'][-1]}anna"},
            ],
        ),
        # The same bits as another number format, other angles, another tenant.
        ([base, {**base, "kv_dtype": "fp16"}, {**base, "rope_theta": 500_000}, {**base, "tenant": "ben"}],),
        # Two values have changed places.
        ([base, {**base, "weights": base["adapter_digest"], "adapter_digest": base["weights"]}],),
        # What stands between two fields may stand in a field, too.
        *(
            ([{**base, "tenant": f"a{ends}b", "weights": "c"}, {**base, "tenant": "a", "weights": f"b{ends}c"}],)
            for mark in ("", *"|,:;-_/ =\n") for ends in (mark, f"{mark}weights", f"{mark}weights=", f"{mark}weights:")
        ),
    ]  # fmt: skip


def _which_two(args: tuple[Any, ...], expected: list[int], given: list[int]) -> str:
    for i, j in combinations(range(len(expected)), 2):
        if (same := given[i] == given[j]) != (expected[i] == expected[j]):
            a, b = args[0][i], args[0][j]
            fields = "; ".join(f"{key}: {a[key]!r}, {b[key]!r}" for key in a if a[key] != b[key])
            return f"Caches {i} and {j} got {'one name' if same else 'two names'}. They differ in {fields or 'order'}."
    return ""


fingerprint = Task(
    "fingerprint",
    _caches,
    lambda caches: _groups(_tagged, caches),
    (
        Mistake(
            "An adapter was known by its name. It was trained again under the same name: its content decides, not what"
            " it is called.",
            lambda fields: _tagged(fields, ("adapter_digest",)),
        ),
        Mistake(
            "A renamed adapter got another name although its content is the same. That is a needless miss: leave the"
            " adapter's name out.",
            lambda fields: _tagged(fields, ()),
        ),
        Mistake(
            "The same fields in another order got another name: sort them first.",
            lambda fields: json.dumps({k: v for k, v in fields.items() if k != "adapter_name"}),
        ),
        Mistake(
            "The values are joined without tags or lengths, so a character can move from one field into the next"
            " unnoticed. Write each field with its name and its end.",
            lambda fields: "".join(str(value) for key, value in sorted(fields.items()) if key != "adapter_name"),
        ),
        Mistake(
            "The number format is left out: the same bits as bf16 and as fp16 are other numbers.",
            lambda fields: _tagged(fields, ("adapter_name", "kv_dtype")),
        ),
        Mistake(
            "The RoPE base is left out: keys are stored with their rotation in them.",
            lambda fields: _tagged(fields, ("adapter_name", "rope_theta")),
        ),
        Mistake(
            "The tenant is left out: from how fast a hit is, one tenant could find out what another one has asked.",
            lambda fields: _tagged(fields, ("adapter_name", "tenant")),
        ),
    ),
    drive=_groups,
    explain=_which_two,
    points=2,
)

# The first difference -------------------------------------------------------------------------------------------------


def _pairs(rng: random.Random) -> list[tuple[Any, ...]]:
    a = _ids(rng, rng.randrange(20, 40))
    at = rng.randrange(4, 14)
    gone = [*a[:at], *a[at + 1 :]]  # two tokens that became one: everything behind moves up
    gone[at] = (gone[at] + 1) % 40_000
    changed = [*a[:at], a[at] + 1, *a[at + 1 :]]
    return [(a, changed), (a, list(a)), (a, a[:at]), (a[:at], a), (a, gone), ([], a[:3])]


def _first_mismatch(a: Sequence[int], b: Sequence[int]) -> int | None:
    for position in range(max(len(a), len(b))):
        if a[position : position + 1] != b[position : position + 1]:
            return position
    return None


first_mismatch = Task(
    "first_mismatch",
    _pairs,
    _first_mismatch,
    (
        Mistake(
            "Where one list only ends earlier, they differ at its end: there the other one has a token more.",
            lambda a, b: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None),
        ),
        Mistake(
            "For equal lists the answer is None: a position would say that something differs there.",
            lambda a, b: min(len(a), len(b)) if a == b else _first_mismatch(a, b),
        ),
        Mistake(
            "That is the last position that still agrees: the answer is the first one that does not.",
            lambda a, b: None if a == b else (_first_mismatch(a, b) or 0) - 1,
        ),
        Mistake(
            "That counts how many positions agree anywhere. Behind the first difference nothing counts any more.",
            lambda a, b: None if a == b else sum(x == y for x, y in zip(a, b, strict=False)),
        ),
    ),
)

# What of a prompt may be reused ---------------------------------------------------------------------------------------


def _common(cached: Sequence[int], prompt: Sequence[int]) -> int:
    at = _first_mismatch(cached, prompt)
    return len(prompt) if at is None else at


def _reusable(cached: Sequence[int], prompt: Sequence[int], block: int) -> int:
    # The cached tokens end in a partial block of which nothing was stored.
    stored = len(cached) // block * block
    return min(_common(cached, prompt), stored, len(prompt) - 1) // block * block


def _prompts(rng: random.Random) -> list[tuple[Any, ...]]:
    block = rng.choice((8, 16))
    cached = _ids(rng, 4 * block)
    inside = rng.randrange(1, block)
    changed = [*cached[: block + inside], cached[block + inside] + 1, *cached[block + inside + 1 :]]
    return [
        (cached, list(cached), block),  # nothing new: the last token is computed all the same
        (cached, [*cached, *_ids(rng, inside)], block),
        (cached, [*changed, *_ids(rng, 3)], block),
        ([*cached, *_ids(rng, block - 1)], [*cached, *_ids(rng, block + 3)], block),
        (cached, cached[: 2 * block + 1], block),
        (cached, cached[: block - 1], block),
    ]


reusable_tokens = Task(
    "reusable_tokens",
    _prompts,
    _reusable,
    (
        Mistake(
            "The whole prompt is reused. Its last token must be computed: its logits are what the request came for, and"
            " no cache holds logits.",
            lambda cached, prompt, block: min(_common(cached, prompt), len(cached)) // block * block,
        ),
        Mistake(
            "That is not a whole number of blocks: a partial block is never stored and has no name.",
            lambda cached, prompt, _block: min(_common(cached, prompt), len(prompt) - 1),
        ),
        Mistake(
            "Blocks behind the first difference are counted too. They hold the same ids and other numbers: they saw"
            " another token before them.",
            lambda cached, prompt, block: (
                block
                * sum(
                    cached[at : at + block] == prompt[at : at + block] and at + block < len(prompt)
                    for at in range(0, len(cached) // block * block, block)
                )
            ),
        ),
        Mistake(
            "That rounds up: the block in which the difference is counts as usable.",
            lambda cached, prompt, block: (
                min(-(-_common(cached, prompt) // block), len(cached) // block, (len(prompt) - 1) // block) * block
            ),
        ),
        Mistake(
            "A block too few: only the last token must be computed. Where that one stands in a later block anyway,"
            " every whole block may be used.",
            lambda cached, prompt, block: max(0, min(_common(cached, prompt), len(prompt)) // block - 1) * block,
        ),
    ),
)

# Branches -------------------------------------------------------------------------------------------------------------


class _Right:
    """Copies the last block when it is written to while somebody else holds it too; lowest free id first."""

    def __init__(self, num_blocks: int, block: int) -> None:
        self.block = block
        self.content: list[list[int]] = [[] for _ in range(num_blocks)]
        self.holders = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}

    def take(self, content: Sequence[int] = ()) -> int:
        """The lowest free block, filled."""
        new = self.holders.index(0)
        self.holders[new], self.content[new] = 1, list(content)
        return new

    def start(self, name: str) -> None:
        """A new, empty sequence."""
        self.tables[name] = []

    def branch(self, name: str, new: str) -> None:
        """A second sequence that shares every block."""
        self.tables[new] = list(self.tables[name])
        for block in self.tables[name]:
            self.holders[block] += 1

    def append(self, name: str, token: int) -> None:
        """Write one token behind the last."""
        table = self.tables[name]
        if not table or len(self.content[table[-1]]) == self.block:
            table.append(self.take())
        elif self.holders[table[-1]] > 1:
            self.divide(table)
        self.content[table[-1]].append(token)

    def divide(self, table: list[int]) -> None:
        """A block of its own in place of the shared last one."""
        shared = table[-1]
        table[-1] = self.take(self.content[shared])
        self.holders[shared] -= 1


class _WritesShared(_Right):
    def divide(self, table: list[int]) -> None:
        pass


class _KeepsHolding(_Right):
    def divide(self, table: list[int]) -> None:
        table[-1] = self.take(self.content[table[-1]])


class _CopiesAtOnce(_Right):
    def branch(self, name: str, new: str) -> None:
        self.tables[new] = [self.take(self.content[block]) for block in self.tables[name]]


class _CopiesFullOnes(_Right):
    def append(self, name: str, token: int) -> None:
        table = self.tables[name]
        if table and self.holders[table[-1]] > 1:
            self.divide(table)
        super().append(name, token)


class _ForgetsContent(_Right):
    def divide(self, table: list[int]) -> None:
        shared = table[-1]
        table[-1] = self.take()
        self.holders[shared] -= 1


def _drive(make: Callable[[int, int], Any], num_blocks: int, block: int, script: Sequence[Any]) -> list[Any]:
    """Run a script on the learner's class; after each step the tables, and in the end what every sequence reads."""
    pages, names, transcript = make(num_blocks, block), list[str](), list[Any]()
    for verb, *what in script:
        getattr(pages, verb)(*what)
        if verb != "append":
            names.append(what[-1])
        transcript.append([f"{verb} {' '.join(map(str, what))}", {name: list(pages.tables[name]) for name in names}])
    reads = {name: [token for at in pages.tables[name] for token in pages.content[at]] for name in names}
    return [*transcript, ["read", reads]]


def _branches(rng: random.Random) -> list[tuple[Any, ...]]:
    block = rng.choice((3, 4))
    ids = _ids(rng, 2 * block + 6)
    grow = [["append", "A", token] for token in ids[: block + 2]]
    full = [["append", "A", token] for token in ids[:block]]
    branch = ["branch", "A", "B"]
    return [
        # The branch writes into a block that is half full and shared; then the parent, which is alone by now.
        (9, block, [["start", "A"], *grow, branch, ["append", "B", ids[-1]], ["append", "A", ids[-2]]]),
        # A branch at a block's edge needs no copy.
        (9, block, [["start", "A"], *full, branch, ["append", "B", ids[-1]], ["append", "A", ids[-2]]]),
        (9, block, [["start", "A"], *grow, branch, ["branch", "B", "C"], ["append", "A", ids[-1]],
                    ["append", "C", ids[-2]], ["append", "B", ids[-3]]]),
    ]  # fmt: skip


def _first_difference(_args: tuple[Any, ...], expected: list[Any], given: Any) -> str:
    """Which step of the script went wrong."""
    for (step, right), found in zip(expected, given if isinstance(given, list) else [], strict=False):
        if found != [step, right]:
            return f"The first step that differs is {step}: expected {right}, got {found[1]}."
    return ""


branches = Task(
    "Branches",
    _branches,
    lambda num_blocks, block, script: _drive(_Right, num_blocks, block, script),
    (
        Mistake(
            "A token was written into a block that another sequence holds too: now its text has changed as well. Copy"
            " the block first.",
            _WritesShared,
        ),
        Mistake(
            "After its copy the writer still counts as a holder of the old block: the one that is left copies for"
            " nothing, and the block is never free again.",
            _KeepsHolding,
        ),
        Mistake(
            "The branch copied its blocks at once. Sharing is the point: copy only a block that is about to change.",
            _CopiesAtOnce,
        ),
        Mistake(
            "A full block was copied. Nobody writes to it again: take a fresh one behind it and go on sharing.",
            _CopiesFullOnes,
        ),
        Mistake(
            "The new block does not hold what the old one held: the branch has forgotten its last tokens.",
            _ForgetsContent,
        ),
    ),
    drive=_drive,
    explain=_first_difference,
    points=3,
)

TASKS = (block_hashes, fingerprint, first_mismatch, reusable_tokens, branches)
