"""Sessions go from one owner to the next, each guarded by itself: both owners run in this process."""

import asyncio
import errno
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from babelbus.config import QuotaSettings, ServerSettings, TlsSettings, WorterbuchSettings
from babelbus.core.access import CLIENT, SERVER
from babelbus.core.publish import Publication
from babelbus.core.record import Event
from babelbus.core.subject import exactly
from babelbus.link.frames import BATCH, Secured
from babelbus.link.transport import Absence, LinkedTls, LinkedTransport
from babelbus.protocols.connection import Connection
from babelbus.protocols.jebp.batches import Batches
from babelbus.protocols.service import Continued, StreamService
from babelbus.server import handover
from babelbus.server.handover import Handover, _Session, _Sessions
from babelbus.storage.files import FILE_MODE, LocalFiles
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.certificates import Authority
from tests.support.handover import Device, HeldFiles, Owners, owners
from tests.support.link import until
from tests.support.server import configure, connections_of
from tests.support.worterbuch import ack, named, pstate, psubscribe, put, state, subscribe


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
            failing, device, direct = await owned.dial(), await owned.dial(), await owned.dial("owner")
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


def test_a_member_that_is_lost_while_sessions_are_written_costs_nobody_else_his_session(tmp_path: Path) -> None:
    async def test() -> None:
        files = HeldFiles()
        async with owners(tmp_path, files=files) as owned:
            frail = await owned.open_edge("frail")
            holder, waiting, direct = [await owned.dial(name) for name in ("frail", "member", "owner")]
            will = f"$SYS/clients/{holder.client_id}/lastWill"
            assert await holder.ask(put(1, will, [{"key": "state", "value": "off"}])) == ack(1)
            assert await holder.ask(named("lock", 2, "job")) == ack(2)
            waiting.say(named("acquireLock", 3, "job"))
            assert await waiting.ask(subscribe(4, "state")) == ack(4)
            assert await direct.ask(subscribe(4, "state")) == ack(4)
            stopping = asyncio.create_task(owned.server.stop(goes_on=True))
            await files.writing.wait()
            frail.disconnect("lost")
            await until(lambda: len(owned.server.core_end.links) == 1)
            files.allowed.set()
            await stopping
            await owned.follow()
            await owned.end_absence(1)  # the client of the lost member does not come
            heard = [await waiting.hear(), await waiting.hear()]
            assert sorted(heard, key=str) == [ack(3), state(4, "off")]
            assert await direct.hear() == state(4, "off")
            assert await waiting.ask(named("releaseLock", 5, "job")) == ack(5)

    asyncio.run(test())


def test_an_owner_that_cannot_write_sessions_leaves_no_client_that_nobody_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(LocalFiles):
        def replace_file(self, path: str, content: bytes, *, mode: int = FILE_MODE) -> None:
            raise OSError(errno.ENOSPC, "no room")

    async def test() -> None:
        async with owners(tmp_path, files=Full()) as owned:
            clients = [await owned.dial(name) for name in ("member", "owner")]
            for number, client in enumerate(clients):
                will = f"$SYS/clients/{client.client_id}/lastWill"
                assert await client.ask(put(1, will, [{"key": f"will/{number}", "value": 1}])) == ack(1)
            await owned.move()
            assert [await client.is_closed() for client in clients] == [True, True]
            assert [owned.server.broker.state.find(f"will/{number}") for number in (0, 1)] == [b"1", b"1"]

    asyncio.run(test())
    assert "no session goes on at the next owner" in caplog.text


@pytest.mark.parametrize("rounds", [10, 1])
def test_a_lock_of_a_session_that_ends_late_is_granted_once_and_its_will_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setattr(handover, "ROUNDS_MAX", rounds)

    async def test() -> None:
        async with owners(tmp_path) as owned:
            holder, waiting = await owned.dial(), await owned.dial()
            will = f"$SYS/clients/{holder.client_id}/lastWill"
            assert await holder.ask(put(1, will, [{"key": "state", "value": "off"}])) == ack(1)
            assert await holder.ask(named("lock", 2, "job")) == ack(2)
            waiting.say(named("acquireLock", 3, "job"))
            assert await waiting.ask(subscribe(4, "state")) == ack(4)
            session = connection_of(owned, holder)._session
            assert session is not None
            looks = [session.continuation(), *[None] * rounds]  # it has become slow
            monkeypatch.setattr(session, "continuation", lambda: looks.pop(0))
            await owned.move()
            assert await holder.is_closed()
            heard = [await waiting.hear(), await waiting.hear()]
            assert sorted(heard, key=str) == [ack(3), state(4, "off")]
            assert await waiting.ask(named("releaseLock", 5, "job")) == ack(5)

    asyncio.run(test())


