"""Blocks are owned, shared and given back without a leak, whatever the order; and a broken allocator is noticed."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.blocks import BlockAllocator, BlockTable, OutOfBlocksError, blocks_for


class Schedules(RuleBasedStateMachine):
    """Random tables that grow, fork, are written to and released; a plain dict says what each position must hold."""

    def __init__(self):
        super().__init__()
        self.size = 4
        self.allocator = BlockAllocator(12, self.size)
        self.tables = []  # (table, {position: value})
        self.bytes = {}  # slot → value: the pool
        self.stamp = 0

    def pick(self, data):
        return data.draw(st.sampled_from(self.tables))

    def write(self, table, expected, position):
        self.stamp += 1
        (slot,) = table.slots(position, position + 1)
        self.bytes[slot] = expected[position] = self.stamp

    @rule()
    def new(self):
        if len(self.tables) < 6:
            self.tables.append((self.allocator.new_table(), {}))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data):
        table, expected = self.pick(data)
        tokens = data.draw(st.integers(0, table.tokens))
        self.allocator.truncate(table, tokens)
        assert table.tokens == tokens
        assert len(table.blocks) == blocks_for(tokens, self.size)
        for position in [position for position in expected if position >= tokens]:
            del expected[position]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 20))
    def append(self, data, more):
        table, expected = self.pick(data)
        stop = table.tokens + more
        before = list(table.blocks)
        fits = blocks_for(stop, self.size) - len(before) <= self.allocator.free_blocks
        try:
            # The block that the next token goes to may be shared with a branch.
            if table.tokens % self.size:
                self.copy_on_write(table, table.tokens)
            self.allocator.grow(table, stop)
        except OutOfBlocksError:
            assert len(table.blocks) == len(before)  # nothing was taken
            return
        assert fits
        for position in range(table.tokens, stop):
            self.write(table, expected, position)
        table.tokens = stop

    def copy_on_write(self, table, position):
        moved = self.allocator.writable(table, position)
        if moved:
            old, new = moved
            for offset in range(self.size):
                self.bytes[new * self.size + offset] = self.bytes.get(old * self.size + offset)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def overwrite(self, data):
        table, expected = self.pick(data)
        if table.tokens:
            position = data.draw(st.integers(0, table.tokens - 1))
            try:
                self.copy_on_write(table, position)
            except OutOfBlocksError:
                return
            self.write(table, expected, position)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        parent, expected = self.pick(data)
        if len(self.tables) < 6:
            self.tables.append((self.allocator.fork(parent), dict(expected)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share_a_prefix(self, data):
        parent, expected = self.pick(data)
        full = parent.tokens // self.size
        if len(self.tables) < 6:
            count = data.draw(st.integers(0, full))
            table = self.allocator.new_table()
            self.allocator.share(table, parent.blocks[:count])
            table.tokens = count * self.size
            self.tables.append((table, {p: v for p, v in expected.items() if p < table.tokens}))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table, _ = self.pick(data)
        self.tables = [pair for pair in self.tables if pair[0] is not table]
        for block in self.allocator.release(table):
            for offset in range(self.size):  # poison
                self.bytes[block * self.size + offset] = None

    @invariant()
    def sound(self):
        self.allocator.check_integrity()
        for table, expected in self.tables:
            found = [self.bytes.get(slot) for slot in table.slots(0, table.tokens)]
            assert found == [expected[position] for position in range(table.tokens)]

    def teardown(self):
        for table, _ in self.tables:
            self.allocator.release(table)
        self.allocator.check_integrity()
        assert self.allocator.free_blocks == 12


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda a, t: a._free.append(t.blocks[0]), "both free and held"),
        (lambda a, t: a._free.append(a._free[0]), "twice in the free list"),
        (lambda a, t: a._free.pop(), "blocks leaked"),
        (lambda a, t: a._ref_count.__setitem__(t.blocks[0], 2), "counts 2 references"),
        (lambda a, t: t.blocks.append(t.blocks[0]), "holds a block twice"),
        (lambda a, t: t.blocks.pop(), "blocks leaked"),
        (lambda a, t: setattr(t, "tokens", 99), "claims 99 tokens"),
    ],
)
def test_the_integrity_check_notices_what_is_broken(break_it, message):
    allocator = BlockAllocator(6, 4)
    table = allocator.new_table()
    allocator.grow(table, 10)
    allocator.check_integrity()
    break_it(allocator, table)
    with pytest.raises(AssertionError, match=message):
        allocator.check_integrity()


def test_without_copy_on_write_a_branch_would_see_its_siblings_tokens():
    """The random schedules above depend on `writable`: a fork that skips it shares the block it writes to."""
    allocator = BlockAllocator(4, 4)
    parent = allocator.new_table()
    allocator.grow(parent, 6)
    parent.tokens = 6
    child = allocator.fork(parent)
    assert child.slots(5, 6) == parent.slots(5, 6)
    old, new = allocator.writable(child, 5)
    assert (old, child.blocks[1]) == (parent.blocks[1], new)
    assert child.slots(5, 6) != parent.slots(5, 6)
    assert allocator.writable(child, 5) is None  # now its own
    assert child.blocks[0] == parent.blocks[0]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_a_block_boundary_takes_exactly_as_many_blocks_as_it_needs(tokens, blocks):
    assert blocks_for(tokens, 16) == blocks


def test_growing_is_all_or_nothing():
    allocator = BlockAllocator(3, 4)
    table = allocator.new_table()
    with pytest.raises(OutOfBlocksError, match="4 more blocks are needed, 3 of 3 are free"):
        allocator.grow(table, 16)
    assert table.blocks == []
    assert allocator.grow(table, 12) == table.blocks
    with pytest.raises(OutOfBlocksError, match="1 more blocks are needed, 0 of 3 are free"):
        allocator.grow(table, 13)
    allocator.fork(table)
    with pytest.raises(OutOfBlocksError, match="is shared and no block is free"):
        allocator.writable(table, 0)


def test_wrong_use_is_refused():
    allocator = BlockAllocator(3, 4)
    table = allocator.new_table()
    with pytest.raises(ValueError, match="block 0 is free"):
        allocator.share(table, [0])
    allocator.release(table)
    for call in (lambda: allocator.grow(table, 1), lambda: allocator.release(table), lambda: allocator.fork(table)):
        with pytest.raises(ValueError, match="not \\(or no longer\\)"):
            call()
    with pytest.raises(ValueError, match="not \\(or no longer\\)"):
        allocator.grow(BlockTable(4), 1)
    with pytest.raises(ValueError, match="outside the 0 slots"):
        BlockTable(4).slots(0, 1)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="expected a positive integer"):
            BlockAllocator(4, bad)
