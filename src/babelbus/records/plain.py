"""Records <-> their stored form, a record at a time (docs/specifications/jebp.md, section 5.1).

record := offset: i64, length: i32 (bytes behind this field), crc: u32 (zlib, over all behind it), attributes: i8,
          timestamp: i64, key_length: i32 (-1: no key), key, payload_length: i32, payload, headers_count: i8,
          (key_length: i32, key, value_length: i32 (-1: no value), value)*; big-endian

Attributes: the low 3 bits name a compression that is passed on unchanged. Bit 3 (`TOMBSTONE`) is ours: the payload is
null and its length 0, so that a reader that does not know the bit sees an empty payload (docs/storage.md).

This is all that a client needs. `format` has the batches of servers, which numpy makes and which are arrays.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from babelbus.errors import StorageError
from babelbus.records.record import Headers, Positions, Record, RecordBatch

Buffer = bytes | bytearray | memoryview
M = TypeVar("M")

HEAD = struct.Struct(">qiI")
"""Offset, length, CRC: the 16 bytes in front of what the CRC covers."""
HEAD_BYTES = HEAD.size
LENGTH_FROM = 12
"""The record length counts from this byte on."""
LENGTH_MIN = 22
RECORD_BYTES_MIN = LENGTH_FROM + LENGTH_MIN
BODY = struct.Struct(">bqi")
"""Attributes, timestamp, key length."""
PLAIN_BODY = struct.Struct(">bqii")
"""The body's numbers for a record without a key: attributes, timestamp, -1, payload length."""
FRONT = struct.Struct(">qiIbqi")
"""The numbers of head and body."""
INT32 = struct.Struct(">i")
INT64 = struct.Struct(">q")
HEADERS_MAX = 127
TOMBSTONE = 0x08
ATTRIBUTES_KNOWN = 0x0F
INT64_MAX = 2**63 - 1
RESERVED_HEADER_PREFIX = b"$"

CRC_IS_WRONG = "its CRC is wrong"


class InvalidRecordError(StorageError):
    """A record cannot be stored: too many headers, a negative time, a part that is too long."""

    retriable = False


class CorruptRecordError(StorageError):
    """Stored bytes are not the record that was written; the record is never served.

    `position` counts from the beginning of the bytes (or of the file `path`, when it is known). All records from
    `offset` to `after` (excluded) are damaged, if that is more than 0: a reader need not ask for each.
    """

    retriable = False

    def __init__(self, position: int, reason: str, *, path: str = "", offset: int = -1, after: int = 0) -> None:
        where = f"{path or 'records'}: bad record at byte {position}"
        if offset >= 0:
            where += f" (offset {offset})"
        super().__init__(f"{where}: {reason}")
        self.position, self.reason, self.path, self.offset, self.after = position, reason, path, offset, after


def encode_records(records: Sequence[Record]) -> RecordBatch:
    """Return the stored form of `records`, with offsets from 0 on.

    Raises:
        InvalidRecordError: a record cannot be stored; then no record of the batch is.
    """
    timestamps = [record.timestamp for record in records]
    return join_bodies(record_bodies(records), timestamps, 0)


def record_bodies(records: Sequence[Record]) -> list[bytes]:
    """Return the bytes under the CRCs of records.

    Raises:
        InvalidRecordError: a record cannot be stored.
    """
    check_timestamps([record.timestamp for record in records])
    try:
        return [_encode_body(record) for record in records]
    except struct.error:
        raise InvalidRecordError("a key, a payload or a header of a record is too long") from None


def payload_bodies(payloads: Sequence[bytes], timestamps: Sequence[int]) -> list[bytes]:
    """Return the bytes under the CRCs of records with a payload and a time only.

    Raises:
        InvalidRecordError: a time is not above 0.
    """
    check_timestamps(timestamps)
    front = PLAIN_BODY.pack
    if len(payloads) == 1:
        return [b"%b%b\0" % (front(0, timestamps[0], -1, len(payloads[0])), payloads[0])]
    return [
        b"%b%b\0" % (front(0, timestamp, -1, len(payload)), payload)
        for payload, timestamp in zip(payloads, timestamps, strict=True)
    ]


def join_bodies(bodies: Sequence[bytes], timestamps: Positions, base_offset: int) -> RecordBatch:
    """Encode records given by the bytes under their CRCs; `timestamps` are those in the bodies."""
    pieces: list[bytes] = []
    starts, position = [], 0
    pack, crc32 = HEAD.pack, zlib.crc32
    for offset, body in enumerate(bodies, base_offset):
        pieces += (pack(offset, len(body) + 4, crc32(body)), body)
        starts.append(position)
        position += HEAD_BYTES + len(body)
    return RecordBatch(bytearray().join(pieces), starts, timestamps, base_offset)


