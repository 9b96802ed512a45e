"""`kvlab chat`: talk with a model on the real engine, and see what pausing, offloading and coming back cost.

Options, where things are kept, and the terminal. The conversation itself is in `kvlab.cli.conversation`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlab.cli.cache import TTL, kv_folder
from kvlab.cli.console import INTERRUPTED, err, out, positive_count, positive_s, progress, visible
from kvlab.units import format_bytes

if TYPE_CHECKING:
    from kvlab.cli.conversation import Conversations
    from kvlab.machine import Machine
    from kvlab.model import Model

BLOCK_SIZE = 16
DISK_BYTES = 2**32
CALIBRATION_TOKENS = 512  # of text: as long as what one message computes, and seconds rather than a minute
CALIBRATION_S = 10.0


def chat(
    model: Annotated[str, typer.Option(help="Preset, folder, GGUF file or hub id.")] = "smollm2-135m",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N; auto: cuda where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16; auto: the faster one on this machine.")] = "auto",
    pool_blocks: Annotated[str, typer.Option(help=f"Blocks of {BLOCK_SIZE} tokens in the pool.")] = "256",
    disk: Annotated[
        Path | None, typer.Option(help="Folder of the disk tier; default: `kv` in kvlab's cache folder.")
    ] = None,
    ttl: Annotated[str, typer.Option(help="How long what is on disk is used: 12h, 7d.")] = TTL,
    machine: Annotated[
        str | None, typer.Option(help="A Machine JSON of `kvlab calibrate --tier disk`; default: calibrate once.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message; default: the model's own.")] = None,
    max_new_tokens: Annotated[str, typer.Option(help="The most that one answer has.")] = "256",
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above, tokens are drawn.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn, and of built-in weights.")] = 0,
) -> None:
    """Talk with a model in the terminal: /pause, /offload, /resume, /branch, and /why for the arithmetic behind it.

    The KV blocks of what was said are kept on disk for the next time (`kvlab cache ls`), readable by you alone.
    """
    from kvlab.cli.conversation import Conversations, CtrlC
    from kvlab.engine import Engine
    from kvlab.loading import load_model
    from kvlab.policy import Calibrated
    from kvlab.request import Sampling
    from kvlab.tiers import DiskTier

    blocks, most = positive_count("--pool-blocks", pool_blocks), positive_count("--max-new-tokens", max_new_tokens)
    sampling, ttl_s, folder = Sampling(temperature, seed), positive_s("--ttl", ttl), disk or kv_folder()
    say = progress()
    say(f"loading {model}")
    loaded = load_model(model, device=device, dtype=dtype, seed=seed)
    tier = DiskTier(folder, DISK_BYTES, ttl_s=ttl_s, label=loaded.arch.name)
    known = _machine(loaded, folder, machine, say)
    say("")
    opening = [] if system is None else [{"role": "system", "content": system}]
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(loaded, blocks, BLOCK_SIZE, [tier], Calibrated(known)))
        conversations = Conversations(engine, BLOCK_SIZE, opening, most, sampling)
        _introduce(conversations, folder)
        code = _converse(conversations)
        with CtrlC():
            conversations.store()
            stack.close()
    kept = tier.counters
    lost = f"; {kept.failed_stores} stores failed" if kept.failed_stores else ""
    out.print(f"{kept.stored_blocks} blocks were stored in {folder}{lost}", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def _machine(model: Model, folder: Path, given: str | None, say: Callable[[str], None]) -> Machine:
    """The machine that was given, else the one that was calibrated here before, else a short calibration of it.

    It is kept with the blocks, since the disk's link is that of their folder.
    """
    from importlib import resources

    from kvlab.experiments.calibrate import TierFactory, calibrate
    from kvlab.machine import Machine
    from kvlab.records import machine_facts, write_json
    from kvlab.tiers import DiskTier

    if given is not None:
        return Machine.load(given)
    safe = re.sub(r"[^\w.-]+", "-", f"{model.arch.name}-{model.dtype}-{model.device}")
    path = folder / f"machine-{safe}.json"
    facts = machine_facts(str(model.device))
    with contextlib.suppress(ValueError):  # there is none, or it is damaged or of another version
        known = Machine.load(path)
        # Two models may have one name, as two folders called "model".
        if known.name == (facts.get("gpu") or facts["cpu"]) and not known.extrapolated(model.arch):
            return known
    err.print("calibrating once: prefill and disk (--machine FILE, from kvlab calibrate, spares it)", soft_wrap=True)
    text = resources.files("kvlab").joinpath("data", "text.txt").read_text(encoding="utf-8")
    tokens = model.tokenizer.encode(text)[:CALIBRATION_TOKENS]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".calibrate-", dir=folder, ignore_cleanup_errors=True) as scratch:
        tiers: dict[str, TierFactory] = {"disk": lambda: DiskTier(scratch, DISK_BYTES)}
        measured = calibrate(model, tokens, tiers, block_size=BLOCK_SIZE, budget_s=CALIBRATION_S, progress=say)
    write_json(path, measured.to_dict())
    return measured


def _introduce(conversations: Conversations, folder: Path) -> None:
    engine = conversations.engine
    model, pool = engine.model, engine.metrics()["pool_blocks"]
    size = format_bytes(pool * conversations.block_bytes)
    tier = engine.tiers[0]
    lines = [
        f"model  {model.arch.name}: {model.source}; {model.dtype} on {model.device}",
        f"pool   {pool} blocks of {BLOCK_SIZE} tokens, {size}; a conversation has up to"
        f" {conversations.most_tokens:,} tokens",
        f"disk   {folder}: {format_bytes(tier.used_bytes)} kept (kvlab cache ls)",
        "Type a message, or /help.",
    ]
    out.print("\n".join(lines), markup=False, soft_wrap=True)


# The terminal ---------------------------------------------------------------------------------------------------------


def _converse(conversations: Conversations) -> int:
    """Read and obey until the end; returns the exit code."""
    commands = _commands(conversations)
    for stream in (sys.stdin, sys.stdout):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a byte or character too strange is no reason to lose a conversation
    while True:
        try:
            line = _read(f"{conversations.name}> ")
            name, _, rest = line.strip().partition(" ")
            if name in ("/quit", "/exit"):
                return 0
            if name == "/help":
                out.print(HELP, markup=False, soft_wrap=True)
            elif name in commands:
                commands[name](visible(rest.strip()))
            elif name.startswith("/") and not line.startswith(" "):
                raise ValueError(f"{name} is not a command; /help lists them (a space before it makes it a message)")
            elif line.strip():
                conversations.say(line.strip())
        except ValueError as error:
            err.print(visible(f"kvlab: {error}"), markup=False, soft_wrap=True)
        except EOFError:
            out.print()
            return 0
        except KeyboardInterrupt:
            out.print()
            return INTERRUPTED


HELP = """\
/pause         keep the conversation's blocks in the pool until their room is needed
/offload       push its blocks out of the pool, to the disk tier
/resume        go on with a stopped answer, or bring a conversation back into the pool
/branch NAME   go to a branch, made from here if it is new; without a name: list them
/new NAME      begin an empty conversation
/why           the arithmetic behind the last decision: reload, recompute or split
/stats         what the engine has counted so far
/quit          leave (so does the end of input); blocks are kept on disk for next time
Ctrl-C         stop this answer; at the prompt, or twice: leave"""


def _commands(conversations: Conversations) -> dict[str, Callable[[str], None]]:
    return {
        "/pause": lambda _: conversations.pause(),
        "/offload": lambda _: conversations.offload(),
        "/resume": lambda _: conversations.resume(),
        "/branch": conversations.branch,
        "/new": conversations.new,
        "/why": lambda _: conversations.why(),
        "/stats": lambda _: conversations.stats(),
    }


def _read(prompt: str) -> str:
    """A line from the terminal, with editing where there is any; piped input is shown, as if it had been typed."""
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (makes `input` edit lines and remember them)
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    out.out(visible(prompt + line.rstrip("\r\n")), highlight=False)
    return line
