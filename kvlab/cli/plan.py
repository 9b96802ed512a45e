"""`kvlab plan`: a model and a machine in, sizes, times, flips and settings out. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.cli import plan_report
from kvlab.cli.console import positive_count
from kvlab.hub import hub_folder
from kvlab.units import parse_bandwidth_gb_per_s, parse_flops_per_s, parse_s

if TYPE_CHECKING:
    from kvlab.arch import ModelArch
    from kvlab.machine import Machine
    from kvlab.plan import Plan

DEFAULT_PREFIXES = (1_000, 8_000, 32_000, 128_000)


def plan(
    model: Annotated[str, typer.Option(help="A config.json, a folder that holds one, a hub id or a preset.")],
    machine: Annotated[
        str | None, typer.Option(help="A published profile (h100-sxm-pcie5, ...) or a file of `kvlab calibrate`.")
    ] = None,
    peak: Annotated[str | None, typer.Option(help="Instead of --machine: peak rate of one rank, 989TFLOP/s.")] = None,
    mfu: Annotated[float, typer.Option(help="The share of --peak that a prefill reaches.")] = 0.6,
    link: Annotated[
        list[str] | None, typer.Option(help="A tier behind a link of 50GB/s or 400Gb/s per rank; may be repeated.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    kv_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp8, ...; default: what the config prescribes, else the machine's.")
    ] = None,
    block_size: Annotated[str, typer.Option(help="Tokens per KV block.")] = "16",
    prefix: Annotated[
        str | None, typer.Option(help="Prefix lengths, 1k,8k,32k,128k (k is 1,000, Ki is 1,024).")
    ] = None,
    suffix: Annotated[str, typer.Option(help="New tokens behind the prefix.")] = "64",
    load: Annotated[float, typer.Option(help="Utilisation of link and accelerator, from 0 to below 1.")] = 0.0,
    ttft_slo: Annotated[str | None, typer.Option(help="Limit for the time to first token, as in 500ms.")] = None,
    percentile: Annotated[float, typer.Option(help="Share of requests, in %, that --load and --ttft-slo mean.")] = 99.0,
    settings: Annotated[
        str | None, typer.Option(help="Also print option names and values for vllm, lmcache, sglang or llm-d.")
    ] = None,
    conversations: Annotated[int, typer.Option(help="Idle conversations that --settings makes room for.")] = 16,
    plot: Annotated[Path | None, typer.Option(help="Write a chart to this file (.png).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Plan a deployment: cache sizes, reload against recompute for every tier, flips, deadlines and settings."""
    from kvlab.plan import plan as make_plan
    from kvlab.settings import settings as settings_for

    arch = find_arch(model)
    where = _find_machine(machine, peak, mfu, link or [])
    suffix_tokens = positive_count("--suffix", suffix)
    made = make_plan(
        arch,
        where,
        prefixes=_prefixes(prefix, arch, suffix_tokens),
        suffix=suffix_tokens,
        tp=tp,
        kv_dtype=kv_dtype,
        block_size=positive_count("--block-size", block_size),
        load=load,
        percentile=percentile,
        ttft_slo_s=None if ttft_slo is None else parse_s(ttft_slo),
    )
    chosen = None if settings is None else settings_for(made, settings, conversations)
    if plot is not None:
        _draw(made, plot)
    if as_json:
        data = {"schema": "kvlab.plan/1", **made.to_dict(), "provenance": dict(where.provenance)}
        if chosen is not None:
            data["settings"] = {"system": settings, "options": [asdict(setting) for setting in chosen]}
        print(json.dumps(data, indent=1, allow_nan=False))  # noqa: T201
        return
    plan_report.show_plan(made)
    if settings is not None and chosen is not None:
        plan_report.show_settings(settings, chosen)
    if plot is not None:
        plan_report.say(f"wrote {plot}")


def find_arch(name: str) -> ModelArch:
    """The shape that `name` (preset, config.json, folder or hub id) means. Raises ValueError or OSError in one line."""
    from kvlab.arch import ModelArch, preset_names

    if name in preset_names():
        return ModelArch.preset(name)
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return ModelArch.from_hf(path)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return replace(ModelArch.from_hf(hub_folder(name, ["config.json"])), name=name.partition("/")[2])
    known = ", ".join(preset_names())
    raise ValueError(
        f"unknown model {name!r}; expected a config.json, a folder, a hub id 'org/name', or one of {known}"
    )


def _find_machine(machine: str | None, peak: str | None, mfu: float, links: Sequence[str]) -> Machine:
    from kvlab.machine import Curve, Link, Machine

    if (machine is None) == (peak is None):
        raise ValueError("give either --machine NAME|FILE, or --peak 989TFLOP/s with --link 50GB/s")
    rates = {link: parse_bandwidth_gb_per_s(link) for link in links}
    if machine is not None:
        found = Machine.load(machine)
    else:
        if not rates:
            raise ValueError("--peak needs at least one --link, as in --link 50GB/s or --link 400Gb/s")
        found = _from_peak(parse_flops_per_s(str(peak)), mfu)
    for text, gb_per_s in rates.items():
        given = Link(Curve(((1.0, gb_per_s),)), spread=0.0, source="given with --link, taken as achieved at any size")
        name = "link" if len(rates) == 1 else f"link {text}"
        found = found.with_link(name, given, given)
    return found


def _from_peak(flops_per_s: float, mfu: float) -> Machine:
    from kvlab.machine import Curve, Machine, Prefill

    if not 0 < mfu <= 1:
        raise ValueError(f"--mfu is {mfu:g}; expected a share above 0 and up to 1")
    rate = Curve(((1.0, flops_per_s * mfu),))
    source = f"{mfu:.0%} of the peak given with --peak (estimate)"
    prefill = Prefill(0.0, rate, rate, calibrated_on="no model (share of peak)", spread=0.3, source=source)
    return Machine(f"{flops_per_s / 1e12:.4g} TFLOP/s", prefill, {}, {"kind": "estimate", "source": source})


def _prefixes(text: str | None, arch: ModelArch, suffix: int) -> list[int]:
    if text is None:
        fitting = [tokens for tokens in DEFAULT_PREFIXES if tokens + suffix <= arch.max_positions]
        return fitting or [max(1, arch.max_positions - suffix)]
    return [positive_count("--prefix", item) for item in text.split(",")]


def _draw(made: Plan, path: Path) -> None:
    try:
        from kvlab.lab import draw
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'kvlab[lab]'") from error
    draw.save(draw.plan_figure(made.to_dict()), path)
