"""A live table that Spark computes from the log: the last part of `make demo`.

The flights are read as a stream, joined with the airlines and aircraft of the state and with the stream of the weather.
Each micro-batch adds to the delays by carrier and hour, which become state again: so a Wörterbuch client reads what
Spark computed. At the end the totals are compared with those that plain Python makes of the source.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from rich.console import Console
from rich.table import Table

from babelbus.client import BlockingClient
from babelbus.spark.java import java_home
from babelbus.spark.python import worker_python
from examples.flights import flights, planes, weather
from examples.load_demo import hour_ms, weather_records
from examples.one_bus import Lines

FLIGHTS = "flights"
WEATHER = "weather"
DELAYS = "delays"
FLIGHTS_PER_BATCH = 90_000
"""Four micro-batches for the year; the weather comes in proportion."""
RAIN_INCHES = 0.01
SHOWN = 6

Totals = dict[tuple[str, int], list[int]]
"""Carrier and hour of the day (UTC) -> flights, minutes of delay, flights in rain, seats."""


def publish_weather(client: BlockingClient, data_folder: str) -> int:
    """Make the topics of this part, and publish the hourly weather of the three airports as events; return how many."""
    client.create_topic(WEATHER)
    babelbus = str(Path(sys.executable).parent / "babelbus")
    making = [babelbus, "topics", "create", DELAYS, "--retain", "last", "--cleanup", "compact"]
    subprocess.run([*making, "--data-folder", data_folder], check=True, stdout=subprocess.DEVNULL)
    records = list(weather_records())
    client.publish_many(WEATHER, records)
    return len(records)


@contextmanager
def session() -> Iterator[SparkSession]:
    """Start Spark in this process, with two threads and without its web page.

    Raises:
        JavaMissingError: there is no Java that it runs on.
    """
    os.environ["JAVA_HOME"] = java_home()
    os.environ["PYSPARK_PYTHON"] = worker_python()
    warnings.simplefilter("ignore", ResourceWarning)
    builder = (
        SparkSession.builder.master("local[2]")
        .appName("babelbus demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
    )
    with quiet_stderr():
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep what a process that is started inside writes to standard error; show it if the start fails.

    The JVM has a dozen lines about itself that mean nothing here. What fails later comes as an exception of ours.
    """
    with tempfile.TemporaryFile() as words:
        before = os.dup(2)
        os.dup2(words.fileno(), 2)
        try:
            yield
        except BaseException:
            words.seek(0)
            os.write(before, words.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)


def stream(spark: SparkSession, bus: dict[str, str], topic: str, per_batch: int, schema: str) -> DataFrame:
    """Read a topic as a stream of rows, from its beginning."""
    read = spark.readStream.format("babelbus").options(**bus)
    records = read.options(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=str(per_batch)).load()
    row = f.from_json(records.value.cast("string"), schema)
    return records.select(records.timestamp, row.alias("row")).select("timestamp", "row.*")


def enriched(spark: SparkSession, bus: dict[str, str], weather_per_batch: int) -> DataFrame:
    """Return the flights with their airline, aircraft and weather."""
    state = spark.read.format("babelbus").options(**bus).option("table", "state").load().cache()
    airline_names = state.where("key LIKE 'airlines/%'").select(
        f.substring_index("key", "/", -1).alias("carrier"), f.get_json_object("value", "$.name").alias("airline")
    )
    aircraft = state.where("key LIKE 'aircraft/%'").select(
        f.substring_index("key", "/", -1).alias("tailnum"),
        f.get_json_object("value", "$.seats").cast("int").alias("seats"),
    )
    flown = stream(
        spark, bus, FLIGHTS, FLIGHTS_PER_BATCH, "carrier STRING, tailnum STRING, origin STRING, dep_delay INT"
    ).select("carrier", "tailnum", "origin", "dep_delay", f.date_trunc("hour", "timestamp").alias("at"))
    seen = stream(spark, bus, WEATHER, weather_per_batch, "origin STRING, precip DOUBLE").select(
        "origin", "precip", f.date_trunc("hour", "timestamp").alias("at")
    )
    return (
        flown.join(seen, ["origin", "at"])
        .join(f.broadcast(airline_names), "carrier", "left")
        .join(f.broadcast(aircraft), "tailnum", "left")
    )


