"""A core and edges in one event loop: an entrance whose connections a test drives by hand."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

from babelbus.clock import SystemClock
from babelbus.config import ServerSettings
from babelbus.limited_log import LimitedLog
from babelbus.link.client import EdgeListener
from babelbus.link.core import CoreEnd
from babelbus.link.edge import Edge
from babelbus.listening.certificates import Tls
from babelbus.listening.crowd import Crowd
from babelbus.listening.door import Door, Place
from babelbus.listening.entrances import Entrance, Entrances
from babelbus.listening.sockets import open_sockets
from babelbus.metrics import Metrics
from tests.support.bus import LOOK_SECONDS, SAFETY_NET_SECONDS

NAME = "echo"
KINDS = ("socketpair", "tcp")


class Session(asyncio.Protocol):
    """One connection at the core, which records what happens."""

    def __init__(self, door: Door, keeps_open: bool = False) -> None:
        self._door = door
        self.place: Place | None = None
        self.received = bytearray()
        self.events: list[str] = []
        self.keeps_open = keeps_open
        self.transport: Any = None
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.place = self.place or self._door.enter(transport)

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, error: Exception | None) -> None:
        if self.place is not None:
            self.place.leave()
        self.lost.set_result(error)


async def until(condition: Any) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(SAFETY_NET_SECONDS):
        while not condition():  # noqa: ASYNC110  # it has no event of its own
            await asyncio.sleep(LOOK_SECONDS)


class Linked:
    """A core and an edge, linked over a socket pair or TCP."""

    def __init__(self, *, connections_max: int = 100, tls: Tls | None = None) -> None:
        clock, metrics = SystemClock(), Metrics()
        self.metrics = metrics
        self.sessions: list[Session] = []
        self._writers: list[asyncio.StreamWriter] = []
        self.keeps_open = False
        self.make_session: Callable[[Door], Session] = lambda door: Session(door, self.keeps_open)
        self.door = Door(
            NAME,
            metrics,
            LimitedLog(logging.getLogger("test"), clock),
            Crowd(ServerSettings(uncounted_networks=None)),
            connections_max=connections_max,
            handshake_seconds=SAFETY_NET_SECONDS,
        )
        self.entrances = Entrances()
        self.entrances.add(Entrance(NAME, self._make, self.door, tls=tls))
        self.core = CoreEnd(self.entrances, metrics, clock, name="core")
        self.lost: list[str] = []
        self.clock = clock
        self.tls = tls
        self.edge = self.make_edge("edge")
        self.address = ("", 0)

    def make_edge(self, name: str, **options: Any) -> Edge:
        return Edge(name, self.clock, on_lost=self.lost.append, **options)

    def _make(self) -> Session:
        session = self.make_session(self.door)
        self.sessions.append(session)
        return session

    async def open(self, edge: Edge) -> tuple[str, int]:
        sockets = await open_sockets("127.0.0.1", 0)
        await edge.open([EdgeListener(NAME, sockets, self.tls)])
        host, port = sockets[0].getsockname()
        return host, port

    async def link(self, edge: Edge, kind: str, tls: ssl.SSLContext | None = None) -> None:
        if kind == "socketpair":
            ours, theirs = socket.socketpair()
            await asyncio.gather(self.core.adopt(ours, edge.name), edge.connect_socket(theirs))
        else:
            host, _, port = self.core.address.rpartition(":")
            await edge.connect(host, int(port), tls)

    async def dial(
        self, address: tuple[str, int] | None = None, tls: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*(address or self.address), ssl=tls)
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await self.edge.stop()
        await self.core.close()

    async def session(self, number: int = 0) -> Session:
        """Return a session when it has begun."""
        await until(lambda: len(self.sessions) > number and self.sessions[number].transport is not None)
        return self.sessions[number]


@contextlib.asynccontextmanager
async def linked(kind: str, **options: Any) -> AsyncIterator[Linked]:
    """A core, an edge and their link."""
    both = Linked(**options)
    await both.core.listen("127.0.0.1", 0)
    both.address = await both.open(both.edge)
    await both.link(both.edge, kind)
    try:
        yield both
    finally:
        await both.close()
