"""`kvlab crossover` and `kvlab calibrate`: options into an experiment, its record into a table and a chart."""

from __future__ import annotations

import gc
import json
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.cli import report
from kvlab.cli.console import err, out, positive_count, progress
from kvlab.units import format_gb_per_s, format_s, parse_bandwidth_gb_per_s, parse_s

if TYPE_CHECKING:
    from kvlab.experiments.calibrate import TierFactory
    from kvlab.model import Model
    from kvlab.tiers import Tier

TIERS = ("host", "disk", "xz")
HOST_TIER_BYTES = 2**33
DISK_TIER_BYTES = 2**35

ModelOption = Annotated[
    str, typer.Option(help="Preset, folder, GGUF file or hub id; auto: SmolLM2-135M, or the built-in model without it.")
]
TextOption = Annotated[
    Path | None, typer.Option(help="UTF-8 text whose tokens are the prefix; default: a built-in one.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto: cuda where there is one.")]
DtypeOption = Annotated[str, typer.Option(help="fp32, bf16, fp16; auto: the faster one on this machine.")]
BlockOption = Annotated[str, typer.Option(help="Tokens per KV block.")]


def crossover(
    model: ModelOption = "auto",
    text: TextOption = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            help="host, disk, xz (compressed disk blocks), all, or a server (valkey://host:port); may be repeated."
        ),
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(help="An emulated link in front of host RAM: 1Gb/s, 25MB/s, 0.125GB/s,latency=50us."),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Prefix lengths in tokens, as in 64,256,1k; auto: what the budget allows.")
    ] = "auto",
    suffix: Annotated[str, typer.Option(help="New tokens behind the prefix.")] = "16",
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    block_size: BlockOption = "16",
    repeats: Annotated[int, typer.Option(help="Rounds of interleaved arms; an interval needs seven.")] = 7,
    budget: Annotated[str, typer.Option(help="Time for measuring; no further round starts beyond it.")] = "75s",
    machine: Annotated[Path | None, typer.Option(help="Reuse a calibration (a Machine JSON).")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where the disk tier keeps its files; default: a temporary folder.")
    ] = None,
    out_dir: Annotated[
        Path, typer.Option("--out", help="Folder for crossover.json, machine.json and crossover.png.")
    ] = Path("kvlab-out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of the table.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the built-in weights and of the bootstrap.")] = 0,
) -> None:
    """Find the prefix length where reloading a KV cache becomes faster than recomputing it, on this machine."""
    with _imports():
        from kvlab.experiments import crossover as experiment
        from kvlab.machine import Machine
        from kvlab.records import write_json

    suffix_tokens, size = positive_count("--suffix", suffix), positive_count("--block-size", block_size)
    if repeats < 1:
        raise ValueError(f"--repeats is {repeats}; expected at least 1")
    budget_s = parse_s(budget)
    wanted = _tier_names(tier, link)
    links = [_parse_link(item) for item in link or ()]
    asked = None if lengths == "auto" else _parse_lengths(lengths)
    calibrated = None if machine is None else Machine.load(machine)
    say = progress(quiet=as_json)
    loaded = _load_model(model, device, dtype, seed, say)
    tokens = _read_tokens(loaded, text)
    _check_lengths(loaded, asked or [], suffix_tokens, len(tokens))
    if not as_json:
        out.print(f"model    {loaded.arch.name}: {loaded.source}; {loaded.dtype} on {loaded.device}", markup=False)

    with _disk_folder(directory) as folder:
        makers = _tier_makers([name for name in wanted if name != "auto-link"], folder)
        if calibrated is None:
            from kvlab.experiments.calibrate import calibrate as run_calibration

            needed = {"host": _tier_makers(["host"], folder)["host"], **makers}
            calibrated = run_calibration(loaded, tokens, needed, block_size=size, progress=say)
        slow = len(links) + sum(name in ("auto-link", "xz") for name in wanted)
        chosen = asked or experiment.auto_lengths(
            loaded.arch,
            calibrated,
            tokens=len(tokens),
            suffix=suffix_tokens,
            block_size=size,
            slow_tiers=slow,
            fast_tiers=len(wanted) + len(links) - slow,
            budget_s=0.8 * budget_s,  # room for noise, so that all rounds fit
            rounds=repeats,
        )
        if "auto-link" in wanted:
            auto_gb_per_s = experiment.mid_range_link(
                loaded.arch, calibrated, chosen, suffix=suffix_tokens, kv_dtype=loaded.dtype, block_size=size
            )
            if auto_gb_per_s is not None:
                links.append((auto_gb_per_s, 0.0))
            elif not as_json:
                out.print("no emulated link: recomputing is predicted to win whatever the link", soft_wrap=True)
        for gb_per_s, latency_s in links:
            name = f"emulated {format_gb_per_s(gb_per_s)}" + (f", {format_s(latency_s)} latency" if latency_s else "")
            makers[name] = _emulated(gb_per_s, latency_s)
            calibrated = calibrated.with_link(name, calibrated.link("host").behind(gb_per_s, latency_s))
        predictions = experiment.predict(
            loaded, calibrated, list(makers), chosen, suffix=suffix_tokens, block_size=size
        )
        say("")
        if not as_json:
            report.show_predictions(predictions, calibrated)
        say = progress(quiet=as_json)
        reference = None if loaded.dtype in ("fp32", "fp64") else _load_model(model, device, "fp32", seed, say)
        measured = experiment.measure(
            loaded,
            tokens,
            makers,
            chosen,
            suffix=suffix_tokens,
            block_size=size,
            rounds=repeats,
            budget_s=budget_s,
            reference=reference,
            progress=say,
        )
        say("")
    parameters = {
        "text": str(text.name) if text else "built-in",
        "suffix": suffix_tokens,
        "block_size": size,
        "repeats": repeats,
        "budget_s": budget_s,
        "seed": seed,
    }
    record = experiment.record(loaded, calibrated, predictions, measured, parameters)
    write_json(out_dir / "machine.json", calibrated.to_dict())
    chart = _draw(record, out_dir / "crossover.png")
    write_json(out_dir / "crossover.json", record)
    if as_json:
        out.print_json(json.dumps(record)) if out.is_terminal else print(json.dumps(record, indent=1))  # noqa: T201
        return
    report.show_result(record)
    out.print(f"\nwrote {out_dir / 'crossover.json'}, {out_dir / 'machine.json'}", markup=False)
    out.print(f"wrote {chart}" if chart else "no chart: matplotlib is missing (pip install 'kvlab[lab]')", markup=False)


