"""A pipeline's sources and steps as frames of a session."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from babelbus.spark.pipelines.bus import Bus
from babelbus.spark.pipelines.errors import PipelineError
from babelbus.spark.pipelines.load import Loaded
from babelbus.spark.pipelines.model import Function, Scalar, Source
from babelbus.spark.pipelines.session import REFUSALS, refused

Opener = Callable[[SparkSession, Source, Bus], DataFrame]


def build(spark: SparkSession, loaded: Loaded, bus: Bus, opener: Opener | None = None) -> dict[str, DataFrame]:
    """Give all frames of a pipeline by name; each is a temporary view of the session too, for the SQL that follows.

    Nothing runs yet. `opener` opens sources in its own way (`check` gives empty ones).

    Raises:
        PipelineError: Spark refused a source or a step.
    """
    frames: dict[str, DataFrame] = {}
    pipeline = loaded.pipeline
    for name, source in pipeline.sources.items():
        with _naming(loaded, f"sources.{name}"):
            frames[name] = _prepared(spark, source, bus, opener or open_source)
            frames[name].createOrReplaceTempView(name)
    for name, step in pipeline.steps.items():
        with _naming(loaded, f"steps.{name}"):
            if step.sql is not None:
                frame = spark.sql(step.sql)
            else:
                frame = call(loaded.functions[name], spark, frames, pipeline.parameters)
            if not isinstance(frame, DataFrame):
                raise PipelineError(
                    loaded.file, f"steps.{name}", f"its function gave {type(frame).__name__}, not a DataFrame"
                )
            frames[name] = frame
            frame.createOrReplaceTempView(name)
    return frames


def call(function: Function, spark: SparkSession, frames: dict[str, DataFrame], parameters: dict[str, Scalar]) -> Any:
    """Call a step's function with the frames and parameters that its parameters name."""
    known: dict[str, Any] = {**parameters, **frames}
    wanted = list(inspect.signature(function).parameters)[1:]
    return function(spark, **{name: known[name] for name in wanted if name in known})


def open_source(spark: SparkSession, source: Source, bus: Bus) -> DataFrame:
    """Open a source where it is."""
    reader: Any = spark.readStream if source.stream else spark.read
    options = text_options(source.options)
    if source.is_bus:
        options = bus.options(options) | where(source)
        return reader.format("babelbus").options(**options).load()  # type: ignore[no-any-return]
    format_, path = ("parquet", source.parquet) if source.parquet is not None else (source.format, None)
    reader = reader.format(format_).options(**options)
    if source.schema is not None:
        reader = reader.schema(source.schema)
    elif path is not None and source.stream:
        reader = reader.schema(spark.read.parquet(path).schema)  # a stream of files must be told its columns
    return reader.load(path) if path is not None else reader.load()  # type: ignore[no-any-return]


def where(source: Source) -> dict[str, str]:
    """Give the options that say what of the bus is read."""
    if source.state:
        return {"table": "state"}
    if source.pattern is not None:
        return {"subscribePattern": source.pattern}
    if any(name.lower() == "assign" for name in source.options):
        return {}  # it names the topic's partitions
    topics = source.topic if isinstance(source.topic, list) else [source.topic or ""]
    return {"subscribe": ",".join(topics)}


def text_options(options: dict[str, Scalar]) -> dict[str, str]:
    """Give options as Spark takes them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def _prepared(spark: SparkSession, source: Source, bus: Bus, opener: Opener) -> DataFrame:
    frame = opener(spark, source, bus)
    if source.json is not None:
        frame = frame.withColumn("data", F.from_json(F.col("value").cast("string"), source.json))
    if source.watermark is not None:
        frame = frame.withWatermark(source.watermark.column, source.watermark.delay)
    return frame


@contextmanager
def _naming(loaded: Loaded, field: str) -> Iterator[None]:
    """Say which part of the file Spark refused."""
    try:
        yield
    except REFUSALS as error:
        raise refused(loaded.file, field, error) from error
