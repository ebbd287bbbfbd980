"""A partition in SQL: append, read, truncate, and what to look at again after a failure (docs/storage.md).

A partition's records lie in *ranges* of about 1 MiB, which take the place of segments: the last one is open, the others
are sealed. Ranges touch; retention deletes whole ones, each in a short transaction of its own.
"""

import logging
import threading
from collections.abc import Sequence

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.records.columns import Columns, decode_chunk
from babelbus.records.format import CorruptRecordError
from babelbus.records.record import RecordBatch, StoredBatch
from babelbus.storage.contract import BadRange, Chunk, LogSettings, Recovery
from babelbus.storage.errors import DiskError, OffsetOutOfRangeError
from babelbus.storage.producers import Producers
from babelbus.storage.sql.cleaner import clean
from babelbus.storage.sql.connection import Database
from babelbus.storage.sql.ranges import PartitionRows, Range
from babelbus.storage.sql.reading import find_range, read_chunk
from babelbus.storage.sql.rows import Row, to_rows

log = logging.getLogger(__name__)

RANGE_BYTES_MAX = 2**20
"""From here on the next range begins, if the topic's `segment_bytes` are not less."""
PRODUCER_ROWS_MAX = 10_000
"""Batches of producers that are noted before those that nobody remembers are removed."""


