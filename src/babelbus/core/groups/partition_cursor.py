"""A partition as a consumer group reads it: the cursor, and the chunk that is being handed out.

A cursor reads a chunk of `READ_BYTES` at a time and decodes it at once. A chunk that the partition does not keep in
memory is *loaded*: the cursor has nothing until the chunk is there, and then wakes its group. The chunks of all cursors
of the server are bounded by their `ReadAhead`: beyond it the cursor that read longest ago drops its chunk, and
reads it again when asked.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from babelbus.arrays import np
from babelbus.core.groups.cursor_files import StoredCursor
from babelbus.core.groups.delivery_rows import Rows
from babelbus.core.groups.in_flight import Counts, CursorFlight
from babelbus.core.groups.settings import Place
from babelbus.core.partition import Partition
from babelbus.core.receipt import Promise
from babelbus.core.record import Record
from babelbus.core.work import Work
from babelbus.errors import BabelbusError
from babelbus.records.columns import decode_columns, find_positions
from babelbus.records.format import CorruptRecordError
from babelbus.storage.contract import Chunk
from babelbus.storage.errors import OffsetOutOfRangeError

log = logging.getLogger(__name__)

READ_BYTES = 512 * 2**10
"""Size of a read; a larger record is read alone."""
BAD_MAX = 256
"""How many damaged records are stepped over before others get their turn."""
FETCH_BYTES = 64 * 2**10
"""Size of a read for records that are handed out again."""
KEPT_BYTES_MAX = 2**24
"""Most bytes that a cursor keeps of records that are held back behind others of their key."""
FETCHED_CHUNKS = 8
"""So many of those chunks are kept: records that come back mostly lie near each other."""
SPANS_MAX = 4096
"""Most ranges of out-of-order acks that a restart keeps for each partition; records behind them come again."""


class CursorInfo(msgspec.Struct, frozen=True):
    """The place of a group in one partition."""

    partition: int
    position: int
    """The offset that is handed out next."""
    committed: int
    """All records below this offset are done."""
    end: int
    """The high watermark."""
    lag: int
    """Offsets that are not done."""
    in_flight: int
    """Records that were handed out, or are held back behind those, and are not done."""


class SeekPreview(msgspec.Struct, frozen=True):
    """The effect that a seek would have in one partition. Offsets that compaction removed count like records."""

    partition: int
    committed: int
    position: int
    target: int
    """The offset that would be handed out next."""
    end: int
    """The high watermark."""
    again: int
    """Records that were delivered and would be delivered again."""
    skipped: int
    """Records that are not done and would be skipped."""
    in_flight: int
    """Records in flight; later acks of them would be stale."""


class NotLoadedError(BabelbusError):
    """The record is being loaded; the group is woken when it is there."""


class ReadAhead:
    """The budget of bytes for the chunks of all groups' cursors."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._held: OrderedDict[PartitionCursor, int] = OrderedDict()

    def hold(self, cursor: "PartitionCursor", size: int) -> None:
        """Record the chunk of a cursor; when the budget is passed, the oldest chunks of other cursors are dropped."""
        self.release(cursor)
        self._held[cursor] = size
        self.bytes_held += size
        while self.bytes_held > self.bytes_max and len(self._held) > 1:
            next(iter(self._held)).drop()

    def release(self, cursor: "PartitionCursor") -> None:
        """Release the bytes of a cursor's chunk."""
        self.bytes_held -= self._held.pop(cursor, 0)


