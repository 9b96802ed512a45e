"""What a model's code knows and its `config.json` may leave out: key names, class defaults, rules by model type.

This is the one place where a model type's name decides anything. Unless a line says otherwise, the source is
transformers 5.24, models/<type>/configuration_<type>.py and modeling_<type>.py. A type that is not listed here is
read by its fields alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "ALIASES",
    "CHECKED",
    "DECODER_FAMILY",
    "ENCODER_TYPES",
    "GATED_QUERY",
    "LAYER_KINDS",
    "NESTED",
    "OUTPUT_GATE",
    "PATTERNS",
    "POSITION_KEYS",
    "SHARED_EXPERT_GATE",
    "UNGATED",
    "UNKNOWN_STATE",
    "class_defaults",
]

# Where a vision-language or composite config keeps its text decoder, in order of preference.
NESTED = ("text_config", "llm_config", "language_config", "language_model_config", "decoder_config", "thinker_config")

# Canonical field -> the key names that configs use for it.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "model_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "kv_n_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "dim_head"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "intermediate_size": (
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        "ff_intermediate_size",
        "block_ff_dim",
        "dim_ff",
    ),
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    "layer_types": ("layer_types", "layers_block_type", "layer_block_types"),
    "draft_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers"),
    "activation": ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"),
    # mixture of experts
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_routed_experts"),
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
    ),
    "expert_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_hidden_size"),
    "shared_size": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_intermediate_size",
        "share_expert_dim",
        "share_expert_dims",
    ),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"),
    # Mamba
    "mamba_heads": ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head", "mamba_headdim"),
    "mamba_state": ("ssm_state_size", "mamba_d_state", "state_size"),
    "mamba_groups": ("n_groups", "mamba_n_groups", "mamba_ngroups"),
    "mamba_conv": ("conv_kernel", "mamba_d_conv"),
    "mamba_expand": ("expand", "mamba_expand"),
    "mamba_dt_rank": ("mamba_dt_rank", "time_step_rank"),
    "state_dtype": ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"),
    "dtype": ("dtype", "torch_dtype"),
}

# Longest sequence: these may differ within one config (Baichuan-2, Qwen-1), the first one present counts.
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")

_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_GEMMA3 = {
    **_GEMMA,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
_QWEN_WINDOW = {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
_TIED = {"tie_word_embeddings": True}

# Defaults of the config classes for fields that published configs of these types leave out.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": {"head_dim": 128, "sliding_window": 1024},
    "bamba": {"num_key_value_heads": 8, "mamba_head_dim": "auto"},
    "bloom": _TIED,
    "cohere": _TIED,
    "cohere2": {**_TIED, "sliding_window": 4096},
    "cwm": {"head_dim": 128, "num_key_value_heads": 8, "sliding_window": 8192},
    "deepseek_v3": {"num_key_value_heads": 128},
    "deepseek_v32": {"num_key_value_heads": 128},
    "deepseek_v4": {"head_dim": 512, "num_key_value_heads": 1, "sliding_window": 128},
    "dots1": {"num_key_value_heads": 32, "sliding_window": None},
    "ernie4_5": {"head_dim": 128, "num_key_value_heads": 2, **_TIED},
    "ernie4_5_moe": {"num_key_value_heads": 4, **_TIED},
    "exaone4": {"sliding_window": 4096, "num_key_value_heads": 32},
    "exaone_moe": {"sliding_window": 4096, "num_key_value_heads": 32},
    "falcon": {**_TIED, "max_position_embeddings": 2048},
    "falcon_h1": {"num_key_value_heads": 8},
    "falcon_mamba": _TIED,
    "gemma": {**_GEMMA, "num_key_value_heads": 16},
    "gemma2": {**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096},
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n_text": {
        **_GEMMA,
        "num_key_value_heads": 2,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
    },
    "gemma4_text": {
        **_GEMMA,
        "global_head_dim": 512,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    },
    "glm": {"head_dim": 128, "num_key_value_heads": 2},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2},
    "glm4_moe": {"num_key_value_heads": 8},
    "gpt2": _TIED,
    "gpt_bigcode": {**_TIED, "multi_query": True},
    "gpt_neo": {**_TIED, "sliding_window": 256},
    "gpt_oss": {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128},
    "granite_swa": {"num_key_value_heads": 4, "sliding_window": 128, **_TIED},
    "helium": {"head_dim": 128, "num_key_value_heads": 20},
    "jamba": {
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_state": 16,
        "mamba_conv": 4,
        "mamba_expand": 2,
    },
    "kimi_linear": {"first_k_dense_replace": 1},
    "lfm2": {"num_key_value_heads": 8, "conv_L_cache": 3, **_TIED},
    "lfm2_moe": {"num_key_value_heads": 8, "conv_L_cache": 3, **_TIED},
    "llama4_text": {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16384,
    },
    "longcat_flash": {"head_dim": 64},
    "mamba": {**_TIED, "mamba_conv": 4, "mamba_expand": 2, "mamba_state": 16},
    "mamba2": {"mamba_conv": 4, "mamba_expand": 2, "mamba_state": 128, "mamba_groups": 8, "head_dim": 64},
    "minicpm3": _TIED,
    "minimax": {"num_key_value_heads": 8},
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {"head_dim": 128, "num_key_value_heads": 8},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "mpt": _TIED,
    "nemotron_h": {"head_dim": 128, "num_key_value_heads": 8},
    "olmo3": {"sliding_window": 4096},
    "opt": _TIED,
    "phimoe": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, **_QWEN_WINDOW},
    "qwen2_moe": {"num_key_value_heads": 16, **_QWEN_WINDOW},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOW},
    "qwen3_5_moe_text": {"head_dim": 256, "num_key_value_heads": 2},
    "qwen3_5_text": {"head_dim": 256, "num_key_value_heads": 4},
    "qwen3_moe": {"num_key_value_heads": 4, **_QWEN_WINDOW},
    "qwen3_next": {"head_dim": 256, "num_key_value_heads": 2},
    "qwen3_vl_moe_text": {"num_key_value_heads": 16},
    "qwen3_vl_text": {"head_dim": 128, "num_key_value_heads": 32},
    "recurrent_gemma": {**_TIED, "sliding_window": 2048, "conv1d_width": 4},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "smollm3": {"num_key_value_heads": 4, "use_sliding_window": False, **_TIED},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"num_key_value_heads": 2, **_TIED},
    "vaultgemma": {**_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096},
    "xglm": _TIED,
    "zamba2": {**_TIED, "mamba_conv": 4, "mamba_expand": 2, "mamba_groups": 1, "mamba_heads": 8, "mamba_state": 64},
}

# Every `period`-th layer attends to everything and the others through their window, where the config says no pattern
# itself. "first" puts the full layer at the start of each period, else it is the last one.
PATTERNS: dict[str, tuple[int, str]] = {
    "afmoe": (4, "last"),
    "cohere2": (4, "last"),
    "cwm": (4, "first"),
    "exaone4": (4, "last"),
    "exaone_moe": (4, "last"),
    "gemma2": (2, "last"),
    "gemma3": (6, "last"),
    "gemma3_text": (6, "last"),
    "gemma3n_text": (5, "last"),
    "gemma4_text": (6, "last"),
    "gpt_oss": (2, "last"),
    "granite_swa": (4, "first"),
    "olmo3": (4, "last"),
    "vaultgemma": (2, "last"),
}

# The words of per-layer lists -> kvlab's kinds. `state` is whatever recurrence the config describes (Mamba, gated delta
# rule, lightning attention, RG-LRU); `ffn` layers hold no mixer; `hybrid` layers hold attention and a state.
LAYER_KINDS: dict[Any, str] = {
    "full_attention": "full",
    "attention": "full",
    "global": "full",
    "global_attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "local": "sliding",
    "local_attention": "sliding",
    "swa": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "state",
    "linear": "state",
    "lightning_attention": "state",
    "gated_deltanet": "state",
    "gated_delta_net": "state",
    "kda": "state",
    "mamba": "state",
    "mamba1": "state",
    "mamba2": "state",
    "recurrent": "state",
    "m": "state",
    "hybrid": "hybrid",
    "g": "hybrid",
    "conv": "conv",
    "short_conv": "conv",
    "mlp": "dense",
    "moe": "moe",
    "compressed_sparse_attention": "compressed_sparse",
    "heavily_compressed_attention": "heavily_compressed",
    "no_op": "none",
    "none": "none",
    None: "none",
    # Nemotron-H `hybrid_override_pattern`, EXAONE `sliding_window_pattern` "LLLG"
    "M": "state",
    "*": "full",
    "-": "dense",
    "E": "moe",
    "L": "sliding",
    "G": "full",
}

# FFN of two matrices (up, down). Every other type has three (gate, up, down), as SwiGLU and GEGLU do.
_UNGATED = """
RefinedWeb RefinedWebModel
apertus arcee biogpt bloom codegen ctrl cpm falcon fuyu gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gptj jais jais2 mpt nanochat nemotron nemotron_h openai-gpt opt persimmon phi phi-msft
starcoder2 xglm
"""
UNGATED = frozenset(_UNGATED.split())

# The query projection also makes an output gate of the same size (q_proj has twice the rows).
GATED_QUERY = frozenset(["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])

# A gate on the attention output with its own matrix: hidden -> "elements" (heads × head_dim), "heads" (one a head), or
# "values" (heads × v_head_dim, MLA).
OUTPUT_GATE = {"afmoe": "elements", "laguna": "heads", "step3p5": "heads", "step3p7": "heads"}

# The shared expert has a scalar gate (hidden -> 1).
SHARED_EXPERT_GATE = frozenset(["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"])

# Recurrent or otherwise special caches whose size kvlab does not know; refused by name.
_UNKNOWN = """
rwkv rwkv6 rwkv7 xlstm retnet hyena reformer xlnet transfo-xl blt hrm_text cpmant
"""
UNKNOWN_STATE = frozenset(_UNKNOWN.split())

# Models that generate no text with a causal KV cache of their own.
_ENCODERS = """
albert bert bert-generation big_bird camembert canine clip convbert data2vec-text deberta deberta-v2 distilbert
electra ernie esm eurobert flaubert fnet funnel ibert layoutlm layoutlmv3 longformer luke megatron-bert
mobilebert modernbert mpnet mra nezha nomic_bert nystromformer rembert roberta roberta-prelayernorm roc_bert
roformer siglip splinter squeezebert vit wav2vec2 xlm-roberta xlm-roberta-xl xmod yoso
bart blenderbot bigbird_pegasus encoder-decoder led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus plbart
prophetnet switch_transformers t5 t5gemma t5gemma2 trocr udop umt5 whisper
"""
ENCODER_TYPES = frozenset(_ENCODERS.split())

# What kvlab's own decoder runs. `bias`: does the code read attention_bias ("field", also for o_proj), always bias
# q, k and v ("qkv"), or never ("no"); `mlp_bias`: does it read mlp_bias; `qk_norm`: RMSNorm over each head's q and k.
DECODER_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"bias": "field", "mlp_bias": True, "qk_norm": False, "positions": 2048},
    "mistral": {"bias": "no", "mlp_bias": False, "qk_norm": False, "positions": 131072},
    "qwen2": {"bias": "qkv", "mlp_bias": False, "qk_norm": False, "positions": 32768},
    "qwen3": {"bias": "field", "mlp_bias": False, "qk_norm": True, "positions": 32768},
}

# Types without a rule that were read right all the same: against published configs, or transformers' own tensors.
_BY_FIELDS = """
baichuan chatglm dbrx deepseek_v2 exaone glm_moe_dsa granite granitemoehybrid granitemoeshared hunyuan_v1_dense
hunyuan_v1_moe internlm2 jetmoe kimi_k2 llava mimo mimo_v2 mimo_v2_flash olmo2 olmo_hybrid olmoe phi3 phi3small phi4mm
qwen qwen2_5_vl qwen2_vl zamba
"""
CHECKED = frozenset([*_BY_FIELDS.split(), *CLASS_DEFAULTS, *DECODER_FAMILY, *UNGATED])


def class_defaults(model_type: str) -> Mapping[str, Any]:
    """The defaults of a model type's config class, for the fields that published configs leave out."""
    return CLASS_DEFAULTS.get(model_type, {})
