"""Batches of many records <-> bytes of a `.log` file, by numpy; `plain` has the stored form of a record."""

import struct
import zlib
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise

from babelbus.arrays import I64, U32, Rows, np
from babelbus.records.plain import *  # noqa: F403 - the form of a record is part of the form of a batch
from babelbus.records.plain import (
    BODY,
    HEAD,
    HEAD_BYTES,
    HEADERS_MAX,
    INT32,
    INT64,
    LENGTH_FROM,
    LENGTH_MIN,
    PLAIN_BODY,
    RECORD_BYTES_MIN,
    Buffer,
    InvalidRecordError,
    check_timestamps,
    decode_headers,
    join_bodies,
    record_bodies,
)
from babelbus.records.record import Positions, Record, RecordBatch

FEW = 16
"""Up to this number of records plain code is faster than numpy."""
CUT_RECORDS = 1024
"""So many bodies are cut out at a time, so that they are still in the cache when their CRC is computed."""
PRODUCER_HEADER = b"$batch"
"""Header of the first record of a batch that has a producer id: producer id i64, first sequence i64, count i32."""
PRODUCER = struct.Struct(">qqi")
PRODUCER_FIELD = INT32.pack(len(PRODUCER_HEADER)) + PRODUCER_HEADER + INT32.pack(PRODUCER.size)
"""The name of the header and the size of its value, as in a record."""


@cache
def head_fields() -> "np.dtype[np.void]":
    """Return the fields of a record's head."""
    return np.dtype([("offset", ">i8"), ("length", ">i4"), ("crc", ">u4")])


@cache
def plain_fields() -> "np.dtype[np.void]":
    """Return the fields of a record without a key up to its payload."""
    return np.dtype(
        {
            "names": ["offset", "length", "crc", "attributes", "timestamp", "key_length", "payload_length"],
            "formats": [">i8", ">i4", ">u4", "i1", ">i8", ">i4", ">i4"],
            "offsets": [0, 8, 12, 16, 17, 25, 29],
            "itemsize": HEAD_BYTES + PLAIN_BODY.size,
        }
    )


