"""`ModelArch.from_hf` reads every published config we have, refuses what it cannot know, and never guesses."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from kvlab.arch import ModelArch, preset_names
from kvlab.arithmetic import kv_bytes, kv_bytes_by_component

CONFIGS = Path(__file__).parent / "data" / "configs"

# What one more token adds in bf16 once every window is full, written out by hand from each file:
# attention layers that grow × (K + V) × KV heads × head size × 2 bytes; MLA: layers × (latent + RoPE key) × 2 bytes.
BYTES_PER_TOKEN = {
    "Baichuan2-7B": 32 * 2 * 32 * 128 * 2,
    "DeepSeek-V3": 61 * (512 + 64) * 2,
    "DeepSeek-V3.1-NVFP4": 61 * (512 + 64) * 2,
    # 41 layers with a compressed cache: 21 with an entry and an index key per 4 tokens, 20 with an entry per 128.
    "DeepSeek-V4-Flash": 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128,
    "EXAONE-3.0-7.8B": 32 * 2 * 8 * 128 * 2,
    "EXAONE-4.0-32B": 16 * 2 * 8 * 128 * 2,
    "GLM-4.5": 92 * 2 * 8 * 128 * 2,
    "GLM-5": 78 * (512 + 64 + 128) * 2,
    "GLM-5.1": 78 * (512 + 64 + 128) * 2,
    "Janus-1.3B": 24 * 2 * 16 * 128 * 2,
    "Kimi-K2-Instruct": 61 * (512 + 64) * 2,
    "Kimi-K2.5": 61 * (512 + 64) * 2,
    "Llama-2-13b-hf": 40 * 2 * 40 * 128 * 2,
    "Llama-2-7b-hf": 32 * 2 * 32 * 128 * 2,
    "Llama-3.1-70B-Instruct-FP8": 80 * 2 * 8 * 128 * 2,
    "Llama-3.1-8B-Instruct": 32 * 2 * 8 * 128 * 2,
    "Llama-3.2-3B": 28 * 2 * 8 * 128 * 2,
    "Llama-3.3-70B-Instruct": 80 * 2 * 8 * 128 * 2,
    "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": 12 * 2 * 8 * 128 * 2,
    "Meta-Llama-3-70B": 80 * 2 * 8 * 128 * 2,
    "Meta-Llama-3-8B-Instruct": 32 * 2 * 8 * 128 * 2,
    "Meta-Llama-3.1-70B": 80 * 2 * 8 * 128 * 2,
    "Meta-Llama-3.1-8B": 32 * 2 * 8 * 128 * 2,
    "MiMo-7B-Base": 36 * 2 * 8 * 128 * 2,
    "MiniMax-M2.5": 62 * 2 * 8 * 128 * 2,
    "Mistral-7B-Instruct-v0.2-dequantized": 32 * 2 * 8 * 128 * 2,
    "Mistral-7B-Instruct-v0.3": 32 * 2 * 8 * 128 * 2,
    "Mistral-Nemo-Instruct-2407": 40 * 2 * 8 * 128 * 2,
    "Mixtral-8x7B-v0.1": 32 * 2 * 8 * 128 * 2,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 6 * 2 * 2 * 128 * 2,
    "Nemotron-H-56B-Base-8K": 10 * 2 * 8 * 128 * 2,
    "Phi-3-mini-128k-instruct": 0,  # a window of 262,144 that its 131,072 positions never fill
    "Phi-3-small": 32 * 2 * 8 * 128 * 2,
    "Phi-3.5-MoE-instruct": 0,  # a window as long as its longest sequence
    "Qwen-7B": 32 * 2 * 32 * 128 * 2,
    "Qwen2-7B": 28 * 2 * 4 * 128 * 2,
    "Qwen2-VL-2B-Instruct": 28 * 2 * 2 * 128 * 2,
    "Qwen2-VL-7B-Instruct": 28 * 2 * 4 * 128 * 2,
    "Qwen2.5-1.5B": 28 * 2 * 2 * 128 * 2,
    "Qwen2.5-14B": 48 * 2 * 8 * 128 * 2,
    "Qwen2.5-3B": 36 * 2 * 2 * 128 * 2,
    "Qwen2.5-72B": 80 * 2 * 8 * 128 * 2,
    "Qwen2.5-7B": 28 * 2 * 4 * 128 * 2,
    "Qwen2.5-7B-Instruct": 28 * 2 * 4 * 128 * 2,
    "Qwen2.5-VL-7B-Instruct": 28 * 2 * 4 * 128 * 2,
    "Qwen3-0.6B": 28 * 2 * 8 * 128 * 2,
    "Qwen3-1.7B": 28 * 2 * 8 * 128 * 2,
    "Qwen3-30B-A3B": 48 * 2 * 4 * 128 * 2,
    "Qwen3-32B": 64 * 2 * 8 * 128 * 2,
    "Qwen3-8B": 36 * 2 * 8 * 128 * 2,
    "Qwen3-Next-80B-A3B-Instruct": 12 * 2 * 2 * 256 * 2,
    "Qwen3-VL-235B-A22B-Instruct": 94 * 2 * 4 * 128 * 2,
    "Qwen3-VL-2B-Instruct": 28 * 2 * 8 * 128 * 2,
    "Qwen3-VL-32B-Instruct": 64 * 2 * 8 * 128 * 2,
    "Qwen3-VL-8B-Instruct": 36 * 2 * 8 * 128 * 2,
    "Qwen3.5-122B-A10B": 12 * 2 * 2 * 256 * 2,
    "Qwen3.5-27B": 16 * 2 * 4 * 256 * 2,
    "Qwen3.5-35B-A3B": 10 * 2 * 2 * 256 * 2,
    "SHRUNK-baichuan": 2 * 16 * 128 * 2,
    "SHRUNK-bloom": 2 * 16 * 128 * 2,
    "SHRUNK-chatglm": 2 * 2 * 128 * 2,
    "SHRUNK-deepseekv2": 2 * (512 + 64) * 2,
    "SHRUNK-falcon": 2 * 8 * 128 * 2,
    "SHRUNK-gptj": 2 * 16 * 256 * 2,
    "SHRUNK-gptneox": 2 * 16 * 128 * 2,
    "SHRUNK-opt": 2 * 16 * 128 * 2,
    "SHRUNK-phi4": 0,  # a window of 262,144 on 131,072 positions
    "SHRUNK-qwen": 2 * 16 * 128 * 2,
    "SHRUNK-stablelm": 2 * 16 * 128 * 2,
    "SmolLM-1.7B": 24 * 2 * 32 * 64 * 2,
    "Yi-34B": 60 * 2 * 8 * 128 * 2,
    "c4ai-command-r-v01": 40 * 2 * 64 * 128 * 2,
    "chatglm3-6b": 28 * 2 * 2 * 128 * 2,
    "falcon-40b": 60 * 2 * 8 * 64 * 2,
    "gemma-2-9b": 21 * 2 * 8 * 256 * 2,
    "gemma-3-27b-it": 10 * 2 * 16 * 128 * 2,
    "gemma-3-27b-it-with-layer_types": 10 * 2 * 16 * 128 * 2,
    "gemma-4-26B-A4B": 5 * 2 * 2 * 512 * 2,
    "gemma-7b": 28 * 2 * 16 * 256 * 2,
    "gpt-j-6B-as-gpt_neo": 28 * 2 * 16 * 256 * 2,
    "gpt-oss-20b": 12 * 2 * 8 * 64 * 2,
    "gpt2-large": 36 * 2 * 20 * 64 * 2,
    "granite-3.3-8b-instruct": 40 * 2 * 8 * 128 * 2,
    "internlm2-7b": 32 * 2 * 8 * 128 * 2,
    "llava-v1.5-7b": 32 * 2 * 32 * 128 * 2,
    "mpt-7b": 32 * 2 * 32 * 128 * 2,
    "opt-125m": 12 * 2 * 12 * 64 * 2,
    "phi-1": 24 * 2 * 32 * 64 * 2,
    "stablelm-3b-4e1t": 32 * 2 * 32 * 80 * 2,
}

# What does not grow: full windows and chunks, and states (convolution inputs in bf16; the state in its own dtype).
FIXED_BYTES = {
    "DeepSeek-V4-Flash": 43 * 128 * 512 * 2,
    "EXAONE-4.0-32B": 48 * 4096 * 2 * 8 * 128 * 2,
    "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": 36 * 8192 * 2 * 8 * 128 * 2,
    # 23 Mamba-2 layers: 3 inputs of 4,096 + 2 × 8 × 128 channels, and 64 heads of 64 × 128 in fp32
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 23 * (3 * (4096 + 2048) * 2 + 64 * 64 * 128 * 4),
    # 54 Mamba-2 layers, the state in bf16 since the config names no other dtype
    "Nemotron-H-56B-Base-8K": 54 * (3 * (16384 + 2 * 8 * 256) * 2 + 256 * 64 * 256 * 2),
    "Phi-3-mini-128k-instruct": 262144 * 32 * 2 * 32 * 96 * 2,
    "Phi-3.5-MoE-instruct": 131072 * 32 * 2 * 8 * 128 * 2,
    # 36 gated delta layers: 3 inputs of 2 × 16 × 128 + 32 × 128 channels, and 32 heads of 128 × 128
    "Qwen3-Next-80B-A3B-Instruct": 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 2),
    "Qwen3.5-122B-A10B": 36 * (3 * 12288 * 2 + 64 * 128 * 128 * 4),
    "Qwen3.5-27B": 48 * (3 * 10240 * 2 + 48 * 128 * 128 * 4),
    "Qwen3.5-35B-A3B": 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4),
    "SHRUNK-phi4": 262144 * 2 * 8 * 128 * 2,
    "gemma-2-9b": 21 * 4096 * 2 * 8 * 256 * 2,
    "gemma-3-27b-it": 52 * 1024 * 2 * 16 * 128 * 2,
    "gemma-3-27b-it-with-layer_types": 52 * 1024 * 2 * 16 * 128 * 2,
    "gemma-4-26B-A4B": 25 * 1024 * 2 * 8 * 256 * 2,
    "gpt-oss-20b": 12 * 128 * 2 * 8 * 64 * 2,
}

# Weights per token from the models' own announcements, in billions of parameters that a token activates, embedding
# and head included. Our count leaves out norms and biases (and Qwen-VL's vision tower), hence the tolerance.
ACTIVE_BILLIONS = {
    "DeepSeek-V3": 37,  # model card: 671B, 37B activated
    "Kimi-K2-Instruct": 32,
    "Mixtral-8x7B-v0.1": 12.9,  # arXiv 2401.04088: 13B active
    "GLM-4.5": 32,
    "MiniMax-M2.5": 10,
    "Qwen3-30B-A3B": 3.3,
    "Qwen3-VL-235B-A22B-Instruct": 22,
    "Qwen3.5-122B-A10B": 10,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 3.5,  # technical report: 3.2B, 3.6B with embeddings
    "DeepSeek-V4-Flash": 13,
    "gpt-oss-20b": 3.6,
    "Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": 17,
    "Meta-Llama-3.1-8B": 8.03,
    "Meta-Llama-3.1-70B": 70.6,
    "Nemotron-H-56B-Base-8K": 56,
    "Qwen3-8B": 8.19,
    "gemma-2-9b": 9.24,
    "gpt2-large": 0.774,
    "opt-125m": 0.125,
    "Yi-34B": 34.4,
    "falcon-40b": 41.3,
    "c4ai-command-r-v01": 35,
}
LOOK_UP_LEFT_OUT = ("gpt-oss-20b", "MiniMax-M2.5")  # their cards count active weights without the embedding


def _arch(name: str) -> ModelArch:
    return ModelArch.from_hf(CONFIGS / f"{name}.json")


def test_every_published_config_is_covered():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(BYTES_PER_TOKEN)


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token_and_fixed_bytes_of_published_configs(name):
    arch = _arch(name)
    far, step = 4 * 2**20, 1024  # past every window; a multiple of every compression ratio
    grown = kv_bytes(arch, far + step, kv_dtype="bf16") - kv_bytes(arch, far, kv_dtype="bf16")
    assert grown == step * BYTES_PER_TOKEN[name]
    assert kv_bytes(arch, far, kv_dtype="bf16") - far * BYTES_PER_TOKEN[name] == FIXED_BYTES.get(name, 0)


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_active_weights_agree_with_the_model_cards(name):
    arch = _arch(name)
    # Every weight MAC uses one weight; the embedding is looked up, so it adds to them where it is not the head.
    look_up = not arch.tied_embeddings and name not in LOOK_UP_LEFT_OUT
    weights = arch.linear_macs + arch.head_macs + (arch.hidden * arch.vocab if look_up else 0)
    assert weights / 1e9 == pytest.approx(ACTIVE_BILLIONS[name], rel=0.075)


@pytest.mark.parametrize("name", sorted(BYTES_PER_TOKEN))
def test_a_decoder_is_offered_exactly_for_the_family_that_kvlab_runs(name):
    config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    runs = config["model_type"] in ("llama", "mistral", "qwen2", "qwen3")
    assert (_arch(name).decoder is not None) == runs


def test_a_decoder_matches_its_preset():
    assert _arch("Meta-Llama-3.1-8B").decoder == ModelArch.preset("llama-3.1-8b").decoder
    assert _arch("Qwen3-8B").decoder == ModelArch.preset("qwen3-8b").decoder
    assert "smollm2-135m" in preset_names()


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}


def _read(**fields) -> ModelArch:
    config = {**LLAMA, **fields}
    return ModelArch.from_hf({key: value for key, value in config.items() if value is not ...})


def _kinds(arch: ModelArch) -> str:
    return "".join({"sliding": "L", "full": "G", "chunked": "C", "state": "S"}.get(x.kind, x.kind) for x in arch.layers)


class TestRulesThatLiveInCode:
    def test_gemma2_windows_every_other_layer(self):
        assert _kinds(_read(model_type="gemma2", num_hidden_layers=5)) == "LGLGL"

    @pytest.mark.parametrize(("fields", "kinds"), [({}, "LLLLLGLL"), ({"sliding_window_pattern": 3}, "LLGLLGLL")])
    def test_gemma3_has_a_global_layer_every_sixth_unless_it_says_otherwise(self, fields, kinds):
        assert _kinds(_read(model_type="gemma3_text", num_hidden_layers=8, **fields)) == kinds

    def test_gemma3_leaves_its_head_sizes_to_its_class(self):
        nested = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
        arch = ModelArch.from_hf({"model_type": "gemma3", "text_config": {**nested, "sliding_window": 1024}})
        assert kv_bytes(arch, 1) == 34 * 2 * 4 * 256 * 2
        assert arch.decoder is None

    @pytest.mark.parametrize(
        ("fields", "kinds"),
        [
            ({"use_sliding_window": False, "max_window_layers": 2}, "GGGG"),
            ({"use_sliding_window": True, "max_window_layers": 2}, "GGLL"),
            ({"use_sliding_window": True, "max_window_layers": 4}, "GGGG"),
            ({}, "GGGG"),
        ],
    )
    def test_qwen2_windows_layers_from_max_window_layers_on(self, fields, kinds):
        arch = _read(model_type="qwen2", sliding_window=16, **fields)
        assert _kinds(arch) == kinds
        assert (arch.decoder is None) == ("L" in kinds)

    @pytest.mark.parametrize(("window", "kinds"), [(16, "LLLL"), (None, "GGGG"), (..., "LLLL")])
    def test_mistral_windows_every_layer_unless_null(self, window, kinds):
        assert _kinds(_read(model_type="mistral", sliding_window=window)) == kinds  # absent: the class default, 4,096

    def test_llama4_chunks_all_but_every_fourth_layer(self):
        experts = {"num_local_experts": 4, "num_experts_per_tok": 1}
        arch = _read(model_type="llama4_text", attention_chunk_size=16, no_rope_layers=[], **experts)
        assert _kinds(arch) == "CCCG"

    @pytest.mark.parametrize(
        ("fields", "kinds"),
        [
            ({"sliding_window_pattern": "LLG", "model_type": "exaone4"}, "LLGL"),
            ({"model_type": "cohere2"}, "LLLG"),
            ({"model_type": "olmo3"}, "LLLG"),
            ({"model_type": "gpt_oss"}, "LGLG"),
            ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "LGLG"),
            ({"hybrid_layer_pattern": [0, 1, 1, 0], "model_type": "mimo_v2"}, "GLLG"),
        ],
    )
    def test_window_patterns(self, fields, kinds):
        assert _kinds(_read(sliding_window=16, **fields)) == kinds

    def test_jamba_places_attention_by_period_and_offset(self):
        arch = _read(model_type="jamba", attn_layer_period=4, attn_layer_offset=1, num_experts=..., mamba_d_state=16)
        assert _kinds(arch) == "SGSS"

    def test_minimax_01_lists_its_attention_types(self):
        arch = _read(model_type="minimax_text_01", attn_type_list=[0, 0, 1, 0])
        assert _kinds(arch) == "SSGS"
        assert kv_bytes_by_component(arch, 10)["state"] == 3 * 4 * 16 * 16 * 2

    def test_kimi_linear_counts_layers_from_one(self):
        latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        linear = {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 16, "num_heads": 4}
        arch = _read(model_type="kimi_linear", linear_attn_config=linear, head_dim=72, **latent)
        assert _kinds(arch) == "SSSG"
        assert kv_bytes_by_component(arch, 10)["latent"] == 10 * 32 * 2

    def test_shared_caches_are_not_counted_twice(self):
        arch = _read(use_cla=True, cla_share_factor=2)
        assert kv_bytes(arch, 10) == kv_bytes(_read(), 10) // 2
        assert len(arch.pairs) == 1  # every layer still attends
        assert arch.pairs == _read().pairs

    def test_no_op_blocks_and_per_layer_groups_of_searched_models(self):
        blocks = [
            {"attention": {"no_op": False, "n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"no_op": True}},
            {"attention": {"replace_with_linear": True}, "ffn": {"intermediate_size": 96}},
            {"attention": {"no_op": False, "n_heads_in_group": 2}, "ffn": {"replace_with_linear": True}},
        ]
        arch = _read(model_type="nemotron-nas", block_configs=blocks, num_key_value_heads=None, intermediate_size=None)
        assert [layer.kind for layer in arch.layers] == ["full", "none", "none", "full"]
        assert kv_bytes(arch, 10) == 10 * 2 * (1 + 2) * 16 * 2
        assert [layer.ffn_macs for layer in arch.layers] == [3 * 64 * 256, 0, 3 * 64 * 96, 64 * 64]

    def test_cross_attention_layers_hold_no_text_tokens(self):
        arch = _read(model_type="mllama_text_model", cross_attention_layers=[1])
        assert kv_bytes(arch, 10) == kv_bytes(_read(), 10) * 3 // 4
        assert any("cross-attention" in note for note in arch.notes)


class TestModelsThatKvlabRuns:
    def test_bias_follows_the_code_of_each_type(self):
        for model_type, bias, output in (("llama", True, True), ("qwen2", True, False), ("mistral", False, False)):
            window = {"sliding_window": None, "use_sliding_window": False}
            decoder = _read(model_type=model_type, attention_bias=True, **window).decoder
            assert (decoder.attention_bias, decoder.output_bias) == (bias, output)
        assert _read(
            model_type="qwen2", attention_bias=False
        ).decoder.attention_bias  # its code does not read the field

    @pytest.mark.parametrize(
        "fields",
        [
            {"hidden_act": "gelu"},
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            {"partial_rotary_factor": 0.5},
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
            {"vision_config": {"hidden_size": 8}},
            {"model_type": "gemma"},
        ],
    )
    def test_what_kvlab_cannot_run_faithfully_is_counted_only(self, fields):
        arch = _read(**fields)
        assert arch.decoder is None
        assert kv_bytes(arch, 10) > 0

    def test_rope_is_read_from_both_spellings(self):
        old = _read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}).decoder
        new = _read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}).decoder
        assert (
            (old.rope_theta, old.rope_scaling)
            == (new.rope_theta, new.rope_scaling)
            == (5e5, (("rope_type", "linear"), ("factor", 2.0)))
        )


class TestDtypes:
    @pytest.mark.parametrize(
        ("scheme", "dtype"),
        [
            ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
            ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
            ({"kv_cache_quant_algo": "FP8", "quant_algo": "NVFP4"}, "fp8"),
            ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
            ({"kv_cache_scheme": None}, None),
            ({"quant_method": "fp8"}, None),  # weights only
        ],
    )
    def test_a_scheme_in_the_config_sets_the_kv_dtype(self, scheme, dtype):
        assert _read(quantization_config=scheme).kv_dtype == dtype

    def test_an_unknown_scheme_is_refused(self):
        with pytest.raises(ValueError, match=r"quantization_config\.kv_cache_scheme.*'num_bits': 3"):
            _read(quantization_config={"kv_cache_scheme": {"num_bits": 3, "type": "float"}})

    def test_a_state_keeps_the_dtype_the_config_names(self):
        config = json.loads((CONFIGS / "Qwen3-Next-80B-A3B-Instruct.json").read_text(encoding="utf-8"))
        state = kv_bytes_by_component(ModelArch.from_hf(config), 1)["state"]
        wider = ModelArch.from_hf({**config, "mamba_ssm_dtype": "float32"})
        assert kv_bytes_by_component(wider, 1, kv_dtype="fp8")["state"] == 2 * state


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_hidden_layers": ...}, "no 'num_hidden_layers'.*add it"),
            ({"hidden_size": ...}, "no 'hidden_size'"),
            ({"vocab_size": ...}, "no 'vocab_size'"),
            ({"intermediate_size": ...}, "no 'intermediate_size'"),
            ({"num_attention_heads": ...}, "no 'num_attention_heads'"),
            ({"model_type": ...}, "'model_type' is None"),
            ({"hidden_size": 0}, "'hidden_size' is 0"),
            ({"hidden_size": -64}, "'hidden_size' is -64"),
            ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
            ({"num_hidden_layers": "4"}, "'num_hidden_layers' is '4'"),
            ({"num_hidden_layers": 4.5}, "'num_hidden_layers' is 4.5"),
            ({"hidden_size": float("inf")}, "'hidden_size' is inf"),
            ({"unused": {"deep": [float("nan")]}}, r"'unused\.deep' is nan"),
            ({"num_key_value_heads": 3}, "4 is not a multiple of the number of KV heads 3"),
            ({"hidden_size": 65}, "65 is not a multiple of num_attention_heads 4; add head_dim"),
            ({"n_layer": 5}, "'num_hidden_layers' = 4 and 'n_layer' = 5 contradict"),
            ({"layer_types": ["full_attention"]}, "'layer_types' has 1 entries but num_hidden_layers is 4"),
            ({"layer_types": ["full_attention", "x", "x", "x"]}, "names the layer kind 'x'"),
            ({"layer_types": ["sliding_attention"] * 4}, "sliding_window is None.*add sliding_window"),
            ({"sliding_window": -5}, "'sliding_window' is -5"),
            ({"layer_types": ["linear_attention"] * 4}, "recurrent layers of a kind kvlab cannot size"),
            ({"mamba_d_state": 16}, "no pattern; add layer_types"),
            ({"index_topk": 8}, "index_topk 8 but no kv_lora_rank"),
            ({"kv_lora_rank": 32}, "no 'qk_nope_head_dim'"),
            ({"compress_ratios": [0, 3, 0, 0]}, "'compress_ratios' holds 3"),
            ({"num_local_experts": 8}, "no 'num_experts_per_tok'"),
            ({"num_local_experts": 2, "num_experts_per_tok": 4}, "picks 4 experts per token out of 2"),
            ({"num_kv_shared_layers": 4}, "'num_kv_shared_layers' is 4 but there are 4 layers"),
            ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'"),
            ({"rope_theta": -1.0}, "'rope_theta' is -1.0"),
            ({"torch_dtype": "float7", "model_type": "mamba", "state_size": 4}, "'torch_dtype' is 'float7'"),
            ({"is_encoder_decoder": True}, "encoder-only or encoder-decoder"),
            ({"model_type": "bert"}, "'bert' is encoder-only or encoder-decoder"),
            ({"model_type": "t5"}, "'t5' is encoder-only or encoder-decoder"),
            ({"architectures": ["NewBertForMaskedLM"]}, "'NewBertForMaskedLM', an encoder"),
            ({"model_type": "rwkv"}, "'rwkv'.*does not know the size of its recurrent state"),
            ({"text_config": "text.json"}, "'text_config' is 'text.json'; expected an object"),
        ],
    )
    def test_what_it_cannot_know_it_refuses_by_field_and_value(self, fields, message):
        with pytest.raises(ValueError, match=message) as error:
            _read(**fields)
        assert "\n" not in str(error.value)

    def test_only_the_time_step_clamp_may_be_infinite(self):
        assert _arch("Nemotron-H-56B-Base-8K").hidden == 8192  # "time_step_limit": [0.0, Infinity]

    def test_the_config_is_not_changed_by_reading(self):
        config = json.loads((CONFIGS / "Kimi-K2.5.json").read_text(encoding="utf-8"))
        before = copy.deepcopy(config)
        ModelArch.from_hf(config)
        assert config == before


class TestFiles:
    def test_a_folder_or_a_file_reads_the_same(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
        assert ModelArch.from_hf(tmp_path) == ModelArch.from_hf(str(tmp_path / "config.json"))
        assert ModelArch.from_hf(tmp_path).name == tmp_path.name

    @pytest.mark.parametrize(
        ("text", "message"), [("{", "is not valid JSON"), ("[1]", "holds a list"), ('{"a": NaN}', "'a' is nan")]
    )
    def test_a_broken_file_is_refused(self, tmp_path, text, message):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            ModelArch.from_hf(tmp_path)

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no model config at .*config\.json"):
            ModelArch.from_hf(tmp_path)
        with pytest.raises(
            FileNotFoundError, match=r"; kvlab.hub.hub_folder\('org/name', \['config.json'\]\) asks the"
        ):
            ModelArch.from_hf("org/name")

    def test_draft_layers_are_stated_and_not_counted(self):
        arch = _arch("DeepSeek-V3")
        assert len(arch.layers) == 61
        assert any("num_nextn_predict_layers = 1" in note for note in arch.notes)

    def test_a_folder_that_is_no_hub_id_is_not_sent_to_the_hub(self, tmp_path):
        for path in (tmp_path, tmp_path / "deeper", "no/such/folder"):
            with pytest.raises(FileNotFoundError, match=r"expected a config\.json or a folder that holds one$"):
                ModelArch.from_hf(path)

    def test_the_longest_sequence_that_a_published_config_leaves_out_is_its_class_s(self):
        """transformers 5.24: Gemma3TextConfig says 131,072 and FalconConfig 2,048. ALiBi models do state none."""
        assert _arch("gemma-3-27b-it").max_positions == _arch("gemma-3-27b-it-with-layer_types").max_positions == 131072
        assert _arch("falcon-40b").max_positions == 2048
        stated = {"model_type": "falcon", "n_positions": 512, "hidden_size": 64, "num_attention_heads": 4}
        assert ModelArch.from_hf({**stated, "num_hidden_layers": 2, "vocab_size": 99}).max_positions == 512
        assert _arch("SHRUNK-baichuan").max_positions == 2**63 - 1

    def test_a_type_that_nobody_checked_says_so(self):
        fields = json.loads((CONFIGS / "Meta-Llama-3-8B-Instruct.json").read_text(encoding="utf-8"))
        (note,) = ModelArch.from_hf({**fields, "model_type": "llama5"}).notes
        assert note == "model_type 'llama5' is not one that kvlab was checked against: read by its fields alone"

    @pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
    def test_a_published_config_is_of_a_type_that_was_checked(self, path):
        assert not any("checked against" in note for note in ModelArch.from_hf(path).notes)
