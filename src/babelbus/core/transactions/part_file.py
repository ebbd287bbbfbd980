"""The file of one staged part: what one writer wants to have published, kept until its batch is committed.

file  := frame(head) frame(entry)*
frame := body_bytes: u32, crc: u32 (zlib, over `body_bytes` and the body), body; big-endian
head  := JSON of `PartHead`
entry := first_record: i64, partition: i32, count: i32, topic_bytes: u16, topic (UTF-8), records in the stored form
"""

import struct
import zlib
from collections import deque

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

    topic: str
    partition: int
    first_record: int
    records: RecordBatch


def frame_head(body_bytes: int, *body: bytes | bytearray | memoryview) -> bytes:
    """Return what stands in front of a body that is given in pieces."""
    length = body_bytes.to_bytes(4, "big")
    crc = zlib.crc32(length)
    for piece in body:
        crc = zlib.crc32(piece, crc)
    return length + crc.to_bytes(4, "big")


class PartReader:
    """Reads the file of a part from its beginning, a frame at a time."""

    def __init__(self, files: FileSystem, path: str) -> None:
        self.path = path
        self.position = 0
        """Where the next frame begins: behind the last good one."""
        self._file = files.open(path, write=False)

    def next_body(self) -> bytes | None:
        """Return the body of the next frame, `None` where no whole one follows.

        Raises:
            OSError: the disk refused.
        """
        head = self._file.pread(FRAME.size, self.position)
        if len(head) < FRAME.size:
            return None
        size, crc = FRAME.unpack(head)
        if size > ENTRY_BYTES_MAX + 2**17:  # no more than an entry and its front
            return None
        body = self._file.pread(size, self.position + FRAME.size)
        if len(body) < size or zlib.crc32(body, zlib.crc32(head[:4])) != crc:
            return None
        self.position += FRAME.size + size
        return body

    def read_head(self) -> PartHead | None:
        """Return whose part it is, `None` when the file is none of ours or was never finished."""
        body = self.next_body()
        try:
            head = None if body is None else msgspec.json.decode(body, type=PartHead)
        except msgspec.DecodeError:
            return None
        return head if head is not None and head.format == FORMAT else None

    def read_front(self) -> tuple[str, int, int, int] | None:
        """Return topic, partition, first record and number of records of the next entry, `None` behind the last one."""
        body = self.next_body()
        if body is None or len(body) < ENTRY.size:
            return None
        first_record, partition, count, topic_bytes = ENTRY.unpack_from(body)
        return body[ENTRY.size : ENTRY.size + topic_bytes].decode(), partition, first_record, count

    def read_entry(self) -> Entry:
        """Return the next entry.

        Raises:
            DiskError: it is not there as it was staged.
        """
        try:
            body = self.next_body()
        except OSError as error:
            raise disk_error(error, f"reading {self.path}") from error
        if body is None or len(body) < ENTRY.size:
            raise DiskError(f"{self.path}: damaged at byte {self.position}; its batch cannot be committed")
        first_record, partition, count, topic_bytes = ENTRY.unpack_from(body)
        start = ENTRY.size + topic_bytes
        data = memoryview(body)[start:]
        positions, end = find_positions(data, 0, len(data))
        if len(positions) != count or end != len(data):
            raise DiskError(f"{self.path}: {len(positions)} records in front of byte {self.position}, not {count}")
        timestamps = timestamps_at(data, positions)
        topic = body[ENTRY.size : start].decode()
        return Entry(topic, partition, first_record, RecordBatch(data, positions, timestamps, -1))

    def close(self) -> None:
        """Give the file back."""
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
        """Flushes that were asked for and not told of yet."""
        self._removed = False
        self._waiting: deque[tuple[int, Receipt]] = deque()

    def create(self) -> None:
        """Build the file, with its head.

        Raises:
            DiskFullError, DiskError: there is none then.
        """
        body = msgspec.json.encode(self.head)
        try:
            file = self._open()
            file.pwrite(frame_head(len(body), body) + body, 0)
        except OSError as error:
            self.close()
            self._unlink()
            raise disk_error(error, f"staging in {self.path}") from error
        self.size_bytes = FRAME.size + len(body)

    def recover(self) -> bool:
        """Read the file as a crash left it, up to the last whole entry; `False`: it holds no part.

        Raises:
            OSError: the disk refused.
        """
        reader = PartReader(self._files, self.path)
        try:
            if reader.read_head() != self.head:
                return False
            self.size_bytes = reader.position
            while True:
                front = reader.read_front()
                if front is None or front[2] != self.records:
                    break
                self._count(front[0], front[1], front[3])
                self.size_bytes = reader.position
        finally:
            reader.close()
        file = self._open()
        file.truncate(self.size_bytes)
        # What a killed process wrote may be in the system's memory alone.
        file.flush()
        self._named = True
        self.durable_bytes = self.size_bytes
        self.close()
        return True

    def check(self) -> StorageError | None:
        """Read all of it again, in any thread: say what is wrong with it, `None` when it is as it was staged."""
        try:
            reader = PartReader(self._files, self.path)
            try:
                while reader.position < self.size_bytes and reader.next_body() is not None:
                    pass
            finally:
                reader.close()
        except OSError as error:
            return disk_error(error, f"reading {self.path}")
        if reader.position == self.size_bytes:
            return None
        return DiskError(f"{self.path}: damaged at byte {reader.position}; its batch cannot be committed")

    def _open(self) -> File:
        if self._file is None:
            self._file = self._files.open(self.path, create=True)
        return self._file

    @property
    def is_open(self) -> bool:
        """Whether it holds a file descriptor."""
        return self._file is not None

    @property
    def idle(self) -> bool:
        """Whether no flush of it is under way."""
        return not self._rounds

    @property
    def durable(self) -> bool:
        """Whether everything in it survives a loss of power."""
        return self.failed is None and self.durable_bytes == self.size_bytes

    def append(self, topic: str, partition: int, batch: RecordBatch, now: float) -> Receipt:
        """Write a batch; the receipt is done once it is durable, for which the caller asks the flusher.

        Raises:
            DiskFullError, DiskError: nothing was staged.
        """
        name = topic.encode()
        front = ENTRY.pack(self.records, partition, batch.count, len(name)) + name
        body_bytes = len(front) + len(batch.data)
        head = frame_head(body_bytes, front, batch.data)
        try:
            self._open().pwrite(b"".join((head, front, batch.data)), self.size_bytes)
        except OSError as error:
            self._cut()
            raise disk_error(error, f"staging in {self.path}") from error
        receipt = Receipt(partition, self.records, batch.count)
        self.size_bytes += FRAME.size + body_bytes
        self._count(topic, partition, batch.count)
        self.touched = now
        self._waiting.append((self.size_bytes, receipt))
        return receipt

    def _cut(self) -> None:
        """Take away what a failed write left, so that it cannot be taken for an entry behind a shorter one."""
        try:
            self._open().truncate(self.size_bytes)
        except OSError as error:
            self.failed = disk_error(error, f"staging in {self.path}")

    def _count(self, topic: str, partition: int, count: int) -> None:
        place = (topic, partition)
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
        """Return whether the flusher has to be asked, and take it that it is."""
        if self._asked:
            return False
        self._asked = True
        self._rounds += 1
        return True

    def flush_log(self) -> int:
        """Make it durable (in the flusher's thread); return the size that is."""
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
        """Record a flush: answer those whose records it covers."""
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
        """Return it up; the caller deletes the file.

        That is not made durable: a part that comes back after a loss of power is nobody's, and expires.
        """
        self._removed = True
        if self.idle:  # else the flusher may hold its descriptor
            self.close()

    def _unlink(self) -> None:
        try:
            self._files.unlink(self.path)
        except OSError as error:
            raise disk_error(error, f"removal of {self.path}") from error

    def close(self) -> None:
        """Give the descriptor back; the next use opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None
