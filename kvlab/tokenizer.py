"""Text to token ids and back: a Hugging Face tokenizer.json, a GGUF's own vocabulary, or plain bytes.

Does not know models or caches. The digest names the content, since cached KV is only valid for the same ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from kvlab.gguf_file import GgufFile

__all__ = ["ByteTokenizer", "TextStream", "Tokenizer", "from_gguf", "from_hf"]

# The system message that SmolLM2's template puts first when the caller gives none; also how we recognise it.
_SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Qwen2Tokenizer's pre-tokenizer (transformers, models/qwen2/tokenization_qwen2.py)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types


class Tokenizer:
    """A real vocabulary. `digest` is the SHA-256 (hex) of its source; `eos` is the id that ends a turn, if known."""

    def __init__(
        self, inner: tokenizers.Tokenizer, digest: str, eos: int | None = None, template: str | None = None
    ) -> None:
        self._inner = inner
        self._template = template
        self.digest = digest
        self.eos = eos

    @property
    def vocab(self) -> int:
        """How many ids there are, added tokens included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of `text`; a byte that the vocabulary cannot spell is dropped.

        `special` adds what the tokenizer puts around a whole text (a BOS, for some models).
        """
        return list(self._inner.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included as they are written."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt for a conversation of {"role", "content"}, open for the assistant's answer (SmolLM2's ChatML).

        Raises ValueError for a model with another template: a prompt that is only nearly right is worse than none.
        """
        if _SMOLLM2_SYSTEM not in (self._template or ""):
            raise ValueError("this model's chat template is not SmolLM2's; write the prompt and use encode(prompt)")
        turns = list(messages)
        if not turns or turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": _SMOLLM2_SYSTEM})
        said = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
        return f"{said}<|im_start|>assistant\n"

    def next_turn(self, content: str) -> str:
        """What the user's next message adds behind an answer: the two and the answer make the longer `chat` prompt.

        It begins with the end of the answer, `eos`, which a model that came to its end has written itself.
        """
        return f"<|im_end|>\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, for seeded models, which have no vocabulary. Ids above decode to U+FFFD."""

    digest = hashlib.sha256(b"kvlab bytes").hexdigest()
    eos: int | None = None
    vocab = 256

    def encode(self, text: str, *, special: bool = True) -> list[int]:  # noqa: ARG002 - same signature as Tokenizer
        """The UTF-8 bytes of `text`."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these bytes; what is no byte or no UTF-8 becomes U+FFFD."""
        # 0xFF never occurs in UTF-8, so an id above 255 decodes to one replacement character of its own.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The messages, one a line, open for the answer: a seeded model has learned no template."""
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "

    def next_turn(self, content: str) -> str:
        """What the user's next message adds behind an answer."""
        return f"\nuser: {content}\nassistant: "


class TextStream:
    """The text of ids that come one by one, behind those `before`: a character comes once all of its bytes are there.

    A token is decoded behind another, since some decoders strip the space of a first one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._anchor = [] if "\ufffd" in decode(before) else list(before)  # whole characters, which are out
        self._ids: list[int] = []  # what has come since
        self._out = 0  # characters of their text that are out

    def push(self, token: int) -> str:
        """The text that `token` completes; what may still be part of a character (U+FFFD at the end) is held back."""
        self._ids.append(token)
        text = self._text()
        # At most three bytes wait for a fourth; a decoder gives one U+FFFD for all of them, or one for each.
        held = min(3, len(text) - len(text.rstrip("\ufffd")))
        new = text[self._out : len(text) - held]
        self._out += len(new)
        if not held:
            # Bytes of a character are no anchor: some decoders take bytes that follow each other as a whole.
            if "\ufffd" not in self._decode([token]):
                self._anchor = [token]
            self._ids, self._out = [], 0
        return new

    def finish(self) -> str:
        """What is still held back, when no more comes."""
        return self._text()[self._out :]

    def _text(self) -> str:
        return self._decode([*self._anchor, *self._ids])[len(self._decode(self._anchor)) :]


def from_hf(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises FileNotFoundError without one, ValueError if broken."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"no tokenizer.json in {folder}; token ids still work, text needs that file")
    raw = file.read_bytes()
    try:
        inner = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from error
    config_file, jinja = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
    eos = config.get("eos_token")
    eos_text = eos.get("content") if isinstance(eos, dict) else eos
    template = jinja.read_text(encoding="utf-8") if jinja.is_file() else config.get("chat_template")
    return Tokenizer(
        inner,
        hashlib.sha256(raw).hexdigest(),
        eos=inner.token_to_id(eos_text) if eos_text else None,
        template=template if isinstance(template, str) else None,
    )


def from_gguf(file: GgufFile) -> Tokenizer:
    """The byte-level BPE that a GGUF file carries. Raises ValueError for another kind of vocabulary."""
    kind, pre = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in ("smollm", "gpt-2", "qwen2"):
        raise ValueError(
            f"{file.path}: tokenizer {kind!r} with pre {pre!r}; kvlab reads gpt2 with smollm, gpt-2, qwen2"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    merges: list[str] = file.get("tokenizer.ggml.merges")
    types: list[int] = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    inner.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    # normalized=False: a special token is matched in the text as written, before anything else looks at it
    inner.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    content = json.dumps([pre, tokens, merges, types], ensure_ascii=True).encode()
    return Tokenizer(
        inner,
        hashlib.sha256(content).hexdigest(),
        eos=file.get("tokenizer.ggml.eos_token_id"),
        template=file.get("tokenizer.chat_template"),
    )


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """How the text is cut before BPE (llama.cpp, src/llama-vocab.cpp: the regular expressions by `pre`)."""
    if pre == "smollm":  # each digit by itself, then GPT-2's rule
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre == "qwen2":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return pre_tokenizers.ByteLevel(add_prefix_space=False)
