"""A Valkey or Redis server: connections, replies read straight to where they belong, and when to leave it alone.

The PyPI client `valkey` (`pip install 'kvlab[valkey]'`) connects, authenticates and speaks TLS. It would copy a bulk
reply three times, so replies are read here. Does not know blocks, tiers, or what a key means.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import socket

__all__ = ["PASSWORD_VARIABLE", "Refusal", "Reply", "Server", "Wire", "command", "milliseconds"]

PASSWORD_VARIABLE = "KVLAB_VALKEY_PASSWORD"
_SCHEMES = ("valkey://", "valkeys://", "redis://", "rediss://", "unix://")
_READ_BYTES = 16 << 10  # read at once where a line is expected; what follows it in there is copied once more
_FIRST_PAUSE_S = 0.5  # after a failure; twice as long after each one that follows
_LONGEST_PAUSE_S = 30.0


class Refusal(OSError):  # noqa: N818
    """The server is there and says no: to what, in its own words."""

    @property
    def of_key(self) -> bool:
        """Whether it is about the key, which holds something else, and not about the server or who asks."""
        return str(self).startswith("WRONGTYPE")


# Bytes of a bulk reply, how many went into the targets, an integer, None for nothing there, what it refuses, or a list.
Reply = bytes | int | None | Refusal | list[Any]


def command(*words: bytes | int) -> bytes:
    """One command as the protocol (RESP, https://valkey.io/topics/protocol/) has it: an array of bulk strings."""
    texts = [b"%d" % word if isinstance(word, int) else word for word in words]
    return b"*%d\r\n" % len(texts) + b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts])


def milliseconds(seconds: float) -> int:
    """A time to live as a server takes it, at least 1."""
    return max(1, round(seconds * 1000))


