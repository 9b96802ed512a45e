"""Every speed claim of the project, re-made: ours beside a floor and beside peers, interleaved.

A floor is the least work the task needs, done alone (the same bytes in one contiguous copy, the same file read raw).
A peer is another library doing the same task. Ratios above 1 mean that we are faster. Medians over interleaved rounds.
Importing this does not import torch: a group's module is loaded when it is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlab.experiments.bench.rows import Row

__all__ = ["GROUPS", "Group", "check_groups", "run"]


@dataclass(frozen=True)
class Group:
    """What a group of rows measures, its minutes on two CPU cores, and the peers that it stands beside."""

    module: str  # of this package; its function is bench_<name of the group>
    measures: str
    minutes: float
    peers: tuple[str, ...] = ()


GROUPS: dict[str, Group] = {
    "start": Group("start", "imports, the shell, one decision, the smallest crossover", 1.5),
    "hashing": Group("hashing", "block hashes and checksums beside hashlib and xxhash; prefix look-ups", 0.2),
    "growth": Group("growth", "fitted exponents: time and memory against size", 1),
    "host": Group("memory", "offload and reload to host RAM beside plain copies", 1),
    "disk": Group("memory", "offload and cold reload to disk beside raw writes and reads", 1),
    "valkey": Group("valkey", "moves to a real server on loopback beside plain pipelined GETs and SETs", 0.5),
    "attention": Group("attention", "attention alone beside scaled_dot_product_attention", 1),
    "prefill": Group("model", "time to first token beside transformers and the floor", 8, ("transformers",)),
    "decode": Group("decode", "time per token, batch 1 and 8, beside transformers", 2, ("transformers",)),
    "resume": Group("model", "a resume from host RAM beside a full prefill; what of a disk reload is hidden", 2),
    "prediction": Group("model", "predicted beside measured times at unseen lengths", 4),
    "engine": Group("engine", "agents under three policies; look-ups, scheduling, loading behind computing", 6),
    "simulate": Group("simulate", "a long trace, the real engine beside it, policies in many cells", 10),
    "vllm": Group("vllm", "time to first token, computed and from disk, beside vLLM", 11, ("vllm",)),
}


def check_groups(groups: Sequence[str]) -> None:
    """Raises ValueError naming the known groups when one of `groups` is none of them."""
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"unknown bench group {group!r}; known groups: {', '.join(GROUPS)}")


def run(
    groups: Sequence[str], device: str, dtype: str, progress: Callable[[str], None] = lambda _: None
) -> Iterator[Row]:
    """The rows of the named groups, as they are measured, each with group and dtype. ValueError for an unknown one."""
    check_groups(groups)
    for group in groups:
        module = import_module(f"{__name__}.{GROUPS[group].module}")
        for row in getattr(module, f"bench_{group}")(device, dtype, progress):
            yield replace(row, group=group, dtype=dtype)
