"""Back-off for wrong proofs: a client that guesses waits, per address and principal, and per address.

The wait after a wrong proof is 1 s, then 2 s, up to 60 s. A principal that somebody guesses from one address can come
from every other address without a wait. The address itself waits from its fourth wrong proof on, so that the typing
error of one user does not delay others behind the same address.
"""

import ipaddress
from typing import Final

from babelbus.clock import Clock
from babelbus.metrics import Metrics

WAIT_SECONDS: Final = 1.0
WAIT_SECONDS_MAX: Final = 60.0
DOUBLINGS_MAX: Final = 6
FORGET_SECONDS: Final = 600.0
FREE_FAILURES: Final = 3
"""Wrong proofs of one address, whatever the principals, before the address waits."""
ENTRIES_MAX: Final = 10_000
NAME_LENGTH_MAX: Final = 256
"""Characters of a name that count: a client may call itself by megabytes, which must not be kept for each guess."""

_Key = tuple[str, str | None]


class Guessing:
    """The wrong proofs of all doors of a server; only the event loop uses it.

    Args:
        entries_max: addresses, and pairs of address and principal, that are remembered; the oldest is dropped first.
    """

    def __init__(self, clock: Clock, metrics: Metrics, *, entries_max: int = ENTRIES_MAX) -> None:
        self._clock = clock
        self._metrics = metrics
        self._entries_max = entries_max
        self._entries: dict[_Key, tuple[int, float]] = {}
        """Failures and the time of the last failure; the oldest first."""
        metrics.guessing_entries.set_function(lambda: len(self._entries))
        metrics.guessing_entries_max.set(entries_max)

    def check(self, address: str, principal: str) -> float:
        """Return how many seconds a client has to wait before its proof is looked at; 0 most of the time."""
        if not self._entries:
            return 0.0
        place = _network(address)
        now = self._clock.monotonic()
        return max(self._wait((place, principal[:NAME_LENGTH_MAX]), now), self._wait((place, None), now))

    def failed(self, address: str, principal: str) -> None:
        """Record a wrong proof, which was looked at."""
        place = _network(address)
        now = self._clock.monotonic()
        for key in ((place, principal[:NAME_LENGTH_MAX]), (place, None)):
            failures, last = self._entries.pop(key, (0, now))
            self._entries[key] = (failures + 1 if now - last < FORGET_SECONDS else 1), now
        while len(self._entries) > self._entries_max:
            del self._entries[next(iter(self._entries))]

    def succeeded(self, address: str, principal: str) -> None:
        """Drop the wrong proofs of a principal from an address; those of the address stay.

        Else a user could guess the passwords of others, and prove its own name in between.
        """
        if self._entries:
            self._entries.pop((_network(address), principal[:NAME_LENGTH_MAX]), None)

    def clear(self) -> None:
        """Drop all wrong proofs: nobody has to wait."""
        self._entries.clear()

    def door(self, protocol: str) -> "Door":
        """Return the door of a protocol: the same entries, with counters of its own."""
        return Door(self, self._metrics, protocol)

    def _wait(self, key: _Key, now: float) -> float:
        failures, last = self._entries.get(key, (0, 0.0))
        if key[1] is None:
            failures -= FREE_FAILURES
        if failures <= 0:
            return 0.0
        wait = min(WAIT_SECONDS * 2.0 ** min(failures - 1, DOUBLINGS_MAX), WAIT_SECONDS_MAX)
        return max(last + wait - now, 0.0)


class Door:
    """The back-off as one protocol uses it; `check`, `failed` and `succeeded` are those of `Guessing`, counted."""

    def __init__(self, guessing: Guessing, metrics: Metrics, protocol: str) -> None:
        self._guessing = guessing
        self._delayed = metrics.proofs_delayed_total.labels(protocol)
        self._failed = metrics.proofs_failed_total.labels(protocol)

    def check(self, address: str, principal: str) -> float:
        """Return how many seconds a client has to wait; a client that has to wait counts as refused."""
        wait = self._guessing.check(address, principal)
        if wait:
            self._delayed.inc()
        return wait

    def failed(self, address: str, principal: str) -> None:
        """Record a wrong proof."""
        self._failed.inc()
        self._guessing.failed(address, principal)

    def succeeded(self, address: str, principal: str) -> None:
        """Drop the wrong proofs of a principal from an address."""
        self._guessing.succeeded(address, principal)


def _network(address: str) -> str:
    """Return what counts as one address: a client has a whole /64 of IPv6, and chooses its address in it."""
    if ":" not in address:
        return address
    try:
        number = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(number.ipv4_mapped or ipaddress.IPv6Address(int(number) >> 64 << 64))
