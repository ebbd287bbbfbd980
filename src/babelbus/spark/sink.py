"""Writing from Spark: tasks stage their rows on the server, and one call of the driver publishes all of them, once.

A part of a batch is what one attempt of one task stages. Its id has a random end, for Spark may run a batch again, with
the same task and attempt numbers, after a crash. Parts that no commit names are dropped by the server.
"""

import logging
import math
import re
import secrets
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from babelbus.client import BabelbusError, BlockingClient, RequestError
from babelbus.clients.jebp import BlockingPartWriter
from babelbus.clock import Clock, SystemClock
from babelbus.protocols.jebp.messages import BatchCommitted, PartRecords
from babelbus.records.format import encode_payloads
from babelbus.spark.connection import connection
from babelbus.spark.errors import OldCheckpointError, SinkOwnerError, TargetError
from babelbus.spark.options import Place
from babelbus.spark.python import keep_imports
from babelbus.spark.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
RUN_ID = "spark.jobGroup.id"
"""Properties of Spark's tasks; `StreamWriter.write` gets these ids in no other way."""
PROBE_PARTITION = 2**31 - 1
KNOWN_SECONDS = 60.0
"""Lifetime of what is known of topics and their partitions: each question takes a round trip."""
_PARTITIONS = re.compile(r"has partitions 0 to (\d+), not \d+$")
_NO_TOPIC = re.compile(r"there is no topic .*$")
_NO_PLACE = re.compile(r"(topic .* is the server's own|no right to publish to .*|topic .* keeps no state.*)$")
_known: dict[tuple[str, str], tuple[float, int]] = {}
_checked: dict[tuple[Place, str, bool, str], float] = {}


@dataclass
class Staged(WriterCommitMessage):
    """The message of a task to the driver: the part that it staged, and its batch. `records` is 0 without rows."""

    transaction: str
    batch_id: int
    owner: str
    part: str
    records: int
    dead: int


class Target(msgspec.Struct, frozen=True):
    """Which batch a task's rows belong to, and which task it is. `owner` is the query, empty for a mere save."""

    transaction: str
    batch_id: int
    owner: str = ""
    partition: int = 0
    attempt: int = 0


def check_targets(options: SinkOptions, clock: Clock | None = None) -> None:
    """Check on the driver, before there are rows, that they can go to the topics that the options name.

    A good result is believed for `KNOWN_SECONDS`, for a stream asks with each batch.

    Raises:
        TargetError: there is no such topic, we may not publish to it, or it does not keep the state that is to be set.
        BabelbusError: the server was not to be reached for `requestTimeoutMs`, or refused.
    """
    from babelbus.spark.encode import NoPlaceError

    now = (clock or SystemClock()).monotonic()
    what = options.place, options.topic, options.to_state, options.dead_letter_topic
    if now - _checked.get(what, -math.inf) <= KNOWN_SECONDS:
        return
    with connection(options.place) as client:
        writer = client.transaction("check").writer(0, "check")
        for name, topic, to_state in (
            ("topic", options.topic, options.to_state),
            ("deadLetterTopic", options.dead_letter_topic, False),
        ):
            try:
                if topic:
                    count_partitions(writer, topic, to_state=to_state)
            except NoPlaceError as error:
                raise TargetError(name, str(error)) from None
    _checked[what] = now


def stage(
    chunks: "Iterator[pa.RecordBatch]", options: SinkOptions, target: Target, clock: Clock | None = None
) -> Staged:
    """Send the rows of one task to be staged. A few MiB are on their way while Spark is asked for more.

    Raises:
        RowRefusedError: a row cannot be a record, and there is no dead-letter topic.
        SinkOwnerError: the transaction is another query's.
        BabelbusError: the server was not to be reached for `requestTimeoutMs`, or refused.
    """
    part = f"{target.partition}.{target.attempt}.{secrets.token_hex(8)}"
    told = Staged(target.transaction, target.batch_id, target.owner, part, 0, 0)
    rows = (chunk for chunk in chunks if chunk.num_rows)
    first = next(rows, None)
    if first is None:
        return told
    with connection(options.place) as client:
        task = _Task(client, options, target, part, clock or SystemClock())
        keep_imports()
        if task.is_committed():
            log.info("batch %d of %r was committed before", target.batch_id, target.transaction)
            return told
        try:
            task.stage(first)
            for chunk in rows:
                task.stage(chunk)
            task.writer.drain()
        except BaseException:
            _known.clear()  # it may be wrong: a topic may have been made again, with fewer partitions
            task.give_up()
            raise
    told.records, told.dead = task.writer.staged.records, task.encoder.dead
    return told


