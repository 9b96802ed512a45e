"""Prompts that no server has seen: random prefixes of real tokens, and suffixes behind them.

Knows tokens or words, not servers. Without fresh randomness the second probe of a server would find the first one's
prefixes in its cache and call them cold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvlab.server import Prompt

__all__ = ["SAFE_IDS", "Prompts"]

# Ordinary entries of any vocabulary of today: special tokens sit below or at the far end.
SAFE_IDS = range(1000, 20_000)


class Prompts:
    """Random pieces of a prompt, drawn from ids, or from words for a server that takes text only.

    A word counts as `tokens_per_word` tokens, so that lengths in words are about right. Raises ValueError for too few
    different pieces to be random.
    """

    def __init__(self, pieces: Sequence[int] | Sequence[str], seed: int, tokens_per_word: float = 1.0) -> None:
        self.pieces: tuple[int | str, ...] = tuple(dict.fromkeys(pieces))
        if len(self.pieces) < 100:
            raise ValueError(f"{len(self.pieces)} different pieces are too few for prompts that nobody has sent")
        self.as_text = isinstance(self.pieces[0], str)
        self.tokens_per_word = tokens_per_word if self.as_text else 1.0
        self.seed = seed
        self._random = random.Random(seed)

    def fresh(self, tokens: int) -> tuple[int | str, ...]:
        """New random pieces of (about, for words) so many tokens; at least one piece."""
        return tuple(self._random.choices(self.pieces, k=max(1, round(tokens / self.tokens_per_word))))

    def prompt(self, prefix: Sequence[int | str], suffix_tokens: int) -> Prompt:
        """`prefix` and a fresh suffix as the server takes them."""
        pieces = (*prefix, *self.fresh(suffix_tokens))
        if self.as_text:
            return " ".join(str(piece) for piece in pieces)
        return [int(piece) for piece in pieces]
