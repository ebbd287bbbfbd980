"""The frame of jebp: `01`, length of the length, length, content (specification, section 1).

frame := 01, L: u8 (0..8), content_bytes: big-endian number of L bytes, content
"""

from typing import Final

from babelbus.errors import RemoteProtocolError

FRAME_BYTES_MAX: Final = 16 * 2**20
HANDSHAKE_BYTES_MAX: Final = 1_024
HANDSHAKE_BYTES_MAX_BARE: Final = 16_384  # with jebp_bare_certificates


def encode_length(length: int) -> bytes:
    """Return L and the length with the smallest L that holds it, at least 1 (DECISION 3)."""
    size = max(1, (length.bit_length() + 7) // 8)
    return bytes((size,)) + length.to_bytes(size, "big")


def encode_frame(content: bytes) -> bytes:
    """Return the frame of one content that is not sealed; the handshake's are small."""
    return b"\x01" + encode_length(len(content)) + content


def read_head(data: bytes | bytearray, position: int, bytes_max: int) -> tuple[int, int] | None:
    """Read the head of the frame at `position`: where its content starts and how many bytes it has.

    None when the head is not complete yet. A wrong beginning is refused without waiting for the rest.

    Raises:
        RemoteProtocolError: the first byte is not `01`, L is over 8, or the content is longer than `bytes_max`
            (DECISION 4: refused before any of the content is kept, for the peer may not be authenticated yet).
    """
    available = len(data) - position
    if available < 1:
        return None
    if data[position] != 1:
        raise RemoteProtocolError(f"frame starts with {data[position]:02x}, not 01")
    if available < 2:
        return None
    size = data[position + 1]
    if size > 8:
        raise RemoteProtocolError(f"length of {size} bytes, limit 8")
    start = position + 2 + size
    if start > len(data):
        return None
    length = int.from_bytes(data[position + 2 : start], "big")
    if length > bytes_max:
        raise RemoteProtocolError(f"frame of {length} bytes, limit {bytes_max}")
    return start, length


class FrameReader:
    """Cuts the few small frames of a handshake; later frames are cut by `decoder`, many at a time."""

    def __init__(self, bytes_max: int = HANDSHAKE_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._bytes_max = bytes_max

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Receive bytes from the transport, cut anywhere."""
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """Return the content of the next frame, or None until it is complete.

        Raises:
            RemoteProtocolError: as `read_head`.
        """
        head = read_head(self._buffer, 0, self._bytes_max)
        if head is None or len(self._buffer) < head[0] + head[1]:
            return None
        start, length = head
        content = bytes(self._buffer[start : start + length])
        del self._buffer[: start + length]
        return content

    def take_rest(self) -> bytes:
        """Return what arrived after the last frame that was taken, and forget it."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest
