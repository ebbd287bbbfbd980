"""The watch of the event loop: it measures, and names the call that holds the loop."""

import asyncio
import sys
import threading
from traceback import walk_stack
from types import FrameType

import pytest

from babelbus.clock import SystemClock
from babelbus.metrics import Metrics
from babelbus.server.loop_watch import HELD_SECONDS, LoopWatch
from tests.support.bus import SAFETY_NET_SECONDS, in_loop


def samples(metrics: Metrics, name: str) -> float:
    value = metrics.registry.get_sample_value(f"babelbus_loop_lag_seconds_{name}")
    assert value is not None
    return value


@in_loop
async def test_a_loop_that_turns_is_measured() -> None:
    metrics = Metrics()
    watch = LoopWatch(metrics, SystemClock())
    watch.start()
    while not samples(metrics, "count"):  # noqa: ASYNC110  # the watch has no event of its own
        await asyncio.sleep(0)
    watch.stop()


@in_loop
async def test_the_call_that_holds_the_loop_is_named_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    watch = LoopWatch(metrics, SystemClock())
    looked, real = threading.Event(), sys._current_frames

    def look() -> dict[int, FrameType]:
        frames = real()
        if any(frame.f_code is read_a_slow_disk.__code__ for frame, _ in walk_stack(frames[holder])):
            looked.set()
        return frames

    def read_a_slow_disk() -> None:
        assert looked.wait(SAFETY_NET_SECONDS)

    holder = threading.get_ident()

    monkeypatch.setattr(sys, "_current_frames", look)
    watch.start()
    read_a_slow_disk()
    # A starved machine may have held the loop elsewhere, too.
    while not (lines := [line for line in caplog.messages if "read_a_slow_disk" in line]):  # noqa: ASYNC110
        await asyncio.sleep(0)
    watch.stop()
    (line,) = lines
    assert line.startswith("the event loop was held for ")
    assert "test_loop_watch.py" in line
    assert samples(metrics, "sum") >= HELD_SECONDS


def test_the_end_of_the_loop_ends_the_watch() -> None:
    metrics = Metrics()
    watch = LoopWatch(metrics, SystemClock())

    async def run() -> None:
        watch.start()

    asyncio.run(run())
    assert watch.look() is False
