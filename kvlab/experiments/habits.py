"""Always reload, never reload, or decide: agents on the real engine under each, with hits beside waiting.

Behind an emulated link with which each habit wins half of the resumes, so that neither is simply right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlab.experiments.agents import Arm, mean_ttft_s, measure, regret, replays
from kvlab.experiments.calibrate import calibrate
from kvlab.experiments.workload import agent_workload, mixing_link
from kvlab.model import Model
from kvlab.policy import Calibrated, Recompute, Reload
from kvlab.records import median
from kvlab.tiers import HostTier, LinkTier, Tier
from kvlab.units import format_gb_per_s, format_s

__all__ = ["play_habits"]

_TIER_BYTES, _BLOCK = 2**30, 16


def play_habits(model: Model, tokens: Sequence[int], *, rounds: int = 3, budget_s: float = 4.0) -> dict[str, Any]:
    """A `kvlab.habits/1`: by policy "ttft_mean_s" (median over rounds), "hit_rate" and "regret_s" a resume.

    Calibrates first (`budget_s`). "link" says what stands in front of host RAM; nothing, where no link mixes.
    """
    machine = calibrate(model, tokens, {"host": lambda: HostTier(_TIER_BYTES)}, block_size=_BLOCK, budget_s=budget_s)
    workload = agent_workload(agents=6, resumes=12, preamble=128, own=(32, 384), tool=(4, 12), gap_s=(1.0, 5.0))

    def tier() -> Tier:
        return HostTier(_TIER_BYTES)

    said = "host RAM"
    groups = min(4, model.decoder.layers)  # the engine's own
    try:
        gb_per_s, latency_s = mixing_link(
            workload, model.arch, machine, kv_dtype=model.dtype, block_size=_BLOCK, groups=groups
        )
    except ValueError:
        pass  # this machine computes so fast or so slowly that one way always wins: the plain tier shows that
    else:

        def tier() -> Tier:
            return LinkTier(HostTier(_TIER_BYTES), gb_per_s, latency_s)

        machine = machine.with_link(tier().name, machine.link("host").behind(gb_per_s, latency_s))
        said = f"an emulated link of {format_gb_per_s(gb_per_s)} and {format_s(latency_s)} in front of host RAM"
    arms = {
        "always reload": Arm(Reload(), tier),
        "never reload": Arm(Recompute(), tier),
        "the verdict": Arm(Calibrated(machine), tier),
    }
    played = measure(model, tokens, workload, arms, rounds, block_size=_BLOCK)
    prompts = rounds * sum(prompt for _, _, prompt in workload.prompts())
    both = replays(played["always reload"], played["never reload"])
    return {
        "schema": "kvlab.habits/1",
        "model": model.arch.name,
        "link": said,
        "policies": {
            name: {
                "ttft_mean_s": median(mean_ttft_s(resumed)),
                "hit_rate": sum(sum(r.hit_tokens.values()) for resumes in resumed for r in resumes) / prompts,
                "regret_s": regret(resumed, both).lost_s,
            }
            for name, resumed in played.items()
        },
    }
