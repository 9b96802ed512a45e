"""Text becomes the ids that the model was trained on, and comes back unchanged."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from kvlab import tokenizer
from kvlab.gguf_file import GgufFile
from kvlab.loading import load_model
from kvlab.tokenizer import ByteTokenizer

SAMPLES = [
    "Hello, world! It's 2024-01-31, and 1,234.5 > 999.",
    "def f(x):\n    return x**2\t# done\n\n\n",
    "naïve café e\u0301 — 你好，世界 🙂‍↔️ \u200b done",
    "   leading and trailing   ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "",
]


@given(st.text())
def test_bytes_round_trip_any_text(text):
    ids = ByteTokenizer().encode(text)
    assert ids == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


def test_ids_that_are_no_bytes_decode_to_one_replacement_each():
    assert ByteTokenizer().decode([72, 300, 511, 105]) == "H\ufffd\ufffdi"


def test_seeded_models_speak_bytes():
    assert load_model("tiny").tokenizer.encode("é") == [0xC3, 0xA9]


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        tokenizer.from_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        tokenizer.from_hf(tmp_path)


def test_a_hf_folder_gives_ids_eos_and_a_digest_of_its_content(tmp_path):
    def write(words):
        inner = Inner(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        inner.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "end"}}))
        return tokenizer.from_hf(tmp_path)

    first = write(["?", "a", "end"])
    assert (first.encode("a b end"), first.eos, first.vocab) == ([1, 0, 2], 2, 3)
    assert first.digest == write(["?", "a", "end"]).digest
    assert first.digest != write(["?", "a", "end", "b"]).digest
    with pytest.raises(ValueError, match="chat template"):
        first.chat([{"role": "user", "content": "hi"}])


@pytest.fixture(scope="module")
def gguf_file(smollm2_path):
    return GgufFile(smollm2_path)


@pytest.fixture(scope="module")
def smollm2(gguf_file):
    return tokenizer.from_gguf(gguf_file)


@pytest.mark.smollm2
@pytest.mark.parametrize("text", SAMPLES)
def test_smollm2_text_comes_back_unchanged(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.smollm2
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_smollm2_round_trips_any_text_that_its_vocabulary_can_spell(smollm2, text):
    # The published vocabulary has no token for these bytes (some control characters, planes 4 to 11): they are dropped.
    absent = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    text = "".join(char for char in text if not absent & set(char.encode()))
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.mark.smollm2
def test_smollm2_ids_are_those_of_transformers(smollm2, smollm2_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)
    for text in SAMPLES:
        assert smollm2.encode(text) == theirs.encode(text), text


@pytest.mark.smollm2
def test_digits_stand_alone_and_special_tokens_are_single_ids(smollm2):
    assert len(smollm2.encode("31415")) == 5
    assert smollm2.encode("<|im_start|>") == [1]
    assert smollm2.encode("<|im_end|>") == [smollm2.eos] == [2]
    assert smollm2.vocab == 49152


@pytest.mark.smollm2
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_the_chat_prompt_is_what_the_models_own_template_renders(smollm2, gguf_file, system):
    jinja2 = pytest.importorskip("jinja2")
    messages = [*system, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    template = jinja2.Environment().from_string(gguf_file.get("tokenizer.chat_template"))
    assert smollm2.chat(messages) == template.render(messages=messages, add_generation_prompt=True)
