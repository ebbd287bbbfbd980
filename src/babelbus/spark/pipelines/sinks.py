"""Where a pipeline's rows go: one running query for each sink."""

import hashlib
import importlib
import importlib.util
import os
import secrets
from typing import Any

import msgspec
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import TimestampType

from babelbus.spark.errors import NoteDamagedError, PipelineError, SparkError
from babelbus.spark.pipelines.bus import WAYS, Bus
from babelbus.spark.pipelines.frames import OF_SOURCE
from babelbus.spark.pipelines.model import Pipeline, Sink
from babelbus.spark.pipelines.parquet import ParquetFolder
from babelbus.spark.pipelines.progress import OBSERVED, ROWS
from babelbus.spark.pipelines.session import REFUSALS, is_local, refused, text_options
from babelbus.spark.schema import STATE_COLUMNS
from babelbus.storage.files import LocalFiles

CARRIED = ("key", "value", "headers", "timestamp", "partition", "subject")
"""Columns of a record that are taken from a frame as they are. A partition and a subject that were read from the bus
are those of another topic, and are left out; a topic has to be asked for."""
EXPRESSIONS = ("key", "value", "subject", "partition")


class Target(msgspec.Struct, frozen=True):
    """One sink of one pipeline, ready to be started."""

    file: str
    name: str
    sink: Sink
    bus: Bus
    checkpoint: str
    trigger_seconds: float | None
    """Between two batches; 0: at once; `None`: what there is now, then the end."""
    identity: str = ""
    """Identity of a save, for sinks of frames that are no streams (`identity`)."""
    remote: bool = False
    """The checkpoint is where a Connect server is."""


class _Noted(msgspec.Struct, frozen=True):
    transaction: str
    done: bool = False


def identity(pipeline: Pipeline, sink: str) -> str:
    """Return the identity of a save: it changes with a parameter, a source, a step and the sink.

    The code of Python steps has no influence, nor have the records that there are to read.
    """
    parts = pipeline.sources, pipeline.steps, pipeline.sinks[sink], sorted(pipeline.parameters.items())
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


class Save:
    """One save, as it is noted in the folder of its sink's checkpoint: without that folder the save is done again.

    The note has the transaction, so that a save that was killed goes on with it; and it says when all is done. Where
    the folder is out of reach there is no note: the transaction is of its name, and the bus alone knows what was done.
    """

    def __init__(self, folder: str, identity: str, *, in_reach: bool) -> None:
        self._folder = folder
        self._identity = identity
        self._in_reach = in_reach
        self._path = os.path.join(folder, f"save-{identity}.json")
        self._files = LocalFiles()

    def begin(self) -> str | None:
        """Return the transaction id to save under; `None`: it was done before.

        Raises:
            NoteDamagedError: the note cannot be read.
        """
        if not self._in_reach:
            return f"pipeline {hashlib.sha256(f'{self._folder} {self._identity}'.encode()).hexdigest()[:40]}"
        try:
            noted = msgspec.json.decode(self._files.read_file(self._path), type=_Noted)
        except FileNotFoundError:
            self._files.make_folder(self._folder)
            noted = _Noted(f"pipeline save {secrets.token_hex(16)}")
            self._files.replace_file(self._path, msgspec.json.encode(noted))
        except msgspec.MsgspecError as error:
            raise NoteDamagedError(f"{self._path} is damaged ({error}); without it all is saved once more") from None
        self._noted = noted
        return None if noted.done else noted.transaction

    def end(self) -> None:
        """Record that it is done."""
        if self._in_reach:
            done = msgspec.structs.replace(self._noted, done=True)
            self._files.replace_file(self._path, msgspec.json.encode(done))


