"""The state as a table: the last value of each key, now or at an earlier moment, and its changes as a stream.

Both come from the topic `$state`, which records each change of the tree (docs/state.md): a record's key is the key, its
payload the value as JSON text, a tombstone takes the key away; a header says the version of a value that has one. Keys
that begin with the byte 0xFF are testaments, which are no values.

A moment is told exactly or refused: compaction removes what was replaced, and what it has gone through cannot be told
any more. By path the log says how far it has gone. By url that shows only in what is missing.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import BooleanType, DataType, LongType, StringType, StructField, StructType, TimestampType

from babelbus.clock import Clock, SystemClock
from babelbus.spark.errors import OptionError, SparkError
from babelbus.spark.options import Place
from babelbus.spark.plan import Bounds
from babelbus.spark.reader import read_task
from babelbus.spark.record_source import Reach, open_reach
from babelbus.spark.schema import COLUMNS as RECORD_COLUMNS
from babelbus.spark.schema import arrow_schema, check_schema
from babelbus.spark.state_options import STATE_TOPIC, StateOptions
from babelbus.spark.stream import StreamReader
from babelbus.storage.disk import compaction_note, folder_name
from babelbus.storage.files import LocalFiles

if TYPE_CHECKING:
    import pyarrow as pa

TESTAMENT_MARK = b"\xff"
VERSION_HEADER = b"version"
ROWS_PER_BATCH = 16384
PARTITION = 0

COLUMNS: dict[str, DataType] = {
    "key": StringType(),
    "value": StringType(),
    "version": LongType(),
    "timestamp": TimestampType(),
    "offset": LongType(),
    "deleted": BooleanType(),
}
_RAW = StructType(
    [StructField(name, RECORD_COLUMNS[name]) for name in ("key", "value", "timestamp", "offset", "headers")]
)


class HistoryGoneError(SparkError):
    """Compaction has removed changes of the moment that was asked for."""

    def __init__(self, offset: int, earliest: int | None) -> None:
        how = (
            "what is left cannot be told by url: read the data folder by path, or the state as it is now"
            if earliest is None
            else f"the earliest is asOfOffset={earliest}"
        )
        super().__init__(
            f"the state after offset {offset} of {STATE_TOPIC} is not known any more, compaction has removed some of"
            f" it; {how} (the setting state.history_seconds says how far back one can ask)"
        )
        self.offset, self.earliest = offset, earliest


_Values = dict[str, tuple[Any, ...]]
"""Key -> value, version, timestamp (us) and offset."""


def state_schema() -> StructType:
    """Return the columns of the state and of its changes; nothing is deleted of the state of one moment."""
    return StructType([StructField(name, kind) for name, kind in COLUMNS.items()])


def check_state_schema(schema: StructType) -> None:
    """Check that a query asks only for columns of the state: any of them in any order, each of which can be null.

    Raises:
        SchemaError: a column is unknown or of another type.
    """
    check_schema(schema, COLUMNS, COLUMNS, "table=state")


class StateTask(InputPartition):
    """The one task that reads the state: offsets up to `end`, `None` for what there is when the task runs.

    Spark plans a frame once and runs its tasks with each action, and with each batch of a stream that joins it.
    """

    def __init__(self, place: Place, end: int | None) -> None:
        super().__init__(None)
        self.place = place
        self.end = end


class StateReader(DataSourceReader):
    """`spark.read.format("babelbus").option("table", "state")`. One task reads it all and holds it in memory."""

    def __init__(self, options: StateOptions, schema: StructType, *, clock: Clock | None = None) -> None:
        self._options = options
        self._schema = schema
        self._clock = clock

    def partitions(self) -> Sequence[InputPartition]:
        """Return the one task, for the moment that the options name.

        Raises:
            OptionError: the moment has not come yet.
            HistoryGoneError: compaction has removed changes before the moment.
            BabelbusError: the bus did not answer.
        """
        place = self._options.source.place
        reach = open_reach(place)
        bounds = reach.bounds(STATE_TOPIC, (PARTITION,))[PARTITION]
        end = self._end(reach, bounds)
        if end is not None:
            _check_history(place, end, gaps=False)
        return [StateTask(place, end)]

    def _end(self, reach: Reach, bounds: Bounds) -> int | None:
        """Return the offset behind the moment, `None` for now."""
        offset, time_ms = self._options.as_of_offset, self._options.as_of_ms
        if offset is not None:
            if offset >= bounds.end:
                raise OptionError(
                    f"option asOfOffset: {STATE_TOPIC} ends at offset {bounds.end}, {offset} is not there"
                )
            return offset + 1
        if time_ms is None:
            return None
        if time_ms >= (self._clock or SystemClock()).now_ms():
            raise OptionError(
                f"option asOfTimestamp: {time_ms} ms is in the future; leave the option out for the state as it is now"
            )
        found = reach.find_time(STATE_TOPIC, PARTITION, time_ms + 1)
        return None if found is None or found >= bounds.end else found

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the values.

        Raises:
            HistoryGoneError: compaction came past while they were read, or what is missing is not known.
            BabelbusError: the bus did not answer, or a record is damaged.
        """
        if isinstance(partition, StateTask):
            yield from _rows(load(partition), arrow_schema(self._schema))


