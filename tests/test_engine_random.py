"""Whatever is asked of the engine, in any order, on any backend: every token is that of a run without cache."""

import contextlib
import random
import tempfile
import threading
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_engine import BACKENDS as PUNCTUAL
from tiny_engine import VOCAB, check_tokens, one_thread, text, tiny_machine, tiny_model  # noqa: F401

from kvlab import policies, scheduler
from kvlab.adversaries import OverdueStreams
from kvlab.blocks import blocks_for
from kvlab.engine import Engine
from kvlab.request import Sampling
from kvlab.tiers import DiskTier, HostTier, TierError
from kvlab.torch_executor import _copy_down

BACKENDS = PUNCTUAL | {"overdue": OverdueStreams, "overdue in place": lambda: OverdueStreams(in_place=True)}
SHARED = [text(60, seed) for seed in (1, 2)]  # what prompts begin with, so that they meet


class AnyReplay(Mapping):
    """Replays of every request: which way was faster is as good as random."""

    def __getitem__(self, key):
        return {"reload": random.Random(hash(key)).random(), "recompute": 0.5}

    def __contains__(self, key):
        return True

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0


POLICIES = {
    "reload": policies.Reload(),
    "recompute": policies.Recompute(),
    "threshold": policies.Threshold(20),
    "calibrated": policies.Calibrated(tiny_machine()),
    "fast link": policies.Calibrated(tiny_machine(gb_per_s=10.0), allow_split=False),
    "oracle": policies.Oracle(AnyReplay()),
}
HANG_S = 0.005  # what a load may take where a tier hangs at times
TALLY: dict[str, int] = {}


@pytest.fixture(autouse=True, scope="module")
def short_naps():
    """Who waits for a tier that hangs looks again soon."""
    scheduler._NAP_S, before = 0.001, scheduler._NAP_S
    yield
    scheduler._NAP_S = before


SEEDS = 100  # schedules by seed, besides those of hypothesis


def tally(name, count=1):
    TALLY[name] = TALLY.get(name, 0) + count


