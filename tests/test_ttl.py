"""A time to live: what is too old is a miss, its bytes are given back, and no clock makes a block immortal."""

import os

import pytest
from test_tiers import FINGERPRINT, HASHES, LAYOUT, Lab, run_python

from kvlab.tiers import DiskTier, HostTier, LinkTier
from kvlab.tiers.segment import Header

TTL_S = 60.0


class Clock:
    """Stands still until it is told otherwise; `tick_s` passes with each look at it."""

    def __init__(self, now_s=1000.0, tick_s=0.0):
        self.now_s, self.tick_s = now_s, tick_s

    def __call__(self):
        self.now_s += self.tick_s
        return self.now_s


@pytest.fixture(params=["host", "disk", "linked"])
def aging(request, tmp_path):
    """A lab, a tier whose blocks live for 60 s, and the clock by which they do."""
    clock = Clock()
    if request.param == "disk":
        tier = DiskTier(tmp_path, 1 << 20, ttl_s=TTL_S, clock=clock)
    else:
        tier = HostTier(1 << 20, ttl_s=TTL_S, clock=clock)
    if request.param == "linked":
        tier = LinkTier(tier, 10.0)
    lab = Lab()
    with lab.streams:
        yield lab, lab.open(tier), clock


def test_a_block_lives_until_its_time_is_over_and_is_a_miss_from_then_on(aging):
    lab, tier, clock = aging
    lab.store(tier)
    clock.now_s += TTL_S
    assert tier.contains(HASHES[0], FINGERPRINT)
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)
    assert tier.counters.expired_blocks == 0
    clock.now_s += 1
    assert not tier.contains(HASHES[0], FINGERPRINT)
    assert lab.fetch(tier).valid_blocks == 0
    assert tier.counters.expired_blocks == 8


def test_using_a_block_does_not_make_it_younger(aging):
    lab, tier, clock = aging
    lab.store(tier)
    for _ in range(4):
        clock.now_s += 20
        lab.fetch(tier)
    assert lab.fetch(tier).valid_blocks == 0


def test_room_of_old_blocks_comes_back_with_the_next_load(aging):
    lab, tier, clock = aging
    lab.store(tier)
    clock.now_s += TTL_S + 1
    assert tier.used_bytes >= 8 * LAYOUT.block_bytes
    lab.fetch(tier)
    assert tier.used_bytes == 0


def test_room_of_old_blocks_comes_back_with_the_next_store(aging):
    lab, tier, clock = aging
    lab.store(tier)
    used = tier.used_bytes
    clock.now_s += TTL_S + 1
    lab.store(tier, first=8)
    assert tier.used_bytes == used
    assert tier.counters.expired_blocks == 8
    assert tier.counters.evicted_blocks == 0


def test_a_block_stored_again_begins_a_new_life(aging):
    lab, tier, clock = aging
    lab.store(tier)
    clock.now_s += TTL_S + 1
    assert lab.store(tier).valid_blocks == 8
    clock.now_s += TTL_S - 1
    assert lab.fetch(tier).valid_blocks == 8
    assert lab.right(8)


def test_only_what_is_too_old_goes(aging):
    lab, tier, clock = aging
    lab.store(tier, count=4)
    clock.now_s += 40
    lab.store(tier)  # the second half of the eight
    clock.now_s += 40
    assert [tier.contains(h, FINGERPRINT) for h in HASHES[:8]] == [False] * 4 + [True] * 4
    lab.fetch(tier)
    assert tier.counters.expired_blocks == 4


@pytest.mark.parametrize("looks", range(1, 20))
def test_time_that_runs_out_during_a_reload_costs_blocks_and_no_exception(aging, looks):
    """Each look at the clock takes 1 s, so that the time is over after any number of them."""
    lab, tier, clock = aging
    lab.store(tier)
    clock.now_s += TTL_S - looks
    clock.tick_s = 1.0
    report = lab.fetch(tier)
    assert report.valid_blocks == min(looks, 8)
    assert lab.right(report.valid_blocks)


