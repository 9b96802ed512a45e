"""The decision is its arithmetic: both times, the flips over whole blocks, the break-even speed, the best split."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.crossings import Crossing, crossings_of, interpolated_crossover, settled_crossover
from kvlab.machine import Curve, Link, Machine, Prefill, machine_names
from kvlab.pipeline import layer_bounds
from kvlab.split import Split, best_split
from kvlab.storing import storing
from kvlab.units import format_s
from kvlab.verdict import decide

TINY = ModelArch.preset("tiny")
DEEP = replace(TINY, layers=TINY.layers * 15)  # 30 of them


def machine(gb_per_s=0.02, overhead_s=0.0, fixed_s=0.0, linear=1e9, attention=1e9, slowdown=0.0, spread=0.1) -> Machine:
    return Machine(
        "test",
        Prefill(fixed_s, Curve(((1.0, linear),)), Curve(((1.0, attention),)), "tiny", spread=spread),
        {
            "host": {
                "load": Link(
                    Curve(((1.0, gb_per_s),)), per_request_s=overhead_s, decode_slowdown=slowdown, spread=spread
                )
            }
        },
    )


machines = st.builds(
    machine,
    gb_per_s=st.floats(1e-4, 1.0),
    overhead_s=st.floats(0, 0.1),
    fixed_s=st.floats(0, 0.05),
    linear=st.floats(1e8, 1e11),
    attention=st.floats(1e8, 1e11),
)


@given(machines, st.integers(0, 2000), st.integers(1, 200), st.sampled_from([1, 8, 16, 64]))
def test_both_times_are_the_stated_sums(m, prefix, suffix, block):
    verdict = decide(TINY, m, prefix=prefix, suffix=suffix, block_size=block, queued_bytes=10_000)
    kept = prefix // block * block
    link = m.link("host")
    size = kv_bytes(TINY, kept, "bf16")
    reload_s = (size + 10_000) / link.gb_per_s(1) / 1e9 + link.per_request_s if kept else 0.0
    assert verdict.ttft_reload_s == pytest.approx(reload_s + m.prefill_s(TINY, kept, prefix + suffix))
    assert verdict.ttft_recompute_s == pytest.approx(m.prefill_s(TINY, 0, prefix + suffix))
    assert verdict.choice in ("reload", "recompute")
    if verdict.choice == "reload":
        assert verdict.cost_reload_s < verdict.cost_recompute_s
        assert kept > 0


@settings(max_examples=30)
@given(machines, st.integers(1, 64), st.sampled_from([64, 256]))
def test_crossings_equal_a_dense_scan_over_whole_blocks(m, suffix, block):
    verdict = decide(TINY, m, prefix=block, suffix=suffix, block_size=block)
    lengths = list(range(block, TINY.max_positions - suffix + 1, block))
    wins = []
    for prefix in lengths:
        one = decide(TINY, m, prefix=prefix, suffix=suffix, block_size=block)
        wins.append(one.ttft_reload_s < one.ttft_recompute_s)
    changes = [(lengths[i], wins[i]) for i in range(1, len(wins)) if wins[i] != wins[i - 1]]
    assert [(c.tokens, c.winner_above == "reload") for c in verdict.crossings] == changes
    if all(wins):
        assert verdict.crossover_tokens == 0
    elif not wins[-1]:
        assert verdict.crossover_tokens is None
    else:
        assert verdict.crossover_tokens == changes[-1][0]


@given(machines, st.integers(16, 4000), st.integers(1, 64), st.integers(1, 30))
def test_at_the_break_even_speed_the_two_times_tie(m, prefix, suffix, groups):
    load = {"queued_bytes": 5000, "link_share": 0.5, "overlap_groups": groups}
    verdict = decide(DEEP, m, prefix=prefix, suffix=suffix, **load)
    speed = verdict.break_even_gb_per_s
    if math.isinf(speed):
        fast = decide(
            DEEP,
            m.with_link("host", Link(Curve(((1.0, 1e9),)), per_request_s=m.link("host").per_request_s)),
            prefix=prefix,
            suffix=suffix,
            overlap_groups=groups,
        )
        assert fast.ttft_reload_s >= fast.ttft_recompute_s * (1 - 1e-9)
        return
    assume(1e-12 < speed < 1e12)
    tied = m.with_link("host", Link(Curve(((1.0, speed),)), per_request_s=m.link("host").per_request_s))
    again = decide(DEEP, tied, prefix=prefix, suffix=suffix, **load)
    assert again.ttft_reload_s == pytest.approx(again.ttft_recompute_s, rel=1e-6)


@settings(max_examples=40)
@given(machines, st.integers(32, 1500))
def test_the_split_is_the_best_of_all_heads(m, prefix):
    verdict = decide(TINY, m, prefix=prefix, suffix=8)
    blocks, link = verdict.reload_tokens // 16, m.link("host")
    rest_s = m.prefill_s(TINY, blocks * 16, prefix + 8)

    def split_s(head):
        tail_bytes = kv_bytes(TINY, blocks * 16, "bf16") - kv_bytes(TINY, head * 16, "bf16")
        return max(link.transfer_s(tail_bytes, blocks - head, 2), m.prefill_s(TINY, 0, head * 16)) + rest_s

    best = min((split_s(head) for head in range(1, blocks)), default=math.inf)
    whole = min(verdict.ttft_reload_s, verdict.ttft_recompute_s)
    if verdict.split is None:
        assert best >= whole * (1 - 1e-9)
    else:
        assert verdict.split.ttft_s == pytest.approx(best)
        assert verdict.split.recompute_tokens + verdict.split.reload_tokens == blocks * 16
        assert verdict.split.ttft_s < whole


def least_split_s(verdict):
    """The least cost of all heads, each priced from the machine's own two times."""
    m, size, link = verdict.machine, verdict.block_size, verdict.machine.link(verdict.tier)
    blocks = verdict.reload_tokens // size
    rest_s = m.prefill_s(verdict.arch, verdict.resident + blocks * size, verdict.prefix + verdict.suffix)
    costs = []
    for head in range(1, blocks):
        head_s = m.prefill_s(verdict.arch, verdict.resident, verdict.resident + head * size)
        tail_bytes = kv_bytes(verdict.arch, (blocks - head) * size, verdict.kv_dtype, block_size=size)
        tail_s = link.transfer_s(tail_bytes, blocks - head, len(verdict.arch.layers))
        delay_s = head_s + rest_s + link.decode_slowdown * tail_s
        costs.append(
            max(verdict.wait_s + tail_s, head_s)
            + rest_s
            + verdict.decode_delay_value * delay_s
            + verdict.link_delay_value * tail_s
        )
    return min(costs, default=math.inf)


