"""What a class measured: everybody's break-even link, from the records of `kvlab crossover` that were handed in.

Reads files. Does not draw, and grades nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from kvlab.experiments.crossover import SCHEMA
from kvlab.lab.gradebook import printable
from kvlab.records import read_json

__all__ = ["Measured", "find"]

# A record with every raw sample weighs some tens of KB.
_MOST_BYTES = 20 * 2**20


@dataclass(frozen=True)
class Measured:
    """One record: whose, of which model and dtype, and at which link its longest prefix ties."""

    who: str
    model: str
    tokens: int
    gb_per_s: float


def find(paths: Sequence[Path]) -> tuple[list[Measured], list[str]]:
    """The records among the .json files below `paths`, slowest link first, and a line on each that cannot be used.

    Whose it is: the folders below the one that was named, or the file's name if it has another one than `crossover`
    writes. Other JSON files (grades, machines) are passed over. Raises ValueError for a path that does not exist and
    when there is no usable record at all.
    """
    found: list[Measured] = []
    broken: list[str] = []
    for root in paths:
        if not root.exists():
            raise ValueError(f"{root} does not exist")
        for path in sorted(root.rglob("*.json")) if root.is_dir() else [root]:
            try:
                record = _read(path)
                if record is not None:
                    found.append(_measured(_who(path, root), record))
            except (ValueError, OSError) as error:
                broken.append(printable(str(error)))
    if not found:
        raise ValueError(
            f"no record of kvlab crossover below {', '.join(map(str, paths))}: everybody hands in a crossover.json"
            f"{''.join(f'; {line}' for line in broken)}"
        )
    return sorted(found, key=lambda each: each.gb_per_s), broken


def _read(path: Path) -> dict[str, Any] | None:
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is larger than any record")
    content = read_json(path)
    return content if isinstance(content, dict) and content.get("schema") == SCHEMA else None


def _who(path: Path, root: Path) -> str:
    below = path.relative_to(root).with_suffix("") if root.is_dir() else Path(path.stem)
    folders = below.parent if below.name == "crossover" else below
    return printable(folders.as_posix() if folders.name else (root if root.is_dir() else root.parent).resolve().name)


def _measured(who: str, record: dict[str, Any]) -> Measured:
    """Raises ValueError for a record that lacks something, or in which no link ties."""
    try:
        model, tier = record["model"], record["tiers"][0]
        # The same for all tiers: bytes ÷ the seconds that having the cache saves.
        pairs = zip(tier["tokens"], tier["break_even_gb_per_s"], strict=True)
        ties = [(int(tokens), float(speed)) for tokens, speed in pairs if speed is not None and 0 < float(speed) < inf]
        name = printable(f"{model['name']} {model['dtype']}")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"the record of {who} is not whole: {type(error).__name__}: {error}") from error
    if not ties:
        raise ValueError(f"in the record of {who} no link ties: recompute was not dearer at any length")
    tokens, speed = max(ties)
    return Measured(who, name, tokens, speed)
