"""Fixtures that several test files share."""

import os

import pytest


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
