"""The pool finds a block's bytes where it put them, in either layout, and poisons what is freed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.pool import TORCH_DTYPES, BlockPool, KVLayout, Window

ORDERS = ["block_major", "layer_major"]


def layout(**changes):
    shape = {"layers": 3, "kv_heads": 2, "head_dim": 4, "block_size": 4, "dtype": "fp32", "order": "block_major"}
    return KVLayout(**(shape | changes))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_what_is_written_by_slot_is_read_by_block(order, dtype, block_size):
    pool = BlockPool(layout(order=order, dtype=dtype, block_size=block_size), 9)
    blocks, tokens = torch.tensor([7, 2, 5]), 2 * block_size + 1
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:tokens]
    written = {}
    for layer in range(3):
        written[layer] = [torch.randn(tokens, 2, 4).to(TORCH_DTYPES[dtype]) for _ in range(2)]
        pool.write(layer, slots, *written[layer])
    for layer in range(3):
        for found, expected in zip(pool.read(layer, blocks, tokens), written[layer], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_holds_one_head_after_the_other_and_a_window_reads_each_without_gaps(order):
    pool = BlockPool(layout(order=order), 9)
    k, v = torch.randn(2, 4, 2, 4)
    pool.write(1, 5 * 4 + torch.arange(4), k, v)
    for kv, written in ((0, k), (1, v)):
        row = pool.rows[pool.row_index(1, kv, torch.tensor(5))]
        assert torch.equal(row.view(2, 4, 4), written.transpose(0, 1))
    nothing = torch.zeros(0, dtype=torch.int64)
    for read in Window(pool, nothing, torch.tensor([7, 5]), 6).read(1):
        assert read.shape == (6, 2, 4)
        assert all(read[:, head].is_contiguous() for head in range(2))


@pytest.mark.parametrize("order", ORDERS)
def test_rows_of_all_layers_and_blocks_are_each_used_once(order):
    pool = BlockPool(layout(order=order), 5)
    every = [pool.row_index(layer, kv, torch.arange(5)) for layer in range(3) for kv in range(2)]
    assert sorted(torch.cat(every).tolist()) == list(range(5 * 3 * 2))
    groups = [pool.group_index(torch.arange(5), start, stop) for start, stop in ((0, 1), (1, 3))]
    assert sorted(torch.cat(groups).tolist()) == list(range(5 * 3 * 2))
    first = pool.group_index(torch.tensor([4]), 1, 3).tolist()
    assert first == [int(pool.row_index(layer, kv, torch.tensor(4))) for layer in (1, 2) for kv in (0, 1)]


def test_a_block_of_all_layers_is_contiguous_when_block_major():
    pool = BlockPool(layout(), 5)
    assert pool.group_index(torch.tensor([3]), 0, 3).tolist() == list(range(18, 24))
    assert pool.layout.block_bytes == 6 * pool.layout.row_bytes == 6 * 4 * 2 * 4 * 4


@pytest.mark.parametrize("order", ORDERS)
def test_copying_a_block_copies_all_layers_and_nothing_else(order):
    pool = BlockPool(layout(order=order), 5)
    pool.rows.copy_(torch.randn(pool.rows.shape))
    before = pool.rows.clone()
    pool.copy_block(1, 3)
    source, target = (pool.group_index(torch.tensor([block]), 0, 3) for block in (1, 3))
    assert torch.equal(pool.rows[target], before[source])
    others = pool.group_index(torch.tensor([0, 1, 2, 4]), 0, 3)
    assert torch.equal(pool.rows[others], before[others])


@pytest.mark.parametrize("order", ORDERS)
def test_freed_blocks_are_poisoned_and_no_others(order):
    pool = BlockPool(layout(order=order), 5, poison=True)
    assert pool.rows.isnan().all()  # never written is poison as well
    pool.rows.fill_(1.0)
    pool.freed([0, 4])
    assert pool.rows[pool.group_index(torch.tensor([0, 4]), 0, 3)].isnan().all()
    assert (pool.rows[pool.group_index(torch.tensor([1, 2, 3]), 0, 3)] == 1).all()
    calm = BlockPool(layout(order=order), 5)
    calm.freed([0])
    assert not calm.rows.isnan().any()


def test_shapes_that_cannot_be_are_refused():
    for name in ("layers", "kv_heads", "head_dim", "block_size"):
        for bad in (0, -1, 1.5, True):
            with pytest.raises(ValueError, match=f"{name} is {bad}; expected a positive integer"):
                layout(**{name: bad})
    with pytest.raises(ValueError, match="dtype is 'fp8'; a pool holds fp64"):
        layout(dtype="fp8")
    with pytest.raises(ValueError, match="not a multiple of 16"):
        layout(block_size=1, kv_heads=1, head_dim=2)


@settings(max_examples=40, deadline=None)
@given(
    block_size=st.sampled_from([1, 2, 4, 16]),
    order=st.sampled_from(["block_major", "layer_major"]),
    dtype=st.sampled_from(["fp32", "bf16", "fp64"]),
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    seed=st.integers(0, 2**16),
)
def test_what_is_written_is_read_back_whatever_the_blocks_the_order_and_the_neighbours(
    block_size, order, dtype, lengths, seed
):
    """Several sequences in random blocks of one poisoned pool: each reads its own bytes in every layer."""
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, block_size=block_size, dtype=dtype, order=order)
    generator = torch.Generator().manual_seed(seed)
    need = [-(-length // block_size) for length in lengths]
    pool = BlockPool(layout, sum(need) + 3, poison=True)
    ids = torch.randperm(pool.num_blocks, generator=generator)[: sum(need)].split(need)
    written = {}
    for sequence, (length, blocks) in enumerate(zip(lengths, ids, strict=True)):
        position = torch.arange(length)
        slots = blocks[position // block_size] * block_size + position % block_size
        for layer in range(layout.layers):
            k, v = torch.randn(2, length, 2, 8, generator=generator, dtype=torch.float64).to(pool.rows.dtype)
            pool.write(layer, slots, k, v)
            written[sequence, layer] = (k, v)
    freed = ids[0].tolist()
    pool.freed(freed)
    for (sequence, layer), (k, v) in written.items():
        read_k, read_v = pool.read(layer, ids[sequence], lengths[sequence])
        if sequence:
            assert torch.equal(read_k, k)
            assert torch.equal(read_v, v)
        else:
            assert read_k.isnan().all(), "a freed block is poisoned"
            assert read_v.isnan().all(), "a freed block is poisoned"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_a_window_writes_and_reads_what_the_pool_does(order, dtype):
    plain, fast = (BlockPool(layout(order=order, dtype=dtype), 9) for _ in range(2))
    plain.rows.copy_(torch.randn(plain.rows.shape))
    fast.rows.copy_(plain.rows)
    blocks, tokens = torch.tensor([7, 2, 5]), 10
    slots = torch.tensor([5 * 4 + 1, 7 * 4])
    window = Window(fast, slots, blocks, tokens)
    for layer in (0, 2, 1):
        new = [torch.randn(2, 2, 4).to(TORCH_DTYPES[dtype]) for _ in range(2)]
        plain.write(layer, slots, *new)
        window.write(layer, *new)
        for found, expected in zip(window.read(layer), plain.read(layer, blocks, tokens), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(fast.rows, plain.rows)
