"""The rows of attention, prefill and decode: what they time is the work that they name, and their bounds are true."""

import os

import pytest
import torch
from stand_in_graph import RecordingStreams

from kvlab.attention import attend, causal_mask
from kvlab.blocks import blocks_for
from kvlab.experiments.bench.attention import attention_row, flex, products, sdpa
from kvlab.experiments.bench.decode import decode_rows
from kvlab.experiments.bench.model import prefill_row, weight_bytes, weight_products
from kvlab.loading import load_model
from kvlab.pool import BlockPool
from kvlab.weights import parameter_count

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="fp32")


@pytest.mark.parametrize(("tokens", "cached"), [(1, 40), (7, 40), (90, 0)])
def test_sdpa_and_ours_are_given_the_same_task(tokens, cached):
    q, k, v = torch.randn(tokens, 6, 16), torch.randn(cached + tokens, 2, 16), torch.randn(cached + tokens, 2, 16)
    mask = causal_mask(tokens, cached + tokens, 3, q) if tokens > 1 else None
    theirs = sdpa(q, k, v)()[0].transpose(0, 1).flatten(1)
    assert torch.allclose(attend(q, k, v, mask), theirs, atol=1e-5)
    products(q, k, v)()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("tokens", "cached"), [(1, 40), (7, 40), (90, 0)])
def test_flex_attention_is_given_the_same_task(tokens, cached):
    q, k, v = torch.randn(tokens, 6, 16), torch.randn(cached + tokens, 2, 16), torch.randn(cached + tokens, 2, 16)
    assert torch.allclose(flex(q, k, v, lambda function: function)(), sdpa(q, k, v)(), atol=1e-5)


def test_an_attention_row_names_its_ratio_and_goal():
    row = attention_row("here", (6, 2, 16), 20, 40, "cpu", "fp32", goal=2.0, rounds=2)
    assert row.of_peer["sdpa"] == pytest.approx(row.peers["sdpa"] / row.ours)
    assert row.of_floor == pytest.approx(row.floor / row.ours)
    assert row.met == (row.of_peer["sdpa"] >= 2)


def test_the_bytes_of_a_step_are_the_checkpoints_matrices(tiny):
    d = tiny.decoder
    vectors = (2 * d.layers + 1) * d.hidden  # norms; none of tiny's other tensors is a vector
    embedding = 0 if tiny.arch.tied_embeddings else tiny.arch.vocab * d.hidden  # looked up, not multiplied by
    assert weight_bytes(tiny) == 4 * (parameter_count(tiny.arch) - vectors - embedding)


def test_the_products_are_those_of_a_pass(tiny):
    assert weight_products(tiny, 5)().shape == (1, tiny.arch.vocab)
    assert weight_products(tiny, 5, all_rows=True)().shape == (5, tiny.arch.vocab)


def test_rows_of_prefill_and_decode_compare_with_floor_and_peer(tiny):
    ids = [token % tiny.arch.vocab for token in range(400)]
    alone = prefill_row(tiny, ids[:40], None, rounds=2)
    assert alone.peers == {}
    assert alone.of_floor == pytest.approx(alone.floor / alone.ours)
    row = prefill_row(tiny, ids[:40], lambda _: 10.0, rounds=2)  # a peer that says it took 10 seconds
    assert row.peers == {"transformers": pytest.approx(10_000.0)}
    assert row.met

    def slow(prompts):
        assert prompts.shape == (2, 64)
        return lambda steps: torch.zeros(steps)

    step, matrices, attention = decode_rows(tiny, ids, 2, 64, slow, steps=2, rounds=2)
    assert "batch 2" in step.name
    assert set(step.of_peer) == {"transformers"}
    assert step.floor > matrices.floor > 0
    assert attention.floor > 0
    assert "transformers" not in next(decode_rows(tiny, ids, 1, 64, None, steps=2, rounds=2)).of_peer


def test_decode_has_a_row_for_graphs_where_there_are_any(tiny, monkeypatch):
    streams = RecordingStreams()
    monkeypatch.setattr("kvlab.experiments.rig.streams_for", lambda _: streams)
    ids = [token % tiny.arch.vocab for token in range(400)]
    step, graph, matrices, _ = decode_rows(tiny, ids, 2, 64, lambda _: lambda _: 1.0, steps=2, rounds=2)
    assert graph.name == f"{step.name}: as a CUDA graph"
    assert graph.floor == step.floor > matrices.floor
    assert set(graph.of_peer) == {"transformers"}
    assert streams.stand_in.replays == 3 * (2 + 2)  # in each round two steps and both parts, the warm-up's too
    assert len(streams.stand_in.recordings) == 3


@pytest.mark.smollm2
def test_transformers_decodes_the_same_tokens_each_time_it_is_asked(smollm2):
    pytest.importorskip("transformers")
    from kvlab.experiments.peers import transformers_decode

    ids = smollm2.tokenizer.encode("The lighthouse keeper wrote down the weather every evening, because nobody else")
    decode = transformers_decode(smollm2)(torch.tensor([ids]))
    theirs = decode(4)
    assert decode(4) == theirs
    blocks = list(range(blocks_for(len(ids) + 4, 16)))
    pool = BlockPool(smollm2.layout(16), len(blocks))
    newest, ours = int(smollm2.prefill(ids, pool, blocks).argmax()), []
    for position in range(len(ids), len(ids) + 4):
        ours.append(newest)
        newest = int(smollm2.decode(torch.tensor([newest]), pool, [blocks], [position]).argmax())
    assert theirs == [ours]
