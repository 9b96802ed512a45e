"""A tier holds what it was given, or says that it does not: faults are misses, crashes leave whole files."""

import errno
import os
import random
import re
import stat
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab.fingerprint import Fingerprint
from kvlab.pool import BlockPool, KVLayout
from kvlab.streams import ThreadStreams
from kvlab.tiers import DiskTier, HostTier, LinkTier, TierError, bytes_read_from_device, checksum, file_io, segment
from kvlab.transfer import Transfer

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=8, block_size=4, dtype="fp32")  # 2 KiB blocks
EXTENT = LAYOUT.block_bytes // 2  # two layer groups
FINGERPRINT = Fingerprint("weights", "config", "tokenizer", "rope", "fp32", "block_major")
HASHES = [bytes([i + 1]) * 32 for i in range(16)]
ROOT = Path(__file__).resolve().parent.parent

if sys.platform != "win32":
    import fcntl


class Lab:
    """Eight blocks of known content in a pool of 32, and a transfer in two layer groups.

    `in_place`: files are read into the pool and written from it, without staging.
    """

    def __init__(self, in_place=True, layout=LAYOUT):
        self.streams = ThreadStreams()
        self.streams.in_place = in_place
        self.in_place = in_place
        self.pool = BlockPool(layout, 32)
        self.pool.rows.copy_(torch.randn(self.pool.rows.shape, generator=torch.Generator().manual_seed(3)))
        self.transfer = Transfer(self.pool, self.streams, groups=2)

    def open(self, tier, fingerprint=FINGERPRINT):
        self.transfer.open(tier, fingerprint)
        return tier

    def store(self, tier, first=0, count=8):
        blocks = list(range(first, first + count))
        return self.transfer.offload(tier, blocks, HASHES[first : first + count], source_held=self.in_place).wait()

    def fetch(self, tier, count=8, fingerprint=None):
        return self.transfer.reload(tier, HASHES[:count], list(range(16, 16 + count)), fingerprint).wait()

    def content(self, first, count):
        index = self.pool.group_index(torch.arange(first, first + count), 0, LAYOUT.layers)
        return self.pool.rows[index]

    def right(self, count):
        return torch.equal(self.content(16, count), self.content(0, count))


@pytest.fixture(params=[True, False], ids=["in place", "staged"])
def lab(request):
    lab = Lab(request.param)
    with lab.streams:
        yield lab


@pytest.fixture
def disk(lab, tmp_path):
    tier = lab.open(DiskTier(tmp_path, 1 << 20))
    lab.store(tier)
    return tier


def only_file(tier):
    (path,) = tier.folder.glob("*.kv")
    return path


def extent_offset(path, group, block):
    header, _ = segment.Header.read(path)
    return int(header.offsets[group, block])


