"""Parse and print quantities: bytes, bandwidth, time, counts. GB is 1e9 bytes, GiB is 2^30; b is bits, B is bytes.

Text in, numbers out, and back. Knows nothing else.
"""

from __future__ import annotations

import math
import re

__all__ = [
    "format_bytes",
    "format_gb_per_s",
    "format_s",
    "parse_bandwidth_gb_per_s",
    "parse_bytes",
    "parse_count",
    "parse_flops_per_s",
    "parse_s",
]

_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BITS = {"b": 1, "kb": 10**3, "Kb": 10**3, "Mb": 10**6, "Gb": 10**9, "Tb": 10**12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_FLOPS = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_COUNTS = {"": 1, "k": 1000, "K": 1000, "M": 1_000_000, "Ki": 1024, "Mi": 1024**2}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not {what}; write it like {example}")
    number = float(match[1])
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not finite; write {what} like {example}")
    return number, match[2]


def parse_bytes(text: str) -> int:
    """Bytes in "512MiB", "4GiB", "1.5GB", "100B". Raises ValueError without a unit."""
    number, unit = _split(text, "a size", "512MiB or 4GB")
    if unit not in _BYTES:
        raise ValueError(f"{text!r} needs a unit: one of {', '.join(_BYTES)} (GB is 1e9, GiB is 2^30)")
    return round(number * _BYTES[unit])


def parse_bandwidth_gb_per_s(text: str) -> float:
    """GB/s (1e9 bytes per second) in "1Gb/s", "0.125GB/s", "200Mb/s", "25MB/s", "20MiB/s": lower-case b is bits.

    Raises ValueError without a unit, or when it is not positive. "Gbps" and "GBps" are refused as ambiguous in use.
    """
    number, unit = _split(text, "a bandwidth", "1Gb/s (bits) or 0.125GB/s (bytes)")
    amount, slash, per = unit.partition("/")
    if slash != "/" or per != "s" or (amount not in _BITS and amount not in _BYTES):
        raise ValueError(f"bandwidth {text!r} needs a unit: write {number:g}Gb/s (bits) or {number:g}GB/s (bytes)")
    bytes_per_s = number * (_BITS[amount] / 8 if amount in _BITS else _BYTES[amount])
    if bytes_per_s <= 0:
        raise ValueError(f"bandwidth {text!r} is not positive; a link that carries nothing cannot be priced")
    return bytes_per_s / 1e9


def parse_flops_per_s(text: str) -> float:
    """FLOP/s in "989TFLOP/s", "2.5PFLOP/s". Raises ValueError without a unit, or when it is not positive."""
    number, unit = _split(text, "a compute rate", "989TFLOP/s")
    if unit not in _FLOPS:
        raise ValueError(f"compute rate {text!r} needs a unit: one of {', '.join(_FLOPS)}")
    if number <= 0:
        raise ValueError(f"compute rate {text!r} is not positive")
    return number * _FLOPS[unit]


def parse_s(text: str) -> float:
    """Seconds in "50us", "1.5ms", "60s", "2min", "7d". Raises ValueError without a unit."""
    number, unit = _split(text, "a time", "50us, 20ms or 60s")
    if unit not in _SECONDS:
        raise ValueError(f"time {text!r} needs a unit: one of {', '.join(_SECONDS)}")
    return number * _SECONDS[unit]


def parse_count(text: str) -> int:
    """A whole number in "512", "8k" (8,000), "8Ki" (8,192), "1M". Raises ValueError for anything else."""
    number, unit = _split(text, "a count", "512, 8k (8,000) or 8Ki (8,192)")
    if unit not in _COUNTS or not (number * _COUNTS[unit]).is_integer():
        raise ValueError(f"{text!r} is not a whole number; write 512, 8k (8,000) or 8Ki (8,192)")
    return int(number * _COUNTS[unit])


def format_bytes(count: float) -> str:
    """Bytes with a binary unit: 1536 → "1.50 KiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{_three(count / size)} {unit}"
    return f"{count:.0f} B"


def format_s(seconds: float) -> str:
    """Seconds with a readable unit: 0.00123 → "1.23 ms"."""
    if not math.isfinite(seconds):
        return "never" if seconds > 0 else "n/a"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size * 0.9995:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-9)} ns" if seconds else "0 s"


def format_gb_per_s(gb_per_s: float) -> str:
    """A bandwidth in bytes and in bits: 0.025 → "25.0 MB/s (200 Mb/s)"."""
    if not math.isfinite(gb_per_s):
        return "infinite"
    byte_unit, byte_size = next((u, s) for u, s in (("GB/s", 1.0), ("MB/s", 1e-3), ("kB/s", 0.0)) if gb_per_s >= s)
    bits = gb_per_s * 8
    bit_unit, bit_size = next((u, s) for u, s in (("Gb/s", 1.0), ("Mb/s", 1e-3), ("kb/s", 0.0)) if bits >= s)
    return f"{_three(gb_per_s / (byte_size or 1e-6))} {byte_unit} ({_three(bits / (bit_size or 1e-6))} {bit_unit})"


def _three(value: float) -> str:
    """Three significant digits, never in exponent form, thousands separated."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-12))
    return f"{value:,.{digits}f}"
