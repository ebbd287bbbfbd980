"""How long a trigger of a stream takes that reads a thousand records, and one that finds nothing to read.

Kafka's connector stands beside it, and Spark's own sources of made-up rows: one that makes them in the JVM, and one
that is written in Python and does nothing, which is the least that any source in Python can take.
"""

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from bench.frame import Peer, Reading, figure
from bench.peers import kafka
from bench.spark import TOPIC, _data, _spark
from bench.workload import PAYLOAD, scratch_folder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamReader
    from pyspark.sql.types import StructType

ROWS = 1_000
TRIGGERS, WARM_TRIGGERS = 20, 20
KAFKA_RECORDS = 500_000
IDLE = "spark.sql.streaming.noDataProgressEventInterval"

Source = Callable[[], "DataStreamReader"]


@lru_cache(maxsize=1)
def _register_python_source() -> None:
    """Tell Spark of a source that gives ready-made rows; made in a function so that it is pickled as it is."""
    from pyspark.sql import datasource
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    class Reader(datasource.DataSourceStreamReader):
        def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
            return {"at": 0}

        def getDefaultReadLimit(self) -> "ReadLimit":  # noqa: N802 - Spark's name
            return ReadAllAvailable()

        def latestOffset(self, start: dict[str, Any], limit: "ReadLimit") -> dict[str, Any]:  # noqa: N802 - Spark's name
            return {"at": start["at"] + ROWS}

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> "list[InputPartition]":
            return [datasource.InputPartition(None)]

        def read(self, partition: "InputPartition") -> "Iterator[pa.RecordBatch]":
            import pyarrow

            yield pyarrow.record_batch({"value": pyarrow.array([PAYLOAD] * ROWS, pyarrow.binary())})

    class Made(datasource.DataSource):
        @classmethod
        def name(cls) -> str:
            return "made"

        def schema(self) -> str:
            return "value binary"

        def streamReader(self, schema: "StructType") -> "DataSourceStreamReader":  # noqa: N802 - Spark's name
            return Reader()

    _spark().dataSource.register(Made)


def _by_path() -> "DataStreamReader":
    place = {"path": f"{_data()}/data", "subscribe": TOPIC, "startingOffsets": "earliest"}
    return _spark().readStream.format("babelbus").options(**place, maxOffsetsPerTrigger=ROWS)


def _at_the_end() -> "DataStreamReader":
    place = {"path": f"{_data()}/data", "subscribe": TOPIC, "startingOffsets": "latest"}
    return _spark().readStream.format("babelbus").options(**place)


def _kafka_triggers() -> Iterator[Reading]:
    kafka.jars("spark")  # else it is said that they are missing
    with kafka.server(flushed=False) as address:
        kafka.publish(address, KAFKA_RECORDS)
        place = {"kafka.bootstrap.servers": address, "subscribe": kafka.TOPIC, "startingOffsets": "earliest"}
        yield from _triggers(lambda: _spark().readStream.format("kafka").options(**place, maxOffsetsPerTrigger=ROWS))


def _rate() -> "DataStreamReader":
    return _spark().readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS)


def _slow_rate() -> "DataStreamReader":
    return _spark().readStream.format("rate").option("rowsPerSecond", 1)


def _python() -> "DataStreamReader":
    _register_python_source()
    return _spark().readStream.format("made")


@figure(
    "spark.trigger_floor_ms",
    unit="ms",
    lower_is_better=True,
    peers=[
        Peer("Spark's Kafka connector", _kafka_triggers),
        Peer("Spark's rate source", lambda: _triggers(_rate)),
        Peer("a Python source that does nothing", lambda: _triggers(_python)),
    ],
)
def trigger_floor() -> Iterator[Reading]:
    """A micro-batch of 1,000 records, read from the files and thrown away: the middle one of 20 triggers."""
    return _triggers(_by_path)


@figure(
    "spark.trigger_empty_ms",
    unit="ms",
    lower_is_better=True,
    peers=[Peer("Spark's rate source", lambda: _triggers(_slow_rate, empty=True))],
)
def trigger_empty() -> Iterator[Reading]:
    """A trigger at the end of the log, which looks for records and finds none."""
    return _triggers(_at_the_end, empty=True)


def _triggers(source: Source, *, empty: bool = False) -> Iterator[Reading]:
    """Run a stream, and give the median time of a trigger."""
    while True:
        spark = _spark()
        spark.conf.set(IDLE, "0" if empty else "10s")
        with scratch_folder() as folder:
            query = (
                source()
                .load()
                .writeStream.format("noop")
                .option("checkpointLocation", f"{folder}/checkpoint")
                .trigger(processingTime="0 seconds")
                .start()
            )
            try:
                times = _durations(query, empty=empty)
            finally:
                query.stop()
        yield Reading(sorted(times)[len(times) // 2], f"fastest {min(times):.0f} ms")


def _durations(query: "StreamingQuery", *, empty: bool) -> list[float]:
    """Wait for some triggers behind the first ones, and give how long each of them took, in ms."""
    found: dict[str, float] = {}
    while len(found) < WARM_TRIGGERS + TRIGGERS:
        if not query.isActive:
            raise RuntimeError(f"the stream ended: {query.exception()}")
        time.sleep(0.1)
        for progress in query.recentProgress:
            if ("addBatch" in progress["durationMs"]) != empty and bool(progress["numInputRows"]) != empty:
                found[progress["timestamp"]] = float(progress["durationMs"]["triggerExecution"])
    return list(found.values())[WARM_TRIGGERS:]
