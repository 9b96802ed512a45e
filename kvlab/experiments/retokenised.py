"""What becomes of an agent's own tokens when its text goes out and comes back: decode, then encode again.

Knows the engine and the tokenizer. Returns plain rows; does not print or draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.blocks import blocks_for
from kvlab.engine import Engine
from kvlab.fingerprint import block_hashes
from kvlab.model import Model
from kvlab.prefix import matched_blocks
from kvlab.request import Sampling

__all__ = ["again", "write"]


def write(
    model: Model, prompt: Sequence[int], *, agents: int = 8, new_tokens: int = 160, temperature: float = 1.0
) -> list[list[int]]:
    """The ids of as many agents, prompt included, that continue `prompt` together, each with a seed of its own."""
    with Engine(model, agents * blocks_for(len(prompt) + new_tokens, 16)) as engine:
        stop = [] if model.tokenizer.eos is None else [model.tokenizer.eos]
        requests = [
            engine.submit(prompt, new_tokens, sampling=Sampling(temperature, seed), stop_tokens=stop)
            for seed in range(agents)
        ]
        engine.run()
    return [list(request.tokens) for request in requests]


def again(model: Model, ids: Sequence[int], block_size: int = 16) -> dict[str, Any]:
    """Decode `ids`, encode the text, and compare: {"same_text", "first_difference", "blocks", "usable_blocks", …}.

    `first_difference` is a position (None: the same tokens); `was` and `became` are the texts of a few tokens there.
    """
    tokenizer = model.tokenizer
    text = tokenizer.decode(ids)
    back = tokenizer.encode(text)
    at = next((i for i, (a, b) in enumerate(zip(ids, back, strict=False)) if a != b), None)
    if at is None and len(ids) != len(back):
        at = min(len(ids), len(back))
    names, found = (block_hashes(model.fingerprint(block_size), tokens, block_size) for tokens in (ids, back))
    around = slice(0, 0) if at is None else slice(max(0, at - 1), at + 3)
    return {
        "same_text": tokenizer.decode(back) == text,
        "first_difference": at,
        "tokens": len(ids),
        "tokens_again": len(back),
        "blocks": len(names),
        "usable_blocks": matched_blocks(names, set(found).__contains__),
        "was": [tokenizer.decode([token]) for token in ids[around]],
        "became": [tokenizer.decode([token]) for token in back[around]],
    }
