"""Batch reads: offsets are settled on the driver, records are decoded where the tasks run."""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from babelbus.spark.available_offsets import Survey
from babelbus.spark.errors import DataLossError
from babelbus.spark.options import Place, SourceOptions
from babelbus.spark.plan import Span, make_tasks
from babelbus.spark.python import keep_imports
from babelbus.spark.record_source import open_reach
from babelbus.spark.schema import arrow_schema
from babelbus.storage.errors import OffsetOutOfRangeError

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)


class Task(InputPartition):
    """The spans that one Spark task reads."""

    def __init__(self, place: Place, spans: list[Span], *, fail_on_data_loss: bool) -> None:
        super().__init__(None)
        self.place = place
        self.spans = spans
        self.fail_on_data_loss = fail_on_data_loss


class BatchReader(DataSourceReader):
    """`spark.read.format("babelbus")`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks for what there is to read now."""
        survey = Survey(self._options, open_reach(self._options.place))
        keep_imports()
        return plan_tasks(self._options, survey.batch())

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        """Yield the records of one task."""
        return read_task(partition, self._schema)


def plan_tasks(options: SourceOptions, spans: list[Span]) -> list[InputPartition]:
    """Return spans as the tasks of one job."""
    tasks = make_tasks(
        spans,
        target_bytes=options.task_bytes,
        records_max=options.records_per_task_max,
        tasks_min=options.tasks_min,
        cores=os.cpu_count() or 1,  # of the driver: right in local mode, and elsewhere a number as good as another
    )
    return [Task(options.place, task, fail_on_data_loss=options.fail_on_data_loss) for task in tasks]


def read_task(task: InputPartition, schema: StructType) -> "Iterator[pa.RecordBatch]":
    """Yield the records of one task; Spark makes an empty one when there is nothing at all to read."""
    if not isinstance(task, Task):
        return
    from babelbus.spark.decode import Decoder

    wanted = arrow_schema(schema)
    reach = open_reach(task.place)
    keep_imports()
    for span in task.spans:
        decoder = Decoder(wanted, span.topic, span.partition)
        start = span.start
        while start < span.end:
            try:
                for columns in reach.read(span.topic, span.partition, start, span.end):
                    yield from decoder.batches(columns, start, span.end)
                    if len(columns):
                        start = max(start, int(columns.offsets[-1]) + 1)
                break
            except OffsetOutOfRangeError as error:
                loss = DataLossError(
                    span.topic, span.partition, start, (error.first, error.end),
                    "they were removed while the query ran",
                )  # fmt: skip
                if task.fail_on_data_loss:
                    raise loss from error
                following = error.first if start < error.first < span.end else span.end
                log.warning("%d offsets are lost: %s", following - start, loss)
                start = following
