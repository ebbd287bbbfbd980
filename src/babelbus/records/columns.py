"""A chunk of stored records -> numpy columns, without a step per record.

`decode_columns` serves bulk readers (Spark, exports): every field becomes an array, keys and payloads stay in place
and are named by position and length, ready for Arrow.
"""

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from babelbus.records.checksum import crcs_hold
from babelbus.records.format import (
    HEAD_BYTES,
    HEADERS_MAX,
    LENGTH_FROM,
    LENGTH_MIN,
    PLAIN_FIELDS,
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

I64 = npt.NDArray[np.int64]
RUN_MIN = 16
"""A shorter run of records of one size is not worth an array of its own."""
RUN_BYTES_MAX = 2**20
"""How many records are searched for a run at a time."""
STEPS_MIN, STEPS_MAX = 4, 4096
"""How many records are walked one by one before the next search for a run: the more, the longer there was none."""
LANES_MIN = 32
"""Record by record is faster with fewer runs than this to walk in step."""


class Columns(msgspec.Struct, frozen=True, eq=False):
    """The records of one chunk, an array for each field, all of one length. Positions count bytes of `data`.

    `key_lengths` is -1 for a record without a key; `headers_positions` is the position of the number of headers.
    """

    data: Buffer
    positions: I64
    ends: I64
    offsets: I64
    timestamps: I64
    attributes: npt.NDArray[np.int8]
    key_lengths: I64
    payload_positions: I64
    payload_lengths: I64
    headers_positions: I64
    headers_counts: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def key_positions(self) -> I64:
        """Where each key begins."""
        return self.positions + (HEAD_BYTES + 13)


def find_positions(data: Buffer, start: int, end: int, hints: I64 | None = None) -> tuple[I64, int]:
    """Return where each whole record begins between `start` and `end`, and where the last record ends.

    `hints` are positions of some of the records, ascending (an index has one a 1,024): all the runs between them are
    walked at once, a step of numpy for each record of the longest run (0.02 us a record with 1,000 runs).
    """
    if hints is None or len(hints) < LANES_MIN:
        return _find_by_runs(data, start, end)
    count, size = uniform_run(data, start, end)
    if count * size + LENGTH_FROM > end - start:  # no room for a record of another size behind them
        return np.arange(start, start + count * size, size), start + count * size
    lengths = np.ndarray((len(data) - 3,), ">i4", data, 0, (1,))
    current = hints.copy()
    stops = np.append(hints[1:], end)
    lanes = np.arange(len(hints))
    steps: list[tuple[I64, I64]] = []
    while len(current):
        fits = current + LENGTH_FROM <= stops
        if not fits.all():
            current, stops, lanes = current[fits], stops[fits], lanes[fits]
            continue
        length = lengths[current + 8].astype(np.int64)
        following = current + LENGTH_FROM + length
        good = (length >= LENGTH_MIN) & (following <= stops)
        if not good.all():
            current, stops, lanes, following = current[good], stops[good], lanes[good], following[good]
        steps.append((lanes, current))
        keep = following < stops
        if keep.all():
            current = following
        else:
            current, stops, lanes = following[keep], stops[keep], lanes[keep]
    if not steps:
        return np.empty(0, np.int64), start
    positions = np.sort(np.concatenate([step for _, step in steps]))
    last = int(positions[-1])
    return positions, last + LENGTH_FROM + int(lengths[last + 8])


def _find_by_runs(data: Buffer, start: int, end: int) -> tuple[I64, int]:
    """Find runs of records of one size at once, and walk record by record through the bytes between the runs."""
    parts: list[I64] = []
    steps = STEPS_MIN
    while True:
        count, size = uniform_run(data, start, min(end, start + RUN_BYTES_MAX))
        if count >= RUN_MIN:
            parts.append(np.arange(start, start + count * size, size))
            start += count * size
            steps = STEPS_MIN
            continue
        steps_ = walk(data, start, end, steps)
        start = steps_.pop()
        parts.append(np.array(steps_, np.int64))
        if len(steps_) < steps:
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
    plain_columns = _decode_plain(data, positions)
    if plain_columns is not None:
        return plain_columns
    view4 = np.ndarray((len(data) - 3,), ">i4", data, 0, (1,))
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
    plain = (headers_counts == 0) & (headers_positions + 1 == ends)
    if not plain.all():
        _check_headers(data, positions, headers_positions, headers_counts, ends)
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
    )


def _decode_plain(data: Buffer, positions: I64) -> Columns | None:
    """Return the columns of records of one size without keys and headers; `None` for other records.

    Every field is then at a fixed stride, which is ten times faster.
    """
    count, first = len(positions), int(positions[0])
    size = int(positions[1]) - first if count > 1 else 0
    if count < LANES_MIN or first + count * size > len(data) or (np.diff(positions) != size).any():
        return None
    rows = np.ndarray((count,), PLAIN_FIELDS, data, first, (size,))
    payload_length = size - LENGTH_FROM - LENGTH_MIN
    if (
        payload_length < 0
        or (rows["length"] != size - LENGTH_FROM).any()
        or (rows["key_length"] != -1).any()
        or (rows["payload_length"] != payload_length).any()
        or np.ndarray((count,), np.uint8, data, first + size - 1, (size,)).any()
    ):
        return None
    payload_positions = positions + (size - 1 - payload_length)
    return Columns(
        data,
        positions,
        positions + size,
        rows["offset"].astype(np.int64),
        rows["timestamp"].astype(np.int64),
        rows["attributes"].astype(np.int8),
        np.full(count, -1, np.int64),
        payload_positions,
        np.full(count, payload_length, np.int64),
        positions + (size - 1),
        np.zeros(count, np.uint8),
    )


def _check_headers(
    data: Buffer, positions: I64, headers_positions: I64, counts: npt.NDArray[np.uint8], ends: I64
) -> None:
    """Check, in step for all records, a header at a time, that the headers of each record end where the record ends."""
    view4 = np.ndarray((len(data) - 3,), ">i4", data, 0, (1,))
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


def iterate(columns: Columns) -> Iterator[Record]:
    """Yield the records of a chunk in order, without the bus's own headers; about 1 us each."""
    data = columns.data
    make = Record
    keyed = columns.key_lengths.max(initial=-1) >= 0
    plain = not keyed and not columns.headers_counts.any() and not columns.attributes.any()
    offsets, timestamps = columns.offsets.tolist(), columns.timestamps.tolist()
    starts, stops = columns.payload_positions.tolist(), columns.headers_positions.tolist()
    if isinstance(data, bytes) and plain:
        none = ()
        for offset, timestamp, start, stop in zip(offsets, timestamps, starts, stops, strict=True):
            yield make(data[start:stop], None, none, timestamp, 0, offset)
        return
    rows = zip(
        offsets,
        timestamps,
        starts,
        stops,
        columns.key_lengths.tolist(),
        columns.attributes.tolist(),
        columns.headers_counts.tolist(),
        strict=True,
    )
    for offset, timestamp, start, stop, key_length, attributes, count in rows:
        key = bytes(data[start - 4 - key_length : start - 4]) if key_length >= 0 else None
        headers = public_headers(decode_headers(data, stop + 1, count)) if count else ()
        payload = None if attributes & TOMBSTONE else bytes(data[start:stop])
        yield make(payload, key, headers, timestamp, attributes & ~TOMBSTONE, offset)
