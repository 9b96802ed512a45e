"""What can be asked of an OpenAI-compatible server: its models, a token behind a prompt, its caches' resets and counts.

Knows the protocol as vLLM 0.32 and SGLang 0.5.23 speak it (both take token ids as a prompt) and clocks. Knows nothing
of what the completions are measured for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvlab.server import metrics
from kvlab.server.http import Endpoint, MissingError, RefusedError, SampleError, ServerError
from kvlab.server.metrics import Counters

__all__ = ["Completion", "Prompt", "Served", "Server"]

Prompt = Sequence[int] | str

# Paths that drop the device's prefix cache: vLLM's in development mode (it keeps what a connector stored elsewhere),
# SGLang's (it drops its host copies too, and keeps the storage backend's).
_RESETS = ("/reset_prefix_cache", "/flush_cache")
_RESET_TRIES = 20
_RESET_PAUSE_S = 0.25
_COUNT_TRIES = 50
_COUNT_PAUSE_S = 0.04


@dataclass(frozen=True)
class Served:
    """A model as `/v1/models` lists it; `max_tokens` (prompt and answer), `root` and `owner` None where not told."""

    name: str
    max_tokens: int | None
    root: str | None
    owner: str | None


@dataclass(frozen=True)
class Completion:
    """One token behind a prompt. Counts are the server's own; None where it gives none.

    `ttft_s` runs from sending the request on an open connection to the first event that holds a choice. `cached` says
    where cached tokens came from, for servers that tell each request.
    """

    ttft_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    cached: Mapping[str, int] = field(default_factory=dict)


class Server:
    """One model on one server."""

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self.endpoint, self.model = endpoint, model
        self.requests = self.prompt_tokens = 0  # completions asked for, and the prompt tokens of those that came
        self._counting = threading.Lock()

    @cached_property
    def models(self) -> tuple[Served, ...]:
        """What the server says that it serves; empty when it has no such list."""
        try:
            listed = self._json("GET", "/v1/models")
        except MissingError:
            return ()
        return tuple(
            Served(str(item["id"]), _int(item.get("max_model_len")), item.get("root"), item.get("owned_by"))
            for item in (listed.get("data") or () if isinstance(listed, dict) else ())
            if isinstance(item, dict) and "id" in item
        )

    def served(self) -> Served:
        """The model in the server's list. Raises ValueError naming those that it has."""
        for item in self.models:
            if item.name == self.model:
                return item
        if self.models:
            known = self.endpoint.said(", ".join(item.name for item in self.models))
            raise ValueError(f"{self.endpoint.url} has no model {self.model!r}; it serves {known}")
        return Served(self.model, None, None, None)

    @cached_property
    def kind(self) -> str:
        """The software, as the model list names its owner: "vllm", "sglang" or "unknown"."""
        owner = (self.served().owner or "").lower()
        return owner if owner in ("vllm", "sglang") else "unknown"

    def version(self) -> str | None:
        """The server's version, where it tells it."""
        try:
            told = self._json("GET", "/version").get("version")
        except (ServerError, AttributeError):
            return None
        return None if told is None else self.endpoint.said(str(told))

    @cached_property
    def reset_path(self) -> str | None:
        """The path that drops the prefix cache, looked up in the server's own description without calling it."""
        try:
            paths = self._json("GET", "/openapi.json").get("paths") or {}
        except (ServerError, AttributeError):
            return None
        return next((path for path in _RESETS if path in paths), None)

    def reset(self) -> bool:
        """Drop the device's prefix cache; False when the server will not, as while any request holds blocks.

        Tried for five seconds: blocks are also held while they are copied to another tier.
        """
        if self.reset_path is None:
            raise ValueError(f"{self.endpoint.url} has no path that resets its prefix cache")
        for _ in range(_RESET_TRIES):
            try:
                said = self.endpoint.fetch("POST", self.reset_path)
            except RefusedError:  # SGLang's way
                said = '{"success": false}'
            if said.replace(" ", "") != '{"success":false}':  # older vLLM and SGLang answer without JSON
                return True
            self.endpoint.sleep(_RESET_PAUSE_S)
        return False

    def counters(self) -> Counters | None:
        """What the server has counted so far; None without metrics."""
        try:
            return metrics.parse(self.endpoint.fetch("GET", "/metrics"))
        except (MissingError, RefusedError, SampleError):
            return None

    def counted_since(self, before: Counters, tokens: int) -> Counters | None:
        """What was added since `before`, once `tokens` prompt tokens were; None when it never is just those.

        More than those means that others use the server, and nothing can be told apart. Counts may come a little late.
        """
        for _ in range(_COUNT_TRIES):
            now = self.counters()
            if now is None:
                return None
            added = now.since(before)
            if added.prompt_tokens >= tokens:
                return added if added.prompt_tokens == tokens else None
            self.endpoint.sleep(_COUNT_PAUSE_S)
        return None

    def tokenize(self, text: str) -> list[int] | None:
        """The ids of `text` in the server's own vocabulary, or None where it does not tell."""
        try:
            told = self._json("POST", "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False})
        except (MissingError, RefusedError, SampleError):
            return None
        tokens = told.get("tokens") if isinstance(told, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            return None
        return tokens or None

    def complete(self, prompt: Prompt) -> Completion:
        """One greedy token behind `prompt` (ids or text), streamed.

        Raises SampleError for a stream that is cut or holds an error, and as `Endpoint.send` does.
        """
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.kind == "sglang":
            body["return_cached_tokens_details"] = True
        with self._counting:
            self.requests += 1
        first_s: float | None = None
        usage: dict[str, Any] = {}
        places: dict[str, int] = {}
        with self.endpoint.send("POST", "/v1/completions", body) as answer:
            for data in answer.events():
                if data == "[DONE]":
                    break
                event = self._event(data)
                if event.get("choices") and first_s is None:
                    first_s = self.endpoint.clock() - answer.sent_s
                usage = event.get("usage") or usage
                places |= _places(event)
            else:
                raise SampleError(f"{self.endpoint.url} cut the stream before its end")
        if first_s is None:
            raise SampleError(f"{self.endpoint.url} ended the stream without a token")
        prompt_tokens = _int(usage.get("prompt_tokens"))
        with self._counting:
            self.prompt_tokens += prompt_tokens or (0 if isinstance(prompt, str) else len(prompt))
        return Completion(
            first_s, prompt_tokens, _int((usage.get("prompt_tokens_details") or {}).get("cached_tokens")), places
        )

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise SampleError(f"{self.endpoint.url} streams what is not a JSON object: {self.endpoint.said(data)}")
        if event.get("error"):
            raise SampleError(f"{self.endpoint.url} failed in the stream: {self.endpoint.said(data)}")
        return event

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        text = self.endpoint.fetch(method, path, body)
        try:
            return json.loads(text)
        except ValueError as error:
            raise SampleError(f"{self.endpoint.url}{path} answers with what is not JSON: {error}") from error


def _places(event: Mapping[str, Any]) -> dict[str, int]:
    """Cached tokens by place in SGLang's extra event (`return_cached_tokens_details`)."""
    details = (event.get("sglext") or {}).get("cached_tokens_details") or {}
    return {str(place): count for place, count in details.items() if isinstance(count, int)}


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
