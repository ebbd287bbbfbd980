"""Saves and streams: `df.write.format("babelbus").mode("append").save()` and `df.writeStream.format("babelbus")`."""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from babelbus.spark.sink import Staged, Target, abort, check_targets, commit, stage
from babelbus.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
RUN_ID = "spark.jobGroup.id"
"""Properties of Spark's tasks; `StreamWriter.write` gets these ids in no other way."""


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
        """Send the rows of one task to be staged."""
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


class StreamWriter(DataSourceStreamArrowWriter):
    """Publishes the rows of one batch after the other, each under the batch id that Spark's checkpoint has.

    With `delivery=at-least-once` the transaction is that of one run of the query, so that what is repeated after a
    restart is published again.

    Raises:
        TargetError, BabelbusError: see `check_targets`.
    """

    def __init__(self, options: SinkOptions) -> None:
        check_targets(options)
        self._options = options

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> WriterCommitMessage:
        """Send the rows of one task to be staged."""
        context = TaskContext.get()
        assert context is not None
        batch_id = context.getLocalProperty(BATCH_ID)
        assert batch_id is not None, f"Spark does not tell {BATCH_ID}"
        owner = context.getLocalProperty(QUERY_ID) or ""
        transaction = self._options.transaction or f"spark run {context.getLocalProperty(RUN_ID)}"
        target = Target(transaction, int(batch_id), owner, context.partitionId(), context.attemptNumber())
        return stage(iterator, self._options, target)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Publish what the tasks staged."""
        told = [one for one in messages if isinstance(one, Staged)]
        transaction = self._options.transaction or next((one.transaction for one in told), "")
        assert all((one.transaction, one.batch_id) == (transaction, batchId) for one in told)
        if transaction:
            commit(self._options, transaction, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Drop what the tasks staged."""
        abort(self._options, messages)
