"""`transactions` without `await`: what `BlockingClient.transaction` gives."""

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from babelbus.clients.jebp.transactions import PartWriter, Transaction
from babelbus.protocols.jebp.messages import ANY_PARTITION, BatchCommitted, Data, PartRecords, TransactionTold
from babelbus.records.record import Record, RecordBatch

T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine in the client's thread and gives its result."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T:
        """Wait for it."""


class BlockingPartWriter:
    """`PartWriter`; the calls and errors are the same, without `await`."""

    def __init__(self, run: Run, writer: PartWriter) -> None:
        self._run = run
        self._writer = writer

    @property
    def staged(self) -> PartRecords:
        """What the commit has to be told of this part; picklable."""
        return self._writer.staged

    def stage(
        self,
        topic: str,
        payloads: Sequence[bytes] | Sequence[Record],
        *,
        timestamps: Sequence[int] | None = None,
        partition: int = ANY_PARTITION,
        batch_records: int = 10_000,
    ) -> PartRecords:
        """Stage a list in batches; see `PartWriter.stage`."""
        return self._run(
            self._writer.stage(topic, payloads, timestamps=timestamps, partition=partition, batch_records=batch_records)
        )

    def stage_batches(
        self, topic: str, batches: Iterable[RecordBatch], *, partition: int = ANY_PARTITION
    ) -> PartRecords:
        """Stage batches in the stored form; see `PartWriter.stage_batches`. The client's thread asks for them."""
        return self._run(self._writer.stage_batches(topic, batches, partition=partition))

    def put(
        self, topic: str, batches: Iterable[RecordBatch], *, partition: int = ANY_PARTITION, to_state: bool = False
    ) -> None:
        """Send batches, and leave the last few on the way; see `PartWriter.put`."""
        self._run(self._writer.put(topic, batches, partition=partition, to_state=to_state))

    def drain(self) -> PartRecords:
        """Wait for what was put; see `PartWriter.drain`."""
        return self._run(self._writer.drain())

    def stage_stored(
        self, topic: str, records: Data, *, partition: int = ANY_PARTITION, to_state: bool = False
    ) -> PartRecords:
        """Stage records in the stored form; see `PartWriter.stage_stored`."""
        return self._run(self._writer.stage_stored(topic, records, partition=partition, to_state=to_state))

    def abort(self) -> None:
        """Drop what was staged."""
        self._run(self._writer.abort())


class BlockingTransaction:
    """`Transaction`; the calls and errors are the same, without `await`."""

    def __init__(self, run: Run, transaction: Transaction) -> None:
        self._run = run
        self._transaction = transaction

    @property
    def id(self) -> str:
        """The transaction id."""
        return self._transaction.id

    def writer(self, batch_id: int, part: str) -> BlockingPartWriter:
        """Return the writer of one part; see `Transaction.writer`."""
        return BlockingPartWriter(self._run, self._transaction.writer(batch_id, part))

    def commit(self, batch_id: int, parts: Sequence[PartRecords], *, owner: str = "") -> BatchCommitted:
        """Publish the records of these parts, all or none; see `Transaction.commit`."""
        return self._run(self._transaction.commit(batch_id, parts, owner=owner))

    def abort(self, batch_id: int) -> int:
        """Drop all parts of a batch; return how many there were."""
        return self._run(self._transaction.abort(batch_id))

    def ask(self) -> TransactionTold:
        """Return the last batch that was committed, and who did."""
        return self._run(self._transaction.ask())
