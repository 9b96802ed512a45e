"""What callers and their policies get wrong is refused in one clear sentence, and the engine goes on with the rest."""

import numpy as np
import pytest
import torch
from tiny_engine import check_tokens, one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab import policies
from kvlab.engine import Engine
from kvlab.policy import Decision, Option, Policy
from kvlab.request import Sampling
from kvlab.tiers import DiskTier, HostTier, LinkTier, ValkeyTier


class Odd(Policy):
    """Wants [resident + `start`, the end + `stop`) of the prompt, from a tier of its own choice."""

    def __init__(self, start, stop, tier=None):
        self.start, self.stop, self.tier = start, stop, tier

    def decide(self, situation):
        option = situation.longest
        asked = option if self.tier is None else Option(self.tier, option.prefix)
        return Decision(situation, "split", "odd", asked, situation.resident + self.start, option.prefix + self.stop)


def resumed(policy):
    """An engine, and a request of 40 tokens that has left its pool and waits to come back."""
    engine = Engine(tiny_model(), 64, 4, [HostTier(1 << 20)], policy, poison=True)
    request = engine.submit(text(40), 1)
    engine.run()
    engine.offload(request)
    return engine, engine.resume(request, text(5, seed=1), 3)


WRONG = [Odd(3, 0), Odd(-4, 0), Odd(0, -3), Odd(0, 4), Odd(40, 0), Odd(0, -44), Odd(0, 0, "disk")]


@pytest.mark.parametrize("odd", WRONG, ids=lambda odd: f"{odd.start}, {odd.stop}, {odd.tier}")
def test_a_policy_that_wants_what_no_tier_holds_is_named_and_nothing_has_begun(odd):
    engine, request = resumed(odd)
    with engine:
        with pytest.raises(ValueError, match=r"Odd would load tokens \[.*inside \[0, "):
            engine.step()
        engine.check_integrity()
        assert request.state == "waiting"
        assert engine.metrics()["loads"] == 0
        assert not engine.decisions
        other = engine.submit(text(6, seed=2), 2)  # behind it, until the one that cannot be served is taken out
        engine.cancel(request)
        engine.run()
        assert check_tokens(engine.model, other, [6, 7]) == 0
        engine.check_integrity()


@pytest.mark.parametrize(
    "fine", [Odd(0, 0), Odd(8, 0), Odd(0, -8), Odd(4, -4)], ids=lambda odd: f"{odd.start}, {odd.stop}"
)
def test_a_policy_may_split_between_any_two_blocks(fine):
    engine, request = resumed(fine)
    with engine:
        engine.run()
        engine.check_integrity()
        assert engine.metrics()["hit_tokens"]["host"] == 40 + fine.stop - fine.start
        check_tokens(engine.model, request, range(request.prompt, len(request.tokens)))


