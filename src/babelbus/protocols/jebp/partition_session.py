"""The commands that name partitions (docs/protocols/jebp.md, extension: partitions by number)."""

import logging

from babelbus.core.access import Action, Identity
from babelbus.core.broker import Broker
from babelbus.core.groups import GroupClosedError, GroupSettings, InvalidGroupNameError, at_offset
from babelbus.core.partition import Partition
from babelbus.core.topic import Topic, UnknownPartitionError
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.protocols.jebp.codec import encode_missing_topics
from babelbus.protocols.jebp.fields import encode_numbers
from babelbus.protocols.jebp.messages import (
    FROM_OFFSET,
    NO_OFFSET,
    NO_TIMESTAMP,
    PROTOCOL,
    Data,
    FetchPartition,
    MoveGroup,
    OffsetBounds,
    PartitionPositions,
    TellPositions,
    TopicPositions,
)
from babelbus.protocols.jebp.partition_codec import (
    FETCHED_HEAD_BYTES,
    encode_topic_positions,
    fetched_head,
    positions_head,
)
from babelbus.protocols.jebp.status import Outcome
from babelbus.records.format import CorruptRecordError
from babelbus.storage.errors import OffsetOutOfRangeError

log = logging.getLogger(__name__)

PARTITIONS_AT_ONCE = 1024
"""An answer ends behind the topic that brings it to so many: each may cost a look at the disk, and the others wait."""
FILE_PARTS = 4
"""Of a segment's path, what stands below the data folder: `topics/news/0/00000000000000000000.log`."""

Said = tuple[Outcome, list[Data]]


def _may_read(client: Identity, broker: Broker, name: str) -> bool:
    return broker.has_topic(name) and broker.may(client, Action.SUBSCRIBE, name)


async def tell_positions(request: TellPositions, broker: Broker, client: Identity, bytes_max: int) -> Said:
    """Return where the partitions of topics begin and end, in the order of their names, in `bytes_max` at the most."""
    missing = [name for name in request.topics if not _may_read(client, broker, name)]
    if missing:
        return Outcome.PARTITION_NO_TOPIC, [encode_missing_topics(missing)]
    names = sorted(name for name in request.topics or broker.topic_names() if name > request.after)
    told: list[Data] = []
    left, partitions = bytes_max - len(positions_head(more=False)), 0
    for name in names:
        topic = broker.find_topic(name)
        if topic is None:  # removed while another one was read
            continue
        if not request.topics and not _may_read(client, broker, name):
            continue
        if partitions >= PARTITIONS_AT_ONCE:
            return Outcome.POSITIONS_TOLD, [positions_head(more=True), *told]
        try:
            content = encode_topic_positions(await _positions_of(topic, request.timestamp))
        except StorageError as error:
            log.error("jebp: positions of topic %r: %s", name, error)
            return Outcome.PARTITION_DISK, [b"the server could not read the topic"]
        if len(content) > left:
            if not told:
                return Outcome.PARTITION_REFUSED, [b"the answer for one topic is over the server's frame limit"]
            return Outcome.POSITIONS_TOLD, [positions_head(more=True), *told]
        told.append(content)
        left -= len(content)
        partitions += len(topic.partitions)
    return Outcome.POSITIONS_TOLD, [positions_head(more=False), *told]


async def _positions_of(topic: Topic, timestamp: int) -> TopicPositions:
    rows = []
    for partition in list(topic.partitions):
        first, high_watermark = _bounds(partition)
        found = None if timestamp == NO_TIMESTAMP else await partition.find_time(timestamp)
        rows.append(
            PartitionPositions(
                first, high_watermark, partition.log.size_bytes, NO_OFFSET if found is None else max(found, first)
            )
        )
    return TopicPositions(topic.name, topic.id, topic.settings.engine, tuple(rows))


def _bounds(partition: Partition) -> tuple[int, int]:
    first = partition.log.first_offset
    return first, max(partition.high_watermark, first)


async def awaited(request: FetchPartition, broker: Broker, client: Identity) -> tuple[Partition, int] | None:
    """Return the partition and the offset that a fetch has to wait for; `None` when it can be answered now."""
    if not request.wait_ms or not _may_read(client, broker, request.topic):
        return None
    topic = broker.topic(request.topic)
    if request.partition >= len(topic.partitions):
        return None
    partition = topic.partitions[request.partition]
    end = partition.high_watermark
    if request.end != NO_OFFSET and request.end <= end:
        return None
    if request.start_type == FROM_OFFSET:
        return (partition, end) if request.start == end else None
    try:
        return (partition, end) if await partition.find_time(request.start) is None else None
    except StorageError:
        return None  # the answer says so


