"""What a user may write into the connector's `kv_connector_extra_config`, checked before a server starts on it.

Knows no server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvlab.bridges.judge import Judge
from kvlab.machine import Machine

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The bridge's own options.

    `inner` is the wrapped connector in the words of a `--kv-transfer-config` (kv_connector, kv_connector_module_path,
    kv_connector_extra_config). `machine`: a `Machine` JSON or a published profile (None: calibrate on what is seen),
    `tier`: which of its links the inner connector loads over. `checksums`: a folder that keeps, over restarts, what
    the right bytes of each block are (None: in memory only). The rest as in `Judge`: `decode_delay_value` is for one
    active decode.
    """

    inner: Mapping[str, Any]
    machine: str | None = None
    tier: str | None = None
    checksums: str | None = None
    max_load_tokens: int | None = None
    decode_delay_value: float = 0.0
    retry_every: int = 64

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> Options:
        """From the extra config. Raises ValueError for a missing inner connector, an unknown key or a wrong type."""
        known = {option.name for option in fields(cls)}
        if unknown := sorted(set(extra) - known):
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(map(repr, unknown))}; CrossoverConnector knows"
                f" {', '.join(sorted(known))}. Options of the wrapped connector go into inner.kv_connector_extra_config"
            )
        inner = extra.get("inner")
        if not isinstance(inner, Mapping) or not isinstance(inner.get("kv_connector"), str):
            raise ValueError(
                f"kv_connector_extra_config.inner is {inner!r}; expected the connector to wrap, such as"
                ' {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 8000000}}'
            )
        if inner["kv_connector"] == "CrossoverConnector":
            raise ValueError("kv_connector_extra_config.inner is CrossoverConnector itself; name the connector to wrap")
        for name, kinds in (
            ("machine", str),
            ("tier", str),
            ("checksums", str),
            ("max_load_tokens", int),
            ("decode_delay_value", (int, float)),
            ("retry_every", int),
        ):
            value = extra.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                raise ValueError(f"kv_connector_extra_config.{name} is {value!r}; expected {cls.__annotations__[name]}")
        options = cls(**extra)
        options.judge(None, block_size=1)  # refuses what is out of range, before a model is loaded
        return options

    def load_machine(self) -> tuple[Machine | None, str]:
        """The machine to start from and the tier. Raises ValueError where there is no such file, profile or tier."""
        if self.machine is None:
            return None, self.tier or "outside"
        machine = Machine.load(self.machine)
        if self.tier is None and not machine.links:
            raise ValueError(
                f"machine {machine.name!r} has no link to load over; probe the server with {self.inner['kv_connector']}"
                " switched on, or leave kv_connector_extra_config.machine out"
            )
        if self.tier is None and len(machine.links) > 1:
            raise ValueError(
                f"kv_connector_extra_config.tier is missing: machine {machine.name!r} has links to"
                f" {', '.join(machine.links)}; name the one that {self.inner['kv_connector']} loads over"
            )
        tier = self.tier or next(iter(machine.links))
        machine.link(tier)
        return machine, tier

    def judge(self, learner: Any, *, block_size: int) -> Judge:
        """A judge with these options. Raises ValueError for values out of range."""
        return Judge(
            learner,
            block_size=block_size,
            max_load_tokens=self.max_load_tokens,
            decode_delay_value=self.decode_delay_value,
            retry_every=self.retry_every,
        )

    def checksum_file(self, identity: bytes, rank: int) -> Path | None:
        """Where the checksums of one rank of one model are kept, if anywhere."""
        return Path(self.checksums) / f"{identity.hex()[:32]}-rank{rank}.sums" if self.checksums else None
