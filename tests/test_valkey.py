"""A tier on a real server holds what it was given, or says that it does not: whatever the server does is a miss."""

import math
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from real_server import RealServer
from test_tiers import EXTENT, FINGERPRINT, HASHES, Lab

from kvlab.pool import KVLayout
from kvlab.tiers import LinkTier, ValkeyTier, server_index, value
from kvlab.tiers import server as server_module
from kvlab.tiers.server import command
from kvlab.tiers.value import BlockForm
from kvlab.transfer import Transfer

FORM = BlockForm(FINGERPRINT, (EXTENT, EXTENT))
MANY = [bytes([i + 1]) * 32 for i in range(32)]
PATIENT = {"timeout_s": 60.0, "lookup_timeout_s": 60.0}  # a busy machine is no hanging server


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    server = RealServer(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture
def server(running):
    """The module's server, with nothing in it."""
    with running.client() as client:
        client.flushall()
    return running


@pytest.fixture
def own(tmp_path):
    """Servers of this test's own, to be killed, frozen and filled: a maker."""
    made = []

    def make(*options, **more):
        made.append(RealServer(tmp_path, *options, **more))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture(autouse=True)
def looks_again(monkeypatch):
    """Nothing is taken as known because it was looked up a moment ago, and no pause is long."""
    monkeypatch.setattr(server_index, "_FRESH_S", 0.0)
    monkeypatch.setattr(server_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(server_module, "_LONGEST_PAUSE_S", 0.01)


@pytest.fixture(params=[True, False], ids=["in place", "staged"])
def lab(request):
    lab = Lab(request.param)
    with lab.streams:
        yield lab


@pytest.fixture
def tier(lab, server):
    """A tier that has stored eight blocks."""
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    assert lab.store(tier).valid_blocks == 8
    return tier


def key_of(tier, block):
    return tier.index.keys.of(HASHES[block])[0]


# Storing and loading --------------------------------------------------------------------------------------------------


def test_blocks_come_back_byte_for_byte_here_and_in_another_process_tier(lab, tier, server):
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)
    assert (tier.counters.stored_blocks, tier.counters.loaded_blocks) == (8, 8)
    lab.pool.rows[lab.pool.group_index(torch.arange(16, 24), 0, 4)] = 0
    other = lab.open(ValkeyTier(server.url, **PATIENT))
    assert not other.contains(HASHES[0], FINGERPRINT)
    other.look_up(HASHES[:9], FINGERPRINT)
    assert [other.contains(h, FINGERPRINT) for h in HASHES[:9]] == [True] * 8 + [False]
    assert lab.fetch(other).valid_blocks == 8
    assert lab.right(8)
    assert other.used_bytes == tier.used_bytes == tier.counters.stored_bytes == 8 * FORM.block_bytes


def test_a_group_waits_for_the_others_although_its_staging_is_used_again(server):
    """One buffer for all pieces: what is to be sent with the last group must not lie in it."""
    lab = Lab(in_place=False)
    with lab.streams:
        lab.transfer = Transfer(lab.pool, lab.streams, groups=2, piece_bytes=1, staging_bytes=1)
        tier = lab.open(ValkeyTier(server.url, **PATIENT))
        assert lab.transfer.offload(tier, list(range(32)), MANY).wait().valid_blocks == 32
        assert lab.transfer.reload(tier, MANY[:8], list(range(16, 24))).wait().valid_blocks == 8
        assert lab.right(8)


def test_a_block_is_one_value_of_known_bytes(lab, tier, server):
    with server.client() as client:
        raw = client.get(key_of(tier, 3))
    header = FORM.decode(raw[: FORM.fixed_bytes], HASHES[3])
    assert raw[FORM.fixed_bytes : FORM.header_bytes] == FORM.facts
    # In the pool a block is contiguous: its layers in order, which is also the order of the groups.
    assert raw[FORM.header_bytes :] == lab.content(3, 1).numpy().tobytes()
    assert header.block_hash == HASHES[3]


def test_what_two_processes_store_at_once_is_stored_once_and_serves_both(lab, server):
    first, second = (lab.open(ValkeyTier(server.url, **PATIENT)) for _ in range(2))
    stores = [tier.reserve(HASHES[:4], FINGERPRINT) for tier in (first, second)]
    for n, store in enumerate(stores):
        for piece in store.pieces:
            store.write(piece, [torch.full((EXTENT,), n + 1, dtype=torch.uint8).numpy()] * piece.count)
        store.seal()
        store.publish()
    assert (first.counters.stored_blocks, second.counters.stored_blocks) == (4, 0)
    assert lab.fetch(second, count=4).valid_blocks == lab.fetch(first, count=4).valid_blocks == 4
    assert bool((lab.content(16, 4).view(torch.uint8) == 1).all())


def test_clear_removes_what_was_found_or_stored_from_here_and_nothing_of_others(lab, tier, server):
    with server.client() as client:
        client.set("somebody:else's", "value")
    lab.open(apart := ValkeyTier(server.url, namespace="apart", **PATIENT))
    lab.store(apart)
    pending = lab.transfer.reload(tier, HASHES[:2], [16, 17])
    tier.clear()
    assert pending.wait().valid_blocks == 2
    assert {key.split(b":")[0] for key in server.blocks()} == {b"kvlab", b"apart"}
    tier.clear()
    assert {key.split(b":")[0] for key in server.blocks()} == {b"apart"}
    assert b"somebody:else's" in server.all_keys()
    assert tier.used_bytes == 0
    assert lab.store(tier).valid_blocks == 8
    assert lab.fetch(tier).valid_blocks == 8


def test_many_round_trips_leave_few_connections_and_no_descriptors(lab, tier, server):
    descriptors = Path("/proc/self/fd")
    lab.fetch(tier)
    before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    for _ in range(50):
        tier.clear()
        lab.store(tier)
        lab.fetch(tier)
    assert before == (len(list(descriptors.iterdir())) if descriptors.exists() else 0)
    tier.close()
    assert lab.fetch(tier).valid_blocks == 8


def test_a_link_in_front_looks_up_behind_it(lab, tier, server):
    link = lab.open(LinkTier(ValkeyTier(server.url, **PATIENT), 10.0))
    assert lab.fetch(link).valid_blocks == 8


# Faults: a miss, never an exception, never tried again ----------------------------------------------------------------


def flip(client, key):
    at = FORM.header_bytes + EXTENT + 100  # in the second group
    client.setrange(key, at, bytes([client.get(key)[at] ^ 1]))


def flip_in_the_header(client, key):
    client.setrange(key, 20, bytes([client.get(key)[20] ^ 1]))


def cut(client, key):
    client.set(key, client.get(key)[:-10])


def swap(client, key):
    """The whole value of another block, which is right in itself."""
    client.set(key, client.get(key.replace(HASHES[3].hex().encode(), HASHES[5].hex().encode())))


def cut_between_groups(client, key):
    client.set(key, client.get(key)[: FORM.header_bytes + EXTENT])


def other_kind(client, key):
    client.delete(key)
    client.rpush(key, "a list")


FAULTS = {
    "flipped bit": flip,
    "flipped bit in the header": flip_in_the_header,
    "cut": cut,
    "cut between groups": cut_between_groups,
    "another block": swap,
    "another kind of value": other_kind,
    "evicted": lambda client, key: client.delete(key),
    "right length, wrong bytes": lambda client, key: client.set(key, b"\x55" * client.strlen(key)),
}


@pytest.mark.parametrize("seen", [False, True], ids=["before it is looked up", "after"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_block_that_is_not_what_was_stored_is_a_miss_from_there_on(lab, tier, server, fault, seen, monkeypatch):
    if seen:
        monkeypatch.setattr(server_index, "_FRESH_S", 1e9)
    with server.client() as client:
        FAULTS[fault](client, key_of(tier, 3))
        report = lab.fetch(tier)
        assert report.valid_blocks == 3
        assert lab.right(3)
        monkeypatch.setattr(server_index, "_FRESH_S", 0.0)
        before = tier.counters.failed_blocks
        assert lab.fetch(tier).valid_blocks == 3
        assert tier.counters.failed_blocks == before  # not tried again
        assert lab.store(tier).valid_blocks == 8
        assert lab.fetch(tier).valid_blocks == 8
        assert lab.right(8)
    if seen:
        assert before == 1
        assert tier.counters.checksum_failures == (fault == "flipped bit")  # the others are seen before their bytes are


@pytest.mark.parametrize("first", ["evicted", "written again"])
def test_what_another_engine_writes_again_is_left_to_it_by_one_that_has_missed_it(
    lab, tier, server, first, monkeypatch
):
    other = lab.open(ValkeyTier(server.url, clock=lambda: 1000.0, **PATIENT))
    with server.client() as client:
        client.delete(key_of(tier, 3))
        if first == "written again":
            assert lab.store(other).valid_blocks == 8
        with monkeypatch.context() as context:
            context.setattr(server_index, "_FRESH_S", 1e9)
            report = lab.fetch(tier)
        assert report.valid_blocks == 3
        assert first in report.failures[0]
        if first == "evicted":
            assert lab.store(other).valid_blocks == 8
        assert other.counters.stored_blocks == 1
        assert lab.fetch(tier).valid_blocks == 8
        assert lab.right(8)
        assert len(server.blocks()) == 8


@pytest.mark.parametrize(
    "field", ["weights", "tokenizer", "rope", "kv_dtype", "block_layout", "adapter", "tp_rank", "salt"]
)
def test_another_fingerprint_gets_nothing_and_is_told_which_field_differs(lab, tier, server, field):
    other = replace(FINGERPRINT, **{field: 1 if field == "tp_rank" else "other"})
    tier.look_up(HASHES[:1], other)
    assert not tier.contains(HASHES[0], other)
    assert tier.differences(other) == [field]
    assert tier.differences(FINGERPRINT) == []
    assert lab.fetch(tier, fingerprint=other).valid_blocks == 0
    with pytest.raises(KeyError, match="under this fingerprint"):
        tier.load(HASHES[:1], other)
    assert lab.fetch(tier).valid_blocks == 8


def test_what_is_replaced_between_look_up_and_load_is_found_and_the_field_is_named(lab, tier, server, monkeypatch):
    monkeypatch.setattr(server_index, "_FRESH_S", 1e9)
    other = BlockForm(replace(FINGERPRINT, weights="weightz"), FORM.extents)  # as long as before, so that lengths agree
    with server.client() as client:
        payload = client.get(key_of(tier, 2))[FORM.header_bytes :]
        sums = tier.index.get(HASHES[2], FORM).checksums
        client.set(key_of(tier, 2), other.header(HASHES[2], 0.0, sums).raw + other.facts + payload)
    report = lab.fetch(tier)
    assert report.valid_blocks == 2
    assert "another fingerprint now: weights" in report.failures[0]


def test_blocks_cut_otherwise_live_beside_each_other(lab, tier, server):
    transfer = Transfer(lab.pool, lab.streams, groups=4)
    again = ValkeyTier(server.url, **PATIENT)
    transfer.open(again, FINGERPRINT)
    again.look_up(HASHES[:1], FINGERPRINT)
    assert not again.contains(HASHES[0], FINGERPRINT)
    assert again.differences(FINGERPRINT) == ["extents"]
    transfer.offload(again, list(range(8)), HASHES[:8], source_held=lab.in_place).wait()
    assert transfer.reload(again, HASHES[:8], list(range(16, 24))).wait().valid_blocks == 8
    assert lab.fetch(tier).valid_blocks == 8
    with pytest.raises(ValueError, match=r"is open for .*extents"):
        transfer.open(tier, FINGERPRINT)


# Values of bounded size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value_bytes", [100, EXTENT, EXTENT + 1, 1500, 2 * EXTENT - 1])
def test_a_large_block_is_cut_into_values_and_a_part_that_is_lost_is_a_miss(lab, server, monkeypatch, value_bytes):
    monkeypatch.setattr(value, "VALUE_BYTES", value_bytes)
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    lab.store(tier)
    with server.client() as client:
        parts = -(-2 * EXTENT // value_bytes)
        keys = tier.index.keys.of(HASHES[3])
        assert len(keys) == parts
        assert [client.strlen(key) for key in keys][1:-1] == [value_bytes] * (parts - 2)
        assert client.strlen(keys[0]) == value_bytes + FORM.header_bytes
        assert lab.fetch(tier).valid_blocks == 8
        assert lab.right(8)
        client.delete(keys[-1])
        assert lab.fetch(tier).valid_blocks == 3
        assert lab.fetch(tier).valid_blocks == 3
        assert tier.counters.failed_blocks == 1
        assert not client.exists(*keys), "what is left of it is of no use to anybody"
        assert lab.store(tier).valid_blocks == 8
        assert lab.fetch(tier).valid_blocks == 8


def test_the_value_by_which_a_block_is_found_is_written_last(lab, server, monkeypatch):
    monkeypatch.setattr(value, "VALUE_BYTES", 600)
    sent = []
    send = server_module.Wire.send
    monkeypatch.setattr(
        server_module.Wire, "send", lambda wire, chunks: (sent.append(b"".join(chunks)), send(wire, chunks))
    )
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    lab.store(tier, count=3)
    everything = b"".join(sent)
    for block in range(3):
        places = [
            everything.index(b"SET\r\n$%d\r\n%b\r\n" % (len(key), key)) for key in tier.index.keys.of(HASHES[block])
        ]
        assert len(places) == 4
        assert places[0] == max(places)


def test_values_hold_at_most_four_mib_and_large_blocks_come_back(own):
    """With the real bound: blocks of 5 MiB, in two groups."""
    layout = KVLayout(layers=4, kv_heads=8, head_dim=64, block_size=320, dtype="fp32")
    lab, server = Lab(layout=layout), own()
    with lab.streams:
        tier = lab.open(ValkeyTier(server.url, **PATIENT))
        lab.store(tier, count=2)
        with server.client() as client:
            sizes = [client.strlen(key) for key in tier.index.keys.of(HASHES[0])]
        assert len(sizes) == 2
        assert max(sizes) < (4 << 20) + 4096
        assert lab.fetch(tier, count=2).valid_blocks == 2
        assert torch.equal(lab.content(16, 2), lab.content(0, 2))


# Time to live ---------------------------------------------------------------------------------------------------------


def test_the_server_drops_what_is_too_old_and_a_younger_limit_holds_at_once(lab, server):
    now_s = 1000.0
    tier = lab.open(ValkeyTier(server.url, ttl_s=60.0, clock=lambda: now_s, **PATIENT))
    lab.store(tier)
    with server.client() as client:
        assert len(server.blocks()) == 8
        assert all(0 < client.pttl(key) <= 60_000 for key in server.all_keys())
        now_s += 60
        assert lab.fetch(tier).valid_blocks == 8
        now_s += 1
        assert not tier.contains(HASHES[0], FINGERPRINT)
        assert lab.fetch(tier).valid_blocks == 0
        assert tier.counters.expired_blocks == 8
        assert lab.store(tier).valid_blocks == 8
        assert lab.fetch(tier).valid_blocks == 8
        for key in server.blocks():
            client.pexpire(key, 1)
        while server.blocks():
            pass
    assert lab.fetch(tier).valid_blocks == 0
    assert tier.counters.failed_blocks == 0


def test_who_gives_blocks_less_time_leaves_them_to_others_until_it_replaces_them(lab, tier, server):
    now_s = 1000.0
    hasty = lab.open(ValkeyTier(server.url, ttl_s=60.0, clock=lambda: now_s, **PATIENT))
    assert lab.fetch(hasty).valid_blocks == 0
    assert lab.fetch(hasty).valid_blocks == 0
    assert hasty.counters.expired_blocks == 8  # each was counted once
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.store(hasty).valid_blocks == 8
    assert hasty.counters.stored_blocks == 8
    assert lab.fetch(hasty).valid_blocks == lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)


def test_the_list_of_fingerprints_is_written_again_before_it_expires(lab, server, monkeypatch):
    real, later_s = server_index.time.perf_counter, 0.0
    monkeypatch.setattr(server_index.time, "perf_counter", lambda: real() + later_s)
    tier = lab.open(ValkeyTier(server.url, ttl_s=2000.0, **PATIENT))
    lab.store(tier, count=1)
    with server.client() as client:
        assert client.delete("kvlab:fingerprints")
        lab.store(tier, first=1, count=1)
        assert not client.exists("kvlab:fingerprints"), "it is not written with every store"
        later_s = 1001.0
        lab.store(tier, first=2, count=1)
        assert client.pttl("kvlab:fingerprints") > 1_000_000
    assert tier.differences(replace(FINGERPRINT, rope="other")) == ["rope"]


def test_blocks_that_are_nowhere_take_no_memory(lab, server):
    tier = lab.open(ValkeyTier(server.url, **PATIENT))
    for n in range(50):
        tier.look_up([b"%31d" % (100 * n + i) for i in range(100)], FINGERPRINT)
    assert len(tier.index._seen_s) < 100


# The client, the URL, the replies -------------------------------------------------------------------------------------


def test_without_the_client_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(ValueError, match=r"pip install 'kvlab\[valkey\]'"):
        ValkeyTier("valkey://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://:secret@127.0.0.1", "begins with none of valkey://"),
        ("valkey://:secret@127.0.0.1:port", "cannot be used"),
        ("valkey://:secret/x@127.0.0.1:6379", "percent-encode"),
        ("valkey://:secret#x@127.0.0.1:6379", "percent-encode"),
        ("valkey://secret/x@127.0.0.1:6379", "percent-encode"),
        ("valkey://:secret@127.0.0.1?nonsense=1", "cannot be used"),
        ("valkey://:secret@127.0.0.1?socket_timeout=soon", "cannot be used"),
    ],
)
def test_a_url_that_is_none_is_refused_and_not_repeated(url, why):
    with pytest.raises(ValueError, match=why) as caught:
        ValkeyTier(url)
    assert "secret" not in "".join(traceback.format_exception(caught.value)).replace(url, "")


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0.0},
        {"timeout_s": "5"},
        {"lookup_timeout_s": float("nan")},
        {"namespace": "a b"},
        {"ttl_s": math.inf},
        {"ttl_s": "60"},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is "):
        ValkeyTier("valkey://127.0.0.1:1", **options)


