"""Packets of clients with a root (docs/access.md): keys become absolute on their way in, relative on their way out."""

from babelbus.core.access import Root
from babelbus.core.access.root import UNROOTED
from babelbus.protocols.sbus.codec import MSG
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from babelbus.wire.packets import Packets

_UNROOTED = tuple(text.encode() for text in UNROOTED)


class Edge:
    """The edge between a client with a root and the bus."""

    def __init__(self, root: Root) -> None:
        self._prefix = root.prefix.encode()
        self._head = MSG + self._prefix

    def absolute(self, pattern: bytes) -> bytes:
        """Return the pattern, or key, that the client means."""
        return pattern if pattern.startswith(_UNROOTED) else self._prefix + pattern

    def inward(self, packets: Packets, first: int, last: int) -> Packets:
        """Return packets `first` to `last` with absolute keys; those that would be too long are left out."""
        made = []
        for number in range(first, last):
            packet = packets.packet(number)
            if packet.startswith(MSG):
                packet = MSG + self.absolute(packet[len(MSG) :])
            if len(packet) <= PACKET_BYTES_MAX:
                made.append(packet)
        return Packets.of(made) if made else Packets(b"", [], [])

    def outward(self, packets: Packets, first: int, last: int) -> Packets:
        """Return packets `first` to `last`, whose keys are below the root, with relative keys."""
        start = len(self._head)
        return Packets.of([MSG + packets.packet(number)[start:] for number in range(first, last)])
