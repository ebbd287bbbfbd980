"""What the storage tests share: records, logs on any file system, and reading all of one."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from hypothesis import strategies as st

from babelbus.clock import Clock
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_batch
from babelbus.records.record import Record, RecordBatch
from babelbus.storage.contract import Chunk, LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.files import FileSystem
from tests.support.clock import ManualClock

FOLDER = "data/topics/t/0"
NOW = 1_700_000_000_000

small_bytes = st.binary(max_size=40)
headers = st.lists(
    st.tuples(small_bytes.filter(lambda key: not key.startswith(b"$")), st.none() | small_bytes), max_size=4
)


def records() -> st.SearchStrategy[Record]:
    """Any record that can be stored."""
    return st.builds(
        Record,
        payload=st.none() | st.binary(max_size=100),
        key=st.none() | small_bytes,
        headers=headers.map(tuple),
        timestamp=st.integers(1, 2**63 - 1),
        attributes=st.integers(0, 7),
    )


def numbered(count: int, *, first: int = 0, bytes_each: int = 20) -> list[Record]:
    """Records that tell their number."""
    return [
        Record(b"%d" % number + b"." * bytes_each, timestamp=NOW + number) for number in range(first, first + count)
    ]


def open_log(files: FileSystem, settings: LogSettings | None = None, clock: Clock | None = None) -> Log:
    files.make_folder(FOLDER)
    return Log(files, FOLDER, settings or LogSettings(), clock or ManualClock(NOW))


class Readable(Protocol):
    """What these helpers need of a log of any engine."""

    @property
    def first_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    def append(self, batch: RecordBatch) -> int: ...

    def read(self, offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk: ...


def append(log: Readable, records: Sequence[Record]) -> int:
    return log.append(encode_batch(records, log.next_offset))


def fill(log: Readable, count: int, *, batch: int = 10, bytes_each: int = 20) -> None:
    """Append numbered records in batches; each one's number is its offset."""
    for first in range(log.next_offset, log.next_offset + count, batch):
        append(log, numbered(min(batch, count), first=first, bytes_each=bytes_each))


def read_all(log: Readable, offset: int | None = None, bytes_max: int = 2**20) -> list[Record]:
    found: list[Record] = []
    offset = log.first_offset if offset is None else offset
    while offset < log.next_offset:
        chunk = log.read(offset, bytes_max)
        if chunk.data:
            found += iterate(decode_chunk(chunk.data))
        assert chunk.next_offset > offset
        offset = chunk.next_offset
    return found


def payloads(records: Iterable[Record]) -> list[bytes | None]:
    return [record.payload for record in records]


def number_of(record: Record) -> int:
    assert record.payload is not None
    return int(record.payload.split(b".")[0])
