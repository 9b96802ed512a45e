"""Checked reading of a config's fields: one value under many key names, with errors that say what to add.

Knows JSON values and the aliases of a key. Does not know what a model does with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.hf.rules import ALIASES, class_defaults

__all__ = ["Fields", "check_finite"]

_NO = (None, False)
_ONE_VALUE = ("num_hidden_layers", "hidden_size", "num_attention_heads")  # aliases of these must agree


class Fields(Mapping[str, Any]):
    """A config (or one layer of it) with checked access. A field that is null counts as absent.

    Sizes are positive integers: zero, negative numbers, booleans, strings and NaN raise a ValueError that names the
    field and its value. Canonical names are looked up under all their aliases.
    A field that the config leaves out takes the default of the model's own config class (`hf.rules.CLASS_DEFAULTS`).
    """

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self.config = config
        self.model_type = model_type
        self._defaults = class_defaults(model_type)

    def __getitem__(self, key: str) -> Any:
        return self.config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.config)

    def __len__(self) -> int:
        return len(self.config)

    def having(self, overrides: Mapping[str, Any]) -> Fields:
        """The same config with some fields replaced (a layer's own heads, say)."""
        return Fields({**self.config, **overrides}, self.model_type) if overrides else self

    def find(self, name: str) -> tuple[str, Any]:
        """The key that carries a canonical field and its value; (name, class default or None) where none does.

        A field that is there but null is switched off: it does not take the class default (Mistral's sliding_window).
        """
        there = [key for key in ALIASES.get(name, (name,)) if key in self.config]
        found = [(key, self.config[key]) for key in there if self.config[key] is not None]
        if not there:
            return name, self._defaults.get(name)
        for key, value in found[1:] if name in _ONE_VALUE else ():
            if value != found[0][1]:
                raise ValueError(
                    f"config fields {found[0][0]!r} = {found[0][1]!r} and {key!r} = {value!r} contradict each other; "
                    "keep the one that is true"
                )
        return found[0] if found else (there[0], None)

    def raw(self, name: str) -> Any:
        """The value of a field under any of its names, or None."""
        return self.find(name)[1]

    def size(self, name: str, default: int | None = None, layer: int | None = None) -> int:
        """A positive integer. A list holds one value per layer. Raises ValueError if absent and without default."""
        value = self.optional_size(name, layer)
        if value is not None:
            return value
        if default is None:
            key, *others = ALIASES.get(name, (name,))
            also = f" (also read: {', '.join(others)})" if others else ""
            raise ValueError(f"config has no {key!r}{also}; add it as a positive integer")
        return default

    def optional_size(self, name: str, layer: int | None = None) -> int | None:
        """A positive integer, or None where the config has none."""
        key, value = self.find(name)
        if isinstance(value, list | tuple):
            value = self._of_layer(key, value, layer)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some exporters write 32.0
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"config field {key!r} is {value!r}; expected a positive integer")
        return value

    def count(self, name: str) -> int:
        """An integer of at least 0; 0 where the config has none."""
        return 0 if self.raw(name) in (0, *_NO) else self.size(name)

    def number(self, name: str, default: float) -> float:
        """A positive finite number."""
        key, value = self.find(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"config field {key!r} is {value!r}; expected a positive finite number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean. Anything else raises ValueError."""
        key, value = self.find(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"config field {key!r} is {value!r}; expected true or false")
        return value

    def sequence(self, name: str, length: int | None = None) -> Sequence[Any] | None:
        """A list or None; with `length`, one value per layer (draft layers may follow and are cut off)."""
        key, value = self.find(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple | str):
            raise ValueError(f"config field {key!r} is {value!r}; expected a list")
        if length is not None and len(value) != length:
            if len(value) != length + self.count("draft_layers"):
                raise ValueError(f"config field {key!r} has {len(value)} entries but num_hidden_layers is {length}")
            return value[:length]
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A nested object, empty where the config has none."""
        value = self.config.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ValueError(f"config field {name!r} is {value!r}; expected an object")
        return value

    @staticmethod
    def _of_layer(key: str, values: Sequence[Any], layer: int | None) -> Any:
        if not values:
            return None
        if layer is None:
            if any(value != values[0] for value in values):
                raise ValueError(f"config field {key!r} differs by layer: {values!r}; expected one value for all")
            return values[0]
        if layer >= len(values):
            raise ValueError(f"config field {key!r} has {len(values)} entries, none for layer {layer}")
        return values[layer]


def check_finite(value: Any, path: str) -> None:
    """Refuse Infinity and NaN anywhere but in the clamp of Mamba's time step, which no count depends on.

    Published Mamba-2 configs do hold `"time_step_limit": [0.0, Infinity]`. Raises ValueError naming the field.
    """
    name = path.rsplit(".", 1)[-1]
    if name.startswith(("time_step", "mamba_dt")):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"config field {path!r} is {value!r}, which is not JSON; replace it with a finite number")
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_finite(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            check_finite(item, path)
