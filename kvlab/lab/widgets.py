"""Sliders over arithmetic: one picture, updated in place, and still there when nobody runs the notebook.

The picture is an ordinary PNG output with a display id; only the sliders are widgets. So there is never a second
picture, nothing flickers, and a saved notebook keeps its last frame without any widget state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.display import Image, display
from matplotlib.figure import Figure

from kvlab.lab.draw.style import png

__all__ = ["Choice", "Slider", "explore", "show"]


@dataclass(frozen=True)
class Slider:
    """A number from `low` to `high` that begins at `start`; whole when `start` is an int, else in 100 steps.

    `log`: equal ways are equal factors. `label` says the unit.
    """

    label: str
    low: float
    high: float
    start: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low <= self.start <= self.high or self.low == self.high or (self.log and self.low <= 0):
            raise ValueError(f"slider {self.label!r}: expected low <= start <= high (above 0 for log), got {self}")

    def _widget(self) -> Any:
        import ipywidgets

        style: dict[str, Any] = {"style": {"description_width": "14em"}, "layout": {"width": "36em"}}
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return ipywidgets.FloatLogSlider(
                self.start, min=low, max=high, step=(high - low) / 100, description=self.label, readout_format=".3r",
                **style,
            )  # fmt: skip
        if isinstance(self.start, int):
            return ipywidgets.IntSlider(self.start, int(self.low), int(self.high), description=self.label, **style)
        step = (self.high - self.low) / 100
        return ipywidgets.FloatSlider(self.start, min=self.low, max=self.high, step=step, description=self.label,
                                      readout_format=".3r", **style)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """One of a few named options; begins with the first."""

    label: str
    options: tuple[str, ...]

    @property
    def start(self) -> str:
        """The option that is shown first."""
        return self.options[0]

    def _widget(self) -> Any:
        import ipywidgets

        return ipywidgets.Dropdown(
            options=self.options, description=self.label, style={"description_width": "14em"}, layout={"width": "36em"}
        )


def show(figure: Figure) -> None:
    """Display a figure as a PNG."""
    display(Image(png(figure)))


def explore(picture: Callable[..., Figure], **controls: Slider | Choice) -> None:
    """Show `picture(name=value, …)` and a control for each name; moving one redraws the picture in place.

    `picture` is arithmetic only (milliseconds): sliders never start an experiment.
    """
    handle = display(Image(png(picture(**{name: c.start for name, c in controls.items()}))), display_id=True)
    try:
        import ipywidgets
    except ModuleNotFoundError:
        print("sliders need ipywidgets: pip install 'kvlab[lab]'")  # noqa: T201  (a notebook's output)
        return
    widgets = {name: control._widget() for name, control in controls.items()}

    def redraw(_: object) -> None:
        handle.update(Image(png(picture(**{name: widget.value for name, widget in widgets.items()}))))

    for widget in widgets.values():
        widget.observe(redraw, names="value")
    display(ipywidgets.VBox(list(widgets.values())))
