"""The bridge's counters in vLLM's own two places: its periodic log line, and its Prometheus endpoint.

The wrapped connector's numbers travel along and appear under their own names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["COUNTERS", "CrossoverPromMetrics", "CrossoverStats", "read_stats", "stats_of"]

# As `Judge` and the scheduler's half count them → what they are. Prometheus: vllm:kvlab_<name>_total.
COUNTERS = {
    "reload_decisions": "Requests with something to load that loaded it.",
    "recompute_decisions": "Requests with something to load that computed it again.",
    "loaded_tokens": "Tokens whose load was decided.",
    "declined_tokens": "Tokens that could have been loaded and were computed again.",
    "loads": "Loads that ended well.",
    "load_seconds": "Seconds that those took.",
    "failed_loads": "Loads that failed or brought wrong bytes; their requests were computed again.",
    "unchecked_blocks": "Loaded blocks with no known checksum.",
}


def _name_of(connector: type) -> str:
    return f"{connector.__module__}:{connector.__qualname__}"


@dataclass
class CrossoverStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: {"kvlab": {counter: number}, "inner": the wrapped connector's stats or None, "connector": its class}."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which `stats_of` reads back."""
        inner = self.data["inner"]
        return {**self.data, "inner": None if inner is None else inner.to_dict()}

    def reset(self) -> None:
        """Forget what was counted."""
        self.data["kvlab"] = {}
        if self.data["inner"] is not None:
            self.data["inner"].reset()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's numbers to these."""
        mine = self.data["kvlab"]
        for name, value in other.data["kvlab"].items():
            mine[name] = mine.get(name, 0) + value
        theirs, inner = other.data["inner"], self.data["inner"]
        self.data["inner"] = theirs if inner is None else inner if theirs is None else inner.aggregate(theirs)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One flat set of numbers for the log."""
        inner = {} if self.data["inner"] is None else self.data["inner"].reduce()
        return {**{f"kvlab {name}": round(value, 6) for name, value in self.data["kvlab"].items()}, **inner}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data["kvlab"] and (self.data["inner"] is None or self.data["inner"].is_empty())


def stats_of(counts: Mapping[str, float], inner: Any, connector: type) -> CrossoverStats | None:
    """The bridge's and the wrapped connector's numbers as one; None for nothing."""
    if not counts and inner is None:
        return None
    return CrossoverStats(data={"kvlab": dict(counts), "inner": inner, "connector": _name_of(connector)})


def read_stats(data: Mapping[str, Any] | None) -> CrossoverStats:
    """Stats from `to_dict`, which may have crossed a process border; empty ones from None."""
    if data is None:
        return CrossoverStats(data={"kvlab": {}, "inner": None, "connector": ""})
    inner = data["inner"]
    if inner is not None and not isinstance(inner, KVConnectorStats):
        module, _, name = data["connector"].partition(":")
        inner = getattr(import_module(module), name).build_kv_connector_stats(inner)
    return CrossoverStats(data={**data, "inner": inner})


class CrossoverPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One Prometheus counter per entry of `COUNTERS`, and whatever the wrapped connector has (`inner`, or None)."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
        inner: Any,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._inner = inner
        self._counters = {}
        for name, meaning in COUNTERS.items():
            counter = metric_types[Counter](name=f"vllm:kvlab_{name}", documentation=meaning, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last time."""
        for name, value in transfer_stats_data["kvlab"].items():
            self._counters[engine_idx, name].inc(value)
        inner = transfer_stats_data["inner"]
        if inner is not None and self._inner is not None:
            self._inner.observe(inner.to_dict() if isinstance(inner, KVConnectorStats) else inner, engine_idx)
