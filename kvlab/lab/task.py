"""A graded task: what it asks, what is right, and the mistakes that people make.

The same task is used in two places. In a learner's notebook it runs the learner's function, judges at once and prints
one fixed line or says what is wrong. While grading, the kernel only *answers*: it runs the learner's code and hands
out plain values; the grader judges those in its own process, where no notebook can reach. In a kernel that is being
graded the tasks do not hold what is right at all.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from IPython.display import display

__all__ = ["ANSWERS_MIME", "GRADING", "CheckFailed", "Mistake", "Task", "close", "learner_seed", "set_learner"]

ANSWERS_MIME = "application/vnd.kvlab.answers+json"
# Set by the grader to its seed: the kernel answers instead of judging.
GRADING = "KVLAB_GRADING"
# The learner's name lives in the environment: it survives this module being loaded anew, as the grader does.
_LEARNER = "KVLAB_LEARNER"
_ANSWER_CHARACTERS = 1_000_000


class CheckFailed(AssertionError):  # noqa: N818  (nbval and pytest show the class name; learners read the message)
    """What was expected, what came, and which mistake usually causes that; a notebook shows the message alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def set_learner(name: str) -> None:
    """Numbers in the tasks vary by learner; the same name always gets the same ones."""
    os.environ[_LEARNER] = str(name).replace("\0", "") or "0"


def learner_seed() -> str:
    """What the learner's numbers derive from."""
    return os.environ.get(_LEARNER, "0")


@dataclass(frozen=True)
class Mistake:
    """A plausible wrong answer: what a learner who makes it would hand in. `why` tells them, as a sentence."""

    why: str
    answer: Callable[..., Any]


