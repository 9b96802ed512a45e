"""The connector's dealings with vLLM's classes, without an engine."""

import pickle
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from prometheus_client import Counter
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvlab.bridges.checksums import Checksums
from kvlab.bridges.judge import Judge
from kvlab.bridges.options import Options
from kvlab.bridges.vllm import CrossoverConnector, connector
from kvlab.bridges.vllm.messages import Load, StepDone, StepOrder
from kvlab.bridges.vllm.scheduler import SchedulerHalf
from kvlab.bridges.vllm.stats import COUNTERS, read_stats, stats_of
from kvlab.bridges.vllm.worker import WorkerHalf


def config(**inner):
    extra = {"inner": {"kv_connector": "OffloadingConnector", **inner}} if inner is not None else {}
    transfer = KVTransferConfig(
        kv_connector="CrossoverConnector",
        kv_connector_module_path="kvlab.bridges.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )
    return SimpleNamespace(kv_transfer_config=transfer, attention_config=SimpleNamespace(hisparse_config=None))


def bare(inner):
    """A connector without vLLM around it."""
    one = object.__new__(CrossoverConnector)
    one.inner = inner
    one._inner_takes_groups = True
    one._scheduler = MagicMock()
    one._worker = MagicMock()
    one._worker.guarded.side_effect = lambda load, errors: load()
    one._worker.spoiled = False
    one._worker.failed_blocks.return_value = {7}
    one._kv_cache_config = MagicMock()
    return one


def instance_methods():
    for name, member in vars(KVConnectorBase_V1).items():
        own = name.startswith("_") or name in ("role", "has_connector_metadata")
        if not own and (callable(member) or isinstance(member, property)):
            yield name, isinstance(member, property)


@pytest.mark.parametrize(("name", "is_property"), list(instance_methods()))
def test_every_public_method_of_the_base_class_reaches_the_wrapped_connector(name, is_property):
    inner = MagicMock()
    inner.get_block_ids_with_load_errors.return_value = {3}
    one = bare(inner)
    if is_property:
        assert getattr(one, name) is getattr(inner, name)
        return
    arguments = {"get_num_new_matched_tokens": 2, "update_state_after_alloc": 3, "request_finished": 2}.get(name)
    code = getattr(KVConnectorBase_V1, name).__code__
    count = arguments or code.co_argcount - 1
    result = getattr(one, name)(*[MagicMock() for _ in range(count)])
    assert getattr(inner, name).call_count == 1, name
    if name == "get_block_ids_with_load_errors":
        assert result == {3, 7}


def test_nothing_abstract_is_left_and_vllm_finds_it():
    assert CrossoverConnector.__abstractmethods__ == frozenset()
    assert KVConnectorFactory.get_connector_class(config().kv_transfer_config) is CrossoverConnector
    assert KVConnectorFactory.get_connector_class_by_name("CrossoverConnector") is CrossoverConnector
    assert supports_hma(CrossoverConnector)


def test_what_vllm_asks_the_class_is_what_the_wrapped_class_says():
    assert CrossoverConnector.get_required_kvcache_layout(config()) == OffloadingConnector.get_required_kvcache_layout(
        config()
    )
    multi = {"connectors": [{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}]}
    for use in (True, False):
        multi["connectors"][0]["kv_connector_extra_config"] = {"use_layerwise": use}
        inner = {"kv_connector": "MultiConnector", "kv_connector_extra_config": multi}
        assert CrossoverConnector.requires_piecewise_for_cudagraph({"inner": inner}) == (
            MultiConnector.requires_piecewise_for_cudagraph(multi)
        )


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"kv_connector": "Nonesuch"}, "no connector 'Nonesuch' .*vLLM itself knows .*OffloadingConnector"),
        ({"kv_connector": "X", "kv_connector_module_path": "no.such.module"}, "no connector 'X' .*no.such.module"),
        ({"kv_connector": "X", "kv_connector_module_path": "json"}, "no connector 'X' .*json"),
        ({"kv_connectr": "typo"}, "not a KV transfer config|kv_connectr"),
    ],
)
def test_an_unknown_inner_connector_is_named(inner, message):
    with pytest.raises(ValueError, match=message):
        CrossoverConnector.get_required_kvcache_layout(config(**inner))


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


