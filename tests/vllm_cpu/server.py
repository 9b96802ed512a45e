"""A vLLM engine with the connector around its example disk connector, and a view into it."""

from __future__ import annotations

from pathlib import Path

from engine import BLOCK, NEW_TOKENS, Reply, ask, start
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvlab.bridges.judge import Judge
from kvlab.bridges.learning import Learner


class Server:
    """The engine, the two halves of its connector, its disk, and what the connector `said` about the latest request."""

    def __init__(self, model: Path, store: Path) -> None:
        inner = {
            "kv_connector": "SlowDiskConnector",
            "kv_connector_module_path": "slow_disk",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        }
        self.llm = start(
            model,
            {
                "kv_connector": "CrossoverConnector",
                "kv_connector_module_path": "kvlab.bridges.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"checksums": str(store.with_name("sums")), "inner": inner},
            },
        )
        self.core = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.half = self.core.connector.scheduler
        self.worker = get_kv_transfer_group().worker
        self.disk = get_kv_transfer_group().inner
        self.folder = store
        self.said: list[str] = []
        self.half._say = lambda line, *values: self.said.append(line % values)

    @property
    def judge(self) -> Judge:
        return self.half.judge

    def ask(self, *prompts: list[int], new_tokens: int = NEW_TOKENS) -> list[Reply]:
        """Replies from a server whose own prefix cache is empty."""
        assert self.llm.reset_prefix_cache()
        self.said.clear()
        return ask(self.llm, *prompts, new_tokens=new_tokens)

    def stores(self, prompt: list[int]) -> tuple[list[int], Path]:
        """Ask for the first time: the new tokens, and the folder that was made."""
        before = set(self.folder.iterdir()) if self.folder.exists() else set()
        reply = self.ask(prompt)[0]
        assert reply.cached == 0
        (made,) = set(self.folder.iterdir()) - before
        return reply.tokens, made

    def count(self, name: str) -> float:
        """One of the counters, as vLLM's metrics have it."""
        (found,) = [metric.value for metric in self.llm.get_metrics() if metric.name == f"vllm:kvlab_{name}"]
        return found


def fresh_learner(server: Server) -> Learner:
    """One that has seen nothing of this server yet."""
    old = server.judge.learner
    chunk = old.machine.prefill.chunk_tokens
    return Learner(old.arch, old.tier, None, kv_dtype="fp32", block_size=BLOCK, chunk_tokens=chunk)
