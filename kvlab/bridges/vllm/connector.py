"""The connector that vLLM loads: wraps another one, forwards everything to it, and lets kvlab decide what is loaded.

Floor 6, and the only file that knows vLLM's configuration. The decision is in `bridges.judge`.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_dtype_for
from kvlab.bridges.checksums import Checksums
from kvlab.bridges.learning import Learner
from kvlab.bridges.options import Options
from kvlab.bridges.vllm.messages import StepDone, StepOrder
from kvlab.bridges.vllm.scheduler import SchedulerHalf
from kvlab.bridges.vllm.stats import CrossoverPromMetrics, read_stats, stats_of
from kvlab.bridges.vllm.worker import WorkerHalf

__all__ = ["CrossoverConnector"]

# Below "vllm", so that its lines come out as vLLM's own do.
logger = init_logger("vllm.kvlab")

# What the base class keeps for each connector by itself.
_OWN = {"role", "has_connector_metadata"}


def _forwards(base: type) -> dict[str, Any]:
    """A method or property for each public one of vLLM's base class, those of versions to come included.

    Each hands the call to the wrapped connector. Class methods are left out: they have no instance to ask.
    """

    def method(name: str) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.inner, name)(*args, **kwargs)

        return forward

    def value(name: str) -> property:
        return property(lambda self: getattr(self.inner, name))

    found: dict[str, Any] = {}
    for name, member in vars(base).items():
        if name.startswith("_") or name in _OWN:
            continue
        if isinstance(member, property):
            found[name] = value(name)
        elif callable(member):
            found[name] = method(name)
    return found


_Forwarding: Any = type("_Forwarding", (KVConnectorBase_V1, SupportsHMA), _forwards(KVConnectorBase_V1))


class CrossoverConnector(_Forwarding):  # type: ignore[misc]
    """Wraps the connector that `kv_connector_extra_config.inner` names; `Options` lists the other keys.

    Claims to support several KV cache groups, since vLLM asks the class; where the wrapped one does not and the model
    has several, it refuses to start. Sets its own `kv_load_failure_policy` to "recompute"; a member of a MultiConnector
    cannot set the one that counts there.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        options = _options(vllm_config)
        connector, config = _wrapped(vllm_config)
        groups = len(kv_cache_config.kv_cache_groups)
        self._inner_takes_groups = KVConnectorFactory.supports_hma_config(config.kv_transfer_config)
        if not self._inner_takes_groups:  # some look whether vLLM would hand them several
            config.scheduler_config = copy.copy(vllm_config.scheduler_config)
            config.scheduler_config.disable_hybrid_kv_cache_manager = True
        if groups > 1 and not self._inner_takes_groups:
            raise ValueError(
                f"{connector.__name__} handles one KV cache group and this model has {groups}:"
                " start vLLM with --disable-hybrid-kv-cache-manager"
            )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        identity = _identity(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            _recompute_failures(vllm_config.kv_transfer_config)
            block_size = vllm_config.cache_config.block_size
            self._scheduler = SchedulerHalf(
                options.judge(_learner(vllm_config, options), block_size=block_size),
                block_size=block_size,
                hash_block_size=getattr(kv_cache_config, "hash_block_size", None) or block_size,
                identity=identity,
                checked=groups == 1 and vllm_config.device_config.device_type == "cpu",
                say=logger.info,
                warn=logger.warning,
            )
        else:
            file = options.checksum_file(identity, vllm_config.parallel_config.rank)
            self._worker = WorkerHalf(Checksums(file, warn=logger.warning), reportable=groups == 1, warn=logger.warning)
        self.inner = connector(config, role, kv_cache_config)

    # Scheduler ------------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler's half. Only in the scheduler's role."""
        assert self._scheduler is not None, "this connector has the worker's role"
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        """The worker's half. Only in the worker's role."""
        assert self._worker is not None, "this connector has the scheduler's role"
        return self._worker

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All that the wrapped connector has (or up to the user's cap), or (0, False): compute it again."""
        found = self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        return self.scheduler.matched(request, num_computed_tokens, found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Tell both; 0 tokens make the wrapped connector drop what it prepared when it was asked."""
        self.scheduler.allocated(request, blocks, num_external_tokens)
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrder:
        """The wrapped connector's metadata inside the bridge's."""
        return self.scheduler.schedule(scheduler_output, self.inner.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn from the workers' news; hand the wrapped connector its part of them."""
        news = connector_output.kv_connector_worker_meta
        self.scheduler.done(
            news if isinstance(news, StepDone) else None,
            connector_output.finished_recving or (),
            connector_output.invalid_block_ids,
            connector_output.failed_recving,
        )
        try:
            connector_output.kv_connector_worker_meta = news.inner if isinstance(news, StepDone) else news
            self.inner.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = news

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget it."""
        self.scheduler.forget(request.request_id)
        finished: tuple[bool, dict[str, Any] | None] = self.inner.request_finished(request, block_ids)
        return finished

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same with the blocks of every group; a connector that takes one group gets that one."""
        if not self._inner_takes_groups:
            return self.request_finished(request, block_ids[0])
        self.scheduler.forget(request.request_id)
        finished: tuple[bool, dict[str, Any] | None] = self.inner.request_finished_all_groups(request, block_ids)
        return finished

    def reset_cache(self) -> bool | None:
        """The wrapped connector's cache is emptied, and what failed in it may be tried again."""
        self.scheduler.judge.forgive()
        done: bool | None = self.inner.reset_cache()
        return done

    def get_kv_connector_stats(self) -> Any:
        """The wrapped connector's stats and, from the scheduler, the bridge's counters."""
        counts = self._scheduler.judge.take_counts() if self._scheduler else {}
        return stats_of(counts, self.inner.get_kv_connector_stats(), type(self.inner))

    # Workers --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Both need the caches: the wrapped connector to write them, the bridge to check what was written."""
        self.worker.register(kv_caches, self._kv_cache_config.num_blocks)
        self.inner.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: StepOrder) -> None:
        """Each gets its own."""
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
        self.worker.bind(connector_metadata)
        self.inner.bind_connector_metadata(connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        KVConnectorBase_V1.clear_connector_metadata(self)
        self.inner.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: StepOrder) -> None:
        """Hand on the wrapped connector's part."""
        self.inner.handle_preemptions(kv_connector_metadata.inner)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, and check what came."""
        load = partial(self.inner.start_load_kv, forward_context, **kwargs)
        self.worker.guarded(load, self.inner.get_block_ids_with_load_errors)
        self.worker.check()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait on the step's clock."""
        load = partial(self.inner.wait_for_layer_load, layer_name)
        self.worker.guarded(load, self.inner.get_block_ids_with_load_errors)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Save, unless a load of this step failed: other requests may compute behind its blocks."""
        if not self.worker.spoiled:
            self.inner.save_kv_layer(*args, **kwargs)

    def wait_for_save(self) -> None:
        """The forward pass is over: what it computed is remembered, and saved (some connectors save only now)."""
        self.worker.saved()
        if not self.worker.spoiled:
            self.inner.wait_for_save()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The wrapped connector's failures and those that the bridge found."""
        failed: set[int] = self.inner.get_block_ids_with_load_errors()
        return failed | self.worker.failed_blocks()

    def build_connector_worker_meta(self) -> StepDone:
        """The step's news for the scheduler."""
        return self.worker.done(self.inner.build_connector_worker_meta())

    # What vLLM asks the class -----------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """The wrapped connector's."""
        connector, config = _wrapped(vllm_config)
        layout: str | None = connector.get_required_kvcache_layout(config)
        return layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Whether the wrapped connector does."""
        inner = Options.read(extra_config).inner
        transfer = KVTransferConfig(**{"kv_role": "kv_both", **inner})
        connector = _connector_class(transfer)
        return bool(connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config))

    @classmethod
    def build_kv_connector_stats(cls, data: Mapping[str, Any] | None = None) -> Any:
        """Stats from what crossed a process border."""
        return read_stats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> CrossoverPromMetrics:
        """The bridge's counters beside the wrapped connector's metrics."""
        connector, config = _wrapped(vllm_config)
        inner = connector.build_prom_metrics(config, metric_types, labelnames, per_engine_labelvalues)
        return CrossoverPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, inner)


def _options(vllm_config: Any) -> Options:
    return Options.read(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _recompute_failures(transfer: Any) -> None:
    """Have loads that fail computed again, by the connector's own configuration, and say where that is not enough."""
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info(
            "kvlab: kv_load_failure_policy is now 'recompute': a load that fails is computed again. As a member of"
            " MultiConnector this does not count: set it on the outer config"
        )


def _wrapped(vllm_config: Any) -> tuple[Any, Any]:
    """The wrapped connector's class, and a configuration in which it stands where the bridge does.

    Raises ValueError for a connector that vLLM does not find or a configuration that it refuses.
    """
    outer = vllm_config.kv_transfer_config
    given = {"kv_role": outer.kv_role, "engine_id": outer.engine_id, "kv_buffer_device": outer.kv_buffer_device}
    try:
        transfer = KVTransferConfig(**{**given, "kv_load_failure_policy": "recompute", **_options(vllm_config).inner})
    except TypeError as error:
        raise ValueError(f"kv_connector_extra_config.inner is not a KV transfer config: {error}") from error
    config = copy.copy(vllm_config)
    config.kv_transfer_config = transfer
    return _connector_class(transfer), config


def _connector_class(transfer: Any) -> Any:
    try:
        return KVConnectorFactory.get_connector_class(transfer)
    except (ValueError, AttributeError, ImportError) as error:
        known = ", ".join(sorted(KVConnectorFactory._registry))
        raise ValueError(
            f"kv_connector_extra_config.inner: no connector {transfer.kv_connector!r}"
            f" (kv_connector_module_path {transfer.kv_connector_module_path!r}): {error}. vLLM itself knows {known}"
        ) from error


def _learner(vllm_config: Any, options: Options) -> Learner | None:
    """What the judge learns with; None, with one warning, for a model that kvlab cannot count."""
    machine, tier = options.load_machine()
    model, cache = vllm_config.model_config, vllm_config.cache_config
    try:
        arch = ModelArch.from_hf(model.hf_config.to_dict())
        kv_dtype = kv_dtype_for(arch, str(model.dtype) if cache.cache_dtype == "auto" else cache.cache_dtype)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("kvlab: cannot judge this model, everything that can be loaded is: %s", error)
        return None
    learner = Learner(
        replace(arch, max_positions=max(arch.max_positions, model.max_model_len)),
        tier,
        machine,
        kv_dtype=kv_dtype,
        block_size=cache.block_size,
        tp=vllm_config.parallel_config.tensor_parallel_size,
        chunk_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )
    start = f"machine {learner.machine.name!r}" if machine else "no machine given, calibrating on what is seen"
    logger.info("kvlab: %s, tier %r, around %s", start, tier, options.inner["kv_connector"])
    return learner


def _identity(vllm_config: Any) -> bytes:
    """32 bytes for what besides the tokens decides a block's bytes: weights (files by size and date), shape, dtypes."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    files = []
    if Path(model.model).is_dir():
        weights = (path for kind in ("*.safetensors", "*.bin", "*.gguf") for path in Path(model.model).glob(kind))
        files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights)
    parts = [
        *(str(part) for part in (model.model, model.revision, model.dtype, cache.cache_dtype, cache.block_size)),
        *(str(part) for part in (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)),
        *(str(part) for part in files),
        json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


# For vLLM's MultiConnector, which looks its members' stats up by name.
if "CrossoverConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("CrossoverConnector", "kvlab.bridges.vllm", "CrossoverConnector")
