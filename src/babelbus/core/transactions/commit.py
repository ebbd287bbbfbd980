"""Carrying a commit out: the records of staged parts -> topics, each once, however often it is begun again."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from babelbus.core.access import CLIENT
from babelbus.core.partition import Partition
from babelbus.core.publish import Publication, Publish
from babelbus.core.topic import Topics
from babelbus.core.transactions.part_file import Entry, PartReader, Place, StagedPart
from babelbus.core.transactions.transaction_file import Pending, producer_of
from babelbus.errors import StorageError
from babelbus.records.columns import find_positions
from babelbus.records.fields import crcs_at, offsets_at
from babelbus.records.format import PRODUCER_HEADER, read_producer
from babelbus.records.record import RecordBatch
from babelbus.storage.contract import PartitionLog
from babelbus.storage.files import FileSystem, disk_error

log = logging.getLogger(__name__)

PROTOCOL = "transactions"
"""What metrics call the publisher of staged records."""
WINDOW_ENTRIES = 32
"""Batches that a commit appends before it waits for the disk: fewer than the 64 that a log remembers of a producer, so
that the log can say of each whether a failed flush has lost it."""
READ_BYTES = 4 * 2**20


class _Appended(msgspec.Struct, frozen=True):
    """A batch that was appended and is not known to be durable."""

    partition: Partition
    first_sequence: int
    base_offset: int
    count: int


class Commit:
    """One attempt to carry a commit out. `parts` are those of the commit, in its order."""

    def __init__(
        self,
        files: FileSystem,
        topics: Topics,
        publish: Publish,
        transaction_id: str,
        parts: Sequence[StagedPart],
    ) -> None:
        self._files = files
        self._topics = topics
        self._publish = publish
        self._producer_id = producer_of(transaction_id)
        self._parts = parts
        self._loop = asyncio.get_running_loop()
        self._window: list[_Appended] = []
        self._gone: set[Place] = set()

    def _target(self, place: Place) -> Partition | None:
        """Return the partition of a place, `None` when the topic was removed since the commit began.

        Raises:
            StorageError: the topic is damaged; the commit waits until the topic is there again.
        """
        name, number = place
        if name in self._topics.damaged:
            raise self._topics.damaged[name]
        topic = self._topics.get(name)
        if topic is not None and number < len(topic.partitions):
            return topic.partitions[number]
        if place not in self._gone:
            self._gone.add(place)
            log.warning("topic %r was removed while records were committed to it: they go with it", name)
        return None

    def _places(self) -> list[Place]:
        return sorted({place for part in self._parts for place in part.places})

    async def find_starts(self) -> dict[str, dict[int, int]]:
        """Return an offset of each partition below which nothing of this commit can come to stand, also after a crash.

        Raises:
            StorageError: the disk refused.
        """
        starts: dict[str, dict[int, int]] = {}
        for place in self._places():
            target = self._target(place)
            if target is not None:  # what is behind the durable offset may be gone after a loss of power
                starts.setdefault(place[0], {})[place[1]] = await target.flush()
        return starts

    async def append_all(self, pending: Pending, *, look: bool, begun: Callable[[], None]) -> None:
        """Append what is not in the log, and return when all of it is there and durable.

        Args:
            pending: the commit.
            look: whether some of it may be in the log already.
            begun: called before the first record is appended.

        Raises:
            StorageError: the disk refused; some of it may be in the log.
        """
        stored = await self._find_stored(pending) if look else {}
        begun()
        sequence = pending.first_sequence
        for part in self._parts:
            left = part.records
            try:
                reader = PartReader(self._files, part.path)
            except OSError as error:
                raise disk_error(error, f"reading {part.path}") from error
            try:
                if reader.next_body() is None:
                    raise StorageError(f"{part.path}: its head is damaged; its batch cannot be committed")
                while left > 0:
                    entry = await self._loop.run_in_executor(None, reader.read_entry)
                    await self._store(entry, sequence, stored.get((entry.topic, entry.partition), {}))
                    sequence += entry.records.count
                    left -= entry.records.count
            except OSError as error:
                raise disk_error(error, f"reading {part.path}") from error
            finally:
                reader.close()
        await self._settle_window()

    async def _store(self, entry: Entry, sequence: int, known: dict[int, int]) -> None:
        """Append what of a staged batch is not in the log."""
        target = self._target((entry.topic, entry.partition))
        if target is None:
            return
        partition = target
        batch = entry.records
        while batch.count and sequence in known:
            base_offset, left = known[sequence], batch
            same = await partition.ask(lambda: count_stored(partition.log, base_offset, left))  # noqa: B023
            sequence += same
            batch = _tail(batch, same)
        if not batch.count:
            return
        receipt = self._publish(
            Publication(
                CLIENT,
                PROTOCOL,
                batch,
                entry.topic,
                entry.partition,
                producer_id=self._producer_id,
                first_sequence=sequence,
                at_once=True,
                fresh=True,
            )
        )
        if receipt.error is not None:
            raise receipt.error
        self._window.append(_Appended(partition, sequence, receipt.base_offset, batch.count))
        if len(self._window) >= WINDOW_ENTRIES:
            await self._settle_window()

    async def _settle_window(self) -> None:
        """Wait until what was appended is durable, and check that a failed flush has not lost any of it."""
        window, self._window = self._window, []
        if not window:
            return
        for partition in {id(one.partition): one.partition for one in window}.values():
            durable = await partition.flush()
            known = {
                (batch.first_sequence, batch.base_offset)
                for batch in partition.log.producers.batches(self._producer_id)
            }
            for one in window:
                if one.partition is not partition:
                    continue
                lost = (one.first_sequence, one.base_offset) not in known
                if lost or one.base_offset + one.count > durable:
                    raise partition.failing or StorageError(
                        f"partition {partition.number}: records of a commit are not on the disk yet"
                    )

    async def _find_stored(self, pending: Pending) -> dict[Place, dict[int, int]]:
        """Return by place where batches of this commit stand in the log: first sequence -> offset."""
        found: dict[Place, dict[int, int]] = {}
        for place in self._places():
            partition = self._target(place)
            if partition is None:
                continue
            await partition.flush()
            if partition.next_offset != partition.log.next_offset:
                raise partition.failing or StorageError("accepted records wait to be written")
            start = pending.starts.get(place[0], {}).get(place[1], 0)
            found[place] = await partition.ask(
                lambda: find_batches(partition.log, self._producer_id, pending.first_sequence, start)  # noqa: B023
            )
        return found


def _tail(batch: RecordBatch, start: int) -> RecordBatch:
    """Return the records of a batch from number `start` on."""
    positions = np.asarray(batch.positions)[start:]
    at = int(positions[0]) if len(positions) else len(batch.data)
    return RecordBatch(memoryview(batch.data)[at:], positions - at, batch.timestamps[start:], -1)


def find_batches(partition_log: PartitionLog, producer_id: int, first_sequence: int, start: int) -> dict[int, int]:
    """Return the batches of a producer from a sequence number on that stand at or behind `start`: sequence -> offset.

    The log itself is read, 4 MiB at a time, not its memory of producers, which is bounded; that is asked for what
    compaction may have removed.

    Raises:
        StorageError: the log cannot be read.
    """
    found = {
        batch.first_sequence: batch.base_offset
        for batch in partition_log.producers.batches(producer_id)
        if batch.first_sequence >= first_sequence
    }
    end = partition_log.next_offset
    offset = max(min(start, end), partition_log.first_offset)
    while offset < end:
        chunk = partition_log.read(offset, READ_BYTES, end)
        offset = chunk.next_offset
        data = bytes(chunk.data)
        at = data.find(PRODUCER_HEADER)
        positions = find_positions(data, 0, len(data))[0] if at >= 0 else np.zeros(0, np.int64)
        while at >= 0:
            position = int(positions[np.searchsorted(positions, at, "right") - 1])
            batch = read_producer(data, position)
            if batch is not None and batch[0] == producer_id and batch[1] >= first_sequence:
                found[batch[1]] = int.from_bytes(data[position : position + 8], "big")
            at = data.find(PRODUCER_HEADER, at + 1)
    return found


def count_stored(partition_log: PartitionLog, base_offset: int, batch: RecordBatch) -> int:
    """Return how many records of a batch whose first one stands at `base_offset` follow there; at least 1.

    A crash, or a failed flush, may have left the beginning of a batch. Records are the same when their CRCs are; what
    compaction removed was there.

    Raises:
        StorageError: the log cannot be read.
    """
    positions = np.asarray(batch.positions)
    crcs = crcs_at(batch.data, positions)
    end = min(base_offset + batch.count, partition_log.next_offset)
    offset = max(base_offset + 1, partition_log.first_offset)
    while offset < end:
        chunk = partition_log.read(offset, READ_BYTES, end)
        if chunk.data:
            at, _ = find_positions(chunk.data, 0, len(chunk.data))
            offsets = offsets_at(chunk.data, at)
            there = crcs_at(chunk.data, at)
            other = np.flatnonzero(there != crcs[offsets - base_offset])
            if len(other):
                return int(offsets[other[0]]) - base_offset
        offset = chunk.next_offset
    return max(end - base_offset, 1)
