"""What must match before cached bytes may be attached, and the chained hash that names each block.

Pure hashing; does not know where blocks are stored. This is identity (SHA-256); corruption is checked elsewhere.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = ["HASH_BYTES", "Fingerprint", "block_hashes"]

HASH_BYTES = 32


def _tagged(parts: Sequence[tuple[str, bytes]]) -> bytes:
    """Join fields so that no two can be confused: each is name length, name, value length, value."""
    joined = bytearray()
    for name, value in parts:
        tag = name.encode()
        joined += len(tag).to_bytes(4, "big") + tag + len(value).to_bytes(8, "big") + value
    return bytes(joined)


@dataclass(frozen=True)
class Fingerprint:
    """Everything besides the tokens that decides the bytes of a KV block.

    All fields are strings or integers so that a stored header can hold them as JSON and name the one that differs.
    `adapter` is a digest of the adapter's content, never its name; "" means none. `salt` separates tenants.
    `first_position` is the position of the first token (keys carry RoPE). `kv_scales` is a digest of quantisation
    scales. `placeholders` is a digest of what image or audio placeholder tokens stand for.
    """

    weights: str
    config: str
    tokenizer: str
    rope: str
    kv_dtype: str
    block_layout: str
    kv_scales: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    adapter: str = ""
    first_position: int = 0
    salt: str = ""
    placeholders: str = ""

    def digest(self) -> bytes:
        """SHA-256 over the tagged, length-prefixed fields (32 bytes)."""
        parts = [(field.name, str(getattr(self, field.name)).encode()) for field in fields(self)]
        return hashlib.sha256(_tagged(parts)).digest()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        """Names of the fields in which `stored` (a `to_dict`) differs; empty when it may be used."""
        mine = self.to_dict()
        return [name for name in sorted(mine.keys() | stored.keys()) if mine.get(name) != stored.get(name)]


def block_hashes(
    fingerprint: Fingerprint, tokens: Sequence[int], block_size: int, parent: bytes = bytes(HASH_BYTES)
) -> list[bytes]:
    """The chained SHA-256 of each *full* block of `tokens`: hash of (parent hash, fingerprint, the block's tokens).

    A partial last block has no hash: its bytes still change. Because each hash holds its parent's, one changed
    token changes the hash of its block and of every later one. Tokens are hashed as little-endian int64.
    `parent` is the hash of the block before `tokens`, to go on with a chain.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; expected at least 1")
    packed = array("q", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    raw = memoryview(packed.tobytes())  # once; slicing a memoryview copies nothing
    own, stride, hashes = fingerprint.digest(), 8 * block_size, []
    # The prefix (tags and lengths of fixed-size fields) is constant, so hash it once and copy the state.
    start = hashlib.sha256(b"kvlab.block/1" + own + block_size.to_bytes(8, "big"))
    for offset in range(0, len(tokens) // block_size * stride, stride):
        state = start.copy()
        state.update(parent)
        state.update(raw[offset : offset + stride])
        parent = state.digest()
        hashes.append(parent)
    return hashes
