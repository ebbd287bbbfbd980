"""The thread that makes records durable: who is told what, and what the log says of a disk that stays away."""

import asyncio
import logging

import pytest

from babelbus.clock import ManualClock
from babelbus.core.flusher import Flusher
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.storage.errors import DiskError
from tests.support.bus import NOW, in_loop


class Log:
    """What is to be flushed: fails with the words that are left, then works."""

    def __init__(self, *failures: str) -> None:
        self._failures = list(failures)
        self.told: asyncio.Queue[tuple[int, StorageError | None]] = asyncio.Queue()

    def flush_log(self) -> int:
        if self._failures:
            raise DiskError(self._failures.pop(0))
        return 7

    def flushed(self, durable_offset: int, error: StorageError | None) -> None:
        self.told.put_nowait((durable_offset, error))


@in_loop
async def test_a_failure_is_logged_once_until_it_works_again_or_fails_in_another_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    flusher = Flusher(asyncio.get_running_loop(), ManualClock(NOW), Metrics(), "disk")
    log = Log("away", "away", "away", "full", "full")
    errors = []
    for _ in range(6):
        flusher.request(log)
        offset, error = await log.told.get()
        errors.append(str(error))
    assert errors == ["away", "away", "away", "full", "full", "None"]
    assert offset == 7
    log._failures.append("away")
    flusher.request(log)
    await log.told.get()
    flusher.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "flush failed, trying again: away",
        "flush failed, trying again: full",
        "flushes work again",
        "flush failed, trying again: away",
    ]