def assert_no_head_is_cheaper(verdict, rel=1e-9):
    whole_s, least_s = min(verdict.cost_reload_s, verdict.cost_recompute_s), least_split_s(verdict)
    if verdict.split is None:
        assert least_s >= whole_s * (1 - rel)
    else:
        assert verdict.split.cost_s == pytest.approx(least_s, rel=rel)
        assert verdict.split.cost_s < whole_s


values = st.sampled_from([0.0, 0.25, 1.0, 4.0])


@settings(max_examples=60, deadline=None)
@given(machines, st.floats(0, 0.5), st.integers(32, 6000), values, values, st.sampled_from([0, 10**6]))
def test_the_split_costs_least_of_all_heads_whatever_delays_are_worth(m, slowdown, prefix, decode, link, queued):
    m = m.with_link("host", replace(m.link("host"), decode_slowdown=slowdown))
    delays = {"decode_delay_value": decode, "link_delay_value": link, "queued_bytes": queued}
    assert_no_head_is_cheaper(decide(TINY, m, prefix=prefix, suffix=8, **delays))


@pytest.mark.parametrize("name", machine_names())
def test_the_split_costs_least_on_published_machines_too(name):
    m, llama = Machine.load(name), ModelArch.preset("llama-3.1-8b")
    found = 0
    for tier in m.links:
        for decode, link in ((0, 0), (0.25, 4), (1, 0.5), (0, 2), (4, 0)):
            for prefix in (4096, 120_000):
                delays = {"decode_delay_value": decode, "link_delay_value": link}
                verdict = decide(llama, m, prefix=prefix, suffix=64, tier=tier, block_size=512, **delays)
                assert_no_head_is_cheaper(verdict, rel=1e-3)
                found += verdict.split is not None
    assert found


