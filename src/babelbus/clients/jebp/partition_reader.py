"""Partitions by number, from the client's side: their positions, and reading a single one."""

from collections.abc import Mapping, Sequence

from babelbus.clients.jebp.errors import (
    OffsetOutOfRangeError,
    RecordTooLargeError,
    UnknownPartitionError,
    UnknownTopicError,
)
from babelbus.clients.jebp.requests import Requests, check
from babelbus.protocols.jebp.codec import decode_missing_topics, encode_request
from babelbus.protocols.jebp.fields import decode_numbers
from babelbus.protocols.jebp.messages import (
    NO_OFFSET,
    NO_TIMESTAMP,
    FetchPartition,
    MoveGroup,
    OffsetBounds,
    PartitionFetched,
    PartitionRequest,
    Response,
    TellPositions,
    TopicPositions,
)
from babelbus.protocols.jebp.partition_codec import (
    TOPICS_MAX,
    WAIT_MS_MAX,
    decode_partition_fetched,
    decode_positions,
)

NO_TOPIC_STATUS = 0xB1
NO_OFFSET_STATUS = 0xB2
TOO_LARGE_STATUS = 0xB4
NO_PARTITION_STATUS = 0xB6
RETRY_SECONDS = 0.3
"""How long a request that the server's disk refused is repeated."""


class PartitionReader:
    """The requests that name partitions."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def positions(self, topics: Sequence[str] | None, timestamp: int | None) -> list[TopicPositions]:
        """Fetch the positions, in as many requests as needed; see `Client.positions`."""
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

    async def fetch(
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
    ) -> PartitionFetched:
        """Fetch once; see `Client.fetch_partition`."""
        # A longer wait would look like a lost server.
        wait_ms = min(int(min(wait_seconds, self._requests.timeout_seconds / 2) * 1000), WAIT_MS_MAX)
        until = NO_OFFSET if end is None else end
        what = f"fetch partition {partition} of {topic!r}"
        request = FetchPartition(topic, partition, start_type, start, until, bytes_max, wait_ms)
        response = await self._ask(request, what, patient=patient)
        return decode_partition_fetched(response.content)

    async def move_group(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        """Send the request; see `Client.move_group`."""
        what = f"move group {group!r} of {topic!r}"
        await self._ask(MoveGroup(topic, group, tuple(sorted(offsets.items()))), what)

    async def _ask(self, request: PartitionRequest, what: str, *, patient: bool = False) -> Response:
        """Return the answer of success.

        Raises:
            RequestError: the server refused; the kind of error says why.
        """
        content = encode_request(request)
        response = await self._requests.ask(content, what, patient=patient, retry_seconds=RETRY_SECONDS)
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
