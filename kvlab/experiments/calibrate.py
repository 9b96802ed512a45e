"""Measure a `Machine`: prefill rates apart for linear layers and attention, decode passes, each tier's link both ways.

Knows clocks and the rig. The curves it returns pass through the medians it measured; raw samples go into provenance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, linear_flops
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import block_hashes
from kvlab.graphs import decode_with
from kvlab.machine import Curve, Decode, Direction, Link, Machine, Prefill
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES
from kvlab.records import machine_facts, median, now_utc
from kvlab.tiers import DiskTier, Tier

__all__ = [
    "DecodeSample",
    "PrefillSample",
    "TierFactory",
    "calibrate",
    "fit_decode",
    "fit_link",
    "fit_prefill",
    "measure_link",
    "relative_spread",
    "scattered",
]

Progress = Callable[[str], None]
# A tier is opened anew for each block layout it is measured with, so calibration takes makers, not tiers.
TierFactory = Callable[[], Tier]

_ROWS = (16, 32, 64, 128, 256, 512)
_CACHED_ROWS = (16, 128, 512)
_CACHED_TOKENS = 1024
_FEW_CACHED = 16  # next to nothing to attend to: what is left are launches
_WHOLE_TOKENS = 1024
# Long prompts may get another kernel, and a GPU shows in them alone what computing takes; only where they are cheap:
_LONG_ROWS = {"cpu": (2048,), "cuda": (2048, 4096, 8192)}
_LONG_SHARE = 0.3  # of the time for prefill
_DECODE_ROWS = (1, 3)
_DECODE_CACHED = (16, 512)  # of the longest row
_LADDER_BLOCKS = (1, 2, 4, 8, 16, 32, 64)
_LINK_BUDGET_S = 10.0  # for one ladder of transfers; what bounds it is a tier that compresses
_DIRECTIONS: tuple[Direction, ...] = ("load", "store")


@dataclass(frozen=True)
class PrefillSample:
    """One timed pass: `rows` new tokens behind `cached` ones took each of `seconds`."""

    rows: int
    cached: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class DecodeSample:
    """One timed decode pass: `rows` sequences with `tokens` cached in all took each of `seconds`."""

    rows: int
    tokens: int
    seconds: tuple[float, ...]


def calibrate(
    model: Model,
    tokens: Sequence[int],
    tiers: dict[str, TierFactory],
    *,
    block_size: int = 16,
    budget_s: float = 25.0,
    progress: Progress = lambda _: None,
) -> Machine:
    """Measure prefill on `tokens` (a real text, at least 512) and a link to each tier; returns a `Machine`.

    Rounds repeat until `budget_s` is spent, at least three and at most nine. Lengths beyond the text are left out.
    Raises ValueError with fewer than 64 tokens.
    """
    if len(tokens) < 64:
        raise ValueError(f"calibration needs at least 64 tokens of text, got {len(tokens)}")
    longest = min(len(tokens), _LONG_ROWS[model.device.type][-1], model.arch.max_positions)
    # One prompt of the longest, and later three sequences of some 512 tokens.
    room = max(longest, max(_DECODE_ROWS) * (min(_DECODE_CACHED[-1], longest) + 1 + block_size))
    with Rig(model, block_size=block_size, max_tokens=room, tables=1) as rig:
        progress("prefill: linear layers and attention, apart")
        samples = _time_prefill(rig, tokens[:longest], budget_s * 0.7)
        progress("decode: passes of few and of more rows")
        decode_samples = _time_decode(rig, tokens[:longest], budget_s * 0.2)
        head_s = _time_head(model.arch, model.dtype, model.device)
        prefill = fit_prefill(model.arch, samples, head_s, model.dtype)
    links: dict[str, dict[Direction, Link]] = {}
    for name, make in tiers.items():
        progress(f"link: {name}, both directions")
        load, store = measure_link(model, tokens, make, block_size=block_size)
        links[name] = {"load": load, "store": store}
    facts = machine_facts(str(model.device))
    return Machine(
        name=str(facts.get("gpu") or facts["cpu"]),
        prefill=prefill,
        links=links,
        decode=fit_decode(decode_samples),
        provenance={
            "kind": "live",
            "when": now_utc(),
            "facts": facts,
            "block_size": block_size,
            "model": model.arch.name,
            "weights": model.source,
            "prefill_samples": [vars(sample) | {"seconds": list(sample.seconds)} for sample in samples],
            "decode_samples": [vars(sample) | {"seconds": list(sample.seconds)} for sample in decode_samples],
            "head_s": head_s,
        },
    )


def _time_prefill(rig: Rig, tokens: Sequence[int], budget_s: float) -> list[PrefillSample]:
    """Interleaved rounds over a grid of (new rows, cached tokens); the cached keys are the text's own."""
    cached = min(_CACHED_TOKENS, len(tokens) // 2) // rig.block_size * rig.block_size
    grid = [(rows, 0) for rows in (*_ROWS, _WHOLE_TOKENS) if rows <= len(tokens)]
    grid += [(rows, cached) for rows in _CACHED_ROWS if cached and cached + rows <= len(tokens)]
    if cached > _FEW_CACHED:
        grid.append((_CACHED_ROWS[0], _FEW_CACHED))
    table = rig.table(len(tokens))
    # Warm-up, and real keys behind which the cached passes run. On a GPU the first pass loads libraries and kernels.
    passes = 2 if rig.model.device.type == "cuda" else 1
    warm_s = min(rig.prefill(tokens[: cached + max(_CACHED_ROWS)], table).ttft_s for _ in range(passes))
    for rows in _LONG_ROWS[rig.model.device.type]:
        passes_s = 3 * 2 * warm_s * (rows / 2048) ** 2  # three rounds; 2,048 tokens take some two warm-ups
        if len(tokens) >= rows and passes_s <= _LONG_SHARE * budget_s:
            grid.append((rows, 0))
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in grid}
    begin = time.perf_counter()
    for done in range(9):
        if done >= 3 and (time.perf_counter() - begin) * (done + 1) / done > budget_s:
            break
        for rows, behind in grid:
            # Short passes are cheap and noisy: three a round. Rewriting [behind, behind + rows) stores the same keys
            # again, so later passes see the same cache.
            for _ in range(3 if rows <= 64 else 1):
                seconds[rows, behind].append(rig.prefill(tokens[behind : behind + rows], table, behind).ttft_s)
    rig.release(table)
    return [PrefillSample(rows, behind, tuple(seconds[rows, behind])) for rows, behind in grid]


