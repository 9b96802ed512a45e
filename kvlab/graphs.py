"""Decode from recorded graphs: one for each size of batch and of tables, replayed instead of launched kernel by kernel.

A small model's step is hundreds of kernels that run for microseconds; launching them one by one takes longer than that.
A graph holds addresses and shapes, so it belongs to one pool, and a smaller batch is filled up to its size.
Knows what a step of the model is given. Does not know how a device records (`Recorder`), requests or scheduling.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvlab.model import Blocks, Model
from kvlab.pool import BlockPool
from kvlab.streams import Recorder

__all__ = ["Decode", "DecodeGraphs", "decode_with"]

Decode = Callable[[Tensor, BlockPool, Sequence[Blocks], Sequence[int]], Tensor]  # as `Model.decode`

_LEAST_BLOCKS = 16  # below this a wider table costs less than one more recording


class _CannotRecordError(Exception):
    """The recorder raised; no graph was made."""


@dataclass(frozen=True, eq=False)
class _Graph:
    given: Tensor  # [B, 2 + W] on the device: where a replay looks for what `Model.decode_inputs` gave
    replay: Callable[[], Tensor]  # → logits [B, vocab], until the next replay of any graph


class DecodeGraphs:
    """`decode` does what `Model.decode` does, by way of up to `limit` graphs. Owns them and what they are given.

    A graph is recorded when a batch of its size first comes, by `record`, for as long as the pool stays where it is.
    When that fails, once, there is a warning, and all steps from then on are launched kernel by kernel.
    """

    def __init__(self, model: Model, record: Recorder, limit: int = 32) -> None:
        self._model, self._record, self._limit = model, record, limit
        self._pool: BlockPool | None = None  # held: while graphs point into it, no other pool can have its address
        self._graphs: dict[torch.Size, _Graph] = {}  # by shape of `given`, the one used last at the end
        self._failed = False

    @torch.inference_mode()
    def decode(self, tokens: Tensor, pool: BlockPool, tables: Sequence[Blocks], positions: Sequence[int]) -> Tensor:
        """Arguments, result and errors as those of `Model.decode`."""
        if self._failed:
            return self._model.decode(tokens, pool, tables, positions)
        given = self._model.decode_inputs(tokens, pool, tables, positions)
        try:
            graph = self._graph(_filled(given), pool)
        except _CannotRecordError as error:
            self._failed = True
            self._graphs.clear()
            message = f"could not record a decode step as a graph ({error}); its kernels are launched one by one"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            return self._model.decode(tokens, pool, tables, positions)
        # Copied: the next replay, of whichever graph, may write where this one leaves its logits.
        return graph.replay()[: len(given)].clone()

    def _graph(self, given: Tensor, pool: BlockPool) -> _Graph:
        """The graph of this shape in this pool, with `given` where it looks for it."""
        if self._pool is None or self._pool.rows.data_ptr() != pool.rows.data_ptr():
            self._graphs.clear()
            self._pool = pool
        graph = self._graphs.pop(given.shape, None) or self._recorded(given, pool)
        graph.given.copy_(given)
        self._graphs[given.shape] = graph
        return graph

    def _recorded(self, given: Tensor, pool: BlockPool) -> _Graph:
        if len(self._graphs) >= self._limit:
            del self._graphs[next(iter(self._graphs))]  # first: its memory then serves the new one
        at = given.to(pool.device)  # with tokens and blocks that exist: the step is run once before it is recorded
        try:
            return _Graph(at, self._record(partial(self._model.decode_static, at, pool)))
        except RuntimeError as error:
            raise _CannotRecordError(error) from error


def decode_with(model: Model, record: Recorder | None) -> Decode:
    """A model's decode, from graphs where the device records them (`Streams.recorder`)."""
    return model.decode if record is None else DecodeGraphs(model, record).decode


def _filled(given: Tensor) -> Tensor:
    """`given` [b, 2 + w] with rows and columns up to the size of a graph.

    Columns: block 0 of each row again, as in any shorter table. Rows: the first one again, whose logits are then left
    out. What such a row writes is the key and value that the first one writes, to the same slot, so it does not matter
    which write comes last, and no block is touched that is not being written anyway. (To keep a block for this, a pool
    would have to be larger than its allocator is told.)
    """
    rows, columns = given.shape[0], given.shape[1] - 2
    batch, width = 1 << (rows - 1).bit_length(), _in_quarters(max(columns, _LEAST_BLOCKS))
    wide = torch.cat((given, given[:, 2:3].expand(-1, width - columns)), dim=1)
    return torch.cat((wide, wide[:1].expand(batch - rows, -1)))


def _in_quarters(blocks: int) -> int:
    """The next of 16, 20, 24, 28, 32, 40, …: at most a quarter more is read, and each doubling records four graphs."""
    step = max(1, 1 << (blocks - 1).bit_length() - 3)
    return -(-blocks // step) * step
