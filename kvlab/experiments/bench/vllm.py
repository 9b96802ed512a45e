"""Time to first token beside vLLM, which runs in its own process and environment; only one of the two works at a time.

Both time the same matrix products before and after every run, and what is compared are runs divided by their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlab.engine import Engine
from kvlab.experiments.bench.memory import ColdReads, drop_file
from kvlab.experiments.bench.model import model_and_text
from kvlab.experiments.bench.rows import Progress, Row, judged
from kvlab.experiments.bench.vllm_peer import __file__ as PEER_FILE
from kvlab.experiments.bench.vllm_peer import matrix_products
from kvlab.experiments.peers import vllm_python, write_smollm2
from kvlab.model import Model
from kvlab.policy import Recompute, Reload
from kvlab.pool import TORCH_DTYPES
from kvlab.records import bootstrap_interval, median
from kvlab.request import Request
from kvlab.tiers import DiskTier

__all__ = ["bench_vllm"]

_BLOCK = 16
_LENGTHS = (16, 128, 512, 1024, 2048, 4096)
_RESUMED = 1500  # tokens of the prompt whose prefix is on disk
_PAUSE_S = 0.05  # the other process's threads have gone to sleep by then
# Without its own worker process, without a network, with both cores for its threads as we have them.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def bench_vllm(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Prompts from 16 to 4,096 tokens computed, and one whose prefix comes from cold files; nothing without vLLM."""
    python = vllm_python()
    if python is None:
        return
    if device != "cpu":
        raise ValueError(f"the bench compares with vLLM on the CPU only; --device is {device}")
    model, tokens = model_and_text("smollm2-135m", device, dtype)
    with tempfile.TemporaryDirectory(prefix="kvlab-bench-") as name:
        folder = Path(name)
        for part in ("model", "stored", "tier"):
            (folder / part).mkdir()
        write_smollm2(folder / "model", model.dtype)
        progress("starting vLLM, which compiles the model")
        with _peer(python, model, folder / "model", None) as peer:
            for length in _LENGTHS:
                progress(f"prefill beside vLLM, {length} tokens")
                yield judged(_prefill_row(model, tokens[:length], peer), device, model.dtype)
        progress("starting vLLM with its disk connector")
        with _peer(python, model, folder / "model", folder / "stored") as peer:
            progress(f"resume from disk beside vLLM, {_RESUMED} tokens")
            yield judged(_resume_row(model, tokens[:_RESUMED], peer, folder), device, model.dtype)


# The other process ---------------------------------------------------------------------------------------------------


class _Peer:
    """One running `vllm_peer`, asked a line at a time."""

    def __init__(self, process: subprocess.Popen[str], log: Path, shapes: list[list[int]], dtype: str) -> None:
        self._process, self._log = process, log
        self.products = matrix_products(shapes, dtype)

    def ask(self, question: Any) -> dict[str, Any]:
        """The answer, when it is there. Raises RuntimeError with the end of its log when the process has ended."""
        assert self._process.stdin is not None, "started with pipes"
        assert self._process.stdout is not None, "started with pipes"
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            log = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RuntimeError(f"vLLM's process has ended: {' / '.join(log[-3:])}")
        found = json.loads(answer)
        assert isinstance(found, dict), f"expected an object, got {answer!r}"
        return found

    def rounds(self, ours: Callable[[], float], theirs: Callable[[], float], count: int) -> dict[str, list[float]]:
        """Seconds of both ways and of the products around each (their mean), whole rounds, the order turning.

        A run of many seconds may begin on a machine faster than the one it ends on.
        """
        seconds: dict[str, list[float]] = {"ours": [], "ours products": [], "vllm": [], "vllm products": []}

        def timed(name: str, run: Callable[[], float], products: Callable[[], float]) -> None:
            before, took_s, after = products(), run(), products()
            seconds[name].append(took_s)
            seconds[f"{name} products"].append((before + after) / 2)

        def we() -> None:
            timed("ours", ours, self.products)

        def they() -> None:
            timed("vllm", theirs, lambda: float(self.ask("gemm")["seconds"]))

        for number in range(count + 1):
            for arm in (we, they) if number % 2 else (they, we):
                time.sleep(_PAUSE_S)
                arm()
        return {name: samples[1:] for name, samples in seconds.items()}  # the first round warms both up


