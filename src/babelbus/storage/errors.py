"""Errors of every engine: the disk or the database refuses, or an offset is not there."""

from babelbus.errors import StorageError


class DiskFullError(StorageError):
    """The disk, the quota or the file size limit is full: nothing was stored, try again when there is room."""


class DiskError(StorageError):
    """The disk refused a read, a write or a flush."""


class FolderLockedError(StorageError):
    """Another process owns the data folder."""


class OffsetOutOfRangeError(StorageError):
    """A reader asked for an offset that retention removed or nobody has written yet."""

    def __init__(self, offset: int, first: int, end: int) -> None:
        super().__init__(f"offset {offset} is not in [{first}, {end}]")
        self.offset, self.first, self.end = offset, first, end
