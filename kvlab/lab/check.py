"""`check.some_task(your_function)`: one fixed line when it is right, else what is wrong (tasks: `lab.tasks`)."""

from __future__ import annotations

from typing import Any

from kvlab.lab.task import Task, learner_seed, set_learner
from kvlab.lab.tasks import TASKS

__all__ = ["given", "learner"]


def learner(name: str) -> None:
    """Say who you are: the numbers in your tasks derive from it."""
    set_learner(name)


def given(task: str) -> list[Any]:
    """The numbers of your own question, for a task that asks for a value."""
    return list(_task(task).questions(learner_seed())[0])


def _task(name: str) -> Task:
    if name not in TASKS:
        raise AttributeError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[name]


def __getattr__(name: str) -> Task:
    if name.startswith("__"):
        raise AttributeError(name)
    return _task(name)
