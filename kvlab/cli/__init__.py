"""The `kvlab` command. Heavy imports (torch, matplotlib) happen inside the commands, so that --help is instant."""

from __future__ import annotations

import atexit
import gc

import typer

from kvlab.cli import bench, cache, chat, crossover, doctor, grade, lab, model, plan, probe, simulate
from kvlab.cli.console import command

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvlab",
    help="Reload a KV cache or recompute it? Learn it, then decide with numbers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes around help would cost a tenth of a second at every start
)
app.command()(command(crossover.crossover))
app.command()(command(crossover.calibrate))
app.command()(command(plan.plan))
app.command()(command(probe.probe))
app.command()(command(simulate.simulate))
app.command(epilog=bench.EPILOG)(command(bench.bench))
app.command()(command(doctor.doctor))
app.command()(command(chat.chat))
app.command()(command(lab.lab))
app.command()(command(grade.grade))
app.add_typer(cache.app, name="cache")
app.add_typer(model.app, name="model")


def main() -> None:
    """Entry point of the `kvlab` script."""
    atexit.register(gc.freeze)  # what is left at the end goes anyway: looking for garbage in it first takes 0.3 s
    app()
