"""Attention's paths compute the same: by blocks as at once, for one suffix as for another, whatever lies behind."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kvlab.attention import _QUERY_BLOCK, _fused, attend, attend_each, causal_mask, pad

BLOCK = _QUERY_BLOCK["cpu"]


def heads(rows, keys, *, kv_heads=2, group=3, dim=16, dtype=torch.float64, seed=0):
    """q [rows, kv_heads · group, dim], k and v [keys, kv_heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (rows, kv_heads * group), (keys, kv_heads), (keys, kv_heads)
    return [torch.randn(*size, dim, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def plain(q, k, v):
    """Softmax over the visible keys, all scores at once, in the dtype of the arguments."""
    group, past = q.shape[1] // k.shape[1], len(k) - len(q)
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
    seen = torch.arange(len(k)) <= past + torch.arange(len(q))[:, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


@pytest.mark.parametrize("rows", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 5 * BLOCK + 1])
@pytest.mark.parametrize("past", [0, 1, 50, 700])
@pytest.mark.parametrize("group", [1, 3])
def test_blocks_of_queries_see_exactly_their_past(rows, past, group):
    q, k, v = heads(rows, past + rows, group=group)
    mask = causal_mask(rows, past + rows, group, q) if rows > 1 else None
    assert torch.allclose(attend(q, k, v, mask), plain(q, k, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_the_error_is_that_of_the_dtype(dtype, most):
    q, k, v = heads(200, 260, dtype=dtype)
    exact = plain(*(t.double() for t in (q, k, v)))
    assert (attend(q, k, v, causal_mask(200, 260, 3, q)).double() - exact).abs().max() < most


def test_attention_is_what_sdpa_computes_for_views_that_are_not_contiguous():
    fused = torch.randn(130, 10, 16)  # as a layer's projection has them: q, k and v side by side
    q, k, v = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0]
    assert torch.allclose(attend(q, k, v, causal_mask(130, 130, 3, q)), expected.transpose(0, 1).flatten(1), atol=1e-5)


@pytest.mark.parametrize("lengths", [[9], [9, 9], [1, 9, 4], [3, 2, 1]])
def test_each_of_a_batch_sees_its_own_keys_and_nothing_behind_them(lengths):
    keys, batch = 12, len(lengths)
    q, k, v = heads(batch, batch * keys)
    expected = torch.empty(batch, q.shape[1] * 16, dtype=torch.float64)
    for b, length in enumerate(lengths):
        own = slice(b * keys, b * keys + length)
        expected[b] = plain(q[b : b + 1], k[own], v[own])[0]
        k[b * keys + length : (b + 1) * keys] = v[b * keys + length : (b + 1) * keys] = torch.nan
    padding = pad(torch.tensor(lengths), keys, q)
    assert (padding.mask is None) == (len(set(lengths)) == 1)
    for given in (None, padding):
        got = attend_each(q, k.clone(), v.clone(), torch.tensor(lengths), given)
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("before", [True, False])
def test_on_cuda_no_plan_is_built_for_each_length_and_the_choice_of_others_stays_as_it_was(monkeypatch, before):
    def attention(*_, **options):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), options))
        raise RuntimeError("out of memory")

    seen, was = [], torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    try:
        torch.backends.cuda.enable_cudnn_sdp(before)
        with pytest.raises(RuntimeError, match="out of memory"):
            _fused(SimpleNamespace(is_cuda=True), None, None, is_causal=True)
        assert seen == [(False, {"is_causal": True})]
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)
