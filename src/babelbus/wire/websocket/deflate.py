"""Compressed WebSocket messages: permessage-deflate (RFC 7692)."""

import zlib
from collections.abc import Sequence

import msgspec

from babelbus.wire.websocket.frames import (
    COMPRESSED,
    FIN,
    INVALID_DATA,
    MESSAGE_TOO_BIG,
    PROTOCOL_ERROR,
    TEXT,
    WebSocketError,
    encode_frames,
)

WINDOW_BITS_MAX = 15
_TAIL = b"\x00\x00\xff\xff"  # ends each message before compression; not sent (section 7.2.1)
_WINDOW_BYTES = 2**WINDOW_BITS_MAX
_MEMORY_LEVEL = 5  # 32 KiB for each compressor together with a window of 12 bits, instead of 256 KiB


class Deflate(msgspec.Struct, frozen=True):
    """The agreement of both sides: whose window is reset after each message, and how large each is (log2 bytes)."""

    server_no_context_takeover: bool = False
    client_no_context_takeover: bool = False
    server_max_window_bits: int = WINDOW_BITS_MAX
    client_max_window_bits: int = WINDOW_BITS_MAX


class Inflater:
    """Decompresses the messages of one peer."""

    def __init__(self, agreed: Deflate, *, is_server: bool) -> None:
        self._forgets = agreed.client_no_context_takeover if is_server else agreed.server_no_context_takeover
        self._bits = agreed.client_max_window_bits if is_server else agreed.server_max_window_bits
        self._inflate = zlib.decompressobj(-self._bits)

    def inflate(self, data: bytes | bytearray, bytes_max: int) -> bytes:
        """Return the message that was compressed as `data`, of at most `bytes_max` bytes.

        Raises:
            WebSocketError: the message would exceed the limit, or `data` is no deflate stream.
        """
        try:
            message = self._all_of(bytes(data) + _TAIL, bytes_max)
        except zlib.error as error:
            raise WebSocketError(INVALID_DATA, f"a message does not decompress: {error}") from error
        if self._forgets:
            self._inflate = zlib.decompressobj(-self._bits)
        return message

    def _all_of(self, data: bytes, bytes_max: int) -> bytes:
        message = self._part(data, bytes_max, bytes_max)
        if not self._inflate.eof:
            return message
        # A peer may end a message with a final block and a zero byte (section 7.2.3.4). The stream goes on in a new
        # object, whose window this message filled; a reference further back fails instead of returning wrong data.
        rest = self._inflate.unused_data
        self._inflate = zlib.decompressobj(-self._bits, zdict=message[-_WINDOW_BYTES:])
        message += self._part(rest, bytes_max - len(message), bytes_max)
        if self._inflate.eof:
            raise WebSocketError(PROTOCOL_ERROR, "a compressed message with more than one final block")
        return message

    def _part(self, data: bytes, bytes_left: int, bytes_max: int) -> bytes:
        # One byte more than allowed is requested: a bomb is noticed when it is that large, not when it is unpacked.
        message = self._inflate.decompress(data, bytes_left + 1)
        if len(message) > bytes_left:
            raise WebSocketError(MESSAGE_TOO_BIG, f"a message decompresses to more than {bytes_max} bytes")
        return message


class Deflater:
    """Compresses the messages to one peer; those below `bytes_min` would not shrink, and are sent as they are."""

    def __init__(self, agreed: Deflate, *, is_server: bool, bytes_min: int = 128) -> None:
        self._forgets = agreed.server_no_context_takeover if is_server else agreed.client_no_context_takeover
        self._bits = agreed.server_max_window_bits if is_server else agreed.client_max_window_bits
        self._bytes_min = max(bytes_min, 1)  # nothing at all is never compressed: zlib flushes it to nothing
        self._mask = not is_server
        self._deflate = self._begin()

    def encode_texts(self, payloads: Sequence[bytes]) -> bytes:
        """Return the frames of texts (UTF-8), joined for one write."""
        return b"".join(map(self._encode, payloads))

    def _encode(self, payload: bytes) -> bytes:
        if len(payload) < self._bytes_min:
            return encode_frames(FIN | TEXT, [payload], mask=self._mask)
        compressed = self._deflate.compress(payload) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        if self._forgets:
            self._deflate = self._begin()
        return encode_frames(FIN | COMPRESSED | TEXT, [compressed[: -len(_TAIL)]], mask=self._mask)

    def _begin(self) -> "zlib._Compress":
        return zlib.compressobj(wbits=-self._bits, memLevel=_MEMORY_LEVEL)
