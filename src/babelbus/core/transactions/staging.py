"""Staged, atomic appends: many writers stage records that no reader sees, and one call commits them all, once.

A batch of a transaction is made of *parts*, one for each attempt of a writer. `stage` adds records to a part, durably;
`commit` names the parts that belong to the batch and appends their records to the topics; the others of that batch are
dropped. A commit is deduplicated by (transaction id, batch id), across restarts.

How a commit is atomic: all its parts are durable; then a marker that names them is made durable (from here on it will
be carried out, whatever happens); then the records are appended, under a producer id of the transaction's own and
sequence numbers, so that what is in the log already is found there and not appended again; then the batch is noted as
the last one, and answered.

Readers see nothing before the marker is durable. While the commit is carried out, the records of each partition
appear in the order of the commit, other publishers' records perhaps between them, and not at the same moment in all
partitions. Once it is answered, all are there. After a crash all or nothing is there when `settle` has returned.
"""

import asyncio
import logging
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import chain

from babelbus.arrays import np
from babelbus.clock import Clock
from babelbus.config import StagingLimits
from babelbus.core.flusher import Flusher
from babelbus.core.partition import TopicClosedError
from babelbus.core.publish import SERVER_CHOOSES, Publish
from babelbus.core.receipt import Receipt
from babelbus.core.subject import is_secret
from babelbus.core.topic import ReservedTopicError, Topic, Topics
from babelbus.core.transactions.commit import Committer, Transaction
from babelbus.core.transactions.model import (
    ID_BYTES_MAX,
    NOT_REMEMBERED,
    STATE_SUFFIX,
    CommitPendingError,
    CommitReceipt,
    FailedPartError,
    MissingTopicError,
    NoStateError,
    PartRef,
    Pending,
    StagedRecordsMissingError,
    StagingFullError,
    StagingRefusedError,
    TransactionDamagedError,
    TransactionInfo,
    TransactionOwnerError,
    TransactionState,
    UnknownPartError,
    note,
    token_of,
)
from babelbus.core.transactions.part_file import ENTRY_BYTES_MAX, PartHead, Place, StagedPart
from babelbus.core.transactions.parts import PART_SUFFIX, Parts
from babelbus.errors import StorageError
from babelbus.records.columns import decode_columns
from babelbus.records.format import HEADERS_MAX, InvalidRecordError
from babelbus.records.record import RecordBatch
from babelbus.storage.files import FileSystem, disk_error
from babelbus.storage.notes import DamagedNoteError

log = logging.getLogger(__name__)


