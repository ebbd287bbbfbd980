"""Fronts: the part of a protocol that an edge runs for each client, in front of the session at the core.

An edge gets the keys of the server over its link, and the core believes it who a client is: an edge process belongs to
the server, and a member of the cluster may own the data itself.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec


class Way(Protocol):
    """The calls of a front for its client. Bytes for the session and batches come to the core in the order of calls."""

    number: int
    """Number of the client in batches."""

    def forward(self, data: bytes) -> None:
        """Send bytes to the session; if the front has something `unsent`, `Fronts.flush` is called first."""

    def gather(self, *, later: bool = False) -> None:
        """Call `Fronts.flush` at the end of this turn of the event loop; `later` within a millisecond."""

    def flush(self) -> None:
        """Call `Fronts.flush` now."""

    def write(self, data: bytes | bytearray, delivered_bytes: int = 0) -> None:
        """Write bytes to the client, with which so many bytes of the session are delivered.

        A client that does not take what its front writes without the session is not read for a while.
        """

    def pause_front(self) -> None:
        """Read no more from the client."""

    def resume_front(self) -> None:
        """Read on."""

    def end(self) -> None:
        """Close the client behind what was written."""


class Front(Protocol):
    """The front of one client. Errors of the client go to the session, which ends the connection."""

    unsent: bool
    """Whether requests of the client are in a batch that was not sent."""

    def receive_data(self, data: bytes) -> None:
        """Receive bytes of the client."""

    def deliver(self, data: bytes) -> None:
        """Receive bytes of the session."""

    def close(self) -> None:
        """Close the client behind the answers to what came before: its session has ended."""


class Fronts(Protocol):
    """The fronts of one listener, and their batches."""

    def make(self, way: Way) -> Front:
        """Return the front of a new client."""

    def flush(self, send: Callable[[bytes], int]) -> None:
        """Send each batch that was gathered with a function that returns the number of the batch."""

    def settle(self, number: int, answer: bytes) -> None:
        """Handle the answer of the core to a batch.

        Raises:
            BabelbusError: the answer does not fit the batch.
        """


class Linked(Protocol):
    """The transport of a fronted client at the core."""

    @property
    def idle_protocol(self) -> asyncio.Protocol | None:
        """The protocol that runs the session, if it reads and nothing of the client waits for it."""

    def receive_aside(self, data: bytes) -> None:
        """Send bytes to the session that the edge has not sent as bytes of the client, in their order."""


Find = Callable[[int], Linked | None]
"""Returns a client by its number at the edge, `None` if it was closed here."""
ReceiveBatch = Callable[[bytes, Find, Callable[[bytes], None]], None]
"""Takes a batch and the way of its one answer; raises `BabelbusError` for bytes that are no batch."""


class FrontPlan(msgspec.Struct, frozen=True):
    """A listener's offer to edges."""

    content: bytes
    """Keys and limits."""
    make: Callable[[], asyncio.Protocol]
    """Returns the protocol of a new connection whose front proves who the client is."""
    receive: ReceiveBatch
