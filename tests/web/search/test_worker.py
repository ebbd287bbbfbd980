"""The work of the process that searches: short stretches, and rests between them."""

import os
from pathlib import Path

from babelbus.clock import ManualClock
from babelbus.records.format import encode_payloads
from babelbus.web.search.tasks import Task
from babelbus.web.search.worker import BLOCK_BYTES, REST_SECONDS, WORK_SECONDS, WORK_SECONDS_MAX, Pace, do
from tests.support.bus import NOW


class Sleeper:
    """A clock that goes on when its process sleeps, for longer than the sleep should take."""

    def __init__(self, late: float = 0.0) -> None:
        self.clock = ManualClock(NOW)
        self.late = late
        self.slept: list[float] = []
        self.pace = Pace(self.clock, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds + self.late)

    def work(self, seconds: float) -> bool:
        """Return whether there was a rest after so much work."""
        count = len(self.slept)
        self.clock.advance(seconds)
        self.pace.rest()
        return len(self.slept) > count


def test_a_stretch_of_work_ends_with_a_rest() -> None:
    sleeper = Sleeper()
    assert [sleeper.work(WORK_SECONDS * 0.6) for _ in range(6)] == [False, True] * 3
    assert sleeper.slept == [REST_SECONDS] * 3


def test_a_long_rest_makes_the_next_stretch_longer_up_to_a_limit() -> None:
    sleeper = Sleeper(late=6 * WORK_SECONDS - REST_SECONDS)
    assert sleeper.work(WORK_SECONDS * 1.01)
    assert not sleeper.work(WORK_SECONDS * 1.01)
    assert sleeper.work(WORK_SECONDS)
    sleeper = Sleeper(late=1.0)
    assert sleeper.work(WORK_SECONDS * 1.01)
    assert sleeper.work(WORK_SECONDS_MAX * 1.01)


def test_records_in_a_file_and_in_a_task_are_searched_in_short_blocks(tmp_path: Path) -> None:
    payloads = [b"%06d" % number + b"x" * 94 for number in range(2_000)]
    data = bytes(encode_payloads(payloads, [NOW] * len(payloads), 0).data)
    (tmp_path / "log").write_bytes(data)
    file = os.open(tmp_path / "log", os.O_RDONLY)
    try:
        for task_data in (data, None):
            sleeper = Sleeper()
            sleeper.pace.rest = lambda s=sleeper: s.slept.append(0.0)  # type: ignore[misc, method-assign]
            task = Task('payload contains "001999"', "t", "", 0, len(data), 0, 2_000, 10, 0.0, task_data)
            outcome = do(task, file, sleeper.clock, sleeper.pace)
            if task_data is None:  # its time is over after one block
                assert (outcome.hits, len(sleeper.slept)) == ([], 1)
                assert 0 < outcome.position <= BLOCK_BYTES
            else:
                assert (outcome.hits, outcome.position, outcome.offset) == ([1_999], len(data), 2_000)
                assert len(sleeper.slept) >= len(data) // BLOCK_BYTES
    finally:
        os.close(file)