async def fetch_partition(
    request: FetchPartition, broker: Broker, client: Identity, metrics: Metrics, bytes_max: int
) -> Said:
    """Read one partition; the answer's content has `bytes_max` bytes at the most."""
    if not _may_read(client, broker, request.topic):
        return Outcome.PARTITION_NO_TOPIC, [encode_missing_topics([request.topic])]
    topic = broker.topic(request.topic)
    try:
        partition = topic.partition(request.partition)
    except UnknownPartitionError as error:
        return Outcome.PARTITION_MISSING, [str(error).encode()]
    try:
        return await _read(request, partition, metrics, bytes_max)
    except OffsetOutOfRangeError:
        return Outcome.PARTITION_NO_OFFSET, [encode_numbers(OffsetBounds(*_bounds(partition)))]
    except CorruptRecordError as error:
        metrics.corrupt_records_total.inc()
        log.error("jebp: fetch partition: %s", error)
        return Outcome.PARTITION_REFUSED, [_damage(error).encode()]
    except StorageError as error:
        log.error("jebp: fetch partition: %s", error)
        return Outcome.PARTITION_DISK, [b"the server could not read the records"]


def _damage(error: CorruptRecordError) -> str:
    """Return what is damaged, with the file as it is called below the data folder: where that is concerns no client."""
    where = f"offset {error.offset}"
    if error.path.endswith(".log"):  # otherwise it stands in a database
        where += f", byte {error.position} of {'/'.join(error.path.split('/')[-FILE_PARTS:])}"
    return f"the record there is damaged, {where}: {error.reason}"


async def _read(request: FetchPartition, partition: Partition, metrics: Metrics, bytes_max: int) -> Said:
    first, high_watermark = _bounds(partition)
    start: int | None = request.start
    if request.start_type != FROM_OFFSET:
        start = await partition.find_time(request.start)
    elif not first <= request.start <= high_watermark:
        raise OffsetOutOfRangeError(request.start, first, high_watermark)
    if start is None:
        start = high_watermark
    stop = high_watermark if request.end == NO_OFFSET else min(request.end, high_watermark)
    if start >= stop:
        return Outcome.PARTITION_FETCHED, [fetched_head(start, first, high_watermark)]
    size = max(min(request.bytes_max, bytes_max - FETCHED_HEAD_BYTES), 0)
    chunk = await partition.read(start, size, stop)
    if len(chunk.data) > size:
        return Outcome.PARTITION_RECORD_TOO_LARGE, []
    if chunk.data:
        metrics.topic_fetched(PROTOCOL, request.topic).inc(chunk.next_offset - chunk.base_offset, len(chunk.data))
    return Outcome.PARTITION_FETCHED, [fetched_head(chunk.next_offset, first, high_watermark), chunk.data]


_OF_READERS = {"reader": PROTOCOL}
"""A label of groups that a reader moves: those that share records among members are not for others to move."""


def move_group(request: MoveGroup, broker: Broker, client: Identity) -> Said:
    """Set a group to where its reader says that it is; its cursor is saved with the next ones, within a second."""
    if not _may_read(client, broker, request.topic):
        return Outcome.PARTITION_NO_TOPIC, [encode_missing_topics([request.topic])]
    topic = broker.topic(request.topic)
    try:
        for partition, _ in request.offsets:
            topic.partition(partition)
        settings = GroupSettings(ack="explicit", labels=_OF_READERS)
        group = broker.groups.ensure(request.topic, request.group, settings)
        if group.members or group.settings.labels != _OF_READERS:
            raise GroupClosedError(f"group {request.group!r} is one for members to share: choose another name")
        for partition, offset in request.offsets:
            group.seek(at_offset(offset, partition))
    except UnknownPartitionError as error:
        return Outcome.PARTITION_MISSING, [str(error).encode()]
    except (InvalidGroupNameError, GroupClosedError) as error:
        return Outcome.PARTITION_REFUSED, [str(error).encode()]
    except StorageError as error:
        log.error("group %r of topic %r was not made: %s", request.group, request.topic, error)
        return Outcome.PARTITION_DISK, [str(error).encode()]
    return Outcome.GROUP_MOVED, []
