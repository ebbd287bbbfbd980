"""The administration endpoint of a member that reaches no owner, over real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from babelbus.server import waiting_room
from babelbus.server.waiting_room import WaitingRoom
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.link import until

Dialled = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class House:
    """A waiting room with a listener."""

    def __init__(self) -> None:
        self.room = WaitingRoom(lambda: "nobody is there")
        self.address = ("", 0)
        self.writers: list[asyncio.StreamWriter] = []

    async def dial(self) -> Dialled:
        dialled = await asyncio.open_connection(*self.address)
        self.writers.append(dialled[1])
        return dialled

    async def ask(self, path: str) -> tuple[str, dict[str, object]]:
        reader, writer = await self.dial()
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        return head.splitlines()[0], json.loads(body)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[House]:
    house = House()
    server = await asyncio.get_running_loop().create_server(house.room.make, "127.0.0.1", 0)
    house.address = server.sockets[0].getsockname()
    async with asyncio.timeout(SAFETY_NET_SECONDS):
        yield house
    server.close()
    for writer in house.writers:
        writer.transport.abort()
    await until(lambda: not house.room._visitors)


async def is_closed(dialled: Dialled) -> bool:
    """Return whether the other end closes without an answer."""
    try:
        return await dialled[0].read() == b""
    except ConnectionResetError:
        return True


def test_a_request_gets_the_reason() -> None:
    async def test() -> None:
        async with opened() as house:
            assert await house.ask("/ready") == (
                "HTTP/1.1 503 Service Unavailable",
                {"ready": False, "reasons": ["nobody is there"]},
            )
            for path in ("/health", "/health?probe=1"):
                assert await house.ask(path) == (
                    "HTTP/1.1 200 OK",
                    {"status": "degraded", "reasons": ["nobody is there"]},
                )

    asyncio.run(test())


@pytest.mark.parametrize("part", [b"", b"GET /ready HTTP/1.1\r\n"])
def test_a_connection_without_a_whole_request_ends(monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    monkeypatch.setattr(waiting_room, "REQUEST_SECONDS", 0.01)

    async def test() -> None:
        async with opened() as house:
            dialled = await house.dial()
            dialled[1].write(part)
            assert await is_closed(dialled)

    asyncio.run(test())


def test_slow_connections_do_not_keep_a_request_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "VISITORS_MAX", 2)

    async def test() -> None:
        async with opened() as house:
            slow = [await house.dial() for _ in range(4)]
            assert await is_closed(slow[0])
            assert await is_closed(slow[1])
            assert (await house.ask("/ready"))[1]["reasons"] == ["nobody is there"]
            assert await is_closed(slow[2])
            slow[3][1].write(b"GET /ready HTTP/1.1\r\n\r\n")
            assert b"nobody is there" in await slow[3][0].read()

    asyncio.run(test())
