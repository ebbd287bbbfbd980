"""Frames of EventMesh over TCP: bytes -> frames and back, in both framings (docs/specifications/eventmesh.md, 3.1).

A frame is a magic, two lengths L and H, a JSON header of H bytes and a body. Released SDKs disagree on what L counts
beside header and body: `OLD` or `NEW` bytes more. The first frame of a connection says which framing its client has,
and both directions keep it.
"""

import struct
from functools import cache
from typing import Final

import msgspec

from babelbus.errors import UNREADABLE, RemoteProtocolError
from babelbus.protocols.eventmesh.messages import CLOUD_EVENT, HELLO, MESSAGE, RECOMMEND, Flavour, Frame, Header

MAGIC: Final = b"EventMesh0000"
_HEAD: Final = struct.Struct(">13sii")
HEAD_BYTES: Final = _HEAD.size
OLD: Final = 8
NEW: Final = 13
_SURPLUSES: Final = (OLD, NEW, 21, 0)
"""Bytes that L may count beside header and body: framings of SDKs, and of clients written from the document alone."""
FRAME_BYTES_MAX: Final = 4 * 2**20
TOO_LARGE: Final = f"the message does not fit into a frame of {FRAME_BYTES_MAX} bytes"
NO_BODY: Final = b"null"
NEWLINE: Final = 0x0A

_decode_header = msgspec.json.Decoder(Header).decode
_encode = msgspec.json.Encoder().encode
_PROPERTIES: Final = {
    flavour: b',"properties":{"protocoltype":"%b"}}' % flavour.encode() for flavour in (MESSAGE, CLOUD_EVENT)
}
TAILS: Final = {flavour: b'"' + properties for flavour, properties in _PROPERTIES.items()}
"""The header of a message behind its `seq`, which is a string, by flavour."""


class MalformedFrameError(RemoteProtocolError):
    """The bytes are no frame, or one over the limit."""


class FrameDecoder:
    """Bytes of one connection -> frames, a whole chunk at a time.

    Attributes:
        surplus: what L counts beside header and body on this connection; `None` before the first frame.
        frame_bytes_max: the limit of L, which may be raised when the client has said who it is.
    """

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.surplus: int | None = None
        self.frame_bytes_max = frame_bytes_max
        self._data = b""
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._wanted = HEAD_BYTES
        """So many bytes must be there before another look finds anything."""
        self._first_object: ObjectScan | None = None
        """The search for the end of the body of the first frame, which goes on where it stopped."""

    @property
    def answer_surplus(self) -> int:
        """The framing of what is sent: that of the client, `NEW` before its first frame."""
        return NEW if self.surplus is None else self.surplus

    @property
    def held_bytes(self) -> int:
        """Bytes of a frame that is not complete."""
        return len(self._data) + self._chunk_bytes

    def receive_data(self, data: bytes) -> None:
        """Add what the transport read, cut anywhere; `frames` parses it."""
        self._chunks.append(data)
        self._chunk_bytes += len(data)

    def frames(self) -> list[Frame]:
        """Return the complete frames that have arrived, in order.

        Raises:
            MalformedFrameError: the peer broke the protocol; what came before was returned.
        """
        found: list[Frame] = []
        if self.held_bytes < self._wanted:
            return found
        data = b"".join((self._data, *self._chunks)) if self._data or len(self._chunks) > 1 else self._chunks[0]
        self._chunks.clear()
        self._chunk_bytes = 0
        start, size = 0, len(data)
        try:
            while size - start >= HEAD_BYTES:
                header_end, end = self._find_end(data, start, size)
                if end > size:
                    self._wanted = end - start
                    break
                header = _decode_header(data[start + HEAD_BYTES : header_end])
                body = data[header_end:end] if end > header_end else b""
                found.append(Frame(header, b"" if body == NO_BODY else body))
                start = end
            else:
                self._wanted = HEAD_BYTES
        except (MalformedFrameError, *UNREADABLE) as error:
            self._data = b""
            if not found:
                raise _unreadable(error) from None
            self._wanted = 0  # the next call meets the fault again, after these frames are handled
            self._data = data[start:]
            return found
        self._data = data[start:]
        return found

    def _find_end(self, data: bytes, start: int, size: int) -> tuple[int, int]:
        """Return where header and body of the frame at `start` end, or how much must be there to tell."""
        magic, length, header_bytes = _HEAD.unpack_from(data, start)
        if magic != MAGIC:
            raise MalformedFrameError("the magic or the version of a frame is wrong")
        limit = self.frame_bytes_max
        if not 0 < header_bytes <= limit or not 0 <= length <= limit + 64:
            raise MalformedFrameError(
                f"a frame of {length} bytes with a header of {header_bytes}, the limit is {limit}"
            )
        header_end = start + HEAD_BYTES + header_bytes
        if self.surplus is None:
            if length < header_bytes:  # in every framing
                raise _no_room(length, header_bytes)
            if header_end > size:
                return header_end, header_end
            self._detect(data, start, header_end, length - header_bytes)
            if self.surplus is None:
                return header_end, size + 1
        body_bytes = length - header_bytes - self.surplus
        if body_bytes < 0:
            raise _no_room(length, header_bytes)
        return header_end, header_end + body_bytes

    def _detect(self, data: bytes, start: int, header_end: int, rest: int) -> None:
        """Set the framing of the connection by its first frame, unless more of it must come."""
        scan = self._first_object
        if scan is None:
            name = _decode_header(data[start + HEAD_BYTES : header_end]).name
            if (
                name not in (HELLO, RECOMMEND)
                or rest <= max(_SURPLUSES[:2])
                or data[header_end : header_end + 1] == b"n"
            ):
                self.surplus = {13: NEW, 17: NEW, 21: 21, 25: 21}.get(rest, OLD)
                return
            if len(data) == header_end:
                return
            scan = self._first_object = ObjectScan(data, header_end)
        end = scan.find_end(data, header_end + rest)
        if end < 0:
            return
        self._first_object = None
        surplus = rest - (end - header_end)
        if surplus not in _SURPLUSES:
            raise MalformedFrameError("the length of the first frame fits no framing")
        self.surplus = surplus