def serving(hf, cache_dtype="auto"):
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: hf), dtype=torch.bfloat16, max_model_len=4096)
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, block_size=16),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )


def test_a_model_is_read_as_vllm_serves_it():
    options = Options.read({"inner": {"kv_connector": "X"}, "machine": "h100-sxm-pcie5", "tier": "host"})
    learner = connector._learner(serving(LLAMA), options)
    assert (learner.kv_dtype, learner.tp, learner.block_size, learner.arch.max_positions) == ("bf16", 2, 16, 4096)
    assert learner.machine.prefill.chunk_tokens == 512
    assert connector._learner(serving(LLAMA, "fp8_e4m3"), options).kv_dtype == "fp8"


@pytest.mark.parametrize(
    ("hf", "dtype", "names"),
    [({**LLAMA, "hidden_size": None}, "auto", "hidden_size"), (LLAMA, "turboquant_4bit", "turboquant_4bit")],
)
def test_a_model_that_kvlab_cannot_count_is_always_loaded_with_one_warning(hf, dtype, names, monkeypatch):
    warned = []
    monkeypatch.setattr(connector.logger, "warning", lambda line, *values: warned.append(line % values))
    options = Options.read({"inner": {"kv_connector": "X"}})
    learner = connector._learner(serving(hf, dtype), options)
    assert learner is None
    assert len(warned) == 1
    assert "cannot judge this model" in warned[0]
    assert names in warned[0]


def test_stats_add_up_across_processes_with_those_of_the_wrapped_connector():
    inner = OffloadingConnectorStats()
    here = stats_of({"loads": 2, "load_seconds": 0.5}, inner, OffloadingConnector)
    there = pickle.loads(pickle.dumps(here.to_dict()))
    both = read_stats(there).aggregate(stats_of({"loads": 1}, None, OffloadingConnector))
    assert both.data["kvlab"] == {"loads": 3, "load_seconds": 0.5}
    assert isinstance(both.data["inner"], OffloadingConnectorStats)
    assert both.reduce()["kvlab loads"] == 3
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
    assert stats_of({}, None, OffloadingConnector) is None
    assert read_stats(None).is_empty()


def test_every_counter_reaches_prometheus():
    made = {}

    def counter(name, documentation, labelnames):
        made[name] = MagicMock()
        return made[name]

    wrapped = config(kv_connector="ExampleConnector")
    metrics = CrossoverConnector.build_prom_metrics(wrapped, {Counter: counter, **anything()}, ["engine"], {0: ["0"]})
    metrics.observe({"kvlab": dict.fromkeys(COUNTERS, 2), "inner": None})
    assert set(made) == {f"vllm:kvlab_{name}" for name in COUNTERS}
    for one in made.values():
        one.labels.assert_called_once_with("0")
        one.labels.return_value.inc.assert_called_once_with(2)


def anything():
    from prometheus_client import Gauge, Histogram

    return {Gauge: MagicMock(), Histogram: MagicMock()}


def half(clock=lambda: 0.0, **options):
    return SchedulerHalf(
        Judge(None, block_size=16, **options),
        block_size=16,
        hash_block_size=16,
        identity=bytes(32),
        checked=True,
        say=lambda *_: None,
        warn=lambda *_: None,
        clock=clock,
    )


