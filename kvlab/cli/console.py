"""How the shell speaks: one line per error, exit codes, where tables and progress go.

Results go to standard output, progress and errors to standard error, so that --json can be piped.
"""

from __future__ import annotations

import functools
import os
import sys
import unicodedata
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rich.console import Console

from kvlab.units import parse_count, parse_s

__all__ = ["BAD_INPUT", "INTERRUPTED", "command", "err", "out", "positive_count", "positive_s", "progress", "visible"]

P = ParamSpec("P")
T = TypeVar("T")

BAD_INPUT = 2
WRONG_RESULT = 1
INTERRUPTED = 130

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
_status = err.status("")


def command(function: Callable[P, T]) -> Callable[P, T]:
    """Turn what a user can cause into one line and an exit code; anything else is a bug and keeps its traceback.

    ValueError and OSError: 2. A wrong result (AssertionError): 1. Ctrl-C: 130. KVLAB_TRACEBACK=1 shows tracebacks.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            _status.stop()
            err.print("kvlab: interrupted; nothing was written")
            sys.exit(INTERRUPTED)
        except (ValueError, OSError, AssertionError) as error:
            if os.environ.get("KVLAB_TRACEBACK"):
                raise
            _status.stop()
            err.print(f"kvlab: {' '.join(str(error).split())}", markup=False, soft_wrap=True)
            sys.exit(WRONG_RESULT if isinstance(error, AssertionError) else BAD_INPUT)

    return run


def positive_count(option: str, text: str) -> int:
    """The whole number of at least 1 that an option was given as "512", "8k" or "8Ki". Raises ValueError naming it."""
    try:
        number = parse_count(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if number < 1:
        raise ValueError(f"{option} is {text}; expected a positive integer")
    return number


def positive_s(option: str, text: str) -> float:
    """The seconds above 0 that an option was given as "90s", "12h" or "7d". Raises ValueError naming it."""
    try:
        seconds = parse_s(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error
    if seconds <= 0:
        raise ValueError(f"{option} is {text}; expected a positive time")
    return seconds


def visible(text: str) -> str:
    """`text` as a terminal may have it: control characters, but for newline and tab, become U+FFFD."""
    return "".join(char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\ufffd" for char in text)


def progress(quiet: bool = False) -> Callable[[str], None]:
    """A function that says what long work does, "" when it is over: one changing line on a terminal, else lines."""
    if quiet:
        return lambda _: None
    if not err.is_terminal:
        return lambda message: err.print(f"  {message}", markup=False) if message else None

    def show(message: str) -> None:
        _status.update(message)
        if message:
            _status.start()
        else:
            _status.stop()

    return show
