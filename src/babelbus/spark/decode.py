"""Columns of stored records -> Arrow batches of exactly the columns that Spark asked for.

Nothing is done per record. Keys and payloads stay in the chunk: an Arrow array is laid over it whose offsets are the
start and end of each value in turn, and `take` copies every other of its entries.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from babelbus.arrays import I64
from babelbus.records.columns import Columns
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import RESERVED_HEADER_PREFIX, TOMBSTONE
from babelbus.records.headers import walk_headers

BATCH_RECORDS = 16_384
"""Records of one Arrow batch; Spark is as fast with 1,024 and a third slower with 262,144."""
BATCH_BYTES = 4 * 2**20
MICROSECONDS_MAX = 2**63 - 1
_MILLISECONDS_MAX = MICROSECONDS_MAX // 1000


class Headers:
    """The headers of some records: one entry each, those of a record side by side and in order.

    `rows` says which record each belongs to. The bus's own headers are not among them.
    """

    def __init__(self, columns: Columns) -> None:
        rows, keys, sizes, values, value_sizes = walk_headers(columns)
        buffer = pa.py_buffer(columns.data)
        names = _gather(buffer, keys, sizes)
        kept = np.ones(len(rows), bool)
        if len(rows):
            own = pc.starts_with(names, pattern=RESERVED_HEADER_PREFIX)
            kept = ~own.to_numpy(zero_copy_only=False)
        if not kept.all():
            rows, values, value_sizes = rows[kept], values[kept], value_sizes[kept]
            names = names.filter(pa.array(kept))
        self.rows = rows
        self.names = names
        self.values = _gather(buffer, values, value_sizes)

    def drop(self, entries: I64) -> None:
        """Remove entries."""
        kept = np.ones(len(self.rows), bool)
        kept[entries] = False
        mask = pa.array(kept)
        self.rows, self.names, self.values = self.rows[kept], self.names.filter(mask), self.values.filter(mask)


class Decoder:
    """Makes the batches of one topic and partition for one schema (that of `schema.arrow_schema`)."""

    def __init__(self, schema: pa.Schema, topic: str, partition: int) -> None:
        self._schema = schema
        self._topic = topic
        self._partition = partition
        self._constants: dict[str, pa.Array] = {}
        self._with_headers = "headers" in schema.names or "subject" in schema.names

    def batches(self, columns: Columns, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the records of a chunk whose offsets are from `start` to `end` (excluded)."""
        first, stop = np.searchsorted(columns.offsets, (start, end)).tolist()
        while first < stop:
            after = min(first + BATCH_RECORDS, stop)
            if columns.ends[after - 1] - columns.positions[first] > BATCH_BYTES:
                room = int(np.searchsorted(columns.ends[first:after], columns.positions[first] + BATCH_BYTES, "right"))
                after = first + max(room, 1)
            yield self.batch(_slice(columns, first, after))
            first = after

    def batch(self, columns: Columns) -> pa.RecordBatch:
        """Return all records of a chunk as one batch."""
        headers = subjects = None
        if self._with_headers and columns.headers_counts.any():
            headers = Headers(columns)
            subjects = self._subjects(headers, len(columns))
        arrays = [self._column(field, columns, headers, subjects) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(
        self, field: pa.Field, columns: Columns, headers: Headers | None, subjects: pa.Array | None
    ) -> pa.Array:
        count = len(columns)
        match field.name:
            case "key":
                return _gather(pa.py_buffer(columns.data), columns.key_positions, columns.key_lengths)
            case "value":
                lengths = columns.payload_lengths
                removed = (columns.attributes & TOMBSTONE) != 0
                if removed.any():
                    lengths = np.where(removed, -1, lengths)
                return _gather(pa.py_buffer(columns.data), columns.payload_positions, lengths)
            case "offset":
                return pa.array(columns.offsets)
            case "timestamp":
                micros = np.minimum(columns.timestamps, _MILLISECONDS_MAX) * 1000
                return pa.array(micros).cast(field.type)
            case "subject" if subjects is not None:
                return subjects
            case "headers":
                return _list_headers(headers, count, field.type)
            case name:
                return self._constant(name, count)

    def _constant(self, name: str, count: int) -> pa.Array:
        """Return a column that is the same for all records of the partition."""
        known = self._constants.get(name)
        if known is None or len(known) < count:
            size = max(count, BATCH_RECORDS)
            if name == "partition":
                known = pa.array(np.full(size, self._partition, np.int32))
            elif name == "timestampType":
                known = pa.array(np.zeros(size, np.int32))
            else:  # topic, and the subject of records that were published under the topic's name
                text = self._topic.encode()
                offsets = np.arange(size + 1, dtype=np.int32) * len(text)
                known = pa.StringArray.from_buffers(size, pa.py_buffer(offsets), pa.py_buffer(text * size))
            self._constants[name] = known
        return known.slice(0, count)

    def _subjects(self, headers: Headers, count: int) -> pa.Array:
        """Return the subjects, and take the headers away that say them.

        A subject that is not below the topic is the publisher's own header and stays one.
        """
        found = np.flatnonzero(pc.equal(headers.names, SUBJECT_HEADER).to_numpy(zero_copy_only=False))
        if not len(found):
            return self._constant("subject", count)
        rows = headers.rows[found]
        last = np.append(rows[1:] != rows[:-1], True)  # the last of several counts
        values = headers.values.take(pa.array(found))
        below = pc.fill_null(pc.starts_with(values, pattern=f"{self._topic}/".encode()), False)
        counts = below.to_numpy(zero_copy_only=False) & last
        chosen = np.zeros(count, bool)
        chosen[rows[counts]] = True
        headers.drop(found[np.isin(rows, rows[counts])])
        return pc.replace_with_mask(
            self._constant("subject", count), pa.array(chosen), texts(values.filter(pa.array(counts)))
        )


def _slice(columns: Columns, first: int, after: int) -> Columns:
    if first == 0 and after == len(columns):
        return columns
    fields = msgspec.structs.astuple(columns)[1:-1]  # but not what is known of the headers of the whole chunk
    return Columns(columns.data, *(array[first:after] for array in fields))


@lru_cache(maxsize=4)
def _even(count: int) -> pa.Array:
    return pa.array(np.arange(0, 2 * count, 2, dtype=np.int32))


def _gather(buffer: pa.Buffer, positions: I64, lengths: I64) -> pa.Array:
    """Return the values that begin at `positions` of a buffer as an array of binary; a length of -1 is a null.

    The positions rise, and no value overlaps the next one.
    """
    count = len(positions)
    if count == 0:
        return pa.array([], pa.binary())
    missing = lengths < 0
    nulls = int(np.count_nonzero(missing))
    if nulls == count:
        return pa.nulls(count, pa.binary())
    first = int(positions[0])
    edges = np.empty(2 * count, np.int32)
    np.subtract(positions, first, out=edges[0::2], casting="unsafe")
    np.add(edges[0::2], np.maximum(lengths, 0) if nulls else lengths, out=edges[1::2], casting="unsafe")
    laid = pa.BinaryArray.from_buffers(pa.binary(), 2 * count - 1, [None, pa.py_buffer(edges), buffer.slice(first)])
    indices = _even(BATCH_RECORDS).slice(0, count) if count <= BATCH_RECORDS else _even(count)
    taken = laid.take(indices)
    if not nulls:
        return taken
    bitmap = pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.BinaryArray.from_buffers(pa.binary(), count, [bitmap, *taken.buffers()[1:]], nulls)


def _list_headers(headers: Headers | None, count: int, type_: Any) -> pa.Array:
    """Return the headers as lists of key and value; null for a record without, as Spark's Kafka source does."""
    if headers is None or not len(headers.rows):
        return pa.nulls(count, type_)
    counts = np.bincount(headers.rows, minlength=count)
    edges = np.zeros(count + 1, np.int32)
    np.cumsum(counts, out=edges[1:])
    entries = pa.StructArray.from_arrays(
        [texts(headers.names), headers.values], fields=[type_.value_type.field(0), type_.value_type.field(1)]
    )
    bitmap = pa.py_buffer(np.packbits(counts > 0, bitorder="little"))
    return pa.Array.from_buffers(type_, count, [bitmap, pa.py_buffer(edges)], children=[entries])


def texts(values: pa.Array) -> pa.Array:
    """Return bytes as text; what is not UTF-8 gets replacement characters, since Spark's strings must be."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([value and value.decode("utf-8", "replace") for value in values.to_pylist()], pa.string())
