"""Fixtures that several test files share."""

import os
import signal

import pytest

# Started in the background by a shell, a process ignores Ctrl-C, and so do its children; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
