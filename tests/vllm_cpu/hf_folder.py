"""SmolLM2 as a Hugging Face folder, made from the GGUF file that kvlab's tests use. vLLM reads such a folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvlab.gguf_file import GgufFile
from kvlab.tokenizer import from_gguf
from kvlab.weights import decoder_of


def write_hf_folder(gguf: Path, folder: Path) -> Path:
    """Write config.json, model.safetensors (fp32) and the tokenizer's files; nothing if they are there."""
    if (folder / "model.safetensors").exists():
        return folder
    file = GgufFile(gguf)
    arch = file.arch()
    decoder = decoder_of(arch)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = from_gguf(file)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": arch.hidden,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "intermediate_size": decoder.ffn,
        "vocab_size": arch.vocab,
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": decoder.norm_eps,
        "rope_theta": decoder.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": arch.tied_embeddings,
        "bos_token_id": 1,
        "eos_token_id": tokenizer.eos,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer._inner.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}), encoding="utf-8"
    )
    tensors = file.tensors()
    whole = {name: tensors[name].to(torch.float32).contiguous() for name in tensors.shapes}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
