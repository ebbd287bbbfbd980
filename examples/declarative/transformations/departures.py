"""The flights of the topic `flights` as a table, and the late ones of them back to the bus, each once.

Server and key are those of the environment: BABELBUS_SERVER and BABELBUS_IDENTITY, the path of a key file.
"""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

FLIGHT = "carrier STRING, flight INT, origin STRING, dest STRING, dep_delay INT"
LATE_MINUTES = 60

BUS = {"url": os.environ["BABELBUS_SERVER"], "identity": os.environ["BABELBUS_IDENTITY"]}

dp.create_sink("late", "babelbus", {**BUS, "topic": "late"})


@dp.table(comment="Each flight of the topic once; a run adds those that came since the last one.")
def departures() -> DataFrame:
    """Read the topic: a streaming table, for it is a stream that is read."""
    records = (
        SparkSession.active()
        .readStream.format("babelbus")
        .options(**BUS, subscribe="flights", startingOffsets="earliest")
        .load()
    )
    return records.select("timestamp", F.from_json(F.col("value").cast("string"), FLIGHT).alias("row")).select(
        "timestamp", "row.*"
    )


@dp.append_flow(target="late", name="late_departures")
def late_departures() -> DataFrame:
    """Return the late flights as records: columns that a record does not have become JSON in `value`."""
    found = SparkSession.active().readStream.table("departures").where(F.col("dep_delay") >= LATE_MINUTES)
    return found.select(
        F.concat("carrier", F.col("flight").cast("string")).alias("key"),
        F.to_json(F.struct("carrier", "flight", "origin", "dest", "dep_delay")).alias("value"),
        "timestamp",
    )
