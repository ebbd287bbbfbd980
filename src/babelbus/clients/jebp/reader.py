"""Reading: one fetch, following a topic from an offset or a time, and finding where it ends.

jebp has no push (DECISION 24) and its fetch names no topic: it reads the topics of the connection's subscriptions. So
each fetch goes out behind its own subscribe, both in one write. That costs the server some microseconds, and no caller
can ever read what another one subscribed to, or be left without a topic that was created again under the same name.

Following reads its partition by number, which is an extension of ours.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

import msgspec

from babelbus.clients.jebp.errors import (
    OffsetOutOfRangeError,
    RecordTooLargeError,
    RequestError,
    UnknownPartitionError,
    UnknownTopicError,
)
from babelbus.clients.jebp.requests import Requests, check
from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp.codec import decode_batches, decode_missing_topics, encode_request
from babelbus.protocols.jebp.fields import decode_numbers
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX
from babelbus.protocols.jebp.messages import (
    FROM_OFFSET,
    FROM_TIMESTAMP,
    NO_OFFSET,
    NO_TIMESTAMP,
    Fetch,
    FetchPartition,
    MoveGroup,
    OffsetBounds,
    PartitionFetched,
    PartitionRequest,
    Response,
    Subscribe,
    TellPositions,
    TopicPositions,
)
from babelbus.protocols.jebp.partition_codec import TOPICS_MAX, WAIT_MS_MAX, decode_partition_fetched, decode_positions
from babelbus.protocols.jebp.status import is_success
from babelbus.records.plain import INT64_MAX, CorruptRecordError, decode_records, offset_of, verify_records, walk
from babelbus.records.record import Record

if TYPE_CHECKING:
    from babelbus.records.columns import Columns

BYTES_MAX_MAX = FRAME_BYTES_MAX - 18
"""Most that fits into the answer to one fetch."""
POLL_SECONDS_MIN = 0.005
NO_TOPIC_STATUS = 0xB1
NO_OFFSET_STATUS = 0xB2
TOO_LARGE_STATUS = 0xB4
NO_PARTITION_STATUS = 0xB6
RETRY_SECONDS = 0.3
"""How long a request that the server's disk refused is repeated."""


class FollowOptions(TypedDict, total=False):
    """Where `follow` begins and how it reads.

    Attributes:
        offset: where to begin; compaction may have removed it, retention may not. By default the first record.
        timestamp: or the time (ms) to begin at.
        partition: the partition to read; 0 by default.
        until_end: stop at the record that is the last one when it begins.
        poll_seconds_max: the longest pause before the next look for new records; 0.25 by default.
        bytes_max: most that one fetch brings, unless one record is larger; 1 MiB by default.
    """

    offset: int | None
    timestamp: int | None
    partition: int
    until_end: bool
    poll_seconds_max: float
    bytes_max: int


class FetchedBatch:
    """Stored records of one partition, whole and in order. `data` is as the server sent it, not checked yet."""

    __slots__ = ("_positions", "data", "partition", "topic")

    def __init__(self, topic: str, partition: int, data: bytes | memoryview) -> None:
        self.topic = topic
        self.partition = partition
        self.data = data
        self._positions: list[int] = []
        """Where each record begins, and where the last one ends."""

    def _find(self) -> list[int]:
        if not self._positions:
            positions = walk(self.data)
            if positions[-1] != len(self.data) or len(positions) == 1:
                raise CorruptRecordError(positions[-1], "the batch ends inside a record")
            self._positions = positions
        return self._positions

    def __len__(self) -> int:
        return len(self._find()) - 1

    @property
    def base_offset(self) -> int:
        """The offset of the first record."""
        return offset_of(self.data, self._find()[0])

    @property
    def next_offset(self) -> int:
        """The offset after the last record, to fetch from next. Does not check CRCs; costs 0.4 us a record at most.

        Raises:
            CorruptRecordError: the batch is not made of whole records.
        """
        return offset_of(self.data, self._find()[-2]) + 1

    def verify(self) -> None:
        """Check the CRC of every record and decode none: for callers that forward the bytes.

        Raises:
            CorruptRecordError: a record is not the one that was written.
        """
        verify_records(self.data, self._find())

    def columns(self) -> "Columns":
        """Return the records as numpy columns, every CRC checked; this needs numpy, which the client alone does not.

        Raises:
            CorruptRecordError: a record is not the one that was written.
        """
        from babelbus.records.columns import decode_chunk

        return decode_chunk(self.data)

    def records(self) -> Iterator[Record]:
        """Yield the records, every CRC checked before the first; 0.6 us each, 1.8 us with two headers.

        Raises:
            CorruptRecordError: a record is not the one that was written.
        """
        if not isinstance(self.data, bytes):
            self.data = bytes(self.data)  # of which payloads are cut faster
        yield from decode_records(self.data)


