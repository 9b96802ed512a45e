"""Lesson 01: how many bytes a prefix leaves, how many are taken for it, and how many agents' worth fit."""

from __future__ import annotations

import random
from typing import Any

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.blocks import blocks_for
from kvlab.lab.task import Mistake, Task
from kvlab.layers import Decoder

__all__ = ["TASKS"]

_DTYPES = {1: "fp8", 2: "bf16", 4: "fp32"}


def _prefix_bytes(
    layers: int, query_heads: int, kv_heads: int, head_dim: int, element_bytes: int, tokens: int = 1
) -> int:
    """The library's own count for a model of this shape (its other sizes do not matter to the cache)."""
    d = Decoder(layers=layers, hidden=64, heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, ffn=64)
    arch = ModelArch("task", "llama", d.hidden, 64, 2**20, (d.layer,) * layers, True, d)
    return kv_bytes(arch, tokens, _DTYPES[element_bytes])


def _shape(rng: random.Random, element_bytes: int) -> tuple[int, ...]:
    """Layers, query heads (more than KV heads), KV heads, head_dim, bytes of an element."""
    kv_heads = rng.choice((2, 3, 4, 8))
    return (
        rng.randrange(12, 81),
        kv_heads * rng.choice((2, 3, 4, 8)),
        kv_heads,
        rng.choice((64, 96, 128)),
        element_bytes,
    )


_Q_FOR_KV = "That counts the query heads. Only keys and values are kept, and a group of query heads shares one KV head."
_K_ALONE = "That is K or V alone. Both are kept: twice as much."
_ONE_LAYER = "That is one layer. Every layer keeps its own keys and values."


def _my_prefix(rng: random.Random) -> list[tuple[Any, ...]]:
    # Few enough tokens, the last block empty enough, that whole blocks are told apart from exactly the tokens.
    return [(*_shape(rng, rng.choice((2, 4))), 16 * rng.randrange(60, 180) + rng.randrange(1, 12))]


def _mib(*shape: int) -> float:
    return _prefix_bytes(*shape) / 2**20


prefix_mib = Task(
    "prefix_mib",
    _my_prefix,
    _mib,
    (
        Mistake(_Q_FOR_KV, lambda n, q, _, dim, size, tokens: _mib(n, q, q, dim, size, tokens)),
        Mistake(_K_ALONE, lambda *shape: _mib(*shape) / 2),
        Mistake(_ONE_LAYER, lambda _, q, kv, dim, size, tokens: _mib(1, q, kv, dim, size, tokens)),
        Mistake(
            "Those are whole blocks. The question is what exactly these tokens leave.",
            lambda *shape: _mib(*shape[:-1], blocks_for(shape[-1], 16) * 16),
        ),
        Mistake("That counts 1e6 bytes to a MiB. A MiB is 2^20 bytes.", lambda *shape: _mib(*shape) * 2**20 / 1e6),
        Mistake("That is in GiB: a MiB is 2^20 bytes, a GiB is 2^30.", lambda *shape: _mib(*shape) / 1024),
    ),
    value=True,
)


def _shapes(rng: random.Random) -> list[tuple[Any, ...]]:
    multi_head = rng.randrange(8, 33)
    # Every element size once, as many KV heads as query heads once, a single KV head once.
    return [
        (rng.randrange(12, 81), multi_head, multi_head, 64, 1),
        _shape(rng, 4),
        _shape(rng, 2),
        (rng.randrange(12, 81), multi_head, 1, 128, 2),
    ]


kv_bytes_per_token = Task(
    "kv_bytes_per_token",
    _shapes,
    _prefix_bytes,
    (
        Mistake(_Q_FOR_KV, lambda n, q, _, dim, size: _prefix_bytes(n, q, q, dim, size)),
        Mistake(_K_ALONE, lambda *shape: _prefix_bytes(*shape) // 2),
        Mistake(_ONE_LAYER, lambda _, q, kv, dim, size: _prefix_bytes(1, q, kv, dim, size)),
        Mistake(
            "That takes every element for 2 bytes. element_bytes says how many there are: 4 in fp32, 1 in fp8.",
            lambda n, q, kv, dim, _: _prefix_bytes(n, q, kv, dim, 2),
        ),
        Mistake(
            "That counts elements, not bytes: each is element_bytes long.",
            lambda *shape: _prefix_bytes(*shape) // shape[-1],
        ),
    ),
)


def _prompts(rng: random.Random) -> list[tuple[Any, ...]]:
    block, size = rng.choice((16, 32, 64)), rng.randrange(2, 60) * 1024
    blocks = rng.randrange(3, 40)
    # Just full, one token more, one token less, nothing at all, and any.
    tokens = (blocks * block, blocks * block + 1, blocks * block - 1, 0, rng.randrange(1, 5000))
    return [(count, block, size) for count in tokens]


allocated_bytes = Task(
    "allocated_bytes",
    _prompts,
    lambda tokens, block, per_token: blocks_for(tokens, block) * block * per_token,
    (
        Mistake(
            "That takes a block more where the tokens just fill the last one: k · block tokens need exactly k blocks.",
            lambda tokens, block, per_token: (tokens // block + 1) * block * per_token,
        ),
        Mistake(
            "That rounds down: a block that is begun is taken whole.",
            lambda tokens, block, per_token: tokens // block * block * per_token,
        ),
        Mistake(
            "That is what the tokens fill. Memory is handed out in whole blocks: what is taken is more.",
            lambda tokens, _, per_token: tokens * per_token,
        ),
        Mistake(
            "That is a number of blocks; the answer is in bytes.",
            lambda tokens, block, _: blocks_for(tokens, block),
        ),
        Mistake(
            "That is the bytes of one token for each block: a block holds `block` tokens.",
            lambda tokens, block, per_token: blocks_for(tokens, block) * per_token,
        ),
    ),
)


def _devices(rng: random.Random) -> list[tuple[Any, ...]]:
    hbm_gib, agent, fit = rng.choice((16, 24, 40, 80)), rng.randrange(200, 900) * 2**20, rng.randrange(5, 12)
    exact = hbm_gib * 2**30 - fit * agent
    # Just as many as fit, one byte too few for that, weights that do not fit at all, and any.
    return [
        (hbm_gib, exact, agent),
        (hbm_gib, exact + 1, agent),
        (hbm_gib, hbm_gib * 2**30 + 3 * agent, agent),
        (hbm_gib, rng.randrange(1, 12) * 10**9, rng.randrange(100, 900) * 2**20),
    ]


def _fit(hbm_gib: int, weights_bytes: int, agent_bytes: int) -> int:
    return max(0, (hbm_gib * 2**30 - weights_bytes) // agent_bytes)


agents_resident = Task(
    "agents_resident",
    _devices,
    _fit,
    (
        Mistake(
            "That forgets the weights: they lie in the same memory, all the time.",
            lambda hbm, _, agent: _fit(hbm, 0, agent),
        ),
        Mistake(
            "That counts 1e9 bytes to a GiB. Device memory is given in GiB of 2^30 bytes.",
            lambda hbm, weights, agent: max(0, (hbm * 10**9 - weights) // agent),
        ),
        Mistake(
            "That rounds up or to the nearest: an agent that does not fit whole does not fit.",
            lambda hbm, weights, agent: max(0, -(-(hbm * 2**30 - weights) // agent)),
        ),
        Mistake(
            "A number of agents is never negative: where the weights alone do not fit, none does.",
            lambda hbm, weights, agent: (hbm * 2**30 - weights) // agent,
        ),
    ),
)

TASKS = (prefix_mib, kv_bytes_per_token, allocated_bytes, agents_resident)
