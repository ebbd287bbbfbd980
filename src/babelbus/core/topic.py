"""A topic in the broker: its partitions, who gets which record, and resends that get the first answer again."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from babelbus.clock import Clock
from babelbus.core.partition import Partition
from babelbus.core.receipt import Receipt
from babelbus.core.record import Event
from babelbus.core.settings import TopicSettings
from babelbus.core.subject import LENGTH_MAX
from babelbus.errors import StorageError
from babelbus.records.columns import decode_columns, iterate
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import (
    encode_batch,
    encode_payloads,
    mark_producer,
    public_headers,
    rebase,
)
from babelbus.records.record import Headers, Record, RecordBatch

RESERVED_PREFIX = "$"
"""Begins the names of the server's own topics."""
FIRST_ID = "0"
"""The id of a topic that was made before topics had ids."""
SERVER_CHOOSES = -1
NO_PRODUCER = -1
GATHER_RECORDS_MAX = 64
"""So many records at once are a batch by themselves."""


class SequenceGapError(StorageError):
    """A producer's batch came before the ones in front of it: those must be sent again first."""


class SequenceTooOldError(StorageError):
    """A producer's batch is older than what is remembered; whether it was stored is unknown."""


class ReservedTopicError(StorageError):
    """The topic is the server's own: everybody may read it, nobody else writes it."""


class UnknownPartitionError(StorageError):
    """The topic has no partition of this number."""


