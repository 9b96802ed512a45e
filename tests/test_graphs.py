"""Decode from recorded graphs gives what `Model.decode` gives, whatever came before, and touches no block of others."""

import gc
import re
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import fields, is_dataclass, replace
from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from stand_in_graph import Recording, RecordingStreams, StandInRecorder
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.graphs import DecodeGraphs, decode_with
from kvlab.loading import load_model
from kvlab.policy import Recompute, Reload
from kvlab.pool import BlockPool
from kvlab.streams import CudaStreams, ThreadStreams, graph_recorder
from kvlab.tiers import HostTier

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
SIZE = 4  # tokens of a block


class Sequences:
    """Sequences in a poisoned pool, each in blocks of its own that follow no order. `lengths` tokens are cached."""

    def __init__(self, model, lengths, room=4, device="cpu", seed=0):
        self.model, self.lengths = model, list(lengths)
        need = [-(-(n + room) // SIZE) for n in lengths]
        self.pool = BlockPool(model.layout(SIZE), sum(need) + 3, device=device, poison=True)
        order = torch.randperm(sum(need) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in need]
        self.others = order
        for n, table in zip(lengths, self.tables, strict=True):
            model.prefill(text(n, seed=n), self.pool, table)

    def bits(self, blocks):
        index = self.pool.group_index(torch.tensor(blocks, device=self.pool.device), 0, self.pool.layout.layers)
        return self.pool.rows[index].view(torch.int64)

    def step(self, decode, number, rows=None):
        rows = range(len(self.lengths)) if rows is None else rows
        ids = torch.tensor([text(1, seed=100 * number + row)[0] for row in rows])
        logits = decode(ids, self.pool, [self.tables[row] for row in rows], [self.lengths[row] for row in rows])
        for row in rows:
            self.lengths[row] += 1
        return logits


def same(a, b):
    return torch.allclose(a, b, rtol=1e-11, atol=1e-12)


# The stand-in ---------------------------------------------------------------------------------------------------------


def test_the_stand_in_replays_what_lies_in_memory_and_runs_no_python():
    given, factor, ran = torch.tensor([1.0, 2.0]), [3.0], []

    def step():
        ran.append(1)
        return (given * factor[0]).view(1, 2)[0] + 1

    replay = StandInRecorder()(step)
    given.copy_(torch.tensor([5.0, 6.0]))
    factor[0] = 100.0
    assert replay().tolist() == [16.0, 19.0]
    assert len(ran) == 2  # to warm up, and to record


@pytest.mark.parametrize(
    "step",
    [lambda x: x * int(x.sum()), lambda x: x[x > 1], lambda x: x + torch.tensor([1, 2]), lambda x: x.nonzero()],
    ids=["a value on the host", "a mask", "a list", "positions"],
)
def test_the_stand_in_refuses_what_no_graph_can_hold(step):
    x = torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match="not permitted"), torch.inference_mode():
        StandInRecorder()(lambda: step(x))


def without_bytes(thing):
    """The same tensors, dataclasses of them included, on a device where they have shapes and nothing can be read."""
    if isinstance(thing, torch.Tensor):
        return torch.empty(thing.shape, dtype=thing.dtype, device="meta")
    if isinstance(thing, tuple):
        return tuple(without_bytes(item) for item in thing)
    if is_dataclass(thing):
        return replace(thing, **{field.name: without_bytes(getattr(thing, field.name)) for field in fields(thing)})
    return thing


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_a_step_stays_on_its_device(dtype):
    model = load_model(tiny_model().arch, dtype=dtype)
    weights, rope = without_bytes(model.weights), without_bytes(model.rope)
    model = replace(model, device=torch.device("meta"), weights=weights, rope=rope)
    pool = BlockPool(model.layout(16), 8, device="meta")
    given = torch.empty(4, 2 + 20, dtype=torch.int64, device="meta")
    with Recording() as recorded:
        logits = model.decode_static(given, pool)
    assert (logits.shape, logits.device) == ((4, model.arch.vocab), model.device)
    assert len(recorded.calls) > 20
    for away in (lambda: given.cpu(), lambda: given + torch.ones(1), lambda: given.copy_(torch.ones(4, 22))):
        with pytest.raises(RuntimeError), Recording():
            away()


# A step ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[1], [7], [3, 30], [4, 1, 17], [5, 8, 2, 23, 11]], ids=str)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_steps_from_a_graph_give_the_logits_of_decode_in_blocks_that_fill_up(lengths, kv_heads):
    model, record = tiny_model(kv_heads), StandInRecorder()
    ours, plain = (Sequences(model, lengths, room=10) for _ in range(2))
    decode = DecodeGraphs(model, record).decode
    others = ours.bits(ours.others)
    for number in range(10):  # each sequence goes into two new blocks, full of NaN
        logits = ours.step(decode, number)
        assert logits.shape == (len(lengths), model.arch.vocab)
        assert same(logits, plain.step(model.decode, number))
    assert (len(record.recordings), record.replays) == (1, 10)
    assert torch.equal(ours.bits(ours.others), others)


def test_rows_that_fill_a_batch_up_leave_all_but_the_slots_of_the_batch_as_they_are():
    model = tiny_model()
    sequences = Sequences(model, [6, 9, 13])
    everything = list(range(sequences.pool.num_blocks))
    before = sequences.bits(everything)
    sequences.step(DecodeGraphs(model, StandInRecorder()).decode, 0)
    changed = (sequences.bits(everything) != before).view(len(everything), -1, SIZE, 8).any(dim=(1, 3)).nonzero()
    assert changed.tolist() == sorted([sequences.tables[row][n // SIZE], n % SIZE] for row, n in enumerate([6, 9, 13]))


def test_batches_and_tables_that_grow_are_recorded_once_for_each_size():
    model, record = tiny_model(), StandInRecorder()
    ours, plain = (Sequences(model, [62, 78, 3, 1, 40], room=12) for _ in range(2))
    decode = DecodeGraphs(model, record).decode
    sizes = set()
    for number in range(12):
        rows = range(1 + number % 5)
        blocks = max(-(-(ours.lengths[row] + 1) // SIZE) for row in rows)
        sizes.add(({1: 1, 2: 2, 3: 4, 4: 4, 5: 8}[len(rows)], next(n for n in (16, 20, 24) if n >= blocks)))
        assert same(ours.step(decode, number, rows), plain.step(model.decode, number, rows))
    assert len(record.recordings) == len(sizes) == 7
    assert record.replays == 12


def test_what_was_returned_stays_as_it_was_when_other_steps_follow():
    model = tiny_model()
    sequences = Sequences(model, [5, 9, 12], room=8)
    decode = DecodeGraphs(model, StandInRecorder()).decode
    first = sequences.step(decode, 0)
    kept = first.clone()
    sequences.step(decode, 1)
    sequences.step(decode, 2, rows=[1])
    assert torch.equal(first, kept)
    assert torch.isfinite(first).all()


def test_another_pool_is_recorded_anew():
    model, record = tiny_model(), StandInRecorder()
    decode = DecodeGraphs(model, record).decode
    for turn, seed in enumerate((0, 1, 0)):
        ours, plain = (Sequences(model, [7, 2], seed=seed) for _ in range(2))
        for number in range(3):
            assert same(ours.step(decode, number), plain.step(model.decode, number))
        assert len(record.recordings) == turn + 1


def test_graphs_are_bounded_and_the_one_that_was_used_longest_ago_goes():
    model, record = tiny_model(), StandInRecorder()
    sequences = Sequences(model, [3] * 5, room=16)
    decode = DecodeGraphs(model, record, limit=2).decode
    recorded = []
    for number, rows in enumerate((1, 2, 1, 4, 1, 2)):
        sequences.step(decode, number, range(rows))
        recorded.append(len(record.recordings))
    assert recorded == [1, 2, 2, 3, 3, 4]


def test_where_recording_fails_one_warning_says_so_and_decode_goes_on():
    model, tries = tiny_model(), []

    def refuse(step):
        tries.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    ours, plain = (Sequences(model, [7, 2]) for _ in range(2))
    decode = DecodeGraphs(model, refuse).decode
    with pytest.warns(RuntimeWarning, match=r"could not record .* \(operation not permitted .*\)") as caught:
        first = ours.step(decode, 0)
    assert same(first, plain.step(model.decode, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(ours.step(decode, 1), plain.step(model.decode, 1))
    assert (len(tries), len(caught)) == (1, 1)


def test_an_error_of_a_replay_is_not_taken_for_one_of_recording():
    model = tiny_model()

    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        Sequences(model, [7, 2]).step(DecodeGraphs(model, lambda _: broken).decode, 0)


def test_a_callers_errors_are_those_of_decode():
    model = tiny_model()
    sequences = Sequences(model, [7])
    decode = DecodeGraphs(model, StandInRecorder()).decode
    for ids, tables, positions in (
        ([model.arch.vocab], sequences.tables, [7]),
        ([1], [[sequences.pool.num_blocks] * 3], [7]),
        ([1], [[0]], [7]),
        ([1, 2], sequences.tables, [7]),
        ([1], sequences.tables, [-1]),
    ):
        with pytest.raises(ValueError) as said:
            model.decode(torch.tensor(ids), sequences.pool, tables, positions)
        with pytest.raises(ValueError, match=re.escape(str(said.value))):
            decode(torch.tensor(ids), sequences.pool, tables, positions)


def test_what_a_graph_reads_stays_as_long_as_its_replay(monkeypatch):
    for name in ("CUDAGraph", "Stream", "current_stream", "device", "graph", "graph_pool_handle", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())

    def step(x):
        return x + 1

    x = torch.ones(3)
    there, replay = weakref.ref(x), graph_recorder(torch.device("cuda"))(partial(step, x))
    del x
    assert there() is not None, "its memory may be given to others, and a replay would read that"
    assert replay().tolist() == [2.0, 2.0, 2.0]
    del replay
    assert there() is None


def test_graphs_go_with_their_owner_and_need_no_garbage_collector():
    sequences = Sequences(tiny_model(), [7, 2])
    graphs = DecodeGraphs(sequences.model, partial)  # its replay holds the step, as that of a CUDA graph does
    sequences.step(graphs.decode, 0)
    there = weakref.ref(graphs)
    gc.disable()
    try:
        del graphs
        assert there() is None, "so would be the pool, and all of the graphs' memory"
    finally:
        gc.enable()


# In an engine ---------------------------------------------------------------------------------------------------------


def turns(streams, policy, **options):
    """The tokens of agents that come and go: their blocks leave for a tier, and come back as others."""
    model = tiny_model(device=streams.device.type)
    with (
        streams,
        Engine(model, 40, SIZE, [HostTier(1 << 20)], policy, poison=True, streams=streams, **options) as engine,
    ):
        requests = [engine.submit(text(n, seed=n), new) for n, new in ((3, 3), (14, 6), (25, 9))]
        for more in ([], [5, 6], [7]):
            if more:
                for request in reversed(requests):
                    engine.offload(request)
                filler = engine.submit(text(9, seed=99), 2)  # takes blocks that the others had
                engine.step()
                requests = [engine.resume(request, more, 6) for request in requests]
            while engine.step():
                engine.check_integrity()
        for request in (*requests, filler):
            check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))
        if isinstance(policy, Reload):
            assert engine.metrics()["hit_tokens"]["host"] > 40
        return [request.tokens for request in requests]


@pytest.mark.parametrize("policy", [Reload(), Recompute()], ids=["reload", "recompute"])
def test_an_engine_gives_the_same_tokens_with_graphs_and_without(policy):
    streams = RecordingStreams()
    assert turns(streams, policy) == turns(ThreadStreams(), policy)
    assert streams.stand_in.replays > 15
    assert len(streams.stand_in.recordings) == 3  # batches of 1, 2 and 4


def test_an_engine_that_is_told_not_to_records_nothing():
    streams = RecordingStreams()
    turns(streams, Reload(), cuda_graphs=False)
    assert not streams.stand_in.recordings


def test_a_device_without_graphs_decodes_as_the_model_does():
    assert ThreadStreams().recorder() is None
    assert decode_with(tiny_model(), None) == tiny_model().decode


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
def test_on_cuda_steps_from_graphs_give_the_logits_of_decode():
    model = tiny_model(device="cuda")
    recordings, record = [], graph_recorder(model.device)
    decode = DecodeGraphs(model, lambda step: recordings.append(step) or record(step)).decode
    ours, plain = (Sequences(model, [62, 78, 3, 1, 40], room=12, device="cuda") for _ in range(2))
    others = ours.bits(ours.others)
    kept = []
    for number in range(12):
        rows = range(1 + number % 5)
        logits, expected = ours.step(decode, number, rows), plain.step(model.decode, number, rows)
        kept.append((logits, expected))
    for logits, expected in kept:  # those of earlier replays too
        assert same(logits, expected)
    assert len(recordings) == 7
    assert torch.equal(ours.bits(ours.others), others)


@pytest.mark.gpu
@needs_cuda
def test_an_engine_on_cuda_gives_the_same_tokens_with_graphs_and_without():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that it could not record
        assert turns(CudaStreams(), Reload()) == turns(CudaStreams(), Reload(), cuda_graphs=False)


@pytest.mark.gpu
@needs_cuda
def test_a_recording_goes_on_while_other_threads_pin_memory_and_wait_for_copies():
    stop, x = threading.Event(), torch.ones(8, device="cuda")

    def disturb():
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                torch.ones(1 << 20).pin_memory().to("cuda", non_blocking=True)
            stream.synchronize()

    other = threading.Thread(target=disturb)
    other.start()
    try:
        for _ in range(20):
            record = graph_recorder(x.device)
            replays = [record(lambda n=n: (x * n).cumsum(0)) for n in range(5)]
            assert [float(replay()[-1]) for replay in replays] == [0.0, 8.0, 16.0, 24.0, 32.0]
    finally:
        stop.set()
        other.join()


RECORDS_A_VALUE = """
import torch
from kvlab.streams import graph_recorder
x = torch.ones(8, device="cuda")
before = torch.cuda.current_stream()
try:
    graph_recorder(x.device)(lambda: x * float(x.sum()))
except RuntimeError:
    print(torch.cuda.current_stream() == before, float((x + 1).sum()))
"""


@pytest.mark.gpu
@needs_cuda
def test_what_cuda_cannot_record_leaves_the_caller_its_stream():
    # In a process of its own: a recording that failed could leave torch's allocator unfit for others in the process,
    # those of other tests (https://github.com/pytorch/pytorch/pull/180395).
    done = subprocess.run([sys.executable, "-c", RECORDS_A_VALUE], capture_output=True, encoding="utf-8")
    assert done.stdout.split() == ["True", "16.0"], done.stderr
