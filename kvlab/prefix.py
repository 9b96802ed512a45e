"""Which blocks of a prompt are already somewhere: the longest run of known hashes, and how much of it may be used.

Hashes and counts only; does not know tensors or tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["matched_blocks", "reloadable_tokens"]


def matched_blocks(hashes: Sequence[bytes], known: Callable[[bytes], bool]) -> int:
    """How many leading blocks are known. A block behind a gap is useless: its keys attend to the missing one."""
    for count, block_hash in enumerate(hashes):
        if not known(block_hash):
            return count
    return len(hashes)


def reloadable_tokens(prefix: int, prompt: int, block_size: int) -> int:
    """Tokens that a reload can bring for a cached `prefix` of a `prompt` (both in tokens).

    Whole blocks only: a partial block is never stored. And less than the prompt: its last token is always computed,
    since its logits are what the request came for.
    """
    return min(prefix, prompt - 1) // block_size * block_size
