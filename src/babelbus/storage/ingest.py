"""Records that a client made in the stored form -> a batch that may be appended; nothing of them is believed."""

import zlib
from itertools import pairwise

import numpy as np

from babelbus.storage.columns import decode_columns, find_positions
from babelbus.storage.format import (
    ATTRIBUTES_KNOWN,
    HEAD_BYTES,
    RESERVED_HEADER_PREFIX,
    Buffer,
    CorruptRecordError,
    InvalidRecordError,
    decode_headers,
)
from babelbus.storage.record import RecordBatch

RECORDS_MAX = 2**20
"""Most records of one batch."""


class ChecksumError(InvalidRecordError):
    """The CRC of a record is not the one of its bytes; sending it again may help."""


def parse_records(data: Buffer) -> RecordBatch:
    """Give the batch that `data` is: one or more whole records with times above 0 and no header of the bus's own.

    Each CRC is checked by itself (0.7 us a record): the quick check of `checksum` is for bytes that we wrote, here
    somebody could have made two wrong ones that cancel out. Offsets are ignored.

    Raises:
        ChecksumError: a CRC is wrong.
        InvalidRecordError: anything else is.
    """
    positions, end = find_positions(data, 0, len(data))
    if end != len(data) or not 1 <= len(positions) <= RECORDS_MAX:
        raise InvalidRecordError(f"{len(positions)} whole records in {end} of {len(data)} bytes")
    view, stops = memoryview(data), positions.tolist()
    stops.append(end)
    crc32 = zlib.crc32
    found = [crc32(view[at + HEAD_BYTES : stop]) for at, stop in pairwise(stops)]
    stored = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))[positions + 12].tolist()
    if found != stored:
        number = next(number for number, crc in enumerate(found) if crc != stored[number])
        raise ChecksumError(f"the CRC of record {number} is wrong")
    try:
        columns = decode_columns(data, positions)
    except CorruptRecordError as error:
        raise InvalidRecordError(str(error)) from error
    if columns.timestamps.min() <= 0:
        raise InvalidRecordError("a record's time is milliseconds since the epoch and above 0")
    if columns.attributes.min() < 0 or columns.attributes.max() > ATTRIBUTES_KNOWN:
        raise InvalidRecordError(f"a record's attributes are 0 to {ATTRIBUTES_KNOWN}")
    for number in np.flatnonzero(columns.headers_counts).tolist():
        at, count = int(columns.headers_positions[number]), int(columns.headers_counts[number])
        if any(key.startswith(RESERVED_HEADER_PREFIX) for key, _ in decode_headers(data, at + 1, count)):
            raise InvalidRecordError("header keys that begin with '$' are the server's own")
    return RecordBatch(data, positions, columns.timestamps, 0)
