"""Reading from a server over the bus: jebp ships the stored bytes, which are decoded where they arrive.

A server that knows partitions by number is asked for them. An older one's fetch names no partition: it gives those of a
topic in order, each from the same offset. So what can be read there for certain is the first partition of a topic, and
the query has to say that it means that one (`assign`).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from babelbus.client import (
    BlockingClient,
    ClientClosedError,
    ConnectionLostError,
    FetchedBatch,
    OutcomeUnknownError,
    RecordTooLargeError,
    RequestError,
    TopicPositions,
    UnknownPartitionError,
    UnsupportedByServerError,
    UntrustedServerError,
)
from babelbus.client import OffsetOutOfRangeError as NoOffsetError
from babelbus.client import UnknownTopicError as NoTopicError
from babelbus.records.columns import Columns, decode_columns, find_positions
from babelbus.records.fields import offset_of
from babelbus.records.format import CorruptRecordError
from babelbus.spark.connection import Patience, connect
from babelbus.spark.errors import OptionError, PartitionUnreachableError, RecordsRefusedError, UnknownTopicError
from babelbus.spark.options import Place
from babelbus.spark.plan import Bounds
from babelbus.storage.errors import OffsetOutOfRangeError

FETCH_BYTES = 8 * 2**20
"""Of one request; with 4 MiB a single reader is a third slower, for each one is waited for."""
PROBE_BYTES = 4096
FETCH_BYTES_MAX = 2**28
"""Where asking for more ends: no frame of jebp is as large, so the server takes it for as much as it can send."""
SAMPLE_BYTES = 2**16

T = TypeVar("T")


class ServerReach:
    """The topics of a server; see `reach.Reach`. The connection is made with the first call, and again when lost.

    A server that is away is waited for, `requestTimeoutMs` for each request: all of them may be sent twice.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client: BlockingClient | None = None
        self._fingerprint = ""
        self._by_number = True
        self._ends: dict[str, int] = {}
        self._record_bytes: dict[str, float] = {}

    def topics(self) -> list[str]:
        """Return the names of the topics that we may read, sorted.

        Raises:
            PartitionUnreachableError: the server is an older one, which has no list of them.
            ClientError: the server is not to be reached.
        """
        found = self._positions(None)
        if found is None:
            raise PartitionUnreachableError(
                f"option subscribePattern: the server at {self._place.address} is an older one that does not list its"
                " topics over jebp; name them with assign, or read the data folder by path"
            )
        return [one.topic for one in found]

    def bounds(self, topic: str, wanted: tuple[int, ...] | None) -> dict[int, Bounds]:
        """Return what the wanted partitions of a topic hold (`None`: all).

        Raises:
            UnknownTopicError: there is no such topic, or we may not read it.
            PartitionUnreachableError: the server is an older one, and what is wanted is not the first partition alone.
            ClientError: the server is not to be reached.
        """
        found = self._positions(topic)
        if found is not None:
            (told,) = found
            return {
                number: Bounds(one.first_offset, one.high_watermark, one.size_bytes, told.id)
                for number, one in enumerate(told.partitions)
                if wanted is None or number in wanted
            }
        if wanted != (0,):
            what = "all partitions" if wanted is None else f"partitions {', '.join(map(str, wanted))}"
            raise PartitionUnreachableError(
                f"topic {topic!r}: {what} cannot be read by url from the older server at {self._place.address}, for it"
                " gives the first one for certain and does not tell whether there are others; write"
                f' assign={{"{topic}": [0]}}, or read the data folder by path'
            )
        first = self._first(topic)
        end = self._find_end(topic, first)
        return {0: Bounds(first, end, int((end - first) * self._record_size(topic, first, end)))}

    def find_time(self, topic: str, partition: int, timestamp: int) -> int | None:
        """Return the offset of the first record at or after `timestamp` (ms), `None` when there is none."""
        batch, _ = self._fetch(topic, partition, timestamp=timestamp, bytes_max=PROBE_BYTES)
        return batch.base_offset if batch is not None else None

    def move_group(self, topic: str, group: str, offsets: dict[int, int]) -> None:
        """Tell how far a stream is in the partitions of a topic: the next offset that it reads of each.

        Raises:
            OptionError: the group cannot be one that a reader moves, or the server is an older one.
            UnknownTopicError: there is no such topic, or we may not read it.
            ClientError: the server is not to be reached.
        """
        try:
            self._ask(lambda client: client.move_group(topic, group, offsets))
        except (UnknownPartitionError, NoTopicError):
            raise self._no_topic(topic) from None
        except UnsupportedByServerError:
            raise OptionError("option groupId: the server is an older one, which cannot be told") from None
        except RequestError as error:
            raise OptionError(f"option groupId: {error}") from None

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Columns]:
        """Yield the records of some offsets; the next chunk is fetched while the caller works on the last one.

        The server has compared every byte with its CRC, and what is sealed cannot change on the way; so the CRCs are
        not computed once more.

        Raises:
            OffsetOutOfRangeError: `start` was removed, or the log ends before `end`.
            RecordsRefusedError: a record is damaged.
            ClientError: the server was not to be reached for `requestTimeoutMs`.
        """
        with ThreadPoolExecutor(1, "fetch") as pool:
            ahead: Future[tuple[FetchedBatch | None, int]] | None = None
            size = FETCH_BYTES
            try:
                while start < end:
                    asked = ahead or pool.submit(self._fetch, topic, partition, offset=start, end=end, bytes_max=size)
                    ahead = None
                    try:
                        batch, following = asked.result()
                    except NoOffsetError:
                        batch, following = None, start
                    if batch is None and following > start:  # compaction removed what was asked for
                        start = following
                        continue
                    if batch is None:
                        raise self._out_of_range(topic, partition, start)
                    data = batch.data
                    positions, after = find_positions(data, 0, len(data))
                    if after != len(data) or not len(positions):
                        raise CorruptRecordError(after, f"what the server sent of topic {topic!r} ends inside a record")
                    start = max(following, offset_of(data, int(positions[-1])) + 1)
                    if start < end:
                        room = int((end - start) * len(data) / len(positions)) + PROBE_BYTES
                        size = max(min(FETCH_BYTES, room), PROBE_BYTES)
                        ahead = pool.submit(self._fetch, topic, partition, offset=start, end=end, bytes_max=size)
                    yield decode_columns(data, positions)
            finally:
                if ahead is not None:
                    ahead.cancel()

    def close(self) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- how ---------------------------------------------------------------------------------------------------------

    def _ask(self, request: Callable[[BlockingClient], T]) -> T:
        """Return the answer to a request, asked for again on a new connection when the server went away meanwhile.

        Raises:
            ClientError: the server refused, or was away for `requestTimeoutMs`, or is another one by now.
        """
        patience = Patience(self._place)
        while True:
            client = self._connected(patience)
            try:
                return request(client)
            except ConnectionLostError as error:
                self.close()
                patience.wait(error)
            except (ClientClosedError, OutcomeUnknownError):  # nothing more can come through it
                self.close()
                raise

    def _connected(self, patience: Patience) -> BlockingClient:
        if self._client is None:
            try:
                self._client = connect(self._place, patience, fingerprint=self._fingerprint, reconnect=False)
            except UntrustedServerError:
                self._fingerprint = ""  # this query has ended; the next one may believe the new server
                raise
            self._fingerprint = self._client.server_fingerprint
        return self._client

    def _no_topic(self, topic: str, what: str = "") -> UnknownTopicError:
        return UnknownTopicError(topic, f"{what}on the server at {self._place.address}, or no right to read it")

    def _positions(self, topic: str | None) -> list[TopicPositions] | None:
        """Ask for the partitions of a topic or of all; `None`: the server is an older one."""
        if not self._by_number:
            return None
        try:
            return self._ask(lambda client: client.positions(None if topic is None else [topic]))
        except UnsupportedByServerError:
            self._by_number = False
            return None
        except NoTopicError:
            raise self._no_topic(topic or "") from None

    def _out_of_range(self, topic: str, partition: int, start: int) -> OffsetOutOfRangeError:
        self._ends.pop(topic, None)
        there = self.bounds(topic, (partition,)).get(partition, Bounds(0, 0, 0))
        return OffsetOutOfRangeError(start, there.first, there.end)

    def _fetch(
        self,
        topic: str,
        partition: int = 0,
        *,
        offset: int | None = None,
        timestamp: int | None = None,
        end: int | None = None,
        bytes_max: int,
    ) -> tuple[FetchedBatch | None, int]:
        """Return records from an offset or a time on, `None` when there are none, and the offset to go on at.

        Raises:
            NoOffsetError: there is no such offset.
            RecordsRefusedError: the server cannot give them: the first one is damaged, as a rule.
            UnknownTopicError, PartitionUnreachableError, ClientError: see `bounds`.
        """
        while True:
            try:
                return self._fetch_once(topic, partition, offset, timestamp, end, bytes_max)
            except UnsupportedByServerError:
                self._by_number = False
            except RecordTooLargeError as error:
                if bytes_max >= FETCH_BYTES_MAX:
                    raise RecordsRefusedError(topic, partition, offset, str(error)) from error
                bytes_max = min(16 * bytes_max, FETCH_BYTES_MAX)
            except NoTopicError:
                raise self._no_topic(topic) from None
            except UnknownPartitionError:
                raise self._no_topic(topic, f"with a partition {partition} ") from None
            except NoOffsetError:
                raise
            except RequestError as error:
                raise RecordsRefusedError(topic, partition, offset, str(error)) from error

    def _fetch_once(
        self, topic: str, partition: int, offset: int | None, timestamp: int | None, end: int | None, bytes_max: int
    ) -> tuple[FetchedBatch | None, int]:
        if self._by_number:
            found = self._ask(
                lambda client: client.fetch_partition(
                    topic, partition, offset=offset, timestamp=timestamp, end_offset=end, bytes_max=bytes_max
                )
            )
            return found.batch, found.next_offset
        if partition:
            raise PartitionUnreachableError(
                f"topic {topic!r}: partition {partition} cannot be read from the older server at {self._place.address}"
            )
        batches = self._ask(
            lambda client: client.fetch(topic, offset=offset, timestamp=timestamp, bytes_max=bytes_max)
        ).batches
        if batches and batches[0].partition == 0:
            return batches[0], batches[0].next_offset
        return None, offset or 0

    # -- an older server's first partition ---------------------------------------------------------------------------

    def _first(self, topic: str) -> int:
        """Return the offset of the oldest record; where the topic ends, as far as is known, when retention left
        none.
        """
        batch, _ = self._fetch(topic, timestamp=0, bytes_max=PROBE_BYTES)
        if batch is not None:
            return batch.base_offset
        known = self._ends.get(topic, 0)
        return known if self._side(topic, known) == 0 else 0

    def _find_end(self, topic: str, first: int) -> int:
        """Return the offset after the last record that readers may see.

        jebp itself has no request for it, but a fetch tells on which side of it an offset is. So the search gallops
        from where the end was last time: one request when nothing came, some 40 for a million new records.
        """
        low = max(self._ends.get(topic, first), first)
        if low > first and self._side(topic, low) >= 0 and self._side(topic, low - 1) >= 0:
            low = first  # the topic has lost its end, or was made again
        high, step = low, 1024
        while self._side(topic, high) < 0:
            low, high, step = high, high + step, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._side(topic, middle) < 0 else (low, middle)
        self._ends[topic] = high
        return high

    def _side(self, topic: str, offset: int) -> int:
        """Tell whether an offset is below the end (-1), does not exist (1), or may be the end (0).

        May be, since a longer partition that has this offset has been answered for too.
        """
        try:
            return -1 if self._fetch(topic, offset=offset, bytes_max=PROBE_BYTES)[0] is not None else 0
        except NoOffsetError:
            return 1

    def _record_size(self, topic: str, first: int, end: int) -> float:
        """Return about how many bytes a record takes, from some of the first ones."""
        known = self._record_bytes.get(topic)
        if known is None and end > first:
            batch, _ = self._fetch(topic, offset=first, bytes_max=SAMPLE_BYTES)
            if batch is not None:
                known = self._record_bytes[topic] = len(batch.data) / (batch.next_offset - batch.base_offset)
        return known or 1.0