class EngineSchedules(RuleBasedStateMachine):
    """One engine, any schedule."""

    @initialize(
        block_size=st.sampled_from([1, 2, 3, 8, 16, 32]),
        pool_tokens=st.sampled_from([48, 72, 128, 256]),
        kv_heads=st.sampled_from([2, 4]),
        policy=st.sampled_from(sorted(POLICIES)),
        backend=st.sampled_from(sorted(BACKENDS)),
        tiers=st.sampled_from(["", "host", "disk", "host disk"]),
        host_tokens=st.sampled_from([33, 100, 1000]),
        budget=st.sampled_from([1, 7, 64]),
        max_running=st.sampled_from([1, 3, 16]),
        watermarks=st.sampled_from([(0.0, 0.0), (0.1, 0.3)]),
        groups=st.sampled_from([1, 2]),
        cost_aware=st.booleans(),
        timeout_s=st.sampled_from([60.0, 60.0, HANG_S, 0.0]),
    )
    def build(
        self,
        block_size,
        pool_tokens,
        kv_heads,
        policy,
        backend,
        tiers,
        host_tokens,
        budget,
        max_running,
        watermarks,
        groups,
        cost_aware,
        timeout_s,
    ):
        self.model = tiny_model(kv_heads)
        self.folder = tempfile.TemporaryDirectory()
        token_bytes = self.model.layout(block_size).block_bytes // block_size
        self.tiers = []
        if "host" in tiers:
            self.tiers.append(HostTier(max(host_tokens, block_size) * token_bytes))
        if "disk" in tiers:
            self.tiers.append(DiskTier(self.folder.name, 1 << 20))
        self.tiers += self.more_tiers()
        eviction = policies.LRU()
        if cost_aware:
            eviction = policies.CostAware(tiny_machine(), self.model.arch, "fp64", block_size)
        self.streams, self.gates = BACKENDS[backend](), []
        self.may_hang = backend == "thread" and timeout_s < 1  # elsewhere it would hang the one who looks
        self.engine = Engine(
            self.model,
            blocks_for(pool_tokens, block_size),
            block_size,
            self.tiers,
            POLICIES[policy],
            eviction=eviction,
            token_budget=budget,
            max_running=max_running,
            watermarks=watermarks,
            groups=groups,
            load_timeout_s=timeout_s,
            streams=self.streams,
            poison=True,
        )
        self.requests, self.generated = [], {}
        tally("schedules")
        tally(f"backend {backend}")
        tally(f"policy {policy}")

    def more_tiers(self):
        """Tiers that a variant of this test adds, as the last ones."""
        return []

    def new_token(self, request, token):
        assert request.tokens[-1] == token
        # Requests are known here before `submit` has returned them.
        self.generated.setdefault(request, set()).add(len(request.tokens) - 1)

    def pick(self, index, *states):
        found = [request for request in self.requests if request.state in states]
        return found[index % len(found)] if found else None

    def fits(self, tokens, new):
        size = self.engine.scheduler.allocator.block_size
        return blocks_for(tokens + new - 1, size) <= self.engine.scheduler.allocator.num_blocks

    @rule(
        shared=st.integers(0, 1),
        prefix=st.integers(0, 60),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=9),
        new=st.integers(1, 12),
        salt=st.sampled_from(["", "", "", "tenant"]),
        seed=st.sampled_from([None, None, 7]),
    )
    def submit(self, shared, prefix, own, new, salt, seed):
        tokens = SHARED[shared][:prefix] + own or [5]
        sampling = Sampling() if seed is None else Sampling(1.0, seed)
        call = {"sampling": sampling, "salt": salt, "on_token": self.new_token}
        if self.fits(len(tokens), new):
            self.requests.append(self.engine.submit(tokens, new, **call))
        else:
            with pytest.raises(ValueError, match="can never run here"):
                self.engine.submit(tokens, new, **call)

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps if self.engine.scheduler.busy else 0):
            self.engine.step()
            self.engine.check_integrity()
            tally("steps")

    @rule(index=st.integers(0, 20))
    def pause(self, index):
        if request := self.pick(index, "waiting", "loading", "running", "finished"):
            self.engine.pause(request)

    @rule(index=st.integers(0, 20), more=st.lists(st.integers(0, VOCAB - 1), max_size=20), new=st.integers(1, 8))
    def resume(self, index, more, new):
        request = self.pick(index, "paused", "finished")
        if request is not None and self.fits(len(request.tokens) + len(more), new):
            self.engine.resume(request, more, new)
            tally("resumes")

    @rule(index=st.integers(0, 20))
    def branch(self, index):
        if request := self.pick(index, "waiting", "loading", "running", "paused", "finished"):
            child = self.engine.branch(request)
            self.requests.append(child)
            self.generated[child] = set(self.generated.get(request, ()))
            if self.fits(len(child.tokens), 5):
                self.engine.resume(child, (), 5)

    @rule(index=st.integers(0, 20))
    def cancel(self, index):
        if request := self.pick(index, "waiting", "loading", "running", "paused", "finished"):
            self.engine.cancel(request)

    @precondition(lambda self: self.tiers)
    @rule(index=st.integers(0, 20))
    def offload(self, index):
        if request := self.pick(index, "paused", "finished"):
            self.engine.offload(request)

    @precondition(lambda self: self.tiers and self.requests)
    @rule(
        index=st.integers(0, 20),
        more=st.lists(st.integers(0, VOCAB - 1), max_size=9),
        steps=st.integers(0, 9),
        twins=st.integers(0, 2),
        spoil=st.sampled_from([None, "rot", "rot above", "cut", "lose"]),
        place=st.floats(0, 0.999),
    )
    def go_away_and_come_back(self, index, more, steps, twins, spoil, place):
        """A request leaves the pool altogether and returns, perhaps with others that want the same blocks."""
        self.step(6)
        if request := self.pick(index, "waiting", "loading", "running", "finished"):
            self.engine.pause(request)
        request = self.pick(index, "paused")
        if request is None or not self.fits(len(request.tokens) + len(more), 4):
            return
        self.engine.offload(request)
        self.engine.evict(1000)
        if spoil:
            self.drain()
            if len(self.tiers) == 2:
                self.copy_down()
            if spoil == "rot above":  # every block there is bad, so that the tier below has its turn
                for part in range(20):
                    self.fault(0, "rot", (part + place) / 20)
            else:
                for tier in range(len(self.tiers)):
                    self.fault(tier, spoil, place)
        for _ in range(twins):
            if request.sampling.temperature == 0:
                self.submit(0, 0, [*request.tokens, *more], 3, request.salt, None)
        self.engine.resume(request, more, 4)
        tally("resumes")
        self.step(steps)

    @rule()
    def drain(self):
        """Every transfer that has begun ends now: what it writes to, it had better own."""
        self.come_back()
        self.engine.executor.drain()

    @precondition(lambda self: self.tiers)
    @rule(tier=st.integers(0, 1))
    def hang(self, tier):
        """Nothing that is asked of a tier from now on comes, for a while."""
        if self.may_hang:
            self.gates.append(threading.Event())
            self.streams.io(self.gates[-1].wait, [], None, self.tiers[tier % len(self.tiers)].name)
            tally("hangs")

    @rule()
    def come_back(self):
        """What hung goes on."""
        for gate in self.gates:
            gate.set()

    @precondition(lambda self: len(self.tiers) == 2)
    @rule()
    def copy_down(self):
        """The lower tier gets what the upper one holds, so that there is a second place to load it from."""
        upper, lower = self.tiers
        for fingerprint in self.engine.executor._fingerprints.values():
            held = [h for h in upper._index if upper.contains(h, fingerprint) and not lower.contains(h, fingerprint)]
            with contextlib.suppress(TierError):  # `refuse_next` came before
                if held and (store := _copy_down(upper, lower, held, fingerprint)) is not None:
                    store.publish()
                    tally("copied down", len(store.hashes))

    @rule(blocks=st.integers(1, 40))
    def evict(self, blocks):
        self.engine.evict(blocks)

    @precondition(lambda self: self.tiers and any(tier.used_bytes for tier in self.tiers))
    @rule(tier=st.integers(0, 1), kind=st.sampled_from(["rot", "cut", "lose", "refuse"]), place=st.floats(0, 0.999))
    def fault(self, tier, kind, place):
        tier = self.tiers[tier % len(self.tiers)]
        files = sorted(tier.folder.glob("*.kv*")) if isinstance(tier, DiskTier) else []
        file = files[int(place * len(files))] if files else None
        if kind == "refuse":
            self.refuse_next(tier)
        elif isinstance(tier, HostTier):
            for slab in tier._slabs:
                slab.memory[int(place * slab.memory.numel())] ^= 16
        elif file and kind == "lose":
            file.unlink()
        elif file and kind == "cut":
            with file.open("r+b") as handle:
                handle.truncate(int(place * file.stat().st_size))
        elif file and file.stat().st_size:
            raw = bytearray(file.read_bytes())
            raw[int(place * len(raw))] ^= 16
            file.write_bytes(raw)
        tally("faults")

    @staticmethod
    def refuse_next(tier):
        """The next store finds the tier full or gone."""
        reserve = tier.reserve

        def refuse(*args, **kwargs):
            tier.reserve = reserve
            raise TierError(28, "no space left on device")

        tier.reserve = refuse

    @invariant()
    def integrity(self):
        if hasattr(self, "engine"):
            self.engine.check_integrity()

    def run_to_the_end(self):
        """Where all wait for the room of a load that hangs, it comes; that helps, or the next line is reached."""
        self.come_back()
        for _ in range(20):
            try:
                return self.engine.run()
            except RuntimeError as error:
                if "blocks that a tier which hangs may still write to" not in str(error):
                    raise
            tally("stuck behind a hanging tier")
            self.engine.executor.drain()
        raise AssertionError("what hung has come, and still nothing runs")

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.run_to_the_end()
        self.engine.check_integrity()
        for request in self.requests:
            assert request.state in ("finished", "paused", "cancelled")
            tally("ties", check_tokens(self.model, request, self.generated.get(request, ())))
            tally("tokens", len(self.generated.get(request, ())))
        metrics = self.engine.metrics()
        for name in (
            "preemptions",
            "loads",
            "failed_loads",
            "joined_loads",
            "copied_blocks",
            "demoted_blocks",
            "timed_out_loads",
            "second_loads",
        ):
            tally(name, metrics[name])
        for choice, count in metrics["decisions"].items():
            tally(f"chose {choice}", count)
        for request in self.requests:
            if request.state != "cancelled":
                self.engine.cancel(request)
        self.engine.evict(10**6)
        self.engine.executor.drain()
        self.engine.close()
        self.engine.check_integrity()
        assert self.engine.scheduler.allocator.free_blocks == self.engine.scheduler.allocator.num_blocks
        assert not self.engine.executor.transfer.under_way
        for tier in self.tiers:
            assert tier.counters.defects == 0  # no fault of a disk or memory makes our own tiers raise what none may
            tier.clear()
            assert tier.used_bytes == 0  # nothing is still being read, or written
        self.streams.close()
        self.folder.cleanup()


