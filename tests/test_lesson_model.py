"""Which model a lesson computes with where torch sees a GPU on which a small one's passes are bound by launches."""

from types import SimpleNamespace

import pytest
import torch
from tiny_engine import tiny_model

from kvlab.lab import lesson_model as made  # as the lessons do
from kvlab.lab.models import growth, lesson_model


@pytest.fixture
def gpu(monkeypatch):
    """A GPU's model by default, and how much longer its long passes take."""

    def with_growth(times, device="cuda"):
        def load(device=device, *, say):
            return SimpleNamespace(device=torch.device(device))

        monkeypatch.setattr(f"{lesson_model.__module__}.load_default_model", load)
        monkeypatch.setattr(f"{lesson_model.__module__}.growth", lambda model, prefix: times)
        monkeypatch.setattr(f"{lesson_model.__module__}.machine_facts", lambda device: {"gpu": "NVIDIA X"})

    return with_growth


def test_where_launches_are_all_that_a_gpu_does_a_lesson_computes_on_the_cpu_and_says_so(gpu):
    gpu(1.1)
    said = []
    assert made(512, say=said.append).device.type == "cpu"
    (line,) = said
    assert "512 tokens take 1.1 times as long as 16 on NVIDIA X" in line
    assert "runs on the CPU" in line


def test_a_gpu_that_shows_what_computing_costs_is_kept(gpu):
    gpu(20.0)
    assert made(512, say=pytest.fail).device.type == "cuda"


def test_a_cpu_is_not_timed(gpu):
    gpu(0.0, device="cpu")
    assert made(512, say=pytest.fail).device.type == "cpu"


def test_growth_is_seconds_of_the_prefix_over_seconds_of_sixteen(monkeypatch):
    monkeypatch.setattr("kvlab.lab.models.Rig.recompute", lambda rig, tokens: SimpleNamespace(ttft_s=0.5 + len(tokens)))
    assert growth(tiny_model(), 512) == pytest.approx(512.5 / 16.5)
