"""A Llama-family decoder in plain PyTorch over a paged KV cache: prefill of [start, stop), and batched decode.

RMSNorm, RoPE, grouped-query attention, SwiGLU, optional QK-norm, biases and LoRA. Does not know requests, tiers or
scheduling: it writes and reads the blocks it is told to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab import weights as weights_module
from kvlab.adapter import Adapter, read_adapter
from kvlab.arch import ModelArch
from kvlab.attention import attend, attend_each, attend_within, causal_mask, pad
from kvlab.blocks import BlockTable, blocks_for
from kvlab.fingerprint import Fingerprint
from kvlab.layers import Decoder
from kvlab.linear import linear
from kvlab.pool import TORCH_DTYPES, BlockPool, KVLayout, Window
from kvlab.rope import Rope, rotate
from kvlab.tokenizer import ByteTokenizer, Tokenizer
from kvlab.weights import LayerWeights, Weights

__all__ = ["Model"]

Blocks = Sequence[int] | Tensor | BlockTable


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder ready to run. Frozen: it holds no sequence's state, which is all in the pool."""

    arch: ModelArch
    dtype: str
    device: torch.device
    source: str  # where the weights came from, for people
    weights: Weights
    rope: Rope
    load_tokenizer: Callable[[], Tokenizer | ByteTokenizer]
    adapter: Adapter | None = None

    @cached_property
    def decoder(self) -> Decoder:
        """The shape that is being run."""
        return weights_module.decoder_of(self.arch)

    @cached_property
    def tokenizer(self) -> Tokenizer | ByteTokenizer:
        """Loaded when first asked for. Raises FileNotFoundError or ValueError when there is none that we can read."""
        return self.load_tokenizer()

    @property
    def weights_digest(self) -> str:
        """SHA-256 (hex) of the base weights in use. Reads them all, once (about 1 s per GB)."""
        return self.weights.digest

    @property
    def adapter_digest(self) -> str:
        """SHA-256 (hex) of the adapter's content, never its name; "" without one."""
        return self.adapter.digest if self.adapter else ""

    def layout(self, block_size: int) -> KVLayout:
        """The pool layout for this model's KV."""
        d = self.decoder
        return KVLayout(d.layers, d.kv_heads, d.head_dim, block_size, self.dtype)

    def fingerprint(self, block_size: int, *, salt: str = "") -> Fingerprint:
        """Everything that must match before this model may attach stored KV. Digests the weights when first asked."""
        try:
            tokenizer = self.tokenizer.digest
        except (FileNotFoundError, ValueError):
            tokenizer = ""  # a checkpoint without a readable one is run on ids alone, which the block hashes cover
        layout, d = self.layout(block_size), self.decoder
        return Fingerprint(
            weights=self.weights_digest,
            config=repr((self.arch.model_type, self.arch.vocab, d)),
            tokenizer=tokenizer,
            rope=repr((d.rope_theta, d.rope_scaling, self.rope.scale, self.arch.max_positions)),
            kv_dtype=self.dtype,
            block_layout=repr(
                (layout.order, "head_major", layout.layers, layout.kv_heads, block_size, layout.head_dim)
            ),
            adapter=self.adapter_digest,
            salt=salt,
        )

    def with_adapter(self, source: str | Path | Mapping[str, Tensor], *, scale: float | None = None) -> Model:
        """The same base weights (shared, not copied) with a LoRA adapter: a PEFT folder, or tensors by PEFT's names.

        Raises ValueError for an adapter that does not fit or uses more than plain LoRA (see `read_adapter`).
        """
        adapter = read_adapter(source, self.decoder, TORCH_DTYPES[self.dtype], self.device, scale)
        return replace(self, adapter=adapter)

    @torch.inference_mode()
    def prefill(
        self,
        tokens: Sequence[int] | Tensor,
        pool: BlockPool,
        blocks: Blocks,
        start: int = 0,
        *,
        before_layer: Callable[[int], None] | None = None,
        all_logits: bool = False,
    ) -> Tensor:
        """Compute positions [start, start + T), attending to the KV of [0, start) that `blocks` already hold.

        Writes the new KV into `blocks` and returns the logits of the last position [vocab], or of all [T, vocab].
        `before_layer(i)` is called just before layer i first touches the pool (its projections are done by then), so
        that layer-wise reload can wait there. The result depends on no block id and on no slot outside [0, stop).
        Raises ValueError for an empty or too long range, ids outside the vocabulary, or a pool of another layout.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        count = ids.numel()
        stop = start + count
        self._check(ids, pool)
        if count < 1 or not 0 <= start < stop <= self.arch.max_positions:
            raise ValueError(f"cannot prefill [{start}, {stop}): expected 1 to {self.arch.max_positions} positions")
        table = _held(blocks, pool, stop).to(self.device)
        positions = torch.arange(start, stop, device=self.device)
        slots = _slots(table[positions // pool.layout.block_size], positions, pool)
        cos, sin = self.rope.at(positions, TORCH_DTYPES[self.dtype])
        # what was cached is read back; without any, the new keys and values are all there is
        window = Window(pool, slots, table[: len(table) if start else 0], stop)
        group = self.decoder.heads // self.decoder.kv_heads
        mask = causal_mask(count, stop, group, pool.rows) if count > 1 else None
        x = F.embedding(ids.to(self.device), self.weights.embed)
        last = self.decoder.layers - 1
        for index in range(self.decoder.layers):
            q, k, v = self._project(index, x, cos, sin)
            if before_layer:
                before_layer(index)
            window.write(index, k, v)
            if start:
                k, v = window.read(index)
            if index == last and not all_logits:
                # nothing above reads the other rows, and their keys and values are already in the pool
                q, x = q[-1:], x[-1:]
            x = self._finish(index, x, attend(q, k, v, mask))
        logits = self._logits(x)
        return logits if all_logits else logits[-1]

    @torch.inference_mode()
    def decode(self, tokens: Tensor, pool: BlockPool, tables: Sequence[Blocks], positions: Sequence[int]) -> Tensor:
        """One token for each of B sequences: `tokens[b]` at `positions[b]`; writes its KV → logits [B, vocab].

        Sequence b attends to [0, positions[b]] of `tables[b]`. The weight matmuls are batched over the sequences.
        Raises ValueError as `prefill` does, or when the three arguments differ in length.
        """
        given = self.decode_inputs(tokens, pool, tables, positions)
        lengths = given[:, 1] + 1
        padding = pad(lengths, (given.shape[1] - 2) * pool.layout.block_size, pool.rows)
        return self._decode(
            given.to(self.device), pool, lambda q, keys, values: attend_each(q, keys, values, lengths, padding)
        )

    @torch.inference_mode()
    def decode_static(self, given: Tensor, pool: BlockPool) -> Tensor:
        """`decode` of what `decode_inputs` gave, on the device → logits [B, vocab]. Checks nothing.

        No shape depends on a value and no value is read on the host, so that a graph can record it; a replay then
        decodes what lies in `given` at that time.
        """
        keys = torch.arange((given.shape[1] - 2) * pool.layout.block_size, device=given.device)
        beyond = keys > given[:, 1:2]  # [B, L]
        mask = torch.zeros(beyond.shape, dtype=pool.rows.dtype, device=given.device).masked_fill_(beyond, -torch.inf)
        return self._decode(given, pool, lambda q, k, v: attend_within(q, k, v, beyond, mask[:, None, None]))

    def decode_inputs(
        self, tokens: Tensor, pool: BlockPool, tables: Sequence[Blocks], positions: Sequence[int]
    ) -> Tensor:
        """What a decode step is given, checked: int64 [B, 2 + W] on the CPU, a token, its position, its W blocks.

        Shorter tables are padded with block 0 of their own, which attention never lets into a result.
        Arguments and errors as in `decode`.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64)
        self._check(ids, pool)
        if not len(ids) == len(tables) == len(positions) >= 1:
            raise ValueError(
                f"{len(ids)} tokens, {len(tables)} tables, {len(positions)} positions; expected one of each"
            )
        if not 0 <= min(positions) <= max(positions) < self.arch.max_positions:
            raise ValueError(f"positions {list(positions)} are outside [0, {self.arch.max_positions})")
        held = [_held(table, pool, position + 1) for table, position in zip(tables, positions, strict=True)]
        padded = torch.nn.utils.rnn.pad_sequence(held, batch_first=True, padding_value=-1)
        padded = torch.where(padded < 0, padded[:, :1], padded).cpu()
        return torch.column_stack((ids.cpu(), torch.tensor(positions), padded))

    def _decode(self, given: Tensor, pool: BlockPool, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The step itself. `mix`: attention of q [B, heads, head_dim] to all keys and values, both [B · L, …]."""
        ids, at, tables = given[:, 0], given[:, 1], given[:, 2:]
        own = tables.gather(1, (at // pool.layout.block_size)[:, None])[:, 0]
        window = Window(pool, _slots(own, at, pool), tables.flatten(), tables.numel() * pool.layout.block_size)
        cos, sin = self.rope.at(at, TORCH_DTYPES[self.dtype])
        x = F.embedding(ids, self.weights.embed)
        for index in range(self.decoder.layers):
            q, k, v = self._project(index, x, cos, sin)
            window.write(index, k, v)
            x = self._finish(index, x, mix(q, *window.read(index)))
        return self._logits(x)

    def _check(self, ids: Tensor, pool: BlockPool) -> None:
        if ids.dim() != 1 or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.arch.vocab):
            raise ValueError(f"tokens of shape {list(ids.shape)} must be one row of ids in [0, {self.arch.vocab})")
        expected = self.layout(pool.layout.block_size)
        if replace(pool.layout, order=expected.order) != expected or pool.rows.device != self.device:
            raise ValueError(f"the pool is {pool.layout} on {pool.rows.device}; expected {expected} on {self.device}")

    def _project(self, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From x [T, hidden]: rotated q [T, heads, head_dim] and k, and v, both [T, kv_heads, head_dim]."""
        w, d = self.weights.layers[index], self.decoder
        qkv = self._linear(index, "qkv", rms_norm(x, w.attn_norm, d.norm_eps))
        qkv = qkv.view(len(x), d.heads + 2 * d.kv_heads, d.head_dim)
        qk, v = qkv[:, : d.heads + d.kv_heads], qkv[:, d.heads + d.kv_heads :]
        if w.q_norm is not None and w.k_norm is not None:
            q, k = qk[:, : d.heads], qk[:, d.heads :]
            qk = torch.cat((rms_norm(q, w.q_norm, d.norm_eps), rms_norm(k, w.k_norm, d.norm_eps)), dim=1)
        qk = rotate(qk, cos, sin)
        return qk[:, : d.heads], qk[:, d.heads :], v

    def _finish(self, index: int, x: Tensor, mixed: Tensor) -> Tensor:
        """Residual + attention output `mixed` [T, heads · head_dim], then residual + SwiGLU → [T, hidden]."""
        x = x + self._linear(index, "out", mixed)
        h = rms_norm(x, self.weights.layers[index].mlp_norm, self.decoder.norm_eps)
        gate, up = self._linear(index, "gate_up", h).chunk(2, dim=-1)
        return x + self._linear(index, "down", F.silu(gate).mul_(up))

    def _linear(self, index: int, name: str, x: Tensor) -> Tensor:
        """One fused projection of a layer, with the adapter's low-rank additions where it has any."""
        layer: LayerWeights = self.weights.layers[index]
        out = linear(x, getattr(layer, name), getattr(layer, f"{name}_bias", None))
        if self.adapter:
            for part in self.adapter.parts.get((index, name), ()):
                out[:, part.start : part.start + len(part.b)] += linear(linear(x, part.a), part.b)
        return out

    def _logits(self, x: Tensor) -> Tensor:
        return linear(rms_norm(x, self.weights.norm, self.decoder.norm_eps), self.weights.head)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale x to weight · x ÷ RMS(x) over the last dimension; half precision is widened, then rounded once."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(x.dtype)


def _held(blocks: Blocks, pool: BlockPool, tokens: int) -> Tensor:
    """The ids of the blocks that hold the first `tokens` positions (int64, on the CPU when given as a list)."""
    given = torch.as_tensor(blocks.blocks if isinstance(blocks, BlockTable) else blocks, dtype=torch.int64)
    need = blocks_for(tokens, pool.layout.block_size)
    if len(given) < need:
        raise ValueError(
            f"{tokens} positions need {need} blocks of {pool.layout.block_size}; the table has {len(given)}"
        )
    given = given[:need]
    if not 0 <= int(given.min()) <= int(given.max()) < pool.num_blocks:
        raise ValueError(f"block ids {given.tolist()} are outside the pool's [0, {pool.num_blocks})")
    return given


def _slots(blocks: Tensor, positions: Tensor, pool: BlockPool) -> Tensor:
    return blocks * pool.layout.block_size + positions % pool.layout.block_size
