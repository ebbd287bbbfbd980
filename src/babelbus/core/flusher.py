"""Group commit: one thread makes an engine's logs durable; all that came meanwhile is covered by the next flush.

A publisher that waits alone would pay twice for the hand-over to the thread. When the last flushes were all fast, such
a flush is made in the event loop; the first slow flush, wherever it is made, sends all flushes back to the thread. So a
disk that stalls holds the loop once, and a disk that is slow never does.
"""

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.metrics import Metrics

log = logging.getLogger(__name__)

FAST_SECONDS = 0.0005
"""A flush that takes longer is slow. Common SSDs take 0.2 ms; a chunk of records holds the loop longer than 0.5 ms."""
FAST_FLUSHES = 16
"""So many flushes in a row must be fast before a flush is made in the event loop."""


class Flushable(Protocol):
    """A log that can be flushed: a partition."""

    def flush_log(self) -> int:
        """Flush the log, in the flusher's thread; return the offset up to which it is durable."""

    def flushed(self, durable_offset: int, error: StorageError | None) -> None:
        """Handle the outcome of a flush, in the event loop."""


Outcome = tuple[Flushable, int, StorageError | None]


class Flusher:
    """Flushes what is asked for of one engine, one round after the other; each round wakes the event loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, metrics: Metrics, engine: str) -> None:
        self._loop = loop
        self._clock = clock
        self._metrics = metrics
        self._requests: queue.SimpleQueue[Flushable | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"flusher-{engine}", daemon=True)
        self._said: weakref.WeakKeyDictionary[Flushable, str] = weakref.WeakKeyDictionary()
        """The failures that were logged; of the thread alone."""
        self.begun_at: float | None = None
        """When the flush that is under way began (monotonic), or `None`: health looks at it."""
        self.last_seconds = 0.0
        """How long the last round took."""
        self._outstanding = 0
        """Requests whose outcome was not told yet; of the event loop alone."""
        self._fast = 0
        """How many of the last flushes were fast, in a row."""
        self._thread.start()

    def request(self, partition: Flushable) -> None:
        """Begin a flush of all appended records; `flushed` reports the outcome. Costs about 2 us."""
        self._outstanding += 1
        self._requests.put(partition)

    def request_alone(self, partition: Flushable, is_alone: Callable[[], bool]) -> None:
        """Begin a flush as `request` does, in the event loop if `is_alone` still holds at the end of its turn."""
        if self._outstanding or self._fast < FAST_FLUSHES:
            self.request(partition)
        else:
            self._outstanding = 1
            self._loop.call_soon(self._flush_here, partition, is_alone)

    def _flush_here(self, partition: Flushable, is_alone: Callable[[], bool]) -> None:
        if self._outstanding > 1 or not is_alone():
            self._requests.put(partition)
            return
        begun = self._clock.monotonic()
        _, durable_offset, error = self._flush(partition)
        self._measure(self._clock.monotonic() - begun, failed=error is not None)
        self._outstanding -= 1
        partition.flushed(durable_offset, error)

    def _measure(self, seconds: float, *, failed: bool) -> None:
        self.last_seconds = seconds
        self._fast = 0 if failed or seconds > FAST_SECONDS else self._fast + 1
        self._metrics.flush_seconds.observe(seconds)

    def _run(self) -> None:
        requests = self._requests
        while True:
            asked: dict[Flushable, None] = {}
            count = 0
            item = requests.get()
            while True:
                if item is None:
                    return
                asked[item] = None
                count += 1
                try:
                    item = requests.get_nowait()
                except queue.Empty:
                    break
            begun = self.begun_at = self._clock.monotonic()
            outcomes = [self._flush(partition) for partition in asked]
            failed = any(error is not None for _, _, error in outcomes)
            self._measure(self._clock.monotonic() - begun, failed=failed)
            self.begun_at = None
            try:
                self._loop.call_soon_threadsafe(self._tell, outcomes, count)
            except RuntimeError:  # the loop is closed: nobody is left to be told
                return

    def _flush(self, partition: Flushable) -> Outcome:
        try:
            durable_offset = partition.flush_log()
            if self._said and self._said.pop(partition, None) is not None:
                log.warning("flushes work again")
            return partition, durable_offset, None
        except StorageError as error:
            self._metrics.flush_failures_total.inc()
            # Not each time: a partition tries again every second, for as long as its disk or database is away.
            if self._said.get(partition) != str(error):
                self._said[partition] = str(error)
                log.error("flush failed, trying again: %s", error)
            return partition, -1, error
        except Exception as error:  # a bug must not leave publishers without an answer for ever
            log.exception("flush failed")
            return partition, -1, StorageError(f"internal error in a flush: {error}")

    def _tell(self, outcomes: list[Outcome], count: int) -> None:
        self._outstanding -= count
        for partition, durable_offset, error in outcomes:
            partition.flushed(durable_offset, error)

    async def call(self, work: Callable[[], int], tell: Callable[[int, StorageError | None], None]) -> int:
        """Return what `work` gives in the flusher's thread, behind the flushes that were asked for before.

        `tell` hears of the outcome before this returns, as `Flushable.flushed` does.

        Raises:
            StorageError: what `work` raises.
        """
        call = _Call(work, tell, self._loop.create_future())
        self.request(call)
        return await call.future

    def stop(self) -> None:
        """End the thread after the round that is under way."""
        self._requests.put(None)
        self._thread.join()


class _Call:
    """A `Flushable` that does one thing."""

    __slots__ = ("__weakref__", "_tell", "_work", "future")

    def __init__(
        self,
        work: Callable[[], int],
        tell: Callable[[int, StorageError | None], None],
        future: "asyncio.Future[int]",
    ) -> None:
        self._work = work
        self._tell = tell
        self.future = future

    def flush_log(self) -> int:
        return self._work()

    def flushed(self, durable_offset: int, error: StorageError | None) -> None:
        self._tell(durable_offset, error)
        if self.future.done():  # the server stops
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(durable_offset)