class _Task:
    """The rows of one task on their way."""

    def __init__(self, client: BlockingClient, options: SinkOptions, target: Target, part: str, clock: Clock) -> None:
        from babelbus.spark.encode import Encoder

        self._options = options
        self._target = target
        self._clock = clock
        self._transaction = client.transaction(target.transaction)
        self.writer = self._transaction.writer(target.batch_id, part)
        # The server chooses a partition well enough where it matters to nobody.
        dealt = options.partitioner == "spread"
        self._must_know = dealt or not options.topic or bool(options.dead_letter_topic)
        # Not of the attempt: another one puts the rows where this one does.
        turn = zlib.crc32(target.transaction.encode()) + target.batch_id + target.partition
        self.encoder = Encoder(options, self._count_partitions, turn=turn)

    def is_committed(self) -> bool:
        told = self._transaction.ask()
        _check_owner(self._target.transaction, told.owner, self._target.owner)
        return told.last_batch_id >= self._target.batch_id

    def stage(self, chunk: "pa.RecordBatch") -> None:
        self._must_know = self._must_know or "key" in chunk.schema.names or "partition" in chunk.schema.names
        for piece in self.encoder.encode(chunk, self._clock.now_ms()):
            to_state = self._options.to_state and piece.topic == self._options.topic
            self.writer.put(piece.topic, piece.batches, partition=piece.partition, to_state=to_state)

    def give_up(self) -> None:
        """Drop what was staged; should that fail, the server does it after a day."""
        try:
            self.writer.abort()
        except BabelbusError as error:
            log.warning("a part of batch %d was not dropped: %s", self._target.batch_id, error)

    def _count_partitions(self, topic: str, least: int) -> int:
        if not self._must_know:
            return -1
        at, now = (self._options.place.address, topic), self._clock.monotonic()
        known = _known.get(at)
        if known is None or known[1] < least or now - known[0] > KNOWN_SECONDS:
            known = _known[at] = now, count_partitions(self.writer, topic)
        return known[1]


def count_partitions(writer: BlockingPartWriter, topic: str, *, to_state: bool = False) -> int:
    """Return how many partitions a topic has.

    jebp tells it to those who may read; but its refusal of a partition that cannot be says which there are to those who
    may only publish, and stages nothing.

    Raises:
        NoPlaceError: there is no such topic, we may not publish to it, or (`to_state`) it keeps no state.
        RequestError: the server refused for another reason.
    """
    from babelbus.spark.encode import NoPlaceError

    if not topic or "," in topic or len(topic.encode()) > 249 or re.search("[\0-\x1f\x7f-\x9f]", topic):
        raise NoPlaceError(f"{topic[:300]!r} is no name of a topic")
    try:
        probe = encode_payloads([b""], [1]).data
        writer.stage_stored(topic, probe, partition=PROBE_PARTITION, to_state=to_state)
    except RequestError as error:
        text = str(error).partition(" (status")[0]
        found = _PARTITIONS.search(text)
        if found is not None:
            return int(found[1]) + 1
        missing = _NO_TOPIC.search(text)
        if missing is not None:
            raise NoPlaceError(f"{missing[0]}: make it with `babelbus topics create {topic}`") from None
        refused = _NO_PLACE.search(text)
        if refused is not None:
            raise NoPlaceError(refused[1]) from None
        raise
    raise AssertionError("a topic has 2^31 partitions")


def commit(
    options: SinkOptions, transaction: str, batch_id: int, messages: Sequence[WriterCommitMessage | None]
) -> BatchCommitted:
    """Publish what the tasks staged, all or none of it; a batch that was published before is not published again.

    Raises:
        SinkOwnerError: the transaction is another query's.
        BabelbusError: the server was not to be reached for `requestTimeoutMs`, or refused. The batch may be published
            or not, and a commit of the same batch tells.
    """
    told = [one for one in messages if isinstance(one, Staged)]
    parts = [PartRecords(one.part, one.records) for one in told if one.records]
    owner = next((one.owner for one in told), "")
    with connection(options.place) as client:
        batches = client.transaction(transaction)
        try:
            done = batches.commit(batch_id, parts, owner=owner)
        except RequestError as error:
            if not error.repeat:
                _check_owner(transaction, batches.ask().owner, owner)
            raise
    if done.again:
        log.info("batch %d of %r was committed before", batch_id, transaction)
    dead = sum(one.dead for one in told)
    if dead:
        log.warning("batch %d: %d rows became dead letters in %r", batch_id, dead, options.dead_letter_topic)
    return done


def abort(options: SinkOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Drop what the tasks staged. Only that: another run of the same batch may be under way."""
    for one in messages:
        if isinstance(one, Staged) and one.records:
            try:
                with connection(options.place) as client:
                    client.transaction(one.transaction).writer(one.batch_id, one.part).abort()
            except BabelbusError as error:
                log.warning("a part of batch %d was not dropped, the server does so in a day: %s", one.batch_id, error)


def _check_owner(transaction: str, owner: str, query: str) -> None:
    if owner and query and owner != query:
        raise SinkOwnerError(transaction, owner, query)


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
        """Publish what the tasks staged.

        Raises:
            OldCheckpointError: a later batch was published before.
            SinkOwnerError, BabelbusError: see `commit`.
        """
        told = [one for one in messages if isinstance(one, Staged)]
        transaction = self._options.transaction or next((one.transaction for one in told), "")
        assert all((one.transaction, one.batch_id) == (transaction, batchId) for one in told)
        if transaction and commit(self._options, transaction, batchId, messages).records < 0:  # a later one was there
            raise OldCheckpointError(transaction, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Drop what the tasks staged."""
        abort(self._options, messages)
