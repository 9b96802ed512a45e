"""A machine predicts what its curves say, survives JSON, and refuses files that are not one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.arch import ModelArch
from kvlab.arithmetic import attention_flops, linear_flops, prefill_flops
from kvlab.machine import SCHEMA, Curve, Decode, Link, Machine, Prefill, PrefillSeen, TransferSeen, machine_names

ARCH = ModelArch.preset("smollm2-135m")


def a_machine(**changes) -> Machine:
    machine = Machine(
        name="test",
        prefill=Prefill(
            per_chunk_s=0.004,
            linear_flops_per_s=Curve(((1, 2e10), (16, 5e10), (256, 1.2e11))),
            attention_flops_per_s=Curve(((16, 1e10), (512, 6e10))),
            calibrated_on="smollm2-135m",
        ),
        links={
            "host": {"load": Link(Curve(((1e4, 1.0), (1e8, 10.0))), per_request_s=1e-4, per_block_s=1e-6)},
            "slow": {"load": Link(Curve(((1.0, 0.02),)), per_request_s=1e-3)},
        },
    )
    return replace(machine, **changes)


@given(st.floats(1, 1e12))
def test_a_curve_stays_between_its_points_and_is_flat_outside(size):
    curve = Curve(((1e3, 2.0), (1e6, 8.0)))
    value = curve(size)
    assert 2.0 <= value <= 8.0 + 1e-9
    if size <= 1e3:
        assert value == 2.0
    if size >= 1e6:
        assert value == 8.0


def test_a_curve_is_straight_in_log_log():
    assert Curve(((1e2, 1.0), (1e4, 100.0)))(1e3) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "points", [(), ((1, 0),), ((0, 1),), ((2, 1), (1, 1)), ((1, float("nan")),), ((1, float("inf")),)]
)
def test_a_curve_refuses_points_that_mean_nothing(points):
    with pytest.raises(ValueError, match="curve"):
        Curve(points)


def test_transfer_time_is_the_sum_of_its_parts():
    link = Link(Curve(((1.0, 2.0),)), per_request_s=0.1, per_block_s=0.01, per_copy_s=0.001, copy="block")
    assert link.transfer_s(8 * 10**9, 4, 32) == pytest.approx(0.1 + 4 * 0.01 + 4 * 0.001 + 4.0)
    assert link.transfer_s(8 * 10**9, 4, 32, share=0.5) == pytest.approx(0.1 + 4 * 0.01 + 4 * 0.001 + 8.0)
    assert link.transfer_s(0, 0, 32) == 0.0


def test_the_bandwidth_is_that_of_the_size_really_copied():
    curve = Curve(((1e3, 1.0), (1e6, 10.0)))
    total, blocks, layers = 4_000_000, 4, 1000
    sizes = {
        copy: Link(curve, copy=copy).copy_bytes(total, blocks, layers) for copy in ("request", "block", "layer_block")
    }
    assert sizes == {"request": 4e6, "block": 1e6, "layer_block": 1e3}
    assert Link(curve, copy="layer_block").transfer_s(total, blocks, layers) == pytest.approx(4e-3)
    assert Link(curve, copy="block").transfer_s(total, blocks, layers) == pytest.approx(4e-4)
    assert Link(curve, max_copy_bytes=1000).copy_bytes(total, blocks, layers) == 1000


@pytest.mark.parametrize(
    ("link", "copies"),
    [({"copy": "request", "max_copy_bytes": most}, copies) for most, copies in ((None, 1), (60, 17), (1000, 1))]
    + [({"copy": "block", "max_copy_bytes": most}, copies) for most, copies in ((None, 10), (60, 20), (50, 20))]
    + [({"copy": "layer_block", "max_copy_bytes": most}, copies) for most, copies in ((None, 40), (25, 40), (24, 80))],
)
def test_a_copy_that_is_too_large_is_cut_by_itself(link, copies):
    # Ten blocks of 100 bytes, of four layers: what is left of one block does not travel with the next.
    link = Link(Curve(((1.0, 1e9),)), per_copy_s=1.0, **link)
    assert link.copies(1000, 10, 4) == copies
    assert link.transfer_s(1000, 10, 4) == pytest.approx(copies)


@pytest.mark.parametrize(("copy", "per_block"), [("block", 1), ("layer_block", 48)])
def test_copies_are_counted_where_the_bytes_do_not_divide(copy, per_block):
    # Window layers stop growing, so that a long prefix has no whole number of bytes a block.
    link = Link(Curve(((1.0, 1e9),)), per_copy_s=1.0, copy=copy)
    for blocks in range(1, 2000):
        assert link.transfer_s(10_000_019 + 7919 * blocks, blocks, 48) == pytest.approx(blocks * per_block)


def test_ranks_that_share_a_link_share_its_bandwidth():
    link = Link(Curve(((1.0, 8.0),)), ranks_per_link=4)
    assert link.rate_gb_per_s(1e6, ranks=1) == 8
    assert link.rate_gb_per_s(1e6, ranks=4) == 2
    assert link.rate_gb_per_s(1e6, ranks=8) == 2


def test_prefill_time_is_fixed_plus_linear_plus_attention_plus_head():
    machine = a_machine()
    expected = (
        0.004 + linear_flops(ARCH, 512) / 1.2e11 + attention_flops(ARCH, 512, 1024) / 6e10 + 2 * ARCH.head_macs / 2e10
    )
    assert machine.prefill_s(ARCH, 512, 1024) == pytest.approx(expected)


def test_chunks_pay_the_fixed_part_each():
    machine = a_machine()
    chunked = replace(machine, prefill=replace(machine.prefill, chunk_tokens=256))
    assert chunked.prefill_s(ARCH, 0, 1024) - machine.prefill_s(ARCH, 0, 1024) > 3 * 0.004 * 0.999


def test_json_round_trip(tmp_path):
    machine = a_machine()
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine.to_dict()), encoding="utf-8")
    assert Machine.load(path) == machine
    # A record that holds a machine is one, too.
    path.write_text(json.dumps({"schema": "kvlab.crossover/1", "machine": machine.to_dict()}), encoding="utf-8")
    assert Machine.load(path) == machine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="kvlab.machine/99"), "schema 'kvlab.machine/99'"),
        (lambda d: d["prefill"].pop("linear_flops_per_s"), "linear_flops_per_s"),
        (lambda d: d["links"]["host"].pop("load"), "links.host.load"),
        (lambda d: d["links"]["host"]["load"].pop("gb_per_s"), "gb_per_s"),
        (lambda d: d["links"]["host"]["load"].update(gb_per_s=[]), "curve"),
        (lambda d: d["links"]["host"]["load"].update(gbps=3), "gbps"),
        (lambda d: d.pop("links"), "links"),
        (lambda d: d.update(prefill=3), "not a kvlab machine"),
        (lambda d: d["links"]["host"]["load"].update(per_block_s=-5), "links.host.load: per_block_s is -5; expected"),
    ],
)
def test_a_file_that_is_not_a_machine_is_refused_by_name(tmp_path, change, message):
    data = a_machine().to_dict()
    change(data)
    path = tmp_path / "m.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Machine.load(path)


LINK = Link(Curve(((1.0, 1.0),)))


@pytest.mark.parametrize(
    ("part", "name", "value", "expected"),
    [(LINK, name, -5, "at least 0") for name in ("per_request_s", "per_block_s", "per_copy_s", "spread")]
    + [
        (LINK, "per_request_s", "1ms", "a finite number"),
        (LINK, "per_request_s", True, "a finite number"),
        (LINK, "per_request_s", float("nan"), "a finite number"),
        (LINK, "per_copy_s", float("inf"), "a finite number"),
        (LINK, "max_copy_bytes", -1, "an integer of at least 1"),
        (LINK, "max_copy_bytes", 0, "an integer of at least 1"),
        (LINK, "ranks_per_link", 0, "an integer of at least 1"),
        (LINK, "ranks_per_link", None, "an integer of at least 1"),
        (LINK, "decode_slowdown", 50, "0 to 1"),
        (LINK, "copy", "requests", "one of request, block, layer_block"),
        (LINK, "emulated", "no", "true or false"),
        (a_machine().prefill, "per_chunk_s", -5, "at least 0"),
        (a_machine().prefill, "chunk_tokens", -5, "an integer of at least 1"),
        (a_machine().prefill, "chunk_tokens", 512.0, "an integer of at least 1"),
        (a_machine().prefill, "spread", -0.1, "at least 0"),
        (a_machine().prefill, "calibrated_on", None, "text"),
        (a_machine(), "tp_efficiency", 0, "above 0 and up to 1"),
        (a_machine(), "tp_efficiency", 85, "above 0 and up to 1"),
        (a_machine(), "tp_efficiency", "0.85", "a finite number"),
        (Decode(0.01, 0.0, 0.0), "per_token_s", -1e-6, "at least 0"),
        (Decode(0.01, 0.0, 0.0), "per_pass_s", 0.0, "above 0"),
    ],
)
def test_no_part_of_a_machine_holds_what_would_price_nonsense(part, name, value, expected):
    with pytest.raises(ValueError, match=expected) as refused:
        replace(part, **{name: value})
    assert name in str(refused.value) or "decode pass" in str(refused.value)
    if not isinstance(part, Decode):
        assert repr(value) in str(refused.value)


def test_other_refusals_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="kvlab calibrate"):
        Machine.load(tmp_path / "missing.json")
    with pytest.raises(ValueError, match="no machine file or profile"):
        Machine.load("abacus")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not valid JSON"):
        Machine.load(broken)
    broken.write_text(json.dumps([SCHEMA]), encoding="utf-8")
    with pytest.raises(ValueError, match="schema 'list'"):
        Machine.load(broken)
    with pytest.raises(ValueError, match="it knows host, slow"):
        a_machine().link("tape")
    with pytest.raises(ValueError, match="no 'store' curve"):
        a_machine().link("host", "store")


def test_a_machine_learns_from_what_it_sees():
    machine = a_machine()
    before_s = machine.prefill_s(ARCH, 0, 512)
    once = machine.updated(PrefillSeen(ARCH, 0, 512, 2 * before_s), weight=0.5)
    assert once.prefill_s(ARCH, 0, 512) == pytest.approx(before_s * 2**0.5)
    learnt = machine
    for _ in range(60):
        learnt = learnt.updated(PrefillSeen(ARCH, 0, 512, 2 * before_s))
        learnt = learnt.updated(TransferSeen("slow", "load", 10**6, 3, 30, 0.5))
    assert learnt.prefill_s(ARCH, 0, 512) == pytest.approx(2 * before_s, rel=0.01)
    assert learnt.link("slow").transfer_s(10**6, 3, 30) == pytest.approx(0.5, rel=0.01)
    assert learnt.link("host") == machine.link("host"), "an observation of one link says nothing about another"
    assert learnt.prefill.spread < machine.prefill.spread, "sixty equal observations leave little spread"
    with pytest.raises(ValueError, match="positive"):
        machine.updated(PrefillSeen(ARCH, 0, 512, 0.0))


@pytest.mark.parametrize(
    "seen",
    [PrefillSeen(ARCH, 5, 5, 0.1), PrefillSeen(ARCH, 5, 4, 0.1)]
    + [TransferSeen("slow", "load", size, 0, 30, 0.1) for size in (0, 10)],
)
def test_nothing_is_learned_from_nothing(seen):
    with pytest.raises(ValueError, match=r"observed (positions \[5, [45]\)|0 blocks); expected at least one"):
        a_machine().updated(seen)


@pytest.mark.parametrize("weight", [-0.1, 1.5, 5, float("nan")])
def test_an_observation_weighs_at_most_all(weight):
    with pytest.raises(ValueError, match="weight"):
        a_machine().updated(PrefillSeen(ARCH, 0, 512, 1.0), weight)


def test_another_shape_is_an_extrapolation():
    assert not a_machine().extrapolated(ARCH)
    assert a_machine().extrapolated(ModelArch.preset("llama-3.1-8b"))


def test_a_preset_under_another_name_is_the_shape_it_was_measured_on():
    # A config file is named by its folder; what was measured is a shape.
    assert not a_machine().extrapolated(replace(ARCH, name="my-finetune"))
    assert a_machine().extrapolated(replace(ARCH, name="my-finetune", layers=ARCH.layers[1:]))


def llama_config(**sizes):
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "hidden_act": "silu"}
    return config | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True} | sizes


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
        {"num_hidden_layers": 17},
        {"intermediate_size": 8256},
        {"vocab_size": 128257},
        {"num_key_value_heads": 4},
        {"model_type": "mistral", "_name_or_path": "llama", "sliding_window": 4096},
    ],
)
def test_two_shapes_of_one_name_are_two_shapes(other):
    small, big = ModelArch.from_hf(llama_config()), ModelArch.from_hf(llama_config(**other))
    assert small.name == big.name == "llama"
    prefill = replace(a_machine().prefill, calibrated_on=small.name, calibrated_shape=small.shape_digest)
    measured = a_machine(prefill=prefill)
    for machine in (measured, Machine.from_dict(json.loads(json.dumps(measured.to_dict())))):
        assert machine.extrapolated(big)
        assert not machine.extrapolated(small)
        assert not machine.extrapolated(replace(small, name="my-finetune"))


def test_a_file_without_a_shape_is_compared_by_name_and_by_the_preset_of_that_name():
    data = a_machine().to_dict()
    del data["prefill"]["calibrated_shape"]
    old, llama = Machine.from_dict(data), ModelArch.from_hf(llama_config())
    assert not old.extrapolated(ARCH)
    assert old.extrapolated(replace(llama, name="smollm2-135m")), "the preset of that name has another shape"
    data["prefill"]["calibrated_on"] = "llama"
    old = Machine.from_dict(data)
    assert not old.extrapolated(llama), "its name is all that is known"
    assert old.extrapolated(ARCH)


def test_latents_are_the_shape_that_they_are_expanded_from():
    # Decode passes of MLA are priced on its latents, prefill on the expanded keys: one model.
    arch = ModelArch.from_hf(Path(__file__).parent / "data" / "configs" / "DeepSeek-V3.json")
    assert arch.absorbed != arch
    assert arch.absorbed.shape_digest == arch.shape_digest


# Published profiles --------------------------------------------------------------------------------------------------

PROFILES = ("a100-sxm-pcie4", "gb300-c2c", "gh200-c2c", "h100-sxm-pcie5")
# How a number came to be in a profile; only the first two were read as they stand.
BASES = {"measured", "measured elsewhere", "digitised", "fit", "estimate", "excerpt", "assumed"}


def test_the_profiles_that_ship():
    assert machine_names() == PROFILES


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_loads_and_prices_every_tier_in_both_directions(name):
    machine = Machine.load(name)
    assert machine.name == name
    assert machine.provenance["kind"] == "published"
    assert list(machine.links) == ["host", "disk", "net-100g", "net-400g", "tcp"]
    for tier in machine.links:
        for direction in ("load", "store"):
            link = machine.link(tier, direction)
            # Nothing published is faster than HBM or slower than a bad disk, and no spread is zero.
            assert 1 / 1000 < link.transfer_s(10**9, 477, 32) < 1 / 0.1
            assert 0.05 <= link.spread <= 0.5
            assert link.source
    arch = ModelArch.preset("llama-3.1-8b")
    assert 1e14 < prefill_flops(arch, 0, 8192) / machine.prefill_s(arch, 0, 8192) < 2.5e15
    assert machine.prefill.source


@pytest.mark.parametrize("name", PROFILES)
def test_every_number_of_a_profile_says_where_it_comes_from(name):
    data = Machine.load(name).to_dict()
    defaults = {name: value for name, value in vars(Link(Curve(((1.0, 1.0),)))).items() if not name.startswith("_")}
    stated = {"tp_efficiency"}
    for tier, directions in data["links"].items():
        for direction, link in directions.items():
            numbers = {k for k, v in link.items() if isinstance(v, int | float | list) and not isinstance(v, bool)}
            given = {k for k in numbers if k in ("gb_per_s", "spread", "ranks_per_link") or link[k] != defaults[k]}
            stated |= {f"links.{tier}.{direction}.{k}" for k in given}
    stated |= {
        f"prefill.{k}" for k in ("linear_flops_per_s", "attention_flops_per_s", "per_chunk_s", "spread")
    }  # what else a prefill has is a name or None
    numbers = data["provenance"]["numbers"]
    assert set(numbers) == stated
    for key, entry in numbers.items():
        assert entry["basis"] in BASES, key
        assert len(entry["source"]) > 10, key


@pytest.mark.parametrize("name", ["gb300-c2c", "gh200-c2c"])
def test_an_estimated_prefill_is_labelled_and_wide(name):
    machine = Machine.load(name)
    assert machine.provenance["numbers"]["prefill.linear_flops_per_s"]["basis"] == "estimate"
    assert machine.prefill.spread >= 0.3
    assert machine.extrapolated(ModelArch.preset("llama-3.1-8b")), "nothing was measured on this machine"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Link(25.0), r"gb_per_s is 25\.0; expected a Curve, as in Curve\(\(\(1\.0, 25\.0\),\)\) for one"),
        (lambda: Prefill(0.0, 4e14, Curve(((1.0, 4e14),)), "mine"), r"linear_flops_per_s is 4.*expected a Curve"),
        (lambda: Curve((1.0, 25.0)), r"curve points are \(1\.0, 25\.0\); expected \[size, value\] pairs"),
        (lambda: Curve(25.0), r"curve points are 25\.0; expected \[size, value\] pairs"),
        (lambda: a_machine().with_link("nas", 25.0), r"links\['nas'\]\['load'\] is 25\.0; expected a Link"),
        (
            lambda: a_machine(links={"nas": a_machine().link("slow")}),
            r"links\['nas'\] is Link.*expected a Link for each",
        ),
        (lambda: a_machine(links={"nas": {"laod": a_machine().link("slow")}}), "expected a Link for each of load and"),
    ],
)
def test_a_machine_built_by_hand_of_other_things_is_refused_where_it_is_built(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: d["links"]["host"]["load"].pop("gb_per_s"), "has no 'links.host.load.gb_per_s'"),
        (lambda d: d["prefill"].pop("linear_flops_per_s"), "has no 'prefill.linear_flops_per_s'"),
        (lambda d: d["prefill"].pop("calibrated_on"), "has no 'prefill.calibrated_on'"),
        (lambda d: d["links"]["host"]["load"].update(gb_per_s=25), r"links\.host\.load: curve points are 25; exp"),
        (
            lambda d: d["links"]["host"]["load"].update(latency_s=1),
            "links.host.load has 'latency_s'; it may have gb_per",
        ),
        (lambda d: d["prefill"].update(tflops=1), "prefill has 'tflops'; it may have per_chunk_s"),
    ],
)
def test_a_file_says_where_it_is_wrong(break_it, message):
    data = json.loads(json.dumps(a_machine().to_dict()))
    break_it(data)
    with pytest.raises(ValueError, match=message):
        Machine.from_dict(data, "m.json")
