"""The graded tasks, a module per lesson, and all of them by name."""

from __future__ import annotations

from kvlab.lab.task import Task
from kvlab.lab.tasks import (
    lesson_00,
    lesson_01,
    lesson_02,
    lesson_03,
    lesson_04,
    lesson_05,
    lesson_06,
    lesson_07,
    lesson_08,
    lesson_09,
)

__all__ = ["BY_LESSON", "TASKS"]

BY_LESSON: dict[str, tuple[Task, ...]] = {
    "00": lesson_00.TASKS,
    "01": lesson_01.TASKS,
    "02": lesson_02.TASKS,
    "03": lesson_03.TASKS,
    "04": lesson_04.TASKS,
    "05": lesson_05.TASKS,
    "06": lesson_06.TASKS,
    "07": lesson_07.TASKS,
    "08": lesson_08.TASKS,
    "09": lesson_09.TASKS,
}
TASKS: dict[str, Task] = {task.name: task for tasks in BY_LESSON.values() for task in tasks}
