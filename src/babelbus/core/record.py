"""What moves over the bus: an event, and what its publisher is told."""

import logging
from collections.abc import Callable

import msgspec

from babelbus.errors import BabelbusError
from babelbus.records.record import Headers, Record, RecordBatch

log = logging.getLogger(__name__)

__all__ = ["Event", "Headers", "Receipt", "Record", "RecordBatch"]


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event: everything that happens on the bus is one.

    `timestamp` is milliseconds since the epoch; 0 takes the server's time. A `payload` of `None` removes the key from a
    compacted topic. `via` is the shared receiver (`router.py`) that has handed the event to its own members already.
    """

    subject: str
    payload: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int = 0
    via: object = None


class Receipt:
    """What becomes of one batch that was published; one object for the whole batch.

    It is done when the topic's ack level is reached or an error says that it will not be: then `error` is set.
    """

    __slots__ = ("_callbacks", "base_offset", "count", "done", "error", "partition")

    def __init__(self, partition: int, base_offset: int, count: int) -> None:
        self.partition = partition
        self.base_offset = base_offset
        self.count = count
        self.done = False
        self.error: BabelbusError | None = None
        self._callbacks: list[Callable[[Receipt], None]] = []

    @classmethod
    def refused(cls, error: BabelbusError) -> "Receipt":
        """Return the receipt of a batch that was not stored."""
        receipt = cls(-1, -1, 0)
        receipt.resolve(error)
        return receipt

    def when_done(self, callback: Callable[["Receipt"], None]) -> None:
        """Call back once it is done, at once if it is."""
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def resolve(self, error: BabelbusError | None = None) -> None:
        """Say that it is done (for the partition)."""
        if self.done:
            return
        self.done = True
        self.error = error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # one publisher's bug must not cost the others of the same flush their answers
                log.exception("answering a publisher failed")
