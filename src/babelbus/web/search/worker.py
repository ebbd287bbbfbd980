"""The process that searches: it does the tasks of one server, one after the other, and ends when the server does."""

import contextlib
import os
import signal
import socket
import sys
from functools import lru_cache
from pathlib import Path

from babelbus.clock import SystemClock
from babelbus.core.access.root import root_of
from babelbus.records.format import CorruptRecordError
from babelbus.units import MIB
from babelbus.web.search.matching import Filter
from babelbus.web.search.scan import scan
from babelbus.web.search.tasks import LENGTH, TASK_SECONDS, Outcome, Task, decode_task, encode, frame

BLOCK_BYTES = MIB // 16
"""Linux lets a publisher that wakes up run at the next system call of this process: with blocks of 1 MiB its p99 beside
a search was half as long again, and the search is no faster."""
RECORD_BYTES_MAX = 256 * MIB
"""A longer run of bytes without a whole record is damage."""
NICENESS = 19
AUTOGROUP = Path("/proc/self/autogroup")


@lru_cache(16)
def compiled(text: str, topic: str, root: str) -> Filter:
    """Return a filter; several tasks are about the same one."""
    return Filter(text, topic, root_of(root) if root else None)


def do(task: Task, file: int, clock: SystemClock) -> Outcome:
    """Return the outcome of a task."""
    wanted = compiled(task.filter, task.topic, task.root)
    try:
        if task.data is not None:
            found = scan(task.data, wanted, task.offset, task.end_offset, task.count)
            return Outcome(found.hits, found.size_bytes, found.next_offset, found.records, found.time_ms)
        return _search_file(task, file, wanted, clock)
    except CorruptRecordError as error:
        return Outcome([], task.position, task.offset, 0, 0, error.reason)


def _search_file(task: Task, file: int, wanted: Filter, clock: SystemClock) -> Outcome:
    position, offset, hits = task.position, task.offset, list[int]()
    records, time_ms, size = 0, 0, BLOCK_BYTES
    deadline = clock.monotonic() + task.seconds
    while position < task.end and offset < task.end_offset and len(hits) < task.count:
        data = os.pread(file, min(size, task.end - position), position)
        found = scan(data, wanted, offset, task.end_offset, task.count - len(hits))
        if not found.size_bytes:
            if found.next_offset == offset and (size > RECORD_BYTES_MAX or position + len(data) >= task.end):
                return Outcome(hits, position, offset, records, time_ms, "the bytes there are no records")
            size *= 4
            continue
        hits += found.hits
        records += found.records
        position += found.size_bytes
        offset, time_ms, size = found.next_offset, found.time_ms or time_ms, BLOCK_BYTES
        if clock.monotonic() >= deadline:
            break
    return Outcome(hits, position, offset, records, time_ms)


def step_back() -> None:
    """Set the lowest priority: a publisher that wakes up must not wait for a search."""
    os.nice(NICENESS)
    # Where Linux groups processes by session, niceness counts inside of a session alone; that of the session counts.
    with contextlib.suppress(OSError):
        AUTOGROUP.write_text(f"{NICENESS}\n")


def main(descriptor: int) -> None:
    """Answer tasks until the server closes the connection."""
    step_back()
    clock = SystemClock()
    with socket.socket(fileno=descriptor) as connection:
        while True:
            head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
            head += _receive(connection, LENGTH.size - len(head))
            task = decode_task(_receive(connection, LENGTH.unpack(head)[0]))
            signal.alarm(TASK_SECONDS)  # a server that was killed cannot end the process
            try:
                outcome = do(task, files[0] if files else -1, clock)
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
