"""Records <-> bytes of a `.log` file (docs/specifications/jebp.md, section 5.1).

record := offset: i64, length: i32 (bytes behind this field), crc: u32 (zlib, over all behind it), attributes: i8,
          timestamp: i64, key_length: i32 (-1: no key), key, payload_length: i32, payload, headers_count: i8,
          (key_length: i32, key, value_length: i32 (-1: no value), value)*; big-endian

Attributes: the low 3 bits name a compression that is passed on unchanged. Bit 3 (`TOMBSTONE`) is ours: the payload is
null and its length 0, so that a reader that does not know the bit sees an empty payload (docs/storage.md).
"""

import struct
import zlib
from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from babelbus.errors import StorageError
from babelbus.records.record import Headers, Positions, Record, RecordBatch

Buffer = bytes | bytearray | memoryview

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
PLAIN_BODY_BYTES = PLAIN_BODY.size
_PLAIN = {
    "offset": (">i8", 0),
    "length": (">i4", 8),
    "crc": (">u4", 12),
    "attributes": ("i1", 16),
    "timestamp": (">i8", 17),
    "key_length": (">i4", 25),
    "payload_length": (">i4", 29),
    "body": (f"V{PLAIN_BODY_BYTES}", 16),
}


def _plain_dtype(shift: int) -> np.dtype[np.void]:
    """Return the fields of a record without a key up to its payload, behind `shift` other bytes."""
    return np.dtype(
        {
            "names": [*_PLAIN, "end"] if shift else list(_PLAIN),
            "formats": [kind for kind, _ in _PLAIN.values()] + ["u1"] * shift,
            "offsets": [at + shift for _, at in _PLAIN.values()] + [0] * shift,
            "itemsize": HEAD_BYTES + PLAIN_BODY_BYTES + shift,
        }
    )


PLAIN_FIELDS = _plain_dtype(0)
PLAIN_DTYPE = _plain_dtype(1)
"""`end` is the last byte of the record before, which has no headers: so heads and payloads alternate."""
END_TABLE = np.array([zlib.crc32(bytes([byte])) ^ zlib.crc32(b"\0") for byte in range(256)], np.uint32)
"""CRC-32 register after one zero byte, by the low byte before: crc(b) ^ crc(0) is linear in b."""
VECTOR_MIN = 16
"""From this number of records on, numpy is faster than a loop."""
VECTOR_MIN_BODIES = 64
"""The same for records whose body is encoded already, so that each takes less work."""
INT32 = struct.Struct(">i")
INT64 = struct.Struct(">q")
HEADERS_MAX = 127
TOMBSTONE = 0x08
ATTRIBUTES_KNOWN = 0x0F
INT64_MAX = 2**63 - 1
PRODUCER_HEADER = b"$batch"
"""Header of the first record of a batch that has a producer id: producer id i64, first sequence i64, count i32."""
PRODUCER = struct.Struct(">qqi")
RESERVED_HEADER_PREFIX = b"$"


CRC_IS_WRONG = "its CRC is wrong"


class InvalidRecordError(StorageError):
    """A record cannot be stored: too many headers, a negative time, a part that is too long."""

    retriable = False


class CorruptRecordError(StorageError):
    """Stored bytes are not the record that was written; the record is never served.

    `position` counts from the beginning of the bytes (or of the file `path`, when it is known).
    """

    retriable = False

    def __init__(self, position: int, reason: str, *, path: str = "", offset: int = -1) -> None:
        where = f"{path or 'records'}: bad record at byte {position}"
        if offset >= 0:
            where += f" (offset {offset})"
        super().__init__(f"{where}: {reason}")
        self.position, self.reason, self.path, self.offset = position, reason, path, offset


