"""The owners of one data folder, one after the other in this process, and a member whose clients they serve."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from babelbus.clock import SystemClock
from babelbus.config import Config
from babelbus.link.client import EdgeListener
from babelbus.link.edge import Edge
from babelbus.listening.sockets import open_sockets
from babelbus.server.app import Server
from babelbus.server.handover import Handover
from babelbus.storage.files import FileSystem, LocalFiles
from tests.support.bus import SAFETY_NET_SECONDS
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


class Owners:
    """The owners, the first of which has begun, and the edge of another member."""

    def __init__(self, folder: Path, config: Config | None, files: FileSystem | None) -> None:
        self._folder = folder
        self._config = config or configure(folder)
        self._files = files or LocalFiles()
        self._epoch = 0
        self._devices: list[Device] = []
        self._address = ("", 0)
        self.server: Server
        self.edge = self.make_edge("member")

    def make_edge(self, name: str) -> Edge:
        return Edge(name, SystemClock(), waiting_max=10, waiting_seconds=SAFETY_NET_SECONDS)

    @property
    def handover(self) -> Handover:
        assert self.server._handover is not None
        return self.server._handover

    async def open(self) -> None:
        sockets = await open_sockets("127.0.0.1", 0)
        self._address = sockets[0].getsockname()
        await self.edge.open([EdgeListener(LISTENER, sockets)])

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

    async def dial(self, *, direct: bool = False) -> Device:
        """Return a client of the member, or of the owner itself."""
        if direct:
            host, _, port = self.server.addresses[LISTENER].rpartition(":")
            return await self.welcome(*await asyncio.open_connection(host, int(port)))
        return await self.welcome(*await asyncio.open_connection(*self._address))

    async def welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Device:
        device = Device(reader, writer)
        self._devices.append(device)
        device.client_id = (await device.hear())["welcome"]["clientId"]
        return device

    async def move(self) -> None:
        """End the owner, which goes on as a member, and start the next one, with both members linked to it."""
        await self.server.stop(goes_on=True)
        released = self.server.released
        await self.begin()
        await self.link()
        if released:
            edge = self.make_edge("owner")
            edge.adopt(released)
            await self.link(edge)

    async def close(self) -> None:
        for device in self._devices:
            device.leave()
        await self.edge.stop()
        await self.server.stop()


@contextlib.asynccontextmanager
async def owners(folder: Path, config: Config | None = None, files: FileSystem | None = None) -> AsyncIterator[Owners]:
    """The first of the owners, linked to the member."""
    one = Owners(folder, config, files)
    await one.open()
    await one.begin()
    try:
        await one.link()
        yield one
    finally:
        await one.close()
