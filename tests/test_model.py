"""The decoder computes what transformers computes, and its results depend on tokens alone, not on where blocks lie."""

import copy
import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvlab import loading
from kvlab.arch import ModelArch
from kvlab.attention import attend, attend_each, causal_mask
from kvlab.blocks import BlockAllocator
from kvlab.gguf_file import GgufFile
from kvlab.layers import Decoder
from kvlab.linear import linear, pack, unpacked
from kvlab.loading import load_model, resolve_device, resolve_dtype
from kvlab.pool import BlockPool
from kvlab.rope import rope_for

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
VARIANTS = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases-wide-heads": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("Llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "llama-yarn": (
        "Llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-yarn": (
        "Qwen3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
}


def theirs(variant, folder):
    """A tiny random transformers model in fp64, saved to `folder`; biases and norms are random too."""
    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes}, rms_norm_eps=1e-5)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + ("norm" in name))
    model.save_pretrained(folder)
    return model.double()


def tiny(dtype="fp64", **changes):
    shape = {"layers": 3, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 96, **changes}
    decoder = Decoder(**shape)
    arch = ModelArch("tiny", "llama", 64, 300, 2048, (decoder.layer,) * decoder.layers, True, decoder)
    return load_model(arch, dtype=dtype)


def text(n, seed=0, vocab=300):
    return torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))


