"""Spark's way into the bus: the data source `babelbus` of PySpark, and the only package that imports it."""