def test_events_that_are_not_flushed_yet_are_told_before_sessions_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with owners(tmp_path) as owned:
            device, broker = await owned.dial(), owned.server.broker
            await broker.create_topic("orders", 1, {"ack": "flushed"}, SERVER)
            assert await device.ask(psubscribe(1, "orders/#", liveOnly=True)) == ack(1)
            partition = broker.topic("orders").partition(0)
            monkeypatch.setattr(partition, "_request_flush", lambda **_: None)  # the disk is slow
            published = broker.publish(Publication(CLIENT, "test", [Event("orders/1", b"1")]))
            assert not published.done
            await owned.move()
            assert await device.hear() == pstate(1, "orders/#", {"orders/1": "1"})
            assert published.done

    asyncio.run(test())


def test_nothing_is_taken_over_the_administration_once_sessions_have_left(tmp_path: Path) -> None:
    async def test() -> None:
        files = HeldFiles()
        async with owners(tmp_path, configure(tmp_path, admin=True), files) as owned:
            await owned.dial()
            host, _, port = owned.server.addresses["admin"].rpartition(":")
            stopping = asyncio.create_task(owned.server.stop())
            await files.writing.wait()
            try:
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(host, int(port))
            finally:
                files.allowed.set()
                await stopping

    asyncio.run(test())


def test_a_request_over_the_administration_is_answered_when_the_server_stops(tmp_path: Path) -> None:
    async def test() -> None:
        async with owners(tmp_path, configure(tmp_path, admin=True)) as owned:
            questions: list[object] = []
            owned.server.broker.responders.add(exactly("ask"), questions.append, "", SERVER)
            host, _, port = owned.server.addresses["admin"].rpartition(":")
            token = (tmp_path / "conf" / "admin_token").read_text().strip()
            reader, writer = await asyncio.open_connection(host, int(port))
            body = b'{"subject": "ask", "payload": "?", "timeout_seconds": 60}'
            head = f"POST /api/request HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: questions)
            await owned.server.stop()
            assert b"the server stops" in await reader.read()
            writer.close()

    asyncio.run(test())


def test_a_client_that_an_owner_has_not_seen_goes_on_at_the_next_one(tmp_path: Path) -> None:
    async def test() -> None:
        # An owner does not wait until such a client takes what was sent.
        config = configure(tmp_path, server=ServerSettings(drain_seconds=SAFETY_NET_SECONDS))
        async with owners(tmp_path, config) as owned:
            device = await owned.dial()
            assert await device.ask(named("lock", 1, "job")) == ack(1)
            assert await device.ask(subscribe(2, "state")) == ack(2)
            for number in (3, 4):  # owners that the member does not reach
                await owned.server.stop(goes_on=True)
                await owned.begin()
                other = await owned.dial("owner")
                assert await other.ask(put(number, "state", number)) == ack(number)
                other.leave()
            await owned.move()
            assert await device.hear() == state(2, 3)
            assert await device.hear() == state(2, 4)
            assert await device.ask(named("releaseLock", 5, "job")) == ack(5)
            await owned.move()
            assert await device.ask(put(6, "other", 6)) == ack(6)

    asyncio.run(test())


def test_an_absent_client_that_cannot_go_on_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with owners(tmp_path) as owned:
            device, late = await owned.dial(), await owned.dial()
            for client, key in ((device, "will/1"), (late, "will/2")):
                will = f"$SYS/clients/{client.client_id}/lastWill"
                assert await client.ask(put(1, will, [{"key": key, "value": 1}])) == ack(1)
            await owned.server.stop()
            await owned.begin()
            connection_of(owned, device).transport.write_eof()  # which no next owner can tell the client
            session = connection_of(owned, late)._session
            monkeypatch.setattr(session, "__class__", type("Stiff", (type(session),), {"is_portable": False}))
            monkeypatch.setattr(handover, "END_SECONDS", SAFETY_NET_SECONDS)
            await owned.move()
            assert [await client.is_closed() for client in (device, late)] == [True, True]
            assert [owned.server.broker.state.find(f"will/{number}") for number in (1, 2)] == [b"1", b"1"]

    asyncio.run(test())