def test_the_search_for_a_split_prices_few_heads_and_passes_over_a_rise_before_the_valley():
    priced = []

    def split(head):
        priced.append(head)
        cost_s = 100 + head / 10 - max(0, 1000 - 2 * abs(head - 5432))  # a valley, but the costs rise towards it
        return Split(head, 7500 - head, cost_s, cost_s, load_s=7500.0 - head, compute_s=float(head))

    assert best_split(split, 7500, delays_cost=True).recompute_tokens == 5432
    assert len(priced) == len(set(priced)) < 80
    priced.clear()
    assert best_split(split, 7500, delays_cost=False).recompute_tokens in (3749, 3750)  # on either side of the crossing
    assert len(priced) < 20


def test_a_split_says_what_it_takes_and_beats():
    m = machine(gb_per_s=0.002, linear=2e9)
    verdict = decide(TINY, m, prefix=1024, suffix=8, allow_split=True, decode_delay_value=0.5)
    split = verdict.split
    assert verdict.choice == "split"
    assert verdict.reason.startswith(f"split: {format_s(split.cost_s)}, {split.recompute_tokens} tokens computed while")
    assert f"{format_s(verdict.cost_reload_s)} for reload" in verdict.reason
    assert f"{format_s(verdict.cost_recompute_s)} for recompute" in verdict.reason
    lines = verdict.explain().splitlines()
    assert f"  time to first token by split     {format_s(split.ttft_s)}, costs {format_s(split.cost_s)}" in lines
    assert lines[-1] == verdict.reason
    (shown,) = (line for line in lines if line.startswith("split "))
    computed_s, loaded_s, rest_s = seconds_in(shown)
    assert max(computed_s, loaded_s) + rest_s == pytest.approx(split.ttft_s, rel=5e-3)


