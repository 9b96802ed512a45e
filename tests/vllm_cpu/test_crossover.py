"""One real vLLM with the connector around its example disk connector: right tokens always, and the right choices.

The tests share the engine and its store; each asks first for what it wants to find there.
"""

import shutil

import pytest
from engine import BLOCK, LENGTHS, ask
from safetensors.torch import load_file, save_file
from server import Server, fresh_learner

from kvlab.bridges.checksums import Checksums
from kvlab.bridges.judge import Judge
from kvlab.bridges.learning import CALIBRATING


@pytest.fixture(scope="module")
def server(plain, hf_folder, tmp_path_factory):  # `plain`, so that the two engines start at once
    return Server(hf_folder, tmp_path_factory.mktemp("outside") / "store")


@pytest.fixture(scope="module")
def names(prompts):
    return [f"length {n}" for n in LENGTHS]


def test_a_fast_disk_is_calibrated_on_and_then_reloaded_from_with_the_same_tokens(server, prompts, expected, names):
    assert server.core.recompute_kv_load_failures, "vLLM's default would fail requests whose load fails"
    for name in names:
        tokens, _ = server.stores(prompts[name])
        assert tokens == expected[name]
        assert server.said == [], "nothing to load, nothing to decide"
    for name, length in zip(names, LENGTHS, strict=True):
        reply = server.ask(prompts[name])[0]
        assert (reply.tokens, reply.cached) == (expected[name], length - 17)
    assert server.judge.learner.loads == len(LENGTHS)
    assert server.judge.learner.ready
    for name, length in zip(names, LENGTHS, strict=True):
        reply = server.ask(prompts[name])[0]
        assert (reply.tokens, reply.cached) == (expected[name], length - 17)
        (line,) = server.said
        assert ": reload: " in line
        assert "against" in line, "the verdict and no longer the calibration"
    assert server.count("reload_decisions") == server.count("loads") == 2 * len(LENGTHS)
    assert server.count("loaded_tokens") == 2 * sum(n - 17 for n in LENGTHS)


def test_a_part_that_vllm_still_has_is_not_counted_twice(server, prompts, expected):
    server.ask(prompts["length 1041"])
    server.llm.reset_prefix_cache()
    ask(server.llm, prompts["length 1041"][:300])  # two blocks of the next prompt
    server.said.clear()
    reply = ask(server.llm, prompts["length 1041"])[0]
    assert (reply.tokens, reply.cached) == (expected["length 1041"], 1024)
    assert "(256 tokens resident, 768 outside, 1041 in all)" in server.said[0]


def test_a_cap_loads_the_head_and_computes_the_rest(server, prompts, expected):
    server.ask(prompts["length 1041"])
    judge = server.judge
    server.half.judge = Judge(judge.learner, block_size=BLOCK, max_load_tokens=300)
    reply = server.ask(prompts["length 1041"])[0]
    server.half.judge = judge
    assert (reply.tokens, reply.cached) == (expected["length 1041"], 256)


def test_a_slow_disk_loses_at_every_length_and_the_tokens_stay_right(server, prompts, expected, names):
    for name in names:
        server.ask(prompts[name])
    known = server.judge.learner
    server.judge.learner = learner = fresh_learner(server)
    for n in range(CALIBRATING):
        assert server.stores(prompts[f"teach {n}"])[0] == expected[f"teach {n}"]
    assert learner.prefills == CALIBRATING
    # A disk that takes eight times as long as computing, by this machine's own prefills a moment ago.
    computing_s = learner.machine.prefill_s(learner.arch, 0, 1041)
    server.disk.seconds_per_byte = 8 * computing_s / learner.load_bytes(1024)
    for n in range(CALIBRATING):
        assert server.ask(prompts[f"teach {n}"])[0].cached == 256
    declined = server.count("recompute_decisions")
    for name in names:
        reply = server.ask(prompts[name])[0]
        assert (reply.tokens, reply.cached) == (expected[name], 0)
        assert ": recompute: " in server.said[0]
    assert server.count("recompute_decisions") - declined == len(LENGTHS)
    server.disk.seconds_per_byte = 0.0
    server.judge.learner = known


def flip_a_bit(folder):
    file = sorted(folder.glob("*.safetensors"))[7]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(bytes(data))


def zero_a_layer(folder):
    file = sorted(folder.glob("*.safetensors"))[0]
    save_file({"kv_cache": load_file(file)["kv_cache"] * 0}, file)


def truncate(folder):
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1000])


def remove_one(folder):
    sorted(folder.glob("*.safetensors"))[3].unlink()


def swap_with_another(folder):
    other = next(one for one in folder.parent.iterdir() if one != folder and sizes(one) == sizes(folder))
    for file in folder.iterdir():
        shutil.copy(other / file.name, file)


def sizes(folder):
    return sorted(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize(
    ("number", "damage"),
    list(enumerate([flip_a_bit, zero_a_layer, truncate, remove_one, swap_with_another])),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_damaged_files_are_computed_again_with_the_right_tokens_and_not_trusted_twice(
    server, prompts, expected, number, damage
):
    prompt, right = prompts[f"damage {number}"], expected[f"damage {number}"]
    tokens, folder = server.stores(prompt)
    assert tokens == right
    damage(folder)
    failed = server.count("failed_loads")
    assert server.ask(prompt)[0].tokens == right
    assert ": reload: " in server.said[0]
    assert server.count("failed_loads") == failed + 1
    again = server.ask(prompt)[0]
    assert (again.tokens, again.cached) == (right, 0)
    assert "loading this prefix failed before" in server.said[0]
    assert server.count("failed_loads") == failed + 1


def test_removed_folders_are_a_miss(server, prompts, expected):
    _, folder = server.stores(prompts["damage 5"])
    shutil.rmtree(folder)
    reply = server.ask(prompts["damage 5"])[0]
    assert (reply.tokens, reply.cached) == (expected["damage 5"], 0)
    assert server.said == []
    assert server.ask(prompts["damage 5"])[0].cached == 256, "it was stored again"


def test_two_requests_in_one_batch_share_blocks_that_are_loaded_from_damaged_files(server, prompts, expected):
    flip_a_bit(server.stores(prompts["twin a"])[1])  # the files hold the common head, so "twin b" finds them too
    failed = server.count("failed_loads")
    replies = server.ask(prompts["twin a"], prompts["twin b"])
    assert [reply.tokens for reply in replies] == [expected["twin a"], expected["twin b"]]
    assert server.count("failed_loads") > failed


def test_what_another_server_stored_is_believed_only_with_its_checksums(server, prompts, expected):
    for name in ("length 273", "length 529"):
        server.ask(prompts[name])
    kept = server.worker._checksums
    file = kept._file
    server.worker._checksums = Checksums(file)  # as in a server that has just started
    assert server.ask(prompts["length 273"])[0].cached == 256
    failed = server.count("failed_loads")
    server.worker._checksums = Checksums(file.with_name("of-another-model.sums"))
    reply = server.ask(prompts["length 529"])[0]
    server.worker._checksums = kept
    assert reply.tokens == expected["length 529"]
    assert server.count("failed_loads") == failed + 1