def encode_batch(records: Sequence[Record], base_offset: int = 0) -> RecordBatch:
    """Return the stored form of `records` with offsets from `base_offset` on.

    Costs about 2 us for a record with a key or headers.

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
    return encode_bodies(record_bodies(records), timestamps, base_offset)


def encode_payloads(payloads: Sequence[bytes], timestamps: list[int], base_offset: int = 0) -> RecordBatch:
    """Return the stored form of records with a payload and a time only.

    Costs about 0.4 us a record in a batch of many of one size, 0.8 us when sizes differ.

    Raises:
        InvalidRecordError: a time is not above 0.
    """
    count = len(payloads)
    if count:
        check_timestamps(timestamps)
    if count > FEW and len(set(map(len, payloads))) == 1:
        heads = make_heads(np.full(count, len(payloads[0])), timestamps, base_offset)
        return encode_uniform(heads, b"".join(payloads), timestamps, base_offset)
    pack = PLAIN_BODY.pack
    bodies = [
        b"%b%b\0" % (pack(0, timestamp, -1, len(payload)), payload)
        for payload, timestamp in zip(payloads, timestamps, strict=True)
    ]
    return encode_bodies(bodies, timestamps, base_offset)


def make_heads(sizes: I64, timestamps: Positions, base_offset: int = 0) -> Rows:
    """Return the `plain_fields` of records with payloads of these sizes, but for their CRCs."""
    heads = np.zeros(len(sizes), plain_fields())
    heads["offset"] = np.arange(base_offset, base_offset + len(sizes))
    heads["length"] = sizes + LENGTH_MIN
    heads["timestamp"] = timestamps
    heads["key_length"] = -1
    heads["payload_length"] = sizes
    return heads


def encode_uniform(heads: Rows, payloads: Buffer, timestamps: Positions, base_offset: int = 0) -> RecordBatch:
    """Return records whose payloads, joined in `payloads`, are of one size; `heads` as of `make_heads`."""
    count, head_bytes = len(heads), heads.itemsize
    size = head_bytes + len(payloads) // count + 1
    data = bytearray(count * size)
    rows = np.frombuffer(data, np.uint8).reshape(count, size)
    rows[:, :head_bytes] = heads.view(np.uint8).reshape(count, head_bytes)
    rows[:, head_bytes:-1] = np.frombuffer(payloads, np.uint8).reshape(count, size - head_bytes - 1)
    return write_crcs(data, np.arange(0, len(data), size), timestamps, base_offset)


def write_crcs(data: bytearray, positions: I64, timestamps: Positions, base_offset: int) -> RecordBatch:
    """Return the records at `positions`, after their CRCs were written into `data`."""
    crcs = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))
    crcs[positions + LENGTH_FROM] = record_crcs(data, positions, len(data))
    return RecordBatch(data, positions, timestamps, base_offset)


def record_crcs(data: Buffer, positions: I64, end: int) -> U32:
    """Return the CRC of each of the records at `positions`, which follow each other without gaps up to `end`.

    Costs 0.2 us a record of records of one size, which numpy cuts out together, and 0.5 us of others.
    """
    count, crc32 = len(positions), zlib.crc32
    sizes = np.diff(positions, append=end)
    if count > FEW and (sizes == sizes[0]).all():
        size, start = int(sizes[0]), int(positions[0]) + HEAD_BYTES
        bodies = np.ndarray((count,), f"V{size - HEAD_BYTES}", data, start, (size,))
        parts = (bodies[first : first + CUT_RECORDS].tolist() for first in range(0, count, CUT_RECORDS))
        return np.fromiter(map(crc32, chain.from_iterable(parts)), np.uint32, count)
    view, stops = memoryview(data), [*positions.tolist(), end]
    return np.array([crc32(view[at + HEAD_BYTES : stop]) for at, stop in pairwise(stops)], np.uint32)


class _Sizes(dict[int, bytes]):
    """A length -> its four bytes; the bytes of frequent lengths are made once."""

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
    check_timestamps((timestamp,))
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
    timestamps = [timestamp] * count if count <= FEW else np.full(count, timestamp, np.int64)
    return encode_bodies(bodies, timestamps, base_offset)


def encode_bodies(bodies: Sequence[bytes], timestamps: Positions, base_offset: int) -> RecordBatch:
    """Encode records given by the bytes under their CRCs; `timestamps` are those in the bodies.

    Costs one CRC a record in a batch of many: the heads are filled in for all at once.
    """
    count = len(bodies)
    if count <= FEW:
        return join_bodies(bodies, timestamps, base_offset)
    lengths = np.fromiter(map(len, bodies), np.int64, count)
    heads = np.empty(count, head_fields())
    heads["offset"] = np.arange(base_offset, base_offset + count)
    heads["length"] = lengths + 4
    heads["crc"] = np.fromiter(map(zlib.crc32, bodies), np.uint32, count)
    pieces = [b""] * (2 * count)
    pieces[::2] = heads.view(f"V{HEAD_BYTES}").tolist()
    pieces[1::2] = bodies
    positions = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1] + HEAD_BYTES, out=positions[1:])
    return RecordBatch(bytearray().join(pieces), positions, timestamps, base_offset)


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


def rebase(batch: RecordBatch, base_offset: int) -> RecordBatch:
    """Return the same records with offsets from `base_offset` on; the CRC does not cover the offset.

    Patches `batch.data` in place when it can be written to, else copies it once.
    """
    if memoryview(batch.data).readonly:
        data: Buffer = bytearray(batch.data)
    else:
        data, batch.base_offset = batch.data, base_offset
    if batch.count <= FEW:
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
    body = _marked_body(first, producer_id, first_sequence, batch.count)
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


def _marked_body(record: memoryview, producer_id: int, first_sequence: int, count: int) -> bytes:
    count_at = headers_position(record, 0)
    if record[count_at] >= HEADERS_MAX:
        raise InvalidRecordError(f"the first record of a batch with a producer has over {HEADERS_MAX - 1} headers")
    headers = (record[count_at] + 1).to_bytes(1, "big")
    mark = PRODUCER.pack(producer_id, first_sequence, count)
    return b"".join((record[HEAD_BYTES:count_at], headers, record[count_at + 1 :], PRODUCER_FIELD, mark))


def batch_bodies(batch: RecordBatch, producer_id: int, first_sequence: int) -> list[bytes]:
    """Return the bytes under the CRCs of the records, marked as by `mark_producer` unless the producer id is -1.

    Raises:
        InvalidRecordError: as `mark_producer`.
    """
    view = memoryview(batch.data)
    starts = list(batch.positions)
    stops = [*starts[1:], len(view)]
    first: list[bytes] = []
    if producer_id >= 0:
        first.append(_marked_body(view[: stops[0]], producer_id, first_sequence, batch.count))
        del starts[0], stops[0]
    return first + [bytes(view[start + HEAD_BYTES : stop]) for start, stop in zip(starts, stops, strict=True)]


def headers_position(data: Buffer, position: int) -> int:
    """Return the position of the number of headers of the good record at `position`."""
    (key_length,) = INT32.unpack_from(data, position + HEAD_BYTES + 9)
    position += HEAD_BYTES + BODY.size + max(key_length, 0)
    (payload_length,) = INT32.unpack_from(data, position)
    return position + 4 + int(payload_length)


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
