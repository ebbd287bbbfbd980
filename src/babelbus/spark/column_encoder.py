"""Rows that are a value, and perhaps a key, a time and a partition -> the stored form, a whole chunk at once.

Most rows are so. Arrow joins heads, keys and values in one call; what is left to pay for each record is its CRC.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from babelbus.records.checksum import CRC_AT, record_crcs
from babelbus.records.format import LENGTH_MIN, PLAIN_FIELDS, RECORD_BYTES_MIN, TOMBSTONE
from babelbus.records.record import RecordBatch
from babelbus.spark.partitioner import ANY_PARTITION, Partitioner
from babelbus.spark.sink_options import SinkOptions

I64 = npt.NDArray[np.int64]
BATCH_BYTES = 2 * 2**20
BATCH_RECORDS = 2**15
_NO_HEADERS = pa.scalar(b"\0", pa.binary())
_NOTHING = pa.scalar(b"", pa.binary())
_KEYED_BYTES = 29
"""Of a record's head up to its key length; the payload length stands behind the key."""


class PlainRows:
    """The rows of one chunk for one topic, none of which has headers or anything wrong with it."""

    def __init__(self, topic: str, values: pa.Array, keys: pa.Array | None, times: I64, partitions: I64 | None) -> None:
        self.topic = topic
        self.sizes = _lengths(values) + RECORD_BYTES_MIN
        if keys is not None:
            self.sizes += _lengths(keys)
        self._values = values
        self._keys = keys
        self._times = times
        self._partitions = partitions

    @staticmethod
    def find(batch: pa.RecordBatch, options: SinkOptions, now_ms: int) -> "PlainRows | None":
        """Return the rows of a chunk, `None` when there is more to one of them, or it cannot be a record."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        topic = options.topic or _one_text(columns["topic"])
        if not topic or options.to_state or not batch.num_rows:
            return None
        if "headers" in columns and columns["headers"].null_count < batch.num_rows:
            return None
        if "subject" in columns and not pc.all(pc.fill_null(pc.equal(columns["subject"], topic), True)).as_py():
            return None
        values = _binary(columns["value"])
        keys = _binary(columns["key"]) if "key" in columns else None
        if values.null_count and (keys is None or pc.any(pc.and_(values.is_null(), keys.is_null())).as_py()):
            return None
        times = np.full(batch.num_rows, now_ms, np.int64)
        if "timestamp" in columns:
            times = numbers(columns["timestamp"].cast(pa.int64()), now_ms * 1000) // 1000
        partitions = numbers(columns["partition"], ANY_PARTITION) if "partition" in columns else None
        rows = PlainRows(topic, values, keys, times, partitions)
        return rows if times.min() > 0 and rows.sizes.max() <= options.record_bytes_max else None

    def targets(self, count: int, partitioner: Partitioner) -> I64 | None:
        """Return the partition of each row; `None` when one names a partition that its topic, which has `count`, has
        not.

        The partitioner is asked only if all are there.
        """
        named, keys = self._partitions, self._keys
        if named is not None and (named.min() < ANY_PARTITION or named.max() >= count):
            return None
        return partitioner.choose(self.topic, len(self._values), count, named, None if keys is None else keys.to_pylist)

    def encode(self, chosen: I64 | None = None) -> list[RecordBatch]:
        """Return some rows, or all, in batches of about `BATCH_BYTES`."""
        values, keys, times, sizes = self._values, self._keys, self._times, self.sizes
        if chosen is not None:
            values, keys = values.take(pa.array(chosen)), None if keys is None else keys.take(pa.array(chosen))
            times, sizes = times[chosen], sizes[chosen]
        return [
            encode_columns(
                values.slice(start, stop - start),
                None if keys is None else keys.slice(start, stop - start),
                times[start:stop],
            )
            for start, stop in cut(sizes)
        ]


def cut(sizes: I64) -> Iterator[tuple[int, int]]:
    """Yield where batches begin and end: of `BATCH_BYTES` and `BATCH_RECORDS` at the most, or one record."""
    edges = np.concatenate(([0], np.cumsum(sizes)))
    start, count = 0, len(sizes)
    while start < count:
        stop = int(np.searchsorted(edges, edges[start] + BATCH_BYTES, "right")) - 1
        stop = min(max(stop, start + 1), start + BATCH_RECORDS, count)
        yield start, stop
        start = stop


def numbers(column: pa.Array, default: int) -> I64:
    """Return a column of numbers; `default` stands for null."""
    return np.asarray(column.cast(pa.int64()).fill_null(default).to_numpy(zero_copy_only=False), np.int64)


def _one_text(column: pa.Array) -> str:
    """Return the text that all values of a column are; empty when they differ."""
    first: str | None = column[0].as_py() if len(column) else None
    if first is None or column.null_count or not pc.all(pc.equal(column, first)).as_py():
        return ""
    return first


def _binary(column: pa.Array) -> pa.Array:
    return column if column.type == pa.binary() else column.cast(pa.binary())


def _lengths(column: pa.Array) -> I64:
    return numbers(pc.binary_length(column), 0)


def edges_of(column: pa.Array) -> I64:
    """Return where the values of an array of binary begin in its data, and where the last one ends."""
    buffer = column.buffers()[1]
    if buffer is None:  # an array of no values may be without
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int32, len(column) + 1, column.offset * 4).astype(np.int64)


def encode_columns(values: pa.Array, keys: pa.Array | None, timestamps: I64) -> RecordBatch:
    """Return records of binary columns in the stored form, with the offsets 0 and up.

    A null key is none; a null value makes a tombstone. Costs about 0.6 us a record, of which the CRC is two thirds.

    Args:
        values, keys: of `timestamps`' length, which is at least 1; all of it together below 2 GiB.
        timestamps: in milliseconds since the epoch, above 0.
    """
    count = len(values)
    removed = _nulls(values)
    if removed is not None:
        values = pc.fill_null(values, b"")
    value_sizes = np.diff(edges_of(values))
    heads = np.zeros(count, PLAIN_FIELDS)
    heads["offset"] = np.arange(count)
    heads["timestamp"] = timestamps
    heads["payload_length"] = value_sizes
    if removed is not None:
        heads["attributes"] = np.where(removed, TOMBSTONE, 0)
    if keys is None or keys.null_count == count:
        heads["key_length"] = -1
        heads["length"] = value_sizes + LENGTH_MIN
        if (value_sizes == value_sizes[0]).all():
            return _encode_uniform(values, heads, int(value_sizes[0]), timestamps)
        pieces = [_fixed(heads.view(np.uint8), PLAIN_FIELDS.itemsize), values]
    else:
        keyless = _nulls(keys)
        if keyless is not None:
            keys = pc.fill_null(keys, b"")
        key_sizes = np.diff(edges_of(keys))
        heads["key_length"] = key_sizes if keyless is None else np.where(keyless, -1, key_sizes)
        heads["length"] = value_sizes + key_sizes + LENGTH_MIN
        octets = heads.view(np.uint8).reshape(count, PLAIN_FIELDS.itemsize)
        front, behind = octets[:, :_KEYED_BYTES], octets[:, _KEYED_BYTES:]
        pieces = [_fixed(front, _KEYED_BYTES), keys, _fixed(behind, PLAIN_FIELDS.itemsize - _KEYED_BYTES), values]
    joined = pc.binary_join_element_wise(*pieces, _NO_HEADERS, _NOTHING)
    edges = edges_of(joined)
    data = bytearray(joined.buffers()[2].slice(int(edges[0]), int(edges[-1] - edges[0])))
    return _finish(data, edges[:-1] - edges[0], timestamps)


def _encode_uniform(values: pa.Array, heads: npt.NDArray[np.void], size: int, timestamps: I64) -> RecordBatch:
    """Do it for values of one size without keys: two copies of numpy."""
    count, head_bytes = len(values), PLAIN_FIELDS.itemsize
    data = bytearray(count * (head_bytes + size + 1))
    rows = np.frombuffer(data, np.uint8).reshape(count, head_bytes + size + 1)
    rows[:, :head_bytes] = heads.view(np.uint8).reshape(count, head_bytes)
    if size:
        first = int(edges_of(values)[0])
        rows[:, head_bytes:-1] = np.frombuffer(values.buffers()[2], np.uint8, count * size, first).reshape(count, size)
    return _finish(data, np.arange(0, len(data), head_bytes + size + 1), timestamps)


def _finish(data: bytearray, positions: I64, timestamps: I64) -> RecordBatch:
    crcs = np.ndarray((len(data) - 3,), ">u4", data, 0, (1,))
    crcs[positions + CRC_AT] = record_crcs(data, positions, len(data))
    return RecordBatch(data, positions, timestamps, 0)


def _nulls(column: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Return which values are null; `None` when no value is."""
    if not column.null_count:
        return None
    found: npt.NDArray[np.bool_] = column.is_null().to_numpy(zero_copy_only=False)
    return found


def _fixed(octets: npt.NDArray[np.uint8], size: int) -> pa.Array:
    """Return bytes of a fixed size each as an array of binary."""
    data = np.ascontiguousarray(octets).reshape(-1)
    edges = np.arange(0, len(data) + 1, size, dtype=np.int32)
    return pa.BinaryArray.from_buffers(pa.binary(), len(data) // size, [None, pa.py_buffer(edges), pa.py_buffer(data)])
