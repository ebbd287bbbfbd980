"""The sink on a real Spark and a real server: what is written, once, and what is refused."""

import logging
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StringType, StructField, StructType

from babelbus.client import BlockingClient, ClientClosedError, ConnectionLostError, Identity, RequestError
from babelbus.core.access import SERVER
from babelbus.core.groups import dead_letters
from babelbus.records.record import Record
from babelbus.spark.connection import connection
from babelbus.spark.encode import DEAD_REASON, DEAD_TIME, DEAD_TOPIC
from babelbus.spark.errors import (
    OptionError,
    OutputModeError,
    RowRefusedError,
    SchemaError,
    SinkOwnerError,
    TargetError,
)
from babelbus.spark.options import Place
from babelbus.spark.sink import Staged, Target, abort, check_targets, commit, stage
from babelbus.spark.sink_options import parse_sink
from babelbus.spark.source import BabelbusDataSource
from tests.cli.shell import Served
from tests.spark.support import NOW, numbered
from tests.support.server import LiveServer, configure, configure_to_return

SECONDS_MAX = 120
VALUES = StructType([StructField("value", StringType())])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(configure(tmp_path_factory.mktemp("sink") / "data")) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[BlockingClient]:
    with BlockingClient(live.address, identity=live.admin) as connected:
        yield connected


def place(live: LiveServer) -> dict[str, str]:
    return {"identity": str(live.conf / "admin_key"), "url": f"jebp://{live.address}"}


def make(live: LiveServer, topic: str, partitions: int = 1, **settings: object) -> str:
    live.call(lambda: live.server.broker.create_topic(topic, partitions, dict(settings), SERVER))
    return topic


def save(frame: DataFrame, live: LiveServer, **options: Any) -> None:
    frame.write.format("babelbus").options(**place(live), **options).mode("append").save()


def stored(client: BlockingClient, topic: str, partition: int = 0) -> list[Record]:
    return list(client.follow(topic, partition=partition, until_end=True))


def payloads(client: BlockingClient, topic: str) -> list[bytes | None]:
    return [record.payload for record in stored(client, topic)]


def test_a_save_publishes_all_that_a_row_says(spark: SparkSession, live: LiveServer, client: BlockingClient) -> None:
    topic = make(live, "said", retention_seconds=None)
    save(
        spark.createDataFrame(
            [
                ("k", bytearray(b"\xff"), [("h", bytearray(b"1")), ("n", None)], NOW / 1000, f"{topic}/below"),
                ("k", None, None, (NOW + 1) / 1000, topic),
                (None, bytearray(b""), [], None, None),
            ],
            "key string, value binary, headers array<struct<key string, value binary>>, at double, subject string",
        )
        .selectExpr("key", "value", "headers", "timestamp_millis(cast(at * 1000 as bigint)) as timestamp", "subject")
        .coalesce(1),
        live,
        topic=topic,
    )
    first, second, third = stored(client, topic)
    assert first == Record(
        b"\xff", b"k", ((b"h", b"1"), (b"n", None), (b"ce_subject", b"said/below")), NOW, offset=0
    )  # fmt: skip
    assert (second.payload, second.key, second.headers, second.timestamp) == (None, b"k", (), NOW + 1)
    assert (third.payload, third.key, third.headers) == (b"", None, ())
    assert third.timestamp > NOW


