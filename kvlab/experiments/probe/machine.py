"""The machine behind a server, as its first-token times show it: prefill rates from misses, a link from reloads.

Arithmetic on a `Level` and the model's shape. The whole server counts as one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, kv_bytes, linear_flops
from kvlab.experiments.calibrate import fit_link, relative_spread
from kvlab.experiments.probe.ask import Arm
from kvlab.experiments.probe.results import Level
from kvlab.machine import Curve, Direction, Link, Machine, Prefill
from kvlab.prefix import reloadable_tokens

__all__ = ["fit_machine"]

# Of the time of a hit: a reload that takes no more than this beyond a resident hit shows nothing of its link.
_NOISE = 0.05


def fit_machine(
    arch: ModelArch,
    level: Level,
    *,
    suffix: int,
    block_size: int,
    tier: str | None,
    kv_dtype: str | None,
    dtype: str,
    name: str,
    provenance: Mapping[str, Any],
) -> Machine:
    """Prefill and, with a `tier` whose reloads take longer than resident hits, its link.

    What a hit costs besides its suffix (HTTP, scheduling, the first token) is the fixed part of every pass, so
    predictions are of times that a client sees. Raises ValueError where fewer than two lengths have both times, or the
    times do not grow with the work.
    """
    prefill = _fit_prefill(arch, level, suffix, block_size, dtype)
    links: dict[str, dict[Direction, Link]] = {}
    notes = ["Probed from outside: the whole server counts as one rank, and its fixed costs as the prefill's."]
    link = None if tier is None else _fit_link(arch, level, block_size, kv_dtype)
    if tier is not None and link is not None:
        links[tier] = {"load": link}
    elif tier is not None:
        notes.append(f"Reloads from {tier} took no longer than resident hits: its link is too fast to be seen here.")
    return Machine(name, prefill, links, {**provenance, "notes": notes})


def _fit_prefill(arch: ModelArch, level: Level, suffix: int, block_size: int, dtype: str) -> Prefill:
    passes = []  # (first position, positions, seconds)
    for tokens, cold_s, hit_s in _both(level, "resident"):
        kept = reloadable_tokens(tokens, tokens + suffix, block_size)
        passes += [(0, tokens + suffix, cold_s), (kept, tokens + suffix - kept, hit_s)]
    if len(passes) < 4:
        raise ValueError(f"{len(passes) // 2} lengths have both a miss and a hit; a machine needs two")
    fixed_s, linear, attention = _rates(arch, passes)
    knots = [(float(passes[1][1]), linear)]  # rows of a hit; below the first cold length
    for _, rows, seconds in passes[::2]:
        left_s = seconds - fixed_s - attention_flops(arch, 0, rows) / attention - 2 * arch.head_macs / linear
        if rows > knots[-1][0] and left_s > 0.1 * seconds:
            knots.append((float(rows), linear_flops(arch, rows) / left_s))
    return Prefill(
        per_chunk_s=fixed_s,
        linear_flops_per_s=Curve(tuple(knots)),
        attention_flops_per_s=Curve(((1.0, attention),)),
        calibrated_on=arch.name,
        calibrated_shape=arch.shape_digest,
        dtype=dtype,
        spread=_spread(level, "recompute"),
        source="first-token times of a server, measured by kvlab probe",
    )


def _rates(arch: ModelArch, passes: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """Fixed seconds, linear FLOP/s and attention FLOP/s by least squares of relative errors, none of them negative.

    Attention that cannot be told from the linear layers is charged at their rate, as `calibrate` does.
    """
    rows = [
        (1.0, linear_flops(arch, count) + 2.0 * arch.head_macs, float(attention_flops(arch, first, first + count)))
        for first, count, _ in passes
    ]
    seconds = np.asarray([s for _, _, s in passes])
    table = np.asarray(rows) / seconds[:, None]
    together = np.stack([table[:, 0], table[:, 1] + table[:, 2]], axis=1)
    for columns in (table, together, together[:, 1:]):
        found = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0]
        if (found > 0).all():
            linear = 1 / float(found[0 if columns.shape[1] == 1 else 1])
            attention = 1 / float(found[2]) if columns.shape[1] == 3 else linear
            return float(found[0]) if columns.shape[1] > 1 else 0.0, linear, attention
    raise ValueError("first-token times do not grow with the tokens computed; no rates follow from them")


def _fit_link(arch: ModelArch, level: Level, block_size: int, kv_dtype: str | None) -> Link | None:
    resident = {tokens: seconds for tokens, _, seconds in _both(level, "resident")}
    times: dict[int, float] = {}
    for tokens, _, reload_s in _both(level, "reload"):
        resident_s = resident.get(tokens, math.inf)
        if reload_s - resident_s > _NOISE * resident_s and tokens >= block_size:
            times[tokens // block_size] = reload_s - resident_s
    if not times:
        return None
    link = fit_link(times, kv_bytes(arch, block_size, kv_dtype, 1, block_size))
    return replace(
        link, spread=_spread(level, "reload"), source="reloads less resident hits of a server, by kvlab probe"
    )


def _both(level: Level, arm: Arm) -> list[tuple[int, float, float]]:
    """(tokens, recompute seconds, `arm` seconds) of the lengths that have both medians."""
    found = zip(level.lengths, level.medians("recompute"), level.medians(arm), strict=True)
    return [(tokens, cold_s, hit_s) for tokens, cold_s, hit_s in found if cold_s is not None and hit_s is not None]


def _spread(level: Level, arm: Arm) -> float:
    groups = [[float(s) for s in row[~np.isnan(row)]] for row in level.seconds[arm]]
    return relative_spread([group for group in groups if group])