@pytest.mark.parametrize("spread", [0.01, 0.9])
@pytest.mark.parametrize("gb_per_s", [0.002, 0.0005])
def test_a_split_is_too_close_where_it_beats_the_best_whole_way_by_less_than_the_spread(gb_per_s, spread):
    m = machine(gb_per_s=gb_per_s, linear=2e9, spread=spread)
    verdict = decide(TINY, m, prefix=1024, suffix=8, allow_split=True)
    split, head_s = verdict.split, m.prefill_s(TINY, 0, verdict.split.recompute_tokens)
    tail_s = m.link("host").transfer_s(kv_bytes(TINY, split.reload_tokens), split.reload_tokens // 16, 2)
    if gb_per_s == 0.002:  # against reload: the head's load and the head's prefill are not shared
        assert verdict.cost_reload_s < verdict.cost_recompute_s
        spent_s = verdict.reload_s - tail_s, head_s
    else:  # against recompute: the tail's load and the tail's prefill
        assert verdict.cost_recompute_s < verdict.cost_reload_s
        spent_s = tail_s, m.prefill_s(TINY, 0, 1032) - m.prefill_s(TINY, 1024, 1032) - head_s
    assert verdict.spread_s == pytest.approx(spread * math.hypot(*spent_s))
    assert verdict.too_close == (spread == 0.9)
    assert ("too close" in verdict.reason) == verdict.too_close


def test_split_is_chosen_only_when_allowed():
    m = machine(gb_per_s=0.002, linear=2e9)
    plain = decide(TINY, m, prefix=1024, suffix=8)
    assert plain.split is not None
    assert plain.choice != "split"
    assert decide(TINY, m, prefix=1024, suffix=8, allow_split=True).choice == "split"


def test_there_can_be_no_flip_one_or_two():
    # Overhead loses at short prefixes; a fast attention-free machine and a slow link lose again at long ones.
    assert decide(TINY, machine(gb_per_s=10.0), prefix=16, suffix=16).crossings == []
    one = decide(TINY, machine(gb_per_s=10.0, overhead_s=0.02), prefix=16, suffix=16)
    assert [c.winner_above for c in one.crossings] == ["reload"]
    # A pass of more than 512 rows runs three times as fast: reload wins below, recompute in the middle, reload above.
    steps = Curve(((500.0, 1e9), (520.0, 3e9)))
    kinked = Machine(
        "kinked",
        Prefill(0.0, steps, Curve(((1.0, 3e10),)), "tiny"),
        {"host": {"load": Link(Curve(((1.0, 0.0038),)))}},
    )
    assert len(decide(TINY, kinked, prefix=16, suffix=16).crossings) >= 2


def test_a_prefix_without_a_whole_block_is_recomputed():
    verdict = decide(TINY, machine(gb_per_s=1e6), prefix=15, suffix=4, block_size=16)
    assert verdict.choice == "recompute"
    assert verdict.reload_tokens == 0
    assert "no whole block" in verdict.reason
    assert verdict.break_even_gb_per_s == math.inf


def test_a_wholly_cached_prompt_still_computes_its_last_token():
    verdict = decide(TINY, machine(gb_per_s=1e6), prefix=64, suffix=0, block_size=16)
    assert verdict.reload_tokens == 48
    assert verdict.suffix_s > 0


def test_load_on_the_link_moves_the_choice():
    m = machine(gb_per_s=0.02)
    idle = decide(TINY, m, prefix=2048, suffix=16)
    assert idle.choice == "reload"
    assert decide(TINY, m, prefix=2048, suffix=16, queued_bytes=10**8).choice == "recompute"
    assert decide(TINY, m, prefix=2048, suffix=16, link_share=0.001).choice == "recompute"


def test_delay_to_active_decodes_is_priced_in_both_arms():
    m = machine(gb_per_s=0.0005, slowdown=0.1)
    idle = decide(TINY, m, prefix=1024, suffix=16)
    assert idle.choice == "recompute"
    # Recompute holds the accelerator for its whole prefill, a reload only for the suffix and a tenth of the copy.
    busy = decide(TINY, m, prefix=1024, suffix=16, decode_delay_value=10.0)
    assert busy.cost_recompute_s == pytest.approx(busy.ttft_recompute_s * 11)
    assert busy.cost_reload_s == pytest.approx(busy.ttft_reload_s + 10 * (busy.suffix_s + 0.1 * busy.reload_s))


@given(machines, st.integers(16, 2000), st.integers(1, 200), st.integers(1, 40))
def test_overlap_is_a_pipeline_of_layer_groups(m, prefix, suffix, groups):
    verdict = decide(DEEP, m, prefix=prefix, suffix=suffix, overlap_groups=groups)
    arrived, computed = m.link("host").per_request_s, 0.0  # paid once, before any group comes
    streamed_s = verdict.reload_s - arrived
    for start, stop in pairwise((0, *layer_bounds(30, min(groups, 30)))):
        # Group i is computed when it has arrived and group i - 1 is computed.
        arrived += streamed_s * (stop - start) / 30
        computed = max(arrived, computed) + verdict.suffix_s * (stop - start) / 30
    assert verdict.ttft_reload_s == pytest.approx(computed)
    assert verdict.ttft_reload_s >= max(verdict.reload_s, verdict.suffix_s) * (1 - 1e-9)


def test_storing_pays_when_the_return_is_likely_enough():
    m = machine(gb_per_s=0.05)
    store = Link(Curve(((1.0, 0.01),)), decode_slowdown=0.5)
    m = m.with_link("host", m.link("host"), store)
    verdict = decide(TINY, m, prefix=1024, suffix=16)
    priced = storing(verdict)
    assert priced.store_s == pytest.approx(verdict.kv_bytes / 1e7)
    assert priced.break_even_return_chance == pytest.approx(0.5 * priced.store_s / priced.saved_s)
    assert priced.saved_s == pytest.approx(verdict.ttft_recompute_s - verdict.ttft_reload_s)
    assert priced.break_even_idle_gap_s == pytest.approx(priced.store_s + verdict.reload_s)
    likely = priced.break_even_return_chance
    assert priced.worth_it(likely * 1.01)
    assert not priced.worth_it(likely * 0.99)
    assert not priced.worth_it(likely * 1.01, idle_gap_s=priced.store_s)


def test_storing_what_will_be_recomputed_never_pays():
    slow = machine(gb_per_s=1e-5)
    slow = slow.with_link("host", slow.link("host"), slow.link("host"))
    assert not storing(decide(TINY, slow, prefix=1024, suffix=16)).worth_it()


def test_too_close_means_inside_the_spread():
    m = machine(spread=0.1)
    verdict = decide(TINY, m, prefix=1024, suffix=16)
    speed = verdict.break_even_gb_per_s
    assert decide(TINY, machine(gb_per_s=speed * 1.02), prefix=1024, suffix=16).too_close
    assert not decide(TINY, machine(gb_per_s=speed * 10), prefix=1024, suffix=16).too_close


def test_explain_shows_numbers_that_add_up_by_hand():
    text = decide(TINY, machine(), prefix=1024, suffix=16).explain()
    assert "64 blocks of 16" in text
    assert "20.0 MB/s (160 Mb/s)" in text
    assert "time to first token by reload" in text
    assert text.splitlines()[-1].startswith(("reload: ", "recompute: "))


def test_explain_writes_large_rates_in_tflop_and_says_what_ranks_share():
    h100 = Machine.load("h100-sxm-pcie5")
    llama = ModelArch.preset("llama-3.1-8b")
    text = decide(llama, h100, prefix=8192, suffix=64, tier="disk", tp=8, link_share=0.5).explain()
    # 2 × 6.979e9 weights × 8,256 tokens ÷ 1e12; 2 × 2 × 32 heads × 128 × 32 layers × 8,256 × 8,257 ÷ 2 pairs.
    assert "115.2 linear TFLOP ÷ 644 TFLOP/s + 17.87 attention TFLOP ÷ 519 TFLOP/s" in text
    assert "e+" not in text
    (link,) = (line for line in text.splitlines() if line.startswith("  link "))
    assert link.split(None, 1)[1] == "4.48 GB/s (35.8 Gb/s) × share 0.5 ÷ 8 ranks = 280 MB/s (2.24 Gb/s)"
    assert "the two tie at a link of" in text
    assert "(before share and ranks)" in text
    alone = decide(llama, h100, prefix=8192, suffix=64, tier="disk").explain()
    assert "  link " not in alone
    assert "before share" not in alone


def test_explain_without_a_block_to_reload_speaks_of_no_link():
    text = decide(TINY, machine(), prefix=8, suffix=16).explain()
    assert "infinite" not in text
    assert "no link speed makes the two tie" in text


UNITS_S = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def seconds_in(text):
    return [float(n.replace(",", "")) * UNITS_S[unit] for n, unit in re.findall(r"([\d.,]+) (s|ms|µs|ns)\b", text)]


def added_by_hand(line):
    """The sum of a prefill line's printed terms, and what is printed as their sum."""
    passes = int(re.search(r": (\d+) ×", line)[1])
    fixed_s, total_s = seconds_in(line)
    terms = [(a, b) for a, _, b in re.findall(r"([\d.e-]+) \w+ ([GT])FLOP(?: ÷ ([\d.e-]+) \2FLOP/s)?", line)]
    assert len(terms) == 3
    ranks = re.search(r"÷ ([\d.]+) for \d+ ranks", line)
    flops_s = sum(float(flops) / float(rate) for flops, rate in terms if rate)
    return passes * fixed_s + flops_s / (float(ranks[1]) if ranks else 1.0), total_s


LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 512,
    "num_key_value_heads": 8, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "intermediate_size": 128, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "max_position_embeddings": 8192,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("chunk", [None, 512, 700])
@pytest.mark.parametrize("arch", [TINY, ModelArch.from_hf(LATENT)], ids=["gqa", "mla"])
def test_the_terms_of_a_prefill_add_to_its_time(arch, chunk, tp):
    prefill = Prefill(
        0.003, Curve(((16.0, 1e9), (512.0, 4e10))), Curve(((16.0, 1e9), (700.0, 9e9))), "tiny", chunk_tokens=chunk
    )
    m = replace(machine(), prefill=prefill)
    verdict = decide(arch, m, prefix=4096, suffix=40, tp=tp)
    suffix, whole = (line for line in verdict.explain().splitlines() if " positions " in line)
    for line, seconds in ((suffix, verdict.suffix_s), (whole, verdict.ttft_recompute_s)):
        added_s, said_s = added_by_hand(line)
        assert said_s == pytest.approx(seconds, rel=5e-3)
        assert added_s == pytest.approx(seconds, rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix": -1}, "prefix is -1; expected an integer of at least 0"),
        ({"prefix": 64.5}, "prefix is 64.5; expected an integer"),
        ({"prefix": 0, "suffix": 0}, "at least 1 token"),
        ({"prefix": 9000}, "beyond the 8192 positions"),
        ({"block_size": 0}, "^block_size is 0; expected an integer of at least 1$"),
        ({"tp": 0}, "^tp is 0; expected an integer of at least 1$"),
        ({"overlap_groups": 0}, "^overlap_groups is 0; expected an integer of at least 1$"),
        ({"link_share": 0.0}, "^link_share is 0.0; expected above 0 and up to 1$"),
        ({"queued_bytes": -1}, "^queued_bytes is -1; expected a finite number of at least 0$"),
        ({"decode_delay_value": math.nan}, "^decode_delay_value is nan; expected a finite number"),
        ({"link_delay_value": math.inf}, "^link_delay_value is inf; expected a finite number"),
        ({"resident": -16}, "^resident is -16; expected an integer of at least 0$"),
        ({"resident": 8}, "^resident is 8; expected whole blocks of 16 of the prefix of 64 tokens"),
        ({"resident": 80}, "^resident is 80; expected whole blocks of 16 of the prefix of 64 tokens"),
        (
            {"resident": 64, "suffix": 0},
            "^resident is 64; .* fewer tokens than the 64 in all, since the last is always",
        ),
        ({"kv_dtype": "fp7"}, "unknown KV dtype 'fp7'; known: fp64, .*bfloat16"),
        ({"tier": "tape"}, "no link to tier 'tape'"),
    ],
)
def test_bad_input_is_refused_with_its_value(changes, message):
    with pytest.raises(ValueError, match=message):
        decide(TINY, machine(), **{"prefix": 64, "suffix": 16, **changes})


