"""Prepared requests on several connections at once, sent by one loop.

Every connection sends the same number of chunks, and no connection is more than a few chunks ahead of the slowest. The
server therefore has traffic of all connections under way from the first message to the last, in equal shares.
"""

import select
import socket
import time
from collections.abc import Callable, Sequence

from bench.traffic import Chunks

AHEAD = 2
"""Chunks under way on each connection."""
READ_BYTES = 2**20
SILENCE_SECONDS = 30


class Stream:
    """One connection with its chunks of requests; `count` returns how many answers are in received bytes."""

    def __init__(self, connection: socket.socket, chunks: Chunks, count: Callable[[bytes], int]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.total = sum(size for _, size in chunks)
        self.answered = self.done = self.begun = 0
        self._chunks = chunks
        self._count = count
        self._unsent = memoryview(b"")
        self._ends = [sum(size for _, size in chunks[: at + 1]) for at in range(len(chunks))]

    @property
    def over(self) -> bool:
        return self.answered >= self.total

    def send(self, limit: int) -> bool:
        """Send chunks up to number `limit` as far as the socket takes them; return whether more waits for room."""
        while self._unsent or self.begun < min(limit, len(self._chunks)):
            if not self._unsent:
                self._unsent = memoryview(self._chunks[self.begun][0])
                self.begun += 1
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                return True
        return False

    def receive(self) -> None:
        """Receive once and count the answers."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise RuntimeError(f"the server closed a connection after {self.answered} of {self.total} answers")
        self.answered += self._count(data)
        while self.done < len(self._ends) and self.answered >= self._ends[self.done]:
            self.done += 1


def exchange(streams: Sequence[Stream]) -> float:
    """Send all chunks of all streams, and return the answers a second.

    Raises:
        RuntimeError: the server closed a connection, or sent nothing for 30 seconds.
    """
    poller = select.epoll()
    by_number = {stream.socket.fileno(): stream for stream in streams}
    for number in by_number:
        poller.register(number, select.EPOLLIN)
    begun = time.perf_counter()
    while not all(stream.over for stream in streams):
        limit = min(stream.done for stream in streams) + AHEAD
        for number, stream in by_number.items():
            waits = stream.send(limit)
            poller.modify(number, select.EPOLLIN | (select.EPOLLOUT if waits else 0))
        ready = poller.poll(SILENCE_SECONDS)
        if not ready:
            raise RuntimeError(f"no answer: {[(stream.answered, stream.total) for stream in streams]}")
        for number, events in ready:
            if events & ~select.EPOLLOUT:
                by_number[number].receive()
    seconds = time.perf_counter() - begun
    poller.close()
    return sum(stream.total for stream in streams) / seconds


def count_of(mark: bytes) -> Callable[[bytes], int]:
    """Return a counter of `mark` in bytes that are cut anywhere."""
    rest = b""

    def count(data: bytes) -> int:
        nonlocal rest
        joined = rest + data
        rest = joined[len(joined) - len(mark) + 1 :]
        return joined.count(mark)

    return count
