"""The server's side of gRPC without I/O (gRPC's PROTOCOL-HTTP2): bytes -> calls and their messages, answers -> bytes.

A unary call is one event when its message has come whole. A call that cannot be carried out is answered here.
"""

import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from babelbus.errors import BabelbusError
from babelbus.wire.http2 import connection as c
from babelbus.wire.http2 import frames as f
from babelbus.wire.http2 import requests as r
from babelbus.wire.http2.connection import Connection, Data, Opened
from babelbus.wire.http2.headers import encode_block
from babelbus.wire.http2.requests import Head

PREFIX: Final = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its size."""

TURN_BYTES_MAX: Final = 2**20
"""One call returns no further message behind so many decompressed bytes: a chunk may hold many bombs."""
MESSAGE_BYTES: Final = 512
"""Each message counts as so many decompressed bytes more: a chunk may hold 26,000 that are empty."""
_STATUS_200: Final = b"\x88"
_HEAD: Final = _STATUS_200 + encode_block([(b"content-type", r.CONTENT_TYPE)])
_DONE: Final = encode_block([(b"grpc-status", b"0")])
_ENCODINGS: Final = encode_block([(b"grpc-accept-encoding", b"identity,gzip")])


class CallLimit:
    """How many calls of all connections may be open."""

    def __init__(self, count_max: int) -> None:
        self.count = 0
        self.count_max = count_max


class Asked(msgspec.Struct, frozen=True, gc=False):
    """A unary call with its message; it fails at `deadline`."""

    stream: int
    path: bytes
    deadline: float | None
    message: bytes


class Began(msgspec.Struct, frozen=True, gc=False):
    """A streaming call began; it fails at `deadline`."""

    stream: int
    path: bytes
    deadline: float | None


class Came(msgspec.Struct, frozen=True, gc=False):
    """A message of a streaming call; its reader gives `size_bytes` back to `take`."""

    stream: int
    message: bytes
    size_bytes: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The client sends no more messages of a streaming call."""

    stream: int


class Cancelled(msgspec.Struct, frozen=True, gc=False):
    """A call is over, without an answer."""

    stream: int


Event = Asked | Began | Came | Finished | Cancelled


class _Call:
    __slots__ = ("began", "deadline", "encoding", "is_stream", "message", "needed", "parts", "path", "size_bytes")

    def __init__(self, head: Head, deadline: float | None, *, is_stream: bool) -> None:
        self.path = head.path
        self.deadline = deadline
        self.encoding = head.encoding
        self.is_stream = is_stream
        self.began = False
        """Whether the header block of the answer has gone."""
        self.message: bytes | None = None
        """The message of a unary call that has not ended."""
        self.parts: list[bytes] = []
        self.size_bytes = 0
        self.needed = PREFIX.size
        """Bytes before which no message can be read."""


