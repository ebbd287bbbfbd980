"""Stored records <-> rows of the table `records`: one row a record, in columns that SQL can ask for.

The CRC of a row is the one of the record's stored form (`format`), so that a row that anything or anybody changed does
not fit any more when it is put together again. No CRC covers an offset: the primary key and the rule that offsets of a
range are dense stand for it.
"""

import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from babelbus.records.checksum import crcs_hold
from babelbus.records.columns import Columns, decode_columns
from babelbus.records.format import (
    BODY,
    CRC_IS_WRONG,
    HEAD,
    HEAD_BYTES,
    INT32,
    LENGTH_MIN,
    PLAIN_DTYPE,
    PRODUCER,
    PRODUCER_HEADER,
    TOMBSTONE,
    decode_headers,
    record_error,
)
from babelbus.records.record import RecordBatch, StoredBatch

Row = tuple[int, int, int, int, bytes | None, bytes | None, bytes | None]
"""Offset, timestamp, attributes, CRC, key, payload, headers."""
BARE_BYTES = 33
"""Size of a stored record without its key, its payload and its headers."""
NULL = INT32.pack(-1)
COPY_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_END = b"\xff\xff"
COPY_COLUMNS = ("partition_id", "offset", "timestamp", "attributes", "crc", "key", "payload", "headers")
_FIXED = {"partition": ">i4", "offset": ">i8", "timestamp": ">i8", "attributes": ">i2", "crc": ">i8"}
COPY_FRONT = np.dtype(
    [("fields", ">i2"), *(pair for name, kind in _FIXED.items() for pair in ((f"{name}_bytes", ">i4"), (name, kind)))]
)
"""The columns of fixed size of one row as `COPY ... (FORMAT BINARY)` takes them, each behind its length."""


class Rows(msgspec.Struct, frozen=True):
    """A batch in columns. `keys`, `headers` and `attributes` are `None` when no record of the batch has any.

    A payload of `None` is a tombstone's; `headers` are in the stored form.
    """

    timestamps: list[int]
    crcs: list[int]
    payloads: Sequence[bytes | None]
    attributes: list[int] | None
    keys: list[bytes | None] | None
    headers: list[bytes | None] | None
    size_bytes: int
    producer: StoredBatch | None

    def __len__(self) -> int:
        return len(self.payloads)


def to_rows(batch: RecordBatch, base_offset: int) -> Rows:
    """Return the columns of a batch of good records that gets the offsets `base_offset` and up. About 0.3 us a
    record.
    """
    data = bytes(batch.data)
    columns = decode_columns(data, np.asarray(batch.positions, np.int64))
    crcs = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))[columns.positions + 12].tolist()
    starts, stops = columns.payload_positions.tolist(), columns.headers_positions.tolist()
    payloads: list[bytes | None] = [data[start:stop] for start, stop in zip(starts, stops, strict=True)]
    timestamps = columns.timestamps.tolist()
    keyed = columns.key_lengths.max(initial=-1) >= 0
    if not keyed and not columns.headers_counts.any() and not columns.attributes.any():
        return Rows(timestamps, crcs, payloads, None, None, None, len(data), None)
    sizes = columns.key_lengths.tolist()
    keys = [data[at - 4 - size : at - 4] if size >= 0 else None for at, size in zip(starts, sizes, strict=True)]
    ends, counts = columns.ends.tolist(), columns.headers_counts.tolist()
    headers = [data[at:end] if count else None for at, end, count in zip(stops, ends, counts, strict=True)]
    attributes = columns.attributes.tolist()
    for number in np.flatnonzero(columns.attributes & TOMBSTONE).tolist():
        payloads[number] = payloads[number] or None
    return Rows(
        timestamps, crcs, payloads, attributes, keys, headers, len(data), _producer(columns, timestamps[0], base_offset)
    )


def _producer(columns: Columns, timestamp: int, base_offset: int) -> StoredBatch | None:
    """Return what the first record tells of the producer of the batch."""
    if not columns.headers_counts[0]:
        return None
    found = decode_headers(columns.data, int(columns.headers_positions[0]) + 1, int(columns.headers_counts[0]))
    key, value = found[-1]
    if key != PRODUCER_HEADER or value is None or len(value) != PRODUCER.size:
        return None
    producer_id, first_sequence, count = PRODUCER.unpack(value)
    return StoredBatch(producer_id, first_sequence, count, base_offset, timestamp)


