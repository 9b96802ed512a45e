"""Guesses: a learner commits to one before the cell that measures shows anything.

    guess = predict("break-even link", None, "MB/s", typical=1000)     # the learner replaces None
    ...
    guess.committed()                                                  # first line of the cell that measures
    compare(guess, model=24.1, measured=26.0)

With KVLAB_AUTO=1 (tests, instructors) an empty guess becomes the typical one. Does not measure anything itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape

from IPython.display import HTML

__all__ = ["Guess", "GuessMissing", "compare", "predict"]


class GuessMissing(Exception):  # noqa: N818  (it is a stop sign, not an error)
    """Raised by the measuring cell while the guess is still None; a notebook shows the sentence alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True)
class Guess:
    """What a learner expects. `value` is a number in `unit`, or a word; None until the learner has written one."""

    name: str
    value: float | str | None
    unit: str
    automatic: bool = False

    def committed(self) -> None:
        """Raises GuessMissing while there is no guess, so that the measurement stays unseen."""
        if self.value is None:
            raise GuessMissing(
                f"Stopped on purpose: first write your guess for {self.name!r}"
                f"{f' in {self.unit}' if self.unit else ''} in place of None above, run that cell, then this one."
            )

    def _repr_html_(self) -> str:
        if self.value is None:
            return f"<p>No guess for <b>{escape(self.name)}</b> yet: write one in place of None.</p>"
        who = "A typical guess" if self.automatic else "Your guess"
        return f"<p>{who} for <b>{escape(self.name)}</b>: {_number(self.value)} {escape(self.unit)}</p>"


def predict(name: str, value: float | str | None, unit: str = "", *, typical: float | str) -> Guess:
    """A guess of `value` (in `unit`). `typical`: what people usually say; used when nobody is there to guess.

    Raises ValueError for what is neither a number nor a word, and for a number that is negative or not finite.
    """
    if value is None and os.environ.get("KVLAB_AUTO"):
        return Guess(name, typical, unit, automatic=True)
    wrong = isinstance(value, bool) or not isinstance(value, (int, float, str, type(None)))
    if wrong or (isinstance(value, (int, float)) and not 0 <= value < float("inf")):
        raise ValueError(f"the guess for {name!r} is {value!r}; expected a number{f' of {unit}' if unit else ''} >= 0")
    return Guess(name, value, unit)


def compare(
    guess: Guess, *, model: float | str | None = None, measured: float | str | None = None, source: str = "live"
) -> HTML:
    """The guess, what the arithmetic said and what came out, side by side (all in the guess's unit).

    `source` says where the measured number comes from: live, recorded, published, emulated; a "simulated" one was not
    measured, and its row says so.
    """
    guess.committed()
    rows = [("a typical guess" if guess.automatic else "your guess", guess.value)]
    if model is not None:
        rows.append(("the arithmetic", model))
    if measured is not None:
        rows.append((source if source == "simulated" else f"measured ({source})", measured))
    result = measured if measured is not None else model
    body = "".join(
        f"<tr><td style='text-align:left'>{escape(label)}</td><td>{_number(value)} {escape(guess.unit)}</td>"
        f"<td style='text-align:left'>{_against(value, result)}</td></tr>"
        for label, value in rows
    )
    return HTML(f"<table><caption><b>{escape(guess.name)}</b></caption>{body}</table>")


def _number(value: float | str | None) -> str:
    if not isinstance(value, (int, float)):
        return escape(str(value))
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _against(value: float | str | None, result: float | str | None) -> str:
    """How far a number is from the result: "40 × too high", or without a factor where one of the two is 0."""
    if not (isinstance(value, (int, float)) and isinstance(result, (int, float))):
        return "" if isinstance(value, (int, float)) or value == result else "not so"
    too = f"too {'high' if value > result else 'low'}"
    if min(value, result) <= 0:
        return "" if value == result else too
    ratio = value / result
    if 0.9 <= ratio <= 1.1:
        return ""
    return f"{_number(float(f'{max(ratio, 1 / ratio):.2g}'))} × {too}"
