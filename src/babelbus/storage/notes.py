"""Notes: small durable blobs, each a file of JSON behind a line with its checksum.

note := CRC-32 of the JSON as 8 hex digits, line end, JSON; written as a whole in the place of the last one. The JSON is
one value; an object may have a `format`, which is 1. Files that had no checksum once (`bare`) begin with `{`.
"""

import logging
import zlib
from typing import Generic, TypeVar

import msgspec

from babelbus.errors import StorageError
from babelbus.storage.files import FileSystem, disk_error

log = logging.getLogger(__name__)

FORMAT = 1
MEMBERSHIP_NAME = "cluster.json"
"""The note of a data folder whose files are in a cluster."""
COPY_BACK = "put a copy of the file back"
_CRC_BYTES = 9

T = TypeVar("T")


class DamagedNoteError(StorageError):
    """A note is not what was written, or a later version wrote it; the message names the file and what to do."""

    def __init__(self, path: str, reason: str, advice: str) -> None:
        super().__init__(f"{path} is damaged or of a later version ({reason}): {advice}")
        self.path = path


class Note(Generic[T]):
    """The note in one file. `advice` says what to do when the note is damaged."""

    def __init__(self, files: FileSystem, path: str, kind: type[T], *, advice: str = COPY_BACK, bare: bool = False):
        self.path = path
        self._files = files
        self._kind = kind
        self._advice = advice
        self._bare = bare

    def read(self) -> T | None:
        """Return what was written, `None` if there is no file.

        Raises:
            DamagedNoteError: the file is not what was written.
            DiskError: the disk refused.
        """
        try:
            content = self._files.read_file(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_error(error, f"reading {self.path}") from error
        return decode(content, self._kind, path=self.path, advice=self._advice, bare=self._bare)

    def recall(self) -> T | None:
        """Return what was written, `None` if nothing can be trusted: for notes that only spare work."""
        try:
            return self.read()
        except StorageError as error:
            log.warning("%s", error)
            return None

    def write(self, value: T) -> None:
        """Write the note, durably.

        Raises:
            DiskFullError, DiskError: the disk refused; the old note or the new one is there.
        """
        self.write_encoded(encode(value))

    def write_encoded(self, content: bytes) -> None:
        """Write what `encode` returned. Raises: as `write`."""
        try:
            self._files.replace_file(self.path, content)
        except OSError as error:
            raise disk_error(error, f"writing {self.path}") from error


def encode(value: object) -> bytes:
    """Return the content of a note."""
    body = msgspec.json.encode(value)
    return b"%08x\n" % zlib.crc32(body) + body


def decode(content: bytes, kind: type[T], *, path: str, advice: str = COPY_BACK, bare: bool = False) -> T:
    """Return what a note says. With `bare`, a note without a checksum is read too.

    Raises:
        DamagedNoteError: the content is not what was written, or of a later version.
    """
    body = content
    if not bare or content[:1] != b"{":
        body = content[_CRC_BYTES:]
        if content[:_CRC_BYTES] != b"%08x\n" % zlib.crc32(body):
            raise DamagedNoteError(path, "wrong checksum", advice)
    try:
        value = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedNoteError(path, str(error), advice) from error
    if getattr(value, "format", FORMAT) != FORMAT:
        raise DamagedNoteError(path, "unknown format", advice)
    return value
