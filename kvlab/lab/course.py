"""Where the course's notebooks are: beside the package in a checkout, inside it once installed.

Knows folders only; what is inside a notebook is for `notebooks` and `submission`.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Course", "course", "python_path"]

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Course:
    """Folders of notebooks, and the module whose TASKS (name → Task) judges the exercises."""

    lessons: Path
    exercises: Path
    tasks: str = "kvlab.lab.tasks"


def course() -> Course:
    """The lessons and exercises that came with this kvlab. Raises ValueError when it came without."""
    installed, checkout = PACKAGE / "lab" / "course", PACKAGE.parent
    root = installed if installed.is_dir() else checkout
    if not (root / "exercises").is_dir():
        raise ValueError(f"no exercises at {root / 'exercises'}; install kvlab from its wheel or run it in a checkout")
    return Course(root / "lessons", root / "exercises")


def python_path(*folders: Path) -> str:
    """PYTHONPATH with which a child finds kvlab and `folders` from any working directory.

    What is installed needs no mention, and must not come before the standard library.
    """
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    wanted = dict.fromkeys((PACKAGE.parent, *folders))
    return os.pathsep.join(str(folder) for folder in wanted if folder not in installed)
