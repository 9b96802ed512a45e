"""Reload or recompute on a server that runs: what to ask it, what its answers prove, and what follows from them."""

from kvlab.experiments.probe.ask import ARMS, Ask, auto_lengths
from kvlab.experiments.probe.machine import fit_machine
from kvlab.experiments.probe.measure import INTERRUPTED, Measured, Sample, measure
from kvlab.experiments.probe.prompts import Prompts
from kvlab.experiments.probe.rehearse import Rehearsal, rehearse
from kvlab.experiments.probe.results import SCHEMA, record

__all__ = [
    "ARMS",
    "INTERRUPTED",
    "SCHEMA",
    "Ask",
    "Measured",
    "Prompts",
    "Rehearsal",
    "Sample",
    "auto_lengths",
    "fit_machine",
    "measure",
    "record",
    "rehearse",
]