def to_copy(rows: Rows, partition_id: int, base_offset: int) -> bytes:
    """Return the rows as PostgreSQL's binary `COPY` takes them: three times as fast as an `INSERT` of arrays."""
    count = len(rows)
    fronts = np.empty(count, COPY_FRONT)
    fronts["fields"] = len(COPY_COLUMNS)
    for name in _FIXED:
        fronts[f"{name}_bytes"] = COPY_FRONT[name].itemsize
    fronts["partition"] = partition_id
    fronts["offset"] = np.arange(base_offset, base_offset + count)
    fronts["timestamp"] = rows.timestamps
    fronts["attributes"] = 0 if rows.attributes is None else rows.attributes
    fronts["crc"] = rows.crcs
    octets, size, pack = fronts.tobytes(), COPY_FRONT.itemsize, INT32.pack
    parts: list[bytes] = [COPY_BEGIN]
    none: list[bytes | None] = [None] * count
    for at, key, payload, headers in zip(
        range(0, size * count, size), rows.keys or none, rows.payloads, rows.headers or none, strict=True
    ):
        parts.append(octets[at : at + size])
        for value in (key, payload, headers):
            parts += (NULL,) if value is None else (pack(len(value)), value)
    parts.append(COPY_END)
    return b"".join(parts)


def sizes(rows: Sequence[Row]) -> list[int]:
    """Return how many bytes the stored form of each row has, up to the first whose columns hold what no record has."""
    found = []
    try:
        for _, _, _, _, key, payload, headers in rows:
            found.append(
                BARE_BYTES
                + (0 if key is None else len(key))
                + (0 if payload is None else len(payload))
                + (1 if headers is None else len(headers))
            )
    except TypeError:
        pass  # said by the length of what is given
    return found


def to_stored(rows: Sequence[Row]) -> tuple[bytes, int, str | None]:
    """Return the stored form of rows as far as they are good, how many are, and what is wrong with the next one."""
    if not rows:
        return b"", 0, None
    try:
        plain = _join_plain(rows)
    except (TypeError, ValueError, OverflowError):  # a column holds what no record has; row by row tells which
        plain = None
    if plain is not None:
        return plain, len(rows), None
    parts: list[bytes] = []
    for number, row in enumerate(rows):
        try:
            record = _join_row(row)
        except (TypeError, ValueError, struct.error) as error:
            return b"".join(parts), number, f"its columns hold what no record has: {type(error).__name__}"
        reason = record_error(record, 0, len(record))
        if reason is not None:
            return b"".join(parts), number, reason if reason == CRC_IS_WRONG else f"{reason}; or {CRC_IS_WRONG}"
        parts.append(record)
    return b"".join(parts), len(rows), None


def _join_plain(rows: Sequence[Row]) -> bytes | None:
    """Return the stored form of rows that are a payload and a time alone, or `None` when one is not, or is not good."""
    offsets, timestamps, attributes, crcs, keys, payloads, headers = zip(*rows, strict=True)
    count = len(rows)
    if any(attributes) or keys.count(None) != count or headers.count(None) != count or None in payloads:
        return None
    lengths = np.fromiter(map(len, payloads), np.int64, count)
    heads = np.empty(count, PLAIN_DTYPE)
    heads["end"] = 0
    heads["offset"] = offsets
    heads["length"] = lengths + LENGTH_MIN
    heads["crc"] = crcs
    heads["attributes"] = 0
    heads["timestamp"] = timestamps
    heads["key_length"] = -1
    heads["payload_length"] = lengths
    octets, size = heads.tobytes(), PLAIN_DTYPE.itemsize
    parts: list[bytes] = [b"\0"] * (2 * count + 1)
    parts[:-1:2] = [octets[at : at + size] for at in range(0, size * count, size)]
    parts[1::2] = payloads
    parts[0] = parts[0][1:]
    data = b"".join(parts)
    positions = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1] + size, out=positions[1:])
    return data if min(timestamps) > 0 and crcs_hold(data, positions, len(data)) else None


def _join_row(row: Row) -> bytes:
    """Return the stored form of one row, whose CRC may be wrong."""
    offset, timestamp, attributes, crc, key, payload, headers = row
    if payload is None and not attributes & TOMBSTONE:
        raise ValueError("no payload, and no tombstone")
    body = b"".join(
        (
            BODY.pack(attributes, timestamp, -1 if key is None else len(key)),
            key or b"",
            INT32.pack(len(payload or b"")),
            payload or b"",
            b"\0" if headers is None else headers,
        )
    )
    return HEAD.pack(offset, len(body) + HEAD_BYTES - 12, crc) + body