def start(frame: DataFrame, target: Target) -> StreamingQuery:
    """Start the query that fills a sink.

    Raises:
        PipelineError: Spark or the sink refused it.
    """
    sink, field = target.sink, f"sinks.{target.name}"
    try:
        writer: Any = shape(frame, target).observe(OBSERVED, F.count(F.lit(1)).alias(ROWS)).writeStream
        writer = writer.queryName(target.name).outputMode(sink.mode)
        if target.trigger_seconds is None:
            writer = writer.trigger(availableNow=True)
        elif target.trigger_seconds:
            writer = writer.trigger(processingTime=f"{round(target.trigger_seconds * 1000)} milliseconds")
        writer = writer.option("checkpointLocation", os.path.join(target.checkpoint, target.name))
        if sink.partition_by and sink.compact_files is None and sink.delta is None:
            writer = writer.partitionBy(*sink.partition_by)
        return _ending(writer, target).start()  # type: ignore[no-any-return]
    except REFUSALS as error:
        raise refused(target.file, field, error) from error


def save(frame: DataFrame, target: Target) -> int | None:
    """Write a frame that is no stream to a sink, once; return the number of rows, `None` when it was done before.

    Topics, the state and Delta get them once for a checkpoint and an identity; files are added each time.

    Raises:
        PipelineError: Spark or the sink refused it.
        NoteDamagedError: the note of the save cannot be read.
    """
    sink, field = target.sink, f"sinks.{target.name}"
    check_save(target)
    counted = Observation(OBSERVED)
    folder = os.path.join(target.checkpoint, target.name)
    once = Save(folder, target.identity, in_reach=is_local(folder) and not target.remote)
    own = once.begin() if sink.topic or sink.state or sink.delta is not None else ""
    if own is None:
        return None
    try:
        rows = shape(frame, target).observe(counted, F.count(F.lit(1)).alias(ROWS))
        if sink.topic or sink.state:
            _Upsert(bus_options(target), own)(rows, 0)
        elif sink.delta is not None:
            need_delta()
            DeltaFolder(sink.delta, sink.partition_by, own, text_options(sink.options))(rows, 0)
        elif sink.console:
            rows.show(truncate=False)
        else:
            writer = rows.write.mode("append").partitionBy(*sink.partition_by).options(**text_options(sink.options))
            writer.format(sink.format or "parquet").save(sink.parquet)
        if own:
            once.end()
        return int(counted.get[ROWS])
    except REFUSALS as error:
        raise refused(target.file, field, error) from error


def check_save(target: Target) -> None:
    """Check that a sink can be filled from what is no stream.

    Raises:
        PipelineError: it asks for what only streams have.
    """
    sink = target.sink
    for name, given in (("mode", sink.mode != "append"), ("compact_files", sink.compact_files is not None)):
        if given:
            field = f"sinks.{target.name}.{name}"
            raise PipelineError(target.file, field, f"goes with streams, and {sink.input!r} is no stream")


def shape(frame: DataFrame, target: Target) -> DataFrame:
    """Return the columns that the bus takes; other sinks get the frame as it is.

    A frame without a column `value` becomes JSON: an object for each row, with `null` for a missing value. Its columns
    `key` and (in a topic) `timestamp` are those of the record too.

    Raises:
        PipelineError: a column is missing, or the topic of a sink of the state keeps none.
    """
    sink, field = target.sink, f"sinks.{target.name}"
    if not sink.topic and not sink.state:
        return frame
    elsewhere = WAYS & {name.lower() for name in sink.options}
    if sink.state and not elsewhere and target.bus.keeps_state(sink.state) is False:
        raise PipelineError(
            target.file, f"{field}.state",
            f"what is published to the topic {sink.state!r} does not become state:"
            f" babelbus topics alter {sink.state} --retain last",
        )  # fmt: skip
    carried = {one.name: one for one in frame.schema.fields if one.name in CARRIED and one.metadata != OF_SOURCE}
    columns = {name: F.col(name) for name in carried}
    if sink.topic is True:
        if "topic" not in frame.columns:
            raise PipelineError(target.file, f"{field}.topic", "the frame has no column 'topic' to name it")
        columns["topic"] = F.col("topic")
    if "value" not in columns:
        row = F.struct(*(F.col(f"`{name}`") for name in frame.columns))
        kept = {"topic", "key"}
        if sink.topic and "timestamp" in carried and isinstance(carried["timestamp"].dataType, TimestampType):
            kept.add("timestamp")
        columns = {name: column for name, column in columns.items() if name in kept}
        columns["value"] = F.to_json(row, {"ignoreNullFields": "false"})
    for name in EXPRESSIONS:
        expression = getattr(sink, name)
        if expression is not None:
            columns[name] = F.expr(expression)
    if sink.state:
        columns = {name: column for name, column in columns.items() if name in STATE_COLUMNS}
        if "key" not in columns:
            raise PipelineError(target.file, f"{field}.key", "the state needs a key: the frame has no column 'key'")
    return frame.select(*(column.alias(name) for name, column in columns.items()))


