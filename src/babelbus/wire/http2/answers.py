"""The frames that go to a client of HTTP/2: answers, as far as its windows have room (RFC 9113, 5.2)."""

from babelbus.wire.http2 import frames as f
from babelbus.wire.http2.frames import Http2Error, encode_frame

STREAM_WINDOW_BYTES = 256 * 1024
"""A client sends so much of one stream before it waits for room."""
SENT_BYTES_MAX = 65_536
"""Limit of the frames that we send, if the client takes such frames."""


class Stream:
    """A stream that is open, or half closed on one side."""

    __slots__ = ("ended", "left", "room", "sent", "taken", "trailers", "unsent", "window")

    def __init__(self, window: int, *, ended: bool, left: int | None) -> None:
        self.window = window
        """Bytes that the client takes; below 0 after its SETTINGS made windows smaller."""
        self.room = STREAM_WINDOW_BYTES
        """Bytes that the client may send."""
        self.taken = 0
        """Bytes that the receiver took and the client does not know of."""
        self.ended = ended
        """Whether the client has sent its last frame."""
        self.left = left
        """Bytes of the body that the client has named and not sent."""
        self.unsent = b""
        """Bytes that wait for a window; the first `sent` of them are gone."""
        self.sent = 0
        self.trailers: bytes | None = None
        """The header block that ends the stream behind `unsent`."""


