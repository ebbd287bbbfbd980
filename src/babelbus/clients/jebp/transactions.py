"""Staged, atomic publishing from the client's side: many writers stage, one call commits, each batch once.

    batches = client.transaction("rollup of orders")
    if (await batches.ask()).last_batch_id < 7:
        writer = batches.writer(7, part="task 0, attempt 0")
        await writer.stage("orders", [b"...", b"..."])
        await batches.commit(7, [writer.staged])

Every request can be sent again without harm, and is: on a new connection, and when the server says that it may help.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from babelbus.clients.jebp.batching import cut_batches
from babelbus.clients.jebp.requests import Requests
from babelbus.clock import Clock
from babelbus.protocols.jebp.fields import decode_numbers
from babelbus.protocols.jebp.messages import (
    ANY_PARTITION,
    AbortBatch,
    AskTransaction,
    BatchCommitted,
    CommitBatch,
    Data,
    PartRecords,
    PartsDropped,
    RecordsStaged,
    Response,
    StageRecords,
    TransactionTold,
)
from babelbus.protocols.jebp.staging_codec import decode_told
from babelbus.records.record import Record, RecordBatch

REQUESTS_ON_THE_WAY = 3
"""Of one writer: enough that both sides always have something to do."""
BATCH_BYTES_MAX = 2 * 2**20


class PartWriter:
    """One writer's share of a batch: an attempt of a Spark task, say. Its calls must follow each other."""

    def __init__(self, requests: Requests, clock: Clock, transaction: str, batch_id: int, part: str) -> None:
        self.staged = PartRecords(part, 0)
        """The description of this part for the commit; picklable."""
        self._requests = requests
        self._clock = clock
        self._transaction = transaction
        self._batch_id = batch_id
        self._sent = 0
        """Records of all requests, answered or not: the number of the next one."""
        self._on_the_way: deque[asyncio.Task[Response]] = deque()

    async def stage(
        self,
        topic: str,
        payloads: Sequence[bytes] | Sequence[Record],
        *,
        timestamps: Sequence[int] | None = None,
        partition: int = ANY_PARTITION,
        batch_records: int = 10_000,
    ) -> PartRecords:
        """Add a list in batches; return the state of the part, once it survives a loss of power on the server.

        The arguments are those of `Client.publish_many`. With `partition` -1 the server chooses one for each batch.

        Raises:
            BabelbusError: as `Requests.do`; discard the writer then, and leave its part out of the commit.
            InvalidRecordError: a record cannot be stored.
        """
        batches = cut_batches(
            payloads,
            timestamps,
            now_ms=self._clock.now_ms,
            batch_records=batch_records,
            batch_bytes_max=BATCH_BYTES_MAX,
        )
        await self.put(topic, batches, partition=partition)
        return await self.drain()

    async def put(
        self, topic: str, batches: Iterable[RecordBatch], *, partition: int = ANY_PARTITION, to_state: bool = False
    ) -> None:
        """Send batches in the stored form, a request for each, several under way at once; `drain` waits for the last.

        The next batch is read from the iterator while the server works on the previous ones. Offsets are ignored.
        `staged` is the last answer of the server. `to_state` as in `stage_stored`.

        Raises:
            BabelbusError: as `stage`, for this call or an earlier one.
        """
        try:
            for batch in batches:
                sending = self._send(topic, partition, self._sent, batch.data, to_state=to_state)
                self._on_the_way.append(asyncio.create_task(sending))
                self._sent += batch.count
                await asyncio.sleep(0)  # the task sends; were they to overtake each other, the server would say so
                if len(self._on_the_way) >= REQUESTS_ON_THE_WAY:
                    self._note(await self._on_the_way.popleft())
        except BaseException:
            self._give_up()
            raise

    async def drain(self) -> PartRecords:
        """Wait for the answers to `put`; return the state of the part, once it survives a loss of power on the server.

        Raises:
            BabelbusError: as `put`.
        """
        try:
            while self._on_the_way:
                self._note(await self._on_the_way.popleft())
        except BaseException:
            self._give_up()
            raise
        return self.staged

    def _give_up(self) -> None:
        """Cancel all waits: after an error the content of the server is unknown."""
        while self._on_the_way:
            self._on_the_way.popleft().cancel()

    async def _send(self, topic: str, partition: int, first_record: int, records: Data, *, to_state: bool) -> Response:
        whose = (self._transaction, self._batch_id, self.staged.part)
        request = StageRecords(*whose, topic, partition, first_record, records, to_state)
        what = f"stage records of {topic!r}{' for the state' if to_state else ''}"
        return await self._requests.do(request, what)

    def _note(self, response: Response) -> None:
        self.staged = PartRecords(self.staged.part, decode_numbers(RecordsStaged, response.content).records)

    async def stage_stored(
        self, topic: str, records: Data, *, partition: int = ANY_PARTITION, to_state: bool = False
    ) -> PartRecords:
        """Add whole records in the stored form, up to 16 MiB, in one request; see `stage`.

        With `to_state` they set the state: a topic that does not retain the last events refuses them.
        """
        await self.drain()
        self._note(await self._send(topic, partition, self.staged.records, records, to_state=to_state))
        self._sent = self.staged.records
        return self.staged

    async def abort(self) -> None:
        """Drop the staged records."""
        self._give_up()
        await self._requests.do(AbortBatch(self._transaction, self._batch_id, self.staged.part), "abort a part")


class Transaction:
    """All batches under one transaction id, which belongs to the identity of the client."""

    def __init__(self, requests: Requests, clock: Clock, transaction: str) -> None:
        self.id = transaction
        self._requests = requests
        self._clock = clock

    def writer(self, batch_id: int, part: str) -> PartWriter:
        """Return the writer of one part; no two writers of a batch may have the same one, and no attempt another's."""
        return PartWriter(self._requests, self._clock, self.id, batch_id, part)

    async def commit(self, batch_id: int, parts: Sequence[PartRecords], *, owner: str = "") -> BatchCommitted:
        """Publish the records of these parts, in this order, all or none; return when they are in the log.

        A batch that was committed before is answered as it was. Parts of the batch that are not named are dropped.

        Args:
            batch_id: 0 or more; batches of a transaction are committed with rising ids.
            parts: `staged` of each writer.
            owner: the committer; the server refuses a transaction with commits of another owner.

        Raises:
            RequestError: a part differs from its description, the owner differs, a topic is gone: nothing is
                published. Or (with `repeat`) the server could not finish it for `request_timeout_seconds`: it may do
                so yet, and the same call tells.
            BabelbusError: as `Requests.do`.
        """
        request = CommitBatch(self.id, batch_id, tuple(parts), owner)
        return decode_numbers(BatchCommitted, (await self._requests.do(request, f"commit batch {batch_id}")).content)

    async def abort(self, batch_id: int) -> int:
        """Drop all parts of a batch; return how many there were."""
        response = await self._requests.do(AbortBatch(self.id, batch_id), f"abort batch {batch_id}")
        return decode_numbers(PartsDropped, response.content).parts

    async def ask(self) -> TransactionTold:
        """Return the last committed batch and its owner."""
        return decode_told((await self._requests.do(AskTransaction(self.id), "ask for a transaction")).content)
