"""The event: what moves over the bus."""

import msgspec

from babelbus.records.record import Headers, Record, RecordBatch

__all__ = ["Event", "Headers", "Record", "RecordBatch"]


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
