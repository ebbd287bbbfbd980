"""The commands of reading (21 and 22): the topics that a connection subscribed to, and fetching from them."""

import logging

from babelbus.core.access import Action
from babelbus.core.access import Identity as Client
from babelbus.core.broker import Broker
from babelbus.core.partition import Partition
from babelbus.core.topic import Topic
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.protocols.jebp.codec import batch_head, encode_missing_offset, encode_missing_topics
from babelbus.protocols.jebp.messages import FROM_OFFSET, PROTOCOL, Data, Fetch, Subscribe
from babelbus.protocols.jebp.status import Outcome
from babelbus.records.format import CorruptRecordError
from babelbus.storage.errors import OffsetOutOfRangeError

log = logging.getLogger(__name__)


class Subscription:
    """The topics that one connection subscribed to."""

    def __init__(self, broker: Broker, metrics: Metrics) -> None:
        self._broker = broker
        self._metrics = metrics
        self._subscribed: dict[str, Topic] = {}

    def subscribe(self, request: Subscribe, client: Client) -> tuple[Outcome, bytes]:
        """Replace the topics that fetch reads (DECISION 23)."""
        broker = self._broker
        missing = [
            name
            for name in request.topics
            if not broker.has_topic(name) or not broker.may(client, Action.SUBSCRIBE, name)
        ]
        if missing:
            return Outcome.SUBSCRIBE_MISSING, encode_missing_topics(missing)
        self._subscribed = {name: broker.topic(name) for name in request.topics}
        return Outcome.SUBSCRIBED, b""

    def end(self) -> None:
        """Release the topics."""
        self._subscribed.clear()

    async def fetch(self, request: Fetch, bytes_max: int) -> tuple[Outcome, list[Data]]:
        """Read the subscribed topics, partitions ascending (DECISION 26 to 29), `bytes_max` together at the most."""
        # A topic that was removed, or made again under its name, is not subscribed any more.
        find = self._broker.find_topic
        self._subscribed = {name: topic for name, topic in self._subscribed.items() if find(name) is topic}
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
        known = False
        subscribed = dict(self._subscribed)  # a read may wait, and the client subscribe to others meanwhile
        for name, topic in subscribed.items():
            for partition in list(topic.partitions):
                try:
                    offset = await _start_of(partition, request)
                except OffsetOutOfRangeError:
                    continue
                known = True
                if offset is None or offset == partition.high_watermark:
                    continue
                head_bytes = len(batch_head(name, partition.number, 0))
                chunk = await partition.read(offset, max(left - head_bytes, 0))
                if len(chunk.data) > left - head_bytes:
                    if not parts:
                        return (
                            Outcome.FETCH_REFUSED,
                            [],
                        )  # its first record does not fit: the client has to ask for more
                    continue
                if not chunk.data:
                    continue
                parts += (batch_head(name, partition.number, len(chunk.data)), chunk.data)
                left -= head_bytes + len(chunk.data)
                count = chunk.next_offset - chunk.base_offset
                self._metrics.topic_fetched(PROTOCOL, name).inc(count, len(chunk.data))
        if not subscribed:
            return Outcome.FETCH_REFUSED, []
        return (Outcome.FETCHED, parts) if known else (Outcome.FETCH_NO_OFFSET, [encode_missing_offset(request.start)])


async def _start_of(partition: Partition, request: Fetch) -> int | None:
    """Return the offset at which a fetch begins in a partition, `None` when it has nothing to give.

    Raises:
        OffsetOutOfRangeError: the partition does not have the offset.
    """
    if request.start_type != FROM_OFFSET:
        return await partition.find_time(request.start)
    if not partition.log.first_offset <= request.start <= partition.high_watermark:
        raise OffsetOutOfRangeError(request.start, partition.log.first_offset, partition.high_watermark)
    return request.start