def test_the_certificate_of_a_client_goes_on_and_counts_for_the_size_of_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secured = Secured(b"c" * 10_000, {"subject": [[["commonName", "device"]]], "notAfter": "Jan  1 00:00:00 2099 GMT"})

    async def test() -> None:
        async with owners(tmp_path) as owned:
            devices = [await owned.dial() for _ in range(3)]
            for device in devices:
                connection_of(owned, device).transport.secure(LinkedTls(secured))
            monkeypatch.setattr(handover, "BYTES_MAX", 25_000)
            await owned.move()
            [first, second] = connections_of(owned.server)
            for connection in (first, second):
                tls = connection.transport.get_extra_info("ssl_object")
                assert (tls.getpeercert(True), tls.getpeercert()) == (secured.certificate, secured.fields)
                assert connection._outbox.peer_certificate is not None
                assert connection._outbox.peer_certificate.common_names == ("device",)

    asyncio.run(test())


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", ["tcp", "unix", "tls"])
def test_a_client_that_stays_keeps_nothing_of_the_last_owner_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)  # a member calls it once, before it is an owner

    async def test() -> None:
        path = str(tmp_path / "lines")
        authority = Authority(tmp_path / "authority")
        cert_file, key_file = authority.issue("server")
        tls = TlsSettings(cert_file=str(cert_file), key_file=str(key_file)) if kind == "tls" else None
        config = configure(tmp_path, worterbuch=WorterbuchSettings(port=0, tcp_port=0, unix_path=path), tls=tls)
        async with owners(tmp_path, config) as owned:
            if kind == "unix":
                device = await owned.welcome(*await asyncio.open_unix_connection(path))
            else:
                device = await owned.dial("owner", None if tls is None else authority.client_context())
            broker = weakref.ref(owned.server.broker)
            await owned.move()
            await until(lambda: gc.collect() >= 0 and broker() is None)
            assert await device.ask(put(1, "state", 1)) == ack(1)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())


def test_a_batch_of_jebp_that_is_not_answered_costs_no_client_of_another_protocol_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[bytes] = []
    monkeypatch.setattr(Batches, "receive", lambda _self, data, _find, _answer: received.append(data))

    async def test() -> None:
        async with owners(tmp_path) as owned:
            device = await owned.dial()
            assert await device.ask(subscribe(1, "state", liveOnly=True)) == ack(1)
            link = owned.edge._link
            assert link is not None
            link.send(BATCH, 1, b"\x04jebp")
            await until(lambda: received)
            await owned.move()
            device.say(put(2, "state", 2))
            assert await device.hear() in (state(1, 2), ack(2))

    asyncio.run(test())


def test_a_client_that_says_nothing_more_counts_for_the_quotas_of_its_principal(tmp_path: Path) -> None:
    async def test() -> None:
        quotas = QuotaSettings(read_bytes_per_second=1)
        config = msgspec.structs.replace(configure(tmp_path), quotas=quotas)
        async with owners(tmp_path, config) as owned:
            silent, device = await owned.dial(), await owned.dial()
            for client in (silent, device):
                assert await client.ask(subscribe(1, "state", liveOnly=True)) == ack(1)
            await owned.move()
            await device.ask(put(2, "state", 2))
            assert await silent.hear() == state(1, 2)
            assert owned.server.quotas.describe()["worterbuch 127.0.0.1"] == {"connections": 2}
            assert connection_of(owned, silent)._outbox.resting

    asyncio.run(test())


def test_an_owner_whose_administration_was_asked_leaves_nothing_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)

    async def test() -> None:
        async with owners(tmp_path, configure(tmp_path, admin=True)) as owned:
            host, _, port = owned.server.addresses["admin"].rpartition(":")
            for path in ("/health", "/api/status", "/nothing"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                assert (await reader.read()).startswith(b"HTTP/1.1")
                writer.close()
            broker = weakref.ref(owned.server.broker)
            await owned.move()
            await until(lambda: gc.collect() >= 0 and broker() is None)

    asyncio.run(test())
