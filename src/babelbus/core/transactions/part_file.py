"""The file of one staged part: what one writer wants to have published, kept until its batch is committed.

file  := frame(head) frame(entry)*
frame := body_bytes: u32, crc: u32 (zlib, over `body_bytes` and the body), body; big-endian
head  := JSON of `PartHead`
entry := first_record: i64, partition: i32, count: i32, topic_bytes: u16, topic (UTF-8), records in the stored form
"""

import struct
import zlib
from collections import deque
from contextlib import closing

import msgspec

from babelbus.core.receipt import Receipt
from babelbus.errors import StorageError
from babelbus.records.columns import find_positions
from babelbus.records.fields import timestamps_at
from babelbus.records.record import RecordBatch
from babelbus.storage.errors import DiskError
from babelbus.storage.files import File, FileSystem, disk_error

FORMAT = 1
FRAME = struct.Struct(">II")
ENTRY = struct.Struct(">qiiH")
ENTRY_BYTES_MAX = 64 * 2**20
"""The largest batch that is staged at once: what a commit has in memory of one transaction."""

Place = tuple[str, int]
"""Topic and partition."""


class PartHead(msgspec.Struct, frozen=True):
    """Whose part it is."""

    transaction_id: str
    batch_id: int
    part: str
    format: int = FORMAT


class Entry(msgspec.Struct, frozen=True):
    """One batch of a part, and where it is to go. `first_record` is its first record's number in the part."""

    place: Place
    first_record: int
    records: RecordBatch


