"""The scheduler: what runs in a step, who gets blocks, who gives them up, and what is loaded rather than computed.

Chunked prefill and batched decode within a token budget, first come, first served. It takes an `Executor`, which moves
bytes and computes (or bills the time for it) and owns the clock, so that an engine and a simulator decide alike.
Does not know torch, tiers' insides, or what a token means.

Why it cannot get stuck: a request is refused unless the pool could hold it alone; the oldest one takes blocks from
idle ones first and then from the youngest that runs, so it always gets on; loads end by themselves, or by their
time-out. Nobody waits for bytes while anything else can run. Only blocks that a hanging tier may still write to are
lost to all, until it has: who needs the room waits.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from numbers import Real

from kvlab.arch import ModelArch
from kvlab.arithmetic import checked_count
from kvlab.blocks import BlockTable, blocks_for
from kvlab.cache import Cache
from kvlab.counts import Counts
from kvlab.executor import Chunk, Executor, Load, Outcome
from kvlab.loads import Loads
from kvlab.policy import Decision, Eviction, Policy, Situation
from kvlab.prefix import matched_blocks, reloadable_tokens
from kvlab.request import Request
from kvlab.waiting import RecentRate

__all__ = ["Counts", "Scheduler"]

_DECISIONS_KEPT = 10_000  # the log of an engine that runs for weeks must not fill its memory
_NAP_S = 0.1  # how long a step with nothing to do waits for a tier that hangs


class Scheduler:
    """Owns the block tables, the prefix index, and who is in which state."""

    def __init__(
        self,
        executor: Executor,
        arch: ModelArch,
        kv_dtype: str,
        policy: Policy,
        eviction: Eviction,
        *,
        token_budget: int,
        max_running: int,
        watermarks: tuple[float, float],
    ) -> None:
        token_budget = checked_count("token_budget", token_budget, 1)
        max_running = checked_count("max_running", max_running, 1)
        shares = list(watermarks) if isinstance(watermarks, Iterable) else []
        if not all(isinstance(share, Real) for share in shares) or not (
            len(shares) == 2 and 0 <= shares[0] <= shares[1] <= 1
        ):
            raise ValueError(
                f"watermarks are {watermarks!r:.60}; expected two shares of free blocks with 0 <= low <= high <= 1,"
                " such as (0.05, 0.1)"
            )
        policy.check(executor.tiers)
        eviction.check(executor.tiers)
        self.executor, self.arch, self.kv_dtype = executor, arch, kv_dtype
        self.policy = policy
        self.token_budget, self.max_running = token_budget, max_running
        self._low, high_blocks = (int(share * executor.num_blocks) for share in shares)
        self.cache = Cache(executor, eviction, high_blocks)
        self.allocator, self.index = self.cache.allocator, self.cache.index
        self.waiting: list[Request] = []  # by arrival
        self.running: dict[Request, None] = {}  # those that compute, drivers of loads included
        self.loads = Loads(executor, self.cache)
        self._room_changed = False
        self.decisions: deque[Decision] = deque(maxlen=_DECISIONS_KEPT)
        self.counts = Counts()
        self._prefilling_s = RecentRate(executor.now())

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running or self.loads.under_way)

    # What callers ask for ---------------------------------------------------------------------------------------------

    def check_fits(self, tokens: int, max_new_tokens: int) -> None:
        """Raises ValueError, with the sizes, for a turn that could not run even alone."""
        if tokens < 1 or max_new_tokens < 1:
            raise ValueError(f"{tokens} tokens and max_new_tokens {max_new_tokens}; expected at least 1 of each")
        most = tokens + max_new_tokens - 1  # the last token that is generated is never computed
        if most > self.arch.max_positions:
            raise ValueError(
                f"{tokens} tokens and {max_new_tokens} new ones need {most} positions; {self.arch.name} has"
                f" {self.arch.max_positions}"
            )
        need, size = blocks_for(most, self.allocator.block_size), self.allocator.block_size
        if need > self.allocator.num_blocks:
            raise ValueError(
                f"{tokens} tokens and {max_new_tokens} new ones need {need} blocks of {size} tokens; the pool has"
                f" {self.allocator.num_blocks}: it can never run here"
            )

    def enqueue(self, request: Request) -> None:
        """Let a request wait for its turn, in order of arrival."""
        request.state = "waiting"
        self._room_changed = True
        insort(self.waiting, request, key=lambda other: other.arrival)

    def stop(self, request: Request) -> None:
        """Take a request out of whatever it is in; what it has computed stays with it until the room is needed."""
        if request.state == "waiting":  # nobody else is looked for in a queue that may be long
            self.waiting.remove(request)
        self.loads.leave(request)
        self.running.pop(request, None)
        self._room_changed = True
        self.cache.park(request)

    # One step ---------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Request, int]]:
        """Admit, plan, run, and account for it; returns the new tokens."""
        self.counts.steps += 1
        self._room_changed |= self.loads.release_settled()
        for load in self.loads.abandoned:
            if self.executor.arrived(load.handle):
                self._land(load, self.executor.finish(load.handle))
        self._admit()
        chunks, decodes = self._plan()
        produced: list[tuple[Request, int]] = []
        if chunks or decodes:
            begin_s = self.executor.now()
            outcome = self.executor.run(chunks, decodes)
            if chunks:
                self._prefilling_s.add(self.executor.now() - begin_s - outcome.waited_s)
            for chunk in chunks:
                if chunk.load is not None:
                    valid = outcome.valid[chunk.load]
                    complete = valid == len(chunk.load.table.blocks)
                    self._land(chunk.load, valid)
                    if not complete:
                        continue
                self._computed(chunk.request, chunk.stop, outcome, produced)
            for request in decodes:
                self._computed(request, request.computed + outcome.repeats, outcome, produced)
        else:
            self._wait()
        if self.allocator.free_blocks < self._low:
            self._make_room(self.cache.high_blocks)
        return produced

    def _wait(self) -> None:
        """Nothing can run before bytes have come: those that others wait for, or else those that are late."""
        for load in self.loads.abandoned:
            self._land(load, self.executor.finish(load.handle))
        if self.waiting and self.loads.quarantine and not self._room_changed:
            self._room_changed = self.loads.release_settled(_NAP_S)

    def _computed(self, request: Request, stop: int, outcome: Outcome, produced: list[tuple[Request, int]]) -> None:
        table, size = request.table, self.allocator.block_size
        assert table is not None, "a request without blocks has computed"
        start, table.tokens = table.tokens, stop
        request.reached = max(request.reached, stop)
        self.counts.computed_tokens += stop - start
        if start // size < stop // size:
            self.cache.name(request, stop // size)
            now = self.executor.now()
            for index in range(start // size, stop // size):
                self.index.insert(request.hashes, index, table.blocks[index], request.salt, now)
        if request in outcome.tokens:
            token = outcome.tokens[request]
            self.counts.generated_tokens += outcome.repeats
            produced.append((request, token))
            decision = request.decision
            if decision is not None and decision.actual_s is None:
                decision.settle(self.executor.now())
                self.counts.estimated_regret_s += decision.estimated_regret_s or 0.0
            if request.append(token, self.executor.now(), outcome.repeats):
                request.state, request.timing.ended_s = "finished", self.executor.now()
                self.stop(request)

    def _plan(self) -> tuple[list[Chunk], list[Request]]:
        """Decodes first, then prefill within the token budget; behind a load once it is here, or if all others wait."""
        order = sorted(self.running, key=lambda request: request.arrival)
        decodes = dict.fromkeys(r for r in order if self._decodes(r) and self._writable(r, r.computed, r.computed + 1))
        budget = max(1, self.token_budget - len(decodes))
        chunks: list[Chunk] = []
        late: list[Chunk] = []
        prefills = [request for request in order if request in self.running and request not in decodes]
        others = bool(decodes) or any(self._next_chunk(request).load is None for request in prefills)
        for request in prefills:
            if request not in self.running:
                continue
            chunk = self._next_chunk(request)
            # A load goes on while its head is computed. The only work there is begins behind it, layer by layer.
            arrived = (
                request in self.loads.driven and others and self.executor.arrived(self.loads.driven[request].handle)
            )
            if chunk.load is not None and others and not arrived:
                late.append(chunk)
            else:
                budget -= self._add(chunks, chunk, budget)
                others = True
        late = [chunk for chunk in late if chunk.request in self.running]
        if late and not (chunks or decodes):
            self._add(chunks, late[0], budget)
        # A prefill may have taken the blocks of a younger request whose decode was planned already.
        return chunks, [request for request in decodes if request in self.running]

    def _decodes(self, request: Request) -> bool:
        """Whether all but the last token of a running request is computed."""
        computed = request.computed
        return 0 < computed == len(request.tokens) - 1 and request in self.running and request not in self.loads.driven

    def _next_chunk(self, request: Request) -> Chunk:
        """What a request could compute next, were the budget large enough: up to its load, behind it, or to the end."""
        load, end = self.loads.driven.get(request), len(request.tokens)
        if load is None:
            return Chunk(request, request.computed, end)
        if request.computed < load.start:
            return Chunk(request, request.computed, load.start)
        return Chunk(request, load.stop, end, load)

    def _add(self, chunks: list[Chunk], chunk: Chunk, budget: int) -> int:
        """Plan as much of a chunk as the budget and the pool allow; returns its tokens."""
        stop = min(chunk.stop, chunk.start + budget)
        if stop == chunk.start or not self._writable(chunk.request, chunk.start, stop):
            return 0
        chunks.append(replace(chunk, stop=stop))
        return stop - chunk.start

    # Admission --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        # Those that run only grow: after a refusal it is no use to ask again before something has stopped or landed.
        while self.waiting and self._room_changed and len(self.running) < self.max_running:
            first = self.waiting[0]
            if self._try_admit(first):
                self.waiting.remove(first)
            else:
                self._room_changed = False

    def _try_admit(self, request: Request) -> bool:
        """Attach what is resident, make room for the prompt, decide on the rest. False: it has to wait."""
        size, now = self.allocator.block_size, self.executor.now()
        most = len(request.tokens)
        self.cache.name(request, reloadable_tokens(most, most, size) // size)
        wanted = request.hashes[: reloadable_tokens(most, most, size) // size]
        load = self.loads.bringing(wanted[self.index.matched(wanted) :])
        if load is not None:
            request.state = "loading"
            load.waiters.append(request)
            self.counts.joined_loads += 1
            return True
        table = self.cache.attach(request, wanted, now)
        # Room for one more block for each that runs already, or they would preempt this one at once.
        need = blocks_for(most, size) - len(table.blocks) + len(self.running)
        if not (self.cache.reclaimable(table, self._busy()) >= need and self._make_room(need)):
            others = self.running or self.loads.under_way or self.loads.quarantine
            assert others, f"request {request.id} fits the pool and cannot be admitted"
            self.cache.park(request)
            return False
        try:
            self._decide(request, wanted, now)
        except Exception:  # a policy's; nothing has begun, and the request is left waiting
            self.cache.park(request)
            request.state = "waiting"
            raise
        self._prefilling_s.begin(now)
        self.loads.began(now)
        self._count_hits(request, "pool")
        self.allocator.grow(table, most)
        self.running[request] = None
        return True

    def _decide(self, request: Request, wanted: list[bytes], now: float) -> None:
        """Ask the policy about the blocks behind the resident ones, and begin the load that it wants."""
        table, size = request.table, self.allocator.block_size
        assert table is not None
        request.state = "running"
        first = table.tokens // size
        options = []
        # A partial block behind the resident ones makes way for a full one; a shared one would not give up its room.
        blocked = any(self.allocator.ref_count(block) > 1 for block in table.blocks[first:])
        for tier in () if blocked else self._untried(request):
            self.executor.look_up(tier, wanted[first:], request.salt)
            held = matched_blocks(wanted[first:], partial(self.executor.holds, tier, salt=request.salt))
            if held:
                found = wanted[first : first + held]
                options.append(self.loads.option(tier, (first + held) * size, found, now))
        if not options:
            return
        decodes = sum(other.computed == len(other.tokens) - 1 for other in self.running)
        situation = Situation(
            key=(request.id, request.turn),
            arch=self.arch,
            kv_dtype=self.kv_dtype,
            block_size=size,
            prompt=len(request.tokens),
            resident=first * size,
            options=tuple(options),
            active_decodes=decodes,
            groups=self.executor.groups,
            waiting=len(self.waiting) - 1,
            ahead=len(self.running) - decodes,
            loading=sum(other.state == "loading" for other in self.running),
            load=self._prefilling_s.per_second(now),
        )
        decision = self.policy.decide(situation)
        if not isinstance(decision, Decision):
            raise ValueError(
                f"{type(self.policy).__name__} decided {decision!r:.60}; expected a kvlab.policies.Decision"
            )
        decision.check(situation, type(self.policy).__name__)
        decision.made_s = now
        self.decisions.append(decision)
        self.counts.decisions[decision.choice] += 1
        request.decision = decision
        if decision.option is None:
            return
        self.cache.free(self.allocator.truncate(table, first * size))
        self.allocator.grow(table, decision.start)
        self.loads.begin(request, decision.option.tier, wanted[: decision.stop // size], decision.start // size)
        request.state = "loading"
        self.counts.loads += 1
        self.counts.second_loads += bool(request.failed_tiers)

    def _untried(self, request: Request) -> list[str]:
        """The tiers that a request may ask in this turn: one that has failed it is not asked again."""
        return [tier for tier in self.executor.tiers if tier not in request.failed_tiers]

    def _land(self, load: Load, valid: int) -> None:
        """A load is over: wake the waiters; what it did not bring comes from another tier, or is computed."""
        self._room_changed = True
        driver, complete, now = load.driver, valid == len(load.table.blocks), self.executor.now()
        self.counts.timed_out_loads += self.loads.land(load, valid, now)
        self.counts.failed_loads += not complete
        if driver is not None:
            driver.state = "running"
            self._count_hits(driver, load.tier)
        if not complete:
            for request in (*load.waiters, *([driver] if driver is not None else ())):
                request.failed_tiers.add(load.tier)
        for waiter in load.waiters:
            self.enqueue(waiter)
        if driver is not None and not complete and self._held_elsewhere(driver, load):
            self.stop(driver)
            self.enqueue(driver)  # to be asked about again

    def _count_hits(self, request: Request, source: str) -> None:
        """What a request has got from `source`, as far as it had not got or computed it before in this turn."""
        got = min(request.computed, request.prompt)
        self.counts.hit_tokens[source] += max(0, got - request.reached)
        request.reached = max(request.reached, got)

    def _held_elsewhere(self, request: Request, load: Load) -> bool:
        """Whether a tier that was not tried yet holds what should have come next."""
        missing = load.hashes[request.computed // self.allocator.block_size]
        return any(self.executor.holds(tier, missing, request.salt) for tier in self._untried(request))

    # Blocks -----------------------------------------------------------------------------------------------------------

    def _writable(self, request: Request, start: int, stop: int) -> bool:
        """Blocks of its own for positions [start, stop). False: it had to give way and waits again."""
        table, size = request.table, self.allocator.block_size
        assert table is not None
        need = blocks_for(stop, size) - len(table.blocks)
        if need > 0:
            if not self._room_for(request, need):
                return False
            self.allocator.grow(table, stop)
        for index in range(start // size, blocks_for(stop, size)):
            while self.allocator.ref_count(table.blocks[index]) > 1:  # a branch shares it: copy, or outlive the others
                if self.allocator.free_blocks:
                    copied = self.allocator.writable(table, index * size)
                    assert copied is not None
                    self.executor.copy_block(*copied)
                    self.counts.copied_blocks += 1
                elif not self._room_for(request, 1):
                    return False
        return True

    def _room_for(self, request: Request, blocks: int) -> bool:
        """Free blocks for a running request, by preempting younger ones if need be, or itself."""
        while not self._make_room(blocks):
            youngest = max(self.running, key=lambda other: other.arrival)
            self.counts.preemptions += 1
            youngest.preemptions += 1
            self.stop(youngest)
            self.enqueue(youngest)
            if youngest is request:
                return False
        return True

    def _make_room(self, blocks: int) -> bool:
        """Free blocks from those that nobody runs on; also from loads whose driver has stopped, once they are here."""
        while not self.cache.make_room(blocks):
            over = next((load for load in self.loads.abandoned if self.executor.arrived(load.handle)), None)
            if over is None:
                return False
            self._land(over, self.executor.finish(over.handle))
        return True

    def _busy(self) -> Iterator[BlockTable]:
        """Tables that nobody may take blocks from."""
        yield from (request.table for request in self.running if request.table is not None)
        yield from self.loads.tables()

    def check_integrity(self) -> None:
        """Assert that every reference to a block has an owner, and that states and places agree."""
        self.cache.check_integrity(self._busy())
        self.loads.check_integrity()
        assert not self.running.keys() & self.cache.idle.keys(), "a request runs and is idle"
        for request in self.running:
            assert request.computed < len(request.tokens), f"request {request.id} has computed what it does not have"
        for states, group in (("waiting", self.waiting), ("running, loading", self.running)):
            assert all(request.state in states for request in group), f"a request that is {states} says otherwise"
