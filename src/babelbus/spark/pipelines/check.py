"""What can be known of a pipeline without running it: its topics are there, and Spark takes it, on empty sources."""

import json
import os
import tempfile
from typing import Literal

import msgspec
from pyspark.sql import DataFrame, SparkSession

from babelbus.errors import BabelbusError
from babelbus.spark.options import SourceOptions, parse
from babelbus.spark.pipelines.bus import WAYS, Bus
from babelbus.spark.pipelines.delta import need_delta
from babelbus.spark.pipelines.errors import PipelineError
from babelbus.spark.pipelines.frames import build, open_source, text_options, where
from babelbus.spark.pipelines.load import Loaded
from babelbus.spark.pipelines.model import Source
from babelbus.spark.pipelines.session import REFUSALS, cause
from babelbus.spark.pipelines.sinks import Target, bus_options, shape
from babelbus.spark.reach import open_reach
from babelbus.spark.schema import full_schema
from babelbus.spark.sink_options import parse_sink
from babelbus.spark.sink_schema import check_columns
from babelbus.spark.state_options import parse_state
from babelbus.spark.state_table import state_schema
from babelbus.spark.survey import Survey

NOT_LOOKED = "not looked at: no server runs here and none was named"
_ANYWHERE = {"url": "jebp://nowhere:1", "identity": "none"}
"""Where options are looked at and nobody is asked."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at; `ok` is `None` where it could not be."""

    field: str
    ok: bool | None
    text: str


def check(spark: SparkSession, loaded: Loaded, bus: Bus) -> list[Finding]:
    """Look at everything; findings whose `ok` is false are faults, and no fault hides another where that can be.

    The queries are started on sources with the right columns and no rows, and end at once: only so does Spark say that
    an output mode or a join of streams is not possible. Nothing of the bus is written.
    """
    found = [_source(spark, loaded, bus, name, source) for name, source in loaded.pipeline.sources.items()]
    with tempfile.TemporaryDirectory(prefix="babelbus-check-") as folder:
        empty = _Empty(folder)
        try:
            frames = build(spark, loaded, bus, empty)
        except PipelineError as error:
            return [*found, Finding(error.field, False, error.problem)]
        for name, frame in frames.items():
            if name in loaded.pipeline.steps:
                found.append(Finding(f"steps.{name}", True, columns(frame)))
        for name, sink in loaded.pipeline.sinks.items():
            target = Target(loaded.file, name, sink, bus, os.path.join(folder, "checkpoints"), None)
            found.append(_sink(frames[sink.input], target))
    return found


def columns(frame: DataFrame) -> str:
    """Give the columns of a frame as DDL would name them."""
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema.fields)


def _source(spark: SparkSession, loaded: Loaded, bus: Bus, name: str, source: Source) -> Finding:
    """See that a source is there."""
    field = f"sources.{name}"
    try:
        if not source.is_bus:
            return Finding(field, True, columns(open_source(spark, source, bus)))
        options = bus.options(text_options(source.options)) | where(source)
        kind: Literal["stream", "batch"] = "stream" if source.stream else "batch"
        if not bus and not WAYS & {one.lower() for one in options}:
            options |= _ANYWHERE
            parse_state(options, kind) if source.state else parse(options, kind)
            return Finding(field, None, NOT_LOOKED)
        if source.state:
            return Finding(field, True, columns(open_source(spark, source, bus)))
        return Finding(field, True, _reach(parse(options, kind)))
    except (*REFUSALS, BabelbusError, OSError) as error:
        return Finding(field, False, cause(error))


def _reach(options: SourceOptions) -> str:
    """Ask the bus for the topics."""
    found = Survey(options, open_reach(options.place)).bounds()
    records = sum(bounds.end - bounds.first for bounds in found.values())
    topics = len({topic for topic, _ in found})
    return f"{topics} topics, {len(found)} partitions, {records} offsets"


def _sink(frame: DataFrame, target: Target) -> Finding:
    """See that a sink takes the columns, and Spark the mode."""
    field = f"sinks.{target.name}"
    sink = target.sink
    try:
        shaped = shape(frame, target)
        if sink.topic or sink.state:
            options = bus_options(target)
            if not target.bus and not WAYS & {one.lower() for one in options}:
                options |= _ANYWHERE
            parsed = parse_sink(options | {"checkpointLocation": "any"}, "stream")
            check_columns(shaped.schema, parsed)
            for topic in filter(None, (parsed.topic, parsed.dead_letter_topic)) if target.bus.url else ():
                _reach(parse(target.bus.options({}, writing=True) | {"assign": json.dumps({topic: [0]})}, "batch"))
        for name in sink.partition_by:
            if name not in frame.columns:
                known = ", ".join(frame.columns)
                return Finding(field, False, f"partition_by: there is no column {name!r}; there are: {known}")
        if sink.delta is not None:
            need_delta()
        if not frame.isStreaming:
            return Finding(field, True, columns(shaped))
        query = (
            shaped.writeStream.format("noop")
            .outputMode(sink.mode)
            .option("checkpointLocation", os.path.join(target.checkpoint, target.name))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return Finding(field, True, columns(shaped))
    except PipelineError as error:
        return Finding(error.field, False, error.problem)
    except (*REFUSALS, BabelbusError, OSError) as error:
        return Finding(field, False, cause(error))


class _Empty:
    """Opens each source with its columns and no rows."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self, spark: SparkSession, source: Source, bus: Bus) -> DataFrame:
        if source.state:
            schema = state_schema()
        elif source.is_bus:
            headers = {name.lower(): str(value).lower() for name, value in source.options.items()}.get("includeheaders")
            schema = full_schema(include_headers=headers == "true")
        else:
            schema = open_source(spark, source, bus).schema
        if not source.stream:
            return spark.createDataFrame([], schema)
        folder = tempfile.mkdtemp(dir=self._folder)
        return spark.readStream.schema(schema).parquet(folder)
