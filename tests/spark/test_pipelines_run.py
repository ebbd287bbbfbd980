"""Pipelines at work: a real Spark, a real server, the flights of the first days of 2013."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from babelbus.client import BlockingClient, Record
from babelbus.core.access import SERVER
from babelbus.spark.errors import QueryFailedError
from babelbus.spark.pipelines.bus import Bus
from babelbus.spark.pipelines.check import check
from babelbus.spark.pipelines.load import load
from babelbus.spark.pipelines.progress import Batch, Watcher
from babelbus.spark.pipelines.run import Policy, Runner
from examples.flights import airlines, flights, weather
from tests.support.server import LiveServer, configure

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
HOUR = 3_600_000
pytestmark = pytest.mark.timeout(1200)


class Watched(Watcher):
    """What a run told."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.failures: list[tuple[str, float | None]] = []
        self.skips: list[tuple[str, str]] = []
        self.seen = threading.Event()

    def batch(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.seen.set()

    def skipped(self, sink: str, reason: str) -> None:
        self.skips.append((sink, reason))

    def failed(self, sink: str, reason: str, restart_seconds: float | None) -> None:
        self.failures.append((reason, restart_seconds))
        if restart_seconds is None:
            self.seen.set()

    def rows(self, sink: str) -> tuple[int, int]:
        told = [batch for batch in self.batches if batch.sink == sink]
        return sum(batch.rows_in for batch in told), sum(batch.rows_out for batch in told)


class Place:
    """A server, a folder and a Spark."""

    def __init__(self, spark: SparkSession, live: LiveServer, folder: Path) -> None:
        self.spark, self.live, self.folder = spark, live, folder
        self.bus = Bus(
            url=f"jebp://{live.address}",
            path=str(live.config.data.folder),
            identity=str(live.conf / "admin_key"),
        )

    def create(self, *topics: str, **settings: object) -> None:
        for topic in topics:
            self.live.call(lambda name=topic: self.live.server.broker.create_topic(name, 1, dict(settings), SERVER))  # type: ignore[misc]

    def publish(self, topic: str, records: list[Record]) -> None:
        with BlockingClient(self.live.address, identity=self.live.admin) as client:
            client.publish_many(topic, records)

    def read(self, topic: str) -> list[Record]:
        with BlockingClient(self.live.address, identity=self.live.admin) as client:
            return list(client.follow(topic, until_end=True))

    def rows(self, topic: str) -> list[Any]:
        return [json.loads(record.payload or b"null") for record in self.read(topic)]

    def state(self, prefix: str) -> dict[str, Any]:
        source = self.spark.read.format("babelbus").option("table", "state").option("path", self.bus.path)
        return {row.key: json.loads(row.value) for row in source.load().collect() if row.key.startswith(prefix)}

    def run(self, name: str, checkpoint: str = "checkpoint", trigger: str = "once", **settings: str) -> Watched:
        watched = Watched()
        # Spark gives a Python worker 15 s to connect, too short on a busy machine: what fails is done again.
        policy = Policy(str(self.folder / checkpoint), trigger, restarts_max=3, backoff_seconds=0.1)
        Runner(self.spark, load(str(EXAMPLES / name), settings), lambda: self.bus, policy, [watched]).run()
        return watched


@pytest.fixture
def place(spark: SparkSession, tmp_path: Path) -> Iterator[Place]:
    spark.sparkContext.setLogLevel("OFF")
    with LiveServer(configure(tmp_path / "data")) as live:
        yield Place(spark, live, tmp_path)
        for query in spark.streams.active:
            query.stop()


def departures(count: int) -> list[Record]:
    return [
        Record(event.payload, event.key, ((b"ce_source", b"jebp:demo"),), event.timestamp_ms)
        for event in islice(flights(), count)
    ]


def test_archive_and_replay_give_back_what_was_published_once_and_in_order(place: Place) -> None:
    place.create("flights", "again")
    sent = departures(600)
    folder = str(place.folder / "archive")
    settings = {"folder": folder, "compact_files": "2"}
    for part in (sent[:200], sent[200:400], sent[400:]):
        place.publish("flights", part)
        told = place.run("archive.yaml", "archive-checkpoint", **settings)
        assert told.rows("files") == (200, 200)
    frame = place.spark.read.parquet(folder)
    assert frame.count() == 600
    assert [row.offset for row in frame.select("offset").orderBy("offset").collect()] == list(range(600))
    names = [path.name for path in Path(folder).rglob("*.parquet")]
    assert any("-to-" in name for name in names), names
    told = place.run("replay.yaml", "replay-checkpoint", folder=folder, into="again")
    assert told.rows("records") == (600, 600)
    found = place.read("again")
    assert [(one.key, one.payload, one.timestamp) for one in found] == [
        (one.key, one.payload, one.timestamp) for one in sent
    ]
    assert found[0].headers == sent[0].headers
    told = place.run("replay.yaml", "replay-checkpoint", folder=folder, into="again")
    assert (told.batches, [sink for sink, _ in told.skips]) == ([], ["records"])
    assert "was done before" in told.skips[0][1]
    assert len(place.read("again")) == 600  # a used checkpoint publishes nothing twice
    place.create("elsewhere")
    told = place.run("replay.yaml", "replay-checkpoint", folder=folder, into="elsewhere")
    assert (told.rows("records"), len(place.read("elsewhere"))) == ((600, 600), 600)  # which is another thing to do
    shutil.rmtree(place.folder / "replay-checkpoint")
    place.run("replay.yaml", "replay-checkpoint", folder=folder, into="again")
    assert len(place.read("again")) == 1200  # who removes the checkpoint wants it all once more


def test_rollup_gives_final_windows_once_and_live_ones_to_the_state(place: Place) -> None:
    place.create("flights", "rollup")
    place.create("live", retain="last")
    sent = departures(900)
    place.publish("flights", sent)
    told = place.run("rollup.yaml")
    expected: dict[str, int] = {}
    for record in sent:
        hour = record.timestamp // HOUR * HOUR
        carrier = json.loads(record.payload or b"")["carrier"]
        expected[f"{carrier} {hour}"] = expected.get(f"{carrier} {hour}", 0) + 1
    live = place.state("live/")
    assert len(live) == len(expected)
    assert sum(one["flights"] for one in live.values()) == 900
    assert told.rows("live") == (900, len(expected))
    final = place.rows("rollup")
    assert 0 < len(final) < len(expected)  # the last windows are still open
    # A late flight within the lateness counts; one behind the watermark is told and dropped.
    late, lost = sent[-1].timestamp - 25 * 60_000, sent[-1].timestamp - 24 * HOUR
    told.batches.clear()
    place.publish("flights", [Record(sent[-1].payload, timestamp=late), Record(sent[-1].payload, timestamp=lost)])
    place.publish("flights", [Record(sent[-1].payload, timestamp=sent[-1].timestamp + 48 * HOUR)])
    told = place.run("rollup.yaml")
    assert sum(batch.rows_late for batch in told.batches if batch.sink == "final") == 1
    final = place.rows("rollup")
    assert len({(one["carrier"], one["start"]) for one in final}) == len(final)
    assert sum(one["flights"] for one in final) == 901


def test_enrich_joins_the_state_and_a_second_stream(place: Place) -> None:
    place.create("flights", "weather", "enriched")
    place.create("airlines", retain="last")
    place.publish(
        "airlines",
        [
            Record(
                json.dumps({"carrier": one.carrier, "name": one.name}).encode(),
                headers=((b"ce_subject", f"airlines/{one.carrier}".encode()), (b"content-type", b"application/json")),
            )
            for one in airlines()
        ],
    )
    sent = departures(400)
    first, last = sent[0].timestamp // HOUR * HOUR, sent[-1].timestamp
    place.publish("flights", sent)
    hours = []
    for one in islice(weather(), 26_000):
        at = _milliseconds(one.time_hour)
        if first <= at <= last:
            hours.append(Record(json.dumps({"origin": one.origin, "temp": one.temp}).encode(), timestamp=at))
    place.publish("weather", sorted(hours, key=lambda one: one.timestamp))
    told = place.run("enrich.py")
    found = place.rows("enriched")
    names = {one.carrier: one.name for one in airlines()}
    with_weather = [one for one in found if one["temp"] is not None]
    assert told.rows("enriched")[0] >= 400 + len(hours)
    assert {one["airline"] for one in found} <= set(names.values())
    # The record's time is the flight's, so that windows over the topic count the flight's day.
    times = {record.timestamp for record in place.read("enriched")}
    assert times == {_milliseconds(one["timestamp"]) for one in found}
    assert max(times) <= last
    assert len(with_weather) > 300
    assert len(found) == len({(one["carrier"], one["flight"], one["timestamp"]) for one in found})


def test_enrich_compares_a_flight_with_the_weather_of_its_hour_alone(spark: SparkSession) -> None:
    loaded = load(str(EXAMPLES / "enrich.py"))
    flight = (
        "timestamp TIMESTAMP, hour TIMESTAMP, carrier STRING, flight INT, airline STRING, origin STRING, dest STRING"
    )
    numbers = "temp: DOUBLE, wind_speed: DOUBLE, precip: DOUBLE, visib: DOUBLE"
    hourly = f"timestamp TIMESTAMP, data STRUCT<origin: STRING, {numbers}>"
    joined = loaded.functions["with_weather"](
        spark,
        named=spark.createDataFrame([], f"{flight}, dep_delay INT"),
        weather=spark.createDataFrame([], hourly),
    )
    condition = next(line for line in str(joined._jdf.queryExecution().analyzed()).splitlines() if "Join" in line)
    assert re.search(r"hour#\d+ = hour#\d+", condition), condition


def _milliseconds(text: str) -> int:
    from datetime import datetime

    return int(datetime.fromisoformat(text).timestamp() * 1000)


def test_deduplicate_lets_each_record_through_once_across_runs(place: Place) -> None:
    place.create("flights", "once")
    sent = departures(150)
    place.publish("flights", sent + sent[:100])
    place.run("deduplicate.py")
    place.publish("flights", sent[120:])
    told = place.run("deduplicate.py")
    assert told.rows("records") == (30, 0)
    assert sorted(one.payload or b"" for one in place.read("once")) == sorted(one.payload or b"" for one in sent)


def test_quality_sends_bad_records_away_with_the_reason(place: Place) -> None:
    place.create("flights", "clean", "rejected")
    sent = departures(100)
    broken = json.loads(sent[0].payload or b"")
    bad = [
        Record(b"{", b"a", ((b"h", b"1"),), sent[0].timestamp),
        Record(json.dumps(broken | {"distance": -1, "origin": "BER"}).encode(), b"b", (), sent[0].timestamp),
        Record(json.dumps(broken | {"carrier": None}).encode(), b"c", (), sent[0].timestamp),
    ]
    place.publish("flights", [*sent, *bad])
    told = place.run("quality.py")
    assert (told.rows("clean"), told.rows("rejected")) == ((103, 100), (103, 3))
    assert [one.payload for one in place.read("clean")] == [one.payload for one in sent]
    found = {one.key: one for one in place.read("rejected")}
    assert found[b"a"].headers == ((b"h", b"1"), (b"quality", b"it is no JSON of the schema"))
    assert dict(found[b"b"].headers) == {b"quality": b"origin is a New York airport; distance is positive"}
    assert dict(found[b"c"].headers) == {b"quality": b"carrier has two characters"}
    assert found[b"b"].payload == bad[1].payload


def test_traffic_tells_who_publishes_what(place: Place) -> None:
    place.create("flights", "other", "traffic", "gaps")
    sent = departures(300)
    place.publish("flights", sent)
    place.publish("other", [Record(b"1234", headers=((b"ce_source", b"sbus:uid=7"),), timestamp=sent[0].timestamp)])
    place.publish("flights", [Record(b"", timestamp=sent[-1].timestamp + 24 * HOUR)])
    told = place.run("traffic.py", topics="flights|other", window="1 hour")
    found = place.rows("traffic")
    assert {(one["topic"], one["protocol"], one["source"]) for one in found} == {
        ("flights", "jebp", "jebp:demo"),
        ("other", "sbus", "sbus:uid=7"),
    }
    assert sum(one["records"] for one in found) == 301
    assert sum(one["bytes"] for one in found) == 4 + sum(len(one.payload or b"") for one in sent)
    assert place.rows("gaps") == []
    assert told.rows("talkers")[1] == 3


ONE = """
name: one
sources:
  raw: {topic: flights, options: {startingOffsets: earliest}}
steps:
  text: {sql: "SELECT key, value, timestamp FROM raw"}
sinks:
  out: {from: text, topic: out}
"""


def test_a_sink_takes_the_partition_and_the_subject_that_a_step_made_but_not_those_that_were_read(
    place: Place,
) -> None:
    place.create("flights", "read")
    place.live.call(lambda: place.live.server.broker.create_topic("made", 2, {}, SERVER))
    file = place.folder / "one.yaml"
    file.write_text("""
name: one
sources:
  raw: {topic: flights, options: {startingOffsets: earliest}}
steps:
  made: {sql: "SELECT value, timestamp, partition + 1 AS partition, concat('made/', subject) AS subject FROM raw"}
sinks:
  read: {from: raw, topic: read}
  made: {from: made, topic: made}
""")
    place.publish("flights", departures(5))
    policy = Policy(str(place.folder / "checkpoint"), "once", restarts_max=3, backoff_seconds=0.1)
    Runner(place.spark, load(str(file)), lambda: place.bus, policy, [Watched()]).run()
    assert len(place.read("read")) == 5
    rows = place.spark.read.format("babelbus").options(path=place.bus.path, subscribe="read,made").load()
    found = {(row.topic, row.partition, row.subject) for row in rows.collect()}
    assert found == {("read", 0, "read"), ("made", 1, "made/flights")}


def test_a_pipeline_runs_until_it_is_told_to_stop_and_goes_on_where_it_was(place: Place) -> None:
    place.create("flights", "out")
    file = place.folder / "one.yaml"
    file.write_text(ONE)
    place.publish("flights", departures(50))
    for expected in (50, 70):
        watched, stop = Watched(), threading.Event()
        waiter = threading.Thread(target=lambda w=watched, s=stop: (w.seen.wait(300), s.set()))
        waiter.start()
        policy = Policy(str(place.folder / "checkpoint"), "100ms", restarts_max=3)
        Runner(place.spark, load(str(file)), lambda: place.bus, policy, [watched], stop=stop).run()
        waiter.join()
        assert [batch.lag for batch in watched.batches][-1:] == [0]
        assert len(place.read("out")) == expected
        assert place.spark.streams.active == []
        place.publish("flights", departures(20))


def test_a_query_that_fails_is_started_again_so_many_times_and_no_more(place: Place) -> None:
    place.create("flights")
    file = place.folder / "failing.yaml"
    file.write_text(ONE.replace("SELECT key,", "SELECT CAST(raise_error('too bad') AS STRING) AS key,"))
    place.publish("flights", departures(3))
    watched = Watched()
    policy = Policy(str(place.folder / "checkpoint"), "once", restarts_max=1, backoff_seconds=0.01)
    place.create("out")
    with pytest.raises(QueryFailedError, match=r"sinks.out: the query failed 2 times in a row: .*too bad"):
        Runner(place.spark, load(str(file)), lambda: place.bus, policy, [watched]).run()
    assert [seconds for _, seconds in watched.failures] == [0.01, None]


def test_check_finds_what_is_wrong_without_running(place: Place) -> None:
    place.create("flights")
    file = place.folder / "one.yaml"

    def faults(text: str) -> dict[str, str]:
        file.write_text(text)
        return {one.field: one.text for one in check(place.spark, load(str(file)), place.bus) if one.ok is False}

    assert faults(ONE.replace("topic: out", "console: true")) == {}
    assert faults(ONE)["sinks.out"] == "there is no topic 'out': babelbus topics create out"
    later = ONE.replace("sinks:", '  last: {sql: "SELECT * FROM raw"}\nsinks:').replace(
        "timestamp FROM raw", "timestamp FROM last"
    )
    assert faults(later)["steps.text"] == "reads the step 'last', which is below it: move that step up"
    assert "there is no topic 'fligths'" in faults(ONE.replace("flights", "fligths"))["sources.raw"]
    assert "colour" in faults(ONE.replace("SELECT key,", "SELECT colour,"))["steps.text"]
    assert "PARSE_SYNTAX_ERROR" in faults(ONE.replace("SELECT key,", "SELECT FROM WHERE key,"))["steps.text"]
    grouped = ONE.replace("SELECT key, value, timestamp FROM raw", "SELECT key, count(*) FROM raw GROUP BY key")
    assert "watermark" in faults(grouped.replace("topic: out", "console: true"))["sinks.out"]
    number = ONE.replace("SELECT key, value", "SELECT key, 1 AS value")
    assert "column 'value' is int" in faults(number)["sinks.out"]
    unknown = ONE.replace("topic: flights, options: {startingOffsets: earliest}", "format: nope")
    assert "nope" in faults(unknown)["sources.raw"]
    misspelt = ONE.replace("startingOffsets:", "startingOffset:")
    assert "option startingOffset is unknown" in faults(misspelt)["sources.raw"]
    place.create("out")
    assert faults(ONE) == {}
    assert place.read("out") == []
    lost = ONE.replace("topic: out}", "topic: out, dead_letters: nowhere}")
    assert "there is no topic 'nowhere'" in faults(lost)["sinks.out"]
    files = ONE.replace("topic: out}", "parquet: out, partition_by: [day]}")
    assert "there is no column 'day'; there are: key, value" in faults(files)["sinks.out.partition_by"]
    place.bus = Bus()
    assert "option startingOffset is unknown" in faults(misspelt)["sources.raw"]
    assert faults(ONE) == {}


def findings(place: Place, text: str, name: str = "one.yaml", **settings: str) -> dict[str, tuple[bool | None, str]]:
    file = place.folder / name
    file.write_text(text)
    told = check(place.spark, load(str(file)), place.bus, settings)
    assert len({(one.field, one.text) for one in told}) == len(told)
    return {one.field: (one.ok, one.text) for one in told}


STATIC = """
name: static
sources:
  files: {parquet: %s, stream: false}
steps:
  rows: {sql: "SELECT n, array(n) AS many FROM files"}
sinks:
  out: {from: files, format: noop}
"""


def test_check_knows_what_a_sink_refuses_to_take(place: Place) -> None:
    place.create("flights", "out")
    place.create("live", retain="last")
    grouped = "SELECT string(key) AS key, count(*) AS n, array(1) AS many FROM raw GROUP BY key"
    text = ONE.replace("SELECT key, value, timestamp FROM raw", grouped)

    def sink(fields: str, text: str = text) -> tuple[bool | None, str]:
        told = findings(place, text.replace("topic: out}", fields + "}"))
        return next(one for field, one in told.items() if field.startswith("sinks.out"))

    assert sink("topic: out, mode: update") == (True, "key string, value string")
    assert sink("state: live, mode: complete")[0]
    assert "output mode complete would publish the whole result again" in sink("topic: out, mode: complete")[1]
    assert "txnId" not in sink("topic: out, mode: update")[1]
    assert sink("topic: out, mode: update, options: {txnId: a}") == (False, "is the pipeline's own here")
    assert sink("format: noop, mode: complete")[0]
    assert sink("format: memory, mode: complete")[0]
    assert "[DATA_SOURCE_NOT_FOUND]" in sink("format: nosuchformat, mode: complete")[1]
    assert "[KAFKA_DATA_SOURCE_NOT_ENABLED]" in sink("format: kafka, mode: update")[1]
    plain = ONE.replace("SELECT key, value, timestamp", "SELECT string(key) AS key, array(1) AS many")
    kept = str(place.folder / "kept")
    assert sink("format: csv", plain) == (False, "is missing: the folder for csv files")
    assert '"ARRAY<INT>"' in sink(f"format: csv, options: {{path: {kept}}}", plain)[1]
    assert sink(f"format: json, options: {{path: {kept}}}", plain)[0]
    assert "output mode: complete" in sink(f"format: json, options: {{path: {kept}}}, mode: complete")[1]
    assert sink("parquet: kept, partition_by: [key], compact_files: 2", plain)[0]
    assert "partition" in sink("parquet: kept, partition_by: [many]", plain)[1]
    assert sorted(path.name for path in place.folder.iterdir()) == ["data", "one.yaml"]  # nothing was written


def test_check_knows_what_a_sink_of_no_stream_refuses(place: Place) -> None:
    place.spark.range(3).withColumnRenamed("id", "n").write.parquet(str(place.folder / "files"))
    text = STATIC % (place.folder / "files")
    assert all(ok for ok, _ in findings(place, text).values())
    complete = findings(place, text.replace("format: noop", "format: noop, mode: complete"))
    assert complete["sinks.out.mode"] == (False, "goes with streams, and 'files' is no stream")
    compact = findings(place, text.replace("format: noop", "parquet: out, compact_files: 2"))
    assert compact["sinks.out.compact_files"] == (False, "goes with streams, and 'files' is no stream")
    csv = text.replace("from: files, format: noop", "from: rows, format: csv, options: {path: out}")
    assert '"ARRAY<BIGINT>"' in findings(place, csv)["sinks.out"][1]


def test_check_sees_nothing_of_another_file(place: Place) -> None:
    place.create("flights")
    (place.folder / "other.py").write_text(
        "def helps(spark, raw):\n    spark.udf.register('shout', str.upper)\n    return raw"
    )
    first = ONE.replace("topic: out", "console: true").replace("sinks:", "  hidden: {python: 'other.py:helps'}\nsinks:")
    assert all(ok for ok, _ in findings(place, first).values())
    second = first.replace("  hidden: {python: 'other.py:helps'}\n", "").replace(
        "SELECT key", "SELECT shout('a') AS key"
    )
    assert "`shout`" in findings(place, second, "two.yaml")["steps.text"][1]
    third = second.replace("shout('a') AS key, value, timestamp FROM raw", "* FROM hidden")
    assert "`hidden`" in findings(place, third, "three.yaml")["steps.text"][1]


def test_check_gives_its_session_the_settings_of_the_file(place: Place) -> None:
    place.create("flights")
    text = ONE.replace("topic: out", "console: true").replace("value, timestamp", "VALUE, timestamp")
    assert all(ok for ok, _ in findings(place, text).values())
    strict = text + "spark: {spark.sql.caseSensitive: true, spark.sql.session.timeZone: Europe/Berlin}\n"
    told = findings(place, strict)
    assert (told["spark.spark.sql.caseSensitive"], told["steps.text"][0]) == ((True, "true"), False)
    assert "`VALUE`" in told["steps.text"][1]
    beaten = findings(place, strict, **{"spark.sql.caseSensitive": "false"})
    assert beaten["spark.spark.sql.caseSensitive"] == (True, "false, of the command line")
    assert all(ok for ok, _ in beaten.values())
    wrong = (
        "spark: {spark.sql.shuffle.partitions: abc, spark.driver.memory: lots, spark.task.cpus: 1, spark.nosuch: 1}\n"
    )
    told = findings(place, text + wrong)
    assert [told[f"spark.{name}"][0] for name in ("spark.sql.shuffle.partitions", "spark.driver.memory")] == [False] * 2
    assert "'abc'" in told["spark.spark.sql.shuffle.partitions"][1]
    assert [told[f"spark.{name}"][0] for name in ("spark.task.cpus", "spark.nosuch")] == [True, None]
    assert place.spark.conf.get("spark.sql.caseSensitive") == "false"


def test_check_lists_a_fault_once_and_goes_on_with_what_does_not_need_it(place: Place) -> None:
    place.create("flights")
    (place.folder / "functions.py").write_text(
        "def first(spark, gone): return gone\ndef second(spark): return 1 / 0\ndef third(spark): return 3\n"
    )
    text = """
name: faulty
sources:
  gone: {parquet: missing, stream: false}
  told: {parquet: missing, schema: n INT, stream: false}
  raw: {topic: flights, json: a STRNG}
  fine: {topic: flights}
steps:
  needs_gone: {sql: SELECT * FROM gone}
  needs_step: {sql: SELECT * FROM fine JOIN needs_gone}
  needs_raw: {sql: SELECT * FROM raw}
  first: {python: "functions.py:first"}
  second: {python: "functions.py:second"}
  third: {python: "functions.py:third"}
  typo: {sql: SELECT m FROM told}
  unknown: {sql: SELECT * FROM fines}
  last: {sql: SELECT value FROM fine}
sinks:
  console: {from: needs_step, console: true}
  nowhere: {from: first, topic: nowhere}
  out: {from: last, format: csv, mode: complete}
"""
    told = findings(place, text)
    assert {field: ok for field, (ok, _) in told.items()} == {
        "sources.gone": False, "sources.told": False, "sources.raw": True, "sources.raw.json": False,
        "sources.fine": True,
        "steps.needs_gone": None, "steps.needs_step": None, "steps.needs_raw": None, "steps.first": None,
        "steps.second": False, "steps.third": False, "steps.typo": False, "steps.unknown": False, "steps.last": True,
        "sinks.console": None, "sinks.nowhere": False, "sinks.out.options.path": False, "sinks.out": False,
    }  # fmt: skip
    assert told["steps.second"][1] == "its function raised ZeroDivisionError: division by zero"
    assert "there is no topic 'nowhere'" in told["sinks.nowhere"][1]
    assert "`m`" in told["steps.typo"][1]


def test_check_of_the_replay_names_its_missing_folder_once(place: Place) -> None:
    place.create("again")
    told = check(place.spark, load(str(EXAMPLES / "replay.yaml"), {"folder": "missing", "into": "again"}), place.bus)
    assert [one.field for one in told if one.ok is False] == ["sources.archived"]
