"""Check a topic's payloads against a schema and rules; good rows go on, bad ones to a topic of their own, with reasons.

    babelbus topics create clean && babelbus topics create rejected
    babelbus pipeline run examples/pipelines/quality.py

Copy this file and write your own SCHEMA and RULES: a rule is SQL over the fields, and a row that it does not hold for
(or gives NULL for) is bad. A rejected record has its payload, key, headers and time as they came, and the header
`quality` with what is wrong.
"""

from functools import reduce

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

SCHEMA = "carrier STRING, flight INT, origin STRING, dest STRING, distance INT, dep_delay INT, time_hour STRING"
RULES = {
    "carrier has two characters": "length(carrier) = 2",
    "origin is a New York airport": "origin IN ('EWR', 'JFK', 'LGA')",
    "distance is positive": "distance > 0",
    "delay is plausible": "dep_delay IS NULL OR dep_delay BETWEEN -120 AND 2880",
}

pipeline = {
    "name": "quality",
    "parameters": {"topic": "flights", "clean": "clean", "rejected": "rejected"},
    "sources": {
        "records": {"topic": "${topic}", "options": {"startingOffsets": "earliest", "includeHeaders": True}},
    },
    "sinks": {
        "clean": {"from": "good", "topic": "${clean}"},
        "rejected": {"from": "bad", "topic": "${rejected}"},
    },
}


def checked(spark: SparkSession, records: DataFrame) -> DataFrame:
    """Return the records with the column `faults`: the faults of each."""
    fields = F.from_json(F.col("value").cast("string"), f"{SCHEMA}, _broken STRING", {
        "columnNameOfCorruptRecord": "_broken"
    })  # fmt: skip
    rows = records.withColumn("fields", fields).select("*", "fields.*")
    broken = F.col("fields").isNull() | F.col("_broken").isNotNull()
    found = [F.when(~F.coalesce(F.expr(rule), F.lit(False)), F.lit(name)) for name, rule in RULES.items()]
    faults = F.when(broken, F.array(F.lit("it is no JSON of the schema"))).otherwise(F.array_compact(F.array(*found)))
    return rows.select("key", "value", "headers", "timestamp", faults.alias("faults"))


def good(spark: SparkSession, checked: DataFrame) -> DataFrame:
    """Return the records without a fault."""
    return checked.where(F.size("faults") == 0).drop("faults")


def bad(spark: SparkSession, checked: DataFrame) -> DataFrame:
    """Return the rejected records, with the reasons in a header."""
    reason = F.array_join("faults", "; ")
    return checked.where(F.size("faults") > 0).select(
        "key", "value", _with_header("headers", "quality", reason).alias("headers"), "timestamp"
    )


def _with_header(headers: str, name: str, value: Column) -> Column:
    one = F.array(F.struct(F.lit(name).alias("key"), F.encode(value, "UTF-8").alias("value")))
    return reduce(F.concat, [F.coalesce(F.col(headers), F.slice(one, 1, 0)), one])