MODEL = tiny_model()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("tiny", 8), r"model is 'tiny'; expected .*kvlab.load_model"),
        ((MODEL.arch, 8), r"model is .*; expected .*kvlab.load_model"),
        ((MODEL, 0), "pool_blocks is 0; expected an integer of at least 1"),
        ((MODEL, -3), "pool_blocks is -3; expected"),
        ((MODEL, 8.0), "pool_blocks is 8.0; expected"),
        ((MODEL, 8, 16, HostTier(1 << 20)), r"tiers is <.*HostTier .*; expected .*\[HostTier"),
        ((MODEL, 8, 16, [HostTier]), r"tiers\[0\] is <class .*; expected .*HostTier\("),
        ((MODEL, 8, 16, "host"), r"tiers\[0\] is 'h'; expected"),
        ((MODEL, 8, 16, (), "reload"), r"policy is 'reload'; expected .*policies.Reload\(\)"),
        ((MODEL, 8, 16, (), policies.Reload), r"policy is <class .*; expected .*policies.Reload\(\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_of_the_wrong_parts_says_which_and_what_was_meant(wrong, said):
    with pytest.raises(ValueError, match=said):
        Engine(*wrong)


def test_an_eviction_is_an_object_too():
    with pytest.raises(ValueError, match=r"eviction is <class .*; expected .*policies.LRU\(\)"):
        Engine(MODEL, 8, eviction=policies.LRU)


@pytest.mark.parametrize(
    "wrong",
    ["hello", [1.0] * 4, [1, "a"], [[1, 2]], [None], None, 5, torch.tensor([1.0]), torch.tensor([[1, 2]])],
    ids=repr,
)
def test_what_is_no_list_of_token_ids_is_refused_before_anybody_waits_for_it(wrong):
    with Engine(MODEL, 16, 4) as engine:
        fine = engine.submit(text(6), 3)
        with pytest.raises(ValueError, match=r"expected token ids, such as model\.tokenizer\.encode\(text\)"):
            engine.submit(wrong, 3)
        engine.run()
        assert check_tokens(MODEL, fine, [6, 7, 8]) == 0
        with pytest.raises(ValueError, match="expected token ids"):
            engine.resume(fine, wrong, 3)
        engine.run()
        assert fine.state == "finished"


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_ids_of_any_integer_type_are_kept_as_plain_ints(kind):
    with Engine(MODEL, 16, 4) as engine:
        request = engine.submit(kind(text(6)), 1)
        engine.run()
        engine.resume(request, kind(text(2, seed=1)), 1)
        engine.run()
        assert {type(token) for token in request.tokens} == {int}
        assert request.tokens[:6] == text(6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"groups": 1.5}, "^groups is 1.5; expected an integer of at least 1$"),
        ({"groups": "2"}, "^groups is '2'; expected"),
        ({"groups": 3}, "^groups is 3; expected 1 to 2, the number of layers"),
        ({"block_size": 4.0}, "^block_size is 4.0; expected an integer of at least 1$"),
        ({"token_budget": "1"}, "^token_budget is '1'; expected an integer of at least 1$"),
        ({"token_budget": 0}, "^token_budget is 0; expected"),
        ({"max_running": None}, "^max_running is None; expected"),
        ({"watermarks": 0.5}, r"^watermarks are 0.5; expected two shares of free blocks .* \(0.05, 0.1\)$"),
        ({"watermarks": (0.5,)}, r"^watermarks are \(0.5,\); expected two shares"),
        ({"watermarks": ("0", "1")}, r"^watermarks are \('0', '1'\); expected two shares"),
        ({"watermarks": (0.1, float("nan"))}, r"^watermarks are \(0.1, nan\); expected two shares"),
        ({"load_timeout_s": "1"}, "^load_timeout_s is '1'; expected seconds, or inf"),
        ({"load_timeout_s": None}, "^load_timeout_s is None; expected seconds, or inf"),
        ({"streams": "cpu"}, r"^streams is 'cpu'; expected an object such as kvlab.streams.ThreadStreams\(\)$"),
        ({"clock": 5}, "^clock is 5; expected an object such as time.perf_counter$"),
        ({"policy": policies.Threshold("9")}, "^a Threshold's tokens are '9'; expected a number"),
        ({"policy": policies.Calibrated("here")}, r"^machine is 'here'; expected a Machine: Machine.load\(path\)$"),
        (
            {"policy": policies.Calibrated(tiny_machine(), decode_delay_value="1")},
            "^decode_delay_value is '1'; expected",
        ),
        ({"policy": policies.Calibrated(tiny_machine(), queue_delay_value=-1)}, "^queue_delay_value is -1; expected"),
        ({"eviction": policies.CostAware("here", MODEL.arch, "fp64", 16)}, "^machine is 'here'; expected a Machine"),
        ({"eviction": policies.CostAware(tiny_machine(), "tiny", "fp64", 16)}, "^arch is 'tiny'; expected a ModelArch"),
    ],
    ids=repr,
)
def test_an_engine_says_which_of_its_numbers_is_none(wrong, said):
    with pytest.raises(ValueError, match=said):
        Engine(MODEL, 8, tiers=[HostTier(1 << 20)], **wrong)


def test_numpy_numbers_make_an_engine_too():
    one, four = np.int64(1), np.int64(4)
    numbers = {"token_budget": four, "max_running": one, "groups": one, "load_timeout_s": np.float32(9.0)}
    with Engine(MODEL, np.int64(8), four, watermarks=np.array([0.1, 0.2]), **numbers) as engine:
        request = engine.submit(text(9), four)
        engine.run()
        assert check_tokens(MODEL, request, [9, 10, 11, 12]) == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_new_tokens": 1.5}, "^max_new_tokens is 1.5; expected an integer of at least 1$"),
        ({"max_new_tokens": "3"}, "^max_new_tokens is '3'; expected"),
        ({"max_new_tokens": 0}, "^max_new_tokens is 0; expected"),
        ({"stop_tokens": 5}, r"^stop_tokens are 5; expected token ids, such as \[model.tokenizer.eos\]$"),
        ({"stop_tokens": "</s>"}, "^stop_tokens are '</s>'; expected token ids"),
        ({"stop_tokens": [[1]]}, r"^stop_tokens are \[\[1\]\]; expected token ids"),
        ({"sampling": 0.7}, r"^sampling is 0.7; expected Sampling\(temperature=0.8, seed=1\)$"),
        ({"sampling": {}}, r"^sampling is {}; expected Sampling\("),
        ({"salt": None}, "^salt is None; expected a tenant's name, a str$"),
        ({"salt": b"a"}, "^salt is b'a'; expected"),
        ({"on_token": "print"}, "^on_token is 'print'; expected a function of request and token$"),
    ],
    ids=repr,
)
def test_what_would_stop_a_later_step_is_refused_when_it_is_submitted(wrong, said):
    with Engine(MODEL, 16, 4) as engine:
        with pytest.raises(ValueError, match=said):
            engine.submit(text(6), **wrong)
        assert not engine.scheduler.busy


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": "1"}, "^temperature is '1'; expected 0"),
        ({"temperature": None}, "^temperature is None; expected 0"),
        ({"seed": 1.5}, "^seed is 1.5; expected an integer$"),
        ({"seed": None}, "^seed is None; expected an integer$"),
    ],
    ids=repr,
)
def test_a_sampling_of_the_wrong_numbers_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        Sampling(**wrong)


