"""Two processes that add up a tensor over and over, as the ranks of a tensor-parallel engine do, beside reloads.

They talk by gloo over the loopback and share no link with a reload from host RAM: what they share is the machine. Knows
the rig and clocks. Returns a plain record; does not print or draw.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from kvlab.experiments.bench.overlap import layer_groups
from kvlab.experiments.rig import Rig
from kvlab.fingerprint import block_hashes
from kvlab.model import Model
from kvlab.records import machine_facts, median, now_utc
from kvlab.tiers import HostTier, LinkTier, Tier

__all__ = ["SCHEMA", "Ranks", "measure", "missing"]

SCHEMA = "kvlab.all_reduce/1"
_BLOCK = 16
_FLOAT_BYTES = 4


def missing() -> str:
    """Why two gloo processes cannot run here, "" when they can."""
    return "" if dist.is_available() and dist.is_gloo_available() else "this build of torch has no gloo"


class Ranks:
    """Two child processes that all-reduce `payload_bytes` of fp32 when told to. Use as a context manager.

    They have met when the constructor returns. Raises ValueError where there is no gloo, RuntimeError when one of them
    ends, or does not answer within `timeout_s`; the other one is ended then, too.
    """

    def __init__(self, payload_bytes: int = 2**20, timeout_s: float = 120.0) -> None:
        if missing():
            raise ValueError(f"an all-reduce needs gloo, and {missing()}: use torch from PyPI or pytorch.org")
        context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and locks
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="kvlab-ranks-")
        self._pipe, theirs = context.Pipe()
        # A file, so that no port has to be chosen before it is used.
        meeting = (Path(self._folder.name).resolve() / "meeting").as_uri()
        self._processes = [
            context.Process(
                target=_rank, args=(rank, None if rank else theirs, meeting, payload_bytes, timeout_s), daemon=True
            )
            for rank in range(2)
        ]
        try:
            for process in self._processes:
                process.start()
            theirs.close()  # so that a dead child is an end of file here
            self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End both processes, whatever they are doing."""
        self._pipe.close()
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def begin(self) -> None:
        """All-reduce from now on, one after the other, until `end`."""
        self._send("begin")

    def end(self) -> list[float]:
        """Seconds of each all-reduce since `begin`; at least one."""
        self._send("end")
        return [float(seconds) for seconds in self._receive()]

    def _send(self, message: str) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._failed("one has ended") from error

    def _receive(self) -> Any:
        ready = wait([self._pipe, *(process.sentinel for process in self._processes)], self._timeout_s)
        try:
            answer = self._pipe.recv() if self._pipe in ready else None
        except (EOFError, OSError):
            answer = None
        if answer is None or isinstance(answer, Exception):
            raise self._failed(answer or ("one has ended" if ready else f"no answer within {self._timeout_s:g} s"))
        return answer

    def _failed(self, why: object) -> RuntimeError:
        self.close()
        codes = [process.exitcode for process in self._processes]
        return RuntimeError(f"the two ranks have failed: {why} (exit codes {codes})")


