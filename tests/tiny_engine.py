"""A tiny engine for tests: float64 models, and the same text without any cache to compare with."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from kvlab.adversaries import EarlyStreams, LateStreams
from kvlab.arch import ModelArch
from kvlab.layers import Decoder
from kvlab.loading import load_model
from kvlab.machine import Curve, Link, Machine, Prefill
from kvlab.pool import BlockPool
from kvlab.request import Request
from kvlab.streams import ThreadStreams
from kvlab.torch_executor import sample

VOCAB = 97
BACKENDS = {"thread": ThreadStreams, "late": LateStreams, "early": EarlyStreams}
# Far above what float64 leaves between two ways to add up the same products, far below what two tokens differ by.
TIE = 1e-9


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only lose by being shared out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@lru_cache
def tiny_model(kv_heads=2, seed=3, device="cpu"):
    """Two layers, four query heads: GQA with two KV heads, MHA with four."""
    d = Decoder(layers=2, hidden=32, heads=4, kv_heads=kv_heads, head_dim=8, ffn=48)
    arch = ModelArch(f"tiny-{kv_heads}", "llama", 32, VOCAB, 512, (d.layer,) * d.layers, True, d)
    return load_model(arch, device=device, dtype="fp64", seed=seed)


def text(n, seed=0):
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits_without_cache(model, tokens):
    """Logits at every position [len(tokens), vocab], computed at once in a pool of their own."""
    pool = BlockPool(model.layout(16), -(-len(tokens) // 16), device=model.device)
    return model.prefill(tokens, pool, list(range(pool.num_blocks)), all_logits=True)


def check_tokens(model, request: Request, generated) -> int:
    """Assert that each of the `generated` positions holds what a run without cache gives; returns the ties among them.

    Each token is compared behind the tokens before it, so all being equal means that the whole run is.
    """
    if not generated:
        return 0
    logits = logits_without_cache(model, request.tokens[:-1] if len(request.tokens) > 1 else request.tokens)
    ties = 0
    for position in sorted(generated):
        row, token = logits[position - 1], request.tokens[position]
        assert torch.isfinite(row).all()
        if request.sampling.temperature:
            so_far = Request(0, request.tokens[:position], 1, sampling=request.sampling)
            assert token == sample(row, so_far), f"token {position} of request {request.id} is drawn otherwise"
            continue
        best = row.topk(2).values
        if best[0] - best[1] < TIE:
            ties += 1
            assert row[token] >= best[0] - TIE
        else:
            assert token == int(row.argmax()), f"token {position} of request {request.id} is wrong: {token}"
    return ties


def tiny_machine(gb_per_s=0.05, flops_per_s=1e9) -> Machine:
    """A machine whose host and disk make every choice possible at some length."""
    link = Link(Curve(((1.0, gb_per_s),)), per_request_s=2e-5)
    prefill = Prefill(1e-5, Curve(((1.0, flops_per_s),)), Curve(((1.0, flops_per_s),)), "tiny")
    return Machine("test", prefill, {"host": {"load": link}, "disk": {"load": link}})
