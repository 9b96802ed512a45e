"""`kvlab probe`: a running server in, first-token times, the flip, a chart, a machine and settings out."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.arch import ModelArch, preset_names
from kvlab.cli import probe_report
from kvlab.cli.console import BAD_INPUT, INTERRUPTED, err, positive_count, positive_s, progress
from kvlab.cli.plan import find_arch

if TYPE_CHECKING:
    from kvlab.experiments.probe import Ask, Measured, Prompts
    from kvlab.machine import Machine
    from kvlab.plan import Plan
    from kvlab.server import Served, Server

KEYS = ("KVLAB_API_KEY", "OPENAI_API_KEY")


def probe(
    url: Annotated[str, typer.Argument(help="Address of an OpenAI-compatible server, as in http://host:8000.")],
    model: Annotated[str, typer.Option(help="The model's name on that server.")],
    lengths: Annotated[
        str,
        typer.Option(help="Prefix lengths in tokens, as in 512,2k,8k; auto: from 256 up, what model and budget allow."),
    ] = "auto",
    suffix: Annotated[str, typer.Option(help="New tokens behind the prefix.")] = "16",
    concurrency: Annotated[str, typer.Option(help="Requests at once, as in 1,4.")] = "1",
    repeats: Annotated[int, typer.Option(help="Rounds of interleaved arms; an interval needs seven.")] = 7,
    token_budget: Annotated[str, typer.Option(help="The most prompt tokens to send in all.")] = "1M",
    budget: Annotated[str, typer.Option(help="Time for measuring; no further round starts beyond it.")] = "10min",
    timeout: Annotated[str, typer.Option(help="How long the server may stay silent.")] = "120s",
    reset: Annotated[
        bool, typer.Option(help="Use the server's own path that drops its prefix cache, where it has one.")
    ] = True,
    config: Annotated[
        str | None,
        typer.Option(help="The model's shape: config.json, folder, hub id or preset; default: what the server names."),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp8, ...; default: what the config prescribes, else bf16.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(help="Settings for vllm, lmcache, sglang or llm-d; default: for what runs there.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for probe.json, machine.json and probe.png.")] = Path(
        "kvlab-probe"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send none of it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the report.")] = False,
) -> None:
    """Find the prefix length from which cache hits beat computing again, on a server that runs."""
    from kvlab.experiments import probe as experiment
    from kvlab.server import Endpoint, Server

    suffix_tokens, budget_tokens = positive_count("--suffix", suffix), positive_count("--token-budget", token_budget)
    budget_s, timeout_s = positive_s("--budget", budget), positive_s("--timeout", timeout)
    users = _counts("--concurrency", concurrency)
    asked = None if lengths == "auto" else _counts("--lengths", lengths)
    shape = None if config is None else find_arch(config)
    _check_system(settings)
    name, key = next(((name, os.environ[name]) for name in KEYS if os.environ.get(name)), (None, None))
    server = Server(Endpoint(url, key, timeout_s=timeout_s), model)
    served, counted = server.served(), server.counters()
    reload = reset and server.reset_path is not None
    chosen = asked or experiment.auto_lengths(
        served.max_tokens, suffix_tokens, users, repeats, budget_tokens, reload=reload
    )
    ask = experiment.Ask(chosen, suffix_tokens, users, repeats, budget_s, reload)
    _check_size(ask, served, budget_tokens)
    block = None if counted is None else counted.block_tokens
    about: dict[str, Any] = {
        "version": server.version(),
        "root": served.root,
        "max_tokens": served.max_tokens,
        "block_tokens": block,
    }
    if not as_json:
        probe_report.show_server(server, about, counted, name)
        probe_report.show_cost(ask, server.reset_path, reset=reset)
    if dry_run:
        return
    say = progress(quiet=as_json)
    rehearsal = experiment.rehearse(server, *_prompts(server), ask, say)
    say("")
    if not as_json:
        probe_report.show_rehearsal(rehearsal, ask)
    measured = experiment.measure(server, rehearsal, ask, say)
    say("")
    arch = shape or _served_arch(served)
    machine, why = _fit(arch, measured, about, rehearsal.tier, kv_dtype, server)
    record = experiment.record(server, rehearsal, measured, machine, {**about, "no_machine": why})
    chart = _write(record, machine, out_dir)
    if as_json:
        print(json.dumps(record, indent=1))  # noqa: T201
    else:
        probe_report.show_result(record)
        if arch is not None and machine is not None and machine.links and measured.rounds:
            plan = _plan(arch, machine, ask, block, kv_dtype, record)
            probe_report.show_settings_for(plan, settings or server.kind)
        probe_report.show_files(record, out_dir, chart)
    if measured.broken:
        err.print(f"kvlab: {measured.stopped}; what was measured before is kept", markup=False, soft_wrap=True)
        sys.exit(INTERRUPTED if measured.stopped == experiment.INTERRUPTED else BAD_INPUT)


# Options into things ------------------------------------------------------------------------------------------------


def _counts(option: str, text: str) -> tuple[int, ...]:
    return tuple(sorted({positive_count(option, item) for item in text.split(",")}))


def _check_system(system: str | None) -> None:
    from kvlab.settings import SYSTEMS

    if system is not None and system not in SYSTEMS:
        raise ValueError(f"no settings for {system!r}; known systems: {', '.join(SYSTEMS)}")


def _check_size(ask: Ask, served: Served, budget_tokens: int) -> None:
    longest = ask.lengths[-1] + ask.suffix + 1
    if served.max_tokens is not None and longest > served.max_tokens:
        raise ValueError(
            f"prefix + suffix + 1 is {longest:,} tokens, beyond the {served.max_tokens:,} that {served.name} takes"
        )
    if ask.cost.prompt_tokens > budget_tokens:
        raise ValueError(
            f"this would send up to {ask.cost.prompt_tokens:,} prompt tokens, beyond --token-budget {budget_tokens:,};"
            " raise it, or ask for fewer lengths, repeats or requests at once"
        )


def _prompts(server: Server) -> tuple[Prompts, Prompts]:
    """Random prompts in ids of the server's own vocabulary, and in words; never the same twice."""
    from kvlab.experiments.probe import Prompts
    from kvlab.experiments.probe.prompts import SAFE_IDS
    from kvlab.loading import default_text

    text, seed = default_text(), random.SystemRandom().randrange(2**32)
    return Prompts(server.tokenize(text) or SAFE_IDS, seed), Prompts(text.split(), seed)


