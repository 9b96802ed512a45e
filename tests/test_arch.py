"""`ModelArch` keeps its promises: frozen, hashable, cheap to evaluate, and the same from a preset and a config."""

from __future__ import annotations

import dataclasses

import pytest

from kvlab.arch import ModelArch, preset_names
from kvlab.arithmetic import attention_flops, kv_bytes, linear_flops
from kvlab.layers import CacheComponent, Decoder, Layer, Pairs


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_a_decoder_that_counts_and_runs(name):
    arch = ModelArch.preset(name)
    assert arch.name == name
    assert arch.decoder is not None
    assert arch.layers == (arch.decoder.layer,) * arch.decoder.layers
    assert arch.head_macs == arch.hidden * arch.vocab


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown model preset 'gpt-9'; known presets: tiny"):
        ModelArch.preset("gpt-9")


def test_an_arch_is_frozen_and_hashable():
    arch = ModelArch.preset("tiny")
    with pytest.raises(dataclasses.FrozenInstanceError):
        arch.hidden = 1
    assert len({arch, ModelArch.preset("tiny")}) == 1


def test_a_preset_equals_what_its_config_says():
    # HuggingFaceTB/SmolLM2-135M-Instruct, config.json
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    read, preset = ModelArch.from_hf(config), ModelArch.preset("smollm2-135m")
    assert dataclasses.replace(read, name=preset.name) == preset


def test_layers_of_one_kind_are_evaluated_once():
    full = Layer("full", (CacheComponent("k", 8, heads=2),), 10, 5, (Pairs(4),))
    window = Layer("sliding", (CacheComponent("k", 8, heads=2, cap_tokens=4),), 10, 5, (Pairs(4, limit=4),))
    arch = ModelArch("m", "m", 8, 16, 100, (full, window, full), tied_embeddings=True)
    assert arch.layer_groups == ((full, 2), (window, 1))
    assert arch.pairs == (Pairs(8), Pairs(4, limit=4))
    assert linear_flops(arch, 3) == 2 * 3 * 3 * 15
    assert attention_flops(arch, 0, 6) == 2 * (8 * 21 + 4 * (1 + 2 + 3 + 4 + 4 + 4))
    assert kv_bytes(arch, 6) == 2 * 8 * (6 + 6 + 4)


def test_what_absorbs_latents_is_the_model_itself_where_there_are_none():
    arch = ModelArch.preset("tiny")
    assert arch.absorbed is arch


def test_the_decoder_s_layer_is_grouped_query_attention_and_a_gated_ffn():
    layer = Decoder(layers=1, hidden=10, heads=4, kv_heads=2, head_dim=3, ffn=7).layer
    assert layer.projection_macs == 10 * (12 + 6 + 6) + 12 * 10
    assert layer.ffn_macs == 3 * 10 * 7
    assert layer.pairs == (Pairs(4 * (3 + 3)),)
    assert [(c.name, c.entry_elements, c.heads) for c in layer.cache] == [("k", 6, 2), ("v", 6, 2)]
