"""The model that a lesson computes with: on a GPU where that shows what computing costs, else on the CPU.

A lesson sets the seconds of a prefix's FLOPs against those of its bytes. On a fast GPU launching a small model's
kernels may take longer than they run, for 16 tokens as for a thousand: no computing is to be seen then.
"""

from __future__ import annotations

from collections.abc import Callable

from kvlab.experiments.rig import Rig
from kvlab.loading import default_text, load_default_model
from kvlab.model import Model
from kvlab.records import machine_facts, median

__all__ = ["growth", "lesson_model"]

_FEW = 16
_SHOWS = 3.0  # times as long as for few tokens


def lesson_model(prefix: int, *, say: Callable[[str], None] = print) -> Model:
    """The default model, on a GPU if computing `prefix` tokens takes three times as long there as computing 16.

    Where it does not, `say` is told so in a line, and the model is on the CPU.
    """
    model = load_default_model(say=say)
    if model.device.type != "cuda" or (times := growth(model, prefix)) >= _SHOWS:
        return model
    gpu = machine_facts(str(model.device)).get("gpu", model.device)
    say(
        f"{prefix:,} tokens take {times:.1f} times as long as {_FEW} on {gpu}: launching kernels is most of the time,"
        " and this lesson is about computing. It runs on the CPU. The GPU: kvlab crossover --device cuda --model LARGER"
    )
    return load_default_model("cpu", say=lambda _: None)  # what it has to say it has said


def growth(model: Model, prefix: int) -> float:
    """Seconds to compute `prefix` tokens ÷ seconds to compute 16: medians of seven, in turns."""
    tokens = model.tokenizer.encode(default_text())[:prefix]
    seconds: dict[int, list[float]] = {_FEW: [], prefix: []}
    with Rig(model, block_size=16, max_tokens=prefix, tables=1) as rig:
        for number in range(8):
            for length, samples in seconds.items():
                took_s = rig.recompute(tokens[:length]).ttft_s
                if number:  # the first ones warm up
                    samples.append(took_s)
    return median(seconds[prefix]) / median(seconds[_FEW])