class Staging:
    """All transactions. Calls come from the event loop that it was made in; `open` before anything else.

    Args:
        files, folder: where staged records lie; the folder is this object's own.
        topics: the broker's topics by name, as they come and go.
        publish: `Broker.publish`.
    """

    def __init__(
        self,
        files: FileSystem,
        folder: str,
        *,
        topics: Topics,
        publish: Publish,
        flusher: Flusher,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        settings: StagingLimits | None = None,
    ) -> None:
        self.settings = settings or StagingLimits()
        self._files = files
        self._folder = folder
        self._topics = topics
        self._clock = clock
        self._transactions: dict[str, Transaction] = {}
        self._damaged: dict[str, str] = {}
        """Token -> path of transactions whose state cannot be read."""
        self._parts = Parts(files, folder, flusher=flusher, clock=clock, loop=loop, settings=self.settings)
        self._committer = Committer(
            files, topics=topics, publish=publish, parts=self._parts, flusher=flusher, clock=clock, loop=loop
        )
        self._closed = False

    @property
    def staged_bytes(self) -> int:
        """Size of all that is staged; `settings.bytes_max` bounds it."""
        return self._parts.staged_bytes

    # -- life --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read what is staged, and go on with commits that a crash cut short. Reads all that is staged (1 GB/s).

        Raises:
            DiskError: the disk refused.
        """
        path = self._folder
        try:
            self._files.make_folder(self._folder)
            names = self._files.list_folder(self._folder)
            for name in names:
                path = f"{self._folder}/{name}"
                if name.endswith(STATE_SUFFIX):
                    self._open_state(name)
                elif not name.endswith(PART_SUFFIX):  # a state that a crash left half written
                    self._files.unlink(path)
            for name in names:
                path = f"{self._folder}/{name}"
                if name.endswith(PART_SUFFIX) and name.partition("-")[0] not in self._damaged:
                    self._parts.recover(name, keep=self._is_wanted, named=self._is_named)
        except OSError as error:
            raise disk_error(error, f"opening {path}") from error
        self._committer.resume([one for one in self._transactions.values() if one.state.pending is not None])

    def _open_state(self, name: str) -> None:
        path = f"{self._folder}/{name}"
        try:
            state = note(self._files, path).read()
        except DamagedNoteError as error:
            log.error("%s", error)
            self._damaged[name.removesuffix(STATE_SUFFIX)] = path
            return
        assert state is not None  # the folder lists it
        one = self._transactions[state.transaction_id] = Transaction(state, path)
        one.touched_ms = state.last.at_ms if state.last else self._clock.now_ms()

    def _is_named(self, head: PartHead, number: int) -> bool:
        """Return whether the pending commit names a part."""
        one = self._transactions.get(head.transaction_id)
        return one is not None and one.state.pending is not None and number in one.state.pending.parts

    def _is_wanted(self, head: PartHead, number: int) -> bool:
        """Return whether a part is not left over from a batch that was committed."""
        one = self._transactions.get(head.transaction_id) or self._begin(head.transaction_id)
        last = one.state.last
        return last is None or head.batch_id > last.batch_id or self._is_named(head, number)

    async def settle(self) -> None:
        """Return when each commit that goes on is carried out, or the disk has refused it for now."""
        await self._committer.settle()
        await self._parts.settle()

    async def close(self) -> None:
        """Close the files. Staged records stay; unfinished commits go on at the next start."""
        if self._closed:
            return
        self._closed = True
        await self._committer.close()
        await self._parts.settle()
        self._parts.close()

    # -- what there is -----------------------------------------------------------------------------------------------

    def transaction(self, transaction_id: str) -> TransactionInfo:
        """Return what is known of a transaction id.

        Raises:
            TransactionDamagedError: nobody knows.
        """
        self._check(transaction_id)
        self._check_known(transaction_id)
        one = self._transactions.get(transaction_id)
        if one is None:
            return TransactionInfo(-1, -1, -1, "", 0)
        last, pending = one.state.last, one.state.pending
        return TransactionInfo(
            last.batch_id if last else -1,
            last.records if last else -1,
            pending.batch_id if pending else -1,
            one.state.owner,
            self._parts.bytes_of(transaction_id),
        )

    def places(self, transaction_id: str, batch_id: int) -> set[Place]:
        """Return the topics and partitions that a batch has staged records for, of all its parts."""
        parts = self._parts.of(transaction_id)
        return set(chain.from_iterable(part.places for part in parts if part.head.batch_id == batch_id))

    def _check(self, *ids: str) -> None:
        if self._closed:
            raise TopicClosedError("the server stops")
        for text in ids:
            if not 1 <= len(text.encode("utf-8", "replace")) <= ID_BYTES_MAX or not _is_unicode(text):
                raise StagingRefusedError(f"an id has 1 to {ID_BYTES_MAX} bytes of UTF-8, not {len(text)} characters")

    def _check_known(self, transaction_id: str) -> None:
        if self._damaged:
            path = self._damaged.get(token_of(transaction_id))
            if path is not None:
                raise TransactionDamagedError(f"{path} is damaged; nobody knows what was committed")

    def _transaction(self, transaction_id: str) -> Transaction:
        one = self._transactions.get(transaction_id)
        if one is None:
            if len(self._transactions) >= self.settings.transactions_max:
                raise StagingFullError(f"{self.settings.transactions_max} transaction ids are remembered, no more fit")
            one = self._begin(transaction_id)
        return one

    def _begin(self, transaction_id: str) -> Transaction:
        path = f"{self._folder}/{token_of(transaction_id)}{STATE_SUFFIX}"
        one = self._transactions[transaction_id] = Transaction(TransactionState(transaction_id), path)
        return one

    # -- staging -----------------------------------------------------------------------------------------------------

    def stage(
        self,
        transaction_id: str,
        batch_id: int,
        part: str,
        topic: str,
        batch: RecordBatch,
        *,
        first_record: int,
        partition: int = SERVER_CHOOSES,
        to_state: bool = False,
    ) -> Receipt:
        """Add records in the stored form, checked by `parse_records`, to a part; nobody sees them before the commit.

        A part has one writer, who counts: `first_record` is the number of records that he staged in it before. A resend
        gets the first answer again. Without a partition, all records of the call go to one, parts take turns.
        A batch that was committed already is answered as if it were staged, and nothing is kept. `to_state` says that
        the records are there to set the state, so that a topic which keeps none refuses them.

        Returns:
            A receipt with the partition and `first_record`, done when the records survive a loss of power, whatever
            the topic's ack level is.

        Raises:
            MissingTopicError, ReservedTopicError, UnknownPartitionError, InvalidRecordError, NoStateError: they cannot
                go there.
            StagedRecordsMissingError, StagingFullError, FailedPartError, StagingRefusedError: see there.
            StorageError: the disk refused; nothing was staged.
        """
        self._check(transaction_id, part)
        self._check_known(transaction_id)
        if not 0 <= batch_id < 2**63 or not 0 <= first_record < 2**63:
            raise StagingRefusedError(f"batch {batch_id}, first record {first_record}: both are 0 or more")
        target = self._find_topic(topic)
        if target.reserved:
            raise ReservedTopicError(f"topic {topic!r} is the server's own")
        if to_state and not target.retains:
            raise NoStateError(topic)
        if partition != SERVER_CHOOSES:
            target.partition(partition)
        _check_batch(batch)
        if target.may_hold_secrets and any(map(is_secret, target.subjects_of(batch))):
            raise StagingRefusedError(f"topic {topic!r}: nobody publishes under secret keys of sbus")
        one = self._transactions.get(transaction_id)
        last = one.state.last if one else None
        if last is not None and batch_id <= last.batch_id:
            receipt = Receipt(max(partition, 0), first_record, batch.count)
            receipt.resolve()
            return receipt
        found = self._parts.find(transaction_id, batch_id, part)
        records = found.records if found else 0
        if found is not None and found.failed is not None:
            raise FailedPartError(f"part {part!r} of batch {batch_id} is lost, stage another one: {found.failed}")
        if first_record > records:
            raise StagedRecordsMissingError(f"part {part!r} has {records} records, the next is not {first_record}")
        if partition == SERVER_CHOOSES:  # so that a resend goes where it went
            partition = (zlib.crc32(part.encode()) + first_record // batch.count) % len(target.partitions)
        if first_record < records:
            if first_record + batch.count > records or found is None:
                raise StagingRefusedError(
                    f"records {first_record} and up of part {part!r} were staged in other batches"
                )
            return found.receipt(partition, first_record, batch.count)
        if one is not None and found is not None and one.state.pending and found.number in one.state.pending.parts:
            raise CommitPendingError(f"part {part!r} is being committed, no more may come to it")
        one = one or self._transaction(transaction_id)
        try:
            receipt = self._parts.append((transaction_id, batch_id, part), (topic, partition), batch)
        except StorageError:
            self._forget_empty(one)
            raise
        one.touched_ms = self._clock.now_ms()
        return receipt

    def _find_topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise self._topics.why_closed(name) or MissingTopicError(f"there is no topic {name!r}")
        return topic

    # -- committing --------------------------------------------------------------------------------------------------

    def commit(self, transaction_id: str, batch_id: int, parts: Sequence[PartRef], *, owner: str = "") -> CommitReceipt:
        """Publish the records of these parts, in this order, all or none of them; drop the batch's other parts.

        A batch that was committed before is answered with success, and so is one below the last. An error of the
        receipt means *unknown*: the commit may be carried out yet, and asking again tells; until then the transaction
        takes no other. `owner` names who commits (a Spark query id); somebody else's transaction is refused.

        Raises:
            UnknownPartError: a part is not staged, not whole, or named twice.
            MissingTopicError, UnknownPartitionError: a topic went away.
            TransactionOwnerError, CommitPendingError, TransactionDamagedError: see there.
        """
        self._check(transaction_id)
        self._check_known(transaction_id)
        if not 0 <= batch_id < 2**63:
            raise StagingRefusedError(f"batch {batch_id}: a batch id is 0 or more")
        one = self._transactions.get(transaction_id)
        if one is not None:
            if owner and one.state.owner and owner != one.state.owner:
                raise TransactionOwnerError(f"transaction {transaction_id!r} is {one.state.owner!r}'s, not {owner!r}'s")
            last, pending = one.state.last, one.state.pending
            if last is not None and batch_id <= last.batch_id:
                self._committer.drop_up_to(transaction_id, batch_id)
                records = last.records if batch_id == last.batch_id else NOT_REMEMBERED
                again = CommitReceipt(batch_id, records, again=True)
                again.resolve()
                return again
            if pending is not None:
                if pending.batch_id != batch_id:
                    raise CommitPendingError(f"batch {pending.batch_id} of {transaction_id!r} is being committed")
                return self._committer.wait_for(one, pending)
        chosen = [self._find_part(transaction_id, batch_id, ref) for ref in parts]
        if len({part.number for part in chosen}) != len(chosen):
            raise UnknownPartError("a commit names each part once")
        for name, number in chain.from_iterable(part.places for part in chosen):
            self._find_topic(name).partition(number)
        one = one or self._transaction(transaction_id)
        records = sum(part.records for part in chosen)
        pending = Pending(batch_id, [part.number for part in chosen], records, one.state.next_sequence, {})
        return self._committer.begin(one, pending, owner)

    def _find_part(self, transaction_id: str, batch_id: int, ref: PartRef) -> StagedPart:
        part = self._parts.find(transaction_id, batch_id, ref.part)
        where = f"part {ref.part!r} of batch {batch_id}"
        if part is None:
            raise UnknownPartError(f"{where} is not staged")
        if part.failed is not None:
            raise UnknownPartError(f"{where} failed: {part.failed}")
        if part.records != ref.records:
            raise UnknownPartError(f"{where} has {part.records} records, not {ref.records}")
        return part

    # -- giving up ---------------------------------------------------------------------------------------------------

    def abort(self, transaction_id: str, batch_id: int, part: str | None = None) -> int:
        """Drop a part, or all parts of a batch; return how many there were.

        Raises:
            CommitPendingError: the batch is being committed; that cannot be taken back.
        """
        self._check(transaction_id)
        self._check_known(transaction_id)
        one = self._transactions.get(transaction_id)
        if one is None:
            return 0
        pending = one.state.pending
        found = [
            staged
            for staged in self._parts.of(transaction_id)
            if staged.head.batch_id == batch_id and part in (None, staged.head.part)
        ]
        if pending is not None and any(staged.number in pending.parts for staged in found):
            raise CommitPendingError(f"batch {batch_id} of {transaction_id!r} is being committed")
        self._parts.remove(found)
        self._forget_empty(one)
        return len(found)

    async def forget(self, transaction_id: str) -> None:
        """Remove a transaction: its parts, and which batch was its last. Committed records stay in the log.

        Raises:
            CommitPendingError: a commit is under way.
            StorageError: the disk refused.
        """
        self._check(transaction_id)
        token = token_of(transaction_id)
        one, damaged = self._transactions.get(transaction_id), self._damaged.get(token)
        if one is not None:
            if one.state.pending is not None:
                raise CommitPendingError(f"a commit of {transaction_id!r} is under way")
            self._parts.remove(self._parts.of(transaction_id))
        try:
            # Of a damaged transaction's parts nothing is known.
            names = [name for name in self._files.list_folder(self._folder) if name.startswith(f"{token}-")]
            self._transactions.pop(transaction_id, None)
            self._damaged.pop(token, None)
            await self._committer.run(partial(self._unlink, [*names, f"{token}{STATE_SUFFIX}"]))
        except (OSError, StorageError) as error:
            if one is not None:
                self._transactions.setdefault(transaction_id, one)
            if damaged is not None:
                self._damaged[token] = damaged
            if isinstance(error, OSError):
                raise disk_error(error, f"listing {self._folder}") from error
            raise

    def _unlink(self, names: Sequence[str]) -> None:
        """Remove files, durably; in the flusher's thread, in front of what is written under their names later."""
        try:
            for name in names:
                self._files.unlink(f"{self._folder}/{name}")
            self._files.flush_folder(self._folder)
        except OSError as error:
            raise disk_error(error, f"forgetting a transaction in {self._folder}") from error

    def _forget_empty(self, one: Transaction) -> None:
        """Remove a transaction without records and without a committed batch."""
        state = one.state
        if state.last is None and state.pending is None and not self._parts.of(state.transaction_id):
            self._transactions.pop(state.transaction_id, None)

    async def expire(self) -> int:
        """Drop parts that nobody commits, and forget transactions that nobody uses; return how many parts were dropped.

        Called now and then, as retention is.
        """
        before = self._clock.monotonic() - self.settings.part_seconds
        forgotten_ms = self._clock.now_ms() - self.settings.transaction_seconds * 1000
        dropped = 0
        for transaction_id, one in list(self._transactions.items()):
            kept = one.state.pending.parts if one.state.pending else ()
            parts = self._parts.of(transaction_id)
            late = [part for part in parts if part.touched <= before and part.number not in kept]
            self._parts.remove(late)
            dropped += len(late)
            self._forget_empty(one)
            idle = len(late) == len(parts) and one.state.pending is None and one.state.last is not None
            if idle and one.touched_ms <= forgotten_ms:
                try:
                    await self.forget(transaction_id)
                except StorageError as error:
                    log.warning("a transaction that nobody uses is not forgotten: %s", error)
        if dropped:
            log.info("dropped %d staged parts that nobody committed", dropped)
        return dropped


def _check_batch(batch: RecordBatch) -> None:
    """Refuse what could not be appended later, when it is too late to say so."""
    if not batch.count or len(batch.data) > ENTRY_BYTES_MAX:
        raise InvalidRecordError(f"{batch.count} records of {len(batch.data)} bytes, 1 to {ENTRY_BYTES_MAX} are staged")
    counts = decode_columns(batch.data, np.asarray(batch.positions, np.int64)).headers_counts
    if counts.max() >= HEADERS_MAX:  # each may come to be the first of a batch, and get one more
        raise InvalidRecordError(f"a record that is staged has {HEADERS_MAX - 1} headers at the most")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
