"""A machine as measured curves: how fast it prefills, and how fast bytes come and go over each link.

Plain frozen data with JSON in and out. Knows no clock and measures nothing: `experiments.calibrate` does.
All rates are for one rank; what ranks share is explicit.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from kvlab.arch import ModelArch, preset_names
from kvlab.arithmetic import attention_flops, linear_flops

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


@dataclass(frozen=True)
class Curve:
    """Positive values against a positive size, interpolated as straight lines in log-log, flat outside the points."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a curve needs at least one [size, value] point")
        if any(not (math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0) for x, y in self.points):
            raise ValueError(f"curve points must be positive and finite: {list(self.points)}")
        if any(a[0] >= b[0] for a, b in zip(self.points, self.points[1:], strict=False)):
            raise ValueError(f"curve sizes must increase: {[x for x, _ in self.points]}")

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return [math.log(x) for x, _ in self.points], [math.log(y) for _, y in self.points]

    def __call__(self, size: float) -> float:
        """The value at `size`."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1]
        xs, ys = self._logs
        x = math.log(size)
        above = bisect_right(xs, x)
        share = (x - xs[above - 1]) / (xs[above] - xs[above - 1])
        return math.exp(ys[above - 1] + share * (ys[above] - ys[above - 1]))

    def scaled(self, factor: float) -> Curve:
        """The same curve with every value times `factor`."""
        return Curve(tuple((x, y * factor) for x, y in self.points))


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
    copy: Literal["request", "block", "layer_block"] = "request"
    max_copy_bytes: int | None = None
    decode_slowdown: float = 0.0
    ranks_per_link: int = 1
    spread: float = 0.1
    emulated: bool = False
    pinned: bool | None = None
    source: str = ""

    def copy_bytes(self, total_bytes: int, blocks: int, layers: int) -> float:
        """Bytes of one copy when `total_bytes` in `blocks` blocks of `layers` layers are moved."""
        size = float(total_bytes)
        if self.copy != "request":
            size /= blocks
        if self.copy == "layer_block":
            size /= layers
        return min(size, self.max_copy_bytes) if self.max_copy_bytes else size

    def rate_gb_per_s(self, copy_bytes: float, share: float = 1.0, ranks: int = 1) -> float:
        """Bandwidth in GB/s that one rank gets with `share` of the link, when `ranks` ranks load at once."""
        return self.gb_per_s(copy_bytes) * share / min(ranks, self.ranks_per_link)

    def overhead_s(self, total_bytes: int, blocks: int, copy_bytes: float) -> float:
        """Software seconds of a transfer: everything but the bytes."""
        return self.per_request_s + blocks * self.per_block_s + math.ceil(total_bytes / copy_bytes) * self.per_copy_s

    def transfer_s(self, total_bytes: int, blocks: int, layers: int, share: float = 1.0, ranks: int = 1) -> float:
        """Seconds to move `total_bytes` (one rank's) in `blocks` blocks; 0 for no blocks."""
        if blocks == 0:
            return 0.0
        size = self.copy_bytes(total_bytes, blocks, layers)
        rate = self.rate_gb_per_s(size, share, ranks)
        return self.overhead_s(total_bytes, blocks, size) + total_bytes / (rate * 1e9)

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
    shape; for another one the answer is an extrapolation and is labelled so. `spread` is relative.
    """

    per_chunk_s: float
    linear_flops_per_s: Curve
    attention_flops_per_s: Curve
    calibrated_on: str
    dtype: str = "bf16"
    chunk_tokens: int | None = None
    spread: float = 0.1
    source: str = ""

    def seconds(self, arch: ModelArch, start: int, stop: int, speedup: float = 1.0) -> float:
        """Seconds to compute [start, stop) behind a cached [0, start); FLOPs are divided by `speedup` (TP)."""
        if stop <= start:
            return 0.0
        linear, attention = self.linear_flops_per_s, self.attention_flops_per_s
        step = self.chunk_tokens or stop - start
        fixed_s, flops_s = 0.0, 2 * arch.head_macs / linear(1)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            rows = last - first
            fixed_s += self.per_chunk_s
            flops_s += linear_flops(arch, rows) / linear(rows) + attention_flops(arch, first, last) / attention(rows)
        return fixed_s + flops_s / speedup


@dataclass(frozen=True)
class Decode:
    """How long a decode pass takes: `per_pass_s` + rows · `per_row_s` + cached tokens of all rows · `per_token_s`.

    Measured on the shape that the prefill was calibrated on, and said of no other.
    """

    per_pass_s: float
    per_row_s: float
    per_token_s: float

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

    def link(self, tier: str, direction: Direction = "load") -> Link:
        """The measured link of a tier. Raises ValueError naming the tiers this machine knows."""
        if tier not in self.links:
            raise ValueError(f"machine {self.name!r} has no link to tier {tier!r}; it knows {', '.join(self.links)}")
        if direction not in self.links[tier]:
            raise ValueError(f"machine {self.name!r} has no {direction!r} curve for tier {tier!r}")
        return self.links[tier][direction]

    def prefill_s(self, arch: ModelArch, start: int, stop: int, tp: int = 1) -> float:
        """Seconds to compute positions [start, stop) of `arch` with [0, start) cached, on `tp` ranks."""
        return self.prefill.seconds(arch, start, stop, 1.0 if tp == 1 else tp * self.tp_efficiency)

    def extrapolated(self, arch: ModelArch) -> bool:
        """Whether `arch` is another shape than the one the prefill curves were measured on.

        A preset's shape read from its config under another name is the same shape.
        """
        known = self.prefill.calibrated_on
        if arch.name == known:
            return False
        return known not in preset_names() or ModelArch.preset(known).layers != arch.layers

    def with_link(self, tier: str, load: Link, store: Link | None = None) -> Machine:
        """This machine with one more (or another) tier."""
        directions: dict[Direction, Link] = {"load": load} if store is None else {"load": load, "store": store}
        return replace(self, links={**self.links, tier: directions})

    def updated(self, seen: PrefillSeen | TransferSeen, weight: float = 0.1) -> Machine:
        """The machine after one more observation: the part that it tests is scaled towards what was seen.

        An exponential average in log space: every time it predicts is multiplied by (seen ÷ predicted)^weight, and the
        spread follows |log(seen ÷ predicted)| at the same pace. Raises ValueError for a time that is not positive.
        """
        if not (math.isfinite(seen.seconds) and seen.seconds > 0):
            raise ValueError(f"observed {seen.seconds} seconds; expected a positive, finite time")
        if isinstance(seen, PrefillSeen):
            surprise = math.log(seen.seconds / self.prefill_s(seen.arch, seen.start, seen.stop, seen.tp))
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
        surprise = math.log(seen.seconds / predicted_s)
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
            prefill = dict(data["prefill"])
            for name in ("linear_flops_per_s", "attention_flops_per_s"):
                prefill[name] = _curve(prefill[name])
            links: dict[str, dict[Direction, Link]] = {}
            for tier, directions in data["links"].items():
                links[tier] = {
                    direction: Link(**{**link, "gb_per_s": _curve(link["gb_per_s"])})
                    for direction, link in directions.items()
                }
                if "load" not in links[tier]:
                    raise KeyError(f"links.{tier}.load")
            return cls(
                name=str(data["name"]),
                prefill=Prefill(**prefill),
                links=links,
                provenance=data.get("provenance", {}),
                tp_efficiency=float(data.get("tp_efficiency", 0.85)),
                decode=Decode(**data["decode"]) if data.get("decode") else None,
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


def _curve(points: Any) -> Curve:
    return Curve(tuple((float(x), float(y)) for x, y in points))


def _plain(value: Prefill | Link) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, item in vars(value).items():
        if not name.startswith("_"):
            plain[name] = [list(point) for point in item.points] if isinstance(item, Curve) else item
    return plain
