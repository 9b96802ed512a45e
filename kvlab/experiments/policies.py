"""Policies over machines, models and loads: who answers soonest where, and what kvlab's verdict wins or loses.

Every cell replays one trace. The machines differ in what stands behind their host RAM, the models in how many bytes a
token leaves for the FLOPs that it took: together they cover both sides of the flip, and the middle. True rates are
drawn up to 20 % away from what the policies believe, so that the verdict is not judged by its own model. Nothing in the
verdict was tuned on these cells. Cells in which a queue grows without end are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.machine import Direction, Link, Machine
from kvlab.simulate import DEVICE_MEMORY_GB_PER_S, Cluster, PolicyReport, Trace, drawn_away, simulate

__all__ = ["FIXED", "LOADS", "Cell", "machines", "models", "policy_cells"]

LOADS = (0.2, 0.35)
# What a server can be set to: always, never, and from so many tokens on. (Below a block of the trace a threshold is
# always passed: the 10 to 256 tokens that systems ship with are "reload" here.)
FIXED = ("reload", "recompute", "threshold:2048", "threshold:8192")

# The same number of tokens for each model, so that all have the same hits: 48 and 64 GiB for the heavy one.
_POOL_TOKENS, _HOST_TOKENS, _FAR_TOKENS = 96 * 2**10, 128 * 2**10, 2**25
_PROBE_RATE = 0.02

# config.json of togethercomputer/LLaMA-2-7B-32K: as many KV heads as heads.
_LLAMA_2_7B_32K = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
# config.json of deepseek-ai/DeepSeek-V2-Lite: one latent of 576 values a layer for all heads.
_DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}


def machines() -> dict[str, Machine]:
    """Published accelerators, each with another store behind its host RAM, as the simulator's "disk" tier."""
    a100, h100, gh200, gb300 = (Machine.load(name) for name in DEVICE_MEMORY_GB_PER_S)
    return {
        "A100 + 25 Gb/s": _with_ethernet(a100, 25),
        "H100 + NVMe": h100,
        "GH200 + 100 Gb/s": _with_ethernet(gh200, 100),
        "GB300 + 100 Gb/s": _with_ethernet(gb300, 100),
    }


def _with_ethernet(machine: Machine, gbit_per_s: int) -> Machine:
    """A remote store at the share of the line rate that was measured on 100 Gb/s."""

    def scaled(direction: Direction) -> Link:
        link = machine.link("net-100g", direction)
        return replace(link, gb_per_s=link.gb_per_s.scaled(gbit_per_s / 100), source=f"{link.source}; scaled")

    return machine.with_link("disk", scaled("load"), scaled("store"))


def models() -> dict[str, ModelArch]:
    """Heavy, usual and light KV, for about the same FLOPs a token or fewer: 512, 128 and 30 KiB in bf16."""
    heavy = ModelArch.from_hf(_LLAMA_2_7B_32K)
    light = ModelArch.from_hf(_DEEPSEEK_V2_LITE)
    return {
        "llama-2-7b-32k (MHA)": heavy,
        "llama-3.1-8b (GQA)": ModelArch.preset("llama-3.1-8b"),
        "deepseek-v2-lite (MLA)": light,
    }


@dataclass(frozen=True, eq=False)
class Cell:
    """One machine, model and load: the accelerator's utilisation if all hits are reloaded, by choice of the rate."""

    machine: str
    model: str
    load: float
    rate: float
    requests: int
    reports: Mapping[str, PolicyReport]

    @property
    def best_fixed(self) -> str | None:
        """The stable fixed policy with the smallest mean time to first token."""
        stable = [name for name in FIXED if not self.reports[name].unstable]
        return min(stable, key=lambda name: self.reports[name].ttft_mean_s, default=None)

    def against_best(self, name: str) -> float | None:
        """A policy's mean time to first token ÷ that of the best fixed one; None where they cannot be compared."""
        return self.against_all(name, FIXED)

    def against_all(self, name: str, others: Sequence[str]) -> float | None:
        """The same, against the best of `others`."""
        stable = [self.reports[other].ttft_mean_s for other in others if not self.reports[other].unstable]
        if not stable or self.reports[name].unstable:
            return None
        return self.reports[name].ttft_mean_s / min(stable)

    def why(self, name: str = "calibrated", most: int = 3) -> str:
        """What the policy decided most often, and why."""
        decisions = self.reports[name].decisions
        total = sum(decisions.values())
        return "; ".join(f"{count / total:.0%} {reason}" for reason, count in list(decisions.items())[:most])


def policy_cells(
    trace: Trace,
    policies: Sequence[str] = (*FIXED, "idle-blind", "calibrated", "oracle"),
    loads: Sequence[float] = LOADS,
    *,
    truth_share: float = 0.2,
    seed: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Cell]:
    """One cell after the other. Requests that are longer than a model's positions are left out for that model."""
    for number, ((machine, believed), (model, arch)) in enumerate(product(machines().items(), models().items())):
        fitting = tuple(s for s in trace.sessions if s.tokens <= arch.max_positions)
        cluster = Cluster(
            arch,
            believed,
            kv_bytes(arch, _POOL_TOKENS, "bf16"),
            kv_bytes(arch, _HOST_TOKENS, "bf16"),
            kv_bytes(arch, _FAR_TOKENS, "bf16"),
            memory_gb_per_s=DEVICE_MEMORY_GB_PER_S[believed.name],
            truth=drawn_away(believed, truth_share, seed + number),
        )
        shown = replace(trace, sessions=fitting)
        for load in loads:
            progress(f"{model} on {machine}, load {load:g}")
            rate = _PROBE_RATE
            for _ in range(2):  # what a session asks of the accelerator depends a little on who else is there
                rho = simulate(shown.at_rate(rate), cluster, ["reload"])["reload"].rho["accelerator"]
                assert rho, "requests that come at different times need some work"
                rate *= load / rho
            reports = simulate(shown.at_rate(rate), cluster, policies)
            yield Cell(machine, model, load, rate, shown.requests, reports)