def _rank(rank: int, pipe: Connection | None, meeting: str, payload_bytes: int, timeout_s: float) -> None:
    """A child's life. Rank 0 has the pipe and a payload of ones; the other one, with zeros, just keeps up with it."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and sys.platform != "win32":
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]  # else by this machine's name, which need not resolve
    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
        payload = torch.zeros(max(1, payload_bytes // _FLOAT_BYTES))
        if pipe is None:
            while True:  # until it is ended from outside
                _all_reduce(payload, 0.0)
        pipe.send("met")
        while pipe.recv() == "begin":
            seconds = [_all_reduce(payload, 1.0)]
            while not pipe.poll():
                seconds.append(_all_reduce(payload, 1.0))
            assert pipe.recv() == "end"
            pipe.send(seconds)
    except (EOFError, OSError, RuntimeError) as error:  # the other one is gone, or the parent; neither is news there
        if pipe is not None and isinstance(error, RuntimeError):
            pipe.send(RuntimeError(str(error).splitlines()[0]))


def _all_reduce(payload: torch.Tensor, value: float) -> float:
    payload.fill_(value)
    begin = time.perf_counter()
    dist.all_reduce(payload)
    seconds = time.perf_counter() - begin
    assert float(payload[0]) == 1.0, "the sum of both ranks' payloads"
    return seconds


def measure(
    model: Model,
    tokens: Sequence[int],
    *,
    prefix: int = 384,
    payload_bytes: int = 2**20,
    throttle: float = 10.0,
    seconds: float = 0.5,
    rounds: int = 3,
) -> dict[str, Any]:
    """All-reduces alone, reloads from host RAM alone, both, and both with the reload paced to 1/`throttle` of its rate.

    Rounds of these four in turns, `seconds` each; in each everything runs over and over. By name, samples of
    "all_reduce_s" and "reload_s" (empty where there is none). Raises ValueError as `Ranks` does, and for a `prefix`
    that is not whole blocks of the text.
    """
    if prefix % _BLOCK or not 0 < prefix <= len(tokens):
        raise ValueError(f"prefix is {prefix}; expected whole blocks of {_BLOCK}, at most {len(tokens)} tokens")
    groups = layer_groups(model)
    with Ranks(payload_bytes) as ranks, Rig(model, block_size=_BLOCK, max_tokens=prefix, groups=groups) as rig:
        home, away = rig.table(prefix), rig.table(prefix)
        rig.prefill(tokens[:prefix], home)
        hashes = block_hashes(rig.fingerprint, tokens[:prefix], _BLOCK)
        size_bytes = len(hashes) * rig.layout.block_bytes

        def stored(tier: Tier) -> Callable[[], float]:
            """A function that reloads the prefix from this tier and returns the seconds that it took."""
            rig.offload(rig.open(tier), tokens[:prefix], home)

            def reload() -> float:
                begin = time.perf_counter()
                report = rig.transfer.reload(tier, hashes, away.blocks).wait()
                assert report.valid_blocks == len(hashes), f"the tier lost blocks: {report.failures}"
                return time.perf_counter() - begin

            return reload

        fast = stored(HostTier(2**32))
        gb_per_s = size_bytes / min(fast() for _ in range(3)) / 1e9
        paced = stored(LinkTier(HostTier(2**32), gb_per_s / throttle))
        ways: dict[str, tuple[bool, Callable[[], float] | None]] = {
            "all-reduces alone": (True, None),
            "reloads alone": (False, fast),
            "both": (True, fast),
            "both, reloads throttled": (True, paced),
        }
        found: dict[str, dict[str, list[float]]] = {name: {"all_reduce_s": [], "reload_s": []} for name in ways}
        for _ in range(rounds):
            for name, (reducing, reload) in ways.items():
                reduced, reloaded = _together(ranks if reducing else None, reload, seconds)
                found[name]["all_reduce_s"] += reduced
                found[name]["reload_s"] += reloaded
    return {
        "schema": SCHEMA,
        "provenance": {"kind": "live", "when": now_utc(), "facts": machine_facts(str(model.device))},
        "parameters": {"payload_bytes": payload_bytes, "reload_bytes": size_bytes, "throttle": throttle},
        "ways": found,
        "median_s": {
            name: {kind: median(samples) if samples else None for kind, samples in both.items()}
            for name, both in found.items()
        },
    }


def _together(
    ranks: Ranks | None, reload: Callable[[], float] | None, seconds: float
) -> tuple[list[float], list[float]]:
    """Samples of both, over and over for `seconds`; each at least once where there is one."""
    if ranks is not None:
        ranks.begin()
    reloaded, ends_s = list[float](), time.perf_counter() + seconds
    if reload is None:
        time.sleep(seconds)
    else:
        while not reloaded or time.perf_counter() < ends_s:
            reloaded.append(reload())
    return ([] if ranks is None else ranks.end()), reloaded
