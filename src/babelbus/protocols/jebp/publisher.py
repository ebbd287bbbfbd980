"""What the requests that create records mean (12 and 13): published, and answered when they are as safe as promised."""

from collections.abc import Sequence
from itertools import cycle, islice

from babelbus.core.access import AccessRefusedError, Action
from babelbus.core.access import Identity as Client
from babelbus.core.broker import Broker
from babelbus.core.catalog import UnknownTopicError
from babelbus.core.publish import Payloads, Publication
from babelbus.core.receipt import Receipt
from babelbus.core.record import Headers
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.box import Sealer
from babelbus.protocols.jebp.codec import encode_records_created
from babelbus.protocols.jebp.messages import PROTOCOL, CreateRecord, CreateRecords, RecordsCreated
from babelbus.protocols.jebp.status import Answers, Outcome
from babelbus.records.envelope import SOURCE_HEADER
from babelbus.records.format import InvalidRecordError
from babelbus.records.ingest import parse_records
from babelbus.storage.errors import DiskError, DiskFullError

REFUSALS = (UnknownTopicError, AccessRefusedError)


class Publisher:
    """Publishes for one connection, under the name of who opened it; each call says who the client is by now."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        sealer: Sealer,
        *,
        opened_by: Client,
        answers: Answers,
        metrics: Metrics,
    ) -> None:
        self._broker = broker
        self._outbox = outbox
        self._sealer = sealer
        self._answers = answers
        self._created = answers[Outcome.RECORD_CREATED].content
        self._metrics = metrics
        self._source: Headers = ((SOURCE_HEADER, opened_by.source.encode()),)

    # -- 12: records one by one --------------------------------------------------------------------------------------

    def create_run(self, run: Sequence[CreateRecord], client: Client) -> None:
        """Store records that came one behind the other, and answer them together once they are as safe as promised."""
        count, first = len(run), run[0].topic
        if all([record.checksum_valid and record.topic == first for record in run]):  # noqa: C419  # a list is faster
            receipt, size = self._create(first, run, client)
            if len(receipt.parts) == 1:
                self._outbox.answer_when((receipt,), lambda: self._answer_alike(count, receipt), size)
            else:
                places = dict(enumerate(islice(cycle(receipt.parts), count)))
                self._outbox.answer_when((receipt,), lambda: self._answer_mixed(count, {}, places), size)
            return
        by_topic: dict[str, list[int]] = {}
        refused: dict[int, Outcome] = {}
        for number, record in enumerate(run):
            if record.checksum_valid:
                by_topic.setdefault(record.topic, []).append(number)
            else:
                refused[number] = self._checksum_outcome(record)
        receipts: list[Receipt] = []
        places = {}
        size = 0
        for name, numbers in by_topic.items():
            receipt, stored = self._create(name, [run[number] for number in numbers], client)
            receipts.append(receipt)
            size += stored
            places.update(zip(numbers, cycle(receipt.parts), strict=False))
        self._outbox.answer_when(receipts, lambda: self._answer_mixed(count, refused, places), size)

    def _create(self, topic: str, records: Sequence[CreateRecord], client: Client) -> tuple[Receipt, int]:
        """Publish records to one topic; return the receipt and the bytes of the payloads."""
        payloads = [record.payload for record in records]
        content = Payloads(payloads, [record.timestamp for record in records])
        receipt = self._broker.publish(Publication(client, PROTOCOL, content, topic, source=self._source))
        return receipt, sum(map(len, payloads))

    def _checksum_outcome(self, record: CreateRecord) -> Outcome:
        """A record whose checksum is wrong may help when it is sent again, but not to a topic that does not exist."""
        if self._broker.has_topic(record.topic):
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
        if isinstance(error, REFUSALS):
            return Outcome.CREATE_RECORD_REFUSED
        self._count_error(error)
        return Outcome.CREATE_RECORD_DISK if error.retriable else Outcome.CREATE_RECORD_REFUSED

    # -- 13: a batch -------------------------------------------------------------------------------------------------

    def create_records(self, request: CreateRecords, client: Client) -> None:
        """Store a batch that came in the stored form (extension jebp/1.1)."""
        if not self._broker.has_topic(request.topic) or not self._broker.may(client, Action.PUBLISH, request.topic):
            self._refuse(Outcome.CREATE_RECORDS_REFUSED)  # before anything of the batch is looked at
            return
        try:
            batch = parse_records(request.records)
        except InvalidRecordError as error:
            self._count_error(error)
            self._refuse(_batch_outcome(error))
            return
        receipt = self._broker.publish(
            Publication(
                client,
                PROTOCOL,
                batch,
                request.topic,
                request.partition,
                producer_id=request.producer_id,
                first_sequence=request.first_sequence,
                source=self._source,
            )
        )

        def answer() -> bytes | bytearray:
            if receipt.error is not None:
                self._count_error(receipt.error)
                return self._sealer.seal_many([self._content(_batch_outcome(receipt.error))])
            place = encode_records_created(RecordsCreated(receipt.partition, receipt.base_offset))
            return self._sealer.seal_many([self._content(Outcome.RECORDS_CREATED) + place])

        self._outbox.answer_when([receipt], answer, len(request.records))

    def _refuse(self, outcome: Outcome) -> None:
        answer = self._content(outcome)
        self._outbox.answer(lambda: self._sealer.seal_many([answer]))

    # -- both --------------------------------------------------------------------------------------------------------

    def _content(self, outcome: Outcome) -> bytes:
        return self._answers[outcome].content

    def _count_error(self, error: BabelbusError) -> None:
        reason = "disk" if isinstance(error, DiskError | DiskFullError) else "refused"
        self._metrics.publish_errors_total.labels(PROTOCOL, reason).inc()


def _batch_outcome(error: BabelbusError) -> Outcome:
    """Return whether sending a batch again may help."""
    return Outcome.CREATE_RECORDS_REPEAT if error.retriable else Outcome.CREATE_RECORDS_REFUSED
