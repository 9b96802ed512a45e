"""The vLLM engine that these tests ask: SmolLM2 in fp32 on a CPU, in this process, with prefix caching."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

# Read when vllm is imported. One process, so that a test can look at the connector; no thread pinning and no spinning,
# so that other work on the machine costs what it takes and not more.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import vllm

BLOCK = 128  # vLLM's block on a CPU, in tokens
LENGTHS = (145, 273, 529, 1041)  # prompts: a whole number of blocks, and 17 tokens that are always computed
NEW_TOKENS = 3


class Reply(NamedTuple):
    """The new tokens, the least gap between the best two log-probabilities, how many prompt tokens were cached."""

    tokens: list[int]
    margin: float
    cached: int


def start(model: Path, transfer: dict | None = None) -> vllm.LLM:
    """An engine; `transfer` is what `--kv-transfer-config` takes."""
    return vllm.LLM(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        **({"kv_transfer_config": transfer} if transfer else {}),
    )


def ask(llm: vllm.LLM, *prompts: list[int], new_tokens: int = NEW_TOKENS) -> list[Reply]:
    """Greedy answers to prompts that arrive together."""
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=new_tokens, logprobs=2, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    replies = []
    for output in outputs:
        best = [sorted((one.logprob for one in step.values()), reverse=True) for step in output.outputs[0].logprobs]
        margin = min(first - second for first, second, *_ in best)
        replies.append(Reply(list(output.outputs[0].token_ids), margin, output.num_cached_tokens or 0))
    return replies
