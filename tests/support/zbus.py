"""Blocking clients of the port of zbus: HTTP as bytes, so that anything can be sent, and WebSocket."""

import contextlib
import json
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from typing import Any, Self

from babelbus.wire.websocket import Close, Decoder, Message, Pong, encode_texts
from babelbus.wire.websocket.upgrade import encode_upgrade_request, make_key
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.http import Response, ResponseDecoder

READ_BYTES = 2**18
BODY_BYTES_MAX = 2**30


class _Socket:
    """A connection that is closed with `with`."""

    def __init__(
        self, address: str, context: ssl.SSLContext | None = None, *, timeout_seconds: float = SAFETY_NET_SECONDS
    ) -> None:
        host, port = address.rsplit(":", 1)
        plain = socket.create_connection((host, int(port)), timeout=timeout_seconds)
        self.socket = plain if context is None else context.wrap_socket(plain, server_hostname="localhost")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def _read(self) -> bytes:
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return data


class HttpClient(_Socket):
    """A connection that says what it is told to, and gives the responses in order."""

    def __init__(
        self, address: str, context: ssl.SSLContext | None = None, *, timeout_seconds: float = SAFETY_NET_SECONDS
    ) -> None:
        super().__init__(address, context, timeout_seconds=timeout_seconds)
        self._responses = ResponseDecoder(body_bytes_max=BODY_BYTES_MAX)
        self._came: deque[Response] = deque()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def next(self) -> Response:
        while not self._came:
            self._came += self._responses.responses()
            if not self._came:
                self._responses.receive_data(self._read())
        return self._came.popleft()

    def ask(self, method: str = "POST", url: str = "/", body: bytes = b"", /, **headers: str) -> Response:
        """Send a request and give its response; `_` in the names of headers stands for `-`."""
        self._responses.expect(method)
        self.send(request_of(method, url, body, **headers))
        return self.next()

    def do(self, cmd: str, body: bytes = b"", /, **headers: str) -> Response:
        """Send a command."""
        return self.ask("POST", "/", body, cmd=cmd, **headers)

    def read_to_end(self) -> bytes:
        """Give what comes until the server closes the connection."""
        came = b""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(READ_BYTES):
                came += data
        return came

    def is_closed(self) -> bool:
        """Wait until the server closes the connection, and say whether it does so without another word."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def request_of(method: str = "POST", url: str = "/", body: bytes = b"", /, **headers: str) -> bytes:
    """The bytes of a request; `_` in the names of headers stands for `-`."""
    fields = {"host": "localhost", **{name.replace("_", "-"): text for name, text in headers.items()}}
    if body:
        fields["content-length"] = str(len(body))
    lines = [f"{method} {url} HTTP/1.1", *(f"{name}: {text}" for name, text in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


class SocketClient(_Socket):
    """A WebSocket client."""

    def __init__(
        self,
        address: str,
        context: ssl.SSLContext | None = None,
        *,
        path: str = "/any/path",
        timeout_seconds: float = SAFETY_NET_SECONDS,
    ) -> None:
        super().__init__(address, context, timeout_seconds=timeout_seconds)
        try:
            responses = self._upgrade(path)
        except BaseException:
            self.close()
            raise
        self._decoder = Decoder(is_server=False, message_bytes_max=BODY_BYTES_MAX)
        self._decoder.receive_data(responses.unread())
        self._came: deque[dict[str, Any]] = deque()
        self.pongs: list[bytes] = []
        self.close_code: int | None = None
        """With what the server has closed."""

    def _upgrade(self, path: str) -> ResponseDecoder:
        """Ask for the protocol, and return what holds the bytes behind the answer."""
        self.socket.sendall(encode_upgrade_request("localhost", path, make_key()))
        responses = ResponseDecoder()
        while not (found := responses.responses()):
            responses.receive_data(self._read())
        assert found[0].status == 101
        return responses

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def next(self) -> dict[str, Any]:
        while not self._came:
            for event in self._decoder.events():
                if isinstance(event, Message):
                    assert event.text
                    self._came.append(json.loads(event.data))
                elif isinstance(event, Pong):
                    self.pongs.append(event.data)
                elif isinstance(event, Close):
                    self.close_code = event.code
            if not self._came:
                self._decoder.receive_data(self._read())
        return self._came.popleft()

    def say_all(self, messages: Iterable[object]) -> None:
        """Send messages with one write."""
        self.send(encode_texts([json.dumps(message).encode() for message in messages], mask=True))

    def say(self, cmd: str, body: Any = None, **headers: Any) -> None:
        self.say_all([command(cmd, body, **headers)])

    def do(self, cmd: str, body: Any = None, **headers: Any) -> dict[str, Any]:
        """Send a command and give what comes next."""
        self.say(cmd, body, **headers)
        return self.next()


def command(cmd: str, body: Any = None, **headers: Any) -> dict[str, Any]:
    """The message of a command."""
    message: dict[str, Any] = {"headers": {"cmd": cmd, **headers}}
    return message if body is None else {**message, "body": body}
