"""A search over a real log, step by step in this process: blocks, gaps, bounds and damage hide no record from it."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from babelbus.core.access import SERVER
from babelbus.records.format import CorruptRecordError
from babelbus.records.record import Record
from babelbus.storage.contract import Chunk, LogSettings, Shared
from babelbus.storage.disk.log import Log
from babelbus.storage.files import LocalFiles
from babelbus.web.search.routes import Progress, Search
from babelbus.web.search.tasks import Outcome, Task
from babelbus.web.search.worker import Pace, do
from tests.storage.helpers import NOW, append
from tests.support.clock import ManualClock

COMPACTED = LogSettings(segment_bytes=2**17, cleanup="compact")
NEEDLE = 'payload contains "needle"'
STEPS_MAX = 10_000


class Looks:
    """A clock whose time goes on with each look at it."""

    def __init__(self, seconds_each: float) -> None:
        self._seconds_each = seconds_each
        self._seconds = 0.0

    def monotonic(self) -> float:
        self._seconds += self._seconds_each
        return self._seconds


class SearcherHere:
    """In place of the process that searches."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces

    async def run(self, task: Task, file: int | None = None) -> Outcome:
        clock: Any = Looks(task.seconds / self._pieces)
        return do(task, -1 if file is None else file, clock, Pace(ManualClock(NOW), lambda _: None))


class Part:
    """A partition as far as a search asks it."""

    number = 0

    def __init__(self, log: Log, high_watermark: int, *, with_blocks: bool) -> None:
        self.log = log
        self.high_watermark = high_watermark
        self._with_blocks = with_blocks

    async def ask(self, call: Callable[[], Shared | None]) -> Shared | None:
        shared = call()
        return shared if shared is None or self._with_blocks else shared._replace(blocks=())

    async def read(self, offset: int, bytes_max: int, end: int) -> Chunk:
        return self.log.read(offset, bytes_max, end)


class Open:
    """A broker with one topic that anybody may read."""

    name = "t"

    def find_topic(self, name: str) -> "Open":
        return self

    def may_topic(self, *_: object) -> bool:
        return True


def search(
    log: Log,
    text: str,
    start: int = 0,
    end: int | None = None,
    *,
    count: int = 10_000,
    pieces: int = 1_000,
    with_blocks: bool = True,
) -> tuple[list[int], Progress]:
    """Return the offsets that were found, and the last progress."""

    async def run() -> tuple[list[int], Progress]:
        broker: Any = Open()
        part: Any = Part(log, log.next_offset if end is None else end, with_blocks=with_blocks)
        searcher: Any = SearcherHere(pieces)
        one = Search(broker, searcher, ManualClock(NOW), broker, SERVER, text, count, float("inf"))
        found, told = list[int](), list[Progress]()
        async for _, hits, progress in one.run([(part, start)]):
            found += hits
            told.append(progress)
            assert len(told) < STEPS_MAX
        one.close()
        return found, told[-1]

    return asyncio.run(run())


def open_log(folder: Path | str, settings: LogSettings | None = None) -> Log:
    return Log(LocalFiles(), str(folder), settings or LogSettings(segment_bytes=2**17), ManualClock(NOW))


def fill(log: Log, count: int, *, needles: set[int], keys: int = 10_000, large: int = -1) -> None:
    append(
        log,
        [
            Record(
                b"%b %d%b" % (b"needle" if n in needles else b"hay", n, b"." * (2**20 if n == large else n % 40)),
                key=b"%d" % (n % keys),
                timestamp=NOW + n,
            )
            for n in range(log.next_offset, log.next_offset + count)
        ],
    )


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.sampled_from([1, 500, 1_023, 1_024, 2_500]), max_size=4),
    needles=st.sets(st.sampled_from([0, 1, 700, 1_022, 1_023, 1_024, 1_025, 2_047, 2_048, 3_000, 5_000])),
    keys=st.sampled_from([300, 1_500, 10_000]),
    large=st.sampled_from([-1, 900, 1_023, 1_024]),
    bounds=st.tuples(st.floats(0, 1), st.sampled_from([1.0, 0.5, 0.9])),
    pieces=st.sampled_from([1, 3, 1_000]),
    count=st.sampled_from([1, 2, 10_000]),
)
@example([2_500, 2_500], {700, 2_048}, 1_500, 1_024, (0.3, 0.9), 1, 10_000)
@example([1_024, 1_024], {1_023}, 10_000, -1, (0.0, 0.5), 3, 1)
def test_with_and_without_blocks_a_search_of_a_log_finds_and_counts_the_same(
    batches: list[int],
    needles: set[int],
    keys: int,
    large: int,
    bounds: tuple[float, float],
    pieces: int,
    count: int,
) -> None:
    with TemporaryDirectory() as folder:
        log = open_log(folder, COMPACTED)
        for size in batches:
            fill(log, size, needles=needles, keys=keys, large=large)
        log.clean(NOW)
        end = int(log.next_offset * bounds[1])
        start = int(end * bounds[0])
        outcomes = []
        for with_blocks in (False, True):
            found, told = search(log, NEEDLE, start, end, count=count, pieces=pieces, with_blocks=with_blocks)
            outcomes.append((found, told.records, told.offset, told.why))
        assert outcomes[0] == outcomes[1]
        every, told = search(log, "payload exists", start, end)
        assert outcomes[0][0] == [offset for offset in every if offset in needles][:count]
        if outcomes[0][3] == "end":
            assert outcomes[0][1] == told.records == len(every)
        log.close()


def test_bytes_behind_the_last_record_of_a_segment_do_not_hold_a_search_up(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for _ in range(3):
        fill(log, 3_000, needles={5, 8_999})
    log.close()
    segments = sorted(tmp_path.glob("*.log"))
    assert len(segments) > 1
    with segments[0].open("ab") as file:
        file.write(b"garbage" * 10)
    log = open_log(tmp_path)
    found, told = search(log, NEEDLE)
    assert (found, told.records, told.why) == ([5, 8_999], 9_000, "end")
    log.close()


@pytest.mark.parametrize("with_blocks", [True, False])
@pytest.mark.parametrize("number", [7, 1_023, 1_024, 1_025])
@pytest.mark.parametrize("changed", [0, 2_400, 2**40])
def test_a_changed_offset_hides_no_record_beside_it(
    tmp_path: Path, number: int, changed: int, with_blocks: bool
) -> None:
    log = open_log(tmp_path, LogSettings())
    fill(log, 2_500, needles=set(range(2_500)))
    shared = log.share(number)
    assert shared is not None
    os.close(shared.file)
    with next(tmp_path.glob("*.log")).open("r+b") as file:
        file.seek(shared.position)
        file.write(changed.to_bytes(8))
    readable = readable_of(log)
    assert len(readable) > 1_000
    for one in (number - 1, number + 1):
        found, _ = search(log, f'payload contains "needle {one}."', with_blocks=with_blocks)
        assert (one in found) == (one in readable)
    for pieces in (1, 1_000):
        assert search(log, NEEDLE, with_blocks=with_blocks, pieces=pieces)[0] == readable
    log.close()


def readable_of(log: Log) -> list[int]:
    """Return the offsets of the records that readers get."""
    offset, found = 0, list[int]()
    while offset < log.next_offset:
        try:
            chunk = log.read(offset, 2**20)
        except CorruptRecordError:
            offset += 1
            continue
        found += range(chunk.base_offset, chunk.next_offset)
        offset = chunk.next_offset
    return found
