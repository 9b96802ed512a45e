"""Weight MACs per token of one layer's FFN: dense, or a mixture of experts with its router and shared experts.

Knows FFN shapes and how a config says which layers are sparse. Does not know mixers. Only the experts that a token
activates count, since that is what it computes.
"""

from __future__ import annotations

from kvlab.hf.fields import Fields
from kvlab.hf.rules import SHARED_EXPERT_GATE, UNGATED

__all__ = ["ffn_macs", "is_gated", "is_sparse", "needs_activation_rule"]


def ffn_macs(f: Fields, layer: int, layers: int, kind: str | None = None) -> int:
    """MACs of layer number `layer` of `layers`. `kind` "dense" or "moe" overrides what the config says by layer."""
    sparse = kind == "moe" if kind else is_sparse(f, layer, layers)
    if not sparse:
        return _matrices(f) * f.size("hidden_size") * dense_width(f, layer)
    macs = _experts(f, layer)
    if f.model_type == "gemma4_text":  # Gemma 4 adds the experts to its dense FFN
        macs += _matrices(f) * f.size("hidden_size") * dense_width(f, layer)
    return macs


def is_gated(f: Fields) -> bool:
    """Whether the FFN has a third (gate) matrix, as SwiGLU has."""
    return f.model_type not in UNGATED


def needs_activation_rule(f: Fields) -> bool:
    """Whether the activation alone leaves open if the FFN is gated: neither SiLU (SwiGLU) nor a type kvlab knows."""
    return str(f.raw("activation") or "silu").lower() not in ("silu", "swish", "swiglu", "gegelu", "geglu")


def _matrices(f: Fields) -> int:
    return 3 if is_gated(f) else 2


def dense_width(f: Fields, layer: int) -> int:
    """The width of a dense FFN under its many names."""
    hidden = f.size("hidden_size")
    nested = f.section("ffn_config")  # DBRX
    if nested.get("ffn_hidden_size") is not None:
        return f.having(nested).size("ffn_hidden_size")
    if f.raw("intermediate_size_mlp") is not None:  # Llama 4: intermediate_size is that of an expert
        return f.size("intermediate_size_mlp")
    if f.raw("dense_intermediate_size") is not None:
        return f.size("dense_intermediate_size")
    if f.model_type == "granitemoehybrid":  # without experts, what is left is the shared one
        return f.size("shared_size")
    width = f.optional_size("intermediate_size", layer)
    if width is None:
        if f.raw("expansion_ratio") is not None:  # MPT
            return int(f.number("expansion_ratio", 4) * hidden)
        if f.model_type in UNGATED or f.model_type in ("gemma4_text", "zamba2"):
            return 4 * hidden  # GPT-2, GPT-J, GPT-Neo, BLOOM, Falcon, MPT: the default of n_inner and its kin
        return f.size("intermediate_size")  # raises, naming the field
    if f.model_type in ("qwen", "recurrent_gemma"):
        return width // 2  # the gate and the up matrix have half of intermediate_size each (QWenMLP, Griffin)
    if f.flag("block_auto_adjust_ff_dim", f.model_type == "lfm2"):  # LFM2 (modeling_lfm2.py, Lfm2MLP)
        width = int(f.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = f.size("block_multiple_of", 256)
        width = -(-width // multiple) * multiple
    return width


def is_sparse(f: Fields, layer: int, layers: int) -> bool:
    """Whether layer number `layer` has experts. Each way of saying so is a field that some config uses."""
    if _expert_count(f, layer) <= 1:
        return False
    if f.model_type == "gemma4_text":
        return f.flag("enable_moe_block")
    kinds = f.sequence("mlp_layer_types", layers)
    if kinds is not None:
        if kinds[layer] not in ("dense", "mlp", "sparse", "moe", "hash_moe"):
            raise ValueError(f"config field 'mlp_layer_types' names {kinds[layer]!r}; expected dense or sparse")
        return kinds[layer] not in ("dense", "mlp")
    listed = f.raw("moe_layers") if f.raw("moe_layers") is not None else f.raw("moe_layers_enum")
    if isinstance(listed, str):
        listed = [int(part) for part in listed.split(",")]
    if listed:
        return layer in listed
    if layer in (f.sequence("mlp_only_layers") or ()):
        return False
    frequency = f.raw("moe_layer_freq")
    if isinstance(frequency, list):
        return bool(frequency[layer])
    dense_first = max(f.count("first_k_dense_replace"), f.count("num_dense_layers"))
    if layer < dense_first:
        return False
    if frequency is not None:
        return layer % f.size("moe_layer_freq") == 0  # DeepSeek
    if f.raw("decoder_sparse_step") is not None:
        return (layer + 1) % f.size("decoder_sparse_step") == 0  # Qwen MoE
    if f.raw("interleave_moe_layer_step") is not None:
        return (layer + 1) % f.size("interleave_moe_layer_step") == 0  # Llama 4
    if f.raw("expert_layer_period") is not None:
        return layer % f.size("expert_layer_period") == f.count("expert_layer_offset")  # Jamba
    if f.raw("moe_layer_start_index") is not None or f.raw("moe_layer_interval") is not None:  # ERNIE 4.5
        last = f.raw("moe_layer_end_index")
        last = layers - 1 if last in (None, -1) else int(last)
        interval = f.size("moe_layer_interval", 1)
        return f.count("moe_layer_start_index") <= layer <= last and (layer + 1) % interval == 0
    return True


def _expert_count(f: Fields, layer: int) -> int:
    nested = f.section("ffn_config")
    if nested.get("moe_num_experts") is not None:
        return f.having(nested).size("moe_num_experts")
    return 0 if f.raw("experts") in (None, 0) else f.size("experts", layer=layer)


def _experts(f: Fields, layer: int) -> int:
    hidden = f.size("hidden_size")
    experts = _expert_count(f, layer)
    nested = f.section("ffn_config")
    top_k = f.having(nested).size("moe_top_k") if "moe_top_k" in nested else f.size("top_k", layer=layer)
    if top_k > experts:
        raise ValueError(f"config picks {top_k} experts per token out of {experts}")
    if "ffn_hidden_size" in nested:
        width = f.having(nested).size("ffn_hidden_size")
    else:
        width = f.optional_size("expert_size", layer) or f.size("intermediate_size", layer=layer)
    shared, gate = _shared_width(f, width), 0
    if shared and f.model_type in SHARED_EXPERT_GATE:
        gate = hidden
    experts += f.count("zero_expert_num")
    latent = f.optional_size("moe_latent_size")  # Nemotron 3: experts between two projections to a narrower width
    inside = hidden if latent is None else latent
    macs = hidden * experts + gate + _matrices(f) * (top_k * inside * width + hidden * shared)
    return macs if latent is None else macs + 2 * hidden * latent


def _shared_width(f: Fields, expert_width: int) -> int:
    """The total width of the experts that every token passes."""
    if f.model_type == "llama4_text":
        return f.size("intermediate_size")
    width = f.raw("shared_size")
    if width is not None:
        return 0 if width == 0 else f.size("shared_size") * (f.count("shared_experts") or 1)
    if f.model_type == "hunyuan_v1_moe" or f.flag("use_mixed_mlp_moe"):
        shared = f.raw("shared_experts")
        count = max(shared) if isinstance(shared, list) else shared or 1
        return f.size("intermediate_size") * int(count)
    return expert_width * f.count("shared_experts")
