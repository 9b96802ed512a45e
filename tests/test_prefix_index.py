"""The index of full blocks in the pool: which ends of chains it gives up first, and what it keeps of the allocator."""

import random

import pytest

from kvlab.blocks import BlockAllocator
from kvlab.prefix import PrefixIndex


def chained(allocator, index, chains, now_s):
    """Insert chains of names, each block computed by a table that is then released."""
    for chain in chains:
        table = allocator.new_table()
        blocks = allocator.grow(table, len(chain) * allocator.block_size)
        for place, block in enumerate(blocks):
            index.insert(chain, place, block, "", now_s)
        allocator.release(table)


def by_definition(index, count, value):
    """Victims one by one: the least valuable of those that are nobody's parent any more."""
    entries, chosen = list(index), []
    while len(chosen) < count and len(chosen) < len(entries):
        left = [entry for entry in entries if entry not in chosen]
        parents = {entry.parent for entry in left}
        chosen.append(min((entry for entry in left if entry.block_hash not in parents), key=value))
    return chosen


@pytest.mark.parametrize("seed", range(8))
def test_victims_are_ends_of_chains_whatever_came_and_went(seed):
    draw = random.Random(seed)
    allocator = BlockAllocator(200, 4)
    index = PrefixIndex(allocator)
    worth = {}

    def value(entry):
        return worth.setdefault(entry.block_hash, draw.random())

    stems = [[b"%d" % n] for n in range(3)]
    for step in range(40):
        stem = draw.choice(stems)
        chain = stem[: draw.randint(1, len(stem))] + [b"%d %d" % (step, n) for n in range(draw.randint(0, 4))]
        chained(allocator, index, [chain], float(step))
        stems.append(chain)
        count = draw.randint(0, 3)
        expected = by_definition(index, count, value)
        victims = index.victims(count, value)
        assert victims == expected
        for entry in victims:
            assert index.remove(entry), "nobody else holds it"
        allocator.check_integrity()
    for entry in index.victims(len(index), value):
        index.remove(entry)
    assert len(index) == 0
    assert allocator.free_blocks == 200


def test_a_block_in_use_outlives_the_index():
    allocator = BlockAllocator(3, 4)
    index, table = PrefixIndex(allocator), allocator.new_table()
    (block,) = allocator.grow(table, 4)
    index.insert([b"a"], 0, block, "", 0.0)
    assert allocator.ref_count(block) == 2
    (entry,) = index
    assert not index.remove(entry)
    assert allocator.ref_count(block) == 1
    assert allocator.release(table) == [block]


def test_a_block_is_kept_once_and_only_while_it_is_held():
    allocator = BlockAllocator(2, 4)
    with pytest.raises(ValueError, match="block 1 is free or kept already"):
        allocator.keep(1)
    (block,) = allocator.grow(allocator.new_table(), 4)
    allocator.keep(block)
    with pytest.raises(ValueError, match=f"block {block} is free or kept already"):
        allocator.keep(block)
    with pytest.raises(KeyError):
        allocator.let_go(1 - block)
    allocator.check_integrity()
    allocator._ref_count[block] -= 1
    with pytest.raises(AssertionError, match="counts 1 references"):
        allocator.check_integrity()


def test_among_some_blocks_none_leaves_that_another_chain_goes_on_from():
    """A system prompt of two conversations: with it the blocks of the one that stays would be lost."""
    allocator = BlockAllocator(20, 4)
    index = PrefixIndex(allocator)
    stem, ours, theirs = [b"s0", b"s1"], [b"a0", b"a1"], [b"b0", b"b1"]
    chained(allocator, index, [stem + ours, stem + theirs], 0.0)
    victims = index.victims(9, lambda entry: -entry.position, among=stem + ours)
    assert [entry.block_hash for entry in victims] == [b"a1", b"a0"]
    for entry in victims:
        index.remove(entry)
    assert index.matched(stem + theirs) == 4
    assert len(index.victims(9, lambda entry: -entry.position)) == 4, "who needs room gets all the same"