def request(name="a", tokens=100):
    hashes = [bytes([n]) * 32 for n in range(tokens // 16)]
    return SimpleNamespace(
        request_id=name,
        num_preemptions=0,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        block_hashes=hashes,
        skip_reading_prefix_cache=False,
    )


def blocks(ids):
    return SimpleNamespace(get_block_ids=lambda: (list(ids),))


def step(scheduled, starts):
    new = [SimpleNamespace(req_id=name, num_computed_tokens=start) for name, start in starts.items()]
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (list(range(10, 17)),)),
    )


@pytest.mark.parametrize("found", [(0, False), (-16, False), (-16, True)])
def test_nothing_or_less_is_a_miss_and_no_decision(found):
    one = half()
    assert one.matched(request(), 32, found) == (0, False)
    assert one.judge.take_counts() == {}


def test_not_yet_is_passed_on_and_asynchronous_only_what_is_loaded():
    assert half().matched(request(), 0, (None, False)) == (None, False)
    assert half().matched(request(), 0, (96, True)) == (96, True)
    assert half(max_load_tokens=0).matched(request(), 0, (96, True)) == (0, False)
    skipping = request()
    skipping.skip_reading_prefix_cache = True
    assert half().matched(skipping, 0, (96, False)) == (0, False)


def test_a_synchronous_load_is_ordered_in_the_step_that_needs_it_and_only_there():
    one = half()
    one.matched(request(), 16, (64, False))
    one.allocated(request(), blocks(range(10, 17)), 64)
    order = one.schedule(step({"a": 20}, {"a": 80}), "inner")
    assert order.inner == "inner"
    assert [load.block_ids for load in order.loads] == [(10, 11, 12, 13, 14)], (
        "from the first block, not from 16 tokens"
    )
    assert len(order.loads[0].names) == 5
    assert [block for _, block in order.computed["a"]] == [15], "96 of 100 tokens are whole blocks"
    assert one.schedule(step({"a": 1}, {}), None).loads == ()
    one.done(StepDone(None, order.step, 0.5), (), set(), ())
    assert one.judge.take_counts() == {"reload_decisions": 1, "loaded_tokens": 64, "loads": 1, "load_seconds": 0.5}


def test_an_asynchronous_load_ends_when_it_is_received_and_fails_with_its_blocks():
    now = [0.0]
    one = half(clock=lambda: now[0])
    for name in ("good", "bad", "lost"):
        one.matched(request(name), 0, (96, True))
        one.allocated(request(name), blocks({"good": range(6), "bad": range(6, 12), "lost": range(12, 18)}[name]), 96)
    assert one.schedule(step({}, {}), None).loads == ()
    now[0] = 2.0
    one.done(StepDone(None, 1), {"good", "bad", "lost"}, {7}, {"lost"})
    counts = one.judge.take_counts()
    assert (counts["loads"], counts["load_seconds"], counts["failed_loads"]) == (1, 2.0, 2)
    assert one.matched(request("again"), 0, (96, True)) == (0, False), "the prefix of a failed load"


@pytest.mark.parametrize(("invalid", "lost"), [({7}, ()), (set(), {"a"})])
def test_an_asynchronous_failure_reported_before_the_load_is_over_is_not_learned_from(invalid, lost):
    now = [0.0]
    one = half(clock=lambda: now[0])
    one.judge.learner = MagicMock()
    one.judge.learner.ready = False
    one.matched(request(), 0, (96, True))
    one.allocated(request(), blocks(range(6, 12)), 96)
    one.schedule(step({}, {}), None)
    one.done(StepDone(None, 1), (), invalid, lost)
    now[0] = 2.0
    one.schedule(step({}, {}), None)
    one.done(StepDone(None, 2), {"a"}, set(), ())
    one.judge.learner.saw_load.assert_not_called()
    assert one.judge.take_counts()["failed_loads"] == 1
    assert one.matched(request(), 0, (96, True)) == (0, False), "vLLM asks again for the same request"


