"""Ten thousand times away and back: pool, tiers, files and the process are as they were."""

import gc

import psutil
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab import scheduler
from kvlab.engine import Engine
from kvlab.tiers import DiskTier, HostTier

CYCLES, WARM_UP = 10_000, 1_000


def test_ten_thousand_cycles_leave_everything_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(scheduler, "_DECISIONS_KEPT", 100)  # the log is bounded, but it fills up for longer than this
    model = tiny_model(kv_heads=4)
    block_bytes = model.layout(16).block_bytes
    host, disk = HostTier(6 * block_bytes), DiskTier(tmp_path, 40 * block_bytes)
    process, seen, resident_bytes = psutil.Process(), set(), {}
    with Engine(model, 8, 16, [host, disk], poison=True, groups=1) as engine:
        agents = [engine.submit(text(33, seed=n), 1) for n in range(7)]
        engine.run()
        for cycle in range(1, CYCLES + 1):
            request = engine.branch(agents[cycle % 7])
            engine.offload(request)
            engine.resume(request, [cycle % 50], 1)
            engine.run()
            if cycle % 500 == 0:
                check_tokens(model, request, [35])
            engine.pause(request)
            engine.cancel(request)
            if cycle % 100 == 0:
                host.clear()  # so that there is something to store again
            if cycle % WARM_UP == 0:
                for agent in agents:
                    engine.offload(agent)
                engine.evict(100)
                engine.executor.drain()
                engine.check_integrity()
                gc.collect()
                resident_bytes[cycle] = process.memory_info().rss
                open_files = process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
                seen.add((engine.scheduler.allocator.free_blocks, engine.metrics()["quarantined_blocks"], open_files))
                assert not engine.executor.transfer.under_way
                assert not engine.executor._stores
                assert not engine.executor._storing
                assert disk.used_bytes <= disk.capacity_bytes
                assert len(list(disk.folder.iterdir())) <= 40
        metrics = engine.metrics()
    assert metrics["loads"] > 0.9 * CYCLES  # the rest found the blocks in the pool
    assert metrics["failed_loads"] == 0
    assert len(seen) == 1
    assert next(iter(seen))[:2] == (8, 0)
    # Should each cycle leave one block behind, these would be nine times as many bytes.
    assert resident_bytes[CYCLES] - resident_bytes[WARM_UP] < (CYCLES - WARM_UP) * block_bytes / 9
