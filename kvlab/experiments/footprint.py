"""What a prefix's cache weighs, counted on the tensors that hold it, and where its bytes are while it travels.

Knows the rig. Returns plain rows; does not print or draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import block_hashes
from kvlab.layers import CacheComponent, Decoder, Layer
from kvlab.loading import load_model
from kvlab.model import Model
from kvlab.tiers import HostTier

__all__ = ["computed_designs", "measured_designs", "tensor_bytes", "whereabouts"]


def tensor_bytes(model: Model, tokens: Sequence[int], block_size: int = 16) -> dict[str, int]:
    """Prefill `tokens`, read every layer's K and V back out of the pool, and add up the tensors' own bytes: {k, v}."""
    with Rig(model, block_size=block_size, max_tokens=len(tokens), tables=1) as rig:
        table = rig.table(len(tokens))
        rig.prefill(tokens, table)
        blocks = torch.tensor(table.blocks, device=model.device)
        pairs = [rig.pool.read(layer, blocks, len(tokens)) for layer in range(model.decoder.layers)]
    return {"k": sum(k.nbytes for k, _ in pairs), "v": sum(v.nbytes for _, v in pairs)}


def measured_designs(kv_heads: Mapping[str, int], tokens: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Small models with random weights that differ in their KV heads alone (8 query heads of 64, 4 layers), run.

    Rows of {"design", "kv_heads", "bytes_per_token"}, the bytes counted on the tensors of `tokens` positions in fp32.
    """
    rows = []
    for design, count in kv_heads.items():
        d = Decoder(layers=4, hidden=512, heads=8, kv_heads=count, head_dim=64, ffn=512)
        arch = ModelArch(design, "llama", d.hidden, 256, 512, (d.layer,) * d.layers, True, d)
        sizes = tensor_bytes(load_model(arch, dtype="fp32", seed=seed), list(range(tokens)))
        rows.append({"design": design, "kv_heads": count, "bytes_per_token": sum(sizes.values()) / tokens})
    return rows


def computed_designs(arch: ModelArch, tokens: int, kv_dtype: str = "bf16") -> list[dict[str, Any]]:
    """What `tokens` positions of `arch` (a Llama-like shape) would weigh, had it been built with another attention.

    "MLA" keeps one latent of 512 + 64 values a layer (DeepSeek-V3's kv_lora_rank and qk_rope_head_dim), "window" the
    newest 4,096 tokens in every other layer (as Gemma 2 does: its sliding_window). Rows of {"design", "bytes"}.
    """
    d = arch.decoder
    assert d is not None, f"{arch.name} is not a shape that kvlab can vary"
    mla = Layer("mla", cache=(CacheComponent("latent", 512 + 64),))
    window = replace(d.layer, cache=tuple(replace(c, cap_tokens=4096) for c in d.layer.cache))
    layers: dict[str, tuple[Layer, ...]] = {
        f"MHA, {d.heads} KV heads": (replace(d, kv_heads=d.heads).layer,) * d.layers,
        f"GQA, {d.kv_heads} KV heads": arch.layers,
        "MQA, 1 KV head": (replace(d, kv_heads=1).layer,) * d.layers,
        "MLA, 1 latent of 576": (mla,) * d.layers,
        "GQA, window in half the layers": tuple(window if i % 2 else d.layer for i in range(d.layers)),
    }
    return [
        {"design": name, "bytes": kv_bytes(replace(arch, layers=own), tokens, kv_dtype)} for name, own in layers.items()
    ]


def whereabouts(model: Model, tokens: Sequence[int], block_size: int = 16) -> list[dict[str, Any]]:
    """The bytes of one prefix before, between and after an offload and a reload.

    Rows of {"moment", "pool_bytes" (in blocks that somebody holds), "tier_bytes" (in host RAM)}. A reload keeps the
    tier's copy.
    """
    kept = len(tokens) // block_size * block_size
    with Rig(model, block_size=block_size, max_tokens=len(tokens), tables=1) as rig:
        tier = rig.open(HostTier(2**32))

        def now(moment: str) -> dict[str, Any]:
            held = rig.allocator.num_blocks - rig.allocator.free_blocks
            return {
                "moment": moment,
                "pool_bytes": held * rig.layout.block_bytes,
                "tier_bytes": tier.used_bytes,
            }

        rows = [now("nothing yet")]
        table = rig.table(kept)
        rig.prefill(tokens[:kept], table)
        rows.append(now("answered"))
        rig.offload(tier, tokens[:kept], table)
        rig.release(table)
        rows.append(now("offloaded"))
        back = rig.table(kept)
        hashes = block_hashes(rig.fingerprint, tokens[:kept], block_size)
        rig.transfer.reload(tier, hashes, back.blocks).wait()
        rows.append(now("reloaded"))
    return rows
