"""Rows that are a value, and perhaps a key, a time and a partition -> the stored form, a whole chunk at once.

Most rows are so. Arrow joins heads, keys and values in one call; what is left to pay for each record is its CRC.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from babelbus.records.arrow import encode_columns
from babelbus.records.format import RECORD_BYTES_MIN
from babelbus.records.record import RecordBatch
from babelbus.spark.partitioner import ANY_PARTITION, Partitioner
from babelbus.spark.sink_options import SinkOptions

I64 = npt.NDArray[np.int64]
BATCH_BYTES = 2 * 2**20
BATCH_RECORDS = 2**15


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
    """Return a column of numbers; `default` replaces null."""
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
