"""Checks of a pipeline that do not run it: its topics exist, and Spark accepts its queries on empty sources."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, cast

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType
from pyspark.sql.utils import is_remote

from babelbus.errors import BabelbusError
from babelbus.spark.available_offsets import Survey
from babelbus.spark.errors import PipelineError, UnknownTopicError
from babelbus.spark.options import SourceOptions, parse
from babelbus.spark.pipelines.bus import WAYS, Bus
from babelbus.spark.pipelines.frames import build, open_source, where
from babelbus.spark.pipelines.load import Loaded
from babelbus.spark.pipelines.model import Scalar, Sink, Source
from babelbus.spark.pipelines.session import REFUSALS, cause, text_options
from babelbus.spark.pipelines.sinks import Target, bus_options, check_save, need_delta, shape
from babelbus.spark.record_source import open_reach
from babelbus.spark.schema import check_columns, full_schema
from babelbus.spark.sink_options import SinkOptions, check_mode, parse_sink
from babelbus.spark.state_options import parse_state
from babelbus.spark.state_table import state_schema

NOT_LOOKED = "not looked at: no server runs here and none was named"
NOT_MADE = "not looked at: what it is made of has a fault"
ANSWER_SECONDS_MAX = 5.0
BUS_FORMAT = "babelbus"
FILE_FORMATS = ("parquet", "orc", "json", "csv", "text", "xml")
"""Formats that write a folder of files, so that a write can be tried in another folder."""
_SINKS_ONLY = ("memory", "console", "noop")
"""Formats of Spark's own that cannot be read, some of which are not found by name either."""
_UNKNOWN = re.compile(r"DATA_SOURCE_NOT_(?:FOUND|ENABLED)")
_ANYWHERE = {"url": "jebp://nowhere:1", "identity": "none"}
"""A place for options that are parsed without asking a server."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at; `ok` is `None` where it could not be."""

    field: str
    ok: bool | None
    text: str


def check(spark: SparkSession, loaded: Loaded, bus: Bus, settings: Mapping[str, Scalar] | None = None) -> list[Finding]:
    """Check everything; findings whose `ok` is false are faults, and no fault hides another where that can be.

    The queries are started on sources with the right columns and no rows, and end at once: only so does Spark say that
    an output mode or a join of streams is not possible. Nothing of the bus is written, and files are written to a
    temporary folder. All happens in a session of its own beside `spark`, which has the settings that the file asks for;
    `settings`, those of the command line, beat them.
    """
    pipeline = loaded.pipeline
    with _own_session(spark, settings or {}) as own, tempfile.TemporaryDirectory(prefix="babelbus-check-") as folder:
        found = [_set(own, name, value, settings or {}) for name, value in pipeline.spark.items()]
        found += [_source(own, loaded, bus, name, source) for name, source in pipeline.sources.items()]
        faults: dict[str, PipelineError] = {}
        frames = build(own, loaded, bus, partial(_open_empty, folder), faults)
        told = [Finding(field, False, error.problem) for field, error in faults.items()]
        found += [one for one in told if one.field.startswith("sources.") and one not in found]
        for name in pipeline.steps:
            if name in frames:
                found.append(Finding(f"steps.{name}", True, columns(frames[name])))
                continue
            own_faults = [one for one in told if one.field == f"steps.{name}"]
            found += own_faults or [Finding(f"steps.{name}", None, NOT_MADE)]
        for name, sink in pipeline.sinks.items():
            target = Target(loaded.file, name, sink, bus, os.path.join(folder, "checkpoints"), None)
            found += _sink(own, frames.get(sink.input), target, folder)
        return found


def columns(frame: DataFrame) -> str:
    """Return the columns of a frame as DDL would name them."""
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema.fields)


def _source(spark: SparkSession, loaded: Loaded, bus: Bus, name: str, source: Source) -> Finding:
    """Check that a source is there."""
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
    """Fetch the topics of a source from the bus, and return how much they hold."""
    # Its user waits: whether the server is there is what `check` has to say, and a query would go on asking for it.
    place = msgspec.structs.replace(
        options.place, timeout_seconds=min(options.place.timeout_seconds, ANSWER_SECONDS_MAX)
    )
    found = Survey(options, open_reach(place)).bounds()
    records = sum(bounds.end - bounds.first for bounds in found.values())
    topics = len({topic for topic, _ in found})
    return f"{topics} topics, {len(found)} partitions, {records} offsets"


