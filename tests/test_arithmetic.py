"""Bytes and FLOPs are exact: by hand, against a token-by-token sum, and in the properties any count must have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.arch import ModelArch
from kvlab.arithmetic import (
    KV_DTYPES,
    attention_flops,
    element_bytes,
    kv_bytes,
    kv_bytes_by_component,
    kv_dtype_for,
    linear_flops,
    prefill_flops,
)
from kvlab.layers import CacheComponent, Layer, Pairs


def _arch(*layers: Layer) -> ModelArch:
    return ModelArch("m", "m", hidden=64, vocab=100, max_positions=10**6, layers=layers, tied_embeddings=True)


def _heads(heads: int, size: int = 32, **kwargs) -> tuple[CacheComponent, ...]:
    return tuple(CacheComponent(name, heads * size, heads=heads, **kwargs) for name in "kv")


FULL = _arch(Layer("full", _heads(8), 1000, 2000, (Pairs(512),)))
WINDOW = _arch(Layer("sliding", _heads(8, cap_tokens=100), 1000, 2000, (Pairs(512, limit=100),)))
CHUNK = _arch(Layer("chunked", _heads(8, cap_tokens=100, chunked=True), 1000, 2000, (Pairs(512, chunk=100),)))
LATENT = _arch(
    Layer(
        "full",
        (CacheComponent("latent", 512), CacheComponent("rope_key", 64)),
        1000,
        2000,
        (Pairs(320),),
        cached_key_macs=700,
        absorbed=Layer(
            "full", (CacheComponent("latent", 512), CacheComponent("rope_key", 64)), 1000, 2000, (Pairs(1088),)
        ),
    )
)
STATE = _arch(Layer("state", (CacheComponent("state", fixed_elements=1024, heads=8, dtype="fp32"),), 1000, scan_macs=9))
COMPRESSED = _arch(
    Layer(
        "compressed_sparse",
        (CacheComponent("window", 64, cap_tokens=16), CacheComponent("compressed", 64, tokens_per_entry=4)),
        1000,
        2000,
        (Pairs(128, limit=16), Pairs(128, limit=5, tokens_per_key=4), Pairs(32, tokens_per_key=4)),
    )
)
MIXED = _arch(*(a.layers[0] for a in (FULL, WINDOW, CHUNK, STATE, COMPRESSED)))
EVERY = [FULL, WINDOW, CHUNK, LATENT, STATE, COMPRESSED, MIXED]

archs = st.sampled_from(EVERY)
lengths = st.integers(0, 1000)
some_tp = st.sampled_from([1, 2, 3, 4, 8, 16])
blocks = st.sampled_from([None, 1, 16, 17, 64])
batches = st.sampled_from([None, 1, 64, 500])


class TestBytes:
    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [("bf16", 1024), ("fp16", 1024), ("fp32", 2048), ("fp8", 512), ("int8", 512), ("q8_0", 544), ("q4_0", 288)],
    )
    def test_dtypes(self, dtype, expected):
        assert kv_bytes(FULL, 1, kv_dtype=dtype) == expected  # 2 × 8 heads × 32

    def test_a_group_that_does_not_divide_is_refused(self):
        with pytest.raises(ValueError, match="q8_0 stores groups of 32 elements, but an entry here has 48"):
            element_bytes(48, "q8_0")
        with pytest.raises(ValueError, match="unknown KV dtype 'fp7'; known: fp64"):
            kv_bytes(FULL, 1, kv_dtype="fp7")

    @pytest.mark.parametrize(
        ("name", "ours"),
        [
            ("float32", "fp32"),
            ("torch.bfloat16", "bf16"),
            ("half", "fp16"),
            ("fp8_e4m3", "fp8"),
            ("float8_e5m2", "fp8"),
        ],
    )
    def test_torchs_and_vllms_names_of_a_dtype_are_understood(self, name, ours):
        assert kv_bytes(FULL, 10, kv_dtype=name) == kv_bytes(FULL, 10, kv_dtype=ours)
        assert kv_dtype_for(FULL, name) == ours

    def test_a_name_instead_of_a_shape_is_refused(self):
        for count in (lambda: kv_bytes("tiny", 1), lambda: prefill_flops("tiny", 0, 1)):
            with pytest.raises(ValueError, match=r"arch is 'tiny'; expected a ModelArch: ModelArch.preset\(name\)"):
                count()

    def test_numpy_integers_are_counts(self):
        size = kv_bytes(FULL, np.int32(10**6), tp=np.int64(2), block_size=np.int8(16))
        assert size == kv_bytes(FULL, 10**6, tp=2, block_size=16)
        assert type(size) is int
        assert prefill_flops(FULL, np.int32(0), np.int32(10**6)) == prefill_flops(FULL, 0, 10**6)

    def test_no_dtype_means_what_the_config_prescribes(self):
        import dataclasses

        assert kv_bytes(dataclasses.replace(FULL, kv_dtype="fp8"), 10) * 2 == kv_bytes(FULL, 10)
        assert kv_bytes(dataclasses.replace(FULL, kv_dtype="fp8"), 10, kv_dtype="bf16") == kv_bytes(FULL, 10)

    @pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
    def test_kv_heads_are_divided_over_ranks_and_replicated_where_they_do_not_divide(self, tp, heads):
        assert kv_bytes(FULL, 10, tp=tp) == 10 * 2 * heads * 32 * 2

    def test_latents_are_on_every_rank_and_states_are_divided(self):
        assert kv_bytes(LATENT, 10, tp=8) == kv_bytes(LATENT, 10) == 10 * 576 * 2
        assert kv_bytes(STATE, 10, tp=8) == 1024 * 4 // 8

    @pytest.mark.parametrize(("tokens", "held"), [(0, 0), (1, 16), (16, 16), (17, 32)])
    def test_whole_blocks(self, tokens, held):
        assert kv_bytes(FULL, tokens, block_size=16) == held * 1024

    def test_a_window_stops_growing(self):
        assert kv_bytes(WINDOW, 99) == 99 * 1024
        assert kv_bytes(WINDOW, 5000) == 100 * 1024

    @pytest.mark.parametrize(
        ("batched", "held"),
        # ceil((100 - 1 + batched) / 16) + 1 blocks (vLLM v1, SlidingWindowSpec.max_memory_usage_bytes)
        [(None, (7 + 1) * 16), (1, (7 + 1) * 16), (64, (11 + 1) * 16), (512, (39 + 1) * 16), (10**6, 5008)],
    )
    def test_chunked_prefill_holds_more_pages_of_a_window(self, batched, held):
        assert kv_bytes(WINDOW, 5000, block_size=16, max_batched_tokens=batched) == held * 1024

    @pytest.mark.parametrize(("batched", "held"), [(None, 100), (60, 100 + 59)])
    def test_without_blocks_a_chunk_of_queries_needs_the_window_of_its_oldest(self, batched, held):
        assert kv_bytes(WINDOW, 5000, max_batched_tokens=batched) == held * 1024

    def test_aligned_chunks_need_no_extra_page(self):
        assert kv_bytes(CHUNK, 5000) == 100 * 1024
        assert kv_bytes(CHUNK, 5000, block_size=16) == 7 * 16 * 1024
        assert kv_bytes(CHUNK, 5000, block_size=16, max_batched_tokens=60) == 10 * 16 * 1024

    def test_a_state_has_one_size_once_there_is_a_token(self):
        assert [kv_bytes(STATE, n) for n in (0, 1, 10**6)] == [0, 4096, 4096]
        assert kv_bytes(STATE, 5, kv_dtype="fp8") == 4096  # the state has a dtype of its own

    @pytest.mark.parametrize(("tokens", "entries"), [(3, 0), (4, 1), (7, 1), (8, 2)])
    def test_a_compressed_entry_exists_once_its_group_is_full(self, tokens, entries):
        assert kv_bytes_by_component(COMPRESSED, tokens)["compressed"] == entries * 64 * 2

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"tokens": -1}, "tokens is -1"),
            ({"tokens": 1.5}, "tokens is 1.5"),
            ({"tokens": True}, "tokens is True"),
            ({"tokens": 1, "tp": 0}, "tp is 0"),
            ({"tokens": 1, "block_size": 0}, "block_size is 0"),
            ({"tokens": 1, "max_batched_tokens": 0}, "max_batched_tokens is 0"),
        ],
    )
    def test_sizes_that_make_no_sense_are_refused(self, kwargs, message):
        with pytest.raises(ValueError, match=message):
            kv_bytes(FULL, **kwargs)

    @given(archs, lengths, lengths, some_tp, blocks, batches)
    def test_more_tokens_never_take_fewer_bytes(self, arch, a, b, tp, block, batched):
        low, high = sorted((a, b))
        sizes = [kv_bytes(arch, n, tp=tp, block_size=block, max_batched_tokens=batched) for n in (low, high)]
        assert sizes[0] <= sizes[1]

    @given(archs, lengths, some_tp, some_tp, blocks)
    def test_more_ranks_never_hold_more_each_nor_less_together(self, arch, tokens, a, b, block):
        few, many = sorted((a, b))
        one, other = (kv_bytes(arch, tokens, tp=tp, block_size=block) for tp in (few, many))
        assert other <= one
        assert other * many >= kv_bytes(arch, tokens, block_size=block)

    @given(archs, lengths, some_tp, blocks, batches, st.sampled_from(["bf16", "fp8", "q8_0", "q4_0"]))
    def test_components_add_up_and_blocks_only_add(self, arch, tokens, tp, block, batched, dtype):
        kwargs = {"kv_dtype": dtype, "tp": tp, "max_batched_tokens": batched}
        total = kv_bytes(arch, tokens, block_size=block, **kwargs)
        assert total == sum(kv_bytes_by_component(arch, tokens, block_size=block, **kwargs).values())
        assert total >= kv_bytes(arch, tokens, kv_dtype=dtype, tp=tp)

    def test_the_bytes_of_a_dtype_are_per_whole_group(self):
        assert all(size > 0 and group in (1, 16, 32) for size, group in KV_DTYPES.values())


def _token_by_token(arch: ModelArch, start: int, stop: int) -> int:
    """Attention FLOPs by looking at each query alone: what a query sees, from the definitions."""
    macs = 0
    for i in range(start, stop):
        for layer in arch.layers:
            macs += layer.scan_macs
            for p in layer.pairs:
                seen = i % p.chunk + 1 if p.chunk else (i + 1) // p.tokens_per_key
                macs += p.macs * (seen if p.limit is None else min(seen, p.limit))
    return 2 * macs + 2 * start * sum(layer.cached_key_macs for layer in arch.layers) * (stop > start)


class TestFlops:
    def test_smollm2_by_hand(self):
        arch = ModelArch.preset("smollm2-135m")
        linear = 30 * (576 * (2 * 9 * 64 + 2 * 3 * 64) + 3 * 576 * 1536)  # q, o, k, v; gate, up, down
        assert linear_flops(arch, 1) == 2 * linear
        assert attention_flops(arch, 99, 100) == 30 * 4 * 9 * 64 * 100
        assert prefill_flops(arch, 99, 100) == 2 * linear + 30 * 4 * 9 * 64 * 100 + 2 * 576 * 49152

    @pytest.mark.parametrize(("head", "ratio"), [(True, 3.06), (False, 3.60)])
    def test_token_8000_of_smollm2_costs_three_times_token_1(self, head, ratio):
        arch = ModelArch.preset("smollm2-135m")
        left_out = 0 if head else 2 * arch.head_macs
        last, first = (prefill_flops(arch, n - 1, n) - left_out for n in (8000, 1))
        assert last / first == pytest.approx(ratio, abs=0.005)

    @given(archs, lengths, lengths)
    def test_attention_equals_the_sum_over_queries(self, arch, a, b):
        start, stop = sorted((a, b))
        assert attention_flops(arch, start, stop) == _token_by_token(arch, start, stop)

    @given(archs, st.integers(1, 1000), st.integers(1, 1000))
    def test_two_passes_cost_one_pass_plus_a_head_and_the_latents_expanded_again(self, arch, a, more):
        again = 2 * a * arch.cached_key_macs
        one, two = prefill_flops(arch, 0, a + more), prefill_flops(arch, 0, a) + prefill_flops(arch, a, a + more)
        assert two == one + 2 * arch.head_macs + again

    @given(archs, lengths, lengths, lengths)
    def test_later_tokens_never_cost_less(self, arch, a, b, count):
        early, late = sorted((a, b))
        if arch in (CHUNK, MIXED):  # but for chunks, whose first token sees itself only
            early, late = early - early % 100, late - late % 100
        assert prefill_flops(arch, early, early + count) <= prefill_flops(arch, late, late + count)

    def test_nothing_to_compute_costs_nothing(self):
        assert prefill_flops(FULL, 7, 7) == 0
        assert attention_flops(LATENT, 7, 7) == 0

    def test_absorbed_pairs_are_wider_but_cached_latents_stay_as_they_are(self):
        absorbed = prefill_flops(LATENT, 1000, 1001, mla="absorbed")
        assert absorbed == 2 * (3000 + 1088 * 1001 + 6400)
        assert prefill_flops(LATENT, 1000, 1001) == 2 * (3000 + 320 * 1001 + 700 * 1000 + 6400)

    @pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
    def test_a_range_that_is_none_is_refused(self, start, stop):
        with pytest.raises(ValueError, match=f"positions \\[{start}, {stop}\\) are not a range"):
            prefill_flops(FULL, start, stop)
        with pytest.raises(ValueError, match=r"stop is 8192\.5; expected an integer"):
            prefill_flops(FULL, 0, 8192.5)

    def test_an_unknown_form_of_mla_is_refused(self):
        with pytest.raises(ValueError, match="mla is 'folded'; expected 'expanded' or 'absorbed'"):
            prefill_flops(FULL, 0, 1, mla="folded")
