"""Records that a client made in the stored form -> a batch that may be appended; every byte is checked."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from babelbus.arrays import np
from babelbus.records.columns import decode_columns, find_positions
from babelbus.records.fields import crcs_at
from babelbus.records.format import (
    ATTRIBUTES_KNOWN,
    BODY,
    CRC_IS_WRONG,
    FEW,
    HEAD_BYTES,
    RESERVED_HEADER_PREFIX,
    Buffer,
    CorruptRecordError,
    InvalidRecordError,
    decode_headers,
    headers_position,
    record_crcs,
    record_error,
    walk,
)
from babelbus.records.record import RecordBatch

RECORDS_MAX = 2**20
"""Most records of one batch."""
TOGETHER_MIN = 16
"""From this number of parts on, arrays for all of them are faster than a loop for each."""
TOGETHER_BYTES_MAX = 65_536
"""A larger part is not copied to be checked with others."""


class ChecksumError(InvalidRecordError):
    """The CRC of a record does not match its bytes; sending the record again may help."""

    retriable = True


def parse_records(data: Buffer) -> RecordBatch:
    """Return `data` as a batch: one or more whole records with times above 0 and without the bus's own headers.

    Offsets are ignored: the base offset is -1.

    Raises:
        ChecksumError: a CRC is wrong.
        InvalidRecordError: any other fault.
    """
    first = walk(data, count_max=FEW + 1)
    if len(first) <= FEW + 1:
        return _parse_few(data, first)
    positions, end = find_positions(data, 0, len(data))
    if end != len(data) or not 1 <= len(positions) <= RECORDS_MAX:
        raise InvalidRecordError(f"{len(positions)} whole records in {end} of {len(data)} bytes")
    wrong = record_crcs(data, positions, end) != crcs_at(data, positions)
    if wrong.any():
        raise ChecksumError(f"the CRC of record {int(np.flatnonzero(wrong)[0])} is wrong")
    try:
        columns = decode_columns(data, positions)
    except CorruptRecordError as error:
        raise InvalidRecordError(str(error)) from error
    if columns.timestamps.min() <= 0:
        raise InvalidRecordError("a record's time is milliseconds since the epoch and above 0")
    if columns.attributes.min() < 0 or columns.attributes.max() > ATTRIBUTES_KNOWN:
        raise InvalidRecordError(f"a record's attributes are 0 to {ATTRIBUTES_KNOWN}")
    keyed = np.flatnonzero(columns.headers_counts)
    counts, starts = columns.headers_counts[keyed].tolist(), columns.headers_positions[keyed].tolist()
    for headers_at, count, stop in zip(starts, counts, columns.ends[keyed].tolist(), strict=True):
        _refuse_reserved(data, headers_at, count, stop)
    return RecordBatch(data, positions, columns.timestamps, -1)


def parse_many(parts: Sequence[Buffer]) -> list[RecordBatch | InvalidRecordError]:
    """Return what `parse_records` returns or raises for each part; many small parts are checked together."""
    if len(parts) >= TOGETHER_MIN and max(map(len, parts)) <= TOGETHER_BYTES_MAX:
        together = _parse_together(parts)
        if together is not None:
            return together
    batches: list[RecordBatch | InvalidRecordError] = []
    for part in parts:
        try:
            batches.append(parse_records(part))
        except InvalidRecordError as error:
            batches.append(error)
    return batches


def _parse_together(parts: Sequence[Buffer]) -> list[RecordBatch | InvalidRecordError] | None:
    """Return the batches of all parts, `None` if a part is not good."""
    data = bytearray().join(parts)
    try:
        whole = parse_records(data)
    except InvalidRecordError:
        return None
    edges = list(accumulate(map(len, parts), initial=0))
    positions = np.append(np.asarray(whole.positions), len(data))
    places = np.searchsorted(positions, edges)
    if (positions[places] != edges).any() or (np.diff(places) == 0).any():
        return None  # a part is empty or ends inside a record
    view, timestamps = memoryview(data), np.asarray(whole.timestamps).tolist()
    batches: list[RecordBatch | InvalidRecordError] = []
    for (start, stop), (first, after) in zip(pairwise(edges), pairwise(places.tolist()), strict=True):
        starts = [0] if after - first == 1 else (positions[first:after] - start).tolist()
        batches.append(RecordBatch(view[start:stop], starts, timestamps[first:after], -1))
    return batches


def _parse_few(data: Buffer, positions: list[int]) -> RecordBatch:
    """Parse a few records one by one; `positions` are those of `walk`."""
    end = positions.pop()
    if end != len(data) or not positions:
        raise InvalidRecordError(f"{len(positions)} whole records in {end} of {len(data)} bytes")
    timestamps = []
    for number, (at, stop) in enumerate(pairwise([*positions, end])):
        reason = record_error(data, at, end)
        if reason is not None:
            wrong = ChecksumError if reason == CRC_IS_WRONG else InvalidRecordError
            raise wrong(f"record {number}: {reason}")
        attributes, timestamp, _ = BODY.unpack_from(data, at + HEAD_BYTES)
        if not 0 <= attributes <= ATTRIBUTES_KNOWN:
            raise InvalidRecordError(f"a record's attributes are 0 to {ATTRIBUTES_KNOWN}")
        timestamps.append(timestamp)
        headers_at = headers_position(data, at)
        if data[headers_at]:
            _refuse_reserved(data, headers_at, data[headers_at], stop)
    return RecordBatch(data, positions, timestamps, -1)


def _refuse_reserved(data: Buffer, headers_at: int, count: int, stop: int) -> None:
    """Check that a record has none of the bus's own headers.

    Raises:
        InvalidRecordError: a header's key begins with '$'.
    """
    if RESERVED_HEADER_PREFIX not in bytes(data[headers_at:stop]):  # a quick look, which most records pass
        return
    if any(key.startswith(RESERVED_HEADER_PREFIX) for key, _ in decode_headers(data, headers_at + 1, count)):
        raise InvalidRecordError("header keys that begin with '$' are the server's own")
