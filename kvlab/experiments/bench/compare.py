"""Two bench records beside each other: what got slower or faster by more than both spreads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvlab.experiments.bench.rows import ratios
from kvlab.records import read_json

__all__ = ["SCHEMA", "Change", "Comparison", "compare", "other_machine", "read_record"]

SCHEMA = "kvlab.bench/1"

# Facts without which two runs did not have the same machine; versions may differ, that is what is compared.
_MACHINE = ("cpu", "cpu_capability", "cores", "torch_threads", "device", "gpu")
_VERSIONS = ("kvlab", "torch", "python", "system")
_FIELDS = ("name", "ours", "unit", "of_floor", "of_peer", "interval", "goal", "met")


@dataclass(frozen=True)
class Change:
    """One row in both records. "unjudged": no interval in one of them, or no way that is better."""

    name: str
    verdict: Literal["slower", "faster", "same", "unjudged"]
    detail: str


@dataclass(frozen=True)
class Comparison:
    """`missing` rows are those of the groups in the new record that only the old one has; `notes` are sentences."""

    changes: list[Change]
    missing: list[str]
    added: list[str]
    notes: list[str]

    @property
    def slower(self) -> list[Change]:
        """The rows that got slower beyond the spread."""
        return [change for change in self.changes if change.verdict == "slower"]


def read_record(path: Path) -> dict[str, Any]:
    """A record that `kvlab bench --out` wrote. Raises ValueError in one line for anything else."""
    record: Any = read_json(path)
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}; expected {SCHEMA!r}, as kvlab bench --out writes it")
    rows, facts = record.get("rows"), record.get("facts")
    if not isinstance(rows, list) or not isinstance(facts, dict):
        raise ValueError(f"{path} has no list of rows or no machine facts; write it again with kvlab bench --out")
    for number, row in enumerate(rows):
        lacking = [name for name in _FIELDS if name not in row] if isinstance(row, dict) else list(_FIELDS)
        if lacking:
            raise ValueError(f"{path}: row {number} lacks {', '.join(lacking)}; write it again with kvlab bench --out")
    return dict(record)


def other_machine(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Which facts say that two records come from different machines, as "cores 2, now 8"."""
    return _differences(old["facts"], new["facts"], _MACHINE)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    return [f"{name} {old.get(name)}, now {new.get(name)}" for name in names if old.get(name) != new.get(name)]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Rows by name. A row with a ratio is compared by its first one, since a slow hour slows both sides of it.

    On another machine rows without a ratio are not judged.
    """
    elsewhere = other_machine(old, new)
    notes = []
    if elsewhere:
        notes.append(f"another machine ({'; '.join(elsewhere)}): only ratios are compared, not absolute figures")
    versions = _differences(old["facts"], new["facts"], _VERSIONS)
    if versions:
        notes.append(f"other versions: {'; '.join(versions)}")
    before = {row["name"]: row for row in old["rows"]}
    now = {row["name"]: row for row in new["rows"]}
    changes = [_change(before[name], now[name], not elsewhere) for name in now if name in before]
    measured = {row.get("group", "") for row in new["rows"]}
    return Comparison(
        changes,
        missing=[name for name in before if name not in now and before[name].get("group", "") in measured],
        added=[name for name in now if name not in before],
        notes=notes,
    )


def _change(old: Mapping[str, Any], new: Mapping[str, Any], same_machine: bool) -> Change:
    name = new["name"]
    first, was_first = next(iter(ratios(new).items()), None), next(iter(ratios(old).items()), None)
    if first and was_first and first[0] == was_first[0]:
        against, (value, was), better = f" × {first[0]}", (first[1], was_first[1]), 1
    elif first or was_first:
        return Change(name, "unjudged", "its ratios are to different things")
    elif not same_machine:
        return Change(name, "unjudged", "an absolute figure of another machine")
    elif new["unit"] != old["unit"] or None in (new["ours"], old["ours"]):
        return Change(name, "unjudged", "not measured in both, or in another unit")
    else:
        against, (value, was), better = f" {new['unit']}".rstrip(), (new["ours"], old["ours"]), _better(new)
    told = f"{was:.3g} → {value:.3g}{against}"
    if new["met"] is False and old["met"] is True:
        told += ", the goal was met and is now missed"
    spans = [row["interval"] for row in (old, new) if row["interval"] and None not in row["interval"]]
    if len(spans) < 2 or not better:
        return Change(name, "unjudged", f"{told} (no interval in both)" if better else f"{told} (no way is better)")
    (was_low, was_high), (low, high) = spans
    if low <= was_high and was_low <= high:
        return Change(name, "same", told)
    return Change(name, "faster" if (low > was_high) == (better > 0) else "slower", told)


def _better(row: Mapping[str, Any]) -> int:
    """1: more is better, -1: less is better, 0: neither; what the goal says, else what the unit says."""
    for sign, better in (("≥", 1), ("≤", -1), ("<", -1)):
        if sign in row["goal"]:
            return better
    if row["unit"].endswith("/s"):
        return 1
    return -1 if row["unit"] in ("s", "ms", "µs", "s of CPU") else 0
