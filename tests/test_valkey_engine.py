"""Engines that share a server: what one computed the other loads, with the tokens of a run without cache."""

import json
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from real_server import RealServer
from test_engine_random import HANG_S, EngineSchedules, drive, short_naps  # noqa: F401
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.tiers import ValkeyTier, server_index
from kvlab.tiers import server as server_module

ROOT = Path(__file__).resolve().parent.parent
PATIENT = {"timeout_s": 60.0, "lookup_timeout_s": 60.0}  # a busy machine is no hanging server


@pytest.fixture
def server(tmp_path):
    server = RealServer(tmp_path)
    yield server
    server.stop()


# Sharing --------------------------------------------------------------------------------------------------------------


def test_two_engines_share_what_either_has_computed(server):
    engines = [Engine(tiny_model(), 32, 4, [ValkeyTier(server.url, **PATIENT)], poison=True) for _ in range(2)]
    first, second = engines
    document = text(40, seed=4)
    done = first.submit(document, 3)
    first.run()
    first.offload(done)
    first.executor.drain()
    asked = second.submit([*document, 7, 8], 5)
    second.run()
    check_tokens(second.model, asked, range(asked.prompt, len(asked.tokens)))
    assert second.metrics()["hit_tokens"]["valkey"] == 40
    # And back: what the second has added the first need not compute; what is there is not written twice.
    second.offload(asked)
    second.executor.drain()
    assert second.tiers[0].counters.stored_blocks == 1
    more = first.submit([*asked.tokens, 9], 2)
    first.run()
    check_tokens(first.model, more, range(more.prompt, len(more.tokens)))
    assert first.metrics()["hit_tokens"]["valkey"] == 44
    # Another tenant's salt finds nothing.
    other = second.submit([*document, 7], 2, salt="tenant")
    second.evict(100)
    second.run()
    check_tokens(second.model, other, range(other.prompt, len(other.tokens)))
    assert second.metrics()["hit_tokens"]["valkey"] == 40
    for engine in engines:
        engine.close()


PROCESS = """
    import json, sys
    sys.path.insert(0, "tests")
    from tiny_engine import text, tiny_model
    from kvlab import Engine, ValkeyTier
    import torch
    torch.set_num_threads(1)
    tiers = [ValkeyTier(sys.argv[1], timeout_s=60.0, lookup_timeout_s=60.0)] if sys.argv[1] else []
    with Engine(tiny_model(), 256, 4, tiers, groups=2) as engine:
        for line in sys.stdin:
            asked = json.loads(line)
            requests = [engine.submit(text(60, seed) + [seed], 6) for seed in asked]
            engine.run()
            for request in requests:
                engine.cancel(request)
            engine.evict(1000)
            engine.executor.drain()
            hits = dict(engine.metrics()["hit_tokens"])
            print(json.dumps([[list(r.output_tokens) for r in requests], hits.get("valkey", 0)]), flush=True)
"""


class Process:
    """An engine in a process of its own, asked over a pipe for the tokens that follow some texts."""

    def __init__(self, url):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS), url],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def ask(self, *seeds):
        print(json.dumps(seeds), file=self.process.stdin, flush=True)

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.communicate(timeout=60)


def test_two_processes_share_prefixes_and_answer_like_one_without_cache(server):
    processes = [Process(server.url), Process(server.url), Process("")]
    try:
        a, b, alone = processes
        a.ask(1, 2, 3)
        alone.ask(1, 2, 3, 4)
        expected, _ = alone.answer()
        assert a.answer() == [expected[:3], 0]
        b.ask(1, 2, 3)
        assert b.answer() == [expected[:3], 3 * 60]
        # Both at once, on what neither has: either may store it first, and nobody fails.
        for process in (a, b):
            process.ask(4)
        assert [process.answer()[0] for process in (a, b)] == [expected[3:]] * 2
        server.kill()
        for process in (a, b):
            process.ask(1, 4)
        assert [process.answer()[0] for process in (a, b)] == [[expected[0], expected[3]]] * 2
    finally:
        for process in processes:
            process.close()


# Any schedule, whatever the server does -------------------------------------------------------------------------------


class ServerSchedules(EngineSchedules):
    """Schedules over a tier on a real server, which is flushed, killed, restarted and frozen meanwhile."""

    server = None
    counts: dict[str, int] = {}  # noqa: RUF012

    def more_tiers(self):
        # Named like the disk, to which the policies' machines have a link.
        self.shared = ValkeyTier(self.server.url, name="disk", timeout_s=0.05, lookup_timeout_s=0.05)
        return [self.shared]

    def fault(self, tier, kind, place):
        if self.tiers[tier % len(self.tiers)] is not self.shared:
            super().fault(tier, kind, place)
        elif kind == "refuse":
            self.refuse_next(self.shared)
        else:
            self.harm(kind, place)

    def harm(self, kind, place):
        drawn = random.Random(place)
        if drawn.random() < 0.15:
            kind = drawn.choice(["flush", "restart", "kill", "freeze"])
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.come_back()
        if kind in ("restart", "kill"):
            self.server.kill()
        if kind == "restart":
            self.server.start()
        elif kind == "freeze":
            self.server.freeze()
        elif kind != "kill":
            self.spoil(kind, place)

    def spoil(self, kind, place):
        with self.server.client() as client:
            keys = self.server.blocks()
            if kind == "flush" or not keys:
                client.flushall()
                return
            key = keys[int(place * len(keys))]
            raw = bytearray(client.get(key))
            if kind == "rot":
                raw[int(place * len(raw))] ^= 16
            if kind == "lose":
                client.delete(key)
            else:
                client.set(key, bytes(raw[: int(place * len(raw))] if kind == "cut" else raw))

    def come_back(self):
        super().come_back()
        if self.server.process.poll() is None:
            self.server.thaw()
        else:
            self.server.start()

    def teardown(self):
        self.come_back()
        time.sleep(0.02)  # no pause is longer
        super().teardown()
        self.counts["found"] = self.counts.get("found", 0) + self.shared.counters.loaded_blocks
        self.counts["lost"] = self.counts.get("lost", 0) + self.shared.counters.failed_blocks
        self.shared.close()


def test_any_schedule_over_a_server_that_fails_gives_the_tokens_of_a_run_without_cache(server, monkeypatch):
    monkeypatch.setattr(server_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(server_module, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(ServerSchedules, "server", server)
    monkeypatch.setattr(ServerSchedules, "counts", counts := {})
    for seed in range(40):
        # What was looked up is looked up again, not again so soon, or never again.
        monkeypatch.setattr(server_index, "_FRESH_S", [0.0, 0.05, 1e9][seed % 3])
        tiers = "host" if seed % 4 == 0 else ""
        try:
            drive(seed, ServerSchedules, tiers=tiers, policy="reload" if seed % 2 else "calibrated")
        except BaseException as error:
            error.add_note(f"schedule of seed {seed}")
            raise
    for kind in ("rot", "cut", "lose", "flush", "restart", "kill", "freeze"):
        assert counts[kind] >= 3, f"{kind} hardly ever happened: {counts}"
    assert counts["found"] > 100
    assert counts["lost"] > 5
