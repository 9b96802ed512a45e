"""The paged KV pool: one tensor for all layers, addressed by block id.

Knows tensors and where a block's bytes lie. Does not know who owns a block, models, or tiers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvlab.pipeline import layer_bounds
from kvlab.streams import host_memory

__all__ = ["TORCH_DTYPES", "BlockPool", "KVLayout", "LayerGroups", "Window"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class KVLayout:
    """What one block is: `block_size` tokens × all layers × (K, V) × heads × head_dim.

    `order` "block_major" keeps one block of all layers contiguous; "layer_major" keeps a layer's blocks together
    (what most engines had first: the layouts lesson compares the two).
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    order: Literal["block_major", "layer_major"] = "block_major"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a positive integer")
        if self.dtype not in TORCH_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; a pool holds {', '.join(TORCH_DTYPES)}")
        if self.row_bytes % 16:
            raise ValueError(f"a row of {self.row_bytes} bytes is not a multiple of 16; use a larger block_size")

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row: K or V of one layer in one block."""
        return self.block_size * self.kv_heads * self.head_dim * TORCH_DTYPES[self.dtype].itemsize

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.layers * self.row_bytes


class BlockPool:
    """`num_blocks` blocks of KV in one tensor of rows. Owns the bytes; block ids come from a `BlockAllocator`.

    Row order, block-major: ((block · layers) + layer) · 2 + (0 for K, 1 for V); layer-major: ((layer · num_blocks) +
    block) · 2 + kv. A row is [kv_heads, block_size, head_dim], so that a head's keys of consecutive blocks gather into
    [tokens, head_dim] without gaps: attention reads these up to twice as fast as those of all heads in turn.
    `poison` fills freed blocks with NaN.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, device: str | torch.device = "cpu", poison: bool = False
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.poison = poison
        dtype = TORCH_DTYPES[layout.dtype]
        row_elements = layout.row_bytes // dtype.itemsize
        rows = num_blocks * layout.layers * 2
        fill = float("nan") if poison else 0.0
        # [rows, block_size · kv_heads · head_dim]; filled, so that pages are mapped before anything is timed.
        if torch.device(device).type == "cpu":  # at a page boundary, so that files can be read into blocks directly
            self.rows = host_memory(rows * layout.row_bytes).view(dtype).view(rows, row_elements).fill_(fill)
        else:
            self.rows = torch.full((rows, row_elements), fill, dtype=dtype, device=device)
        # [rows · kv_heads · block_size, head_dim] for writes by slot: one vector per head and token.
        self.vectors = self.rows.view(-1, layout.head_dim)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.rows.device

    def row_index(self, layer: int, kv: int, blocks: Tensor) -> Tensor:
        """Row ids of K (`kv` 0) or V (1) of `layer` in `blocks` [n] (int64) → [n]."""
        if self.layout.order == "block_major":
            return (blocks * self.layout.layers + layer) * 2 + kv
        return (blocks + layer * self.num_blocks) * 2 + kv

    def group_index(self, blocks: Tensor, start: int, stop: int) -> Tensor:
        """Row ids of layers [start, stop) of `blocks` [n], block by block → [n · (stop − start) · 2]."""
        layers = torch.arange(start, stop, device=blocks.device)
        kv = torch.arange(2, device=blocks.device)
        if self.layout.order == "block_major":
            first = (blocks[:, None] * self.layout.layers + layers) * 2
        else:
            first = (blocks[:, None] + layers * self.num_blocks) * 2
        return (first[:, :, None] + kv).flatten()

    def vector_index(self, layer: int, kv: int, slots: Tensor) -> Tensor:
        """Vector ids of every head's K (`kv` 0) or V (1) of `layer` at `slots` [T] (int64) → [T · kv_heads]."""
        size, heads = self.layout.block_size, self.layout.kv_heads
        first = self.row_index(layer, kv, slots // size) * heads * size + slots % size
        return (first[:, None] + torch.arange(heads, device=slots.device) * size).flatten()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store K and V [T, kv_heads, head_dim] of `layer` at `slots` [T] (block · block_size + offset)."""
        for kv, values in ((0, k), (1, v)):
            self.vectors.index_copy_(0, self.vector_index(layer, kv, slots), values.flatten(0, 1))

    def read(self, layer: int, blocks: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `tokens` positions in `blocks` [n] → two [tokens, kv_heads, head_dim], copied."""
        heads, size, dim = self.layout.kv_heads, self.layout.block_size, self.layout.head_dim
        k, v = (
            self.rows.index_select(0, self.row_index(layer, kv, blocks))
            .view(-1, heads, size, dim)
            .transpose(1, 2)
            .flatten(0, 1)[:tokens]
            for kv in (0, 1)
        )
        return k, v

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block over all layers (copy-on-write)."""
        ids = torch.tensor([source, target], device=self.device)
        source_rows, target_rows = self.group_index(ids, 0, self.layout.layers).view(2, -1)
        self.rows.index_copy_(0, target_rows, self.rows.index_select(0, source_rows))

    def freed(self, blocks: list[int]) -> None:
        """Tell the pool that blocks were freed; with `poison` they become NaN, so that a stale table is seen."""
        if self.poison and blocks:
            index = self.group_index(torch.tensor(blocks, device=self.device), 0, self.layout.layers)
            self.rows.index_fill_(0, index, float("nan"))


class Window:
    """Part of a pool as one pass of a model uses it: each layer writes the same slots, then reads the same blocks.

    `slots` [T] as in `BlockPool.write`; `blocks` [n] and `tokens` as in `BlockPool.read`; all on the pool's device.
    Computes what those two do; what it reads of a head lies in one piece, and indices and buffers are made once instead
    of in every layer: on two AVX2 cores a read of 1,024 tokens took 0.1 of the time, and one of 33 MB, whose pages the
    system maps anew each time, 0.06.
    """

    def __init__(self, pool: BlockPool, slots: Tensor, blocks: Tensor, tokens: int) -> None:
        layout = pool.layout
        heads, size, dim = layout.kv_heads, layout.block_size, layout.head_dim
        self._slots = torch.stack([pool.vector_index(0, kv, slots) for kv in (0, 1)])  # in layer 0
        each = torch.arange(heads, device=blocks.device)[:, None]
        self._parts = torch.stack([(pool.row_index(0, kv, blocks) * heads + each).flatten() for kv in (0, 1)])
        layer_rows = 2 if layout.order == "block_major" else 2 * pool.num_blocks
        self._layer_parts, self._layer_slots = layer_rows * heads, layer_rows * heads * size
        self._vectors = pool.vectors
        parts = pool.rows.view(-1, size * dim)  # one head's part of each row
        # 16-byte elements where they fit, as in `LayerGroups`.
        self._wide = parts if parts.shape[1] * parts.itemsize % 16 else parts.view(torch.complex128)
        self._buffers = self._wide.new_empty(2, heads * len(blocks), self._wide.shape[1])
        shape = (heads, len(blocks) * size, dim)
        self._kv = [buffer.view(parts.dtype).view(shape)[:, :tokens].transpose(0, 1) for buffer in self._buffers]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store K and V [T, kv_heads, head_dim] of `layer`."""
        for slots, values in zip(self._slots + layer * self._layer_slots, (k, v), strict=True):
            self._vectors.index_copy_(0, slots, values.flatten(0, 1))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [tokens, kv_heads, head_dim] of `layer`; good until the next read, which overwrites them."""
        for parts, buffer in zip(self._parts + layer * self._layer_parts, self._buffers, strict=True):
            torch.index_select(self._wide, 0, parts, out=buffer)
        k, v = self._kv
        return k, v


class LayerGroups:
    """A pool's layers in `groups` runs that move apart, so that compute can begin before all have come.

    `layers` [(start, stop)]: half-open, see `layer_bounds`. `extents`: bytes of each group's part of one block.
    `in_place`: whether each lies together in CPU memory. Raises ValueError unless 1 <= groups <= layers.
    """

    def __init__(self, pool: BlockPool, groups: int) -> None:
        self._pool = pool
        self.layers = list(pairwise((0, *layer_bounds(pool.layout.layers, groups))))
        layer_bytes = 2 * pool.layout.row_bytes
        self.extents = tuple(layer_bytes * (stop - start) for start, stop in self.layers)
        # 16-byte elements: index_select and index_copy_ move complex128 at memcpy speed, and bf16 at half of it.
        self._rows = pool.rows.view(torch.complex128)
        self._parts: list[Tensor] = []
        self._extents: list[npt.NDArray[np.uint8]] = []  # by group: [num_blocks, extent]
        if pool.layout.order == "block_major":
            blocks = self._rows.view(pool.num_blocks, -1)  # [num_blocks, block_bytes / 16]
            self._parts = [blocks[:, a * layer_bytes // 16 : b * layer_bytes // 16] for a, b in self.layers]
            if pool.device.type == "cpu":
                raw = pool.rows.view(torch.uint8).view(pool.num_blocks, -1).numpy()
                self._extents = [raw[:, a * layer_bytes : b * layer_bytes] for a, b in self.layers]
        self.in_place = bool(self._extents)

    def rows(self, group: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """What to index, and with what, to reach `group` of `blocks` [n] (int64): whole extents where contiguous."""
        if self._parts:
            return self._parts[group], blocks
        return self._rows, self._pool.group_index(blocks, *self.layers[group])

    def extents_of(self, group: int, blocks: Tensor) -> list[npt.NDArray[np.uint8]]:
        """The bytes of `group` of `blocks` [n], where they lie in the pool; only if `in_place`."""
        extents = self._extents[group]
        return [extents[block] for block in blocks.tolist()]
