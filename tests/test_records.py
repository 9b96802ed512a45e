"""Records are whole or absent, and intervals are honest."""

import json
import math

import numpy as np
import pytest

from kvlab.records import bootstrap_interval, machine_facts, median, read_json, write_json


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "record.json"
    write_json(path, {"a": [1.5, None]})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": math.nan})
    assert read_json(path) == {"a": [1.5, None]}
    assert [p.name for p in path.parent.iterdir()] == ["record.json"]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "record.json", {})
    assert list(tmp_path.iterdir()) == []


def test_fewer_than_seven_rounds_give_no_interval():
    assert bootstrap_interval(lambda _: 1.0, 6) is None
    assert bootstrap_interval(lambda _: 1.0, 7) == (1.0, 1.0)


def test_the_interval_covers_the_median_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    hits = 0
    for trial in range(60):
        samples = generator.lognormal(0, 0.2, 21)
        low, high = bootstrap_interval(lambda rounds, s=samples: float(np.median(s[rounds])), 21, seed=trial)
        hits += low <= 1.0 <= high
    assert hits >= 50


def test_an_interval_can_end_in_never():
    values = np.array([1.0, 2.0, 3.0, math.inf, math.inf, math.inf, math.inf])
    low, high = bootstrap_interval(lambda rounds: float(np.max(values[rounds])), 7)
    assert high == math.inf
    assert low > 1


def test_the_median_is_that_of_numpy():
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_facts_name_what_a_reader_needs():
    facts = machine_facts()
    assert facts["cpu"]
    assert facts["torch"]
    assert facts["torch_threads"] >= 1
    json.dumps(facts, allow_nan=False)
