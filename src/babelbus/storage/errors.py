"""Errors of every engine: the disk or the database refuses, or an offset is not there.

An error of a class that is `retriable` may go away: the same call can work later.
"""

from babelbus.errors import StorageError


class DiskFullError(StorageError):
    """The disk, the quota or the file size limit is full: nothing was stored, try again when there is room."""


class DiskError(StorageError):
    """The disk or the database refused a read, a write or a flush."""


class TooManyFilesError(DiskError):
    """The process or the system has as many open files as it may have: no fault of the file."""


class LostPartitionError(StorageError):
    """Nothing is there of a partition that was stored: its first record would get an offset that was given before."""


class AlteredError(StorageError):
    """An engine has something else than this server stored there: somebody changed or removed it."""

    retriable = False


class BackendBusyError(StorageError):
    """The engine's queue of unwritten records is full: nothing was stored, try again when the engine has caught up."""


class StaleWriterError(StorageError):
    """Another writer has opened the partition since: this one must not write any more."""

    retriable = False


class FolderLockedError(StorageError):
    """Another process owns the data folder."""


class OffsetOutOfRangeError(StorageError):
    """A reader asked for an offset that retention removed or nobody has written yet."""

    retriable = False

    def __init__(self, offset: int, first: int, end: int) -> None:
        super().__init__(f"offset {offset} is not in [{first}, {end}]")
        self.offset, self.first, self.end = offset, first, end
