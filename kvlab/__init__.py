"""kvlab: reload a KV cache or recompute it? Learn it, then decide with numbers.

Importing kvlab does not import torch: what needs it is loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvlab import policy as policies
from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes, prefill_flops
from kvlab.machine import Machine
from kvlab.verdict import Verdict, decide

if TYPE_CHECKING:
    from kvlab.engine import Engine
    from kvlab.experiments.calibrate import calibrate
    from kvlab.loading import load_model
    from kvlab.model import Model
    from kvlab.pool import BlockPool
    from kvlab.tiers import DiskTier, HostTier, LinkTier
    from kvlab.transfer import Transfer

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
    "Model": "kvlab.model",
    "Transfer": "kvlab.transfer",
    "calibrate": "kvlab.experiments.calibrate",
    "load_model": "kvlab.loading",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")
