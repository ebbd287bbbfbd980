"""The store that a topic stands on. Every engine passes the same contract tests (tests/storage/test_contract.py)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from babelbus.config import LogLayout, StorageSettings
from babelbus.records.record import RecordBatch
from babelbus.storage.producers import Producers

PARTITIONS_MAX = 1024
"""The most partitions of a topic."""


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


class Part(NamedTuple):
    """A piece of a log: a segment of the disk, or all that a database holds. `newest_ms` is -1 without a record."""

    base_offset: int
    next_offset: int
    size_bytes: int
    newest_ms: int


class Shared(NamedTuple):
    """Records that another process can read: bytes `position` to `end` of an open file, whose descriptor is `file`.

    The records are there from `offset` on, up to `next_offset`. They are not checked; who asked closes the file.
    `blocks` are the positions of some of them, in order: from each to the next are `block_records` records.
    """

    file: int
    position: int
    end: int
    offset: int
    next_offset: int
    blocks: Sequence[int]
    block_records: int


class Recovery:
    """The result of opening a partition: bytes cut from the tail, ranges that are damaged, bytes that were read."""

    def __init__(self) -> None:
        self.cut_bytes = 0
        self.read_bytes = 0
        self.bad: list[tuple[str, BadRange]] = []


class LogSettings(LogLayout, frozen=True, kw_only=True):
    """How one partition's log is kept. `None` means no bound; times are seconds, sizes bytes."""

    segment_bytes: int = StorageSettings().segment_bytes
    checkpoint_bytes: int = StorageSettings().checkpoint_bytes
    """Most that a start after a kill must read of a partition, beside the last block."""


class Fit(msgspec.Struct, frozen=True):
    """Properties of an engine that the broker must know before it calls the engine."""

    reads_wait: bool = True
    """A read may wait for a device: it is done in a reader's thread, never in the event loop."""
    appends_wait: bool = False
    """`append` only queues: `durable` writes, and until then no ack level but `accepted` is reached."""
    opens_at_once: int = 1
    """How many partitions a start opens at once: more than 1 if each asks another machine."""
    volatile: bool = False
    """Nothing survives the process: no flush is asked for."""


class PartitionLog(Protocol):
    """One append-only sequence of records with dense offsets, opened by one writer (`Store.open_partition`).

    Calls that never wait, for the event loop: the properties, `configure` and `append`. All others may wait and come
    from a thread: `durable` from the engine's flusher, `read`, `share`, `parts` and `find_time` from its readers,
    `clean` from the cleaner. Reads see everything that was appended and written: the high watermark is the core's
    matter.
    """

    producers: Producers
    recovery: Recovery
    """The result of opening it."""

    @property
    def is_owned(self) -> bool:
        """Whether no other server can write the partition now, so that records in memory may be served."""

    @property
    def first_offset(self) -> int:
        """Offset of the oldest record that is still there, or `next_offset` if no record is there."""

    @property
    def next_offset(self) -> int:
        """Offset that the next record gets."""

    @property
    def size_bytes(self) -> int:
        """Size of the stored records."""

    @property
    def part_count(self) -> int:
        """How many pieces hold the records: segments of the disk, ranges of a database."""

    def parts(self) -> list[Part]:
        """Return the pieces that hold the records, the oldest first; records are appended to the last one.

        Raises:
            StorageError: the engine refused.
        """

    @property
    def compacted_until(self) -> int:
        """Offset up to which records may be missing because compaction looked at them; durably remembered.

        From here on every record is there, and the last one of each key in front of it is, or its tombstone expired.
        """

    def configure(self, settings: LogSettings) -> None:
        """Replace the settings."""

    def append(self, batch: RecordBatch) -> int:
        """Append a batch whose base offset is `next_offset`; return the base offset. Durable only after `durable`.

        If a failure moved `next_offset` since the batch was made, the batch gets the offsets that follow now.

        Raises:
            DiskFullError, DiskError, BackendBusyError: nothing was appended; it may work later.
            StaleWriterError: the partition was opened again since; nothing was appended.
        """

    def durable(self, *, sync: bool = True) -> int:
        """Write what was appended, and with `sync` make it survive a loss of power; return the offset up to which.

        The remains of an earlier failure are repaired first.

        Raises:
            StorageError: what was appended since the last call may be lost; `next_offset` says what is there.
        """

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        """Return stored records from the first one at or after `offset` on, as many as fit `bytes_max`, all checked.

        At least one record is returned, however large, if there is one below `end_offset` (which is excluded). An
        empty chunk means that there is nothing between `offset` and its `next_offset`.

        Raises:
            OffsetOutOfRangeError: `offset` is below `first_offset` or above `next_offset`.
            CorruptRecordError: the record at `offset` is damaged.
        """

    def share(self, offset: int) -> Shared | None:
        """Return where another process reads the records from `offset` on; `None`: they are in no file.

        Raises:
            OffsetOutOfRangeError, CorruptRecordError: as `read`.
        """

    def find_time(self, timestamp: int) -> int | None:
        """Return the offset of the first record whose timestamp (ms) is `timestamp` or later, or `None`."""

    def cut_torn(self, start: int) -> None:
        """Remove, at a start, the records from the first hole on that a loss of power left at or after `start`.

        An engine whose appends are whole or not there at all does nothing. Other damage is decay, and stays.

        Raises:
            StorageError: the log cannot be read.
        """

    def trim(self, first_offset: int) -> int:
        """Remove whole parts at the front whose records are all below an offset; return how many bytes became free.

        Raises:
            StorageError: the engine refused; what was removed is gone.
        """

    def clean(self, now_ms: int) -> int:
        """Run retention and compaction; return how many bytes became free. May take long."""

    def close(self) -> None:
        """Close the files or connections, after everything is durable."""


class Store(Protocol):
    """The logs of all topics of one engine."""

    fit: Fit

    def partition_count(self, topic: str) -> int:
        """Return how many partitions of a topic are stored."""

    def open_partition(self, topic: str, partition: int, settings: LogSettings) -> PartitionLog:
        """Open a partition as its only writer, or make it: appends of whoever opened it before are refused."""

    def hide(self, topic: str) -> str:
        """Remove a topic at once and durably; its logs must be closed. Returns a token for `erase`."""

    def erase(self, token: str) -> None:
        """Delete what `hide` took away. May take long."""

    def removed(self) -> dict[str, str]:
        """Return what `hide` took away and nobody has erased yet: token -> name of the topic."""

    def close(self) -> None:
        """Close what the store holds beside the logs."""


class Catalog(Store, Protocol):
    """A store that also knows the settings of the topics of all engines."""

    def open_partition(self, topic: str, partition: int, settings: LogSettings, *, anew: bool = True) -> PartitionLog:
        """Open a partition as its only writer; make it if it is missing, unless `anew` is false.

        Raises:
            LostPartitionError: it is missing and not to be made.
        """

    def topics(self) -> list[str]:
        """Return the names of the topics, sorted."""

    def load_settings(self, topic: str) -> bytes | None:
        """Return what `save_settings` was given, or `None`."""

    def load_removed(self, token: str) -> bytes | None:
        """Return the settings of a topic that `hide` took away, or `None`."""

    def erase_records(self, token: str) -> None:
        """Delete the records of what `hide` took away; `removed` and `load_removed` still know it. May take long."""

    def save_settings(self, topic: str, content: bytes) -> None:
        """Keep the settings of a topic, durably, as the core writes them; makes the topic."""
