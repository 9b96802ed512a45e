"""Layer groups: every layer in one of them, small ones first, and what a pipeline of them hides."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.pipeline import default_groups, hidden_s, layer_bounds

SECONDS = st.floats(0.0, 1e3)


def sizes(bounds):
    return [stop - start for start, stop in pairwise((0, *bounds))]


@given(st.integers(1, 130), st.data())
def test_each_layer_is_in_one_group_and_no_group_is_empty(layers, data):
    groups = data.draw(st.integers(1, layers))
    bounds = layer_bounds(layers, groups)
    assert len(bounds) == groups
    assert bounds[-1] == layers
    assert min(sizes(bounds)) >= 1


def test_groups_double_until_they_are_as_large_as_the_rest():
    # 30 layers by 1 : 2 : 4 : 5 : 5 : 5, in whole layers.
    assert sizes(layer_bounds(30, 6)) == [1, 3, 5, 7, 7, 7]
    assert sizes(layer_bounds(80, 6)) == [3, 7, 15, 18, 18, 19]
    assert sizes(layer_bounds(32, 1)) == [32]
    assert sizes(layer_bounds(4, 4)) == [1, 1, 1, 1]
    assert [default_groups(layers) for layers in (1, 4, 30)] == [1, 4, 6]


@pytest.mark.parametrize("groups", [0, 5])
def test_more_groups_than_layers_are_refused(groups):
    with pytest.raises(ValueError, match=f"^groups is {groups}; expected 1 to 4, the number of layers$"):
        layer_bounds(4, groups)


@given(SECONDS, SECONDS, st.integers(1, 40), st.data())
def test_what_is_hidden_is_what_playing_the_pipeline_saves(load_s, compute_s, layers, data):
    bounds = layer_bounds(layers, data.draw(st.integers(1, layers)))
    done_s = 0.0
    for start, stop in pairwise((0, *bounds)):
        done_s = max(done_s, load_s * stop / layers) + compute_s * (stop - start) / layers
    assert hidden_s(load_s, compute_s, bounds) == pytest.approx(load_s + compute_s - done_s, abs=1e-9)


@pytest.mark.parametrize("layers", [16, 30, 32, 61, 80])
@pytest.mark.parametrize("compute_s", [0.1, 0.5, 1.0, 2.0, 10.0])
def test_never_less_is_hidden_than_by_four_equal_groups_and_most_where_computing_is_long(layers, compute_s):
    hidden = hidden_s(1.0, compute_s, layer_bounds(layers, 6))
    assert hidden >= 0.98 * 0.75 * min(1.0, compute_s)
    if compute_s >= 2.0:
        assert hidden >= 0.87
