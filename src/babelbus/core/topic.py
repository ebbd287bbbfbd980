"""A topic in the broker: its partitions, who gets which record, and resends that get the first answer again."""

import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from babelbus.arrays import np
from babelbus.clock import Clock
from babelbus.core.failures import count_failures
from babelbus.core.partition import Partition
from babelbus.core.publish import (
    GATHER_BYTES_MAX,
    GATHER_RECORDS_MAX,
    NO_PRODUCER,
    SERVER_CHOOSES,
    Bodies,
    Content,
    Gathered,
    Payloads,
    Publication,
)
from babelbus.core.receipt import Receipt, join
from babelbus.core.record import Event
from babelbus.core.settings import TopicSettings
from babelbus.core.subject import LENGTH_MAX, may_hold_secrets
from babelbus.errors import StorageError
from babelbus.metrics import Metrics
from babelbus.records.columns import decode_columns, iterate
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import (
    batch_bodies,
    encode_batch,
    encode_bodies,
    encode_payloads,
    mark_producer,
    payload_bodies,
    public_headers,
    rebase,
)
from babelbus.records.record import Headers, Positions, Record, RecordBatch

log = logging.getLogger(__name__)

RESERVED_PREFIX = "$"
"""Begins the names of the server's own topics."""
Run = Callable[[Callable[[], list[StorageError | None]]], Awaitable[list[StorageError | None]]]
DEAD_LETTERS_PREFIX = "dead-letters/"
"""Begins the names of the topics that hold records of other topics."""
FIRST_ID = "0"
"""The id of a topic that was made before topics had ids."""


class SequenceGapError(StorageError):
    """A producer's batch came before the ones in front of it: those must be sent again first."""


class SequenceTooOldError(StorageError):
    """A producer's batch is older than what is remembered; whether it was stored is unknown."""

    retriable = False


class ReservedTopicError(StorageError):
    """The topic is the server's own: everybody may read it, nobody else writes it."""

    retriable = False


class UnknownPartitionError(StorageError):
    """The topic has no partition of this number."""

    retriable = False


class ClosedTopicError(StorageError):
    """The topic could not be opened: it is served again when that is mended and the server was started again."""


