"""A child process that runs somebody else's code: little environment, limits, and nothing of it left afterwards.

What is limited, and how:

* environment: an allow-list, with home, temporary and Jupyter folders in a scratch folder. No tokens, no proxies.
* memory: a data limit (RLIMIT_DATA) makes a huge allocation fail at once. Not the address space (RLIMIT_AS): torch and
  BLAS reserve far more of that than they use. A watcher also adds up what all processes of the tree hold.
* CPU seconds and file size: resource limits. Wall time, number of processes, and space taken in the scratch folder: the
  watcher. (RLIMIT_NPROC counts all processes of the user, and root is exempt.)
* processes that fork away: on Linux the child adopts its orphans (`confine`), so the watcher still sees them.

This stops accidents and clumsy attacks. It is no jail: code in it may read what the user may read and open
connections.
Where a limit does not exist (Windows has no resource limits, macOS ignores some), the watcher alone is left;
`missing_limits` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Limits", "confine", "end_descendants", "environment", "missing_limits", "run"]

_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH")
_KEPT_ON_WINDOWS = ("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT")
_LOOK_S = 0.2
# A scratch folder is measured only this often: it may hold many files.
_WEIGH_S = 1.0


@dataclass(frozen=True)
class Limits:
    """What one child and everything it starts may use. Seconds are wall time of the whole run."""

    wall_s: float
    memory_bytes: int
    file_bytes: int = 256 * 2**20
    scratch_bytes: int = 2**30
    processes: int = 64


def environment(scratch: Path, **extra: str) -> dict[str, str]:
    """The child's environment: what Python needs to start, everything personal inside `scratch` (which is made)."""
    home = scratch / "home"
    temporary = scratch / "tmp"
    for folder in (home, temporary):
        folder.mkdir(parents=True, exist_ok=True)
    places = dict.fromkeys(("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA"), str(home))
    places |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        places[name] = str(home / name.lower())
    kept = {name: os.environ[name] for name in (*_KEPT, *_KEPT_ON_WINDOWS) if name in os.environ}
    # One thread each: several submissions run at once. No GPU: exercises are plain numbers.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **places, **threads, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8", **extra}


def missing_limits() -> str:
    """One sentence on what cannot be limited on this system; empty on Linux."""
    if sys.platform == "linux":
        return ""
    return (
        f"On {sys.platform} memory, CPU time and file size are only watched, not limited, and a process that "
        "detaches itself may outlive its notebook: grade strangers' notebooks on Linux."
    )


def confine(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Limit this process and all that it will start, and adopt its orphans (Linux), so that none gets out of sight.

    The child calls this before it starts anything. Does nothing where the system has no such limits.
    """
    if os.name != "posix":
        return
    import resource

    wanted = {
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_CPU: cpu_s,  # a process that outlives all watching still runs out of these
        resource.RLIMIT_CORE: 0,
    }
    for which, value in wanted.items():
        _, hard = resource.getrlimit(which)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(which, (most, most))
    if sys.platform == "linux":
        pr_set_child_subreaper = 36  # <linux/prctl.h>
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def run(
    command: Sequence[str], scratch: Path, env: Mapping[str, str], limits: Limits, stopped: Callable[[], bool]
) -> str:
    """Run `command` to its end and return "", or which limit ended it ("memory: …"); nothing it started is left.

    The child itself is trusted, what it starts is not: where memory, processes or space run out, the child's own
    children are killed and the child gets time to report. Standard streams lead nowhere. `stopped` may end it early.
    """
    nowhere = subprocess.DEVNULL
    child = subprocess.Popen(
        command, cwd=scratch, env=dict(env), stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    seen: set[psutil.Process] = set()
    try:
        return _watch(child, seen, scratch, limits, stopped)
    finally:
        _end(child, seen, env.get("HOME", ""))


def _watch(
    child: subprocess.Popen[bytes],
    seen: set[psutil.Process],
    scratch: Path,
    limits: Limits,
    stopped: Callable[[], bool],
) -> str:
    ends = time.monotonic() + limits.wall_s
    weigh_at = time.monotonic() + _WEIGH_S
    reason = ""
    while True:
        try:
            child.wait(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        else:
            return reason
        if stopped():
            return "stopped"
        below = _below(child)
        seen |= set(below)
        over = _over(below, limits)
        if not over and now >= weigh_at:
            weigh_at = now + _WEIGH_S
            if folder_bytes(scratch) > limits.scratch_bytes:
                over = f"space: wrote more than {limits.scratch_bytes / 2**20:,.0f} MiB of files"
        if over:
            reason = reason or over
            _kill(below)
            ends = min(ends, now + 30)
        elif now >= ends:
            return reason or f"time: took more than {limits.wall_s:.0f} s in all"


def _below(child: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(child.pid).children(recursive=True)
    except psutil.Error:
        return []


def _over(below: list[psutil.Process], limits: Limits) -> str:
    if len(below) > limits.processes:
        return f"processes: started more than {limits.processes}"
    # The quick number counts what forked processes share once for each; only where that is too much, the exact one.
    if sum(map(_resident, below)) > limits.memory_bytes and sum(map(_own, below)) > limits.memory_bytes:
        return f"memory: held more than {limits.memory_bytes / 2**30:.1f} GiB"
    return ""


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _own(process: psutil.Process) -> int:
    """Bytes, each shared page split among those who share it; without shared pages where the system does not say."""
    try:
        held = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(held, "pss", held.uss))


def folder_bytes(folder: Path) -> int:
    """What the files below a folder take, links not followed; what vanishes meanwhile counts nothing."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118  (os.walk speaks texts)
    return total


def _kill(processes: Sequence[psutil.Process]) -> None:
    # All stop before the first dies, so that none can start another in answer.
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.suspend()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _end(child: subprocess.Popen[bytes], seen: set[psutil.Process], home: str) -> None:
    """Kill the child and all that it was ever seen to have started."""
    own = _below(child)
    with contextlib.suppress(OSError):
        child.kill()
    child.wait()
    if child.returncode < 0 and os.name == "posix":
        # It did not end by itself, so it may not have cleaned up: what lives in its home is its own.
        own += [process for process in psutil.process_iter() if _home(process) == home]
    _kill_all(lambda: seen | set(own))


def end_descendants() -> None:
    """Kill all that this process started, directly or not; in the child, before it ends."""
    _kill_all(lambda: set(psutil.Process().children(recursive=True)))


def _kill_all(find: Callable[[], set[psutil.Process]]) -> None:
    for _ in range(50):
        # psutil compares start times too: a process that was given an old number is not taken for the one that had it.
        alive = [process for process in find() if process.is_running() and not _is_dead(process)]
        if not alive:
            return
        _kill(alive)
        time.sleep(0.02)


def _home(process: psutil.Process) -> str:
    try:
        return process.environ().get("HOME", "")
    except (psutil.Error, OSError):
        return ""


def _is_dead(process: psutil.Process) -> bool:
    try:
        return bool(process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.Error:
        return True
