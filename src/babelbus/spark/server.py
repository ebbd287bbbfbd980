"""Reading from a server over the bus: jebp ships the stored bytes, which are decoded where they arrive."""

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
    UnknownPartitionError,
    UntrustedServerError,
)
from babelbus.client import OffsetOutOfRangeError as NoOffsetError
from babelbus.client import UnknownTopicError as NoTopicError
from babelbus.records.columns import Columns, decode_columns, find_positions
from babelbus.records.fields import offset_of
from babelbus.records.format import CorruptRecordError
from babelbus.spark.connection import Patience, connect
from babelbus.spark.errors import OptionError, RecordsRefusedError, UnknownTopicError
from babelbus.spark.options import Place
from babelbus.spark.plan import Bounds
from babelbus.storage.errors import OffsetOutOfRangeError

FETCH_BYTES = 8 * 2**20
"""Of one request; with 4 MiB a single reader is a third slower, for each one is waited for."""
PROBE_BYTES = 4096
FETCH_BYTES_MAX = 2**28
"""Where asking for more ends: no frame of jebp is as large, so the server takes it for as much as it can send."""

T = TypeVar("T")


class ServerReach:
    """The topics of a server (`record_source.Reach`). The connection is made with the first call, and again when lost.

    A server that is away is waited for, `requestTimeoutMs` for each request: all of them may be sent twice.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._client: BlockingClient | None = None
        self._fingerprint = ""

    def topics(self) -> list[str]:
        """Return the names of the topics that we may read, sorted.

        Raises:
            ClientError: the server is not to be reached.
        """
        return [one.topic for one in self._ask(lambda client: client.positions())]

    def bounds(self, topic: str, wanted: tuple[int, ...] | None) -> dict[int, Bounds]:
        """Return what the wanted partitions of a topic hold (`None`: all).

        Raises:
            UnknownTopicError: there is no such topic, or we may not read it.
            ClientError: the server is not to be reached.
        """
        try:
            (positions,) = self._ask(lambda client: client.positions([topic]))
        except NoTopicError:
            raise self._no_topic(topic) from None
        return {
            number: Bounds(one.first_offset, one.high_watermark, one.size_bytes, positions.id)
            for number, one in enumerate(positions.partitions)
            if wanted is None or number in wanted
        }

    def find_time(self, topic: str, partition: int, timestamp: int) -> int | None:
        """Return the offset of the first record at or after `timestamp` (ms), `None` without such a record."""
        batch, _ = self._fetch(topic, partition, timestamp=timestamp, bytes_max=PROBE_BYTES)
        return batch.base_offset if batch is not None else None

    def move_group(self, topic: str, group: str, offsets: dict[int, int]) -> None:
        """Send the server the next offset of a stream in each partition of a topic.

        Raises:
            OptionError: the group cannot be one that a reader moves.
            UnknownTopicError: there is no such topic, or we may not read it.
            ClientError: the server is not to be reached.
        """
        try:
            self._ask(lambda client: client.move_group(topic, group, offsets))
        except (UnknownPartitionError, NoTopicError):
            raise self._no_topic(topic) from None
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
        """Close the connection."""
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

    def _out_of_range(self, topic: str, partition: int, start: int) -> OffsetOutOfRangeError:
        there = self.bounds(topic, (partition,)).get(partition, Bounds(0, 0, 0))
        return OffsetOutOfRangeError(start, there.first, there.end)

    def _fetch(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None = None,
        timestamp: int | None = None,
        end: int | None = None,
        bytes_max: int,
    ) -> tuple[FetchedBatch | None, int]:
        """Return records from an offset or a time on, `None` when there are none, and the offset to go on at.

        Raises:
            NoOffsetError: there is no such offset.
            RecordsRefusedError: the server cannot send the records: usually the first one is damaged.
            UnknownTopicError, ClientError: see `bounds`.
        """
        try:
            fetched = self._ask(
                lambda client: client.fetch_partition(
                    topic, partition, offset=offset, timestamp=timestamp, end_offset=end, bytes_max=bytes_max
                )
            )
            return fetched.batch, fetched.next_offset
        except RecordTooLargeError as error:
            if bytes_max >= FETCH_BYTES_MAX:
                raise RecordsRefusedError(topic, partition, offset, str(error)) from error
            larger = min(16 * bytes_max, FETCH_BYTES_MAX)
            return self._fetch(topic, partition, offset=offset, timestamp=timestamp, end=end, bytes_max=larger)
        except NoTopicError:
            raise self._no_topic(topic) from None
        except UnknownPartitionError:
            raise self._no_topic(topic, f"with a partition {partition} ") from None
        except NoOffsetError:
            raise
        except RequestError as error:
            raise RecordsRefusedError(topic, partition, offset, str(error)) from error
