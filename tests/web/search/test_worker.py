"""The work of the process that searches: short stretches, rests between them, and blocks that are passed."""

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.clock import Clock
from babelbus.records.format import encode_payloads
from babelbus.web.search import worker
from babelbus.web.search.tasks import Outcome, Task, encode, frame
from babelbus.web.search.worker import (
    CALM_SECONDS,
    LATE_SECONDS,
    PIECE_BYTES,
    REST_SECONDS,
    RESTS_TO_IDLE,
    WORK_SECONDS,
    Pace,
    Worker,
    do,
)
from tests.support.bus import NOW
from tests.support.clock import ManualClock


class Sleeper:
    """A clock that goes on when its process sleeps, for longer than the sleep should take."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW)
        self.late = 0.0
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


def test_the_machine_is_calm_after_many_prompt_rests_and_busy_after_a_late_one() -> None:
    sleeper = Sleeper()

    def is_calm_after(rests: int) -> bool:
        for _ in range(rests):
            assert sleeper.work(WORK_SECONDS * 1.01)
        return sleeper.pace.is_calm

    assert not is_calm_after(RESTS_TO_IDLE - 1)
    assert is_calm_after(RESTS_TO_IDLE)
    sleeper.late = LATE_SECONDS
    assert not is_calm_after(2)
    sleeper.late = 0.0
    assert not is_calm_after(RESTS_TO_IDLE - 1)
    assert is_calm_after(1)
    sleeper.pace.begin()
    assert sleeper.pace.is_calm
    sleeper.clock.advance(CALM_SECONDS * 1.01)
    sleeper.pace.begin()
    assert not sleeper.pace.is_calm


def test_a_nice_thread_does_the_task_that_the_idle_one_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper, at_work = Sleeper(), list[tuple[int, bool]]()

    def do(task: Task, file: int, clock: Clock, pace: Pace) -> Outcome:
        at_work.append((threading.get_ident(), pace.is_idle))
        sleeper.work(WORK_SECONDS * 1.01)
        return Outcome([], file, 0, 0, 0)

    monkeypatch.setattr(worker, "do", do)
    task = Task("", "t", "", 0, 0, 0, 0, 1, 0.0)
    threads = Worker(sleeper.clock, sleeper.pace)
    for _ in range(RESTS_TO_IDLE + 1):
        assert threads.do(task, 7).position == 7
    sleeper.late = LATE_SECONDS
    assert threads.do(task, 8).position == 8
    here = threading.get_ident()
    assert at_work[:RESTS_TO_IDLE] == [(here, False)] * RESTS_TO_IDLE
    assert [(ident == here, is_idle) for ident, is_idle in at_work[-3:]] == [
        (False, True),
        (False, True),
        (True, False),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="idle threads are a thing of Linux")
def test_without_any_right_one_thread_is_idle_and_one_is_nice() -> None:
    code = (
        "import os; from babelbus.web.search import worker\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "worker.step_back(); idle = worker.idle_thread()\n"
        "policies = [idle.submit(os.sched_getscheduler, 0).result(), os.sched_getscheduler(0)]\n"
        "print(policies == [os.SCHED_IDLE, os.SCHED_OTHER], os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(min(os.nice(0) + 10, 19))]  # the tests may be nice themselves


def test_a_search_works_where_no_priority_may_be_changed() -> None:
    code = (
        "import os; from babelbus.web.search import worker\n"
        "def refuse(*_): raise PermissionError\n"
        "os.nice = os.sched_setscheduler = refuse\n"
        "worker.step_back(); print(worker.idle_thread().submit(int, '7').result())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7"]


@pytest.mark.parametrize("answered", [True, False])
def test_a_process_whose_server_was_killed_ends_without_a_word(answered: bool) -> None:
    ours, theirs = socket.socketpair()
    task = frame(encode(Task('payload = "x"', "t", "", 0, 0, 0, 0, 1, 0.0, b"")))
    with theirs:
        ours.sendall(task)
        if not answered:
            ours.close()
        process = subprocess.Popen(
            [sys.executable, "-m", worker.__name__, str(theirs.fileno())],
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
    if answered:
        select.select([ours], [], [])
        ours.close()  # with the answer unread: that resets the connection
    assert (process.communicate()[1], process.returncode) == (b"", 0)


def test_records_in_a_file_and_in_a_task_are_searched_in_short_pieces(tmp_path: Path) -> None:
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
            if task_data is None:  # its time is over after one piece
                assert (outcome.hits, len(sleeper.slept)) == ([], 1)
                assert 0 < outcome.position <= PIECE_BYTES
            else:
                assert (outcome.hits, outcome.position, outcome.offset) == ([1_999], len(data), 2_000)
                assert len(sleeper.slept) >= len(data) // PIECE_BYTES
    finally:
        os.close(file)


@given(
    sizes=st.lists(st.sampled_from([0, 30, 3_000, 40_000]), min_size=1, max_size=60),
    found=st.sets(st.integers(0, 59)),
    block_records=st.integers(1, 9),
    first=st.integers(0, 59),
    end_offset=st.integers(1, 70),
    count=st.integers(1, 4),
    text=st.sampled_from(['payload contains "needle"', "/id = 12345", 'not payload contains "needle"']),
)
def test_with_known_blocks_a_search_finds_the_same(
    sizes: list[int],
    found: set[int],
    block_records: int,
    first: int,
    end_offset: int,
    count: int,
    text: str,
) -> None:
    payloads = [
        b'{"of":"%b","x":"%b","id":%d}' % (b"needle" if n in found else b"hay", b"x" * size, 12345 if n in found else n)
        for n, size in enumerate(sizes)
    ]
    batch = encode_payloads(payloads, [NOW] * len(payloads), 0)
    data, positions = bytes(batch.data), [int(position) for position in batch.positions]
    first = min(first, len(sizes) - 1)
    end_offset = min(max(end_offset, first + 1), len(sizes))
    blocks = [position for position in positions[::block_records] if position >= positions[first]]
    plain = Task(text, "t", "", positions[first], len(data), first, end_offset, count, 10.0)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        outcomes = []
        for task in (plain, msgspec.structs.replace(plain, blocks=blocks, block_records=block_records)):
            sleeper = Sleeper()
            outcomes.append(do(task, file.fileno(), sleeper.clock, sleeper.pace))
    assert outcomes[0] == outcomes[1]


def test_a_block_without_a_match_is_not_read_record_by_record(tmp_path: Path) -> None:
    payloads = [b"%06d" % number + b"x" * 94 for number in range(4_096)]
    batch = encode_payloads(payloads, [NOW + number for number in range(4_096)], 0)
    data = bytearray(batch.data)
    blocks = [int(position) for position in batch.positions[::1_024]]
    data[blocks[1] + 300 : blocks[1] + 500] = bytes(200)  # nobody looks there
    (tmp_path / "log").write_bytes(data)
    task = Task('payload contains "003500"', "t", "", 0, len(data), 0, 4_096, 1, 10.0, None, blocks, 1_024)
    sleeper = Sleeper()
    with open(tmp_path / "log", "rb") as file:
        outcome = do(task, file.fileno(), sleeper.clock, sleeper.pace)
        assert (outcome.hits, outcome.offset, outcome.records) == ([3_500], 3_501, 3_501)
        outcome = do(msgspec.structs.replace(task, end_offset=3_072), file.fileno(), sleeper.clock, sleeper.pace)
        assert (outcome.hits, outcome.offset, outcome.time_ms) == ([], 3_072, NOW + 2_048)


def test_a_file_that_was_cut_behind_a_block_is_a_fault_and_no_crash(tmp_path: Path) -> None:
    batch = encode_payloads([b"hay"] * 20, [NOW] * 20, 0)
    blocks = [int(position) for position in batch.positions[::10]]
    (tmp_path / "log").write_bytes(bytes(batch.data)[: blocks[1]])
    task = Task('payload contains "needle"', "t", "", 0, len(batch.data), 0, 20, 1, 10.0, None, blocks, 10)
    sleeper = Sleeper()
    with open(tmp_path / "log", "rb") as file:
        outcome = do(task, file.fileno(), sleeper.clock, sleeper.pace)
    assert (outcome.offset, outcome.fault) == (10, "the bytes there are no records")
