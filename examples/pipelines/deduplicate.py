"""One topic into another without the records that were published twice.

    babelbus topics create once
    babelbus pipeline run examples/pipelines/deduplicate.py

Two records are the same one if `same` (SQL over the columns of a record) gives the same for both, and their times are
no further apart than `within`. So long each is remembered, in Spark's state store on disk.
"""

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

pipeline = {
    "name": "deduplicate",
    "parameters": {"topic": "flights", "into": "once", "within": "1 hour", "same": "struct(key, value)"},
    "sources": {
        "records": {
            "topic": "${topic}",
            "watermark": {"delay": "${within}"},
            "options": {"startingOffsets": "earliest", "includeHeaders": True},
        }
    },
    "sinks": {"records": {"from": "unique", "topic": "${into}"}},
}


def unique(spark: SparkSession, records: DataFrame, same: str) -> DataFrame:
    """Return the first of each group of records that are the same."""
    marked = records.withColumn("_same", F.expr(same))
    return marked.dropDuplicatesWithinWatermark(["_same"]).drop("_same")
