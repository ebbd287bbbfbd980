"""A partition in SQL: append, read, trim, rewrite, and loading again after a failure (docs/storage.md).

Each write is one transaction that first changes the partition's own row, under the condition that epoch and end are
those that this writer knows. So a stale writer changes nothing, and batches stay without a hole.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, delete, func, insert, select, update

from babelbus.records.columns import decode_chunk
from babelbus.records.format import CorruptRecordError, read_producer, rebase
from babelbus.records.record import RecordBatch, StoredBatch
from babelbus.storage.contract import BadRange, Chunk, LogSettings, Part
from babelbus.storage.errors import DiskError, StaleWriterError
from babelbus.storage.fileless import FilelessLog
from babelbus.storage.sql.batches import REACHING, Batch, cut, fetch, make_row, make_rows
from babelbus.storage.sql.database import Database
from babelbus.storage.sql.tables import batches, partitions, producers

log = logging.getLogger(__name__)

PRODUCER_ROWS_MAX = 10_000
"""Rows of producers' batches; beyond this number the rows of forgotten batches are removed."""
LOST_ADVICE = (
    "readers are refused them and no offset is given again; if a copy of the database has them, stop the server and put"
    " back the whole copy"
)

_CLAIM = update(partitions).where(
    partitions.c.id == bindparam("partition_id"),
    partitions.c.epoch == bindparam("known_epoch"),
    partitions.c.next_offset == bindparam("known_end"),
)
_INSERT = insert(batches)
_INSERT_PRODUCERS = insert(producers)
_AFTER_TIME = (
    select(batches.c.base_offset, batches.c.next_offset)
    .where(REACHING, batches.c.greatest_timestamp >= bindparam("timestamp"))
    .order_by(batches.c.base_offset)
    .limit(1)
)


