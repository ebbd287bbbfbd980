"""Sessions go from one owner to the next, each guarded by itself: both owners run in this process."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from babelbus.config import WorterbuchSettings
from babelbus.link.transport import Absence, LinkedTransport
from babelbus.protocols.connection import Connection
from babelbus.protocols.service import Continued, StreamService
from babelbus.server.handover import Handover, _Session, _Sessions
from babelbus.storage.files import LocalFiles
from tests.support.handover import Device, Owners, owners
from tests.support.server import configure, connections_of
from tests.support.worterbuch import ack, put, state, subscribe


def connection_of(owned: Owners, device: Device) -> Connection:
    """Return the connection of a client at the owner."""
    [found] = [one for one in connections_of(owned.server) if session_of(one).client_id == device.client_id]
    return found


def session_of(connection: Connection) -> Any:
    session: Any = connection._session
    return session.session


def test_a_client_of_a_unix_socket_goes_on_and_costs_nobody_else_his_session(tmp_path: Path) -> None:
    async def test() -> None:
        path = str(tmp_path / "lines")
        config = configure(tmp_path, worterbuch=WorterbuchSettings(port=0, tcp_port=0, unix_path=path))
        async with owners(tmp_path, config) as owned:
            local = await owned.welcome(*await asyncio.open_unix_connection(path))
            device = await owned.dial()
            for client in (local, device):
                assert await client.ask(subscribe(1, "state", liveOnly=True)) == ack(1)
            await owned.move()
            for number, (writer, reader) in enumerate(((device, local), (local, device)), 2):
                writer.say(put(number, "state", number))
                assert await reader.hear() == state(1, number)
                for message in (await writer.hear(), await writer.hear()):
                    assert message in (state(1, number), ack(number))

    asyncio.run(test())


@pytest.mark.parametrize("step", ["is_portable", "stay", "continuation"])
def test_a_session_that_fails_while_it_is_handed_over_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    async def test() -> None:
        async with owners(tmp_path) as owned:
            failing, device, direct = await owned.dial(), await owned.dial(), await owned.dial(direct=True)
            session = connection_of(owned, failing)._session
            defect = property(fail) if step == "is_portable" else fail
            monkeypatch.setattr(session, "__class__", type("Failing", (type(session),), {step: defect}))
            await owned.move()
            assert await failing.is_closed()
            for number, client in enumerate((device, direct), 1):
                assert await client.ask(put(number, "state", number)) == ack(number)

    asyncio.run(test())
    assert "the session cannot go on" in caplog.text


def test_a_session_that_the_next_owner_cannot_begin_ends_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with owners(tmp_path) as owned:
            service = owned.server.services["zbus"]
            assert isinstance(service, StreamService)
            # An address as releases before this one have written that of a unix socket.
            transports = [LinkedTransport(Absence(), 0, None, {"peername": name}) for name in ((), ("127.0.0.1", 1))]
            content = [Continued("owner", b"\x01", transport) for transport in transports]
            assert await service.continue_sessions(content) == set()
            assert [transport.is_lost for transport in transports] == [True, True]

    with caplog.at_level(logging.INFO):
        asyncio.run(test())
    assert "a session of zbus does not go on" in caplog.text
    assert "closing: the session is of another release" in caplog.text


def test_a_session_that_cannot_be_read_costs_nobody_else_his_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def raw(content: object) -> msgspec.Raw:
        return msgspec.Raw(msgspec.msgpack.encode(content))

    good = _Session("id", "worterbuch", "owner", None, None, None, b"")
    Handover(LocalFiles(), str(tmp_path), 4)._write(_Sessions(4, [raw({"id": 7}), raw(good)]))
    assert asyncio.run(Handover(LocalFiles(), str(tmp_path), 5).read()) == ["owner"]
    assert "a session of the last owner does not go on" in caplog.text
