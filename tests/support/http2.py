"""HTTP/2 and gRPC as a client writes and reads them, byte by byte; header blocks by the library hpack."""

import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import hpack

from tests.support.bus import SAFETY_NET_SECONDS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
FIELDS = {
    ":method": "POST", ":scheme": "http", ":path": "/s/unary", ":authority": "localhost",
    "te": "trailers", "content-type": "application/grpc",
}  # fmt: skip


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def number(self) -> int:
        """The last number of RST_STREAM, GOAWAY without a text and WINDOW_UPDATE."""
        return int.from_bytes(self.payload[4:8] if self.kind == GOAWAY else self.payload, "big")


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def settings(**values: int) -> bytes:
    names = {"table": 1, "push": 2, "streams": 3, "window": 4, "frame": 5}
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", names[name], value) for name, value in values.items()))


def number(kind: int, stream: int, value: int) -> bytes:
    return frame(kind, 0, stream, value.to_bytes(4, "big"))


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(data).to_bytes(4, "big") + data


def block(encoder: hpack.Encoder | None = None, /, **changed: str | None) -> bytes:
    """The header block of a call; a field that is `None` is left out, `_` in names stands for `-`."""
    named = {(":" if f":{name}" in FIELDS else "") + name.replace("_", "-"): text for name, text in changed.items()}
    fields = {name: text for name, text in (FIELDS | named).items() if text is not None}
    return bytes((encoder or hpack.Encoder()).encode(list(fields.items())))


def call(stream: int, data: bytes, fields: bytes | None = None) -> bytes:
    """A unary call whose message is `data`."""
    head = frame(HEADERS, END_HEADERS, stream, block() if fields is None else fields)
    return head + frame(DATA, END_STREAM, stream, message(data))


def frames(data: bytes) -> Iterator[Frame]:
    """The frames of whole bytes."""
    start = 0
    while start < len(data):
        end = start + 9 + int.from_bytes(data[start : start + 3], "big")
        assert end <= len(data)
        stream = int.from_bytes(data[start + 5 : start + 9], "big")
        yield Frame(data[start + 3], data[start + 4], stream, data[start + 9 : end])
        start = end


def fields_of(found: Iterable[Frame], stream: int) -> dict[str, str]:
    """The header fields that came on a stream."""
    decoder, fields = hpack.Decoder(), {}
    for one in found:
        if one.kind == HEADERS:
            decoded = decoder.decode(one.payload)
            if one.stream == stream:
                fields.update({str(name): str(value) for name, value in decoded})
    return fields


def body_of(found: Iterable[Frame], stream: int) -> bytes:
    return b"".join([one.payload for one in found if (one.kind, one.stream) == (DATA, stream)])


class RawClient:
    """One connection. It grants the server no more room than it has at first, unless `grant` is called."""

    def __init__(self, address: str, **values: int) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=SAFETY_NET_SECONDS)
        self.came: list[Frame] = []
        self._data = b""
        self._room = {0: 65_535}
        self.socket.sendall(PREFACE + settings(**values))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def grant(self, stream: int, size_bytes: int) -> None:
        self.send(number(WINDOW_UPDATE, stream, size_bytes))

    def read(self) -> bool:
        """Read what has come into `came`; `False`: the server closed."""
        try:
            data = self.socket.recv(2**16)
        except ConnectionResetError:
            data = b""
        self._data += data
        whole = 0
        while len(self._data) - whole >= 9:
            end = whole + 9 + int.from_bytes(self._data[whole : whole + 3], "big")
            if end > len(self._data):
                break
            whole = end
        for one in frames(self._data[:whole]):
            self.came.append(one)
            if one.kind == WINDOW_UPDATE:
                self._room[one.stream] = self._room.get(one.stream, 2**18) + one.number
        self._data = self._data[whole:]
        return bool(data)

    def until(self, kind: int, stream: int = 0, flags: int = 0, number: int = 0) -> Frame:
        """The first frame of a kind that has come or comes, or that with a number."""
        while True:
            found = [one for one in self.came if (one.kind, one.stream, one.flags & flags) == (kind, stream, flags)]
            if len(found) > number:
                return found[number]
            assert self.read(), f"the server closed after {self.came[-3:]}"

    def until_closed(self) -> list[Frame]:
        while self.read():
            pass
        return self.came

    def status(self, stream: int) -> dict[str, str]:
        """The header fields of a call that ends."""
        self.until(HEADERS, stream, END_STREAM)
        return fields_of(self.came, stream)

    def upload(self, stream: int, data: bytes) -> None:
        """Send a part of a body as fast as the server gives room."""
        start = 0
        while start < len(data):
            size = min(len(data) - start, 16_384, self._room[0], self._room.get(stream, 2**18))
            if size <= 0:
                if not self.read():
                    raise ConnectionResetError("the server closed")
                continue
            self._room[0] -= size
            self._room[stream] = self._room.get(stream, 2**18) - size
            self.send(frame(DATA, 0, stream, data[start : start + size]))
            start += size


class Upload(RawClient):
    """A unary call that sends a part of a long message."""

    def __init__(self, address: str, path: str, size_bytes: int) -> None:
        super().__init__(address)
        self.send(frame(HEADERS, END_HEADERS, 1, block(path=path)))
        self.upload(1, b"\0" + size_bytes.to_bytes(4, "big"))

    def sendall(self, data: bytes) -> None:
        self.upload(1, data)

    def recv(self, size_bytes: int) -> bytes:
        return self.socket.recv(size_bytes)

    def shutdown(self, how: int) -> None:
        self.socket.shutdown(how)

    def close(self) -> None:
        self.socket.close()
