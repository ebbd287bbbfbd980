"""The server's side of one HTTP/2 connection without I/O (RFC 9113): bytes -> events, answers -> bytes.

Windows are given back as soon as bytes come, but for those of a stream whose receiver puts them off (`take`). So
the reader of the events bounds what it keeps, and no client waits for another stream.
"""

from collections.abc import Callable

import msgspec

from babelbus.wire.http2 import frames as f
from babelbus.wire.http2.answers import STREAM_WINDOW_BYTES, Answers
from babelbus.wire.http2.frames import Http2Error, encode_frame
from babelbus.wire.http2.headers import LIST_BYTES_MAX, HeaderDecoder
from babelbus.wire.http2.requests import Head

CONNECTION_WINDOW_BYTES = 2**20
BLOCK_BYTES_MAX = 32 * 1024
"""Limit of a header block with its CONTINUATION frames, each of which counts with its head."""
BLOCKS_MAX = 256
"""Header blocks of one turn of the event loop; frames behind them wait for the next turn."""
GOODBYE = b"goodbye!"
"""The ping behind a goodbye: its answer says that the client has heard the goodbye."""
STRIKES_MAX = 2000
STRIKES_PER_SECOND = 200
"""Frames that cost work and bring nothing: resets, pings, settings, empty frames, frames of closed streams, refusals.
A client may send so many at once, and so many in each second; more end the connection."""


class Opened(msgspec.Struct, frozen=True, gc=False):
    """A request began; `ended` says that it has no body."""

    stream: int
    head: Head
    ended: bool


class Data(msgspec.Struct, frozen=True, gc=False):
    """Bytes of a body came; `ended` says that no more come."""

    stream: int
    data: bytes
    ended: bool


class Aborted(msgspec.Struct, frozen=True, gc=False):
    """The client, or a fault of the client, has ended a stream."""

    stream: int


Event = Opened | Data | Aborted


