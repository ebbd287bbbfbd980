"""The connection as its session sees it: a way to send that never blocks, and a way to stop its own client."""

from collections.abc import Callable
from typing import Protocol

from babelbus.core.flow_policy import Flow
from babelbus.wire.packets import Packets


class Send(Protocol):
    """The call that sends packets; see `Port.send`."""

    def __call__(self, packets: Packets, first: int, last: int, *, stoppable: bool) -> bool:
        """Send packets `first` to `last`."""


class Port(Protocol):
    """One client's end of the bus. No call blocks."""

    flow: Flow
    """The client's policy for packets that it does not take (docs/specifications/sbus.md, section 9.2)."""

    def send(self, packets: Packets, first: int, last: int, *, stoppable: bool) -> bool:
        """Send packets `first` to `last`, or do with them what `flow` says.

        Gives whether who sent them has to wait until this client has taken enough. With `stoppable` false there is
        nobody who could: what does not fit is dropped where it would block.
        """

    def reply(self, packet: bytes) -> None:
        """Send an answer of the server: behind all that waits, and never dropped."""

    def keep(self, wanted: Callable[[bytes], bool]) -> None:
        """Drop the packets that wait for the client and are not wanted; answers of the server stay."""

    def wait_for(self, other: "Port") -> None:
        """Read no more from this client until `other` has taken enough."""

    def hold(self, holds: bool) -> None:
        """Read no more from this client until the call that holds it no longer."""

    def flow_changed(self) -> None:
        """Resume the clients that wait for this one and need not any more."""
