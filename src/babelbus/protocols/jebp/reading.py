"""The commands of reading: by subscription (21 and 22), and by number of partition (24 to 26, an extension of ours)."""

import logging
from collections.abc import Iterable, Sequence

from babelbus.core.access import NOBODY, SERVER, AccessRefusedError, Action, Identity
from babelbus.core.broker import Broker
from babelbus.core.groups import GroupClosedError, GroupSettings, InvalidGroupNameError, at_offset
from babelbus.core.partition import Partition
from babelbus.core.rooted import relative_chunk
from babelbus.core.topic import ClosedTopicError, Topic, UnknownPartitionError
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.protocols.jebp.codec import batch_head, encode_missing_offset, encode_missing_topics
from babelbus.protocols.jebp.fields import encode_numbers
from babelbus.protocols.jebp.messages import (
    FROM_OFFSET,
    NO_OFFSET,
    NO_TIMESTAMP,
    PROTOCOL,
    Data,
    Fetch,
    FetchPartition,
    MoveGroup,
    OffsetBounds,
    PartitionPositions,
    Subscribe,
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
from babelbus.storage.contract import Chunk
from babelbus.storage.errors import OffsetOutOfRangeError

log = logging.getLogger(__name__)

PARTITIONS_AT_ONCE = 1024
"""An answer ends behind the topic that brings it to so many: each may cost a look at the disk, and the others wait."""
FILE_PARTS = 4
"""Of a segment's path, what stands below the data folder: `topics/news/0/00000000000000000000.log`."""

Said = tuple[Outcome, list[Data]]


def _may_read(client: Identity, broker: Broker, name: str) -> bool:
    return broker.has_topic(name) and broker.may_topic(client, Action.READ, name)


def _asked(client: Identity, broker: Broker, name: str, action: Action = Action.READ) -> bool:
    """Return whether a client may do this with a topic that it named; a refusal is recorded.

    Raises:
        ClosedTopicError: it may, and the topic could not be opened.
    """
    closed = broker.why_closed(name)
    if closed is None and not broker.has_topic(name):
        return False
    try:
        broker.check_topic(client, action, name)
    except AccessRefusedError:
        return False
    if closed is not None:
        raise closed
    return True


def _refuse_missing(
    client: Identity, broker: Broker, names: Iterable[str], action: Action = Action.READ
) -> Said | None:
    """Return the answer of commands 24 to 26 if a topic is missing or closed."""
    try:
        missing = [name for name in names if not _asked(client, broker, name, action)]
    except ClosedTopicError as error:
        return Outcome.PARTITION_DISK, [client.relative_text(str(error)).encode()]
    return (Outcome.PARTITION_NO_TOPIC, [encode_missing_topics(map(client.relative, missing))]) if missing else None


async def tell_positions(request: TellPositions, broker: Broker, client: Identity, bytes_max: int) -> Said:
    """Return where the partitions of topics begin and end, in the order of their names, in `bytes_max` at the most."""
    refused = _refuse_missing(client, broker, request.topics)
    if refused is not None:
        return refused
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
            positions = await _positions_of(topic, request.timestamp, client.relative(name))
            content = encode_topic_positions(positions)
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


async def _positions_of(topic: Topic, timestamp: int, name: str) -> TopicPositions:
    rows = []
    for partition in list(topic.partitions):
        first, high_watermark = _bounds(partition)
        found = None if timestamp == NO_TIMESTAMP else await partition.find_time(timestamp)
        rows.append(
            PartitionPositions(
                first, high_watermark, partition.log.size_bytes, NO_OFFSET if found is None else max(found, first)
            )
        )
    return TopicPositions(name, topic.id, topic.settings.engine, tuple(rows))


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
    refused = _refuse_missing(client, broker, [request.topic])
    if refused is not None:
        return refused
    topic = broker.topic(request.topic)
    try:
        partition = topic.partition(request.partition)
    except UnknownPartitionError as error:
        return Outcome.PARTITION_MISSING, [client.relative_text(str(error)).encode()]
    try:
        outcome, parts = await _read(request, partition, metrics, bytes_max)
        return outcome, _relative(parts, client)
    except OffsetOutOfRangeError:
        return Outcome.PARTITION_NO_OFFSET, [encode_numbers(OffsetBounds(*_bounds(partition)))]
    except CorruptRecordError as error:
        metrics.corrupt_records_total.inc()
        log.error("jebp: fetch partition: %s", error)
        return Outcome.PARTITION_REFUSED, [client.relative_text(_damage(error)).encode()]
    except StorageError as error:
        log.error("jebp: fetch partition: %s", error)
        return Outcome.PARTITION_DISK, [b"the server could not read the records"]


def _relative(parts: list[Data], client: Identity) -> list[Data]:
    """Return the parts of an answer, whose last one is stored records, as the client sees them."""
    if client.root is None or len(parts) < 2:
        return parts
    return [*parts[:-1], relative_chunk(parts[-1], client.root)]


def _damage(error: CorruptRecordError) -> str:
    """Return what is damaged, with the file as it is called below the data folder: where that is concerns no client."""
    where = f"offset {error.offset}"
    if error.path.endswith(".log"):  # otherwise it stands in a database
        where += f", byte {error.position} of {'/'.join(error.path.split('/')[-FILE_PARTS:])}"
    return f"the record there is damaged, {where}: {error.reason}"


async def _read(request: FetchPartition, partition: Partition, metrics: Metrics, bytes_max: int) -> Said:
    first, high_watermark = _bounds(partition)
    start = request.start
    stop = high_watermark if request.end == NO_OFFSET else min(request.end, high_watermark)
    size = max(min(request.bytes_max, bytes_max - FETCHED_HEAD_BYTES), 0)
    if request.start_type != FROM_OFFSET:
        chunk = await partition.read_since(start, size, stop)
    elif not first <= start <= high_watermark:
        raise OffsetOutOfRangeError(start, first, high_watermark)
    elif start >= stop:
        return Outcome.PARTITION_FETCHED, [fetched_head(start, first, high_watermark)]
    else:
        chunk = await partition.read(start, size, stop)
    if len(chunk.data) > size:
        return Outcome.PARTITION_RECORD_TOO_LARGE, []
    if not chunk.data:
        return Outcome.PARTITION_FETCHED, [fetched_head(chunk.next_offset, first, high_watermark)]
    metrics.topic_fetched(PROTOCOL, request.topic).inc(chunk.next_offset - chunk.base_offset, len(chunk.data))
    return Outcome.PARTITION_FETCHED, [fetched_head(chunk.next_offset, first, high_watermark), chunk.data]


_OF_READERS = {"reader": PROTOCOL}
"""A label of groups that a reader moves: those that share records among members are not for others to move."""


async def move_group(request: MoveGroup, broker: Broker, client: Identity) -> Said:
    """Set a group to where its reader says that it is; its cursor is saved with the next ones, within a second."""
    refused = _refuse_missing(client, broker, [request.topic], Action.CONSUME)
    if refused is not None:
        return refused
    topic = broker.topic(request.topic)
    try:
        for partition, _ in request.offsets:
            topic.partition(partition)
        settings = GroupSettings(ack="explicit", labels=_OF_READERS)
        known = broker.groups.find(request.topic, request.group)
        group = known or broker.groups.create(request.topic, request.group, settings, principal=client)
        if group.members or group.settings.labels != _OF_READERS:
            raise GroupClosedError(f"group {request.group!r} is one for members to share: choose another name")
        for partition, offset in request.offsets:
            group.seek(at_offset(offset, partition), SERVER)  # it may consume, which is to move its cursors
        if known is None:
            await group.saved.wait()
    except UnknownPartitionError as error:
        return Outcome.PARTITION_MISSING, [client.relative_text(str(error)).encode()]
    except (InvalidGroupNameError, GroupClosedError) as error:
        return Outcome.PARTITION_REFUSED, [client.relative_text(str(error)).encode()]
    except StorageError as error:
        log.error("group %r of topic %r was not made: %s", request.group, request.topic, error)
        return Outcome.PARTITION_DISK, [client.relative_text(str(error)).encode()]
    return Outcome.GROUP_MOVED, []


class Subscription:
    """The topics that one connection subscribed to."""

    def __init__(self, broker: Broker, metrics: Metrics) -> None:
        self._broker = broker
        self._metrics = metrics
        self._subscribed: dict[str, Topic] = {}
        self.client = NOBODY
        """The client, with the rights of the moment."""

    def subscribe(self, request: Subscribe, client: Identity) -> tuple[Outcome, bytes]:
        """Replace the topics that fetch reads (DECISION 23)."""
        broker = self._broker
        try:
            missing = [name for name in request.topics if not _asked(client, broker, name)]
        except ClosedTopicError as error:
            log.info("jebp: subscribe: %s", error)
            return Outcome.SUBSCRIBE_CLOSED, b""
        if missing:
            return Outcome.SUBSCRIBE_MISSING, encode_missing_topics(map(client.relative, missing))
        self._subscribed = {name: broker.topic(name) for name in request.topics}
        self.client = client
        return Outcome.SUBSCRIBED, b""

    def restore(self, names: Sequence[str], client: Identity) -> None:
        """Read these topics again, as far as they are there."""
        find = self._broker.find_topic
        self._subscribed = {name: topic for name in names if (topic := find(name)) is not None}
        self.client = client

    @property
    def topics(self) -> list[str]:
        """Names of the topics."""
        return list(self._subscribed)

    def end(self) -> None:
        """Release the topics."""
        self._subscribed.clear()

    async def fetch(self, request: Fetch, bytes_max: int) -> tuple[Outcome, list[Data]]:
        """Read the subscribed topics, partitions ascending (DECISION 26 to 29), `bytes_max` together at the most."""
        # A topic that was removed, or made again under its name, is not subscribed any more; nor one that the client
        # may not read any more.
        find, client, broker = self._broker.find_topic, self.client, self._broker
        self._subscribed = {
            name: topic
            for name, topic in self._subscribed.items()
            if find(name) is topic and broker.may_topic(client, Action.READ, name)
        }
        try:
            return await self._collect(request, min(request.bytes_max, bytes_max))
        except CorruptRecordError as error:
            self._metrics.corrupt_records_total.inc()
            log.error("jebp: fetch: %s", error)
            return Outcome.FETCH_REFUSED, []
        except StorageError as error:
            log.error("jebp: fetch: %s", error)
            return Outcome.FETCH_DISK, []

    async def _collect(self, request: Fetch, left: int) -> tuple[Outcome, list[Data]]:
        """Return the outcome, and the heads and records of all batches, as far as `left` bytes go."""
        parts: list[Data] = []
        known, root = False, self.client.root
        subscribed = dict(self._subscribed)  # a read may wait, and the client subscribe to others meanwhile
        for name, topic in subscribed.items():
            shown = name if root is None else root.relative(name)
            for partition in list(topic.partitions):
                head_bytes = len(batch_head(shown, partition.number, 0))
                try:
                    chunk = await _read_from(partition, request, max(left - head_bytes, 0))
                except OffsetOutOfRangeError:
                    continue
                known = True
                if not chunk.data:
                    continue
                if len(chunk.data) > left - head_bytes:
                    if not parts:
                        return (
                            Outcome.FETCH_REFUSED,
                            [],
                        )  # its first record does not fit: the client has to ask for more
                    continue
                data = chunk.data if root is None else relative_chunk(chunk.data, root)
                parts += (batch_head(shown, partition.number, len(data)), data)
                left -= head_bytes + len(data)
                count = chunk.next_offset - chunk.base_offset
                self._metrics.topic_fetched(PROTOCOL, name).inc(count, len(chunk.data))
        if not subscribed:
            return Outcome.FETCH_REFUSED, []
        return (Outcome.FETCHED, parts) if known else (Outcome.FETCH_NO_OFFSET, [encode_missing_offset(request.start)])


async def _read_from(partition: Partition, request: Fetch, bytes_max: int) -> Chunk:
    """Return what a fetch reads in a partition, which may be nothing.

    Raises:
        OffsetOutOfRangeError: the partition does not have the offset.
    """
    if request.start_type != FROM_OFFSET:
        return await partition.read_since(request.start, bytes_max)
    return await partition.read(request.start, bytes_max)
