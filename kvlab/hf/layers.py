"""Which mixer sits in which layer, and each layer's counts put together from its mixer and its FFN.

Knows every way a config states a per-layer pattern. Does not know what a mixer costs (`hf.mixer`) nor files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlab.hf.ffn import ffn_macs
from kvlab.hf.fields import Fields
from kvlab.hf.mixer import attention, compressed, short_conv, state
from kvlab.hf.rules import LAYER_KINDS, PATTERNS
from kvlab.layers import Layer

__all__ = ["layer_kinds", "read_layers"]

_ATTENTION = ("full", "sliding", "chunked")


def read_layers(f: Fields) -> tuple[Layer, ...]:
    """Every layer of the model, in order. Raises ValueError for a pattern or a mixer that kvlab cannot read."""
    if f.raw("block_configs") is not None:
        return _searched_layers(f)
    kinds = layer_kinds(f)
    if f.model_type == "longcat_flash":
        # Each LongCat layer is two attention blocks with a dense FFN each, and one MoE beside them.
        return tuple(layer for i in range(len(kinds)) for layer in _longcat(f, i, len(kinds)))
    reuse = _reused_caches(f, kinds)
    ratios = _compress_ratios(f, kinds)
    # Where a pattern has FFN-only layers (Nemotron-H), or nothing but recurrences (Mamba), mixers stand alone.
    alone = any(kind in ("dense", "moe") for kind in kinds) or (
        set(kinds) == {"state"} and (f.raw("intermediate_size") is None or f.model_type in ("mamba", "falcon_mamba"))
    )
    indexers = _indexers(f, len(kinds))
    layers = []
    for i, kind in enumerate(kinds):
        layer = _mixer(_of_layer(f, i, kind), kind, i, i in reuse, ratios.get(i, 0), indexers[i])
        has_ffn = kind in ("dense", "moe") or not (alone or kind in ("none", "cross"))
        if f.model_type in ("zamba", "zamba2"):
            has_ffn = kind == "hybrid"
        if has_ffn:
            layer = replace(layer, ffn_macs=ffn_macs(f, i, len(kinds), kind if kind in ("dense", "moe") else None))
        extra = _extra_macs(f, kind)
        layers.append(replace(layer, ffn_macs=layer.ffn_macs + extra) if extra else layer)
    return tuple(_with_absorbed_ffn(layer) for layer in layers)


def _mixer(f: Fields, kind: str, i: int, reused: bool, ratio: int, has_indexer: bool) -> Layer:
    if ratio or (kind == "sliding" and _is_compressed(f)):
        return compressed(f, kind, ratio)
    if kind in _ATTENTION:
        return attention(f, kind, i, shares_kv=reused, has_indexer=has_indexer)
    if kind == "state":
        return state(f)
    if kind == "conv":
        return short_conv(f)
    if kind == "hybrid":
        first, second = attention(f, "full", i), state(f)
        return Layer(
            "hybrid",
            first.cache + second.cache,
            first.projection_macs + second.projection_macs,
            pairs=first.pairs,
            scan_macs=second.scan_macs,
        )
    return Layer(kind)  # FFN-only, no-op, and cross-attention layers cache no text tokens


def _is_compressed(f: Fields) -> bool:
    return any(f.raw(field) is not None for field in ("compress_ratios", "compress_rates"))


def layer_kinds(f: Fields) -> list[str]:
    """One kind per layer, from whichever field states the pattern; uniform where no field does."""
    n = _layer_count(f)
    listed = _listed_kinds(f, n)
    if listed is None:
        listed = _periodic_kinds(f, n) or _windowed_kinds(f, n)
    if "sliding" in listed and (f.raw("sliding_window") in (None, 0) or f.raw("use_sliding_window") is False):
        raise ValueError(
            "the layer pattern has sliding layers, but sliding_window is "
            f"{f.raw('sliding_window')!r} and use_sliding_window {f.raw('use_sliding_window')!r}; add sliding_window"
        )
    for i in f.sequence("cross_attention_layers") or ():
        listed[int(i)] = "cross"  # their keys come from the image encoder, not from text tokens
    return listed


def _layer_count(f: Fields) -> int:
    blocks = f.get("layers_block_type")
    if f.raw("num_hidden_layers") is None and isinstance(blocks, list):
        return len(blocks)  # Nemotron-H in transformers 5: the list is the count
    return f.size("num_hidden_layers")


def _kind(word: Any, field: str) -> str:
    if word not in LAYER_KINDS:
        known = ", ".join(sorted(str(key) for key in LAYER_KINDS if key))
        raise ValueError(f"config field {field!r} names the layer kind {word!r}; kvlab knows {known}")
    return LAYER_KINDS[word]


def _listed_kinds(f: Fields, n: int) -> list[str] | None:
    """Patterns that name every layer, or all layers of one kind."""
    ratios = f.sequence("compress_ratios", n)
    if ratios is not None:  # DeepSeek-V4 (configuration_deepseek_v4.py, _COMPRESS_RATIO_TO_LAYER_TYPE)
        names = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
        for ratio in ratios:
            if ratio not in names:
                raise ValueError(f"config field 'compress_ratios' holds {ratio!r}; kvlab knows 0, 4 and 128")
        return [names[ratio] for ratio in ratios]
    for field in ("layer_types", "hybrid_override_pattern", "attention_layers"):
        words = f.sequence(field, n)
        if words is not None:
            return [_kind(word, field) for word in words]
    nested = f.sequence("attention_types")  # GPT-Neo: [[["global", "local"], 12]]
    if nested is not None:
        spread = [word for words, repeat in nested for _ in range(repeat) for word in words]
        if len(spread) != n:
            raise ValueError(f"config field 'attention_types' describes {len(spread)} layers but there are {n}")
        return [_kind(word, "attention_types") for word in spread]
    for field, on, off in (("attn_type_list", "full", "state"), ("hybrid_layer_pattern", "sliding", "full")):
        bits = f.sequence(field, n)  # MiniMax-01: 1 is full attention; MiMo-V2: 1 is a sliding window
        if bits is not None:
            return [on if bit else off for bit in bits]
    linear = f.section("linear_attn_config")
    if linear.get("full_attn_layers") is not None:  # Kimi-Linear counts layers from 1
        full = set(linear["full_attn_layers"])
        return ["full" if i + 1 in full else "state" for i in range(n)]
    for field, other in (("full_attn_idxs", "conv"), ("attn_layer_indices", "state"), ("hybrid_layer_ids", "state")):
        indices = f.sequence(field)
        if indices is not None:
            kind = "hybrid" if field == "hybrid_layer_ids" else "full"
            return [kind if i in indices else other for i in range(n)]
    blocks = f.sequence("block_types")  # RecurrentGemma repeats it; its attention is always local
    if blocks is not None:
        return ["sliding" if blocks[i % len(blocks)] == "attention" else "state" for i in range(n)]
    return None


def _periodic_kinds(f: Fields, n: int) -> list[str] | None:
    """Patterns given as a period, and models that have no softmax attention or both mixers everywhere."""
    if f.raw("attn_layer_period") is not None:  # Jamba
        period, offset = f.size("attn_layer_period"), f.count("attn_layer_offset")
        return ["full" if i % period == offset else "state" for i in range(n)]
    linear = f.raw("linear_num_value_heads") is not None
    if linear or f.raw("layer_group_size") is not None:  # Qwen3-Next (4 by default), Ring-linear
        period = f.size("full_attention_interval", 4) if linear else f.size("layer_group_size")
        return ["state" if (i + 1) % period else "full" for i in range(n)]
    if f.raw("attention_chunk_size") is not None:  # Llama 4: layers without RoPE attend to everything
        rope = f.sequence("no_rope_layers", n if f.raw("no_rope_layers") else None)
        interval = f.size("no_rope_layer_interval", 4)
        rope = rope or [int((i + 1) % interval != 0) for i in range(n)]
        return ["chunked" if uses else "full" for uses in rope]
    if f.raw("mamba_state") is not None:
        if f.raw("num_attention_heads") is None or f.model_type in ("mamba", "mamba2", "falcon_mamba"):
            return ["state"] * n
        if f.model_type == "falcon_h1":
            return ["hybrid"] * n
        if f.model_type in ("bamba", "granitemoehybrid"):
            return ["state"] * n
        raise ValueError(
            "config has both attention heads and Mamba sizes but no pattern; add layer_types with one word per layer"
        )
    return None


def _windowed_kinds(f: Fields, n: int) -> list[str]:
    """Full or sliding attention, where the config has no list: the rules of each model's code."""
    window = f.raw("sliding_window")
    if window in (None, 0, -1, False) or f.raw("use_sliding_window") is False:
        return ["full"] * n
    f.size("sliding_window")
    for field in ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"):
        pattern = f.raw(field)
        if isinstance(pattern, str):  # EXAONE 4: "LLLG", its last layer always global
            return [_kind(pattern[i % len(pattern)], field) for i in range(n)]
        if pattern not in (None, 0):
            return _every(n, f.size(field), "last")
    if f.model_type in PATTERNS:
        return _every(n, *PATTERNS[f.model_type])
    if f.raw("use_sliding_window") and f.raw("no_rope_layers"):  # SmolLM3: windows where there is no RoPE
        return ["full" if uses else "sliding" for uses in f.sequence("no_rope_layers", n) or ()]
    first = f.raw("max_window_layers")
    if f.raw("use_sliding_window") and f.model_type == "qwen2_moe":
        return ["sliding" if (i + 1) % 2 and i < int(first) else "full" for i in range(n)]
    if f.raw("use_sliding_window") and first is not None and f.model_type != "qwen3_moe":
        return ["sliding" if i >= first else "full" for i in range(n)]  # Qwen2 and Qwen3
    return ["sliding"] * n  # Mistral, Mixtral, Phi-3, StarCoder2


