"""What is known here of the blocks on a server, which others write to and which evicts by itself.

A look-up asks for many blocks at once; between look-ups, what was found last counts. Does not know payloads.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvlab.fingerprint import Fingerprint
from kvlab.tiers.lifetime import Lifetime
from kvlab.tiers.server import Refusal, Reply, Server, command, milliseconds
from kvlab.tiers.value import BlockForm, BlockHeader, BlockKeys

if TYPE_CHECKING:
    from kvlab.tiers.base import Counters

__all__ = ["ServerIndex"]

_TOGETHER = 4096  # look-ups, or removals, of one question
_FRESH_S = 0.05  # a block that was looked up so recently is not looked up again: a load follows its look-up
_MOST_KNOWN = 1 << 17  # blocks that are remembered


class ServerIndex:
    """The blocks that were found on `server` or stored there, those cut into `extents` only. Owns what it remembers.

    `doomed` are to be removed from the server with the next question. For one thread.
    """

    def __init__(self, server: Server, namespace: str, lifetime: Lifetime, counters: Counters) -> None:
        self.server, self.lifetime, self.counters = server, lifetime, counters
        self.namespace = namespace
        self.extents: tuple[int, ...] = ()
        self.doomed: dict[bytes, None] = {}
        self._headers: OrderedDict[bytes, BlockHeader] = OrderedDict()  # by block hash, the one met first first
        self._seen_s: OrderedDict[bytes, float] = OrderedDict()  # when a block was looked up, of those just now
        self._outdated: OrderedDict[bytes, None] = OrderedDict()  # blocks that are there and too old for us
        self._forms: dict[Fingerprint, BlockForm] = {}
        self._listed_s: dict[bytes, float] = {}  # by digest of a form, when it was put on the server's list

    def open(self, extents: tuple[int, ...]) -> None:
        """From now on blocks are cut so."""
        self.extents, self.keys = extents, BlockKeys(self.namespace, extents)

    def __iter__(self) -> Iterator[bytes]:
        """A copy, so that blocks can be forgotten meanwhile."""
        return iter(list(self._headers))

    @property
    def nbytes(self) -> int:
        """Bytes of all values of the known blocks."""
        payload = sum(self.extents)
        return sum(len(header.raw) + header.facts_bytes + payload for header in self._headers.values())

    def form(self, fingerprint: Fingerprint) -> BlockForm:
        """How blocks are stored under this fingerprint."""
        if fingerprint not in self._forms:
            self._forms[fingerprint] = BlockForm(fingerprint, self.extents)
        return self._forms[fingerprint]

    def get(self, block_hash: bytes, form: BlockForm) -> BlockHeader | None:
        """The header of a known block, if it is of this form."""
        header = self._headers.get(block_hash)
        return header if header is not None and header.digest == form.digest else None

    # Asking -----------------------------------------------------------------------------------------------------------

    def look_up(self, hashes: Sequence[bytes], form: BlockForm) -> None:
        """Ask for all that were not looked up a moment ago; where the server does not answer, what was known stays."""
        now_s = time.perf_counter()
        stale = [h for h in hashes if not now_s - self._seen_s.get(h, -1.0) < _FRESH_S]
        with contextlib.suppress(OSError):  # the server is down now, and knows it
            for first in range(0, len(stale), _TOGETHER):
                part = stale[first : first + _TOGETHER]
                commands = [command(b"GETRANGE", self.keys.of(h)[0], 0, form.fixed_bytes - 1) for h in part]
                for block_hash, reply in zip(part, self.ask(commands), strict=True):
                    self._learn(form, block_hash, reply)

    def _learn(self, form: BlockForm, block_hash: bytes, reply: Reply) -> None:
        """What a look-up says: the block's header, nothing, or something that is of no use to anybody and goes.

        A block that is too old stays: others may give blocks more time, and the server removes it in its own.
        """
        self._saw(block_hash)
        header = self._headers.pop(block_hash, None)
        outdated = block_hash in self._outdated
        self._outdated.pop(block_hash, None)
        if not reply or (isinstance(reply, Refusal) and not reply.of_key):
            return
        if header is None or header.raw != reply:
            try:
                header = form.decode(reply if isinstance(reply, bytes) else b"", block_hash)
            except ValueError:
                self.counters.read_failures += 1
                self.doomed[block_hash] = None
                return
        if self.lifetime.over(header.created):
            self.counters.expired_blocks += not outdated
            self._outdated[block_hash] = None
            if len(self._outdated) > _MOST_KNOWN:
                self._outdated.popitem(last=False)
        else:
            self.remember(header)

    def outdated(self, hashes: Iterable[bytes]) -> frozenset[bytes]:
        """Those that the last look-up has found and that were too old: whoever stores them again replaces them."""
        return frozenset(block_hash for block_hash in hashes if block_hash in self._outdated)

    def ask(self, commands: Sequence[bytes]) -> list[Reply]:
        """Ask, after removing what is doomed. Raises OSError."""
        doomed = list(self.doomed)[:_TOGETHER]
        keys = [key for block_hash in doomed for key in self.keys.of(block_hash)]
        replies = self.server.ask([command(b"UNLINK", *keys), *commands] if keys else commands)
        for block_hash in doomed:
            del self.doomed[block_hash]
        return replies[bool(keys) :]

    def announce(self, form: BlockForm) -> None:
        """Put a form on the server's list, so that others can be told what differs; again before it expires there.

        Raises OSError.
        """
        now_s, ttl_s = time.perf_counter(), self.lifetime.ttl_s
        listed_s = self._listed_s.get(form.digest)
        listed = listed_s is not None and (ttl_s is None or now_s - listed_s < ttl_s / 2)
        commands = [command(b"HSET", self._list_key, form.digest.hex().encode(), form.facts)]
        if ttl_s is not None:
            commands.append(command(b"PEXPIRE", self._list_key, milliseconds(ttl_s)))
        # Even where it is there already: an answer shows that a store is worth beginning.
        replies = self.ask([command(b"PING")] if listed else commands)
        for reply in replies:
            if isinstance(reply, Refusal):
                raise reply
        if not listed:
            self._listed_s[form.digest] = now_s

    def differences(self, form: BlockForm) -> list[str]:
        """Fields in which the most similar form of the server's list differs; [] also where it does not answer."""
        try:
            (stored,) = self.ask([command(b"HVALS", self._list_key)])
        except OSError:
            return []
        facts = [item for item in stored if isinstance(item, bytes)] if isinstance(stored, list) else []
        return min((form.differences(item) for item in facts), key=len, default=[])

    @property
    def _list_key(self) -> bytes:
        return f"{self.namespace}:fingerprints".encode()

    # Remembering ------------------------------------------------------------------------------------------------------

    def remember(self, header: BlockHeader) -> None:
        """A block is there."""
        self._headers[header.block_hash] = header
        self._outdated.pop(header.block_hash, None)
        self._saw(header.block_hash)
        while len(self._headers) > _MOST_KNOWN:
            self._headers.popitem(last=False)

    def _saw(self, block_hash: bytes) -> None:
        """A block was looked up now, there or not. Those that were not so recently need not be kept in mind."""
        now_s = time.perf_counter()
        self._seen_s.pop(block_hash, None)
        self._seen_s[block_hash] = now_s
        while now_s - next(iter(self._seen_s.values())) > _FRESH_S:
            self._seen_s.popitem(last=False)

    def forget(self, block_hash: bytes) -> None:
        """Nothing is known of a block any more."""
        self._headers.pop(block_hash, None)
        self._seen_s.pop(block_hash, None)

    def remove(self, block_hashes: Iterable[bytes]) -> None:
        """Forget blocks and remove them from the server; now if it answers, else when it does again."""
        for block_hash in block_hashes:
            self.forget(block_hash)
            self.doomed[block_hash] = None
        with contextlib.suppress(OSError):
            while self.doomed:
                self.ask([])