def _encode_body(record: Record) -> bytes:
    """Return the bytes that the CRC covers, of a record of any kind."""
    key, payload, attributes, pack = record.key, record.payload, record.attributes, INT32.pack
    if key is None and payload is not None and not (record.headers or attributes):
        return b"%b%b\0" % (PLAIN_BODY.pack(0, record.timestamp, -1, len(payload)), payload)
    if payload is None:
        payload, attributes = b"", attributes | TOMBSTONE
    if not 0 <= attributes <= ATTRIBUTES_KNOWN:
        raise InvalidRecordError(f"a record's attributes are 0 to {ATTRIBUTES_KNOWN}, not {attributes}")
    front = BODY.pack(attributes, record.timestamp, -1 if key is None else len(key))
    headers = encode_headers(record.headers) if record.headers else b"\0"
    return b"".join((front, key or b"", pack(len(payload)), payload, headers))


def check_timestamps(timestamps: Sequence[int]) -> None:
    """Check that the stored form has room for each time.

    Raises:
        InvalidRecordError: a time is 0, negative or over 63 bits.
    """
    if min(timestamps) <= 0 or max(timestamps) > INT64_MAX:
        raise InvalidRecordError("a record's time is milliseconds since the epoch and above 0")


def encode_headers(headers: Headers) -> bytes:
    """Return the number of headers and the headers, as at the end of a record.

    Raises:
        InvalidRecordError: there are more than `HEADERS_MAX`.
    """
    pack = INT32.pack
    if len(headers) > HEADERS_MAX:
        raise InvalidRecordError(f"a record has {len(headers)} headers, the most are {HEADERS_MAX}")
    parts = [len(headers).to_bytes(1, "big")]
    for key, value in headers:
        parts += (pack(len(key)), key, pack(-1 if value is None else len(value)), value or b"")
    return b"".join(parts)


def decode_records(data: bytes) -> list[Record]:
    """Return the records of a chunk, without the bus's own headers, after a check of every CRC.

    Costs 0.6 us a record, 1.8 us with two headers: as much as numpy's columns for a thousand records, and a
    thirtieth for a lone record.

    Raises:
        CorruptRecordError: a record is not the one that was written, or the chunk ends inside a record.
    """
    return decode_each(data, Record)


def decode_each(data: bytes, make: Callable[..., M], *owner: object) -> list[M]:
    """Return `make(payload, key, headers, timestamp, attributes, offset)` of each record of a chunk.

    With an owner, `make` also takes the owner and the number of the record in the chunk.

    Raises:
        CorruptRecordError: a record is not the one that was written, or the chunk ends inside a record.
    """
    made: list[M] = []
    append = made.append
    unpack, unpack_size, crc32, view = FRONT.unpack_from, INT32.unpack_from, zlib.crc32, memoryview(data)
    position, end = 0, len(data)
    while position < end:
        if end - position < RECORD_BYTES_MIN:
            raise CorruptRecordError(position, "the chunk ends inside a record")
        offset, length, crc, attributes, timestamp, key_length = unpack(data, position)
        stop = position + LENGTH_FROM + length
        if length < LENGTH_MIN or stop > end or crc32(view[position + HEAD_BYTES : stop]) != crc:
            raise CorruptRecordError(position, record_error(data, position, end) or CRC_IS_WRONG)
        start = position + (HEAD_BYTES + 17)
        key = None
        if key_length >= 0:
            key = data[start - 4 : start - 4 + key_length]
            start += key_length
        if key_length < -1 or start >= stop:
            raise CorruptRecordError(position, "its key does not fit")
        at = start + unpack_size(data, start - 4)[0]
        if not start <= at < stop:
            raise CorruptRecordError(position, "its payload does not fit")
        payload = None if attributes & TOMBSTONE else data[start:at]
        headers = _read_headers(data, at, stop) if data[at] or at + 1 != stop else ()
        if headers is None:
            raise CorruptRecordError(position, "its headers do not fit")
        if owner:
            append(make(payload, key, headers, timestamp, attributes & ~TOMBSTONE, offset, *owner, len(made)))
        else:
            append(make(payload, key, headers, timestamp, attributes & ~TOMBSTONE, offset))
        position = stop
    return made


def _read_headers(data: bytes, at: int, stop: int) -> Headers | None:
    """Return the headers from the byte of their number on; `None` if they do not end at `stop`."""
    unpack = INT32.unpack_from
    headers: list[tuple[bytes, bytes | None]] = []
    count = data[at]
    at += 1
    if count > HEADERS_MAX:
        return None
    for _ in range(count):
        if at + 4 > stop:
            return None
        (size,) = unpack(data, at)
        middle = at + 4 + size
        if size < 0 or middle + 4 > stop:
            return None
        key = data[at + 4 : middle]
        (size,) = unpack(data, middle)
        at = middle + 4 + max(size, 0)
        if size < -1 or at > stop:
            return None
        if not key.startswith(RESERVED_HEADER_PREFIX):
            headers.append((key, None if size < 0 else data[middle + 4 : at]))
    return tuple(headers) if at == stop else None


