"""Three small tasks for the tests of the grader: a number of one's own, a function, a class that is driven."""

import random

from kvlab.lab.task import Mistake, Task, learner_seed


def _weigh(rng: random.Random):
    return [(rng.randrange(2, 90), rng.randrange(2, 90))]


def _blocks(rng: random.Random):
    return [(32, 16), (33, 16)] + [(rng.randrange(1, 5000), rng.choice([8, 16, 32])) for _ in range(4)]


def _script(rng: random.Random):
    return [([rng.randrange(1, 9) for _ in range(rng.randrange(3, 9))],) for _ in range(3)]


def _drive(counter, steps):
    made = counter()
    return [made.add(step) for step in steps]


TASKS = {
    task.name: task
    for task in (
        Task("toy_weight", _weigh, lambda a, b: a * b, (Mistake("That adds.", lambda a, b: a + b),), value=True),
        Task(
            "toy_blocks",
            _blocks,
            lambda tokens, block: -(-tokens // block),
            (
                Mistake("That drops the last block.", lambda tokens, block: tokens // block),
                Mistake("That counts one too many at k·B.", lambda tokens, block: tokens // block + 1),
            ),
            points=2,
        ),
        Task(
            "toy_counter",
            _script,
            lambda steps: [sum(steps[: index + 1]) for index in range(len(steps))],
            (Mistake("That forgets.", lambda counter: None),),
            drive=_drive,
        ),
    )
}


def given(task):
    return list(TASKS[task].questions(learner_seed())[0])
