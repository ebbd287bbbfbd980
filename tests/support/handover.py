"""The owners of one data folder, one after the other in this process, and a member whose clients they serve."""

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from babelbus.clock import SystemClock
from babelbus.config import Config
from babelbus.link.client import Client, EdgeListener
from babelbus.link.edge import Edge
from babelbus.listening.sockets import open_sockets
from babelbus.server.app import Server
from babelbus.server.handover import Handover
from babelbus.storage.files import FILE_MODE, FileSystem, LocalFiles
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.link import until
from tests.support.server import configure

LISTENER = "worterbuch-tcp"


class Device:
    """One client of Wörterbuch, on lines."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.client_id = ""

    async def hear(self) -> dict[str, Any]:
        """Return the next message."""
        async with asyncio.timeout(SAFETY_NET_SECONDS):
            line = await self.reader.readline()
        assert line, "the connection ended"
        heard: dict[str, Any] = json.loads(line)
        return heard

    def say(self, message: object) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def ask(self, message: object) -> dict[str, Any]:
        self.say(message)
        return await self.hear()

    async def is_closed(self) -> bool:
        """Return whether the connection ends without another word."""
        try:
            async with asyncio.timeout(SAFETY_NET_SECONDS):
                return await self.reader.read() == b""
        except ConnectionResetError:
            return True

    def leave(self) -> None:
        self.writer.transport.abort()


class HeldFiles(LocalFiles):
    """The files of an owner, whose sessions are not written before a test allows it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.writing = asyncio.Event()
        self.allowed = threading.Event()

    def replace_file(self, path: str, content: bytes, *, mode: int = FILE_MODE) -> None:
        self._loop.call_soon_threadsafe(self.writing.set)
        assert self.allowed.wait(SAFETY_NET_SECONDS)
        super().replace_file(path, content, mode=mode)


class Owners:
    """The owners, the first of which has begun, and the edge of another member."""

    def __init__(self, folder: Path, config: Config | None, files: FileSystem | None) -> None:
        self._folder = folder
        self._config = config or configure(folder)
        self._files = files or LocalFiles()
        self._epoch = 0
        self._devices: list[Device] = []
        self._edges: list[Edge] = []
        self.addresses: dict[str, tuple[str, int]] = {}
        self.server: Server
        self.edge: Edge
        """That of the member."""

    def make_edge(self, name: str) -> Edge:
        edge = Edge(name, SystemClock(), waiting_max=10, waiting_seconds=SAFETY_NET_SECONDS)
        self._edges.append(edge)
        return edge

    @property
    def handover(self) -> Handover:
        assert self.server._handover is not None
        return self.server._handover

    async def begin(self) -> None:
        """Start the next owner."""
        self._epoch += 1
        self.server = Server(self._config)
        self.server._handover = Handover(self._files, str(self._folder), self._epoch)
        await self.server.start()
        await self.server.core_end.listen("127.0.0.1", 0)

    async def link(self, edge: Edge | None = None) -> None:
        """Link an edge, that of the member if no other is given, to the owner."""
        host, _, port = self.server.core_end.address.rpartition(":")
        await (edge or self.edge).connect(host, int(port))

    async def dial(self, name: str = "member", tls: ssl.SSLContext | None = None) -> Device:
        """Return a client of a member, or of the owner itself, there with TLS if it has any."""
        if name == "owner":
            host, _, port = self.server.addresses[LISTENER].rpartition(":")
            return await self.welcome(*await asyncio.open_connection(host, int(port), ssl=tls))
        return await self.welcome(*await asyncio.open_connection(*self.addresses[name]))

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Device:
        device = Device(reader, writer)
        self._devices.append(device)
        device.client_id = (await device.hear())["welcome"]["clientId"]
        return device

    async def move(self) -> None:
        """End the owner, which goes on as a member, and start the next one, with both members linked to it."""
        await self.server.stop(goes_on=True)
        await self.follow()

    async def follow(self) -> None:
        """Start the next owner, with the members linked to it."""
        released = self.server.released
        await self.begin()
        await self.link()
        if released:
            await self.link_released(released)

    async def link_released(self, released: list[Client]) -> None:
        edge = self.make_edge("owner")
        edge.adopt(released)
        await self.link(edge)

    async def end_absence(self, count: int) -> None:
        """End the sessions of clients that do not come, once these are so many."""
        core_end = self.server.core_end
        await until(lambda: len(core_end.absent) == count)
        self.handover._end_absence(core_end)

    async def open_edge(self, name: str) -> Edge:
        """Return the edge of one more member, linked to the owner."""
        edge = self.make_edge(name)
        sockets = await open_sockets("127.0.0.1", 0)
        self.addresses[name] = sockets[0].getsockname()
        await edge.open([EdgeListener(LISTENER, sockets)])
        await self.link(edge)
        return edge

    async def close(self) -> None:
        for device in self._devices:
            device.leave()
        for edge in self._edges:
            await edge.stop()
        if not self.server.stopping:
            await self.server.stop()


@contextlib.asynccontextmanager
async def owners(folder: Path, config: Config | None = None, files: FileSystem | None = None) -> AsyncIterator[Owners]:
    """The first of the owners, linked to the member."""
    one = Owners(folder, config, files)
    await one.begin()
    try:
        one.edge = await one.open_edge("member")
        yield one
    finally:
        await one.close()
