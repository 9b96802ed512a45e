"""Round trips without one wait: every one corrupt under the right adversary, none elsewhere, and nobody notices."""

import pytest

from kvlab.experiments.missing_wait import WAITS, count_corrupt
from kvlab.loading import load_model

FINDER = dict(zip(WAITS, ("early", "late", "early", "late"), strict=True))


@pytest.fixture(scope="module")
def model():
    return load_model("tiny", dtype="fp32")


TOKENS = [(i * 37) % 251 for i in range(400)]


@pytest.mark.parametrize("streams", ["ordinary", "early", "late"])
def test_with_every_wait_nothing_is_corrupt(model, streams):
    found = count_corrupt(model, TOKENS, streams=streams, rounds=3)
    assert (found["corrupt_rounds"], found["other_answer"], found["noticed"]) == (0, 0, 0)
    assert found["blocks"] == 9


@pytest.mark.parametrize("wait", WAITS)
def test_without_a_wait_every_round_is_corrupt_under_one_adversary_and_no_error_is_seen(model, wait):
    found = count_corrupt(model, TOKENS, streams=FINDER[wait], missing=wait, rounds=3)
    assert (found["corrupt_rounds"], found["corrupt_blocks"], found["noticed"]) == (3, 9, 0)
    # Copies on the calling thread need no wait: the bug sleeps.
    assert count_corrupt(model, TOKENS, streams="ordinary", missing=wait, rounds=3)["corrupt_rounds"] == 0


def test_bad_calls_name_the_values(model):
    with pytest.raises(ValueError, match="'quick'"):
        count_corrupt(model, TOKENS, streams="quick")
    with pytest.raises(ValueError, match="whole blocks"):
        count_corrupt(model, TOKENS, streams="early", prefix=20)
    with pytest.raises(ValueError, match="need more text"):
        count_corrupt(model, TOKENS[:50], streams="early")
