"""WebSocket (RFC 6455): bytes <-> messages, a whole chunk at a time. The handshake is in `upgrade.py`.

A chunk goes through three steps: one loop finds where its frames begin and end, one XOR unmasks them all, and the
payloads become messages: all at once if every frame is a whole text, the most frequent case.
"""

import codecs
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

import msgspec

from babelbus.errors import LocalProtocolError
from babelbus.wire.buffer import Buffer
from babelbus.wire.websocket.cutter import Cutter
from babelbus.wire.websocket.deflate import Deflate, Inflater
from babelbus.wire.websocket.frames import (
    BINARY,
    CLOSE,
    COMPRESSED,
    CONTROL_BYTES_MAX,
    FIN,
    INVALID_DATA,
    NO_STATUS,
    NORMAL,
    PING,
    PONG,
    PROTOCOL_ERROR,
    TEXT,
    WebSocketError,
    encode_frames,
    unmask,
)

INFLATED_BYTES_MAX = 2**20
"""One call decompresses no further message behind so many bytes: a chunk may hold many bombs."""
_WHOLE_TEXT = FIN | TEXT
_WHOLE_BINARY = FIN | BINARY


class Message(msgspec.Struct, frozen=True, gc=False):
    """A whole message; a `text` is valid UTF-8."""

    data: bytes
    text: bool


class Texts(msgspec.Struct, frozen=True, gc=False):
    """The texts of a chunk of nothing but whole texts, if the reader accepts them together: each valid UTF-8."""

    payloads: list[bytes]


class Ping(msgspec.Struct, frozen=True, gc=False):
    """The peer wants a pong with the same data."""

    data: bytes


class Pong(msgspec.Struct, frozen=True, gc=False):
    """The peer answers a ping, or shows unasked that it is connected."""

    data: bytes


class Close(msgspec.Struct, frozen=True, gc=False):
    """The peer closes; `code` is 1005 if it sent none. Nothing that it sends afterwards is read."""

    code: int
    reason: str


Event = Message | Texts | Ping | Pong | Close


