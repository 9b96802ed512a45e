"""A server that is killed, hangs, is full, evicts, or lets nobody in: nobody waits for long, and nothing is wrong."""

import json
import re
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_server import RealServer, free_port
from test_tiers import FINGERPRINT, HASHES, Lab
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.pool import KVLayout
from kvlab.tiers import HostTier, TierError, ValkeyTier, server_index, value
from kvlab.tiers import server as server_module
from kvlab.tiers import valkey as valkey_module
from kvlab.torch_executor import _copy_down

DOCS = Path(__file__).resolve().parent.parent / "docs"
LARGE = KVLayout(layers=4, kv_heads=8, head_dim=64, block_size=16, dtype="fp32")  # 256 KiB blocks
LIMITS = {"timeout_s": 0.3, "lookup_timeout_s": 0.3}
PATIENT = {"timeout_s": 60.0, "lookup_timeout_s": 60.0}  # a busy machine is no hanging server


@pytest.fixture
def own(tmp_path):
    """Servers of this test's own: a maker."""
    made = []

    def make(*options, **more):
        made.append(RealServer(tmp_path, *options, **more))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture(autouse=True)
def looks_again(monkeypatch):
    monkeypatch.setattr(server_index, "_FRESH_S", 0.0)


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(server_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(server_module, "_LONGEST_PAUSE_S", 0.01)


@pytest.fixture(params=[True, False], ids=["in place", "staged"])
def lab(request):
    lab = Lab(request.param)
    with lab.streams:
        yield lab


@pytest.fixture
def large():
    lab = Lab(layout=LARGE)
    with lab.streams:
        yield lab


def again(tier):
    """Wait until the server would be asked again."""
    while tier.server.down:
        time.sleep(0.001)


# Gone -----------------------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_is_a_miss_and_serves_again_when_it_is_back(lab, own, short_pauses):
    server = own()
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    lab.store(tier)
    server.kill()
    assert lab.fetch(tier).valid_blocks == 0
    with pytest.raises(TierError, match=rf"cannot write the valkey tier at 127.0.0.1:{server.port}: "):
        lab.store(tier, first=8)
    server.start()  # with nothing in it
    again(tier)
    assert lab.fetch(tier).valid_blocks == 0
    again(tier)
    assert lab.store(tier).valid_blocks == 8
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)


def test_a_server_that_is_killed_between_look_up_and_load_costs_the_load(lab, own, short_pauses, monkeypatch):
    server = own()
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    lab.store(tier)
    monkeypatch.setattr(server_index, "_FRESH_S", 1e9)
    server.kill()
    report = lab.fetch(tier)
    assert report.valid_blocks == 0
    assert len(report.failures) == 1
    assert tier.counters.read_failures == 1
    assert tier.counters.checksum_failures == 0


