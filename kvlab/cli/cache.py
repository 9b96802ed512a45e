"""`kvlab cache`: what disk tiers keep in a folder, by model, and how to be rid of it."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvlab.cli.console import command, out, positive_s, visible
from kvlab.units import format_bytes

if TYPE_CHECKING:
    from kvlab.tiers.segment import Header
    from kvlab.tiers.segment_folder import Found

__all__ = ["TTL", "app", "kv_folder"]

TTL = "7d"  # how long `kvlab chat` uses what it has stored

app = typer.Typer(help="See and clear the KV blocks that disk tiers keep.", no_args_is_help=True)

DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help="The folder that a disk tier was given; default: that of `kvlab chat`."),
]


def kv_folder() -> Path:
    """Where `kvlab chat` keeps KV blocks: beside the models."""
    from kvlab.weights import cache_dir

    return cache_dir() / "kv"


@dataclass(frozen=True)
class Holding:
    """The segments of one fingerprint, at least one, the one stored first first."""

    fingerprint: str
    files: Sequence[Found]
    headers: Sequence[Header]

    @property
    def model(self) -> str | None:
        """The name that was stored with the newest of them, if any was."""
        return self.headers[-1].label or None

    @cached_property
    def blocks(self) -> int:
        """Different blocks; two processes may have stored the same one."""
        return len({block_hash for header in self.headers for block_hash in header.hashes})

    @cached_property
    def layout(self) -> tuple[str, int] | None:
        """Order and block size, as `Model.fingerprint` writes them; None when they are written otherwise."""
        with contextlib.suppress(KeyError, ValueError, SyntaxError, TypeError):
            order, _, _, _, block_size, _ = ast.literal_eval(str(self.headers[0].fingerprint["block_layout"]))
            return str(order), int(block_size)
        return None

    def to_dict(self, ttl_s: float, now_s: float) -> dict[str, Any]:
        """Plain values for --json; times are ISO 8601 in UTC."""
        from kvlab.tiers.lifetime import Lifetime

        facts, lifetime = self.headers[0].fingerprint, Lifetime(ttl_s, lambda: now_s)
        created = [header.created for header in self.headers]
        order, block_size = self.layout or (None, None)
        return {
            "model": self.model,
            "fingerprint": self.fingerprint,
            "kv_dtype": facts.get("kv_dtype"),
            "block_size": block_size,
            "layout": order,
            "codec": self.headers[0].codec,
            "adapter": bool(facts.get("adapter")),
            "salted": bool(facts.get("salt")),
            "files": len(self.files),
            "blocks": self.blocks,
            "tokens": None if block_size is None else self.blocks * block_size,
            "bytes": sum(file.nbytes for file in self.files),
            "oldest": _utc(created[0]),
            "newest": _utc(created[-1]),
            "expired_files": sum(lifetime.over(stored_s) for stored_s in created),
        }


def ls(
    directory: DirOption = None,
    ttl: Annotated[str, typer.Option(help="Say what is older than this: 12h, 7d.")] = TTL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the KV blocks that disk tiers keep in a folder, by model, and what else is there."""
    ttl_s, now_s = positive_s("--ttl", ttl), time.time()
    folder, found = _look(directory)
    holdings = _holdings(found)
    others = [file for file in found if file.kind != "segment"]
    if as_json:
        rest = [{"file": file.path.name, "kind": file.kind, "bytes": file.nbytes, "why": file.why} for file in others]
        kept = [holding.to_dict(ttl_s, now_s) for holding in holdings]
        listing = {"folder": str(folder), "ttl_s": ttl_s, "holdings": kept, "others": rest}
        print(json.dumps(listing, indent=1))  # noqa: T201
        return
    out.print(f"{folder}: {format_bytes(sum(file.nbytes for file in found))}", markup=False, soft_wrap=True)
    if holdings:
        _show(holdings, ttl_s, now_s)
    for file in others:
        out.print(_line(file), markup=False, soft_wrap=True)
    if not found:
        out.print("no KV blocks are kept here")


