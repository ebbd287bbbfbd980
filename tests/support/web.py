"""Blocking clients of the HTTP port of Wörterbuch: REST, server-sent events, WebSocket."""

import http.client
import json
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import jwt
import msgspec

from babelbus.wire.websocket import Decoder, Event, Message, encode_texts, upgrade
from babelbus.wire.websocket.upgrade import check_upgrade_response, encode_upgrade_request, make_key
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.child import Child
from tests.support.http import Response, ResponseDecoder, encode_request
from tests.support.server import LiveServer

SECRET = "a secret of a test, long enough for every HMAC that the library knows"


class Answer(msgspec.Struct, frozen=True):
    """One response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as what it says."""
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


class Web:
    """One connection that asks and waits."""

    def __init__(self, live: LiveServer) -> None:
        self._connection = http.client.HTTPConnection(live.server.addresses["worterbuch"], timeout=SAFETY_NET_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._connection.close()

    def ask(self, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Answer:
        """Send a request and give its answer; `_` in the names of headers stands for `-`."""
        self._connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        response = self._connection.getresponse()
        data = response.read()
        return Answer(response.status, {name.lower(): text for name, text in response.headers.items()}, data)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: bytes, content_type: str = "application/json", **headers: str) -> Answer:
        return self.ask("POST", path, body, content_type=content_type, **headers)


class Events:
    """One stream of server-sent events, from a server or an address."""

    def __init__(self, live: LiveServer | str, path: str, **headers: str) -> None:
        address = live if isinstance(live, str) else live.server.addresses["worterbuch"]
        self._connection = http.client.HTTPConnection(address, timeout=SAFETY_NET_SECONDS)
        self._connection.request("GET", path, headers=headers)
        self.response = self._connection.getresponse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.response.close()
        self._connection.close()

    def next(self) -> Any:
        """Wait for the next event and give what its data says."""
        line, blank = self.response.readline(), self.response.readline()
        assert line.startswith(b"data: ")
        assert blank == b"\n"
        return json.loads(line[6:])


class Plain:
    """A socket to which anything can be said."""

    def __init__(self, live: LiveServer | Child, *, receive_bytes: int | None = None) -> None:
        addresses = live.addresses if isinstance(live, Child) else live.server.addresses
        host, port = addresses["worterbuch"].rsplit(":", 1)
        self.socket = socket.socket()
        self.socket.settimeout(SAFETY_NET_SECONDS)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.connect((host, int(port)))
        self.answers = ResponseDecoder(body_bytes_max=2**30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.socket.close()

    def read(self, count: int) -> list[Response]:
        """Give so many answers."""
        found: list[Response] = []
        while len(found) < count:
            data = self.socket.recv(2**16)
            assert data, f"closed after {found}"
            self.answers.receive_data(data)
            found += self.answers.responses()
        return found

    def rest(self) -> bytes:
        """Give all that comes until the server closes, in order or not."""
        data = bytearray()
        try:
            while part := self.socket.recv(2**16):
                data += part
        except ConnectionResetError:
            pass
        return bytes(data)


class WebSocket(Plain):
    """A WebSocket client, which has read the welcome."""

    def __init__(
        self,
        live: LiveServer | Child,
        path: str = "/ws",
        *,
        subprotocols: tuple[str, ...] = (),
        deflate: bool = False,
        greeted: bool = True,
    ) -> None:
        super().__init__(live)
        key = make_key()
        self.socket.sendall(encode_upgrade_request("localhost", path, key, subprotocols=subprotocols, deflate=deflate))
        [came] = self.read(1)
        response = upgrade.Response(came.status, came.reason, came.headers)
        self.subprotocol, self.deflate = check_upgrade_response(
            response, key, subprotocols=subprotocols, deflate=deflate
        )
        self._decoder = Decoder(is_server=False, message_bytes_max=2**30, deflate=self.deflate)
        self._decoder.receive_data(self.answers.unread())
        self._events: list[Event] = []
        if greeted:
            assert "welcome" in self.next()

    def event(self) -> Event:
        """Wait for the next event of the connection."""
        while not self._events:
            self._events += self._decoder.events()
            if not self._events:
                data = self.socket.recv(2**16)
                assert data, "closed"
                self._decoder.receive_data(data)
        return self._events.pop(0)

    def next(self) -> dict[str, Any]:
        """Wait for the next message."""
        event = self.event()
        assert isinstance(event, Message), event
        assert event.text
        message: dict[str, Any] = json.loads(event.data)
        return message

    def say(self, *messages: object) -> None:
        """Send messages."""
        self.socket.sendall(encode_texts([json.dumps(message).encode() for message in messages], mask=True))

    def ask(self, message: object) -> dict[str, Any]:
        """Send a message and give the next one that comes."""
        self.say(message)
        return self.next()


def get_of(path: str, method: str = "GET", body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request."""
    fields = [(name.replace("_", "-"), text) for name, text in headers.items()]
    return encode_request(method, path, fields, body, host="localhost")


def token(granted: Mapping[str, object], *, exp: float = 2e9, key: str = SECRET) -> str:
    """A token that grants this."""
    claims = {"sub": "me", "name": "tester", "exp": exp, "worterbuchPrivileges": granted}
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key, "HS256", headers={"typ": "JWT"})
