"""One partition in the broker: append with a receipt, read below the high watermark, wait for more."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from babelbus.config import Ack
from babelbus.core.backend import Backend
from babelbus.core.receipt import Receipt
from babelbus.core.settings import TopicSettings
from babelbus.core.tail import Tail, TailBudget
from babelbus.errors import StorageError
from babelbus.records.format import rebase
from babelbus.records.record import RecordBatch
from babelbus.storage.contract import Chunk, PartitionLog
from babelbus.storage.errors import DiskFullError, OffsetOutOfRangeError

T = TypeVar("T")

log = logging.getLogger(__name__)

DEFERRED_BYTES_MAX = 8 * 2**20
"""Most that a topic with `ack = "accepted"` holds in memory before it is written."""
RETRY_SECONDS = 1.0
"""After how long accepted records that the disk refused are written again, and a failed flush is tried again."""


class TopicClosedError(StorageError):
    """The topic was removed, or the server stops, while something waited for it."""


def _level(settings: TopicSettings) -> Ack:
    """Return the ack level; a store that replicates has nothing below its quorum, so a flush is that."""
    return "flushed" if settings.ack == "replicated" else settings.ack


class Partition:
    """A partition's log and what the broker knows of it. All calls come from the event loop.

    Invariant: readers see the records below `high_watermark`, and what it says survives as the ack level promises.
    """

    def __init__(
        self,
        number: int,
        partition_log: PartitionLog,
        settings: TopicSettings,
        backend: Backend,
        loop: asyncio.AbstractEventLoop,
        *,
        tails: TailBudget,
        flush_every_bytes: int,
    ) -> None:
        self.number = number
        self.log = partition_log
        self._high_watermark = partition_log.next_offset
        self.pending: Callable[[], None] | None = None
        """Appends the records that this turn of the event loop has gathered; set while there are such records."""
        self.failing: StorageError | None = None
        """Why the last append or flush failed; `None` when it did not."""
        self._append_failed = False
        """Whether the last append failed: then a flush that works does not mean that records can be stored."""
        self._ack = _level(settings)
        self._retention_records = settings.retention_records
        self._backend = backend
        self._volatile = backend.fit.volatile
        self.queued = backend.fit.appends_wait
        """Whether what is appended is written by the flusher's thread, and not at once."""
        self._tail = None if self._volatile else Tail(tails)
        self._loop = loop
        self._flush_every_bytes = flush_every_bytes
        self._unflushed_bytes = 0
        self._flush_requested = False
        self._sync_wanted = False
        """Whether the next flush must make durable, and not only write."""
        self._waiting: deque[tuple[int, Receipt]] = deque()
        self._deferred: deque[RecordBatch] = deque()
        self._deferred_count = 0
        self._deferred_bytes = 0
        self._unwritten: deque[RecordBatch] = deque()
        """Accepted batches that are queued for the flusher's thread; deferred again if that fails."""
        self._retry: asyncio.TimerHandle | None = None
        self._watchers: list[tuple[int, int, Callable[[], None]]] = []
        self._watch_count = 0
        self._closed = False
        self._cleaning = False

    @property
    def closed(self) -> bool:
        """Whether the topic went away, or the server stops."""
        return self._closed

    @property
    def is_unsettled(self) -> bool:
        """Whether something was published that readers may not see before a flush."""
        return not self._closed and (self.pending is not None or bool(self._waiting or self._unwritten))

    @property
    def next_offset(self) -> int:
        """The offset that the next record gets; gathered records are appended first."""
        if self.pending is not None:
            self.pending()
        return self.log.next_offset + self._deferred_count

    @property
    def oldest(self) -> int:
        """The offset of the oldest record that `retention_records` asks to keep; some more may still be there."""
        first = self.log.first_offset
        if self._retention_records is None:
            return first
        return max(first, self._high_watermark - self._retention_records)

    @property
    def high_watermark(self) -> int:
        """The offset up to which readers see; gathered records are appended first, so that all see the same end."""
        if self.pending is not None:
            self.pending()
        return self._high_watermark

    def step_back(self) -> None:
        """Remove records that the log has lost from the view of readers."""
        self._high_watermark = min(self._high_watermark, self.log.next_offset)
        self._wake_beyond(self._high_watermark)

    def configure(self, settings: TopicSettings, checkpoint_bytes: int) -> None:
        """Set other settings; later publishers are answered at the new ack level."""
        if self.pending is not None:
            self.pending()
        self._write_deferred()
        self._ack = _level(settings)
        self._retention_records = settings.retention_records
        self.log.configure(settings.for_log(checkpoint_bytes))

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: RecordBatch, receipt: Receipt | None = None) -> Receipt:
        """Append a batch whose base offset is `next_offset`; the receipt is done when the ack level is reached.

        The receipt is `receipt` if it is given, with the place of the batch.

        Raises:
            StorageError: nothing was appended.
        """
        if receipt is None:
            receipt = Receipt()
        if self._closed:
            raise TopicClosedError("the topic was removed or the server stops")
        if self._ack == "accepted":
            return self._accept(batch, receipt)
        if self._deferred:  # accepted before the level changed: they go first, for their offsets are given
            self._write_deferred()
            if self._deferred:
                raise self.failing or StorageError("accepted records wait to be written")
        return self._write(batch, receipt)

    def _write(self, batch: RecordBatch, receipt: Receipt) -> Receipt:
        try:
            base_offset = self.log.append(batch)
        except StorageError as error:
            self._note_failure(error)
            raise
        self._note_success()
        self._keep(batch, base_offset)
        receipt.partition, receipt.base_offset, receipt.count = self.number, base_offset, batch.count
        # Behind records that wait for a flush nobody reads earlier, even if the level was lowered meanwhile.
        if (self._ack == "flushed" or self._waiting or self.queued) and not self._volatile:
            self._waiting.append((base_offset + batch.count, receipt))
            self._unflushed_bytes += len(batch.data)
            self._request_flush(sync=self._ack == "flushed" or self._unflushed_bytes >= self._flush_every_bytes)
            return receipt
        self._unflushed_bytes += len(batch.data)
        if self._unflushed_bytes >= self._flush_every_bytes and not self._volatile:
            self._request_flush()  # so that a start after a kill has little to read
        self._advance(base_offset + batch.count)
        receipt.resolve()
        return receipt

    def _keep(self, batch: RecordBatch, base_offset: int) -> None:
        """Keep what was appended for those who read at the tail."""
        if self._tail is not None:
            self._tail.add(batch if batch.base_offset == base_offset else rebase(batch, base_offset))

    def _note_success(self) -> None:
        if self._append_failed:
            self.failing = None
            self._append_failed = False
        if self._backend.failing is not None:
            self._backend.note_success()

    def _note_failure(self, error: StorageError) -> None:
        self.failing = error
        self._append_failed = True
        self._backend.note_failure(error)
        if not isinstance(error, DiskFullError):
            self._request_flush()  # which puts things right where they can be

    def _accept(self, batch: RecordBatch, receipt: Receipt) -> Receipt:
        """Write a batch; what the disk refuses waits in memory."""
        if self._deferred_bytes + len(batch.data) > DEFERRED_BYTES_MAX:
            self._write_deferred()
            if self._deferred:
                raise self.failing or StorageError("too much waits to be written")
        self._deferred.append(batch)
        self._deferred_count += batch.count
        self._deferred_bytes += len(batch.data)
        self._write_deferred()
        receipt.partition, receipt.base_offset, receipt.count = self.number, batch.base_offset, batch.count
        receipt.resolve()
        return receipt

    def _write_deferred(self) -> None:
        """Write what was accepted; what the disk refuses waits for the next append, or `RETRY_SECONDS`."""
        self._cancel_retry()
        while self._deferred and not self._closed:
            batch = self._deferred[0]
            try:
                base_offset = self.log.append(batch)
            except StorageError as error:
                self._note_failure(error)
                log.warning("%d accepted records wait in memory: %s", self._deferred_count, error)
                self._retry = self._loop.call_later(RETRY_SECONDS, self._write_deferred)
                return
            self._note_success()
            self._keep(batch, base_offset)
            self._deferred.popleft()
            self._deferred_count -= batch.count
            self._deferred_bytes -= len(batch.data)
            self._unflushed_bytes += len(batch.data)
            if self.queued:
                self._unwritten.append(batch)
            elif not self._waiting:  # else they become visible with the flush that those wait for
                self._advance(base_offset + batch.count)
        due = self._unflushed_bytes >= self._flush_every_bytes
        if due or self._unwritten:
            self._request_flush(sync=due)

    def _defer_again(self) -> None:
        """Return accepted batches that could not be written to the queue, in front of later batches."""
        for batch in reversed(self._unwritten):
            self._deferred.appendleft(batch)
            self._deferred_count += batch.count
            self._deferred_bytes += len(batch.data)
        if self._unwritten:
            self._unwritten.clear()
            self._cancel_retry()
            self._retry = self._loop.call_later(RETRY_SECONDS, self._write_deferred)

    def _cancel_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def receipt_for(self, base_offset: int, count: int) -> Receipt:
        """Return a receipt for records that were appended before, done when their ack level is reached."""
        receipt = Receipt(self.number, base_offset, count)
        if base_offset + count <= self.high_watermark or self._ack != "flushed":
            receipt.resolve()
        else:
            self._waiting.append((base_offset + count, receipt))
            self._request_flush()
        return receipt

    # -- durability --------------------------------------------------------------------------------------------------

    def _request_flush(self, *, sync: bool = True) -> None:
        if sync:
            self._sync_wanted = True
        if not self._flush_requested and not self._closed:
            self._flush_requested = True
            if self._is_alone():
                self._backend.flusher.request_alone(self, self._is_alone)
            else:
                self._backend.flusher.request(self)

    def _is_alone(self) -> bool:
        """Return whether a single record waits for a flush, and no cleaner may hold the log."""
        waiting = self._waiting
        return len(waiting) == 1 and waiting[0][1].count == 1 and not self.queued and not self._cleaning

    def flush_log(self) -> int:
        """Write what is queued, and make it durable if that was asked for (in the flusher's thread)."""
        self._flush_requested = False  # what is appended from here on asks again
        if self._closed:
            return self.log.next_offset
        if self.queued and not self._sync_wanted:
            return self.log.durable(sync=False)
        self._sync_wanted = False
        return self.log.durable()

    async def flush(self) -> int:
        """Flush the log at any ack level; return the offset up to which it is durable.

        Raises:
            StorageError: the engine refused.
        """
        if self.pending is not None:
            self.pending()
        return await self._backend.flusher.call(self.log.durable, self.flushed)

    def flushed(self, durable_offset: int, error: StorageError | None) -> None:
        """Record a flush: answer the publishers that it covers, and let readers see."""
        if self._closed:
            return
        waiting = self._waiting
        if error is not None:
            self.failing = self._backend.flush_failing = error
            self._loop.call_later(RETRY_SECONDS, self._request_flush)  # health must not depend on the next publisher
            while waiting:
                waiting.popleft()[1].resolve(error)
            self._defer_again()
            if self._tail is not None:
                self._tail.cut(self.log.next_offset)
            # What the disk did not give back is gone, and its offsets are given again.
            self.step_back()
            return
        self._backend.flush_failing = None
        if not self._append_failed:
            self.failing = None
        self._unflushed_bytes = 0
        while self._unwritten and self._unwritten[0].base_offset < durable_offset:
            self._unwritten.popleft()
        self._advance(min(durable_offset, self.log.next_offset))
        while waiting and waiting[0][0] <= durable_offset:
            waiting.popleft()[1].resolve()
        if not waiting and self._ack != "flushed" and not self.queued:
            self._advance(self.log.next_offset)  # what was written behind those that waited, at a lower level

    # -- reading -----------------------------------------------------------------------------------------------------

    def read_cached(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk | None:
        """Return stored records from `offset` on that readers may see, if that needs no wait; `None`: use `read`.

        As many records as fit `bytes_max`, but at least one, however large; `end_offset` bounds them (excluded).

        Raises:
            OffsetOutOfRangeError: `offset` is below the first one or above the high watermark.
            CorruptRecordError: the record at `offset` is damaged.
        """
        high_watermark, first = self.high_watermark, self.log.first_offset
        if not first <= offset <= high_watermark:
            raise OffsetOutOfRangeError(offset, first, high_watermark)
        end = high_watermark if end_offset is None else min(end_offset, high_watermark)
        if offset >= end:
            return Chunk(b"", offset, offset)
        tail = self._tail if self.log.is_owned else None
        chunk = None if tail is None else tail.read(offset, bytes_max, end)
        if chunk is None and not self._backend.fit.reads_wait:
            return self.log.read(offset, bytes_max, end)
        return chunk

    async def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return what `read_cached` does, from the engine if need be.

        Raises:
            OffsetOutOfRangeError, CorruptRecordError: as `read_cached`.
            StorageError: the engine cannot read, or the topic went away.
        """
        chunk = self.read_cached(offset, bytes_max, end_offset)
        if chunk is not None:
            return chunk
        end = self.high_watermark if end_offset is None else min(end_offset, self.high_watermark)
        return await self.ask(lambda: self.log.read(offset, bytes_max, end))

    async def read_since(self, timestamp: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return records as `read` does, from the first visible one on whose timestamp (ms) is `timestamp` or later.

        Without such a record the chunk is empty, and ends at the high watermark.

        Raises:
            CorruptRecordError, StorageError: as `read`.
        """
        while True:
            end = max(self.high_watermark, self.log.first_offset)
            offset = await self.find_time(timestamp)
            if offset is None:
                return Chunk(b"", end, end)
            try:
                return await self.read(offset, bytes_max, end_offset)
            except OffsetOutOfRangeError:
                if offset >= self.log.first_offset:
                    raise
                # Retention has removed the record meanwhile; those behind it are later.

    async def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first visible record whose timestamp (ms) is `timestamp` or later, or `None`.

        Raises:
            StorageError: the engine cannot read, or the topic went away.
        """
        offset = await self.ask(lambda: self.log.find_time(timestamp))
        return offset if offset is not None and offset < self.high_watermark else None

    async def ask(self, work: Callable[[], T]) -> T:
        """Return what `work` reads from the log, in a reader's thread of the engine where reads wait.

        Raises: what `work` raises, and `TopicClosedError`.
        """

        def run() -> T:
            if self._closed:
                raise TopicClosedError("the topic was removed or the server stops")
            return work()

        return await self._backend.ask(run)

    def cut_torn(self, start: int) -> None:
        """Remove at a start what a loss of power has torn a hole into, from `start` on; see `PartitionLog.cut_torn`.

        Raises:
            StorageError: the log cannot be read.
        """
        self.log.cut_torn(start)
        self.step_back()

    async def clean(self, now_ms: int) -> int:
        """Run retention and compaction, in the cleaner's thread; return how many bytes became free.

        Raises:
            StorageError, OSError: the engine refused.
        """

        def run() -> int:
            freed = self.log.trim(self.oldest) if self._retention_records is not None else 0
            return freed + self.log.clean(now_ms)

        self._cleaning = True
        try:
            freed = await self._loop.run_in_executor(None, run)
        finally:
            self._cleaning = False
        if freed:
            self.forget_tail()  # it may hold what is gone
        return freed

    def forget_tail(self) -> None:
        """Drop the records that are kept in memory: the next read goes to the engine."""
        if self._tail is not None:
            self._tail.clear()

    def watch(self, offset: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back once, when the record `offset` can be read or the topic goes away; at once if it can be now.

        Returns what to call when the callback is not wanted any more.
        """
        if offset < self.high_watermark or self._closed:
            callback()
            return lambda: None
        self._watch_count += 1
        watcher = (offset, self._watch_count, callback)
        heappush(self._watchers, watcher)

        def cancel() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
                heapify(self._watchers)

        return cancel

    async def wait(self, offset: int) -> None:
        """Return when the record `offset` can be read.

        Raises:
            TopicClosedError: the topic went away meanwhile.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        cancel = self.watch(offset, lambda: None if future.done() else future.set_result(None))
        try:
            await future
        except asyncio.CancelledError:
            cancel()  # a reader that gives up again and again must not pile up
            raise
        if self._closed:
            raise TopicClosedError("the topic was removed or the server stops")

    def _advance(self, high_watermark: int) -> None:
        if high_watermark <= self._high_watermark:
            return
        self._high_watermark = high_watermark
        watchers = self._watchers
        while watchers and watchers[0][0] < high_watermark:
            heappop(watchers)[2]()

    def _wake_beyond(self, high_watermark: int) -> None:
        """Call the watchers of offsets that are beyond the end now."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if watcher[0] > high_watermark:
                watcher[2]()
            else:
                heappush(self._watchers, watcher)

    def stop(self) -> None:
        """Refuse records, flushes and reads from now on."""
        if self._closed:
            return
        self._write_deferred()
        self._cancel_retry()
        if self._deferred:
            log.error("%d accepted records are lost: the disk refused them until the end", self._deferred_count)
        self._closed = True
        self.forget_tail()

    def close_log(self) -> StorageError | None:
        """Close the log, flushed if the disk allows; return the error of the flush. Blocks."""
        error = None
        try:
            self.log.durable()
        except (StorageError, OSError) as failure:
            error = failure if isinstance(failure, StorageError) else StorageError(str(failure))
            log.error("closing a partition: %s", failure)
        try:
            self.log.close()
        except (StorageError, OSError) as failure:  # a full disk: the records are safe, the next start reads more
            log.warning("closing a partition: %s", failure)
        return error

    def release(self, error: StorageError | None) -> None:
        """Answer publishers and readers that wait; publishers get the error of the flush, if there is one."""
        while self._waiting:
            self._waiting.popleft()[1].resolve(error)
        watchers, self._watchers = self._watchers, []
        for _, _, callback in watchers:
            callback()