def verify_records(data: Buffer, positions: Sequence[int]) -> None:
    """Check the CRC of each record; `positions` are where the records begin and, last, where they end.

    Raises:
        CorruptRecordError: the record at this position is not the one that was written.
    """
    view, unpack, crc32 = memoryview(data), HEAD.unpack_from, zlib.crc32
    for position, stop in pairwise(positions):
        if crc32(view[position + HEAD_BYTES : stop]) != unpack(data, position)[2]:
            raise CorruptRecordError(position, record_error(data, position, stop) or CRC_IS_WRONG)


def decode_headers(data: Buffer, start: int, count: int) -> Headers:
    """Return `count` headers from byte `start` on; the bytes are part of a verified record."""
    unpack = INT32.unpack_from
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


def offset_of(data: Buffer, position: int = 0) -> int:
    """Return the offset of the record at a position."""
    return int(INT64.unpack_from(data, position)[0])


def record_error(data: Buffer, position: int, end: int) -> str | None:
    """Return the fault of the record at `position`, or `None` if it is good (DECISION 41); `end` bounds it.

    The offset is not checked: the caller knows the expected offset.
    """
    if end - position < HEAD_BYTES:
        return "its head is cut off"
    _, length, crc = HEAD.unpack_from(data, position)
    stop = position + LENGTH_FROM + length
    if length < LENGTH_MIN:
        return f"its length says {length}"
    if stop > end:
        return f"its length says {length}, {end - position - LENGTH_FROM} bytes are there"
    if zlib.crc32(memoryview(data)[position + HEAD_BYTES : stop]) != crc:
        return CRC_IS_WRONG
    return _body_error(data, position + HEAD_BYTES, stop)


def _body_error(data: Buffer, position: int, stop: int) -> str | None:
    """Return why the inner lengths of a record do not add up to its end, or `None` if they do."""
    unpack = INT32.unpack_from
    _, timestamp, key_length = BODY.unpack_from(data, position)
    if timestamp <= 0:
        return f"its time is {timestamp}"
    position += BODY.size + max(key_length, 0)
    if key_length < -1 or position + 5 > stop:
        return "its key does not fit"
    (payload_length,) = unpack(data, position)
    position += 4 + payload_length
    if payload_length < 0 or position >= stop:
        return "its payload does not fit"
    count = data[position]
    if count > HEADERS_MAX:
        return f"it has {count} headers"
    position += 1
    for _ in range(count):
        for least in (0, -1):
            if position + 4 > stop:
                return "its headers do not fit"
            (size,) = unpack(data, position)
            if size < least:
                return "a length in its headers is negative"
            position += 4 + max(size, 0)
    return None if position == stop else "its inner lengths do not add up"


def is_cut_off(data: Buffer) -> bool:
    """Return whether `data` is the front of a record: its length and its inner lengths all pass the end.

    One damaged length would contradict the other lengths.
    """
    at = HEAD_BYTES + BODY.size
    if len(data) < at:
        return True
    stop = LENGTH_FROM + HEAD.unpack_from(data)[1]
    _, timestamp, key_length = BODY.unpack_from(data, HEAD_BYTES)
    if timestamp <= 0 or key_length < -1:
        return False
    at += max(key_length, 0)
    if at + 4 <= len(data):
        (payload_length,) = INT32.unpack_from(data, at)
        at += 4 + payload_length
        if payload_length < 0:
            return False
        lengths = (0, -1) * (data[at] if at < len(data) else 0)
        at += 1
        for least in lengths:
            if at + 4 > len(data):
                break
            (length,) = INT32.unpack_from(data, at)
            if length < least:
                return False
            at += 4 + max(length, 0)
    return bool(len(data) < at + 4 and at <= stop)


def walk(data: Buffer, start: int = 0, end: int | None = None, count_max: int = 2**62) -> list[int]:
    """Return the position of each whole record between the bytes `start` and `end`, and their end as the last entry.

    A record that is cut off, or an invalid length, ends the walk: the last entry is then below `end`. So do
    `count_max` records. Costs about 0.4 us a record.
    """
    if end is None:
        end = len(data)
    unpack = INT32.unpack_from
    positions: list[int] = []
    append = positions.append
    last = end - LENGTH_FROM
    while start <= last and len(positions) < count_max:
        (length,) = unpack(data, start + 8)
        stop = start + LENGTH_FROM + length
        if length < LENGTH_MIN or stop > end:
            break
        append(start)
        start = stop
    append(start)
    return positions
