"""The information about a group and its cursors, and the stored form of a cursor."""

import msgspec

from babelbus.core.groups.in_flight import Counts
from babelbus.core.groups.partition_cursor import PartitionCursor
from babelbus.core.groups.settings import GroupSettings, Place

SPANS_MAX = 4096
"""How many ranges of out-of-order acks are kept over a restart, for each partition; what lies behind comes again."""


class CursorInfo(msgspec.Struct, frozen=True):
    """The place of a group in one partition."""

    partition: int
    position: int
    """The offset that is handed out next."""
    committed: int
    """All records below this offset are done."""
    end: int
    """The high watermark."""
    lag: int
    """Offsets that are not done."""
    in_flight: int
    """Records that were handed out, or are held back behind those, and are not done."""


class GroupInfo(msgspec.Struct, frozen=True):
    """The settings and figures of a group."""

    topic: str
    name: str
    settings: GroupSettings
    paused: bool
    created_ms: int
    members: int
    lag: int
    in_flight: int
    cursors: tuple[CursorInfo, ...] = msgspec.field(name="lanes")
    counts: Counts


class StoredCursor(msgspec.Struct, frozen=True, array_like=True):
    """The stored form of a cursor: records below `committed` and in `done` ([start, end) each) are done."""

    committed: int
    done: list[tuple[int, int]] = []


def cursor_info(cursor: PartitionCursor) -> CursorInfo:
    """Return the place of a cursor."""
    end = cursor.partition.high_watermark
    unfinished = len(cursor.flight.unfinished)
    ahead = sum(span[1] - max(span[0], cursor.position) for span in cursor.done if span[1] > cursor.position)
    first = max(cursor.position, cursor.partition.log.first_offset)
    lag = max(end - first - ahead, 0) + unfinished
    return CursorInfo(cursor.number, cursor.position, cursor.flight.committed(cursor.position), end, lag, unfinished)


def stored_cursor(cursor: PartitionCursor) -> StoredCursor:
    """Return the stored form of a cursor."""
    spans = cursor.flight.done(cursor.position, SPANS_MAX)
    spans += [(max(start, cursor.position), end) for start, end in cursor.done if end > cursor.position]
    return StoredCursor(cursor.flight.committed(cursor.position), spans[:SPANS_MAX])


def resolve(place: Place, cursor: PartitionCursor) -> int:
    """Return the offset that a place is in one partition."""
    partition = cursor.partition
    if place.at == "beginning":
        return partition.log.first_offset
    if place.at == "offset":
        return place.offsets.get(partition.number, place.value)
    return partition.high_watermark
