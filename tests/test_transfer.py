"""Bytes come back right under every stream backend; each wait is needed, or an adversary makes them wrong."""

import time

import pytest
import torch

from kvlab.adversaries import EarlyStreams, LateStreams
from kvlab.fingerprint import Fingerprint
from kvlab.pool import BlockPool, KVLayout
from kvlab.streams import Event, Streams, ThreadStreams, copy_rows
from kvlab.tiers import DiskTier, HostTier, LinkTier
from kvlab.transfer import Transfer

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=8, block_size=4, dtype="fp32")  # 256-byte rows, 2 KiB blocks
FINGERPRINT = Fingerprint("w", "c", "t", "r", "fp32", "b")
HASHES = [bytes([i + 1]) * 32 for i in range(12)]


class Staged(ThreadStreams):
    """Files pass through staging, as where the pool is not in CPU memory."""

    in_place = False


class LateInPlace(LateStreams):
    """Files are read into the pool, and written from it, at the last moment that the waits allow."""

    in_place = True


class EarlyInPlace(EarlyStreams):
    """… at the first moment that the waits allow, and compute runs at the last: when somebody waits for it."""

    in_place = True

    def __init__(self):
        super().__init__()
        self.launched = []

    def compute(self, job):
        self.launched.append(job)

    def compute_event(self):
        event = Event("compute")
        event.ended = True
        return event

    def _copy(self, op, rows, index, host, after):
        for event in after:
            self._finish(event)
        event = Event(op)
        event.run(lambda: copy_rows(op, rows, index, host), after)
        return event

    def _finish(self, event):
        if event.op == "compute":
            while self.launched:
                self.launched.pop(0)()
        super()._finish(event)


BACKENDS = {
    "thread": ThreadStreams,
    "staged": Staged,
    "late": LateStreams,
    "early": EarlyStreams,
    "late in place": LateInPlace,
    "early in place": EarlyInPlace,
}


class Without(Streams):
    """Streams that forget one wait: jobs of kind `op` do not come after events of kind `awaited`."""

    def __init__(self, streams, op=None, awaited=None):
        self.streams, self.op, self.awaited, self.forgotten = streams, op, awaited, 0
        self.in_place = streams.in_place

    def compute(self, job):
        getattr(self.streams, "compute", lambda job: job())(job)

    def compute_is_over(self):
        self.streams.wait_compute(self.streams.compute_event())

    def _forgets(self, op, event):
        hit = op == self.op and event.op == self.awaited
        self.forgotten += hit
        return hit

    def _after(self, op, after):
        return [event for event in after if not self._forgets(op, event)]

    def _copy(self, op, rows, index, host, after):
        return self.streams._copy(op, rows, index, host, self._after(op, after))

    def io(self, job, after, fills=None, lane=""):
        return self.streams.io(job, self._after("io", after), fills, lane)

    def compute_event(self):
        return self.streams.compute_event()

    def wait_compute(self, event):
        if not self._forgets("compute", event):
            self.streams.wait_compute(event)

    def wait_host(self, event):
        if not self._forgets("host", event):
            self.streams.wait_host(event)

    def buffer(self, nbytes):
        return self.streams.buffer(nbytes)

    def watch(self, rows):
        self.streams.watch(rows)

    def close(self):
        self.streams.close()


def make_tier(kind, tmp_path, capacity=1 << 20):
    if kind == "host":
        return HostTier(capacity)
    if kind == "unverified host":
        return HostTier(capacity, verify=False)
    if kind == "link":
        return LinkTier(HostTier(capacity), gb_per_s=1.0)
    return DiskTier(tmp_path, capacity, codec="xz" if kind == "xz" else None)


TIERS = ["host", "unverified host", "link", "disk", "xz"]


def content(pool, blocks):
    """The bytes of blocks, block by block."""
    index = pool.group_index(torch.tensor(blocks), 0, pool.layout.layers)
    return pool.rows[index].view(len(blocks), -1).clone()


def computed(pool, blocks, values):
    """What a forward pass does to its blocks; on a CPU it is over when it returns."""
    pool.rows[pool.group_index(torch.tensor(blocks), 0, pool.layout.layers)] = values.view(-1, pool.rows.shape[1])