def test_measured_curves_flip_where_their_lines_cross():
    tokens, reload_s, recompute_s = [100, 200, 400], [2.0, 2.0, 2.0], [1.0, 1.5, 3.5]
    assert crossings_of(tokens, reload_s, recompute_s) == [Crossing(400, "reload")]
    assert settled_crossover(tokens, reload_s, recompute_s) == 400
    # log(2/1.5) = 0.2877 at 200 and log(2/3.5) = -0.5596 at 400: 0.3396 of the way, on a log scale
    assert interpolated_crossover(tokens, reload_s, recompute_s) == pytest.approx(200 * 2**0.33954, rel=1e-4)
    assert interpolated_crossover(tokens, [0.5] * 3, recompute_s) == 0
    assert interpolated_crossover(tokens, [9.0] * 3, recompute_s) is None


@given(st.floats(0.5, 1.5), st.floats(1.6, 2.5), st.integers(100, 5000))
def test_power_laws_are_interpolated_exactly_however_wide_the_gap(slow, steep, flip):
    tokens = [16, 6400]
    a = [2.0 * (n / flip) ** slow for n in tokens]
    b = [2.0 * (n / flip) ** steep for n in tokens]
    assert interpolated_crossover(tokens, a, b) == pytest.approx(flip)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_the_settled_crossover_is_the_start_of_the_last_run_of_wins(pairs):
    tokens = [16 * (i + 1) for i in range(len(pairs))]
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    at = settled_crossover(tokens, a, b)
    if at is None:
        assert a[-1] >= b[-1]
    else:
        start = 0 if at == 0 else tokens.index(at)
        assert all(a[i] < b[i] for i in range(start, len(a)))
        assert at == 0 or a[start - 1] >= b[start - 1]