@contextmanager
def _peer(python: Path, model: Model, weights: Path, storage: Path | None) -> Iterator[_Peer]:
    d, threads = model.decoder, torch.get_num_threads()
    heads = d.heads * d.head_dim
    rows = 512
    shapes = [
        [rows, d.hidden, heads + 2 * d.kv_heads * d.head_dim],
        [rows, heads, d.hidden],
        [rows, d.hidden, 2 * d.ffn],
        [rows, d.ffn, d.hidden],
    ]
    order: dict[str, Any] = {
        "model": str(weights),
        "dtype": str(TORCH_DTYPES[model.dtype]).removeprefix("torch."),
        "max_tokens": max(_LENGTHS) + _BLOCK,
        "threads": threads,
        "storage": None if storage is None else str(storage),
        "shapes": shapes,
    }
    log = weights / "vllm.log"
    environment = {**os.environ, **_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            [str(python), "-I", PEER_FILE],  # isolated: this folder's modules are not for its imports
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            encoding="utf-8",
            env=environment,
        ) as process,
    ):
        try:
            peer = _Peer(process, log, shapes, order["dtype"])
            started = peer.ask(order)
            if started["threads"] != threads:
                raise RuntimeError(f"vLLM computes with {started['threads']} threads, and kvlab with {threads}")
            yield peer
        finally:
            process.kill()  # it holds nothing that outlives it


# Rows ----------------------------------------------------------------------------------------------------------------


def _row(name: str, seconds: dict[str, list[float]], goal: float) -> Row:
    """The ratio is of medians of times divided, each, by the products around it in the same process."""
    ours, theirs = (np.divide(seconds[arm], seconds[f"{arm} products"]) for arm in ("ours", "vllm"))

    def ratio(rounds: Any) -> float:
        return float(np.median(theirs[rounds]) / np.median(ours[rounds]))

    count = len(seconds["ours"])
    found = ratio(np.arange(count))
    return Row(
        name,
        median(seconds["ours"]) * 1e3,
        "ms",
        peers={
            "vllm": median(seconds["vllm"]) * 1e3,
            "matrix products here": median(seconds["ours products"]) * 1e3,
            "matrix products there": median(seconds["vllm products"]) * 1e3,
        },
        of_peer={"vllm": found},
        interval=bootstrap_interval(ratio, count),
        goal=f"≥ {goal:g} × vllm",
        met=found >= goal,
    )


def _prefill_row(model: Model, ids: Sequence[int], peer: _Peer) -> Row:
    """Both engines compute the whole prompt in one pass and give one token; neither keeps a prefix."""
    count = 31 if len(ids) <= 128 else 9 if len(ids) <= 1024 else 7
    with Engine(model, len(ids) // _BLOCK + 2, _BLOCK, policy=Recompute(), token_budget=len(ids)) as engine:
        seconds = peer.rounds(lambda: _ttft_s(engine, ids), lambda: float(peer.ask(list(ids))["seconds"]), count)
    goal = 0.9 if len(ids) <= 512 else 1.0
    return _row(f"time to first token beside vLLM, {len(ids)} tokens, {model.dtype}", seconds, goal)


def _resume_row(model: Model, ids: Sequence[int], peer: _Peer, folder: Path) -> Row:
    """The prompt has been computed and stored by both; all pages are dropped before every reload of either."""
    stored = folder / "stored"
    reads = ColdReads(len(ids) // _BLOCK * model.layout(_BLOCK).block_bytes)
    tier = DiskTier(folder / "tier", 2**31)
    with Engine(model, 2 * (len(ids) // _BLOCK + 2), _BLOCK, [tier], Reload(), token_budget=len(ids)) as engine:
        request = engine.submit(ids, 1)
        engine.run()
        engine.offload(request)
        _leave_nothing(engine, request)
        peer.ask(list(ids))

        def drop_pages() -> None:
            for file in stored.rglob("*.safetensors"):
                drop_file(file)
            tier.drop_pages()

        def ours() -> float:
            drop_pages()
            return reads.timed(lambda: _ttft_s(engine, ids))

        def theirs() -> float:
            drop_pages()
            answer = peer.ask(list(ids))
            reads.note(answer["read_bytes"])
            return float(answer["seconds"])

        seconds = peer.rounds(ours, theirs, 9)
        assert engine.decisions[-1].choice == "reload", f"the engine chose {engine.decisions[-1].reason}"
    name = f"resume from disk beside vLLM's example connector, {len(ids)} tokens, {model.dtype}"
    return replace(_row(name, seconds, 3), note=str(reads))


def _ttft_s(engine: Engine, ids: Sequence[int]) -> float:
    """Seconds from submit to the first token; nothing of the prompt stays in the pool."""
    request = engine.submit(ids, 1)
    engine.run()
    _leave_nothing(engine, request)
    ttft_s = request.timing.ttft_s
    assert ttft_s is not None, "a request has ended without a token"
    return ttft_s


def _leave_nothing(engine: Engine, request: Request) -> None:
    """Give back the blocks of a request that is over, and wait until what was being stored is stored."""
    engine.cancel(request)
    engine.evict(len(engine.scheduler.index))
    engine.executor.drain()
