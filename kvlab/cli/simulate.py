"""`kvlab simulate`: a request trace through the engine's own scheduler and policies, on a virtual clock. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from kvlab.cli import simulate_report
from kvlab.cli.console import positive_count, progress
from kvlab.cli.plan import find_arch
from kvlab.units import parse_bandwidth_gb_per_s, parse_bytes

if TYPE_CHECKING:
    from kvlab.machine import Machine
    from kvlab.simulate import Cluster, PolicyReport, Trace


def simulate(
    trace: Annotated[
        str,
        typer.Argument(help="Mooncake's .jsonl, agents as .csv, or mooncake-1k (ships with kvlab)."),
    ],
    model: Annotated[str, typer.Option(help="A config.json, a folder that holds one, a hub id or a preset.")],
    machine: Annotated[str, typer.Option(help="A published profile or a file of `kvlab calibrate`.")],
    pool: Annotated[str, typer.Option(help="KV memory in each accelerator, as in 40GiB.")],
    host: Annotated[str | None, typer.Option(help="The host tier of each replica, as in 256GiB.")] = None,
    disk: Annotated[str | None, typer.Option(help="The disk tier of each replica, as in 2TiB.")] = None,
    policy: Annotated[
        str, typer.Option(help="all, or some of reload,recompute,threshold:TOKENS,idle-blind,calibrated,oracle.")
    ] = "all",
    replicas: Annotated[int, typer.Option(help="Engines behind one router.")] = 1,
    router: Annotated[str, typer.Option(help="prefix (where it is cached), load, or kvlab (the verdict).")] = "prefix",
    shared_disk: Annotated[bool, typer.Option("--shared-disk", help="One disk and link for all replicas.")] = False,
    rate: Annotated[float, typer.Option(help="Arrivals so many times as fast as in the trace.")] = 1.0,
    requests: Annotated[str | None, typer.Option(help="Only the first ones (sessions, in a .csv), as in 1k.")] = None,
    truth: Annotated[str, typer.Option(help="True rates are drawn up to so far from what policies believe.")] = "0%",
    seed: Annotated[int, typer.Option(help="Of that draw.")] = 0,
    kv_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp8, ...; default: what the config prescribes, else the machine's.")
    ] = None,
    block_size: Annotated[str, typer.Option(help="Tokens per KV block: 512, as in the traces, or a divisor.")] = "512",
    token_budget: Annotated[str, typer.Option(help="Tokens computed in a step.")] = "8192",
    max_running: Annotated[int, typer.Option(help="Requests that run at once, room permitting.")] = 256,
    memory_bandwidth: Annotated[
        str | None, typer.Option(help="Device memory, 3350GB/s; a decode step reads weights and caches over it.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count bad lines instead of stopping there.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a chart to this file (.png).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Replay a request trace under reload, recompute, a threshold, kvlab's verdict and an oracle.

    Each replica is one accelerator that holds the whole model.
    """
    from kvlab import simulate as simulation
    from kvlab.arithmetic import kv_dtype_for
    from kvlab.machine import Machine

    believed, arch = Machine.load(machine), find_arch(model)
    limit = None if requests is None else positive_count("--requests", requests)
    read = simulation.read_trace(trace, skip_bad=skip_bad, limit=limit).at_rate(rate)
    if router not in get_args(simulation.Router):
        raise ValueError(f"--router is {router!r}; expected {', '.join(get_args(simulation.Router))}")
    cluster = simulation.Cluster(
        arch=arch,
        machine=believed,
        pool_bytes=parse_bytes(pool),
        host_bytes=0 if host is None else parse_bytes(host),
        disk_bytes=0 if disk is None else parse_bytes(disk),
        kv_dtype=kv_dtype_for(arch, kv_dtype, believed.prefill.dtype),
        block_size=positive_count("--block-size", block_size),
        token_budget=positive_count("--token-budget", token_budget),
        max_running=max_running,
        replicas=replicas,
        router=router,  # type: ignore[arg-type]  # checked above
        shared_disk=shared_disk,
        memory_gb_per_s=_memory_gb_per_s(memory_bandwidth, believed),
        truth=simulation.drawn_away(believed, _share(truth), seed),
    )
    names = list(simulation.POLICIES) if policy == "all" else policy.split(",")
    reports = simulation.simulate(read, cluster, names, progress(quiet=as_json))
    given = {"rate": rate, "truth": _share(truth), "seed": seed}
    result = _result(read, cluster, reports, given)
    if plot is not None:
        _draw(result, plot)
    if as_json:
        print(json.dumps(result, indent=1, allow_nan=False))  # noqa: T201
        return
    simulate_report.show(read, cluster, reports)
    if plot is not None:
        simulate_report.say(f"wrote {plot}")


def _memory_gb_per_s(given: str | None, machine: Machine) -> float | None:
    from kvlab.simulate import DEVICE_MEMORY_GB_PER_S

    return DEVICE_MEMORY_GB_PER_S.get(machine.name) if given is None else parse_bandwidth_gb_per_s(given)


def _share(text: str) -> float:
    number = text.strip().removeprefix("±").removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError as error:
        raise ValueError(f"--truth is {text!r}; write it like 20%") from error
    if not (math.isfinite(share) and 0 <= share < 1):
        raise ValueError(f"--truth is {text!r}; expected from 0% to below 100%, as in 20%")
    return share


# What of a cluster a record keeps; its model and machine are named beside them.
_PARAMETERS = (
    "pool_bytes",
    "host_bytes",
    "disk_bytes",
    "kv_dtype",
    "block_size",
    "token_budget",
    "max_running",
    "router",
    "shared_disk",
    "memory_gb_per_s",
)


def _result(
    trace: Trace, cluster: Cluster, reports: Mapping[str, PolicyReport], given: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "schema": "kvlab.simulate/1",
        "trace": trace.name,
        "requests": trace.requests,
        "skipped": trace.skipped,
        "model": cluster.arch.name,
        "machine": cluster.machine.name,
        "replicas": cluster.replicas,
        "parameters": {**{name: getattr(cluster, name) for name in _PARAMETERS}, **given},
        "policies": {name: made.to_dict() for name, made in reports.items()},
    }


def _draw(result: Mapping[str, Any], path: Path) -> None:
    try:
        from kvlab.lab import draw
    except ModuleNotFoundError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'kvlab[lab]'") from error
    draw.save(draw.simulate_figure(result), path)
