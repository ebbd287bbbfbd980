"""The thread that makes records durable: who is told what, and what the log says of a disk that stays away."""

import asyncio
import logging
import threading

import pytest

from babelbus.core.flusher import FAST_FLUSHES, FAST_SECONDS, Flusher
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.storage.errors import DiskError
from tests.support.bus import NOW, in_loop
from tests.support.clock import ManualClock


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


class Timed(Log):
    """Takes as long as it is told, and notes in which thread."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.seconds = 0.0
        self.threads: list[str] = []

    def flush_log(self) -> int:
        self.threads.append(threading.current_thread().name)
        self._clock.advance(self.seconds)
        return super().flush_log()


def here() -> str:
    return threading.current_thread().name


@in_loop
async def test_a_lone_flush_is_made_in_the_loop_while_flushes_are_fast() -> None:
    clock = ManualClock(NOW)
    flusher = Flusher(asyncio.get_running_loop(), clock, Metrics(), "disk")
    log = Timed(clock)

    async def flush(count: int, seconds: float = FAST_SECONDS / 2) -> list[str]:
        log.seconds, log.threads = seconds, []
        for _ in range(count):
            flusher.request_alone(log, lambda: True)
            await log.told.get()
        return log.threads

    assert await flush(FAST_FLUSHES) == ["flusher-disk"] * FAST_FLUSHES
    assert await flush(3) == [here()] * 3
    assert await flush(1, 2.0) == [here()]  # the price of a disk that stalls: once
    assert await flush(1, 2.0) == ["flusher-disk"]
    assert await flush(FAST_FLUSHES) == ["flusher-disk"] * FAST_FLUSHES
    log._failures.append("away")
    assert await flush(2) == [here(), "flusher-disk"]
    flusher.stop()


@in_loop
async def test_a_flush_that_others_wait_for_is_made_by_the_thread() -> None:
    clock = ManualClock(NOW)
    flusher = Flusher(asyncio.get_running_loop(), clock, Metrics(), "disk")
    log, other = Timed(clock), Timed(clock)
    for _ in range(FAST_FLUSHES):
        flusher.request(log)
        await log.told.get()
    log.threads.clear()
    flusher.request_alone(log, lambda: True)
    flusher.request(other)  # in the same turn of the loop
    await log.told.get()
    await other.told.get()
    flusher.request_alone(log, lambda: False)  # more records came in the same turn
    await log.told.get()
    assert [*log.threads, *other.threads] == ["flusher-disk"] * 3
    flusher.request_alone(log, lambda: True)
    await log.told.get()
    assert log.threads[-1] == here()
    flusher.stop()