def table(pool, tokens, seed=0):
    """Enough blocks for `tokens`, scattered over the pool."""
    order = torch.randperm(pool.num_blocks, generator=torch.Generator().manual_seed(seed))
    return order[: -(-tokens // pool.layout.block_size)].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_transformers_on_the_same_folder(variant, tmp_path):
    reference = theirs(variant, tmp_path)
    ids = text(90)
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    for dtype, tolerance in (("fp64", 2e-5), ("fp32", 1e-3)):  # transformers' own RMSNorm and RoPE are fp32 even here
        model = load_model(tmp_path, dtype=dtype)
        pool = BlockPool(model.layout(16), 16, poison=True)
        logits = model.prefill(ids, pool, table(pool, 90), all_logits=True)
        assert (logits - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()) / 10)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("block_size", [1, 2, 3, 7, 16, 32])
@pytest.mark.parametrize("split", [1, 31, 32, 33, 69])
def test_chunked_prefill_equals_whole(block_size, split):
    model, ids = tiny(), text(70)
    pool = BlockPool(model.layout(block_size), 160, poison=True)
    whole = model.prefill(ids, pool, table(pool, 70), all_logits=True)
    blocks = table(pool, 70, seed=1)
    head = model.prefill(ids[:split], pool, blocks, all_logits=True)
    tail = model.prefill(ids[split:], pool, blocks, start=split, all_logits=True)
    assert torch.allclose(torch.cat((head, tail)), whole, rtol=0, atol=1e-12)


def test_suffixes_longer_than_one_query_block_see_exactly_their_past():
    model, ids = tiny(), text(1500)
    pool = BlockPool(model.layout(16), 200)
    whole = model.prefill(ids, pool, table(pool, 1500), all_logits=True)
    blocks = table(pool, 1500, seed=1)
    model.prefill(ids[:211], pool, blocks)
    tail = model.prefill(ids[211:], pool, blocks, start=211, all_logits=True)  # 1289 = 2 · 512 + 265 rows
    assert torch.allclose(tail, whole[211:], rtol=0, atol=1e-12)


def test_the_last_logits_are_the_last_row_of_all_logits():
    model, ids = tiny(), text(50)
    pool = BlockPool(model.layout(16), 8)
    blocks = table(pool, 50)
    every = model.prefill(ids, pool, blocks, all_logits=True)
    rows = pool.rows.clone()
    last = model.prefill(ids, pool, blocks)
    assert last.shape == (300,)
    assert torch.allclose(last, every[-1], rtol=0, atol=1e-12)
    assert torch.equal(pool.rows, rows)  # dropping rows of the last layer must not drop their keys and values


def test_decode_equals_prefill():
    model, ids = tiny(), text(40)
    pool = BlockPool(model.layout(16), 16, poison=True)
    every = model.prefill(ids, pool, table(pool, 40), all_logits=True)
    blocks = table(pool, 40, seed=1)
    model.prefill(ids[:20], pool, blocks)
    for position in range(20, 40):
        logits = model.decode(ids[position : position + 1], pool, [blocks], [position])
        assert torch.allclose(logits[0], every[position], rtol=0, atol=1e-12)


def test_batched_decode_equals_single_for_ragged_lengths_in_a_poisoned_pool():
    model, lengths = tiny(), [1, 5, 16, 17, 47]
    pool = BlockPool(model.layout(16), 40, poison=True)
    allocator = BlockAllocator(40, 16)
    tables, single = [], []
    for seed, n in enumerate(lengths):
        held = allocator.new_table()
        allocator.grow(held, n + 1)
        model.prefill(text(n, seed), pool, held)
        tables.append(held)
    tokens = text(len(lengths), 99)
    for i, n in enumerate(lengths):
        single.append(model.decode(tokens[i : i + 1], pool, [tables[i].blocks], [n])[0])
    batched = model.decode(tokens, pool, tables, lengths)
    assert torch.allclose(batched, torch.stack(single), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("prefix", [16, 37, 64])
def test_copied_blocks_give_bit_identical_logits(dtype, prefix):
    """The lab rests on this: left in the pool, or copied out and back to other blocks, the logits are the same."""
    model, ids = tiny(dtype), text(80)
    resident = BlockPool(model.layout(16), 32, poison=True)
    here, there = table(resident, 80), table(resident, 80, seed=5)
    model.prefill(ids[:prefix], resident, here)
    moved = BlockPool(model.layout(16), 32)
    moved.rows.fill_(123.0)  # other garbage than the resident pool's NaN
    used = -(-prefix // 16)
    source = resident.group_index(torch.tensor(here[:used]), 0, 3)
    moved.rows[moved.group_index(torch.tensor(there[:used]), 0, 3)] = resident.rows[source]
    # slots behind the prefix in its last block are nobody's: they may hold anything
    kv = moved.rows.view(32, 3, 2, model.decoder.kv_heads, 16, -1)
    kv[there[used - 1], ..., (prefix - 1) % 16 + 1 :, :] = float("nan")
    expected = model.prefill(ids[prefix:], resident, here, start=prefix, all_logits=True)
    got = model.prefill(ids[prefix:], moved, there, start=prefix, all_logits=True)
    assert torch.equal(got, expected)
    assert not got.isnan().any()
    step = [m.decode(ids[:1], p, [b], [79]) for m, p, b in ((model, resident, here), (model, moved, there))]
    assert torch.equal(*step)


def test_a_changed_cached_value_changes_the_logits():
    model, ids = tiny(), text(64)
    pool = BlockPool(model.layout(16), 8)
    blocks = table(pool, 64)
    model.prefill(ids[:48], pool, blocks)
    before = model.prefill(ids[48:], pool, blocks, start=48)
    pool.rows[pool.row_index(1, 1, torch.tensor(blocks[:1]))] += 0.5
    assert not torch.allclose(model.prefill(ids[48:], pool, blocks, start=48), before)


def test_before_layer_runs_before_that_layer_touches_its_cache():
    model, ids = tiny(), text(64)
    pool = BlockPool(model.layout(16), 8, poison=True)
    blocks = table(pool, 64)
    model.prefill(ids[:40], pool, blocks)
    stored = pool.rows.clone()
    expected = model.prefill(ids[40:], pool, blocks, start=40)
    pool.rows.fill_(float("nan"))
    called = []

    def arrive(layer):  # whole blocks: what lands in the half-filled one must not cover what this layer writes
        called.append(layer)
        index = pool.group_index(torch.tensor(blocks), layer, layer + 1)
        pool.rows[index] = stored[index]

    got = model.prefill(ids[40:], pool, blocks, start=40, before_layer=arrive)
    assert called == [0, 1, 2]
    assert torch.equal(got, expected)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    past=st.integers(0, 40),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    pad=st.integers(0, 9),
)
def test_attention_is_softmax_over_the_visible_keys(rows, past, kv_heads, group, pad):
    heads, keys, dim = kv_heads * group, rows + past, 8
    g = torch.Generator().manual_seed(rows * 97 + past)
    q = torch.randn(rows, heads, dim, generator=g, dtype=torch.float64)
    k, v = (torch.randn(keys, kv_heads, dim, generator=g, dtype=torch.float64) for _ in range(2))
    expected = torch.empty(rows, heads, dim, dtype=torch.float64)
    for t, h in itertools.product(range(rows), range(heads)):
        seen = past + t + 1
        weight = (k[:seen, h // group] @ q[t, h] / dim**0.5).softmax(0)
        expected[t, h] = weight @ v[:seen, h // group]
    mask = causal_mask(rows, keys, group, q) if rows > 1 else None
    assert torch.allclose(attend(q, k, v, mask), expected.flatten(1), atol=1e-12)
    filler = torch.full((pad, kv_heads, dim), torch.nan, dtype=torch.float64)
    one = attend_each(q[-1:], torch.cat((k, filler)), torch.cat((v, filler)), torch.tensor([keys]))
    assert torch.allclose(one[0], expected[-1].flatten(), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_compute_what_plain_ones_do_and_unpack_to_the_same_bits(dtype):
    weight, x, bias = torch.randn(96, 64).to(dtype), torch.randn(5, 64).to(dtype), torch.randn(96).to(dtype)
    packed = pack(weight)
    assert torch.equal(unpacked(packed), weight)
    tolerance = 2e-2 if dtype.itemsize == 2 else 1e-5
    plain = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(linear(x, packed, bias).double(), plain, rtol=tolerance, atol=20 * tolerance)


def adapter_tensors(seed=3, rank=4):
    g = torch.Generator().manual_seed(seed)
    places = {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
    }  # fmt: skip
    tensors = {}
    for layer, (name, (out, inner)) in itertools.product((0, 2), places.items()):
        key = f"base_model.model.model.layers.{layer}.{name}"
        tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inner, generator=g) * 0.2
        tensors[f"{key}.lora_B.weight"] = torch.randn(out, rank, generator=g) * 0.2
    return tensors


def test_lora_equals_merged_weights(tmp_path):
    folder, merged_folder, adapter = (tmp_path / name for name in ("base", "merged", "adapter"))
    reference = theirs("llama", folder)
    tensors = adapter_tensors()
    with torch.no_grad():
        for key, a in tensors.items():
            if "lora_A" in key:
                name = key.removeprefix("base_model.model.").replace("lora_A.", "")
                b = tensors[key.replace("lora_A", "lora_B")]
                reference.get_parameter(name).add_(8 / 4 * (b.double() @ a.double()))
    reference.save_pretrained(merged_folder)
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}')
    base, merged = load_model(folder, dtype="fp64"), load_model(merged_folder, dtype="fp64")
    adapted = base.with_adapter(adapter)
    ids, pool = text(60), BlockPool(base.layout(16), 8)
    blocks = table(pool, 60)
    got = adapted.prefill(ids, pool, blocks, all_logits=True)
    assert torch.allclose(got, merged.prefill(ids, pool, blocks, all_logits=True), rtol=0, atol=1e-10)
    assert not torch.allclose(got, base.prefill(ids, pool, blocks, all_logits=True), atol=1e-3)
    assert adapted.weights is base.weights


def test_an_adapter_is_known_by_its_content_and_refused_when_it_does_not_fit():
    model, tensors = tiny(), adapter_tensors()
    first = model.with_adapter(tensors, scale=2.0)
    assert first.adapter_digest == model.with_adapter(dict(reversed(tensors.items())), scale=2.0).adapter_digest
    assert len({model.adapter_digest, first.adapter_digest, model.with_adapter(tensors).adapter_digest}) == 3
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(ValueError, match=r"q_proj has A \[4, 63\].*expected \[r, 64\]"):
        model.with_adapter({**tensors, key: torch.ones(4, 63)})
    with pytest.raises(ValueError, match="embed_tokens"):
        model.with_adapter({**tensors, "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(1)})


def test_the_fingerprint_changes_with_weights_adapter_dtype_and_layout():
    model = tiny("fp32")
    changed = [
        model,
        load_model(model.arch, dtype="fp32", seed=1),
        tiny("bf16"),
        tiny("fp32", rope_theta=5e5),
        model.with_adapter(adapter_tensors()),
    ]
    prints = [m.fingerprint(16).digest() for m in changed] + [model.fingerprint(8).digest()]
    assert len(set(prints)) == len(prints)
    assert tiny("fp32").fingerprint(16) == model.fingerprint(16)


def test_wrong_calls_are_refused_in_one_line():
    model, pool = tiny(), BlockPool(tiny().layout(16), 4)
    for call, message in [
        (lambda: model.prefill([], pool, [0]), "cannot prefill"),
        (lambda: model.prefill([300], pool, [0]), r"\[0, 300\)"),
        (lambda: model.prefill([1] * 17, pool, [0]), "need 2 blocks"),
        (lambda: model.prefill([1], pool, [4]), "outside the pool"),
        (lambda: model.prefill([1], BlockPool(tiny("fp32").layout(16), 1), [0]), "expected KVLayout"),
        (lambda: model.decode(torch.tensor([1, 2]), pool, [[0]], [0]), "2 tokens, 1 tables"),
        (lambda: model.decode(torch.tensor([1]), pool, [[0]], [2048]), "outside"),
        (lambda: load_model("nobody-knows-this"), "smollm2-135m"),
        (lambda: load_model("tiny", device="mps"), "not supported"),
        (lambda: load_model("tiny", dtype="int4"), "expected auto"),
    ]:
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_length_dependent_rope_is_refused():
    decoder = Decoder(1, 8, 1, 1, 8, 8, rope_scaling=(("rope_type", "dynamic"), ("factor", 2.0)))
    with pytest.raises(ValueError, match="dynamic"):
        rope_for(decoder, 128, torch.device("cpu"))


def test_auto_dtype_is_stable_and_bf16_only_where_that_is_clearly_faster(monkeypatch):
    cpu = torch.device("cpu")
    assert load_model("tiny").dtype == resolve_dtype("auto", cpu) == resolve_dtype("auto", cpu)
    for bf16, expected in ((30.0, "fp32"), (110.0, "fp32"), (200.0, "bf16")):  # emulated, a tie, instructions for it
        monkeypatch.setattr(loading, "cpu_gflops_per_s", lambda rate=bf16: {"fp32": 100.0, "bf16": rate})
        assert resolve_dtype("auto", cpu) == expected


def test_a_busy_spell_slows_both_dtypes_alike(monkeypatch):
    now = itertools.count()
    seen = []

    def linear(x, w):
        seen.append(x.dtype)
        for _ in range(100 if len(seen) <= 5 else 3):  # the first five products meet a busy machine
            next(now)

    monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    monkeypatch.setattr(loading, "F", SimpleNamespace(linear=linear))
    rates = loading.cpu_gflops_per_s.__wrapped__()
    assert rates["fp32"] == rates["bf16"]
    assert seen[:4] == [torch.float32, torch.bfloat16] * 2


def test_a_gpu_that_is_not_there_is_refused_and_one_that_emulates_bf16_computes_in_fp16(monkeypatch):
    capability = {0: (7, 5), 1: (8, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capability))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[device.index])
    assert [str(resolve_device(name)) for name in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match="'cuda:2' was asked for, but torch sees 2 of them, from cuda:0 on"):
        resolve_device("cuda:2")
    assert [resolve_dtype("auto", resolve_device(name)) for name in ("cuda:0", "cuda:1")] == ["fp16", "bf16"]


ENGLISH = (
    "The lighthouse keeper wrote down the weather every evening, because nobody else on the island could read the sky. "
    "On most days the entry was short: wind from the west, a little rain, two ships passing far out. In winter the "
    "storms came in rows, and the book filled with numbers, names and the hours at which the lamp had to be trimmed. "
    "When the mail boat finally arrived in March, it brought letters, flour, 12 new wicks and a question from the "
    "harbour office: how many nights had the light failed since 1893? The answer, he wrote back, was none. "
)


@pytest.fixture(scope="module")
def smollm2_pair(smollm2, smollm2_path):
    """512 ids of English, transformers' fp32 model holding the same dequantised tensors, and what it makes of them."""
    config = transformers.LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
        vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100_000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    missing = reference.load_state_dict(dict(GgufFile(smollm2_path).tensors()), strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    assert missing.unexpected_keys == []
    ids = torch.tensor(smollm2.tokenizer.encode(ENGLISH * 6)[:512])
    assert len(ids) == 512
    with torch.no_grad():
        return ids, reference, reference(ids[None]).logits[0]


@pytest.mark.smollm2
def test_the_real_model_agrees_with_transformers_in_fp32(smollm2, smollm2_pair):
    ids, _, expected = smollm2_pair
    pool = BlockPool(smollm2.layout(16), 40, poison=True)
    logits = smollm2.prefill(ids, pool, table(pool, 512), all_logits=True)
    assert (logits - expected).abs().max() <= 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    # and it is the real model, not two equal mistakes: English is far likelier than chance (ln 49152 = 10.8)
    assert torch.nn.functional.cross_entropy(logits[:-1], ids[1:]) < 3.0


@pytest.mark.smollm2
def test_the_real_model_in_bf16_errs_no_more_than_transformers_in_bf16(smollm2_pair, smollm2_path):
    ids, reference, exact = smollm2_pair
    with torch.no_grad():
        theirs_bf16 = copy.deepcopy(reference).to(torch.bfloat16)(ids[None]).logits[0].float()
    ours = load_model(smollm2_path, dtype="bf16")
    pool = BlockPool(ours.layout(16), 40)
    logits = ours.prefill(ids, pool, table(pool, 512), all_logits=True).float()

    def rms(x):
        return float((x - exact).square().mean().sqrt())

    assert rms(logits) <= 1.1 * rms(theirs_bf16)
