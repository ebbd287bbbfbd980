"""The limits of the administration listener: how many connections, and how long the first request may take.

aiohttp has neither: a client that sends half of a head would hold a descriptor for ever, and enough such clients all
descriptors of the server.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from babelbus.clock import Clock
from babelbus.limited_log import LimitedLog
from babelbus.listening.certificates import Tls
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import SPEAKS_TLS, TLS_HELLO, Arrival, Door, Place, name_of
from babelbus.metrics import Metrics
from babelbus.web.answers import HttpHandler

log = logging.getLogger(__name__)

NAME = "admin"


class ConnectionLimits:
    """Admits connections to an aiohttp server; `guard` is the outermost middleware of its application."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Clock,
        crowd: Crowd,
        *,
        connections_max: int,
        handshake_seconds: float,
        tls: Tls | None = None,
        door: Door | None = None,
    ) -> None:
        self._metrics = metrics
        self._tls = tls
        self._guests: dict[asyncio.BaseTransport, _Guest] = {}
        """The open connections; over TLS, by the transport of what is decrypted."""
        self._make_protocol: Callable[[], asyncio.Protocol]
        self.door = door or Door(
            NAME,
            metrics,
            LimitedLog(log, clock),
            crowd,
            connections_max=connections_max,
            handshake_seconds=handshake_seconds,
            is_admin=True,
        )

    async def listen(
        self, server: web.Server, make_protocol: Callable[[], asyncio.Protocol], sockets: Sequence[socket.socket]
    ) -> list[asyncio.Server]:
        """Handle the connections of listening sockets: admitted connections go to protocols of the server."""
        self._make_protocol = make_protocol
        self._metrics.connections.labels(NAME).set_function(lambda: len(server.connections))
        tls = self._tls

        def connect() -> asyncio.Protocol:
            guest = self.make_guest()
            return guest if tls is None else Arrival(self.door, tls.context, guest)

        loop = asyncio.get_running_loop()
        return [await loop.create_server(connect, sock=one) for one in sockets]

    def make_guest(self) -> "_Guest":
        """Return the protocol of a connection, which may come over a link; after `listen`."""
        return _Guest(self, self._make_protocol())

    def begin(self, guest: "_Guest") -> None:
        """Count a connection that was let in; its first request is awaited from now on."""
        self._metrics.connections_total.labels(NAME).inc()
        self._guests[guest.transport] = guest

    def end(self, guest: "_Guest") -> None:
        """Drop a connection that is closed."""
        self._guests.pop(guest.transport, None)

    def prove(self, request: web.Request) -> None:
        """Record that the client of a request has proved who it is: its connection does not give way to new ones."""
        guest = None if request.transport is None else self._guests.get(request.transport)
        if guest is not None and guest.place is not None:
            guest.place.prove()

    @web.middleware
    async def guard(self, request: web.Request, handler: HttpHandler) -> web.StreamResponse:
        """Keep the connection open: the head of a request has come."""
        guest = None if request.transport is None else self._guests.get(request.transport)
        if guest is not None:
            guest.note_request()
        return await handler(request)

    def close(self) -> None:
        """End the handshakes, and drop the deadlines: the server closes its connections itself."""
        self.door.close()
        for guest in self._guests.values():
            guest.deadline.cancel()
        self._guests.clear()


class _Guest(asyncio.Protocol):
    """One connection: passes everything on to aiohttp, and knows when the connection is lost."""

    place: Place | None = None

    def __init__(self, limits: ConnectionLimits, protocol: asyncio.Protocol) -> None:
        self._limits = limits
        self._protocol = protocol

    def connection_made(self, transport: Any) -> None:
        """Connect the connection to the server, or close it."""
        limits, door = self._limits, self._limits.door
        is_encrypted = self.place is not None
        self.place = self.place or door.enter(transport)
        if self.place is None:
            return
        self.transport = transport
        self._is_first = not is_encrypted
        self._protocol.connection_made(transport)
        self.deadline = asyncio.get_running_loop().call_later(door.handshake_seconds, self._expire)
        limits.begin(self)

    def data_received(self, data: bytes) -> None:
        """Handle the bytes of one read."""
        may_serve = self._limits.door.crowd.may_serve
        if may_serve is not None and not may_serve():
            self.transport.abort()  # the data may be another server's by now
            return
        if self._is_first:
            self._is_first = False
            if data.startswith(TLS_HELLO):
                self._refuse("tls", SPEAKS_TLS)
                return
        self._protocol.data_received(data)

    def eof_received(self) -> None:
        """Handle the end of what the client sends."""
        self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Stop the answers: the client does not take them."""
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Release the place: the connection is closed."""
        place, self.place = self.place, None
        if place is None:
            return
        place.leave()
        self.deadline.cancel()
        self._limits.end(self)
        self._protocol.connection_lost(error)

    def note_request(self) -> None:
        """Wait no longer for the first request: this may be it."""
        self.deadline.cancel()
        if self.place is not None:
            self.place.finish_handshake()
            self.place.note_request()

    def _expire(self) -> None:
        self._refuse("handshake", f"no request within {self._limits.door.handshake_seconds:g} s")

    def _refuse(self, reason: str, text: str) -> None:
        peer = name_of(self.transport.get_extra_info("peername"))
        self._limits.door.refuse(logging.INFO, peer, reason, text)
        self.transport.abort()
