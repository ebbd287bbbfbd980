"""The end of each partition in a small file beside the database, because SQLite loses records without an error.

SQLite drops all of its WAL behind the first damaged byte and opens as if nothing was missing. `<database>.ends` has one
slot of 32 bytes for each partition: BLAKE2b of topic and partition number (16 bytes), the offset up to which the
partition is durable (i64), CRC-32 of both (u32), 4 zero bytes; big-endian. A flush writes the slot after the database
is durable, so that a slot never promises too much. The file itself is flushed at most once in `SYNC_SECONDS`: a killed
server loses no slot, a loss of power the changes of the last seconds.
"""

import hashlib
import logging
import struct
import threading
import zlib

from babelbus.clock import Clock
from babelbus.storage.files import File, FileSystem, disk_error

log = logging.getLogger(__name__)

SLOT = struct.Struct(">16sqI4x")
COVERED = struct.Struct(">16sq")
FREE = -1
SYNC_SECONDS = 1.0


class Ends:
    """The ends that were durable. Methods may be called from any thread."""

    def __init__(self, files: FileSystem, path: str, clock: Clock) -> None:
        self._files = files
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._file: File | None = None
        self._slots: dict[bytes, tuple[int, int]] = {}
        self._free: list[int] = []
        self._count = 0
        self._synced_at = clock.monotonic()
        self._failed = False

    def load(self) -> None:
        """Read the file, if there is one. A damaged slot is named and not used.

        Raises:
            OSError: the disk refused.
        """
        content = self._files.read_file(self.path) if self._files.exists(self.path) else b""
        self._slots, self._free, self._count = {}, [], len(content) // SLOT.size
        for number, (key, end, crc) in enumerate(SLOT.iter_unpack(content[: self._count * SLOT.size])):
            if zlib.crc32(COVERED.pack(key, end)) != crc:
                log.error("%s: slot %d is damaged; the end of one partition cannot be verified", self.path, number)
            elif end != FREE:
                self._slots[key] = number, end
                continue
            self._free.append(number)

    def get(self, topic: str, number: int) -> int:
        """Return the offset up to which a partition was durable; 0 when the file does not know the partition."""
        return self._slots.get(_key(topic, number), (0, 0))[1]

    def put(self, topic: str, number: int, end: int) -> None:
        """Record that a partition is durable up to `end`. A refusing disk is logged: the records are safe."""
        key = _key(topic, number)
        with self._lock:
            if self._slots.get(key, (0, 0))[1] >= end:
                return
            try:
                self._write(key, end)
            except OSError as error:
                if not self._failed:
                    log.error("%s: %s; a damaged WAL may pass unnoticed until this works", self.path, error)
                self._failed = True
            else:
                self._failed = False

    def sync(self) -> None:
        """Flush the file, at most once in `SYNC_SECONDS`."""
        file, now = self._file, self._clock.monotonic()
        if file is None or now - self._synced_at < SYNC_SECONDS:
            return
        self._synced_at = now
        try:
            file.flush()
        except OSError as error:
            log.error("%s: %s; a loss of power may let a damaged WAL pass unnoticed", self.path, error)

    def remove(self, topic: str, number: int) -> None:
        """Delete the end of a partition, durably, before its topic is removed.

        Raises:
            DiskError: the disk refused; the topic must not be removed.
        """
        key = _key(topic, number)
        with self._lock:
            if key in self._slots:
                try:
                    self._write(key, FREE).flush()
                except OSError as error:
                    raise disk_error(error, f"write of {self.path}") from error

    def _write(self, key: bytes, end: int) -> File:
        if self._file is None:
            self._file = self._files.open(self.path, create=True)
        slot = self._slots[key][0] if key in self._slots else self._free.pop() if self._free else self._count
        self._count = max(self._count, slot + 1)
        self._slots[key] = slot, self._slots.get(key, (0, 0))[1]  # the slot is taken even if the disk refuses
        self._file.pwrite(SLOT.pack(key, end, zlib.crc32(COVERED.pack(key, end))), slot * SLOT.size)
        if end == FREE:
            self._free.append(slot)
            del self._slots[key]
        else:
            self._slots[key] = slot, end
        return self._file

    def close(self) -> None:
        """Flush and close the file."""
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            try:
                file.flush()
            except OSError as error:
                log.error("%s: %s", self.path, error)
            finally:
                file.close()


def _key(topic: str, number: int) -> bytes:
    return hashlib.blake2b(f"{number} {topic}".encode(), digest_size=16).digest()
