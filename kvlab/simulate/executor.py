"""The executor that only bills: time on a virtual clock for what the scheduler decides, from a `Machine`.

Compute is one queue in order, each direction of each link is another. Does not know traces, policies, or tokens.

What is exact, given the machine: hits, bytes and decisions; prefill, chunk by chunk; loads and stores; a load that
computing runs behind, layer group by layer group; and decode steps, many of which are billed at once while each is like
the last: until a request ends or fills a block, a load has arrived, or somebody comes. What is not: layers with windows
are billed as if they kept every token in a pool, a tier and a decode, and as if what is stored at once were one chain;
stores never slow a load down, nor loads a store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, kv_bytes, linear_flops
from kvlab.executor import Chunk, Outcome
from kvlab.machine import Decode, Machine
from kvlab.pipeline import layer_bounds
from kvlab.request import Request
from kvlab.simulate.tier import BilledTier

__all__ = ["DEVICE_MEMORY_GB_PER_S", "BillingExecutor", "DecodeCost", "Named"]

# Peaks of NVIDIA's data sheets, by published profile: A100 80 GB SXM, H100 SXM, GH200 with HBM3, B300.
DEVICE_MEMORY_GB_PER_S = {
    "a100-sxm-pcie4": 2039.0,
    "h100-sxm-pcie5": 3350.0,
    "gh200-c2c": 4000.0,
    "gb300-c2c": 8000.0,
}


class Named(Protocol):
    """A session that can name its blocks; see `trace.Session`."""

    def hashes(self, first: int, last: int, block_size: int) -> list[bytes]:
        """Names of full blocks [first, last)."""


@dataclass(frozen=True)
class DecodeCost:
    """Seconds of decode passes, each one row a request, on `machine`.

    Where passes of this shape were measured, that is what they take. Elsewhere a pass takes what its FLOPs take, as a
    prefill of as many rows would, and at least as long as reading weights (two bytes each) and caches once at
    `memory_gb_per_s`. None: FLOPs alone count, which is far too little for an accelerator of which only long prefills
    are published. Experts that a batch reads beyond those of one token are left out.
    """

    machine: Machine
    arch: ModelArch
    token_bytes: float
    memory_gb_per_s: float | None = None

    @property
    def measured(self) -> Decode | None:
        """What was measured of passes of this shape."""
        return None if self.machine.decode is None or self.machine.extrapolated(self.arch) else self.machine.decode

    def seconds(self, rows: int, positions: int, steps: int = 1) -> float:
        """`steps` passes of `rows` requests with `positions` cached tokens in all before the first."""
        measured, prefill, arch = self.measured, self.machine.prefill, self.arch
        if measured is not None:
            return steps * measured.seconds(rows, positions + rows * (steps - 1) / 2)  # a row grows by one each step
        # Between two neighbouring positions attention is linear, so that this is the sum over rows of unequal length.
        each, more = divmod(positions, rows)
        attention = (rows - more) * attention_flops(arch, each, each + steps)
        if more:
            attention += more * attention_flops(arch, each + 1, each + 1 + steps)
        linear = steps * (linear_flops(arch, rows) + 2 * rows * arch.head_macs)
        took_s = (
            steps * prefill.per_chunk_s
            + linear / prefill.linear_flops_per_s(rows)
            + attention / prefill.attention_flops_per_s(rows)
        )
        if self.memory_gb_per_s is None:
            return took_s
        weights = 2 * (arch.linear_macs + arch.head_macs)
        caches = (positions * steps + rows * steps * (steps + 1) // 2) * self.token_bytes
        return max(took_s, (steps * weights + caches) / (self.memory_gb_per_s * 1e9))

    def steps_until(self, rows: int, positions: int, seconds: float, most: int) -> int:
        """The fewest passes, up to `most` and at least one, that take `seconds` or more."""
        # Passes only get longer: as many as fit at the first one's pace are enough, and so many at their mean pace are
        # needed. Mostly the two are equal.
        high = min(most, max(1, math.ceil(seconds / self.seconds(rows, positions))))
        all_s = self.seconds(rows, positions, high)
        if all_s < seconds:
            return high
        low = max(1, math.floor(high * seconds / all_s))
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.seconds(rows, positions, middle) >= seconds else (middle + 1, high)
        return low


@dataclass(eq=False)
class _Loading:
    """A load of `size_bytes` on a link's clock, from `begin_s` to `due_s`."""

    tier: BilledTier
    hashes: Sequence[bytes]
    size_bytes: int
    begin_s: float
    due_s: float


