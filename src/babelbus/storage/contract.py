"""The store that a topic stands on. Every engine passes the same contract tests (tests/storage/test_contract.py)."""

from typing import NamedTuple, Protocol

import msgspec

from babelbus.config import LogLayout, StorageSettings
from babelbus.records.columns import Columns
from babelbus.records.record import RecordBatch
from babelbus.storage.producers import Producers


class BadRange(msgspec.Struct, frozen=True):
    """Bytes of a log that hold no good record, and the offsets that are lost with them (`next_offset` excluded)."""

    position: int
    end: int
    offset: int
    next_offset: int
    reason: str


class Chunk(NamedTuple):
    """Whole records as stored, one behind the other. `next_offset` is where to read on; `base_offset` is the first's.

    Every byte was checked against the CRCs.
    """

    data: bytes
    base_offset: int
    next_offset: int


class Recovery:
    """What opening a partition found: bytes cut from the tail, ranges that are damaged, bytes that were read."""

    def __init__(self) -> None:
        self.cut_bytes = 0
        self.read_bytes = 0
        self.bad: list[tuple[str, BadRange]] = []


class LogSettings(LogLayout, frozen=True, kw_only=True):
    """How one partition's log is kept. `None` means no bound; times are seconds, sizes bytes."""

    segment_bytes: int = StorageSettings().segment_bytes
    checkpoint_bytes: int = StorageSettings().checkpoint_bytes
    """Most that a start after a kill must read of a partition, beside the last block."""


class PartitionLog(Protocol):
    """One append-only sequence of records with dense offsets.

    All methods may be called from any thread; one thread appends. Reads see everything appended: who may see what
    (the high watermark) is the core's matter.
    """

    producers: Producers
    recovery: Recovery
    """What opening it had to put right."""

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record that is still there, or `next_offset` when there is none."""

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets."""

    @property
    def size_bytes(self) -> int:
        """Size of the stored records."""

    @property
    def segment_count(self) -> int:
        """How many runs of files hold them."""

    @property
    def compacted_until(self) -> int:
        """Offset up to which records may be missing because compaction looked at them; durably remembered.

        From here on every record is there, and the last one of each key in front of it is, or its tombstone expired.
        """

    @property
    def failed(self) -> bool:
        """Whether a flush failed and `recover_flush` has not put things right yet."""

    def configure(self, settings: LogSettings) -> None:
        """Take other settings from now on."""

    def append(self, batch: RecordBatch) -> int:
        """Write a batch whose base offset is `next_offset`; return the base offset. Durable only after `flush`.

        Raises:
            DiskFullError, DiskError: nothing was appended.
        """

    def flush(self) -> int:
        """Make everything appended so far durable; return the offset up to which it is. Blocks for the disk.

        Raises:
            DiskError: what is durable is unknown; `recover_flush` must follow before the next append.
        """

    def recover_flush(self, durable_offset: int = 0) -> None:
        """After a failed flush: put what was appended from `durable_offset` on into a new place and go on there.

        Raises:
            StorageError: the disk refuses that too; call again later, appends are refused until then.
        """

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return stored records from the first one at or after `offset` on, as many as fit `bytes_max`, all checked.

        `end_offset` bounds them from above (excluded). An empty chunk means that there is nothing yet, or (its
        `next_offset` is `offset`, below `end_offset`) that the first record is larger than `bytes_max`.

        Raises:
            OffsetOutOfRangeError: `offset` is below `first_offset` or above `next_offset`.
            CorruptRecordError: the record at `offset` is damaged.
        """

    def read_columns(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Columns:
        """Return the same records as numpy columns."""

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record whose timestamp (ms) is `timestamp` or later; `None`: there is none."""

    def truncate(self, next_offset: int) -> None:
        """Remove the records from `next_offset` on, so that it is the next offset."""

    def clean(self, now_ms: int) -> int:
        """Do what retention and compaction ask for; return how many bytes became free. May take long."""

    def checkpoint(self) -> None:
        """Note durably how far the log is durable, so that a start need not read that part."""

    def close(self) -> None:
        """Flush, checkpoint and return the files back."""


class Store(Protocol):
    """The logs of all topics of one engine."""

    def topics(self) -> list[str]:
        """Return the names of the topics that are stored, sorted."""

    def partition_count(self, topic: str) -> int:
        """Return how many partitions of a topic are stored."""

    def open_partition(self, topic: str, partition: int, settings: LogSettings) -> PartitionLog:
        """Open a partition, or make it."""

    def load_settings(self, topic: str) -> bytes | None:
        """Return what `save_settings` was given, or `None`."""

    def save_settings(self, topic: str, content: bytes) -> None:
        """Keep the settings of a topic, durably, as the core writes them."""

    def hide(self, topic: str) -> str:
        """Take a topic out of `topics` at once and durably; its logs must be closed. Returns a token for `erase`."""

    def erase(self, token: str) -> None:
        """Delete what `hide` took away. May take long."""

    def removed(self) -> dict[str, str]:
        """Return what `hide` took away and nobody has erased yet: token -> name of the topic."""

    def close(self) -> None:
        """Give up what the store holds beside the logs."""