class Connection:
    """The frames of one client. Spent once it has raised; `answers.take_output` then has the GOAWAY."""

    def __init__(self, *, streams_max: int) -> None:
        self.established = False
        """Whether the preface and the settings of the client came."""
        self.last_stream = 0
        """The last stream that is carried out."""
        self._last_seen = 0
        """The last stream that the client began."""
        self.answers = Answers()
        self._streams_max = streams_max
        self._headers = HeaderDecoder()
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._needed = len(f.PREFACE)
        """Bytes before which nothing can be read."""
        self._has_preface = False
        self._block: bytearray | None = None
        """A header block that waits for CONTINUATION frames, and what its HEADERS frame said."""
        self._block_bytes = self._block_stream = self._block_flags = 0
        self._room = CONNECTION_WINDOW_BYTES
        self._leaving = False
        """Whether the client has been told that no further streams are carried out."""
        self._saying_goodbye = False
        """Whether the client has been told that it should begin no further streams."""
        self._blocks_left = 0
        """Header blocks that this turn may still read."""
        self.busy = False
        """Whether frames that came whole wait for the next turn."""
        self._strikes = 0.0
        self._struck_at = 0.0
        self._events: list[Event] = []
        settings = {
            f.MAX_CONCURRENT_STREAMS: streams_max,
            f.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
            f.MAX_HEADER_LIST_SIZE: LIST_BYTES_MAX,
        }
        self.answers.out += (
            f.encode_settings(settings),
            f.encode_window_update(0, CONNECTION_WINDOW_BYTES - f.WINDOW_BYTES),
        )

    # -- what comes --------------------------------------------------------------------------------------------------

    @property
    def unfinished_bytes(self) -> int:
        """Memory of frames and header blocks that have not come whole."""
        return self._parts_bytes + 64 * len(self._parts) + len(self._block or b"")

    def receive_data(self, data: bytes, now: float) -> list[Event]:
        """Return what some bytes say; `now` is in seconds of a clock that is never set.

        Raises:
            Http2Error: the client broke the protocol; send `answers.take_output` and close the connection.
        """
        if self._parts:
            self._parts.append(data)
            self._parts_bytes += len(data)
            if self._parts_bytes < self._needed:
                return []
            data = b"".join(self._parts)
            self._parts = []
            self._parts_bytes = 0
        if self._strikes:
            self._strikes = max(self._strikes - (now - self._struck_at) * STRIKES_PER_SECOND, 0)
        self._struck_at = now
        try:
            rest = self._read(data)
        except Http2Error as error:
            self.fail(error.code, str(error))
            raise
        if rest < len(data):
            self._parts.append(data[rest:])
            self._parts_bytes = len(data) - rest
        self.answers.send_unsent()
        self._give_back()
        events, self._events = self._events, []
        return events

    def _read(self, data: bytes) -> int:
        """Handle the frames that came whole; return where the next frame begins."""
        start, size = 0, len(data)
        if not self._has_preface:
            if not f.PREFACE.startswith(data[: len(f.PREFACE)]):
                raise Http2Error(f.PROTOCOL_ERROR, "the client does not speak HTTP/2")
            if size < len(f.PREFACE):
                return 0
            self._has_preface = True
            start = len(f.PREFACE)
        handlers, unpack, head_bytes = _HANDLERS, f.HEAD.unpack_from, f.HEAD.size
        self._blocks_left = BLOCKS_MAX
        self.busy = False
        while size - start >= head_bytes:
            if not self._blocks_left:
                self.busy = True
                break
            high, low, kind, flags, stream = unpack(data, start)
            length = high << 8 | low
            if length > f.FRAME_BYTES:
                raise Http2Error(f.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = start + head_bytes + length
            if end > size:
                self._needed = head_bytes + length
                return start
            if not self.established and (kind != f.SETTINGS or flags & f.ACK):
                raise Http2Error(f.PROTOCOL_ERROR, "the client does not begin with its settings")
            if self._block is not None and kind != f.CONTINUATION:
                raise Http2Error(f.PROTOCOL_ERROR, "a header block is interrupted")
            handler = handlers.get(kind)
            if handler is None:
                self._strike()  # frames of extensions are ignored (4.1)
            else:
                handler(self, flags, stream & f.STREAM_MAX, data[start + head_bytes : end])
            start = end
        self._needed = head_bytes
        return start

    def _strike(self) -> None:
        self._strikes += 1
        if self._strikes > STRIKES_MAX:
            raise Http2Error(f.ENHANCE_YOUR_CALM, "too many frames that bring nothing")

    def _idle(self, stream: int) -> bool:
        """Return whether a stream has not begun."""
        return stream > self._last_seen or not stream & 1

    def _settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise Http2Error(f.PROTOCOL_ERROR, "SETTINGS of a stream")
        if flags & f.ACK:
            if payload:
                raise Http2Error(f.FRAME_SIZE_ERROR, "an acknowledgement of settings with settings")
            return
        self.established = True
        self._strike()
        for name, value in f.read_settings(payload):
            self.answers.set(name, value)
        self.answers.out.append(encode_frame(f.SETTINGS, f.ACK, 0))

    def _ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            raise Http2Error(f.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise Http2Error(f.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        self._strike()
        if not flags & f.ACK:
            self.answers.out.append(encode_frame(f.PING, f.ACK, 0, payload))
        elif payload == GOODBYE and self._saying_goodbye:
            self.end_goodbye()

    def _goaway(self, _flags: int, stream: int, payload: bytes) -> None:
        """Check a goodbye: streams that are open go on (6.8)."""
        if stream:
            raise Http2Error(f.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise Http2Error(f.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self._strike()

    def _refuse(self, _flags: int, _stream: int, _payload: bytes) -> None:
        raise Http2Error(f.PROTOCOL_ERROR, "a client cannot push")

    def _prioritise(self, _flags: int, stream: int, payload: bytes) -> None:
        if not stream:
            raise Http2Error(f.PROTOCOL_ERROR, "PRIORITY without a stream")
        if len(payload) != 5:
            raise Http2Error(f.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        self._strike()

    def _reset(self, _flags: int, stream: int, payload: bytes) -> None:
        f.read_number(payload)
        if self._idle(stream):
            raise Http2Error(f.PROTOCOL_ERROR, "RST_STREAM of a stream that has not begun")
        self._strike()
        if stream in self.answers.streams:
            self.answers.forget(stream)
            self._events.append(Aborted(stream))

    def _update_window(self, _flags: int, stream: int, payload: bytes) -> None:
        size_bytes = f.read_number(payload) & f.WINDOW_BYTES_MAX
        found = self.answers.streams.get(stream)
        if not stream:
            if not size_bytes:
                raise Http2Error(f.PROTOCOL_ERROR, "WINDOW_UPDATE of 0 bytes")
            self.answers.widen(size_bytes)
        elif found is not None:
            if not size_bytes:
                self._fault(stream, f.PROTOCOL_ERROR)
            elif not self.answers.widen_stream(found, size_bytes):
                self._fault(stream, f.FLOW_CONTROL_ERROR)
        elif self._idle(stream):
            raise Http2Error(f.PROTOCOL_ERROR, "WINDOW_UPDATE of a stream that has not begun")

    def _data(self, flags: int, stream: int, payload: bytes) -> None:
        size_bytes = len(payload)
        self._room -= size_bytes
        if self._room < 0:
            raise Http2Error(f.FLOW_CONTROL_ERROR, "more DATA than the window of the connection")
        data = f.without_padding(flags, payload) if flags & f.PADDED else payload
        found = self.answers.streams.get(stream)
        if found is None:
            if self._idle(stream):
                raise Http2Error(f.PROTOCOL_ERROR, "DATA of a stream that has not begun")
            if not data:
                self._strike()
            return  # on its way before the client saw that the stream has ended
        if found.ended:
            self._fault(stream, f.STREAM_CLOSED)
            return
        found.room -= size_bytes
        if found.room < 0:
            self._fault(stream, f.FLOW_CONTROL_ERROR)
            return
        ended = bool(flags & f.END_STREAM)
        if not data and not ended:
            self._strike()
        if found.left is not None:
            found.left -= len(data)
            if found.left < 0 or (ended and found.left):
                self._fault(stream, f.PROTOCOL_ERROR)  # malformed (8.1.1)
                return
        found.ended = ended
        if size_bytes != len(data):
            self.take(stream, size_bytes - len(data))
        self._events.append(Data(stream, data, ended))

    # -- header blocks -----------------------------------------------------------------------------------------------

    def _begin_block(self, flags: int, stream: int, payload: bytes) -> None:
        if not stream & 1:
            raise Http2Error(f.PROTOCOL_ERROR, f"HEADERS of stream {stream}")
        block = f.without_padding(flags, payload)
        if flags & f.PRIORITISED:
            if len(block) < 5:
                raise Http2Error(f.FRAME_SIZE_ERROR, "HEADERS without their priority")
            block = block[5:]
        if flags & f.END_HEADERS:
            self._end_block(flags, stream, block)
            return
        self._block = bytearray(block)
        self._block_bytes = f.HEAD.size + len(block)
        self._block_stream, self._block_flags = stream, flags

    def _continue_block(self, flags: int, stream: int, payload: bytes) -> None:
        block = self._block
        if block is None or stream != self._block_stream:
            raise Http2Error(f.PROTOCOL_ERROR, "CONTINUATION of no header block")
        block += payload
        self._block_bytes += f.HEAD.size + len(payload)
        if self._block_bytes > BLOCK_BYTES_MAX:
            raise Http2Error(f.ENHANCE_YOUR_CALM, f"a header block of more than {BLOCK_BYTES_MAX} bytes")
        if flags & f.END_HEADERS:
            self._block = None
            self._end_block(self._block_flags, stream, bytes(block))

    def _end_block(self, flags: int, stream: int, block: bytes) -> None:
        self._blocks_left -= 1
        head = self._headers.decode(block)
        ended = bool(flags & f.END_STREAM)
        found = self.answers.streams.get(stream)
        if found is not None:
            if found.ended or not ended:  # trailers end a stream (8.1)
                self._fault(stream, f.STREAM_CLOSED if found.ended else f.PROTOCOL_ERROR)
                return
            if found.left:
                self._fault(stream, f.PROTOCOL_ERROR)
                return
            found.ended = True
            self._events.append(Data(stream, b"", ended=True))
            return
        if stream <= self._last_seen:
            if not ended:
                raise Http2Error(f.STREAM_CLOSED, f"HEADERS of stream {stream}, which is closed")
            self._strike()  # trailers on their way before the client saw that the stream has ended
            return
        self._last_seen = stream
        if self._leaving:
            return  # the GOAWAY says that the stream is not carried out
        self.last_stream = stream
        if len(self.answers.streams) >= self._streams_max:
            self._strike()
            self.answers.out.append(f.encode_reset(stream, f.REFUSED_STREAM))
            return
        if ended and head.body_bytes:
            head = Head(malformed=True)
        self.answers.open(stream, ended=ended, left=head.body_bytes)
        self._events.append(Opened(stream, head, ended))

    # -- windows of the client ---------------------------------------------------------------------------------------

    def take(self, stream: int, size_bytes: int) -> None:
        """Return bytes of a stream to its window, once half of the window is used."""
        found = self.answers.streams.get(stream)
        if found is None or found.ended:
            return
        found.taken += size_bytes
        if found.taken >= STREAM_WINDOW_BYTES // 2:
            self.answers.out.append(f.encode_window_update(stream, found.taken))
            found.room += found.taken
            found.taken = 0

    def _give_back(self) -> None:
        if self._room < CONNECTION_WINDOW_BYTES // 2:
            self.answers.out.append(f.encode_window_update(0, CONNECTION_WINDOW_BYTES - self._room))
            self._room = CONNECTION_WINDOW_BYTES

    # -- what goes ---------------------------------------------------------------------------------------------------

    def ping(self) -> None:
        """Send a ping: the client answers while it lives."""
        self.answers.out.append(encode_frame(f.PING, 0, 0, b"babelbus"))

    def leave(self) -> None:
        """Send a goodbye: open streams go on, and so do streams that are on their way, for one round trip (6.8)."""
        if not self._saying_goodbye:
            self._saying_goodbye = True
            self.answers.out += (f.encode_goaway(f.STREAM_MAX, f.NO_ERROR), encode_frame(f.PING, 0, 0, GOODBYE))

    def end_goodbye(self) -> None:
        """Send the last stream that is carried out: later streams are not."""
        if not self._leaving:
            self._leaving = True
            self.answers.out.append(f.encode_goaway(self.last_stream, f.NO_ERROR))

    @property
    def has_left(self) -> bool:
        """Whether no further streams are carried out; a client that has not begun has no streams on their way."""
        return self._leaving or not self.established

    def close(self) -> None:
        """Drop all streams, and what has not come whole."""
        self.busy = False
        self.answers.clear()
        self._parts = []
        self._parts_bytes = 0
        self._block = None

    def fail(self, code: int, text: str) -> None:
        """Send the last word of a connection that is closed for an error."""
        self._leaving = True
        self.close()
        self.answers.out.append(f.encode_goaway(self.last_stream, code, text))

    def _fault(self, stream: int, code: int) -> None:
        """End a stream for an error of the client; a client may cause some such errors alone (CVE-2025-8671)."""
        self._strike()
        self.answers.reset(stream, code)
        self._events.append(Aborted(stream))


_HANDLERS: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    f.DATA: Connection._data,
    f.HEADERS: Connection._begin_block,
    f.PRIORITY: Connection._prioritise,
    f.RST_STREAM: Connection._reset,
    f.SETTINGS: Connection._settings,
    f.PUSH_PROMISE: Connection._refuse,
    f.PING: Connection._ping,
    f.GOAWAY: Connection._goaway,
    f.WINDOW_UPDATE: Connection._update_window,
    f.CONTINUATION: Connection._continue_block,
}
"""By kind; a table of bound methods would hold the connection in a cycle."""
