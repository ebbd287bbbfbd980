"""Stored records <-> objects in plain Python: for clients, which read some records at a time and need no numpy.

The form is that of `format`, which does the same for whole chunks with numpy.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from babelbus.records.errors import CorruptRecordError, InvalidRecordError
from babelbus.records.record import Headers, Record

Buffer = bytes | bytearray | memoryview
M = TypeVar("M")

HEADERS_MAX: Final = 127
TOMBSTONE: Final = 0x08
ATTRIBUTES_KNOWN: Final = 0x0F
INT64_MAX: Final = 2**63 - 1
RESERVED_HEADER_PREFIX: Final = b"$"
_FRONT: Final = struct.Struct(">qiIbqii")
"""Offset, length, CRC, attributes, timestamp, key length, and the payload length of a record without a key."""
_HEAD: Final = struct.Struct(">qiI")
_BODY: Final = struct.Struct(">bqi")
_PLAIN_BODY: Final = struct.Struct(">bqii")
_INT32: Final = struct.Struct(">i")
_COVERED_FROM: Final = _HEAD.size
_LENGTH_FROM: Final = 12
_KEY_FROM: Final = _HEAD.size + _BODY.size


def decode_each(data: bytes, make: Callable[..., M], *more: object) -> list[M]:
    """Return what `make(payload, key, headers, timestamp, attributes, offset, *more, number)` makes of each record.

    The CRC of every record is checked first; the bus's own headers are left out. About 1 us each.

    Raises:
        CorruptRecordError: a record is not the one that was written, or the last one is cut off.
    """
    made: list[M] = []
    append, unpack, crc32, view = made.append, _FRONT.unpack_from, zlib.crc32, memoryview(data)
    at, size = 0, len(data)
    try:
        while at < size:
            offset, length, crc, attributes, timestamp, key_length, payload_length = unpack(data, at)
            end = at + _LENGTH_FROM + length
            if end > size or crc32(view[at + _COVERED_FROM : end]) != crc:
                raise CorruptRecordError(at, "its CRC is wrong", offset=offset)
            start = at + _KEY_FROM
            key = None
            if key_length >= 0:
                key = data[start : start + key_length]
                start += key_length
                (payload_length,) = _INT32.unpack_from(data, start)
            start += 4
            stop = start + payload_length
            headers: Headers = ()
            if count := data[stop]:
                headers = public_headers(decode_headers(data, stop + 1, count))
            payload = data[start:stop]
            if attributes & TOMBSTONE:
                append(make(None, key, headers, timestamp, attributes & ~TOMBSTONE, offset, *more, len(made)))
            else:
                append(make(payload, key, headers, timestamp, attributes, offset, *more, len(made)))
            at = end
    except (struct.error, IndexError):
        raise CorruptRecordError(at, "the record is cut off") from None
    return made


def encode_each(records: Sequence[Record]) -> bytes:
    """Return records in the stored form, with offset 0: the server puts the offsets in. About 1.5 us each.

    Raises:
        InvalidRecordError: a record cannot be stored.
    """
    parts: list[bytes] = []
    head, front, plain, crc32 = _HEAD.pack, _BODY.pack, _PLAIN_BODY.pack, zlib.crc32
    try:
        for record in records:
            payload, key, attributes, timestamp = record.payload, record.key, record.attributes, record.timestamp
            if not 0 < timestamp <= INT64_MAX:
                raise InvalidRecordError("a record's time is milliseconds since the epoch and above 0")
            if payload is None:
                payload, attributes = b"", attributes | TOMBSTONE
            if not 0 <= attributes <= ATTRIBUTES_KNOWN:
                raise InvalidRecordError(f"a record's attributes are 0 to {ATTRIBUTES_KNOWN}, not {attributes}")
            headers = encode_headers(record.headers) if record.headers else b"\0"
            if key is None:
                body = plain(attributes, timestamp, -1, len(payload)) + payload + headers
            else:
                size = _INT32.pack(len(payload))
                body = b"".join((front(attributes, timestamp, len(key)), key, size, payload, headers))
            parts += (head(0, len(body) + 4, crc32(body)), body)
    except struct.error:
        raise InvalidRecordError("a key, a payload or a header of a record is too long") from None
    return b"".join(parts)


def encode_headers(headers: Headers) -> bytes:
    """Return the number of headers and the headers, as at the end of a record.

    Raises:
        InvalidRecordError: there are more than `HEADERS_MAX`.
    """
    pack = _INT32.pack
    if len(headers) > HEADERS_MAX:
        raise InvalidRecordError(f"a record has {len(headers)} headers, the most are {HEADERS_MAX}")
    parts = [len(headers).to_bytes(1, "big")]
    for key, value in headers:
        parts += (pack(len(key)), key, pack(-1 if value is None else len(value)), value or b"")
    return b"".join(parts)


def decode_headers(data: Buffer, start: int, count: int) -> Headers:
    """Return `count` headers from byte `start` on; the bytes are part of a verified record."""
    unpack = _INT32.unpack_from
    headers: list[tuple[bytes, bytes | None]] = []
    for _ in range(count):
        (size,) = unpack(data, start)
        key = bytes(data[start + 4 : start + 4 + size])
        start += 4 + size
        (size,) = unpack(data, start)
        start += 4
        if size < 0:
            headers.append((key, None))
        else:
            headers.append((key, bytes(data[start : start + size])))
            start += size
    return tuple(headers)


def public_headers(headers: Iterable[tuple[bytes, bytes | None]]) -> Headers:
    """Return the headers without the bus's own."""
    return tuple([pair for pair in headers if not pair[0].startswith(RESERVED_HEADER_PREFIX)])