class Decoder:
    """Cuts the bytes of one peer into messages; with `together`, the texts of a chunk may come as one event.

    Attributes:
        error: why nothing more can be read; when `events` has returned the last messages, send
            `encode_close(error.code, str(error))`, then close the connection.
        inflated_bytes: size of the messages that the last call of `events` decompressed.
    """

    def __init__(
        self,
        *,
        is_server: bool,
        message_bytes_max: int,
        deflate: Deflate | None = None,
        together: bool = False,
        room_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        self.error: WebSocketError | None = None
        self.inflated_bytes = 0
        self._message_bytes_max = message_bytes_max
        self._room_bytes = room_bytes
        self._frames: list[tuple[int, bytes]] = []  # put off: the messages before them were decompressed to much
        self._refused: WebSocketError | None = None  # a frame behind all of these
        self._together = together
        self._is_server = is_server
        self._cutter = Cutter(is_server=is_server, message_bytes_max=message_bytes_max, compressed=deflate is not None)
        self._inflater = Inflater(deflate, is_server=is_server) if deflate else None
        self._closed = False
        self._held = Buffer()
        self._gathering = 0  # first byte of the message whose frames are being joined; 0 without such a message
        self._gathered = bytearray()
        self._characters = codecs.getincrementaldecoder("utf-8")()

    def receive_data(self, data: bytes) -> None:
        """Receive bytes from the transport, cut anywhere; parse them with `events`."""
        if self._closed or self.error is not None:
            return
        self._held.add(data)

    def events(self) -> list[Event]:
        """Return the complete events in order; the rest waits for more data.

        Events that were complete before the peer broke the protocol are returned first, with `error` set; then close.

        Raises:
            WebSocketError: the peer broke the protocol and no complete event is left.
        """
        events: list[Event] = []
        self.inflated_bytes = 0
        if self._frames:
            self._interpret(iter(self._frames), events)
        elif self.error is None and self._held.size_bytes >= self._cutter.needed:
            self._read(self._held.take(), events)
        if self._refused is not None and self.error is None and not self._frames:
            self.fail(self._refused)
        if self.error is not None and not events:
            raise self.error
        return events

    @property
    def has_more(self) -> bool:
        """Whether `events` has more to return without more data: it decompresses a bounded amount in a call."""
        return bool(self._frames)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that are kept of a message that is not complete, and of frames that were put off."""
        begun = bool(self._gathering)  # the first frame may be empty
        return self._held.memory_bytes + begun + len(self._gathered) + sum(len(payload) for _, payload in self._frames)

    def fail(self, error: WebSocketError) -> None:
        """Read nothing more, and drop the message that is not complete."""
        self.error = error
        self._drop()

    def _drop(self) -> None:
        self._held.clear()
        self._frames = []
        self._gathering = 0
        self._gathered.clear()

    def _read(self, data: bytes, events: list[Event]) -> None:
        firsts: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        try:
            end = self._cutter.cut(data, firsts, starts, ends)
        except WebSocketError as error:
            self._refused = error
            end = len(data)
        self._held.add(data[end:])
        payloads = (
            unmask(data, starts, ends)
            if self._is_server
            else [data[start:end] for start, end in zip(starts, ends, strict=True)]
        )
        if not self._gathering and firsts.count(_WHOLE_TEXT) == len(firsts) and all(map(bytes.isascii, payloads)):
            if self._together and payloads:
                events.append(Texts(payloads))
            else:
                events += map(Message, payloads, repeat(True))
        else:
            self._interpret(zip(firsts, payloads, strict=True), events)

    def _interpret(self, frames: Iterator[tuple[int, bytes]], events: list[Event]) -> None:
        try:
            self._read_frames(frames, events)
            self._frames = list(frames)
        except WebSocketError as error:
            self.fail(error)
        if self._closed:
            self._drop()

    def _read_frames(self, frames: Iterator[tuple[int, bytes]], events: list[Event]) -> None:
        for first, payload in frames:
            if first == _WHOLE_TEXT:
                if not payload.isascii():
                    _check_text(payload)
                events.append(Message(payload, True))
            elif first == _WHOLE_BINARY:
                events.append(Message(payload, False))
            elif first == FIN | PING:
                events.append(Ping(payload))
            elif first == FIN | PONG:
                events.append(Pong(payload))
            elif first == FIN | CLOSE:
                self._closed = True
                events.append(_read_close(payload))
            else:
                self._gather(first, payload, events)
                if self.inflated_bytes >= INFLATED_BYTES_MAX:
                    return

    def _gather(self, first: int, payload: bytes, events: list[Event]) -> None:
        """Add a fragment or a compressed message, and append the event that it completes."""
        if not self._gathering:
            self._gathering = first
        self._gathered += payload
        text = self._gathering & 15 == TEXT
        last = bool(first & FIN)
        if self._gathering & COMPRESSED and self._inflater is not None:
            if not last:
                return
            data = self._inflater.inflate(self._gathered, min(self._message_bytes_max, self._room_bytes()))
            self.inflated_bytes += len(data)
            if text:
                _check_text(data)
        else:
            if text:
                try:  # as far as the text has arrived: section 8.1 lets a bad text fail early
                    self._characters.decode(payload, last)
                except UnicodeDecodeError as error:
                    raise WebSocketError(INVALID_DATA, "a text is not UTF-8") from error
            if not last:
                return
            data = bytes(self._gathered)
        self._gathering = 0
        self._gathered.clear()
        events.append(Message(data, text))


def _check_text(data: bytes) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise WebSocketError(INVALID_DATA, "a text is not UTF-8") from error


def _read_close(payload: bytes) -> Close:
    if not payload:
        return Close(NO_STATUS, "")
    code = int.from_bytes(payload[:2], "big")
    if len(payload) == 1 or not _may_be_sent(code):
        raise WebSocketError(PROTOCOL_ERROR, f"a close frame with the code {payload[:2].hex()}")
    try:
        return Close(code, payload[2:].decode())
    except UnicodeDecodeError as error:
        raise WebSocketError(INVALID_DATA, "a close reason is not UTF-8") from error


def _may_be_sent(code: int) -> bool:
    # Section 7.4.2 and the registry: 1004 to 1006 and 1015 are never sent, 1016 to 2999 are unassigned.
    return 1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999


def encode_texts(payloads: Sequence[bytes], *, mask: bool = False) -> bytes:
    """Return the frames of texts (UTF-8, not checked), joined for one write. A client masks."""
    return encode_frames(_WHOLE_TEXT, payloads, mask=mask)


def encode_pong(data: bytes, *, mask: bool = False) -> bytes:
    """Return the answer to a ping, with its data.

    Raises:
        LocalProtocolError: `data` has more than 125 bytes.
    """
    return _encode_control(PONG, data, mask)


def encode_close(code: int = NORMAL, reason: str = "", *, mask: bool = False) -> bytes:
    """Return a close frame; 1005 sends no code (the answer to a close without one). A long reason is cut.

    Raises:
        LocalProtocolError: `code` may not be sent in a frame.
    """
    if code == NO_STATUS:
        return _encode_control(CLOSE, b"", mask)
    if not _may_be_sent(code):
        raise LocalProtocolError(f"no close frame carries the code {code}")
    cut = reason.encode(errors="replace")[: CONTROL_BYTES_MAX - 2].decode(errors="ignore")
    return _encode_control(CLOSE, code.to_bytes(2, "big") + cut.encode(), mask)


def _encode_control(opcode: int, data: bytes, mask: bool) -> bytes:
    if len(data) > CONTROL_BYTES_MAX:
        raise LocalProtocolError(f"a control frame of {len(data)} bytes, limit {CONTROL_BYTES_MAX}")
    return encode_frames(FIN | opcode, [data], mask=mask)
