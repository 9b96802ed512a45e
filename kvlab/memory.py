"""How much memory is free, asked before something large is allocated: a refusal in words beats a killed process.

Does not know what the memory is for.
"""

from __future__ import annotations

import psutil
import torch

__all__ = ["check_fits"]


def check_fits(what: str, need_bytes: int, device: torch.device) -> None:
    """Raise ValueError, with both figures, when `need_bytes` are more than is free on `device` now."""
    if device.type == "cuda":  # what torch keeps for its next tensors is free as well
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = psutil.virtual_memory().available
    if need_bytes > free:
        raise ValueError(
            f"{what} needs {need_bytes} bytes and {free} are free on {device};"
            " use a smaller model or dtype, or shorter lengths"
        )
