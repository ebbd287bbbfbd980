"""Records that a client made in the stored form -> a batch that may be appended; every byte is checked."""

import numpy as np

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
    for number in np.flatnonzero(columns.headers_counts).tolist():
        _refuse_reserved(data, int(columns.headers_positions[number]), int(columns.headers_counts[number]))
    return RecordBatch(data, positions, columns.timestamps, -1)


def _parse_few(data: Buffer, positions: list[int]) -> RecordBatch:
    """Parse a few records one by one; `positions` are those of `walk`."""
    end = positions.pop()
    if end != len(data) or not positions:
        raise InvalidRecordError(f"{len(positions)} whole records in {end} of {len(data)} bytes")
    timestamps = []
    for number, at in enumerate(positions):
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
            _refuse_reserved(data, headers_at, data[headers_at])
    return RecordBatch(data, positions, timestamps, -1)


def _refuse_reserved(data: Buffer, headers_at: int, count: int) -> None:
    """Check that a record has none of the bus's own headers.

    Raises:
        InvalidRecordError: a header's key begins with '$'.
    """
    if any(key.startswith(RESERVED_HEADER_PREFIX) for key, _ in decode_headers(data, headers_at + 1, count)):
        raise InvalidRecordError("header keys that begin with '$' are the server's own")
