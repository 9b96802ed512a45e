"""Moves between the pool and a real server on loopback, beside plain pipelined GETs and SETs of the same bytes."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvlab.arch import ModelArch
from kvlab.experiments.bench.rows import Progress, Row, interleave, ratio_interval
from kvlab.experiments.calibrate import scattered
from kvlab.fingerprint import Fingerprint
from kvlab.pool import BlockPool, KVLayout
from kvlab.records import median
from kvlab.streams import streams_for
from kvlab.tiers import ValkeyTier
from kvlab.tiers.server import Server, command
from kvlab.transfer import Transfer

__all__ = ["bench_valkey", "own_server"]

_STARTS_S = 20.0


def bench_valkey(device: str, dtype: str, progress: Progress) -> Iterator[Row]:
    """Reload and offload of scattered 16-token SmolLM2 blocks, with checksums, in one and in four layer groups.

    Beside them the same bytes in as many values, by the client's own pipeline; the floor of a reload is a pipelined
    GET into one piece of memory, which that client cannot do.
    """
    arch = ModelArch.preset("smollm2-135m")
    assert arch.decoder is not None, "the preset has a decoder"
    layout = KVLayout(arch.decoder.layers, arch.decoder.kv_heads, arch.decoder.head_dim, 16, dtype)
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        progress("no valkey-server or redis-server here: the valkey tier is not measured")
        yield Row("valkey: no server is installed", float("nan"), "GB/s", goal="≥ 0.8 × pipelined GET")
        return
    with own_server(binary) as url:
        for target_bytes, groups in ((2**23, 1), (2**26, 1), (2**26, 4)):
            blocks = target_bytes // layout.block_bytes
            progress(f"valkey, {target_bytes >> 20} MiB, {groups} layer groups")
            yield from _rows(layout, blocks, groups, device, url)


@contextmanager
def own_server(binary: str) -> Iterator[str]:
    """The URL of a server that is started for us on loopback and keeps nothing; ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvlab-bench-") as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
        try:
            begin = time.monotonic()
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                if time.monotonic() - begin > _STARTS_S or process.poll() is not None:
                    raise OSError(f"{binary} did not start on port {port}")
                time.sleep(0.02)
            yield f"valkey://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _rows(layout: KVLayout, blocks: int, groups: int, device: str, url: str) -> Iterator[Row]:
    import valkey

    size_bytes = blocks * layout.block_bytes
    pool = BlockPool(layout, 2 * blocks, device=device)
    pool.rows.normal_()
    order = scattered(list(range(2 * blocks)))
    hashes = [i.to_bytes(32, "big") for i in range(blocks)]
    value = np.random.default_rng(0).bytes(layout.block_bytes)
    names = [b"plain:%d" % i for i in range(blocks)]
    memory = np.ones(size_bytes, np.uint8).data
    client = valkey.Valkey.from_url(url)
    server = Server(url, timeout_s=30.0, question_s=5.0)
    with streams_for(pool.device) as streams:
        transfer = Transfer(pool, streams, groups)
        tier = ValkeyTier(url, lookup_timeout_s=5.0)
        transfer.open(tier, Fingerprint("bench", "bench", "bench", "bench", layout.dtype, str(layout)))

        def offload() -> float:
            tier.clear()
            begin = time.perf_counter()
            transfer.offload(tier, order[:blocks], hashes, source_held=True).wait()
            return time.perf_counter() - begin

        def pipelined_set() -> float:
            client.delete(*names)
            begin = time.perf_counter()
            pipe = client.pipeline(transaction=False)
            for name in names:
                pipe.set(name, value)
            pipe.execute()
            return time.perf_counter() - begin

        def reload() -> None:
            report = transfer.reload(tier, hashes, order[blocks:]).wait()
            assert report.valid_blocks == blocks, f"the server lost blocks: {report.failures}"

        def pipelined_get() -> None:
            pipe = client.pipeline(transaction=False)
            for name in names:
                pipe.get(name)
            pipe.execute()

        def get_into_memory() -> None:
            with server.payloads() as wire:
                wire.send([b"".join(command(b"GET", name) for name in names)])
                for place in range(0, size_bytes, layout.block_bytes):
                    wire.reply([memory[place : place + layout.block_bytes]])

        label = f"{size_bytes / 2**20:.1f} MiB, {groups} layer group{'s' if groups > 1 else ''}"
        stored = interleave({"ours": offload, "pipelined SET": pipelined_set}, 9)
        yield _against(f"valkey offload, {label}", stored, size_bytes)
        arms: dict[str, Callable[[], object]] = {"ours": reload, "pipelined GET": pipelined_get}
        yield _against(f"valkey reload, {label}", interleave(arms | {"floor": get_into_memory}, 11), size_bytes)
        tier.clear()
        client.delete(*names)
        tier.close()
    client.close()
    server.close()


def _against(name: str, seconds: dict[str, list[float]], amount_bytes: int) -> Row:
    """A row in GB/s beside its peer, and its floor if it has one."""
    took_s = {arm: median(samples) for arm, samples in seconds.items()}
    (peer,) = took_s.keys() - {"ours", "floor"}
    floor_s = took_s.get("floor")
    return Row(
        name,
        ours=amount_bytes / took_s["ours"] / 1e9,
        unit="GB/s",
        floor=None if floor_s is None else amount_bytes / floor_s / 1e9,
        of_floor=None if floor_s is None else floor_s / took_s["ours"],
        peers={peer: amount_bytes / took_s[peer] / 1e9},
        of_peer={peer: took_s[peer] / took_s["ours"]},
        interval=ratio_interval(seconds["floor" if "floor" in seconds else peer], seconds["ours"]),
        goal=f"≥ 0.8 × {peer}",
        met=took_s[peer] >= 0.8 * took_s["ours"],
    )
