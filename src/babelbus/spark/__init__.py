"""Spark's way into the bus: the data source `babelbus` of PySpark. The only package of ours that imports pyspark."""