def test_rows_go_to_the_topic_and_partition_that_they_name_and_else_to_that_of_their_key(
    spark: SparkSession, live: LiveServer, client: BlockingClient
) -> None:
    make(live, "many", 3)
    make(live, "one")
    rows = spark.range(0, 3000, 1, 3).selectExpr(
        "cast(id as string) as value",
        "if(id % 2 = 0, concat('key ', id % 20), null) as key",
        "if(id % 3 = 0, 'one', 'many') as topic",
        "if(id % 100 = 4 and id % 3 <> 0, 2, null) as partition",
    )
    save(rows, live)
    assert sorted(int(one.payload or b"") for one in stored(client, "one")) == list(range(0, 3000, 3))
    found = [stored(client, "many", number) for number in range(3)]
    assert sorted(int(one.payload or b"") for part in found for one in part) == [n for n in range(3000) if n % 3]
    where: dict[bytes, set[int]] = {}
    for number, part in enumerate(found):
        for one in part:
            if int(one.payload or b"") % 100 == 4:
                assert number == 2
            elif one.key is not None:
                where.setdefault(one.key, set()).add(number)
    assert all(len(numbers) == 1 for numbers in where.values())
    assert len(set.union(*where.values())) > 1


def test_a_key_is_in_the_partition_where_the_command_line_puts_it(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.range(0, 60, 1, 3).selectExpr("concat('key ', id % 6) as key", "'spark' as value")
    lines = "".join(f'{{"key": "key {number}", "payload": "shell"}}\n' for number in range(6))
    served = Served(tmp_path)
    address, identity = served.ready["addresses"]["jebp"], str(served.data / "conf" / "admin_key")
    try:
        served.run("topics", "create", "shared", "--partitions", "5")
        rows.write.format("babelbus").options(url=address, identity=identity, topic="shared").mode("append").save()
        served.run("publish", "shared", "--json", input=lines)
        with BlockingClient(address, identity=Identity.load(identity)) as client:
            found = [stored(client, "shared", number) for number in range(5)]
    finally:
        code = served.stop()
    assert code == 0
    where = [(one.key, number) for number, part in enumerate(found) for one in part]
    assert len(where) == 66
    assert len(set(where)) == 6
    assert len({number for _, number in where}) > 1


def test_rows_that_are_spread_fill_all_partitions_evenly(
    spark: SparkSession, live: LiveServer, client: BlockingClient
) -> None:
    topic = make(live, "even", 4)
    rows = spark.range(0, 1001, 1, 3).selectExpr("'same' as key", "cast(id as string) as value")
    save(rows, live, topic=topic, partitioner="spread")
    counts = [len(stored(client, topic, number)) for number in range(4)]
    assert sum(counts) == 1001
    assert max(counts) - min(counts) <= 3  # one of each task


@pytest.mark.parametrize("partitioner", ["key", "spread"])
def test_another_attempt_puts_the_rows_of_a_batch_where_the_first_one_did(
    live: LiveServer, client: BlockingClient, partitioner: str
) -> None:
    topic, transaction = make(live, f"attempted {partitioner}", 3), f"attempted {partitioner}"
    options = parse_sink({**place(live), "topic": topic, "txnId": transaction, "partitioner": partitioner}, "stream")
    chunks = [pa.record_batch({"value": [b"%d" % n, b"+"], "key": [None, b"k"]}) for n in range(7)]
    found = []
    for attempt in range(2):
        target = Target(transaction, 5, "query", 2, attempt)
        commit(options, transaction, 5, [stage(iter(chunks), options, target)])
        found.append([[one.payload for one in stored(client, topic, number)] for number in range(3)])
        live.run(lambda: live.server.broker.staging.forget(f"admin/{transaction}"))
    once, twice = found
    assert all(once)
    assert twice == [[*values, *values] for values in once]


def test_partitions_that_a_topic_got_or_lost_are_known_at_once_where_it_matters(
    live: LiveServer, client: BlockingClient
) -> None:
    topic = make(live, "growing", 2)
    options = parse_sink({**place(live), "topic": topic, "txnId": topic}, "stream")

    def publish(batch: int, *partitions: int) -> None:
        rows = pa.record_batch({"value": [b"%d" % batch] * len(partitions), "partition": pa.array(partitions)})
        commit(options, topic, batch, [stage(iter([rows]), options, Target(topic, batch))])

    publish(0, 0, 1)
    client.topics.alter(topic, {"partitions": 3})
    publish(1, 0, 1, 2)
    with pytest.raises(RowRefusedError, match="has partitions 0 to 2, not 3: drop the column partition"):
        publish(2, 3)
    publish(2, 2)
    assert [[one.payload for one in stored(client, topic, number)] for number in range(3)] == [
        [b"0", b"1"], [b"0", b"1"], [b"1", b"2"]
    ]  # fmt: skip
    client.topics.remove(topic)
    make(live, topic)
    with pytest.raises(RequestError, match="has partitions 0 to 0, not 1"):
        publish(3, 0, 1)
    with pytest.raises(RowRefusedError, match="has partitions 0 to 0, not 1: drop the column partition"):
        publish(3, 0, 1)
    publish(3, 0)
    assert payloads(client, topic) == [b"3"]


def test_a_save_with_an_id_is_done_once(spark: SparkSession, live: LiveServer, client: BlockingClient) -> None:
    topic = make(live, "named")
    rows = spark.range(0, 10, 1, 2).selectExpr("cast(id as string) as value")
    for batch_id in (3, 3, 2, 4):
        save(rows, live, topic=topic, txnId="daily", batchId=batch_id)
    assert len(stored(client, topic)) == 20
    save(rows, live, topic=topic)
    save(rows.limit(0), live, topic=topic)
    assert len(stored(client, topic)) == 30


def staged_bytes(live: LiveServer) -> int:
    """What waits for a commit on the server."""
    return live.call(lambda: live.server.broker.staging.staged_bytes)


def test_a_save_that_fails_publishes_nothing(spark: SparkSession, live: LiveServer, client: BlockingClient) -> None:
    topic = make(live, "failed")
    rows = spark.range(0, 1000, 1, 4).selectExpr("if(id = 999, raise_error('bad row'), cast(id as string)) as value")
    with pytest.raises(Exception, match="bad row"):
        save(rows, live, topic=topic)
    # What a task that Spark killed had staged is dropped by the server when `staging.part_seconds` have passed.
    assert stored(client, topic) == []


def test_rows_that_cannot_be_records_become_dead_letters_with_the_reason(
    spark: SparkSession, live: LiveServer, client: BlockingClient
) -> None:
    make(live, "good")
    make(live, "bad")
    rows = spark.createDataFrame(
        [
            ("good", "k", "fine", None),
            ("good", None, None, None),
            (None, "k", "no topic", None),
            ("nowhere", "k", "lost", None),
            ("$state", "k", "own", None),
            ("good", "k", "x" * 5000, None),
            ("good", "k", "there", 7),
            ("a,b", "k", "comma", None),
        ],
        "topic string, key string, value string, partition int",
    ).coalesce(1)
    with pytest.raises(PythonException, match=r"a row cannot be published: its value is null.*deadLetterTopic"):
        save(rows, live)
    assert stored(client, "good") == []
    save(rows, live, deadLetterTopic="bad", maxRecordBytes="4KiB")
    assert payloads(client, "good") == [b"fine"]
    letters = {(one.payload or b"")[:8]: dict(one.headers) for one in stored(client, "bad")}
    reasons = {payload: headers[b"dead-reason"] for payload, headers in letters.items()}
    assert reasons == {
        b"": b"its value is null, which only removes a key, and it has none",
        b"no topic": b"its topic is null",
        b"lost": b"there is no topic 'nowhere': make it with `babelbus topics create nowhere`",
        b"own": b"topic '$state' is the server's own",
        b"x" * 8: b"it has 5035 bytes, the most are 4096",
        b"there": b"topic 'good' has partitions 0 to 0, not 7: drop the column partition, as with .drop('partition'),"
        b" or add partitions to the topic",
        b"comma": b"'a,b' is no name of a topic",
    }
    assert letters[b"x" * 8][b"dead-bytes"] == b"5000"
    assert letters[b"lost"][b"dead-topic"] == b"nowhere"


def test_topics_that_the_options_name_are_asked_for_before_there_are_rows(
    spark: SparkSession, live: LiveServer, tmp_path: Path
) -> None:
    make(live, "asked")
    none = spark.createDataFrame([], VALUES)
    with pytest.raises(
        AnalysisException, match=r"option deadLetterTopic: there is no topic 'nodl': make it with `babel"
    ):
        save(none, live, topic="asked", deadLetterTopic="nodl")
    with pytest.raises(
        AnalysisException, match=r"option topic: there is no topic 'notopic': make it with `babelbus topi"
    ):
        save(none, live, topic="notopic")
    rows = follow(spark, live, "asked").select("value")
    with pytest.raises(StreamingQueryException, match=r"option deadLetterTopic: topic '\$state' is the server's own"):
        run(rows, live, tmp_path, topic="asked", deadLetterTopic="$state")


def test_the_state_is_not_set_through_a_topic_that_keeps_none(
    spark: SparkSession, live: LiveServer, client: BlockingClient
) -> None:
    topic = make(live, "plant", 2)
    rows = spark.createDataFrame([("plant/a", "1"), ("plant/b", "2"), ("plant/c", None)], "key string, value string")
    before = staged_bytes(live)
    refusal = r"option topic: topic 'plant' keeps no state.*: `babelbus topics alter plant --retain last` lets it"
    with pytest.raises(AnalysisException, match=refusal):
        save(rows, live, topic=topic, table="state")
    options = parse_sink({**place(live), "topic": topic, "table": "state", "txnId": "plant"}, "stream")
    with pytest.raises(TargetError, match=refusal):
        check_targets(options)
    chunk = pa.record_batch({"key": [b"plant/a"], "value": [b"1"]})
    with pytest.raises(RequestError, match="'plant' keeps no state"):  # a topic that was altered under way
        stage(iter([chunk]), options, Target("plant", 0))
    assert staged_bytes(live) == before
    assert stored(client, topic, 0) == stored(client, topic, 1) == []
    live.call(lambda: live.server.broker.alter_topic(topic, {"retain": "last"}, SERVER))
    live.call(lambda: live.server.broker.state.set("plant/c", b"3"))
    save(rows, live, topic=topic, table="state")
    state = spark.read.format("babelbus").options(**place(live), table="state").load()
    found = state.where("key like 'plant/%'").select("key", "value").collect()
    assert sorted(map(tuple, found)) == [("plant/a", "1"), ("plant/b", "2")]


def test_a_topic_is_copied_with_the_columns_that_it_is_read_with(
    spark: SparkSession, live: LiveServer, client: BlockingClient
) -> None:
    source, target = make(live, "copied", 2), make(live, "copy", 1)
    records = [Record(b"1", b"k", ((b"h", b"v"),), NOW), Record(None, b"k", (), NOW + 1)]
    client.publish_many(source, records, partition=1)
    options = place(live) | {"subscribe": source, "includeHeaders": "true"}
    rows = spark.read.format("babelbus").options(**options).load()
    with pytest.raises(
        PythonException, match=r"its subject 'copied' is not below its topic 'copy': drop the column subj"
    ):
        save(rows, live, topic=target)
    with pytest.raises(PythonException, match=r"partitions 0 to 0, not 1: drop the column partition, as with .drop\("):
        save(rows.drop("subject"), live, topic=target)
    save(rows.drop("subject", "partition"), live, topic=target)
    assert [(one.payload, one.key, one.headers, one.timestamp) for one in stored(client, target)] == [
        (one.payload, one.key, one.headers, one.timestamp) for one in records
    ]
    save(rows.withColumn("timestampType", F.lit(0)), live)  # to where they came from
    assert len(stored(client, source, 1)) == 4


def follow(spark: SparkSession, live: LiveServer, source: str) -> DataFrame:
    options = {"assign": f'{{"{source}": [0]}}', "startingOffsets": "earliest", "maxOffsetsPerTrigger": "40"}
    return spark.readStream.format("babelbus").options(**place(live), **options).load()


def run(
    frame: DataFrame, live: LiveServer, checkpoint: Path, *, mode: str = "append", **options: Any
) -> StreamingQuery:
    """Write all that there is now."""
    query = (
        frame.writeStream.format("babelbus")
        .options(**place(live), **options)
        .option("checkpointLocation", str(checkpoint))
        .outputMode(mode)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(SECONDS_MAX)
    return query


def test_a_stream_publishes_each_row_once_although_its_last_batch_is_run_again(
    spark: SparkSession, live: LiveServer, client: BlockingClient, tmp_path: Path
) -> None:
    source, target = make(live, "source"), make(live, "target")
    client.publish_many(source, numbered(100))
    rows = follow(spark, live, source).select("key", "value", "timestamp")
    run(rows, live, tmp_path, topic=target)
    assert payloads(client, target) == [b"%d" % n for n in range(100)]
    commits = sorted((tmp_path / "commits").glob("[0-9]"))
    assert len(commits) == 3
    commits[-1].unlink()  # as if the driver had been killed behind its commit
    for crc in (tmp_path / "commits").glob(".*.crc"):
        crc.unlink()
    client.publish_many(source, numbered(10, first=100))
    run(rows, live, tmp_path, topic=target)
    assert payloads(client, target) == [b"%d" % n for n in range(110)]


def test_batches_that_are_saved_by_their_ids_are_saved_once_and_belong_to_their_query(
    spark: SparkSession, live: LiveServer, client: BlockingClient, tmp_path: Path
) -> None:
    source, target = make(live, "events"), make(live, "counts")
    client.publish_many(source, numbered(100))
    counts = follow(spark, live, source).groupBy(F.expr("length(value)").alias("size")).count()

    def upsert(frame: DataFrame, batch_id: int) -> None:
        rows = frame.selectExpr("cast(size as string) as key", "cast(count as string) as value")
        for _ in range(2):  # as if it was done again
            save(rows, live, topic=target, txnId="counts", batchId=batch_id)

    query = (
        counts.writeStream.foreachBatch(upsert)
        .option("checkpointLocation", str(tmp_path))
        .outputMode("update")
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(SECONDS_MAX)
    found = [(one.key, one.payload) for one in stored(client, target)]
    assert sorted(found) == [(b"1", b"10"), (b"2", b"30"), (b"2", b"70"), (b"2", b"90")]
    assert client.transaction("counts").ask().owner == str(query.id)


def test_a_lost_checkpoint_is_told_from_batches_that_were_published(
    spark: SparkSession, live: LiveServer, client: BlockingClient, tmp_path: Path
) -> None:
    source, target = make(live, "again"), make(live, "twice")
    client.publish_many(source, numbered(10))
    rows = follow(spark, live, source).select("value")
    run(rows, live, tmp_path / "one", topic=target, txnId="copy")
    with pytest.raises(StreamingQueryException, match=r"transaction id 'copy' belongs to the query .*checkpoint"):
        run(rows, live, tmp_path / "two", topic=target, txnId="copy")
    assert len(stored(client, target)) == 10
    run(rows, live, tmp_path / "three", topic=target, delivery="at-least-once")
    assert len(stored(client, target)) == 20


def test_an_old_copy_of_a_checkpoint_is_refused(
    spark: SparkSession, live: LiveServer, client: BlockingClient, tmp_path: Path
) -> None:
    source, target = make(live, "restored"), make(live, "restored copy")
    rows = follow(spark, live, source).select("value")
    client.publish_many(source, numbered(10))
    run(rows, live, tmp_path / "checkpoint", topic=target, txnId="restored")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "old")
    for first in (10, 20):
        client.publish_many(source, numbered(10, first=first))
        run(rows, live, tmp_path / "checkpoint", topic=target, txnId="restored")
    client.publish_many(source, numbered(10, first=30))
    # Its batch 1 has 30 records now, and had 10.
    with pytest.raises(StreamingQueryException, match=r"batch 1 comes again, and a later batch .* was published"):
        run(rows, live, tmp_path / "old", topic=target, txnId="restored")
    run(rows, live, tmp_path / "checkpoint", topic=target, txnId="restored")
    assert payloads(client, target) == [b"%d" % n for n in range(40)]


OPTIONS = {"url": "jebp://127.0.0.1:5320", "identity": "key"}


@pytest.mark.parametrize(
    ("columns", "options", "reason"),
    [
        ("value int", {"topic": "t"}, "column 'value' is int, the sink takes string or binary: cast it first"),
        ("text string", {"topic": "t"}, "column 'text': the sink has value, key"),
        ("value string, offset string", {"topic": "t"}, "column 'offset': the sink has value, key"),
        ("value string, timestampType bigint", {"topic": "t"}, "column 'timestampType': the sink has value, key"),
        ("value string", {"topic": "t", "url": ""}, "^option url is missing: give the server that the rows go to"),
        (
            "value string",
            {"topic": "t", "partitioner": "random"},
            "option partitioner: 'random' is not possible; write key",
        ),
        (
            "key string, value string",
            {"topic": "t", "table": "state", "partitioner": "spread"},
            "options partitioner=spread and table=state do not go together",
        ),
        (
            "key string, value string",
            {"topic": "t", "table": "state", "deadLetterTopic": "t"},
            "option deadLetterTopic: 't' is not possible; write another topic",
        ),
        ("key string", {"topic": "t"}, "column 'value' is missing"),
        (
            "value string, headers map<string,string>",
            {"topic": "t"},
            "column 'headers' is map<string,string>, the sink",
        ),
        ("value string", {}, "neither a column 'topic' nor the option topic"),
        ("value string", {"topic": "t", "txnId": "x"}, "options txnId and batchId go together"),
        ("value string", {"topic": "t", "txnId": "x", "batchId": "-1"}, "option batchId: '-1' is not possible"),
        ("value string", {"topic": "t", "keys": "x"}, "option keys is unknown; the sink has url"),
        ("value string", {"topic": "t", "delivery": "at-least-once"}, "option delivery is for streams"),
        ("value string", {"topic": "t", "path": "data"}, "option path .* is for reading"),
        ("value string", {"topic": "t", "maxRecordBytes": "1GiB"}, "option maxRecordBytes: '1GiB' is not possible"),
        ("value string", {"topic": " "}, "option topic: ' ' is not possible"),
        ("key string, value string", {"table": "state"}, "option topic is missing"),
        ("key string, value string", {"topic": "t", "table": "tree"}, "option table: 'tree' is not possible"),
        ("value string", {"topic": "t", "table": "state"}, "column 'key' is missing: table=state needs it"),
        ("key string, value string, headers string", {"topic": "t", "table": "state"}, "column 'headers': table=state"),
    ],
)
def test_what_cannot_be_saved_is_refused_in_one_line(
    spark: SparkSession, columns: str, options: dict[str, str], reason: str
) -> None:
    schema = spark.createDataFrame([], columns).schema
    with pytest.raises((OptionError, SchemaError), match=reason) as refused:
        BabelbusDataSource({**OPTIONS, **options}).writer(schema, overwrite=False)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "exactly once needs an id that stays: give the option checkpointLocation"),
        ({"delivery": "at-most-once"}, "option delivery: 'at-most-once' is not possible"),
        ({"delivery": "at-least-once", "txnId": "x"}, "txnId and delivery=at-least-once do not go together"),
        ({"txnId": "x", "batchId": "1"}, "option batchId is for saves"),
        ({"txnId": "x" * 513}, "option txnId: .* an id of 1 to 512 bytes"),
    ],
)
def test_what_cannot_be_streamed_is_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        BabelbusDataSource({**OPTIONS, "topic": "t", **options}).streamWriter(VALUES, overwrite=False)


