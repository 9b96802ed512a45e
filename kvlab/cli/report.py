"""What `kvlab crossover` and `kvlab calibrate` say: machines, predictions and records as tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from kvlab.cli.console import out
from kvlab.units import format_bytes, format_gb_per_s, format_s

if TYPE_CHECKING:
    from kvlab.experiments.crossover import Prediction
    from kvlab.machine import Machine

__all__ = [
    "bound_by_launches",
    "narrow_table",
    "sentence",
    "show_machine",
    "show_predictions",
    "show_result",
    "uneven_pace",
]

_UNEVEN = 1.5  # what calibration and measurement may differ by before it is said
_FAR, _FLAT = 16, 3  # so many times the tokens in so few times the seconds: not their FLOPs


def narrow_table(title: str, right: Sequence[str], left: Sequence[str] = ()) -> Table:
    """A table that fits 80 columns: no frame, numbers to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    for column in left:
        table.add_column(column)
    return table


def show_machine(machine: Machine) -> None:
    """Print the curves of a machine."""
    prefill = machine.prefill
    table = narrow_table("Calibrated prefill: GFLOP/s by new tokens in a pass", ["new tokens", "linear", "attention"])
    for rows, rate in prefill.linear_flops_per_s.points:
        attention = prefill.attention_flops_per_s(rows)
        table.add_row(f"{rows:,.0f}", f"{rate / 1e9:.3g}", f"{attention / 1e9:.3g}")
    out.print(table)
    out.print(f"and {format_s(prefill.per_chunk_s)} a pass; spread ±{prefill.spread:.0%}", markup=False)
    names = ["up to", "a request", "a block", "a copy", "spread"]
    table = narrow_table("Calibrated links", names, ["link"])
    for name, directions in machine.links.items():
        for direction, link in directions.items():
            if name.startswith("emulated") and direction == "store":
                continue
            table.add_row(
                _rate(max(rate for _, rate in link.gb_per_s.points)),
                format_s(link.per_request_s),
                format_s(link.per_block_s),
                format_s(link.per_copy_s),
                f"±{link.spread:.0%}",
                f"{_short(name)}, {direction}",
            )
    out.print(table)


def show_predictions(predictions: Sequence[Prediction], machine: Machine) -> None:
    """Print the calibration, both predicted times at every length, and the predicted flips."""
    show_machine(machine)
    reloads = [f"reload, {_short(prediction.tier)}" for prediction in predictions]
    table = narrow_table("Predicted before measuring: time to first token", ["prefix", "recompute", *reloads])
    for i, verdict in enumerate(predictions[0].verdicts):
        times = [format_s(prediction.verdicts[i].ttft_reload_s) for prediction in predictions]
        table.add_row(f"{verdict.prefix:,}", format_s(verdict.ttft_recompute_s), *times)
    out.print(table)
    for prediction in predictions:
        out.print(f"predicted, {prediction.tier}: {_flip(prediction.crossover_tokens)}", markup=False, soft_wrap=True)


def show_result(record: Mapping[str, Any]) -> None:
    """Print a `kvlab.crossover/1` record: a table and a sentence for each tier."""
    out.print()
    columns = ["prefix", "KV", "reload", "pred.", "recompute", "pred.", "tie at"]
    for tier in record["tiers"]:
        cold = {"memory": "", "proven": "; cold, proven", "unproven": "; cold: unproven"}[tier["cold"]]
        title = f"{tier['name']}{_emulated(tier)}{cold}: medians of {record['rounds']} rounds"
        table = narrow_table(title, columns, ["winner"])
        for i, tokens in enumerate(tier["tokens"]):
            even = tier["break_even_gb_per_s"][i]
            table.add_row(
                f"{tokens:,}",
                format_bytes(tier["kv_bytes"][i]),
                format_s(tier["reload_s"][i]),
                format_s(tier["predicted_reload_s"][i]),
                format_s(tier["recompute_s"][i]),
                format_s(tier["predicted_recompute_s"][i]),
                "no speed" if even is None else _rate(even),
                "reload" if tier["reload_s"][i] < tier["recompute_s"][i] else "recompute",
            )
        out.print(table)
    out.print(
        "Times are to the first new token, suffix included. pred.: predicted before measuring. tie at: the link speed,"
        " overheads included, at which both ways would take equally long."
    )
    out.print("Reloaded logits equal the resident cache's bit for bit at every length and in every round.\n")
    for tier in record["tiers"]:
        out.print(sentence(tier), markup=False)
    for warning in (uneven_pace(record["tiers"][0]), bound_by_launches(record)):
        if warning:
            out.print(f"\n{warning}", markup=False)


