"""Appends of a partition in a stream: queued in the event loop, sent by its shard, and waited for (docs/cluster.md)."""

from collections import deque
from typing import Any

import msgspec
import numpy as np

from babelbus.errors import StorageError
from babelbus.records.columns import find_positions
from babelbus.records.fields import timestamps_at
from babelbus.records.format import rebase
from babelbus.records.record import Positions, RecordBatch
from babelbus.storage.contract import Chunk
from babelbus.storage.errors import BackendBusyError
from babelbus.storage.jetstream.errors import NatsAwayError, RecordTooLargeError
from babelbus.storage.jetstream.frame import Head, Kind
from babelbus.storage.jetstream.shard import Message
from babelbus.storage.jetstream.stored import WAIT_SECONDS, StoredLog
from babelbus.storage.room import Room

FRAME_BYTES = 2**18
"""Batches that wait are sent together up to this size; a larger batch goes in several frames of it."""
OVERHEAD_BYTES = 4096
"""Room that subject, header and head need in a message."""


class WritableLog(StoredLog):
    """A partition without reading and cleaning; see `contract.PartitionLog`."""

    def __init__(self, room: Room, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._room = room
        self._queue: deque[RecordBatch] = deque()
        self._is_pushed = False
        self._unstored_bytes = 0
        """Bytes in messages that are under way."""
        self._refusing: StorageError | None = None
        self._closed = False
        self._next_offset = self._sent_offset = self.bounds.next_offset
        self._sent_bytes, self._sent_latest = self.bounds.end_bytes, self.bounds.latest_timestamp

    # -- appending ---------------------------------------------------------------------------------------------------

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets, behind those that are under way."""
        return self._next_offset

    def append(self, batch: RecordBatch) -> int:
        """Append a batch to what is under way; see `contract.PartitionLog`."""
        if len(batch.data) > FRAME_BYTES:
            self._check_sizes(batch)
        with self._lock:
            if self._stale:
                raise self._stale_error()
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
                raise shard.failure or self._stale_error()
            return target

    def fence_off(self) -> None:
        """Refuse appends from now on: the partition is opened again. Waits until nothing of it is under way.

        Raises:
            NatsAwayError: that is not known now.
        """
        error = self._stale_error()
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

    def close(self) -> None:
        """Wait for what is under way, and write the bounds; see `contract.PartitionLog`."""
        if self._closed or self._stale:
            return
        self.durable()
        if self._bytes_since_bounds:
            self.write_bounds()
        self._closed = True


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