def run(
    spark: SparkSession,
    bus: dict[str, str],
    weather_count: int,
    flight_count: int,
    console: Console,
) -> Totals:
    """Run the stream through all that is there, writing the totals of each micro-batch to the state.

    `bus` is how it is reached: options of the source and of the sink.
    """
    totals: Totals = defaultdict(lambda: [0, 0, 0, 0])
    names: dict[str, str] = {}
    weather_per_batch = weather_count * FLIGHTS_PER_BATCH // flight_count + 1

    def add(batch: DataFrame, number: int) -> None:
        sums = (
            batch.groupBy("carrier", f.hour("at").alias("hour"))
            .agg(
                f.count("*"),
                f.sum("dep_delay"),
                f.count_if(f.col("precip") >= RAIN_INCHES),
                f.sum("seats"),
                f.first("airline"),
            )
            .collect()
        )
        for carrier, hour, *figures, airline in sums:
            names[carrier] = airline
            entry = totals[carrier, hour]
            totals[carrier, hour] = [old + (new or 0) for old, new in zip(entry, figures, strict=True)]
        if not sums:
            return
        rows = [
            (f"{DELAYS}/{carrier}/{hour:02d}", json.dumps(describe(names[carrier], totals[carrier, hour])))
            for carrier, hour in {(row[0], row[1]) for row in sums}
        ]
        changed = batch.sparkSession.createDataFrame(rows, "key STRING, value STRING")
        changed.write.format("babelbus").options(**bus, table="state", topic=DELAYS).mode("append").save()
        console.print(live_table(totals, names, number))

    with tempfile.TemporaryDirectory(prefix="babelbus-demo-spark-") as folder:
        query = (
            enriched(spark, bus, weather_per_batch)
            .writeStream.foreachBatch(add)
            .option("checkpointLocation", folder)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    return dict(totals)


def describe(airline: str, figures: list[int]) -> dict[str, object]:
    """Return a total as it is in the state."""
    return {"airline": airline, **dict(zip(("flights", "delay_minutes", "in_rain", "seats"), figures, strict=True))}


def live_table(totals: Totals, names: dict[str, str], number: int) -> Table:
    """Show the carriers and hours with the longest delays so far."""
    flown = sum(figures[0] for figures in totals.values())
    table = Table(title=f"Delays by carrier and hour, micro-batch {number}: {flown:,} flights", title_justify="left")
    for column in ("airline", "hour (UTC)", "flights", "mean delay", "in rain", "mean seats"):
        table.add_column(column, justify="left" if column == "airline" else "right")
    often = [(key, figures) for key, figures in totals.items() if figures[0] >= 100]
    for (carrier, hour), (count, delay, rain, seats) in sorted(often, key=lambda one: -one[1][1] / one[1][0])[:SHOWN]:
        table.add_row(
            names[carrier], f"{hour:02d}", f"{count:,}", f"{delay / count:.1f} min", f"{rain / count:.0%}",
            f"{seats / count:.0f}",
        )  # fmt: skip
    return table


def expected() -> Totals:
    """Make the same totals of the source, in plain Python."""
    rain: dict[tuple[str, int], float] = {}
    for row in weather():
        rain[row.origin, hour_ms(row)] = float(row.precip or 0)
    seats = {plane.tailnum: plane.seats or 0 for plane in planes()}
    totals: Totals = defaultdict(lambda: [0, 0, 0, 0])
    for event in flights():
        flight = json.loads(event.payload)
        at = event.timestamp_ms // 3_600_000 * 3_600_000
        inches = rain.get((flight["origin"], at))
        if inches is None:
            continue
        entry = totals[flight["carrier"], datetime.fromtimestamp(at / 1000, UTC).hour]
        entry[0] += 1
        entry[1] += flight["dep_delay"] or 0
        entry[2] += inches >= RAIN_INCHES
        entry[3] += seats.get(flight["tailnum"], 0)
    return dict(totals)


def read_back(address: str, token: str) -> Totals:
    """Read the totals through a Wörterbuch client."""
    lines = Lines(address, token)
    lines.send({"pGet": {"transactionId": 1, "requestPattern": f"{DELAYS}/#"}})
    pairs: list[dict[str, object]] = lines.receive()["pState"]["keyValuePairs"]  # type: ignore[assignment]
    lines.close()
    found: Totals = {}
    for pair in pairs:
        _, carrier, hour = str(pair["key"]).split("/")
        value: dict[str, int] = pair["value"]  # type: ignore[assignment]
        found[carrier, int(hour)] = [value[name] for name in ("flights", "delay_minutes", "in_rain", "seats")]
    return found
