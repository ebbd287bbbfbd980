"""The frames of a partition in its stream, the bounds and producers beside them, and how it is opened again.

`_lock` guards what the event loop shares with the thread of the connection; `_changing` is held by whatever changes the
front: trim, compaction and bounds. The locks are taken in this order: `_changing`, `Shard.done`, `_lock`.
"""

import logging
import threading
from collections.abc import Iterator

import msgspec

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.records.columns import find_positions
from babelbus.records.fields import offsets_at, timestamps_at
from babelbus.records.format import PRODUCER_HEADER, read_producer
from babelbus.records.record import StoredBatch
from babelbus.storage.contract import BadRange, LogSettings, Part
from babelbus.storage.fileless import FilelessLog
from babelbus.storage.jetstream.client import PURGE_SECONDS, Nats
from babelbus.storage.jetstream.errors import StreamAlteredError
from babelbus.storage.jetstream.frame import Frame, Head, Kind, decode
from babelbus.storage.jetstream.places import Places
from babelbus.storage.jetstream.shard import Message, Shard
from babelbus.storage.producers import ProducerBatch

log = logging.getLogger(__name__)

SNAPSHOT_BYTES = 2**19
PAGE_BYTES = 4 * 2**20
PAGE_FRAMES = 512
WAIT_SECONDS = 1.0
"""A wait looks this often whether its time is over."""


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of a partition, as its last record of them says; what lies behind `scanned` is read at the opening."""

    next_offset: int = 0
    end_bytes: int = 0
    latest_timestamp: int = 0
    scanned: int = 0
    """The sequence up to which `next_offset` and the producers cover the frames."""
    first_offset: int = 0
    first_sequence: int = 1
    first_bytes: int = 0
    compacted_until: int = 0
    generation: int = 0
    """Which compaction wrote the frames below `compacted_until`; 0: there are none."""
    compacted_from: int = 1
    compacted_to: int = 1
    compacted_from_bytes: int = 0
    compacted_bytes: int = 0
    producers: tuple[int, int] = (0, 0)
    """The sequences in which the producers are written: the first one, and how many messages."""

    @property
    def size_bytes(self) -> int:
        """Size of the records."""
        return self.end_bytes - self.first_bytes + self.compacted_bytes - self.compacted_from_bytes


class StoredLog(FilelessLog):
    """A partition without appending, reading and cleaning; see `contract.PartitionLog`."""

    def __init__(
        self,
        nats: Nats,
        shard: Shard,
        subject: str,
        topic: str,
        partition: int,
        settings: LogSettings,
        clock: Clock,
        timeout_seconds: float,
    ) -> None:
        super().__init__(settings)
        self.name = f"stream {shard.stream}, topic {topic!r}, partition {partition}"
        self.subject = subject
        self.nats, self.shard = nats, shard
        self._topic, self._partition = topic, partition
        self._clock, self._timeout = clock, timeout_seconds
        self._lock = threading.Lock()
        self._bytes_since_bounds = 0
        self.bounds = Bounds()
        """The newest bounds in memory."""
        self.records = Places(subject)
        self.compacted = Places("")
        self._recover()

    # -- bounds ------------------------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record."""
        return self.bounds.first_offset

    @property
    def end(self) -> int:
        """Offset behind the last stored record."""
        return self.bounds.next_offset

    @property
    def size_bytes(self) -> int:
        """Size of the stored records."""
        return self.bounds.size_bytes

    @property
    def compacted_until(self) -> int:
        """Offset up to which compaction has looked."""
        return self.bounds.compacted_until

    def parts(self) -> list[Part]:
        """Return all that is stored as one piece."""
        bounds = self.bounds
        newest_ms = bounds.latest_timestamp if bounds.next_offset > bounds.first_offset else -1
        return [Part(bounds.first_offset, bounds.next_offset, bounds.size_bytes, newest_ms)]

    # -- other messages ----------------------------------------------------------------------------------------------

    def _failure(self, begun: float, refusals: int) -> StorageError | None:
        if self._stale:
            return self._stale_error()
        what = f"{self.name}: NATS does not acknowledge; whether the records are stored"
        return self.shard.fault(begun, refusals, self._timeout, what)

    def write(self, kind: Kind, suffix: str, data: bytes, head: Head | None = None) -> int:
        """Write one message beside the records; return its sequence. Waits for NATS.

        Raises:
            StorageError: whether it is stored is unknown, or it is not.
        """
        stored: list[int] = []
        if self._stale:
            raise self._stale_error()
        head = head or Head(kind, self._topic, self._partition)
        message = Message(f"{self.subject}.{suffix}", head, data, None, lambda sent: stored.append(sent.sequence))
        begun, shard = self._clock.monotonic(), self.shard
        refusals = shard.refusals
        shard.push(message)
        with shard.done:
            while not stored:
                error = self._failure(begun, refusals)
                if error is not None:
                    message.dropped = True
                    raise error
                shard.done.wait(WAIT_SECONDS)
        return stored[0]

    def write_bounds(self, **changes: int) -> None:
        """Write the bounds with some changes, and the producers; they count when they are stored.

        Raises:
            StorageError: NATS refused, or did not answer.
        """
        with self._changing:
            with self._lock:
                bounds, unwritten = self.bounds, self._bytes_since_bounds
            snapshot = self._encode_producers(bounds.next_offset)
            sequences = [self.write(Kind.PRODUCERS, "producers", part) for part in snapshot]
            bounds = msgspec.structs.replace(
                bounds, producers=(sequences[0], len(sequences)) if sequences else (0, 0), **changes
            )
            sequence = self.write(Kind.BOUNDS, "bounds", msgspec.json.encode(bounds))
            with self._lock:
                self.bounds = msgspec.structs.replace(self.bounds, producers=bounds.producers, **changes)
                self._bytes_since_bounds -= unwritten
            self.purge("bounds", sequence)
            self.purge("producers", bounds.producers[0] or sequence)

    def _encode_producers(self, next_offset: int) -> list[bytes]:
        """Return the batches of the producers that are stored, in messages."""
        rows: list[tuple[int, ProducerBatch]] = []
        for producer_id, batches in self.producers.snapshot().items():
            rows += [(producer_id, batch) for batch in batches if batch.base_offset + batch.count <= next_offset]
        count = SNAPSHOT_BYTES // 64
        return [msgspec.msgpack.encode(rows[first : first + count]) for first in range(0, len(rows), count)]

    def purge(self, suffix: str, sequence: int) -> None:
        """Delete the messages of a subject in front of a sequence; a refusal costs space alone."""
        subject = f"{self.subject}.{suffix}" if suffix else self.subject
        try:
            self.nats.call(
                self.nats.api(f"STREAM.PURGE.{self.shard.stream}", {"filter": subject, "seq": sequence}, PURGE_SECONDS)
            )
        except Exception as error:  # of NATS: what could not be deleted is deleted with the next purge
            log.warning("%s: space is given back later: %s", self.name, error)

    # -- opening -----------------------------------------------------------------------------------------------------

    def _get(self, **chosen: str | int) -> Frame | None:
        """Return a frame from the leader; a message of a writer that was not the owner any more is removed.

        Raises:
            StreamAlteredError: the message is not of Babelbus, or damaged.
        """
        while True:
            message = self.nats.call(self.nats.read_from_leader(self.shard.stream, **chosen))
            if message is None:
                return None
            frame = decode(message.data, message.sequence)
            if frame is None:
                raise StreamAlteredError(
                    f"stream {self.shard.stream}, sequence {message.sequence}: the message at an end of partition"
                    f" {self._partition} of topic {self._topic!r} is damaged or not of Babelbus; the partition is not"
                    f" opened; look at it, and remove it with 'nats stream rmm {self.shard.stream} {message.sequence}'"
                )
            if self.shard.is_valid(frame.head):
                return frame
            self._remove(message.sequence)

    def _remove(self, sequence: int, reason: str = "its writer was not the owner any more") -> None:
        log.warning("%s: sequence %d is removed: %s", self.name, sequence, reason)
        self.nats.call(self.nats.api(f"STREAM.MSG.DELETE.{self.shard.stream}", {"seq": sequence, "no_erase": True}))

    def _recover(self) -> None:
        """Read the bounds, and the frames that were stored after them; make a partition that is new.

        Raises:
            StorageError: the stream was altered, or cannot be read.
        """
        bounds_frame = self._get(last_by_subj=f"{self.subject}.bounds")
        last = self._get(last_by_subj=self.subject)
        if bounds_frame is None:
            if last is not None:
                raise StreamAlteredError(
                    f"{self.name}: the message with its bounds is gone: somebody purged it; restore the stream"
                )
            self.write_bounds()
            return
        if bounds_frame.data is None:
            raise StreamAlteredError(
                f"stream {self.shard.stream}, sequence {bounds_frame.head.sequence}: the bounds of partition"
                f" {self._partition} of topic {self._topic!r} are damaged; restore the stream"
            )
        bounds = self.bounds = msgspec.json.decode(bounds_frame.data, type=Bounds)
        self._load_producers(bounds)
        if bounds.first_sequence > 1:
            self.purge("", bounds.first_sequence)  # which a crash may have cut short
        self.records.cut_front(bounds.first_sequence)
        self.open_compacted(bounds)
        if last is not None and last.head.sequence > bounds.scanned:
            self._scan(last)
        elif last is not None and last.head.next_offset < bounds.next_offset:
            self._note_lost(last.head.next_offset, bounds.next_offset, "the end of the partition is lost")
        self.records.end = max(self.records.end, self.bounds.scanned + 1)
        self._check_front()

    def open_compacted(self, bounds: Bounds) -> None:
        """Begin to read the frames of the last compaction."""
        places = Places(f"{self.subject}.compacted.{bounds.generation}")
        places.first, places.end = bounds.compacted_from, bounds.compacted_to
        self.compacted = places

    def _load_producers(self, bounds: Bounds) -> None:
        sequence, count = bounds.producers
        for _ in range(count):
            frame = self._get(seq=sequence, next_by_subj=f"{self.subject}.producers")
            if frame is None or frame.data is None:
                log.error("%s: the producers are damaged; resends of before the start may be stored again", self.name)
                return
            rows = msgspec.msgpack.decode(frame.data, type=list[tuple[int, ProducerBatch]])
            for producer_id, batch in rows:
                self.producers.add(producer_id, batch.first_sequence, batch.count, batch.base_offset)
            sequence = frame.head.sequence + 1

    def _note_lost(self, offset: int, next_offset: int, reason: str) -> None:
        log.error("%s: the records %d to %d are lost or damaged: %s", self.name, offset, next_offset - 1, reason)
        self.recovery.bad.append((self.name, BadRange(0, 0, offset, next_offset, reason)))

    def _check_front(self) -> None:
        """Check that no frame is missing at the front."""
        first = next(self.frames(self.records, self.bounds.first_sequence, self.records.end, 1), None)
        begins = self.bounds.next_offset if first is None else first.head.base_offset
        expected = max(self.bounds.first_offset, self.bounds.compacted_until if self.bounds.generation else 0)
        if begins > expected:
            self._note_lost(expected, begins, "the frames are gone: somebody purged them")

    def _scan(self, last: Frame) -> None:
        """Read the frames behind the bounds up to the last frame: where they end, their producers, what is damaged.

        Raises:
            StreamAlteredError: two frames have one offset.
        """
        bounds = self.bounds
        at, heads, found = bounds.next_offset, list[Head](), list[StoredBatch]()
        # Of each head, the batches of producers; `None` for a frame that is damaged.
        contents: list[list[StoredBatch] | None] = []
        for frame in self.frames(self.records, bounds.scanned + 1, last.head.sequence + 1):
            self.recovery.read_bytes += frame.size_bytes
            for _ in range(self._count_out_of_turn(heads, frame.head)):
                contents.pop()
                self._remove(heads.pop().sequence, "it was stored out of turn, and sent again")
            heads.append(frame.head)
            contents.append(None if frame.data is None else _producers_of(frame.data))
        for head, batches in zip(heads, contents, strict=True):
            if head.base_offset != at:
                self._note_lost(at, head.base_offset, "frames are missing")
            if batches is None:
                reason = f"stream {self.shard.stream}, sequence {head.sequence}: wrong CRC"
                self._note_lost(head.base_offset, head.next_offset, reason)
            else:
                found += batches
            at = head.next_offset
            self.records.add(head)
        end, end_bytes = last.head.next_offset, last.head.bytes_before + last.size_bytes
        latest, scanned = last.head.latest_timestamp, last.head.sequence
        half = next((batch for batch in found if batch.base_offset + batch.count > end), None)
        if half is not None:  # a batch in several frames, of which a crash kept the first ones; nobody saw them
            for head in reversed([head for head in heads if head.base_offset >= half.base_offset]):
                self.nats.call(
                    self.nats.api(f"STREAM.MSG.DELETE.{self.shard.stream}", {"seq": head.sequence, "no_erase": True})
                )
                end, end_bytes = head.base_offset, head.bytes_before
                heads.pop()
            latest = heads[-1].latest_timestamp if heads else bounds.latest_timestamp
            scanned = heads[-1].sequence if heads else bounds.scanned
            found.remove(half)
        self.producers.restore(found)
        self.bounds = msgspec.structs.replace(
            bounds, next_offset=end, end_bytes=end_bytes, latest_timestamp=latest, scanned=scanned
        )
        self._bytes_since_bounds = end_bytes - bounds.end_bytes

    def _count_out_of_turn(self, heads: list[Head], following: Head) -> int:
        """Return how many of the last frames stand behind a gap that the following frame begins to fill.

        They were not acknowledged, because what is acknowledged has no gap in front of it.

        Raises:
            StreamAlteredError: the following frame has an offset that a frame without a gap has already.
        """
        kept = len(heads)
        while kept and heads[kept - 1].base_offset >= following.base_offset:
            kept -= 1
        if kept < len(heads) and heads[kept].base_offset <= self._end_of(heads, kept):
            kept = len(heads)
        if following.base_offset < self._end_of(heads, kept):
            raise StreamAlteredError(
                f"{self.name}: sequence {following.sequence} has records from offset {following.base_offset} on, which"
                " are there already: somebody wrote into the stream; restore it"
            )
        return len(heads) - kept

    def _end_of(self, heads: list[Head], count: int) -> int:
        """Return the offset behind the first frames of those behind the bounds."""
        return heads[count - 1].next_offset if count else self.bounds.next_offset

    def frames(self, places: Places, sequence: int, end: int, page_bytes: int = PAGE_BYTES) -> Iterator[Frame]:
        """Yield the frames that `messages` finds; what holds no frame is logged."""
        for found in self.messages(places, sequence, end, page_bytes):
            if isinstance(found, Frame):
                yield found
            else:
                log.error("stream %s, sequence %d: damaged, or not of Babelbus", self.shard.stream, found)

    def messages(self, places: Places, sequence: int, end: int, page_bytes: int) -> Iterator[Frame | int]:
        """Yield the frames of a subject from one sequence up to another one; the sequence of what holds no frame.

        Frames whose writer was not the owner any more are left out.

        Raises:
            NatsAwayError: NATS does not answer.
        """
        stream = self.shard.stream
        count = 1 if page_bytes == 1 else PAGE_FRAMES
        while sequence < end:
            messages = self.nats.call(
                self.nats.get_batch(stream, places.subject, sequence, page_bytes, count), self._timeout
            )
            if not messages:  # the replica may lag
                message = self.nats.call(
                    self.nats.read_from_leader(stream, seq=sequence, next_by_subj=places.subject), self._timeout
                )
                if message is None:
                    return
                messages = [message]
            for message in messages:
                if message.sequence >= end:
                    return
                frame = decode(message.data, message.sequence)
                if frame is None:
                    yield message.sequence
                elif self.shard.is_valid(frame.head):
                    yield frame
            sequence = messages[-1].sequence + 1


def _producers_of(data: bytes) -> list[StoredBatch]:
    """Return the batches with a producer id in the records of a frame."""
    if PRODUCER_HEADER not in data:
        return []
    starts, _ = find_positions(data, 0, len(data))
    offsets, times = offsets_at(data, starts), timestamps_at(data, starts)
    marked = ((number, read_producer(data, at)) for number, at in enumerate(starts.tolist()))
    return [
        StoredBatch(*batch, base_offset=int(offsets[number]), timestamp=int(times[number]))
        for number, batch in marked
        if batch is not None
    ]
