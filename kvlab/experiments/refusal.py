"""Ask a tier for prompts that are almost what it holds, and see how many blocks the library hands out.

Knows the rig. Returns plain rows; does not print or draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.experiments.rig import Rig
from kvlab.fingerprint import block_hashes
from kvlab.model import Model
from kvlab.tiers import HostTier

__all__ = ["ask"]


def ask(
    model: Model, stored: Sequence[int], wanted: Mapping[str, tuple[Sequence[int], str]], block_size: int = 16
) -> list[dict[str, Any]]:
    """Prefill `stored`, offload it to host RAM, and reload each of `wanted`: by name, its tokens and tenant salt.

    Rows of {"name", "blocks", "valid_blocks", "why"}; the last is the library's own words, "" where all blocks came.
    """
    with Rig(model, block_size=block_size, max_tokens=len(stored), tables=2) as rig:
        tier, table = rig.open(HostTier(2**32)), rig.table(len(stored))
        rig.prefill(stored, table)
        rig.offload(tier, stored, table)
        rows = []
        for name, (tokens, salt) in wanted.items():
            fingerprint = rig.copy_of(salt)
            hashes = block_hashes(fingerprint, tokens, block_size)
            away = rig.table(len(tokens))
            report = rig.transfer.reload(tier, hashes, away.blocks[: len(hashes)], fingerprint).wait()
            rig.release(away)
            differs = [f"fingerprint differs in: {field}" for field in tier.differences(fingerprint)]
            rows.append(
                {
                    "name": name,
                    "blocks": len(hashes),
                    "valid_blocks": report.valid_blocks,
                    "why": "; ".join((*report.failures, *differs)),
                }
            )
    return rows
