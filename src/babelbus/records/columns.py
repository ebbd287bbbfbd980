"""A chunk of stored records -> numpy columns, without a step per record.

`decode_columns` serves bulk readers (Spark, exports): every field becomes an array, keys and payloads stay in place
and are named by position and length, ready for Arrow.
"""

from collections.abc import Iterator

import msgspec

from babelbus.arrays import I8, I64, U8, np
from babelbus.records.equal_headers import Headed, find_equal
from babelbus.records.fields import crcs_hold, int32s
from babelbus.records.format import (
    HEAD_BYTES,
    HEADERS_MAX,
    LENGTH_FROM,
    TOMBSTONE,
    Buffer,
    CorruptRecordError,
    decode_headers,
    public_headers,
    record_error,
    uniform_run,
    walk,
)
from babelbus.records.record import Record

__all__ = [
    "Columns",
    "decode_chunk",
    "decode_columns",
    "find_positions",
    "iterate",
    "iterate_keys",
    "rows_of_key",
    "verify",
]

RUN_MIN = 16
"""A shorter run of records of one size is not worth an array of its own."""
RUN_BYTES_MAX = 2**20
"""How many records are searched for a run at a time."""
STEPS_MIN, STEPS_MAX = 4, 4096
"""How many records are walked one by one before the next search for a run: the more, the longer there was none."""

NEVER = 2**63


