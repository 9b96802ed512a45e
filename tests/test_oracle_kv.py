"""KV bytes equal the cache tensors that transformers really holds, for every kind of cache.

transformers differs from what a server holds in five ways; `_held_elements` undoes each, from the tensors alone:
* it keeps window - 1 tokens of a window (the next query needs no more), where a server holds the window;
* it keeps `kernel` columns of a convolution, of which the next step reads kernel - 1;
* Falcon's grouped form copies each KV head to all heads of its group before it caches it;
* GPT-Neo keeps all tokens of its local layers;
* DeepSeek-V4 keeps its window twice (the key is the value) and raw inputs of groups that are not full.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import CASES, WINDOW, prompt, tiny_config, tiny_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes, kv_bytes_by_component

# transformers' own warnings about untrained or deprecated settings are not ours to keep.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small, more threads only wait for each other
    yield
    torch.set_num_threads(threads)


def _tensors(value, name="", seen=None):
    """Every (attribute path, tensor) inside a cache object."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}", seen)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, f"{name}[{i}]", seen)
    elif type(value).__module__.startswith("transformers") and "Config" not in type(value).__name__:
        for key, item in vars(value).items():
            yield from _tensors(item, f"{name}.{key}", seen)


def _cache(model, tokens):
    with torch.no_grad():
        out = model(input_ids=prompt(tokens), use_cache=True)
    return out.past_key_values if getattr(out, "past_key_values", None) is not None else out.cache_params


def _held_elements(cache, config, tokens: int) -> int:
    total = 0
    for name, tensor in _tensors(cache):
        if not tensor.is_floating_point():
            continue
        size = tensor.numel()
        if ".conv_states" in name:
            size -= tensor[..., :1].numel()
        elif name.endswith((".keys", ".values")) and tensor.shape[-2] == WINDOW - 1 < tokens:
            size += tensor[..., :1, :].numel()
        elif config.model_type == "gpt_neo" and tokens > WINDOW:
            layer = int(name.split("[")[1].split("]")[0])
            if config.attention_layers[layer] == "local":
                size = tensor[..., :WINDOW, :].numel()
        elif config.model_type == "falcon" and config.new_decoder_architecture:
            group = config.num_attention_heads // config.num_kv_heads
            assert torch.equal(tensor, tensor[:, ::group].repeat_interleave(group, 1))
            size //= group
        total += size
    return total


@pytest.mark.parametrize("name", CASES)
def test_kv_bytes_are_the_bytes_of_the_cache_tensors(name):
    config = tiny_config(name)
    model = tiny_model(config)
    arch = ModelArch.from_hf(config.to_dict())
    for tokens in (5, 20):  # below and above the window
        held = _held_elements(_cache(model, tokens), config, tokens)
        assert held > 0
        assert kv_bytes(arch, tokens, kv_dtype="fp32") == 4 * held


def test_a_compressed_cache_is_a_window_plus_one_entry_per_group_plus_index_keys():
    config = CONFIG_MAPPING["deepseek_v4"](
        **{**tiny_config_fields(), "compress_ratios": [0, 0, 4, 128, 4, 128], "o_groups": 2, "o_lora_rank": 24}
    )
    arch = ModelArch.from_hf(config.to_dict())
    tokens = 300  # two full groups of 128 and one that is not
    cache = _cache(tiny_model(config), tokens)
    sizes = {"window": 0, "compressed": 0, "index_key": 0}
    for name, tensor in _tensors(cache):
        if name.endswith(".keys"):
            sizes["window"] += 4 * (tensor.numel() + tensor[..., :1, :].numel())
        elif name.endswith(".compressed_kv.compressor"):
            sizes["compressed"] += 4 * tensor.numel()
        elif name.endswith(".compressed_kv.indexer"):
            sizes["index_key"] += 4 * tensor.numel()
    assert sizes == {"window": 6 * 8 * 24 * 4, "compressed": (2 * 75 + 2 * 2) * 24 * 4, "index_key": 2 * 75 * 16 * 4}
    assert kv_bytes_by_component(arch, tokens, kv_dtype="fp32") == sizes


def tiny_config_fields() -> dict[str, object]:
    from tiny_models import EVERYWHERE, SIZES

    known = CONFIG_MAPPING["deepseek_v4"]().to_dict()
    return {**{key: SIZES[key] for key in SIZES if key in known}, **EVERYWHERE, "num_key_value_heads": 1}
