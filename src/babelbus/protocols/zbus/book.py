"""The entry of an MQ beside its topic: its mask, its creator, and whether it is a ring.

Specification: docs/specifications/zbus.md, 4.6, 5.

One note, written anew when an MQ is made, altered or removed. A topic that is not in it, made by another
protocol, is an MQ all the same: without a mask, kept by its own settings.
"""

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from babelbus.core.broker import Broker
from babelbus.errors import StorageError
from babelbus.storage.files import FileSystem
from babelbus.storage.notes import Note

log = logging.getLogger(__name__)

FILE_NAME = "zbus.json"


class Entry(msgspec.Struct, frozen=True):
    """The entry of one MQ."""

    mask: int = 0
    creator: str = ""
    """`/ip:port` of the connection that made it."""
    created_ms: int = 0
    ring: bool = False
    """Whether only its newest messages are kept (type `memory`)."""
    topic_id: str = ""
    """Of which topic of this name this is said; empty while it is made."""
    owner: str = ""
    """The principal that set the mask, whose rights the mask has; empty while the gate is off."""


UNKNOWN = Entry()


class Book:
    """The entries of all MQs, by name. Changes are written in a thread."""

    def __init__(self, broker: Broker, files: FileSystem, folder: str) -> None:
        advice = "put a copy of the file back, or remove the file: then the masks of MQs are lost, no more"
        self._note = Note(files, f"{folder}/{FILE_NAME}", dict[str, Entry], advice=advice, bare=True)
        self.entries: dict[str, Entry] = {}
        self._writer = broker.writer("the masks of zbus MQs", lambda: partial(self._note.write, dict(self.entries)))

    def open(self, current: Callable[[str, Entry], Entry | None]) -> None:
        """Read what is stored; `current` returns what holds of an entry now, `None` for an entry to be forgotten.

        Raises:
            StorageError: the file cannot be read, or is damaged.
        """
        held = ((mq, current(mq, entry)) for mq, entry in (self._note.read() or {}).items())
        self.entries = {mq: entry for mq, entry in held if entry is not None}

    async def put(self, mq: str, entry: Entry) -> None:
        """Keep an entry, durably.

        Raises:
            StorageError: the disk refused; nothing has changed.
        """
        before = self.entries.get(mq)
        if before == entry:
            return
        self.entries[mq] = entry
        try:
            await self._writer.write().wait()
        except StorageError:
            if self.entries.get(mq) is entry:
                self.entries.pop(mq)
                if before is not None:
                    self.entries[mq] = before
            raise

    async def forget(self, mq: str) -> None:
        """Remove an MQ from the book. A failure is only logged: the next start removes the MQ, too."""
        if self.entries.pop(mq, None) is not None:
            try:
                await self._writer.write().wait()
            except StorageError as error:
                log.warning("a removed MQ is still noted: %s", error)