class Topics(dict[str, "Topic"]):
    """The open topics by name. `damaged` says why other topics are not open; their names stay taken."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: dict[str, StorageError] = {}

    def why_closed(self, name: str) -> ClosedTopicError | None:
        """Return the error of a topic that is not open, `None` if there is no such topic.

        It is for principals that may know of the topic.
        """
        damage = self.damaged.get(name)
        return None if damage is None else ClosedTopicError(f"topic {name!r} is closed: {damage}")


class Topic:
    """One topic: settings and partitions. All calls come from the event loop."""

    def __init__(
        self,
        name: str,
        settings: TopicSettings,
        partitions: list[Partition],
        clock: Clock,
        metrics: Metrics,
        on_visible: Callable[[str, Sequence[Event]], None],
        is_heard: Callable[[], bool],
        later: Callable[[Callable[[], None]], object],
        topic_id: str = FIRST_ID,
        owner: str = "",
        sources: tuple[str, ...] = (),
        since: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.name = name
        self.id = topic_id
        """Another one when the topic was removed and made again."""
        self.settings = settings
        self.owner = owner
        """The principal that made the topic; empty for the server, and for topics from before there was a gate."""
        self.sources = sources
        """The topics whose records dead letters brought here: whoever reads the letters needs the rights to them."""
        self.since = dict(since or {})
        """By source, the offset of each partition below which no letter comes from the source; a topic from before
        these offsets were kept lacks them."""
        self.coming: tuple[str, ...] = ()
        """The sources that are about to be added."""
        self.has_letters = bool(sources) or name.startswith(DEAD_LETTERS_PREFIX)
        """Whether dead letters may be here."""
        self.partitions = partitions
        self._clock = clock
        self._metrics = metrics
        self._on_visible = on_visible
        self._is_heard = is_heard
        self._later = later
        self._turn = 0
        self._last_ms = 0
        self.reserved = name.startswith(RESERVED_PREFIX)
        """Whether clients may only read it, and no live subscription sees it."""
        self.may_hold_secrets = may_hold_secrets(name)
        """Whether the subjects of records have to be asked for secret ones, which are refused."""
        self._gathered: dict[Partition, Gathered] = {}
        self._sequences: dict[int, int] = {}
        """The next sequence number of producers whose batches are gathered."""

    @property
    def _shown(self) -> bool:
        """Whether what is published must be made events."""
        return not self.reserved and (self.retains or self._is_heard())

    @property
    def retains(self) -> bool:
        """Whether its last event of each subject is kept as state.

        Dead letters are not: who may see a value is asked for the right to its key alone, and not to their sources.
        """
        return self.settings.retain == "last" and not self.has_letters

    def stamp(self) -> int:
        """Return the server's time in ms; it never runs backwards within a topic, whatever the clock does."""
        self._last_ms = max(self._clock.now_ms(), self._last_ms, 1)
        return self._last_ms

    def partition(self, number: int) -> Partition:
        """Return a partition.

        Raises:
            UnknownPartitionError: the topic has no partition of this number.
        """
        if not 0 <= number < len(self.partitions):
            raise UnknownPartitionError(
                f"topic {self.name!r} has partitions 0 to {len(self.partitions) - 1}, not {number}"
            )
        return self.partitions[number]

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, publication: Publication) -> Receipt:
        """Append a publication of `Broker.publish`; whatever prevents that is the error of the receipt.

        Events with a key go to the partition that the key chooses; events without, payloads and batches go round robin
        unless the publication names a partition. Bodies go to the first partition. A receipt of several partitions has
        `parts`, in the order in which the partitions took turns.

        Few records wait for the end of this turn of the event loop, so that what many connections and requests publish
        at once is one write for each partition.
        """
        content = publication.content
        try:
            if type(content) is list:
                self.flush()
                return self._publish_events(publication, content)
            if type(content) is RecordBatch:
                return self._publish_batch(publication, content)
            if type(content) is Payloads and len(self.partitions) > 1:
                return self._spread(publication, content)
            return self._publish_records(self.partitions[0], publication)
        except StorageError as error:
            count_failures(self._metrics, (publication.protocol,), error)
            return Receipt.refused(error)

    def flush(self) -> None:
        """Append the gathered records. Nobody has to call this first: whoever looks at the partition's end does."""
        if not self._gathered:
            return
        everything, self._gathered = self._gathered, {}
        self._sequences.clear()
        for partition, gathered in everything.items():
            partition.pending = None
            batch = encode_bodies(gathered.bodies, gathered.timestamps, partition.next_offset)
            gathered.settle(self._append(partition, batch, gathered.publications, gathered.lone))

    def _spread(self, publication: Publication, content: Payloads) -> Receipt:
        payloads, timestamps, count = content.payloads, content.timestamps, len(self.partitions)
        receipts = []
        for start in range(min(count, len(payloads))):
            some = Payloads(payloads[start::count], timestamps[start::count])
            part = msgspec.structs.replace(publication, content=some)
            receipts.append(self._publish_records(self.partitions[(self._turn + start) % count], part))
        self._turn = (self._turn + len(payloads)) % count
        return join(receipts)

    def _publish_batch(self, publication: Publication, batch: RecordBatch) -> Receipt:
        number, producer_id = publication.partition, publication.producer_id
        if number != SERVER_CHOOSES:
            self.partition(number)
        if producer_id != NO_PRODUCER and not publication.fresh:
            receipt = self._find_batch(producer_id, publication.first_sequence, batch.count)
            if receipt is not None:
                self._metrics.topic_published(publication.protocol, self.name).inc(batch.count, batch.size_bytes)
                return receipt
        if number == SERVER_CHOOSES:
            number = self._turn
            self._turn = (self._turn + 1) % len(self.partitions)
        return self._publish_records(self.partitions[number], publication)

    def _publish_records(self, partition: Partition, publication: Publication) -> Receipt:
        """Append payloads, bodies or a batch: at once, or few of them at the end of the turn.

        Raises:
            InvalidRecordError: a record cannot be stored.
        """
        content = publication.content
        assert not isinstance(content, list)
        marked = publication.producer_id != NO_PRODUCER
        few = len(content) < GATHER_RECORDS_MAX
        if isinstance(content, RecordBatch):
            few = few and content.size_bytes <= GATHER_BYTES_MAX
        if (
            few and not publication.at_once and not (marked and partition.queued)
        ):  # there a transaction has one producer's records
            return self._gather(partition, publication, content)
        self.flush()
        base_offset = partition.next_offset
        if isinstance(content, Payloads):
            batch = encode_payloads(content.payloads, self._times(content), base_offset)
        elif isinstance(content, Bodies):
            batch = encode_bodies(content.bodies, content.timestamps, base_offset)
        else:
            batch = content
            if marked:
                batch = mark_producer(batch, publication.producer_id, publication.first_sequence)
            if batch.base_offset != base_offset:
                batch = rebase(batch, base_offset)
        return self._append(partition, batch, [(0, publication)])

    def _times(self, content: Payloads) -> list[int]:
        timestamps = content.timestamps
        if 0 not in timestamps:
            return timestamps
        now = self.stamp()
        return [timestamp or now for timestamp in timestamps]

    def _gather(
        self, partition: Partition, publication: Publication, content: Payloads | Bodies | RecordBatch
    ) -> Receipt:
        """Keep few records until the end of the turn."""
        timestamps = content.timestamps
        if isinstance(content, Payloads):
            timestamps = self._times(content)
            bodies = payload_bodies(content.payloads, timestamps)
        elif isinstance(content, Bodies):
            bodies = content.bodies
        else:
            bodies = batch_bodies(content, publication.producer_id, publication.first_sequence)
            self._sequences[publication.producer_id] = publication.first_sequence + content.count
        gathered = self._gathered.get(partition)
        if gathered is None:
            if not self._gathered:
                self._later(self.flush)
            gathered = self._gathered[partition] = Gathered()
            partition.pending = self.flush
        return gathered.add(publication, bodies, timestamps)

    def _append(
        self,
        partition: Partition,
        batch: RecordBatch,
        publications: Sequence[tuple[int, Publication]],
        receipt: Receipt | None = None,
    ) -> Receipt:
        """Append the records of these publications, each of which begins at the record with its number.

        Returns the receipt of the batch: `receipt` if it is given.
        """
        if receipt is None:
            receipt = Receipt()
        self._note_failure(receipt, [publication.protocol for _, publication in publications])
        producers, base_offset = partition.log.producers, batch.base_offset
        for index, publication in publications:
            if publication.producer_id != NO_PRODUCER:
                # Before the append, which may write a checkpoint: one that knows too much is put right by the log.
                place = (publication.first_sequence, len(publication.content), base_offset + index)
                producers.add(publication.producer_id, *place)
        try:
            if self._shown:
                self._show(receipt, self._events(batch, publications))
            partition.append(batch, receipt)
        except Exception as error:  # one sender's records must not cost all others of the turn their answers
            producers.forget_from(base_offset)
            if not isinstance(error, StorageError):
                log.exception("publishing to topic %r failed", self.name)
                error = StorageError("the server failed; its log says why")
            receipt.resolve(error)
            return receipt
        published, name = self._metrics.topic_published, self.name
        for _, publication in publications:
            content = publication.content
            assert not isinstance(content, list)
            published(publication.protocol, name).inc(len(content), content.size_bytes)
        return receipt

    def _note_failure(self, receipt: Receipt, protocols: Sequence[str]) -> None:
        """Count the publications of a batch, each by its protocol, if the batch fails."""

        def count(done: Receipt) -> None:
            if done.error is not None:
                count_failures(self._metrics, protocols, done.error)

        receipt.when_done(count)

    def _events(self, batch: RecordBatch, publications: Sequence[tuple[int, Publication]]) -> list[Event]:
        """Return the records of these publications as events."""
        everything = self.decode(bytes(batch.data), batch.positions)
        events: list[Event] = []
        for index, publication in publications:
            part = everything[index : index + len(publication.content)]
            events += with_source(part, publication.source) if publication.source else part
        return events

    def _publish_events(self, publication: Publication, events: list[Event]) -> Receipt:
        now = self.stamp()
        by_partition: dict[int, list[Event]] = {}
        for event in events:
            by_partition.setdefault(self._choose(event.key), []).append(event)
        protocol = publication.protocol
        return join(
            [self._append_events(self.partitions[number], part, now, protocol) for number, part in by_partition.items()]
        )

    def _append_events(self, partition: Partition, events: list[Event], now: int, protocol: str) -> Receipt:
        records = [
            Record(event.payload, event.key, self._headers_of(event), event.timestamp or now) for event in events
        ]
        try:
            receipt = partition.append(encode_batch(records, partition.next_offset))
        except StorageError as error:
            receipt = Receipt.refused(error)
        self._note_failure(receipt, (protocol,))
        if receipt.error is not None:
            return receipt
        size_bytes = sum([len(event.payload) for event in events if event.payload])
        self._metrics.topic_published(protocol, self.name).inc(len(events), size_bytes)
        if self._shown:
            shown = [event_of(self.name, one, event.via) for one, event in zip(records, events, strict=True)]
            self._show(receipt, shown)
        return receipt

    def _headers_of(self, event: Event) -> tuple[tuple[bytes, bytes | None], ...]:
        headers = public_headers(event.headers) if event.headers else ()
        if event.subject == self.name:
            return headers
        subject = event.subject.encode("utf-8", "surrogateescape")
        return (*(pair for pair in headers if pair[0] != SUBJECT_HEADER), (SUBJECT_HEADER, subject))

    def _choose(self, key: bytes | None) -> int:
        count = len(self.partitions)
        if count == 1:
            return 0
        if key is not None:
            return zlib.crc32(key) % count
        self._turn = (self._turn + 1) % count
        return self._turn

    def _find_batch(self, producer_id: int, first_sequence: int, count: int) -> Receipt | None:
        """Return the receipt of a batch that was stored before, `None` for the next one in order."""
        expected = self._sequences.get(producer_id, -1)
        if expected < 0:
            expected = max([partition.log.producers.next_sequence(producer_id) for partition in self.partitions])
        if expected in (-1, first_sequence):  # a new batch, as nearly every one is, costs no search
            return None
        if self._gathered:
            self.flush()
            return self._find_batch(producer_id, first_sequence, count)
        for partition in self.partitions:
            for batch in partition.log.producers.batches(producer_id):
                if batch.first_sequence == first_sequence and batch.count == count:
                    return partition.receipt_for(batch.base_offset, count)
        if first_sequence > expected:
            raise SequenceGapError(f"sequence {first_sequence} came, {expected} is next")
        raise SequenceTooOldError(
            f"sequence {first_sequence} with {count} records is not remembered, {expected} is next"
        )

    # -- live subscriptions ------------------------------------------------------------------------------------------

    def _show(self, receipt: Receipt, events: Sequence[Event]) -> None:
        """Deliver events to the live subscriptions once their ack level is reached, refused events never.

        The publisher is answered after that.
        """
        receipt.when_done(lambda done: None if done.error else self._on_visible(self.name, events), first=True)

    def decode(self, data: bytes, positions: Positions) -> list[Event]:
        """Return stored records of this topic as events."""
        columns = decode_columns(data, np.asarray(positions, np.int64))
        return [event_of(self.name, record) for record in iterate(columns)]

    def subjects_of(self, content: Content) -> set[str]:
        """Return the subjects of records that are to be stored."""
        if isinstance(content, Payloads):
            return {self.name}
        if isinstance(content, list):
            return {event.subject for event in content}
        batch = encode_bodies(content.bodies, content.timestamps, 0) if isinstance(content, Bodies) else content
        return {event.subject for event in self.decode(bytes(batch.data), batch.positions)}

    async def close(self, run: Run, error: StorageError | None = None) -> None:
        """Close the logs, in a thread that `run` chooses; who waits is answered, with `error` if there is one."""
        self.flush()
        partitions = self.partitions
        for partition in partitions:
            partition.stop()
        failures = await run(lambda: [partition.close_log() for partition in partitions])
        for partition, failure in zip(partitions, failures, strict=True):
            partition.release(error or failure)


