"""The only module that reads the time; all others are passed a `Clock`.

Two kinds, never mixed: `now_ms` is the time of people and records, and may jump when the system's clock is set;
`monotonic` only grows, so every deadline and duration is counted with it (docs/design/reliability.md, rule 6).
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of the time."""

    def now_ms(self) -> int:
        """Return the wall clock's time, in milliseconds since 1970-01-01 UTC. It may jump, also backwards."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment. They never go backwards; only differences are meaningful."""


class SystemClock:
    """The time of this machine."""

    __slots__ = ()

    def now_ms(self) -> int:
        """Return the wall clock's time, in milliseconds since 1970-01-01 UTC. It may jump, also backwards."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment. They never go backwards; only differences are meaningful."""
        return time.monotonic()
