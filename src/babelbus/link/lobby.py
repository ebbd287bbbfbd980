"""Connections to the address for links whose other end has not said who it is, from the first byte on.

A new connection always gets in, and the oldest one leaves if there are too many: an edge says its hello at once, so
silent connections keep no edge out. They do not count as links.
"""

import logging
from typing import Any

from babelbus.limited_log import LimitedLog
from babelbus.listening.certificates import PeerCertificate
from babelbus.listening.crowd import name_network
from babelbus.listening.door import Arrival, Place, name_of

ADDRESS_MAX = 32
"""Connections of one address, or of one network of IPv6."""
LOBBY_MAX = 128
"""Connections of all addresses: below the descriptors that are kept for the data."""


class Lobby:
    """Counts the connections, and ends the oldest ones; what `Arrival` needs of a door."""

    def __init__(self, limited_log: LimitedLog, handshake_seconds: float) -> None:
        self.handshake_seconds = handshake_seconds
        self.arriving: set[Arrival] = set()
        self._log = limited_log
        self._waiting: dict[str, dict[Seat, None]] = {}
        """The connections of each address, the oldest first."""
        self._count = 0

    def enter(self, transport: Any) -> "Seat":
        """Return the place of a new connection."""
        peer = transport.get_extra_info("peername")
        seat = Seat(self, transport, name_network(peer[0]) if isinstance(peer, tuple) else "local")
        self._waiting.setdefault(seat.address, {})[seat] = None
        self._count += 1
        if len(self._waiting[seat.address]) > ADDRESS_MAX:
            self._turn_out(seat.address)
        elif self._count > LOBBY_MAX:
            self._turn_out(max(self._waiting, key=lambda address: len(self._waiting[address])))
        return seat

    def _turn_out(self, address: str) -> None:
        seat = next(iter(self._waiting[address]))
        peer = name_of(seat.transport.get_extra_info("peername"))
        self.refuse(logging.WARNING, peer, "full", "too many connections say no hello: the oldest one ends")
        seat.leave()
        seat.transport.abort()

    def remove(self, seat: "Seat") -> None:
        """Count a connection as gone, or as one of an edge."""
        waiting = self._waiting.get(seat.address)
        if waiting is None or seat not in waiting:
            return
        del waiting[seat]
        self._count -= 1
        if not waiting:
            del self._waiting[seat.address]

    def refuse(self, level: int, peer: str, reason: str, text: str) -> None:
        """Record that a connection is turned away."""
        self._log.write(level, f"link, {reason}", "link of %s: %s", peer, text)


class Seat(Place):
    """The place of one connection."""

    __slots__ = ("_lobby", "address", "transport")

    def __init__(self, lobby: Lobby, transport: Any, address: str) -> None:
        self._lobby = lobby
        self.transport = transport
        """The one below the TLS."""
        self.address = address

    def finish_handshake(self) -> None:
        """Count the connection as one of an edge."""
        self._lobby.remove(self)

    def certify(self, certificate: PeerCertificate | None) -> bool:
        """Return `True`: a link is checked at its handshake alone."""
        return True

    def leave(self) -> None:
        """Count the connection as closed."""
        self._lobby.remove(self)