def event_of(topic: str, record: Record, via: object = None) -> Event:
    """Return the event that a record of a topic is.

    A subject that is too long, or not below the topic, is the publisher's own header and stays one: a record cannot
    claim to have been published elsewhere.
    """
    subject, headers = topic, record.headers
    if headers and any(key == SUBJECT_HEADER for key, _ in headers):
        found = (dict(headers)[SUBJECT_HEADER] or b"").decode("utf-8", "surrogateescape")
        if len(found) <= LENGTH_MAX and found.startswith(f"{topic}/"):
            subject = found
            headers = tuple(pair for pair in headers if pair[0] != SUBJECT_HEADER)
    return Event(subject, record.payload, record.key, headers, record.timestamp, via)


def with_source(events: Sequence[Event], source: Headers) -> list[Event]:
    """Return the events with these headers in the place of those of the same names."""
    names = {name for name, _ in source}
    return [
        Event(
            event.subject,
            event.payload,
            event.key,
            (*(pair for pair in event.headers if pair[0] not in names), *source),
            event.timestamp,
            event.via,
        )
        for event in events
    ]


def stamped(events: Sequence[Event], now_ms: int) -> Sequence[Event]:
    """Return the events with the time `now_ms` where they have none, as they are stored."""
    if all(event.timestamp for event in events):
        return events
    return [
        event if event.timestamp else Event(event.subject, event.payload, event.key, event.headers, now_ms, event.via)
        for event in events
    ]
