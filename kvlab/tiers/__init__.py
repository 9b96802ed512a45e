"""Slower places that KV blocks go to and come back from: host memory, disk, a server, an emulated link in front."""

from kvlab.tiers.base import Counters, Geometry, Load, Piece, Store, Tier, TierError, checksum
from kvlab.tiers.disk import DiskTier
from kvlab.tiers.file_io import bytes_read_from_device
from kvlab.tiers.host import HostTier
from kvlab.tiers.link import LinkTier
from kvlab.tiers.valkey import ValkeyTier

__all__ = [
    "Counters",
    "DiskTier",
    "Geometry",
    "HostTier",
    "LinkTier",
    "Load",
    "Piece",
    "Store",
    "Tier",
    "TierError",
    "ValkeyTier",
    "bytes_read_from_device",
    "checksum",
]
