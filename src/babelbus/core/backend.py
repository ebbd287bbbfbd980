"""One engine as the broker runs it: its store, the thread that makes it durable, the threads that read from it.

No engine shares a thread with another one, so a database that hangs delays nobody but its own topics.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from babelbus.clock import Clock
from babelbus.core.flusher import Flusher
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.storage.contract import Store
from babelbus.storage.errors import DiskFullError

log = logging.getLogger(__name__)

READERS = 4
"""Threads that read from one engine: so many cold reads are under way at once."""

T = TypeVar("T")


class Backend:
    """The store of one engine, and its threads."""

    def __init__(
        self, engine: str, store: Store, loop: asyncio.AbstractEventLoop, clock: Clock, metrics: Metrics
    ) -> None:
        self.engine = engine
        self.store = store
        self.fit = store.fit
        self.flusher = Flusher(loop, clock, metrics, engine)
        self._loop = loop
        self._readers = ThreadPoolExecutor(READERS, f"reader-{engine}")
        self.changes = ThreadPoolExecutor(1, f"changes-{engine}")
        """Makes, alters, removes and closes topics."""
        self.failing: StorageError | None = None
        """Why the last append to any of its topics failed; `None` when it did not."""
        self.flush_failing: StorageError | None = None
        """Why the last flush of any of its topics failed; `None` when it did not."""

    def note_failure(self, error: StorageError) -> None:
        """Record a failed append; log the first one that finds the disk full."""
        if isinstance(error, DiskFullError) and not isinstance(self.failing, DiskFullError):
            log.error("engine %s: the disk is full, records are refused: %s; free some room", self.engine, error)
        self.failing = error

    def note_success(self) -> None:
        """Record an append that worked after one that failed."""
        if isinstance(self.failing, DiskFullError):
            log.warning("engine %s: the disk has room again, records are stored", self.engine)
        self.failing = None

    async def ask(self, work: Callable[[], T]) -> T:
        """Return what `work` gives: called at once where a read never waits, otherwise in a reader's thread.

        Raises: what `work` raises.
        """
        if not self.fit.reads_wait:
            return work()
        return await self._loop.run_in_executor(self._readers, work)

    def stop(self) -> None:
        """End the threads after what is under way, and close the store. May take long."""
        self._readers.shutdown(cancel_futures=True)
        self.changes.shutdown()
        self.flusher.stop()
        self.store.close()
