"""Whole reads and writes of a file from many pieces of memory at once, its lock, and what the page cache has of it.

Short ones go on, and Windows has its own way. Not for two threads on one descriptor, which has one position.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

if sys.platform != "win32":
    import fcntl

__all__ = ["bytes_read_from_device", "ends_in_memory", "lock", "read_into", "sync_folder", "write_from"]

_MOST_BUFFERS = 1024  # IOV_MAX: what one call takes, on Linux and macOS alike


def read_into(fd: int, offset: int, targets: Sequence[memoryview], least: int) -> int:
    """Fill `targets` one after another from `offset`, with `least` bytes or more; fewer only where the file ends.

    Returns how many.
    """
    os.lseek(fd, offset, os.SEEK_SET)
    left, got = list(targets), 0
    while got < least and (step := _readv(fd, left[:_MOST_BUFFERS])):
        got += step
        left = _behind(left, step)
    return got


def write_from(fd: int, offset: int, sources: Sequence[memoryview]) -> None:
    """Write `sources` one after another at `offset`. Raises OSError, such as that of a full disk."""
    os.lseek(fd, offset, os.SEEK_SET)
    left = list(sources)
    while left:
        left = _behind(left, _writev(fd, left[:_MOST_BUFFERS]))


def ends_in_memory(fd: int, nbytes: int) -> bool:
    """Whether the last page of a file of `nbytes` is in the page cache; False where the system does not say.

    By mincore: a read that may not wait (RWF_NOWAIT) makes the kernel fetch the page, and at times finds it there.
    """
    if sys.platform == "win32":
        return False
    offset = (nbytes - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    state = ctypes.c_ubyte()
    with (
        contextlib.suppress(OSError, ValueError),  # the file is shorter: whoever reads it will say so
        mmap.mmap(fd, nbytes - offset, prot=mmap.PROT_READ, offset=offset) as page,
    ):
        address = ctypes.c_void_p(np.frombuffer(page, np.uint8).ctypes.data)
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(page)), ctypes.byref(state))
        return not failed and bool(state.value & 1)
    return False


def lock(fd: int) -> bool:
    """Try to be the one who holds this file; its lock ends with its process, however that ends."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        raise
    return True


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a crash, where a folder can be synced at all."""
    if sys.platform != "win32":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def bytes_read_from_device() -> int | None:
    """Bytes that this process has made storage devices read so far (Linux); None where that is not counted.

    A cold read is proven when this grew by as many bytes as were read.
    """
    try:
        counts = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    return int(counts.split("read_bytes:")[1].split()[0])


def _behind(buffers: list[memoryview], nbytes: int) -> list[memoryview]:
    """What of `buffers` lies behind their first `nbytes`."""
    for i, buffer in enumerate(buffers):
        if nbytes < len(buffer):
            return [buffer[nbytes:], *buffers[i + 1 :]]
        nbytes -= len(buffer)
    return []


def _readv(fd: int, targets: list[memoryview]) -> int:
    if hasattr(os, "readv"):
        return os.readv(fd, targets)
    data = os.read(fd, len(targets[0]))
    targets[0][: len(data)] = data
    return len(data)


def _writev(fd: int, sources: list[memoryview]) -> int:
    return os.writev(fd, sources) if hasattr(os, "writev") else os.write(fd, sources[0])
