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


@pytest.mark.parametrize(
    ("value", "measured", "cell"),
    [(63, 0, "too high"), (0, 7, "too low"), (0, 0, ""), (8, 2, "4 × too high"), (2, 2.1, "")],
)
def test_a_guess_is_compared_with_zero_too(value, measured, cell):
    table = compare(predict("blocks", value, "of 64", typical=63), measured=measured).data
    assert f"<td style='text-align:left'>{cell}</td>" in table.partition("</tr>")[0]
