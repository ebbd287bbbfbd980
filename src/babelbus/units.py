"""Sizes and durations in readable text: "128MiB", "8 MB", "7d", "250ms", "1h30m"; and back.

A bare number is in the unit of its setting: bytes, or seconds.
"""

import math
import re

from babelbus.errors import BabelbusError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

# Longest first: a size is formatted in the largest unit that divides it.
_SIZES = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}
_SIZES_READ = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_DURATIONS = {"w": 604_800.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[wdhms])\s*", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


class UnitError(BabelbusError):
    """The text of a size or duration is invalid."""


def parse_size(text: str) -> int:
    """Return a size in bytes. KiB, MiB, GiB, TiB count in 1,024s; kB, MB, GB, TB in 1,000s; case is ignored.

    Raises:
        UnitError: the text is no size, or no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _SIZES_READ.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UnitError(
            f"{text!r} is no size: write a number of bytes, or one with KiB, MiB, GiB, TiB, kB, MB, GB or TB"
        )
    size = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if size != int(size):
        raise UnitError(f"{text!r} is no whole number of bytes")
    return int(size)


def parse_duration(text: str) -> float:
    """Return a duration in seconds: one or more of w, d, h, m, s, ms in any order, as in "1h30m".

    Raises:
        UnitError: the text is no duration.
    """
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return float(stripped)
    seconds, position = 0.0, 0
    while match := _DURATION_PART.match(stripped, position):
        seconds += float(match[1]) * _DURATIONS[match[2]]
        position = match.end()
    if not position or position != len(stripped):
        raise UnitError(f"{text!r} is no duration: write a number of seconds, or numbers with w, d, h, m, s or ms")
    return seconds


def format_size(size_bytes: int) -> str:
    """Return a size exactly, in the largest unit that divides it: 134217728 is "128 MiB"."""
    for unit, factor in _SIZES.items():
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def format_duration(seconds: float) -> str:
    """Return a duration exactly to the millisecond, in the largest unit that divides it: 604800 is "7d"."""
    assert math.isfinite(seconds), "a duration is finite"
    milliseconds = round(seconds * 1000)
    for unit in ("d", "h", "m", "s"):  # weeks are read but not written: "7d" is the usual form
        factor = round(_DURATIONS[unit] * 1000)
        if milliseconds and milliseconds % factor == 0:
            return f"{milliseconds // factor}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"
