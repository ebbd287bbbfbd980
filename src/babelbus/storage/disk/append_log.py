"""A partition on disk: appending, what of it is durable, going on after a failed flush (docs/storage.md).

One thread appends, and the append is the only call that may come from an event loop: it costs one `pwrite` into the
system's memory. Readers, the flusher and the cleaner come from other threads. Three locks, taken in this order:
`_flushing` by whatever makes durable or removes, `_reading` by a read and by whatever takes files away from readers,
and `_lock` for a moment, never while the disk is flushed, read or asked to remove: appending goes on meanwhile.
"""

import logging
import threading
from collections.abc import Iterator

import msgspec

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.records.format import CorruptRecordError, rebase
from babelbus.records.record import RecordBatch
from babelbus.storage.contract import Chunk, LogSettings, Part, Recovery, Shared
from babelbus.storage.disk import checkpoint as checkpoints
from babelbus.storage.disk.checkpoint import Checkpoint
from babelbus.storage.disk.index import BLOCK_RECORDS
from babelbus.storage.disk.recovery import RESCUED_SUFFIX, is_lost_page, open_segments
from babelbus.storage.disk.segment import Segment, base_name
from babelbus.storage.disk.segments import Segments
from babelbus.storage.errors import DiskError, LostPartitionError, OffsetOutOfRangeError, StaleWriterError
from babelbus.storage.files import FileSystem, disk_error
from babelbus.storage.producers import Producers

log = logging.getLogger(__name__)

TORN_READ_BYTES = 4 * 2**20
READ_AGAIN_BYTES_MAX = 2**18
"""A start that had to read less than this of a partition writes no checkpoint, so that 10,000 topics open fast."""


class _Mark(msgspec.Struct):
    """A checkpoint to be, the segments whose derived files it stands on, and the bytes that it spares a start."""

    checkpoint: Checkpoint
    segments: list[Segment]
    bytes_before: int


