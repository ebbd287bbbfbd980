"""Appends of engine `db`: queued in the event loop, written by the engine's own thread, acked when they are committed.

Offsets are given when a batch is queued. A batch that the database refuses takes all batches behind it along: their
offsets are given again, and their publishers get the error.
"""

import threading
from collections import deque
from typing import Any

from babelbus.arrays import np
from babelbus.errors import StorageError
from babelbus.records.format import PRODUCER_HEADER, rebase
from babelbus.records.record import RecordBatch
from babelbus.storage.errors import BackendBusyError, StaleWriterError
from babelbus.storage.room import Room
from babelbus.storage.sql.cleaner import clean
from babelbus.storage.sql.log import DatabaseLog

TRANSACTION_BYTES_MAX = 2**20
"""Queued batches are written together up to this size: one commit for what came during the last commit."""


class QueuedLog(DatabaseLog):
    """A partition of a database whose `append` never waits; see `contract.PartitionLog`."""

    def __init__(self, room: Room, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._room = room
        self._queue_lock = threading.Lock()
        """Guards what the event loop and the writing thread share; never held while the database is asked."""
        self._queue: deque[RecordBatch] = deque()
        self._next_offset = self.end
        self._refusing: StorageError | None = None
        """Why appends are refused, until the writing thread has put things right."""

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets, behind those that are queued."""
        return self._next_offset

    def append(self, batch: RecordBatch) -> int:
        """Append a batch to the queue; see `contract.PartitionLog`."""
        with self._queue_lock:
            if self._stale:
                raise self._stale_error()
            if self._refusing is not None:
                raise self._refusing
            if not self._room.take(len(batch.data)):
                raise BackendBusyError(
                    f"{self.name}: {self._room.bytes_held} bytes wait for the database, publish again later"
                )
            base_offset = self._next_offset
            if batch.base_offset != base_offset:
                batch = rebase(batch, base_offset)
            self._queue.append(batch)
            self._next_offset += batch.count
            return base_offset

    def fence_off(self) -> None:
        """Refuse appends from now on: the partition was opened again."""
        with self._queue_lock:
            self._stale = True

    def durable(self, *, sync: bool = True) -> int:
        """Write what is queued, and with `sync` flush it; see `contract.PartitionLog`."""
        try:
            if self.failed:
                self.recover_flush()
                self._accept()
            self._commit()
            return self.flush() if sync else self.end
        except StorageError as error:
            self._drop(error)
            if isinstance(error, StaleWriterError):
                self.fence_off()
            if self.failed:
                self.recover_flush()
            self._accept()
            raise

    def _commit(self) -> None:
        while self._queue:
            with self._queue_lock:
                count = _count_together(self._queue)
                batches = [self._queue[number] for number in range(count)]
            super().append(batches[0] if count == 1 else _join(batches))
            with self._queue_lock:
                for _ in range(count):
                    self._room.give_back(len(self._queue.popleft().data))

    def _drop(self, error: StorageError) -> None:
        with self._queue_lock:
            self._refusing = error
            for batch in self._queue:
                self._room.give_back(len(batch.data))
            self._queue.clear()

    def _accept(self) -> None:
        with self._queue_lock:
            self._refusing = None
            self._next_offset = self.end
            self.producers.forget_from(self.end)

    def clean(self, now_ms: int) -> int:
        """Run retention and compaction; return how many bytes became free."""
        return clean(self, now_ms)

    def close(self) -> None:
        """Write and flush what is queued, and close the partition; see `contract.PartitionLog`."""
        try:
            self.durable()
        finally:
            super().close()


def _count_together(queue: deque[RecordBatch]) -> int:
    """Return how many batches at the front of the queue one transaction takes; a producer's batch goes alone."""
    if len(queue) == 1:
        return 1
    count = size = 0
    for batch in queue:
        size += len(batch.data)
        if count and (size > TRANSACTION_BYTES_MAX or bytes(batch.data).find(PRODUCER_HEADER) >= 0):
            break
        count += 1
        if count == 1 and bytes(batch.data).find(PRODUCER_HEADER) >= 0:
            break
    return count


def _join(batches: list[RecordBatch]) -> RecordBatch:
    """Return batches whose offsets follow each other as one."""
    starts = np.cumsum([0, *(len(batch.data) for batch in batches[:-1])])
    positions = [np.asarray(batch.positions) + start for batch, start in zip(batches, starts, strict=True)]
    return RecordBatch(
        b"".join(batch.data for batch in batches),
        np.concatenate(positions),
        np.concatenate([np.asarray(batch.timestamps) for batch in batches]),
        batches[0].base_offset,
    )
