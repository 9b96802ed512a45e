"""Lists of operations on three lanes: right ones are right in every order, each missing wait is found and red."""

import re
from itertools import permutations

import pytest

from kvlab.lab.draw.lanes import lanes_figure
from kvlab.lab.draw.style import png
from kvlab.lab.lanes import LANES, bars, corrupt_blocks, offload_operations, problem, reload_operations

BUILD = {"offload": offload_operations, "reload": reload_operations}
WAITS = [("offload", wait) for wait in ("computed", "gathered", "written", "reuse")]
WAITS += [("reload", wait) for wait in ("computed", "read", "scattered", "attend")]
BLOCKS = [7, 3, 11, 4, 9]


@pytest.mark.parametrize("direction", BUILD)
@pytest.mark.parametrize("slots", [1, 2, 5, 9])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_with_every_wait_no_order_of_the_lanes_makes_a_block_wrong(direction, slots, count):
    operations = BUILD[direction](BLOCKS[:count], slots)
    found = corrupt_blocks(operations, direction, BLOCKS[:count])
    assert len(found) == len(list(permutations(LANES)))
    assert not any(found.values())
    assert problem(operations, direction, BLOCKS[:count], slots) == ""
    assert not any(bar.wrong for bar in bars(operations, direction, BLOCKS[:count]))


@pytest.mark.parametrize(("direction", "wait"), WAITS)
def test_each_wait_is_needed_and_the_clock_shows_it(direction, wait):
    operations = BUILD[direction](BLOCKS, 2, wait)
    assert len(operations) < len(BUILD[direction](BLOCKS, 2))
    assert any(corrupt_blocks(operations, direction, BLOCKS).values())
    wrong = {bar.block for bar in bars(operations, direction, BLOCKS) if bar.wrong}
    assert wrong <= set(BLOCKS)
    assert wrong


def test_a_wait_for_an_event_that_was_not_recorded_before_it_waits_for_nothing():
    operations = offload_operations([5], 1)
    late = [*operations[1:], operations[0]]  # "computed" is waited for behind the gather
    assert any(corrupt_blocks(late, "offload", [5]).values())
    misnamed = [["copy", "wait", "computd"], *operations[1:]]
    assert any(corrupt_blocks(misnamed, "offload", [5]).values())


def test_a_bar_is_torn_when_its_source_changes_under_it():
    # Compute does not wait for the gathers: it overwrites each block while, or before, it is copied.
    found = bars(offload_operations([1, 2], 2, "reuse"), "offload", [1, 2])
    gather = next(bar for bar in found if bar.verb == "gather")
    overwrite = next(bar for bar in found if bar.verb == "next owner")
    assert gather.begin_ms < overwrite.end_ms < gather.end_ms
    assert gather.wrong


@pytest.mark.parametrize(
    ("operations", "sentence"),
    [
        (None, "expected a list of operations"),
        ([["copy", "gather", 1]], "not known"),
        ([["gpu", "gather", 1, 0]], r"is not a list \[lane, verb"),
        ([["io", "gather", 1, 0]], "does not belong here"),
        ([["copy", "scatter", 0, 1]], "does not belong here"),
        ([["copy", "gather", 2, 0]], "names block 2"),
        ([["copy", "gather", 1, 1]], "slot 1"),
        ([["copy", "gather", 1, 0]], "block 1 is never moved all the way"),
        ([], "block 1 is never moved all the way"),
        ([["copy", "gather", [1], 0]], "names block"),
        ([["copy", "record", "x"]] * 1000, "1,000 operations for 1 blocks"),
    ],
)
def test_what_is_no_list_of_operations_is_said_in_a_sentence(operations, sentence):
    assert re.search(sentence, problem(operations, "offload", [1], 1))


def test_the_picture_says_in_words_what_is_red():
    right = lanes_figure(offload_operations(BLOCKS, 2), "offload", BLOCKS)
    wrong = lanes_figure(reload_operations(BLOCKS, 2, "attend"), "reload", BLOCKS)
    assert right.axes[0].get_title() == "every block is right"
    assert wrong.axes[0].get_title() == "wrong bytes in blocks 3, 4, 7, 9, 11"
    assert png(right)[:4] == b"\x89PNG"
