"""Whole reads and writes of a file from many pieces of memory at once: short ones go on, and Windows has its own way.

Not for two threads on one descriptor: the position in the file is shared.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence

import numpy as np

__all__ = ["ends_in_memory", "read_into", "write_from"]

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
