"""FLOPs equal what transformers' own forward multiplies.

Linear terms: torch's FlopCounterMode over the forward pass (mm and addmm; bmm and convolutions are mixing, not
weights). Attention: an attention function registered with transformers that counts the True entries of the mask it is
handed, times the head sizes of the tensors it is handed.
"""

from __future__ import annotations

import pytest
import torch
from tiny_models import CASES, prompt, tiny_config, tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, linear_flops, prefill_flops

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on tensors this small, more threads only wait for each other
    yield
    torch.set_num_threads(threads)


TOKENS = 20
PAIR_FLOPS: list[int] = []


def _counting_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    # query [1, heads, q, dk], key and value [1, kv_heads, k, d], attention_mask [1, 1 or heads, q, k] additive.
    visible = (attention_mask[0, 0, :, -key.shape[-2] :] > -1).sum().item()
    PAIR_FLOPS.append(2 * visible * query.shape[1] * (query.shape[-1] + value.shape[-1]))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    weights = (query @ key.transpose(-1, -2) + attention_mask[..., -key.shape[-2] :]).softmax(-1)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("counting", _counting_attention)
AttentionMaskInterface.register("counting", eager_mask)


def _matmul_flops(counter: FlopCounterMode) -> int:
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))


# Weights that transformers applies by bmm, in MACs per token: Llama 4 runs all experts at once and masks; 2 of 8 count.
BY_BMM = {"llama4": 2 * 3 * 64 * 96 * 6}


@pytest.mark.parametrize("name", CASES)
def test_linear_flops_are_the_matmuls_of_the_forward_pass(name):
    config = tiny_config(name)
    arch = ModelArch.from_hf(config.to_dict())
    model = tiny_model(config)
    grad = torch.enable_grad() if name == "dbrx" else torch.no_grad()  # the counter fails on DBRX without it
    with grad, FlopCounterMode(display=False) as counter:
        model(input_ids=prompt(TOKENS), use_cache=True)
    # transformers computes the LM head for every position, kvlab for the last one only.
    expected = _matmul_flops(counter) - 2 * TOKENS * arch.head_macs + 2 * TOKENS * BY_BMM.get(name, 0)
    assert linear_flops(arch, TOKENS) == expected


def test_head_flops_are_those_of_one_position():
    config = tiny_config("llama")
    arch = ModelArch.from_hf(config.to_dict())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tiny_model(config)(input_ids=prompt(TOKENS), logits_to_keep=1)
    assert _matmul_flops(counter) == linear_flops(arch, TOKENS) + 2 * arch.hidden * arch.vocab
    assert prefill_flops(arch, 0, TOKENS) - attention_flops(arch, 0, TOKENS) == _matmul_flops(counter)


# Full, windowed, chunked, mixed, experts, values narrower than keys, shared caches. Models with a registered function.
MASKED = (
    "gpt2 gpt_neox llama qwen2 qwen3 phi3 starcoder2 olmo2 mistral gemma2 gemma3 gemma4 gpt_oss exaone4 olmo3 cohere2 "
    "smollm3 mimo_v2 llama4 mixtral qwen3_moe ernie4_5_moe deepseek_v3 deepseek_v2 minicpm3"
)


@pytest.mark.parametrize("start", [0, 5, 13])
@pytest.mark.parametrize("name", MASKED.split())
def test_attention_flops_are_the_visible_pairs_of_the_model_s_own_masks(name, start):
    config = tiny_config(name)
    arch = ModelArch.from_hf(config.to_dict())
    model = tiny_model(config, attention="counting")
    with torch.no_grad():
        past = model(input_ids=prompt(start), use_cache=True).past_key_values if start else None
        PAIR_FLOPS.clear()
        positions = torch.arange(start, TOKENS)[None]
        kwargs = {"past_key_values": past} if past is not None else {}
        with FlopCounterMode(display=False) as counter:
            model(input_ids=prompt(TOKENS)[:, start:], position_ids=positions, use_cache=True, **kwargs)
    assert PAIR_FLOPS, "the model did not use the counting attention"
    expanded_again = 2 * arch.cached_key_macs * start
    assert attention_flops(arch, start, TOKENS) == sum(PAIR_FLOPS) + expanded_again
    if expanded_again:  # transformers caches latents and projects them again in each pass, as counted
        new = _matmul_flops(counter) - 2 * (TOKENS - start) * arch.head_macs
        assert new == linear_flops(arch, TOKENS - start) + expanded_again


def test_absorbed_mla_is_the_matmuls_over_latents():
    config = tiny_config("deepseek_v3")
    arch = ModelArch.from_hf(config.to_dict())
    heads, nope, rope, value, rank = 4, 16, 8, 20, 32
    cached, new = 12, 5
    q_nope, q_rope = torch.zeros(heads, new, nope), torch.zeros(heads, new, rope)
    w_key, w_value = torch.zeros(heads, nope, rank), torch.zeros(heads, rank, value)
    with FlopCounterMode(display=False) as counter:
        weights = (q_nope @ w_key, torch.zeros(heads, new, rank) @ w_value)
    absorbed_weights = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        latents, rope_keys = torch.zeros(heads, cached + new, rank), torch.zeros(heads, cached + new, rope)
        scores = weights[0] @ latents.transpose(1, 2) + q_rope @ rope_keys.transpose(1, 2)
        _ = scores @ latents
    rectangle = counter.get_total_flops()
    pairs, all_pairs = sum(cached + i + 1 for i in range(new)), new * (cached + new)
    layers = 6
    absorbed = arch.absorbed
    assert attention_flops(absorbed, cached, cached + new) == layers * rectangle * pairs // all_pairs
    # Folding kv_b into query and output costs each new token what expanding its own latent would.
    assert absorbed_weights == 2 * new * rank * heads * (nope + value)
    assert absorbed.linear_macs == arch.linear_macs
    assert prefill_flops(arch, cached, cached + new, mla="absorbed") == prefill_flops(absorbed, cached, cached + new)


@pytest.mark.parametrize("start", [0, 9])
def test_an_indexer_scores_every_key_and_attention_sees_the_top_k(start):
    arch = ModelArch.from_hf(tiny_config("deepseek_v32").to_dict())
    heads, key, value, index_heads, index_dim, top_k, layers = 4, 24, 20, 4, 16, 6, 6
    expected = 0
    for i in range(start, TOKENS):
        expected += layers * 2 * min(i + 1, top_k) * heads * (key + value)
        expected += layers * 2 * (i + 1) * index_heads * (index_dim + 1)
    assert attention_flops(arch, start, TOKENS) == expected + 2 * arch.cached_key_macs * start