def _every(n: int, period: int, place: str) -> list[str]:
    full = 0 if place == "first" else period - 1
    return ["full" if i % period == full else "sliding" for i in range(n)]


def _of_layer(f: Fields, i: int, kind: str) -> Fields:
    """The config as layer `i` sees it: per-layer overrides and the other head sizes of sliding or global layers."""
    overrides: dict[str, Any] = {}
    if kind == "sliding":
        names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        overrides |= {name: f[f"swa_{name}"] for name in names if f.get(f"swa_{name}") is not None}  # MiMo-V2
        for name, value in f.section("attention_other_setting").items():  # Step-3.5
            overrides[{"num_attention_groups": "num_key_value_heads"}.get(name, name)] = value
        if f.model_type == "mimo_v2_flash":
            overrides.setdefault("num_key_value_heads", 2 * f.size("num_key_value_heads"))
            if f.raw("sliding_window_size") is not None:  # keys before the query, which its window adds
                overrides["sliding_window"] = f.size("sliding_window_size") + 1
    if kind == "full" and f.model_type.startswith("gemma4"):
        overrides["head_dim"] = f.size("global_head_dim", 512)
        if f.flag("attention_k_eq_v") and f.raw("num_global_key_value_heads") is not None:
            overrides["num_key_value_heads"] = f["num_global_key_value_heads"]
    heads = f.sequence("num_attention_heads_per_layer")
    if heads is not None:
        overrides["num_attention_heads"] = heads[i]
    for key, value in f.section("per_layer_config").items():  # transformers 5
        if int(key) == i:
            overrides |= value
    overrides = {name: value for name, value in overrides.items() if value is not None}
    aliases = {"num_key_value_heads": ("num_attention_groups",)}
    hidden = {alias: None for name in overrides for alias in aliases.get(name, ())}
    return f.having({**hidden, **overrides})


