"""The teaching face: guesses, pictures, sliders, checks. A lesson begins with `from kvlab.lab import …`.

What needs IPython is loaded when first used: the shell draws charts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.lab import check
    from kvlab.lab.guess import compare, predict
    from kvlab.lab.models import lesson_model
    from kvlab.lab.widgets import Choice, Slider, explore, show

__all__ = ["Choice", "Slider", "check", "compare", "explore", "lesson_model", "predict", "show"]

_LAZY = {
    "Choice": "kvlab.lab.widgets",
    "Slider": "kvlab.lab.widgets",
    "compare": "kvlab.lab.guess",
    "explore": "kvlab.lab.widgets",
    "lesson_model": "kvlab.lab.models",
    "predict": "kvlab.lab.guess",
    "show": "kvlab.lab.widgets",
}


def __getattr__(name: str) -> Any:
    if name == "check":
        return import_module("kvlab.lab.check")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvlab.lab' has no attribute {name!r}")