def encode_batch(records: Sequence[Record], base_offset: int = 0) -> RecordBatch:
    """Return the stored form of `records` with offsets from `base_offset` on.

    Costs about 2 us for a record with a key or headers; `encode_payloads` tells the cost of the others.

    Raises:
        InvalidRecordError: a record cannot be stored; then no record of the batch is.
    """
    count = len(records)
    timestamps = [record.timestamp for record in records]
    payloads = [record.payload for record in records]
    if (
        None not in payloads
        and [record.key for record in records].count(None) == count
        and not any(record.headers or record.attributes for record in records)
    ):
        return encode_payloads(payloads, timestamps, base_offset)  # type: ignore[arg-type]  # no None among them
    _check_timestamps(timestamps)
    parts: list[bytes] = []
    positions: list[int] = []
    position = 0
    try:
        for offset, record in enumerate(records, base_offset):
            body = _encode_body(record)
            parts += (HEAD.pack(offset, len(body) + 4, zlib.crc32(body)), body)
            positions.append(position)
            position += HEAD_BYTES + len(body)
    except struct.error:
        raise InvalidRecordError("a key, a payload or a header of a record is too long") from None
    return RecordBatch(b"".join(parts), positions, timestamps, base_offset)


def _encode_body(record: Record) -> bytes:
    """Return the bytes that the CRC covers, of a record of any kind."""
    key, payload, attributes, pack = record.key, record.payload, record.attributes, INT32.pack
    if payload is None:
        payload, attributes = b"", attributes | TOMBSTONE
    if not 0 <= attributes <= ATTRIBUTES_KNOWN:
        raise InvalidRecordError(f"a record's attributes are 0 to {ATTRIBUTES_KNOWN}, not {attributes}")
    front = BODY.pack(attributes, record.timestamp, -1 if key is None else len(key))
    headers = encode_headers(record.headers) if record.headers else b"\0"
    return b"".join((front, key or b"", pack(len(payload)), payload, headers))


def encode_payloads(payloads: Sequence[bytes], timestamps: list[int], base_offset: int = 0) -> RecordBatch:
    """Return the stored form of records with a payload and a time only.

    Costs about 0.7 us a record in a batch of many of one size, 1.2 us when sizes differ: numpy writes all fields of
    fixed width for the whole batch, and a call of zlib is the only cost of each record.

    Raises:
        InvalidRecordError: a time is not above 0.
    """
    count = len(payloads)
    if count:
        _check_timestamps(timestamps)
    if count < VECTOR_MIN:
        return _encode_few_payloads(payloads, timestamps, base_offset)
    sizes = list(map(len, payloads))
    uniform = sizes.count(sizes[0]) == count
    lengths = np.array(sizes, np.int64)
    heads = np.empty(count, PLAIN_DTYPE)
    heads["end"] = 0
    heads["offset"] = np.arange(base_offset, base_offset + count)
    heads["length"] = lengths + LENGTH_MIN
    heads["attributes"] = 0
    heads["timestamp"] = timestamps
    heads["key_length"] = -1
    heads["payload_length"] = lengths
    if uniform and timestamps.count(timestamps[0]) == count:
        fronts: Iterable[int] = repeat(zlib.crc32(heads["body"][0].tobytes()))
    else:
        octets, size = heads["body"].tobytes(), PLAIN_BODY_BYTES
        fronts = map(zlib.crc32, [octets[at : at + size] for at in range(0, size * count, size)])
    crcs = np.fromiter(map(zlib.crc32, payloads, fronts), np.uint32, count) ^ np.uint32(0xFFFFFFFF)
    # The byte behind the payload says that there are no headers: one more step of the CRC, for all at once.
    heads["crc"] = (END_TABLE.take(crcs & 0xFF) ^ (crcs >> 8)) ^ np.uint32(0xFFFFFFFF)
    size = PLAIN_DTYPE.itemsize
    if uniform:
        rows = np.empty((count, size + sizes[0]), np.uint8)
        rows[:, :size] = heads.view(np.uint8).reshape(count, size)
        rows[:, size:] = np.frombuffer(b"".join(payloads), np.uint8).reshape(count, sizes[0])
        data = bytearray(rows)
        data.append(0)
        del data[0]
        positions = np.arange(0, count * (size + sizes[0]), size + sizes[0])
    else:
        octets = heads.tobytes()
        parts: list[bytes] = [b"\0"] * (2 * count + 1)
        parts[:-1:2] = [octets[at : at + size] for at in range(0, size * count, size)]
        parts[1::2] = payloads
        parts[0] = parts[0][1:]
        data = bytearray().join(parts)
        positions = np.zeros(count, np.int64)
        np.cumsum(lengths[:-1] + size, out=positions[1:])
    return RecordBatch(data, positions, timestamps, base_offset)


