"""The limits of the administration listener: how many connections, and how long the first request may take.

aiohttp has neither: a client that sends half of a head would hold a descriptor for ever, and enough such clients all
descriptors of the server.
"""

import asyncio
import logging
from typing import Any

from aiohttp import web

from babelbus.clock import Clock
from babelbus.descriptors import is_reserved
from babelbus.limited_log import LimitedLog
from babelbus.metrics import Metrics
from babelbus.web.answers import Handler

log = logging.getLogger(__name__)

NAME = "admin"


class ConnectionLimits:
    """Admits connections to an aiohttp server; `guard` is the outermost middleware of its application."""

    def __init__(self, metrics: Metrics, clock: Clock, *, connections_max: int, handshake_seconds: float) -> None:
        self._metrics = metrics
        self._log = LimitedLog(log, clock)
        self._connections_max = connections_max
        self._seconds = handshake_seconds
        self._deadlines: dict[asyncio.BaseTransport, asyncio.TimerHandle] = {}
        metrics.connections_max.labels(NAME).set(connections_max)

    async def listen(self, server: web.Server, host: str, port: int) -> asyncio.Server:
        """Open a TCP listener whose admitted connections go to the server.

        Raises:
            OSError: another process uses the address, or this machine does not have it.
        """
        self._metrics.connections.labels(NAME).set_function(lambda: len(server.connections))
        return await asyncio.get_running_loop().create_server(lambda: _Entrance(self, server), host, port)

    def admit(self, transport: asyncio.Transport, server: web.Server) -> None:
        """Connect a connection to the server, or close it if there are too many."""
        if len(server.connections) >= self._connections_max:
            self._refuse(transport, logging.WARNING, "limit", f"{self._connections_max} connections are open")
            return
        if is_reserved(transport.get_extra_info("socket").fileno(), is_admin=True):
            text = "file descriptors run out; raise LimitNOFILE (ulimit -n)"
            self._refuse(transport, logging.WARNING, "descriptors", text)
            return
        protocol = server()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._metrics.connections_total.labels(NAME).inc()
        self._deadlines[transport] = asyncio.get_running_loop().call_later(self._seconds, self._expire, transport)

    def _expire(self, transport: asyncio.Transport) -> None:
        del self._deadlines[transport]
        if not transport.is_closing():
            self._refuse(transport, logging.INFO, "handshake", f"no request within {self._seconds:g} s")

    def _refuse(self, transport: asyncio.Transport, level: int, reason: str, text: str) -> None:
        self._log.write(level, f"{NAME}, {reason}", "%s: refused: %s", NAME, text)
        self._metrics.connections_refused_total.labels(NAME, reason).inc()
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
        """Connect the connection to the server, or close it."""
        self._limits.admit(transport, self._server)
