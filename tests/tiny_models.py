"""Tiny transformers models of every kind, for the oracle tests: real code path, random weights, sizes that all differ.

`CASES` maps a case name to (model_type, config fields). `SIZES` are shared fields, applied where the config class has
them, chosen so that no two of them can be swapped without a count changing.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 8
KERNEL = 4

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "num_hidden_layers": 6,
    "n_layer": 6,
    "n_layers": 6,
    "num_layers": 6,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 40,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 6,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "state_size": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "shared_expert_intermediate_size": 56,
    "intermediate_size_mlp": 112,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "max_position_embeddings": 512,
    "n_group": 1,
    "topk_group": 1,
}
EVERYWHERE = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"}
NONE = object()  # leave the class default alone

_MLA = {"num_key_value_heads": 4, "head_dim": NONE}
_ALTERNATE = ["sliding_attention", "full_attention"] * 3
_HYBRID = ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"]

# name -> (model_type, fields): one case per way of being different.
CASES: dict[str, tuple[str, dict[str, object]]] = {
    # multi-head and multi-query with old key names
    "gpt2": ("gpt2", {}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 3]]}),
    "gpt_neox": ("gpt_neox", {}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "opt": ("opt", {}),
    "opt_projected": ("opt", {"word_embed_proj_dim": 32}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "falcon_7b_form": ("falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "falcon_rw_form": ("falcon", {"multi_query": False, "new_decoder_architecture": False, "alibi": True}),
    "falcon_40b_form": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode_multi_head": ("gpt_bigcode", {"multi_query": False}),
    "phi": ("phi", {}),
    "persimmon": ("persimmon", {}),
    "xglm": ("xglm", {}),
    # grouped queries
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "starcoder2": ("starcoder2", {}),
    "stablelm": ("stablelm", {}),
    "nemotron": ("nemotron", {}),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", {}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "helium": ("helium", {"head_dim": 16}),
    "hunyuan_dense": ("hunyuan_v1_dense", {}),
    "ernie4_5": ("ernie4_5", {}),
    "seed_oss": ("seed_oss", {}),
    "arcee": ("arcee", {}),
    # windows and chunks
    "mistral": ("mistral", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_kv_shared_layers": 2,
            "layer_types": _ALTERNATE,
            "laurel_rank": 8,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 120,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 2,
            "layer_types": _ALTERNATE,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 120,
            "global_head_dim": 32,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
    ),
    "gpt_oss": ("gpt_oss", {}),
    "exaone4": ("exaone4", {}),
    "olmo3": ("olmo3", {}),
    "cohere2": ("cohere2", {}),
    "smollm3": ("smollm3", {"use_sliding_window": True}),
    "mimo_v2": ("mimo_v2_flash", {}),
    "llama4": ("llama4_text", {}),
    # experts
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", {}),
    "phimoe": ("phimoe", {}),
    "dbrx": (
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    "glm4_moe": ("glm4_moe", {"first_k_dense_replace": 2}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 4}),
    "hunyuan_moe": ("hunyuan_v1_moe", {}),
    "granitemoeshared": ("granitemoeshared", {"shared_intermediate_size": 56}),
    "minimax_m2": ("minimax_m2", {}),
    # latents
    "deepseek_v2": ("deepseek_v2", _MLA),
    "deepseek_v3": ("deepseek_v3", {**_MLA, "first_k_dense_replace": 2}),
    "deepseek_v3_plain_query": ("deepseek_v3", {**_MLA, "q_lora_rank": None}),
    "minicpm3": ("minicpm3", _MLA),
    "deepseek_v32": ("deepseek_v32", _MLA),
    "glm_moe_dsa": ("glm_moe_dsa", {**_MLA, "index_topk_freq": 2}),
    # recurrences and convolutions
    "mamba": ("mamba", {"intermediate_size": 128}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16}),
    "jamba": ("jamba", {"attn_layer_period": 3, "attn_layer_offset": 1, "use_mamba_kernels": False}),
    "bamba": ("bamba", {"attn_layer_indices": [1, 4]}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 128}),
    "granite_hybrid": (
        "granitemoehybrid",
        {"layer_types": ["linear_attention", "full_attention"] * 3, "shared_intermediate_size": 48},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"],
            "moe_shared_expert_intermediate_size": 56,
            "num_hidden_layers": NONE,
        },
    ),
    "zamba2": (
        "zamba2",
        {"layers_block_type": _HYBRID, "n_mamba_heads": 8, "num_key_value_heads": 4, "mamba_ngroups": 2},
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "kimi_linear": ("kimi_linear", _MLA),
    "minimax": ("minimax", {}),
    "lfm2": ("lfm2", {"full_attn_idxs": [1, 4]}),
    "lfm2_moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 3, "num_dense_layers": 2}),
}


def tiny_config(name: str):
    """The transformers config of a case."""
    model_type, fields = CASES[name]
    known = CONFIG_MAPPING[model_type]().to_dict()
    shared = {key: value for key, value in SIZES.items() if key in known}
    chosen = {key: value for key, value in {**shared, **EVERYWHERE, **fields}.items() if value is not NONE}
    return CONFIG_MAPPING[model_type](**chosen)


def tiny_model(config, attention: str = "sdpa"):
    """The model, on CPU with seeded random weights. Experts run one by one, so that matmuls are those that count."""
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except ValueError:  # models without SDPA (ALiBi, attention sinks)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.eval()


def prompt(tokens: int) -> torch.Tensor:
    """Token ids [1, tokens], none of them special."""
    return torch.arange(tokens)[None] % 100 + 3
