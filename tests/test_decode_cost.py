"""Decode passes: measured where they were, by FLOPs and bytes elsewhere, MLA on its latents."""

import json
from dataclasses import replace

import pytest
from tiny_engine import one_thread, text, tiny_model  # noqa: F401

from kvlab.arch import ModelArch
from kvlab.arithmetic import kv_bytes
from kvlab.experiments.calibrate import DecodeSample, calibrate, fit_decode
from kvlab.experiments.policies import models
from kvlab.machine import Decode, Machine
from kvlab.simulate import Cluster, DecodeCost, drawn_away
from kvlab.simulate.executor import BillingExecutor
from kvlab.tiers import HostTier

ARCH = ModelArch.preset("llama-3.1-8b")
H100 = Machine.load("h100-sxm-pcie5")  # calibrated on that shape
MEASURED = replace(H100, decode=Decode(0.01, 0.002, 1e-6))


def sample(rows, tokens, seconds):
    return DecodeSample(rows, tokens, (seconds,) * 3)


def test_a_plane_is_found_again_and_noise_is_not_negative():
    cases = ((1, 16), (1, 512), (3, 45), (3, 1400))
    exact = [sample(rows, tokens, 0.03 + rows * 0.002 + tokens * 5e-6) for rows, tokens in cases]
    fitted = fit_decode(exact)
    assert (fitted.per_pass_s, fitted.per_row_s, fitted.per_token_s) == pytest.approx((0.03, 0.002, 5e-6))
    odd = fit_decode([sample(1, 16, 0.03), sample(1, 512, 0.029), sample(3, 45, 0.031), sample(3, 1400, 0.03)])
    assert odd.per_token_s == 0
    assert min(odd.per_pass_s, odd.per_row_s) >= 0


def test_measured_passes_are_billed_for_their_own_shape_only():
    cost = DecodeCost(MEASURED, ARCH, 1.0)
    assert cost.seconds(4, 1000) == pytest.approx(0.01 + 4 * 0.002 + 1000e-6)
    assert cost.seconds(4, 1000, 50) == pytest.approx(sum(cost.seconds(4, 1000 + 4 * step) for step in range(50)))
    other = ModelArch.preset("llama-3.2-1b")
    assert DecodeCost(MEASURED, other, 1.0).seconds(4, 1000) == DecodeCost(H100, other, 1.0).seconds(4, 1000)
    assert Cluster(ARCH, MEASURED, 2**34).decodes_measured
    assert not Cluster(other, MEASURED, 2**34).decodes_measured
    assert not Cluster(ARCH, H100, 2**34).decodes_measured


def test_a_machine_keeps_its_decode_in_json_and_old_files_have_none():
    assert Machine.from_dict(json.loads(json.dumps(MEASURED.to_dict()))) == MEASURED
    old = H100.to_dict()
    del old["decode"]
    assert Machine.from_dict(old).decode is None
    true = drawn_away(MEASURED, 0.2, seed=5).decode
    assert true is not None
    slower = {true.per_pass_s / 0.01, true.per_row_s / 0.002, true.per_token_s / 1e-6}
    assert max(slower) == pytest.approx(min(slower))
    assert 0.8 <= min(slower) <= 1.2
    assert min(slower) != pytest.approx(1.0)


def test_calibration_measures_decodes_of_unequal_rows():
    machine = calibrate(tiny_model(), text(300), {"host": lambda: HostTier(2**24)}, block_size=4, budget_s=0.5)
    assert machine.decode is not None
    taken = machine.provenance["decode_samples"]
    assert {(s["rows"], s["tokens"]) for s in taken} == {(1, 16), (3, 16 + 14 + 12), (1, 299), (3, 299 + 262 + 225)}
    assert all(len(s["seconds"]) >= 3 for s in taken)
    assert machine.decode.seconds(2, 100) > 0


def test_mla_decodes_on_its_latents():
    """Projecting 100,000 cached latents again for each token would cost as much as a prefill."""
    arch = models()["deepseek-v2-lite (MLA)"]
    block = kv_bytes(arch, 512, "bf16")
    executor = BillingExecutor(arch, H100, "bf16", pool_blocks=8, block_size=512, tiers=[])
    latents = 4 * 16 * 27 * (2 * 512 + 64) * 100_000 / 2  # 2 FLOPs each: scores over 576 values, sums over 512
    took_s = executor.decode_cost.seconds(1, 100_000) - executor.decode_cost.seconds(1, 0)
    assert took_s == pytest.approx(latents / H100.prefill.attention_flops_per_s(1), rel=1e-3)
    assert block == 512 * 27 * 576 * 2
