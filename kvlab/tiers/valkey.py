"""A Valkey or Redis server as a tier that many processes share: it evicts by itself, and whatever fails is a miss.

Nothing is asked block by block: `look_up` asks for a whole chain, and `contains` answers from what was found. Look-ups
run on the calling thread and are short, payloads on the io lane, but for blocks that a tier above hands down: those the
calling thread sends. Does not know sockets or the pool.
"""

from __future__ import annotations

import errno
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kvlab.fingerprint import Fingerprint
from kvlab.streams import Streams
from kvlab.tiers.base import (
    Bytes,
    Counters,
    Extents,
    Geometry,
    Load,
    Lost,
    Piece,
    Store,
    Tier,
    TierError,
    checksum,
    in_pieces,
)
from kvlab.tiers.lifetime import Lifetime
from kvlab.tiers.server import Refusal, Server, command, milliseconds
from kvlab.tiers.server_index import ServerIndex
from kvlab.tiers.value import BlockForm, BlockHeader

__all__ = ["ValkeyTier"]

_STORE_BYTES = 4 << 20  # blocks that are written together, and held here until their last layer group has come
_LAST_BYTES = 4 << 20  # the last read of a load: little to check when nothing more is to come
_FULL_PAUSE_S = 1.0  # a server that is full and does not evict is not sent anything for so long