def test_a_large_seed_of_numpy_draws_what_the_same_int_draws():
    big = 2**62 - 1
    assert Sampling(1.0, np.int64(big)) == Sampling(1.0, big)
    assert type(Sampling(1.0, np.int64(big)).seed) is int


@pytest.mark.parametrize("kind", [torch.tensor, np.array, set, list])
def test_stop_tokens_of_any_integer_type_stop(kind):
    with Engine(MODEL, 16, 4) as engine:
        stop = engine.submit(text(6), 1)
        engine.run()
        request = engine.submit(text(6), 9, stop_tokens=kind(stop.output_tokens))
        engine.run()
        assert request.output_tokens == stop.output_tokens


@pytest.mark.parametrize("verb", ["resume", "pause", "offload", "branch", "cancel"])
def test_a_request_of_another_engine_is_refused_and_nothing_is_spoilt(verb):
    with Engine(MODEL, 16, 4, [HostTier(1 << 20)]) as engine, Engine(MODEL, 16, 4) as other:
        own, theirs = engine.submit(text(6), 1), other.submit(text(9), 2)
        engine.run()
        other.run()
        with pytest.raises(ValueError, match=r"^request 0 is another engine's; it can only be \w+ by the one"):
            getattr(engine, verb)(theirs)
        with pytest.raises(ValueError, match=r"^request is None; expected what submit returned$"):
            getattr(engine, verb)(None)
        engine.resume(own, [1], 2)
        other.resume(theirs, [1], 2)
        for each in (engine, other):
            each.run()
            each.check_integrity()
        check_tokens(MODEL, theirs, [9, 10, 12, 13])


@pytest.mark.parametrize("blocks", [-1, 1.5, "3", None])
def test_no_number_of_blocks_is_no_eviction(blocks):
    with (
        Engine(MODEL, 16, 4) as engine,
        pytest.raises(ValueError, match=f"^blocks is {blocks!r}; expected an integer of at least 0$"),
    ):
        engine.evict(blocks)


def test_a_callback_that_raises_costs_no_other_request_its_token():
    heard = []

    def hear(request, token):
        heard.append((request, token))

    def break_down(_request, _token):
        raise ConnectionError("the client has gone")

    with Engine(MODEL, 32, 4) as engine:
        gone = engine.submit(text(6), 1, on_token=break_down)
        other = engine.submit(text(6, seed=1), 2, on_token=hear)
        with pytest.raises(ConnectionError, match="the client has gone"):
            engine.run()
        engine.run()
        assert [token for _, token in heard] == other.output_tokens
        assert gone.state == other.state == "finished"
        for seed in (2, 3):
            engine.submit(text(6, seed), 1, on_token=break_down)
        with pytest.raises(ExceptionGroup, match="several on_token raised"):
            engine.run()


def test_a_policy_that_decides_nothing_is_named():
    class Forgetful(Policy):
        def decide(self, situation):
            pass

    engine, request = resumed(Forgetful())
    with engine:
        with pytest.raises(ValueError, match=r"^Forgetful decided None; expected a kvlab.policies.Decision$"):
            engine.step()
        assert request.state == "waiting"
        engine.check_integrity()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LinkTier("host", 1.0), r"^tier is 'host'; expected the tier behind the link, such as HostTier"),
        (lambda: LinkTier(HostTier, 1.0), r"^tier is <class .*; expected the tier behind the link"),
        (lambda: DiskTier(None, 1 << 20), "^path is None; expected the path of a folder"),
        (lambda: DiskTier(b"kv", 1 << 20), "^path is b'kv'; expected the path of a folder"),
        (lambda: DiskTier("kv", 1 << 20, codec=["xz"]), r"^codec is \['xz'\]; expected None or 'xz'"),
        (lambda: DiskTier("kv", 1 << 20, label=5), "^label is 5; expected a str$"),
        (lambda: ValkeyTier(None), "^the server's URL is of type NoneType; write valkey://host:port$"),
        (lambda: ValkeyTier("valkey://here", namespace=5), "^namespace is 5; expected letters"),
    ],
)
def test_a_tier_says_which_of_its_arguments_is_of_the_wrong_kind(make, said):
    with pytest.raises(ValueError, match=said):
        make()
