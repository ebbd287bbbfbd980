"""A pipeline's sources and steps as frames of a session."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from babelbus.spark.errors import PipelineError
from babelbus.spark.pipelines.bus import Bus
from babelbus.spark.pipelines.load import Loaded
from babelbus.spark.pipelines.model import Function, Scalar, Source
from babelbus.spark.pipelines.session import REFUSALS, refused, text_options

Opener = Callable[[SparkSession, Source, Bus], DataFrame]
OF_SOURCE = {"babelbus": "source"}
"""Metadata of the columns that say where a record was read; a column that a step computes has none."""
_NO_TABLE = "TABLE_OR_VIEW_NOT_FOUND"


def build(
    spark: SparkSession,
    loaded: Loaded,
    bus: Bus,
    opener: Opener | None = None,
    faults: dict[str, PipelineError] | None = None,
) -> dict[str, DataFrame]:
    """Return all frames of a pipeline by name; each is a temporary view of the session too, for the SQL that follows.

    Nothing runs yet. `opener` opens sources in its own way (`check` gives empty ones). With `faults` what Spark refuses
    is put there by its field instead of being raised; what needs it is left out, and all the rest is made.

    Raises:
        PipelineError: Spark refused a source or a step.
    """
    frames: dict[str, DataFrame] = {}
    missing: set[str] = set()
    for name, source in loaded.pipeline.sources.items():
        missing.add(name)
        with _kept(faults):
            with _naming(loaded, f"sources.{name}"):
                frame = (opener or open_source)(spark, source, bus)
            frames[name] = _prepared(loaded, name, source, frame)
            frames[name].createOrReplaceTempView(name)
            missing.remove(name)
    for name in loaded.pipeline.steps:
        above = frozenset(missing)
        missing.add(name)
        with _kept(faults), _naming(loaded, f"steps.{name}", above):
            made = _step(spark, loaded, name, frames, above)
            if made is not None:
                made.createOrReplaceTempView(name)
                frames[name] = made
                missing.remove(name)
    return frames


def _step(
    spark: SparkSession, loaded: Loaded, name: str, frames: dict[str, DataFrame], missing: frozenset[str]
) -> DataFrame | None:
    """Build the frame of a step; `None` where its function needs one that is missing."""
    step, field = loaded.pipeline.steps[name], f"steps.{name}"
    if step.sql is not None:
        return spark.sql(step.sql)
    function = loaded.functions[name]
    if missing & inspect.signature(function).parameters.keys():
        return None
    try:
        frame = call(function, spark, frames, loaded.pipeline.parameters)
    except REFUSALS:
        raise
    except Exception as error:
        said = f"its function raised {type(error).__name__}: {error}"
        raise PipelineError(loaded.file, field, " ".join(said.split())) from error
    if not isinstance(frame, DataFrame):
        raise PipelineError(loaded.file, field, f"its function gave {type(frame).__name__}, not a DataFrame")
    return frame


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
    """Return the options that say what of the bus is read."""
    if source.state:
        return {"table": "state"}
    if source.pattern is not None:
        return {"subscribePattern": source.pattern}
    if any(name.lower() == "assign" for name in source.options):
        return {}  # it names the topic's partitions
    topics = source.topic if isinstance(source.topic, list) else [source.topic or ""]
    return {"subscribe": ",".join(topics)}


def _prepared(loaded: Loaded, name: str, source: Source, frame: DataFrame) -> DataFrame:
    if source.is_bus and not source.state:
        for column in ("partition", "subject"):
            frame = frame.withMetadata(column, OF_SOURCE)
    if source.json is not None:
        with _naming(loaded, f"sources.{name}.json"):
            frame = frame.withColumn("data", F.from_json(F.col("value").cast("string"), source.json))
    if source.watermark is not None:
        with _naming(loaded, f"sources.{name}.watermark"):
            frame = frame.withWatermark(source.watermark.column, source.watermark.delay)
    return frame


@contextmanager
def _naming(loaded: Loaded, field: str, missing: frozenset[str] = frozenset()) -> Iterator[None]:
    """Return which part of the file Spark refused; that a table is `missing` is the fault of another part."""
    try:
        yield
    except REFUSALS as error:
        absent = _absent(error)
        if absent in missing:
            return
        if absent in loaded.pipeline.steps:
            own = f"steps.{absent}" == field
            problem = "reads itself" if own else f"reads the step {absent!r}, which is below it: move that step up"
            raise PipelineError(loaded.file, field, problem) from error
        raise refused(loaded.file, field, error) from error


def _absent(error: BaseException) -> str | None:
    """Return the name of the table that Spark did not find."""
    if not isinstance(error, PySparkException) or error.getCondition() != _NO_TABLE:
        return None
    return (error.getMessageParameters() or {}).get("relationName", "").strip("`")


@contextmanager
def _kept(faults: dict[str, PipelineError] | None) -> Iterator[None]:
    """Collect a fault in `faults` instead of raising it."""
    try:
        yield
    except PipelineError as error:
        if faults is None:
            raise
        faults[error.field] = error