@pytest.mark.parametrize("resident", [0, 64, 128])
def test_resident_blocks_are_paid_for_by_neither_way(resident):
    m = machine(overhead_s=0.01)
    verdict = decide(TINY, m, prefix=128, suffix=10, block_size=16, resident=resident)
    size = kv_bytes(TINY, 128 - resident)
    load_s = size / m.link("host").gb_per_s(1) / 1e9 + 0.01 if size else 0.0
    assert verdict.reload_tokens == 128 - resident
    assert verdict.ttft_reload_s == pytest.approx(load_s + m.prefill_s(TINY, 128, 138))
    assert verdict.ttft_recompute_s == pytest.approx(m.prefill_s(TINY, resident, 138))
    assert f"positions {resident} to 138" in verdict.explain()
    if split := verdict.split:
        assert split.recompute_tokens + split.reload_tokens == 128 - resident
    assert ("behind the 128 resident ones" in verdict.reason) == (resident == 128)


def test_a_suffix_of_nothing_computes_the_last_token_even_if_all_else_is_resident():
    verdict = decide(TINY, machine(), prefix=64, suffix=0, block_size=16, resident=48)
    assert verdict.ttft_recompute_s == verdict.ttft_reload_s == machine().prefill_s(TINY, 48, 64) > 0
    assert verdict.crossings is not None  # its other lengths include some that 48 resident tokens would cover
    assert "before the last token, which is always computed" in verdict.reason