def _time_decode(rig: Rig, tokens: Sequence[int], budget_s: float) -> list[DecodeSample]:
    """Interleaved rounds over rows and cached tokens. Rows are of unequal length, as in traffic: each further one is an
    eighth of the longest shorter, since what pads them, and the mask that hides it, take time too.
    """
    decode = decode_with(rig.model, rig.streams.recorder())  # as an engine does
    few, most = _DECODE_CACHED[0], min(_DECODE_CACHED[-1], len(tokens) - 1)
    tables = [rig.table(most + 1) for _ in range(max(_DECODE_ROWS))]
    rig.prefill(tokens[:most], tables[0])
    for table in tables[1:]:  # the same keys in blocks of their own
        for source, target in zip(tables[0].blocks, table.blocks, strict=True):
            rig.pool.copy_block(source, target)
    grid = [(rows, cached) for rows in _DECODE_ROWS for cached in (few, most)]
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in grid}
    begun = time.perf_counter()
    for done in range(16):
        if done > 3 and (time.perf_counter() - begun) * (done + 1) / done > budget_s:
            break
        for rows, cached in grid:
            blocks, lengths = [table.blocks for table in tables[:rows]], _unequal(rows, cached)
            ids = torch.tensor([tokens[length] for length in lengths])
            begin = time.perf_counter()
            logits = decode(ids, rig.pool, blocks, lengths)
            int(logits[-1].argmax())
            if done:  # the first round is warm-up, and records graphs where there are any
                seconds[rows, cached].append(time.perf_counter() - begin)
    for table in tables:
        rig.release(table)
    return [DecodeSample(rows, sum(_unequal(rows, cached)), tuple(seconds[rows, cached])) for rows, cached in grid]


