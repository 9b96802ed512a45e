"""Which bytes each block is known to have: 64-bit checksums by block name, in memory or in an append-only file.

A checksum tells damaged bytes from good ones; whose bytes they are, the name says (a chained hash of the tokens).
"""

from __future__ import annotations

import errno
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

__all__ = ["Checksums"]

logger = logging.getLogger(__name__)

NAME_BYTES = 32
RECORD_BYTES = NAME_BYTES + 8
# Blocks that are remembered, the latest ones: about 200 MB of Python objects.
MOST_BLOCKS = 2**20


class Checksums:
    """Every checksum that a block was ever seen to have when it was computed: other batches round differently.

    With a `file` (made with its folder, readable by its owner alone) they outlive the process and are shared with
    others who use the same file. A torn last record (a crash) is cut off when the file is opened.

    A file that cannot be made raises OSError. One that cannot be written or read later (a full disk, a folder that was
    removed) is warned about once: what is recorded then is known to this process only, and tried again with the next.
    `warn` gets a format string and its values.
    """

    def __init__(self, file: Path | None = None, *, warn: Callable[..., None] = logger.warning) -> None:
        self._file = file
        self._warn = warn
        self._warned = False
        self._read_bytes = 0
        self._known: OrderedDict[bytes, set[int]] = OrderedDict()
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.exists() and (torn := file.stat().st_size % RECORD_BYTES):
                os.truncate(file, file.stat().st_size - torn)  # or everything appended after it would be shifted
            self._read_on()

    @property
    def persistent(self) -> bool:
        """Whether a block that is not known was never stored by this model (True), or perhaps before a restart."""
        return self._file is not None

    def record(self, blocks: Iterable[tuple[bytes, int]]) -> None:
        """These blocks (name of 32 bytes, checksum) hold what was computed for them."""
        new = [(name, value) for name, value in blocks if value not in self._known.get(name, ())]
        for name, value in new:
            self._remember(name, value)
        if self._file is not None and new:
            try:
                _append(self._file, b"".join(name + value.to_bytes(8, "little") for name, value in new))
            except OSError as error:
                self._warn_once(error)

    def look(self, name: bytes, value: int) -> Literal["right", "wrong", "unknown"]:
        """Whether `value` is what this block has."""
        if value not in self._known.get(name, ()):
            try:
                self._read_on()  # another process may have stored it
            except OSError as error:
                self._warn_once(error)
        if name not in self._known:
            return "unknown"
        return "right" if value in self._known[name] else "wrong"

    def _remember(self, name: bytes, value: int) -> None:
        self._known.setdefault(name, set()).add(value)
        self._known.move_to_end(name)
        while len(self._known) > MOST_BLOCKS:
            self._known.popitem(last=False)

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                "kvlab: checksums cannot be kept in %s (%s): new ones are kept in memory, and after a restart blocks"
                " without one are computed again",
                self._file,
                error,
            )

    def _read_on(self) -> None:
        if self._file is None or not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        whole = len(data) - len(data) % RECORD_BYTES
        self._read_bytes += whole
        for at in range(0, whole, RECORD_BYTES):
            name = data[at : at + NAME_BYTES]
            self._remember(name, int.from_bytes(data[at + NAME_BYTES : at + RECORD_BYTES], "little"))


def _append(file: Path, data: bytes) -> None:
    """Append all of `data` or nothing. Raises OSError."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        written = os.write(handle, data)  # one write: several servers may append to one file
        if written < len(data):
            os.ftruncate(handle, os.lseek(handle, 0, os.SEEK_CUR) - written)  # or later records would be shifted
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes written")
    finally:
        os.close(handle)
