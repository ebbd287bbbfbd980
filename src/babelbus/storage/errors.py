"""Errors of every engine: the disk or the database refuses, or an offset is not there.

A `RetriableStorageError` may go away: the same call can work later. All others stay until somebody changes something.
"""

from babelbus.errors import StorageError


class RetriableStorageError(StorageError):
    """Nothing was stored, or what was stored is unknown; the same call may work later."""


class DiskFullError(RetriableStorageError):
    """The disk, the quota or the file size limit is full: nothing was stored, try again when there is room."""


class DiskError(RetriableStorageError):
    """The disk or the database refused a read, a write or a flush."""


class BackendBusyError(RetriableStorageError):
    """The engine's queue of unwritten records is full: nothing was stored, try again when the engine has caught up."""


class StaleWriterError(StorageError):
    """Another writer has opened the partition since: this one must not write any more."""


class FolderLockedError(StorageError):
    """Another process owns the data folder."""


class InvalidFolderError(StorageError):
    """A topic cannot have this name: its folder would have none that a file system takes."""


class OffsetOutOfRangeError(StorageError):
    """A reader asked for an offset that retention removed or nobody has written yet."""

    def __init__(self, offset: int, first: int, end: int) -> None:
        super().__init__(f"offset {offset} is not in [{first}, {end}]")
        self.offset, self.first, self.end = offset, first, end
