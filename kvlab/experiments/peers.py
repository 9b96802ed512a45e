"""Other libraries doing the same task with the same weights: what the bench stands beside.

A peer that is not installed is a ModuleNotFoundError; the bench then leaves it out and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch

from kvlab.gguf_file import GgufFile
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES
from kvlab.weights import fetch

__all__ = ["transformers_prefill"]


def transformers_prefill(model: Model) -> Callable[[Sequence[int]], int]:
    """Transformers' Llama (sdpa) with SmolLM2's weights: token ids to the first new token, KV cache kept."""
    transformers = import_module("transformers")
    arch, d = model.arch, model.decoder
    config = transformers.LlamaConfig(
        hidden_size=d.hidden,
        num_hidden_layers=d.layers,
        num_attention_heads=d.heads,
        num_key_value_heads=d.kv_heads,
        intermediate_size=d.ffn,
        vocab_size=arch.vocab,
        max_position_embeddings=arch.max_positions,
        rms_norm_eps=d.norm_eps,
        rope_theta=d.rope_theta,
        tie_word_embeddings=arch.tied_embeddings,
        attn_implementation="sdpa",
    )
    peer = transformers.LlamaForCausalLM(config)
    peer.load_state_dict(dict(GgufFile(fetch("smollm2-135m", quiet=True)).tensors()), strict=False)
    peer = peer.to(device=model.device, dtype=TORCH_DTYPES[model.dtype]).eval()

    def first_token(ids: Sequence[int]) -> int:
        with torch.inference_mode():
            inputs = torch.tensor([list(ids)], device=model.device)
            return int(peer(inputs, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    return first_token