def _sink(spark: SparkSession, frame: DataFrame | None, target: Target, folder: str) -> list[Finding]:
    """Check that a sink is there and takes the columns, and Spark the mode."""
    field = f"sinks.{target.name}"
    found: list[Finding] = []
    with _noted(found, field):
        _sink_place(spark, target)
    with _noted(found, field):
        if frame is not None:
            shaped = shape(frame, target)
            _sink_rows(frame, shaped, target)
            if _files(target.sink) is not None:
                _write_empty(spark, shaped, target, os.path.join(folder, f"files-{target.name}"))
            if frame.isStreaming:
                _start_empty(shaped, target, os.path.join(folder, f"stream-{target.name}"))
            return found or [Finding(field, True, columns(shaped))]
    return found or [Finding(field, None, NOT_MADE)]


@contextmanager
def _noted(found: list[Finding], field: str) -> Iterator[None]:
    """Record a fault once, and go on."""
    try:
        yield
        return
    except PipelineError as error:
        fault = Finding(error.field, False, error.problem)
    except (*REFUSALS, BabelbusError, OSError) as error:
        fault = Finding(field, False, cause(error))
    if fault not in found:
        found.append(fault)


def _sink_place(spark: SparkSession, target: Target) -> None:
    """Check what can be known of a sink without its rows.

    Raises:
        BabelbusError: a topic, a package or a format is not there, or an option is wrong.
    """
    sink, field = target.sink, f"sinks.{target.name}"
    if _is_bus(sink):
        parsed = parse_sink(_writing(target) | {"checkpointLocation": "any"}, "stream")
        for topic in filter(None, (parsed.topic, parsed.dead_letter_topic)) if target.bus.url else ():
            try:
                _reach(parse(target.bus.options({}, writing=True) | {"assign": json.dumps({topic: [0]})}, "batch"))
            except UnknownTopicError:
                problem = f"there is no topic {topic!r}: babelbus topics create {topic}"
                raise PipelineError(target.file, field, problem) from None
    if sink.delta is not None:
        need_delta()
    if sink.format is None:
        return
    if _files(sink) is not None:
        if not any(name.lower() == "path" and value for name, value in sink.options.items()):
            raise PipelineError(target.file, f"{field}.options.path", f"is missing: the folder for {sink.format} files")
    elif sink.format.lower() not in (BUS_FORMAT, *_SINKS_ONLY):
        try:  # to read from a format without options reaches nobody
            spark.readStream.format(sink.format).load()
        except REFUSALS as error:
            if _UNKNOWN.search(str(error)):
                raise PipelineError(target.file, f"{field}.format", cause(error)) from None


def _sink_rows(frame: DataFrame, shaped: DataFrame, target: Target) -> None:
    """Check that a sink takes the columns in its mode.

    Raises:
        BabelbusError: a column or the mode is refused.
    """
    sink, field = target.sink, f"sinks.{target.name}"
    if not frame.isStreaming:
        check_save(target)
    if _is_bus(sink):
        check_columns(shaped.schema, _parsed(frame, target))
    for name in sink.partition_by:
        if name not in frame.columns:
            known = ", ".join(frame.columns)
            raise PipelineError(
                target.file, f"{field}.partition_by", f"there is no column {name!r}; there are: {known}"
            )


def _parsed(frame: DataFrame, target: Target) -> SinkOptions:
    """Read the options of a sink on the bus as they will be: of a stream, or of a save of each batch."""
    sink, field = target.sink, f"sinks.{target.name}"
    options = _writing(target)
    if frame.isStreaming and sink.mode != "update":
        parsed = parse_sink(options | {"checkpointLocation": "any"}, "stream")
        check_mode(parsed, "stream", overwrite=sink.mode == "complete")
        return parsed
    if sink.format is not None:
        return parse_sink(options, "batch")
    own = {"txnId": "any", "batchId": "0"}
    for name in options:
        if name.lower() in ("txnid", "batchid"):
            raise PipelineError(target.file, f"{field}.options.{name}", "is the pipeline's own here")
    return parse_sink(options | own, "batch")


