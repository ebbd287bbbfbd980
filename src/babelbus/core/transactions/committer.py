"""Carrying commits out that have begun, until each is done: what the disk refuses is tried again (see `staging`).

A commit that is `Pending` passes three points, each of them durable before the next: its marker stands in the state of
its transaction, its records are in the log, the batch is noted as the last one. Who waits for it is answered at the
last, or with an error that means *unknown*.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from babelbus.clock import Clock
from babelbus.core.flusher import Flusher
from babelbus.core.partition import TopicClosedError
from babelbus.core.publish import Publish
from babelbus.core.receipt import settled
from babelbus.core.topic import Topics
from babelbus.core.transactions.commit import Commit
from babelbus.core.transactions.model import CommitReceipt, UnknownPartError
from babelbus.core.transactions.part_file import StagedPart
from babelbus.core.transactions.parts import Parts
from babelbus.core.transactions.transaction_file import (
    Committed,
    Pending,
    TransactionDamagedError,
    TransactionState,
    note,
)
from babelbus.errors import BabelbusError, StorageError
from babelbus.storage.files import FileSystem

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""How long a commit that the disk refused waits before it is tried again without anybody's asking."""


class Transaction:
    """A transaction id: what is kept of it, and the commit that is under way."""

    def __init__(self, state: TransactionState, path: str) -> None:
        self.state = state
        self.path = path
        self.owner = ""
        """Who asked for the pending commit."""
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
        """At a start: go on with pending commits that a crash cut short."""
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

    async def _run(self, work: Callable[[], None]) -> None:
        """Do in the flusher's thread what must not block the event loop, behind the flushes asked for before.

        Raises:
            StorageError: what `work` raises.
        """

        def do() -> int:
            work()
            return 0

        await self._flusher.call(do, lambda _durable, _error: None)

    async def _wait_durable(self, parts: Sequence[StagedPart]) -> StorageError | None:
        """Return when all of the parts survive a loss of power, with the error of one that does not."""
        for part in parts:
            await settled((part.receipt(-1, 0, 0),))
            if part.failed is not None:
                return part.failed
        return None

    def begin(self, one: Transaction, pending: Pending, owner: str) -> CommitReceipt:
        """Start a commit for `owner`; its parts are whole."""
        one.state = msgspec.structs.replace(one.state, pending=pending)
        one.owner, one.marked, one.appended = owner, False, False
        return self.wait_for(one, pending)

    def wait_for(self, one: Transaction, pending: Pending) -> CommitReceipt:
        """Promise an answer to the pending commit, and try it now if it waits for its next try."""
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
        """Carry the pending commit out; what the disk refuses stays pending, and is tried again."""
        pending = one.state.pending
        assert pending is not None
        by_number = {part.number: part for part in self._parts.of(one.state.transaction_id)}
        parts = [by_number[number] for number in pending.parts if number in by_number]
        commit = Commit(self._files, self._topics, self._publish, one.state.transaction_id, parts)
        try:
            if not one.marked:
                broken = await self._wait_durable(parts) or await self._check_parts(parts)
                if broken is not None:
                    one.state = msgspec.structs.replace(one.state, pending=None)
                    _answer(one, UnknownPartError(f"a part is lost, nothing was committed: {broken}"))
                    return
                if parts:
                    pending = msgspec.structs.replace(pending, starts=await commit.find_starts())
                    await self._save(one, msgspec.structs.replace(one.state, pending=pending))
                one.marked = True
            if len(parts) != len(pending.parts) or sum(part.records for part in parts) != pending.records:
                raise TransactionDamagedError(f"{one.path}: staged records of batch {pending.batch_id} are gone")
            await commit.append_all(pending, look=one.appended, begun=lambda: _note_appended(one))
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

    async def _check_parts(self, parts: Sequence[StagedPart]) -> StorageError | None:
        """Read the parts once more before it is too late: a commit that has begun cannot be taken back."""
        for part in parts:
            part.failed = part.failed or await self._loop.run_in_executor(None, part.check)
            if part.failed is not None:
                return part.failed
        return None

    async def _save(self, one: Transaction, state: TransactionState) -> None:
        await self._run(lambda: note(self._files, one.path).write(state))
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

    # -- ending ------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Return when each commit is carried out, or the disk has refused it for now."""
        tasks = [one.task for one in self._under_way.values() if one.task is not None]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Let all go: unfinished commits go on at the next start. No flush of a part is under way any more then."""
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
        await self._run(lambda: None)  # behind every flush of a part that was asked for
        for one in self._under_way.values():
            _answer(one, TopicClosedError("the server stops; the commit goes on at the next start"))


def _answer(one: Transaction, error: BabelbusError | None) -> None:
    waiting, one.waiting = one.waiting, []
    for receipt in waiting:
        receipt.resolve(error)


def _note_appended(one: Transaction) -> None:
    one.appended = True