def test_a_server_that_is_killed_while_it_is_written_to_fails_that_store_alone(lab, own, short_pauses):
    server = own()
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    store = tier.reserve(HASHES[:8], FINGERPRINT)
    server.kill()
    for piece in store.pieces:
        store.write(piece, [torch.ones(piece.nbytes // piece.count, dtype=torch.uint8).numpy()] * piece.count)
    with pytest.raises(TierError, match="cannot write the valkey tier"):
        store.seal()
    store.abandon()
    assert tier.used_bytes == 0
    server.start()
    again(tier)
    assert lab.store(tier).valid_blocks == 8


def test_connections_that_the_server_has_closed_are_replaced_and_nothing_is_missed(lab, own):
    server = own()
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    lab.store(tier)
    lab.fetch(tier)
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    assert lab.fetch(tier).valid_blocks == 8
    assert not tier.server.down


def test_a_server_that_is_not_there_is_one_clear_error_when_the_tier_is_opened(lab):
    with pytest.raises(TierError, match=r"cannot open the valkey tier at 127.0.0.1:\d+: .*it needs a Valkey or Redis"):
        lab.open(ValkeyTier(f"valkey://:secret@127.0.0.1:{free_port()}", **LIMITS))


# Hanging --------------------------------------------------------------------------------------------------------------


def test_a_server_that_hangs_is_waited_for_once_and_then_left_alone_for_a_while(lab, own, monkeypatch):
    server = own()
    tier = lab.open(ValkeyTier(server.url, **LIMITS))
    lab.store(tier)
    asked = []
    open_wire = server_module.Wire.open
    monkeypatch.setattr(server_module.Wire, "open", lambda wire: (asked.append(wire), open_wire(wire)))
    monkeypatch.setattr(server_module, "_FIRST_PAUSE_S", 1e6)
    monkeypatch.setattr(server_module, "_LONGEST_PAUSE_S", 1e6)
    server.freeze()
    for _ in range(50):
        tier.look_up(HASHES[:8], FINGERPRINT)
        assert not tier.contains(HASHES[0], FINGERPRINT)
        with pytest.raises(TierError, match="has failed 1 times; asked again in"):
            lab.store(tier, first=8)
        assert lab.fetch(tier).valid_blocks == 0
    assert len(asked) == 1, "only the first look-up has waited"


def test_pauses_grow_up_to_a_limit_and_end_with_an_answer(own, monkeypatch):
    server = own()
    asked = server_module.Server(server.url, timeout_s=0.1, question_s=0.1)
    clock = [0.0]
    monkeypatch.setattr(server_module.time, "perf_counter", lambda: clock[0])
    server.kill()
    pauses = []
    for _ in range(9):
        with pytest.raises(ConnectionError):
            asked.ask([server_module.command(b"PING")])
        pauses.append(asked._down_until_s - clock[0])
        assert asked.down
        clock[0] = asked._down_until_s
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    server.start()
    assert asked.ask([server_module.command(b"PING")]) == [b"PONG"]
    server.kill()
    with pytest.raises(ConnectionError):
        asked.ask([server_module.command(b"PING")])
    assert asked._down_until_s - clock[0] == 0.5


def test_pauses_grow_where_questions_are_answered_and_nothing_is_delivered(own, monkeypatch):
    server = own()
    asked = server_module.Server(server.url, timeout_s=60.0, question_s=60.0)
    clock = [0.0]
    monkeypatch.setattr(server_module.time, "perf_counter", lambda: clock[0])

    def hang():
        assert asked.ask([server_module.command(b"PING")]) == [b"PONG"]
        with pytest.raises(TimeoutError), asked.payloads():
            raise TimeoutError
        pause_s = asked._down_until_s - clock[0]
        clock[0] = asked._down_until_s
        return pause_s

    assert [hang() for _ in range(4)] == [0.5, 1, 2, 4]
    with asked.payloads() as wire:
        wire.send([server_module.command(b"PING")])
        assert wire.reply() == b"PONG"
    assert hang() == 0.5


def test_sends_that_trickle_out_are_cut_off_at_the_limit(monkeypatch):
    clock = [0.0]

    class Trickle:
        def settimeout(self, seconds):
            self.most_s = seconds

        def sendall(self, chunk):
            assert self.most_s == pytest.approx(1.0 - clock[0])
            clock[0] += 0.3

    wire = server_module.Wire(None, 1.0)
    wire._socket, wire.deadline_s = Trickle(), 1.0
    monkeypatch.setattr(server_module.time, "perf_counter", lambda: clock[0])
    with pytest.raises(TimeoutError):
        wire.send([b"x"] * 9)
    assert clock[0] == pytest.approx(1.2)


def test_what_a_tier_above_hands_down_has_one_limit_for_all_of_it(own, monkeypatch, short_pauses):
    """Each block alone would be in time; and who asks again, of another thread, has the usual one."""
    monkeypatch.setattr(valkey_module, "_STORE_BYTES", 1)
    server, lab = own(), Lab()
    with lab.streams:
        upper = lab.open(HostTier(1 << 20))
        lower = lab.open(ValkeyTier(server.url, timeout_s=1.0, lookup_timeout_s=60.0))
        lab.store(upper)
        send = server_module.Wire.send
        with monkeypatch.context() as context:
            context.setattr(server_module.Wire, "send", lambda wire, chunks: (time.sleep(0.4), send(wire, chunks)))
            with pytest.raises(TierError, match="cannot write the valkey tier"):
                _copy_down(upper, lower, HASHES[:8], FINGERPRINT)
        assert len(server.blocks()) < 8
        assert lower.used_bytes == 0
        again(lower)
        assert _copy_down(upper, lower, HASHES[:8], FINGERPRINT).hashes == HASHES[:8]
        with lower.server.payloads() as wire:
            assert wire.deadline_s is None


def test_a_large_block_that_the_server_has_not_taken_whole_goes(lab, own, monkeypatch, short_pauses):
    monkeypatch.setattr(value, "VALUE_BYTES", 600)
    server = own()
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    send = server_module.Wire.send

    def break_off(wire, chunks):
        send(wire, chunks if len(chunks) == 1 else chunks[: len(chunks) // 2])  # one chunk is a question
        if len(chunks) > 1:
            raise ConnectionResetError("in the middle")

    with monkeypatch.context() as context:
        context.setattr(server_module.Wire, "send", break_off)
        with pytest.raises(TierError, match="in the middle"):
            lab.store(tier)
    while len(server.all_keys()) < 2:  # it has taken what it got
        pass
    again(tier)
    tier.look_up(HASHES[:1], FINGERPRINT)
    assert server.all_keys() == [b"kvlab:fingerprints"]


def test_a_load_that_has_failed_waits_for_no_read_that_is_still_under_way(own, monkeypatch):
    server, lab, begun, gate = own(), Lab(), threading.Event(), threading.Event()

    def read_in_place(load, piece, extents):
        if piece.group == 0:
            raise OSError("nothing came")
        begun.set()
        gate.wait()

    with lab.streams:
        tier = lab.open(ValkeyTier(server.url, **PATIENT))
        lab.store(tier)
        monkeypatch.setattr(valkey_module._ValkeyLoad, "read_in_place", read_in_place)
        try:
            pending = lab.transfer.reload(tier, HASHES[:8], list(range(16, 24)), timeout_s=10.0)
            pending.read_ahead()
            begun.wait()
            while not tier.counters.failed_blocks:
                assert not pending.advance()
            assert pending.valid_blocks == 0
            assert not pending.timed_out
            assert not pending.advance(), "its blocks are still written to"
        finally:
            gate.set()
        assert pending.wait().valid_blocks == 0
        assert pending.settled


def test_answers_that_trickle_in_are_cut_off_at_the_limit(monkeypatch):
    """Each read alone would be in time."""
    clock = [0.0]

    class Trickle:
        def settimeout(self, seconds):
            assert seconds <= 1.0

        def recv_into(self, target):
            clock[0] += 0.3
            target[:1] = b"+"
            return 1

    wire = server_module.Wire(None, 1.0)
    wire._socket, wire.deadline_s = Trickle(), 1.0
    monkeypatch.setattr(server_module.time, "perf_counter", lambda: clock[0])
    with pytest.raises(TimeoutError):
        wire.reply()
    assert clock[0] == pytest.approx(1.2)


def test_a_payload_that_stands_still_is_given_up(lab, own, short_pauses, monkeypatch):
    server = own()
    tier = lab.open(ValkeyTier(server.url, **LIMITS))
    lab.store(tier)
    monkeypatch.setattr(server_index, "_FRESH_S", 1e9)
    server.freeze()
    assert lab.fetch(tier).valid_blocks == 0
    server.thaw()
    monkeypatch.setattr(server_index, "_FRESH_S", 0.0)
    again(tier)
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)


# Full, and evicting ---------------------------------------------------------------------------------------------------


def test_a_server_that_is_full_refuses_a_store_keeps_what_it_has_and_is_left_alone_for_a_moment(
    large, own, monkeypatch
):
    server = own("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    tier = large.open(ValkeyTier(server.url, **PATIENT))
    assert tier.capacity_bytes == 4 << 20
    assert large.store(tier, count=4).valid_blocks == 4
    with pytest.raises(TierError, match=r"OOM command not allowed.*it needs .* memory"):
        large.store(tier, count=16)
    assert tier.counters.failed_stores == 1
    assert tier.used_bytes == tier.counters.stored_bytes
    with pytest.raises(TierError, match="it was full a moment ago"):
        large.store(tier, count=16)
    # What had its place before it was full is whole, and found.
    report = large.fetch(tier, count=16)
    assert 4 <= report.valid_blocks < 16
    assert torch.equal(large.content(16, report.valid_blocks), large.content(0, report.valid_blocks))
    assert tier.counters.failed_blocks == 0
    tier.clear()
    tier._full_until_s = 0.0
    assert large.store(tier, count=4).valid_blocks == 4


@pytest.mark.parametrize("known", [False, True], ids=["looked up", "not looked up again"])
def test_a_server_that_evicts_by_itself_gives_what_it_still_has(large, own, known, monkeypatch):
    server = own("--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")
    tier = large.open(ValkeyTier(server.url, **PATIENT))
    assert large.store(tier, count=16).valid_blocks == 16
    there = {key.split(b":")[1] for key in server.blocks()}
    assert 0 < len(there) < 16
    leading = next(n for n, h in enumerate(HASHES) if h.hex().encode() not in there)
    if known:
        monkeypatch.setattr(server_index, "_FRESH_S", 1e9)
    report = large.fetch(tier, count=16)
    valid = report.valid_blocks
    if valid < leading:  # replies need memory too: the server has evicted more while it was read
        assert HASHES[valid].hex().encode() not in {key.split(b":")[1] for key in server.blocks()}
    assert valid <= leading
    assert torch.equal(large.content(16, valid), large.content(0, valid))
    assert tier.counters.checksum_failures == 0
    if known:
        assert f"block {valid} of the reload from the valkey tier: the server has evicted it" in report.failures
        assert all(failure.endswith("the server has evicted it") for failure in report.failures)


# Who is let in --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["url", "environment"])
def test_a_password_lets_in_and_is_repeated_nowhere(own, place, monkeypatch, caplog):
    server = own("--requirepass", "s3cret", password="s3cret")
    lab = Lab()
    with lab.streams:
        if place == "url":
            tier = ValkeyTier(server.url.replace("//", "//:s3cret@"), **PATIENT)
        else:
            monkeypatch.setenv(server_module.PASSWORD_VARIABLE, "s3cret")
            tier = ValkeyTier(server.url, **PATIENT)
        lab.open(tier)
        lab.store(tier)
        assert lab.fetch(tier).valid_blocks == 8
        server.kill()
        with pytest.raises(TierError) as caught:
            lab.store(tier, first=8)
        said = [
            str(caught.value),
            repr(caught.value.__cause__),
            repr(tier),
            repr(tier.server),
            json.dumps(vars(tier.counters)),
        ]
        assert not any("s3cret" in each for each in [*said, caplog.text])


@pytest.mark.parametrize("url", ["valkey://127.0.0.1", "valkey://:wr0ng@127.0.0.1", "valkey://nobody:wr0ng@127.0.0.1"])
def test_who_is_not_let_in_is_told_so_when_the_tier_is_opened(lab, own, url):
    server = own("--requirepass", "s3cret")
    with pytest.raises(TierError, match=r"NOAUTH|refuses the login") as caught:
        lab.open(ValkeyTier(f"{url}:{server.port}", **PATIENT))
    assert "wr0ng" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "database", "namespace"),
    [([], "", "kvlab"), ([], "", "kvlab-run-0123456789ab"), (["+select"], "/1", "kvlab")],
)
def test_a_user_with_the_few_rights_that_the_docs_name_is_enough(lab, own, more, database, namespace):
    (rights,) = re.findall(r"`ACL SETUSER user (.*?)`", (DOCS / "valkey.md").read_text(encoding="utf-8"), re.DOTALL)
    server = own()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "user", *rights.split(), *more)
    url = server.url.replace("//", "//user:password@") + database
    tier = lab.open(ValkeyTier(url, namespace=namespace, ttl_s=60.0, **PATIENT))
    assert tier.capacity_bytes > 0
    lab.store(tier)
    assert lab.fetch(tier).valid_blocks == 8
    assert tier.differences(replace(FINGERPRINT, rope="other")) == ["rope"]
    tier.clear()
    assert not server.blocks()


def test_a_password_that_changes_makes_misses_and_removes_nothing(lab, own, short_pauses):
    server = own("--requirepass", "s3cret", password="s3cret")
    tier = lab.open(ValkeyTier(server.url.replace("//", "//:s3cret@"), **PATIENT))
    lab.store(tier)
    with server.client() as client:
        client.config_set("requirepass", "another")
        client.client_kill_filter(_type="normal", skipme=True)
        assert lab.fetch(tier).valid_blocks == 0
        again(tier)
        client.config_set("requirepass", "s3cret")
        assert lab.fetch(tier).valid_blocks == 8


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """(an authority's certificate, a key and a certificate that it has signed for localhost)."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    try:
        openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca"
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed: no certificates to test TLS with")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "request", "-subj", "/CN=localhost")
    (folder / "names").write_text("subjectAltName=DNS:localhost", encoding="ascii")
    openssl(
        *("x509", "-req", "-in", "request", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-out", "crt"),
        *("-days", "2", "-extfile", "names"),
    )
    return folder / "ca.crt", folder / "key", folder / "crt"


def test_tls_serves_and_refuses_a_wrong_authority_and_a_wrong_name(lab, own, certificates):
    authority, key, certificate = certificates
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    own(*tls, "--tls-ca-cert-file", str(authority), "--tls-auth-clients", "no")
    tier = lab.open(ValkeyTier(f"valkeys://localhost:{port}?ssl_ca_certs={authority}", **PATIENT))
    lab.store(tier)
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)
    for url in (f"valkeys://localhost:{port}", f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}"):
        with pytest.raises(TierError, match="certificate verify failed"):
            lab.open(ValkeyTier(url, **PATIENT))


# In an engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def away(own, short_pauses):
    """(engine, tier, request, server): a finished request whose ten blocks are on the server and nowhere else."""
    engines = []

    def make(limits=PATIENT, **options):
        server = own()
        tier = ValkeyTier(server.url, **limits)
        engine = Engine(tiny_model(), 32, 4, [tier], poison=True, groups=2, **options)
        engines.append(engine)
        request = engine.submit(text(40, seed=4), 1)
        engine.run()
        assert engine.offload(request) == 10
        engine.executor.drain()
        assert tier.counters.stored_blocks == 10
        return engine, tier, request, server

    yield make
    for engine in engines:
        engine.close()
        engine.check_integrity()
        assert not engine.executor.transfer.under_way


def flush(server):
    with server.client() as client:
        client.flushall()


def lose_one(server):
    with server.client() as client:
        client.delete(server.blocks()[5])


def restart(server):
    server.kill()
    server.start()


ENDS = {
    "killed": RealServer.kill,
    "hanging": RealServer.freeze,
    "flushed": flush,
    "one block": lose_one,
    "new": restart,
}


@pytest.mark.parametrize("when", ["before the decision", "after it"])
@pytest.mark.parametrize("end", ENDS)
def test_whatever_becomes_of_the_server_the_tokens_are_those_of_a_run_without_cache(away, end, when, monkeypatch):
    engine, tier, request, server = away(LIMITS if end == "hanging" else PATIENT)
    if when == "after it":
        look_up = tier.look_up

        def look_up_first(hashes, fingerprint):
            look_up(hashes, fingerprint)
            monkeypatch.setattr(server_index, "_FRESH_S", 1e9)
            monkeypatch.setattr(tier, "look_up", look_up)
            ENDS[end](server)

        monkeypatch.setattr(tier, "look_up", look_up_first)
    else:
        ENDS[end](server)
    engine.resume(request, [1, 2], 4)
    while engine.step():
        engine.check_integrity()
    assert request.state == "finished"
    check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))
    metrics = engine.metrics()
    assert metrics["failed_loads"] == (when == "after it")
    assert metrics["hit_tokens"].get("valkey", 0) < 40
    assert tier.counters.checksum_failures == 0


def test_a_tier_above_hands_down_to_the_server_what_it_evicts(own):
    """On the calling thread, while the lane may be reading."""
    server = own()
    block = tiny_model().layout(4).block_bytes
    host, shared = HostTier(12 * block), ValkeyTier(server.url, **PATIENT)
    with Engine(tiny_model(), 64, 4, [host, shared], poison=True) as engine:
        requests = [engine.submit(text(40, seed=n), 1) for n in range(3)]
        engine.run()
        for request in requests:
            engine.offload(request)
            engine.executor.drain()
        assert engine.metrics()["demoted_blocks"] == shared.counters.stored_blocks > 0
        for request in requests:
            engine.resume(request, [1], 2)
        engine.run()
        for request in requests:
            check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))
        assert engine.metrics()["hit_tokens"]["valkey"] > 0
