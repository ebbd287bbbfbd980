"""Saves: `df.write.format("babelbus").mode("append").save()`."""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from babelbus.spark.sink import Target, abort, check_targets, commit, stage
from babelbus.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_ID = "sql.streaming.queryId"
"""Name of a query's id in the properties of Spark's tasks."""


class BatchWriter(DataSourceArrowWriter):
    """Publishes all rows of a save, or none.

    It is made on the driver and sent to the tasks and to the commit as it is. A save has a transaction id of its own,
    unless the options name one: then a save with a batch id that was saved before does nothing.

    Raises:
        TargetError, BabelbusError: see `check_targets`.
    """

    def __init__(self, options: SinkOptions) -> None:
        check_targets(options)
        self._options = options
        self._transaction = options.transaction or f"spark save {secrets.token_hex(16)}"
        self._batch_id = max(options.batch_id, 0)

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> WriterCommitMessage:
        """Stage the rows of one task."""
        context = TaskContext.get()
        assert context is not None
        # Inside foreachBatch there is a query, and its batch ids are not another's.
        owner = (context.getLocalProperty(QUERY_ID) or "") if self._options.transaction else ""
        target = Target(self._transaction, self._batch_id, owner, context.partitionId(), context.attemptNumber())
        return stage(iterator, self._options, target)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what the tasks staged."""
        commit(self._options, self._transaction, self._batch_id, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop it."""
        abort(self._options, messages)
