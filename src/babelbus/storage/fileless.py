"""A partition whose records are in no file: the engine asks a database or a cluster for each range of records."""

import threading
from abc import ABC, abstractmethod

from babelbus.arrays import np
from babelbus.records.columns import decode_chunk
from babelbus.records.format import CorruptRecordError
from babelbus.storage.contract import Chunk, LogSettings, Recovery, Shared
from babelbus.storage.errors import OffsetOutOfRangeError, StaleWriterError
from babelbus.storage.producers import Producers

READ_BYTES_MAX = 8 * 2**20
"""Most that one read of a search by time asks for."""


class FilelessLog(ABC):
    """The reading half of such a partition; see `contract.PartitionLog`.

    `_changing` is held by every call that removes or rewrites records.
    """

    name: str
    part_count = 1
    is_owned = True

    def __init__(self, settings: LogSettings) -> None:
        self.settings = settings
        self.producers = Producers()
        self.recovery = Recovery()
        self._changing = threading.RLock()
        self._stale = False
        """Whether the partition was opened again since: this writer is refused."""

    @property
    @abstractmethod
    def first_offset(self) -> int:
        """Offset of the oldest record."""

    @property
    @abstractmethod
    def end(self) -> int:
        """Offset behind the last stored record."""

    @abstractmethod
    def _collect(self, offset: int, end_offset: int, bytes_max: int) -> Chunk:
        """Return checked records from `offset` on, below `end_offset`, which are both inside of the partition.

        Raises:
            CorruptRecordError: the record at `offset` is damaged, or was removed during the call.
        """

    def configure(self, settings: LogSettings) -> None:
        """Replace the settings."""
        self.settings = settings

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return stored records, all checked; see `contract.PartitionLog`."""
        try:
            return self._read(offset, bytes_max, end_offset)
        except CorruptRecordError:
            with self._changing:  # the cleaner may just have removed or rewritten it
                return self._read(offset, bytes_max, end_offset)

    def _read(self, offset: int, bytes_max: int, end_offset: int | None) -> Chunk:
        first, following = self.first_offset, self.end
        end = following if end_offset is None else min(end_offset, following)
        if not first <= offset <= following:
            raise OffsetOutOfRangeError(offset, first, following)
        return self._collect(offset, end, bytes_max) if offset < end else Chunk(b"", offset, offset)

    def share(self, offset: int) -> Shared | None:
        """Return `None`: the records are in no file; see `contract.PartitionLog`."""
        return None

    def find_time_between(self, timestamp: int, offset: int, end_offset: int) -> int | None:
        """Return the offset of the first record of a range at or after a time, or of a damaged one that may be it."""
        while offset < end_offset:
            try:
                chunk = self.read(offset, READ_BYTES_MAX, end_offset)
            except CorruptRecordError as error:
                return error.offset
            columns = decode_chunk(chunk.data, verified=True)
            late = np.flatnonzero(columns.timestamps >= timestamp)
            if len(late):
                return int(columns.offsets[late[0]])
            offset = chunk.next_offset
        return None

    def _stale_error(self) -> StaleWriterError:
        return StaleWriterError(f"{self.name}: another writer has opened the partition since")

    def cut_torn(self, start: int) -> None:  # noqa: B027 - no engine of this kind has torn records
        """Return at once: what was appended together is there as a whole or not at all."""