def uneven_pace(tier: Mapping[str, Any]) -> str:
    """A warning where computing the longest prefix took another time than its calibration says, else ""."""
    tokens, took_s, predicted_s = (tier[key][-1] for key in ("tokens", "recompute_s", "predicted_recompute_s"))
    if 1 / _UNEVEN < predicted_s / took_s < _UNEVEN:
        return ""
    when = "calibrated" if predicted_s > took_s else "measured"
    return (
        f"Mind: computing {tokens:,} tokens took {format_s(took_s)} and was predicted to take"
        f" {format_s(predicted_s)}. The machine was slower while it was {when}: other programs, a thermal limit, or a"
        " calibration of another day. Predictions above and machine.json are off by as much; run again when it is idle."
    )


def bound_by_launches(record: Mapping[str, Any]) -> str:
    """A warning where a GPU took about as long for the longest prefix as for one far shorter, else ""."""
    gpu, tier = record["provenance"]["facts"].get("gpu"), record["tiers"][0]
    tokens, times = ([tier[key][end] for end in (0, -1)] for key in ("tokens", "recompute_s"))
    if not gpu or tokens[1] < _FAR * tokens[0] or times[1] > _FLAT * times[0]:
        return ""
    return (
        f"Mind: {gpu} computes {tokens[1]:,} tokens in {times[1] / times[0]:.1f} times what it takes for {tokens[0]:,}."
        " Launching kernels is most of the time, and the answer is one about Python and the driver. A larger --model"
        " shows the GPU."
    )


def _emulated(tier: Mapping[str, Any]) -> str:
    return " (emulated)" if tier["emulated"] and "emulated" not in tier["name"] else ""


def _rate(gb_per_s: float) -> str:
    return format_gb_per_s(gb_per_s).split(" (")[0]


def _short(name: str) -> str:
    return name.split(" (")[0]


def _flip(tokens: int | None) -> str:
    if tokens is None:
        return "recompute wins at long prefixes"
    return "reload wins at every length" if tokens == 0 else f"reload wins from {tokens:,} tokens up"


def sentence(tier: Mapping[str, Any]) -> str:
    """What one tier's record says, in one sentence."""
    name, at, interval = tier["name"], tier["crossover_tokens"], tier["crossover_interval"]
    kind = _emulated(tier)
    if at == 0:
        ties = [(even, n) for even, n in zip(tier["break_even_gb_per_s"], tier["tokens"], strict=True) if even]
        if not ties:  # computing the prefix costs nothing that can be measured: see "tie at"
            return f"{name}{kind}: reload wins at every measured length, by less than the two ways scatter."
        (slowest, at_slowest), (fastest, at_fastest) = min(ties), max(ties)
        return (
            f"{name}{kind}: reload wins at every measured length: the link would have to be slower than"
            f" {format_gb_per_s(fastest)} for recomputing to win anywhere (at {at_fastest:,} tokens), and slower than"
            f" {format_gb_per_s(slowest)} at {at_slowest:,}."
        )
    predicted = _flip(tier["predicted_crossover_tokens"])
    if at is None:
        return (
            f"{name}{kind}: recompute wins at {tier['tokens'][-1]:,} tokens, the longest measured;"
            f" predicted: {predicted}."
        )
    if interval is None:
        between = "no interval: fewer than 7 rounds"
    else:
        low = "the shortest length" if interval[0] == 0 else f"{interval[0]:,.0f}"
        high = "never" if interval[1] is None else f"{interval[1]:,.0f}"
        between = f"between {low} and {high}"
    return f"{name}{kind}: reload wins from {at:,} tokens up ({between}); predicted: {predicted}."