class Answers:
    """The open streams, their windows, and the bytes that go."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.out: list[bytes] = []
        self.unsent_bytes = 0
        """Bytes of answers that wait for a window of the client."""
        self._blocked: dict[int, Stream] = {}
        """Streams with bytes that wait for a window, in the order of their turn."""
        self._window = f.WINDOW_BYTES
        self._initial_window = f.WINDOW_BYTES
        self._frame_bytes = f.FRAME_BYTES
        self._table_update = b""
        """Begins the next header block, after the client made its table smaller (RFC 7541, 4.2)."""
        self._grew = False
        """Whether windows of the client grew since answers were sent."""

    # -- what the client says ----------------------------------------------------------------------------------------

    def set(self, name: int, value: int) -> None:
        """Set a setting of the client.

        Raises:
            Http2Error: the window of a stream overflows.
        """
        if name == f.INITIAL_WINDOW_SIZE:
            change = value - self._initial_window
            self._initial_window = value
            self._grew = True
            for stream in self.streams.values():
                stream.window += change
                if stream.window > f.WINDOW_BYTES_MAX:
                    raise Http2Error(f.FLOW_CONTROL_ERROR, "the window of a stream overflows")
        elif name == f.MAX_FRAME_SIZE:
            self._frame_bytes = min(value, SENT_BYTES_MAX)
        elif name == f.HEADER_TABLE_SIZE and value < f.TABLE_BYTES:
            self._table_update = b"\x20"

    def widen(self, size_bytes: int) -> None:
        """Add room to the window of the connection.

        Raises:
            Http2Error: the window overflows.
        """
        self._window += size_bytes
        self._grew = True
        if self._window > f.WINDOW_BYTES_MAX:
            raise Http2Error(f.FLOW_CONTROL_ERROR, "the window of the connection overflows")

    def widen_stream(self, stream: Stream, size_bytes: int) -> bool:
        """Add room to the window of a stream; return whether the window can be so large."""
        stream.window += size_bytes
        self._grew = True
        return stream.window <= f.WINDOW_BYTES_MAX

    def open(self, stream: int, *, ended: bool, left: int | None = None) -> None:
        """Add a stream."""
        self.streams[stream] = Stream(self._initial_window, ended=ended, left=left)

    def forget(self, stream: int) -> None:
        """Remove a stream, and what waits of it."""
        found = self.streams.pop(stream)
        if self._blocked.pop(stream, None) is not None:
            self.unsent_bytes -= len(found.unsent) - found.sent

    def clear(self) -> None:
        """Remove all streams."""
        self.streams.clear()
        self._blocked.clear()
        self.unsent_bytes = 0

    # -- what goes ---------------------------------------------------------------------------------------------------

    def take_output(self) -> bytes:
        """Return and remove the bytes for the client."""
        out = self.out
        if not out:
            return b""
        self.out = []
        return out[0] if len(out) == 1 else b"".join(out)

    @property
    def idle(self) -> bool:
        """Whether no stream is open."""
        return not self.streams

    def room(self, stream: int) -> int:
        """Return how many bytes of a stream can go now; none while bytes of the stream wait."""
        found = self.streams.get(stream)
        return 0 if found is None or found.unsent else max(min(found.window, self._window), 0)

    def waits(self, stream: int) -> bool:
        """Return whether bytes of a stream wait for a window."""
        return stream in self._blocked

    def answer(self, stream: int, head: bytes, body: bytes, trailers: bytes) -> None:
        """Send a whole response: header block, body and trailer block."""
        found = self.streams.get(stream)
        if found is None:
            return
        size = len(body)
        if size <= found.window and size <= self._window and size <= self._frame_bytes and found.ended:
            self._window -= size
            pack = f.HEAD.pack
            self.out += (
                self._encode_headers(f.END_HEADERS, stream, head), pack(size >> 8, size & 255, f.DATA, 0, stream), body,
                pack(0, len(trailers), f.HEADERS, f.END_HEADERS | f.END_STREAM, stream), trailers,
            )  # fmt: skip
            del self.streams[stream]
            return
        self.begin(stream, head)
        self.send(stream, body)
        self.end(stream, trailers)

    def begin(self, stream: int, block: bytes) -> None:
        """Send the header block of a response."""
        if stream in self.streams:
            self.out.append(self._encode_headers(f.END_HEADERS, stream, block))

    def send(self, stream: int, data: bytes) -> None:
        """Send a part of a body, as far as the windows of the client have room; the rest waits."""
        found = self.streams.get(stream)
        if found is None or not data:
            return
        self.unsent_bytes += len(data)
        if found.unsent:
            found.unsent = found.unsent[found.sent :] + data
            found.sent = 0
            return
        found.unsent = data
        while found.unsent and found.window > 0 and self._window > 0:
            self._send_part(stream, found)
        if found.unsent:
            self._blocked[stream] = found

    def end(self, stream: int, block: bytes) -> None:
        """End a stream with a trailer block, behind what waits."""
        found = self.streams.get(stream)
        if found is None:
            return
        if found.unsent:
            found.trailers = block
            return
        self.out.append(self._encode_headers(f.END_HEADERS | f.END_STREAM, stream, block))
        if not found.ended:  # the client need not send the rest (8.1)
            self.out.append(f.encode_reset(stream, f.NO_ERROR))
        del self.streams[stream]

    def reset(self, stream: int, code: int) -> None:
        """End a stream at once."""
        if stream in self.streams:
            self.forget(stream)
            self.out.append(f.encode_reset(stream, code))

    def _encode_headers(self, flags: int, stream: int, block: bytes) -> bytes:
        if self._table_update:
            block, self._table_update = self._table_update + block, b""
        return encode_frame(f.HEADERS, flags, stream, block)

    def _send_part(self, stream: int, found: Stream) -> None:
        """Send one frame of what waits."""
        start = found.sent
        size = min(len(found.unsent) - start, found.window, self._window, self._frame_bytes)
        found.window -= size
        self._window -= size
        self.unsent_bytes -= size
        found.sent += size
        self.out += (f.HEAD.pack(size >> 8, size & 255, f.DATA, 0, stream), found.unsent[start : start + size])
        if found.sent == len(found.unsent):
            found.unsent = b""
            found.sent = 0

    def send_unsent(self) -> None:
        """Send a frame of each stream in turn, until the windows are full; nothing if no window grew."""
        if not self._grew:
            return
        self._grew = False
        ready = [pair for pair in self._blocked.items() if pair[1].window > 0]
        while ready and self._window > 0:
            left = []
            for stream, found in ready:
                if self._window <= 0:
                    break
                self._send_part(stream, found)
                if not found.unsent:
                    del self._blocked[stream]
                    if found.trailers is not None:
                        self.end(stream, found.trailers)
                elif found.window > 0:
                    left.append((stream, found))
            ready = left
