"""Read a Hugging Face `config.json` into the fields of a `ModelArch`.

Knows files, nesting and what belongs to the whole model. What it cannot read it refuses, naming the field and its
value; layers are read by `hf.layers`, and rules that live in a model's code are in `hf.rules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.hf.ffn import is_gated, needs_activation_rule
from kvlab.hf.fields import Fields, check_finite
from kvlab.hf.layers import read_layers
from kvlab.hf.rules import (
    CHECKED,
    CLASS_DEFAULTS,
    DECODER_FAMILY,
    ENCODER_TYPES,
    NESTED,
    POSITION_KEYS,
    UNGATED,
    UNKNOWN_STATE,
)
from kvlab.layers import Decoder, Layer

__all__ = ["read"]

_ROPE_TYPES = {"default", "linear", "llama3", "yarn"}
_NO_LIMIT = 2**63 - 1  # ALiBi and recurrent models state no longest sequence


def read(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `ModelArch` for a config (path, folder holding `config.json`, or parsed dict).

    Raises ValueError (or FileNotFoundError) naming the field, its value and what was expected.
    """
    if isinstance(source, Mapping):
        name, outer = str(source.get("_name_or_path") or source.get("model_type") or "model"), dict(source)
    else:
        name, outer = _load(Path(source))
    check_finite(outer, "")
    config, nested = _text_config(outer)
    model_type = _model_type(outer, config)
    if model_type.startswith("ernie4_5") and "vl" in model_type:
        # ERNIE-VL lists its expert sizes by modality; text comes first.
        config = {k: v[0] if k.startswith("moe_") and isinstance(v, list) else v for k, v in config.items()}
    f = Fields(config, model_type)
    try:
        layers = read_layers(f)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"config of model_type {model_type!r} has a value of the wrong form: {error}") from error
    hidden, vocab = f.size("hidden_size"), f.size("vocab_size")
    embedding = f.size("word_embed_proj_dim", hidden)  # OPT-350M: narrower embeddings, projected in and out
    stem = 2 * embedding * hidden if embedding != hidden else 0
    per_layer = f.count("hidden_size_per_layer_input")
    stem += hidden * len(layers) * per_layer  # Gemma 3n and 4: one projection makes the inputs of all layers
    if model_type == "gemma3n_text":
        stem += 2 * (f.size("altup_num_inputs") - 1) * hidden * hidden
    if f.raw("hc_mult") is not None:
        stem += f.size("hc_mult") ** 2 * hidden
    return {
        "name": name,
        "model_type": model_type,
        "hidden": hidden,
        "vocab": vocab,
        "max_positions": _max_positions(f),
        "layers": layers,
        "tied_embeddings": f.flag("tie_word_embeddings"),
        "decoder": None if nested else _decoder(f, layers),
        "kv_dtype": _kv_dtype(outer, config),
        "head_macs": embedding * vocab,
        "stem_macs": stem,
        "notes": tuple(_notes(f, layers)),
    }


