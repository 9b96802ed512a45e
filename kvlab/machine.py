"""A machine as measured curves: how fast it prefills, and how fast bytes come and go over each link.

Plain frozen data with JSON in and out. Knows no clock and measures nothing: `experiments.calibrate` does.
All rates are for one rank; what ranks share is explicit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from kvlab.arch import ModelArch, preset_names
from kvlab.arithmetic import attention_flops, linear_flops
from kvlab.curve import Curve

__all__ = [
    "SCHEMA",
    "Curve",
    "Decode",
    "Direction",
    "Link",
    "Machine",
    "Prefill",
    "PrefillSeen",
    "TransferSeen",
    "machine_names",
]

SCHEMA = "kvlab.machine/1"
Direction = Literal["load", "store"]
Copy = Literal["request", "block", "layer_block"]
_DIRECTIONS = frozenset(get_args(Direction))
_Part = TypeVar("_Part", "Link", "Prefill", "Decode")


@dataclass(frozen=True)
class Link:
    """One direction between the device and a tier.

    seconds = per_request_s + blocks · per_block_s + copies · per_copy_s + bytes ÷ (gb_per_s(copy size) · share).
    `gb_per_s` is measured against the bytes of one copy. `copy` says what one copy is: "request" (all blocks
    coalesced), "block" (one block of all layers), or "layer_block" (one layer of one block, K and V).
    `max_copy_bytes` cuts larger copies. `decode_slowdown` is the share of compute that active decodes lose
    while a copy runs. `ranks_per_link` ranks share the bandwidth. `spread` is relative (one standard deviation).
    """

    gb_per_s: Curve
    per_request_s: float = 0.0
    per_block_s: float = 0.0
    per_copy_s: float = 0.0
    copy: Copy = "request"
    max_copy_bytes: int | None = None
    decode_slowdown: float = 0.0
    ranks_per_link: int = 1
    spread: float = 0.1
    emulated: bool = False
    pinned: bool | None = None
    source: str = ""

    def __post_init__(self) -> None:
        _check_fields(self)
        if self.decode_slowdown > 1:
            raise ValueError(f"decode_slowdown is {self.decode_slowdown!r}; expected a share of compute, 0 to 1")

    def copy_bytes(self, total_bytes: int, blocks: int, layers: int) -> float:
        """Bytes of one copy when `total_bytes` in `blocks` blocks of `layers` layers are moved."""
        size = total_bytes / self._uncut(blocks, layers)
        return min(size, self.max_copy_bytes) if self.max_copy_bytes else size

    def copies(self, total_bytes: int, blocks: int, layers: int) -> int:
        """How many copies that takes; each larger than `max_copy_bytes` is cut by itself."""
        uncut = self._uncut(blocks, layers)
        # Ceil per copy, not of the total: what is left of one block does not travel with the next.
        return uncut * math.ceil(total_bytes / uncut / self.max_copy_bytes) if self.max_copy_bytes else uncut

    def _uncut(self, blocks: int, layers: int) -> int:
        return 1 if self.copy == "request" else blocks if self.copy == "block" else blocks * layers

    def rate_gb_per_s(self, copy_bytes: float, share: float = 1.0, ranks: int = 1) -> float:
        """Bandwidth in GB/s that one rank gets with `share` of the link, when `ranks` ranks load at once."""
        return self.gb_per_s(copy_bytes) * share / min(ranks, self.ranks_per_link)

    def overhead_s(self, total_bytes: int, blocks: int, layers: int) -> float:
        """Software seconds of a transfer: everything but the bytes."""
        copies_s = self.copies(total_bytes, blocks, layers) * self.per_copy_s
        return self.per_request_s + blocks * self.per_block_s + copies_s

    def transfer_s(self, total_bytes: int, blocks: int, layers: int, share: float = 1.0, ranks: int = 1) -> float:
        """Seconds to move `total_bytes` (one rank's) in `blocks` blocks; 0 for no blocks."""
        if blocks == 0:
            return 0.0
        rate = self.rate_gb_per_s(self.copy_bytes(total_bytes, blocks, layers), share, ranks)
        return self.overhead_s(total_bytes, blocks, layers) + total_bytes / (rate * 1e9)

    def behind(self, gb_per_s: float, latency_s: float = 0.0) -> Link:
        """This link behind an emulated one: that one's bytes and latency, and the software that was measured here."""
        return replace(
            self,
            gb_per_s=Curve(((1.0, gb_per_s),)),
            per_request_s=self.per_request_s + latency_s,
            emulated=True,
            source="emulated",
        )


@dataclass(frozen=True)
class Prefill:
    """How long computing positions takes: fixed seconds per forward pass + FLOPs ÷ measured rates.

    `linear_flops_per_s` and `attention_flops_per_s` are curves against the rows (new tokens) in the pass. The LM head
    is a matmul of one row. `chunk_tokens` is the largest pass (None: all at once). `calibrated_on` names the
    shape and `calibrated_shape` is its `ModelArch.shape_digest` (None: the name is all that is known); for another
    one the answer is an extrapolation and is labelled so. `dtype` is what was computed in, and what a cache is taken
    to hold unless somebody says otherwise. `spread` is relative.
    """

    per_chunk_s: float
    linear_flops_per_s: Curve
    attention_flops_per_s: Curve
    calibrated_on: str
    dtype: str = "bf16"
    chunk_tokens: int | None = None
    spread: float = 0.1
    source: str = ""
    calibrated_shape: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self)

    def seconds(self, arch: ModelArch, start: int, stop: int, speedup: float = 1.0) -> float:
        """Seconds to compute [start, stop) behind a cached [0, start); FLOPs are divided by `speedup` (TP)."""
        if stop <= start:
            return 0.0
        passes, _, linear_s, _, attention_s, head_s = self.terms(arch, start, stop)
        return passes * self.per_chunk_s + (linear_s + attention_s + head_s) / speedup

    def terms(self, arch: ModelArch, start: int, stop: int) -> tuple[int, int, float, int, float, float]:
        """What that time is made of on one rank, for start < stop.

        The number of passes, linear FLOPs and their seconds, attention FLOPs and their seconds over all passes, and the
        head's seconds.
        """
        step = self.chunk_tokens or stop - start
        linear_rate, attention_rate = self.linear_flops_per_s, self.attention_flops_per_s
        passes = linear = attention = 0
        linear_s, attention_s, head_s = 0.0, 0.0, 2 * arch.head_macs / linear_rate(1)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            linear_here, attention_here = linear_flops(arch, last - first), attention_flops(arch, first, last)
            passes, linear, attention = passes + 1, linear + linear_here, attention + attention_here
            linear_s += linear_here / linear_rate(last - first)
            attention_s += attention_here / attention_rate(last - first)
        return passes, linear, linear_s, attention, attention_s, head_s


