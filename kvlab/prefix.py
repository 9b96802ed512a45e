"""Which blocks of a prompt are already somewhere: the longest run of known hashes, and how much of it may be used.

Hashes and counts only; does not know tensors or tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["matched_blocks", "reusable_tokens"]


def matched_blocks(hashes: Sequence[bytes], known: Callable[[bytes], bool]) -> int:
    """How many leading blocks are known. A block behind a gap is useless: its keys attend to the missing one."""
    for count, block_hash in enumerate(hashes):
        if not known(block_hash):
            return count
    return len(hashes)


def reusable_tokens(matched: int, block_size: int, prompt_tokens: int) -> int:
    """Prompt positions whose KV may be reused when `matched` leading blocks are known.

    The last token is always computed, since its logits are what the request came for: a wholly cached prompt reuses
    one token less than its length.
    """
    return max(0, min(matched * block_size, prompt_tokens - 1))
