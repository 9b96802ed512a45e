"""What lesson 07 shows of traffic that shares the machine or a GPU: all-reduces beside reloads, decode as a graph."""

import multiprocessing
import time

import pytest
import torch

import kvlab
from kvlab.experiments import all_reduce, decode_graph
from kvlab.records import median

TEXT = [(i * 7919 + i // 3) % 250 for i in range(64)]
needs_gloo = pytest.mark.skipif(bool(all_reduce.missing()), reason=all_reduce.missing() or "gloo is here")


@pytest.fixture(scope="module")
def model():
    return kvlab.load_model("tiny", dtype="fp32")


@needs_gloo
@pytest.mark.parametrize("victim", [0, 1])
def test_two_ranks_add_up_when_told_to_and_one_that_dies_ends_the_other_one_too(victim):
    before = set(multiprocessing.active_children())
    ranks = all_reduce.Ranks(payload_bytes=64)
    assert len(set(multiprocessing.active_children()) - before) == 2
    for _ in range(2):
        ranks.begin()
        time.sleep(0.05)
        seconds = ranks.end()
        assert len(seconds) >= 1
        assert all(each > 0 for each in seconds)
    ranks.begin()
    ranks._processes[victim].kill()
    ranks._processes[victim].join()

    def go_on():
        for _ in range(2):  # the first answer may have been on its way
            ranks.end()
            ranks.begin()

    with pytest.raises(RuntimeError, match="the two ranks have failed"):
        go_on()
    assert set(multiprocessing.active_children()) == before


@needs_gloo
def test_ranks_that_do_not_meet_are_ended():
    before = set(multiprocessing.active_children())
    with pytest.raises(RuntimeError, match=r"no answer within 0\.001 s"):
        all_reduce.Ranks(timeout_s=0.001)
    assert set(multiprocessing.active_children()) == before


@needs_gloo
def test_each_way_has_the_samples_that_its_name_says_and_a_throttled_reload_is_slower(model):
    before = set(multiprocessing.active_children())
    record = all_reduce.measure(model, TEXT, prefix=64, payload_bytes=256, throttle=1000, seconds=0.02, rounds=2)
    assert set(multiprocessing.active_children()) == before
    kinds = {name: {kind for kind, samples in both.items() if samples} for name, both in record["ways"].items()}
    assert kinds == {
        "all-reduces alone": {"all_reduce_s"},
        "reloads alone": {"reload_s"},
        "both": {"all_reduce_s", "reload_s"},
        "both, reloads throttled": {"all_reduce_s", "reload_s"},
    }
    # It waits until a link of a thousandth of the fastest reload's rate would have delivered: that is arithmetic.
    throttled, alone = (record["ways"][name]["reload_s"] for name in ("both, reloads throttled", "reloads alone"))
    assert min(throttled) > 50 * min(alone)
    assert record["median_s"]["all-reduces alone"]["reload_s"] is None
    assert record["median_s"]["reloads alone"]["reload_s"] == median(alone)
    assert record["parameters"]["reload_bytes"] == kvlab.kv_bytes(model.arch, 64, "fp32")


def test_without_gloo_one_sentence_says_so(monkeypatch, model):
    monkeypatch.setattr(all_reduce, "missing", lambda: "this build of torch has no gloo")
    with pytest.raises(ValueError, match="has no gloo: use torch from"):
        all_reduce.measure(model, TEXT, prefix=64)


@pytest.mark.parametrize("prefix", [0, 63, 80])
def test_an_all_reduce_beside_part_of_a_block_is_refused(model, prefix):
    with pytest.raises(ValueError, match=f"prefix is {prefix}; expected whole blocks of 16"):
        all_reduce.measure(model, TEXT, prefix=prefix)


# Decode as a graph ---------------------------------------------------------------------------------------------------


def test_a_graph_without_a_gpu_is_refused_in_a_line(model):
    with pytest.raises(ValueError, match="needs a CUDA device; this model is on cpu"):
        decode_graph.measure(model)


def test_pools_of_other_seeds_give_other_attention_and_new_bytes_are_seen(model):
    pool, other = (decode_graph._pool(model, 64, seed) for seed in (0, 1))
    step = decode_graph._attention(model, pool, 64)
    before, elsewhere = step(), decode_graph._attention(model, other, 64)()
    assert before.shape == (model.decoder.layers, model.decoder.heads * model.decoder.head_dim)
    assert not decode_graph._alike(before, elsewhere)
    pool.rows.copy_(other.rows)
    assert decode_graph._alike(step(), elsewhere)


def test_the_clock_waits_for_the_device_of_the_model(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    decode_graph._median_s(lambda: None, torch.device("cuda", 1), 2)
    assert waited == [torch.device("cuda", 1)] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_a_graph_follows_the_pool_that_it_was_recorded_with_and_no_other():
    on_gpu = kvlab.load_model("tiny", device="cuda")
    record = decode_graph.measure(on_gpu, prefix=64, repeats=3)
    assert (record["follows_the_pool"], record["follows_a_new_pool"]) == (True, False)
