"""In which order arms take their turns, so that none always comes first, and none always behind the same other one.

An arm leaves caches, and on a shared machine what is left of its pace, to the one behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["in_turn"]

Arm = TypeVar("Arm")


def in_turn(arms: Iterable[Arm], number: int) -> list[Arm]:
    """`arms` in the order of round `number`, from 0.

    Over as many rounds as arms (twice as many, for an odd number) each stands once (twice) at every place and follows
    every other one equally often: E. J. Williams (1949), designs balanced for the estimation of residual effects.
    """
    given = list(arms)
    count = len(given)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]  # 0, 1, −1, 2, −2, …
    order = [given[(step + number) % count] for step in zigzag]
    return order[::-1] if count % 2 and number % (2 * count) >= count else order