class DatabaseLog:
    """A partition in a database; see `contract.PartitionLog`.

    Invariant: `_ranges` are sorted and touch each other; the last one is open and has no gaps. Who changes them holds
    `_lock`; readers take the list as it is.
    """

    def __init__(
        self, database: Database, topic: str, number: int, partition_id: int, settings: LogSettings, clock: Clock
    ) -> None:
        self.name = f"{database.name}, topic {topic!r}, partition {number}"
        self._database = database
        self._rows = PartitionRows(partition_id)
        self._settings = settings
        self._clock = clock
        self._lock = threading.RLock()
        self._ranges: list[Range] = []
        self._compacted_until = 0
        self._durable = 0
        self._begun_ms = 0
        self._producer_rows = 0
        self._closed = False
        self._generation = database.failures
        self.producers = Producers()
        self.recovery = Recovery()
        self._load()
        self._load_producers()
        self._durable = self.next_offset

    # -- opening -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Take over what the database has of the ranges; count what is in the open one.

        Raises:
            DiskError: it cannot be read.
        """
        holes: list[tuple[int, int]] = []
        with self._database.read() as connection:
            self._compacted_until = self._rows.compacted_until(connection)
            loaded, is_open = self._rows.load(connection)
            if is_open:
                holes = self._rows.measure(connection, loaded[-1])
        if not is_open:
            base = loaded[-1].next_offset if loaded else 0
            with self._database.write() as connection:
                self._rows.insert_open(connection, base)
            loaded.append(Range(base, base))
        self._begun_ms = self._clock.now_ms() if loaded[-1].size_bytes else 0
        self._ranges = loaded
        self._note_holes(holes)

    def _note_holes(self, holes: list[tuple[int, int]]) -> None:
        """Leave an open range that has lost records as it is, and go on behind it."""
        for first, end in holes:
            log.error("%s: offsets %d to %d are missing", self.name, first, end - 1)
            self.recovery.bad.append((self.name, BadRange(0, 0, first, end, "the rows are missing")))
        if holes:
            self._roll()

    def _load_producers(self) -> None:
        with self._database.read() as connection:
            found = self._rows.producers(connection)
        self._producer_rows = len(found)
        self.producers.restore(found)

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record that is still there, or `next_offset` when there is none."""
        return self._ranges[0].base_offset

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets."""
        return self._ranges[-1].next_offset

    @property
    def size_bytes(self) -> int:
        """Size of the records in the stored form."""
        return sum(found.size_bytes for found in self._ranges)

    @property
    def segment_count(self) -> int:
        """How many ranges there are."""
        return len(self._ranges)

    @property
    def compacted_until(self) -> int:
        """Offset up to which records may be missing because compaction looked at them; durably remembered."""
        return min(self._compacted_until, self.next_offset)

    @property
    def failed(self) -> bool:
        """Whether a commit or a flush is in doubt and `recover_flush` has not looked yet."""
        return self._generation != self._database.failures

    def configure(self, settings: LogSettings) -> None:
        """Take other settings from now on."""
        self._settings = settings

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: RecordBatch) -> int:
        """Insert a batch with the offsets from `next_offset` on, in one transaction; return the first. Costs one
        commit.

        It survives a kill of the server; durable it is only after `flush`. Whatever offsets the batch has, it gets
        those that follow.

        Raises:
            DiskFullError, DiskError: nothing was appended. If the connection was lost while it was committed,
                `recover_flush` takes back what of it may be there.
        """
        if self.failed:  # without the lock, which `recover_flush` has as long as it tries to connect
            raise DiskError(f"{self.name}: the connection was lost, or a flush failed; it is not repaired yet")
        with self._lock:
            base_offset = self.next_offset
            rows = to_rows(batch, base_offset)
            open_ = self._ranges[-1]
            roll = open_.size_bytes > 0 and self._is_full(open_)
            with self._database.write() as connection:
                if self.failed:  # and repaired for another partition meanwhile: what is in front may be lost
                    raise DiskError(f"{self.name}: the connection was lost just now")
                if roll:
                    self._rows.seal(connection, open_)
                    self._rows.insert_open(connection, base_offset)
                self._database.insert(connection, self._rows.id, base_offset, rows)
                if rows.producer is not None:
                    self._rows.insert_producers(connection, [rows.producer])
            if roll:
                open_ = Range(base_offset, base_offset)
                self._ranges.append(open_)
            if not open_.size_bytes:
                self._begun_ms = self._clock.now_ms()
            self._producer_rows += rows.producer is not None
            open_.size_bytes += rows.size_bytes
            open_.greatest_timestamp = max(open_.greatest_timestamp, max(rows.timestamps))
            open_.next_offset += len(rows)
            return base_offset

    def _is_full(self, open_: Range) -> bool:
        if open_.size_bytes >= min(self._settings.segment_bytes, RANGE_BYTES_MAX):
            return True
        seconds = self._settings.segment_seconds
        return seconds is not None and self._clock.now_ms() - self._begun_ms >= seconds * 1000

    def _roll(self) -> None:
        open_ = self._ranges[-1]
        with self._database.write() as connection:
            self._rows.seal(connection, open_)
            self._rows.insert_open(connection, open_.next_offset)
        self._ranges.append(Range(open_.next_offset, open_.next_offset))

    def roll(self) -> None:
        """Start a new range if the open one has records, so that the cleaner may take that one."""
        with self._lock:
            if self._ranges[-1].size_bytes:
                self._roll()

    # -- durability --------------------------------------------------------------------------------------------------

    def flush(self) -> int:
        """Make everything appended so far durable; return the offset up to which it is. Blocks for the disk.

        One flush does for all partitions of the database: those that ask next find that it is done.

        Raises:
            DiskError: what is durable is unknown; `recover_flush` must follow before the next append.
        """
        if self._closed:
            return self._durable
        if self.failed:
            raise DiskError(f"{self.name}: the connection was lost, or a flush failed; it is not repaired yet")
        target = self.next_offset
        self._database.make_durable()
        if self.failed:  # and repaired for another partition meanwhile: what was made durable need not be all
            raise DiskError(f"{self.name}: the connection was lost while it was flushed")
        self._durable = max(self._durable, target)
        return target

    def recover_flush(self, durable_offset: int = 0) -> None:
        """After a failed flush or a lost connection: connect again, and see what of the last records is there.

        A batch whose commit was in doubt is taken back, since its publisher was told that it is not stored. What the
        database has lost, or gives back damaged, is gone from there on, and `next_offset` goes back to it.

        Raises:
            StorageError: it does not work yet; call again later, appends are refused until then.
        """
        with self._lock:
            self._database.repair()
            generation, end = self._database.failures, self.next_offset
            self._load()
            good = min(self._find_damage(max(durable_offset, self._durable, self.first_offset)), end)
            taken_back = self.next_offset - end
            if good < self.next_offset:
                self._cut(good)
            self._database.make_durable()
            self._durable = self.next_offset
            self._generation = generation
            self.producers.forget_from(self.next_offset)
        log.error(
            "%s: repaired after a failure; %d records in doubt were taken back, %d are lost",
            self.name, max(taken_back, 0), end - self.next_offset,
        )  # fmt: skip

    def _find_damage(self, offset: int) -> int:
        """Return the offset of the first record from `offset` on that is not there or not good, or `next_offset`."""
        while offset < self.next_offset:
            try:
                offset = self.read(offset, 2**31 - 1).next_offset
            except CorruptRecordError as error:
                log.error("%s", error)
                return offset
        return self.next_offset

    def checkpoint(self) -> None:
        """Flush, and forget the rows of producers' batches that nobody remembers: a start has nothing else to read."""
        self.flush()
        self.tidy_producers()

    def tidy_producers(self) -> None:
        """Remove the rows of producers' batches that nobody remembers, when they have become many."""
        with self._lock:
            if self._closed or self._producer_rows <= PRODUCER_ROWS_MAX:
                return
            known = [
                StoredBatch(producer_id, one.first_sequence, one.count, one.base_offset, 0)
                for producer_id, batches in self.producers.snapshot().items()
                for one in batches
            ]
            with self._database.write() as connection:
                self._rows.delete_producers(connection)
                self._rows.insert_producers(connection, known)
            self._producer_rows = len(known)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return records in the stored form from the first one at or after `offset` on, as many as fit, all checked.

        Costs a SELECT for each MiB.

        Raises:
            OffsetOutOfRangeError: `offset` is below `first_offset` or above `next_offset`.
            CorruptRecordError: the record at `offset` is damaged, or missing.
            DiskError: the database cannot be read.
        """
        try:
            return self._read(offset, bytes_max, end_offset)
        except CorruptRecordError:
            with self._lock:  # the cleaner may just have taken it away
                return self._read(offset, bytes_max, end_offset)

    def _read(self, offset: int, bytes_max: int, end_offset: int | None) -> Chunk:
        found = self._ranges
        first, following = found[0].base_offset, found[-1].next_offset
        end = following if end_offset is None else min(end_offset, following)
        if not first <= offset <= following:
            raise OffsetOutOfRangeError(offset, first, following)
        if offset >= end:
            return Chunk(b"", offset, offset)
        return read_chunk(self._fetch, found, offset, end, bytes_max, self.name)

    def _fetch(self, offset: int, end_offset: int, limit: int) -> Sequence[Row]:
        return self._database.fetch(self._rows.id, offset, end_offset, limit)

    def read_columns(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Columns:
        """Return the same records as numpy columns."""
        return decode_chunk(self.read(offset, bytes_max, end_offset).data, verified=True)

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record whose timestamp (ms) is `timestamp` or later; `None`: there is none."""
        for found in list(self._ranges):
            if found.size_bytes and found.greatest_timestamp >= timestamp:
                with self._database.read() as connection:
                    offset = self._rows.find_time(connection, found, timestamp)
                if offset is not None:
                    return offset
        return None

    # -- removing ----------------------------------------------------------------------------------------------------

    def truncate(self, next_offset: int) -> None:
        """Remove the records from `next_offset` on, durably, so that it is the next offset.

        Raises:
            OffsetOutOfRangeError: it is not between `first_offset` and `next_offset`.
            DiskError: the database refused; whether it was done is unknown, and asking again is right.
        """
        with self._lock:
            if not self.first_offset <= next_offset <= self.next_offset:
                raise OffsetOutOfRangeError(next_offset, self.first_offset, self.next_offset)
            self._cut(next_offset)
            self._durable = min(self._durable, next_offset)
            self.producers.forget_from(next_offset)
            self._database.make_durable()

    def _cut(self, next_offset: int) -> None:
        """Remove the records from `next_offset` on, where a new open range begins."""
        number = find_range(self._ranges, next_offset)
        last = self._ranges[number]
        kept = self._ranges[:number]
        with self._database.write() as connection:
            self._rows.delete_from(connection, next_offset)
            if last.base_offset < next_offset:
                shorter = Range(last.base_offset, next_offset, gaps=last.gaps)
                self._rows.measure(connection, shorter)
                self._rows.seal(connection, shorter)
                kept.append(shorter)
            self._rows.insert_open(connection, next_offset)
        self._ranges = [*kept, Range(next_offset, next_offset)]

    def sealed_ranges(self) -> list[Range]:
        """Return the ranges that nobody appends to any more (for the cleaner)."""
        return self._ranges[:-1]

    def open_range(self) -> Range:
        """Return the range that is appended to (for the cleaner)."""
        return self._ranges[-1]

    def drop_first(self) -> None:
        """Remove the oldest range, which is sealed (for the cleaner)."""
        with self._lock:
            oldest = self._ranges[0]
            with self._database.write() as connection:
                self._rows.delete_first(connection, oldest)
            self._ranges = self._ranges[1:]

    def thin_out(self, found: Range, offsets: list[int], until: int) -> None:
        """Remove records of a sealed range, which compaction has found to be replaced (for the cleaner).

        `until` is where the records end that compaction looked at.
        """
        with self._lock:
            thinned = Range(found.base_offset, found.next_offset, gaps=True, compacted_with=found.compacted_with)
            with self._database.write() as connection:
                self._rows.note_compaction(connection, until)
                self._rows.delete_records(connection, offsets)
                self._rows.measure(connection, thinned)
                self._rows.seal(connection, thinned)
            self._compacted_until = max(self._compacted_until, until)
            self._ranges = [thinned if one is found else one for one in self._ranges]

    def clean(self, now_ms: int) -> int:
        """Do what retention and compaction ask for; return how many bytes of records became free. May take long."""
        freed = clean(self, self._settings, now_ms)
        self.tidy_producers()
        return freed

    def close(self) -> None:
        """Flush, and take no more; the connections are the store's.

        Raises:
            DiskError: what was not flushed may be lost with the power.
        """
        try:
            if not self.failed and not self._closed:
                self.checkpoint()
        except StorageError:
            self._closed = True
            raise
        self._closed = True