class Slices:
    """A socket that gives a few bytes at a time."""

    def __init__(self, data, step):
        self.data, self.step = data, step

    def settimeout(self, seconds):
        pass

    def recv_into(self, target):
        part, self.data = self.data[: min(self.step, len(target))], self.data[min(self.step, len(target)) :]
        target[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 100_000])
def test_replies_are_read_wherever_they_are_cut(step):
    big = bytes(range(256)) * 200
    data = b"+OK\r\n:42\r\n$-1\r\n$5\r\nab\r\nc\r\n-OOM no room\r\n$%d\r\n%b\r\n*2\r\n$1\r\nx\r\n:7\r\n$0\r\n\r\n" % (
        len(big),
        big,
    )
    wire = server_module.Wire(None, 1.0)
    wire._socket = Slices(data, step)
    assert [wire.reply() for _ in range(4)] == [b"OK", 42, None, b"ab\r\nc"]
    assert str(wire.reply()) == "OOM no room"
    target = bytearray(len(big))
    assert wire.reply([memoryview(target)[:1000], memoryview(target)[1000:]]) == len(big)
    assert target == big
    assert wire.reply() == [b"x", 7]
    assert wire.reply([memoryview(target)]) == b""  # shorter than what was expected: handed over as it is
    with pytest.raises(ConnectionResetError):
        wire.reply()


def test_a_command_is_an_array_of_bulk_strings():
    assert command(b"GETRANGE", b"key", 0, 10) == b"*4\r\n$8\r\nGETRANGE\r\n$3\r\nkey\r\n$1\r\n0\r\n$2\r\n10\r\n"
