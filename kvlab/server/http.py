"""HTTP to one server: requests with a key, time limits and bounded patience, streams of events, errors in one line.

Built on `http.client`: one connection per request, opened before the clock starts, whose socket can be shut from
another thread, and nothing to install (httpx comes with huggingface_hub 1.0 and later only). It asks the server itself:
proxies and redirects are not followed. Does not know models or what is asked.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Answer", "Endpoint", "MissingError", "RefusedError", "SampleError", "ServerError"]

_PATIENCE_S = 60.0  # in all, for one request that is told to wait
_LONGEST_LINE = 2**20
_LONGEST_BODY = 2**26
_LONGEST_SAYING = 200


class ServerError(OSError):
    """The server cannot be used any further; the message is one line that says what to do."""


class MissingError(ServerError):
    """The server has no such path or model (404)."""


class RefusedError(ServerError):
    """The server understood and will not do this request as it is (400, 422)."""


class SampleError(ServerError):
    """This request failed; the next one may well succeed."""


@dataclass(frozen=True)
class Answer:
    """A successful answer whose body is still to be read, and the clock's time at which its request was sent."""

    response: HTTPResponse
    sent_s: float

    def events(self) -> Iterator[str]:
        """The data of each server-sent event as it arrives; ends where the stream ends, for whatever reason."""
        while line := self.response.readline(_LONGEST_LINE):
            name, _, data = line.decode("utf-8", "replace").partition(":")
            if name == "data":
                yield data.strip()


class Endpoint:
    """A server's address, with the key that goes into each request and into nothing else.

    Time is read from `clock` and spent by `sleep` (None: a wait that `abort` ends). Raises ValueError for an address or
    a key that cannot be used; the key is never repeated.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout_s: float = 120.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.username or parts.password:
            raise ValueError("an address must not hold a user or password; put the key into KVLAB_API_KEY")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not a server's address; expected http://host:port or https://host")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is not a server's address: {error}") from error
        if key is not None and not re.fullmatch(r"[!-~]+", key):
            raise ValueError("the key holds a space, a line break or another character that no HTTP header can carry")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")  # OpenAI clients' base addresses end in /v1
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.plain_text = not self._secure and parts.hostname not in ("localhost", "127.0.0.1", "::1")
        self._key, self._timeout_s, self._aborted = key, timeout_s, threading.Event()
        self.clock, self.sleep = clock, sleep or self._aborted.wait
        self._open: set[HTTPConnection] = set()

    def fetch(self, method: str, path: str, body: Any = None) -> str:
        """The whole body of a small answer as text. Raises as `send` does."""
        with self.send(method, path, body) as answer:
            return answer.response.read(_LONGEST_BODY).decode("utf-8", "replace")

    def abort(self) -> None:
        """Shut every request that is under way and take no more; their threads see SampleError."""
        self._aborted.set()
        for connection in tuple(self._open):
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def send(self, method: str, path: str, body: Any = None) -> Iterator[Answer]:
        """One request. A server that asks to wait (429, or 503 with Retry-After) is obeyed, a minute in all.

        Raises ServerError, MissingError, RefusedError or SampleError, also for what goes wrong while the body is read.
        """
        waited_s, tries = 0.0, 0
        while True:
            tries += 1
            if self._aborted.is_set():
                raise SampleError(f"requests to {self.url} were ended")
            connection = self._connect()
            self._open.add(connection)
            try:
                begin = self.clock()
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, self._path + path, data, self._headers(data))
                response = connection.getresponse()
                wait_s = _wait_s(response, tries)
                if wait_s is None:
                    self._check(response, path)
                    yield Answer(response, begin)
                    return
                if waited_s + wait_s > _PATIENCE_S:
                    raise ServerError(
                        f"{self.url} limits requests ({response.status}) and asks to wait {wait_s:,.0f} s after"
                        f" {waited_s:,.0f} s of waiting; try later, or with fewer lengths or lower --concurrency"
                    )
            except TimeoutError as error:
                raise ServerError(
                    f"{self.url} sent nothing for {self._timeout_s:g} s; it may be overloaded: try later or raise"
                    " --timeout"
                ) from error
            except (ConnectionError, HTTPException) as error:
                raise SampleError(f"{self.url} broke off the connection ({type(error).__name__})") from error
            finally:
                self._open.discard(connection)
                connection.close()
            self.sleep(wait_s)
            waited_s += wait_s

    def _connect(self) -> HTTPConnection:
        kind = HTTPSConnection if self._secure else HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.connect()
        except OSError as error:
            raise ServerError(f"cannot connect to {self.url}: {error.strerror or error}; is it running?") from error
        return connection

    def _headers(self, data: bytes | None) -> dict[str, str]:
        headers = {"Accept": "*/*", "Connection": "close"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        return headers

    def _check(self, response: HTTPResponse, path: str) -> None:
        """Raise what the status means; 2xx passes."""
        status = response.status
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            raise ServerError(f"{self.url} redirects to {self.said(response.getheader('Location') or '?')}; ask there")
        said = self.said(response.read(_LONGEST_BODY).decode("utf-8", "replace"))
        if status in (401, 403):
            advice = "the server does not take the key" if self._key else "the server wants a key"
            raise ServerError(f"{self.url}: {advice} ({status}); set KVLAB_API_KEY or OPENAI_API_KEY. It says: {said}")
        if status == 404:
            raise MissingError(f"{self.url} knows nothing under {path} (404): {said}")
        if status < 500:
            raise RefusedError(f"{self.url} refuses the request ({status}): {said}")
        raise SampleError(f"{self.url} failed ({status}): {said}")

    def said(self, text: str) -> str:
        """What a server said, fit for a terminal and a record: its message alone, one short line, without the key."""
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            found = json.loads(text)
            inner = found.get("error", found)
            text = str(inner if isinstance(inner, str) else inner.get("message") or inner.get("detail") or text)
        if self._key:
            text = text.replace(self._key, "[key]")
        line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
        return line if len(line) <= _LONGEST_SAYING else f"{line[:_LONGEST_SAYING]}…"


def _wait_s(response: HTTPResponse, tries: int) -> float | None:
    """Seconds after which to ask again, or None where waiting was not asked for. Without a number: 1, 2, 4, … s."""
    stated = response.getheader("Retry-After")
    if response.status != 429 and not (response.status == 503 and stated):
        return None
    if stated is None:
        return 2.0 ** (tries - 1)
    try:
        return max(1.0, float(stated))  # not 0: a server that says so for ever would be asked without end
    except ValueError:
        pass
    try:
        return max(1.0, (parsedate_to_datetime(stated) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 2.0 ** (tries - 1)