@dataclass(frozen=True)
class Decode:
    """How long a decode pass takes: `per_pass_s` + rows · `per_row_s` + cached tokens of all rows · `per_token_s`.

    Measured on the shape that the prefill was calibrated on, and said of no other.
    """

    per_pass_s: float
    per_row_s: float
    per_token_s: float

    def __post_init__(self) -> None:
        _check_fields(self)
        if not self.per_pass_s + self.per_row_s + self.per_token_s:
            raise ValueError("a decode pass takes 0 seconds; expected one of its parts above 0")

    def seconds(self, rows: int, tokens: float) -> float:
        """Seconds of one pass."""
        return self.per_pass_s + rows * self.per_row_s + tokens * self.per_token_s


@dataclass(frozen=True)
class PrefillSeen:
    """One observed prefill: positions [start, stop) of `arch` took `seconds` on `tp` ranks."""

    arch: ModelArch
    start: int
    stop: int
    seconds: float
    tp: int = 1


@dataclass(frozen=True)
class TransferSeen:
    """One observed transfer with nothing queued ahead: one rank's `total_bytes` in `blocks` blocks took `seconds`."""

    tier: str
    direction: Direction
    total_bytes: int
    blocks: int
    layers: int
    seconds: float
    ranks: int = 1


@dataclass(frozen=True)
class Machine:
    """Prefill curves and links of one rank, with where each number came from; `decode` where it was measured."""

    name: str
    prefill: Prefill
    links: Mapping[str, Mapping[Direction, Link]]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    tp_efficiency: float = 0.85
    decode: Decode | None = None

    def __post_init__(self) -> None:
        _check_fields(self)
        for tier, directions in self.links.items():
            if not isinstance(directions, Mapping) or not directions.keys() <= _DIRECTIONS:
                raise ValueError(f"links[{tier!r}] is {directions!r}; expected a Link for each of load and store")
            for direction, link in directions.items():
                if not isinstance(link, Link):
                    raise ValueError(f"links[{tier!r}][{direction!r}] is {link!r}; expected a Link")
        if not 0 < self.tp_efficiency <= 1:
            raise ValueError(f"tp_efficiency is {self.tp_efficiency!r}; expected a share above 0 and up to 1")

    def link(self, tier: str, direction: Direction = "load") -> Link:
        """The measured link of a tier. Raises ValueError naming the tiers this machine knows."""
        if tier not in self.links:
            raise ValueError(f"machine {self.name!r} has no link to tier {tier!r}; it knows {', '.join(self.links)}")
        if direction not in self.links[tier]:
            raise ValueError(f"machine {self.name!r} has no {direction!r} curve for tier {tier!r}")
        return self.links[tier][direction]

    def prefill_s(self, arch: ModelArch, start: int, stop: int, tp: int = 1) -> float:
        """Seconds to compute positions [start, stop) of `arch` with [0, start) cached, on `tp` ranks."""
        return self.prefill.seconds(arch, start, stop, self.speedup(tp))

    def speedup(self, tp: int) -> float:
        """By how much `tp` ranks together compute faster than one."""
        return 1.0 if tp == 1 else tp * self.tp_efficiency

    def extrapolated(self, arch: ModelArch) -> bool:
        """Whether `arch` is another shape than the one the prefill curves and decode passes were measured on.

        Shapes are compared, not names: every Llama's config is named "llama". Only a machine that knows no more than
        a name, and not that of a preset, is compared by it.
        """
        name, shape = self.prefill.calibrated_on, self.prefill.calibrated_shape
        if shape is None and name in preset_names():
            shape = ModelArch.preset(name).shape_digest
        return arch.name != name if shape is None else arch.shape_digest != shape

    def with_link(self, tier: str, load: Link, store: Link | None = None) -> Machine:
        """This machine with one more (or another) tier."""
        directions: dict[Direction, Link] = {"load": load} if store is None else {"load": load, "store": store}
        return replace(self, links={**self.links, tier: directions})

    def updated(self, seen: PrefillSeen | TransferSeen, weight: float = 0.1) -> Machine:
        """The machine after one more observation: the part that it tests is scaled towards what was seen.

        An exponential average in log space: every time it predicts is multiplied by (seen ÷ predicted)^weight, and the
        spread follows |log(seen ÷ predicted)| at the same pace. Raises ValueError for a time that is not positive, for
        no positions or blocks, and for a weight out of [0, 1].
        """
        if not 0 <= weight <= 1:
            raise ValueError(f"weight is {weight!r}; expected 0 to 1")
        if isinstance(seen, PrefillSeen):
            surprise = _surprise(seen, self.prefill_s(seen.arch, seen.start, seen.stop, seen.tp))
            factor, p = math.exp(weight * surprise), self.prefill
            prefill = replace(
                p,
                per_chunk_s=p.per_chunk_s * factor,
                linear_flops_per_s=p.linear_flops_per_s.scaled(1 / factor),
                attention_flops_per_s=p.attention_flops_per_s.scaled(1 / factor),
                spread=p.spread + weight * (abs(surprise) - p.spread),
            )
            return replace(self, prefill=prefill)
        link = self.link(seen.tier, seen.direction)
        predicted_s = link.transfer_s(seen.total_bytes, seen.blocks, seen.layers, ranks=seen.ranks)
        surprise = _surprise(seen, predicted_s)
        factor = math.exp(weight * surprise)
        link = replace(
            link,
            gb_per_s=link.gb_per_s.scaled(1 / factor),
            per_request_s=link.per_request_s * factor,
            per_block_s=link.per_block_s * factor,
            per_copy_s=link.per_copy_s * factor,
            spread=link.spread + weight * (abs(surprise) - link.spread),
        )
        return replace(self, links={**self.links, seen.tier: {**self.links[seen.tier], seen.direction: link}})

    # JSON -----------------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, source: str | Path) -> Machine:
        """A machine from a JSON file, or a published profile by name. Raises ValueError saying what is wrong."""
        path = Path(source)
        if path.suffix != ".json" and not path.exists():
            if str(source) not in machine_names():
                known = ", ".join(machine_names()) or "none"
                raise ValueError(f"no machine file or profile {str(source)!r}; published profiles: {known}")
            text = resources.files("kvlab").joinpath("data", "machines", f"{source}.json").read_text(encoding="utf-8")
        elif not path.is_file():
            raise ValueError(f"no machine file at {path}; write one with `kvlab calibrate --out {path}`")
        else:
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"machine file {path} is not UTF-8 text: {error}") from error
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"machine file {source} is not valid JSON: {error}") from error
        return cls.from_dict(data, str(source))

    @classmethod
    def from_dict(cls, data: Any, where: str = "machine") -> Machine:
        """A machine from parsed JSON (or from a record that holds one under "machine")."""
        if isinstance(data, dict) and isinstance(data.get("machine"), dict) and "prefill" in data["machine"]:
            data = data["machine"]
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"{where} has schema {found!r}; expected {SCHEMA!r} (write one with `kvlab calibrate`)")
        try:
            curves = ("linear_flops_per_s", "attention_flops_per_s")
            prefill = _read(Prefill, "prefill", data["prefill"], curves)
            links: dict[str, dict[Direction, Link]] = {}
            for tier, directions in data["links"].items():
                links[tier] = {
                    direction: _read(Link, f"links.{tier}.{direction}", link, ("gb_per_s",))
                    for direction, link in directions.items()
                }
                if "load" not in links[tier]:
                    raise KeyError(f"links.{tier}.load")
            return cls(
                name=str(data["name"]),
                prefill=prefill,
                links=links,
                provenance=data.get("provenance", {}),
                tp_efficiency=data.get("tp_efficiency", 0.85),
                decode=_read(Decode, "decode", data["decode"], ()) if data.get("decode") else None,
            )
        except KeyError as error:
            raise ValueError(f"{where} has no {error.args[0]!r}; the file is incomplete: calibrate again") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{where} is not a kvlab machine: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "provenance": dict(self.provenance),
            "tp_efficiency": self.tp_efficiency,
            "prefill": _plain(self.prefill),
            "decode": None if self.decode is None else dict(vars(self.decode)),
            "links": {
                tier: {direction: _plain(link) for direction, link in directions.items()}
                for tier, directions in self.links.items()
            },
        }