class _Loader:
    """The read of a chunk that is not in memory: under way, or done and not used yet."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.work: Work[Chunk] | None = None
        self._offset = -1
        self._wake = wake

    def read(self, partition: Partition, offset: int, bytes_max: int) -> Chunk:
        """Return the chunk at an offset.

        Raises:
            NotLoadedError: this chunk, or another one, is on its way.
            StorageError: as `Partition.read`.
        """
        work = self.work
        if work is None or (work.done and self._offset != offset):
            chunk = partition.read_cached(offset, bytes_max)
            if chunk is not None:
                return chunk
            work = self.work = Work(partition.read(offset, bytes_max))
            self._offset = offset
            work.when_done(self._done)
        if not work.done:
            raise NotLoadedError
        self.work = None
        return work.result()

    def _done(self, work: Promise) -> None:
        if work is self.work:  # else the cursor has left, or was set to another place
            self._wake()


class PartitionCursor:
    """The cursor of a group in one partition. `position` is the offset that is handed out next."""

    def __init__(
        self,
        partition: Partition,
        position: int,
        read_ahead: ReadAhead,
        counts: Counts,
        done: list[tuple[int, int]],
        wake: Callable[[], None],
    ) -> None:
        self.partition = partition
        self.number = partition.number
        self.position = position
        self.done = done
        """Ranges from `position` on that were acked in front of others before the last start; never handed out."""
        self.flight = CursorFlight(partition.number)
        """The records that were handed out and not acked; in explicit mode alone."""
        self.watching: Callable[[], None] | None = None
        """Called to stop the wait for the next record."""
        self._reached = 0
        """The end of what was read: if readers are stepped back behind it, its end was lost with the disk."""
        self._passed = -1
        """The offset behind the last damaged record: a lost segment is one line of the log, not one for each offset."""
        self._rows: Rows | None = None
        self._fresh = _Loader(wake)
        """The chunk at `position`."""
        self._again = _Loader(wake)
        """A chunk of records that come again."""
        self._read_ahead = read_ahead
        self._counts = counts
        self._fetched: list[tuple[int, int, Rows]] = []
        self._kept: dict[int, Record] = {}
        self._kept_bytes = 0

    # -- the cursor --------------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether something may be there to be handed out."""
        return self.position < self.partition.high_watermark

    def info(self) -> CursorInfo:
        """Return the place of the cursor."""
        end = self.partition.high_watermark
        unfinished = len(self.flight.unfinished)
        ahead = sum(span[1] - max(span[0], self.position) for span in self.done if span[1] > self.position)
        first = max(self.position, self.partition.log.first_offset)
        lag = max(end - first - ahead, 0) + unfinished
        return CursorInfo(self.number, self.position, self.flight.committed(self.position), end, lag, unfinished)

    def stored(self) -> StoredCursor:
        """Return the stored form of the cursor."""
        spans = self.flight.done(self.position, SPANS_MAX)
        spans += [(max(start, self.position), end) for start, end in self.done if end > self.position]
        return StoredCursor(self.flight.committed(self.position), spans[:SPANS_MAX])

    def target(self, place: Place) -> int:
        """Return the offset of a place; an offset below the first stored record becomes that record's."""
        offset = self.partition.high_watermark
        if place.at == "beginning":
            offset = 0
        elif place.at == "offset":
            offset = place.offsets.get(self.number, place.value)
        return max(offset, self.partition.log.first_offset)

    def preview(self, place: Place) -> SeekPreview:
        """Return the effect that `seek` would have."""
        target, position, end = self.target(place), self.position, self.partition.high_watermark
        first = self.partition.log.first_offset
        # All below `position` was delivered, as were the spans of `done`; of that, `unfinished` is not done.
        ahead = [(max(start, position), stop) for start, stop in self.done if stop > position]
        again = max(min(position, end) - target, 0) + sum(max(stop - max(start, target), 0) for start, stop in ahead)
        unread = max(min(target, end) - max(position, first), 0)
        unread -= sum(max(min(stop, target) - start, 0) for start, stop in ahead)
        in_flight = self.flight.unfinished
        dropped = sum(offset < target for offset in in_flight)
        committed = self.flight.committed(position)
        return SeekPreview(self.number, committed, position, target, end, again, unread + dropped, len(in_flight))

    def seek(self, place: Place) -> None:
        """Move to another place; an offset below the first stored record becomes that record's."""
        self.position = self.target(place)
        self.done = []
        self._reached = 0
        self.leave()

    def rebind(self, partition: Partition) -> None:
        """Continue in a partition that was opened again."""
        self.leave()
        self.partition = partition

    def leave(self) -> None:
        """Drop everything that can be read again, and stop waiting."""
        if self.watching is not None:
            self.watching()
            self.watching = None
        self._fetched.clear()
        self._kept.clear()
        self._kept_bytes = 0
        self._fresh.work = self._again.work = None
        self.drop()

    def drop(self) -> None:
        """Drop the chunk, which is read again when it is needed."""
        self._rows = None
        self._read_ahead.release(self)

    @property
    def loading(self) -> Work[Chunk] | None:
        """The load that the cursor waits for, if any."""
        works = (self._fresh.work, self._again.work)
        return next((work for work in works if work is not None and not work.done), None)

    # -- fresh records -----------------------------------------------------------------------------------------------

    def rows(self) -> Rows | None:
        """Return what is to be handed out next, reading it if need be; `None` when nothing is there (for now).

        `has_more` tells whether to ask again: what is damaged, removed or done already is passed step by step. While
        the cursor is `loading` it has nothing; it wakes its group afterwards.

        Raises:
            DiskError: the disk refused; the cursor stands where it was.
        """
        partition = self.partition
        if self._reached > partition.high_watermark:  # the disk lost what a lower ack level had shown
            self._reached = partition.high_watermark
            self.position = min(self.position, self._reached)
            self.leave()
        rows = self._rows
        if rows is not None:
            return rows
        for _ in range(BAD_MAX):
            if not self.has_more:
                return None
            try:
                rows = self._read()
            except NotLoadedError:
                return None
            except OffsetOutOfRangeError as error:
                first = partition.log.first_offset
                if self.position >= first:  # readers were stepped back while we looked
                    self.position = min(self.position, partition.high_watermark)
                    return None
                log.warning("a group's cursor was at %d, retention had removed up to %d", self.position, error.first)
                self._counts.removed += first - self.position
                self.position = first
            except CorruptRecordError as error:
                if self.position != self._passed:
                    log.warning("a group passes damaged records from here on: %s", error)
                after = max(self.position + 1, min(error.after, partition.high_watermark))
                self._counts.corrupt += after - self.position
                self.position = after
                self._passed = self.position
            else:
                if rows is not None:
                    return rows
        return None

    def _read(self) -> Rows | None:
        """Read the next chunk; `None` when nothing in it is to be handed out."""
        chunk = self._fresh.read(self.partition, self.position, READ_BYTES)
        if chunk.next_offset > self.partition.high_watermark:  # the end was stepped back while the chunk was loaded
            chunk = self._fresh.read(self.partition, self.position, READ_BYTES)
        self._reached = max(self._reached, chunk.next_offset)
        if not chunk.data:  # compaction removed what was here
            self.position = chunk.next_offset
            return None
        positions, _ = find_positions(chunk.data, 0, len(chunk.data))
        columns = decode_columns(chunk.data, positions)
        if self.done:
            wanted = np.ones(len(positions), bool)
            for start, end in self.done:
                first, after = np.searchsorted(columns.offsets, (start, end))
                wanted[first:after] = False
            if not wanted.all():
                columns = decode_columns(chunk.data, positions[wanted])
        if not len(columns):
            self.position = chunk.next_offset
            return None
        self._rows = rows = Rows(columns, chunk.next_offset)
        self._read_ahead.hold(self, len(chunk.data))
        return rows

    def passed(self, rows: Rows, at: int) -> None:
        """Move the cursor: the records in front of `at` were handed out or skipped."""
        rows.at = at
        if at < rows.count:
            self.position = rows.offsets[at]
        else:
            self.position = rows.next_offset
            self.drop()
        if self.done:  # not before: a chunk that is given up is read again
            self.done = [span for span in self.done if span[1] > self.position]

    # -- records that were handed out before -------------------------------------------------------------------------

    def fetch(self, offset: int) -> Record | None:
        """Return a record that was read before; `None` when it is not there any more.

        Raises:
            NotLoadedError: the record is on its way.
            StorageError: the engine cannot read.
        """
        record = self._kept.pop(offset, None)
        if record is not None:
            self._kept_bytes -= _size(record)
            return record
        for start, end, rows in self._fetched:
            if start <= offset < end:
                return rows.find(offset)
        try:
            chunk = self._again.read(self.partition, offset, FETCH_BYTES)
        except OffsetOutOfRangeError:
            self._counts.removed += 1
            return None
        except CorruptRecordError as error:
            log.warning("a group passes a damaged record: %s", error)
            self._counts.corrupt += 1
            return None
        positions, _ = find_positions(chunk.data, 0, len(chunk.data))
        rows = Rows(decode_columns(chunk.data, positions), chunk.next_offset)
        self._fetched.insert(0, (offset, chunk.next_offset, rows))
        del self._fetched[FETCHED_CHUNKS:]
        record = rows.find(offset)
        if record is None:
            self._counts.removed += 1
        return record

    def keep(self, record: Record) -> None:
        """Keep a record that is held back, for `fetch`; when there are too many, they are read again."""
        size = _size(record)
        if self._kept_bytes + size <= KEPT_BYTES_MAX:
            self._kept[record.offset] = record
            self._kept_bytes += size


def _size(record: Record) -> int:
    """Return about what a record takes in memory."""
    return 300 + len(record.payload or b"") + 150 * len(record.headers)