class Fetched(msgspec.Struct, frozen=True):
    """The batches of one fetch; none if there are no records yet."""

    batches: list[FetchedBatch]


class FetchedPartition(msgspec.Struct, frozen=True):
    """The batch of one fetch of one partition; none without records.

    `next_offset` is where to continue; `first_offset` and `high_watermark` are where the partition begins and where
    readers stop, when the server answered.
    """

    batch: FetchedBatch | None
    next_offset: int
    first_offset: int
    high_watermark: int


class Reader:
    """The reading side of a client."""

    _requests: Requests

    async def fetch(
        self, topic: str, *, offset: int | None = None, timestamp: int | None = None, bytes_max: int = 2**20
    ) -> Fetched:
        """Fetch stored records from an offset, or from the first one with a time (ms) at or after `timestamp`.

        With neither, from the first record there is. Each partition begins at the same start, the first partitions come
        first, and one that does not have the offset is left out (DECISION 26). No batches: nothing there yet.

        Raises:
            OffsetOutOfRangeError: no partition has the offset.
            RecordTooLargeError: the first record alone is over `bytes_max` bytes, head included.
            UnknownTopicError: there is no such topic.
            RequestError, RequestTimeoutError, ClientError: the server or the connection failed.
        """
        start_type, start = start_of(offset, timestamp)
        if not 0 <= bytes_max < 2**31:
            raise LocalProtocolError(f"a fetch of {bytes_max} bytes")
        contents = encode_request(Subscribe((topic,))), encode_request(Fetch(start_type, start, bytes_max))
        subscribed, fetched = await self._requests.send(*contents, what="a fetch")
        status = subscribed.status
        if status == NO_TOPIC_STATUS:
            raise UnknownTopicError(f"there is no topic {topic!r}, or no right to read it", status, subscribed.repeat)
        if not is_success(status):
            raise RequestError(f"the server refused to subscribe to {topic!r}", status, subscribed.repeat)
        status = fetched.status
        if status == 0xB1:
            raise OffsetOutOfRangeError(start, status)
        if not is_success(status) and fetched.repeat:
            raise RequestError("the server could not read the records", status, True)
        if not is_success(status):
            raise RecordTooLargeError(bytes_max, status)
        batches = decode_batches(fetched.content)
        return Fetched([FetchedBatch(batch.topic, batch.partition, batch.records) for batch in batches])

    async def fetch_partition(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        timestamp: int | None = None,
        end_offset: int | None = None,
        bytes_max: int = 2**20,
        wait_seconds: float = 0.0,
    ) -> FetchedPartition:
        """Fetch stored records of one partition, up to `end_offset` (excluded) if it is given.

        Start as in `fetch`. When there is nothing yet the server waits for `wait_seconds`, 60 at the most and half the
        request timeout; meanwhile it answers nothing else of this client, for answers keep the order of requests.

        Raises:
            OffsetOutOfRangeError: the partition does not have the offset; the error has the offsets that exist.
            RecordTooLargeError: the first record alone is over `bytes_max` bytes.
            UnknownTopicError, UnknownPartitionError: there is no such topic or partition.
            RequestError, ClientError: as `fetch`; a damaged record is a `RequestError`.
        """
        start_type, start = start_of(offset, timestamp)
        fetched = await self._fetch_partition(
            topic, partition, start_type, start, end=end_offset, bytes_max=bytes_max, wait_seconds=wait_seconds
        )
        batch = FetchedBatch(topic, partition, fetched.records) if len(fetched.records) else None
        return FetchedPartition(batch, fetched.next_offset, fetched.first_offset, fetched.high_watermark)

    async def positions(
        self, topics: Sequence[str] | None = None, timestamp: int | None = None
    ) -> list[TopicPositions]:
        """Return the partitions of topics with their begin and end, sorted by name; of all topics without names.

        With `timestamp` (ms) also where each partition has its first record at or after that time. A topic's `id`
        changes when the topic is removed and created again.

        Raises:
            UnknownTopicError: a named topic does not exist, or this client may not read it.
            RequestError, ClientError: as `fetch`.
        """
        if topics is None:
            return await self._tell((), timestamp)
        names = sorted(set(topics))
        positions: list[TopicPositions] = []
        for begin in range(0, len(names), TOPICS_MAX):
            positions += await self._tell(tuple(names[begin : begin + TOPICS_MAX]), timestamp)
        return positions

    async def _tell(self, topics: tuple[str, ...], timestamp: int | None) -> list[TopicPositions]:
        positions: list[TopicPositions] = []
        while True:
            after = positions[-1].topic if positions else ""
            request = TellPositions(topics, NO_TIMESTAMP if timestamp is None else timestamp, after)
            response = await self._ask(request, "positions")
            answer = decode_positions(response.content)
            positions += answer.topics
            if not answer.more or not answer.topics:
                return positions

    async def _fetch_partition(
        self,
        topic: str,
        partition: int,
        start_type: int,
        start: int,
        *,
        end: int | None = None,
        bytes_max: int,
        wait_seconds: float = 0.0,
        patient: bool = False,
        gives_up: bool = False,
    ) -> PartitionFetched:
        # A longer wait would look like a lost server.
        wait_ms = min(int(min(wait_seconds, self._requests.timeout_seconds / 2) * 1000), WAIT_MS_MAX)
        until = NO_OFFSET if end is None else end
        what = f"fetch partition {partition} of {topic!r}"
        request = FetchPartition(topic, partition, start_type, start, until, bytes_max, wait_ms)
        response = await self._ask(request, what, patient=patient, gives_up=gives_up)
        return decode_partition_fetched(response.content)

    async def move_group(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        """Set the cursor of a reader that keeps its own offsets: partition -> the next offset that it reads.

        The consumer group of this name is created if it does not exist. It only shows the lag of the reader, and its
        cursor may be a second older after a crash of the server.

        Raises:
            UnknownTopicError, UnknownPartitionError: there is no such topic or partition.
            RequestError: members of the group share the records, or the name is invalid.
            ClientError: as `fetch`.
        """
        what = f"move group {group!r} of {topic!r}"
        await self._ask(MoveGroup(topic, group, tuple(sorted(offsets.items()))), what)

    async def _ask(
        self, request: PartitionRequest, what: str, *, patient: bool = False, gives_up: bool = False
    ) -> Response:
        """Return the answer of success.

        Raises:
            RequestError: the server refused; the kind of error says why.
        """
        content = encode_request(request)
        response = await self._requests.ask(
            content, what, patient=patient, gives_up=gives_up, retry_seconds=RETRY_SECONDS
        )
        status, repeat = response.status, response.repeat
        if status == NO_TOPIC_STATUS:
            missing = ", ".join(map(repr, decode_missing_topics(response.content)))
            raise UnknownTopicError(f"there is no topic {missing}, or no right to read it", status, repeat)
        if status == NO_PARTITION_STATUS:
            raise UnknownPartitionError(str(response.content, "utf-8", "replace"), status, repeat)
        if isinstance(request, FetchPartition) and status == NO_OFFSET_STATUS:
            bounds = decode_numbers(OffsetBounds, response.content)
            raise OffsetOutOfRangeError(request.start, status, bounds.first_offset, bounds.high_watermark)
        if isinstance(request, FetchPartition) and status == TOO_LARGE_STATUS:
            raise RecordTooLargeError(request.bytes_max, status)
        return check(response, what)

    async def first_offset(self, topic: str) -> int:
        """Return the offset at which the first partition with records begins, 0 if there are no records.

        Raises:
            UnknownTopicError, ClientError: as `positions`.
        """
        (positions,) = await self.positions([topic])
        return next((info.first_offset for info in positions.partitions if info.first_offset < info.high_watermark), 0)

    async def end_offset(self, topic: str) -> int:
        """Return the offset that the next record gets, of the longest partition.

        Raises:
            UnknownTopicError, ClientError: as `positions`.
        """
        (positions,) = await self.positions([topic])
        return max(info.high_watermark for info in positions.partitions)

    async def follow(self, topic: str, **options: Unpack[FollowOptions]) -> AsyncGenerator[Record, None]:
        """Yield the records of one partition from an offset, a time (ms) or the first one on, then new ones.

        It asks again when there is nothing: after 5 ms at first, then after `poll_seconds_max` seconds at the most, for
        jebp has no push. A lost connection is waited for, as long as it takes; with `until_end`, for
        `request_timeout_seconds`. Costs about 1.5 us a record.

        Args:
            topic: an existing topic.
            options: see `FollowOptions`.

        Raises:
            OffsetOutOfRangeError, UnknownTopicError, RequestError, ClientError: as `fetch`.
            UnknownPartitionError: the topic has no such partition.
            CorruptRecordError: a record is not the one that was written.
        """
        async with contextlib.aclosing(self.follow_batches(topic, **options)) as batches:
            async for batch in batches:
                for record in batch.records():
                    yield record

    async def follow_batches(self, topic: str, **options: Unpack[FollowOptions]) -> AsyncGenerator[FetchedBatch, None]:
        """Yield the records of `follow` a chunk at a time, for bulk readers: `batch.columns()` or `batch.records()`.

        The next chunk is fetched while the caller works on the last one.
        """
        start_type, start = start_of(options.get("offset"), options.get("timestamp"))
        partition, until_end = options.get("partition", 0), options.get("until_end", False)
        poll_seconds_max, bytes_max = options.get("poll_seconds_max", 0.25), options.get("bytes_max", 2**20)
        pause = 0.0
        end: int | None = None
        if until_end and start_type == FROM_OFFSET:
            end = await self._end_of(topic, partition, start)

        def fetch() -> "asyncio.Task[FetchedBatch | None]":
            task = asyncio.create_task(self._fetch_one(topic, partition, start_type, start, end, bytes_max, until_end))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited
            return task

        fetching = fetch()
        try:
            while end is None or start < end:
                try:
                    batch = await fetching
                except RecordTooLargeError:
                    if bytes_max >= BYTES_MAX_MAX:
                        raise
                    bytes_max = min(4 * bytes_max, BYTES_MAX_MAX)
                    fetching = fetch()
                    continue
                if batch is not None:
                    start_type, start, pause = FROM_OFFSET, batch.next_offset, 0.0
                    if until_end and end is None:
                        end = await self._end_of(topic, partition, start)
                elif until_end:
                    return
                else:
                    pause = min(max(2 * pause, POLL_SECONDS_MIN), poll_seconds_max)
                    await asyncio.sleep(pause)
                fetching = fetch()
                if batch is not None:
                    # The next chunk is on its way while the caller decodes this one. One turn of the loop for the
                    # request to be made, one for uvloop to write it: only then may the caller keep the loop busy.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    yield batch
        finally:
            fetching.cancel()

    async def _fetch_one(
        self, topic: str, partition: int, start_type: int, start: int, end: int | None, bytes_max: int, gives_up: bool
    ) -> FetchedBatch | None:
        """Return the next batch of one partition, behind whatever compaction left empty; `None` at the end."""
        while True:
            fetched = await self._fetch_partition(
                topic,
                partition,
                start_type,
                start,
                end=end,
                bytes_max=bytes_max,
                patient=True,
                gives_up=gives_up,
            )
            if len(fetched.records):
                return FetchedBatch(topic, partition, fetched.records)
            if fetched.next_offset <= start or fetched.next_offset >= (fetched.high_watermark if end is None else end):
                return None
            start_type, start = FROM_OFFSET, fetched.next_offset

    async def _end_of(self, topic: str, partition: int, start: int) -> int:
        """Return the offset after a partition's last record.

        Raises:
            OffsetOutOfRangeError: `start` lies behind it.
            UnknownPartitionError: the topic has no partition of this number.
        """
        (positions,) = await self.positions([topic], None)
        if partition >= len(positions.partitions):
            raise UnknownPartitionError(
                f"topic {topic!r} has partitions 0 to {len(positions.partitions) - 1}, not {partition}", 0xB6, False
            )
        bounds = positions.partitions[partition]
        if start > bounds.high_watermark:
            raise OffsetOutOfRangeError(start, 0xB2, bounds.first_offset, bounds.high_watermark)
        return bounds.high_watermark


def start_of(offset: int | None, timestamp: int | None) -> tuple[int, int]:
    """Return the start of a fetch; from the first record that there is if neither is given.

    Raises:
        LocalProtocolError: both are given, or one is negative.
    """
    if offset is not None and timestamp is not None:
        raise LocalProtocolError("a fetch starts at an offset or at a timestamp, not at both")
    start = offset if offset is not None else timestamp or 0
    if not 0 <= start <= INT64_MAX:
        raise LocalProtocolError(f"a fetch cannot start at {start}")
    # Every record is at or after time 0, so this is the first one, whatever offset retention has left it.
    return (FROM_OFFSET if offset is not None else FROM_TIMESTAMP), start
