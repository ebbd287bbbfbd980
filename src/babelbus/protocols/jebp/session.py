"""What the messages of one jebp connection mean (docs/protocols/jebp.md): requests in, broker calls out."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from babelbus.core.access import Action
from babelbus.core.access import Identity as Client
from babelbus.core.broker import Broker, TopicExistsError, UnknownTopicError
from babelbus.core.partition import Partition
from babelbus.core.record import Headers, Receipt
from babelbus.core.settings import InvalidSettingError
from babelbus.core.subject import InvalidTopicNameError
from babelbus.core.topic import (
    SOURCE_HEADER,
    SequenceGapError,
    SequenceTooOldError,
    Topic,
    UnknownPartitionError,
)
from babelbus.errors import BabelbusError, StorageError
from babelbus.metrics import Metrics
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.codec import (
    batch_head,
    encode_missing_offset,
    encode_missing_topics,
    encode_records_created,
)
from babelbus.protocols.jebp.decoder import ServerDecoder
from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX
from babelbus.protocols.jebp.handshake import ServerHandshake, UntrustedPeerError
from babelbus.protocols.jebp.identity import Identity
from babelbus.protocols.jebp.messages import (
    CREATE_TOPIC,
    FROM_OFFSET,
    REMOVE_TOPIC,
    AbortBatch,
    AskTransaction,
    CommitBatch,
    CreateRecord,
    CreateRecords,
    CreateTopic,
    Data,
    Fetch,
    FetchPartition,
    Malformed,
    MoveGroup,
    PartitionRequest,
    RecordsCreated,
    RemoveTopic,
    Request,
    StageRecords,
    StagingRequest,
    Subscribe,
    TellPositions,
)
from babelbus.protocols.jebp.partition_session import awaited, fetch_partition, move_group, tell_positions
from babelbus.protocols.jebp.staging_session import carry_out
from babelbus.protocols.jebp.status import Outcome, Reading, answers
from babelbus.storage.disk import InvalidTopicNameError as InvalidFolderError
from babelbus.storage.files import DiskError, DiskFullError, OffsetOutOfRangeError
from babelbus.storage.format import CorruptRecordError, InvalidRecordError
from babelbus.storage.ingest import ChecksumError, parse_records

log = logging.getLogger(__name__)

PROTOCOL = "jebp"
RESPONSE_OVERHEAD_BYTES = 18
"""Tag and the two status bytes, which the frame limit counts too."""


class Options(msgspec.Struct, frozen=True):
    """How the server reads what the document leaves open, and its limits."""

    status: Reading = "command"
    bare_records: bool = False
    bare_certificates: bool = False
    frame_bytes_max: int = FRAME_BYTES_MAX


Authorise = Callable[[str], Client | None]
"""Fingerprint -> who that is and what he may do; `None`: nobody we know."""


class Session:
    """One connection of a jebp client, from its handshake on."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        close: Callable[[], None],
        *,
        identity: Identity,
        authorise: Authorise,
        options: Options,
        metrics: Metrics,
        handshake: ServerHandshake | None = None,
    ) -> None:
        self._broker = broker
        self._outbox = outbox
        self._close_connection = close
        self._authorise = authorise
        self._options = options
        self._metrics = metrics
        self._answers = answers(options.status)
        self._created = self._answers[Outcome.RECORD_CREATED].content
        # One is given by tests that know every byte; else its keys are made here, for this connection alone.
        self._handshake = handshake or ServerHandshake(
            identity, bare_certificates=options.bare_certificates, frame_bytes_max=options.frame_bytes_max
        )
        self._decoder: ServerDecoder | None = None
        self._client: Client | None = None
        self._fingerprint = ""
        self._topics: dict[str, Topic] = {}
        self._backlog: deque[Request] = deque()
        self._waits: set[Receipt] = set()
        self._source: Headers = ()
        self.on_close: Callable[[], None] = lambda: None
        hello = self._handshake.begin()
        outbox.answer(lambda: hello)

    # -- connection --------------------------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Take what one read brought, and do all that it asks for.

        Raises:
            RemoteProtocolError: the peer broke the protocol or is nobody we know; close the connection.
        """
        decoder = self._decoder
        if decoder is None:
            decoder = self._shake(data)
            if decoder is None:
                return
        else:
            decoder.receive_data(data)
        requests = decoder.events()
        if self._backlog:
            self._backlog.extend(requests)
        else:
            self._handle(requests)
        if decoder.error is not None:
            raise decoder.error

    def _shake(self, data: bytes) -> ServerDecoder | None:
        """Go on with the handshake; give the decoder of what follows once it is done."""
        reply = self._handshake.receive_data(data)
        if reply:
            self._outbox.answer(lambda: reply)
        established = self._handshake.established
        if established is None:
            return None
        client = self._authorise(established.fingerprint)
        if client is None:
            self._metrics.connections_refused_total.labels(PROTOCOL, "identity").inc()
            raise UntrustedPeerError(established.fingerprint)
        log.info("jebp: %s (%s) connected", client.name, established.fingerprint[:16])
        self._client, self._fingerprint = client, established.fingerprint
        self._source = ((SOURCE_HEADER, client.source.encode()),)
        self._sealer = established.sealer
        bare = self._broker.topics.__contains__ if self._options.bare_records else None
        self._decoder = ServerDecoder(
            established.opener, frame_bytes_max=self._options.frame_bytes_max, topic_exists=bare
        )
        self._decoder.receive_data(established.surplus)
        return self._decoder

    @property
    def established(self) -> bool:
        """Whether the client has proved who it is."""
        return self._client is not None

    @property
    def busy(self) -> bool:
        """Whether requests are put off."""
        return bool(self._backlog)

    def reauthorise(self) -> None:
        """Look the client up again after the lists of clients changed; one that is not in them any more has to go."""
        if self._client is not None:
            self._client = self._authorise(self._fingerprint)
            if self._client is None:
                log.info("jebp: client %s is not in the list any more, closing", self._fingerprint[:16])
                self._close_connection()

    def resume(self) -> None:
        """Go on with what was put off while the outbox was full."""
        requests = list(self._backlog)
        self._backlog.clear()
        self._handle(requests)

    def close(self) -> None:
        """The client is gone: records of requests that came whole are still stored (specification, section 6)."""
        requests = [request for request in self._backlog if not isinstance(request, Fetch | FetchPartition)]
        self._backlog.clear()
        self.end_waits()
        try:
            self._handle(requests)
        finally:
            self._topics.clear()
            self.on_close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _handle(self, requests: Sequence[Request]) -> None:
        """Carry out requests in order: runs of records together, until the outbox is full."""
        count, outbox = len(requests), self._outbox
        at = 0
        while at < count:
            if outbox.full:
                self._backlog.extend(requests[at:])
                return
            request = requests[at]
            if type(request) is CreateRecord:
                after = at + 1
                while after < count and type(requests[after]) is CreateRecord:
                    after += 1
                self._create_run(requests[at:after])  # type: ignore[arg-type]  # the loop looked at each
                at = after
                continue
            at += 1
            match request:
                case CreateRecords():
                    self._create_records(request)
                case Fetch():
                    self._fetch(request)
                case Subscribe():
                    self._subscribe(request)
                case CreateTopic():
                    self._say(self._create_topic(request))
                case RemoveTopic():
                    self._say(self._remove_topic(request))
                case StageRecords() | CommitBatch() | AbortBatch() | AskTransaction():
                    self._carry_out_staging(request)
                case TellPositions() | FetchPartition() | MoveGroup():
                    self._read_partitions(request)
                case Malformed():
                    self._say(self._refuse(request))

    def _may(self, action: Action, topic: str) -> bool:
        return self._client is not None and self._client.may(action, topic)

    def _content(self, outcome: Outcome) -> bytes:
        return self._answers[outcome].content

    def _say(self, outcome: Outcome, content: bytes = b"") -> None:
        answer = self._content(outcome) + content
        self._outbox.answer(lambda: self._sealer.seal_many([answer]))

    def _refuse(self, request: Malformed) -> Outcome:
        """Say what is wrong; who may not do it at all is told that first (section 4.2)."""
        if request.command == CREATE_TOPIC and not self._may(Action.ADMIN, ""):
            return Outcome.CREATE_TOPIC_NO_RIGHTS
        if request.command == REMOVE_TOPIC and not self._may(Action.ADMIN, ""):
            return Outcome.REMOVE_TOPIC_NO_RIGHTS
        return request.outcome

    # -- 12 and 13: records ------------------------------------------------------------------------------------------

    def _create_run(self, run: Sequence[CreateRecord]) -> None:
        """Store records that came one behind the other, and answer them together once they are as safe as promised."""
        if len(run) == 1 and run[0].checksum_valid and self._create_one(run[0]):
            return
        by_topic: dict[str, list[int]] = {}
        refused: dict[int, Outcome] = {}
        first = run[0].topic
        if all([record.checksum_valid and record.topic == first for record in run]):  # noqa: C419  # a list is faster
            by_topic[first] = list(range(len(run)))
        else:
            for number, record in enumerate(run):
                if record.checksum_valid:
                    by_topic.setdefault(record.topic, []).append(number)
                else:
                    refused[number] = self._checksum_outcome(record)
        receipts: list[Receipt] = []
        places: dict[int, Receipt] = {}
        size = 0
        for name, numbers in by_topic.items():
            topic = self._broker.topics.get(name)
            if topic is None or not self._may(Action.PUBLISH, name):
                refused.update(dict.fromkeys(numbers, Outcome.CREATE_RECORD_REFUSED))
                continue
            payloads = [run[number].payload for number in numbers]
            made = topic.publish_payloads(payloads, [run[number].timestamp for number in numbers], self._source)
            stored = sum(map(len, payloads))
            size += stored
            self._metrics.topic_published(PROTOCOL, name).inc(len(numbers), stored)
            receipts += made
            if len(by_topic) > 1 or len(made) > 1 or refused:
                for turn, number in enumerate(numbers):
                    places[number] = made[turn % len(made)]
        if refused or len(receipts) != 1:
            self._outbox.answer_when(receipts, lambda: self._answer_mixed(len(run), refused, places), size)
        else:
            receipt = receipts[0]
            self._outbox.answer_when(receipts, lambda: self._answer_alike(len(run), receipt), size)

    def _create_one(self, record: CreateRecord) -> bool:
        """Do the same for a record that came alone, which many clients send; `False`: it needs the long way."""
        topic = self._broker.topics.get(record.topic)
        if topic is None or not self._may(Action.PUBLISH, record.topic):
            return False
        size = len(record.payload)
        receipts = topic.publish_payloads((record.payload,), [record.timestamp], self._source)
        self._metrics.topic_published(PROTOCOL, record.topic).inc(1, size)
        receipt = receipts[0]
        self._outbox.answer_when(receipts, lambda: self._answer_alike(1, receipt), size)
        return True

    def _checksum_outcome(self, record: CreateRecord) -> Outcome:
        """A record whose checksum is wrong may help when it is sent again, but not to a topic that does not exist."""
        if record.topic in self._broker.topics:
            return Outcome.CREATE_RECORD_CHECKSUM
        return Outcome.CREATE_RECORD_REFUSED

    def _answer_alike(self, count: int, receipt: Receipt) -> bytes | bytearray:
        content = self._created if receipt.error is None else self._content(self._outcome_of(receipt))
        return self._sealer.seal_repeated(content, count)

    def _answer_mixed(self, count: int, refused: dict[int, Outcome], places: dict[int, Receipt]) -> bytes | bytearray:
        outcomes = [
            refused[number] if number in refused else self._outcome_of(places[number]) for number in range(count)
        ]
        return self._sealer.seal_many([self._content(outcome) for outcome in outcomes])

    def _outcome_of(self, receipt: Receipt) -> Outcome:
        error = receipt.error
        if error is None:
            return Outcome.RECORD_CREATED
        self._count_error(error)
        return Outcome.CREATE_RECORD_REFUSED if isinstance(error, InvalidRecordError) else Outcome.CREATE_RECORD_DISK

    def _count_error(self, error: BabelbusError) -> None:
        reason = "disk" if isinstance(error, DiskError | DiskFullError) else "refused"
        self._metrics.publish_errors_total.labels(PROTOCOL, reason).inc()

    def _create_records(self, request: CreateRecords) -> None:
        """Store a batch that came in the stored form (extension jebp/1.1)."""
        topic = self._broker.topics.get(request.topic)
        if topic is None or not self._may(Action.PUBLISH, request.topic):
            self._say(Outcome.CREATE_RECORDS_REFUSED)
            return
        size = len(request.records)
        try:
            batch = parse_records(request.records)
            receipt = topic.publish_batch(
                batch,
                partition=request.partition,
                producer_id=request.producer_id,
                first_sequence=request.first_sequence,
                source=self._source,
            )
        except BabelbusError as error:
            self._count_error(error)
            self._say(_batch_outcome(error))
            return
        self._metrics.topic_published(PROTOCOL, request.topic).inc(batch.count, size)

        def answer() -> bytes | bytearray:
            if receipt.error is not None:
                self._count_error(receipt.error)
                return self._sealer.seal_many([self._content(_batch_outcome(receipt.error))])
            place = encode_records_created(RecordsCreated(receipt.partition, receipt.base_offset))
            return self._sealer.seal_many([self._content(Outcome.RECORDS_CREATED) + place])

        self._outbox.answer_when([receipt], answer, size)

    # -- 14, 15, 16 and 23: staged batches ---------------------------------------------------------------------------

    def _carry_out_staging(self, request: StagingRequest) -> None:
        staging, client = self._broker.staging, self._client
        if staging is None or client is None:
            self._say(Outcome.UNKNOWN_COMMAND)
            return
        receipts, tell = carry_out(request, staging, client, self._metrics)

        def answer() -> bytes | bytearray:
            outcome, content = tell()
            return self._sealer.seal_many([self._content(outcome) + content])

        self._outbox.answer_when(receipts, answer, len(request.records) if isinstance(request, StageRecords) else 0)

    # -- 21 and 22: reading ------------------------------------------------------------------------------------------

    def _subscribe(self, request: Subscribe) -> None:
        """Replace the topics that fetch reads (DECISION 23)."""
        topics = self._broker.topics
        missing = [name for name in request.topics if name not in topics or not self._may(Action.SUBSCRIBE, name)]
        if missing:
            self._say(Outcome.SUBSCRIBE_MISSING, encode_missing_topics(missing))
            return
        self._topics = {name: topics[name] for name in request.topics}
        self._say(Outcome.SUBSCRIBED)

    def _fetch(self, request: Fetch) -> None:
        """Read the subscribed topics, partitions ascending (DECISION 26 to 29)."""
        # A topic that was removed, or made again under its name, is not subscribed any more.
        self._topics = {name: topic for name, topic in self._topics.items() if self._broker.topics.get(name) is topic}
        try:
            parts = self._collect(request)
        except _NoOffsetError:
            self._say(Outcome.FETCH_NO_OFFSET, encode_missing_offset(request.start))
            return
        except (_RefusedError, CorruptRecordError) as error:
            if isinstance(error, CorruptRecordError):
                self._metrics.corrupt_records_total.inc()
                log.error("jebp: fetch: %s", error)
            self._say(Outcome.FETCH_REFUSED)
            return
        except StorageError as error:
            log.error("jebp: fetch: %s", error)
            self._say(Outcome.FETCH_DISK)
            return
        content = [self._content(Outcome.FETCHED), *parts]
        self._outbox.answer(lambda: self._sealer.seal_parts(content), sum(map(len, parts)))

    def _collect(self, request: Fetch) -> list[Data]:
        """Give heads and records of all batches, `bytes_max` together at the most."""
        left = min(request.bytes_max, self._options.frame_bytes_max - RESPONSE_OVERHEAD_BYTES)
        parts: list[Data] = []
        known = False
        for name, topic in self._topics.items():
            topic.commit()
            for partition in topic.partitions:
                try:
                    offset = _start_of(partition, request)
                except OffsetOutOfRangeError:
                    continue
                known = True
                if offset is None or offset == partition.high_watermark:
                    continue
                head_bytes = len(batch_head(name, partition.number, 0))
                chunk = partition.read(offset, max(left - head_bytes, 0))
                if not chunk.data:
                    if not parts and chunk.next_offset < partition.high_watermark:
                        raise _RefusedError  # its first record does not fit: the client has to ask for more
                    continue
                parts += (batch_head(name, partition.number, len(chunk.data)), chunk.data)
                left -= head_bytes + len(chunk.data)
                count = chunk.next_offset - chunk.base_offset
                self._metrics.topic_fetched(PROTOCOL, name).inc(count, len(chunk.data))
        if not self._topics:
            raise _RefusedError
        if not known:
            raise _NoOffsetError
        return parts

    # -- 24 to 26: partitions by number -----------------------------------------------------------------------------

    def _read_partitions(self, request: PartitionRequest) -> None:
        client, topics = self._client, self._broker.topics
        assert client is not None  # nobody else's requests are read
        bytes_max = self._options.frame_bytes_max - RESPONSE_OVERHEAD_BYTES

        def read() -> list[Data]:
            if isinstance(request, TellPositions):
                outcome, parts = tell_positions(request, topics, client, bytes_max)
            elif isinstance(request, MoveGroup):
                outcome, parts = move_group(request, self._broker.groups, topics, client)
            else:
                outcome, parts = fetch_partition(request, topics, client, self._metrics, bytes_max)
            return [self._content(outcome), *parts]

        waiting = awaited(request, topics, client) if isinstance(request, FetchPartition) else None
        if isinstance(request, FetchPartition) and waiting is not None:
            receipt = self._wait(*waiting, request.wait_ms / 1000)
            weight = min(request.bytes_max, bytes_max)
            self._outbox.answer_when([receipt], lambda: self._sealer.seal_parts(read()), weight)
            return
        content = read()
        self._outbox.answer(lambda: self._sealer.seal_parts(content), sum(map(len, content)))

    def _wait(self, partition: Partition, offset: int, seconds: float) -> Receipt:
        """Give what is done when a record can be read, its topic goes away, the time is over or the client is gone."""
        receipt = Receipt(partition.number, offset, 0)
        self._waits.add(receipt)
        cancel = partition.watch(offset, receipt.resolve)
        timer = asyncio.get_running_loop().call_later(seconds, receipt.resolve)

        def forget(_: Receipt) -> None:
            cancel()
            timer.cancel()
            self._waits.discard(receipt)

        receipt.when_done(forget)
        return receipt

    def end_waits(self) -> None:
        """Answer the fetches that wait for records with what there is: the server stops, or nobody is there."""
        for receipt in list(self._waits):
            receipt.resolve()

    # -- 11 and 31: topics -------------------------------------------------------------------------------------------

    def _create_topic(self, request: CreateTopic) -> Outcome:
        if not self._may(Action.ADMIN, request.topic):
            return Outcome.CREATE_TOPIC_NO_RIGHTS
        try:
            self._broker.create_topic(request.topic)
        except TopicExistsError:
            return Outcome.CREATE_TOPIC_EXISTS
        except (InvalidTopicNameError, InvalidFolderError, InvalidSettingError) as error:
            log.info("jebp: create topic: %s", error)
            return Outcome.CREATE_TOPIC_BAD_NAME
        except StorageError as error:
            log.error("jebp: create topic: %s", error)
            return Outcome.CREATE_TOPIC_DISK
        return Outcome.TOPIC_CREATED

    def _remove_topic(self, request: RemoveTopic) -> Outcome:
        if not self._may(Action.ADMIN, request.topic):
            return Outcome.REMOVE_TOPIC_NO_RIGHTS
        try:
            self._broker.remove_topic(request.topic)
        except UnknownTopicError:
            return Outcome.REMOVE_TOPIC_MISSING
        except StorageError as error:
            log.error("jebp: remove topic: %s", error)
            return Outcome.REMOVE_TOPIC_DISK
        return Outcome.TOPIC_REMOVED


class _RefusedError(BabelbusError):
    """A fetch that cannot be answered with records."""


class _NoOffsetError(BabelbusError):
    """No subscribed partition has the offset."""


def _start_of(partition: Partition, request: Fetch) -> int | None:
    """Give the offset at which a fetch begins in a partition, `None` when it has nothing to give.

    Raises:
        OffsetOutOfRangeError: the offset is none of this partition's.
    """
    if request.start_type != FROM_OFFSET:
        return partition.find_time(request.start)
    if not partition.log.first_offset <= request.start <= partition.high_watermark:
        raise OffsetOutOfRangeError(request.start, partition.log.first_offset, partition.high_watermark)
    return request.start


def _batch_outcome(error: BabelbusError) -> Outcome:
    """Say whether sending a batch again may help."""
    if isinstance(error, ChecksumError | SequenceGapError):
        return Outcome.CREATE_RECORDS_REPEAT
    if isinstance(error, InvalidRecordError | SequenceTooOldError | UnknownPartitionError):
        return Outcome.CREATE_RECORDS_REFUSED
    return Outcome.CREATE_RECORDS_REPEAT
