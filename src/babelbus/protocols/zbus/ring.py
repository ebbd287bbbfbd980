"""The ring of an MQ of type `memory`: the newest 1000 messages (docs/specifications/zbus.md, section 5.1).

A channel sees exactly those: one that fell behind goes on at the oldest kept when it is asked for messages again. The
log itself gives memory back by whole segments, so it holds some more for a while.
"""

from babelbus.core.groups import Group, at_offset
from babelbus.core.topic import Topic
from babelbus.storage.disk import Log

SIZE = 1000
SEGMENT_BYTES = 2**20
NO_RETENTION = {"retention_bytes": None, "retention_seconds": None}
SLACK_BYTES = 64 * 2**20
"""What may be kept beyond the ring for channels whose consumers take more: their turn comes within a moment."""


def oldest(topic: Topic) -> int:
    """Return the offset of the oldest message that is kept."""
    partition = topic.partitions[0]
    return max(partition.log.first_offset, partition.high_watermark - SIZE)


def catch_up(group: Group) -> None:
    """Let a channel that is behind the ring go on at its oldest message."""
    first = oldest(group.topic)
    if _position(group) < first:
        group.seek(at_offset(first))


def trim(topic: Topic, groups: list[Group]) -> None:
    """Return back the memory of messages that nobody can get any more."""
    log = topic.partitions[0].log
    if log.segment_count == 1 or not isinstance(log, Log):
        return
    keep_from = oldest(topic)
    if log.sealed_segments()[0].next_offset > keep_from:
        return
    if log.size_bytes < SLACK_BYTES:
        waiting = [group for group in groups if any(member.capacity for member in group.members)]
        keep_from = min([keep_from, *(_position(group) for group in waiting)])
    for segment in log.sealed_segments():
        if segment.next_offset > keep_from:
            return
        log.drop_first(segment)


def _position(group: Group) -> int:
    return group.stored()[0].committed  # a record is done when it was handed out