def load(task: StateTask) -> _Values:
    """Read the log and return what it makes of the state; 1 to 2 us a record."""
    reach = open_reach(task.place)
    bounds = reach.bounds(STATE_TOPIC, (PARTITION,))[PARTITION]
    end = bounds.end if task.end is None else task.end
    values: _Values = {}
    gaps = _replay(reach, bounds.first, end, values) or bounds.first > 0
    if task.end is not None:
        _check_history(task.place, end, gaps=gaps)  # once more: compaction may have come past
        return values
    # What compaction removed while we read was replaced by something behind; so that is read too, until nothing is
    # missing of what was read last.
    while gaps:
        following = reach.bounds(STATE_TOPIC, (PARTITION,))[PARTITION].end
        gaps = _replay(reach, end, following, values)
        end = max(end, following)
    return values


def _replay(reach: Reach, start: int, end: int, values: _Values) -> bool:
    """Update values by the changes of a range of offsets; return whether offsets were missing."""
    from babelbus.spark.decode import Decoder

    decoder, wanted, count = Decoder(arrow_schema(_RAW), STATE_TOPIC, PARTITION), arrow_schema(state_schema()), 0
    for columns in reach.read(STATE_TOPIC, PARTITION, start, end) if end > start else ():
        for batch in decoder.batches(columns, start, end):
            count += batch.num_rows
            changes = _changes(batch, wanted)
            times = changes.column("timestamp").cast("int64").to_pylist()
            others = [changes.column(name).to_pylist() for name in ("key", "deleted", "value", "version", "offset")]
            for timestamp, key, deleted, value, version, offset in zip(times, *others, strict=True):
                if deleted:
                    values.pop(key, None)
                else:
                    values[key] = value, version, timestamp, offset
    return count < end - start


def _check_history(place: Place, end: int, *, gaps: bool) -> None:
    """Check that nothing is missing of what must be known of the records in front of `end`.

    Raises:
        HistoryGoneError: a change may be missing.
    """
    until = None
    if place.path:
        folder = f"{place.path}/topics/{folder_name(STATE_TOPIC)}/{PARTITION}"
        mark = compaction_note(LocalFiles(), folder).recall()
        until = None if mark is None else mark.until
        if until is not None and end < until:
            raise HistoryGoneError(end - 1, until - 1)
    if until is None and gaps:
        raise HistoryGoneError(end - 1, None)


def _rows(values: _Values, schema: "pa.Schema") -> "Iterator[pa.RecordBatch]":
    import pyarrow as pa

    rows = ((key, *value, False) for key, value in values.items())
    while part := list(islice(rows, ROWS_PER_BATCH)):
        columns = dict(zip(COLUMNS, map(list, zip(*part, strict=True)), strict=True))
        arrays = [pa.array(columns[field.name], field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


class StateStreamReader(StreamReader):
    """`spark.readStream.format("babelbus").option("table", "state")`: each change, in order.

    A query that begins at `earliest` begins with what compaction has left: with it all last values are among the rows.
    """

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the changes of one task."""
        wanted = arrow_schema(self._schema)
        for batch in read_task(partition, _RAW):
            changes = _changes(batch, wanted)
            if changes.num_rows:
                yield changes


def _changes(batch: "pa.RecordBatch", schema: "pa.Schema") -> "pa.RecordBatch":
    """Return the changes of values among some records of `$state`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from babelbus.spark.decode import texts

    keys = batch.column("key")
    testaments = pc.starts_with(keys, pattern=TESTAMENT_MARK)
    batch = batch.filter(pc.and_(keys.is_valid(), pc.invert(pc.fill_null(testaments, True))))
    columns: dict[str, Any] = {
        "key": texts(batch.column("key")),
        "value": texts(batch.column("value")),
        "version": _versions(batch.column("headers")),
        "timestamp": batch.column("timestamp"),
        "offset": batch.column("offset"),
        "deleted": batch.column("value").is_null(),
    }
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


def _versions(headers: "pa.Array") -> "pa.Array":
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    found = np.zeros(len(headers), np.int64)
    entries = headers.flatten()
    said = pc.equal(entries.field("key"), VERSION_HEADER.decode())
    rows = pc.list_parent_indices(headers).filter(said)
    if len(rows):
        found[rows.to_numpy()] = entries.field("value").filter(said).cast(pa.string()).cast(pa.int64()).to_numpy()
    return pa.array(found)
