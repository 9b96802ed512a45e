"""Figures that others measured and published, which lessons draw as published lines. Each has its source.

Read from `data/published.json`. Knows nothing about how they are drawn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["Published", "published"]


@dataclass(frozen=True)
class Published:
    """`values`: lists of equal length by name, units in the names. `source` in a few words, `where` to find it."""

    about: str
    source: str
    where: str
    values: dict[str, list[Any]]

    def __getitem__(self, name: str) -> list[Any]:
        return self.values[name]


def published(name: str) -> Published:
    """A set of published figures by name. Raises ValueError naming those there are."""
    text = resources.files("kvlab").joinpath("data", "published.json").read_text(encoding="utf-8")
    known = json.loads(text)
    if name not in known:
        raise ValueError(f"no published figures {name!r}; there are {', '.join(known)}")
    return Published(**known[name])
