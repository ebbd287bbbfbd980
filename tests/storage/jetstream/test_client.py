"""What the connection to NATS says of itself, and what it makes of the answers of NATS."""

import asyncio
import base64
import contextlib
import json
import logging
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import pytest

pytest.importorskip("nats", reason="engine jetstream is not tested: the package nats-py is not installed")

from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport

from babelbus.config import JetstreamSettings
from babelbus.storage.jetstream import client
from babelbus.storage.jetstream.client import Nats, Stored
from babelbus.storage.jetstream.errors import NatsAwayError
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.nats import NatsServer, nats_server


@pytest.mark.parametrize(
    ("servers", "shown"),
    [
        ("nats://bus:secret@10.0.0.1:4222, tls://10.0.0.2:4222", ["nats://10.0.0.1:4222", "tls://10.0.0.2:4222"]),
        ("bus:secret@10.0.0.1:4222", ["10.0.0.1:4222"]),
        ("nats://secret@[::1]:4222", ["nats://[::1]:4222"]),
        ("nats://bus:secret://@secret@h", ["nats://h"]),
        ("bus:secret://secret@h", ["h"]),
    ],
)
def test_user_and_password_of_an_address_are_shown_nowhere(
    servers: str, shown: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ATTEMPT_SECONDS", 0.0)
    nats = Nats(JetstreamSettings(servers), None)
    try:
        assert nats.servers == shown
        with pytest.raises(NatsAwayError) as caught:
            _ = nats.client
        with caplog.at_level(logging.WARNING):
            asyncio.run(nats.wait_again(OSError("refused")))
    finally:
        nats.stop()
    for text in (str(caught.value), caplog.text):
        assert ", ".join(shown) in text
        assert "secret" not in text


UNAVAILABLE = {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}
MESSAGE = {"message": {"subject": "s", "seq": 7, "data": base64.b64encode(b"data").decode()}}


@pytest.fixture(scope="module")
def plain() -> Iterator[NatsServer]:
    """A server without JetStream: a client can answer in its place."""
    with nats_server("jetstream: false") as server:
        yield server


class Impostor:
    """A JetStream that gives the answers of a list; the last one again and again."""

    def __init__(self, server: NatsServer, subject: str, answers: list[tuple[bytes, dict[str, str]]]) -> None:
        self.asked = 0
        self.nats = Nats(JetstreamSettings(server.url), None)
        self.nats.start("tests")
        self.nats.call(self._begin(subject, answers))

    async def _begin(self, subject: str, answers: list[tuple[bytes, dict[str, str]]]) -> None:
        async def answer(message: Msg) -> None:
            data, headers = answers[min(self.asked, len(answers) - 1)]
            self.asked += 1
            await self.nats.client.publish(message.reply, data, headers=headers)

        await self.nats.client.subscribe(subject, cb=answer)

    def __enter__(self) -> "Impostor":
        return self

    def __exit__(self, *_: object) -> None:
        self.nats.stop()


def said(content: Any) -> tuple[bytes, dict[str, str]]:
    return json.dumps(content).encode(), {}


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "READ_AGAIN_SECONDS", (0.01, 0.01))


def test_a_read_waits_while_jetstream_elects_a_leader(plain: NatsServer) -> None:
    with Impostor(plain, "$JS.API.STREAM.MSG.GET.s", [said(UNAVAILABLE), said(UNAVAILABLE), said(MESSAGE)]) as other:
        assert other.nats.call(other.nats.read_from_leader("s", seq=7)) == Stored("s", 7, b"data")
        assert other.asked == 3


@pytest.mark.usefixtures("soon")
def test_a_read_without_a_leader_fails_as_one_without_nats(plain: NatsServer) -> None:
    with Impostor(plain, "$JS.API.STREAM.MSG.GET.s", [said(UNAVAILABLE)]) as other:
        with pytest.raises(NatsAwayError, match="temporarily unavailable") as caught:
            other.nats.call(other.nats.read_from_leader("s", seq=7))
        assert caught.value.retriable


def test_a_read_that_jetstream_refuses_is_not_made_again(plain: NatsServer) -> None:
    refusal = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}
    with Impostor(plain, "$JS.API.STREAM.MSG.GET.s", [said(refusal)]) as other:
        with pytest.raises(NatsAwayError, match="stream s: stream not found"):
            other.nats.call(other.nats.read_from_leader("s", seq=7))
        assert other.asked == 1


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("leaders", [1, 0])
def test_a_direct_get_waits_for_a_replica_that_can_answer(plain: NatsServer, leaders: int) -> None:
    answers = [(b"", {"Status": "503", "Description": "unavailable"})]
    answers += [(b"data", {"Nats-Subject": "s", "Nats-Sequence": "7"})] * leaders
    with Impostor(plain, "$JS.API.DIRECT.GET.s", answers) as other:
        asked = other.nats.get_batch("s", "s", 1, 100, 1)
        if leaders:
            assert other.nats.call(asked) == [Stored("s", 7, b"data")]
        else:
            with pytest.raises(NatsAwayError, match="does not answer a read"):
                other.nats.call(asked)
        assert other.asked == 2


def test_the_end_does_not_wait_for_a_task_that_lost_its_cancellation(plain: NatsServer) -> None:
    async def begin() -> None:
        tasks.append(asyncio.get_running_loop().create_task(work()))

    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(SAFETY_NET_SECONDS)
        await asyncio.sleep(10 * SAFETY_NET_SECONDS)

    tasks: list[asyncio.Task[None]] = []
    nats = Nats(JetstreamSettings(plain.url), None)
    nats.start("tests")
    nats.call(begin())
    nats.call(asyncio.sleep(0))  # it waits by now
    nats.stop()
    assert tasks[0].cancelled()


def test_a_connection_that_is_made_while_the_client_closes_is_closed_too(plain: NatsServer) -> None:
    async def begin() -> None:
        tasks.append(asyncio.get_running_loop().create_task(connect_again()))

    async def connect_again() -> None:
        client = nats.client
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(SAFETY_NET_SECONDS)
        await closed.wait()
        transport = client._transport = TcpTransport()  # type: ignore[no-untyped-call]
        await transport.connect(urlparse(plain.url), buffer_size=1024, connect_timeout=2)
        assert transport._io_writer is not None
        writers.append(transport._io_writer)

    async def note() -> None:
        closed.set()

    closed = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []
    nats = Nats(JetstreamSettings(plain.url), None)
    nats.start("tests")
    nats.client._closed_cb = note
    nats.call(begin())
    nats.call(asyncio.sleep(0))  # it waits by now
    nats.stop()
    assert [writer.is_closing() for writer in writers] == [True]


def test_a_connection_over_which_nats_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Nats._options
    monkeypatch.setattr(Nats, "_options", lambda nats: {**options(nats), "connect_timeout": 0.05})
    monkeypatch.setattr(client, "ATTEMPT_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(SAFETY_NET_SECONDS)
        with nats_server("jetstream: false") as server:
            port = silent.getsockname()[1]
            nats = Nats(JetstreamSettings(f"{server.url}, nats://127.0.0.1:{port}"), None)
            nats.start("tests")
        try:
            accepted = [silent.accept()[0] for _ in range(5)]
            for connection in accepted[:-1]:
                with connection:
                    connection.settimeout(SAFETY_NET_SECONDS)
                    assert connection.recv(1) == b""
            accepted[-1].close()
        finally:
            nats.stop()