def _ending(writer: Any, target: Target) -> Any:
    """Return where the rows go."""
    sink = target.sink
    options = text_options(sink.options)
    if sink.topic or sink.state:
        options = bus_options(target)
        if sink.mode == "update":
            writer = writer.outputMode("update")
            return writer.foreachBatch(_Upsert(options, transaction(target)))
        return writer.format("babelbus").options(**options)
    if sink.parquet is not None and sink.compact_files is not None:
        return writer.foreachBatch(ParquetFolder(sink.parquet, sink.partition_by, sink.compact_files))
    if sink.delta is not None:
        need_delta()
        return writer.foreachBatch(DeltaFolder(sink.delta, sink.partition_by, transaction(target), options))
    if sink.parquet is not None:
        return writer.format("parquet").options(**options).option("path", sink.parquet)
    if sink.console:
        return writer.format("console").options(**({"truncate": "false"} | options))
    return writer.format(sink.format).options(**options)


def bus_options(target: Target) -> dict[str, str]:
    """Return the options of a sink on the bus."""
    sink = target.sink
    options = target.bus.options(text_options(sink.options), writing=True)
    if sink.state:
        options |= {"table": "state", "topic": sink.state}
    elif sink.topic is not True:
        options["topic"] = str(sink.topic)
    if sink.dead_letters is not None:
        options["deadLetterTopic"] = sink.dead_letters
    return options


def transaction(target: Target) -> str:
    """Return the transaction id of a stream that is published by saves: the same while its checkpoint is the same."""
    folder = os.path.join(target.checkpoint, target.name)
    if is_local(folder):
        folder = os.path.abspath(folder)
    return f"pipeline {hashlib.sha256(folder.encode()).hexdigest()[:40]}"


class DeltaMissingError(SparkError):
    """The package `deltalake` is not installed."""


def need_delta() -> None:
    """Check that the package is installed.

    Raises:
        DeltaMissingError: the package is not installed.
    """
    if importlib.util.find_spec("deltalake") is None:
        raise DeltaMissingError("a sink delta needs the package deltalake: pip install deltalake")


class DeltaFolder:
    """Appends batches to a Delta table, each once, through the package `deltalake`, which needs no jar.

    The first batch makes the table. A batch passes through the driver: up to about 1 GB. The table notes the id of the
    query and the number of the batch with the rows themselves, so that a batch that is done again is known.
    """

    def __init__(self, path: str, partition_by: list[str], transaction: str, options: dict[str, str]) -> None:
        self._path = path
        self._partition_by = partition_by
        self._transaction = transaction
        self._options = options

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Append a batch, unless the table has it."""
        delta = importlib.import_module("deltalake")  # by name: it is no requirement of ours, so types are not there
        if delta.DeltaTable.is_deltatable(self._path, self._options or None):
            last = delta.DeltaTable(self._path, storage_options=self._options or None).transaction_version(
                self._transaction
            )
            if last is not None and last >= batch:
                return
        delta.write_deltalake(
            self._path,
            frame.toArrow(),
            mode="append",
            partition_by=self._partition_by or None,
            storage_options=self._options or None,
            commit_properties=delta.CommitProperties(app_transactions=[delta.Transaction(self._transaction, batch)]),
        )


class _Upsert:
    """Saves one batch: a streaming sink in Python cannot say that it takes changed rows, a save of each batch can.

    The save has the batch's id, so that a batch that is done again is not published again.
    """

    def __init__(self, options: dict[str, str], transaction: str) -> None:
        self._options = options
        self._transaction = transaction

    def __call__(self, frame: DataFrame, batch: int) -> None:
        own = {"txnId": self._transaction, "batchId": str(batch)}
        frame.write.format("babelbus").options(**self._options, **own).mode("append").save()
