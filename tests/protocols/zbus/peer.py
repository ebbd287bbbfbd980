"""A hub on a real broker, and peers that speak bytes to its sessions without a socket."""

import asyncio
import json
from typing import Any, Literal

import msgspec

from babelbus.config import Ack, ZbusSettings
from babelbus.core.settings import TopicSettings
from babelbus.identities.directory import Directory
from babelbus.identities.guessing import Guessing
from babelbus.protocols.contract import Outbox
from babelbus.protocols.zbus.continuation import KeptSession
from babelbus.protocols.zbus.http import WebSession
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.web_options import NOTHING_ELSE, WebOptions
from babelbus.storage.files import FileSystem
from babelbus.wire.websocket import Decoder, Event, Message, encode_texts
from babelbus.wire.websocket.upgrade import encode_upgrade_request, make_key
from tests.support.bus import Bus, turns
from tests.support.clock import ManualClock
from tests.support.http import Response, ResponseDecoder

OUTBOX_BYTES = 2**20


class Wire:
    """A transport that keeps what is sent; what `stuck` says counts as not taken by the peer."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.stuck = 0

    def write(self, data: bytes | bytearray) -> None:
        if data:
            self.writes.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.stuck


class House:
    """A broker with groups and a hub."""

    def __init__(
        self,
        files: FileSystem | None = None,
        *,
        clock: ManualClock | None = None,
        ack: Ack = "written",
        gate: Literal["off", "enforce"] = "off",
        directory: Directory | None = None,
        **options: Any,
    ) -> None:
        self.bus = Bus(files, clock=clock, defaults=TopicSettings(ack=ack))
        self.clock = self.bus.clock
        self.gate = self.bus.open_gate(gate)
        self.bus.broker.open_groups(self.bus.files, "data", 3600)
        self.options = options
        self.hub = Hub(
            self.bus.broker,
            self.bus.files,
            "data",
            metrics=self.bus.metrics,
            clock=self.clock,
            guessing=Guessing(self.clock, self.bus.metrics),
            directory=directory,
            settings=ZbusSettings(**options),
            loop=asyncio.get_running_loop(),
        )

    def flush(self) -> None:
        """Append what was gathered, as the end of a turn of the event loop does."""
        for topic in self.bus.broker.topics():
            topic.flush()

    async def stop(self) -> None:
        """Stop in order."""
        self.hub.stop()
        await self.bus.broker.close()

    async def restart(self) -> "House":
        """Stop in order and start again on the same files."""
        await self.stop()
        return House(self.bus.files, clock=self.clock, **self.options)


class Peer:
    """A connection to the port: bytes in, answers out."""

    def __init__(
        self,
        house: House,
        *,
        keys: dict[str, str] | None = None,
        options: WebOptions | None = None,
        address: str = "10.0.0.1:5",
        kept: KeptSession | None = None,
    ) -> None:
        self.wire = Wire()
        self.outbox = Outbox(self.wire, OUTBOX_BYTES)
        self.closed = False
        self._house = house
        self.session = WebSession(
            house.hub,
            self.outbox,
            self._closed,
            address=address,
            keys=keys or {},
            options=options or NOTHING_ELSE,
            kept=kept,
        )
        self.outbox.on_drained = self.room
        self._read = 0
        self._responses = ResponseDecoder(body_bytes_max=2**30)

    def _closed(self) -> None:
        self.closed = True

    def room(self) -> None:
        self.session.resume()
        self.session.release()

    def send(self, data: bytes) -> None:
        """What the connection does with one read, in a turn of its own."""
        self.send_in_turn(data)
        self._house.flush()  # as the end of the turn does

    def send_in_turn(self, data: bytes) -> None:
        """What the connection does with one of several reads of a turn."""
        self.outbox.holding = True
        try:
            self.session.receive_data(data)
        finally:
            self.outbox.release()
            self.session.release()

    def leave(self) -> None:
        self.outbox.close()
        self.session.close()

    def _unread(self) -> bytes:
        data = b"".join(self.wire.writes[self._read :])
        self._read = len(self.wire.writes)
        return data

    def responses(self) -> list[Response]:
        """The HTTP responses that came."""
        self._responses.receive_data(self._unread())
        return self._responses.responses()

    def upgrade(self) -> None:
        """Become a WebSocket."""
        self.send(encode_upgrade_request("localhost", "/", make_key()))
        [response] = self.responses()
        assert response.status == 101

    def ask(self, method: str = "POST", url: str = "/", *, body: bytes = b"", **headers: str) -> Response:
        """Send a request and give the one response."""
        self.send(request_of(method, url, body, **headers))
        [response] = self.responses()
        return response


class Client(Peer):
    """A connection that has become a WebSocket."""

    def __init__(self, house: House, *, kept: KeptSession | None = None, **how: Any) -> None:
        super().__init__(house, kept=kept, **how)
        if kept is None:
            self.upgrade()
        self._decoder = Decoder(is_server=False, message_bytes_max=2**30)
        self.id = self.session.session.id

    def events(self) -> list[Event]:
        self._decoder.receive_data(self._unread())
        return self._decoder.events()

    def messages(self) -> list[dict[str, Any]]:
        """The messages that came."""
        found = self.events()
        assert all(isinstance(one, Message) and one.text for one in found), found
        return [json.loads(one.data) for one in found if isinstance(one, Message)]

    def say(self, *messages: object) -> None:
        """Send messages in one chunk."""
        self.send(encode_texts([msgspec.json.encode(message) for message in messages], mask=True))

    def do(self, cmd: str, body: Any = None, **headers: Any) -> dict[str, Any]:
        """Send a command, and give the one answer."""
        self.say(command(cmd, body, **headers))
        [answer] = self.messages()
        return answer

    async def pushed(self) -> list[dict[str, Any]]:
        """Let the event loop go round, and give what came."""
        await turns()
        return self.messages()


def command(cmd: str, body: Any = None, **headers: Any) -> dict[str, Any]:
    """The message of a command."""
    message: dict[str, Any] = {"headers": {"cmd": cmd, **headers}}
    return message if body is None else {**message, "body": body}


def request_of(method: str = "POST", url: str = "/", body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request; `_` in the names of headers stands for `-`."""
    fields = {"host": "localhost", **{name.replace("_", "-"): text for name, text in headers.items()}}
    if body:
        fields["content-length"] = str(len(body))
    lines = [f"{method} {url} HTTP/1.1", *(f"{name}: {text}" for name, text in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body
