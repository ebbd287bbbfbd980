"""Frames of HTTP/2 (RFC 9113, sections 4 and 6): numbers, and frames -> bytes.

frame := payload_bytes: u24, kind: u8, flags: u8, stream: u31, payload; big-endian
"""

import struct
from typing import Final

from babelbus.errors import RemoteProtocolError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD: Final = struct.Struct(">HBBBI")
"""The first 16 bits of the size, its last 8 bits, kind, flags and stream."""

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 1
END_STREAM: Final = 1
END_HEADERS: Final = 4
PADDED: Final = 8
PRIORITISED: Final = 32

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

FRAME_BYTES: Final = 16_384
"""The longest payload that each side must take, and the longest that we take."""
FRAME_BYTES_MAX: Final = 2**24 - 1
WINDOW_BYTES: Final = 65_535
"""Windows before SETTINGS and WINDOW_UPDATE."""
WINDOW_BYTES_MAX: Final = 2**31 - 1
STREAM_MAX: Final = 2**31 - 1
TABLE_BYTES: Final = 4096
"""Size of the table of header fields before SETTINGS."""

_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")


class Http2Error(RemoteProtocolError):
    """The client broke HTTP/2: the connection ends with a GOAWAY of this `code`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 255, kind, flags, stream) + payload


def encode_settings(settings: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return encode_frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items()))


def encode_window_update(stream: int, size_bytes: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return encode_frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(size_bytes))


def encode_reset(stream: int, code: int) -> bytes:
    """Return a RST_STREAM frame."""
    return encode_frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def encode_goaway(last: int, code: int, text: str = "") -> bytes:
    """Return a GOAWAY frame; streams up to `last` are carried out."""
    return encode_frame(GOAWAY, 0, 0, _NUMBER.pack(last) + _NUMBER.pack(code) + text.encode())


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings of a frame.

    Raises:
        Http2Error: the frame is cut, or a value is not allowed.
    """
    if len(payload) % _SETTING.size:
        raise Http2Error(FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    settings: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for name, value in settings:
        if name == INITIAL_WINDOW_SIZE and value > WINDOW_BYTES_MAX:
            raise Http2Error(FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
        if name == ENABLE_PUSH and value > 1:
            raise Http2Error(PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        if name == MAX_FRAME_SIZE and not FRAME_BYTES <= value <= FRAME_BYTES_MAX:
            raise Http2Error(PROTOCOL_ERROR, f"frames of at most {value} bytes")
    return settings


def read_number(payload: bytes) -> int:
    """Return the number of a RST_STREAM or WINDOW_UPDATE.

    Raises:
        Http2Error: the frame has another size.
    """
    if len(payload) != _NUMBER.size:
        raise Http2Error(FRAME_SIZE_ERROR, f"a number of {len(payload)} bytes")
    number: int = _NUMBER.unpack(payload)[0]
    return number


def without_padding(flags: int, payload: bytes) -> bytes:
    """Return the payload of DATA or HEADERS without its padding.

    Raises:
        Http2Error: the padding is longer than the frame.
    """
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL_ERROR, "the padding is longer than the frame")
    return payload[1 : len(payload) - payload[0]]
