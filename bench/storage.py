"""The log by itself: appending, and reading into columns and records. One process, one thread, 100-byte payloads."""

import time
from collections.abc import Callable, Iterator

from babelbus.clock import SystemClock
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.format import encode_payloads
from babelbus.storage.contract import LogSettings
from babelbus.storage.disk.log import Log
from babelbus.storage.files import LocalFiles
from bench.frame import Reading, figure
from bench.peers import raw
from bench.workload import PAYLOAD, SECONDS, scratch_folder

BATCH_RECORDS = 1_000
PAYLOADS = [PAYLOAD] * BATCH_RECORDS
TIMESTAMPS = [1_700_000_000_000] * BATCH_RECORDS
READ_RECORDS = 1_000_000
READ_BYTES = 4 * 2**20


def make_chunk() -> bytes:
    """Give the bytes of one batch as they are stored."""
    return bytes(encode_payloads(PAYLOADS, TIMESTAMPS).data)


def _open(folder: str) -> Log:
    return Log(LocalFiles(), f"{folder}/0", LogSettings(), SystemClock())


@figure(
    "storage.append",
    unit="records/s",
    target=600_000,
    peers=[raw.writing(make_chunk, records_per_chunk=BATCH_RECORDS)],
)
def append() -> Iterator[Reading]:
    """Encode and write batches of 1,000; the peer writes bytes that are ready."""
    while True:
        with scratch_folder() as folder:
            log, records = _open(folder), 0
            begun = time.perf_counter()
            while (passed := time.perf_counter() - begun) < SECONDS:
                log.append(encode_payloads(PAYLOADS, TIMESTAMPS, log.next_offset))
                records += BATCH_RECORDS
            log.close()
        yield Reading(records / passed)


def _reading(read: Callable[[Log, int], tuple[int, int]]) -> Iterator[Reading]:
    """Read a log of a million records to its end with `read(log, offset) -> (next offset, records)`, in records/s."""
    with scratch_folder() as folder:
        log = _open(folder)
        while log.next_offset < READ_RECORDS:
            log.append(encode_payloads(PAYLOADS, TIMESTAMPS, log.next_offset))
        log.close()
        log = _open(folder)
        while True:
            begun = time.perf_counter()
            offset = records = 0
            while offset < READ_RECORDS:
                offset, count = read(log, offset)
                records += count
            assert records == READ_RECORDS
            yield Reading(records / (time.perf_counter() - begun))


def _read_columns(log: Log, offset: int) -> tuple[int, int]:
    chunk = log.read(offset, READ_BYTES)
    return chunk.next_offset, len(decode_chunk(chunk.data, verified=True))


def _read_columns_verified(log: Log, offset: int) -> tuple[int, int]:
    chunk = log.read(offset, READ_BYTES)
    return chunk.next_offset, len(decode_chunk(chunk.data))


def _read_records(log: Log, offset: int) -> tuple[int, int]:
    chunk = log.read(offset, READ_BYTES)
    records = 0
    for _record in iterate(decode_chunk(chunk.data, verified=True)):
        records += 1
    return chunk.next_offset, records


@figure(
    "storage.read_columns",
    unit="records/s",
    target=8_000_000,
    peers=[raw.reading(make_chunk, records_per_chunk=BATCH_RECORDS)],
)
def read_columns() -> Iterator[Reading]:
    """Bulk reading as Spark will do it: bytes checked by the CRC-32C of each block, every field into an array."""
    return _reading(_read_columns)


@figure(
    "storage.read_columns_verified",
    unit="records/s",
    target=2_000_000,
    peers=[raw.reading(make_chunk, records_per_chunk=BATCH_RECORDS)],
)
def read_columns_verified() -> Iterator[Reading]:
    """The same, with every record's own CRC checked on top."""
    return _reading(_read_columns_verified)


@figure("storage.read_records", unit="records/s", target=700_000)
def read_records() -> Iterator[Reading]:
    """A Python object for each record."""
    return _reading(_read_records)
