"""The process that searches: it does the tasks of one server, one after the other, and ends when the server does."""

import contextlib
import os
import signal
import socket
import sys
import time
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

from babelbus.clock import Clock, SystemClock
from babelbus.core.access.root import root_of
from babelbus.records.fields import offset_of, timestamp_of
from babelbus.records.format import RECORD_BYTES_MIN, CorruptRecordError
from babelbus.units import KIB, MIB
from babelbus.web.search.matching import Filter
from babelbus.web.search.scan import Scanned, may_match, scan
from babelbus.web.search.tasks import LENGTH, TASK_SECONDS, Outcome, Task, decode_task, encode, frame

PIECE_BYTES = 16 * KIB
"""A thread that waits for the processor gets it at the next system call, if not before; a piece is some 70 microseconds
of work at most. With pieces of 64 KiB it is four times that, and a record costs a sixth less."""
WORK_SECONDS, REST_SECONDS = 200e-6, 50e-6
"""A stretch of work, and the sleep after it, to which Linux adds some fifty microseconds."""
PASSED_BYTES_MAX = MIB
"""A larger block has large records, and to go through them costs little."""
RECORD_BYTES_MAX = 256 * MIB
"""A longer run of bytes without a whole record is damage."""
NICENESS = 10
LATE_SECONDS = 0.01
"""A rest that takes longer says that others want the processor all the time."""
RESTS_TO_IDLE = 1_000
"""So many rests in a row, none of them late, take a quarter of a second."""
CALM_SECONDS = 10.0
"""So long rests of an earlier task count: on a busy machine an idle thread takes seconds to notice."""


@lru_cache(16)
def compiled(text: str, topic: str, root: str) -> Filter:
    """Return a filter; several tasks are about the same one."""
    return Filter(text, topic, root_of(root) if root else None)


class BusyError(Exception):
    """The machine is busy: an idle thread would get next to nothing of it."""


