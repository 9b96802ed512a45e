"""`kvlab lab`: JupyterLab on the learner's own copy of the lessons and exercises."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvlab.cli.console import out


def lab(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Your folder; default: kvlab-lab in your home.")
    ] = None,
    reset: Annotated[
        str, typer.Option(help="Put a fresh copy of this lesson (04) beside yours; starts nothing.", metavar="LESSON")
    ] = "",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
    port: Annotated[int | None, typer.Option(help="JupyterLab's port; default: 8888 or the next free one.")] = None,
) -> None:
    """Start JupyterLab on your copy of the lessons and exercises. Your files are never overwritten."""
    if not all(map(find_spec, ("jupyterlab", "ipykernel", "ipywidgets", "nbformat"))):
        raise ValueError("the lab needs JupyterLab and ipywidgets: pip install 'kvlab[lab]'")
    from kvlab.lab import start
    from kvlab.lab.course import course

    folder = (directory or Path.home() / "kvlab-lab").expanduser().absolute()
    added = start.fresh_copies(course(), folder, reset) if reset else start.add_missing(course(), folder)
    for path in added:
        out.print(f"new: {path}", markup=False, soft_wrap=True)
    if not reset:
        sys.exit(start.serve(folder, browser=browser, port=port))
