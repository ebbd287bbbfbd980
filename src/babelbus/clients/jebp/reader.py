"""Reading: one fetch, following a topic from an offset or a time, and finding where it ends.

jebp has no push (DECISION 24) and its fetch names no topic: it reads the topics of the connection's subscriptions. So
each fetch goes out behind its own subscribe, both in one write. That costs the server some microseconds, and no caller
can ever read what another one subscribed to, or be left without a topic that was created again under the same name.

Following reads its partition by number (`partition_reader`).
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import TypedDict, Unpack

import msgspec

from babelbus.clients.jebp.errors import (
    OffsetOutOfRangeError,
    RecordTooLargeError,
    RequestError,
    UnknownPartitionError,
    UnknownTopicError,
)
from babelbus.clients.jebp.partition_reader import NO_TOPIC_STATUS, PartitionReader
from babelbus.clients.jebp.requests import Requests
from babelbus.errors import LocalProtocolError
from babelbus.protocols.jebp.codec import decode_batches, encode_request
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX
from babelbus.protocols.jebp.messages import FROM_OFFSET, FROM_TIMESTAMP, Fetch, Subscribe
from babelbus.protocols.jebp.status import is_success
from babelbus.records.columns import I64, Columns, decode_columns, find_positions, iterate, verify
from babelbus.records.fields import offset_of
from babelbus.records.format import INT64_MAX, CorruptRecordError
from babelbus.records.record import Record

BYTES_MAX_MAX = FRAME_BYTES_MAX - 18
"""Most that fits into the answer to one fetch."""
POLL_SECONDS_MIN = 0.005


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

    __slots__ = ("_end", "_positions", "data", "partition", "topic")

    def __init__(self, topic: str, partition: int, data: bytes | memoryview) -> None:
        self.topic = topic
        self.partition = partition
        self.data = data
        self._positions: I64 | None = None
        self._end = 0

    def _find(self) -> I64:
        if self._positions is None:
            self._positions, self._end = find_positions(self.data, 0, len(self.data))
            if self._end != len(self.data) or not len(self._positions):
                raise CorruptRecordError(self._end, "the batch ends inside a record")
        return self._positions

    def __len__(self) -> int:
        return len(self._find())

    @property
    def base_offset(self) -> int:
        """The offset of the first record."""
        return offset_of(self.data, int(self._find()[0]))

    @property
    def next_offset(self) -> int:
        """The offset after the last record, to fetch from next. Does not check CRCs; costs 0.4 us a record at most.

        Raises:
            CorruptRecordError: the batch is not made of whole records.
        """
        return offset_of(self.data, int(self._find()[-1])) + 1

    def verify(self) -> None:
        """Check the CRC of every record and decode none: for callers that forward the bytes.

        Raises:
            CorruptRecordError: a record is not the one that was written.
        """
        verify(self.data, self._find(), self._end)

    def columns(self) -> Columns:
        """Return the records as numpy columns, every CRC checked.

        Raises:
            CorruptRecordError: a record is not the one that was written.
        """
        self.verify()
        return decode_columns(self.data, self._find())

    def records(self) -> Iterator[Record]:
        """Yield the records, every CRC checked before the first; about 1 us each.

        Raises:
            CorruptRecordError: a record is not the one that was written.
        """
        if not isinstance(self.data, bytes):
            self.data = bytes(self.data)  # of which payloads are cut faster
        yield from iterate(self.columns())


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

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self.partitions = PartitionReader(requests)

    async def fetch(self, topic: str, start_type: int, start: int, bytes_max: int) -> list[FetchedBatch]:
        """Fetch once; see `Client.fetch`."""
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
        return [FetchedBatch(batch.topic, batch.partition, batch.records) for batch in decode_batches(fetched.content)]

    async def fetch_partition(
        self,
        topic: str,
        partition: int,
        start_type: int,
        start: int,
        end: int | None,
        bytes_max: int,
        wait_seconds: float,
    ) -> FetchedPartition:
        """Fetch from one partition once; see `Client.fetch_partition`."""
        fetched = await self.partitions.fetch(
            topic, partition, start_type, start, end=end, bytes_max=bytes_max, wait_seconds=wait_seconds
        )
        batch = FetchedBatch(topic, partition, fetched.records) if len(fetched.records) else None
        return FetchedPartition(batch, fetched.next_offset, fetched.first_offset, fetched.high_watermark)

    async def follow(self, topic: str, **options: Unpack[FollowOptions]) -> AsyncGenerator[FetchedBatch, None]:
        """Yield the batches of one partition. See `Client.follow`."""
        start_type, start = start_of(options.get("offset"), options.get("timestamp"))
        partition, until_end = options.get("partition", 0), options.get("until_end", False)
        poll_seconds_max, bytes_max = options.get("poll_seconds_max", 0.25), options.get("bytes_max", 2**20)
        pause = 0.0
        end: int | None = None
        if until_end and start_type == FROM_OFFSET:
            end = await self._end_of(topic, partition, start)
        fetching = self._ask(topic, partition, start_type, start, end, bytes_max)
        try:
            while end is None or start < end:
                try:
                    batch = await fetching
                except RecordTooLargeError:
                    if bytes_max >= BYTES_MAX_MAX:
                        raise
                    bytes_max = min(4 * bytes_max, BYTES_MAX_MAX)
                    fetching = self._ask(topic, partition, start_type, start, end, bytes_max)
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
                fetching = self._ask(topic, partition, start_type, start, end, bytes_max)
                if batch is not None:
                    # The next chunk is on its way while the caller decodes this one. One turn of the loop for the
                    # request to be made, one for uvloop to write it: only then may the caller keep the loop busy.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    yield batch
        finally:
            fetching.cancel()

    def _ask(
        self, topic: str, partition: int, start_type: int, start: int, end: int | None, bytes_max: int
    ) -> "asyncio.Task[FetchedBatch | None]":
        """Start to fetch."""
        task = asyncio.create_task(self._fetch_one(topic, partition, start_type, start, end, bytes_max))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a follower may stop before it reads
        return task

    async def _fetch_one(
        self, topic: str, partition: int, start_type: int, start: int, end: int | None, bytes_max: int
    ) -> FetchedBatch | None:
        """Return the next batch of one partition, behind whatever compaction left empty; `None` at the end."""
        while True:
            fetched = await self.partitions.fetch(
                topic, partition, start_type, start, end=end, bytes_max=bytes_max, patient=True
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
        (positions,) = await self.partitions.positions([topic], None)
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