def _reused_caches(f: Fields, kinds: Sequence[str]) -> set[int]:
    """Layers that attend to another layer's keys and values and cache none of their own."""
    n = len(kinds)
    last = f.count("num_kv_shared_layers")  # Gemma 3n, Gemma 4
    if last >= n:
        raise ValueError(f"config field 'num_kv_shared_layers' is {last} but there are {n} layers")
    if f.raw("use_cla") is True:  # Hunyuan-Large: the first of each group of layers computes keys for all of them
        group = f.size("cla_share_factor")
        return {i for i in range(n) if i % group}
    return set(range(n - last, n))


def _compress_ratios(f: Fields, kinds: Sequence[str]) -> dict[int, int]:
    """Tokens per compressed entry by layer."""
    rates = {"compressed_sparse": 4, "heavily_compressed": 128}
    for name, rate in f.section("compress_rates").items():
        rates[_kind(name, "compress_rates")] = f.having({"rate": rate}).size("rate")
    return {i: rates[kind] for i, kind in enumerate(kinds) if kind in rates}


def _indexers(f: Fields, n: int) -> list[bool]:
    """Whether a layer has an indexer of its own or reuses the choice of an earlier one (GLM-5)."""
    words = f.sequence("indexer_types", n)
    if words is not None:
        return [word != "shared" for word in words]
    pattern = f.sequence("index_topk_pattern", n)
    if pattern is not None:
        return [word != "S" for word in pattern]
    frequency = f.size("index_topk_freq", 1)
    offset = 2 if f.raw("index_skip_topk_offset") is None else f.count("index_skip_topk_offset")
    return [max(i - offset + 1, 0) % frequency == 0 for i in range(n)]