class PartReader:
    """Reads the file of a part from its beginning, a frame at a time.

    Raises:
        DiskError: the disk refused; all calls may raise it.
    """

    def __init__(self, files: FileSystem, path: str) -> None:
        self.path = path
        self.position = 0
        """Where the next frame begins: behind the last good one."""
        try:
            self._file = files.open(path, write=False)
        except OSError as error:
            raise disk_error(error, f"reading {path}") from error

    def next_body(self) -> bytes | None:
        """Return the body of the next frame, `None` where no whole one follows."""
        try:
            head = self._file.pread(FRAME.size, self.position)
            if len(head) < FRAME.size:
                return None
            size, crc = FRAME.unpack(head)
            if size > ENTRY_BYTES_MAX + 2**17:  # no more than an entry and its front
                return None
            body = self._file.pread(size, self.position + FRAME.size)
        except OSError as error:
            raise disk_error(error, f"reading {self.path}") from error
        if len(body) < size or zlib.crc32(body, zlib.crc32(head[:4])) != crc:
            return None
        self.position += FRAME.size + size
        return body

    def read_head(self) -> PartHead | None:
        """Return whose part it is, `None` if the file is not a part or was never finished."""
        body = self.next_body()
        try:
            head = None if body is None else msgspec.json.decode(body, type=PartHead)
        except msgspec.DecodeError:
            return None
        return head if head is not None and head.format == FORMAT else None

    def next_entry(self) -> Entry | None:
        """Return the next entry, `None` where no whole one follows."""
        body = self.next_body()
        if body is None or len(body) < ENTRY.size:
            return None
        first_record, partition, count, topic_bytes = ENTRY.unpack_from(body)
        start = ENTRY.size + topic_bytes
        data = memoryview(body)[start:]
        positions, end = find_positions(data, 0, len(data))
        if len(positions) != count or end != len(data):
            return None
        records = RecordBatch(data, positions, timestamps_at(data, positions), -1)
        return Entry((body[ENTRY.size : start].decode(), partition), first_record, records)

    def is_damaged(self) -> bool:
        """Return whether bytes follow that no crash leaves: a frame that is not as it was written, and more behind."""
        try:
            size = self._file.size()
            head = self._file.pread(FRAME.size, self.position)
        except OSError as error:
            raise disk_error(error, f"reading {self.path}") from error
        if len(head) < FRAME.size or not any(head):  # zeros: the system had not written them yet
            return False
        return self.position + FRAME.size + int(FRAME.unpack(head)[0]) < size

    def damage(self) -> DiskError:
        """Return the error that names where the file is damaged."""
        advice = "put a copy of the file back, or abort the batch"
        return DiskError(f"{self.path}: damaged at byte {self.position}; its batch cannot be committed: {advice}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class StagedPart:
    """A part and its file. It is a `Flushable`: `flush_log` runs in the flusher's thread, the rest in the event loop.

    Invariant: `size_bytes` ends on a frame, and what is below `durable_bytes` survives a loss of power.

    Attributes:
        records: how many are staged; the next one has this number.
        places: records by topic and partition.
        failed: why nothing of it can be committed any more, `None` as long as all is well.
        touched: when it last grew, in seconds of the monotonic clock.
    """

    def __init__(self, files: FileSystem, folder: str, number: int, path: str, head: PartHead, now: float) -> None:
        self.number = number
        self.head = head
        self.path = path
        self.size_bytes = 0
        self.durable_bytes = 0
        self.records = 0
        self.places: dict[Place, int] = {}
        self.failed: StorageError | None = None
        self.touched = now
        self._files = files
        self._folder = folder
        self._file: File | None = None
        self._named = False
        """Whether the file's name survives a loss of power."""
        self._asked = False
        self._rounds = 0
        """Flushes that were asked for and whose outcome is not known yet."""
        self._removed = False
        self._waiting: deque[tuple[int, Receipt]] = deque()

    def create(self) -> None:
        """Create the file, with its head.

        Raises:
            DiskFullError, DiskError: the disk refused; there is no file.
        """
        try:
            self._write(msgspec.json.encode(self.head))
        except StorageError:
            self.close()
            try:
                self._files.unlink(self.path)
            except OSError as error:
                raise disk_error(error, f"removal of {self.path}") from error
            raise

    def recover(self) -> None:
        """Read the file as a crash left it, up to the last whole entry.

        Raises:
            DiskError: the disk refused.
        """
        with closing(PartReader(self._files, self.path)) as reader:
            reader.next_body()
            self.size_bytes = reader.position
            while (entry := reader.next_entry()) is not None and entry.first_record == self.records:
                self._count(entry.place, entry.records.count)
                self.size_bytes = reader.position
        try:
            file = self._open()
            file.truncate(self.size_bytes)
            # What a killed process wrote may be in the system's memory alone.
            file.flush()
        except OSError as error:
            raise disk_error(error, f"opening {self.path}") from error
        self._named = True
        self.durable_bytes = self.size_bytes
        self.close()

    def check(self) -> StorageError | None:
        """Read all of it again, in any thread; return what is wrong with it, `None` when it is as it was staged."""
        try:
            with closing(PartReader(self._files, self.path)) as reader:
                while reader.position < self.size_bytes:
                    if reader.next_body() is None:
                        return reader.damage()
        except StorageError as error:
            return error
        return None

    def _open(self) -> File:
        if self._file is None:
            self._file = self._files.open(self.path, create=True)
        return self._file

    @property
    def idle(self) -> bool:
        """Whether no flush of it is under way."""
        return not self._rounds

    @property
    def durable(self) -> bool:
        """Whether everything in it survives a loss of power."""
        return self.failed is None and self.durable_bytes == self.size_bytes

    def append(self, place: Place, batch: RecordBatch, now: float) -> Receipt:
        """Write a batch; the receipt is done once it is durable, for which the caller asks the flusher.

        Raises:
            DiskFullError, DiskError: nothing was staged.
        """
        topic, partition = place
        name = topic.encode()
        self._write(ENTRY.pack(self.records, partition, batch.count, len(name)) + name, batch.data)
        receipt = Receipt(partition, self.records, batch.count)
        self._count(place, batch.count)
        self.touched = now
        self._waiting.append((self.size_bytes, receipt))
        return receipt

    def _write(self, *body: bytes | bytearray | memoryview) -> None:
        """Write a frame at the end of the file, whose body is given in pieces."""
        length = sum(map(len, body)).to_bytes(4, "big")
        crc = zlib.crc32(length)
        for piece in body:
            crc = zlib.crc32(piece, crc)
        frame = b"".join((length, crc.to_bytes(4, "big"), *body))
        try:
            self._open().pwrite(frame, self.size_bytes)
        except OSError as error:
            self._cut()
            raise disk_error(error, f"staging in {self.path}") from error
        self.size_bytes += len(frame)

    def _cut(self) -> None:
        """Remove what a failed write left, so that it cannot be taken for an entry behind a shorter one."""
        try:
            self._open().truncate(self.size_bytes)
        except OSError as error:
            self.failed = disk_error(error, f"staging in {self.path}")

    def _count(self, place: Place, count: int) -> None:
        self.places[place] = self.places.get(place, 0) + count
        self.records += count

    def receipt(self, partition: int, first_record: int, count: int) -> Receipt:
        """Return a receipt for records that were staged before, done when all of the part is durable."""
        receipt = Receipt(partition, first_record, count)
        if self.failed is not None or self.durable:
            receipt.resolve(self.failed)
        else:
            self._waiting.append((self.size_bytes, receipt))
        return receipt

    # -- durability --------------------------------------------------------------------------------------------------

    def wants_flush(self) -> bool:
        """Return whether the flusher has to be asked, and record that it is."""
        if self._asked:
            return False
        self._asked = True
        self._rounds += 1
        return True

    def flush_log(self) -> int:
        """Flush the file (in the flusher's thread); return the size that is durable."""
        self._asked = False  # what is appended from here on asks again
        size, file = self.size_bytes, self._file
        if self._removed or file is None:
            return size
        if self.failed is not None:  # the system forgets a failed write-back: a second try would say that all is well
            raise self.failed
        try:
            file.flush()
            if not self._named:
                self._files.flush_folder(self._folder)
        except OSError as error:
            raise disk_error(error, f"flush of {self.path}") from error
        return size

    def flushed(self, durable_offset: int, error: StorageError | None) -> None:
        """Record the outcome of a flush: answer those whose records it covers."""
        self._rounds -= 1
        waiting = self._waiting
        if error is not None or self._removed:
            self.failed = self.failed or error or StorageError("the part was aborted")
            self.durable_bytes = -1
            while waiting:
                waiting.popleft()[1].resolve(self.failed)
            if self._removed and self.idle:
                self.close()
            return
        self._named = True
        self.durable_bytes = max(self.durable_bytes, durable_offset)
        while waiting and waiting[0][0] <= self.durable_bytes:
            waiting.popleft()[1].resolve()

    # -- removal -----------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Close the part for good; the caller deletes the file.

        That is not made durable: a part that comes back after a loss of power belongs to no batch, and expires.
        """
        self._removed = True
        if self.idle:  # else the flusher may hold its descriptor
            self.close()

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