@dataclass(frozen=True)
class Task:
    """A task of one lesson. Called with the learner's function (or, for a value task, with the learner's value).

    `cases(rng)`: argument tuples of plain values, the telling ones first. `answer(*args)`: what is right, from the
    library or an independent source. `drive(function, *args)`: how the learner's function is run, for what is more
    than one call; returns plain values. `same(expected, given)`: whether an answer counts. `explain(args, expected,
    given)`: an extra sentence where no known mistake fits. `value`: the learner hands in a value instead of a function,
    and `cases` returns the one question behind it, from the learner's own seed. `may_use_kvlab`: calling the library is
    the point of the task.
    """

    name: str
    cases: Callable[[random.Random], Sequence[tuple[Any, ...]]]
    answer: Callable[..., Any]
    mistakes: tuple[Mistake, ...]
    drive: Callable[..., Any] | None = None
    same: Callable[[Any, Any], bool] | None = None
    explain: Callable[[tuple[Any, ...], Any, Any], str] | None = None
    value: bool = False
    may_use_kvlab: bool = False
    points: int = 1

    def __post_init__(self) -> None:
        if os.environ.get(GRADING):
            object.__setattr__(self, "answer", _withheld)
            object.__setattr__(self, "mistakes", ())

    def questions(self, seed: str) -> list[tuple[Any, ...]]:
        """The argument tuples for one seed."""
        return list(self.cases(random.Random(f"{self.name}/{seed}")))

    def __call__(self, given: Any) -> None:
        """Judge the learner's function (or value) and print one line. Raises CheckFailed with what is wrong.

        While grading it displays the plain answers instead and never raises for them.
        """
        if os.environ.get(GRADING):
            self.show_answers(given, os.environ[GRADING])
            return
        message = self.judge(learner_seed(), self.run(given, learner_seed()))
        if message is not None:
            raise CheckFailed(f"not yet: {self.name}\n{message}")
        print(f"passed: {self.name}")  # noqa: T201  (a notebook's output)

    def show_answers(self, given: Any, seed: str) -> None:
        """Display what the grader reads: JSON as text, since a message between kernel and client knows no infinity."""
        seed = learner_seed() if self.value else seed
        answers = {"task": self.name, "seed": seed, "answers": self.run(given, seed)}
        display({ANSWERS_MIME: json.dumps(answers)}, raw=True)

    def run(self, given: Any, seed: str) -> list[dict[str, Any]]:
        """What the learner's function does in each case: {"value": plain value}, {"error": text} or {"crash": text}."""
        return [self._run_case(given, args) for args in self.questions(seed)]

    def _run_case(self, given: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        if self.value:
            return {"error": "not written yet: it is still None"} if given is None else _plain(given)
        if not callable(given):
            return {"error": f"expected a function, got {type(given).__name__}"}
        with _Watch() as watch:
            try:
                result = _plain(self._call(given, args))
            except NotImplementedError as error:
                return {"error": f"not written yet{f': {error}' if str(error) else ''}"}
            except Exception as error:
                return {"crash": f"{type(error).__name__}: {error}"[:2000]}
        if watch.called and not self.may_use_kvlab:
            return {"error": f"the answer calls {watch.called}; the task is to work it out yourself"}
        return result

    def judge(self, seed: str, answers: Sequence[Any]) -> str | None:
        """None when every answer is right, else what was expected, what came, and which mistake it looks like."""
        return self.grade(seed, answers)[1]

    def grade(self, seed: str, answers: Sequence[Any]) -> tuple[str, str | None]:
        """The status (passed, failed, or error where the learner's code crashed) and what `judge` says.

        `answers` is what `run` returned, or whatever else a notebook claims that it did.
        """
        questions = self.questions(seed)
        if len(answers) != len(questions):
            return "failed", f"expected {len(questions)} answers, got {len(answers)}"
        for args, answer in zip(questions, answers, strict=True):
            where = "" if self.value else f"{self.name}({', '.join(_short(arg) for arg in args)}): "
            if not isinstance(answer, dict):
                return "failed", f"{where}no answer"
            if "value" not in answer:
                status = "error" if "crash" in answer else "failed"
                return status, where + str(answer.get("crash") or answer.get("error"))[:2000]
            message = self._wrong(args, answer["value"])
            if message is not None:
                return "failed", where + message
        return "passed", None

    def _wrong(self, args: tuple[Any, ...], given: Any) -> str | None:
        """None when `given` is right for this case, else what to tell the learner."""
        expected = self.answer(*args)
        if self._same(expected, given):
            return None
        wanted = "" if self.value else f"expected {_short(expected)}, "
        hint = self._mistake(args, given) or self._explanation(args, expected, given) or _factor(args, expected, given)
        return f"{wanted}got {_short(given)}" + (f"\n{hint}" if hint else "")

    def _explanation(self, args: tuple[Any, ...], expected: Any, given: Any) -> str:
        try:
            return self.explain(args, expected, given) if self.explain else ""
        except Exception:
            return ""  # written for an answer of the right form; this one is not

    def _same(self, expected: Any, given: Any) -> bool:
        try:
            return bool((self.same or close)(expected, given))
        except Exception:
            return False  # not even of the right form: a list for a number, nested without end, …

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        arguments = json.loads(json.dumps(args))  # a copy: what the learner changes does not reach the judge
        return self.drive(function, *arguments) if self.drive else function(*arguments)

    def _mistake(self, args: tuple[Any, ...], given: Any) -> str:
        """The sentence of the first known mistake that gives this answer too."""
        for mistake in self.mistakes:
            try:
                wrong = _plain(self._call(mistake.answer, args))
            except Exception:
                continue  # a mistake that crashes here cannot have made this answer
            if self._same(wrong.get("value"), given):
                return mistake.why
        return ""


def close(expected: Any, given: Any) -> bool:
    """Equal integers, booleans and texts; floats within one part in a thousand; lists and dicts element by element."""
    if isinstance(expected, bool) or isinstance(given, bool) or expected is None or isinstance(expected, str):
        return type(expected) is type(given) and bool(expected == given)
    if isinstance(expected, int):
        return isinstance(given, (int, float)) and expected == given
    if isinstance(expected, float):
        if not isinstance(given, (int, float)):
            return False
        return expected == given if math.isinf(expected) else math.isclose(expected, given, rel_tol=1e-3, abs_tol=1e-12)
    if isinstance(expected, dict):
        return expected.keys() == given.keys() and all(close(expected[key], given[key]) for key in expected)
    return len(expected) == len(given) and all(close(a, b) for a, b in zip(expected, given, strict=True))


_UNITS = {
    2: "something was counted twice, or once that comes twice",
    8: "bits and bytes",
    1e3: "milli, kilo, mega, giga: a unit is one step off",
    1e6: "milli, kilo, mega, giga: a unit is two steps off",
    1e9: "giga is 1e9",
    2**20 / 1e6: "MiB (2^20) and MB (1e6)",
    2**30 / 1e9: "GiB (2^30) and GB (1e9)",
}


def _factor(args: tuple[Any, ...], expected: Any, given: Any) -> str:
    """For a wrong number that is no known mistake: its kind, or the factor by which it is off where that has a name."""
    if type(expected) not in (int, float) or given is None or isinstance(given, bool):
        return ""
    if not isinstance(given, (int, float)):
        return f"expected a number, got {'a text' if isinstance(given, str) else 'a list'}"
    if not math.isfinite(given):
        return ""
    if isinstance(expected, int) and given != int(given):
        return "A whole number is expected: round, or divide with //, as the task says."
    if isinstance(expected, int) and abs(given - expected) == 1:
        return f"One too {'many' if given > expected else 'few'}: look at the boundary."
    if given * expected <= 0 or (isinstance(expected, int) and min(given, expected) < 10):
        return ""
    named = {name: size for arg in args if isinstance(arg, dict) for name, size in arg.items()}
    named |= {f"argument {place + 1}": arg for place, arg in enumerate(args)}
    factors = [(text, size) for size, text in _UNITS.items()]
    factors += [(f"{name} ({size:,})", size) for name, size in named.items() if type(size) is int and size > 2]
    ratio = max(given / expected, expected / given)
    found = [text for text, size in factors if math.isclose(ratio, size, rel_tol=1e-4)]
    times = f"{ratio:,.0f}" if ratio > 1.9 else f"{ratio:.3g}"
    return f"{times} times too {'large' if given > expected else 'small'}: {', or '.join(found)}?" if found else ""


def _withheld(*_: Any) -> NoReturn:
    raise RuntimeError("a kernel that is being graded holds no answers")


def _plain(value: Any) -> dict[str, Any]:
    """The value as JSON sees it (tuples become lists, numpy numbers become numbers), or why it is not plain."""
    try:
        text = json.dumps(value, default=_number)
    except (TypeError, ValueError, RecursionError):
        return {"error": f"returned {_short(value)} of type {type(value).__name__}; expected plain numbers and lists"}
    if len(text) > _ANSWER_CHARACTERS:
        return {"error": f"returned {len(text):,} characters; expected a short answer"}
    return {"value": json.loads(text)}


def _number(value: Any) -> Any:
    """A numpy or torch number or array as plain Python; a set, sorted."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError


def _short(value: Any) -> str:
    text = f"{value:,}" if type(value) is int else f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 300 else f"{text[:300]}…"


class _Watch:
    """Notices when the code under it calls a function of the library: `called` names the first one."""

    def __init__(self) -> None:
        self.called: str | None = None

    def __enter__(self) -> _Watch:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self.called:
            return
        module = frame.f_globals.get("__name__", "")
        if module.startswith("kvlab.") and not module.startswith("kvlab.lab."):
            self.called = f"{module}.{frame.f_code.co_qualname}"