def _unequal(rows: int, longest: int) -> list[int]:
    return [longest - row * longest // 8 for row in range(rows)]


def fit_decode(samples: Sequence[DecodeSample]) -> Decode:
    """The least-squares plane through the medians, of which no part is below 0.

    A part that comes out negative is noise: it is left out and the others are fitted again.
    """
    columns = np.array([[1.0, s.rows, s.tokens] for s in samples])
    medians = np.array([median(s.seconds) for s in samples])
    used = [0, 1, 2]
    while True:
        fitted = np.linalg.lstsq(columns[:, used], medians, rcond=None)[0]
        if fitted.min() >= 0:
            break
        used.pop(int(fitted.argmin()))
    parts = dict.fromkeys(range(3), 0.0) | dict(zip(used, map(float, fitted), strict=True))
    return Decode(parts[0], parts[1], parts[2])


def _time_head(arch: ModelArch, dtype: str, device: torch.device) -> float:
    """Seconds of the LM head alone on one row: a matmul that reads every weight once."""
    weight = torch.ones(arch.vocab, arch.hidden, dtype=TORCH_DTYPES[dtype], device=device)
    row = torch.ones(1, arch.hidden, dtype=weight.dtype, device=device)
    samples = []
    for _ in range(8):
        begin = time.perf_counter()
        float(torch.nn.functional.linear(row, weight)[0, 0])
        samples.append(time.perf_counter() - begin)
    return median(samples[1:])


def fit_prefill(arch: ModelArch, samples: Sequence[PrefillSample], head_s: float, dtype: str) -> Prefill:
    """Rates from timed passes: attention by what it adds (`_attention_rates`), linear layers from the rest."""
    times = {(s.rows, s.cached): median(s.seconds) for s in samples}
    plain = sorted(rows for rows, cached in times if cached == 0)
    attention = _attention_rates(arch, times, plain, head_s)
    attention_s = {rows: attention_flops(arch, 0, rows) / attention(rows) for rows in plain}
    fixed_s, linear = _fit_linear(arch, times, attention_s, head_s)
    return Prefill(
        per_chunk_s=fixed_s,
        linear_flops_per_s=Curve(tuple(linear)),
        attention_flops_per_s=attention,
        calibrated_on=arch.name,
        calibrated_shape=arch.shape_digest,
        dtype=dtype,
        spread=relative_spread([s.seconds for s in samples]),
        source="measured",
    )


def _attention_rates(
    arch: ModelArch, times: Mapping[tuple[int, int], float], plain: Sequence[int], head_s: float
) -> Curve:
    """Attention FLOP/s by rows: from what cached tokens add, and what long prompts take beyond two of half the length.

    `plain`: the rows that were timed without cached tokens, in order.
    """
    far = max(cached for _, cached in times)
    launches_s = _launches_s(arch, times, far)
    attention: list[tuple[float, float]] = []
    for (rows, cached), seconds in sorted(times.items()):
        if cached and cached == far and (rows, 0) in times:
            extra_s = seconds - times[rows, 0] - launches_s
            # Below 2 % of the pass the difference is noise; the neighbouring knot then serves.
            if extra_s > 0.02 * seconds:
                attention.append((rows, _extra_flops(arch, rows, cached) / extra_s))
    for long in (rows for rows in plain if rows > _WHOLE_TOKENS and (rows // 2, 0) in times):
        extra_s = times[long, 0] - 2 * times[long // 2, 0] + head_s
        extra_flops = attention_flops(arch, 0, long) - 2 * attention_flops(arch, 0, long // 2)
        if extra_s > 0.1 * times[long, 0]:  # the noise of three timings
            attention.append((long, extra_flops / extra_s))
    if not attention:  # no usable difference: charged at the rate of the linear layers
        _, linear = _fit_linear(arch, times, dict.fromkeys(plain, 0.0), head_s)
        attention.append((1.0, max(rate for _, rate in linear)))
    # No more than four fifths of any whole prompt: a knot that is noise may not outgrow what was measured.
    least = {rows: attention_flops(arch, 0, rows) / (0.8 * times[rows, 0]) for rows in plain}
    rates = Curve(tuple(attention))
    raised = {rows: rate for rows, rate in least.items() if rates(rows) < rate}
    return Curve(tuple(sorted((dict(attention) | raised).items())))


def _fit_linear(
    arch: ModelArch, times: Mapping[tuple[int, int], float], attention_s: Mapping[int, float], head_s: float
) -> tuple[float, list[tuple[float, float]]]:
    """The fixed seconds of a pass, and the linear FLOP/s by rows, from what `attention_s` and the LM head leave.

    The fixed part is the intercept of the three shortest passes, not below 0. A tenth of each pass at least stays with
    its FLOPs: where launching kernels takes the time, all lengths take alike and nothing would be left.
    """
    rest_s = {rows: times[rows, 0] - head_s - seconds for rows, seconds in attention_s.items()}
    shortest_s = _intercept(list(rest_s.items())[:3])
    fixed_s = max(0.0, min([shortest_s, *(seconds - 0.1 * times[rows, 0] for rows, seconds in rest_s.items())]))
    rates = [(1.0, 2 * arch.head_macs / head_s)]
    for rows, seconds in rest_s.items():
        rates.append((rows, linear_flops(arch, rows) / max(seconds - fixed_s, 0.1 * times[rows, 0])))
    return fixed_s, rates


def _extra_flops(arch: ModelArch, rows: int, cached: int) -> int:
    """Attention FLOPs that `cached` tokens add to a pass of `rows` new ones."""
    return attention_flops(arch, cached, cached + rows) - attention_flops(arch, 0, rows)


def _launches_s(arch: ModelArch, times: Mapping[tuple[int, int], float], far: int) -> float:
    """What a pass behind cached tokens takes more, however few they are: launches, not attention.

    Where passes of equal rows were timed behind few and behind `far` tokens: the line through both, behind none. 0
    below 5 % of the pass, which is noise. No part of a `Prefill` has it: passes behind a cache are predicted that much
    too short.
    """
    for (rows, near), seconds in times.items():
        if 0 < near < far and (rows, 0) in times and (rows, far) in times:
            share = _extra_flops(arch, rows, near) / _extra_flops(arch, rows, far)
            extra_s = (seconds - share * times[rows, far]) / (1 - share) - times[rows, 0]
            return extra_s if extra_s > 0.05 * seconds else 0.0
    return 0.0


def measure_link(
    model: Model, tokens: Sequence[int], make_tier: TierFactory, *, block_size: int, repeats: int = 5
) -> tuple[Link, Link]:
    """The (load, store) links of one tier, from transfers of 1, 2, 4, … scattered blocks of real keys and values.

    Overhead per block comes from moving the same bytes in blocks of a quarter of the size, overhead per copy from
    cutting the same blocks into layer groups; both are differences of medians, and 0 where the difference is noise.
    """
    reach = min(len(tokens), model.arch.max_positions, _LADDER_BLOCKS[-1] * block_size) // block_size * block_size
    tokens, most = tokens[:reach], reach // block_size
    ladder = [blocks for blocks in _LADDER_BLOCKS if blocks < most] + [most]
    base = _time_transfers(model, tokens, make_tier, block_size, 1, ladder, repeats)
    most = max(base)
    quarter = block_size // 4
    small = {}
    if block_size % 4 == 0 and model.layout(block_size).row_bytes % 64 == 0:  # a quarter row is still whole copies
        small = _time_transfers(model, tokens, make_tier, quarter, 1, [4 * most], repeats)
    groups = min(8, len(model.arch.layers))
    grouped = _time_transfers(model, tokens, make_tier, block_size, groups, [most], repeats) if groups > 1 else {}
    spread = {name: relative_spread([samples[name] for samples in base.values()]) for name in _DIRECTIONS}
    links = []
    for direction in _DIRECTIONS:
        times = {blocks: median(samples[direction]) for blocks, samples in base.items()}
        per_block_s = per_copy_s = 0.0
        if small:
            per_block_s = max(0.0, (median(small[4 * most][direction]) - times[most]) / (3 * most))
        if grouped:
            per_copy_s = max(0.0, (median(grouped[most][direction]) - times[most]) / (groups - 1))
        link = fit_link(times, model.layout(block_size).block_bytes, per_block_s, per_copy_s)
        links.append(replace(link, spread=spread[direction], pinned=model.device.type == "cuda", source="measured"))
    return links[0], links[1]


def fit_link(times: Mapping[int, float], block_bytes: int, per_block_s: float = 0.0, per_copy_s: float = 0.0) -> Link:
    """The link whose prediction for each measured number of blocks is its measured seconds.

    `per_request_s` is the intercept of the three smallest transfers, less the other overheads, not below 0.
    """
    counts = sorted(times)
    per_request_s = max(0.0, _intercept([(n, times[n]) for n in counts[:3]]) - per_copy_s)
    # A tenth of each time at least stays with the bytes, so that noise in the overheads cannot make a rate negative.
    share = min(1.0, *(0.9 * times[n] / max(per_request_s + per_copy_s + n * per_block_s, 1e-12) for n in counts))
    per_request_s, per_block_s, per_copy_s = per_request_s * share, per_block_s * share, per_copy_s * share
    points = []
    for n in counts:
        left_s = times[n] - per_request_s - per_copy_s - n * per_block_s
        points.append((float(n * block_bytes), n * block_bytes / left_s / 1e9))
    return Link(Curve(tuple(points)), per_request_s=per_request_s, per_block_s=per_block_s, per_copy_s=per_copy_s)


def _time_transfers(
    model: Model,
    tokens: Sequence[int],
    make_tier: TierFactory,
    block_size: int,
    groups: int,
    ladder: Sequence[int],
    repeats: int,
) -> dict[int, dict[str, list[float]]]:
    """Seconds to load and to store each number of blocks in `ladder`, interleaved; a load finds its pages dropped."""
    seconds: dict[int, dict[str, list[float]]] = {}
    with Rig(model, block_size=block_size, max_tokens=len(tokens), tables=2, groups=groups) as rig:
        tier = rig.open(make_tier())
        home = rig.table(len(tokens))
        rig.pool.rows.normal_()
        if isinstance(tier, DiskTier) and tier.codec:  # only compression cares what the bytes are
            rig.prefill(tokens, home)
        hashes = block_hashes(rig.fingerprint, tokens, block_size)
        begun = time.perf_counter()
        for repeat in range(repeats + 1):  # the first round warms allocators and is dropped
            for n in list(seconds) if repeat else ladder:
                tier.clear()
                begin = time.perf_counter()
                rig.transfer.offload(tier, home.blocks[:n], hashes[:n], source_held=True).wait()
                stored_s = time.perf_counter() - begin
                tier.drop_pages()
                away = rig.table(n * block_size)
                # Scattered: every other block of the free half, in no order.
                begin = time.perf_counter()
                report = rig.transfer.reload(tier, hashes[:n], scattered(away.blocks)).wait()
                loaded_s = time.perf_counter() - begin
                rig.release(away)
                if report.valid_blocks < n:
                    raise RuntimeError(f"{tier.name} lost blocks while it was measured: {'; '.join(report.failures)}")
                if repeat:
                    seconds[n]["load"].append(loaded_s)
                    seconds[n]["store"].append(stored_s)
                    continue
                seconds[n] = {"load": [], "store": []}
                # The next step costs about as much as all before it: a slow tier gets a shorter ladder.
                if len(seconds) > 1 and 2 * (repeats + 1) * (time.perf_counter() - begun) > _LINK_BUDGET_S:
                    break
        rig.release(home)
        tier.clear()
    return seconds


def scattered(blocks: Sequence[int]) -> list[int]:
    """The same blocks in an order without runs, as a busy pool hands them out; deterministic."""
    return [*blocks[::2], *blocks[1::2]][::-1]


def _intercept(points: Sequence[tuple[float, float]]) -> float:
    """The value at 0 of the least-squares line through (x, y) points; 0 with a single point."""
    if len(points) < 2:
        return 0.0
    sizes, values = np.asarray(points, dtype=np.float64).T
    return float(np.polyfit(sizes, values, 1)[1])


def relative_spread(samples: Sequence[Sequence[float]]) -> float:
    """Relative scatter of single timings about their medians: 1.4826 × the median absolute deviation, at least 1 %."""
    deviations = [abs(value / median(group) - 1) for group in samples for value in group]
    return max(0.01, 1.4826 * median(deviations))