def _write_empty(spark: SparkSession, shaped: DataFrame, target: Target, path: str) -> None:
    """Write no rows of these columns: only a write says which types a format of files has."""
    sink = target.sink
    writer = spark.createDataFrame([], shaped.schema).write.format(str(_files(sink))).options(**_but_path(sink))
    writer.partitionBy(*sink.partition_by).mode("append").save(path)


def _start_empty(shaped: DataFrame, target: Target, path: str) -> None:
    """Start a query whose sources are empty, and wait for its end."""
    sink = target.sink
    writer = shaped.writeStream.outputMode(sink.mode).trigger(availableNow=True)
    writer = writer.option("checkpointLocation", os.path.join(target.checkpoint, target.name))
    files = _files(sink)
    if files is None or sink.compact_files is not None:
        writer = writer.format("noop")
    else:
        writer = writer.format(files).options(**_but_path(sink)).option("path", path).partitionBy(*sink.partition_by)
    writer.start().awaitTermination()


def _files(sink: Sink) -> str | None:
    """Return the format of a sink that writes files through Spark."""
    format_ = "parquet" if sink.parquet is not None else (sink.format or "").lower()
    return format_ if format_ in FILE_FORMATS else None


def _but_path(sink: Sink) -> dict[str, str]:
    return {name: text for name, text in text_options(sink.options).items() if name.lower() != "path"}


def _is_bus(sink: Sink) -> bool:
    return bool(sink.topic or sink.state or (sink.format or "").lower() == BUS_FORMAT)


def _writing(target: Target) -> dict[str, str]:
    """Return the options of a sink on the bus, with a server that is never asked if the real one is not known."""
    sink = target.sink
    options = text_options(sink.options) if sink.format is not None else bus_options(target)
    here = sink.format is None and target.bus.url
    return options if here or WAYS & {one.lower() for one in options} else options | _ANYWHERE


@contextmanager
def _own_session(spark: SparkSession, settings: Mapping[str, Scalar]) -> Iterator[SparkSession]:
    """Return a session that shares no view, function or setting with others, and is the one that steps find active."""
    own = spark.newSession()
    for name, text in text_options(settings).items():
        if own.conf.isModifiable(name):  # over Spark Connect a new session has none of those of the first
            own.conf.set(name, text)
    own.createDataFrame([], "nothing INT")  # makes it the active one
    try:
        yield own
    finally:
        spark.createDataFrame([], "nothing INT")


def _set(spark: SparkSession, name: str, value: Scalar, beaten_by: Mapping[str, Scalar]) -> Finding:
    """Set a setting of the file in the session, or check that Spark would accept it at its start."""
    field = f"spark.{name}"
    if name in beaten_by:
        return Finding(field, True, f"{beaten_by[name]}, of the command line")
    text = text_options({name: value})[name]
    try:
        if spark.conf.isModifiable(name):
            spark.conf.set(name, text)
            return Finding(field, True, text)
        if is_remote():
            return Finding(field, None, "not looked at: it is of the Connect server")
        jvm: Any = spark._jvm
        entry = jvm.org.apache.spark.internal.config.ConfigEntry.findEntry(name)
        if entry is None:
            return Finding(field, None, "Spark itself has no such setting")
        entry.valueConverter().andThen(entry.stringConverter()).apply(text)  # a text: py4j knows not all of the types
    except REFUSALS as error:
        return Finding(field, False, cause(error))
    return Finding(field, True, text)


def _open_empty(folder: str, spark: SparkSession, source: Source, bus: Bus) -> DataFrame:
    """Open a source with its columns and no rows."""
    if source.state:
        schema = state_schema()
    elif source.is_bus:
        headers = {name.lower(): str(value).lower() for name, value in source.options.items()}.get("includeheaders")
        schema = full_schema(include_headers=headers == "true")
    else:
        try:
            schema = open_source(spark, source, bus).schema
        except REFUSALS:
            if source.schema is None:
                raise
            schema = cast(StructType, StructType.fromDDL(source.schema))  # steps can be looked at all the same
    if not source.stream:
        return spark.createDataFrame([], schema)
    return spark.readStream.schema(schema).parquet(tempfile.mkdtemp(dir=folder))
