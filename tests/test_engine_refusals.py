"""What callers and their policies get wrong is refused in one clear sentence, and the engine goes on with the rest."""

import numpy as np
import pytest
import torch
from tiny_engine import check_tokens, one_thread, text, tiny_model  # noqa: F401

from kvlab import policies
from kvlab.engine import Engine
from kvlab.policy import Decision, Option, Policy
from kvlab.tiers import HostTier


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