class Columns(msgspec.Struct, frozen=True, eq=False):
    """The records of one chunk, an array for each field, all of one length. Positions count bytes of `data`.

    `key_lengths` is -1 for a record without a key; `headers_positions` is the position of the number of headers.
    """

    data: Buffer
    positions: I64
    ends: I64
    offsets: I64
    timestamps: I64
    attributes: I8
    key_lengths: I64
    payload_positions: I64
    payload_lengths: I64
    headers_positions: I64
    headers_counts: U8
    headed: Headed | None = None
    """The headers, if all records have as many and the same first name."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def key_positions(self) -> I64:
        """Where each key begins."""
        return self.positions + (HEAD_BYTES + 13)


def find_positions(data: Buffer, start: int, end: int) -> tuple[I64, int]:
    """Return where each whole record begins between `start` and `end`, and where the last record ends.

    Runs of records of one size are found at once; through the bytes between the runs goes a step for each record.
    """
    parts: list[I64] = []
    steps = STEPS_MIN
    while True:
        count, size = uniform_run(data, start, min(end, start + RUN_BYTES_MAX))
        if count >= RUN_MIN:
            parts.append(np.arange(start, start + count * size, size))
            start += count * size
            steps = STEPS_MIN
            continue
        walked = walk(data, start, end, steps)
        start = walked.pop()
        parts.append(np.array(walked, np.int64))
        if len(walked) < steps:
            return np.concatenate(parts), start
        steps = min(2 * steps, STEPS_MAX)


def decode_columns(data: Buffer, positions: I64) -> Columns:
    """Return the fields of the records that begin at `positions`.

    Raises:
        CorruptRecordError: the inner lengths of a record do not add up to its length.
    """
    positions = np.asarray(positions, np.int64)
    if len(positions) == 0:
        empty = np.empty(0, np.int64)
        return Columns(
            data, empty, empty, empty, empty, empty.astype(np.int8), empty, empty, empty, empty, empty.astype(np.uint8)
        )
    view4 = int32s(data)
    view8 = np.ndarray((len(data) - 7,), ">i8", data, 0, (1,))
    octets = np.frombuffer(data, np.uint8)
    lengths = view4[positions + 8].astype(np.int64)
    ends = positions + (LENGTH_FROM + lengths)
    key_lengths = view4[positions + (HEAD_BYTES + 9)].astype(np.int64)
    key_bytes = np.maximum(key_lengths, 0)
    payload_positions = positions + (HEAD_BYTES + 17) + key_bytes
    good = (key_lengths >= -1) & (payload_positions < ends) & (ends <= len(data))
    if not good.all():
        raise CorruptRecordError(int(positions[np.flatnonzero(~good)[0]]), "its key does not fit")
    payload_lengths = view4[payload_positions - 4].astype(np.int64)
    headers_positions = payload_positions + payload_lengths
    good = (payload_lengths >= 0) & (headers_positions < ends)
    if not good.all():
        raise CorruptRecordError(int(positions[np.flatnonzero(~good)[0]]), "its payload does not fit")
    headers_counts = octets[headers_positions]
    checked, headed = (headers_counts == 0) & (headers_positions + 1 == ends), None
    if isinstance(data, bytes) and headers_counts.any():
        equal, headed = find_equal(data, headers_positions, headers_counts, ends)
        checked |= equal
    if not checked.all():
        rest = np.flatnonzero(~checked)
        _check_headers(data, positions[rest], headers_positions[rest], headers_counts[rest], ends[rest])
    return Columns(
        data,
        positions,
        ends,
        view8[positions].astype(np.int64),
        view8[positions + (HEAD_BYTES + 1)].astype(np.int64),
        octets[positions + HEAD_BYTES].view(np.int8),
        key_lengths,
        payload_positions,
        payload_lengths,
        headers_positions,
        headers_counts,
        headed,
    )


def _check_headers(data: Buffer, positions: I64, headers_positions: I64, counts: U8, ends: I64) -> None:
    """Check, in step for all records, a header at a time, that the headers of each record end where the record ends."""
    view4 = int32s(data)
    current = headers_positions + 1
    left = counts.astype(np.int64)
    bad = left > HEADERS_MAX
    left[bad] = 0
    while True:
        open_ = np.flatnonzero(left > 0)
        if len(open_) == 0:
            break
        for least in (0, -1):
            at = current[open_]
            fits = at + 4 <= ends[open_]
            size = view4[np.minimum(at, len(data) - 4)].astype(np.int64)
            fits &= size >= least
            bad[open_[~fits]] = True
            current[open_] = np.where(fits, at + 4 + np.maximum(size, 0), ends[open_])
        left[open_] -= 1
        left[bad] = 0
    bad |= current != ends
    if bad.any():
        raise CorruptRecordError(int(positions[np.flatnonzero(bad)[0]]), "its headers do not fit")


def verify(data: Buffer, positions: I64, end: int) -> None:
    """Check the CRC of every record, all at once; search for the wrong record only when that fails.

    Raises:
        CorruptRecordError: the record at this position is not the one that was written.
    """
    if crcs_hold(data, positions, end):
        return
    for position in positions.tolist():
        reason = record_error(data, position, end)
        if reason:
            raise CorruptRecordError(position, reason)
    raise CorruptRecordError(int(positions[0]), "the CRCs of the chunk do not add up")


def decode_chunk(data: Buffer, *, verified: bool = False) -> Columns:
    """Return the columns of a chunk of whole records; their CRCs are checked unless the chunk is `verified`.

    Raises:
        CorruptRecordError: a record is not the one that was written, or the chunk ends inside a record.
    """
    positions, end = find_positions(data, 0, len(data))
    if end != len(data):
        raise CorruptRecordError(end, "the chunk ends inside a record")
    if not verified:
        verify(data, positions, end)
    return decode_columns(data, positions)


def iterate_rows(columns: Columns) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """Yield the offset, timestamp, payload's and headers' position, key length, attributes and headers of each record.

    The key ends 4 bytes in front of the payload; of the headers it is the number.
    """
    return zip(
        columns.offsets.tolist(),
        columns.timestamps.tolist(),
        columns.payload_positions.tolist(),
        columns.headers_positions.tolist(),
        columns.key_lengths.tolist(),
        columns.attributes.tolist(),
        columns.headers_counts.tolist(),
        strict=True,
    )


def iterate(columns: Columns) -> Iterator[Record]:
    """Yield the records of a chunk in order, without the bus's own headers; about 1 us each."""
    data = columns.data
    make = Record
    for offset, timestamp, start, stop, key_length, attributes, count in iterate_rows(columns):
        key = bytes(data[start - 4 - key_length : start - 4]) if key_length >= 0 else None
        headers = public_headers(decode_headers(data, stop + 1, count)) if count else ()
        payload = None if attributes & TOMBSTONE else bytes(data[start:stop])
        yield make(payload, key, headers, timestamp, attributes & ~TOMBSTONE, offset)


def rows_of_key(columns: Columns, key: bytes) -> I64:
    """Return the rows of a key: all keys of its length are compared one byte column at a time, from the end."""
    rows = np.flatnonzero(columns.key_lengths == len(key))
    octets = np.frombuffer(columns.data, np.uint8)
    ends = columns.payload_positions - 5  # the key's last byte, in front of the payload's length
    for back, byte in enumerate(reversed(key)):  # keys differ at their end: few rows are left after some steps
        if not len(rows):
            break
        rows = rows[octets[ends[rows] - back] == byte]
    return rows


def iterate_keys(columns: Columns) -> Iterator[tuple[int, bytes | None, int]]:
    """Yield offset, key, and the time of a tombstone in ms; `NEVER` stands for the time of another record."""
    data = columns.data
    rows = zip(
        columns.offsets.tolist(),
        columns.key_positions.tolist(),
        columns.key_lengths.tolist(),
        columns.attributes.tolist(),
        columns.timestamps.tolist(),
        strict=True,
    )
    for offset, at, size, attributes, timestamp in rows:
        key = bytes(data[at : at + size]) if size >= 0 else None
        yield offset, key, timestamp if attributes & TOMBSTONE else NEVER
