"""A custom tier that raises what no tier may: a miss or a failed store, counted and logged, never an end."""

import logging

import pytest
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.tiers import DiskTier, HostTier

BLOCK = tiny_model().layout(4).block_bytes
GIVEN = ("publish", "abandon", "write", "seal")  # what a store is asked for
READ = ("read", "read_in_place", "lost", "checksum", "close")  # what a load is asked for


def raising(kind):
    """A tier of `kind` that raises `error` instead of doing what `wrong` names, the first `times` times."""

    class Raising(kind):
        wrong, error, times = "", OSError, 10**9

        def __init__(self, *args):
            super().__init__(*args)
            for name in ("touch", "drop", "look_up", "contains", "victims"):
                setattr(self, name, self.instead(name, getattr(self, name)))

        def instead(self, name, method):
            def call(*args, **kwargs):
                # What gives something back does so first, or the test itself would leak.
                done = method(*args, **kwargs) if name in ("abandon", "close", "drop") else None
                if self.wrong == name and self.times > 0:
                    self.times -= 1
                    raise self.error(f"{name} went wrong")
                return done if name in ("abandon", "close", "drop") else method(*args, **kwargs)

            return call

        def reserve(self, *args, **kwargs):
            return self.spoilt(self.instead("reserve", super().reserve)(*args, **kwargs), GIVEN)

        def load(self, *args, **kwargs):
            return self.spoilt(self.instead("load", super().load)(*args, **kwargs), READ)

        def spoilt(self, part, names):
            for name in names:
                setattr(part, name, self.instead(name, getattr(part, name)))
            return part

    return Raising


def make_tiers(kind, folder):
    if kind == "host above a disk":
        return [raising(HostTier)(12 * BLOCK), DiskTier(folder, 1 << 20)]
    return [raising(HostTier)(1 << 20) if kind == "host" else raising(DiskTier)(folder, 1 << 20)]


@pytest.mark.parametrize("kind", ["host", "disk", "host above a disk"])
@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyError])
@pytest.mark.parametrize("wrong", ["touch", "drop", "look_up", "contains", "victims", "reserve", "load", *GIVEN, *READ])
def test_whatever_a_tier_raises_every_request_gets_its_tokens_and_nothing_leaks(tmp_path, kind, error, wrong):
    tiers, generated = make_tiers(kind, tmp_path), {}

    def heard(request, _token):
        generated.setdefault(request, set()).add(len(request.tokens) - 1)

    with Engine(tiny_model(), 20, 4, tiers, poison=True, groups=2) as engine:
        tiers[0].error = error
        requests = [engine.submit(text(40, seed), 2, on_token=heard) for seed in range(3)]
        for place, request in enumerate(requests):
            engine.run()
            engine.pause(request)
            engine.offload(request)
            engine.executor.drain()
            tiers[0].wrong = wrong if place else ""
        for turn in (2, 3):  # the second when all is well again
            for request in requests:
                engine.resume(request, [turn], 2)
                engine.run()
                engine.check_integrity()
                engine.offload(request)
            tiers[0].wrong = ""
        for request in requests:
            assert request.state == "finished"
            assert len(generated[request]) == 6
            check_tokens(engine.model, request, generated[request])
            engine.cancel(request)
        engine.evict(100)
        engine.executor.drain()
        engine.check_integrity()
        assert engine.metrics()["free_blocks"] == 20
        assert not engine.executor.transfer.under_way
        for tier in tiers:
            tier.clear()
            assert tier.used_bytes == 0


def away(tier):
    """An engine, and a request that is in `tier` alone."""
    engine = Engine(tiny_model(), 20, 4, [tier], poison=True, groups=2)
    request = engine.submit(text(40), 1)
    engine.run()
    engine.offload(request)
    engine.executor.drain()
    return engine, request


@pytest.mark.parametrize("wrong", ["touch", "load", "read", "lost", "checksum"])
def test_a_load_that_raises_is_a_failed_load_counted_as_a_defect_and_logged_with_its_cause(tmp_path, wrong, caplog):
    tier = raising(HostTier if wrong in ("touch", "load") else DiskTier)
    tier = tier(1 << 20) if issubclass(tier, HostTier) else tier(tmp_path, 1 << 20)
    engine, request = away(tier)
    with engine, caplog.at_level(logging.WARNING, "kvlab"):
        tier.wrong, tier.error = "read_in_place" if wrong == "read" else wrong, RuntimeError
        engine.resume(request, [1], 2)
        engine.run()
        check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))
        metrics = engine.metrics()
        assert metrics["loads"] == metrics["failed_loads"] == 1
        assert metrics["hit_tokens"].get(tier.name, 0) == 0
        assert metrics["tiers"][tier.name]["defects"] == 1
        assert metrics["tiers"][tier.name]["read_failures"] == 1
        assert f'kvlab_tier_defects_total{{tier="{tier.name}"}} 1' in engine.prometheus()
        (record,) = caplog.records
        assert "went wrong" in record.getMessage()
        assert record.exc_info


def test_a_tier_that_goes_on_like_that_does_not_fill_the_log(caplog):
    engine, request = away(raising(HostTier)(1 << 20))
    (tier,) = engine.tiers
    with engine, caplog.at_level(logging.WARNING, "kvlab"):
        tier.wrong, tier.error = "reserve", RuntimeError
        for _ in range(17):  # the first turn completes no block
            engine.resume(request, [1], 1)
            engine.run()
            engine.offload(request)
        assert tier.counters.defects == tier.counters.failed_stores == 16
        assert len(caplog.records) == 5  # no. 1, 2, 4, 8, 16


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_store_one_of_whose_writes_raises_is_not_published_though_it_can_be_sealed(error):
    tier = raising(HostTier)(1 << 20)
    tier.wrong, tier.error, tier.times = "write", error, 1
    engine, request = away(tier)
    with engine:
        assert tier.counters.failed_stores == 1
        assert tier.counters.stored_blocks == tier.used_bytes == 0
        assert not tier.contains(request.hashes[0], engine.model.fingerprint(4))


def test_a_write_that_raises_does_not_spoil_the_stores_that_use_its_staging_next(tmp_path):
    tier = raising(DiskTier)(tmp_path, 1 << 20)
    tier.wrong, tier.times = "write", 1
    engine, request = away(tier)
    with engine:
        for turn in range(3):
            engine.resume(request, [turn], 2)
            engine.run()
            engine.offload(request)
            engine.executor.drain()
        assert tier.counters.failed_stores == 1
        assert tier.counters.stored_blocks >= 10
