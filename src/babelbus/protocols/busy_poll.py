"""A short wait without sleep for a client that waits for each answer before it asks again.

Waking a process that sleeps in the kernel costs 15 us, and far more where the processor sleeps as well, as on an idle
virtual machine. When the last gaps between an answer and the next request of one client were all short, the event loop
looks for that request again and again, until it is there or the time is over. All other work has its turn meanwhile.
After a miss the loop sleeps again, until the gaps were short so many times in a row. An idle server polls nothing.
"""

import asyncio

from babelbus.clock import Clock

SEVERAL = -1
"""In place of a connection: several were answered, so none of them is alone."""
SHORT_GAPS = 16
"""So many gaps in a row must be short: then one miss, which costs the whole time, comes after as many hits."""


class BusyPoll:
    """Keeps the event loop awake behind an answer to the only client that asks, if the client asks again at once."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._now = clock.monotonic
        self._awaited: int | None = None
        """The connection that was answered last, if no connection has sent since."""
        self._answered_at = 0.0
        self._short_gaps = 0
        self._polling = False

    def answered(self, connection: int) -> None:
        """Record that a connection was answered, and poll if its next request is likely to come at once."""
        if self._awaited is not None and self._awaited != connection:
            self._awaited = SEVERAL  # without a look at the clock, which many answers of one flush would pay for
            return
        self._awaited = connection
        self._answered_at = self._now()
        if self._short_gaps >= SHORT_GAPS and not self._polling:
            self._polling = True
            asyncio.get_running_loop().call_soon(self._poll)

    def received(self, connection: int) -> None:
        """Record that a connection has sent."""
        is_short = connection == self._awaited and self._now() - self._answered_at < self._seconds
        self._short_gaps = self._short_gaps + 1 if is_short else 0
        self._awaited = None

    def _poll(self) -> None:
        """Continue until the request is there or the time is over: each turn of the loop looks at its sockets."""
        if self._awaited is not None:
            if self._now() - self._answered_at < self._seconds:
                asyncio.get_running_loop().call_soon(self._poll)
                return
            self._short_gaps = 0
        self._polling = False