class AppendLog:
    """A partition on disk without its cleaning; see `contract.PartitionLog`."""

    is_owned = True

    def __init__(
        self, files: FileSystem, folder: str, settings: LogSettings, clock: Clock, *, anew: bool = True
    ) -> None:
        """Open the log in a folder; make it if nothing is there, unless `anew` is false.

        Raises:
            LostPartitionError: nothing is there.
            DiskFullError, DiskError: the disk refused.
        """
        self._files = files
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self._lock = threading.RLock()
        self._segments: Segments
        self._bytes_since_checkpoint = 0
        self._durable = 0
        self._lost: list[int] = []
        self._failed = False
        self._rescued_from: int | None = None
        """Where the records begin that a rescue after a failed flush has stored again, while it is not finished."""
        self._closed = False
        self._stale = False
        self._flushing = threading.Lock()
        self._reading = threading.RLock()
        self.producers = Producers()
        self.recovery = Recovery()
        self._compacted_until: int | None = None
        self._recover(anew=anew)
        self._opened_at = self.next_offset
        if settings.cleanup == "compact":
            self._load_compaction()  # now: later an event loop asks

    # -- opening -----------------------------------------------------------------------------------------------------

    def _recover(self, *, anew: bool) -> None:
        """Find the segments and read what no checkpoint vouches for. Raises: as `__init__`."""
        try:
            if anew:
                self._files.make_folder(self._folder)
            self._open_segments(anew=anew)
        except OSError as error:
            raise disk_error(error, f"opening {self._folder}") from error

    def _open_segments(self, *, anew: bool) -> None:
        opened = open_segments(self._files, self._folder, self.producers, self.recovery)
        self._segments = Segments(self._files, self._folder, opened.segments, self._lock)
        self._lost = opened.lost
        if not opened.segments:
            if not anew:
                raise LostPartitionError(
                    f"{self._folder} is missing or has no log: put a copy of the folder back, or let 'babelbus repair' "
                    "begin the partition anew, then start again"
                )
            self._segments.begin(0, durable=False)
            checkpoints.note(self._files, self._folder).write(self._mark().checkpoint)  # its flush covers the folder
            return
        self._bytes_since_checkpoint = self.recovery.read_bytes
        known = opened.known
        # What a killed process wrote may be in the system's memory alone; nobody reads it before it is durable.
        for segment in opened.scanned:
            if known is None or segment.next_offset > known.durable_end:
                segment.flush()
        active = self._segments.active
        active.created_ms = self._clock.now_ms() if active.size_bytes else 0
        if any(path == f"{active.path}.log" for path, _ in self.recovery.bad):
            # Nobody appends behind a damaged range: it stays as it is, and what follows goes into a new segment.
            self._roll()
        self._durable = self.next_offset
        # A checkpoint also makes the names of new segments durable.
        is_old = known is None or known.segment != self._segments.active.base_offset
        if is_old or self.recovery.read_bytes >= READ_AGAIN_BYTES_MAX or self.recovery.cut_bytes or self.recovery.bad:
            self._try_checkpoint(self._mark())

    # -- what there is -----------------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record; see `contract.PartitionLog`."""
        return self._segments.bases[0]

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets."""
        return self._segments.active.next_offset

    @property
    def size_bytes(self) -> int:
        """Size of the stored records."""
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments.all)

    @property
    def part_count(self) -> int:
        """How many segments hold the records."""
        return len(self._segments.all)

    def parts(self) -> list[Part]:
        """Return the segments, the oldest first."""
        with self._lock:
            segments = self._segments.all[:]
        return [
            Part(one.base_offset, one.next_offset, one.size_bytes, one.index.greatest_timestamp) for one in segments
        ]

    @property
    def compacted_until(self) -> int:
        """Offset up to which records may be missing because compaction looked at them; durably remembered.

        When that memory is missing although records are, it is all that there was when the log was opened.
        """
        if self._compacted_until is None:
            return self._load_compaction()
        return self._compacted_until

    def _load_compaction(self) -> int:
        with self._reading:
            if self._compacted_until is None:
                mark = checkpoints.compaction_note(self._files, self._folder).recall()
                if mark is not None:
                    self._compacted_until = mark.until
                else:
                    dense = all(segment.dense for segment in self._segments.all[:-1])
                    self._compacted_until = 0 if dense else self._opened_at
            return self._compacted_until

    def note_compaction(self, until: int) -> None:
        """Record durably that compaction may remove records before `until`, before it removes the first.

        Raises:
            DiskFullError, DiskError: the disk refused; nothing may go.
        """
        if until > self.compacted_until:
            checkpoints.compaction_note(self._files, self._folder).write(checkpoints.Compacted(until))
            self._compacted_until = until

    @property
    def failed(self) -> bool:
        """Whether a flush failed and `recover_flush` has not put things right yet."""
        return self._failed

    def configure(self, settings: LogSettings) -> None:
        """Replace the settings."""
        self._settings = settings

    # -- appending ---------------------------------------------------------------------------------------------------

    def append(self, batch: RecordBatch) -> int:
        """Append a batch with one `pwrite`, sometimes to a new segment; see `contract.PartitionLog`."""
        with self._lock:
            if self._stale:
                raise StaleWriterError(f"{self._folder}: another writer has opened the partition since")
            if self._failed:
                raise DiskError(f"{self._folder}: a flush failed and its records have no new place yet")
            active = self._segments.active
            if active.size_bytes and self._is_full(active):
                self._roll()
                active = self._segments.active
            if not active.created_ms:
                active.created_ms = self._clock.now_ms()
            if batch.base_offset != active.next_offset:
                batch = rebase(batch, active.next_offset)
            active.append(batch)
            self._bytes_since_checkpoint += len(batch.data)
            self._segments.remember(active.next_offset, active, active.size_bytes)
            return batch.base_offset

    def _is_full(self, active: Segment) -> bool:
        if active.size_bytes >= self._settings.segment_bytes:
            return True
        seconds = self._settings.segment_seconds
        return seconds is not None and self._clock.now_ms() - active.created_ms >= seconds * 1000

    def _roll(self) -> None:
        """Begin the next segment and seal the open one.

        Raises:
            DiskFullError, DiskError: the open one goes on.
        """
        try:
            self._segments.roll()
        except OSError as error:
            raise disk_error(error, f"new segment in {self._folder}") from error

    def roll(self) -> None:
        """Start a new segment if the open one has records, so that the cleaner may take that one."""
        with self._lock:
            if self._segments.active.size_bytes and not self._stale:
                self._roll()

    def fence_off(self) -> None:
        """Refuse appends from now on: the partition was opened again."""
        with self._lock:
            self._stale = True

    # -- durability --------------------------------------------------------------------------------------------------

    def durable(self, *, sync: bool = True) -> int:
        """Flush everything appended so far; a failed flush is repaired here or by the next call; see the contract."""
        if self._failed:
            self.recover_flush()
        if not sync:
            return self.next_offset
        try:
            return self.flush()
        except StorageError:
            if not self._closed:
                self.recover_flush()
            raise

    def flush(self) -> int:
        """Flush everything appended so far; return the offset up to which it is durable. Blocks for the disk.

        Raises:
            DiskError: what is durable is unknown; `recover_flush` must follow before the next append.
        """
        with self._flushing:
            return self._durable if self._closed else self._flush()

    def _flush(self, *, checkpoint: bool = False) -> int:
        with self._lock:
            if self._failed:  # the system forgets a failed write-back: a second try would say that all is well
                raise DiskError(f"{self._folder}: a flush failed and its records have no new place yet")
            target = self.next_offset
            active = self._segments.active
            rolled = list(self._segments.unflushed)
            new_name, self._segments.unflushed_folder = self._segments.unflushed_folder, False
            due = bool(rolled) or self._bytes_since_checkpoint >= self._settings.checkpoint_bytes
            # Taken before the flush: what is appended meanwhile is not durable.
            mark = self._mark() if due or (checkpoint and self._bytes_since_checkpoint) else None
        try:
            for segment in rolled:
                segment.flush()
            if new_name:
                self._files.flush_folder(self._folder)
            active.flush()
        except (OSError, StorageError) as error:
            self._failed = True
            if isinstance(error, OSError):
                raise disk_error(error, f"flush of {active.path}.log") from error
            raise
        self._durable = max(self._durable, target)
        if rolled:
            with self._reading, self._lock:
                self._segments.note_flushed(rolled)
        if mark is not None:
            self._try_checkpoint(mark)
        return target

    def recover_flush(self) -> None:
        """Repair a failed flush: write what was appended since the last good flush into a new segment and go on there.

        Records that the system still gives back are checked and written again, since it may drop pages of a failed
        flush. Other records are lost, and `next_offset` goes back to the first of them. The old files stay as they are
        until the new file is durable.

        Raises:
            StorageError: the disk refuses that too; call again later, appends are refused until then.
        """
        with self._flushing, self._reading:
            with self._lock:  # from here on every append is refused, without waiting for what follows
                end = self.next_offset
            try:
                if self._rescued_from is None:
                    start = max(self._durable, self.first_offset)
                    rescued = f"{self._folder}/{base_name(start)}{RESCUED_SUFFIX}"
                    self._files.replace_file(rescued, b"".join(self._read_back(start)))
                    self._rescued_from = start
                start = self._rescued_from
                self._segments.begin_again(start, self._clock.now_ms())
                self._durable = self.next_offset
                self._rescued_from = None
            except OSError as error:
                raise disk_error(error, f"recovery of {self._folder} after a failed flush") from error
            self._failed = False
            self.producers.forget_from(self.next_offset)
            log.error(
                "%s: a flush failed; %d records were written again into %s.log, %d are lost",
                self._folder, self.next_offset - start, self._segments.active.path, end - self.next_offset,
            )  # fmt: skip
            self._try_checkpoint(self._mark())

    def _read_back(self, offset: int) -> Iterator[bytes]:
        """Yield the records from `offset` on, up to the first that the system does not give back."""
        try:
            while offset < self.next_offset:
                chunk = self.read(offset, 2**31 - 1)
                offset = chunk.next_offset
                yield chunk.data
        except (CorruptRecordError, DiskError) as error:
            log.error("%s: records from offset %d on cannot be read back: %s", self._folder, offset, error)

    def checkpoint(self) -> None:
        """Write how far the log is durable, so that a start need not read that part."""
        with self._flushing:
            if not self._closed:
                self._flush(checkpoint=True)

    def _mark(self) -> _Mark:
        """Record how far the log goes, at the beginning of its last block, to be saved when all of that is durable."""
        active = self._segments.active
        blocks = active.index.full_blocks
        if blocks == len(active.index):
            position, offset = active.size_bytes, active.next_offset
        else:
            position = active.index.positions[blocks]
            offset = active.base_offset + blocks * BLOCK_RECORDS
        return _Mark(
            Checkpoint(
                active.base_offset,
                position,
                offset,
                self.producers.snapshot(),
                end=active.next_offset,
                lost=self._lost,
            ),
            [segment for segment in self._segments.all[:-1] if segment.index_dirty] + [active],
            self._bytes_since_checkpoint,
        )

    def _try_checkpoint(self, mark: _Mark) -> None:
        try:
            self._save_checkpoint(mark)
        except (OSError, StorageError) as error:  # the records are durable; only the next start is slower
            log.warning("%s: no checkpoint: %s", self._folder, error)

    def _save_checkpoint(self, mark: _Mark) -> None:
        for segment in mark.segments:
            segment.flush_index()
        checkpoints.note(self._files, self._folder).write(mark.checkpoint)
        with self._lock:
            self._bytes_since_checkpoint -= mark.bytes_before

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return stored records; costs one `pread`, a checksum of it, and at most one more block; see the contract."""
        with self._reading:
            return self._segments.read(offset, bytes_max, end_offset)

    def share(self, offset: int) -> Shared | None:
        """Return where another process reads the records from `offset` on; see the contract."""
        with self._reading:
            return self._segments.share(offset)

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record at or after a time; see `contract.PartitionLog`."""
        with self._reading:
            return self._segments.find_time(timestamp)

    # -- removing ----------------------------------------------------------------------------------------------------

    def truncate(self, next_offset: int) -> None:
        """Remove the records from `next_offset` on, so that it is the next offset.

        Where compaction removed the records in front of it too, the next offset is the one behind the last one left.

        Raises:
            OffsetOutOfRangeError: it is not between `first_offset` and `next_offset`.
            DiskError: the disk refused; what was asked for may be half done, and asking again is right.
        """
        with self._flushing, self._reading, self._lock:
            if not self.first_offset <= next_offset <= self.next_offset:
                raise OffsetOutOfRangeError(next_offset, self.first_offset, self.next_offset)
            try:
                self._files.unlink(f"{self._folder}/{checkpoints.NAME}")  # it may vouch for what goes away
                self._segments.cut(next_offset)
                self.producers.forget_from(next_offset)
                self._segments.active.flush()
            except OSError as error:
                raise disk_error(error, f"truncation of {self._folder}") from error
            self._durable = min(self._durable, self.next_offset)
            self._try_checkpoint(self._mark())

    def cut_torn(self, start: int) -> None:
        """Remove, at a start, the records from the hole on that a loss of power left at or after `start`.

        The disk may take the pages of what was not flushed in any order. Records behind such a hole were never
        flushed either, and so never promised. Only a hole of zeros, up to the end of a page, is cut: any other damage
        is decay, and stays for `babelbus repair`.

        Raises:
            StorageError: the log cannot be read.
        """
        offset = max(min(start, self.next_offset), self.first_offset)
        try:
            while offset < self.next_offset:
                offset = self.read(offset, TORN_READ_BYTES).next_offset
        except CorruptRecordError as error:
            if error.offset < start or not is_lost_page(self._files, error.path, error.position):
                raise
            log.warning("%s: cut at byte %d, offset %d: power was lost while it was written",
                        error.path, error.position, error.offset)  # fmt: skip
            self.truncate(error.offset)

    def trim(self, first_offset: int) -> int:
        """Remove sealed segments whose records are all below an offset; see `contract.PartitionLog`."""
        freed = 0
        for segment in self.sealed_segments():
            if segment.next_offset > first_offset:
                break
            freed += segment.size_bytes
            self.drop_first(segment)
        return freed

    def sealed_segments(self) -> list[Segment]:
        """Return the segments that nobody appends to any more (for the cleaner)."""
        with self._lock:
            return self._segments.all[:-1]

    def open_segment(self) -> Segment:
        """Return the segment that is appended to (for the cleaner)."""
        return self._segments.active

    def drop_first(self, segment: Segment) -> None:
        """Remove the oldest segment, which is sealed (for the cleaner)."""
        with self._flushing, self._reading:
            assert self._segments.all[0] is segment
            assert segment.sealed
            try:
                self._segments.drop_first()
            except OSError as error:
                raise disk_error(error, f"removal of {segment.path}.log") from error

    def swap(self, segment: Segment, content: bytes) -> None:
        """Replace a segment by `content`, its records without those that compaction removed.

        Raises:
            DiskFullError, DiskError: the disk refused; the segment is the old or the new one.
        """
        source = f"{segment.path}.compacting"
        try:
            self._files.replace_file(source, content)
            with self._flushing, self._reading:
                self._segments.swap(segment, source)
        except OSError as error:
            raise disk_error(error, f"compaction of {segment.path}") from error

    def close(self) -> None:
        """Flush, checkpoint and return the files back.

        Raises:
            DiskError: what was not flushed may be lost with the power; the files are given back all the same.
        """
        try:
            if not self._failed and not self._closed:
                self.checkpoint()
                self._trim()
        finally:
            with self._flushing, self._reading:
                self._closed = True
                self._segments.close()

    def _trim(self) -> None:
        """Remove the zeros behind the last record, unless another writer has the partition.

        Raises:
            DiskFullError, DiskError: the disk refused; the next start reads past them.
        """
        with self._lock:
            if not self._stale:
                active = self._segments.active
                try:
                    active.trim()
                except OSError as error:
                    raise disk_error(error, f"closing {active.path}.log") from error
