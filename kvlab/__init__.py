"""kvlab: reload a KV cache or recompute it? Learn it, then decide with numbers.

Importing kvlab imports nothing else: each name below is loaded when it is first used, torch with the first that
needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab import policy as policies
    from kvlab.arch import ModelArch
    from kvlab.arithmetic import kv_bytes, prefill_flops
    from kvlab.engine import Engine
    from kvlab.experiments.calibrate import calibrate
    from kvlab.loading import load_model
    from kvlab.machine import Machine
    from kvlab.model import Model
    from kvlab.pool import BlockPool
    from kvlab.tiers import DiskTier, HostTier, LinkTier, ValkeyTier
    from kvlab.transfer import Transfer
    from kvlab.verdict import Verdict, decide

__version__ = "0.1.0"

__all__ = [
    "BlockPool",
    "DiskTier",
    "Engine",
    "HostTier",
    "LinkTier",
    "Machine",
    "Model",
    "ModelArch",
    "Transfer",
    "ValkeyTier",
    "Verdict",
    "calibrate",
    "decide",
    "kv_bytes",
    "load_model",
    "policies",
    "prefill_flops",
]

_LAZY = {
    "BlockPool": "kvlab.pool",
    "DiskTier": "kvlab.tiers",
    "Engine": "kvlab.engine",
    "HostTier": "kvlab.tiers",
    "LinkTier": "kvlab.tiers",
    "Machine": "kvlab.machine",
    "Model": "kvlab.model",
    "ModelArch": "kvlab.arch",
    "Transfer": "kvlab.transfer",
    "ValkeyTier": "kvlab.tiers",
    "Verdict": "kvlab.verdict",
    "calibrate": "kvlab.experiments.calibrate",
    "decide": "kvlab.verdict",
    "kv_bytes": "kvlab.arithmetic",
    "load_model": "kvlab.loading",
    "prefill_flops": "kvlab.arithmetic",
}


def __getattr__(name: str) -> Any:
    if name == "policies":
        return import_module("kvlab.policy")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