class Wire:
    """One connection: commands go out, and their replies come in that order. Not for two threads at once.

    `deadline_s`, an instant of `perf_counter`, bounds all of them together; None: each send or read has `timeout_s`.
    """

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        self._socket: socket.socket | None = None
        self._buffer = bytearray(_READ_BYTES)
        self._low = self._high = 0  # [low, high) of the buffer has been received and not taken
        self.deadline_s: float | None = None

    def open(self) -> None:
        """Be connected: anew, where the server has closed the connection since it was last used. Raises OSError."""
        import valkey

        if self._socket is not None:
            try:
                stale = self._connection.can_read(0)
            except valkey.ValkeyError:
                stale = True
            if not stale:
                return
            self.close()
        try:
            self._connection.connect()
        except (valkey.AuthenticationError, valkey.ResponseError) as error:
            raise Refusal(f"it refuses the login: {error}") from error
        except valkey.TimeoutError as error:
            raise TimeoutError(str(error)) from error
        except valkey.ValkeyError as error:
            raise ConnectionError(str(error)) from error
        # The client has read every reply to what it has sent, so that nothing is left in its own buffer.
        self._socket = self._connection._sock
        self._low = self._high = 0

    def close(self) -> None:
        """Give the connection up, with whatever was still to come."""
        self._socket = None
        self._connection.disconnect()

    def send(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Send commands in `command`'s form, cut anywhere. Raises OSError."""
        assert self._socket is not None, "open the connection first"
        for chunk in chunks:
            self._socket.settimeout(self._left_s())
            self._socket.sendall(chunk)

    def reply(self, targets: Sequence[memoryview] = ()) -> Reply:
        """The next reply; of a bulk reply as long as `targets` together, the bytes go there. Raises OSError."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return Refusal(rest.decode(errors="replace"))
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self.reply() for _ in range(int(rest))]
        if kind != b"$":
            raise ConnectionError(f"it answers {line[:40]!r}, which is not what was asked for")
        size = int(rest)
        if size < 0:
            return None
        if targets and size == sum(len(target) for target in targets):
            for target in targets:
                self._take(target)
            self._take(memoryview(bytearray(2)))
            return size
        data = bytearray(size + 2)
        self._take(memoryview(data))
        return bytes(data[:size])

    def _left_s(self) -> float:
        if self.deadline_s is None:
            return self._timeout_s
        left_s = self.deadline_s - time.perf_counter()
        if left_s <= 0:
            raise TimeoutError("it took too long")
        return left_s

    def _receive(self, target: memoryview) -> int:
        assert self._socket is not None, "open the connection first"
        if self.deadline_s is not None:
            self._socket.settimeout(self._left_s())
        got = self._socket.recv_into(target)
        if not got:
            raise ConnectionResetError("it has closed the connection")
        return got

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._low, self._high)) < 0:
            kept = self._high - self._low
            if kept == len(self._buffer):
                raise ConnectionError("it answers with a line that does not end")
            self._buffer[:kept] = self._buffer[self._low : self._high]
            self._low, self._high = 0, kept
            self._high += self._receive(memoryview(self._buffer)[kept:])
        line = bytes(self._buffer[self._low : end])
        self._low = end + 2
        return line

    def _take(self, target: memoryview) -> None:
        done = min(len(target), self._high - self._low)
        target[:done] = self._buffer[self._low : self._low + done]
        self._low += done
        while done < len(target):
            done += self._receive(target[done:])


def _close(questions: Wire, idle: list[Wire]) -> None:
    for wire in (questions, *idle):
        wire.close()


class Server:
    """The server at `url`. Owns one connection for questions, and as many for payloads as are in use at once.

    A question takes `question_s` seconds at most, and as long again where it has to connect first; a payload may stand
    still for `timeout_s`. After a failure nothing is asked for a pause, which doubles up to half a minute as long as
    failures go on, so that who asks at every step does not wait at every step. An answer ends what questions have
    failed, but not what payloads have: a server may answer and yet not deliver. The password is kept by the client
    alone: it comes with the URL or from the environment variable KVLAB_VALKEY_PASSWORD, and is in no message.
    Raises ValueError for a URL that is none, or without the client.
    """

    def __init__(self, url: str, *, timeout_s: float, question_s: float) -> None:
        try:
            import valkey
        except ModuleNotFoundError as error:
            raise ValueError(f"a Valkey tier needs the client ({error}): pip install 'kvlab[valkey]'") from error
        for name, seconds in (("timeout_s", timeout_s), ("lookup_timeout_s", question_s)):
            if not (isinstance(seconds, int | float) and seconds > 0):
                raise ValueError(f"{name} is {seconds!r}; expected a positive number of seconds")
        if not url.lower().startswith(_SCHEMES):  # the URL itself may hold a password, and is not repeated
            raise ValueError(f"the server's URL begins with none of {', '.join(_SCHEMES)}; write valkey://host:port")
        options: dict[str, Any] = {"lib_name": None, "lib_version": None}
        if url.lower().startswith(("valkeys://", "rediss://")):
            options["ssl_check_hostname"] = True
        if password := os.environ.get(PASSWORD_VARIABLE):
            options["password"] = password
        try:
            if not url.lower().startswith("unix://") and "@" in (parts := urlsplit(url)).path + parts.fragment:
                raise ValueError("its password ends the host's place too early")
            pool = valkey.ConnectionPool.from_url(url, **options)
            pool.connection_kwargs.update(protocol=2)
            self._pool, self._timeout_s, self._question_s = pool, timeout_s, question_s
            self._questions = self._wire(question_s)
        except (ValueError, TypeError, valkey.ValkeyError):
            # What it says may repeat a part of the password that was taken for a port.
            raise ValueError(
                "the server's URL cannot be used: its host, port, database or an option cannot be read; "
                "percent-encode / ? # @ in the password, or give it in KVLAB_VALKEY_PASSWORD"
            ) from None
        place = pool.connection_kwargs
        self.place = str(place.get("path") or f"{place.get('host', 'localhost')}:{place.get('port', 6379)}")
        self._idle: list[Wire] = []
        self._lock = threading.Lock()
        self._failed_questions = self._failed_payloads = 0  # since the last that did not
        self._down_until_s = 0.0
        weakref.finalize(self, _close, self._questions, self._idle)

    def _wire(self, timeout_s: float) -> Wire:
        connection = self._pool.make_connection()
        connection.socket_timeout = timeout_s
        connection.socket_connect_timeout = min(timeout_s, self._question_s)
        return Wire(connection, timeout_s)

    @property
    def down(self) -> bool:
        """Whether it has failed so recently that it is not asked."""
        return time.perf_counter() < self._down_until_s

    def ask(self, commands: Sequence[bytes]) -> list[Reply]:
        """Send short commands together and return their replies; for the thread that must not wait. Raises OSError."""
        self._check_up()
        wire = self._questions
        try:
            wire.open()
            wire.deadline_s = time.perf_counter() + self._question_s
            wire.send([b"".join(commands)])
            replies = [wire.reply() for _ in commands]
        except BaseException as error:
            wire.close()
            self._failed_questions += self._pause(error)
            raise
        self._failed_questions = 0
        return replies

    @contextmanager
    def payloads(self, deadline_s: float | None = None) -> Iterator[Wire]:
        """A connection for large commands and replies, to be left when all of them are in. Raises OSError.

        `deadline_s`: the instant of `perf_counter` by which they must be; None: each may stand still for a while.
        """
        self._check_up()
        with self._lock:
            wire = self._idle.pop() if self._idle else self._wire(self._timeout_s)
        try:
            wire.open()
            wire.deadline_s = deadline_s
            yield wire
        except BaseException as error:
            wire.close()
            self._failed_payloads += self._pause(error)
            raise
        self._failed_questions = self._failed_payloads = 0
        with self._lock:
            self._idle.append(wire)

    def close(self) -> None:
        """Close the connections that are not in use; later calls open new ones."""
        with self._lock:
            _close(self._questions, self._idle)
            self._idle.clear()

    def _check_up(self) -> None:
        if self.down:
            left_s = self._down_until_s - time.perf_counter()
            raise ConnectionError(f"it has failed {self._failures} times; asked again in {left_s:.1f} s")

    @property
    def _failures(self) -> int:
        return self._failed_questions + self._failed_payloads

    def _pause(self, error: BaseException) -> bool:
        """Leave the server alone for a while, if `error` is a failure of it; whether it is."""
        if isinstance(error, OSError):
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 10))
            self._down_until_s = time.perf_counter() + pause_s
        return isinstance(error, OSError)