def test_a_declined_load_leaves_nothing_behind():
    one = half(max_load_tokens=0)
    one.matched(request(), 0, (96, True))
    one.allocated(request(), blocks(range(7)), 0)
    assert one.schedule(step({"a": 100}, {"a": 0}), None).loads == ()
    one.forget("a")
    assert not one._pending
    assert not one._requests
    assert not one._offered


def test_what_an_inner_connector_raises_fails_the_loads_of_its_step_only_where_vllm_can_be_told():
    load = Load("a", 32, (4, 5))

    def broken():
        raise OSError("the disk is gone")

    for order, reportable in ((StepOrder(None, 1), True), (StepOrder(None, 1, (load,)), False)):
        worker = WorkerHalf(Checksums(), reportable=reportable, warn=lambda *_: None)
        worker.bind(order)
        with pytest.raises(OSError, match="the disk is gone"):
            worker.guarded(broken, set)
    worker = WorkerHalf(Checksums(), reportable=True, warn=lambda *_: None)
    worker.bind(StepOrder(None, 1, (load,)))
    worker.guarded(broken, set)
    assert worker.done(None).failed == {"a": "OSError: the disk is gone"}
    assert worker.failed_blocks() == {4, 5}
    assert worker.failed_blocks() == set()


def checking(tmp_path, file=None):
    worker = WorkerHalf(Checksums(file and tmp_path / file), reportable=True, warn=lambda *_: None)
    caches = {f"layer {n}": torch.zeros(4, 2, 16, 8, dtype=torch.bfloat16) for n in range(2)}
    worker.register(caches, 4)
    worker.bind(StepOrder(None, 1, (), {"a": ((b"x" * 32, 1), (b"y" * 32, 2))}))
    worker.saved()
    return worker, caches["layer 1"]


def loads(worker, *names):
    worker.bind(StepOrder(None, 2, (Load("b", 32, (1, 2), names),), {"b": ((b"z" * 32, 3),)}, heard=2))
    worker.guarded(lambda: None, set)
    worker.check()
    worker.saved()
    return worker.failed_blocks(), worker.done(None)


def test_only_blocks_with_other_bytes_than_were_computed_fail(tmp_path):
    worker, cache = checking(tmp_path)
    assert loads(worker, b"x" * 32, b"y" * 32) == (set(), StepDone(None, 2, worker._load_s))
    cache[2, 1, 7, 3] = 1
    bad, news = loads(worker, b"x" * 32, b"y" * 32)
    assert bad == {2}
    assert list(news.failed) == ["b"]


def test_what_a_request_computes_behind_a_failed_load_is_not_taken_for_right(tmp_path):
    worker, cache = checking(tmp_path)
    cache[2, 1, 7, 3] = 1
    loads(worker, b"x" * 32, b"y" * 32)
    assert worker._checksums.look(b"z" * 32, worker._checksum(3)) == "unknown"
    cache[2, 1, 7, 3] = 0
    loads(worker, b"x" * 32, b"y" * 32)
    assert worker._checksums.look(b"z" * 32, worker._checksum(3)) == "right"


class Storing:
    """An inner connector that loads block 1 synchronously, fails as told, and stores what is in block 2."""

    def __init__(self, raises=False, reports=()):
        self.raises, self.reports, self.stored = raises, set(reports), []

    def start_load_kv(self, forward_context):
        if self.raises:
            raise OSError("the file is gone")

    def get_block_ids_with_load_errors(self):
        reports, self.reports = self.reports, set()
        return reports

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata):
        self.stored.append(layer_name)

    def wait_for_save(self):
        self.stored.append("wait_for_save")

    def bind_connector_metadata(self, metadata):
        self.raises = self.raises and metadata == "failing"


def one_step(bridge, order):
    """What vLLM's worker does around a forward pass. Returns the blocks that the scheduler hears of."""
    bridge.bind_connector_metadata(order)
    bridge.start_load_kv(None)
    bridge.save_kv_layer("layer 0", None, None)
    bridge.wait_for_save()
    return bridge.get_block_ids_with_load_errors()