class BillingExecutor:
    """Owns a virtual clock. `horizon_s`: when the next request comes, beyond which decode steps are not foreseen.

    Raises ValueError for a model whose blocks cannot be counted one by one.
    """

    def __init__(
        self,
        arch: ModelArch,
        machine: Machine,
        kv_dtype: str,
        *,
        pool_blocks: int,
        block_size: int,
        tiers: Sequence[BilledTier],
        groups: int = 1,
        memory_gb_per_s: float | None = None,
    ) -> None:
        if any(component.fixed_elements for component, _ in arch.cache_groups):
            raise ValueError(
                f"{arch.name} keeps recurrent states, which are no blocks of tokens; the simulator needs a cache that"
                " grows token by token"
            )
        self.num_blocks, self.block_size, self.groups = pool_blocks, block_size, min(groups, len(arch.layers))
        self.block_bytes = kv_bytes(arch, block_size, kv_dtype, 1, block_size)
        self.tiers = tuple(tier.name for tier in tiers)
        self.layer_bounds = layer_bounds(len(arch.layers), self.groups)
        self.arch, self.machine, self.kv_dtype = arch, machine, kv_dtype
        # Servers decode MLA on its latents; projecting all of them again for one token each would be far too dear.
        self.decode_cost = DecodeCost(machine, arch.absorbed, self.block_bytes / block_size, memory_gb_per_s)
        self.billed_tiers = {tier.name: tier for tier in tiers}
        self.clock_s = 0.0
        self.horizon_s = math.inf
        self.prefill_s = self.decode_s = self.stalled_s = 0.0
        self.decoded_tokens = self.decoded_positions = 0
        self._loads: list[_Loading] = []
        self._slowing = [
            (clock, clock.link.decode_slowdown)
            for tier in tiers
            for clock in (tier.load_clock, tier.store_clock)
            if clock.link.decode_slowdown
        ]

    @property
    def busy_s(self) -> float:
        """Seconds that the accelerator has computed."""
        return self.prefill_s + self.decode_s

    def now(self) -> float:
        """Seconds on the virtual clock."""
        return self.clock_s

    def wait_until(self, at_s: float) -> None:
        """Let time pass in which nothing is computed."""
        self.clock_s = max(self.clock_s, at_s)

    def hashes(self, request: Request, first: int, last: int) -> list[bytes]:
        """The names that the request's session has for its full blocks."""
        session: Named = request.session  # type: ignore[attr-defined]
        return session.hashes(first, last, self.block_size)

    # Tiers ------------------------------------------------------------------------------------------------------------

    def look_up(self, tier: str, hashes: Sequence[bytes], salt: str) -> None:
        """Nothing to do: what tiers hold is known here."""

    def holds(self, tier: str, block_hash: bytes, salt: str) -> bool:  # noqa: ARG002
        """Whether a tier holds the block; tenants' names differ anyway."""
        return block_hash in self.billed_tiers[tier]

    def bytes_of(self, blocks: int) -> int:
        """What so many blocks of one chain are: of a layer with a window no more than the window."""
        return kv_bytes(self.arch, blocks * self.block_size, self.kv_dtype, 1, self.block_size)

    def storing_bytes(self, tier: str, hashes: Sequence[bytes]) -> int:
        """What the tier's link writes until the last of these is there, copies of one block at a time."""
        held = self.billed_tiers[tier]
        link = held.store_clock.link
        rate_gb_per_s = link.rate_gb_per_s(link.copy_bytes(self.block_bytes, 1, held.store_clock.layers))
        return round(max(0.0, held.ready_s(hashes) - self.clock_s) * rate_gb_per_s * 1e9)

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> None:  # noqa: ARG002
        """Into the first tier, and what finds no room there into the next."""
        tiers = list(self.billed_tiers.values())
        for place, tier in enumerate(tiers):
            if not hashes:
                return
            self._demote(tiers[place:], len(hashes), hashes)
            tier.touch(hashes)
            held = tier.make_room(tier.missing(hashes), hashes)
            self._bill_store(tier, held)
            hashes = tier.missing(hashes)

    def _demote(self, tiers: Sequence[BilledTier], blocks: int, keep: Sequence[bytes]) -> None:
        """Store what the first of `tiers` is about to evict in the one below, unless that has it."""
        if len(tiers) > 1:
            upper, below = tiers[0], tiers[1]
            self._bill_store(below, below.make_room(below.missing(upper.victims(blocks, keep))))

    def _bill_store(self, tier: BilledTier, held: Sequence[bytes]) -> None:
        if held:
            tier.put(held, tier.store_clock.book(self.bytes_of(len(held)), len(held), self.clock_s)[1])

    def load(self, tier: str, hashes: Sequence[bytes], blocks: Sequence[int], salt: str) -> _Loading:  # noqa: ARG002
        """Book a load behind those before it, and behind the stores that it needs."""
        source = self.billed_tiers[tier]
        source.touch(hashes)
        source.pin(hashes)
        size_bytes = self.bytes_of(len(blocks))
        ready_s = max(self.clock_s, source.ready_s(hashes))
        loading = _Loading(source, hashes, size_bytes, *source.load_clock.book(size_bytes, len(blocks), ready_s))
        self._loads.append(loading)
        return loading

    def remaining_bytes(self, handle: _Loading) -> int:
        """What is left of it, as if it came at one pace from the beginning to the end."""
        left_s = max(0.0, handle.due_s - max(self.clock_s, handle.begin_s))
        return round(handle.size_bytes * left_s / (handle.due_s - handle.begin_s)) if left_s else 0

    def arrived(self, handle: _Loading) -> bool:
        """Whether it is over by now."""
        return handle.due_s <= self.clock_s

    def finish(self, handle: _Loading) -> int:
        """Wait for a load; all of it is valid."""
        self.stalled_s += max(0.0, handle.due_s - self.clock_s)
        self.wait_until(handle.due_s)
        self._loads.remove(handle)
        handle.tier.unpin(handle.hashes)
        return len(handle.hashes)

    def timed_out(self, handle: _Loading) -> bool:  # noqa: ARG002
        """No load is ever given up."""
        return False

    def settled(self, handle: _Loading, wait_s: float = 0.0) -> bool:  # noqa: ARG002
        """No copy is late."""
        return True

    def copy_block(self, source: int, target: int) -> None:
        """Copies inside the pool cost nothing here."""

    def freed(self, blocks: list[int]) -> None:
        """Nothing lies in them."""

    # Compute ----------------------------------------------------------------------------------------------------------

    def run(self, chunks: Sequence[Chunk], decodes: Sequence[Request]) -> Outcome:
        """Prefill chunks one by one, then decodes in a batch, then chunks behind their loads."""
        tokens: dict[Request, int] = {}
        valid, repeats, stalled_s = {}, 1, self.stalled_s
        for chunk in (chunk for chunk in chunks if chunk.load is None):
            self._prefill(chunk, self.machine.prefill_s(self.arch, chunk.start, chunk.stop), tokens)
        if decodes:
            positions = sum(request.computed for request in decodes)
            if not chunks:
                repeats = self._foreseen(decodes, positions)
            self._decode(len(decodes), positions, repeats)
            tokens.update(dict.fromkeys(decodes, 0))
        for chunk in chunks:
            if chunk.load is not None:
                self._prefill_behind(chunk, chunk.load.handle, tokens)
                valid[chunk.load] = self.finish(chunk.load.handle)
        return Outcome(tokens, valid, repeats, self.stalled_s - stalled_s)

    def _prefill(self, chunk: Chunk, took_s: float, tokens: dict[Request, int]) -> None:
        self.clock_s += took_s
        self.prefill_s += took_s
        if chunk.stop == len(chunk.request.tokens):
            tokens[chunk.request] = 0

    def _prefill_behind(self, chunk: Chunk, loading: _Loading, tokens: dict[Request, int]) -> None:
        """Each layer group is computed when it has arrived and the one before it is done."""
        took_s = self.machine.prefill_s(self.arch, chunk.start, chunk.stop)
        done_s = self.clock_s
        first_s = loading.begin_s + loading.tier.load_clock.link.per_request_s  # paid once, before any group comes
        layers = self.layer_bounds[-1]
        for start, stop in pairwise((0, *self.layer_bounds)):
            arrival_s = first_s + (loading.due_s - first_s) * stop / layers
            done_s = max(done_s, arrival_s) + took_s * (stop - start) / layers
        self.stalled_s += max(0.0, done_s - took_s - self.clock_s)
        self.clock_s = max(self.clock_s, done_s - took_s)
        self._prefill(chunk, took_s, tokens)

    def _decode(self, rows: int, positions: int, steps: int) -> None:
        took_s = self.decode_cost.seconds(rows, positions, steps)
        for clock, slowdown in self._slowing:
            took_s += slowdown * min(took_s, max(0.0, clock.free_s - self.clock_s))
        self.clock_s += took_s
        self.decode_s += took_s
        self.decoded_tokens += rows * steps
        self.decoded_positions += positions * steps + rows * steps * (steps - 1) // 2

    def _foreseen(self, decodes: Sequence[Request], positions: int) -> int:
        """How many decode steps in a row will be like the next one; 1 where a first token is due."""
        steps = 1 << 62
        for request in decodes:
            table = request.table
            assert table is not None, "a decode of a request without blocks"
            if request.timing.first_token_s is None:
                return 1
            left = request.prompt + request.max_new_tokens - len(request.tokens)
            steps = min(steps, left, table.capacity - table.tokens)
        until_s = min((load.due_s for load in self._loads), default=math.inf)
        until_s = min(until_s, self.horizon_s) - self.clock_s
        if steps == 1 or math.isinf(until_s):
            return steps
        return self.decode_cost.steps_until(len(decodes), positions, until_s, steps)
