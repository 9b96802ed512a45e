"""Caches that look right and are not: same shape, same size, somebody else's numbers. What the model makes of them.

Each is attached by force, so that one sees what a name of blocks has to prevent, and then asked for properly. Knows
models, pools and the rig. Returns plain rows; does not print or draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvlab.blocks import blocks_for
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import Fingerprint, block_hashes
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES, BlockPool
from kvlab.rope import Rope, rope_for
from kvlab.tiers import HostTier

__all__ = ["BLOCK", "COVERS", "Stored", "accepted", "ask", "force", "look_alikes", "right"]

BLOCK = 16

# What a name of a block may cover, each with what came before: (whether it holds the block before, fields).
COVERS: dict[str, tuple[bool, tuple[str, ...]]] = {}
for _words, _chained, _more in (
    ("the block's own tokens", False, ()),
    ("+ the block before it", True, ()),
    ("+ the RoPE settings", True, ("rope",)),
    ("+ the layer configuration", True, ("config",)),
    ("+ the adapter's content", True, ("adapter",)),
    ("+ the dtype of its bits", True, ("kv_dtype",)),
    ("+ the first position", True, ("first_position",)),
    ("+ weights, tokenizer, layout, ranks, tenant: all", True, tuple(field.name for field in fields(Fingerprint))),
):
    COVERS[_words] = (_chained, (*next((known for _, known in reversed(COVERS.values())), ()), *_more))


@dataclass(frozen=True)
class Stored:
    """Somebody's cache: of which tokens (`lead` blocks of them are not handed out), under which fingerprint.

    `write(pool, blocks)` computes it and leaves the handed-out part in these blocks, one for each of its blocks.
    """

    tokens: tuple[int, ...]
    fingerprint: Fingerprint
    write: Callable[[BlockPool, Sequence[int]], None]
    lead: int = 0

    @property
    def hashes(self) -> list[bytes]:
        """The names of the blocks that are handed out."""
        return block_hashes(self.fingerprint, self.tokens, BLOCK)[self.lead :]


def right(model: Model, prefix: Sequence[int]) -> Stored:
    """The cache that the prompt should get."""
    return Stored(tuple(prefix), model.fingerprint(BLOCK), lambda pool, at: _prefill(model, prefix, pool, at))


def look_alikes(model: Model, prefix: Sequence[int], changed: Sequence[int], lead: Sequence[int]) -> dict[str, Stored]:
    """Seven caches that fit where that of `prefix` (whole blocks) belongs, and differ from it in one respect each.

    `changed`: the same prompt with something else in it. `lead`: whole blocks that stood before it elsewhere.
    Raises ValueError for what is not whole blocks, or where `changed` has another length.
    """
    if len(prefix) % BLOCK or len(lead) % BLOCK or len(changed) != len(prefix):
        raise ValueError(
            f"{len(prefix)}, {len(changed)} and {len(lead)} tokens: expected whole blocks of {BLOCK}, two alike"
        )
    said = "fp16" if model.dtype == "bf16" else "bf16"
    others = {
        "another RoPE base (500,000)": _with_decoder(model, rope_theta=500_000.0),
        "another layer configuration (norm epsilon)": _with_decoder(model, norm_eps=0.01),
        "another adapter": model.with_adapter(_adapter(model), scale=0.45),
    }
    moved = replace(model.fingerprint(BLOCK), first_position=BLOCK)
    bits = replace(model.fingerprint(BLOCK), kv_dtype=said)
    own, skipped = tuple(prefix), len(lead) // BLOCK
    return {
        "one changed word": right(model, changed),
        "the same text behind another beginning": Stored(
            (*lead, *prefix), model.fingerprint(BLOCK), lambda pool, at: _behind(model, lead, prefix, pool, at), skipped
        ),
        f"positions shifted by {BLOCK}": Stored(
            own, moved, lambda pool, at: _prefill(_shifted(model), prefix, pool, at)
        ),
        **{name: right(other, prefix) for name, other in others.items()},
        f"{said} bits read as {'bf16' if said == 'fp16' else 'fp16'}": Stored(
            own, bits, lambda pool, at: _misread(model, prefix, pool, at, said)
        ),
    }


def force(model: Model, stored: Stored, suffix: Sequence[int], new_tokens: int = 14) -> dict[str, Any]:
    """Attach a cache without asking, compute `suffix` behind it and go on greedily.

    {"text", "sure", "errors"}: what the model says, the mean probability that it gave to its own words, and how many
    exceptions or logits that are no numbers there were.
    """
    prefix = len(stored.tokens) - stored.lead * BLOCK
    blocks = list(range(blocks_for(prefix + len(suffix) + new_tokens, BLOCK)))
    pool = BlockPool(model.layout(BLOCK), len(blocks), device=model.device)
    said, sure, errors, at = list[int](), list[float](), 0, prefix + len(suffix)
    try:
        stored.write(pool, blocks[: prefix // BLOCK])
        logits = model.prefill(suffix, pool, blocks, prefix)
        while True:
            errors += int(not logits.isfinite().all())
            token = int(logits.argmax())
            if len(said) == new_tokens or token == model.tokenizer.eos:
                break
            said.append(token)
            sure.append(float(logits.float().softmax(-1)[token]))
            logits = model.decode(torch.tensor([token]), pool, [blocks], [at])[0]
            at += 1
    except (ValueError, RuntimeError):
        errors += 1
    text = model.tokenizer.decode(said)
    return {"text": " ".join(text.split()), "sure": sum(sure) / max(1, len(sure)), "errors": errors}


def ask(model: Model, stored: Stored, prefix: Sequence[int]) -> dict[str, Any]:
    """Put a cache into a tier under its own name, and ask that tier for `prefix` under ours.

    {"valid_blocks", "blocks", "differs"}: how many blocks come, of how many, and which fields of the name differ.
    """
    with Rig(model, block_size=BLOCK, max_tokens=len(prefix), tables=2) as rig:
        tier, home, away = rig.open(HostTier(2**32)), rig.table(len(prefix)), rig.table(len(prefix))
        stored.write(rig.pool, home.blocks)
        rig.transfer.offload(tier, home.blocks, stored.hashes, stored.fingerprint).wait()
        hashes = block_hashes(rig.fingerprint, prefix, BLOCK)
        report = rig.transfer.reload(tier, hashes, away.blocks[: len(hashes)]).wait()
        return {
            "valid_blocks": report.valid_blocks,
            "blocks": len(hashes),
            "differs": rig.fingerprint.differences(stored.fingerprint.to_dict()),
        }


def accepted(mine: Stored, other: Stored, covers: str) -> list[bool]:
    """Which blocks of `other` a library would hand out as ours, block by block, if a name covered only that much."""
    chained, known = COVERS[covers]
    names = [_weak_names(stored, chained, known) for stored in (mine, other)]
    return [a == b for a, b in zip(*names, strict=True)]


def _weak_names(stored: Stored, chained: bool, known: Sequence[str]) -> list[bytes]:
    blank = Fingerprint("", "", "", "", "", "")
    seen = replace(blank, **{name: getattr(stored.fingerprint, name) for name in known})
    if chained:
        return block_hashes(seen, stored.tokens, BLOCK)[stored.lead :]
    tokens = stored.tokens[stored.lead * BLOCK :]
    return [block_hashes(seen, tokens[at : at + BLOCK], BLOCK)[0] for at in range(0, len(tokens), BLOCK)]


# How they are made ----------------------------------------------------------------------------------------------------


def _prefill(model: Model, tokens: Sequence[int], pool: BlockPool, blocks: Sequence[int]) -> None:
    model.prefill(tokens, pool, blocks)


def _with_decoder(model: Model, **changes: float) -> Model:
    decoder = replace(model.decoder, **changes)  # type: ignore[arg-type]
    arch = replace(model.arch, decoder=decoder)
    return replace(model, arch=arch, rope=rope_for(decoder, arch.max_positions, model.device))


def _adapter(model: Model, rank: int = 4) -> dict[str, torch.Tensor]:
    """A low-rank adapter of queries and values in every layer, with seeded random content."""
    generator, decoder, parts = torch.Generator().manual_seed(1), model.decoder, {}
    for layer in range(decoder.layers):
        for name, heads in (("q_proj", decoder.heads), ("v_proj", decoder.kv_heads)):
            key = f"model.layers.{layer}.self_attn.{name}.lora_"
            a = torch.randn(rank, decoder.hidden, generator=generator)
            parts[f"{key}A.weight"] = a / decoder.hidden**0.5
            parts[f"{key}B.weight"] = torch.randn(heads * decoder.head_dim, rank, generator=generator)
    return parts


class _ShiftedRope(Rope):
    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return super().at(positions + BLOCK, dtype)


def _shifted(model: Model) -> Model:
    return replace(model, rope=_ShiftedRope(model.rope.inv_freq, model.rope.scale))


def _behind(model: Model, lead: Sequence[int], prefix: Sequence[int], pool: BlockPool, blocks: Sequence[int]) -> None:
    """The prefix's blocks as they were computed behind `lead`."""
    skipped, total = len(lead) // BLOCK, (len(lead) + len(prefix)) // BLOCK
    elsewhere = BlockPool(pool.layout, total, device=pool.device)
    model.prefill([*lead, *prefix], elsewhere, list(range(total)))
    there = torch.arange(skipped, total, device=pool.device)
    here = torch.tensor(list(blocks), device=pool.device)
    layers = pool.layout.layers
    pool.rows[pool.group_index(here, 0, layers)] = elsewhere.rows[elsewhere.group_index(there, 0, layers)]


def _misread(model: Model, prefix: Sequence[int], pool: BlockPool, blocks: Sequence[int], said: str) -> None:
    """The right values, written with 16 bits each in one format and read back as the other."""
    model.prefill(prefix, pool, blocks)
    rows = pool.group_index(torch.tensor(list(blocks), device=pool.device), 0, pool.layout.layers)
    bits = pool.rows[rows].to(TORCH_DTYPES[said])
    pool.rows[rows] = bits.view(TORCH_DTYPES["bf16" if said == "fp16" else "fp16"]).to(pool.rows.dtype)
