"""The limits of the administration listener: how many connections, and how long the first request may take.

aiohttp has neither: a client that sends half of a head would hold a descriptor for ever, and enough such clients all
descriptors of the server.
"""

import asyncio
import logging
from typing import Any

from aiohttp import web

from babelbus.metrics import Metrics
from babelbus.web.answers import Handler

log = logging.getLogger(__name__)

NAME = "admin"


class ConnectionLimits:
    """Admits connections to an aiohttp server; `guard` is the outermost middleware of its application."""

    def __init__(self, metrics: Metrics, *, connections_max: int, handshake_seconds: float) -> None:
        self._metrics = metrics
        self._connections_max = connections_max
        self._seconds = handshake_seconds
        self._deadlines: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        metrics.connections_max.labels(NAME).set(connections_max)

    async def listen(self, server: web.Server, host: str, port: int) -> asyncio.Server:
        """Listen on a TCP port, and hand each admitted connection to the server.

        Raises:
            OSError: the address is taken or not ours.
        """
        self._metrics.connections.labels(NAME).set_function(lambda: len(server.connections))
        return await asyncio.get_running_loop().create_server(lambda: _Entrance(self, server), host, port)

    def admit(self, transport: asyncio.Transport, server: web.Server) -> None:
        """Pass a connection to the server, or close it if there are too many."""
        if len(server.connections) >= self._connections_max:
            log.warning("admin: refused, %d connections are open", self._connections_max)
            self._metrics.connections_refused_total.labels(NAME, "limit").inc()
            transport.abort()
            return
        protocol = server()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._metrics.connections_total.labels(NAME).inc()
        self._deadlines[transport] = asyncio.get_running_loop().call_later(self._seconds, self._expire, transport)

    def _expire(self, transport: asyncio.Transport) -> None:
        del self._deadlines[transport]
        if not transport.is_closing():
            log.info("admin: closing: no request within %g s", self._seconds)
            self._metrics.connections_refused_total.labels(NAME, "handshake").inc()
            transport.abort()

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keep the connection open: the head of a request has come."""
        deadline = None if request.transport is None else self._deadlines.pop(request.transport, None)
        if deadline is not None:
            deadline.cancel()
        return await handler(request)

    def close(self) -> None:
        """Drop the deadlines: the server closes its connections itself."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()


class _Entrance(asyncio.Protocol):
    """Stands in for a connection until it is admitted."""

    def __init__(self, limits: ConnectionLimits, server: web.Server) -> None:
        self._limits = limits
        self._server = server

    def connection_made(self, transport: Any) -> None:
        """Pass the connection on, or close it."""
        self._limits.admit(transport, self._server)