def patch(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# Faults: a miss, never an exception, never tried again ----------------------------------------------------------------


def flip_a_byte(path):
    at = extent_offset(path, 1, 3) + 100
    patch(path, at, bytes([path.read_bytes()[at] ^ 1]))


def truncate(path):
    os.truncate(path, extent_offset(path, 1, 3) + 10)


def right_length_wrong_bytes(path):
    patch(path, extent_offset(path, 1, 3), b"\x55" * EXTENT)


def swap_two_payloads(path):
    raw = path.read_bytes()
    a, b = extent_offset(path, 1, 3), extent_offset(path, 1, 5)
    patch(path, a, raw[b : b + EXTENT])
    patch(path, b, raw[a : a + EXTENT])


def swap_two_groups(path):
    raw = path.read_bytes()
    a, b = extent_offset(path, 0, 3), extent_offset(path, 1, 3)
    patch(path, a, raw[b : b + EXTENT])
    patch(path, b, raw[a : a + EXTENT])


@pytest.mark.parametrize("fault", [flip_a_byte, right_length_wrong_bytes, swap_two_payloads, swap_two_groups])
def test_wrong_bytes_on_disk_are_a_miss_from_that_block_on(lab, disk, fault):
    fault(only_file(disk))
    report = lab.fetch(disk)
    assert report.valid_blocks == 3
    assert "block 3" in report.failures[0]
    assert "checksum" in report.failures[0]
    assert lab.right(3)
    assert disk.counters.checksum_failures == 1
    # The segment lied once: it is gone, and nothing is tried again.
    assert not list(disk.folder.glob("*.kv"))
    assert lab.fetch(disk).valid_blocks == 0
    assert disk.counters.checksum_failures == 1
    assert disk.used_bytes == 0
    # Computed again, the same blocks can be stored again.
    assert lab.store(disk).valid_blocks == 8
    assert lab.fetch(disk).valid_blocks == 8
    assert lab.right(8)


def test_without_the_checksum_wrong_bytes_would_be_served(lab, disk, monkeypatch):
    monkeypatch.setattr("kvlab.reload.checksum", lambda extent, block_hash, group: None)
    monkeypatch.setattr("kvlab.tiers.disk._DiskLoad.checksum", lambda self, group, block: None)
    right_length_wrong_bytes(only_file(disk))
    assert lab.fetch(disk).valid_blocks == 8
    assert not lab.right(8)


def test_a_checksum_is_bound_to_block_and_group():
    data = torch.arange(64, dtype=torch.uint8).numpy()
    sums = {checksum(data, block_hash, group) for block_hash in HASHES[:4] for group in range(3)}
    assert len(sums) == 12


def test_a_truncated_file_is_a_short_read_and_a_miss(lab, disk):
    truncate(only_file(disk))
    report = lab.fetch(disk)
    assert report.valid_blocks < 8
    assert "short read" in report.failures[0]
    assert lab.right(report.valid_blocks)
    assert disk.counters.read_failures == 1
    assert lab.fetch(disk).valid_blocks <= report.valid_blocks
    assert disk.counters.read_failures <= 2


def test_a_file_that_is_gone_is_a_miss(lab, disk):
    only_file(disk).unlink()
    report = lab.fetch(disk)
    assert report.valid_blocks == 0
    assert "FileNotFoundError" in report.failures[0]
    assert lab.fetch(disk).failures == ("block 0 of the reload is not in the disk tier",)


def test_a_folder_that_is_gone_is_a_miss_and_then_one_clear_error(lab, disk):
    only_file(disk).unlink()
    disk.folder.rmdir()
    assert lab.fetch(disk).valid_blocks == 0
    with pytest.raises(TierError, match=r"cannot write the disk tier in .*writable folder with free space"):
        lab.store(disk, 8, 2)


def test_permission_lost_is_a_miss(lab, disk, monkeypatch):
    path = only_file(disk)
    path.chmod(0)
    if os.access(path, os.R_OK):  # root may read everything: let the system call refuse instead
        opening = os.open

        def refuse(target, *args, **kwargs):
            if Path(target) == path:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return opening(target, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
    report = lab.fetch(disk)
    assert report.valid_blocks == 0
    assert "PermissionError" in report.failures[0]


def test_an_unreadable_sector_is_a_miss(lab, disk, monkeypatch):
    real = segment.SegmentReader._fill

    def fail_in_the_second_group(self, target, offset, length):
        if offset + length > extent_offset(only_file(disk), 1, 0):
            raise OSError(errno.EIO, "Input/output error")
        real(self, target, offset, length)

    monkeypatch.setattr(segment.SegmentReader, "_fill", fail_in_the_second_group)
    pending = lab.transfer.reload(disk, HASHES[:8], list(range(16, 24)))
    assert pending.wait_group(0) == 8  # the first group has arrived
    assert pending.wait_group(1) == 0  # all groups or nothing
    assert "Input/output error" in pending.wait().failures[0]
    assert disk.counters.read_failures == 1
    assert not disk.contains(HASHES[0], FINGERPRINT)


@pytest.mark.parametrize("codec", [None, "xz"])
def test_every_flipped_byte_of_a_file_is_noticed_or_harmless(lab, tmp_path, codec):
    tier = lab.open(DiskTier(tmp_path, 1 << 20, codec=codec))
    lab.store(tier, count=3)
    whole = only_file(tier).read_bytes()
    rng = random.Random(0)
    header_end = extent_offset(only_file(tier), 0, 0)
    for at in [*rng.sample(range(header_end), 40), *rng.sample(range(header_end, len(whole)), 40)]:
        path = tier.folder / "0.kv"
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        other = lab.open(DiskTier(tmp_path, 1 << 20))
        lab.pool.rows[16 * 8 :] = 0
        report = lab.fetch(other, 3)
        assert lab.right(report.valid_blocks), f"byte {at} flipped"
        other.clear()


def test_a_header_that_changes_after_it_was_indexed_is_found_at_load(lab, disk, tmp_path):
    other = Lab()
    with other.streams:
        foreign = other.open(DiskTier(tmp_path / "b", 1 << 20), replace(FINGERPRINT, weights="others"))
        other.store(foreign)
        only_file(disk).write_bytes(only_file(foreign).read_bytes())
    before = lab.content(16, 8)
    report = lab.fetch(disk)
    assert report.valid_blocks == 0
    assert "weights" in report.failures[0]
    assert torch.equal(lab.content(16, 8), before)  # before anything else is read
    assert not list(disk.folder.glob("*.kv"))


def test_corrupt_host_memory_is_a_miss(lab):
    tier = lab.open(HostTier(1 << 20))
    lab.store(tier)
    tier._slabs[0].memory[5] ^= 1
    report = lab.fetch(tier)
    assert report.valid_blocks == 0
    assert tier.counters.checksum_failures == 1
    assert not tier.contains(HASHES[0], FINGERPRINT)
    assert tier.contains(HASHES[1], FINGERPRINT)  # memory beside it is no worse for it
    assert tier.used_bytes == 7 * LAYOUT.block_bytes


# Files that are read into the pool itself -----------------------------------------------------------------------------

WHOLE_PAGES = KVLayout(layers=4, kv_heads=2, head_dim=64, block_size=16, dtype="fp32")  # 64 KiB: extents of 32 KiB


@pytest.fixture(params=[WHOLE_PAGES, LAYOUT, replace(WHOLE_PAGES, head_dim=66)], ids=["pages", "small", "no pages"])
def direct(request, tmp_path):
    """(lab, tier): sixteen blocks stored, past the page cache where their extents are whole pages; read cold."""
    lab = Lab(layout=request.param)
    with lab.streams:
        tier = lab.open(DiskTier(tmp_path, 1 << 24))
        lab.store(tier, 0, 16)
        tier.drop_pages()
        yield lab, tier


def nothing_passes_staging(lab):
    return all(lane.staging._made == 0 for lane in lab.transfer._lanes.values())


def test_the_pool_begins_at_a_page_so_that_whole_pages_can_be_read_into_it():
    for layout, poison in ((WHOLE_PAGES, False), (LAYOUT, True)):
        pool = BlockPool(layout, 3, poison=poison)
        assert pool.rows.data_ptr() % 4096 == 0
        assert pool.rows.isnan().all() == poison


def test_reads_that_come_short_go_on_where_they_stopped(direct, monkeypatch):
    lab, tier = direct
    real, calls = os.readv, []

    def short(fd, buffers):
        calls.append(len(buffers))
        most = 4096 * 3 if lab.pool.layout is WHOLE_PAGES else 777
        whole = []
        for buffer in buffers:
            whole.append(buffer[:most])
            most -= len(whole[-1])
            if most == 0:
                break
        return real(fd, whole)

    monkeypatch.setattr(os, "readv", short)
    assert lab.fetch(tier, 16).valid_blocks == 16
    assert lab.right(16)
    assert len(calls) > 8
    assert nothing_passes_staging(lab)


def test_more_blocks_than_one_call_takes_are_read_and_written_in_several(tmp_path):
    layout = replace(LAYOUT, layers=1, block_size=2)
    with ThreadStreams() as streams:
        pool, count = BlockPool(layout, 5000), 2500
        pool.rows.copy_(torch.randn(pool.rows.shape))
        transfer = Transfer(pool, streams)
        tier = DiskTier(tmp_path, 1 << 22)
        transfer.open(tier, FINGERPRINT)
        hashes, order = [i.to_bytes(32, "big") for i in range(count)], torch.randperm(5000)
        transfer.offload(tier, order[:count].tolist(), hashes, source_held=True).wait()
        assert transfer.reload(tier, hashes, order[count:].tolist()).wait().valid_blocks == count
        home, away = (pool.rows[pool.group_index(part, 0, 1)] for part in (order[:count], order[count:]))
        assert torch.equal(home, away)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct reads")
@pytest.mark.parametrize("where", ["open", "readv", "writev"])
def test_where_direct_reads_and_writes_are_refused_the_page_cache_serves(direct, monkeypatch, where):
    lab, tier = direct
    real, refused = getattr(os, where), []

    def refuse(what, *args, **kwargs):
        flags = args[0] if where == "open" else fcntl.fcntl(what, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            refused.append(what)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(what, *args, **kwargs)

    monkeypatch.setattr(os, where, refuse)
    if where == "writev":
        tier.clear()
        lab.store(tier, 0, 16)
        tier.drop_pages()
    assert lab.fetch(tier, 16).valid_blocks == 16
    assert lab.right(16)
    assert bool(refused) == (lab.pool.layout is WHOLE_PAGES)


@pytest.mark.parametrize("fault", ["flip", "truncate"])
def test_what_is_wrong_with_a_direct_read_is_a_miss(direct, fault):
    lab, tier = direct
    path = only_file(tier)
    at = extent_offset(path, 1, 5)
    if fault == "flip":
        patch(path, at + 9, bytes([path.read_bytes()[at + 9] ^ 1]))
    else:
        os.truncate(path, at + 9)
    tier.drop_pages()
    report = lab.fetch(tier, 16)
    assert report.valid_blocks == (5 if fault == "flip" else 0)  # a piece that cannot be read is lost as a whole
    assert ("checksum" if fault == "flip" else "short read") in report.failures[0]
    assert lab.right(report.valid_blocks)
    assert nothing_passes_staging(lab)
    assert lab.fetch(tier, 16).valid_blocks == 0


def test_a_file_that_goes_away_while_it_is_read_is_a_miss_from_there_on(direct, monkeypatch):
    lab, tier = direct
    monkeypatch.setattr("kvlab.tiers.disk._SEGMENT_BYTES", 4 * lab.pool.layout.block_bytes)
    tier.clear()
    lab.store(tier, 0, 16)
    paths = [tier._index[block_hash][0].path for block_hash in HASHES]
    real = segment.SegmentReader.read_in_place

    def read_and_remove(self, group, position, extents):
        real(self, group, position, extents)
        paths[8].unlink(missing_ok=True)

    monkeypatch.setattr(segment.SegmentReader, "read_in_place", read_and_remove)
    report = lab.fetch(tier, 16)
    assert report.valid_blocks == 8
    assert "FileNotFoundError" in report.failures[0]
    assert lab.right(8)


def test_blocks_that_are_lost_belong_to_their_owner_at_once(direct, monkeypatch):
    """Whoever has seen that a block failed may reuse it: no read that was under way lands there later."""
    lab, tier = direct
    lab.transfer = Transfer(lab.pool, lab.streams, groups=4)  # three are read ahead, one is asked for after the failure
    tier = lab.open(DiskTier(tier.folder / "four groups", 1 << 24))
    lab.store(tier, 0, 16)
    patch(only_file(tier), extent_offset(only_file(tier), 0, 3), b"wrong")
    real = segment.SegmentReader.read_in_place
    monkeypatch.setattr(segment.SegmentReader, "read_in_place", lambda *args: (time.sleep(0.005), real(*args)))
    pending = lab.transfer.reload(tier, HASHES, list(range(16, 32)))
    assert pending.wait_group(0) == 3
    lost = lab.pool.group_index(torch.arange(19, 32), 0, 4)
    lab.pool.rows[lost] = 5.0
    assert pending.wait().valid_blocks == 3
    assert (lab.pool.rows[lost] == 5.0).all()
    assert lab.right(3)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no direct reads")
def test_asking_whether_a_file_is_in_memory_does_not_bring_it_there(direct):
    _, tier = direct
    path = only_file(tier)
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        assert [file_io.ends_in_memory(file.fileno(), size) for _ in range(5)] == [False] * 5
        file.read()
        assert file_io.ends_in_memory(file.fileno(), size)
        assert not file_io.ends_in_memory(file.fileno(), size + 8192)  # it has been cut since


# Full and read-only disks ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "writev"), reason="needs writev")
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(lab, disk, monkeypatch):
    before = sorted(path.name for path in disk.folder.iterdir())
    used, written, real = disk.used_bytes, 0, os.writev

    def full(fd, buffers):
        nonlocal written
        if written > 3000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += sum(map(len, buffers))
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", full)
    pending = lab.transfer.offload(disk, list(range(8, 16)), HASHES[8:], source_held=lab.in_place)
    for _ in range(2):  # the same answer whenever it is asked
        with pytest.raises(TierError, match=r"cannot write the disk tier in .*: No space left on device"):
            pending.wait()
    assert sorted(path.name for path in disk.folder.iterdir()) == before
    assert disk.used_bytes == used
    assert disk.counters.failed_stores == 1
    monkeypatch.undo()
    assert lab.fetch(disk).valid_blocks == 8


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_real_file_size_limit_is_one_clear_error(tmp_path):
    code = """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        from tests.test_tiers import *
        lab = Lab()
        tier = lab.open(DiskTier(sys.argv[1], 1 << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            lab.store(tier)
        except TierError as error:
            print(error, len(list(tier.folder.iterdir())), tier.used_bytes)
        lab.streams.close()
    """
    out = run_python(code, tmp_path)
    assert "cannot write the disk tier" in out
    assert out.strip().endswith("0 0")


def test_a_folder_that_cannot_be_made_is_one_clear_error(lab, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(TierError, match="cannot open the disk tier"):
        lab.open(DiskTier(tmp_path / "file", 1 << 20))


def test_a_read_only_folder_is_one_clear_error(lab, tmp_path, monkeypatch):
    def refuse(self):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(segment.SegmentWriter, "_create", refuse)
    with pytest.raises(TierError, match="Read-only file system"):
        lab.open(DiskTier(tmp_path, 1 << 20))


# Crashes and other processes ------------------------------------------------------------------------------------------


def run_python(code, *args):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# Forked from one parent, since starting Python and torch takes far longer than the moments that matter.
KILL_WRITERS = """
    import signal
    from tests.test_tiers import *
    rng = random.Random(sys.argv[2])
    for turn in range(25):
        opened, opening = os.pipe()
        child = os.fork()
        if child == 0:
            lab = Lab()
            tier = lab.open(DiskTier(sys.argv[1], 1 << 16))
            os.write(opening, b"!")
            n = 0
            while True:
                n += 1
                hashes = [os.getpid().to_bytes(4, "big") + n.to_bytes(4, "big") + bytes([i] * 24) for i in range(8)]
                lab.transfer.offload(tier, list(range(8)), hashes).wait()
        if turn % 5:  # else it may die before it has opened the tier
            os.read(opened, 1)
        time.sleep(rng.random() * 0.05)
        os.close(opened)
        os.close(opening)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_kill_at_any_moment_leaves_whole_segments_only(lab, tmp_path):
    """Fifty writers, two at a time, killed at random moments of their lives."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: run_python(KILL_WRITERS, tmp_path, seed), range(2)))
    tier = lab.open(DiskTier(tmp_path, 1 << 16))
    assert not list(tier.folder.glob(".tmp-*"))
    paths = list(tier.folder.iterdir())
    assert paths
    for path in paths:
        header, _ = segment.Header.read(path)
        report = lab.transfer.reload(tier, header.hashes, list(range(16, 24))).wait()
        assert report.valid_blocks == 8, report.failures
        assert lab.right(8)
    assert tier.counters.read_failures == tier.counters.checksum_failures == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs file locks")
def test_opening_leaves_the_temporaries_of_live_writers_alone(lab, tmp_path):
    tier = lab.open(DiskTier(tmp_path, 1 << 20))
    writer = segment.SegmentWriter(tier.folder, segment.Header.new({}, (16, 16), HASHES[:1], None))
    writer.write(0, 0, np.zeros((1, 16), np.uint8), [0])
    (tier.folder / ".tmp-dead").write_bytes(b"half a segment")
    lab.open(DiskTier(tmp_path, 1 << 20))
    assert len(list(tier.folder.glob(".tmp-*"))) == 1
    assert not (tier.folder / ".tmp-dead").exists()
    writer.write(1, 0, np.zeros((1, 16), np.uint8), [0])
    assert writer.path.exists()
    writer.abandon()


def test_a_second_process_uses_the_files_and_sees_what_is_added(lab, disk, tmp_path):
    code = """
        from tests.test_tiers import *
        lab = Lab()
        tier = lab.open(DiskTier(sys.argv[1], 1 << 20))
        print(lab.fetch(tier).valid_blocks, lab.right(8))
        lab.store(tier, 8, 4)
        lab.streams.close()
    """
    assert run_python(code, tmp_path).split() == ["8", "True"]
    assert not disk.contains(HASHES[8], FINGERPRINT)
    disk.refresh()
    assert disk.contains(HASHES[8], FINGERPRINT)
    report = lab.transfer.reload(disk, HASHES[8:12], [16, 17, 18, 19]).wait()
    assert report.valid_blocks == 4
    assert torch.equal(lab.content(16, 4), lab.content(8, 4))


def test_files_survive_reopening_and_are_private(lab, disk, tmp_path):
    again = lab.open(DiskTier(tmp_path, 1 << 20))
    assert lab.fetch(again).valid_blocks == 8
    assert lab.right(8)
    if sys.platform != "win32":
        assert stat.S_IMODE(only_file(disk).stat().st_mode) == 0o600
        assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700


def test_foreign_files_in_the_folder_are_ignored_and_kept(lab, disk, tmp_path):
    whole = only_file(disk).read_bytes()
    (disk.folder / "notes.kv").write_bytes(b"not ours")
    (disk.folder / "later.kv").write_bytes(whole[:8] + (99).to_bytes(4, "little") + whole[12:])
    (disk.folder / "cut.kv").write_bytes(whole[:-100])
    (disk.folder / "cut_header.kv").write_bytes(whole[:300])
    again = lab.open(DiskTier(tmp_path, 1 << 20))
    assert lab.fetch(again).valid_blocks == 8
    assert (disk.folder / "notes.kv").exists()
    assert (disk.folder / "later.kv").exists()
    assert not (disk.folder / "cut.kv").exists()  # ours, and of no use to anybody
    assert not (disk.folder / "cut_header.kv").exists()


# The fingerprint ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize(
    "field", ["weights", "tokenizer", "rope", "kv_dtype", "block_layout", "adapter", "tp_rank", "salt"]
)
def test_another_fingerprint_gets_nothing_and_is_told_which_field_differs(lab, tmp_path, kind, field):
    tier = lab.open(HostTier(1 << 20) if kind == "host" else DiskTier(tmp_path, 1 << 20))
    lab.store(tier)
    other = replace(FINGERPRINT, **{field: 1 if field == "tp_rank" else "other"})
    assert not tier.contains(HASHES[0], other)
    assert tier.differences(other) == [field]
    assert tier.differences(FINGERPRINT) == []
    assert lab.fetch(tier, fingerprint=other).valid_blocks == 0
    with pytest.raises(KeyError, match="under this fingerprint"):
        tier.load(HASHES[:1], other)


def test_blocks_cut_otherwise_are_not_used(lab, disk, tmp_path):
    transfer = Transfer(lab.pool, lab.streams, groups=4)
    again = DiskTier(tmp_path, 1 << 20)
    transfer.open(again, FINGERPRINT)
    assert not again.contains(HASHES[0], FINGERPRINT)
    assert again.differences(FINGERPRINT) == ["extents"]
    assert again.used_bytes == disk.used_bytes  # they count against the capacity all the same
    for tier in (disk, lab.open(HostTier(1 << 20))):
        with pytest.raises(ValueError, match=r"is open for .*extents"):
            transfer.open(tier, FINGERPRINT)


# Capacity, eviction, age ----------------------------------------------------------------------------------------------


def test_the_host_tier_evicts_the_least_recently_used_tail_first(lab):
    tier = lab.open(HostTier(8 * LAYOUT.block_bytes))
    lab.store(tier, 0, 4)
    lab.store(tier, 4, 4)
    lab.fetch(tier, 4)  # the first chain is used
    assert tier.victims(2 * LAYOUT.block_bytes) == [HASHES[7], HASHES[6]]
    lab.store(tier, 8, 2)
    assert [i for i in range(10) if not tier.contains(HASHES[i], FINGERPRINT)] == [6, 7]
    assert tier.counters.evicted_blocks == 2
    assert tier.used_bytes == tier.capacity_bytes


def test_the_disk_tier_evicts_the_least_recently_used_segment(lab, tmp_path):
    tier = lab.open(DiskTier(tmp_path, 3 * (4096 + 4 * LAYOUT.block_bytes)))
    for first in (0, 4, 8):
        lab.store(tier, first, 4)
    lab.fetch(tier, 4)
    assert set(tier.victims(1)) == set(HASHES[4:8])
    lab.store(tier, 12, 4)
    assert [i for i in range(16) if not tier.contains(HASHES[i], FINGERPRINT)] == [4, 5, 6, 7]
    assert len(list(tier.folder.iterdir())) == 3
    assert tier.used_bytes == sum(path.stat().st_size for path in tier.folder.iterdir())
    again = lab.open(DiskTier(tmp_path, tier.capacity_bytes))
    assert HASHES[0] not in again.victims(1)  # how recently it was used outlives the process


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_what_is_being_read_is_not_evicted(lab, tmp_path, kind):
    size = 8 * LAYOUT.block_bytes
    tier = lab.open(HostTier(size) if kind == "host" else DiskTier(tmp_path, size + 4096))
    lab.store(tier)
    pending = lab.transfer.reload(tier, HASHES[:8], list(range(16, 24)))
    assert lab.store(tier, 8, 2).valid_blocks == 0
    tier.clear()
    assert pending.wait().valid_blocks == 8
    assert lab.right(8)
    assert lab.store(tier, 8, 2).valid_blocks == 2


def test_a_block_dropped_while_it_is_read_frees_its_slot_once(lab):
    tier = lab.open(HostTier(8 * LAYOUT.block_bytes))
    lab.store(tier)
    pending = lab.transfer.reload(tier, HASHES[:8], list(range(16, 24)))
    tier.drop(HASHES[0])
    assert tier.used_bytes == 8 * LAYOUT.block_bytes
    pending.wait()
    assert tier.used_bytes == 7 * LAYOUT.block_bytes
    tier.clear()
    assert tier.used_bytes == 0
    assert lab.store(tier).valid_blocks == 8


def test_host_memory_is_kept_in_powers_of_two_and_reused(lab):
    tier = lab.open(HostTier(100 * LAYOUT.block_bytes))
    for _ in range(50):
        lab.store(tier)
        assert lab.fetch(tier).valid_blocks == 8
        tier.clear()
    assert [slab.memory.numel() for slab in tier._slabs] == [64 * LAYOUT.block_bytes]
    assert tier.used_bytes == 0


def test_old_blocks_are_not_used(lab, tmp_path):
    now_s = 0.0
    tier = lab.open(DiskTier(tmp_path, 1 << 20, ttl_s=60, clock=lambda: now_s))
    lab.store(tier)
    assert lab.fetch(tier).valid_blocks == 8
    now_s = 61.0
    assert lab.fetch(tier).valid_blocks == 0
    assert tier.counters.expired_blocks == 8
    assert not list(tier.folder.iterdir())


def test_many_round_trips_leave_no_files_memory_or_descriptors(lab, tmp_path):
    tier = lab.open(DiskTier(tmp_path, 1 << 16))
    descriptors = Path("/proc/self/fd")
    lab.store(tier)
    lab.fetch(tier)
    before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    for _ in range(100):
        tier.clear()
        lab.store(tier)
        lab.fetch(tier)
    assert len(list(tier.folder.iterdir())) == 1
    assert before == (len(list(descriptors.iterdir())) if descriptors.exists() else 0)
    assert sum(lane.staging._made for lane in lab.transfer._lanes.values()) <= 4


def test_wrong_sizes_are_refused(lab, tmp_path):
    for make in (HostTier, lambda n: DiskTier(tmp_path, n)):
        for wrong in (0, 1e9, float("nan"), True, "1GiB", None, tmp_path):
            with pytest.raises(ValueError, match=re.escape(f"capacity_bytes is {wrong!r}; expected a positive int")):
                make(wrong)
        assert type(make(np.int64(4096)).capacity_bytes) is int
    with pytest.raises(ValueError, match="holds no block of 2048 bytes"):
        lab.open(HostTier(2047))
    with pytest.raises(ValueError, match="codec is 'zip'"):
        DiskTier(tmp_path, 1, codec="zip")
    with pytest.raises(ValueError, match="ttl_s is 0"):
        DiskTier(tmp_path, 1, ttl_s=0)
    with pytest.raises(ValueError, match="ttl_s is '60'"):
        HostTier(1, ttl_s="60")
    for wrong in (0, float("nan"), "1", None):
        with pytest.raises(ValueError, match=f"gb_per_s is {wrong!r}"):
            LinkTier(HostTier(1), wrong)
    for wrong in (-1.0, float("nan"), "0", None):
        with pytest.raises(ValueError, match=f"latency_s is {wrong!r}"):
            LinkTier(HostTier(1), 1.0, wrong)


# Cold reads, slow tiers, emulated links -------------------------------------------------------------------------------


def test_a_cold_reload_is_proven_by_bytes_read_from_the_device(lab, disk):
    if bytes_read_from_device() is None or not disk.drop_pages():
        pytest.skip("this system does not say what was read from the device")
    before = bytes_read_from_device()
    assert lab.fetch(disk).valid_blocks == 8
    if bytes_read_from_device() == before:
        pytest.skip("the temporary folder is not on a device")
    assert bytes_read_from_device() - before >= 8 * LAYOUT.block_bytes


@pytest.mark.parametrize("read_ahead_bytes", [0, 1 << 30])
@pytest.mark.parametrize("cold", [False, True])
def test_whole_pages_pass_the_page_cache_and_are_the_same_bytes(tmp_path, monkeypatch, cold, read_ahead_bytes):
    """Extents of whole pages are written and read directly where the file system can; others go through the cache."""
    monkeypatch.setattr(segment, "_READ_AHEAD_BYTES", read_ahead_bytes)
    for head_dim in (64, 72):  # extents of 16 KiB, and of 18 KiB: not whole pages
        layout = KVLayout(layers=4, kv_heads=2, head_dim=head_dim, block_size=8, dtype="fp32")
        with ThreadStreams() as streams:
            pool = BlockPool(layout, 32)
            pool.rows.copy_(torch.randn(pool.rows.shape))
            transfer = Transfer(pool, streams, groups=2, piece_bytes=1 << 16)
            tier = DiskTier(tmp_path / str(head_dim), 1 << 24)
            transfer.open(tier, FINGERPRINT)
            transfer.offload(tier, list(range(16)), HASHES).wait()
            for first, stop in ((0, 16), (0, 3)):
                if cold:
                    tier.drop_pages()
                elif head_dim == 72:
                    only_file(tier).read_bytes()
                pool.rows[pool.group_index(torch.arange(16, 32), 0, 4)] = 0
                report = transfer.reload(tier, HASHES[first:stop], list(range(16, 16 + stop))).wait()
                assert report.valid_blocks == stop
                found, expected = (pool.group_index(torch.arange(at, at + stop), 0, 4) for at in (16, 0))
                assert torch.equal(pool.rows[found], pool.rows[expected])


def test_xz_blocks_take_less_room_and_come_back_the_same(lab, tmp_path):
    index = lab.pool.group_index(torch.arange(8), 0, LAYOUT.layers)
    lab.pool.rows[index] = torch.randint(0, 3, (len(index), lab.pool.rows.shape[1])).float()
    tier = lab.open(DiskTier(tmp_path, 1 << 20, codec="xz"))
    lab.store(tier)
    assert tier.name == "xz"
    assert tier.used_bytes == only_file(tier).stat().st_size < 4096 + 4 * LAYOUT.block_bytes
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)


def test_damaged_xz_data_is_a_miss(lab, tmp_path):
    tier = lab.open(DiskTier(tmp_path, 1 << 20, codec="xz"))
    lab.store(tier)
    patch(only_file(tier), extent_offset(only_file(tier), 0, 2), b"\0" * 50)
    report = lab.fetch(tier)
    assert report.valid_blocks <= 2
    assert "xz" in report.failures[0]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_an_emulated_link_delivers_no_sooner_than_it_could_and_not_much_later(lab, tmp_path, kind):
    size = 8 * LAYOUT.block_bytes
    inner = HostTier(1 << 20) if kind == "host" else DiskTier(tmp_path, 1 << 20)
    tier = lab.open(LinkTier(inner, gb_per_s=size / 0.04 / 1e9, latency_s=0.01))
    assert tier.emulated
    assert "emulated" in tier.name
    stored = lab.store(tier)
    loaded = lab.fetch(tier)
    for report in (stored, loaded):
        assert report.emulated
        assert 0.05 <= report.wall_s < 0.5
    assert lab.right(8)


def test_transfers_at_the_same_time_share_an_emulated_link(lab):
    size = 8 * LAYOUT.block_bytes
    tier = lab.open(LinkTier(HostTier(1 << 20), gb_per_s=size / 0.04 / 1e9))
    lab.store(tier)
    began = time.perf_counter()
    first = lab.transfer.reload(tier, HASHES[:8], list(range(16, 24)))
    second = lab.transfer.reload(tier, HASHES[:8], list(range(24, 32)))
    assert second.load.pieces[-1].due_s >= began + 0.08
    assert not first.done()
    second.wait()
    assert time.perf_counter() - began >= 0.08
    first.wait()


def test_a_group_arrives_before_the_next_one_on_a_slow_link(lab):
    size = 8 * LAYOUT.block_bytes
    tier = lab.open(LinkTier(HostTier(1 << 20), gb_per_s=size / 0.2 / 1e9))
    lab.store(tier)
    began = time.perf_counter()
    pending = lab.transfer.reload(tier, HASHES[:8], list(range(16, 24)))
    assert pending.wait_group(0) == 8
    first = time.perf_counter() - began
    pending.wait()
    assert 0.1 <= first < 0.18
    assert time.perf_counter() - began >= 0.2