def calibrate(
    model: ModelOption = "auto",
    text: TextOption = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="host, disk, xz, all, or a server (valkey://host:port); may be repeated.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    block_size: BlockOption = "16",
    directory: Annotated[
        Path | None, typer.Option(help="Where the disk tier keeps its files; default: a temporary folder.")
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", help="The Machine JSON to write.")] = Path("machine.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the machine as JSON too.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the built-in weights.")] = 0,
) -> None:
    """Measure this machine: prefill rates and every tier's link, saved as a Machine JSON."""
    with _imports():
        from kvlab.experiments.calibrate import calibrate as run_calibration
        from kvlab.records import write_json

    size = positive_count("--block-size", block_size)
    names = [name for name in _tier_names(tier, None) if name != "auto-link"]
    say = progress(quiet=as_json)
    loaded = _load_model(model, device, dtype, seed, say)
    with _disk_folder(directory) as folder:
        makers = _tier_makers(names, folder)
        measured = run_calibration(loaded, _read_tokens(loaded, text), makers, block_size=size, progress=say)
    say("")
    write_json(out_file, measured.to_dict())
    if as_json:
        print(json.dumps(measured.to_dict(), indent=1))  # noqa: T201
    else:
        report.show_machine(measured)
        out.print(f"wrote {out_file}", markup=False)


@contextmanager
def _imports() -> Iterator[None]:
    """Import without looking for garbage, then or later, in what is imported: all of it stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# Options into things ------------------------------------------------------------------------------------------------


def _parse_lengths(value: str) -> list[int]:
    lengths = [positive_count("--lengths", item) for item in value.split(",")]
    if any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(f"--lengths {value} must increase")
    return lengths


def _check_lengths(model: Model, lengths: Sequence[int], suffix: int, available: int) -> None:
    need = max(lengths, default=64) + suffix
    if need > model.arch.max_positions:
        raise ValueError(
            f"prefix + suffix is {need} tokens, beyond the {model.arch.max_positions} of {model.arch.name}"
        )
    if need > available:
        raise ValueError(
            f"the text has {available} tokens, but the longest prefix + suffix needs {need}; use a longer --text"
        )


def _tier_names(tiers: Sequence[str] | None, links: Sequence[str] | None) -> list[str]:
    """Asked tiers; without any, host, disk and one emulated link (unless --link gives some)."""
    if not tiers:
        return ["host"] if links else ["host", "disk", "auto-link"]
    names: list[str] = []
    for name in tiers:
        if "://" not in name and name not in (*TIERS, "all"):
            raise ValueError(f"unknown tier {name!r}; known tiers: {', '.join(TIERS)}, all, valkey://host:port")
        names += [n for n in (TIERS if name == "all" else (name,)) if n not in names]
    if sum("://" in name for name in names) > 1:
        raise ValueError("--tier names more than one server; in a record they would have the same name")
    return names


def _parse_link(value: str) -> tuple[float, float]:
    """Read "1Gb/s" or "25MB/s,latency=50us" as (GB/s, seconds)."""
    rate, _, rest = value.partition(",")
    latency_s = 0.0
    if rest:
        key, _, amount = rest.partition("=")
        if key.strip() != "latency":
            raise ValueError(f"--link {value!r}: {key.strip()!r} is not known; write 1Gb/s or 1Gb/s,latency=50us")
        latency_s = parse_s(amount)
    return parse_bandwidth_gb_per_s(rate), latency_s


def _load_model(name: str, device: str, dtype: str, seed: int, say: Callable[[str], None]) -> Model:
    from kvlab.loading import load_default_model, load_model

    if name == "auto":
        say("loading the model")
        return load_default_model(device, dtype, seed, say=lambda line: err.print(line, markup=False, soft_wrap=True))
    say(f"loading {name}")
    return load_model(name, device=device, dtype=dtype, seed=seed)


def _read_tokens(model: Model, text: Path | None) -> list[int]:
    from kvlab.loading import default_text

    if text is None:
        content = default_text()
    else:
        if not text.is_file():
            raise ValueError(f"no text file at {text}")
        try:
            content = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{text} is not UTF-8 text: {error}") from error
        if not content.strip():
            raise ValueError(f"{text} is empty; expected UTF-8 text")
    return model.tokenizer.encode(content)


@contextmanager
def _disk_folder(directory: Path | None) -> Iterator[Path]:
    """A folder of this run's own (below `directory`, which may hold other things), removed afterwards."""
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="kvlab-", dir=directory, ignore_cleanup_errors=True)
    except OSError as error:
        raise ValueError(f"cannot make the disk tier's folder in {directory}: {error.strerror or error}") from error
    with folder as name:
        yield Path(name)


