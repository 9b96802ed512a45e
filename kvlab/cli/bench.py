"""`kvlab bench`: the rows of `experiments.bench` as a table or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.cli.console import out, progress


def bench(
    groups: Annotated[
        list[str] | None,
        typer.Argument(help="start, host, disk, prefill, resume, prediction, engine; without any: all of them."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16; auto: the faster one on this machine.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write rows and machine facts to this JSON file.")
    ] = None,
) -> None:
    """Measure every speed claim of the project on this machine: ours, the floor, the peers, and the goal."""
    from kvlab.experiments import bench as experiment
    from kvlab.loading import resolve_device, resolve_dtype
    from kvlab.records import machine_facts, now_utc, write_json

    if out_file is not None and out_file.is_dir():
        raise ValueError(f"--out {out_file} is a folder; give the JSON file to write")
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    say = progress(quiet=as_json)
    rows = []
    for row in experiment.run(groups or list(experiment.GROUPS), str(where), kind, say):
        rows.append(_finite(asdict(row)))
        if not as_json:
            out.print(_line(rows[-1]), markup=False, soft_wrap=True)
    say("")
    if as_json:
        print(json.dumps(rows, indent=1))  # noqa: T201
    else:
        _table(rows)
    if out_file is not None:
        facts = machine_facts(str(where))
        write_json(out_file, {"schema": "kvlab.bench/1", "when": now_utc(), "facts": facts, "rows": rows})


def _finite(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ratio(row: Mapping[str, Any]) -> str:
    ratios = [row["of_floor"], *row["of_peer"].values()]
    shown = " / ".join(f"{ratio:.2f}" for ratio in ratios if ratio is not None)
    if row["interval"] and None not in row["interval"]:
        shown += " [{:.2f}, {:.2f}]".format(*row["interval"])
    return shown.strip()


def _beside(row: Mapping[str, Any]) -> str:
    floor = [] if row["floor"] is None else [f"floor {row['floor']:.3g}"]
    return ", ".join(floor + [f"{name} {value:.4g}" for name, value in row["peers"].items() if value is not None])


def _met(row: Mapping[str, Any]) -> str:
    return {True: "met", False: "missed", None: "-"}[row["met"]]


def _ours(row: Mapping[str, Any]) -> str:
    return "n/a" if row["ours"] is None else f"{row['ours']:.3g} {row['unit']}"


def _line(row: Mapping[str, Any]) -> str:
    parts = [
        f"{row['name']}: {_ours(row)}",
        _beside(row),
        _ratio(row) and f"ratio {_ratio(row)}",
        row["goal"],
        _met(row),
    ]
    return "; ".join(part for part in parts if part)


def _table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title="kvlab bench; a ratio above 1: kvlab is faster",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("what", "ours", "ratio [95 %]", "goal", ""):
        table.add_column(column, no_wrap=column in ("ours", ""))
    for row in rows:
        table.add_row(row["name"], _ours(row), _ratio(row), row["goal"], _met(row))
    out.print(table)
