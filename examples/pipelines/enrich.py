"""Flights with the airline's name from the state and the weather of their hour from a second stream.

    babelbus topics create enriched
    babelbus pipeline run examples/pipelines/enrich.py

The demo's data has all three (`make demo-data`). The state holds airlines/<code> = {"carrier": ..., "name": ...}; it
is read anew with every batch. The topic `weather` holds an hour at an airport as JSON. A flight waits for the weather
of its hour: it comes out when that is there, and without weather once both topics are `patience` past its hour.
"""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

FLIGHT = "carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, dep_delay INT"
WEATHER = "origin STRING, temp DOUBLE, wind_speed DOUBLE, precip DOUBLE, visib DOUBLE"
AIRLINE = "carrier STRING, name STRING"

pipeline = {
    "name": "enrich",
    "parameters": {"flights_topic": "flights", "weather_topic": "weather", "into": "enriched", "patience": "1 hour"},
    "sources": {
        "flights": {
            "topic": "${flights_topic}",
            "json": FLIGHT,
            "watermark": {"delay": "${patience}"},
            "options": {"startingOffsets": "earliest"},
        },
        "weather": {
            "topic": "${weather_topic}",
            "json": WEATHER,
            "watermark": {"delay": "${patience}"},
            "options": {"startingOffsets": "earliest"},
        },
        "state": {"state": True, "stream": False},
    },
    "sinks": {"enriched": {"from": "with_weather", "topic": "${into}", "key": "concat(carrier, flight)"}},
}


def airlines(spark: SparkSession, state: DataFrame) -> DataFrame:
    """Return code and name of each airline that the state knows."""
    airline = F.from_json(F.col("value").cast("string"), AIRLINE)
    return (
        state.where(F.col("key").startswith("airlines/"))
        .select(airline.alias("airline"))
        .select("airline.carrier", F.col("airline.name").alias("airline"))
    )


def named(spark: SparkSession, flights: DataFrame, airlines: DataFrame) -> DataFrame:
    """Return the flights with their airline's name, `null` where the state does not know it."""
    rows = flights.select("timestamp", F.date_trunc("hour", "timestamp").alias("hour"), "data.*")
    return rows.join(airlines, "carrier", "left")


def with_weather(spark: SparkSession, named: DataFrame, weather: DataFrame) -> DataFrame:
    """Return the flights with the weather of their hour at the airport they leave from."""
    hourly = weather.select("timestamp", F.date_trunc("hour", "timestamp").alias("hour"), "data.*").alias("w")
    flight = named.alias("f")
    same = (
        (F.col("f.origin") == F.col("w.origin"))
        # Without this equality Spark compares each flight with all hours of its airport: 10,000 times as many.
        & (F.col("f.hour") == F.col("w.hour"))
        # The range is what lets Spark forget a flight and an hour that can no longer meet.
        & (F.col("w.timestamp") <= F.col("f.timestamp"))
        & (F.col("w.timestamp") > F.col("f.timestamp") - F.expr("INTERVAL 1 HOUR"))
    )
    return flight.join(hourly, same, "left").select(
        "f.timestamp", "f.carrier", "f.flight", "f.airline", "f.origin", "f.dest", "f.dep_delay",
        "w.temp", "w.wind_speed", "w.precip", "w.visib",
    )  # fmt: skip
