"""What clients of a cluster did and saw, event by event, with one clock; kept as JSON lines.

Values are unique: each publisher numbers what it sends and sends no number twice. An answer that did not come, or an
error, is `unknown`: the record may be there or not.
"""

import gzip
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal[
    "sent", "acked", "unknown",  # a record: `value` to `topic`; an ack may say where it is
    "joined", "got", "left",  # a consumer's session, what it was handed, and the end of the session
    "read",  # the audit at the end: what `who` reads at each offset
    "end",  # where a reader was told that a partition ends; it asked at `begun`
    "set", "set_acked", "set_unknown",  # a key of the state, whose values count upwards and have one writer
    "found",  # the value of a key (0: none), asked for at `begun`; with a `session`: a subscription brought it
    "stored",  # a value that the log of the state has of a key
    "alive",  # a connection (`session`), subscribed to `topic`, is answered what it asked at `begun`
    "holds", "freed",  # a session has the lock `topic`, and is about to let it go
    "will", "executed",  # the key that a session's will sets; somebody sees that, `number`: how often it was set
    "quiet", "lived",  # a session that is quiet before the fault `value`, and is answered behind it
    "fault", "healed",  # what was done to the cluster
    "due", "done",  # a promise of the round, `value` says which, and that it was kept
]  # fmt: skip
Style = Literal["follow", "group", "queue", "stream", "live"]
"""follow: by offset, nothing twice. group: at least once, acked. queue: acked when sent, so what was on its way may be
lost with a session. stream: the same with a window of bytes. live: while it is there."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a history. `at` and `begun` are seconds of the monotonic clock."""

    at: float
    who: str
    kind: Kind
    topic: str = ""
    value: str = ""
    partition: int = -1
    offset: int = -1
    number: int = 0
    """Of a value of the state."""
    session: int = 0
    style: Style = "live"
    begun: float = 0.0


class History:
    """Collects events of all threads."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._news = threading.Condition()
        self._counts: dict[tuple[str, Kind], int] = {}

    def add(self, who: str, kind: Kind, **more: object) -> None:
        """Add an event that happens now."""
        with self._news:
            self._events.append(Event(time.monotonic(), who, kind, **more))  # type: ignore[arg-type]
            key = (who, kind)
            self._counts[key] = self._counts.get(key, 0) + 1
            self._news.notify_all()

    def count(self, who: str, kind: Kind) -> int:
        """Return how many events of a kind somebody has added."""
        with self._news:
            return self._counts.get((who, kind), 0)

    def wait_for(self, who: str, kind: Kind, count: int, seconds: float) -> bool:
        """Return True when somebody has added so many events of a kind, False if the time passes before."""
        key = (who, kind)
        with self._news:
            return self._news.wait_for(lambda: self._counts.get(key, 0) >= count, seconds)

    def events(self) -> list[Event]:
        """Return all events so far."""
        with self._news:
            return list(self._events)


def write_history(path: Path, events: Sequence[Event]) -> None:
    """Write events as JSON lines, compressed."""
    encode = msgspec.json.encode
    with gzip.open(path, "wb", compresslevel=3) as file:
        file.writelines(encode(event) + b"\n" for event in events)


def read_history(path: Path) -> list[Event]:
    """Read what `write_history` wrote."""
    decoder = msgspec.json.Decoder(Event)
    with gzip.open(path, "rb") as file:
        return [decoder.decode(line) for line in file]
