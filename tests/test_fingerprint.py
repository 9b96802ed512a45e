"""Bytes are attached only where everything that decides them is the same; the answer names the field that is not."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.fingerprint import HASH_BYTES, Fingerprint, block_hashes
from kvlab.prefix import matched_blocks, reloadable_tokens

BASE = Fingerprint("weights", "config", "tokenizer", "rope", "bf16", "block_major/16")


def other_value(name):
    return 7 if isinstance(getattr(BASE, name), int) else "other"


@pytest.mark.parametrize("name", [field.name for field in fields(Fingerprint)])
def test_every_field_changes_every_hash_and_is_named(name):
    other = replace(BASE, **{name: other_value(name)})
    assert other.digest() != BASE.digest()
    assert BASE.differences(other.to_dict()) == [name]
    ours, theirs = (block_hashes(fingerprint, range(64), 16) for fingerprint in (BASE, other))
    assert not set(ours) & set(theirs)


def test_a_salt_equal_to_an_adapter_is_not_that_adapter():
    assert replace(BASE, salt="x").digest() != replace(BASE, adapter="x").digest()


@given(st.lists(st.text(max_size=4), min_size=6, max_size=6), st.lists(st.text(max_size=4), min_size=6, max_size=6))
def test_fields_cannot_run_into_each_other(one, two):
    # Any way to cut the same characters into other fields gives another digest.
    assert (Fingerprint(*one).digest() == Fingerprint(*two).digest()) == (one == two)


def test_a_stored_fingerprint_with_fields_unknown_here_differs():
    stored = BASE.to_dict() | {"quantised_by": "somebody"}
    assert BASE.differences(stored) == ["quantised_by"]
    missing = BASE.to_dict()
    del missing["rope"]
    assert BASE.differences(missing) == ["rope"]
    assert BASE.differences(BASE.to_dict()) == []


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=80), st.integers(1, 9), st.data())
def test_one_changed_token_changes_its_block_and_all_that_follow(tokens, size, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] += 1
    ours, theirs = block_hashes(BASE, tokens, size), block_hashes(BASE, changed, size)
    assert len(ours) == len(tokens) // size  # a partial last block has no hash
    assert all(len(block_hash) == HASH_BYTES for block_hash in ours)
    same = at // size
    assert ours[:same] == theirs[:same]
    assert not set(ours[same:]) & set(theirs[same:])


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 8))
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(tokens, size):
    hashes = block_hashes(BASE, tokens, size)
    for stop in range(len(tokens) + 1):
        assert block_hashes(BASE, tokens[:stop], size) == hashes[: stop // size]


def test_the_same_tokens_in_blocks_of_another_size_or_place_have_other_hashes():
    tokens = [5] * 32
    hashes = block_hashes(BASE, tokens, 16)
    assert len(set(hashes)) == 2  # equal content, another parent
    assert not set(hashes) & set(block_hashes(BASE, tokens, 32))
    with pytest.raises(ValueError, match="block_size is 0"):
        block_hashes(BASE, tokens, 0)


def test_block_hashes_are_what_they_were_when_files_were_written():
    """Stored files are found by these: changing them orphans every cache on disk, so do it knowingly."""
    assert block_hashes(BASE, range(4), 4)[0].hex() == KNOWN


KNOWN = "b6fce3e8eb018c19d0ab08da7a7fb04fab62581f7b68b7f5765b099210c51caa"


def test_matching_stops_at_the_first_gap_and_the_last_token_is_always_computed():
    known = {b"a", b"b", b"d"}
    assert matched_blocks([b"a", b"b", b"c", b"d"], known.__contains__) == 2
    assert matched_blocks([b"a"], known.__contains__) == 1
    assert matched_blocks([], known.__contains__) == 0
    assert reloadable_tokens(40, 41, 16) == 32  # a partial block is never stored
    assert reloadable_tokens(32, 33, 16) == 32
    assert reloadable_tokens(32, 32, 16) == 16  # wholly cached: the last token is computed, and so its block
    assert reloadable_tokens(15, 100, 16) == 0


def test_a_chain_goes_on_from_the_hash_of_its_parent():
    whole = block_hashes(BASE, range(64), 16)
    assert block_hashes(BASE, range(32, 64), 16, whole[1]) == whole[2:]
