"""From samples to medians, crossovers with intervals and a record. Knows no server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvlab.crossings import crossings_of, interpolated_crossover
from kvlab.experiments.probe.ask import Arm
from kvlab.experiments.probe.measure import Measured, Sample
from kvlab.experiments.probe.rehearse import Rehearsal
from kvlab.machine import Machine
from kvlab.records import bootstrap_interval, machine_facts, now_utc
from kvlab.server import Server

__all__ = ["SCHEMA", "Level", "discarded", "levels", "record"]

SCHEMA = "kvlab.probe/1"
_LEAST_SHARE = 0.5  # of the rounds must have proven samples before a length has a median


class Level:
    """What was measured with so many requests at once; `seconds[arm]` is [length, round], NaN where nothing counts.

    A sample is the median of its group. Only whole rounds count, unless there is none.
    """

    def __init__(self, measured: Measured, concurrency: int) -> None:
        self.concurrency, self.lengths = concurrency, measured.ask.lengths
        self.arms = measured.arms
        rounds = measured.rounds or 1
        self.seconds = {arm: np.full((len(self.lengths), rounds), math.nan) for arm in self.arms}
        for sample in measured.samples:
            if sample.concurrency == concurrency and sample.round < rounds and sample.fault is None:
                where = self.lengths.index(sample.tokens), sample.round
                self.seconds[sample.arm][where] = float(np.median(sample.ttft_s))

    def proven(self, arm: Arm) -> list[int]:
        """How many samples count, by length."""
        return [int(count) for count in np.sum(~np.isnan(self.seconds[arm]), axis=1)]

    def medians(self, arm: Arm) -> list[float | None]:
        """Seconds by length; None where fewer than half of the rounds count."""
        rounds = self.seconds[arm].shape[1]
        return [
            float(np.nanmedian(row)) if count >= _LEAST_SHARE * rounds and count else None
            for row, count in zip(self.seconds[arm], self.proven(arm), strict=True)
        ]

    def against_recompute(self, arm: Arm, seed: int = 0) -> dict[str, Any]:
        """From which length `arm` wins over recompute: in the medians, with a 95 % interval over complete rounds.

        0: at every length, None: not at the longest; an interval's end None: never. Lengths without a median in both
        arms are left out, and a round is complete when it has both everywhere else. Nothing to compare: `tokens` is
        empty.
        """
        pairs = zip(self.medians(arm), self.medians("recompute"), strict=True)
        used = [i for i, (hit_s, cold_s) in enumerate(pairs) if hit_s is not None and cold_s is not None]
        tokens = [self.lengths[i] for i in used]
        hits, colds = self.seconds[arm][used], self.seconds["recompute"][used]
        whole = ~np.isnan(hits + colds).any(axis=0)

        def crossover(rounds: Any) -> float:
            both = (np.median(samples[:, whole][:, rounds], axis=1).tolist() for samples in (hits, colds))
            at = interpolated_crossover(tokens, *both)
            return math.inf if at is None else at

        interval = bootstrap_interval(crossover, int(whole.sum()), seed) if tokens else None
        medians = [np.nanmedian(samples, axis=1).tolist() if used else [] for samples in (hits, colds)]
        at = interpolated_crossover(tokens, *medians)
        return {
            "tokens": tokens,
            "complete_rounds": int(whole.sum()) if used else 0,
            "crossover_tokens": None if at is None else math.ceil(at),
            "crossover_interval": None if interval is None else [None if math.isinf(end) else end for end in interval],
            "crossings": [asdict(crossing) for crossing in crossings_of(tokens, *medians)],
        }


def levels(measured: Measured) -> list[Level]:
    """One for each number of requests at once that has any sample that counts."""
    found = [Level(measured, concurrency) for concurrency in measured.ask.concurrency]
    return [level for level in found if any(level.proven("recompute"))]


def discarded(samples: Sequence[Sample]) -> dict[str, int]:
    """How many samples do not count, by why."""
    counts: dict[str, int] = {}
    for sample in samples:
        if sample.fault is not None:
            said = f"{sample.arm} of {sample.concurrency} × {sample.tokens:,} tokens: {sample.fault}"
            counts[said] = counts.get(said, 0) + 1
    return counts


def record(
    server: Server,
    rehearsal: Rehearsal,
    measured: Measured,
    machine: Machine | None,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """A `kvlab.probe/1` record; `Machine.load` reads the machine in it. `about`: more of what is known of the server.

    Holds no key. `provenance.facts` are of the machine that asked, which need not be the server's.
    """
    shown = []
    for level in levels(measured):
        shown.append(
            {
                "concurrency": level.concurrency,
                "tokens": list(level.lengths),
                "seconds": {arm: level.medians(arm) for arm in level.arms},
                "proven": {arm: level.proven(arm) for arm in level.arms},
                "against_recompute": {arm: level.against_recompute(arm) for arm in level.arms[1:]},
            }
        )
    ask = measured.ask
    data = {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(), "facts_of": "the client"},
        "server": {
            "url": server.endpoint.url,
            "model": server.model,
            "kind": server.kind,
            "proof": rehearsal.proof,
            "tier": rehearsal.tier,
            "reset": server.reset_path if rehearsal.tier else None,
            "settle_s": rehearsal.settle_s,
            "notes": list(rehearsal.notes),
            **about,
        },
        "parameters": {
            "suffix": ask.suffix,
            "rounds": ask.rounds,
            "budget_s": ask.budget_s if math.isfinite(ask.budget_s) else None,
            "seed": rehearsal.prompts.seed,
            "prompts": "text" if rehearsal.prompts.as_text else "token ids",
        },
        "sent": {"requests": server.requests, "prompt_tokens": server.prompt_tokens},
        "rounds": measured.rounds,
        "stopped": measured.stopped,
        "rehearsal_s": {"cold": rehearsal.cold_s, "hit": rehearsal.hit_s},
        "levels": shown,
        "discarded": discarded(measured.samples),
        "samples": [asdict(sample) for sample in measured.samples],
    }
    if machine is not None:
        data["machine"] = machine.to_dict()
    return data
