"""`kvlab bench`: the rows of `experiments.bench` measured or read, as lines, JSON, Markdown, a chart, a comparison."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.cli.console import INTERRUPTED, WRONG_RESULT, err, out, progress
from kvlab.experiments.bench import GROUPS, check_groups

if TYPE_CHECKING:
    from kvlab.experiments.bench.compare import Comparison

# \b keeps the shell's help from filling the paragraph.
EPILOG = "\b\nGroups, and about how long they take on two CPU cores:\n" + "\n".join(
    f"  {name:11}{group.minutes:3g} min  {group.measures}" for name, group in GROUPS.items()
)


def bench(
    groups: Annotated[list[str] | None, typer.Argument(help="Groups to measure; without any: all of them.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16; auto: the faster one on this machine.")] = "auto",
    vllm: Annotated[
        Path | None,
        typer.Option(envvar="KVLAB_VLLM_PYTHON", help="The Python of an environment in which vLLM is installed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list of rows as JSON.")] = False,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write rows and machine facts to this JSON file, after every row.")
    ] = None,
    add: Annotated[
        bool, typer.Option("--add", help="Keep the rows of other groups, and of other dtypes, that --out holds.")
    ] = False,
    from_file: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: take the rows from this JSON file.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option("--compare", help="Say what got slower or faster than in this JSON file; exit 1 if slower."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios to this PNG or SVG file.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of the rows as Markdown.")] = False,
) -> None:
    """Measure every speed claim of the project on this machine: ours, the floor, the peers, and the goal.

    With --compare the exit code is 1 when a row got slower by more than the spread of both runs. Ctrl-C keeps the rows
    that were measured in the file of --out.
    """
    from kvlab.experiments.bench.compare import compare, read_record

    _check(groups or (), out_file, add, from_file, plot)
    old = None if against is None else read_record(against)
    if vllm is not None:
        os.environ["KVLAB_VLLM_PYTHON"] = str(vllm)
    quiet = as_json or as_markdown
    if from_file is not None:
        record = read_record(from_file)
        if groups:
            record["rows"] = [row for row in record["rows"] if row.get("group") in groups]
    else:
        record = _measure(list(groups or GROUPS), device, dtype, out_file, add, quiet=quiet)
    _show(record, as_json=as_json, as_markdown=as_markdown)
    if plot is not None:
        from kvlab.lab.draw import bench_figure, save

        err.print(f"wrote {save(bench_figure(record), plot)}", markup=False, soft_wrap=True)
    if from_file is None and not record["complete"]:
        sys.exit(INTERRUPTED)
    if old is not None:
        comparison = compare(old, record)
        _show_comparison(comparison, str(against), to=err if quiet else out)
        if comparison.slower:
            sys.exit(WRONG_RESULT)


def _check(groups: Sequence[str], out_file: Path | None, add: bool, from_file: Path | None, plot: Path | None) -> None:
    """Whatever can be refused is refused before minutes are spent."""
    check_groups(groups)
    if out_file is not None and out_file.is_dir():
        raise ValueError(f"--out {out_file} is a folder; give the JSON file to write")
    if from_file is not None and out_file is not None:
        raise ValueError("--from measures nothing, so there is nothing for --out to write; give one of them")
    if add and out_file is None:
        raise ValueError("--add says what to do with the rows in --out; give --out FILE too")
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise ValueError(f"--plot {plot} ends in {plot.suffix!r}; expected .png or .svg")
    if plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed (pip install 'kvlab[lab]')")


def _measure(
    groups: list[str], device: str, dtype: str, out_file: Path | None, add: bool, *, quiet: bool
) -> dict[str, Any]:
    """The record of a run. Every row is in the file before the next is measured, so that Ctrl-C loses none."""
    from kvlab.experiments import bench as experiment
    from kvlab.experiments.bench.compare import SCHEMA
    from kvlab.experiments.peers import missing_peers
    from kvlab.loading import resolve_device, resolve_dtype
    from kvlab.records import machine_facts, now_utc

    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    left_out = missing_peers({peer for group in groups for peer in GROUPS[group].peers})
    options = [f"--{name}={value}" for name, value in (("device", device), ("dtype", dtype)) if value != "auto"]
    options += ["--vllm=PYTHON"] if "vllm" in groups and "vllm" not in left_out else []
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "when": now_utc(),
        "facts": machine_facts(str(where)),
        "commands": [shlex.join(["kvlab", "bench", *groups, *options])],
        "missing_peers": left_out,
        "complete": False,
        "took_s": {},
        "rows": [],
    }
    if add and out_file is not None and out_file.exists():
        _keep_others(record, out_file, groups, kind)
    for peer, remedy in left_out.items():
        err.print(f"left out: {peer}, which is not here; {remedy}", markup=False, soft_wrap=True)
    say = progress(quiet=quiet)
    try:
        for group in groups:
            begin = time.monotonic()
            for row in experiment.run([group], str(where), kind, say):
                others = [other for other in record["rows"] if other["name"] != row.name]
                record["rows"] = [*others, row.plain()]
                if not quiet:
                    _say_row(record["rows"][-1])
                _write(record, out_file)
            record["took_s"][f"{group} {kind}"] = round(time.monotonic() - begin)
        record["complete"] = True
    except KeyboardInterrupt:
        say("")
        kept = f"{len(record['rows'])} rows are in {out_file}" if out_file else "nothing was written (no --out)"
        err.print(f"kvlab: interrupted; {kept}", markup=False, soft_wrap=True)
    say("")
    _write(record, out_file)
    return record


def _keep_others(record: dict[str, Any], path: Path, groups: Sequence[str], dtype: str) -> None:
    """The rows in `path` that are not measured now. Raises ValueError where another machine wrote them."""
    from kvlab.experiments.bench.compare import other_machine, read_record

    old = read_record(path)
    if elsewhere := other_machine(old, record):
        raise ValueError(f"--add: {path} is of another machine ({'; '.join(elsewhere)}); give another --out")
    record["rows"] = [
        row
        for row in old["rows"]
        if row.get("group") and (row["group"] not in groups or row.get("dtype", dtype) != dtype)
    ]
    again = {f"{group} {dtype}" for group in groups}
    record["took_s"] = {name: s for name, s in old.get("took_s", {}).items() if name not in again}
    record["commands"] = [*(c for c in old.get("commands", ()) if c not in record["commands"]), *record["commands"]]


def _write(record: Mapping[str, Any], path: Path | None) -> None:
    from kvlab.records import write_json

    if path is not None:
        write_json(path, record)


def _say_row(row: Mapping[str, Any]) -> None:
    from kvlab.experiments.bench.table import line

    out.print(line(row), markup=False, soft_wrap=True)


def _show(record: Mapping[str, Any], *, as_json: bool, as_markdown: bool) -> None:
    from kvlab.experiments.bench.table import COLUMNS, cells, markdown

    if as_json:
        print(json.dumps(record["rows"], indent=1))  # noqa: T201
        return
    if as_markdown:
        print(markdown(record), end="")  # noqa: T201
        return
    from rich import box
    from rich.table import Table

    table = Table(
        title="kvlab bench; a ratio above 1: kvlab is faster",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in COLUMNS:
        table.add_column(column, no_wrap=column in ("ours", ""))
    for row in record["rows"]:
        table.add_row(*cells(row))
    out.print(table)


def _show_comparison(comparison: Comparison, old: str, to: Any) -> None:
    def say(text: str) -> None:
        to.print(text, markup=False, soft_wrap=True)

    say(f"against {old}:")
    for note in comparison.notes:
        say(f"  note: {note}")
    for verdict in ("slower", "faster", "unjudged"):
        for change in comparison.changes:
            if change.verdict == verdict:
                say(f"  {verdict}: {change.name}: {change.detail}")
    for title, names in (("missing now", comparison.missing), ("new", comparison.added)):
        for name in names:
            say(f"  {title}: {name}")
    count = Counter(change.verdict for change in comparison.changes)
    say(f"  {count['slower']} slower, {count['faster']} faster, {count['same']} within the spread")