def _no_room(length: int, header_bytes: int) -> MalformedFrameError:
    return MalformedFrameError(f"a frame of {length} bytes has no room for its header of {header_bytes}")


def _unreadable(error: Exception) -> MalformedFrameError:
    if isinstance(error, MalformedFrameError):
        return error
    return MalformedFrameError(f"the header of a frame cannot be read: {error}")


class ObjectScan:
    """The search for the end of a JSON object in data that grows: each byte is looked at once."""

    def __init__(self, data: bytes, start: int) -> None:
        """Begin the search for the end of the object at `start`.

        Raises:
            MalformedFrameError: there is no object.
        """
        if data[start] != 0x7B:
            raise MalformedFrameError("the body of the first frame is no JSON object")
        self.position = start
        """The first byte that was not looked at."""
        self._depth = 0
        self._is_text = self._is_escaped = False

    def find_end(self, data: bytes, end_max: int) -> int:
        """Return where the object ends, -1 if the data ends before.

        Raises:
            MalformedFrameError: the object does not end before `end_max`.
        """
        depth, is_text, is_escaped = self._depth, self._is_text, self._is_escaped
        for position in range(self.position, min(len(data), end_max)):
            byte = data[position]
            if is_text:
                if is_escaped:
                    is_escaped = False
                elif byte == 0x5C:
                    is_escaped = True
                elif byte == 0x22:
                    is_text = False
            elif byte == 0x22:
                is_text = True
            elif byte == 0x7B:
                depth += 1
            elif byte == 0x7D:
                depth -= 1
                if not depth:
                    return position + 1
        if len(data) >= end_max:
            raise MalformedFrameError("the JSON object of the first frame does not end")
        self.position, self._depth, self._is_text, self._is_escaped = len(data), depth, is_text, is_escaped
        return -1


def encode_frame(surplus: int, header: bytes, body: bytes = b"") -> bytes:
    """Return the bytes of a frame; header and body must have no newline, as compact JSON has none."""
    return encode_head(surplus, header, len(body)) + body


def encode_head(surplus: int, header: bytes, body_bytes: int) -> bytes:
    """Return the bytes of a frame before its body.

    No byte of the lengths is a newline: Go's client ends its process at one (3.1), so the header is padded with blanks.
    """
    while True:
        header_bytes = len(header)
        head = _HEAD.pack(MAGIC, header_bytes + body_bytes + surplus, header_bytes)
        if NEWLINE not in head:
            return head + header
        header += b" "


@cache
def begin_header(command: str) -> bytes:
    """Return the header of a frame up to its code."""
    name = command.encode()
    return b'{"cmd":"%b","command":"%b","code":' % (name, name)


def encode_answer(surplus: int, command: str, seq: bytes, error: str, body: bytes = b"") -> bytes:
    """Return the frame of an answer to the request with this `seq`, as JSON; an `error` is the text of a failure."""
    outcome = b'1,"desc":' + _encode(error) if error else b'0,"desc":"success"'
    return encode_frame(surplus, begin_header(command) + outcome + b',"seq":' + seq + b"}", body)


def encode_message(surplus: int, command: str, seq: bytes, flavour: Flavour, body: bytes) -> bytes:
    """Return the frame of a message of a flavour; `seq` is JSON."""
    return encode_frame(surplus, begin_header(command) + b'0,"seq":' + seq + _PROPERTIES[flavour], body)
