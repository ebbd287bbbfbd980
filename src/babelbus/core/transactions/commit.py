"""Commits that have begun, until each is done: the records of staged parts -> topics, each once.

A commit that is `Pending` passes three points, each of them durable before the next: its marker stands in the state of
its transaction, its records are in the log, the batch is recorded as the last one. Its callers are answered at the
last point, or with an error that means *unknown*. When the disk refuses, the commit is tried again (see `staging`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import msgspec

from babelbus.arrays import np
from babelbus.clock import Clock
from babelbus.core.access import CLIENT
from babelbus.core.flusher import Flusher
from babelbus.core.partition import Partition, TopicClosedError
from babelbus.core.publish import Publication, Publish
from babelbus.core.receipt import settled
from babelbus.core.topic import Topics
from babelbus.core.transactions.model import (
    CommitReceipt,
    Committed,
    Pending,
    TransactionDamagedError,
    TransactionState,
    UnknownPartError,
    note,
    producer_of,
)
from babelbus.core.transactions.part_file import Entry, PartReader, Place, StagedPart
from babelbus.core.transactions.parts import Parts
from babelbus.errors import BabelbusError, StorageError
from babelbus.records.columns import find_positions
from babelbus.records.fields import crcs_at, offsets_at
from babelbus.records.format import PRODUCER_HEADER, read_producer
from babelbus.records.record import RecordBatch
from babelbus.storage.contract import PartitionLog
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

PROTOCOL = "transactions"
"""The name of the publisher of staged records in metrics."""
RETRY_SECONDS = 1.0
"""How long a commit that the disk refused waits until it is tried again, unless somebody asks for it before."""
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


class Transaction:
    """A transaction id: what is kept of it, and the commit that is under way."""

    def __init__(self, state: TransactionState, path: str) -> None:
        self.state = state
        self.path = path
        self.owner = ""
        """The client that asked for the pending commit."""
        self.marked = False
        """Whether the marker of the pending commit is durable."""
        self.appended = False
        """Whether some of its records may be in the log."""
        self.waiting: list[CommitReceipt] = []
        self.task: asyncio.Task[None] | None = None
        self.retry: asyncio.TimerHandle | None = None
        self.touched_ms = 0


class Committer:
    """Has a task for each transaction with a pending commit, or a timer for its next try. Calls come from the loop."""

    def __init__(
        self,
        files: FileSystem,
        *,
        topics: Topics,
        publish: Publish,
        parts: Parts,
        flusher: Flusher,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._files = files
        self._topics = topics
        self._publish = publish
        self._parts = parts
        self._flusher = flusher
        self._clock = clock
        self._loop = loop
        self._under_way: dict[str, Transaction] = {}
        self._closed = False

    # -- beginning ---------------------------------------------------------------------------------------------------

    def resume(self, transactions: Sequence[Transaction]) -> None:
        """Continue, at a start, with pending commits that a crash cut short."""
        for one in transactions:
            assert one.state.pending is not None
            one.marked = one.appended = True
            self._cut_torn(one.state.pending)
        for one in transactions:  # not before: what they append would stand behind the holes
            self._start(one)

    def _cut_torn(self, pending: Pending) -> None:
        for name, starts in pending.starts.items():
            topic = self._topics.get(name)
            for number, start in starts.items():
                if topic is None or number >= len(topic.partitions):
                    continue
                try:
                    topic.partitions[number].cut_torn(start)
                except StorageError as error:
                    log.error("a commit cannot go on: %s", error)

    async def run(self, work: Callable[[], None]) -> None:
        """Run in the flusher's thread what must not block the event loop, behind the flushes asked for before.

        Raises:
            StorageError: what `work` raises.
        """

        def do() -> int:
            work()
            return 0

        await self._flusher.call(do, lambda _durable, _error: None)

    def begin(self, one: Transaction, pending: Pending, owner: str) -> CommitReceipt:
        """Start a commit for `owner`; its parts are whole."""
        one.state = msgspec.structs.replace(one.state, pending=pending)
        one.owner, one.marked, one.appended = owner, False, False
        return self.wait_for(one, pending)

    def wait_for(self, one: Transaction, pending: Pending) -> CommitReceipt:
        """Return a promise for the pending commit, and try it now if it waits for its next try."""
        receipt = CommitReceipt(pending.batch_id, pending.records)
        one.waiting.append(receipt)
        self._start(one)
        return receipt

    def _start(self, one: Transaction) -> None:
        if one.retry is not None:
            one.retry.cancel()
            one.retry = None
        self._under_way[one.state.transaction_id] = one
        if one.task is None and not self._closed:
            one.task = self._loop.create_task(self._carry_out(one))

    # -- carrying out ------------------------------------------------------------------------------------------------

    async def _carry_out(self, one: Transaction) -> None:
        """Run the pending commit; if the disk refuses, it stays pending and is tried again."""
        pending = one.state.pending
        assert pending is not None
        by_number = {part.number: part for part in self._parts.of(one.state.transaction_id)}
        parts = [by_number[number] for number in pending.parts if number in by_number]
        try:
            if not one.marked:
                broken = await self._find_broken(parts)
                if broken is not None:
                    one.state = msgspec.structs.replace(one.state, pending=None)
                    _answer(one, UnknownPartError(f"a part is lost, nothing was committed: {broken}"))
                    return
                if parts:
                    pending = msgspec.structs.replace(pending, starts=await self._find_starts(parts))
                    await self._save(one, msgspec.structs.replace(one.state, pending=pending))
                one.marked = True
            if len(parts) != len(pending.parts) or sum(part.records for part in parts) != pending.records:
                raise TransactionDamagedError(f"{one.path}: staged records of batch {pending.batch_id} are gone")
            await self._append_all(one, pending, parts)
            await self._finish(one, pending)
        except BabelbusError as error:
            log.warning("commit of batch %d is not finished, it is tried again: %s", pending.batch_id, error)
            _answer(one, error)
            if not self._closed:
                one.retry = self._loop.call_later(RETRY_SECONDS, self._start, one)
        except Exception as error:  # a bug must not leave who waits without an answer for ever
            log.exception("commit of batch %d failed", pending.batch_id)
            _answer(one, StorageError(f"internal error in a commit: {error}"))
        finally:
            one.task = None
            if one.state.pending is None:
                self._under_way.pop(one.state.transaction_id, None)

    async def _find_broken(self, parts: Sequence[StagedPart]) -> StorageError | None:
        """Wait until the parts survive a loss of power, and read them: a commit that has begun cannot be taken back."""
        await settled([part.receipt(-1, 0, 0) for part in parts])
        for part in parts:
            part.failed = part.failed or await self._loop.run_in_executor(None, part.check)
            if part.failed is not None:
                return part.failed
        return None

    async def _save(self, one: Transaction, state: TransactionState) -> None:
        await self.run(lambda: note(self._files, one.path).write(state))
        one.state = state

    async def _finish(self, one: Transaction, pending: Pending) -> None:
        """Record the batch as committed, durably, answer, and drop its parts and those left over of earlier ones."""
        now_ms = self._clock.now_ms()
        state = msgspec.structs.replace(
            one.state,
            owner=one.owner or one.state.owner,
            last=Committed(pending.batch_id, pending.records, now_ms),
            pending=None,
            next_sequence=pending.first_sequence + pending.records,
        )
        await self._save(one, state)
        one.touched_ms = now_ms
        _answer(one, None)
        self.drop_up_to(state.transaction_id, pending.batch_id)

    def drop_up_to(self, transaction_id: str, batch_id: int) -> None:
        """Drop the parts of a batch that is committed, and those left over of earlier ones."""
        self._parts.remove(part for part in self._parts.of(transaction_id) if part.head.batch_id <= batch_id)

    # -- the records -------------------------------------------------------------------------------------------------

    def _targets(self, parts: Sequence[StagedPart]) -> dict[Place, Partition]:
        """Return the partitions that parts have records for, but for those of topics that were removed meanwhile.

        Raises:
            StorageError: a topic is damaged; the commit waits until the topic is there again.
        """
        targets = {}
        for place in sorted({place for part in parts for place in part.places}):
            name, number = place
            if name in self._topics.damaged:
                raise self._topics.damaged[name]
            topic = self._topics.get(name)
            if topic is not None and number < len(topic.partitions):
                targets[place] = topic.partitions[number]
            else:
                log.warning("topic %r was removed while records were committed to it: they go with it", name)
        return targets

    async def _find_starts(self, parts: Sequence[StagedPart]) -> dict[str, dict[int, int]]:
        """Return an offset of each partition below which no record of this commit can be, also after a crash.

        Raises:
            StorageError: the disk refused.
        """
        starts: dict[str, dict[int, int]] = {}
        for (name, number), target in self._targets(parts).items():
            # What is behind the durable offset may be gone after a loss of power.
            starts.setdefault(name, {})[number] = await target.flush()
        return starts

    async def _append_all(self, one: Transaction, pending: Pending, parts: Sequence[StagedPart]) -> None:
        """Append what is not in the log, and return when all of it is there and durable.

        Raises:
            StorageError: the disk refused; some of it may be in the log.
        """
        producer_id = producer_of(one.state.transaction_id)
        targets = self._targets(parts)
        stored = await self._find_stored(targets, pending, producer_id) if one.appended else {}
        one.appended = True
        sequence = pending.first_sequence
        window: list[_Appended] = []
        for part in parts:
            left = part.records
            with closing(PartReader(self._files, part.path)) as reader:
                if await self._loop.run_in_executor(None, reader.next_body) is None:
                    raise StorageError(f"{part.path}: its head is damaged; its batch cannot be committed")
                while left > 0:
                    entry = await self._loop.run_in_executor(None, reader.next_entry)
                    if entry is None:
                        raise reader.damage()
                    if entry.place in targets:
                        known = stored.get(entry.place, {})
                        window += await self._store(targets[entry.place], entry, sequence, known, producer_id)
                    if len(window) >= WINDOW_ENTRIES:
                        await self._settle_window(window, producer_id)
                        window = []
                    sequence += entry.records.count
                    left -= entry.records.count
        await self._settle_window(window, producer_id)

    async def _store(
        self, partition: Partition, entry: Entry, sequence: int, known: Mapping[int, int], producer_id: int
    ) -> list[_Appended]:
        """Append what of a staged batch is not in the log; return that, if it is anything."""
        batch = entry.records
        while batch.count and sequence in known:
            base_offset, left = known[sequence], batch
            same = await partition.ask(lambda: count_stored(partition.log, base_offset, left))  # noqa: B023
            sequence += same
            batch = _tail(batch, same)
        if not batch.count:
            return []
        topic, number = entry.place
        receipt = self._publish(
            Publication(
                CLIENT,
                PROTOCOL,
                batch,
                topic,
                number,
                producer_id=producer_id,
                first_sequence=sequence,
                at_once=True,
                fresh=True,
            )
        )
        if receipt.error is not None:
            raise receipt.error
        return [_Appended(partition, sequence, receipt.base_offset, batch.count)]

    async def _settle_window(self, window: Sequence[_Appended], producer_id: int) -> None:
        """Wait until what was appended is durable, and check that a failed flush has not lost any of it."""
        for partition in {id(one.partition): one.partition for one in window}.values():
            durable = await partition.flush()
            known = {
                (batch.first_sequence, batch.base_offset) for batch in partition.log.producers.batches(producer_id)
            }
            for one in window:
                if one.partition is not partition:
                    continue
                lost = (one.first_sequence, one.base_offset) not in known
                if lost or one.base_offset + one.count > durable:
                    raise partition.failing or StorageError(
                        f"partition {partition.number}: records of a commit are not on the disk yet"
                    )

    async def _find_stored(
        self, targets: Mapping[Place, Partition], pending: Pending, producer_id: int
    ) -> dict[Place, dict[int, int]]:
        """Return by place where batches of this commit stand in the log: first sequence -> offset."""
        stored: dict[Place, dict[int, int]] = {}
        for place, partition in targets.items():
            await partition.flush()
            if partition.next_offset != partition.log.next_offset:
                raise partition.failing or StorageError("accepted records wait to be written")
            start = pending.starts.get(place[0], {}).get(place[1], 0)
            stored[place] = await partition.ask(
                lambda: find_batches(partition.log, producer_id, pending.first_sequence, start)  # noqa: B023
            )
        return stored

    # -- ending ------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Return when each commit is carried out, or the disk has refused it for now."""
        tasks = [one.task for one in self._under_way.values() if one.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Stop: unfinished commits go on at the next start. Afterwards no flush of a part is under way."""
        self._closed = True
        tasks = []
        for one in self._under_way.values():
            if one.retry is not None:
                one.retry.cancel()
            if one.task is not None:
                one.task.cancel()
                tasks.append(one.task)
        if tasks:
            await asyncio.wait(tasks)
        await self.run(lambda: None)  # behind every flush of a part that was asked for
        for one in self._under_way.values():
            _answer(one, TopicClosedError("the server stops; the commit goes on at the next start"))


def _answer(one: Transaction, error: BabelbusError | None) -> None:
    waiting, one.waiting = one.waiting, []
    for receipt in waiting:
        receipt.resolve(error)


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
