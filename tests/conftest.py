"""Fixtures that several test files share."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Started in the background by a shell, a process ignores Ctrl-C, and so do its children; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def tool_runs(request):
    """Processes by command: the tools of `test_house`, which run beside the tests before it.

    Without a cache mypy takes a minute of one core, and most tests leave one to it.
    """
    name = "test_lint_format_and_types"
    asked = [item for item in request.session.items if getattr(item, "originalname", "") == name]
    last = ["nice", "-n", "19"] if shutil.which("nice") else []
    with contextlib.ExitStack() as stack:
        runs = {}
        for tool in (item.callspec.params["tool"] for item in asked):
            command = [*last, sys.executable, "-m", *tool]
            run = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
            )
            runs[" ".join(tool)] = stack.enter_context(run)
        yield runs
        for run in runs.values():
            run.kill()


@pytest.fixture(scope="session")
def smollm2_path():
    """The real SmolLM2 GGUF: from the cache, else fetched; tests that need it are skipped when neither works."""
    from kvlab.weights import fetch

    try:
        return fetch("smollm2-135m", quiet=True)
    except OSError as error:
        if os.environ.get("KVLAB_REQUIRE_MODEL"):
            raise
        pytest.skip(f"no SmolLM2 weights: {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    """SmolLM2 in fp32, loaded once a session. Nothing may change its weights."""
    from kvlab.loading import load_model

    return load_model(smollm2_path, dtype="fp32")