@dataclass
class _ValkeyStore(Store):
    tier: ValkeyTier = field(kw_only=True)
    form: BlockForm = field(kw_only=True)
    created: float = field(kw_only=True)
    outdated: frozenset[bytes] = field(kw_only=True)  # blocks that are there, too old, and replaced
    extents: dict[int, list[Bytes]] = field(kw_only=True, default_factory=dict)  # by block, of the groups that came
    headers: dict[int, BlockHeader] = field(kw_only=True, default_factory=dict)  # of the blocks that are there now
    partial: list[bytes] = field(kw_only=True, default_factory=list)  # blocks of which a part may be missing
    failed: OSError | None = field(kw_only=True, default=None)
    deadline_s: float | None = field(kw_only=True, default=None)

    def waited_for(self) -> None:
        self.deadline_s = time.perf_counter() + self.tier.timeout_s

    def write(self, piece: Piece, extents: Extents) -> None:
        if self.failed is not None:
            return  # `seal` says why
        last = piece.group == len(self.form.extents) - 1
        for block, extent in enumerate(extents, start=piece.first):
            # Whoever waits for its other groups outlives the memory it came in.
            self.extents.setdefault(block, []).append(extent if last else extent.copy())
        if last:
            blocks = range(piece.first, piece.first + len(extents))
            try:
                self._send(blocks)
            except OSError as error:
                self.failed = error
                if len(self.tier.index.keys.of(self.hashes[piece.first])) > 1:
                    self.partial += [self.hashes[block] for block in blocks]

    def _send(self, blocks: range) -> None:
        chunks: list[bytes | memoryview] = []
        owners: list[tuple[int, BlockHeader | None]] = []  # of each command: the block, and its header with the first
        for block in blocks:
            block_hash, extents = self.hashes[block], self.extents.pop(block)
            sums = [checksum(extent, block_hash, group) for group, extent in enumerate(extents)]
            header = self.form.header(block_hash, self.created, sums)
            # The first value last, and only where none of use is there: the rest is that of its checksums.
            for part, payload in reversed(list(enumerate(self.form.cut(extents)))):
                head = [header.raw, self.form.facts] if part == 0 else []
                chunks += self._set(block_hash, part, [*head, *payload])
                owners.append((block, header if part == 0 else None))
        with self.tier.server.payloads(self.deadline_s) as wire:
            wire.send(chunks)
            replies = [wire.reply() for _ in owners]
        for (block, first), reply in zip(owners, replies, strict=True):
            if isinstance(reply, Refusal):
                self.failed = reply
                self.partial.append(self.hashes[block])
            elif first is not None and reply is not None:
                self.headers[block] = first

    def _set(self, block_hash: bytes, part: int, value: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """The command that writes a value, without a copy; the first one of a block replaces only what is too old."""
        ttl_s = self.tier.index.lifetime.ttl_s
        options: list[bytes | int] = [b"NX"] if part == 0 and block_hash not in self.outdated else []
        options += [] if ttl_s is None else [b"PX", milliseconds(ttl_s)]
        words = command(b"SET", self.tier.index.keys.of(block_hash)[part], b"", *options)
        before, after = words.split(b"$0\r\n\r\n", 1)  # the value goes where the empty word is
        return [before + b"$%d\r\n" % sum(map(len, value)), *value, b"\r\n" + after]

    def seal(self) -> None:
        if self.failed is not None:
            raise self.tier._error("write", self.failed) from self.failed

    def publish(self) -> None:
        self.tier._publish(self)

    def abandon(self) -> None:
        """What was written is whole and stays: others may be reading it. What is not whole goes."""
        self.tier._abandon(self)


@dataclass
class _ValkeyLoad(Load):
    tier: ValkeyTier = field(kw_only=True)
    form: BlockForm = field(kw_only=True)
    headers: list[BlockHeader] = field(kw_only=True)
    gone: dict[int, Lost] = field(kw_only=True, default_factory=dict)  # by block

    def checksum(self, group: int, block: int) -> int:
        return self.headers[block].checksums[group]

    def read(self, piece: Piece, buffer: Tensor) -> Tensor:
        rows = buffer[: piece.nbytes]
        self.read_in_place(piece, list(rows.view(piece.count, -1).numpy()))
        return rows

    def read_in_place(self, piece: Piece, extents: list[Bytes]) -> None:
        form, ranges, keys = self.form, self.form.ranges(piece.group), self.tier.index.keys
        asked: list[bytes] = []
        wanted: list[tuple[int, int, bytearray, list[memoryview]]] = []  # block, part, room for a header, all targets
        for block, extent in enumerate(extents, start=piece.first):
            names, done = keys.of(self.headers[block].block_hash), 0
            for place in ranges:
                nbytes, with_header = place.stop - place.start, piece.group == place.part == 0
                header = bytearray(form.header_bytes if with_header else 0)
                start = 0 if with_header else place.start
                asked.append(command(b"GETRANGE", names[place.part], start, place.stop - 1))
                wanted.append((block, place.part, header, [memoryview(header), extent.data[done : done + nbytes]]))
                done += nbytes
        with self.tier.server.payloads() as wire:
            wire.send([b"".join(asked)])
            replies = [wire.reply(targets) for *_, targets in wanted]
        for (block, part, header, _), reply in zip(wanted, replies, strict=True):
            if isinstance(reply, Refusal) and not reply.of_key:
                raise reply
            if not isinstance(reply, int):
                self.gone.setdefault(block, self._missing(block, part))
                return  # nobody wants those behind it
            if header and header[: form.fixed_bytes] != self.headers[block].raw:
                self.gone.setdefault(block, self._changed(bytes(header), block))
                return

    def _missing(self, block: int, part: int) -> Lost:
        """Why a value is not as long as it was: what stands at the block's beginning now says so. Raises OSError."""
        key = self.tier.index.keys.of(self.headers[block].block_hash)[0]
        with self.tier.server.payloads() as wire:
            wire.send([command(b"GETRANGE", key, 0, self.form.header_bytes - 1)])
            header = wire.reply()
        if isinstance(header, Refusal) and not header.of_key:
            raise header
        if header == b"":
            return Lost(block, "the server has evicted it", corrupt=False)
        if isinstance(header, bytes) and header[: self.form.fixed_bytes] != self.headers[block].raw:
            return self._changed(header, block)
        return Lost(block, f"its value number {part} is not whole", corrupt=True)

    def _changed(self, header: bytes, block: int) -> Lost:
        """Why a header is not the one that was looked up."""
        fixed = self.form.fixed_bytes
        try:
            now = self.form.decode(header[:fixed], self.headers[block].block_hash)
        except ValueError as error:
            return Lost(block, str(error), corrupt=True)
        if now.digest == self.form.digest:
            return Lost(block, "it was written again since it was looked up", corrupt=False)
        differences = ", ".join(self.form.differences(header[fixed:]))
        return Lost(block, f"it is stored under another fingerprint now: {differences}", corrupt=False)

    def lost(self, piece: Piece) -> Lost | None:
        blocks = range(piece.first, piece.first + piece.count)
        return next((self.gone[block] for block in blocks if block in self.gone), None)

    def close(self) -> None:
        self.tier._readers -= Counter(header.block_hash for header in self.headers)
        self.headers = []


class ValkeyTier(Tier):
    """Blocks on a server: valkey://[[user]:password@]host:port[/db], valkeys:// with TLS, redis(s)://, unix://.

    Query options of the `valkey` client are understood (ssl_ca_certs=…, ssl_certfile=…); a password may also come from
    KVLAB_VALKEY_PASSWORD. `namespace` begins every key. `ttl_s`: seconds on `clock` after which a block is a miss; the
    server removes it then. `timeout_s`: how long a payload may stand still, and how long the calling thread waits where
    a tier above hands blocks down. `lookup_timeout_s`: how long that waits for an answer (and as long again where it
    has to connect); after a failure nothing is here for a pause of 0.5 to 30 s. `used_bytes` is what was stored or
    found from here and not missed since, for the server evicts by itself; `capacity_bytes` what it said it may use when
    the tier was opened (0: it did not say).
    Raises ValueError for a URL that is none, or without the client: pip install 'kvlab[valkey]'.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "kvlab",
        ttl_s: float | None = None,
        timeout_s: float = 5.0,
        lookup_timeout_s: float = 0.25,
        name: str = "valkey",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not isinstance(url, str):
            raise ValueError(f"the server's URL is of type {type(url).__name__}; write valkey://host:port")
        if not (isinstance(namespace, str) and re.fullmatch(r"[\w.:-]+", namespace)):
            raise ValueError(f"namespace is {namespace!r}; expected letters, digits and . : - _ alone")
        self.name = name
        self.capacity_bytes = 0
        self.counters = Counters()
        self.timeout_s = timeout_s
        self.server = Server(url, timeout_s=timeout_s, question_s=lookup_timeout_s)
        self.index = ServerIndex(self.server, namespace, Lifetime(ttl_s, clock), self.counters)
        self._clock = clock
        self._geometry: Geometry | None = None
        self._readers: Counter[bytes] = Counter()
        self._reserved_bytes = 0
        self._full_until_s = 0.0

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are known to be there, those on their way included."""
        return self._reserved_bytes + self.index.nbytes

    @property
    def _open_geometry(self) -> Geometry:
        if self._geometry is None:
            raise ValueError("this tier is not open; call Transfer.open(tier) first")
        return self._geometry

    def open(self, geometry: Geometry, streams: Streams) -> None:  # noqa: ARG002
        """Raises TierError when the server does not answer or refuses, ValueError when it is open for blocks that are
        cut otherwise.
        """
        if self._geometry is not None and self._geometry.extents != geometry.extents:
            raise ValueError(
                f"the {self.name} tier is open for extents of {self._geometry.extents} bytes, not {geometry.extents}; "
                "use another ValkeyTier"
            )
        self.check()
        self._geometry = geometry
        self.index.open(geometry.extents)

    def check(self) -> None:
        """Ask the server whether it is there and lets us in, and for its memory. Raises TierError."""
        try:
            pong, memory = self.server.ask([command(b"PING"), command(b"INFO", b"memory")])
            if isinstance(pong, Refusal):
                raise pong
        except OSError as error:
            raise self._error("open", error) from error
        lines = memory.splitlines() if isinstance(memory, bytes) else []  # not everybody may ask
        facts = dict(line.split(b":", 1) for line in lines if b":" in line)
        self.capacity_bytes = int(facts.get(b"maxmemory", 0)) or int(facts.get(b"total_system_memory", 0))

    def close(self) -> None:
        """Close the connections that are idle; whatever is asked next opens new ones."""
        self.server.close()

    def look_up(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> None:
        """Ask the server which of them it has, all at once. Does not wait for one that has just failed."""
        if not self.server.down:
            self.index.look_up(hashes, self.index.form(fingerprint))

    def contains(self, block_hash: bytes, fingerprint: Fingerprint) -> bool:
        """Whether the last look-up found the block, or it was stored from here, and it is not too old.

        Does not ask the server, as `look_up` does; while that is down, nothing is here.
        """
        header = self.index.get(block_hash, self.index.form(fingerprint))
        return header is not None and not self.index.lifetime.over(header.created) and not self.server.down

    def differences(self, fingerprint: Fingerprint) -> list[str]:
        """Fields in which the most similar fingerprint on the server differs; [] also where it does not answer."""
        return self.index.differences(self.index.form(fingerprint))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Nothing to do: the server sees every look-up and every load, and orders its keys by them."""

    def victims(self, nbytes: int, protect: Collection[bytes] = ()) -> list[bytes]:  # noqa: ARG002
        """None: the server evicts by itself, by its own policy."""
        return []

    def reserve(self, hashes: Sequence[bytes], fingerprint: Fingerprint, protect: Collection[bytes] = ()) -> Store:  # noqa: ARG002
        """All of `hashes`, once the server has answered.

        Raises TierError where it does not, or was full a moment ago.
        """
        form, geometry = self.index.form(fingerprint), self._open_geometry
        try:
            if time.perf_counter() < self._full_until_s:
                raise OSError(errno.ENOSPC, "it was full a moment ago and did not evict")
            self.index.announce(form)
        except OSError as error:
            raise self._error("write", error) from error
        outdated = self.index.outdated(hashes)
        most = max(1, _STORE_BYTES // geometry.block_bytes)
        runs = [(first, min(most, len(hashes) - first), 0, 0) for first in range(0, len(hashes), most)]
        # A few blocks at a time with all their groups, since a block is sent as a whole.
        pieces = [piece for run in runs for piece in in_pieces([run], form.extents, geometry.piece_bytes)]
        self._reserved_bytes += len(hashes) * form.block_bytes
        return _ValkeyStore(list(hashes), pieces, tier=self, form=form, created=self._clock(), outdated=outdated)

    def _publish(self, store: _ValkeyStore) -> None:
        self._reserved_bytes -= len(store.hashes) * store.form.block_bytes
        for block, block_hash in enumerate(store.hashes):
            if block in store.headers:
                self.index.remember(store.headers[block])
            else:
                self.index.forget(block_hash)  # somebody else was first, with another header: to be looked up
        self.counters.stored_blocks += len(store.headers)
        self.counters.stored_bytes += len(store.headers) * store.form.block_bytes

    def _abandon(self, store: _ValkeyStore) -> None:
        self._reserved_bytes -= len(store.hashes) * store.form.block_bytes
        self.index.doomed.update(dict.fromkeys(store.partial))
        if isinstance(store.failed, Refusal):
            self._full_until_s = time.perf_counter() + _FULL_PAUSE_S

    def load(self, hashes: Sequence[bytes], fingerprint: Fingerprint) -> Load:
        """Pieces of many blocks, whose extents are asked for together; headers are read again with the first group.

        A block that `contains` has just found is here, even if its time has run out or the server gone meanwhile.
        """
        form, geometry = self.index.form(fingerprint), self._open_geometry
        headers = []
        for block_hash in hashes:
            header = self.index.get(block_hash, form)
            if header is None:
                raise KeyError(f"block {block_hash.hex()[:16]} is not in the {self.name} tier under this fingerprint")
            headers.append(header)
        self._readers.update(hashes)
        runs = [(0, len(headers), 0, 0)] if headers else []
        in_place = geometry.in_place_bytes > 0
        if in_place:
            pieces = in_pieces(runs, form.extents, geometry.in_place_bytes, _LAST_BYTES)
        else:
            pieces = in_pieces(runs, form.extents, geometry.piece_bytes)
        return _ValkeyLoad(pieces, in_place=in_place, tier=self, form=form, headers=headers)

    def drop(self, block_hash: bytes, *, corrupt: bool = False) -> None:
        """Forget a block; one that is not whole any more goes from the server too, with the next question."""
        self.index.forget(block_hash)
        if corrupt:
            self.index.doomed[block_hash] = None

    def clear(self) -> None:
        """Remove the blocks that were stored or found from here, but for those being read; others' stay."""
        self.index.remove(block_hash for block_hash in self.index if block_hash not in self._readers)

    def _error(self, doing: str, error: OSError) -> TierError:
        why = str(error.strerror or error).rstrip(".")
        said = (
            f"cannot {doing} the {self.name} tier at {self.server.place}: {why}; "
            "it needs a Valkey or Redis server that answers, lets this user in and has memory"
        )
        return TierError(said) if error.errno is None else TierError(error.errno, said)  # the client's have none