def drive(seed, make=EngineSchedules, **fixed):
    """One schedule from a seed, longer than hypothesis' own, with all rules in it; `fixed` settings are not drawn."""
    choose = random.Random(seed)
    machine = make()
    drawn = {
        "block_size": choose.choice([1, 2, 3, 4, 8, 16, 32]),
        "pool_tokens": choose.choice([48, 72, 128, 256]),
        "kv_heads": choose.choice([2, 4]),
        "policy": choose.choice([*POLICIES, "reload", "calibrated"]),
        "backend": choose.choice(sorted(BACKENDS)),
        "tiers": choose.choice(["", "host", "disk", "host disk", "host disk"]),
        "host_tokens": choose.choice([33, 100, 1000]),
        "budget": choose.choice([1, 7, 64]),
        "max_running": choose.choice([1, 3, 16]),
        "watermarks": choose.choice([(0.0, 0.0), (0.1, 0.3)]),
        "groups": choose.choice([1, 2]),
        "cost_aware": choose.random() < 0.3,
        "timeout_s": choose.choice([60.0, 60.0, HANG_S, 0.0]),
    }
    machine.build(**(drawn | fixed))

    def ids(most):
        return [choose.randrange(VOCAB) for _ in range(choose.randint(0, most))]

    for _ in range(40):
        index, place = choose.randrange(20), choose.random()
        action = choose.choices(
            (
                *("submit", "step", "pause", "resume", "branch", "cancel", "offload", "evict", "fault", "away"),
                *("drain", "hang", "come_back", "copy_down"),
            ),
            [6, 10, 4, 5, 3, 1, 2, 1, 2, 4, 2, 2, 1, 1],
        )[0]
        if action == "submit":
            salt = choose.choice(["", "", "", "tenant"])
            prefix, seed = choose.choice([0, 20, 40, 60]), choose.choice([None, None, 7])
            machine.submit(choose.randrange(2), prefix, ids(9), choose.randint(1, 12), salt, seed)
        elif action == "step":
            machine.step(choose.randint(1, 8))
        elif action == "resume":
            machine.resume(index, ids(20), choose.randint(1, 8))
        elif action == "evict":
            machine.evict(choose.randint(1, 40))
        elif action in ("drain", "come_back"):
            getattr(machine, action)()
        elif action == "copy_down":
            if len(machine.tiers) == 2:
                machine.copy_down()
        elif action == "hang":
            if machine.tiers:
                machine.hang(index)
        elif action in ("pause", "branch", "cancel"):
            getattr(machine, action)(index)
        elif machine.tiers and action == "offload":
            machine.offload(index)
        elif machine.tiers and action == "fault":
            machine.fault(index, choose.choice(["rot", "cut", "lose", "refuse"]), place)
        elif machine.tiers and machine.requests:
            spoil = choose.choice([None, None, None, "rot", "rot above", "rot above", "cut", "lose"])
            machine.go_away_and_come_back(index, ids(9), choose.randint(0, 9), choose.randint(0, 2), spoil, place)
        machine.integrity()
    machine.teardown()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_seeded_schedules_give_the_tokens_of_a_run_without_cache(first):
    for seed in range(first, first + 25):
        try:
            drive(seed)
        except BaseException as error:
            error.add_note(f"schedule of seed {seed}")
            raise


def test_where_the_upper_tier_often_fails_the_lower_one_has_its_turn():
    for seed in range(SEEDS, SEEDS + 20):
        drive(seed, tiers="host disk", policy="reload", host_tokens=1000)
    for seed in range(SEEDS + 20, SEEDS + 30):
        drive(seed, tiers="host disk", policy="reload", backend="thread", timeout_s=HANG_S)


def test_the_schedules_were_of_every_kind():
    """Runs after those above: what they are for did happen, or they prove less than they say."""
    if TALLY.get("schedules", 0) < SEEDS:
        pytest.skip("only some of the schedules ran")
    for backend in BACKENDS:
        assert TALLY[f"backend {backend}"] > SEEDS / 10
    assert TALLY["timed_out_loads"] > 5
    assert TALLY["second_loads"] > 5
    assert TALLY["hangs"] > 5
    for what in (
        "preemptions", "loads", "failed_loads", "joined_loads", "copied_blocks", "demoted_blocks",
        "chose reload", "chose recompute", "chose split",
    ):  # fmt: skip
        assert TALLY[what] > 5, f"{what} hardly ever happened: {TALLY}"


EngineSchedules.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestAnyScheduleGivesTheTokensOfARunWithoutCache = EngineSchedules.TestCase