def _load(path: Path) -> tuple[str, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        # A hub id looks like a folder, and nothing here asks the hub.
        ask = f"; kvlab.hub.hub_folder('{path.as_posix()}', ['config.json']) asks the hub"
        hub = ask if len(path.parts) == 2 and not path.is_absolute() and path.suffix != ".json" else ""
        raise FileNotFoundError(f"no model config at {file}; expected a config.json or a folder that holds one{hub}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}; expected a JSON object")
    # A config.json is called by its folder, a config kept under another file name by that name.
    return (file.resolve().parent.name if file.name == "config.json" else file.stem), config


def _text_config(outer: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The part that describes the text decoder, and whether it was nested in a larger model."""
    for key in NESTED:
        inner = outer.get(key)
        if isinstance(inner, Mapping) and inner:
            # What the whole model states holds for its text part unless the part says otherwise.
            shared = {k: outer[k] for k in ("tie_word_embeddings", "torch_dtype", "dtype") if outer.get(k) is not None}
            return _text_config({**shared, **inner})[0], True
        if inner is not None and not isinstance(inner, Mapping):
            raise ValueError(f"config field {key!r} is {inner!r}; expected an object")
    # Models that keep text sizes at the top level beside a vision tower (LLaVA 1.5, Qwen2-VL).
    nested = any(key in outer for key in ("vision_config", "mm_vision_tower", "audio_config", "embd_layer"))
    return dict(outer), nested


def _model_type(outer: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type") or outer.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"config field 'model_type' is {model_type!r}; add the model's type, such as 'llama'")
    encoder_decoder = [c for c in (outer, config) if c.get("is_encoder_decoder") is True]
    if encoder_decoder or model_type in ENCODER_TYPES:
        raise ValueError(
            f"model_type {model_type!r} is encoder-only or encoder-decoder (is_encoder_decoder "
            f"{bool(encoder_decoder)}); kvlab counts decoder-only models"
        )
    for architecture in config.get("architectures") or ():
        if str(architecture).endswith(("ForMaskedLM", "ForPreTraining")):
            raise ValueError(f"config field 'architectures' is {architecture!r}, an encoder; expected a causal decoder")
    if model_type in UNKNOWN_STATE:
        raise ValueError(f"model_type is {model_type!r}; kvlab does not know the size of its recurrent state")
    return model_type


def _max_positions(f: Fields) -> int:
    for key in POSITION_KEYS:
        if f.get(key) is not None:
            return f.size(key)
    return f.size(POSITION_KEYS[0], int(DECODER_FAMILY.get(f.model_type, {}).get("positions", _NO_LIMIT)))


def _kv_dtype(outer: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The KV-cache dtype that a quantised checkpoint prescribes, or None.

    Read from compressed-tensors and ModelOpt (`kv_cache_scheme`: bits and type), ModelOpt (`kv_cache_quant_algo`) and
    Quark (`kv_cache_dtype`), in `quantization_config` or `compression_config`. Raises ValueError for a scheme that
    kvlab has no dtype for.
    """
    for holder in (outer, config):
        for key in ("quantization_config", "compression_config", "quantization"):
            scheme = holder.get(key)
            if not isinstance(scheme, Mapping):
                continue
            inner = scheme.get("quantization")
            for section in (scheme, inner if isinstance(inner, Mapping) else {}):
                for field in ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_dtype"):
                    if section.get(field) not in (None, "auto", {}):
                        return _scheme_dtype(f"{key}.{field}", section[field])
    return None


def _scheme_dtype(field: str, scheme: Any) -> str:
    if isinstance(scheme, Mapping):
        word = f"{scheme.get('type', 'float')}{scheme.get('num_bits')}"
    else:
        word = str(scheme).lower()
    dtypes = {
        "float8": "fp8",
        "fp8": "fp8",
        "fp8_e4m3": "fp8",
        "fp8_e5m2": "fp8",
        "int8": "int8",
        "float4": "nvfp4",
        "nvfp4": "nvfp4",
        "float16": "fp16",
        "bfloat16": "bf16",
    }
    if word not in dtypes:
        raise ValueError(f"config field {field!r} is {scheme!r}; kvlab knows {', '.join(dtypes)}")
    return dtypes[word]


def _decoder(f: Fields, layers: tuple[Layer, ...]) -> Decoder | None:
    """What kvlab's own model needs, or None where it would not compute this model faithfully."""
    rules = DECODER_FAMILY.get(f.model_type)
    rope = _rope(f)
    uniform = {layer.kind for layer in layers} == {"full"}
    partial = f.raw("partial_rotary_factor") not in (None, 1, 1.0)
    if rules is None or rope is None or not uniform or partial or f.raw("activation") not in (None, "silu", "swish"):
        return None
    heads = f.size("num_attention_heads")
    hidden = f.size("hidden_size")
    bias = rules["bias"] == "qkv" or (rules["bias"] == "field" and f.flag("attention_bias"))
    decoder = Decoder(
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        kv_heads=f.size("num_key_value_heads", heads),
        head_dim=f.size("head_dim", hidden // heads),
        ffn=f.size("intermediate_size"),
        rope_theta=rope[0],
        rope_scaling=rope[1],
        norm_eps=f.number("rms_norm_eps", 1e-6),
        qk_norm=rules["qk_norm"],
        attention_bias=bias,
        output_bias=bias and rules["bias"] == "field",
        mlp_bias=rules["mlp_bias"] and f.flag("mlp_bias"),
    )
    return decoder if decoder.head_dim % 2 == 0 and decoder.layer == layers[0] else None


def _rope(f: Fields) -> tuple[float, tuple[tuple[str, Any], ...]] | None:
    """Base and scaling of RoPE; None for a scaling that kvlab does not run.

    Dynamic NTK and longrope depend on the total length, which would invalidate cached keys; mrope is for images.
    """
    # transformers ≥ 5 writes theta and scaling together in `rope_parameters`.
    parameters = f.section("rope_parameters")
    scaling = dict(f.section("rope_scaling") or parameters)
    scaling.pop("rope_theta", None)
    theta = f.having(parameters if "rope_theta" in parameters else {}).number("rope_theta", 10_000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in _ROPE_TYPES or "mrope_section" in scaling or scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        return None
    return theta, () if kind == "default" else (("rope_type", kind), *sorted(scaling.items()))


def _notes(f: Fields, layers: tuple[Layer, ...]) -> list[str]:
    """What the counts assume, in words: shown by the faces, never computed with."""
    notes = []
    if f.model_type not in CHECKED:
        notes.append(f"model_type {f.model_type!r} is not one that kvlab was checked against: read by its fields alone")
    if f.count("draft_layers"):
        key, value = f.find("draft_layers")
        notes.append(f"{key} = {value}: draft (MTP) layers are not counted")
    if needs_activation_rule(f) and f.model_type not in UNGATED and f.model_type not in CLASS_DEFAULTS:
        gated = "three matrices (gated)" if is_gated(f) else "two matrices"
        notes.append(f"FFN of {f.model_type!r} with {f.raw('activation')!r} counted as {gated}")
    if f.raw("blocksparse_block_size") is not None:
        notes.append("block-sparse layers are counted as full attention: their cache is full, their FLOPs are fewer")
    if f.count("zero_expert_num"):
        notes.append("zero-computation experts: FLOPs assume that every chosen expert computes (an upper bound)")
    if any(layer.kind == "cross" for layer in layers):
        notes.append("cross-attention layers hold image keys only: no bytes and no FLOPs for text tokens")
    if any(layer.absorbed is not None for layer in layers):
        notes.append("MLA: the cache holds latents; FLOPs are of the expanded form unless asked for absorbed")
    return notes
