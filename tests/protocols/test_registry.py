"""The server knows no protocol: an entry in SERVICES and a section of the configuration make one."""

import ast
import asyncio
import contextlib
import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from babelbus.config import Config
from babelbus.core.access import CLIENT, SERVER
from babelbus.core.publish import Publication
from babelbus.core.receipt import Receipt
from babelbus.core.record import Event
from babelbus.errors import PeerLeavesError
from babelbus.protocols import contract
from babelbus.protocols.contract import Outbox
from babelbus.protocols.registry import SERVICES
from babelbus.protocols.service import ServiceContext, StreamService
from babelbus.server import app
from tests.support.bus import in_loop
from tests.support.server import configure, running


def _encode_offset(receipt: Receipt) -> bytes:
    return b"%d\n" % receipt.base_offset


class ToySettings(msgspec.Struct, frozen=True):
    enabled: bool = True
    handshake_seconds: float = 10.0
    connections_max: int = 2


class ToyConfig(Config, frozen=True):
    toy: ToySettings = ToySettings()


class ToySession(contract.Session):
    """Publishes each line to a topic and answers with its offset; `wait` is answered when the server stops."""

    def __init__(self, context: ServiceContext, outbox: Outbox) -> None:
        self._broker = context.broker
        self._outbox = outbox
        self._buffer = b""
        self._waits = 0

    def receive_data(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line == b"leave":
                raise PeerLeavesError("the client leaves")
            if line == b"wait":
                self._waits += 1
                continue
            receipt = self._broker.publish(Publication(CLIENT, "toy", [Event("toys", line)]))
            self._outbox.answer_when([receipt], partial(_encode_offset, receipt))

    @property
    def busy(self) -> bool:
        return False

    @property
    def established(self) -> bool:
        return True

    def resume(self) -> None:
        pass

    def end_waits(self) -> None:
        for _ in range(self._waits):
            self._outbox.answer(lambda: b"nothing came\n")

    def close(self) -> None:
        pass


class ToyService(StreamService):
    def __init__(self, context: ServiceContext) -> None:
        assert isinstance(context.config, ToyConfig)
        super().__init__("toy", context, context.config.toy)
        self._context = context

    async def start(self) -> None:
        await self.listeners.listen("toy", "127.0.0.1", 0, self._make_session)

    def _make_session(self, outbox: Outbox, _close: Callable[[], None], _peer: str | None) -> ToySession:
        return ToySession(self._context, outbox)


def test_the_server_names_no_protocol() -> None:
    names = ast.unparse(ast.parse(inspect.getsource(app)))  # strings and names, no comments
    assert re.findall("|".join([*SERVICES, "wörterbuch", "eventmesh"]), names, re.IGNORECASE) == []


def test_every_protocol_has_a_section_of_the_configuration() -> None:
    assert [name for name in SERVICES if not hasattr(getattr(Config(), name, None), "enabled")] == []


@in_loop
async def test_a_fifth_protocol_needs_an_entry_and_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVICES, "toy", ToyService)
    known = msgspec.structs.asdict(configure(tmp_path))
    async with running(ToyConfig(**known)) as server:
        await server.broker.create_topic("toys", principal=SERVER)
        host, _, port = server.addresses["toy"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"ball\nwait\nkite\n")
        assert [await reader.readline() for _ in range(2)] == [b"0\n", b"1\n"]
        assert server.metrics.registry.get_sample_value("babelbus_connections", {"protocol": "toy"}) == 1
    assert await reader.read() == b"nothing came\n"
    writer.close()


@in_loop
async def test_a_session_that_cannot_be_made_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: ToyService, *_: object) -> ToySession:
        raise ValueError("a defect")

    monkeypatch.setattr(ToyService, "_make_session", refuse)
    monkeypatch.setitem(SERVICES, "toy", ToyService)
    async with running(ToyConfig(**msgspec.structs.asdict(configure(tmp_path)))) as server:
        host, _, port = server.addresses["toy"].partition(":")
        for _ in range(ToySettings().connections_max + 1):  # those that failed are not counted as open
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        assert server.metrics.registry.get_sample_value("babelbus_connections", {"protocol": "toy"}) in (None, 0)
        refused = {"protocol": "toy", "reason": "limit"}
        assert server.metrics.registry.get_sample_value("babelbus_connections_refused_total", refused) is None
    assert [record.exc_text for record in caplog.records if "internal error, closing" in record.getMessage()]


@in_loop
async def test_a_protocol_that_is_not_enabled_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVICES, "toy", ToyService)
    known = msgspec.structs.asdict(configure(tmp_path))
    async with running(ToyConfig(**known, toy=ToySettings(enabled=False))) as server:
        assert set(server.services) == set(SERVICES) - {"toy"}
        assert "toy" not in server.addresses