def _encode_few_payloads(payloads: Sequence[bytes], timestamps: list[int], base_offset: int) -> RecordBatch:
    """Encode a few payloads record by record: numpy's fixed costs are more than it would save."""
    head, front, crc32 = HEAD.pack, PLAIN_BODY.pack, zlib.crc32
    parts: list[bytes] = []
    positions: list[int] = []
    position = 0
    for payload, timestamp in zip(payloads, timestamps, strict=True):
        body = front(0, timestamp, -1, len(payload)) + payload + b"\0"
        parts += (head(base_offset, len(body) + 4, crc32(body)), body)
        positions.append(position)
        position += HEAD_BYTES + len(body)
        base_offset += 1
    return RecordBatch(b"".join(parts), positions, timestamps, base_offset - len(positions))


class _Sizes(dict[int, bytes]):
    """A length -> its four bytes; those of frequent sizes are made once."""

    def __missing__(self, size: int) -> bytes:
        packed = INT32.pack(size)
        if size < SIZES_KEPT:
            self[size] = packed
        return packed


SIZES_KEPT = 65_536
LENGTHS = _Sizes()
"""The four bytes of a length."""


def encode_keyed(
    keys: Sequence[bytes], payloads: Sequence[bytes], headers: bytes, timestamp: int, base_offset: int
) -> RecordBatch:
    """Return the stored form of records with a key, one time and the same `headers` (`encode_headers`).

    Costs about 0.7 us a record in a batch of many: one join and one CRC each; the heads are filled in for all at once.

    Raises:
        InvalidRecordError: the time is not above 0, or a key or a payload is too long.
    """
    _check_timestamps((timestamp,))
    sizes, join = LENGTHS, b"".join
    front = struct.pack(">bq", 0, timestamp)
    try:
        bodies = [
            join((front, sizes[len(key)], key, sizes[len(payload)], payload, headers))
            for key, payload in zip(keys, payloads, strict=True)
        ]
    except struct.error:
        raise InvalidRecordError("a key or a payload is too long") from None
    count = len(bodies)
    timestamps = [timestamp] * count if count < VECTOR_MIN_BODIES else np.full(count, timestamp, np.int64)
    return encode_bodies(bodies, timestamps, base_offset)


def encode_bodies(bodies: Sequence[bytes], timestamps: Positions, base_offset: int) -> RecordBatch:
    """Return the stored form of records given by the bytes under their CRCs; `timestamps` are those in the bodies.

    Costs one CRC a record in a batch of many: the heads are filled in for all at once.
    """
    count = len(bodies)
    if count < VECTOR_MIN_BODIES:
        return _encode_few_bodies(bodies, timestamps, base_offset)
    lengths = np.fromiter(map(len, bodies), np.int64, count)
    pieces: list[bytes] = [bytes(HEAD_BYTES)] * (2 * count)
    pieces[1::2] = bodies
    data = bytearray().join(pieces)
    positions = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1] + HEAD_BYTES, out=positions[1:])
    np.ndarray((len(data) - 7,), ">i8", data, 0, (1,))[positions] = np.arange(base_offset, base_offset + count)
    words = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))
    words[positions + 8] = lengths + 4
    words[positions + 12] = np.fromiter(map(zlib.crc32, bodies), np.uint32, count)
    return RecordBatch(data, positions, timestamps, base_offset)


def _encode_few_bodies(bodies: Sequence[bytes], timestamps: Positions, base_offset: int) -> RecordBatch:
    """Encode a few bodies record by record: numpy's fixed costs are more than it would save."""
    pack, crc32 = HEAD.pack, zlib.crc32
    parts: list[bytes] = []
    positions: list[int] = []
    position = 0
    for offset, body in enumerate(bodies, base_offset):
        size = len(body)
        parts += (pack(offset, size + 4, crc32(body)), body)
        positions.append(position)
        position += HEAD_BYTES + size
    return RecordBatch(bytearray().join(parts), positions, timestamps, base_offset)


def _check_timestamps(timestamps: Sequence[int]) -> None:
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


