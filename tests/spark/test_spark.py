"""What only a real Spark can tell: that it finds the source, hands over options, and reads rows."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery

from babelbus.client import BlockingClient
from babelbus.config import TopicDefaults
from babelbus.records.record import Record
from babelbus.spark.pipelines import progress
from babelbus.spark.schema import COLUMNS, NULLABLE
from babelbus.storage.disk.log import Log
from tests.spark.support import NOW, Folder, numbered, on_disk
from tests.support.server import LiveServer, configure

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"
SECONDS_MAX = 90


def read(spark: SparkSession, folder: Folder, **options: Any) -> DataFrame:
    named = any(name in options for name in ("subscribe", "subscribePattern", "assign"))
    given = {"path": str(folder.path)} | ({} if named else {"subscribe": "news"}) | options
    return spark.read.format("babelbus").options(**given).load()


def values(frame: DataFrame) -> list[bytes | None]:
    return [None if row.value is None else bytes(row.value) for row in frame.orderBy("partition", "offset").collect()]


def told(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.unset(name)


def test_the_format_is_found_by_its_name_and_gives_the_columns_that_the_documentation_says(
    spark: SparkSession, folder: Folder
) -> None:
    record = Record(b"\xff\x00", b"k", ((b"ce_subject", b"news/\xc3\xb6l"), (b"h", None), (b"\xc3\xa4", b"1")), NOW)
    folder.add([record, Record(None, timestamp=NOW + 1)])
    frame = read(spark, folder, includeHeaders=True)
    assert {field.name: field.dataType for field in frame.schema} == {
        name: kind for name, kind in COLUMNS.items() if name != "timestampType"
    }
    assert {field.name for field in frame.schema if field.nullable} == NULLABLE
    first, second = frame.select("*", F.unix_millis("timestamp").alias("ms")).orderBy("offset").collect()
    assert (bytes(first.key), bytes(first.value), first.topic, first.partition, first.offset, first.ms) == (
        b"k", b"\xff\x00", "news", 0, 0, NOW
    )  # fmt: skip
    assert first.subject == "news/öl"
    assert first.headers == [Row(key="h", value=None), Row(key="ä", value=bytearray(b"1"))]
    assert (second.key, second.value, second.subject, second.headers, second.offset) == (None, None, "news", None, 1)


def test_a_schema_chooses_columns_in_any_order(spark: SparkSession, folder: Folder) -> None:
    folder.add(numbered(3))
    source = spark.read.format("babelbus").options(path=str(folder.path), subscribe="news")
    rows = source.schema("offset bigint, timestampType int, value binary").load().orderBy("offset").collect()
    assert rows[2] == Row(offset=2, timestampType=0, value=bytearray(b"2"))
    with pytest.raises(AnalysisException, match="column 'value' is binary, not string: cast it later"):
        source.schema("value string").load().collect()
    with pytest.raises(AnalysisException, match="column 'value' can be null: leave NOT NULL out"):
        source.schema("value binary not null").load().collect()
    assert source.schema("offset bigint not null").load().count() == 3
    with pytest.raises(AnalysisException, match="there is no column 'payload'; the source has key, value"):
        source.schema("payload binary").load().collect()


def test_a_batch_reads_between_the_offsets_it_is_given(spark: SparkSession, folder: Folder) -> None:
    folder.add(numbered(1000))
    folder.add(numbered(10), partition=1)
    bounds = {"startingOffsets": '{"news": {"0": 100, "1": -2}}', "endingOffsets": '{"news": {"0": 200, "1": -1}}'}
    assert values(read(spark, folder, **bounds, minPartitions=5)) == told(*range(100, 200), *range(10))
    late = read(spark, folder, assign='{"news": [0]}', startingTimestamp=NOW + 990, endingTimestamp=NOW + 995)
    assert values(late) == told(*range(990, 995))


def test_nothing_at_all_is_an_empty_frame(spark: SparkSession, folder: Folder) -> None:
    folder.log()
    assert read(spark, folder).count() == 0


def test_what_is_wrong_is_said_in_one_line(spark: SparkSession, folder: Folder) -> None:
    folder.add(numbered(3))
    with pytest.raises(AnalysisException, match="option failOnDataLoss: 'maybe' is not possible; write true or false"):
        read(spark, folder, failOnDataLoss="maybe")
    with pytest.raises(AnalysisException, match="there is no topic 'olds' in the data folder"):
        read(spark, folder, subscribe="olds").collect()
    with pytest.raises(AnalysisException, match="offset 7 was wanted, available: offsets 0 to 3"):
        read(spark, folder, startingOffsets='{"news": {"0": 7}}').collect()


def test_a_damaged_segment_fails_the_query_with_file_and_offset(spark: SparkSession, folder: Folder) -> None:
    folder.add(numbered(100))
    folder.log().roll()
    folder.add(numbered(1, first=100))
    content = bytearray(folder.file().read_bytes())
    content[content.index(b"\x0250") + 1] ^= 1
    folder.file().write_bytes(content)
    with pytest.raises(PythonException, match=r"00000000\.log: bad record at byte \d+ \(offset 50\)"):
        read(spark, folder).collect()


@pytest.mark.parametrize("push_down", ["false", "true"])
def test_a_frame_that_is_used_with_several_filters_has_all_rows(
    spark: SparkSession, folder: Folder, push_down: str
) -> None:
    folder.add(numbered(100))
    with setting(spark, PUSH_DOWN, push_down):
        frame = read(spark, folder)
        assert values(frame.where("offset < 10")) == told(*range(10))
        assert values(frame) == told(*range(100))
        both = frame.where("offset < 10").union(frame.where("partition = 0 and offset >= 95"))
        assert values(both) == told(*range(10), *range(95, 100))
        assert values(frame.where("timestamp < timestamp_millis(-1)")) == []


def test_a_folder_and_its_server_give_the_same_rows(spark: SparkSession, tmp_path: Path) -> None:
    config = on_disk(tmp_path / "data", TopicDefaults(cleanup="compact", partitions=3))
    with LiveServer(config) as live:
        caller = {"identity": str(live.conf / "admin_key"), "url": f"jebp://{live.address}"}
        records = [
            Record(b"%d" % n, b"key %d" % (n % 50) if n % 3 else None, (), NOW + n) for n in range(3000)
        ] + [
            Record(None, b"key 7", (), NOW),
            Record(b"", b"", ((b"k", None), (b"k", b""), ("ä".encode(), "ö".encode())), NOW),
            Record("ß €".encode(), "clé".encode(), ((b"ce_subject", "news/Größe".encode()),), NOW),
            Record(bytes(range(256)), None, ((b"ce_subject", b"elsewhere"),), NOW),
        ]  # fmt: skip
        publish(live, records)
        publish(live, numbered(700), partition=1)

        def compact() -> None:
            log = live.server.broker.topic("news").partitions[0].log
            assert isinstance(log, Log)
            log.roll()
            log.clean(NOW)

        live.call(compact)
        publish(live, [Record(b"tail %d" % n, timestamp=NOW) for n in range(100)])
        publish(live, numbered(5), topic="newer", partition=2)
        common = {"subscribePattern": "new.*", "includeHeaders": "true", "maxRecordsPerPartition": "3000"}

        def rows(place: dict[str, str]) -> list[Row]:
            frame = spark.read.format("babelbus").options(**common, **place).load()
            return frame.orderBy("topic", "partition", "offset").collect()

        by_url = rows(caller)
        assert {row.subject for row in by_url} == {"newer", "news", "news/Größe"}
        counts = Counter((row.topic, row.partition) for row in by_url)
        assert 1000 < counts.pop(("news", 0)) < 1300  # compaction has done its work
        assert counts == {("news", 1): 700, ("newer", 2): 5}
        assert max(row.offset for row in by_url) == 3103
    assert rows({"path": config.data.folder}) == by_url  # when the server is down; tests of both at once need no Spark


def publish(live: LiveServer, records: list[Record], topic: str = "news", partition: int = 0) -> None:
    with BlockingClient(live.address, identity=live.admin) as client:
        if topic not in live.call(lambda: set(live.server.broker.topic_names())):
            client.create_topic(topic)
        client.publish_many(topic, records, partition=partition)


def test_a_server_says_what_it_cannot_give(spark: SparkSession, tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path / "data")) as live:
        publish(live, numbered(3))
        place = {"identity": str(live.conf / "admin_key"), "url": f"jebp://{live.address}"}

        def rows(**options: str) -> list[Row]:
            return spark.read.format("babelbus").options(**place, **options).load().collect()

        with pytest.raises(AnalysisException, match="there is no topic 'olds' on the server"):
            rows(subscribe="olds")
        with pytest.raises(AnalysisException, match="topic 'news' has no partition 1"):
            rows(assign='{"news": [1]}')
        assert len(rows(subscribe="news", startingOffsets='{"news": {"0": 1}}')) == 2


def run(source: DataFrame, target: Path) -> StreamingQuery:
    """Write what there is now to Parquet, exactly once over all runs."""
    query = (
        source.writeStream.format("parquet")
        .option("path", str(target / "rows"))
        .option("checkpointLocation", str(target / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(SECONDS_MAX)
    finally:
        query.stop()
    return query


def stream(spark: SparkSession, folder: Folder, **options: Any) -> DataFrame:
    given = {"path": str(folder.path), "subscribe": "news", "startingOffsets": "earliest"} | options
    return spark.readStream.format("babelbus").options(**given).load()


def test_a_stream_goes_on_where_its_checkpoint_says(spark: SparkSession, folder: Folder, tmp_path: Path) -> None:
    folder.add(numbered(250))
    folder.add(numbered(50), partition=1)
    run(stream(spark, folder, maxOffsetsPerTrigger=100), tmp_path)
    folder.add(numbered(10, first=250))
    folder.add(numbered(5), partition=2)
    run(stream(spark, folder, maxRecordsPerTrigger=100), tmp_path)
    rows = spark.read.parquet(str(tmp_path / "rows"))
    assert values(rows) == told(*range(260), *range(50), *range(5))


def test_a_stream_follows_a_server_and_its_new_topics(spark: SparkSession, tmp_path: Path) -> None:
    config = configure(tmp_path / "data", topics=TopicDefaults(partitions=2))
    with LiveServer(config) as live:
        publish(live, numbered(10))
        place = {"identity": str(live.conf / "admin_key"), "url": f"jebp://{live.address}"}
        source = spark.readStream.format("babelbus").options(
            **place, subscribePattern="news.*", startingOffsets="earliest"
        )
        query = source.load().writeStream.format("memory").queryName("followed").start()
        try:
            query.processAllAvailable()
            publish(live, numbered(2000, first=10))
            publish(live, numbered(7), partition=1)
            query.processAllAvailable()
            publish(live, numbered(3), topic="newsflash", partition=1)
            publish(live, numbered(1, first=2010))
            query.processAllAvailable()
            rows = spark.table("followed").orderBy("topic", "partition", "offset")
            assert values(rows.where("topic = 'news'")) == told(*range(2011), *range(7))
            assert values(rows.where("topic = 'newsflash'")) == told(*range(3))
        finally:
            query.stop()


def test_a_stream_whose_records_are_gone_fails_with_the_offsets(
    spark: SparkSession, folder: Folder, tmp_path: Path
) -> None:
    folder.add(numbered(10), retention_bytes=1)
    run(stream(spark, folder), tmp_path)
    for first in (10, 20):
        folder.add(numbered(10, first=first))
        folder.log().roll()
    folder.add(numbered(5, first=30))
    folder.log().clean(NOW)
    with pytest.raises(StreamingQueryException, match="offset 10 was wanted, available: offsets 30 to 35"):
        run(stream(spark, folder), tmp_path)
    query = run(stream(spark, folder, failOnDataLoss=False), tmp_path)
    assert values(spark.read.parquet(str(tmp_path / "rows"))) == told(*range(10), *range(30, 35))
    batches = [batch for one in query.recentProgress if (batch := progress.read(one.json, "p", "rows"))]
    assert [(batch.rows_in, batch.rows_lost) for batch in batches] == [(5, 20)]
