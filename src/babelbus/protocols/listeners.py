"""The stream sockets of one protocol: where it listens, who is connected, and what is due now and then."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from babelbus.clock import Clock
from babelbus.core.quotas import Quotas
from babelbus.limited_log import LimitedLog
from babelbus.listening.certificates import Tls, read_peer_certificate
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import Arrival, Door
from babelbus.listening.entrances import Entrance, Entrances
from babelbus.listening.fronts import FrontPlan, ReceiveBatch
from babelbus.listening.sockets import Waiting, load, open_sockets, reserve
from babelbus.metrics import Metrics
from babelbus.protocols.budget import Budget
from babelbus.protocols.busy_poll import BusyPoll
from babelbus.protocols.connection import Connection, MakeSession

log = logging.getLogger(__name__)

BACKLOG = 1024
Fronted = tuple[bytes, MakeSession, ReceiveBatch]
"""Content of a `FrontPlan`, the way to make sessions of its clients, and the receiver of batches."""


class _Gone(asyncio.Protocol):
    """A connection that was accepted while its listener closed."""

    def connection_made(self, transport: Any) -> None:
        transport.abort()


class _Factory:
    """Makes the protocols of one listener until that is closed.

    A connection of asyncio keeps the factory of its listener: without an end of it, a client that goes on at another
    server would keep everything of this one in memory.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol]) -> None:
        self._make = make

    def __call__(self) -> asyncio.Protocol:
        return self._make()

    def close(self) -> None:
        """Drop everything that makes protocols."""
        self._make = _Gone


class Listeners:
    """Listeners and connections of one protocol, with limits and metrics of its own.

    `addresses` says where each listener is, by name.
    """

    def __init__(
        self,
        protocol: str,
        metrics: Metrics,
        clock: Clock,
        budget: Budget,
        crowd: Crowd,
        quotas: Quotas,
        entrances: Entrances,
        *,
        bytes_max: int,
        handshake_seconds: float,
        connections_max: int,
        busy_poll_seconds: float,
    ) -> None:
        self.connections: set[Connection] = set()
        self.addresses: dict[str, str] = {}
        self._metrics = metrics
        self._budget = budget
        self._quotas = quotas
        self._entrances = entrances
        self._bytes_max = bytes_max
        self._busy_poll = BusyPoll(busy_poll_seconds, clock) if busy_poll_seconds else None
        self._door = Door(
            protocol,
            metrics,
            LimitedLog(log, clock),
            crowd,
            connections_max=connections_max,
            handshake_seconds=handshake_seconds,
        )
        self._numbers = itertools.count(1)
        self._listeners: list[asyncio.Server] = []
        self._factories: list[_Factory] = []
        self._waiting: list[Waiting] = []
        self._ticker: asyncio.Task[None] | None = None
        self._path: tuple[str, int | None] | None = None
        metrics.outbox_bytes_max.labels(protocol).set(bytes_max)
        metrics.outbox_bytes.labels(protocol).set_function(lambda: sum(one.outbox_bytes for one in self.connections))

    async def listen(
        self,
        name: str,
        host: str,
        port: int,
        make_session: MakeSession,
        *,
        tls: Tls | None = None,
        needs: str | None = None,
        fronted: Fronted | None = None,
    ) -> None:
        """Open a listener on a TCP port; 0 lets the system choose the port. With `tls` it speaks TLS alone.

        `needs` names a module that `make_session` uses, and that the first connection loads. A listener may be
        `fronted` at edge processes if it has neither.

        Raises:
            OSError: the address is taken.
        """
        connect = self._connect(make_session)
        make = connect if tls is None else lambda: Arrival(self._door, tls.context, connect())

        is_loaded = needs is None or needs in sys.modules

        async def prepare() -> None:
            nonlocal is_loaded
            if needs is not None:
                await load(needs)
            is_loaded = True

        front = None if fronted is None else FrontPlan(fronted[0], self._connect(fronted[1]), fronted[2])
        entrance = Entrance(
            name, connect, self._door, tls=tls, prepare=prepare, is_ready=lambda: is_loaded, front=front
        )
        self._entrances.add(entrance)
        if self._entrances.elsewhere:
            sockets = await open_sockets(host, port, make=reserve)
            self._entrances.reserve(entrance, sockets)
            self._note(name, "{}:{}".format(*sockets[0].getsockname()[:2]))
            return
        sockets = self._entrances.take(name) or await open_sockets(host, port, BACKLOG)

        async def serve() -> None:
            await prepare()
            loop = asyncio.get_running_loop()
            factory = self._factory(make)
            self._listeners += [await loop.create_server(factory, sock=one, backlog=BACKLOG) for one in sockets]

        for one in sockets:
            # Each connection takes it over: a client that vanished without a word is noticed in the end.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if is_loaded:
            await serve()
        else:
            self._waiting.append(Waiting(name, sockets, serve))
        self._note(name, "{}:{}".format(*sockets[0].getsockname()[:2]))

    async def listen_unix(self, name: str, path: str, make_session: MakeSession) -> None:
        """Open a listener on a unix socket; its folder is made, and asyncio removes a stale file.

        Raises:
            OSError: the path is taken, or cannot be made.
        """
        path = _prepare(path)
        loop = asyncio.get_running_loop()
        factory = self._factory(self._connect(make_session))
        self._listeners.append(await loop.create_unix_server(factory, path, backlog=BACKLOG))
        self._note(name, path)
        self._path = (path, _number_of(path))

    def _factory(self, make: Callable[[], asyncio.Protocol]) -> _Factory:
        factory = _Factory(make)
        self._factories.append(factory)
        return factory

    def _note(self, name: str, address: str) -> None:
        self.addresses[name] = address
        log.info("%s listens on %s", name, address)

    def _connect(self, make_session: MakeSession) -> Callable[[], Connection]:
        return lambda: Connection(
            self._door,
            make_session,
            self._metrics,
            self.connections,
            self._budget,
            self._quotas,
            bytes_max=self._bytes_max,
            number=next(self._numbers),
            busy_poll=self._busy_poll,
        )

    def continue_client(self, transport: asyncio.Transport, make_session: MakeSession) -> None:
        """Connect a client whose session another server has begun."""
        connection = self._connect(make_session)()
        if transport.get_extra_info("ssl_object") is not None:  # such a client has its place before it begins
            connection.place = self._door.enter(transport)
            if connection.place is None:
                return
            if not connection.place.certify(read_peer_certificate(transport.get_extra_info("ssl_object"))):
                connection.place.leave()
                transport.abort()
                return
        transport.set_protocol(connection)
        connection.connection_made(transport)
        connection.go_on()

    def tick(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` every so many seconds, until `stop`."""

        async def run() -> None:
            while True:
                await asyncio.sleep(seconds)
                do()

        self._ticker = asyncio.get_running_loop().create_task(run())

    async def stop(self) -> None:
        """Close the listeners; connections that are open stay open."""
        for waiting in self._waiting:
            await waiting.stop()
        for listener in self._listeners:
            listener.close()
        for factory in self._factories:  # behind the connections that this turn has accepted
            asyncio.get_running_loop().call_soon(factory.close)
        while self._waiting:
            self._waiting.pop().close()
        self._door.close()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._path is not None and _number_of(self._path[0]) == self._path[1]:
            os.unlink(self._path[0])


def _prepare(path: str) -> str:
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return path


def _number_of(path: str) -> int | None:
    """Return which file is at a path now."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None
