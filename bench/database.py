"""Engine `db`: appending to and reading from SQLite and PostgreSQL. One process, one thread, 100-byte payloads.

An append is one transaction. PostgreSQL is a server of the measurement's own, on a UNIX socket.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from babelbus.clock import SystemClock
from babelbus.records.format import encode_payloads
from babelbus.storage.contract import LogSettings
from babelbus.storage.files import LocalFiles
from babelbus.storage.sql.queue import QueuedLog
from babelbus.storage.sql.store import DatabaseStore
from bench.frame import PeerMissingError, Reading, figure
from bench.workload import PAYLOAD, SECONDS, scratch_folder
from tests.support.postgres import PostgresMissingError, PostgresServer, postgres_server

BATCH_RECORDS = 1_000
SMALL_BATCH_RECORDS = 100
READ_RECORDS = 300_000
READ_BYTES = 4 * 2**20
FLUSH_BYTES = 32 * 2**20
"""How often the broker has a topic flushed that does not ask for it: half of `storage.checkpoint_bytes`."""
MIB = 2**20


@contextmanager
def _open(url: str) -> Iterator[QueuedLog]:
    store = DatabaseStore(url, LocalFiles(), SystemClock())
    try:
        yield store.open_partition("bench", 0, LogSettings())
    finally:
        store.close()


def _append(log: QueuedLog, batch_records: int) -> float:
    """Encode and append batches for a while; give records/s, the last flush included."""
    payloads, timestamps = [PAYLOAD] * batch_records, [1_700_000_000_000] * batch_records
    records = unflushed = 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < SECONDS:
        batch = encode_payloads(payloads, timestamps, log.next_offset)
        log.append(batch)
        log.durable(sync=False)
        records += batch_records
        unflushed += len(batch.data)
        if unflushed >= FLUSH_BYTES:
            log.durable()
            unflushed = 0
    log.durable()
    return records / (time.perf_counter() - begun)


def _read(log: QueuedLog) -> float:
    """Read all of a partition in large chunks; give MiB/s of stored records."""
    begun = time.perf_counter()
    offset = size = 0
    while offset < log.next_offset:
        chunk = log.read(offset, READ_BYTES)
        offset = chunk.next_offset
        size += len(chunk.data)
    return size / MIB / (time.perf_counter() - begun)


def _fill(log: QueuedLog) -> None:
    payloads, timestamps = [PAYLOAD] * BATCH_RECORDS, [1_700_000_000_000] * BATCH_RECORDS
    while log.next_offset < READ_RECORDS:
        log.append(encode_payloads(payloads, timestamps, log.next_offset))
        log.durable(sync=False)
    log.durable()


def _appending(url: str) -> Reading:
    with _open(url) as log:
        small = _append(log, SMALL_BATCH_RECORDS)
        return Reading(_append(log, BATCH_RECORDS), f"{small:,.0f}/s in batches of {SMALL_BATCH_RECORDS}")


@figure("db.sqlite_append", unit="records/s", target=150_000)
def sqlite_append() -> Iterator[Reading]:
    """Batches of 1,000 into a new file each time, flushed every 32 MiB; the note says batches of 100."""
    while True:
        with scratch_folder() as folder:
            yield _appending(f"sqlite:///{folder}/db.sqlite")


@figure("db.sqlite_read", unit="MiB/s")
def sqlite_read() -> Iterator[Reading]:
    """Stored records out of SQLite, put together from rows and checked."""
    with scratch_folder() as folder, _open(f"sqlite:///{folder}/db.sqlite") as log:
        _fill(log)
        while True:
            yield Reading(_read(log))


@contextmanager
def _postgres() -> Iterator[PostgresServer]:
    try:
        with postgres_server() as server:
            yield server
    except PostgresMissingError as missing:
        raise PeerMissingError(str(missing)) from missing


@figure("db.postgresql_append", unit="records/s")
def postgresql_append() -> Iterator[Reading]:
    """The same into PostgreSQL, by COPY; `written` does not wait for its disk, a flush does."""
    with _postgres() as server:
        while True:
            yield _appending(server.url())


@figure("db.postgresql_read", unit="MiB/s")
def postgresql_read() -> Iterator[Reading]:
    """Stored records out of PostgreSQL."""
    with _postgres() as server, _open(server.url()) as log:
        _fill(log)
        while True:
            yield Reading(_read(log))