def test_a_block_that_is_being_read_arrives_although_its_time_runs_out(aging):
    lab, tier, clock = aging
    lab.store(tier)
    pending = lab.transfer.reload(tier, HASHES[:8], list(range(16, 24)))
    clock.now_s += TTL_S + 1
    lab.store(tier, first=8)
    assert pending.wait().valid_blocks == 8
    assert lab.right(8)
    lab.fetch(tier)
    assert tier.used_bytes <= 8 * LAYOUT.block_bytes + 4096, "the old ones have gone once nobody read them"


@pytest.mark.parametrize("back_s", [1.0, 59.0, 61.0, 1e9, float("nan")])
def test_a_clock_that_goes_back_makes_no_block_immortal(aging, back_s):
    lab, tier, clock = aging
    lab.store(tier)
    clock.now_s -= back_s
    assert lab.fetch(tier).valid_blocks == (8 if back_s < TTL_S else 0)
    clock.now_s = 1000.0 - back_s + 2 * TTL_S
    assert lab.fetch(tier).valid_blocks == 0, "no block is used for longer than twice its time"
    assert tier.used_bytes == 0
    clock.tick_s, clock.now_s = 0.0, 1000.0
    assert lab.store(tier).valid_blocks == 8
    assert lab.fetch(tier).valid_blocks == 8


def test_without_a_time_to_live_nothing_is_too_old(tmp_path):
    lab, clock = Lab(), Clock()
    with lab.streams:
        for tier in (HostTier(1 << 20, clock=clock), DiskTier(tmp_path, 1 << 20, clock=clock)):
            lab.open(tier)
            lab.store(tier)
            clock.now_s += 1e12
            assert lab.fetch(tier).valid_blocks == 8


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan")])
def test_a_time_to_live_that_is_none_is_refused(tmp_path, ttl_s):
    for make in (lambda: HostTier(1, ttl_s=ttl_s), lambda: DiskTier(tmp_path, 1, ttl_s=ttl_s)):
        with pytest.raises(ValueError, match=f"ttl_s is {ttl_s}; expected a positive number"):
            make()


# On disk: the age outlives the process --------------------------------------------------------------------------------


def test_the_age_is_that_of_the_bytes_whatever_became_of_the_file(tmp_path):
    """Reading a file sets its time (how recently it was used), and so does copying it; neither makes it young."""
    lab, clock = Lab(), Clock(now_s=1e9)
    with lab.streams:
        first = lab.open(DiskTier(tmp_path, 1 << 20, ttl_s=TTL_S, clock=clock))
        lab.store(first)
        (path,) = first.folder.glob("*.kv")
        assert Header.read(path)[0].created == 1e9
        clock.now_s += TTL_S
        again = lab.open(DiskTier(tmp_path, 1 << 20, ttl_s=TTL_S, clock=clock))
        assert lab.fetch(again).valid_blocks == 8
        os.utime(path)
        clock.now_s += 1
        last = lab.open(DiskTier(tmp_path, 1 << 20, ttl_s=TTL_S, clock=clock))
        assert not path.exists(), "opening sweeps"
        assert last.counters.expired_blocks == 8
        # The tier that was open all along reads what is gone as a miss.
        assert lab.fetch(again).valid_blocks == 0
        assert again.counters.read_failures == 0


def test_another_process_finds_what_is_young_and_nothing_that_is_old(tmp_path):
    lab, code = Lab(), """
        from tests.test_tiers import *
        lab = Lab()
        for ttl_s in (3600, 1e-9):
            tier = lab.open(DiskTier(sys.argv[1], 1 << 20, ttl_s=ttl_s))
            print(lab.fetch(tier).valid_blocks, tier.counters.expired_blocks)
        lab.streams.close()
    """  # fmt: skip
    with lab.streams:
        lab.store(lab.open(DiskTier(tmp_path, 1 << 20)))
    assert run_python(code, tmp_path).split() == ["8", "0", "0", "8"]


def test_a_label_is_kept_with_the_blocks_and_decides_nothing(tmp_path):
    lab = Lab()
    with lab.streams:
        named = lab.open(DiskTier(tmp_path, 1 << 20, label="a model"))
        lab.store(named)
        (path,) = named.folder.glob("*.kv")
        assert Header.read(path)[0].label == "a model"
        other = lab.open(DiskTier(tmp_path, 1 << 20, label="another name"))
        assert lab.fetch(other).valid_blocks == 8
        assert lab.right(8)