def clear(
    directory: DirOption = None,
    model: Annotated[list[str] | None, typer.Option(help="Only of this model; may be repeated.")] = None,
    fingerprint: Annotated[
        list[str] | None, typer.Option(help="Only under this fingerprint (or its beginning); may be repeated.")
    ] = None,
    older_than: Annotated[str | None, typer.Option(help="Only what was stored longer ago than this: 12h, 7d.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove KV blocks that disk tiers keep in a folder. Files that are not kvlab's always stay.

    A process that uses the folder finds what is removed missing, as if another had evicted it, and computes it again.
    Without a filter, damaged segments and what dead writers left go too.
    """
    age_s = None if older_than is None else positive_s("--older-than", older_than)
    folder, found = _look(directory)
    chosen = _choose(found, model or [], fingerprint or [], age_s)
    if not (model or fingerprint or older_than):
        chosen += [file for file in found if file.kind in ("damaged", "abandoned")]
    if chosen:
        what = _amount(chosen)
        if not (yes or _agreed(f"remove {what} from {folder}")):
            out.print("nothing was removed")
            return
        _remove(chosen)
        out.print(f"removed {what} from {folder}", markup=False, soft_wrap=True)
    else:
        out.print(f"nothing to remove in {folder}", markup=False, soft_wrap=True)
    for file in found:
        if file.kind != "segment" and file not in chosen:
            out.print(f"kept: {_line(file)}", markup=False, soft_wrap=True)


# Looking --------------------------------------------------------------------------------------------------------------


def _look(directory: Path | None) -> tuple[Path, list[Found]]:
    """The folder and what is in it; the default one need not be there yet."""
    from kvlab.tiers.segment_folder import segment_folder, survey

    folder = kv_folder() if directory is None else directory
    if segment_folder(folder).is_dir():
        return folder, survey(segment_folder(folder))
    if directory is not None:
        wrong = f"has no {segment_folder(folder).name} in it" if folder.is_dir() else "is not a folder"
        raise ValueError(f"--dir {folder} {wrong}; name the folder that a DiskTier was given")
    return folder, []


def _holdings(found: Sequence[Found]) -> list[Holding]:
    """Whole segments by fingerprint, the largest first."""
    groups: dict[str, list[tuple[Found, Header]]] = {}
    for file in found:
        if file.header is not None:
            groups.setdefault(_name(file.header), []).append((file, file.header))
    holdings = []
    for name, pairs in groups.items():
        pairs.sort(key=lambda pair: pair[1].created)
        holdings.append(Holding(name, [file for file, _ in pairs], [header for _, header in pairs]))
    return sorted(holdings, key=lambda holding: -sum(file.nbytes for file in holding.files))


def _name(header: Header) -> str:
    """Twelve hex digits of the fingerprint's digest."""
    from kvlab.fingerprint import Fingerprint

    try:
        return Fingerprint(**header.fingerprint).digest().hex()[:12]
    except TypeError:  # it has fields that this kvlab does not know
        return "unreadable"


def _choose(
    found: Sequence[Found], models: Sequence[str], fingerprints: Sequence[str], age_s: float | None
) -> list[Found]:
    """Segments of the wanted models or fingerprints that are old enough. Raises ValueError for one that is not here."""
    from kvlab.tiers.lifetime import Lifetime

    holdings = _holdings(found)
    wanted = {id(holding): holding for holding in holdings} if not (models or fingerprints) else {}
    for option, asked in [("--model", name) for name in models] + [("--fingerprint", name) for name in fingerprints]:
        match = [h for h in holdings if (h.model == asked if option == "--model" else h.fingerprint.startswith(asked))]
        if not match or not asked:
            known = ", ".join(f"{h.model or 'no name'} ({h.fingerprint})" for h in holdings) or "nothing"
            raise ValueError(f"{option} {asked!r} is not kept here; there is {visible(known)}")
        wanted.update((id(holding), holding) for holding in match)
    lifetime = Lifetime(age_s, time.time)
    return [
        file
        for holding in wanted.values()
        for file, header in zip(holding.files, holding.headers, strict=True)
        if age_s is None or lifetime.over(header.created)
    ]


# Removing -------------------------------------------------------------------------------------------------------------


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise ValueError(f"would {what}; nobody can be asked here: add --yes")
    return typer.confirm(f"{what}?")


def _remove(files: Sequence[Found]) -> None:
    """Unlink each; one that is gone already is as good. Raises OSError after the rest has been tried."""
    failed = []
    for file in files:
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            failed.append(f"{file.path.name} ({error.strerror or error})")
    if failed:
        raise OSError(f"{len(failed)} of {len(files)} files could not be removed: {', '.join(failed)}")


# Saying ---------------------------------------------------------------------------------------------------------------


def _amount(files: Sequence[Found]) -> str:
    """What is about to go: blocks and models, files, bytes."""
    holdings = _holdings(files)
    parts = [f"{holding.blocks} blocks of {visible(holding.model or holding.fingerprint)}" for holding in holdings]
    parts += [
        f"{count} {kind} file{'s' if count > 1 else ''}"
        for kind in ("damaged", "abandoned")
        if (count := sum(file.kind == kind for file in files))
    ]
    return f"{', '.join(parts)} ({format_bytes(sum(file.nbytes for file in files))})"


def _line(file: Found) -> str:
    why = {
        "damaged": f"damaged: {file.why}; the next disk tier that opens the folder removes it",
        "foreign": f"left alone: {file.why}",
        "being written": "being written by a process",
        "abandoned": "left by a writer that is gone",
    }
    return visible(f"{file.path.name} ({format_bytes(file.nbytes)}): {why[file.kind]}")


def _show(holdings: Sequence[Holding], ttl_s: float, now_s: float) -> None:
    from kvlab.cli.report import narrow_table

    table = narrow_table("", [])
    for name in ("model", "fingerprint", "KV", "tokens", "blocks", "size", "stored"):
        right = name in ("tokens", "blocks", "size")
        table.add_column(name, justify="right" if right else "left", no_wrap=name not in ("KV", "stored"))
    for holding in holdings:
        held = holding.to_dict(ttl_s, now_s)
        marks = [mark for mark in ("adapter", "salted") if held[mark]] + [held["codec"]] * bool(held["codec"])
        kind = f"{held['kv_dtype']}, {held['layout'] or 'other layout'}, {held['block_size'] or '?'} a block"
        ages = [_age(now_s - header.created) for header in holding.headers]
        stored = " to ".join(dict.fromkeys((ages[0], ages[-1])))
        if held["expired_files"]:
            stored += f"; expired: {held['expired_files']} of {held['files']} files"
        table.add_row(
            visible(held["model"] or "no name"),
            held["fingerprint"],
            visible(", ".join([kind, *marks])),
            "?" if held["tokens"] is None else f"{held['tokens']:,}",
            f"{held['blocks']:,}",
            format_bytes(held["bytes"]),
            stored,
        )
    out.print(table)


def _utc(stored_s: float) -> str | None:
    """ISO 8601; None for a time that no calendar has."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(stored_s, UTC).isoformat(timespec="seconds")
    return None


def _age(seconds: float) -> str:
    """A time span as people say it: 5 min ago, 3 h ago."""
    if not seconds >= 0:
        return "ahead of the clock"
    size, unit = next(((size, u) for u, size in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= size), (1, "s"))
    return f"{seconds / size:.0f} {unit} ago"


app.command("ls")(command(ls))
app.command("clear")(command(clear))
