"""Connections whose clients have shown a certificate: they end when the certificate expires."""

import asyncio
import math
from typing import Protocol

from babelbus.clock import Clock

EXPIRE_SECONDS = 1.0
"""How late a connection may end whose certificate has expired."""


class Holder(Protocol):
    """A connection of a client with a certificate."""

    def end(self, text: str) -> None:
        """Close the connection at once, and write why into the log."""


class Certified:
    """The connections of clients with certificates, over all listeners of a server.

    A handshake alone does not bound them: a connection may stay open for months, and a session of TLS that a client
    resumes is not checked again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[Holder, float] = {}
        self._first_end_ms = math.inf
        """No certificate expires before; may be too early."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, holder: Holder, ends_ms: float) -> bool:
        """Add a connection; return whether its certificate is still valid, else nothing is added."""
        if ends_ms <= self._clock.now_ms():
            return False
        self._ends[holder] = ends_ms
        self._first_end_ms = min(self._first_end_ms, ends_ms)
        return True

    def remove(self, holder: Holder) -> None:
        """Remove a connection that is closed, if it is there."""
        self._ends.pop(holder, None)

    def watch(self) -> None:
        """Call `expire` every second from now on."""
        self._timer = asyncio.get_running_loop().call_later(EXPIRE_SECONDS, self.watch)
        self.expire()

    def expire(self) -> None:
        """Close the connections whose certificates have expired."""
        now_ms = self._clock.now_ms()
        if now_ms < self._first_end_ms:
            return
        for holder in [holder for holder, ends_ms in self._ends.items() if ends_ms <= now_ms]:
            del self._ends[holder]
            holder.end("the certificate of the client has expired")
        self._first_end_ms = min(self._ends.values(), default=math.inf)

    def close(self) -> None:
        """End the watch."""
        if self._timer is not None:
            self._timer.cancel()