@pytest.mark.parametrize("failure", [{"raises": True}, {"reports": {1}}])
def test_what_a_longer_request_computes_behind_anothers_failed_load_is_neither_stored_nor_believed(failure):
    bridge = bare(Storing(**failure))
    bridge._worker = worker = WorkerHalf(Checksums(), reportable=True, warn=lambda *_: None)
    worker.register({"layer 0": torch.zeros(4, 2, 16, 8)}, 4)
    behind = {"b": ((b"z" * 32, 2),)}  # B: block 1 is A's, block 2 its own
    assert one_step(bridge, StepOrder("failing", 1, (Load("a", 16, (1,)),), behind)) == {1}
    assert worker.done(None).failed.keys() == {"a"}
    one_step(bridge, StepOrder(None, 2, (), behind, heard=0))  # was scheduled before the failure was known
    assert bridge.inner.stored == []
    assert worker._checksums.look(b"z" * 32, worker._checksum(2)) == "unknown"
    one_step(bridge, StepOrder(None, 3, (), behind, heard=1))
    assert bridge.inner.stored == ["layer 0", "wait_for_save"]
    assert worker._checksums.look(b"z" * 32, worker._checksum(2)) == "right"


def test_a_load_that_the_inner_connector_reports_does_not_keep_another_from_being_awaited_and_checked(tmp_path):
    worker, cache = checking(tmp_path)
    cache[2, 1, 7, 3] = 1
    worker.bind(StepOrder(None, 2, (Load("a", 16, (3,)), Load("b", 32, (1, 2), (b"x" * 32, b"y" * 32)))))
    worker.guarded(lambda: None, lambda: {3})
    worker.check()
    awaited = []
    worker.guarded(lambda: awaited.append("layer 1"), set)
    assert awaited == ["layer 1"]
    assert worker.done(None).failed.keys() == {"a", "b"}
    assert worker.failed_blocks() == {2, 3}


def test_an_order_says_which_news_the_scheduler_has_heard():
    one = half()
    assert one.schedule(step({}, {}), None).heard == 0
    assert one.schedule(step({}, {}), None).heard == 0
    one.done(StepDone(None, 1), (), set(), ())
    assert one.schedule(step({}, {}), None).heard == 1


def test_the_failure_policy_is_set_and_where_that_is_not_enough_is_said(monkeypatch):
    said = []
    monkeypatch.setattr(connector.logger, "info", said.append)
    transfer = config().kv_transfer_config
    for _ in range(2):
        connector._recompute_failures(transfer)
        assert transfer.kv_load_failure_policy == "recompute"
    assert len(said) == 1
    assert "MultiConnector" in said[0]
    assert "outer config" in said[0]


def test_a_block_without_a_checksum_is_counted_or_with_a_file_refused(tmp_path):
    bad, news = loads(checking(tmp_path)[0], b"x" * 32, b"?" * 32)
    assert (bad, news.unchecked_blocks) == (set(), 1)
    bad, news = loads(checking(tmp_path, "a.sums")[0], b"x" * 32, b"?" * 32)
    assert (bad, news.unchecked_blocks) == ({2}, 0)


def test_caches_that_are_not_whole_blocks_in_host_memory_are_left_alone(tmp_path):
    worker = WorkerHalf(Checksums(), reportable=True, warn=lambda *_: None)
    for caches in ({"a": torch.zeros(3, 2)}, {"a": torch.zeros(4, 2), "b": [torch.zeros(4, 2)]}):
        worker.register(caches, 4)
        assert worker._caches == []


def test_news_of_several_ranks_are_one():
    both = StepDone(None, 3, 0.2, {"a": "x"}, 1).aggregate(StepDone(None, 3, 0.5, {"b": "y"}, 2))
    assert both == StepDone(None, 3, 0.5, {"a": "x", "b": "y"}, 3)