def test_a_name_instead_of_a_shape_or_machine_is_refused_with_what_makes_one():
    with pytest.raises(ValueError, match=r"arch is 'tiny'; expected a ModelArch: ModelArch.preset"):
        decide("tiny", machine(), prefix=64, suffix=16)
    with pytest.raises(ValueError, match=r"machine is 'h100-sxm-pcie5'; expected a Machine, as from Machine.load"):
        decide(TINY, "h100-sxm-pcie5", prefix=64, suffix=16)


def test_counts_may_be_numpy_integers():
    counts = {"prefix": 64, "suffix": 16, "tp": 2, "block_size": 8, "overlap_groups": 3, "resident": 8}
    verdict = decide(TINY, machine(), **{name: np.int32(count) for name, count in counts.items()})
    assert verdict == decide(TINY, verdict.machine, **counts)
    assert type(verdict.kv_bytes) is type(verdict.prefix) is int


def test_a_cache_is_taken_to_hold_what_the_machine_was_measured_in():
    def size(arch=TINY, kv_dtype=None, **measured):
        m = machine()
        m = replace(m, prefill=replace(m.prefill, **measured))
        return decide(arch, m, prefix=64, suffix=16, kv_dtype=kv_dtype).kv_bytes

    assert size() == kv_bytes(TINY, 64, "bf16")
    assert size(dtype="fp32") == kv_bytes(TINY, 64, "fp32") == 2 * size()
    assert size(dtype="fp32", kv_dtype="bf16") == size()
    assert 2 * size(replace(TINY, kv_dtype="fp8"), dtype="fp32") == size()
    assert decide(TINY, machine(), prefix=64, suffix=16, kv_dtype="bfloat16").kv_dtype == "bf16"


def test_a_verdict_can_be_read_where_it_is_printed():
    assert "Machine(" not in repr(decide(TINY, machine(), prefix=64, suffix=16, tier="host"))