def test_output_modes_that_a_log_cannot_do_are_refused() -> None:
    with pytest.raises(OutputModeError, match=r"mode overwrite: a topic is only appended to"):
        BabelbusDataSource({**OPTIONS, "topic": "t"}).writer(VALUES, overwrite=True)
    with pytest.raises(OutputModeError, match="output mode complete would publish the whole result again"):
        BabelbusDataSource({**OPTIONS, "topic": "t", "txnId": "x"}).streamWriter(VALUES, overwrite=True)


def test_a_checkpoint_gives_the_transaction_however_its_folder_is_written() -> None:
    def transaction(**more: str) -> str:
        return parse_sink({**OPTIONS, "topic": "t", **more}, "stream").transaction

    assert transaction(checkpointlocation="file:///a/b/") == transaction(checkpointLocation="/a/b", queryname="q")
    assert transaction(checkpointlocation="/a/c") != transaction(checkpointLocation="/a/b")
    assert transaction(queryname="q") not in ("", transaction(checkpointLocation="q"))
    assert transaction(txnId="mine", checkpointLocation="/a/b") == "mine"


def test_dead_letters_have_the_headers_that_those_of_groups_have() -> None:
    assert (DEAD_REASON, DEAD_TOPIC, DEAD_TIME) == (dead_letters.REASON, dead_letters.TOPIC, dead_letters.TIME)