def uniform_run(data: Buffer, start: int, end: int) -> tuple[int, int]:
    """Return how many records of one size follow each other from `start` on, and that size in bytes; else (0, 0)."""
    if end - start < RECORD_BYTES_MIN:
        return 0, 0
    (length,) = INT32.unpack_from(data, start + 8)
    size = length + LENGTH_FROM
    if length < LENGTH_MIN or start + size > end:
        return 0, 0
    second = start + size + 8
    if second + 4 <= end and INT32.unpack_from(data, second)[0] != length:
        return 1, size  # the most frequent end of a search, without an array
    lengths = np.ndarray(((end - start) // size,), ">i4", data, start + 8, (size,))
    different = np.flatnonzero(lengths != length)
    return (int(different[0]) if len(different) else len(lengths)), size


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


def rebase(batch: RecordBatch, base_offset: int) -> RecordBatch:
    """Return the same records with offsets from `base_offset` on; the CRC does not cover the offset.

    Patches `batch.data` in place when it can be written to, else copies it once.
    """
    if memoryview(batch.data).readonly:
        data: Buffer = bytearray(batch.data)
    else:
        data, batch.base_offset = batch.data, base_offset
    if batch.count < VECTOR_MIN:
        pack_into = INT64.pack_into
        for offset, position in enumerate(batch.positions, base_offset):
            pack_into(data, position, offset)
    else:
        offsets = np.ndarray((len(data) - 7,), ">i8", data, 0, (1,))
        offsets[np.asarray(batch.positions)] = np.arange(base_offset, base_offset + batch.count)
    return RecordBatch(data, batch.positions, batch.timestamps, base_offset)


def mark_producer(batch: RecordBatch, producer_id: int, first_sequence: int) -> RecordBatch:
    """Return the batch with the header `PRODUCER_HEADER` behind the other headers of its first record.

    The header makes a resend recognisable after a restart: the log itself tells which batches were stored.

    Raises:
        InvalidRecordError: the first record has no room for one more header.
    """
    stop = batch.positions[1] if batch.count > 1 else len(batch.data)
    first = memoryview(batch.data)[:stop]
    count_at = headers_position(first, 0)
    if first[count_at] >= HEADERS_MAX:
        raise InvalidRecordError(f"the first record of a batch with a producer has over {HEADERS_MAX - 1} headers")
    body = b"".join(
        (
            first[HEAD_BYTES:count_at],
            (first[count_at] + 1).to_bytes(1, "big"),
            first[count_at + 1 :],
            INT32.pack(len(PRODUCER_HEADER)),
            PRODUCER_HEADER,
            INT32.pack(PRODUCER.size),
            PRODUCER.pack(producer_id, first_sequence, batch.count),
        )
    )
    (offset,) = INT64.unpack_from(first)
    data = bytearray(HEAD.pack(offset, len(body) + 4, zlib.crc32(body)))
    data += body
    grown = len(data) - stop
    data += memoryview(batch.data)[stop:]
    positions: Positions
    if isinstance(batch.positions, np.ndarray):
        positions = batch.positions + grown
        positions[0] = 0
    else:
        positions = [0, *(at + grown for at in batch.positions[1:])]
    return RecordBatch(data, positions, batch.timestamps, batch.base_offset)


def headers_position(data: Buffer, position: int) -> int:
    """Return the position of the number of headers of the good record at `position`."""
    (key_length,) = INT32.unpack_from(data, position + HEAD_BYTES + 9)
    position += HEAD_BYTES + BODY.size + max(key_length, 0)
    (payload_length,) = INT32.unpack_from(data, position)
    return position + 4 + int(payload_length)


def public_headers(headers: Iterable[tuple[bytes, bytes | None]]) -> Headers:
    """Return the headers without the bus's own."""
    return tuple(pair for pair in headers if not pair[0].startswith(RESERVED_HEADER_PREFIX))


def read_producer(data: bytes, position: int) -> tuple[int, int, int] | None:
    """Return producer id, first sequence and count of the batch that begins with the good record at `position`."""
    at = headers_position(data, position)
    if not data[at]:
        return None
    key, value = decode_headers(data, at + 1, data[at])[-1]
    if key != PRODUCER_HEADER or value is None or len(value) != PRODUCER.size:
        return None
    producer_id, first_sequence, count = PRODUCER.unpack(value)
    return producer_id, first_sequence, count
