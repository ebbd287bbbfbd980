"""Errors of records."""

from babelbus.errors import StorageError


class InvalidRecordError(StorageError):
    """A record cannot be stored: too many headers, a negative time, a part that is too long."""

    retriable = False


class CorruptRecordError(StorageError):
    """Stored bytes are not the record that was written; the record is never served.

    `position` counts from the beginning of the bytes (or of the file `path`, when it is known).
    """

    retriable = False

    def __init__(self, position: int, reason: str, *, path: str = "", offset: int = -1) -> None:
        where = f"{path or 'records'}: bad record at byte {position}"
        if offset >= 0:
            where += f" (offset {offset})"
        super().__init__(f"{where}: {reason}")
        self.position, self.reason, self.path, self.offset = position, reason, path, offset
