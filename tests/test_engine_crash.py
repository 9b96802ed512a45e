"""Killed at any moment of an offload, an engine leaves whole blocks, for those that are of the same kind."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.fingerprint import block_hashes
from kvlab.loading import load_model
from kvlab.model import Model
from kvlab.tiers import DiskTier, segment

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = 100  # what the killed ones offload, by seed, so that the survivors can tell what a block should hold
CAPACITY_BYTES = 1 << 20  # about forty prompts: there is eviction, too

# Forked from one parent, since starting Python and torch takes far longer than the moments that matter.
KILL_ENGINES = """
    import os, random, signal, sys, time
    sys.path.insert(0, "tests")
    import torch
    from test_engine_crash import *
    torch.set_num_threads(1)
    rng = random.Random(int(sys.argv[2]))
    tiny_model().fingerprint(4)
    for turn in range(16):
        opened, opening = os.pipe()
        child = os.fork()
        if child == 0:
            engine = an_engine(sys.argv[1])
            os.write(opening, b"!")
            while True:
                request = engine.submit(text(40, seed=rng.randrange(PROMPTS)), 1)
                engine.run()
                engine.offload(request)
                os.write(opening, b"!")
        for _ in range(rng.randrange(6)):  # none: it may die before it has opened the tier
            os.read(opened, 1)
        time.sleep(rng.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(opened)
        os.close(opening)
        rng.seed(turn + 1000 * int(sys.argv[2]))  # each child draws other prompts
"""
USE_THEM = """
    import sys
    sys.path.insert(0, "tests")
    from test_engine_crash import *
    with an_engine(sys.argv[1]) as engine:
        print(*use(engine, map(int, sys.argv[2:])))
"""


def an_engine(folder, model=None):
    return Engine(model or tiny_model(), 24, 4, [DiskTier(folder, CAPACITY_BYTES)], poison=True, groups=2)


def use(engine, seeds):
    """(tokens from disk, failed loads) after each prompt has come back; its tokens are those of a run without cache."""
    for seed in seeds:
        request = engine.submit([*text(40, seed=seed), 1], 3)
        engine.run()
        check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))
        engine.cancel(request)
        engine.check_integrity()
    metrics = engine.metrics()
    return metrics["hit_tokens"].get("disk", 0), metrics["failed_loads"]


def run_python(code, *args):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_an_engine_that_is_killed_while_it_offloads_leaves_only_whole_blocks(tmp_path):
    """Thirty-two engines, two at a time, killed at random moments of their lives."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: run_python(KILL_ENGINES, tmp_path, seed), range(2)))
    with an_engine(tmp_path) as engine:  # opening clears what the dead have left
        folder = engine.tiers[0].folder
        files = list(folder.iterdir())
        assert files
        assert all(file.suffix == ".kv" for file in files)
        stored = {block_hash for file in files for block_hash in segment.Header.read(file)[0].hashes}
        fingerprint, expected = engine.model.fingerprint(4), {}
        for seed in range(PROMPTS):
            held = [block_hash in stored for block_hash in block_hashes(fingerprint, text(40, seed=seed), 4)]
            if held[0]:
                expected[seed] = [*held, False].index(False) * 4
        assert len(expected) > 5
        assert use(engine, expected) == (sum(expected.values()), 0)
        counters = engine.tiers[0].counters
        assert counters.checksum_failures == counters.read_failures == 0
    some = list(expected)[:4]  # reading makes them the most recently used: the files that were there still are
    hits, failed = map(int, run_python(USE_THEM, tmp_path, *some).split())
    assert (hits, failed) == (sum(expected[seed] for seed in some), 0)


def changed(kind, monkeypatch):
    """`tiny_model` with one thing different that decides about the bytes, or stands for what does."""
    if kind == "dtype":
        return load_model(tiny_model().arch, dtype="fp32", seed=3)
    if kind == "tokenizer":
        other = replace(tiny_model())
        other.__dict__["tokenizer"] = type("Another", (), {"digest": "of another vocabulary"})()
        return other
    real = Model.fingerprint
    field = {
        "TP rank": {"tp_rank": 1, "tp_size": 2},
        "KV scales": {"kv_scales": "s"},
        "position": {"first_position": 4},
    }
    monkeypatch.setattr(Model, "fingerprint", lambda *args, **kwargs: replace(real(*args, **kwargs), **field[kind]))
    return tiny_model()


@pytest.mark.parametrize(
    ("kind", "differing"),
    [
        ("dtype", ["extents", "kv_dtype", "weights"]),
        ("tokenizer", ["tokenizer"]),
        ("TP rank", ["tp_rank", "tp_size"]),
        ("KV scales", ["kv_scales"]),
        ("position", ["first_position"]),
    ],
)
def test_another_kind_of_engine_gets_none_of_the_blocks_and_is_told_why(tmp_path, monkeypatch, kind, differing):
    """Besides model, adapter, RoPE, layout and salt: see test_engine."""
    with an_engine(tmp_path) as first:
        request = first.submit(text(40, seed=0), 1)
        first.run()
        first.offload(request)
    other = changed(kind, monkeypatch)
    with an_engine(tmp_path, other) as second:
        assert use(second, [0]) == (0, 0)
        assert not second.decisions
        assert sorted(second.tiers[0].differences(other.fingerprint(4))) == differing
