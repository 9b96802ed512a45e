"""In bf16, too, what comes back from a tier is bit for bit what never left, where the chunk boundaries are the same."""

import pytest
import torch
from tiny_engine import one_thread, text, tiny_model  # noqa: F401

from kvlab.engine import Engine
from kvlab.loading import load_model
from kvlab.tiers import DiskTier, HostTier

P, MORE = text(48, seed=4), text(5, seed=6)  # three blocks of sixteen tokens


def last_logits(monkeypatch, tier, *, leaves):
    """Logits of each pass of the second turn, whose prefix was resident (or had left and was reloaded)."""
    model = load_model(tiny_model().arch, dtype="bf16", seed=3)
    assert model.dtype == "bf16"
    seen = []
    with Engine(model, 16, 16, [tier], groups=2) as engine:
        request = engine.submit(P, 1)
        engine.run()
        if leaves:
            assert engine.offload(request) == 3
        real = type(model)._logits
        monkeypatch.setattr(type(model), "_logits", lambda self, x: (seen.append(real(self, x)), seen[-1])[1])
        engine.resume(request, MORE, 6)
        engine.run()
        monkeypatch.undo()
        assert engine.metrics()["loads"] == leaves
        assert engine.metrics()["computed_tokens"] == 48 + 6 + 5  # the same chunks either way
    return seen, request.tokens


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_reload_is_bit_for_bit_what_was_resident(tmp_path, monkeypatch, kind):
    def tier():
        return HostTier(1 << 20) if kind == "host" else DiskTier(tmp_path, 1 << 20)

    resident, tokens = last_logits(monkeypatch, tier(), leaves=False)
    reloaded, again = last_logits(monkeypatch, tier(), leaves=True)
    assert len(resident) == len(reloaded) == 6
    for one, other in zip(resident, reloaded, strict=True):
        assert torch.equal(one, other)
    assert tokens == again
