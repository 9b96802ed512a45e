"""A `Machine` that follows what a server is seen to do: its loads and its prefills.

Arithmetic on what was observed. Knows no server and reads no clock: whoever calls brings the times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes, kv_dtype_for
from kvlab.machine import Curve, Link, Machine, Prefill, PrefillSeen, TransferSeen

__all__ = ["CALIBRATING", "LEAST_ROWS", "Chunk", "Learner", "StepClock", "unmeasured"]

# Observations of each kind that make a calibration where no machine file was given.
CALIBRATING = 3
# Shorter prefills are mostly fixed cost, and would drag the rates of long ones along: nothing is learned from them.
LEAST_ROWS = 128
# Weight of one observation in the long run; the first ones weigh more (see `Learner`).
STEADY_WEIGHT = 0.1


def unmeasured(arch: ModelArch, tier: str) -> Machine:
    """A machine with the shape of any machine and the speed of none: its first observations set the scale.

    One rate for every size, and nominal values (1 TFLOP/s, 5 ms a pass, 1 GB/s) until something was seen.
    """
    rate = Curve(((1.0, 1e12),))
    source = "learned from what the server did"
    prefill = Prefill(5e-3, rate, rate, calibrated_on=arch.name, calibrated_shape=arch.shape_digest, source=source)
    link = Link(Curve(((1.0, 1.0),)), source=source)
    return Machine("learned", prefill, {tier: {"load": link}}, {"kind": "learned"})


class Learner:
    """Keeps `machine` in step with what is observed of `arch` on `tier`.

    From a measured `machine` the first observation counts 1/2, the next 1/3, and so on down to `STEADY_WEIGHT`. From
    none the first counts whole, and `ready` is False until `CALIBRATING` loads and prefills were seen.
    `chunk_tokens` is the server's largest pass. Sizes are per rank of `tp`.
    """

    def __init__(
        self,
        arch: ModelArch,
        tier: str,
        machine: Machine | None = None,
        *,
        kv_dtype: str | None = None,
        block_size: int = 16,
        tp: int = 1,
        chunk_tokens: int | None = None,
    ) -> None:
        start = machine or unmeasured(arch, tier)
        start.link(tier)  # raises ValueError naming the tiers that it knows
        if chunk_tokens is not None:
            start = replace(start, prefill=replace(start.prefill, chunk_tokens=chunk_tokens))
        self.machine = start
        self.arch, self.tier, self.block_size, self.tp = arch, tier, block_size, tp
        self.kv_dtype = kv_dtype_for(arch, kv_dtype, start.prefill.dtype)  # loads count as many bytes as verdicts do
        self.loads = self.prefills = 0
        self._prior = 0 if machine is None else 1

    @property
    def ready(self) -> bool:
        """Whether there is something to judge by: a machine that was given, or enough that was seen."""
        return bool(self._prior) or min(self.loads, self.prefills) >= CALIBRATING

    def load_bytes(self, tokens: int) -> int:
        """Bytes of one rank that hold `tokens` positions."""
        return kv_bytes(self.arch, tokens, self.kv_dtype, self.tp, self.block_size)

    def saw_load(self, tokens: int, seconds: float) -> None:
        """A load of `tokens` positions, with nothing queued ahead, took `seconds`."""
        if tokens < self.block_size or seconds <= 0:
            return
        self.loads += 1
        seen = TransferSeen(
            self.tier,
            "load",
            self.load_bytes(tokens),
            tokens // self.block_size,
            len(self.arch.layers),
            seconds,
            ranks=self.tp,
        )
        self.machine = self.machine.updated(seen, self._weight(self.loads))

    def saw_prefill(self, start: int, stop: int, seconds: float) -> None:
        """Computing positions [start, stop), and nothing else of weight, took `seconds`."""
        if stop - start < LEAST_ROWS or seconds <= 0:
            return
        self.prefills += 1
        seen = PrefillSeen(self.arch, start, stop, seconds, self.tp)
        self.machine = self.machine.updated(seen, self._weight(self.prefills))

    def _weight(self, count: int) -> float:
        return max(STEADY_WEIGHT, 1 / (count + self._prior))


@dataclass(frozen=True)
class Chunk:
    """What one request computes in one step: `rows` positions from `start` on. `loaded` tokens are loaded before it."""

    request_id: str
    start: int
    rows: int
    prefill: bool
    loaded: int = 0


class StepClock:
    """How long each step of a server took, and what that says about prefill and loads.

    Steps end in the order in which they began, and may overlap (a server prepares one while another runs): a step is
    billed from its beginning or the end of the one before, whichever is later.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[float, tuple[Chunk, ...]]] = {}
        self._last_end_s = 0.0

    def begin(self, step: int, chunks: tuple[Chunk, ...], now_s: float) -> None:
        """Step `step` was scheduled."""
        self._open[step] = (now_s, chunks)

    def end(self, step: int, now_s: float, load_s: float, learner: Learner | None, failed: Mapping[str, str]) -> None:
        """It is over; `load_s` of it were spent loading. Teaches `learner` what can be told apart.

        A load by itself; a prefill by itself, or with decodes of at most an eighth of its rows. Nothing where a load
        failed.
        """
        began_s, chunks = self._open.pop(step, (now_s, ()))
        for stale in [number for number in self._open if number < step]:
            del self._open[stale]
        took_s = now_s - max(began_s, self._last_end_s) - load_s
        self._last_end_s = now_s
        if learner is None or failed:
            return
        loaded = [chunk.loaded for chunk in chunks if chunk.loaded]
        if len(loaded) == 1:
            learner.saw_load(loaded[0], load_s)
        prefills = [chunk for chunk in chunks if chunk.prefill]
        if len(prefills) == 1:
            rows = prefills[0].rows
            if sum(chunk.rows for chunk in chunks) - rows <= rows / 8:
                learner.saw_prefill(prefills[0].start, prefills[0].start + rows, took_s)
