"""Read a GGUF file (llama.cpp's format) as what it was converted from: a config, and Hugging Face tensors.

Dequantises with the `gguf` package and undoes what llama.cpp's converter did to the tensors. Does not run anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize
from torch import Tensor

from kvlab.arch import ModelArch
from kvlab.weights import LazyTensors, decoder_of

__all__ = ["GgufFile"]

# llama.cpp's tensor names (gguf-py/gguf/constants.py) → Hugging Face's
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """One GGUF file, opened once (parsing its vocabulary takes a second or two); tensors are read when asked for.

    Raises ValueError for a file that is not GGUF or is truncated, FileNotFoundError when there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"{path} begins with {magic!r}; a GGUF file begins with b'GGUF'")
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError, OSError) as error:
            raise ValueError(
                f"{path} is not readable GGUF ({path.stat().st_size} bytes; truncated?): {error}"
            ) from error

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python (str, int, float, bool, or a list of them)."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _own(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.get('general.architecture')}.{key}", default)

    def arch(self) -> ModelArch:
        """The model's shape. Goes through the Hugging Face reader, so that its rules and refusals hold here too."""
        kind = self.get("general.architecture")
        if kind not in ("llama", "qwen2", "qwen3"):
            raise ValueError(f"{self.path}: general.architecture is {kind!r}; kvlab reads llama, qwen2, qwen3")
        names = {tensor.name for tensor in self._reader.tensors}
        if "rope_freqs.weight" in names:
            raise ValueError(f"{self.path} scales RoPE by a tensor (Llama 3.1 and later); use its safetensors instead")
        heads, hidden = self._own("attention.head_count"), self._own("embedding_length")
        config: dict[str, Any] = {
            "_name_or_path": self.get("general.name") or self.path.stem,
            "model_type": kind,
            "hidden_size": hidden,
            "num_hidden_layers": self._own("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._own("attention.head_count_kv", heads),
            "head_dim": self._own("attention.key_length"),
            "intermediate_size": self._own("feed_forward_length"),
            "vocab_size": len(self.get("tokenizer.ggml.tokens") or ()) or self._own("vocab_size"),
            "max_position_embeddings": self._own("context_length"),
            "rms_norm_eps": self._epsilon(),
            "rope_theta": self._own("rope.freq_base", 10_000.0),
            "rope_scaling": self._rope_scaling(),
            "sliding_window": self._own("attention.sliding_window"),
            "tie_word_embeddings": "output.weight" not in names,
        }
        if kind == "llama":  # the file says whether there are biases only by holding them
            config["attention_bias"] = "blk.0.attn_q.bias" in names
        arch = ModelArch.from_hf(config)
        head_dim, rotated = decoder_of(arch).head_dim, self._own("rope.dimension_count")
        if rotated not in (None, head_dim):
            raise ValueError(f"{self.path} rotates {rotated} of {head_dim} head dimensions; kvlab rotates all of them")
        return arch

    def _epsilon(self) -> float | None:
        stored = self._own("attention.layer_norm_rms_epsilon")  # float32: 1e-5 reads as 9.999999747378752e-06
        return None if stored is None else float(f"{stored:.6g}")

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._own("rope.scaling.type", "none")
        if kind == "none":
            return None
        return {
            "rope_type": kind,
            "factor": self._own("rope.scaling.factor", 1.0),
            "original_max_position_embeddings": self._own("rope.scaling.original_context_length"),
        }

    def tensors(self) -> LazyTensors:
        """Every tensor by its Hugging Face name, dequantised to float32 when read."""
        arch = self.arch()
        decoder = decoder_of(arch)
        found = {_hf_name(tensor.name): tensor for tensor in self._reader.tensors}
        shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in found.items()}

        def read(name: str) -> Tensor:
            tensor = found[name]
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(shapes[name])
            for projection, heads in (("q_proj", decoder.heads), ("k_proj", decoder.kv_heads)):
                if arch.model_type == "llama" and f".{projection}." in name:
                    return unpermute(values, heads)
            return values

        return LazyTensors(shapes, read)


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("blk."):
        _, index, part = stem.split(".", 2)
        return f"model.layers.{index}.{_LAYER.get(part, part)}.{kind}"
    return f"{_TOP.get(stem, stem)}.{kind}"


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of q and k rows [heads · head_dim, …], which pairs dimensions (2i, 2i+1) for RoPE.

    Hugging Face pairs (i, i + head_dim/2). The inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