def round_trip(streams, tier, groups, order="block_major", blocks=12, staging_bytes=1, reads_forget=None):
    """Compute, offload, reuse the source blocks, reload elsewhere, compute there; True when the bytes are right.

    Small staging (one buffer of 16 KiB), so that buffers are reused. `reads_forget` applies from the reload on. Where
    the streams work in place, the source blocks are held, as it takes to write from them.
    """

    def compute_writes(pool, blocks, values):
        streams.compute(lambda: computed(pool, blocks, values))

    layout = KVLayout(LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.block_size, LAYOUT.dtype, order)
    pool = BlockPool(layout, 2 * blocks + 3)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(pool.num_blocks, generator=generator).tolist()
    home, away = ids[:blocks], ids[blocks : 2 * blocks]
    transfer = Transfer(pool, streams, groups, piece_bytes=1, staging_bytes=staging_bytes)
    transfer.open(tier, FINGERPRINT)
    values = torch.randn(blocks, LAYOUT.block_bytes // 4, generator=generator)
    compute_writes(pool, home, values)
    pending = transfer.offload(tier, home, HASHES[:blocks], source_held=streams.in_place)
    pending.wait_source()
    compute_writes(pool, home, torch.full_like(values, 7.0))  # the source blocks belong to somebody else now
    if pending.wait().valid_blocks != blocks:
        return False
    if reads_forget:
        streams.op, streams.awaited = reads_forget
    compute_writes(pool, away, torch.full_like(values, 8.0))  # the last owner of the target blocks still writes
    report_pending = transfer.reload(tier, HASHES[:blocks], away)
    seen = []
    for group, (start, stop) in enumerate(transfer.groups.layers):
        valid = report_pending.wait_group(group)
        streams.compute_is_over()
        rows = pool.rows[pool.group_index(torch.tensor(away), start, stop)]  # compute attends to this group
        seen.append(rows.view(blocks, -1).clone())
        if valid != blocks:
            return False
    assert bool(report_pending.copies) != report_pending.load.in_place
    right = torch.equal(torch.cat(seen, 1), values) and torch.equal(content(pool, away), values)
    return right and report_pending.wait().valid_blocks == blocks


@pytest.mark.parametrize("order", ["block_major", "layer_major"])
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_come_back_right_under_every_backend(backend, tier, groups, order, tmp_path):
    with Without(BACKENDS[backend]()) as streams:
        assert round_trip(streams, make_tier(tier, tmp_path), groups, order)
        assert streams.forgotten == 0


OFFLOAD_WAITS = [
    # (job, what it must come after, tier, adversary that finds it missing)
    ("gather", "compute", "host", "early"),
    ("gather", "compute", "disk", "early"),
    ("io", "gather", "host", "early"),
    ("io", "gather", "disk", "early"),
    ("compute", "gather", "unverified host", "late"),
    ("compute", "gather", "disk", "late"),
    ("gather", "io", "disk", "late"),
    ("host", "io", "disk", "late"),
    ("io", "compute", "disk", "early in place"),
    ("io", "compute", "xz", "early in place"),
    ("compute", "io", "disk", "late in place"),
]
RELOAD_WAITS = [
    ("host", "io", "disk", "late"),
    ("scatter", "compute", "host", "early"),
    ("scatter", "compute", "disk", "early"),
    ("compute", "scatter", "host", "late"),
    ("compute", "scatter", "disk", "late"),
    ("io", "scatter", "disk", "late"),
    ("io", "compute", "disk", "early in place"),
    ("host", "io", "disk", "late in place"),
]


@pytest.mark.parametrize(("op", "awaited", "tier", "adversary"), OFFLOAD_WAITS)
def test_an_offload_without_this_wait_is_found_out(op, awaited, tier, adversary, tmp_path):
    # More blocks than one staging buffer holds, so that it is used again.
    with Without(BACKENDS[adversary](), op, awaited) as streams:
        right = round_trip(streams, make_tier(tier, tmp_path), 2, reads_forget=(None, None))
        assert streams.forgotten > 0, "the wait that this test removes does not exist"
        assert not right


@pytest.mark.parametrize(("op", "awaited", "tier", "adversary"), RELOAD_WAITS)
def test_a_reload_without_this_wait_is_found_out(op, awaited, tier, adversary, tmp_path):
    with Without(BACKENDS[adversary]()) as streams:
        assert not round_trip(streams, make_tier(tier, tmp_path), 2, reads_forget=(op, awaited))
        assert streams.forgotten > 0, "the wait that this test removes does not exist"


def test_the_lists_above_name_every_wait_that_a_transfer_asks_for(tmp_path):
    asked = set()

    class Recording(Without):
        def _forgets(self, op, event):
            asked.add((op, event.op))
            return False

    for tier in TIERS:
        for backend in (ThreadStreams, Staged):
            with Recording(backend()) as streams:
                assert round_trip(streams, make_tier(tier, tmp_path / tier / backend.__name__), 2)
    listed = {(op, awaited) for op, awaited, _, _ in OFFLOAD_WAITS + RELOAD_WAITS}
    # The host waits for copies only to read their clocks.
    assert asked - {("host", "gather"), ("host", "scatter")} == listed


@pytest.mark.parametrize("backend", ["thread", "late"])
def test_a_held_source_need_not_stop_compute_until_it_is_given_up(backend):
    with Without(BACKENDS[backend]()) as streams:
        pool = BlockPool(LAYOUT, 4)
        transfer = Transfer(pool, streams)
        tier = HostTier(1 << 20)
        transfer.open(tier, FINGERPRINT)
        pool.rows.fill_(1.0)
        waits = []
        streams.wait_compute = lambda event: (waits.append(event.op), streams.streams.wait_compute(event))
        pending = transfer.offload(tier, [0, 1], HASHES[:2], source_held=True)
        assert waits == []
        pending.wait_source()
        assert waits == ["gather"]
        pool.rows.fill_(2.0)
        pending.wait()
        transfer.reload(tier, HASHES[:2], [2, 3]).wait()
        assert (content(pool, [2, 3]) == 1.0).all()


def test_blocks_that_are_written_from_where_they_are_are_held_until_the_file_is_written(tmp_path):
    with LateInPlace() as streams:
        pool = BlockPool(LAYOUT, 4)
        transfer = Transfer(pool, streams)
        tier = DiskTier(tmp_path, 1 << 20)
        transfer.open(tier, FINGERPRINT)
        pool.rows.fill_(1.0)
        pending = transfer.offload(tier, [0, 1], HASHES[:2], source_held=True)
        assert pending.ios
        assert not pending.copies
        assert not pending.ios[0].done()
        pending.wait_source()
        assert pending.ios[0].done()
        pool.rows.fill_(2.0)
        pending.wait()
        transfer.reload(tier, HASHES[:2], [2, 3]).wait()
        assert (content(pool, [2, 3]) == 1.0).all()
        copied = transfer.offload(tier, [0], HASHES[3:4])  # the source is not held: it must be copied first
        assert copied.copies


@pytest.fixture
def lab(tmp_path):
    """(pool, transfer, tier maker) on the CPU, eight blocks of known content in blocks 0 to 7."""
    with ThreadStreams() as streams:
        pool = BlockPool(LAYOUT, 24)
        pool.rows.copy_(torch.randn(pool.rows.shape, generator=torch.Generator().manual_seed(1)))
        transfer = Transfer(pool, streams, groups=2)

        def make(kind, capacity=1 << 20, name="tier"):
            tier = make_tier(kind, tmp_path / name, capacity)
            transfer.open(tier, FINGERPRINT)
            return tier

        yield pool, transfer, make


def test_an_offload_writes_only_what_the_tier_lacks(lab):
    _, transfer, make = lab
    for kind in ("host", "disk"):
        tier = make(kind)
        first = transfer.offload(tier, [0, 1, 2], HASHES[:3]).wait()
        second = transfer.offload(tier, [0, 1, 2, 3], HASHES[:4]).wait()
        third = transfer.offload(tier, [0, 1, 2, 3], HASHES[:4]).wait()
        assert [r.bytes_moved // LAYOUT.block_bytes for r in (first, second, third)] == [3, 1, 0]
        assert [r.valid_blocks for r in (first, second, third)] == [3, 4, 4]
        assert tier.counters.stored_blocks == 4


def test_a_reload_stops_at_the_first_block_that_is_not_there(lab):
    pool, transfer, make = lab
    tier = make("host")
    transfer.offload(tier, [0, 1, 3], [HASHES[0], HASHES[1], HASHES[3]]).wait()
    report = transfer.reload(tier, HASHES[:4], [10, 11, 12, 13]).wait()
    assert (report.blocks, report.valid_blocks) == (4, 2)
    assert "block 2" in report.failures[0]
    assert torch.equal(content(pool, [10, 11]), content(pool, [0, 1]))


def test_blocks_of_a_tier_that_is_full_are_refused_from_the_tail(lab):
    _, transfer, make = lab
    for kind, capacity in (("host", 3 * LAYOUT.block_bytes), ("disk", 4096 + 3 * LAYOUT.block_bytes)):
        tier = make(kind, capacity, name=f"full {kind}")
        report = transfer.offload(tier, [0, 1, 2, 3, 4], HASHES[:5]).wait()
        assert report.valid_blocks == 3
        assert [tier.contains(h, FINGERPRINT) for h in HASHES[:5]] == [True] * 3 + [False] * 2
        assert tier.used_bytes <= tier.capacity_bytes


def test_every_second_is_accounted_for_once(lab):
    _, transfer, make = lab
    tier = make("disk")
    stored = transfer.offload(tier, list(range(8)), HASHES[:8]).wait()
    loaded = transfer.reload(tier, HASHES[:8], list(range(8, 16))).wait()
    for report in (stored, loaded):
        assert report.bytes_moved == 8 * LAYOUT.block_bytes
        assert report.io_s > 0
        assert report.device_s + report.queue_s + report.enqueue_s + report.notice_s <= report.wall_s * 1.5
    assert loaded.verify_s > 0
    assert (stored.copies, loaded.copies) == (2, 0)  # one a group: the blocks lie together; read where they belong
    assert stored.device_s > 0
    assert loaded.device_s == 0
    stored = transfer.offload(tier, [16, 17], HASHES[8:10], source_held=True).wait()
    assert (stored.copies, stored.bytes_moved) == (0, 2 * LAYOUT.block_bytes)


def test_poll_publishes_what_is_over_and_drain_ends_the_rest(lab):
    _, transfer, make = lab
    tier = make("disk")
    pending = transfer.offload(tier, [0], HASHES[:1])
    deadline = time.monotonic() + 10
    while not tier.contains(HASHES[0], FINGERPRINT) and time.monotonic() < deadline:
        transfer.poll()
    assert tier.contains(HASHES[0], FINGERPRINT)
    assert pending.wait() is pending.wait()
    transfer.offload(tier, [1], HASHES[1:2])
    transfer.reload(tier, HASHES[:1], [9])
    transfer.drain()
    assert tier.contains(HASHES[1], FINGERPRINT)
    assert transfer.under_way == []


def test_two_offloads_of_one_block_at_a_time_keep_one_copy(lab):
    _, transfer, make = lab
    tier = make("host")
    first, second = (transfer.offload(tier, [0], HASHES[:1]) for _ in range(2))
    first.wait()
    second.wait()
    assert tier.used_bytes == LAYOUT.block_bytes
    transfer.reload(tier, HASHES[:1], [9]).wait()


def test_interleaved_reloads_share_one_staging_buffer(tmp_path):
    with Staged() as streams:
        pool = BlockPool(LAYOUT, 40)
        pool.rows.copy_(torch.randn(pool.rows.shape))
        transfer = Transfer(pool, streams, groups=4, piece_bytes=1, staging_bytes=1)
        tier = DiskTier(tmp_path, 1 << 20)
        transfer.open(tier, FINGERPRINT)
        transfer.offload(tier, list(range(12)), HASHES).wait()
        one = transfer.reload(tier, HASHES, list(range(12, 24)))
        two = transfer.reload(tier, HASHES, list(range(24, 36)))
        for group in range(4):
            assert one.wait_group(group) == two.wait_group(group) == 12
        assert one.wait().valid_blocks == two.wait().valid_blocks == 12
        for start in (12, 24):
            assert torch.equal(content(pool, list(range(start, start + 12))), content(pool, list(range(12))))


def test_bad_calls_name_the_values(lab):
    pool, transfer, make = lab
    tier = make("host")
    with pytest.raises(ValueError, match="2 blocks and 1 hashes"):
        transfer.offload(tier, [0, 1], HASHES[:1])
    with pytest.raises(ValueError, match=r"blocks 24 to 24; the pool has 0 to 23"):
        transfer.offload(tier, [24], HASHES[:1])
    with pytest.raises(ValueError, match="named twice"):
        transfer.reload(tier, HASHES[:2], [3, 3])
    with pytest.raises(ValueError, match="groups is 5; expected 1 to 4"):
        Transfer(pool, transfer.streams, groups=5)
    with pytest.raises(KeyError):
        transfer.offload(HostTier(1 << 20), [0], HASHES[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("groups", [1, 4])
def test_bytes_come_back_right_on_cuda(tier, groups, tmp_path):
    from kvlab.streams import CudaStreams

    with CudaStreams() as streams:
        pool = BlockPool(LAYOUT, 24, device="cuda")
        transfer = Transfer(pool, streams, groups, piece_bytes=1, staging_bytes=1)
        store = make_tier(tier, tmp_path)
        transfer.open(store, FINGERPRINT)
        for turn in range(20):
            store.clear()
            values = torch.randn(12 * 8, pool.rows.shape[1], device="cuda")
            index = pool.group_index(torch.arange(12, device="cuda"), 0, 4)
            torch.cuda._sleep(20_000_000)  # compute is late: copies that do not wait are wrong
            pool.rows[index] = values
            pending = transfer.offload(store, list(range(12)), HASHES)
            pool.rows[index] = 7.0
            assert pending.wait().valid_blocks == 12
            torch.cuda._sleep(20_000_000)
            away = pool.group_index(torch.arange(12, 24, device="cuda"), 0, 4)
            pool.rows[away] = 8.0
            report = transfer.reload(store, HASHES, list(range(12, 24))).wait()
            assert report.valid_blocks == 12
            assert report.device_s > 0
            assert torch.equal(pool.rows[away], values), f"turn {turn}"
