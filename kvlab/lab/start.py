"""The learner's own copy of the course, and JupyterLab on it with the interpreter that runs kvlab.

What is in the learner's folder is theirs: files are added, never changed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import nbformat
from nbformat.sign import NotebookNotary

from kvlab.lab.course import Course, python_path
from kvlab.lab.notebooks import read, without_results

__all__ = ["add_missing", "fresh_copies", "jupyter_command", "jupyter_environment", "serve"]


def add_missing(course: Course, folder: Path) -> list[Path]:
    """Copy the lessons and exercises that are not in the folder yet; returns the new files."""
    added = []
    for source, target in _pairs(course, folder):
        if not os.path.lexists(target):
            _copy(source, target, lesson=source.parent == course.lessons)
            added.append(target)
    return added


def fresh_copies(course: Course, folder: Path, lesson: str) -> list[Path]:
    """A fresh copy of one lesson and of its exercise beside what is there (`04_flip.fresh-1.ipynb`, then -2, …).

    `lesson` is its number or its name. Raises ValueError when there is no such lesson.
    """
    stems = sorted({source.stem for source, _ in _pairs(course, folder)})
    wanted = [stem for stem in stems if lesson.removesuffix(".ipynb") == stem]
    wanted = wanted or [stem for stem in stems if lesson.isdigit() and stem.partition("_")[0] == lesson.zfill(2)]
    if not wanted:
        raise ValueError(f"there is no lesson {lesson!r}; the lessons are {', '.join(stems)}")
    copies = []
    for source, target in _pairs(course, folder):
        if source.stem in wanted:
            if os.path.lexists(target):
                names = (target.with_name(f"{target.stem}.fresh-{number}.ipynb") for number in count(1))
                target = next(name for name in names if not os.path.lexists(name))
            _copy(source, target, lesson=source.parent == course.lessons)
            copies.append(target)
    return copies


def _pairs(course: Course, folder: Path) -> Iterator[tuple[Path, Path]]:
    """Each notebook of the course and where the learner's copy belongs."""
    for source_folder in (course.lessons, course.exercises):
        for source in sorted(source_folder.glob("*.ipynb")):
            yield source, folder / source_folder.name / source.name


def _copy(source: Path, target: Path, *, lesson: bool) -> None:
    notebook = read(source)
    if lesson:
        notebook = without_results(notebook)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: half a notebook would never be replaced.
    part = target.with_name(f".{target.name}.part")
    part.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8", newline="\n")
    part.replace(target)
    # Trusted, so that the first frames show; we know who wrote these.
    NotebookNotary().sign(read(target))


def jupyter_command(folder: Path, *, browser: bool, port: int | None) -> list[str]:
    """The command line of a JupyterLab on the folder that opens the first lesson."""
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder}"]
    first = sorted((folder / "lessons").glob("*.ipynb"))
    if first:
        command.append(f"--LabApp.default_url=/lab/tree/lessons/{first[0].name}")
    if port is not None:
        command.append(f"--ServerApp.port={port}")
    if not browser:
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # containers and rented machines have no other user
    return command


def jupyter_environment(place: Path) -> dict[str, str]:
    """The environment in which the notebooks' kernel name means this interpreter, and JupyterLab asks for nothing.

    What it refers to is written to `place`: a kernel's spec, and defaults for settings (what a user has set stays).
    """
    spec: dict[str, Any] = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Python 3 (kvlab)",
        "language": "python",
        "metadata": {"debugger": True},
    }
    # Else its first start asks whether it may fetch news, on top of the lesson.
    quiet = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    for folder, name, content in (
        ("kernels/python3", "kernel.json", spec),
        ("labconfig", "default_setting_overrides.json", quiet),
    ):
        (place / folder).mkdir(parents=True)
        (place / folder / name).write_text(json.dumps(content), encoding="utf-8")
    environment = dict(os.environ)
    for name, value in (
        ("JUPYTER_PATH", str(place)), ("JUPYTER_CONFIG_PATH", str(place)), ("PYTHONPATH", python_path())
    ):  # fmt: skip
        environment[name] = os.pathsep.join(filter(None, (value, environment.get(name, ""))))
    return environment


def serve(folder: Path, *, browser: bool, port: int | None) -> int:
    """Run JupyterLab until it ends; its exit code. Ctrl-C is JupyterLab's to answer."""
    with tempfile.TemporaryDirectory(prefix="kvlab-jupyter-") as place:
        command = jupyter_command(folder, browser=browser, port=port)
        server = subprocess.Popen(command, env=jupyter_environment(Path(place)), cwd=folder)
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        while True:
            try:
                return server.wait()
            except KeyboardInterrupt:
                continue