class Pace:
    """The rests of the thread that works; they say whether the machine is calm, so that an idle thread comes on."""

    def __init__(self, clock: Clock, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock = clock
        self._sleep = sleep
        self._begun = clock.monotonic()
        self._prompt = 0
        """Rests since the last one that was late."""
        self.is_idle = False
        """Whether an idle thread works."""

    @property
    def is_calm(self) -> bool:
        """Whether the last rests were prompt."""
        return self._prompt >= RESTS_TO_IDLE

    def begin(self) -> None:
        """Begin a task: rests of long ago say nothing."""
        if self._clock.monotonic() - self._begun > CALM_SECONDS:
            self._prompt = 0

    def rest(self) -> None:
        """Wait a moment if the stretch of work is over.

        Raises:
            BusyError: an idle thread waited for long.
        """
        now = self._clock.monotonic()
        if now - self._begun < WORK_SECONDS:
            return
        self._sleep(REST_SECONDS)
        self._begun = self._clock.monotonic()
        if self._begun - now < LATE_SECONDS:
            self._prompt += 1
        else:
            self._prompt = 0
            if self.is_idle:
                raise BusyError


class Worker:
    """The two threads that search, of which one works at a time.

    Linux stops an idle thread at once for a thread of the same session or control group, such as the server's. Others
    wait for the end of a slice, about four milliseconds, or until this process sleeps. On a machine that is busy all
    the time a nice thread takes over. There are two threads, since few processes have the right to end being idle.
    """

    def __init__(self, clock: Clock, pace: Pace) -> None:
        self._clock = clock
        self._pace = pace
        self._idle = idle_thread()

    def do(self, task: Task, file: int) -> Outcome:
        """Return the outcome of a task."""
        pace = self._pace
        pace.begin()
        if pace.is_calm:
            pace.is_idle = True
            try:
                return self._idle.submit(do, task, file, self._clock, pace).result()
            except BusyError:
                pass  # a task can be done again
            finally:
                pace.is_idle = False
        return do(task, file, self._clock, pace)


def do(task: Task, file: int, clock: Clock, pace: Pace) -> Outcome:
    """Return the outcome of a task."""
    wanted = compiled(task.filter, task.topic, task.root)
    data = task.data
    try:
        if data is not None:
            return _search(task, wanted, pace, lambda size, position: data[position : position + size], lambda: False)
        deadline = clock.monotonic() + task.seconds
        read = partial(os.pread, file)
        return _search(task, wanted, pace, read, lambda: clock.monotonic() >= deadline)
    except CorruptRecordError as error:
        return Outcome([], task.position, task.offset, 0, 0, error.reason)


def _search(
    task: Task, wanted: Filter, pace: Pace, read: Callable[[int, int], bytes], is_over: Callable[[], bool]
) -> Outcome:
    position, offset, hits = task.position, task.offset, list[int]()
    records, time_ms, size = 0, 0, PIECE_BYTES
    blocks = task.blocks
    while position < task.end and offset < task.end_offset and len(hits) < task.count:
        following = bisect_right(blocks, position)
        stop = blocks[following] if following < len(blocks) else task.end
        is_block = 0 < following < len(blocks) and blocks[following - 1] == position and size == PIECE_BYTES
        found = _pass(task, wanted, pace, read, position, stop, offset) if is_block else None
        if found is None:
            data = read(min(size, stop - position), position)
            if position > task.position:
                _check_offset(data, offset)
            found = scan(data, wanted, offset, task.end_offset, task.count - len(hits))
            pace.rest()
            if not found.size_bytes:
                if found.next_offset == offset and (size > RECORD_BYTES_MAX or position + len(data) >= stop):
                    return Outcome(hits, position, offset, records, time_ms, "the bytes there are no records")
                size *= 4
                continue
        hits += found.hits
        records += found.records
        position += found.size_bytes
        offset, time_ms, size = found.next_offset, found.time_ms or time_ms, PIECE_BYTES
        if is_over():
            break
    if task.position < position < task.end:  # the next task begins at `offset`, so it would not notice
        _check_offset(read(RECORD_BYTES_MIN, position), offset)
    return Outcome(hits, position, offset, records, time_ms)


def _check_offset(data: bytes, offset: int) -> None:
    """Check that the record at the beginning of `data` is not below `offset`, which the records before it lead to.

    Raises:
        CorruptRecordError: it is.
    """
    if len(data) >= RECORD_BYTES_MIN and offset_of(data) < offset:
        raise CorruptRecordError(0, "offsets do not rise")


def _pass(
    task: Task, wanted: Filter, pace: Pace, read: Callable[[int, int], bytes], position: int, stop: int, offset: int
) -> Scanned | None:
    """Return how far the search comes by a block without a trace of a match, `None` if its records must be looked at.

    To look for needles alone takes less than half the time: nobody asks where each record begins.
    """
    if wanted.needles is None or stop - position > PASSED_BYTES_MAX:
        return None
    longest = max(len(needle.data) for needle in wanted.needles)
    for start in range(position, stop, PIECE_BYTES):
        data = read(min(PIECE_BYTES + longest, stop - start), start)
        pace.rest()
        if may_match(data, wanted):
            return None
    head, next_head = read(RECORD_BYTES_MIN, position), read(RECORD_BYTES_MIN, stop)
    if min(len(head), len(next_head)) < RECORD_BYTES_MIN:
        return None
    next_offset = offset_of(next_head)
    if not offset + task.block_records <= next_offset <= task.end_offset:
        return None
    return Scanned([], stop - position, task.block_records, next_offset, timestamp_of(head))


def step_back() -> None:
    """Set a low priority: a publisher that wakes up must not wait for a search."""
    with contextlib.suppress(OSError):  # a sandbox may refuse: the rests are left
        os.nice(NICENESS)


def idle_thread() -> ThreadPoolExecutor:
    """Return a thread that works when the processor has nothing else to do, on Linux."""
    return ThreadPoolExecutor(1, initializer=_become_idle)


def _become_idle() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # refused by a sandbox; the C library musl has it not
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(descriptor: int) -> None:
    """Answer tasks until the server closes the connection, or is killed."""
    step_back()
    clock = SystemClock()
    worker = Worker(clock, Pace(clock))
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(ConnectionError):
        while True:
            head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
            head += _receive(connection, LENGTH.size - len(head))
            task = decode_task(_receive(connection, LENGTH.unpack(head)[0]))
            signal.alarm(TASK_SECONDS)  # a server that was killed cannot end the process
            try:
                outcome = worker.do(task, files[0] if files else -1)
            finally:
                signal.alarm(0)
                for file in files:
                    os.close(file)
            connection.sendall(frame(encode(outcome)))


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), MIB))
        if not part:
            sys.exit(0)
        content += part
    return bytes(content)


if __name__ == "__main__":
    main(int(sys.argv[1]))