def _tier_makers(names: Sequence[str], folder: Path) -> dict[str, TierFactory]:
    """Makers of the tiers, by the name that a record has for them: a server's URL may hold a password."""
    from kvlab.tiers import DiskTier, HostTier

    known: dict[str, TierFactory] = {
        "host": lambda: HostTier(HOST_TIER_BYTES),
        "disk": lambda: DiskTier(folder / "disk", DISK_TIER_BYTES),
        "xz": lambda: DiskTier(folder / "xz", DISK_TIER_BYTES, codec="xz"),
    }
    known |= {url: _shared(url) for url in names if "://" in url}
    return {"valkey" if "://" in name else name: known[name] for name in names}


def _shared(url: str) -> TierFactory:
    """A maker of tiers on a server, under names of this run's own, which are gone after a day whatever happens."""
    from kvlab.tiers import ValkeyTier

    namespace = f"kvlab-run-{uuid.uuid4().hex[:12]}"

    def make() -> Tier:
        # Patient: in a measurement a late answer is slow, not a miss.
        return ValkeyTier(url, namespace=namespace, ttl_s=86400.0, timeout_s=60.0, lookup_timeout_s=10.0)

    ValkeyTier(url, lookup_timeout_s=10.0).check()  # before anything is measured
    return make


def _emulated(gb_per_s: float, latency_s: float) -> TierFactory:
    from kvlab.tiers import HostTier, LinkTier

    return lambda: LinkTier(HostTier(HOST_TIER_BYTES), gb_per_s, latency_s)


def _draw(record: Mapping[str, Any], path: Path) -> Path | None:
    try:
        from kvlab.lab import draw
    except ModuleNotFoundError:
        return None
    return draw.save(draw.crossover_figure(record), path)
