"""What `kvlab probe` says: the server, what it will be sent, medians, flips, what did not count, settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab.cli.console import out, visible
from kvlab.cli.plan_report import show_settings
from kvlab.cli.report import narrow_table
from kvlab.units import format_s

if TYPE_CHECKING:
    from kvlab.experiments.probe import Ask, Rehearsal
    from kvlab.plan import Plan
    from kvlab.server import Counters, Server

__all__ = ["show_cost", "show_files", "show_rehearsal", "show_result", "show_server", "show_settings_for"]

_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "unknown": "an OpenAI-compatible server"}
_SAYS = {
    "usage": "each answer's own count of cached tokens",
    "metrics": "the server's metrics, before and after each request",
    "none": "nothing; hits and misses are unproven",
}


def _say(text: str) -> None:
    out.print(visible(text), markup=False, soft_wrap=True)


def show_server(server: Server, about: Mapping[str, Any], counted: Counters | None, key_name: str | None) -> None:
    """Print what answers there, and how the key travels."""
    told = [_NAMES[server.kind] + (f" {about['version']}" if about["version"] else ""), f"model {server.model}"]
    if about["max_tokens"]:
        told.append(f"up to {about['max_tokens']:,} tokens")
    if about["block_tokens"]:
        told.append(f"blocks of {about['block_tokens']}")
    _say(f"server   {server.endpoint.url}: {', '.join(told)}")
    if key_name is not None:
        how = ", unencrypted" if server.endpoint.plain_text else ""
        _say(f"key      from {key_name}, sent to that server{how}")
    if counted is not None and counted.busy:
        _say(f"note     {counted.busy:,.0f} requests of others run or wait there: times hold for that load")


def show_cost(ask: Ask, reset_path: str | None, *, reset: bool) -> None:
    """Print the most that will be sent, before it is."""
    cost = ask.cost
    _say(
        f"sends    up to {cost.requests:,} requests with {cost.prompt_tokens:,} prompt tokens in all, about"
        f" {cost.computed_tokens:,} of them to compute, and one generated token each"
    )
    _say(
        f"         prefixes of {', '.join(f'{n:,}' for n in ask.lengths)} + {ask.suffix} tokens,"
        f" {', '.join(map(str, ask.concurrency))} at once, {ask.rounds} rounds, measuring for {format_s(ask.budget_s)}"
        " at most"
    )
    if ask.reload:
        _say(
            f"resets   POST {reset_path} up to {cost.resets:,} times: each drops the cached prefixes of everybody who"
            " uses that server (--no-reset leaves it out)"
        )
    elif reset_path is None:
        _say("resets   none: the server has no path for it")
    elif not reset:
        _say("resets   none: --no-reset")


def show_rehearsal(rehearsal: Rehearsal, ask: Ask) -> None:
    """Print what the first requests showed."""
    _say(
        f"rehearsed with {ask.lengths[-1]:,} tokens: cold {format_s(rehearsal.cold_s)}, again"
        f" {format_s(rehearsal.hit_s)}; proof: {_SAYS[rehearsal.proof]}"
    )
    if rehearsal.tier is not None:
        settle = f", {format_s(rehearsal.settle_s)} after it was stored" if rehearsal.settle_s else ""
        _say(f"reload   a reset leaves prefixes in the tier {rehearsal.tier}{settle}")
    for note in rehearsal.notes:
        _say(f"note     {note}")
    scale = sum(ask.lengths) / ask.lengths[-1]
    _say(
        f"expect   about {format_s(rehearsal.cold_s * scale * ask.rounds * sum(ask.concurrency))} of computing or more"
    )


def show_result(record: Mapping[str, Any]) -> None:
    """Print a `kvlab.probe/1` record: a table for each number of requests at once, flips, what does not count."""
    out.print("\nTime to first token")
    arms = {"recompute": "recompute", "resident": "on device", "reload": f"from {record['server']['tier']}"}
    for level in record["levels"]:
        at_once = "1 request at a time" if level["concurrency"] == 1 else f"{level['concurrency']} requests at once"
        title = f"{at_once}: {_rounds(record['rounds'])}"
        columns = ["prefix", *(arms[arm] for arm in level["seconds"]), "that count"]
        table = narrow_table(title, columns, ["winner"])
        for i, tokens in enumerate(level["tokens"]):
            times = {arm: medians[i] for arm, medians in level["seconds"].items()}
            table.add_row(
                f"{tokens:,}",
                *("none" if seconds is None else format_s(seconds) for seconds in times.values()),
                "/".join(str(counts[i]) for counts in level["proven"].values()),
                _winner(times),
            )
        out.print(table)
    for level in record["levels"]:
        for arm, found in level["against_recompute"].items():
            _say(_sentence(level["concurrency"], arms[arm], found))
    if record["stopped"]:
        _say(f"Stopped after {record['rounds']} whole rounds: {record['stopped']}")
    if record["discarded"]:
        _say("Samples that do not count:")
        for why, count in record["discarded"].items():
            _say(f"  {count} × {why}")


def _rounds(count: int) -> str:
    return f"medians of {count} rounds" if count > 1 else "one round" if count else "not one whole round"


def _winner(times: Mapping[str, float | None]) -> str:
    cold_s, hit_s = times["recompute"], times["reload" if "reload" in times else "resident"]
    if cold_s is None or hit_s is None:
        return ""
    return ("reload" if "reload" in times else "on device") if hit_s < cold_s else "recompute"


def _sentence(concurrency: int, name: str, found: Mapping[str, Any]) -> str:
    who = f"{concurrency} at once, hits {name}"
    if not found["tokens"]:
        return f"{who}: no length has proven samples of both ways"
    if found["crossover_tokens"] == 0:
        said = f"faster than computing again at every length from {found['tokens'][0]:,} tokens"
    elif found["crossover_tokens"] is None:
        said = f"slower than computing again at {found['tokens'][-1]:,} tokens, the longest measured"
    else:
        said = f"faster than computing again from {found['crossover_tokens']:,} tokens up"
    interval = found["crossover_interval"]
    if interval is None:
        return f"{who}: {said} (no interval: {found['complete_rounds']} complete rounds, 7 are needed)"
    ends = ["never" if end is None else "the shortest" if end == 0 else f"{end:,.0f}" for end in interval]
    return f"{who}: {said} (95 % interval: {ends[0]} to {ends[1]})"


def show_settings_for(plan: Plan, system: str) -> None:
    """Print what the measured flip means as options of `system`."""
    from kvlab.settings import SYSTEMS, settings

    if system in SYSTEMS:
        show_settings(system, settings(plan, system))
    else:
        _say(f"no settings: what runs there is not known; give --settings ({', '.join(SYSTEMS)})")


def show_files(record: Mapping[str, Any], folder: Path, chart: Path | None) -> None:
    """Print where things are, and what to do with them."""
    out.print()
    if why := record["server"]["no_machine"]:
        _say(f"no machine in the record: {why}")
    else:
        _say(f"next: kvlab plan --model CONFIG --machine {folder / 'probe.json'}")
    _say(f"wrote {folder / 'probe.json'}" + (f" and {chart}" if chart else ""))
