"""The graded tasks, a module per lesson, and all of them by name."""

from __future__ import annotations

from kvlab.lab.task import Task
from kvlab.lab.tasks import lesson_00

__all__ = ["BY_LESSON", "TASKS"]

BY_LESSON: dict[str, tuple[Task, ...]] = {"00": lesson_00.TASKS}
TASKS: dict[str, Task] = {task.name: task for tasks in BY_LESSON.values() for task in tasks}
