"""The state as a table: now, as of a moment, as a stream, and written; by path and by url alike."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import StructType

from babelbus.client import BlockingClient
from babelbus.core.access import SERVER, STATE_TOPIC
from babelbus.core.state import log as state_log
from babelbus.core.state.key_index import KeyPattern
from babelbus.core.state.tree import Testament
from babelbus.records.columns import Columns
from babelbus.spark import state_options, state_table
from babelbus.spark.errors import OptionError, SchemaError
from babelbus.spark.record_source import open_reach
from babelbus.spark.state_options import parse_state
from babelbus.spark.state_table import HistoryGoneError, StateReader, StateStreamReader, state_schema
from babelbus.storage.disk.log import Log
from tests.spark.support import on_disk
from tests.support.clock import ManualClock
from tests.support.server import LiveServer

SECONDS_MAX = 120
FAR_MS = 2**41


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(on_disk(tmp_path / "data")) as server:
        yield server


@pytest.fixture(params=["path", "url"])
def place(request: pytest.FixtureRequest, live: LiveServer) -> dict[str, str]:
    return by_path(live) if request.param == "path" else by_url(live)


def by_path(live: LiveServer) -> dict[str, str]:
    return {"table": "state", "path": live.config.data.folder}


def by_url(live: LiveServer) -> dict[str, str]:
    return {"table": "state", "url": f"jebp://{live.address}", "identity": str(live.conf / "admin_key")}


def log_of(live: LiveServer) -> Log:
    log = live.server.broker.topic(STATE_TOPIC).partitions[0].log
    assert isinstance(log, Log)
    return log


def change(live: LiveServer, **values: str | None) -> None:
    """Set or delete, each as a commit of its own, and wait until all can be read."""

    def do() -> None:
        state = live.server.broker.state
        for key, value in values.items():
            if value is None:
                state.delete(key)
            else:
                state.set(key, value.encode())
            state.commit("test")

    live.call(do)
    settle(live)


def settle(live: LiveServer) -> None:
    partition = live.server.broker.topic(STATE_TOPIC).partitions[0]
    live.until(lambda: partition.high_watermark == partition.next_offset)


def compact(live: LiveServer) -> None:
    def do() -> None:
        log_of(live).roll()
        log_of(live).clean(FAR_MS)

    live.call(do)


def read(options: dict[str, str], schema: StructType | None = None) -> list[dict[str, Any]]:
    """Read as Spark would, without one."""
    reader = StateReader(parse_state(options, "batch"), schema or state_schema())
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    return rows_of(batches)


def rows_of(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches).to_pylist() if batches else []
    return rows


def values(options: dict[str, str], **more: object) -> dict[str, str]:
    return {row["key"]: row["value"] for row in read(options | {name: str(value) for name, value in more.items()})}


def changes(options: dict[str, str]) -> list[dict[str, Any]]:
    reader = StateStreamReader(parse_state({**options, "startingOffsets": "earliest"}, "stream").source, state_schema())
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    batches = [batch for task in reader.partitions(start, end) for batch in reader.read(task)]
    return rows_of(batches)


def test_the_layout_of_the_log_is_the_one_that_the_server_writes() -> None:
    assert state_options.STATE_TOPIC == STATE_TOPIC
    assert state_table.TESTAMENT_MARK == state_log.TESTAMENT_MARK
    assert state_table.VERSION_HEADER == state_log.VERSION_HEADER


def test_the_table_has_the_last_value_of_each_key(live: LiveServer, place: dict[str, str]) -> None:
    assert read(place) == []
    change(live, a="1", b='"x"')

    def more() -> None:
        state = live.server.broker.state
        state.set_testament("gone", Testament((KeyPattern(("a",)),)))
        state.compare_and_set("c", b'"\xc3\xb6"', 0)
        state.commit("test")

    live.call(more)
    change(live, a="2", b=None)
    rows = sorted(read(place), key=lambda row: row["key"])
    assert [(row["key"], row["value"], row["version"], row["deleted"]) for row in rows] == [
        ("a", "2", 0, False), ("c", '"ö"', 1, False)
    ]  # fmt: skip
    assert rows[0]["offset"] > rows[1]["offset"]
    assert rows[0]["timestamp"].timestamp() > 1_700_000_000


def test_the_table_as_of_a_moment_is_what_it_was(live: LiveServer, place: dict[str, str]) -> None:
    change(live, a="1", b="1")
    change(live, a="2", b=None)
    assert values(place, asOfOffset=0) == {"a": "1"}
    assert values(place, asOfOffset=1) == {"a": "1", "b": "1"}
    assert values(place, asOfOffset=2) == {"a": "2", "b": "1"}
    assert values(place, asOfTimestamp=1) == {}
    last = max(row["timestamp"] for row in read(place))
    clock = ManualClock(int(last.timestamp() * 1000) + 2)
    options = parse_state(place | {"asOfTimestamp": str(clock.now_ms() - 1)}, "batch")
    reader = StateReader(options, state_schema(), clock=clock)
    assert [row["key"] for row in rows_of([batch for task in reader.partitions() for batch in reader.read(task)])] == [
        "a"
    ]
    with pytest.raises(OptionError, match=r"asOfTimestamp: .* is in the future"):
        values(place, asOfTimestamp="2100-01-01 00:00")
    with pytest.raises(OptionError, match="ends at offset 4, 4 is not there"):
        values(place, asOfOffset=4)


def test_a_moment_that_compaction_has_gone_through_is_refused(live: LiveServer) -> None:
    change(live, a="1", b="1")
    change(live, a="2")
    change(live, c="1")
    compact(live)
    change(live, a="3", d="1")
    for place in (by_path(live), by_url(live)):
        assert values(place) == {"a": "3", "b": "1", "c": "1", "d": "1"}
        with pytest.raises(HistoryGoneError, match=r"after offset 1 .* is not known any more"):
            values(place, asOfOffset=1)
    assert values(by_path(live), asOfOffset=3) == {"a": "2", "b": "1", "c": "1"}
    with pytest.raises(HistoryGoneError, match="the earliest is asOfOffset=3"):
        values(by_path(live), asOfOffset=0)
    with pytest.raises(HistoryGoneError, match="read the data folder by path"):
        values(by_url(live), asOfOffset=4)


def test_what_is_replaced_while_the_table_is_read_is_read_too(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(live, a="1", b="1")
    options = by_path(live)
    reach = open_reach(parse_state(options).source.place)
    read_on = reach.read

    def replace_first(*what: Any) -> Iterator[Columns]:
        monkeypatch.undo()
        change(live, b="2", a="2")
        compact(live)
        return read_on(*what)

    monkeypatch.setattr(reach, "read", replace_first)
    assert values(options) == {"a": "2", "b": "2"}


def test_a_stream_that_joins_the_state_sees_it_as_it_is_with_each_batch(
    spark: SparkSession, live: LiveServer, place: dict[str, str]
) -> None:
    live.call(lambda: live.server.broker.create_topic("news", 1, {}, SERVER))
    topic = {name: value for name, value in place.items() if name != "table"} | {"subscribe": "news"}
    change(live, a="0")
    state = spark.read.format("babelbus").options(**place).load()
    joined = spark.readStream.format("babelbus").options(**topic).load().selectExpr("offset as at").crossJoin(state)
    query = joined.writeStream.format("memory").queryName("joined").start()
    try:
        with BlockingClient(live.address, identity=live.admin) as client:
            for number in range(3):
                query.processAllAvailable()
                change(live, a=str(number))
                client.publish("news", b"")
            query.processAllAvailable()
        rows = spark.table("joined").orderBy("at").collect()
        assert [row.value for row in rows] == ["0", "1", "2"]
    finally:
        query.stop()
    assert [row.value for row in state.collect()] == ["2"]
    change(live, a="3")
    assert [row.value for row in state.collect()] == ["3"]


def test_the_stream_has_each_change(live: LiveServer, place: dict[str, str]) -> None:
    change(live, a="1")
    live.call(lambda: live.server.broker.state.set_testament("gone", Testament((KeyPattern(("a",)),))))
    live.call(lambda: live.server.broker.state.compare_and_set("c", b"3", 0))
    live.call(lambda: live.server.broker.state.commit("test"))
    change(live, a=None)
    rows = changes(place)
    assert [(row["key"], row["value"], row["deleted"], row["version"]) for row in rows] == [
        ("a", "1", False, 0), ("c", "3", False, 1), ("a", None, True, 0)
    ]  # fmt: skip
    assert [row["offset"] for row in rows] == sorted(row["offset"] for row in rows)


def test_options_and_columns_that_mean_nothing_are_refused(live: LiveServer) -> None:
    place = by_path(live)
    refused = {
        ("subscribe", "news"): "option subscribe is unknown; table=state has path, url",
        ("table", "tree"): "option table: 'tree' is not possible",
        ("startingOffsets", "earliest"): "is for streams",
        ("asOfOffset", "-1"): "option asOfOffset: '-1' is not possible",
        ("asOfTimestamp", "yesterday"): "option asOfTimestamp: 'yesterday' is not possible",
    }
    for (name, value), reason in refused.items():
        with pytest.raises(OptionError, match=reason):
            state_options.is_state(place | {name: value}) and parse_state(place | {name: value}, "batch")
    with pytest.raises(OptionError, match="is for batches"):
        parse_state(place | {"asOfOffset": "1"}, "stream")
    with pytest.raises(OptionError, match="do not go together"):
        parse_state(place | {"asOfOffset": "1", "asOfTimestamp": "1"}, "batch")
    with pytest.raises(SchemaError, match="there is no column 'text'; table=state has key"):
        state_table.check_state_schema(StructType().add("text", "string"))
    with pytest.raises(SchemaError, match="column 'key' is string, not binary: cast it later"):
        state_table.check_state_schema(StructType().add("key", "binary"))


def test_spark_writes_the_state_and_reads_it_back(spark: SparkSession, live: LiveServer, tmp_path: Path) -> None:
    live.call(lambda: live.server.broker.create_topic("plant", 1, {"retain": "last"}, SERVER))
    place = by_url(live)
    rows = spark.createDataFrame(
        [("plant/a", "1"), ("plant/b", '{"c": [2]}'), ("plant/a/x", '"t"'), ("plant/d", "4")],
        "key string, value string",
    ).coalesce(1)
    rows.write.format("babelbus").options(**place, topic="plant").mode("append").save()
    gone = spark.createDataFrame([("plant/d", None)], "key string, value string")
    gone.write.format("babelbus").options(**place, topic="plant").mode("append").save()
    live.until(lambda: live.server.broker.state.find("plant/d") is None)
    settle(live)
    table = spark.read.format("babelbus").options(**place)
    assert table.schema("value string, key string").load().orderBy("key").collect() == [
        Row(value="1", key="plant/a"),
        Row(value='"t"', key="plant/a/x"),
        Row(value='{"c": [2]}', key="plant/b"),
    ]
    with pytest.raises(Exception, match="its key 'other' is neither 'plant' nor below it"):
        spark.createDataFrame([("other", "1")], "key string, value string").write.format("babelbus").options(
            **place, topic="plant"
        ).mode("append").save()

    counts = (
        spark.readStream.format("babelbus")
        .options(**place, startingOffsets="earliest")
        .load()
        .groupBy("deleted")
        .count()
        .selectExpr("concat('plant/counts/', deleted) as key", "cast(count as string) as value")
    )
    query = (
        counts.writeStream.format("babelbus")
        .options(**place, topic="plant", checkpointLocation=str(tmp_path / "checkpoint"))
        .outputMode("complete")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(SECONDS_MAX)
    state = live.server.broker.state
    live.until(lambda: state.find("plant/counts/true") is not None)
    assert live.call(lambda: [state.get("plant/counts/false"), state.get("plant/counts/true")]) == [b"4", b"1"]
