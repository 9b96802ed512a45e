"""vLLM as a peer: this file runs in vLLM's own Python, and answers one question a line until its input ends.

It imports nothing of kvlab, since kvlab is not installed there. `kvlab.experiments.bench.vllm` starts it, and takes
the matrix products from here, so that both processes time the same ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

__all__ = ["matrix_products"]


def matrix_products(shapes: list[list[int]], dtype: str) -> Callable[[], float]:
    """Seconds of a pass over `x @ w.T` for each (rows, columns of x, rows of w), the median of three.

    `dtype` as torch names it.
    """
    kind = getattr(torch, dtype)
    pairs = [
        (torch.randn(rows, inner, dtype=kind), torch.randn(outer, inner, dtype=kind)) for rows, inner, outer in shapes
    ]

    def one_pass() -> float:
        begin = time.perf_counter()
        for x, w in pairs:
            torch.nn.functional.linear(x, w)
        return time.perf_counter() - begin

    def run() -> float:
        with torch.inference_mode():
            return sorted(one_pass() for _ in range(3))[1]

    return run


def _engine(order: dict[str, Any]) -> Any:
    vllm = import_module("vllm")
    config: dict[str, Any] = {}
    if order["storage"]:
        config["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": order["storage"]},
        }
    return vllm.LLM(
        model=order["model"],
        dtype=order["dtype"],
        skip_tokenizer_init=True,
        max_model_len=order["max_tokens"],
        max_num_batched_tokens=order["max_tokens"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        seed=0,
        **config,
    )


def _read_bytes() -> int | None:
    """Bytes that this process has made the storage device read, where Linux counts them."""
    counters = Path("/proc/self/io")
    if not counters.exists():
        return None
    fields = dict(line.split(": ") for line in counters.read_text(encoding="utf-8").splitlines())
    return int(fields["read_bytes"])


def _answers(orders: IO[str]) -> Iterator[dict[str, Any]]:
    """First line: what to load. Then "gemm", or a list of token ids: seconds to its first token, request to result."""
    order = json.loads(orders.readline())
    torch.set_num_threads(order["threads"])
    engine = _engine(order)
    sampling = import_module("vllm").SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    products = matrix_products(order["shapes"], order["dtype"])
    yield {"vllm": import_module("vllm").__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    for line in orders:
        asked = json.loads(line)
        if asked == "gemm":
            yield {"seconds": products()}
            continue
        before, begin = _read_bytes(), time.perf_counter()
        result = engine.generate({"prompt_token_ids": asked}, sampling, use_tqdm=False)
        took_s, after = time.perf_counter() - begin, _read_bytes()
        read = None if before is None or after is None else after - before
        yield {"seconds": took_s, "token": result[0].outputs[0].token_ids[0], "read_bytes": read}


def main() -> None:
    """Answer on what was standard output; what vLLM prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for answer in _answers(sys.stdin):
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