def test_a_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    config = configure_to_return(tmp_path / "data")
    with LiveServer(config) as live:
        address, identity = live.address, str(live.conf / "admin_key")
    place = Place(address=address, identity=identity, timeout_seconds=60)
    refused = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            refused.set()

    def ask() -> int:
        with connection(place) as client:
            return client.transaction("any").ask().last_batch_id

    listener = Listener()
    logging.getLogger("babelbus.spark.connection").addHandler(listener)
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(ask)
        assert refused.wait(SECONDS_MAX)
        with LiveServer(config):
            assert told.result(SECONDS_MAX) == -1
            with connection(place) as client:
                client.close()
    logging.getLogger("babelbus.spark.connection").removeHandler(listener)
    with pytest.raises(ClientClosedError):
        ask()
    with pytest.raises(ConnectionLostError), connection(msgspec.structs.replace(place, timeout_seconds=0.05)):
        pass


def staged(live: LiveServer, target: Target, *values: bytes) -> Staged:
    """Do what one attempt of a task does."""
    given = {**place(live), "topic": "attempts", "txnId": target.transaction}
    return stage(iter([pa.record_batch([pa.array(values)], ["value"])]), parse_sink(given, "stream"), target)


def test_what_a_killed_attempt_has_staged_is_not_published(live: LiveServer, client: BlockingClient) -> None:
    make(live, "attempts")
    before = staged_bytes(live)
    options = parse_sink({**place(live), "topic": "attempts", "txnId": "task"}, "stream")
    lost = staged(live, Target("task", 0, "query", 0, 0), b"a", b"b")
    again = staged(live, Target("task", 0, "query", 0, 0), b"a", b"b")  # after a crash, numbers begin anew
    other = staged(live, Target("task", 0, "query", 1, 3), b"c")
    assert len({lost.part, again.part, other.part}) == 3
    empty = stage(iter(()), options, Target("task", 0, "query", 2, 0))
    for _ in range(2):
        commit(options, "task", 0, [again, other, empty, None])
    assert payloads(client, "attempts") == [b"a", b"b", b"c"]
    late = staged(live, Target("task", 0, "query", 0, 9), b"a", b"b")
    assert late.records == 0  # the batch is there: nothing is sent
    abort(options, [staged(live, Target("task", 1, "query"), b"d"), None])
    assert staged_bytes(live) == before
    with pytest.raises(SinkOwnerError, match="belongs to the query query, this one is another"):
        staged(live, Target("task", 1, "another"), b"e")
    assert payloads(client, "attempts") == [b"a", b"b", b"c"]
