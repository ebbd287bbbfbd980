"""Sockets that wait for their first client."""

import asyncio
import logging
import socket

import pytest

from babelbus.listening.sockets import Waiting, load, open_sockets


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


def address_of(sockets: list[socket.socket]) -> tuple[str, int]:
    host, port = sockets[0].getsockname()[:2]
    return host, port


def test_the_first_connections_are_served_by_what_they_have_loaded() -> None:
    async def main() -> None:
        sockets = await open_sockets("127.0.0.1", 0)
        servers = []

        async def serve() -> None:
            assert (await load("babelbus.listening.sockets")).Waiting is Waiting
            loop = asyncio.get_running_loop()
            servers.extend([await loop.create_server(Greeter, sock=one) for one in sockets])

        waiting = Waiting("test", sockets, serve)
        readers = await asyncio.gather(*[asyncio.open_connection(*address_of(sockets)) for _ in range(3)])
        assert [await reader.read() for reader, _ in readers] == [b"hello"] * 3
        for _, writer in readers:
            writer.close()
        await waiting.stop()
        for server in servers:
            server.close()
        waiting.close()

    asyncio.run(main())


def test_sockets_that_nobody_has_come_to_are_closed() -> None:
    async def main() -> None:
        sockets = await open_sockets("127.0.0.1", 0)
        address = address_of(sockets)

        async def serve() -> None:
            raise AssertionError

        waiting = Waiting("test", sockets, serve)
        await waiting.stop()
        waiting.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*address)

    asyncio.run(main())


def test_what_cannot_be_loaded_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        sockets = await open_sockets("127.0.0.1", 0)
        began = asyncio.Event()

        async def serve() -> None:
            began.set()
            await load("babelbus.no_such_module")

        waiting = Waiting("test", sockets, serve)
        _, writer = await asyncio.open_connection(*address_of(sockets))
        await began.wait()
        await waiting.stop()
        waiting.close()
        writer.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == ["test cannot serve its clients"]
