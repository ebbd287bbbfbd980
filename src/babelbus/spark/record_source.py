"""Two ways to the same records: the files of a data folder, and a server. Callers do not know which."""

import os
from collections.abc import Iterator
from typing import Protocol

from babelbus.records.columns import Columns
from babelbus.spark.options import Place
from babelbus.spark.plan import Bounds


class Reach(Protocol):
    """Topics and their records; used by one thread."""

    def topics(self) -> list[str]:
        """Return the names of the topics, sorted."""

    def bounds(self, topic: str, wanted: tuple[int, ...] | None) -> dict[int, Bounds]:
        """Return what the wanted partitions of a topic hold (`None`: all); what lies below their ends is durable.

        A partition that does not exist is left out.

        Raises:
            UnknownTopicError: there is no such topic.
        """

    def find_time(self, topic: str, partition: int, timestamp: int) -> int | None:
        """Return the offset of the first record at or after `timestamp` (ms), `None` without such a record."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Columns]:
        """Yield the records of some offsets (`end` excluded) a few MiB at a time, every byte checked.

        The first and the last chunk may reach beyond both. Offsets that compaction removed are left out.

        Raises:
            OffsetOutOfRangeError: `start` was removed, or there are not so many records.
            CorruptRecordError, RecordsRefusedError: a record is damaged.
        """

    def close(self) -> None:
        """Close connections and files."""


_open: dict[tuple[Place, int], Reach] = {}
"""Spark keeps its Python processes for many tasks and batches: so is a connection. Never across a fork."""


def open_reach(place: Place) -> Reach:
    """Return this process's way to a place; it stays open for the next one who asks.

    Raises:
        BabelbusError: the server is not to be reached, or does not know us.
    """
    at = place, os.getpid()
    found = _open.get(at)
    if found is None:
        found = _open[at] = _make(place)
    return found


def _make(place: Place) -> Reach:
    if place.path:
        from babelbus.spark.folder import FolderReach

        return FolderReach(place.path)
    from babelbus.spark.server import ServerReach

    return ServerReach(place)