def _extra_macs(f: Fields, kind: str) -> int:
    """Weight MACs of a layer that belong to neither its mixer nor its FFN."""
    hidden = f.size("hidden_size")
    per_layer = f.count("hidden_size_per_layer_input")
    macs = 2 * hidden * per_layer  # Gemma 3n and 4: gate and projection of the per-layer inputs
    if f.model_type == "gemma3n_text":
        inputs, rank = f.size("altup_num_inputs"), f.size("laurel_rank")
        # AltUp routes once before the layer and once after it; LAuReL is a low-rank residual.
        macs += 2 * hidden * inputs + inputs**3 + inputs * inputs + 2 * hidden * rank
    if f.raw("hc_mult") is not None:  # DeepSeek-V4 hyper-connections, around the mixer and around the FFN
        streams = f.size("hc_mult")
        macs += 2 * (2 * streams + streams * streams) * streams * hidden
    if f.model_type in ("zamba", "zamba2") and kind == "hybrid":
        macs += hidden * hidden
    if f.model_type == "zamba2" and kind == "hybrid":
        # The shared block is told apart at each place by low-rank adapters, always around its first FFN matrix.
        rank, inputs = f.size("adapter_rank", 128), f.size("attention_hidden_size", 2 * hidden)
        macs += rank * (hidden + 2 * f.size("intermediate_size", 4 * hidden))
        macs += 6 * rank * inputs if f.flag("use_shared_attention_adapter") else 0
    if f.model_type == "jetmoe":
        macs += hidden * f.size("experts")  # a second router, for the experts of the query projection
    return macs


def _with_absorbed_ffn(layer: Layer) -> Layer:
    if layer.absorbed is None:
        return layer
    return replace(layer, absorbed=replace(layer.absorbed, ffn_macs=layer.ffn_macs))


def _longcat(f: Fields, i: int, n: int) -> list[Layer]:
    first = attention(f, "full", i)
    dense, sparse = ffn_macs(f, i, n, "dense"), ffn_macs(f, i, n, "moe")
    return [_with_absorbed_ffn(replace(first, ffn_macs=macs)) for macs in (dense + sparse, dense)]


def _searched_layers(f: Fields) -> tuple[Layer, ...]:
    """Nemotron-NAS (DeciLM): each block has its own attention and FFN, or none, or a linear layer instead."""
    n, blocks = f.size("num_hidden_layers"), f.sequence("block_configs") or ()
    if len(blocks) != n:
        raise ValueError(f"config field 'block_configs' has {len(blocks)} entries but num_hidden_layers is {n}")
    return tuple(_searched_layer(f, i, block) for i, block in enumerate(blocks))


def _searched_layer(f: Fields, i: int, block: Mapping[str, Any]) -> Layer:
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    mixer, ffn = block["attention"], block["ffn"]
    if mixer.get("no_op"):
        layer = Layer("none")
    elif mixer.get("replace_with_linear"):
        layer = Layer("none", projection_macs=hidden * hidden)
    else:
        group = f.having({"n_heads_in_group": mixer.get("n_heads_in_group")}).size("n_heads_in_group")
        layer = attention(f.having({"num_key_value_heads": heads // group}), "full", i)
    if ffn.get("no_op"):
        return layer
    if ffn.get("replace_with_linear"):
        return replace(layer, ffn_macs=hidden * hidden)
    width = ffn.get("intermediate_size")
    if width is None:  # modeling_decilm.py: two thirds of 2 × multiplier × hidden, rounded up to 256
        width = -(-int(2 * f.having(ffn).number("ffn_mult", 0) * hidden / 3) // 256) * 256
    return replace(layer, ffn_macs=3 * hidden * f.having({"intermediate_size": width}).size("intermediate_size"))
