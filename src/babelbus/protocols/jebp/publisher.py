"""What the requests that create records mean (12 and 13): published, and answered when they are as safe as promised."""

from collections.abc import Mapping, Sequence

from babelbus.core.access import Action
from babelbus.core.access import Identity as Client
from babelbus.core.receipt import Receipt
from babelbus.core.record import Headers
from babelbus.core.topic import (
    SequenceGapError,
    SequenceTooOldError,
    Topic,
    UnknownPartitionError,
)
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.box import Sealer
from babelbus.protocols.jebp.codec import encode_records_created
from babelbus.protocols.jebp.messages import PROTOCOL, CreateRecord, CreateRecords, RecordsCreated
from babelbus.protocols.jebp.status import Answers, Outcome
from babelbus.records.envelope import SOURCE_HEADER
from babelbus.records.format import InvalidRecordError
from babelbus.records.ingest import ChecksumError, parse_records
from babelbus.storage.errors import DiskError, DiskFullError


class Publisher:
    """Publishes for one connection, under the name of who opened it; each call says what the client may do by now.

    A client that is `None` is in no list any more: it may do nothing.
    """

    def __init__(
        self,
        topics: Mapping[str, Topic],
        outbox: Outbox,
        sealer: Sealer,
        *,
        opened_by: Client,
        answers: Answers,
        metrics: Metrics,
    ) -> None:
        self._topics = topics
        self._outbox = outbox
        self._sealer = sealer
        self._answers = answers
        self._created = answers[Outcome.RECORD_CREATED].content
        self._metrics = metrics
        self._source: Headers = ((SOURCE_HEADER, opened_by.source.encode()),)

    # -- 12: records one by one --------------------------------------------------------------------------------------

    def create_run(self, run: Sequence[CreateRecord], client: Client | None) -> None:
        """Store records that came one behind the other, and answer them together once they are as safe as promised."""
        if len(run) == 1 and run[0].checksum_valid and self._create_one(run[0], client):
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
            topic = self._topics.get(name)
            if topic is None or not _may_publish(client, name):
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

    def _create_one(self, record: CreateRecord, client: Client | None) -> bool:
        """Do the same for a record that came alone, which many clients send; `False`: it needs the long way."""
        topic = self._topics.get(record.topic)
        if topic is None or not _may_publish(client, record.topic):
            return False
        size = len(record.payload)
        receipts = topic.publish_payloads((record.payload,), [record.timestamp], self._source)
        self._metrics.topic_published(PROTOCOL, record.topic).inc(1, size)
        receipt = receipts[0]
        self._outbox.answer_when(receipts, lambda: self._answer_alike(1, receipt), size)
        return True

    def _checksum_outcome(self, record: CreateRecord) -> Outcome:
        """A record whose checksum is wrong may help when it is sent again, but not to a topic that does not exist."""
        if record.topic in self._topics:
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

    # -- 13: a batch -------------------------------------------------------------------------------------------------

    def create_records(self, request: CreateRecords, client: Client | None) -> None:
        """Store a batch that came in the stored form (extension jebp/1.1)."""
        topic = self._topics.get(request.topic)
        if topic is None or not _may_publish(client, request.topic):
            self._refuse(Outcome.CREATE_RECORDS_REFUSED)
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
            self._refuse(_batch_outcome(error))
            return
        self._metrics.topic_published(PROTOCOL, request.topic).inc(batch.count, size)

        def answer() -> bytes | bytearray:
            if receipt.error is not None:
                self._count_error(receipt.error)
                return self._sealer.seal_many([self._content(_batch_outcome(receipt.error))])
            place = encode_records_created(RecordsCreated(receipt.partition, receipt.base_offset))
            return self._sealer.seal_many([self._content(Outcome.RECORDS_CREATED) + place])

        self._outbox.answer_when([receipt], answer, size)

    def _refuse(self, outcome: Outcome) -> None:
        answer = self._content(outcome)
        self._outbox.answer(lambda: self._sealer.seal_many([answer]))

    # -- both --------------------------------------------------------------------------------------------------------

    def _content(self, outcome: Outcome) -> bytes:
        return self._answers[outcome].content

    def _count_error(self, error: BabelbusError) -> None:
        reason = "disk" if isinstance(error, DiskError | DiskFullError) else "refused"
        self._metrics.publish_errors_total.labels(PROTOCOL, reason).inc()


def _may_publish(client: Client | None, topic: str) -> bool:
    return client is not None and client.may(Action.PUBLISH, topic)


def _batch_outcome(error: BabelbusError) -> Outcome:
    """Return whether sending a batch again may help."""
    if isinstance(error, ChecksumError | SequenceGapError):
        return Outcome.CREATE_RECORDS_REPEAT
    if isinstance(error, InvalidRecordError | SequenceTooOldError | UnknownPartitionError):
        return Outcome.CREATE_RECORDS_REFUSED
    return Outcome.CREATE_RECORDS_REPEAT
