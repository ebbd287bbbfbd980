"""The requests that create records (12 and 13): published, and answered when they are as safe as promised."""

from collections.abc import Callable, Sequence
from itertools import cycle

from babelbus.core.access import Action, refusal
from babelbus.core.access import Identity as Client
from babelbus.core.broker import Broker
from babelbus.core.catalog import UnknownTopicError
from babelbus.core.failures import count_failures
from babelbus.core.publish import Payloads, Publication
from babelbus.core.receipt import Receipt
from babelbus.core.record import Headers
from babelbus.errors import BabelbusError
from babelbus.metrics import Metrics
from babelbus.protocols.contract import Outbox
from babelbus.protocols.jebp.box import Sealer
from babelbus.protocols.jebp.fields import encode_numbers
from babelbus.protocols.jebp.messages import PROTOCOL, CreateRecord, CreateRecords, RecordsCreated
from babelbus.protocols.jebp.status import Answers, Outcome
from babelbus.records.envelope import SOURCE_HEADER
from babelbus.records.ingest import ChecksumError, parse_many
from babelbus.records.record import RecordBatch


class Publisher:
    """Publishes for one connection, under the name of who opened it; each call says who the client is by now.

    Requests of one kind that came one behind the other are published together and answered together.
    """

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
        self._metrics = metrics
        self.source: Headers = ((SOURCE_HEADER, opened_by.source.encode()),)

    def create_each(self, run: Sequence[CreateRecord], client: Client) -> None:
        """Publish records that came one by one (12)."""
        created = self._answers[Outcome.RECORD_CREATED]
        if len(run) == 1:  # its receipt has no parts
            record = run[0]
            content = Payloads([record.payload], [record.timestamp])
            valid = record.checksum_valid
            place = self._publish(record.topic, content, client) if valid else self._refused(record, client)
            self._answer((place,), lambda _: created, len(record.payload))
            return
        by_topic: dict[str, list[CreateRecord]] = {}
        for record in run:
            if record.checksum_valid:
                by_topic.setdefault(record.topic, []).append(record)
        receipts = {topic: cycle(self._create(topic, records, client).parts) for topic, records in by_topic.items()}
        places = [
            next(receipts[record.topic]) if record.checksum_valid else self._refused(record, client) for record in run
        ]
        self._answer(places, lambda _: created, sum([len(record.payload) for record in run]))

    def _refused(self, record: CreateRecord, client: Client) -> Receipt:
        """Return the receipt of a record whose checksum is wrong."""
        return self._refuse(record.topic, client) or self._reject(ChecksumError("the CRC of a record is wrong"))

    def _create(self, topic: str, records: Sequence[CreateRecord], client: Client) -> Receipt:
        content = Payloads([record.payload for record in records], [record.timestamp for record in records])
        return self._publish(topic, content, client)

    def _publish(self, topic: str, content: Payloads, client: Client) -> Receipt:
        return self._broker.publish(Publication(client, PROTOCOL, content, topic, source=self.source))

    def create_batches(self, run: Sequence[CreateRecords], client: Client) -> None:
        """Publish batches in the stored form (13, extension jebp/1.1)."""
        refused = {topic: self._refuse(topic, client) for topic in {request.topic for request in run}}
        # Before anything of a batch is looked at: nobody learns about batches to topics that are not his.
        batches = iter(parse_many([request.records for request in run if refused[request.topic] is None]))
        places = []
        for request in run:
            known = refused[request.topic]
            if known is not None:
                places.append(known)
                continue
            batch = next(batches)
            places.append(
                self._store(request, batch, client) if isinstance(batch, RecordBatch) else self._reject(batch)
            )
        created = self._answers[Outcome.RECORDS_CREATED]

        def place(receipt: Receipt) -> bytes:
            return created + encode_numbers(RecordsCreated(receipt.partition, receipt.base_offset))

        self._answer(places, place, sum([len(request.records) for request in run]))

    def _refuse(self, topic: str, client: Client) -> Receipt | None:
        """Return the refusal of whatever is published to a topic, `None` if the client may publish something there."""
        if not self._broker.has_topic(topic):
            return self._reject(self._broker.why_not_open(client, topic))
        if self._broker.may_some(client, Action.PUBLISH, topic):
            return None
        return Receipt.refused(refusal(client, Action.PUBLISH, topic))

    def _reject(self, error: BabelbusError) -> Receipt:
        """Return the receipt of what does not come as far as the broker, and count it."""
        if not isinstance(error, UnknownTopicError):
            count_failures(self._metrics, (PROTOCOL,), error)
        return Receipt.refused(error)

    def _store(self, request: CreateRecords, batch: RecordBatch, client: Client) -> Receipt:
        return self._broker.publish(
            Publication(
                client,
                PROTOCOL,
                batch,
                request.topic,
                request.partition,
                producer_id=request.producer_id,
                first_sequence=request.first_sequence,
                source=self.source,
            )
        )

    def _answer(self, places: Sequence[Receipt], created: Callable[[Receipt], bytes], size: int) -> None:
        """Answer each request by the receipt in its place, once all of them are done."""
        receipts = places if len(places) == 1 else list(dict.fromkeys(places))

        def answer() -> bytes | bytearray:
            if len(places) == 1:
                receipt = places[0]
                return self._sealer.seal(refusal_of(receipt, self._answers) or created(receipt))
            contents = {receipt: refusal_of(receipt, self._answers) or created(receipt) for receipt in receipts}
            return self._sealer.seal_many([contents[receipt] for receipt in places])

        self._outbox.answer_when(receipts, answer, size)


def refusal_of(receipt: Receipt, answers: Answers) -> bytes | None:
    """Return the answer to what was not stored; the outcomes of 12 and 13 have the same bytes."""
    error = receipt.error
    if error is None:
        return None
    outcome = Outcome.CREATE_RECORDS_REPEAT if error.retriable else Outcome.CREATE_RECORDS_REFUSED
    return answers[outcome]