class DatabaseLog(FilelessLog):
    """A partition in a database; see `contract.PartitionLog`. The committed records end at `end`."""

    first_offset = end = 0

    def __init__(
        self, database: Database, topic: str, number: int, partition_id: int, epoch: int, settings: LogSettings
    ) -> None:
        super().__init__(settings)
        self.name = f"{database.name}, topic {topic!r}, partition {number}"
        self.id = partition_id
        self.database = database
        self._topic, self._number, self._epoch = topic, number, epoch
        self._closed = False
        self._generation = database.failures
        self._durable = database.ends.get(topic, number)
        self.looked_until = 0
        """Offset up to which compaction has looked since the start (for the cleaner)."""
        self.size_bytes = self.compacted_until = self._latest = 0
        self._load()
        with database.read() as connection:
            columns = [producers.c[name] for name in ("producer_id", "first_sequence", "count", "base_offset")]
            query = select(*columns).where(producers.c.partition_id == partition_id).order_by(producers.c.base_offset)
            stored = [StoredBatch(row[0], row[1], row[2], row[3], 0) for row in connection.execute(query)]
        self._producer_rows = len(stored)
        self.producers.restore(stored)

    def _load(self) -> None:
        """Load the bounds; a partition that ends below what was durable keeps its end, and the lost range is named.

        Raises:
            DiskError: the database cannot be read.
        """
        with self.database.read() as connection:
            row = connection.execute(select(partitions).where(partitions.c.id == self.id)).one()
            stored, self._latest = self._last(connection)
        self.first_offset, self.end, self.size_bytes = row.first_offset, row.next_offset, row.size_bytes
        self.compacted_until = min(row.compacted_until, row.next_offset)
        stored = max(stored, self.first_offset)
        end = max(self._durable, self.end)
        if stored < end:
            log.error("%s: the records %d to %d are lost; %s", self.name, stored, end - 1, LOST_ADVICE)
            self.recovery.bad.append((self.name, BadRange(0, 0, stored, end, "the end of the partition is lost")))
        if self.end < end:
            with self._write(next_offset=end):
                self.end = end
        self._durable = self.end

    def _last(self, connection: Connection) -> tuple[int, int]:
        """Return where the last batch ends, and the greatest timestamp up to there; (0, 0) without batches."""
        query = select(batches.c.next_offset, batches.c.latest_timestamp).where(batches.c.partition_id == self.id)
        row = connection.execute(query.order_by(batches.c.base_offset.desc()).limit(1)).one_or_none()
        return (row.next_offset, row.latest_timestamp) if row else (0, 0)

    # -- bounds ------------------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Return all that is committed as one piece.

        Raises:
            DiskError: the database refused.
        """
        with self.database.read() as connection:
            end, latest_ms = self._last(connection)
        return [Part(self.first_offset, self.end, self.size_bytes, latest_ms if end > self.first_offset else -1)]

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets."""
        return self.end

    @property
    def failed(self) -> bool:
        """Whether a commit or a flush is in doubt and `recover_flush` has not looked yet."""
        return self._generation != self.database.failures

    # -- writing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _write(self, written_bytes: int = 0, **changes: Any) -> Iterator[Connection]:
        """Run a transaction that changes the partition's row, if epoch and end are as this writer knows them.

        Raises:
            StaleWriterError: another writer has opened the partition.
            DiskError: the end is another one, so that the last commit is in doubt.
        """
        known = {"partition_id": self.id, "known_epoch": self._epoch, "known_end": self.end}
        with self.database.write(written_bytes) as connection:
            if self.failed:  # and repaired for another partition meanwhile: the last commits of this one may be lost
                raise DiskError(f"{self.name}: the connection was lost just now; try again")
            if connection.execute(_CLAIM, known | (changes or {"size_bytes": self.size_bytes})).rowcount != 1:
                self._refuse(connection)
            yield connection

    def _refuse(self, connection: Connection) -> None:
        chosen = select(partitions.c.epoch, partitions.c.next_offset).where(partitions.c.id == self.id)
        epoch, end = connection.execute(chosen).one_or_none() or (-1, -1)
        if epoch != self._epoch:
            raise StaleWriterError(
                f"{self.name}: another server has opened it (epoch {epoch}, ours is {self._epoch});"
                " nothing was written; stop one of the two servers"
            )
        self.database.doubt()
        raise DiskError(f"{self.name}: it ends at {end} and not at {self.end}: a commit was in doubt")

    def append(self, batch: RecordBatch) -> int:
        """Append a batch with the offsets from `next_offset` on, in one transaction; return the first offset.

        The batch survives a kill of the server; it is durable only after `flush`. It gets the offsets that follow,
        whatever offsets it has.

        Raises:
            StaleWriterError: another writer has opened the partition.
            DiskFullError, DiskError: nothing was appended. If the connection was lost while the batch was committed,
                `recover_flush` takes back what of the batch may be there.
        """
        self._check()  # without the lock, which `recover_flush` holds as long as it tries to connect
        with self._changing:
            base_offset = self.end
            if batch.base_offset != base_offset:
                batch = rebase(batch, base_offset)
            rows = make_rows(batch, self._latest)
            next_offset, size_bytes = base_offset + batch.count, self.size_bytes + len(batch.data)
            marked = read_producer(rows[0]["data"], 0)
            with self._write(len(batch.data), next_offset=next_offset, size_bytes=size_bytes) as connection:
                for row in rows:
                    connection.execute(_INSERT, row | {"partition_id": self.id})
                if marked is not None:
                    connection.execute(_INSERT_PRODUCERS, self._producer_row(*marked, base_offset))
            self._producer_rows += marked is not None
            self._latest = rows[-1]["latest_timestamp"]
            self.end, self.size_bytes = next_offset, size_bytes
            return base_offset

    def _producer_row(self, producer_id: int, first_sequence: int, count: int, base_offset: int) -> dict[str, int]:
        values = (self.id, base_offset, producer_id, first_sequence, count)
        return dict(zip(producers.c.keys(), values, strict=True))

    def _check(self) -> None:
        if self.failed:
            raise DiskError(f"{self.name}: the connection was lost, or a flush failed; it is not repaired yet")

    # -- durability --------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Flush everything appended so far; return the offset up to which it is durable. Blocks for the disk.

        One flush serves all partitions of the database: the following calls find that nothing is left to do.

        Raises:
            DiskError: what is durable is unknown; `recover_flush` must follow before the next append.
        """
        if self._closed:
            return self._durable
        self._check()
        target = self.end
        self.database.make_durable()
        with self._changing:
            self._check()  # a failure that was repaired for another partition meanwhile: the commits may be lost
            target = min(target, self.end)
            self._durable = max(self._durable, target)
            self.database.ends.put(self._topic, self._number, target)
        self.database.ends.sync()
        return target

    def recover_flush(self) -> None:
        """Connect again after a failed flush or a lost connection, and load which of the last records are there.

        A batch whose commit was in doubt is taken back, since its publisher got an error. Records that the database
        has lost, or returns damaged, are removed with all behind them, and `next_offset` goes back to the first.

        Raises:
            StorageError: it does not work yet; call again later, appends are refused until then.
        """
        with self._changing:
            self.database.repair()
            generation, end = self.database.failures, self.end
            durable = self._durable = max(self._durable, self.first_offset)
            self._generation = generation
            try:
                self._load()
                taken_back = self.end - end
                good = min(self._find_damage(durable), end)
                if good < self.end:
                    self._cut(good)
                self.database.make_durable()
            except BaseException:
                self._generation, self._durable, self.end = generation - 1, durable, end
                raise
            self._durable = self.end
            self.producers.forget_from(self.end)
        log.error(
            "%s: repaired after a failure; %d records in doubt were taken back, %d are lost",
            self.name, max(taken_back, 0), end - self.end,
        )  # fmt: skip

    def _find_damage(self, offset: int) -> int:
        """Return the offset of the first record from `offset` on that is lost or damaged, or `next_offset`."""
        while offset < self.end:
            try:
                offset = self.read(offset, 2**31 - 1).next_offset
            except CorruptRecordError as error:
                log.error("%s", error)
                return offset
        return self.end

    def checkpoint(self) -> None:
        """Flush, and remove the rows of producers' batches that are forgotten."""
        self.flush()
        self.tidy_producers()

    def tidy_producers(self) -> None:
        """Remove the rows of producers' batches that are forgotten, if there are many."""
        with self._changing:
            if self._closed or self._producer_rows <= PRODUCER_ROWS_MAX:
                return
            rows = [
                self._producer_row(producer_id, batch.first_sequence, batch.count, batch.base_offset)
                for producer_id, stored in self.producers.snapshot().items()
                for batch in stored
            ]
            with self._write() as connection:
                connection.execute(delete(producers).where(producers.c.partition_id == self.id))
                if rows:
                    connection.execute(_INSERT_PRODUCERS, rows)
            self._producer_rows = len(rows)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _collect(self, offset: int, end_offset: int, bytes_max: int) -> Chunk:
        parts: list[bytes] = []
        base_offset, at, room = offset, offset, bytes_max
        reason = None
        for batch in self.fetch(offset, end_offset, bytes_max):
            if batch.base_offset > at:
                break  # a batch is missing
            piece = cut(batch, at, end_offset, room, least=not parts)
            at, reason = piece.next_offset, piece.reason
            if piece.data:
                base_offset = base_offset if parts else piece.base_offset
                parts.append(piece.data)
                room -= len(piece.data)
            if piece.is_full:
                return Chunk(b"".join(parts), base_offset, at)
            if reason is not None:
                break
        if not parts and (at < end_offset or reason is not None):
            raise CorruptRecordError(0, reason or "its batch is missing", path=self.name, offset=at)
        return Chunk(parts[0] if len(parts) == 1 else b"".join(parts), base_offset if parts else end_offset, at)

    def fetch(self, offset: int, end_offset: int, page_bytes: int) -> Iterator[Batch]:
        """Yield the stored batches that reach into a range of offsets, unchecked (for the cleaner)."""
        return fetch(self.database, self.id, offset, end_offset, page_bytes)

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record at or after a time, or of a damaged record that may be it."""
        lowest = (
            select(batches.c.base_offset)
            .where(batches.c.partition_id == self.id, batches.c.latest_timestamp >= timestamp)
            .order_by(batches.c.latest_timestamp, batches.c.base_offset)
            .limit(1)
        )
        with self.database.read() as connection:
            at = max(self.first_offset, connection.execute(lowest).scalar() or 0)
        while at < self.end:
            with self.database.read() as connection:
                bounds = {"partition_id": self.id, "offset": at, "timestamp": timestamp}
                batch = connection.execute(_AFTER_TIME, bounds).one_or_none()
            if batch is None:
                return None
            at = max(at, batch.base_offset)
            found = self.find_time_between(timestamp, at, batch.next_offset)
            if found is not None:
                return found
            at = batch.next_offset
        return None

    # -- removing ----------------------------------------------------------------------------------------------------

    def _cut(self, offset: int) -> None:
        """Remove the batch that holds `offset` and all behind it."""
        with self.database.read() as connection:
            holding = select(func.min(batches.c.base_offset)).where(REACHING)
            found = connection.execute(holding, {"partition_id": self.id, "offset": offset}).scalar()
        end = offset if found is None else min(found, offset)
        behind = (batches.c.partition_id == self.id) & (batches.c.base_offset >= end)
        _, removed_bytes, _ = self._measure(behind)
        with self._write(next_offset=end, size_bytes=self.size_bytes - removed_bytes) as connection:
            connection.execute(delete(batches).where(behind))
            _, self._latest = self._last(connection)
            cut_off = producers.c.base_offset + producers.c.count > end
            connection.execute(delete(producers).where(producers.c.partition_id == self.id, cut_off))
        self.end, self.size_bytes = end, self.size_bytes - removed_bytes

    def _measure(self, chosen: ColumnElement[bool]) -> tuple[int, int, int]:
        """Return the number of batches, their bytes, and their greatest timestamp."""
        columns = (func.count(), func.sum(batches.c.size_bytes), func.max(batches.c.latest_timestamp))
        with self.database.read() as connection:
            count, size_bytes, latest = connection.execute(select(*columns).where(chosen)).one()
        return int(count), int(size_bytes or 0), int(latest or 0)

    def trim(self, first_offset: int) -> int:
        """Remove the records in front of `first_offset`; return how many bytes became free.

        Only whole batches are deleted; the records in front of `first_offset` in its own batch are no more read.

        Raises:
            DiskError: the database refused; nothing was removed.
        """
        with self._changing:
            if not self.first_offset < first_offset <= self.end:
                return 0
            front = (batches.c.partition_id == self.id) & (batches.c.base_offset < first_offset)
            front &= batches.c.next_offset <= first_offset
            _, freed, _ = self._measure(front)
            with self._write(first_offset=first_offset, size_bytes=self.size_bytes - freed) as connection:
                connection.execute(delete(batches).where(front))
            self.first_offset, self.size_bytes = first_offset, self.size_bytes - freed
            return freed

    def rewrite(self, replaced: list[Batch], data: bytes, until: int) -> int:
        """Replace neighbouring batches by one with the records in `data`; return the bytes that this frees.

        `until` is the offset up to which compaction has looked. Nothing happens if the batches changed meanwhile.

        Raises:
            DiskError: the database refused; nothing was changed.
        """
        base_offset, next_offset = replaced[0].base_offset, replaced[-1].next_offset
        timestamps = decode_chunk(data, verified=True).timestamps
        freed = sum(len(batch.data) for batch in replaced) - len(data)
        chosen = (batches.c.partition_id == self.id) & (batches.c.base_offset >= base_offset)
        chosen &= batches.c.base_offset < next_offset
        with self._changing:
            count, size_bytes, latest = self._measure(chosen)
            if (count, size_bytes) != (len(replaced), freed + len(data)):
                return 0
            row = make_row(base_offset, next_offset, data, timestamps, latest)
            until = max(until, self.compacted_until)
            with self._write(len(data), size_bytes=self.size_bytes - freed, compacted_until=until) as connection:
                connection.execute(delete(batches).where(chosen))
                connection.execute(_INSERT, row | {"partition_id": self.id})
            self.compacted_until, self.size_bytes = until, self.size_bytes - freed
            return freed

    def close(self) -> None:
        """Flush and refuse further writes; the store closes the connections.

        Raises:
            DiskError: records that were not flushed may be lost with the power.
        """
        try:
            if not self.failed and not self._closed:
                self.checkpoint()
        finally:
            self._closed = True
