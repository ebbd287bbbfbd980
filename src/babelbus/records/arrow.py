"""Arrow columns -> records in the stored form, a whole chunk at once.

Arrow joins heads, keys and values in one call; the only cost for each record is its CRC. Only Spark uses this:
no other module of the package imports pyarrow.
"""

import pyarrow as pa
import pyarrow.compute as pc

from babelbus.arrays import I64, U8, Flags, np
from babelbus.records.format import LENGTH_MIN, TOMBSTONE, encode_uniform, make_heads, plain_fields, write_crcs
from babelbus.records.record import RecordBatch

_NO_HEADERS = pa.scalar(b"\0", pa.binary())
_NOTHING = pa.scalar(b"", pa.binary())
_KEYED_BYTES = 29
"""Bytes of a record's head up to its key length; the payload length is behind the key."""


def edges_of(column: pa.Array) -> I64:
    """Return where the values of an array of binary begin in its data, with the end of the last value."""
    buffer = column.buffers()[1]
    if buffer is None:  # an array without values may have none
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)


def encode_columns(values: pa.Array, keys: pa.Array | None, timestamps: I64) -> RecordBatch:
    """Return records of binary columns in the stored form, with the offsets 0 and up.

    A null key is no key; a null value makes a tombstone. Costs about 0.6 us a record, of which the CRC is two thirds.

    Args:
        values, keys: of `timestamps`' length, which is at least 1; in total below 2 GiB.
        timestamps: in milliseconds since the epoch, above 0.
    """
    count = len(values)
    removed = _nulls(values)
    if removed is not None:
        values = pc.fill_null(values, b"")
    value_sizes = np.diff(edges_of(values))
    heads = make_heads(value_sizes, timestamps)
    if removed is not None:
        heads["attributes"] = np.where(removed, TOMBSTONE, 0)
    if keys is None or keys.null_count == count:
        if value_sizes[0] and (value_sizes == value_sizes[0]).all():
            first, size = int(edges_of(values)[0]), int(value_sizes.sum())
            return encode_uniform(heads, memoryview(values.buffers()[2])[first : first + size], timestamps)
        pieces = [_fixed(heads.view(np.uint8), plain_fields().itemsize), values]
    else:
        keyless = _nulls(keys)
        if keyless is not None:
            keys = pc.fill_null(keys, b"")
        key_sizes = np.diff(edges_of(keys))
        heads["key_length"] = key_sizes if keyless is None else np.where(keyless, -1, key_sizes)
        heads["length"] = value_sizes + key_sizes + LENGTH_MIN
        octets = heads.view(np.uint8).reshape(count, plain_fields().itemsize)
        front, behind = octets[:, :_KEYED_BYTES], octets[:, _KEYED_BYTES:]
        pieces = [_fixed(front, _KEYED_BYTES), keys, _fixed(behind, plain_fields().itemsize - _KEYED_BYTES), values]
    joined = pc.binary_join_element_wise(*pieces, _NO_HEADERS, _NOTHING)
    edges = edges_of(joined)
    data = bytearray(joined.buffers()[2].slice(int(edges[0]), int(edges[-1] - edges[0])))
    return write_crcs(data, edges[:-1] - edges[0], timestamps, 0)


def _nulls(column: pa.Array) -> Flags | None:
    """Return which values are null; `None` when no value is."""
    if not column.null_count:
        return None
    nulls: Flags = column.is_null().to_numpy(zero_copy_only=False)
    return nulls


def _fixed(octets: U8, size: int) -> pa.Array:
    """Return bytes of a fixed size each as an array of binary."""
    data = np.ascontiguousarray(octets).reshape(-1)
    edges = np.arange(0, len(data) + 1, size, dtype=np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), len(data) // size, [None, pa.py_buffer(edges), pa.py_buffer(data)])
