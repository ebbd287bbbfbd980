"""What a group tells of its cursors, and what is kept of them."""

import msgspec

from babelbus.core.groups.in_flight import Counts
from babelbus.core.groups.partition_cursor import Lane
from babelbus.core.groups.settings import GroupSettings, Place

SPANS_MAX = 4096
"""How many ranges of out-of-order acks are kept over a restart, for each partition; what lies behind comes again."""


class LaneInfo(msgspec.Struct, frozen=True):
    """Where a group is in one partition."""

    partition: int
    position: int
    """The offset that is handed out next."""
    committed: int
    """Below it all is done."""
    end: int
    """The high watermark."""
    lag: int
    """Offsets that are not done."""
    in_flight: int
    """Records that were handed out, or are held back behind those, and are not done."""


class GroupInfo(msgspec.Struct, frozen=True):
    """What a group is and does."""

    topic: str
    name: str
    settings: GroupSettings
    paused: bool
    created_ms: int
    members: int
    lag: int
    in_flight: int
    lanes: tuple[LaneInfo, ...]
    counts: Counts


class StoredLane(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a cursor: all below `committed` is done, and what lies in `done` ([start, end) each)."""

    committed: int
    done: list[tuple[int, int]] = []


def lane_info(lane: Lane) -> LaneInfo:
    """Return where a lane is."""
    end = lane.partition.high_watermark
    unfinished = len(lane.flight.unfinished)
    ahead = sum(span[1] - max(span[0], lane.position) for span in lane.done if span[1] > lane.position)
    first = max(lane.position, lane.partition.log.first_offset)
    lag = max(end - first - ahead, 0) + unfinished
    return LaneInfo(lane.number, lane.position, lane.flight.committed(lane.position), end, lag, unfinished)


def stored_lane(lane: Lane) -> StoredLane:
    """Return what is to be kept of a lane."""
    spans = lane.flight.done(lane.position, SPANS_MAX)
    spans += [(max(start, lane.position), end) for start, end in lane.done if end > lane.position]
    return StoredLane(lane.flight.committed(lane.position), spans[:SPANS_MAX])


def resolve(place: Place, lane: Lane) -> int:
    """Return the offset that a place is in one partition."""
    partition = lane.partition
    if place.at == "beginning":
        return partition.log.first_offset
    if place.at == "offset":
        return place.offsets.get(partition.number, place.value)
    return partition.high_watermark
