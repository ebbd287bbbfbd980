"""A scripted EventMesh client over TCP, in either framing."""

import json
import socket
import ssl
import struct
from collections import deque
from typing import Any

from babelbus.config import EventmeshSettings
from tests.support.bus import SAFETY_NET_SECONDS

SETTINGS = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, webhook_networks="127.0.0.0/8")
OLD, NEW = 8, 13
HEAD = struct.Struct(">13sii")
AGENT = {
    "env": "P", "subsystem": "5023", "path": "/data", "pid": 32893, "host": "localhost", "port": 8362,
    "version": "2.0.11", "username": "u", "password": "p", "idc": "FT", "group": "G", "purpose": "sub", "unack": 0,
}  # fmt: skip


def frame(surplus: int, header: dict[str, Any] | bytes, body: object = None) -> bytes:
    """A frame as an SDK encodes it: without a body, the old framing has the literal null."""
    head = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    if body is None and surplus != OLD:
        data = b""
    return HEAD.pack(b"EventMesh0000", len(head) + len(data) + surplus, len(head)) + head + data


class MeshClient:
    """One connection; `seq` of each request is a number."""

    def __init__(
        self,
        address: str,
        surplus: int = NEW,
        context: ssl.SSLContext | None = None,
        *,
        timeout_seconds: float = SAFETY_NET_SECONDS,
    ) -> None:
        self.surplus = surplus
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_seconds)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        self._data = b""
        self._came: deque[tuple[dict[str, Any], Any]] = deque()
        self._number = 0

    def __enter__(self) -> "MeshClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def frame(self, cmd: str, body: object = None, seq: str | None = None, **properties: object) -> bytes:
        self._number += 1
        header = {"cmd": cmd, "command": cmd, "code": 0, "seq": seq or str(self._number), "properties": properties}
        return frame(self.surplus, header, body)

    def send(self, cmd: str, body: object = None, seq: str | None = None, **properties: object) -> None:
        self.socket.sendall(self.frame(cmd, body, seq, **properties))

    def next(self) -> tuple[dict[str, Any], Any]:
        """The next frame: header and body."""
        while not self._came:
            data = self.socket.recv(2**16)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._data += data
            while len(self._data) >= HEAD.size:
                magic, length, size = HEAD.unpack_from(self._data)
                assert magic == b"EventMesh0000"
                end = HEAD.size + length - self.surplus
                if len(self._data) < end:
                    break
                whole, self._data = self._data[:end], self._data[end:]
                assert b"\n" not in whole
                header = json.loads(whole[HEAD.size : HEAD.size + size])
                assert header["cmd"] == header["command"]
                body = whole[HEAD.size + size :]
                self._came.append((header, json.loads(body) if body else None))
        return self._came.popleft()

    def ask(self, cmd: str, body: object = None, **properties: object) -> dict[str, Any]:
        """Send a request and give the header of its answer; pushes that come between are kept."""
        self.send(cmd, body, None, **properties)
        seq = str(self._number)
        pushes = []
        while (found := self.next())[0].get("seq") != seq or found[0]["cmd"].endswith("_TO_CLIENT"):
            pushes.append(found)
        self._came.extendleft(reversed(pushes))
        return found[0]

    def hello(self, purpose: str = "sub", **agent: object) -> "MeshClient":
        answer = self.ask("HELLO_REQUEST", {**AGENT, "purpose": purpose, **agent})
        assert (answer["cmd"], answer["code"]) == ("HELLO_RESPONSE", 0), answer
        return self

    def listen(self, *topics: str, mode: str = "CLUSTERING", kind: str = "ASYNC") -> "MeshClient":
        for topic in topics:
            item = {"topic": topic, "mode": mode, "type": kind}
            assert self.ask("SUBSCRIBE_REQUEST", {"topicList": [item]})["code"] == 0
        assert self.ask("LISTEN_REQUEST")["code"] == 0
        return self

    def publish(self, topic: str, text: str, **properties: str) -> dict[str, Any]:
        return self.ask("ASYNC_MESSAGE_TO_SERVER", {"topic": topic, "properties": properties, "body": text})

    def push(self) -> tuple[dict[str, Any], Any]:
        """The next push, acknowledged as the Java SDK does, with the body once more as a string."""
        header, body = self.next()
        assert header["cmd"].endswith("_TO_CLIENT"), header
        self.send(f"{header['cmd']}_ACK", json.dumps(body), seq=header["seq"])
        return header, body

    def is_closed(self) -> bool:
        """Whether the server closes the connection without another word."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True
