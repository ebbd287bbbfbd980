"""The TCP listeners of a server by name: an edge passes on the clients of each of them over a link."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from babelbus.listening.certificates import Tls
from babelbus.listening.door import Door
from babelbus.listening.fronts import FrontPlan


class Entrance:
    """One listener: makes what handles a connection, once its code is loaded."""

    def __init__(
        self,
        name: str,
        make: Callable[[], asyncio.Protocol],
        door: Door,
        *,
        tls: Tls | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
        is_ready: Callable[[], bool] = lambda: True,
        front: FrontPlan | None = None,
    ) -> None:
        self.name = name
        self.make = make
        """Returns the protocol of a new connection, which may have a `place` already (`door.Guest`)."""
        self.door = door
        self.tls = tls
        self.prepare = prepare
        """Loads the code that `make` needs."""
        self.is_ready = is_ready
        """Returns whether the code is loaded."""
        self.front = front
        """The offer to edges, if the listener has no TLS and no code to load."""
        self.addresses: list[tuple[int, tuple[str | int, ...]]] = []
        """Family and address of each socket that edge processes open in place of this process."""


class Entrances:
    """All TCP listeners of a server.

    With `elsewhere`, edge processes of this machine accept the clients: listeners reserve their addresses only.
    """

    def __init__(self, *, elsewhere: bool = False) -> None:
        self.elsewhere = elsewhere
        self.by_name: dict[str, Entrance] = {}
        self.kept: dict[str, list[socket.socket]] = {}
        """Sockets that listen already, by the name of the listener."""
        self._reservations: list[socket.socket] = []

    def add(self, entrance: Entrance) -> None:
        """Add a listener."""
        self.by_name[entrance.name] = entrance

    def take(self, name: str) -> list[socket.socket] | None:
        """Return the sockets of a listener that listen already, `None` if it has no such sockets."""
        return self.kept.pop(name, None)

    def reserve(self, entrance: Entrance, sockets: list[socket.socket]) -> None:
        """Keep the addresses of sockets that are bound for a listener, and that nobody connects to."""
        self._reservations += sockets
        entrance.addresses = [(one.family, one.getsockname()) for one in sockets]

    def close(self) -> None:
        """Release the addresses."""
        for sockets in self.kept.values():
            self._reservations += sockets
        self.kept.clear()
        while self._reservations:
            self._reservations.pop().close()