def machine_names() -> tuple[str, ...]:
    """Names of the published profiles that ship with kvlab."""
    folder = resources.files("kvlab").joinpath("data", "machines")
    if not folder.is_dir():
        return ()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def _surprise(seen: PrefillSeen | TransferSeen, predicted_s: float) -> float:
    """log(seen ÷ predicted)."""
    if not (math.isfinite(seen.seconds) and seen.seconds > 0):
        raise ValueError(f"observed {seen.seconds} seconds; expected a positive, finite time")
    if not predicted_s:
        what = f"positions [{seen.start}, {seen.stop})" if isinstance(seen, PrefillSeen) else f"{seen.blocks} blocks"
        raise ValueError(f"observed {what}; expected at least one")
    return math.log(seen.seconds / predicted_s)


# What a field may hold, by its annotation.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "float": (
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf,
        "a finite number of at least 0",
    ),
    "int": (lambda value: type(value) is int and value > 0, "an integer of at least 1"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text"),
    "Copy": (lambda value: value in get_args(Copy), f"one of {', '.join(get_args(Copy))}"),
    "Curve": (lambda value: isinstance(value, Curve), "a Curve, as in Curve(((1.0, 25.0),)) for one value at any size"),
}


def _check_fields(part: Link | Prefill | Decode | Machine) -> None:
    """Raises ValueError naming the first field that holds what no machine has."""
    for one in fields(part):
        value, (kind, optional, _) = getattr(part, one.name), str(one.type).partition(" | None")
        fits, expected = _EXPECTED.get(kind, (None, ""))
        if fits and not fits(value) and not (optional and value is None):
            raise ValueError(f"{one.name} is {value!r}; expected {expected}")


def _curve(points: Any) -> Curve:
    try:
        return Curve(tuple((float(x), float(y)) for x, y in points))
    except TypeError as error:
        raise ValueError(f"curve points are {points!r}; expected [size, value] pairs") from error


def _read(kind: type[_Part], where: str, values: Mapping[str, Any], curves: Sequence[str]) -> _Part:
    """A part of a machine from JSON. Raises KeyError for a field that is missing, ValueError for what is wrong."""
    known = [one.name for one in fields(kind)]
    for one in fields(kind):
        if one.default is MISSING and one.name not in values:
            raise KeyError(f"{where}.{one.name}")
    for name in values:
        if name not in known:
            raise ValueError(f"{where} has {name!r}; it may have {', '.join(known)}")
    try:
        given: dict[str, Any] = {name: _curve(value) if name in curves else value for name, value in values.items()}
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _plain(value: Prefill | Link) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, item in vars(value).items():
        if not name.startswith("_"):
            plain[name] = [list(point) for point in item.points] if isinstance(item, Curve) else item
    return plain
