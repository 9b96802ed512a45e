"""What a server counts about its prefix caches: Prometheus text of vLLM and SGLang into a few totals.

Names as published by vLLM 0.32 (v1/metrics/loggers.py) and SGLang 0.5.23 (srt/observability/metrics_collector.py);
Prometheus appends `_total` to a counter's name. Does not know how the text was fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Counters", "parse"]

# Tokens whose KV came from a cache, by the label that says which: vLLM's source, SGLang's cache_source.
_BY_SOURCE = {
    "vllm:prompt_tokens_cached_by_source": "source",
    "sglang:cached_tokens": "cache_source",
}
_DEVICE = "vllm:prefix_cache_hits"
_EXTERNAL = "vllm:external_prefix_cache_hits"
_PROMPTS = ("vllm:prompt_tokens", "sglang:prompt_tokens")
_BUSY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Counters:
    """Totals over all engines since the server started. `block_tokens` and `busy` are None where they are not told.

    `cached` holds prompt tokens from caches by place: "device", "host", "disk", "storage", "p2p", "external" or others
    of the server's own; empty where the server does not count them. `busy`: requests running or waiting right now.
    """

    prompt_tokens: float
    cached: Mapping[str, float] = field(default_factory=dict)
    busy: float | None = None
    block_tokens: int | None = None

    def since(self, before: Counters) -> Counters:
        """What was added between `before` and now."""
        cached = {place: total - before.cached.get(place, 0.0) for place, total in self.cached.items()}
        grown = {place: total for place, total in cached.items() if total}
        return Counters(self.prompt_tokens - before.prompt_tokens, grown, self.busy, self.block_tokens)


def parse(text: str) -> Counters | None:
    """The totals in a server's metrics; None when it counts no prompts, so that nothing can be told from them."""
    samples = list(_samples(text))
    names = {name for name, _, _ in samples}
    if not names.intersection(_PROMPTS):
        return None

    def total(*wanted: str) -> float:
        return sum(value for name, _, value in samples if name in wanted)

    cached: dict[str, float] = {}
    for name, labels, value in samples:
        if name in _BY_SOURCE:
            place = labels.get(_BY_SOURCE[name], "device").removesuffix("_unspecified")
            cached[place] = cached.get(place, 0.0) + value
    if not cached and names.intersection((_DEVICE, _EXTERNAL)):
        cached = {"device": total(_DEVICE), "external": total(_EXTERNAL)}
    return Counters(
        prompt_tokens=total(*_PROMPTS),
        cached=cached,
        busy=total(*_BUSY) if names.intersection(_BUSY) else None,
        block_tokens=_block_tokens(samples),
    )


def _samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:  # comments, blank lines
            continue
        name, labels, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        yield name.removesuffix("_total"), dict(_LABEL.findall(labels or "")), number


def _block_tokens(samples: Iterable[tuple[str, Mapping[str, str], float]]) -> int | None:
    for name, labels, value in samples:
        if name == "vllm:cache_config_info" and labels.get("block_size", "").isdigit():
            return int(labels["block_size"])
        if name == "sglang:page_size" and value >= 1:
            return int(value)
    return None