class Topics(dict[str, "Topic"]):
    """The open topics by name. `damaged` says why other topics are not open; their names stay taken."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: dict[str, StorageError] = {}


class Topic:
    """One topic: settings and partitions. All calls come from the event loop."""

    def __init__(
        self,
        name: str,
        settings: TopicSettings,
        partitions: list[Partition],
        clock: Clock,
        on_visible: Callable[[str, Sequence[Event]], None],
        is_heard: Callable[[], bool],
        later: Callable[[Callable[[], None]], object],
        topic_id: str = FIRST_ID,
    ) -> None:
        self.name = name
        self.id = topic_id
        """Another one when the topic was removed and made again."""
        self.settings = settings
        self.partitions = partitions
        self._clock = clock
        self._on_visible = on_visible
        self._is_heard = is_heard
        self._later = later
        self._turn = 0
        self._last_ms = 0
        self.reserved = name.startswith(RESERVED_PREFIX)
        """Whether clients may only read it."""
        self._gathered: Receipt | None = None
        self._payloads: list[bytes] = []
        self._timestamps: list[int] = []
        self._sources: list[tuple[int, Headers]] = []
        """How many of the gathered payloads came up to and with each call, and what its events are to carry."""

    def _reserved_error(self) -> ReservedTopicError:
        return ReservedTopicError(f"topic {self.name!r} is the server's own and cannot be written to")

    @property
    def _shown(self) -> bool:
        """Whether what is published must be made events."""
        return self.settings.retain == "last" or self._is_heard()

    def stamp(self) -> int:
        """Give the server's time in ms; it never runs backwards within a topic, whatever the clock does."""
        self._last_ms = max(self._clock.now_ms(), self._last_ms, 1)
        return self._last_ms

    def partition(self, number: int) -> Partition:
        """Return a partition.

        Raises:
            UnknownPartitionError: there is none of this number.
        """
        if not 0 <= number < len(self.partitions):
            raise UnknownPartitionError(
                f"topic {self.name!r} has partitions 0 to {len(self.partitions) - 1}, not {number}"
            )
        return self.partitions[number]

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish_payloads(self, payloads: Sequence[bytes], timestamps: list[int], source: Headers = ()) -> list[Receipt]:
        """Append records that are a payload and a time alone, round robin over the partitions; 0 is the server's time.

        `source` are the headers that live subscribers get: who published them. What is stored stays as it came.

        Returns a receipt for each partition that got some; one for all when nothing could be stored (with its error).
        Few records wait for the end of this turn of the event loop, so that what many connections publish at once is
        one write (`commit`) with one receipt, which does not know their offsets.
        """
        if self.reserved:
            return [Receipt.refused(self._reserved_error())]
        count = len(self.partitions)
        if count == 1:
            if len(payloads) >= GATHER_RECORDS_MAX:
                self.commit()
                return [self._append_payloads(self.partitions[0], payloads, timestamps, source)]
            receipt = self._gathered
            if receipt is None:
                receipt = self._gathered = Receipt()
                self._later(self.commit)
            self._payloads += payloads
            self._timestamps += timestamps
            self._sources.append((len(self._payloads), source))
            return [receipt]
        receipts = []
        for lane in range(min(count, len(payloads))):
            partition = self.partitions[(self._turn + lane) % count]
            receipts.append(self._append_payloads(partition, payloads[lane::count], timestamps[lane::count], source))
        self._turn = (self._turn + len(payloads)) % count
        return receipts

    def commit(self) -> None:
        """Append what `publish_payloads` gathered; who reads or appends in another way calls this first."""
        receipt = self._gathered
        if receipt is None:
            return
        payloads, timestamps, sources = self._payloads, self._timestamps, self._sources
        self._gathered, self._payloads, self._timestamps, self._sources = None, [], [], []
        made = self._append_payloads(self.partitions[0], payloads, timestamps, sources)
        made.when_done(lambda made: receipt.resolve(made.error))

    def _append_payloads(
        self,
        partition: Partition,
        payloads: Sequence[bytes],
        timestamps: list[int],
        source: Headers | list[tuple[int, Headers]],
    ) -> Receipt:
        if 0 in timestamps:
            now = self.stamp()
            timestamps = [timestamp or now for timestamp in timestamps]
        try:
            receipt = partition.append(encode_payloads(payloads, timestamps, partition.next_offset))
        except StorageError as error:
            return Receipt.refused(error)
        if self._shown:
            name = self.name
            sources = source if isinstance(source, list) else [(len(payloads), source)]
            events: list[Event] = []
            for end, headers in sources:
                begin = len(events)
                pairs = zip(payloads[begin:end], timestamps[begin:end], strict=True)
                events += [Event(name, data, None, headers, at) for data, at in pairs]
            self._show(receipt, events)
        return receipt

    def publish(self, events: Sequence[Event], *, by_server: bool = False) -> list[Receipt]:
        """Append events: those with a key to the partition that the key chooses, the others round robin."""
        if self.reserved and not by_server:
            return [Receipt.refused(self._reserved_error())]
        self.commit()
        now = self.stamp()
        lanes: dict[int, list[Event]] = {}
        for event in events:
            lanes.setdefault(self._choose(event.key), []).append(event)
        return [self._append_events(self.partitions[number], lane, now) for number, lane in lanes.items()]

    def _append_events(self, partition: Partition, events: list[Event], now: int) -> Receipt:
        records = [
            Record(event.payload, event.key, self._headers_of(event), event.timestamp or now) for event in events
        ]
        try:
            receipt = partition.append(encode_batch(records, partition.next_offset))
        except StorageError as error:
            return Receipt.refused(error)
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

    def publish_batch(
        self,
        batch: RecordBatch,
        *,
        partition: int = SERVER_CHOOSES,
        producer_id: int = NO_PRODUCER,
        first_sequence: int = 0,
        source: Headers = (),
    ) -> Receipt:
        """Append records that came in the stored form, checked by `records.parse_records`, to one partition.

        `source` as in `publish_payloads`; it stands for headers of the same names that the publisher set.

        With a `producer_id` a batch that was stored before is not stored again: the receipt says where it is.

        Raises:
            SequenceGapError, SequenceTooOldError, UnknownPartitionError, InvalidRecordError: see there.
            ReservedTopicError: the topic is the server's own.
            StorageError: the disk refused; nothing was appended.
        """
        if self.reserved:
            raise self._reserved_error()
        self.commit()
        if partition != SERVER_CHOOSES:
            self.partition(partition)
        if producer_id != NO_PRODUCER:
            known = self._find_batch(producer_id, first_sequence, batch.count)
            if known is not None:
                return known
        if partition == SERVER_CHOOSES:
            partition = self._turn
            self._turn = (self._turn + 1) % len(self.partitions)
        return self.append_batch(batch, partition, producer_id, first_sequence, source)

    def append_batch(
        self, batch: RecordBatch, partition: int, producer_id: int, first_sequence: int, source: Headers = ()
    ) -> Receipt:
        """Append records in the stored form to a partition without asking whether they were stored before.

        Raises:
            InvalidRecordError, StorageError: as `publish_batch`.
        """
        target = self.partitions[partition]
        if producer_id != NO_PRODUCER:
            batch = mark_producer(batch, producer_id, first_sequence)
        base_offset = target.next_offset
        batch = rebase(batch, base_offset)
        if producer_id != NO_PRODUCER:
            # Before the append, which may write a checkpoint: one that knows too much is put right by the log.
            target.log.producers.add(producer_id, first_sequence, batch.count, base_offset)
        try:
            receipt = target.append(batch)
        except StorageError:
            target.log.producers.forget_from(base_offset)
            raise
        if self._shown:
            events = self.decode(bytes(batch.data), batch.positions)
            self._show(receipt, with_source(events, source) if source else events)
        return receipt

    def _find_batch(self, producer_id: int, first_sequence: int, count: int) -> Receipt | None:
        """Return the receipt of a batch that was stored before, `None` for the next one in order."""
        expected = max([partition.log.producers.next_sequence(producer_id) for partition in self.partitions])
        if expected in (-1, first_sequence):  # a new batch, as nearly every one is, costs no search
            return None
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
        """Hand events to the live subscriptions once their ack level is reached; never what was refused."""
        receipt.when_done(lambda done: None if done.error else self._on_visible(self.name, events))

    def decode(self, data: bytes, positions: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Event]:
        """Return stored records of this topic as events."""
        columns = decode_columns(data, np.asarray(positions, np.int64))
        return [event_of(self.name, record) for record in iterate(columns)]

    def close(self, error: StorageError | None = None) -> None:
        """Give the logs back; who waits for something is answered, with `error` if there is one."""
        self.commit()
        for partition in self.partitions:
            partition.close(error)


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
