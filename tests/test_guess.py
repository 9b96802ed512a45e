"""Guesses beside results: what the row of a result is called."""

import pytest

from kvlab.lab.guess import compare, predict


@pytest.mark.parametrize(
    ("source", "row"),
    [("live", "measured (live)"), ("emulated", "measured (emulated)"), ("simulated", "simulated")],
)
def test_a_simulated_result_does_not_call_itself_measured(source, row):
    table = compare(predict("p99", 2, "s", typical=1), measured=3, source=source).data
    assert f">{row}</td>" in table
    assert ("measured" in table) == (source != "simulated")
