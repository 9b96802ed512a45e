"""What can go wrong between a probe and a server: one clear line each, the key nowhere, what was measured kept."""

import functools
import json
import os
import signal
import socket
import sys
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from stand_in_server import StandIn, running

import kvlab.server
from kvlab.arch import ModelArch
from kvlab.cli import main
from kvlab.experiments import probe
from kvlab.machine import Machine
from kvlab.server import Endpoint, RefusedError, SampleError, Server, ServerError

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("KVLAB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shell(monkeypatch, capsys, tmp_path):
    """Runs `kvlab probe` on a stand-in with its clock: (exit code, out, err, record or None)."""

    def run(server: StandIn, *arguments, lengths="64,128", model="toy", repeats=3):
        endpoint = functools.partial(Endpoint, clock=server.clock, sleep=server.clock.sleep)
        monkeypatch.setattr(kvlab.server, "Endpoint", endpoint)
        with running(server) as url:
            words = ["probe", url, "--model", model, "--out", str(tmp_path), "--repeats", str(repeats)]
            words += ["--lengths", lengths, *arguments]
            monkeypatch.setattr(sys, "argv", ["kvlab", *words])
            with pytest.raises(SystemExit) as stop:
                main()
        path = tmp_path / "probe.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        said, complained = capsys.readouterr()
        return stop.value.code, said, complained.replace("\n", " ").strip(), record

    return run


def client(url, server, key=None, **options):
    return Server(Endpoint(url, key, clock=server.clock, sleep=server.clock.sleep, **options), "toy")


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def slow(device, tier, total):
    return 1e-3 * (total - device - tier) + (0.02 + 1e-4 * tier if tier else 0.0)


def test_a_whole_run_ends_in_a_record_that_plans(shell, tmp_path, monkeypatch, capsys):
    server = StandIn(bill=slow)
    code, said, complained, record = shell(server, "--config", "llama-3.1-8b", "--concurrency", "1,2", repeats=2)
    assert code == 0, complained
    assert "faster than computing again at every length" in said
    assert "Settings for vllm" in said
    assert (tmp_path / "probe.png").stat().st_size > 10_000
    assert Machine.load(tmp_path / "probe.json").links.keys() == {"external"}
    assert Machine.load(tmp_path / "machine.json") == Machine.load(tmp_path / "probe.json")
    assert record["machine"]["prefill"]["calibrated_on"] == "llama-3.1-8b"
    assert record["machine"]["prefill"]["calibrated_shape"] == ModelArch.preset("llama-3.1-8b").shape_digest
    arguments = ["plan", "--model", "llama-3.1-8b", "--machine", str(tmp_path / "probe.json"), "--prefix", "256"]
    monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert "external" in capsys.readouterr().out


def test_a_dry_run_asks_for_no_token_and_no_reset(shell):
    server = StandIn()
    code, said, _, record = shell(server, "--dry-run", "--concurrency", "1,4")
    assert code == 0
    assert record is None
    assert {method for method, _, _ in server.requests} == {"GET"}
    assert "up to 95 requests" in said  # 3 rounds × 2 lengths × 5 at once × 3 arms, and 5 of the rehearsal
    assert "drops the cached prefixes of everybody" in said


def test_no_reset_leaves_the_cache_alone(shell):
    server = StandIn(bill=slow)
    code, said, _, record = shell(server, "--no-reset")
    assert code == 0
    assert not any(path == "/reset_prefix_cache" for _, path, _ in server.requests)
    assert list(record["levels"][0]["seconds"]) == ["recompute", "resident"]
    assert "a hit is what was still on its device" in said


def test_more_tokens_than_the_budget_are_refused_before_any_is_sent(shell):
    server = StandIn()
    code, _, complained, _ = shell(server, "--token-budget", "1k")
    assert code == 2
    assert "beyond --token-budget 1,000" in complained
    assert server.prompts == []


def test_a_prompt_beyond_the_model_is_refused_before_any_is_sent(shell):
    server = StandIn(max_model_len=100)
    code, _, complained, _ = shell(server)
    assert (code, server.prompts) == (2, [])
    assert "145 tokens, beyond the 100" in complained


def test_the_key_goes_into_the_requests_and_into_nothing_else(shell, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server = StandIn(bill=slow, key=KEY)
    code, said, complained, _ = shell(server)
    assert code == 0
    assert all(headers["Authorization"] == f"Bearer {KEY}" for _, _, headers in server.requests)
    assert "from OPENAI_API_KEY" in said
    for text in (said, complained, *(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.json"))):
        assert KEY not in text
    assert KEY not in repr(Endpoint("http://localhost", KEY)) + str(vars(SampleError("x")))


def test_a_server_that_wants_a_key_and_one_that_echoes_a_wrong_key(shell, monkeypatch):
    code, _, complained, _ = shell(StandIn(key=KEY))
    assert code == 2
    assert "wants a key (401); set KVLAB_API_KEY or OPENAI_API_KEY" in complained
    monkeypatch.setenv("KVLAB_API_KEY", "wrong-key-987")
    code, said, complained, _ = shell(StandIn(key=KEY))
    assert code == 2
    assert "does not take the key (401)" in complained
    assert "Incorrect API key provided: Bearer [key]" in complained
    assert "wrong-key-987" not in said + complained


def test_a_key_that_no_header_can_carry_is_not_repeated(shell, monkeypatch):
    monkeypatch.setenv("KVLAB_API_KEY", f"{KEY}\nX-Other: 1")
    code, said, complained, _ = shell(StandIn())
    assert code == 2
    assert "the key holds a space, a line break" in complained
    assert KEY not in said + complained


def test_an_unknown_model_names_those_that_are_there(shell):
    code, _, complained, _ = shell(StandIn(models=("toy", "other")), model="missing")
    assert code == 2
    assert "has no model 'missing'; it serves toy, other" in complained


@pytest.mark.parametrize("stated", ["3", format_datetime(datetime.now(UTC) + timedelta(days=-1)), None, "soon", "0"])
def test_a_server_that_says_slow_down_is_obeyed(stated):
    server = StandIn(faults={0: "429", 1: "429"}, retry_after=stated)
    with running(server) as url:
        assert client(url, server).complete([1] * 20).prompt_tokens == 20
    assert server.clock.now_s == {"3": 6.0, None: 3.0, "soon": 3.0}.get(stated, 2.0)


@pytest.mark.parametrize(("stated", "tries"), [("3600", 1), ("25", 3), (None, 6)])
def test_patience_has_an_end(stated, tries):
    server = StandIn(always="429", retry_after=stated)
    with running(server) as url, pytest.raises(ServerError, match="limits requests \\(429\\) and asks to wait") as stop:
        client(url, server).complete([1] * 20)
    assert not isinstance(stop.value, SampleError)  # the run ends; it does not go on asking
    assert len(server.prompts) == tries
    assert server.clock.now_s <= 60


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", r"failed \(500\): CUDA \[2J error: out of memory"),
        ("cut", "cut the stream before its end"),
        ("no token", "ended the stream without a token"),
        ("error in stream", "failed in the stream: engine died"),
        ("not json", "streams what is not a JSON object: <html>"),
        ("hang up", "broke off the connection"),
    ],
)
def test_a_failed_request_is_one_line_and_costs_one_sample(shell, fault, said):
    with running(StandIn(always=fault)) as url, pytest.raises(SampleError, match=said):
        client(url, StandIn()).complete([1] * 20)
    server = StandIn(bill=slow, faults={4: fault})  # behind the rehearsal's three: the first round's resident hit
    code, shown, complained, record = shell(server)
    assert code == 0, complained
    (why,) = record["discarded"]
    assert why.startswith("resident of 1 × 64 tokens: ")
    assert "\x1b" not in shown + json.dumps(record, ensure_ascii=False)
    assert record["levels"][0]["proven"] == {"recompute": [3, 3], "resident": [2, 3], "reload": [3, 3]}


def test_three_failures_in_a_row_end_the_run_and_the_rounds_before_are_kept(shell):
    server = StandIn(bill=slow, faults=dict.fromkeys(range(9, 100), "500"))
    code, said, complained, record = shell(server)
    assert code == 2
    assert "3 requests in a row failed, the last:" in complained
    assert "what was measured before is kept" in complained
    assert record["rounds"] == 2  # the second one without any answer: no prefix, no hits to ask for
    assert record["levels"][0]["proven"] == {"recompute": [1, 1], "resident": [1, 1], "reload": [1, 1]}
    assert len(server.prompts) == 12
    assert "medians of 2 rounds" in said


def test_a_server_that_goes_away_leaves_what_was_measured(shell):
    code, _, complained, record = shell(StandIn(bill=slow, faults={10: "go away"}))
    assert code == 2
    assert "cannot connect to http://127.0.0.1" in complained
    assert record["rounds"] == 1
    assert record["levels"][0]["seconds"]["reload"][1] is not None


def test_a_server_that_is_not_there_is_one_line(shell):
    code, _, complained, record = shell(StandIn(faults={0: "go away"}))
    assert (code, record) == (2, None)
    assert "broke off the connection" in complained


def test_ctrl_c_keeps_what_was_measured(shell):
    server = StandIn(bill=slow)
    server.on_completion = lambda number: press_ctrl_c() if number == 10 else None
    code, _, complained, record = shell(server)
    assert code == 130
    assert complained.endswith("kvlab: interrupted; what was measured before is kept")
    assert record["stopped"] == "interrupted"
    assert record["rounds"] == 1
    assert len(record["samples"]) >= 6


def test_ctrl_c_ends_every_request_that_is_under_way():
    server, never, waiting, answered = StandIn(bill=slow), threading.Event(), threading.Semaphore(0), []

    def hold(number):
        if number >= 3:  # behind the rehearsal
            waiting.release()
            never.wait(60)
            answered.append(number)

    def interrupt():
        for _ in range(3):
            waiting.acquire()
        press_ctrl_c()

    server.on_completion = hold
    threading.Thread(target=interrupt, daemon=True).start()
    with running(server) as url:
        ask = probe.Ask((64,), 16, (3,), rounds=1)
        words = probe.Prompts([f"w{i}" for i in range(200)], 1)
        asked = client(url, server)
        rehearsal = probe.rehearse(asked, probe.Prompts(range(1000, 3000), 1), words, ask, lambda _: None)
        measured = probe.measure(asked, rehearsal, ask)
        assert answered == []  # the run did not wait for the server
        never.set()
    assert measured.stopped == "interrupted"
    assert measured.samples == []


def test_a_folder_that_the_server_names_and_kvlab_cannot_read_costs_no_measurement(shell, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    code, _, complained, record = shell(StandIn(bill=slow, root=str(tmp_path)))
    assert code == 0, complained
    assert "--config" in record["server"]["no_machine"]
    assert record["rounds"] == 3


def test_a_silent_server_is_not_waited_for_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ServerError, match=r"sent nothing for 0.2 s; it may be overloaded"):
            Server(Endpoint(url, timeout_s=0.2), "toy").complete([1] * 20)


def test_a_refused_prompt_says_what_the_server_said():
    server = StandIn(takes_ids=False)
    with (
        running(server) as url,
        pytest.raises(RefusedError, match=r"refuses the request \(422\): prompt: expected a st"),
    ):
        client(url, server).complete([1] * 20)


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://host:notaport", "http://host/?x=1", "http://u:p@host"]
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(ValueError, match="address") as refused:
        Endpoint(url)
    assert "u:p" not in str(refused.value)


def test_an_address_may_end_as_openai_clients_write_it():
    assert Endpoint("localhost:8000/v1/").url == "http://localhost:8000"
    assert Endpoint("https://host/some/v1").url == "https://host/some"
    assert Endpoint("http://example.org").plain_text
    assert not Endpoint("http://127.0.0.1:1").plain_text
