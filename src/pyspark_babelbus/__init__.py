"""How Spark finds us: it imports each top-level module named `pyspark_*` and takes its `DefaultSource`.

Every session that meets a format it does not know imports this, so it is light: pyarrow comes with the first read.
"""

from babelbus.spark.source import BabelbusDataSource as DefaultSource

__all__ = ["DefaultSource"]
