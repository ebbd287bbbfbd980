"""Frames of WebSocket (RFC 6455, section 5): heads and masks, many at once.

frame := first: u8, [mask bit, length]: u8, [length: u16 | u64], [key: 4 bytes], payload; big-endian. `first` is
FIN, three reserved bits (the highest says *compressed*, RFC 7692) and the opcode. A client masks what it sends, a
server does not.
"""

import secrets
from collections.abc import Iterable, Sequence
from functools import cache

from babelbus.arrays import I64, U32, np
from babelbus.errors import RemoteProtocolError

FIN = 0x80
COMPRESSED = 0x40
RESERVED = 0x70
CONTINUATION, TEXT, BINARY = 0x0, 0x1, 0x2
CLOSE, PING, PONG = 0x8, 0x9, 0xA
MASKED = 0x80
CONTROL_BYTES_MAX = 125

NORMAL = 1000
PROTOCOL_ERROR = 1002
NO_STATUS = 1005
INVALID_DATA = 1007
MESSAGE_TOO_BIG = 1009
TRY_AGAIN_LATER = 1013

_KEY_BYTES = 4
_HEADS = 4096  # payloads below this many bytes have their head made beforehand
_FEW = 6  # fewer frames than this are unmasked one by one: numpy takes some microseconds to start
_SMALL_BYTES = 512  # a payload below is one integer to XOR, a larger one is an array


class WebSocketError(RemoteProtocolError):
    """The peer broke WebSocket; it is sent a close frame with `code` and the message, then the connection closes."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def toggle_mask(data: bytes, start: int, end: int, key: bytes) -> bytes:
    """Mask the payload in `data[start:end]`, or unmask it: both are the same XOR (section 5.3)."""
    size = end - start
    if size < _SMALL_BYTES:
        keys = (key * ((size + 3) >> 2))[:size]
        clear = int.from_bytes(data[start:end], "little") ^ int.from_bytes(keys, "little")
        return clear.to_bytes(size, "little")
    words = np.frombuffer(data, np.uint32, size >> 2, start) ^ np.frombuffer(key, np.uint32)
    even = end - (size & 3)
    return words.tobytes() if even == end else words.tobytes() + toggle_mask(data, even, end, key)


@cache
def _turns() -> I64:
    """Return the bytes of the key for a word, by the position in the word at which a payload begins."""
    return np.array([[(byte - begin) % 4 - _KEY_BYTES for byte in range(4)] for begin in range(4)])


def _toggle_masks(data: bytes, starts: I64, ends: I64) -> U32:
    """Return `data` with each part from `starts[i]` to `ends[i]` XORed with the four bytes in front of the part.

    The parts are payloads of frames: in order, at least six bytes apart. So no word of four bytes belongs to two parts,
    and the whole chunk takes a single XOR: with each key, rotated to the start of its words and repeated for all of
    them, and zeros between. Up to three bytes on each side of a part change too. `data` is a whole number of words.
    """
    edges = np.zeros(2 * len(starts) + 2, np.int64)
    edges[1:-1:2] = starts >> 2
    edges[2:-1:2] = (ends + 3) >> 2
    edges[-1] = len(data) >> 2
    turned = starts[:, None] + _turns()[starts & 3]
    keys = np.zeros(2 * len(starts) + 1, np.uint32)
    keys[1::2] = np.frombuffer(data, np.uint8)[turned].view(np.uint32).ravel()
    words: U32 = np.frombuffer(data, np.uint32) ^ keys.repeat(np.diff(edges))
    return words


def _positions(numbers: Iterable[int]) -> I64:
    return np.fromiter(numbers, np.int64)


def unmask(data: bytes, starts: list[int], ends: list[int]) -> list[bytes]:
    """Return the payloads of masked frames of one chunk."""
    if len(starts) < _FEW:
        return [
            toggle_mask(data, start, end, data[start - _KEY_BYTES : start])
            for start, end in zip(starts, ends, strict=True)
        ]
    padded = data + bytes(-len(data) & 3) if len(data) & 3 else data
    clear = _toggle_masks(padded, _positions(starts), _positions(ends)).tobytes()
    return [clear[start:end] for start, end in zip(starts, ends, strict=True)]


def encode_head(first: int, size: int, *, mask: bool = False) -> bytes:
    """Return the head of a frame without its key, with the shortest length field (section 5.2)."""
    bit = MASKED if mask else 0
    if size < 126:
        return bytes((first, bit | size))
    if size < 2**16:
        return bytes((first, bit | 126)) + size.to_bytes(2, "big")
    return bytes((first, bit | 127)) + size.to_bytes(8, "big")


@cache
def _heads(first: int, mask: bool) -> list[bytes]:
    return [encode_head(first, size, mask=mask) for size in range(_HEADS)]


def encode_frames(first: int, payloads: Sequence[bytes], *, mask: bool = False) -> bytes:
    """Return one frame for each payload, joined for one write."""
    try:
        heads = list(map(_heads(first, mask).__getitem__, map(len, payloads)))
    except IndexError:  # a payload is large
        heads = [encode_head(first, len(payload), mask=mask) for payload in payloads]
    if mask:
        return _encode_masked(heads, payloads)
    parts = [b""] * (2 * len(heads))
    parts[::2] = heads
    parts[1::2] = payloads
    return b"".join(parts)


def _encode_masked(heads: list[bytes], payloads: Sequence[bytes]) -> bytes:
    # Unpredictable keys (section 10.3): bytes that a script makes a client send must not look like HTTP.
    keys = secrets.token_bytes(_KEY_BYTES * len(payloads))
    parts = [
        keys[4 * number : 4 * number + 4].join((head, payload))
        for number, (head, payload) in enumerate(zip(heads, payloads, strict=True))
    ]
    data = b"".join(parts)
    sizes = _positions(map(len, payloads))
    ends = _positions(map(len, parts)).cumsum()
    starts = ends - sizes
    padded = data + bytes(4 + (-len(data) & 3))
    masked = _toggle_masks(padded, starts, ends).view(np.uint8)
    around = np.concatenate((starts[:, None] - np.arange(1, 4), ends[:, None] + np.arange(3)))
    masked[around] = np.frombuffer(padded, np.uint8)[around]
    return masked[: len(data)].tobytes()