def _served_arch(served: Served) -> ModelArch | None:
    """The shape of the served model where it is a preset or lies in a local folder that kvlab can read.

    Nothing is fetched, and a name that the server made up costs no measurement.
    """
    for name in (served.root, served.name):
        with suppress(ValueError, OSError):
            if name and (name in preset_names() or (Path(name) / "config.json").is_file()):
                return find_arch(name)
    return None


def _fit(
    arch: ModelArch | None,
    measured: Measured,
    about: Mapping[str, Any],
    tier: str | None,
    kv_dtype: str | None,
    server: Server,
) -> tuple[Machine | None, str | None]:
    """The machine behind the server, or why there is none."""
    from kvlab.experiments.probe import fit_machine
    from kvlab.experiments.probe.results import levels
    from kvlab.records import machine_facts, now_utc

    found = levels(measured)
    if arch is None:
        return None, "the model's shape is not known here: give --config (config.json, folder, hub id or preset)"
    if not found:
        return None, "nothing was measured"
    try:
        return (
            fit_machine(
                arch,
                found[0],
                suffix=measured.ask.suffix,
                block_size=about["block_tokens"] or 16,
                tier=tier,
                kv_dtype=kv_dtype,
                dtype=kv_dtype or arch.kv_dtype or "bf16",
                name=f"{server.model} at {server.endpoint.url}",
                provenance={
                    "kind": "live",
                    "when": now_utc(),
                    "facts": machine_facts(),
                    "facts_of": "the client",
                    "server": {"url": server.endpoint.url, "kind": server.kind, **about},
                    "concurrency": found[0].concurrency,
                },
            ),
            None,
        )
    except ValueError as error:
        return None, str(error)


def _plan(
    arch: ModelArch, machine: Machine, ask: Ask, block: int | None, kv_dtype: str | None, record: Mapping[str, Any]
) -> Plan:
    """A plan on the fitted machine whose flip is the measured one, where the measured range holds it."""
    from kvlab.plan import plan

    made = plan(arch, machine, prefixes=ask.lengths, suffix=ask.suffix, kv_dtype=kv_dtype, block_size=block or 16)
    found = record["levels"][0]["against_recompute"]["reload"]
    tiers = []
    for tier in made.tiers:
        at = found["crossover_tokens"]
        if at is None and (tier.crossover_tokens or 0) > ask.lengths[-1]:
            at = tier.crossover_tokens  # beyond what was measured: the fit's word
        tiers.append(replace(tier, crossover_tokens=at))
    return replace(made, tiers=tuple(tiers))


def _write(record: Mapping[str, Any], machine: Machine | None, folder: Path) -> Path | None:
    """Write the record and the machine, and the chart where there is something to draw and a library to do it."""
    from kvlab.records import write_json

    write_json(folder / "probe.json", record)
    if machine is not None:
        write_json(folder / "machine.json", machine.to_dict())
    if not record["levels"]:
        return None
    try:
        from kvlab.lab import draw
    except ModuleNotFoundError:
        return None
    return draw.save(draw.probe_figure(record), folder / "probe.png")
