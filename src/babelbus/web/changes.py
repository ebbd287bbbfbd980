"""The last changes of a server: topics, groups, dead letters, clients, connections and the table of access, by whom.

They are in memory only; what has to be proved later is in the audit. Topics and the table are noted where they change,
whatever protocol asked. The rest can be changed over the administration API alone, and is noted there.
"""

from collections import deque
from typing import Any, Final

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import Identity
from babelbus.core.broker import Broker

KEPT: Final = 1_000
TEXT_LENGTH_MAX: Final = 300


class Change(msgspec.Struct, frozen=True):
    """One change, with absolute names. `topic` is the topic that a reader has to see; empty: administrators alone."""

    time_ms: int
    kind: str
    text: str
    principal: str
    topic: str


class Changes:
    """The changes since the start, the newest of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.kept: deque[Change] = deque(maxlen=KEPT)

    def note(self, kind: str, text: str, principal: str = "", topic: str = "") -> None:
        """Add a change."""
        self.kept.append(Change(self._clock.now_ms(), kind, text[:TEXT_LENGTH_MAX], principal, topic))

    def watch(self, broker: Broker) -> None:
        """Begin to note the changes of topics and of the table of access."""
        broker.on_topic_edited = self._note_topic
        broker.gate.audit.on_changed = self._note_access

    def _note_topic(self, name: str, what: str, by: Identity) -> None:
        self.note("topic", f"topic {name!r} was {what}", by.name, name)

    def _note_access(self, by: Identity, version: int, before: list[Any], after: list[Any]) -> None:
        count = len(after)
        entries = "1 entry" if count == 1 else f"{count} entries"
        self.note("access", f"the table of access has version {version}: {entries} changed", by.name)
