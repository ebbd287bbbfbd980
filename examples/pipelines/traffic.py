"""The bus watching itself: who publishes what, how much of it, and where offsets are missing.

    babelbus topics create traffic && babelbus topics create gaps
    babelbus pipeline run examples/pipelines/traffic.py --set topics='flights|plant.*'

`topics` is a regular expression, by default all topics. The pipeline's own two topics are never read: each batch would
publish what the next one reads.

- `traffic` (a topic): per window, topic, protocol and source: records, bytes, rate, largest payload. Protocol and
  source are of the header ce_source, which the bus gives to what comes through it; '-' where a record has none.
- `gaps` (a topic): per window, topic and partition, how many offsets between the first and the last record are missing:
  compaction removed them, or a publisher's transaction was given up.
- `talkers` (the terminal): the ten sources with the most bytes since the start.
"""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

pipeline = {
    "name": "traffic",
    "parameters": {
        "topics": ".*", "window": "1 minute", "lateness": "10 seconds", "into": "traffic", "gaps_into": "gaps"
    },
    "sources": {
        "records": {
            "pattern": "(?!(?:${into}|${gaps_into})$$)(?:${topics})",
            "watermark": {"delay": "${lateness}"},
            "options": {"startingOffsets": "earliest", "includeHeaders": True},
        }
    },
    "sinks": {
        "traffic": {"from": "rates", "topic": "${into}", "key": "concat(topic, ' ', source)"},
        "gaps": {"from": "gaps", "topic": "${gaps_into}", "key": "concat(topic, ' ', partition)"},
        "talkers": {"from": "talkers", "console": True, "mode": "complete", "trigger": "10s"},
    },
}  # fmt: skip


def observed(spark: SparkSession, records: DataFrame) -> DataFrame:
    """Return the columns that are counted of each record."""
    named = F.filter("headers", lambda header: header["key"] == "ce_source")
    source = F.coalesce(F.get(named, F.lit(0))["value"].cast("string"), F.lit("-"))
    return records.select(
        "topic", "partition", "offset", "timestamp", source.alias("source"),
        F.regexp_extract(source, r"^/*([^/:]+)", 1).alias("protocol"),
        F.coalesce(F.length("value"), F.lit(0)).alias("bytes"),
    )  # fmt: skip


def rates(spark: SparkSession, observed: DataFrame, window: str) -> DataFrame:
    """Return records, bytes and rate per window, topic, protocol and source."""
    groups = observed.groupBy(F.window("timestamp", window), "topic", "protocol", "source")
    seconds = F.col("window.end").cast("long") - F.col("window.start").cast("long")
    return groups.agg(
        F.count("*").alias("records"), F.sum("bytes").alias("bytes"), F.max("bytes").alias("bytes_max")
    ).select(
        F.col("window.start").alias("start"), F.col("window.end").alias("end"), "topic", "protocol", "source",
        "records", "bytes", "bytes_max", F.round(F.col("records") / seconds, 3).alias("records_per_second"),
    )  # fmt: skip


def gaps(spark: SparkSession, observed: DataFrame, window: str) -> DataFrame:
    """Return the missing offsets per window and partition, where there are any."""
    groups = observed.groupBy(F.window("timestamp", window), "topic", "partition")
    found = groups.agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count("*").alias("records"))
    missing = F.col("last") - F.col("first") + 1 - F.col("records")
    return found.select(
        F.col("window.start").alias("start"), "topic", "partition", "first", "last", missing.alias("missing")
    ).where("missing > 0")


def talkers(spark: SparkSession, observed: DataFrame) -> DataFrame:
    """Return the ten sources with the most bytes."""
    groups = observed.groupBy("topic", "protocol", "source")
    found = groups.agg(F.count("*").alias("records"), F.sum("bytes").alias("bytes"))
    return found.orderBy(F.desc("bytes")).limit(10)