class RefusedMessageError(BabelbusError):
    """A message that cannot be read: the call fails with a status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Calls:
    """The calls of one client. `methods` says of each path whether it is a streaming call."""

    def __init__(
        self,
        methods: Mapping[bytes, bool],
        limit: CallLimit,
        *,
        streams_max: int,
        message_bytes_max: int,
        inflated_bytes_max: Callable[[], int],
    ) -> None:
        self._methods = methods
        self._limit = limit
        self._message_bytes_max = message_bytes_max
        self._inflated_bytes_max = inflated_bytes_max
        self._calls: dict[int, _Call] = {}
        self._held_bytes = 0
        """Memory of messages that have not come whole."""
        self._events: list[Event] = []
        self._came: deque[c.Event] = deque()
        """The frames that are not handled, because those in front of them were much work."""
        self._turn_bytes = 0
        """The work of the last call of `receive_data`, as decompressed bytes."""
        self.connection = Connection(streams_max=streams_max)
        self.answers = self.connection.answers

    # -- what comes --------------------------------------------------------------------------------------------------

    @property
    def open(self) -> Sequence[int]:
        """The streams of all open calls."""
        return list(self._calls)

    @property
    def unfinished_bytes(self) -> int:
        """Memory of frames and messages that have not come whole."""
        came_bytes = sum([len(event.data) for event in self._came if type(event) is Data])
        return self.connection.unfinished_bytes + self._held_bytes + came_bytes

    @property
    def busy(self) -> bool:
        """Whether `receive_data` has more to return without more data: it does a bounded amount of work in a call."""
        return self.connection.busy or bool(self._came)

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Return what some bytes say; `now` is in seconds of a clock that is never set.

        Raises:
            Http2Error: the client broke the protocol; send `answers.take_output` and close the connection.
        """
        came = self._came
        came += self.connection.receive_data(data, now)
        self._turn_bytes = 0
        while came and self._turn_bytes < TURN_BYTES_MAX:
            event = came.popleft()
            kind = type(event)
            if kind is Data:
                self._receive(event)  # type: ignore[arg-type]
            elif kind is Opened:
                self._open(event, now)  # type: ignore[arg-type]
            elif self._forget(event.stream):
                self._events.append(Cancelled(event.stream))
        events, self._events = self._events, []
        return events

    def _open(self, opened: Opened, now: float) -> None:
        stream, head = opened.stream, opened.head
        if head.malformed:
            self.answers.reset(stream, f.PROTOCOL_ERROR)
            return
        is_stream = self._methods.get(head.path)
        if head.status != r.OK:
            self._refuse(stream, head.status, head.text, head.http_status)
        elif is_stream is None:
            self._refuse(stream, r.UNIMPLEMENTED, "there is no such method")
        elif self._limit.count >= self._limit.count_max:
            self._refuse(stream, r.RESOURCE_EXHAUSTED, f"{self._limit.count_max} calls are open")
        else:
            self._limit.count += 1
            deadline = None if head.timeout_seconds is None else now + head.timeout_seconds
            call = self._calls[stream] = _Call(head, deadline, is_stream=is_stream)
            if is_stream:
                self._events.append(Began(stream, head.path, deadline))
            if opened.ended:
                self._finish(stream, call)

    def _receive(self, event: Data) -> None:
        stream, data = event.stream, event.data
        call = self._calls.get(stream)
        if call is None:
            return
        try:
            taken, rest = self._cut(stream, call, data)
        except RefusedMessageError as error:
            if self._forget(stream):
                self._refuse(stream, error.status, str(error), began=call.began)
                if call.is_stream:
                    self._events.append(Cancelled(stream))
            return
        if rest:
            self._came.appendleft(Data(stream, rest, event.ended))
        if event.ended and not rest:
            self._finish(stream, call)
        elif taken:
            self.connection.take(stream, taken)

    def _cut(self, stream: int, call: _Call, data: bytes) -> tuple[int, bytes]:
        """Read the messages that came whole; return how many bytes nobody will give back, and what is put off.

        Raises:
            RefusedMessageError: the call fails.
        """
        before = 0
        taken = len(data)
        if call.parts:
            before = call.size_bytes
            self._hold(call, data)
            if call.size_bytes < call.needed:
                return taken, b""
            data = b"".join(call.parts)
            self._release(call)
        start, size = 0, len(data)
        while size - start >= PREFIX.size:
            if self._turn_bytes >= TURN_BYTES_MAX:
                return taken - (size - start), data[start:]
            is_compressed, length = PREFIX.unpack_from(data, start)
            if length > self._message_bytes_max:
                limit = self._message_bytes_max
                raise RefusedMessageError(r.RESOURCE_EXHAUSTED, f"a message of {length} bytes, the limit is {limit}")
            end = start + PREFIX.size + length
            if end > size:
                break
            message = data[start + PREFIX.size : end]
            self._turn_bytes += MESSAGE_BYTES
            if is_compressed:
                message = self._inflate(call, is_compressed, message)
            if call.is_stream:
                fresh = end - max(start, before)
                taken -= fresh
                self._events.append(Came(stream, message, fresh))
            elif call.message is None:
                call.message = message
                self._held_bytes += len(message)
            else:
                raise RefusedMessageError(r.INTERNAL, "a call of this method has one message")
            start = end
        if start < size:
            call.needed = PREFIX.size if size - start < PREFIX.size else end - start
            self._hold(call, data[start:])
        return taken, b""

    def _hold(self, call: _Call, data: bytes) -> None:
        if data:
            call.parts.append(data)
            call.size_bytes += len(data)
            self._held_bytes += len(data) + 64

    def _release(self, call: _Call) -> None:
        self._held_bytes -= call.size_bytes + 64 * len(call.parts)
        call.parts = []
        call.size_bytes = 0

    def _inflate(self, call: _Call, mark: int, data: bytes) -> bytes:
        if mark != 1 or call.encoding != r.GZIP:
            raise RefusedMessageError(r.INTERNAL, "a compressed message without grpc-encoding")
        limit = min(self._message_bytes_max, self._inflated_bytes_max())
        inflater = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            message = inflater.decompress(data, limit + 1)
        except zlib.error:
            self._turn_bytes += limit  # it may have been so much work
            raise RefusedMessageError(r.INTERNAL, "a compressed message cannot be read") from None
        self._turn_bytes += len(message)
        if len(message) > limit:
            raise RefusedMessageError(r.RESOURCE_EXHAUSTED, f"a message is longer than {limit} bytes")
        if not inflater.eof or inflater.unused_data:
            raise RefusedMessageError(r.INTERNAL, "a compressed message is cut")
        return message

    def _finish(self, stream: int, call: _Call) -> None:
        """Handle that the client sends no more of a call."""
        if call.is_stream and not call.parts:
            self._events.append(Finished(stream))
        elif call.message is not None and not call.parts:
            message, call.message = call.message, None
            self._held_bytes -= len(message)
            self._events.append(Asked(stream, call.path, call.deadline, message))
        else:
            self.fail(stream, r.INTERNAL, "the call ended before its message")
            if call.is_stream:
                self._events.append(Cancelled(stream))

    def _forget(self, stream: int) -> bool:
        """Remove a call; return whether it was open."""
        call = self._calls.pop(stream, None)
        if call is None:
            return False
        self._limit.count -= 1
        if call.message is not None:
            self._held_bytes -= len(call.message)
        if call.parts:
            self._release(call)
        return True

    def close(self) -> None:
        """Remove all calls: the connection is gone."""
        self._came.clear()
        for stream in self.open:
            self._forget(stream)
        self.connection.close()

    # -- what goes ---------------------------------------------------------------------------------------------------

    def take(self, stream: int, size_bytes: int) -> None:
        """Return bytes of a streaming call to its window."""
        self.connection.take(stream, size_bytes)

    def answer(self, stream: int, message: bytes) -> None:
        """Answer a unary call."""
        if self._forget(stream):
            self.answers.answer(stream, _HEAD, PREFIX.pack(0, len(message)) + message, _DONE)

    def begin(self, stream: int) -> None:
        """Send the head of the answers to a streaming call."""
        call = self._calls.get(stream)
        if call is not None and not call.began:
            call.began = True
            self.answers.begin(stream, _HEAD)

    def send(self, stream: int, messages: Sequence[bytes]) -> None:
        """Send messages of a streaming call."""
        parts: list[bytes] = []
        for message in messages:
            parts += (PREFIX.pack(0, len(message)), message)
        self.answers.send(stream, b"".join(parts))

    def end(self, stream: int) -> None:
        """End a streaming call, behind all messages."""
        self.begin(stream)
        if self._forget(stream):
            self.answers.end(stream, _DONE)

    def fail(self, stream: int, status: int, text: str) -> None:
        """End a call with a status."""
        call = self._calls.get(stream)
        if call is not None and self._forget(stream):
            self._refuse(stream, status, text, began=call.began)

    def abort(self, stream: int, status: int, text: str) -> None:
        """End a call with a status, or with a reset if a part of a message is sent: the rest of it is dropped."""
        if not self.answers.waits(stream):
            self.fail(stream, status, text)
        elif self._forget(stream):
            self.answers.reset(stream, f.CANCEL)

    def _refuse(self, stream: int, status: int, text: str, http_status: int = 200, *, began: bool = False) -> None:
        block = encode_block([(b"grpc-status", b"%d" % status), (b"grpc-message", r.encode_message(text))])
        if not began:  # head and trailers in one block
            head = _HEAD if http_status == 200 else b"\x08\x03%d" % http_status + _HEAD[len(_STATUS_200) :]
            block = head + (_ENCODINGS if status == r.UNIMPLEMENTED else b"") + block
        self.answers.end(stream, block)
