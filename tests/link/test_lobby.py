"""Connections to the address for links that say nothing: they end, and keep no edge out."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from babelbus.link import core, lobby
from babelbus.link.security import LinkTls
from tests.support.certificates import Authority
from tests.support.link import Linked, until


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> LinkTls | None:
    if request.param == "plain":
        return None
    authority = Authority(tmp_path)
    cert_file, key_file = authority.issue("core")
    return LinkTls(str(cert_file), str(key_file), str(authority.path))


@contextlib.asynccontextmanager
async def opened(tls: LinkTls | None) -> AsyncIterator[Linked]:
    both = Linked()
    await both.core.listen("127.0.0.1", 0, tls)
    try:
        yield both
    finally:
        await both.close()


def dial(both: Linked, source: str = "127.0.0.1") -> socket.socket:
    host, _, port = both.core.address.rpartition(":")
    one = socket.create_connection((host, int(port)), source_address=(source, 0))
    one.setblocking(False)
    return one


async def ends(one: socket.socket) -> None:
    """Wait until the other end closes."""
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.get_running_loop().sock_recv(one, 1) == b""
    one.close()


def is_open(one: socket.socket) -> bool:
    try:
        one.recv(1)
    except BlockingIOError:
        return True
    return False


def test_silent_connections_of_one_address_keep_no_edge_out(
    tls: LinkTls | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "LINKS_MAX", 1)
    monkeypatch.setattr(lobby, "ADDRESS_MAX", 3)

    async def test() -> None:
        async with opened(tls) as both:
            silent = [dial(both) for _ in range(5)]
            await asyncio.gather(*map(ends, silent[:2]))
            assert all(map(is_open, silent[2:]))
            await both.link(both.edge, "tcp", None if tls is None else tls.client)
            assert [link.name for link in both.core.links] == ["edge"]
            await ends(silent[2])
            for one in silent[3:]:
                assert is_open(one)
                one.close()
            await until(lambda: not both.core.lobby._waiting)
            assert both.edge.is_connected

    asyncio.run(test())
    assert "too many connections say no hello" in caplog.text


def test_the_address_with_the_most_silent_connections_makes_room(
    tls: LinkTls | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby, "LOBBY_MAX", 3)

    async def test() -> None:
        async with opened(tls) as both:
            first = dial(both, "127.0.0.2")
            await until(lambda: both.core.lobby._count == 1)
            many = [dial(both, "127.0.0.3") for _ in range(3)]
            await ends(many[0])
            last = dial(both, "127.0.0.4")
            await ends(many[1])
            assert all(map(is_open, (first, many[2], last)))
            for one in (first, many[2], last):
                one.close()
            await until(lambda: not both.core.lobby._waiting)

    asyncio.run(test())


def test_a_silent_connection_ends_soon(tls: LinkTls | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "HELLO_SECONDS", 0.01)

    async def test() -> None:
        async with opened(tls) as both:
            await ends(dial(both))
            await until(lambda: not both.core.lobby._waiting)

    asyncio.run(test())


def test_a_handshake_under_way_does_not_delay_the_end_of_the_core(tls: LinkTls | None) -> None:
    async def test() -> None:
        async with opened(tls) as both:
            one = dial(both)
            await until(lambda: both.core.lobby._waiting)
        await ends(one)
        assert not both.core.lobby._waiting

    asyncio.run(test())
