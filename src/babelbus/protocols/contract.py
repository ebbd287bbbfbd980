"""The shape that every stream protocol has: bytes in, a session between, one write out."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from babelbus.core.receipt import Promise
from babelbus.errors import BabelbusError
from babelbus.listening.certificates import PeerCertificate
from babelbus.wire.contract import Continuation as Continuation
from babelbus.wire.contract import Session as Session

LOST_RIGHT = "it lost a right while it did not take what was sent"
ANSWER_BYTES = 256
"""Weight of a waiting answer beside its bytes: small answers count too while a slow disk holds them back."""


Encode = Callable[[], bytes | bytearray]


class Sender(Protocol):
    """The way of answers: an `Outbox`, or a wrapper that transforms the bytes of its answers."""

    @property
    def bytes_max(self) -> int:
        """The bound of what waits."""

    @property
    def size_bytes(self) -> int:
        """Weight of the answers that wait."""

    @property
    def is_stuck(self) -> bool:
        """See `Outbox.is_stuck`."""

    def answer(self, encode: Encode, weight: int = 0) -> None:
        """Send what `encode` returns, behind all answers that were promised before."""

    def answer_when(self, promises: Sequence[Promise], encode: Encode, weight: int = 0) -> None:
        """Send what `encode` returns once all promises are done, behind all answers that were promised before."""


class Transport(Protocol):
    """The part of a socket that an outbox needs."""

    def write(self, data: bytes | bytearray) -> None:
        """Send, or keep until the peer takes it."""

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the peer has not taken yet."""


def _ignore() -> None:
    return


def _takes_all() -> bool:
    return False


def _unbounded() -> int:
    return sys.maxsize


class Answer:
    """One answer's place in the order of an outbox."""

    __slots__ = ("encode", "left", "outbox", "weight")

    def __init__(self, outbox: "Outbox", encode: Encode, left: int, weight: int) -> None:
        self.outbox = outbox
        self.encode = encode
        self.left = left
        self.weight = weight

    def arrive(self, _promise: Promise) -> None:
        """Count one of the promises as done."""
        self.left -= 1
        if not self.left:
            self.outbox.push()


class Outbox:
    """The answers of one connection, in the order of its requests, with one write for all that are ready.

    `bytes_max` bounds what waits: answers that are not ready yet by the `weight` they were given, and those that the
    peer does not take. Above it `full` is true: the session puts its work off, and the connection stops reading.
    """

    def __init__(self, transport: Transport, bytes_max: int) -> None:
        self._transport = transport
        self._answers: deque[Answer] = deque()
        self._weight = 0
        self.holding = False
        """While set, what becomes ready is collected until `release`, so that one chunk's answers are one write."""
        self.bytes_max = bytes_max
        self.closed = False
        self.sent_bytes = 0
        """Bytes that the transport was given so far."""
        self.on_drained: Callable[[], None] = _ignore
        """Called when answers were written while it was not `holding`."""
        self.room_bytes: Callable[[], int] = _unbounded
        """Returns how long a message may become that the peer sent compressed."""
        self.is_blocked: Callable[[], bool] = _takes_all
        """Returns whether the peer does not take what was written."""
        self.on_sent: Callable[[int], None] | None = None
        """Called with the number of bytes of each write, if the reader has a quota."""
        self.on_answered: Callable[[], None] | None = None
        """Called behind each write of answers, if the loop polls for the next request."""
        self.resting = False
        """Whether the reader has used up its quota: no more should be asked for now."""
        self.peer = ""
        """The address of the client, as people write it."""
        self.peer_certificate: PeerCertificate | None = None
        """The certificate that the client showed in its TLS handshake."""

    @property
    def full(self) -> bool:
        """Whether no more should be asked of this connection for now."""
        waiting = 0 if self.closed else self._weight + self._transport.get_write_buffer_size()
        return self.resting or waiting >= self.bytes_max

    @property
    def size_bytes(self) -> int:
        """Weight of the answers that are not ready, and bytes that the peer has not taken."""
        return 0 if self.closed else self._weight + self._transport.get_write_buffer_size()

    @property
    def waiting(self) -> int:
        """Answers that are not written yet."""
        return len(self._answers)

    @property
    def is_stuck(self) -> bool:
        """Whether bytes wait behind earlier answers, or because the peer reads too slowly.

        They are one stream, encrypted perhaps: what is in them cannot be taken out again.
        """
        return not self.closed and (self.is_blocked() or any(not answer.left for answer in self._answers))

    def release(self) -> None:
        """Write what became ready."""
        self.holding = False
        if self._answers and not self._answers[0].left:
            self._drain()

    def answer(self, encode: Encode, weight: int = 0) -> None:
        """Send what `encode` gives, behind all answers that were promised before."""
        weight += ANSWER_BYTES
        self._answers.append(Answer(self, encode, 0, weight))
        self._weight += weight
        if not self.holding:
            self._drain()

    def answer_when(self, promises: Sequence[Promise], encode: Encode, weight: int = 0) -> None:
        """Send what `encode` gives once all promises are done, behind all answers that were promised before.

        `encode` is called when its turn to be written has come, not earlier.
        """
        weight += ANSWER_BYTES
        answer = Answer(self, encode, len(promises), weight)
        self._answers.append(answer)
        self._weight += weight
        for promise in promises:
            promise.when_done(answer.arrive)
        if not promises and not self.holding:
            self._drain()

    def send(self, data: bytes | bytearray) -> None:
        """Send bytes now, whatever waits: not for answers, which have an order."""
        if not self.closed:
            self._transport.write(data)
            self.sent_bytes += len(data)
            if self.on_sent is not None:
                self.on_sent(len(data))

    def count_sent(self, size_bytes: int) -> None:
        """Count bytes of answers that go to the client another way."""
        if not self.closed:
            self.sent_bytes += size_bytes
            if self.on_sent is not None:
                self.on_sent(size_bytes)
            if self.on_answered is not None:
                self.on_answered()

    def push(self) -> None:
        """Write what became ready, unless it is collected."""
        if not self.holding:
            self._drain()
            self.on_drained()

    def _drain(self) -> None:
        answers = self._answers
        ready: list[bytes | bytearray] = []
        while answers and not answers[0].left:
            answer = answers.popleft()
            self._weight -= answer.weight
            if not self.closed:
                ready.append(answer.encode())
        if ready:
            data = ready[0] if len(ready) == 1 else b"".join(ready)
            self._transport.write(data)
            self.sent_bytes += len(data)
            if self.on_sent is not None:
                self.on_sent(len(data))
            if self.on_answered is not None:
                self.on_answered()

    def close(self) -> None:
        """Send nothing more: the peer is gone."""
        self.closed = True
        self.resting = False  # nobody waits for a quota any more, and what was put off is done now
        self.on_drained = _ignore  # else outbox and connection hold each other
        self.on_sent = self.on_answered = None
        self.room_bytes = _unbounded
        self.is_blocked = _takes_all
        self._answers.clear()
        self._weight = 0


@contextmanager
def closed_if_refused(close: Callable[[], None]) -> Iterator[None]:
    """Close a session that cannot go on: by then it has a part of what it had at another server."""
    try:
        yield
    except BabelbusError:
        close()
        raise
