"""A partition in a stream: append, what of it is stored, recovery (docs/cluster.md, "Subjects").

The event loop appends and takes no lock that is held while NATS is asked. `_lock` guards what the loop shares with the
thread of the connection, `_changing` is held by whatever changes the front: trim, compaction and bounds. The locks are
taken in this order: `_changing`, `Shard.done`, `_lock`.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.records.columns import find_positions
from babelbus.records.fields import offsets_at, timestamps_at
from babelbus.records.format import PRODUCER_HEADER, read_producer, rebase
from babelbus.records.record import Positions, RecordBatch, StoredBatch
from babelbus.storage.contract import BadRange, Chunk, LogSettings, Part, Recovery
from babelbus.storage.errors import BackendBusyError, StaleWriterError
from babelbus.storage.jetstream.client import PURGE_SECONDS, Nats
from babelbus.storage.jetstream.errors import NatsAwayError, RecordTooLargeError, StreamAlteredError
from babelbus.storage.jetstream.frame import Frame, Head, Kind, decode
from babelbus.storage.jetstream.places import Places
from babelbus.storage.jetstream.shard import Message, Shard
from babelbus.storage.producers import ProducerBatch, Producers
from babelbus.storage.room import Room

log = logging.getLogger(__name__)

FRAME_BYTES = 2**18
"""Batches that wait are sent together up to this size; a larger batch goes in several frames of it."""
OVERHEAD_BYTES = 4096
"""Room that subject, header and head need in a message."""
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


class WritableLog:
    """A partition without reading and cleaning; see `contract.PartitionLog`."""

    part_count = 1

    def __init__(
        self,
        nats: Nats,
        shard: Shard,
        subject: str,
        topic: str,
        partition: int,
        settings: LogSettings,
        clock: Clock,
        room: Room,
        timeout_seconds: float,
    ) -> None:
        self.name = f"stream {shard.stream}, topic {topic!r}, partition {partition}"
        self.subject = subject
        self.settings = settings
        self.producers = Producers()
        self.recovery = Recovery()
        self.nats, self.shard = nats, shard
        self._topic, self._partition = topic, partition
        self._clock, self._room, self._timeout = clock, room, timeout_seconds
        self._lock = threading.Lock()
        self._changing = threading.RLock()
        self._queue: deque[RecordBatch] = deque()
        self._is_pushed = False
        self._unstored_bytes = 0
        """Bytes in messages that are under way."""
        self._refusing: StorageError | None = None
        self._stale = self._closed = False
        self._bytes_since_bounds = 0
        self.bounds = Bounds()
        """The newest bounds in memory."""
        self.records = Places(subject)
        self.compacted = Places("")
        self._recover()
        self._next_offset = self._sent_offset = self.bounds.next_offset
        self._sent_bytes, self._sent_latest = self.bounds.end_bytes, self.bounds.latest_timestamp

    # -- bounds ------------------------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record."""
        return self.bounds.first_offset

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets, behind those that are under way."""
        return self._next_offset

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

    def configure(self, settings: LogSettings) -> None:
        """Replace the settings."""
        self.settings = settings

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: RecordBatch) -> int:
        """Append a batch to what is under way; see `contract.PartitionLog`."""
        if len(batch.data) > FRAME_BYTES:
            self._check_sizes(batch)
        with self._lock:
            if self._stale:
                raise StaleWriterError(f"{self.name}: another writer has opened the partition since")
            if (error := self.shard.failure or self._refusing) is not None:
                raise error
            if not self._room.take(len(batch.data)):
                raise BackendBusyError(f"{self.name}: {self._room.bytes_held} bytes wait for NATS, publish again later")
            base_offset = self._next_offset
            if batch.base_offset != base_offset:
                batch = rebase(batch, base_offset)
            self._queue.append(batch)
            self._next_offset += batch.count
            push, self._is_pushed = not self._is_pushed, True
        if push:
            self.shard.push(self)
        return base_offset

    def begin_at(self, offset: int) -> None:
        """Set the first offset of a log that has no records: a copy of a log whose front is gone.

        Raises:
            StorageError: NATS refused, or did not answer.
        """
        assert self.bounds.first_offset == self.bounds.next_offset == self._next_offset
        self.write_bounds(next_offset=offset, first_offset=offset)
        self.settled()

    def append_as_is(self, chunk: Chunk) -> None:
        """Append stored records with the offsets that they have, which may have gaps; nobody else appends meanwhile.

        Raises: as `append`.
        """
        data, size = chunk.data, len(chunk.data)
        positions, _ = find_positions(data, 0, size)
        if size > FRAME_BYTES:
            self._check_sizes(RecordBatch(data, positions, (), chunk.base_offset))
        with self._lock:
            if (error := self.shard.failure or self._refusing) is not None:
                raise error
            if not self._room.take(size):
                raise BackendBusyError(f"{self.name}: {self._room.bytes_held} bytes wait for NATS, try again later")
            self._sent_latest = max(self._sent_latest, int(timestamps_at(data, positions).max(initial=0)))
            head = Head(
                *(Kind.RECORDS, self._topic, self._partition, 0),
                *(self._sent_offset, chunk.next_offset, self._sent_bytes, self._sent_latest),
            )
            self._next_offset = self._sent_offset = chunk.next_offset
            self._sent_bytes += size
            self._unstored_bytes += size
        self.shard.push(Message(self.subject, head, data, self, self._stored))

    def _check_sizes(self, batch: RecordBatch) -> None:
        largest = int(np.diff(np.asarray(batch.positions), append=len(batch.data)).max())
        limit = self.nats.payload_bytes_max - OVERHEAD_BYTES
        if largest > limit:
            raise RecordTooLargeError(
                f"{self.name}: a record has {largest} bytes, NATS takes {limit} (max_payload of its configuration)"
            )

    def take_message(self) -> Message | None:
        """Return what is queued as the next message; see `shard.Source`."""
        with self._lock:
            queue = self._queue
            if not queue:
                self._is_pushed = False
                return None
            batches, size = [], 0
            while queue and (not size or size + len(queue[0].data) <= FRAME_BYTES):
                batch = queue.popleft()
                if len(batch.data) > FRAME_BYTES and batch.count > 1:
                    batch, rest = _split(batch, FRAME_BYTES)
                    if rest is not None:
                        queue.appendleft(rest)
                    batches.append(batch)
                    break
                batches.append(batch)
                size += len(batch.data)
            data = bytes(batches[0].data) if len(batches) == 1 else b"".join(batch.data for batch in batches)
            self._sent_latest = max(self._sent_latest, *(_greatest(batch.timestamps) for batch in batches))
            base_offset = self._sent_offset
            self._sent_offset += sum(batch.count for batch in batches)
            head = Head(
                Kind.RECORDS, self._topic, self._partition, 0,
                base_offset, self._sent_offset, self._sent_bytes, self._sent_latest,
            )  # fmt: skip
            self._sent_bytes += len(data)
            self._unstored_bytes += len(data)
            assert base_offset == batches[0].base_offset
        return Message(self.subject, head, data, self, self._stored)

    def _stored(self, message: Message) -> None:
        head, size = message.head, len(message.data)
        with self._lock:
            self.bounds = msgspec.structs.replace(
                self.bounds,
                next_offset=head.next_offset,
                end_bytes=head.bytes_before + size,
                latest_timestamp=head.latest_timestamp,
                scanned=message.sequence,
            )
            self.records.end = message.sequence + 1
            self._bytes_since_bounds += size
            if self._refusing is None:
                self._unstored_bytes -= size
                self._room.give_back(size)
        self.records.add(msgspec.structs.replace(head, epoch=message.epoch, sequence=message.sequence))

    def settled(self) -> None:
        """Continue behind the stored records after a failure; see `shard.Source`."""
        with self._lock:
            self._refusing = None
            self._next_offset = self._sent_offset = self.bounds.next_offset
            self._sent_bytes, self._sent_latest = self.bounds.end_bytes, self.bounds.latest_timestamp
            self.producers.forget_from(self._next_offset)

    def _lose(self, error: StorageError) -> None:
        """Drop the records that are not stored, because of an error; `Shard.done` is held."""
        with self._lock:
            if self._refusing is not None:
                return
            self._refusing = error
            self._room.give_back(sum(len(batch.data) for batch in self._queue) + self._unstored_bytes)
            self._queue.clear()
            self._unstored_bytes = 0
            self._next_offset = self.bounds.next_offset
        self.shard.drop(self)

    # -- durability --------------------------------------------------------------------------------------------------

    def durable(self, *, sync: bool = True) -> int:
        """Wait until NATS has stored what was appended, by its quorum; see `contract.PartitionLog`."""
        target = self._wait()
        if self._bytes_since_bounds >= self.settings.checkpoint_bytes:
            self.write_bounds()
        return target

    def _wait(self) -> int:
        shard, begun = self.shard, self._clock.monotonic()
        with shard.done:
            refusals, refusing = shard.refusals, self._refusing
            target = self._next_offset
            while refusing is not None or self.bounds.next_offset < target:
                error = self._failure(begun, refusals)
                if error is not None:
                    self._lose(error)
                    raise error
                if refusing is not None and self._refusing is None:
                    refusing, target = None, self._next_offset
                    continue
                if refusing is None and self._refusing is not None:
                    raise self._refusing
                shard.done.wait(WAIT_SECONDS)
            if self._stale or shard.failure is not None:
                raise shard.failure or StaleWriterError(f"{self.name}: another writer has opened the partition since")
            return target

    def _failure(self, begun: float, refusals: int) -> StorageError | None:
        """Return why waiting is in vain."""
        shard, now = self.shard, self._clock.monotonic()
        if self._stale:
            return StaleWriterError(f"{self.name}: another writer has opened the partition since")
        if shard.failure is not None:
            return shard.failure
        if shard.refusals != refusals:
            return shard.refusal
        since = begun if shard.doubt_since is None else min(begun, shard.doubt_since)
        if now - since >= self._timeout:
            return (
                shard.reason
                if shard.doubt_since is not None
                else NatsAwayError(f"{self.name}: NATS does not acknowledge; whether the records are stored is unknown")
            )
        return None

    def fence_off(self) -> None:
        """Refuse appends from now on: the partition is opened again. Waits until nothing of it is under way.

        Raises:
            NatsAwayError: that is not known now.
        """
        error = StaleWriterError(f"{self.name}: another writer has opened the partition since")
        begun = self._clock.monotonic()
        with self._changing, self.shard.done:
            self._stale = True
            if self._sent_offset == self.bounds.next_offset and not self._queue:
                return
            self._lose(error)
            while self._refusing is not None and self.shard.failure is None:
                if self._clock.monotonic() - begun >= self._timeout:
                    raise NatsAwayError(f"{self.name}: NATS does not answer; try again")
                self.shard.done.wait(WAIT_SECONDS)

    def cut_torn(self, start: int) -> None:
        """Return at once: a frame is there as a whole or not at all."""

    def close(self) -> None:
        """Wait for what is under way, and write the bounds; see `contract.PartitionLog`."""
        if self._closed or self._stale:
            return
        self.durable()
        if self._bytes_since_bounds:
            self.write_bounds()
        self._closed = True

    # -- other messages ----------------------------------------------------------------------------------------------

    def write(self, kind: Kind, suffix: str, data: bytes, head: Head | None = None) -> int:
        """Write one message beside the records; return its sequence. Waits for NATS.

        Raises:
            StorageError: whether it is stored is unknown, or it is not.
        """
        stored: list[int] = []
        if self._stale:
            raise StaleWriterError(f"{self.name}: another writer has opened the partition since")
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
            message = self.nats.call(self.nats.get_from_leader(self.shard.stream, **chosen))
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

    def _remove(self, sequence: int) -> None:
        log.warning("%s: sequence %d is removed: its writer was not the owner any more", self.name, sequence)
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
            self._next_offset = self._sent_offset = 0
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
        """Read the frames behind the bounds up to the last frame: where they end, their producers, what is damaged."""
        bounds = self.bounds
        at, heads, found = bounds.next_offset, list[Head](), list[StoredBatch]()
        for frame in self.frames(self.records, bounds.scanned + 1, last.head.sequence + 1):
            head = frame.head
            self.recovery.read_bytes += frame.size_bytes
            if head.base_offset != at:
                self._note_lost(at, head.base_offset, "frames are missing")
            if frame.data is None:
                reason = f"stream {self.shard.stream}, sequence {head.sequence}: wrong CRC"
                self._note_lost(head.base_offset, head.next_offset, reason)
            else:
                found += _producers_of(frame.data)
            at = head.next_offset
            heads.append(head)
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
                    self.nats.get_from_leader(stream, seq=sequence, next_by_subj=places.subject), self._timeout
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


def _greatest(timestamps: Positions) -> int:
    return int(timestamps.max()) if isinstance(timestamps, np.ndarray) else max(timestamps, default=0)


def _split(batch: RecordBatch, bytes_max: int) -> tuple[RecordBatch, RecordBatch | None]:
    """Return the records of a batch that fit `bytes_max`, at least one, and the others."""
    positions = np.append(np.asarray(batch.positions, np.int64), len(batch.data))
    count = max(int(np.searchsorted(positions, bytes_max, "right")) - 1, 1)
    if count == batch.count:
        return batch, None
    at, view, times = int(positions[count]), memoryview(batch.data), batch.timestamps
    front = RecordBatch(view[:at], positions[:count], times[:count], batch.base_offset)
    return front, RecordBatch(view[at:], positions[count:-1] - at, times[count:], batch.base_offset + count)


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
