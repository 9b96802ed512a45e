"""The scheduler needs no model: on a clock that is only billed it decides as it does for the engine."""

import subprocess
import sys
from collections import Counter

import pytest
from tiny_engine import VOCAB, one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab import policies
from kvlab.arithmetic import kv_bytes
from kvlab.engine import Engine
from kvlab.executor import Outcome
from kvlab.fingerprint import HASH_BYTES, Fingerprint, block_hashes
from kvlab.request import Request
from kvlab.scheduler import Scheduler
from kvlab.tiers import HostTier

FINGERPRINT = Fingerprint("w", "c", "t", "r", "fp64", "b")


class Bill:
    """An executor that computes nothing: each action adds to a clock what the machine says it takes."""

    def __init__(self, num_blocks, block_size, machine, arch):
        self.num_blocks, self.block_size, self.groups, self.tiers = num_blocks, block_size, 2, ("host",)
        self.block_bytes = kv_bytes(arch, block_size, "fp64")
        self.machine, self.arch, self.clock_s, self.host = machine, arch, 0.0, set()

    def now(self):
        return self.clock_s

    def hashes(self, request, first, last):
        parent = request.hashes[first - 1] if first else bytes(HASH_BYTES)
        size = self.block_size
        return block_hashes(FINGERPRINT, request.tokens[first * size : last * size], size, parent)

    def storing_bytes(self, tier, hashes):
        return 0

    def look_up(self, tier, hashes, salt):
        pass

    def holds(self, tier, block_hash, salt):
        return block_hash in self.host

    def store(self, hashes, blocks, salt):
        self.host.update(hashes)

    def load(self, tier, hashes, blocks, salt):
        size = len(blocks) * self.block_bytes
        return len(blocks), self.clock_s + self.machine.link(tier).transfer_s(size, len(blocks), 2)

    def bytes_of(self, blocks):
        return blocks * self.block_bytes

    def remaining_bytes(self, handle):
        return 0 if self.arrived(handle) else self.bytes_of(handle[0])

    def arrived(self, handle):
        return self.clock_s >= handle[1]

    def finish(self, handle):
        self.clock_s = max(self.clock_s, handle[1])
        return handle[0]

    def copy_block(self, source, target):
        pass

    def freed(self, blocks):
        pass

    def run(self, chunks, decodes):
        for chunk in chunks:
            self.clock_s += self.machine.prefill_s(self.arch, chunk.start, chunk.stop)
        self.clock_s += sum(self.machine.prefill_s(self.arch, r.computed, r.computed + 1) for r in decodes)
        valid = {chunk.load: self.finish(chunk.load.handle) for chunk in chunks if chunk.load is not None}
        asked = [*decodes, *(chunk.request for chunk in chunks if chunk.stop == len(chunk.request.tokens))]
        return Outcome({request: sum(request.tokens) % VOCAB for request in asked}, valid)


class Simulated:
    """The engine's verbs over a scheduler that bills, as far as the workload below needs them."""

    def __init__(self, pool_blocks, policy):
        arch = tiny_model().arch
        self.executor = Bill(pool_blocks, 4, tiny_machine(), arch)
        self.scheduler = Scheduler(
            self.executor, arch, "fp64", policy, policies.LRU(), token_budget=32, max_running=8, watermarks=(0.0, 0.0)
        )
        self.made = 0

    def begin(self, request, tokens, new):
        self.made += 1
        request.begin_turn(tokens, new, self.made, self.executor.now())
        self.scheduler.enqueue(request)
        return request

    def submit(self, tokens, new):
        return self.begin(Request(self.made, [], new), tokens, new)

    resume = begin

    def offload(self, request):
        self.scheduler.cache.offload(request)

    def run(self):
        while self.scheduler.busy:
            self.scheduler.step()
            self.scheduler.check_integrity()


def agents(engine):
    """Four agents with a preamble in common, in a pool that holds about two of them; they leave and come back."""
    preamble = text(24, seed=1)
    requests = [engine.submit([*preamble, *text(6 + 4 * n, seed=n)], 4) for n in range(4)]
    engine.run()
    for turn in range(3):
        for n in (2, 0, 3, 1):
            engine.offload(requests[n])
            engine.resume(requests[n], text(5, seed=100 + 10 * turn + n), 3)
            engine.run()
        for n in (1, 3):
            engine.resume(requests[n], text(3, seed=200 + 10 * turn + n), 2)
        engine.run()
    return requests


@pytest.mark.parametrize("policy", [policies.Reload(), policies.Recompute(), policies.Threshold(30)], ids=repr)
def test_an_executor_that_bills_sees_the_hits_that_the_engine_sees(policy):
    simulated = Simulated(24, policy)
    agents(simulated)
    with Engine(
        tiny_model(), 24, 4, [HostTier(1 << 20)], policy, token_budget=32, max_running=8, groups=2, poison=True
    ) as engine:
        agents(engine)
        real, billed = engine.scheduler.counts, simulated.scheduler.counts
        assert billed.hit_tokens == real.hit_tokens
        assert billed.computed_tokens == real.computed_tokens
        assert billed.decisions == real.decisions
        assert billed.loads == real.loads
    assert simulated.executor.now() > 0
    if policy == policies.Reload():
        assert real.hit_tokens["host"] > 100


def test_every_token_of_a_prompt_is_a_hit_or_computed():
    simulated = Simulated(64, policies.Reload())
    requests = agents(simulated)
    counts = simulated.scheduler.counts
    assert counts.preemptions == 0
    # In each turn all but the last token of the sequence are resident, loaded or computed: no more and no less.
    assert sum(Counter(counts.hit_tokens).values()) + counts.computed_tokens > sum(len(r.tokens) - 1 for r in requests)
    last = simulated.submit(requests[0].tokens, 1)
    before = sum(counts.hit_tokens.values()) + counts.computed_tokens
    simulated.run()
    assert sum(counts.hit_tokens.values()) + counts.computed_tokens - before == len(last.tokens) - 1


def test_policies_and_scheduler_do_not_need_torch():
    code = "import sys, kvlab.scheduler, kvlab.policy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
