"""One partition in the broker: append with a receipt, read below the high watermark, wait for more."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from babelbus.config import Ack
from babelbus.core.flusher import Flusher
from babelbus.core.receipt import Receipt
from babelbus.errors import StorageError
from babelbus.records.record import RecordBatch
from babelbus.storage.contract import Chunk, PartitionLog
from babelbus.storage.errors import DiskFullError, OffsetOutOfRangeError
from babelbus.storage.files import disk_error

log = logging.getLogger(__name__)

DEFERRED_BYTES_MAX = 8 * 2**20
"""Most that a topic with `ack = "accepted"` holds in memory before it is written."""
RETRY_SECONDS = 1.0
"""How long accepted records that the disk refused wait before they are tried again without anybody's asking."""


class TopicClosedError(StorageError):
    """The topic was removed, or the server stops, while something waited for it."""


class Partition:
    """A partition's log and what the broker knows of it. All calls come from the event loop.

    Invariant: readers see the records below `high_watermark`, and what it says survives as the ack level promises.
    """

    def __init__(
        self,
        number: int,
        partition_log: PartitionLog,
        ack: Ack,
        flusher: Flusher,
        loop: asyncio.AbstractEventLoop,
        *,
        volatile: bool,
        flush_every_bytes: int,
    ) -> None:
        self.number = number
        self.log = partition_log
        self._high_watermark = partition_log.next_offset
        self.pending: Callable[[], None] | None = None
        """Appends the records that this turn of the event loop has gathered; set while there are such records."""
        self.failing: StorageError | None = None
        """Why the last append or flush failed; `None` when it did not."""
        self._ack = ack
        self._volatile = volatile
        self._flusher = flusher
        self._loop = loop
        self._flush_every_bytes = flush_every_bytes
        self._unflushed_bytes = 0
        self._flush_requested = False
        self._waiting: deque[tuple[int, Receipt]] = deque()
        self._deferred: deque[RecordBatch] = deque()
        self._deferred_count = 0
        self._deferred_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._watchers: list[tuple[int, int, Callable[[], None]]] = []
        self._watch_count = 0
        self._closed = False

    @property
    def next_offset(self) -> int:
        """The offset that the next record gets; gathered records are appended first."""
        if self.pending is not None:
            self.pending()
        return self.log.next_offset + self._deferred_count

    @property
    def high_watermark(self) -> int:
        """The offset up to which readers see; gathered records are appended first, so that all see the same end."""
        if self.pending is not None:
            self.pending()
        return self._high_watermark

    def step_back(self) -> None:
        """Hide from readers what the log has lost."""
        self._high_watermark = min(self._high_watermark, self.log.next_offset)
        self._wake_beyond(self._high_watermark)

    def set_ack(self, ack: Ack) -> None:
        """Answer the publishers that come from now on at another level."""
        if self.pending is not None:
            self.pending()
        self._write_deferred()
        self._ack = ack

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: RecordBatch) -> Receipt:
        """Append a batch whose base offset is `next_offset`; the receipt is done when the ack level is reached.

        Raises:
            StorageError: nothing was appended.
        """
        if self._closed:
            raise TopicClosedError("the topic was removed or the server stops")
        if self._ack == "accepted":
            return self._accept(batch)
        if self._deferred:  # accepted before the level changed: they go first, for their offsets are given
            self._write_deferred()
            if self._deferred:
                raise self.failing or StorageError("accepted records wait to be written")
        return self._write(batch)

    def _write(self, batch: RecordBatch) -> Receipt:
        try:
            base_offset = self.log.append(batch)
        except StorageError as error:
            self._note_failure(error)
            raise
        self.failing = None
        receipt = Receipt(self.number, base_offset, batch.count)
        # Behind records that wait for a flush nobody reads earlier, even if the level was lowered meanwhile.
        if (self._ack == "flushed" or self._waiting) and not self._volatile:
            self._waiting.append((base_offset + batch.count, receipt))
            self._request_flush()
            return receipt
        self._unflushed_bytes += len(batch.data)
        if self._unflushed_bytes >= self._flush_every_bytes and not self._volatile:
            self._request_flush()  # so that a start after a kill has little to read
        self._advance(base_offset + batch.count)
        receipt.resolve()
        return receipt

    def _note_failure(self, error: StorageError) -> None:
        self.failing = error
        if not isinstance(error, DiskFullError):
            self._request_flush()  # which puts things right where they can be

    def _accept(self, batch: RecordBatch) -> Receipt:
        """Write a batch; what the disk refuses waits in memory."""
        if self._deferred_bytes + len(batch.data) > DEFERRED_BYTES_MAX:
            self._write_deferred()
            if self._deferred:
                raise self.failing or StorageError("too much waits to be written")
        self._deferred.append(batch)
        self._deferred_count += batch.count
        self._deferred_bytes += len(batch.data)
        self._write_deferred()
        receipt = Receipt(self.number, batch.base_offset, batch.count)
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
            self.failing = None
            self._deferred.popleft()
            self._deferred_count -= batch.count
            self._deferred_bytes -= len(batch.data)
            self._unflushed_bytes += len(batch.data)
            if not self._waiting:  # else they become visible with the flush that those wait for
                self._advance(base_offset + batch.count)
        if self._unflushed_bytes >= self._flush_every_bytes:
            self._request_flush()

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

    def _request_flush(self) -> None:
        if not self._flush_requested and not self._closed:
            self._flush_requested = True
            self._flusher.request(self)

    def flush_log(self) -> int:
        """Make the log durable (in the flusher's thread); after a failed flush, put things right first."""
        self._flush_requested = False  # what is appended from here on asks again
        if self._closed:
            return self.log.next_offset
        if self.log.failed:
            self.log.recover_flush()
        try:
            return self.log.flush()
        except StorageError:
            if self._closed:
                raise
            self.log.recover_flush()
            raise

    def flushed(self, durable_offset: int, error: StorageError | None) -> None:
        """Record a flush: answer the publishers that it covers, and let readers see."""
        if self._closed:
            return
        waiting = self._waiting
        if error is not None:
            self.failing = error
            while waiting:
                waiting.popleft()[1].resolve(error)
            # What the disk did not give back is gone, and its offsets are given again.
            self.step_back()
            return
        self.failing = None
        self._unflushed_bytes = 0
        self._advance(min(durable_offset, self.log.next_offset))
        while waiting and waiting[0][0] <= durable_offset:
            waiting.popleft()[1].resolve()
        if not waiting and self._ack != "flushed":
            self._advance(self.log.next_offset)  # what was written behind those that waited, at a lower level

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return stored records from `offset` on that readers may see, as many as fit; see `PartitionLog.read`.

        `end_offset` bounds them from above (excluded).

        Raises:
            OffsetOutOfRangeError: `offset` is below the first one or above the high watermark.
            CorruptRecordError: the record there is damaged.
        """
        high_watermark = self.high_watermark
        if offset > high_watermark:
            raise OffsetOutOfRangeError(offset, self.log.first_offset, high_watermark)
        end = high_watermark if end_offset is None else min(end_offset, high_watermark)
        return self.log.read(offset, bytes_max, end)

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first visible record whose timestamp (ms) is `timestamp` or later, or `None`."""
        high_watermark = self.high_watermark
        offset = self.log.find_time(timestamp)
        return offset if offset is not None and offset < high_watermark else None

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
        """Let those look who wait for an offset that is beyond the end now: their place is gone."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if watcher[0] > high_watermark:
                watcher[2]()
            else:
                heappush(self._watchers, watcher)

    def close(self, error: StorageError | None = None) -> None:
        """Give the log back, flushed if the disk allows; who still waits is answered, with `error` if there is one."""
        if self._closed:
            return
        self._write_deferred()
        self._cancel_retry()
        if self._deferred:
            log.error("%d accepted records are lost: the disk refused them until the end", self._deferred_count)
        self._closed = True
        try:
            self.log.flush()
        except (StorageError, OSError) as failure:
            error = error or (failure if isinstance(failure, StorageError) else disk_error(failure, "closing a log"))
            log.error("closing a partition: %s", failure)
        try:
            self.log.close()
        except (StorageError, OSError) as failure:  # a full disk: the records are safe, the next start reads more
            log.warning("closing a partition: %s", failure)
        while self._waiting:
            self._waiting.popleft()[1].resolve(error)
        watchers, self._watchers = self._watchers, []
        for _, _, callback in watchers:
            callback()
