"""The probe against a real vLLM server on a CPU, with the example disk connector as the tier behind the device.

Runs where vLLM is: in this environment, or in the one whose python $KVLAB_VLLM_PYTHON names.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from kvlab.cli import main
from kvlab.machine import Machine
from kvlab.server import Endpoint, Server

HAS_VLLM = importlib.util.find_spec("vllm") is not None
PYTHON = os.environ.get("KVLAB_VLLM_PYTHON") or (sys.executable if HAS_VLLM else None)
START_S = 600
LENGTHS = (128, 256)  # whole blocks of vLLM's on a CPU

pytestmark = pytest.mark.skipif(PYTHON is None, reason="no vLLM here and no $KVLAB_VLLM_PYTHON")


@pytest.fixture(scope="module")
def url(hf_folder, tmp_path_factory):
    """The address of a vLLM server in development mode, so that its cache can be reset."""
    folder = tmp_path_factory.mktemp("vllm-server")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
    }
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(hf_folder), "--served-model-name", "smol",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048",
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--enforce-eager",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_WAIT_POLICY": "passive",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)  # the other environment has its own packages
    log = folder / "log.txt"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=folder
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/v1/models", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            for signum in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(20)


def _wait_for(address, server, log):
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(address, timeout=5).close()
            return
        time.sleep(1)
    pytest.fail(f"vLLM did not start: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def test_hits_misses_and_reloads_are_proven_and_the_record_plans(url, hf_folder, tmp_path, monkeypatch, capsys):
    def shell(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 0, capsys.readouterr().err
        return capsys.readouterr().out

    said = shell(
        "probe", f"{url}/v1", "--model", "smol", "--lengths", ",".join(map(str, LENGTHS)), "--repeats", 2,
        "--concurrency", "1,2", "--kv-dtype", "fp32", "--out", tmp_path,
    )  # fmt: skip
    record = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))
    assert record["server"]["kind"] == "vllm"
    assert record["server"]["proof"] == "usage"
    assert record["server"]["tier"] == "external"
    assert record["server"]["block_tokens"] == 128
    assert record["discarded"] == {}
    for sample in record["samples"]:
        wanted = 0 if sample["arm"] == "recompute" else sample["tokens"]
        assert sample["cached_tokens"] == [wanted] * sample["concurrency"]
        assert sample["prompt_tokens"] == [sample["tokens"] + 16] * sample["concurrency"]
    assert len(record["samples"]) == 2 * 2 * len(LENGTHS) * 3
    # SmolLM2 on a CPU: a token costs milliseconds to compute and microseconds to keep.
    (level, _) = record["levels"]
    for cold_s, resident_s in zip(level["seconds"]["recompute"], level["seconds"]["resident"], strict=True):
        assert resident_s < cold_s
    assert "Settings for vllm" in said or "too fast to be seen" in json.dumps(record)
    machine = Machine.load(tmp_path / "probe.json")
    link = [] if machine.links else ["--link", "1GB/s"]
    assert "smol" in shell("plan", "--model", hf_folder, "--machine", tmp_path / "probe.json", "--prefix", 256, *link)


def test_the_metrics_alone_tell_hits_and_where_they_come_from(url):
    server = Server(Endpoint(url), "smol")
    prompt = [1000 + (i * 37) % 5000 for i in range(LENGTHS[0] + 16)]
    added = []
    for again in range(3):
        if again == 2:
            assert server.reset()
        before = server.counters()
        answer = server.complete(prompt)
        counted = server.counted_since(before, len(prompt))
        assert sum(counted.cached.values()) == answer.cached_tokens
        added.append(dict(counted.cached))
    assert added == [{}, {"device": LENGTHS[0]}, {"external": LENGTHS[0]}]
