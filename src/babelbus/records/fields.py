"""Single fields of stored records: a number at many positions of a chunk, or of the record that some bytes begin."""

from babelbus.arrays import I32, I64, U32, np
from babelbus.records.format import INT64, LENGTH_FROM, Buffer, record_crcs
from babelbus.records.plain import offset_of as offset_of

CRC_AT = 12
TIMESTAMP_AT = 17


def int32s(data: Buffer) -> I32:
    """Return the 32-bit number that begins at each byte of a chunk, as a view: index it with positions."""
    return np.ndarray((max(len(data) - 3, 0),), ">i4", data, 0, (1,))


def offsets_at(data: Buffer, positions: I64) -> I64:
    """Return the offsets of the records that begin at these positions."""
    return _int64s_at(data, positions)


def timestamps_at(data: Buffer, positions: I64) -> I64:
    """Return the timestamps of the records that begin at these positions."""
    return _int64s_at(data, positions + TIMESTAMP_AT)


def crcs_at(data: Buffer, positions: I64) -> U32:
    """Return the stored CRCs of the records at these positions."""
    crcs: U32 = np.ndarray((max(len(data) - 3, 0),), ">u4", data, 0, (1,))[positions + CRC_AT]
    return crcs


def crcs_hold(data: Buffer, positions: I64, end: int) -> bool:
    """Return whether the records at `positions`, which follow each other up to `end`, match their CRCs.

    Offsets are not checked: no CRC covers an offset.
    """
    return bool((record_crcs(data, positions, end) == crcs_at(data, positions)).all())


def _int64s_at(data: Buffer, places: I64) -> I64:
    if not len(places):
        return np.empty(0, np.int64)
    return np.ndarray((len(data) - 7,), ">i8", data, 0, (1,))[places].astype(np.int64)


def timestamp_of(data: Buffer) -> int:
    """Return the timestamp of the record that `data` begins with."""
    return int(INT64.unpack_from(data, TIMESTAMP_AT)[0])


def size_of(head: bytes) -> int:
    """Return the size of the record that begins with the bytes `head`, by its length field."""
    return LENGTH_FROM + int.from_bytes(head[8:LENGTH_FROM], "big", signed=True)
