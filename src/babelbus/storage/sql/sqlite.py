"""SQLite for engine `db`: one file with its WAL, owned through a lock file beside it.

`synchronous = NORMAL` writes a commit to the WAL and does not flush it. `make_durable` calls `fdatasync` on the WAL
through the file layer, which needs no lock of SQLite. What SQLite has moved from the WAL into the database it flushed
itself before it used the WAL's space again.
"""

import logging
import sqlite3
from collections.abc import Sequence
from itertools import chain
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from babelbus.storage.errors import DiskError, FolderLockedError
from babelbus.storage.files import File, FileSystem
from babelbus.storage.sql.connection import Database
from babelbus.storage.sql.rows import Rows

log = logging.getLogger(__name__)

BUSY_SECONDS = 2.0
"""How long a write waits for another program that writes to the same file."""
PAGE_BYTES = 8192
MOVE_BYTES = 8 * 2**20
"""When so much was written, the flusher moves the WAL into the database."""
WAL_PAGES_MAX = 64 * 2**20 // PAGE_BYTES
"""From here on the writer does it, if the flusher does not get to it."""
INSERT_SIZES = (256, 64, 16, 4, 1)
"""Rows of one INSERT: SQLite takes many of one statement twice as fast as `executemany`, and keeps each of these."""


class SqliteDatabase(Database):
    """A file of SQLite, owned by one server through a lock file beside it; other programs may read it meanwhile."""

    select = (
        'SELECT "offset", timestamp, attributes, crc, key, payload, headers FROM records'
        ' WHERE partition_id = ? AND "offset" >= ? AND "offset" < ? ORDER BY "offset" LIMIT ?'
    )

    def __init__(self, url: URL, name: str, files: FileSystem) -> None:
        self._files = files
        self._path = url.database or ""
        self._lock: File | None = None
        self._wal: File | None = None
        self._unmoved_bytes = 0
        super().__init__(url, name)

    def _make_engine(self) -> Engine:
        engine = create_engine(
            self._url,
            hide_parameters=True,
            poolclass=QueuePool,
            max_overflow=-1,
            connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False},
        )
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def is_there(self) -> bool:
        """Return whether the file is there."""
        return self._files.exists(self._path)

    def _take(self) -> None:
        folder = self._path.rpartition("/")[0] or "."
        self._files.make_folder(folder)
        try:
            self._lock = self._files.lock(f"{self._path}.lock")
        except FolderLockedError as error:
            owner = str(error).partition(" in use by ")[2].partition(";")[0]
            raise FolderLockedError(f"{self.name} is in use by {owner}; one server owns a database") from None
        self._connect()
        self._files.flush_folder(folder)

    def _connect(self) -> None:
        self._writer = self._engine.connect().execution_options(babelbus_write=True)
        with self._writer.begin():
            self._writer.exec_driver_sql("SELECT count(*) FROM sqlite_master").fetchall()  # makes the WAL
        self._wal = self._files.open(f"{self._path}-wal")

    def _leave(self) -> None:
        try:
            if self._wal is not None:
                self._wal.close()
            if self._writer is not None:
                self._writer.close()
            self._engine.dispose()  # the last connection moves the WAL into the file and removes it
        finally:
            self._wal = self._writer = None
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _flush(self) -> None:
        assert self._wal is not None
        unmoved = self._unmoved_bytes
        self._wal.flush()
        if unmoved >= MOVE_BYTES:
            self._unmoved_bytes -= unmoved
            try:
                with self._engine.connect() as connection:
                    _checkpoint(connection, "PASSIVE")
            except (SQLAlchemyError, sqlite3.Error) as error:  # all is durable in the WAL, which only grows
                log.warning("%s: its WAL is not moved: %s", self.name, error)

    def _restore(self) -> None:
        """Let SQLite move what the system still gives back of the WAL into the database, and begin the WAL anew.

        Pages of a failed flush may be dropped without a further word, so the WAL is not used beyond that point. Whether
        what came back is what was written, the CRCs of the records tell.
        """
        if self._wal is not None:
            self._wal.close()
            self._wal = None
        if self._writer is not None and self._is_lost(self._writer):
            self._writer.close()
            self._writer = None
        if self._writer is None:
            self._connect()
        assert self._writer is not None
        with self._engine.connect() as connection:
            busy = _checkpoint(connection, "TRUNCATE")
        if busy:
            raise DiskError(f"{self.name}: another program reads it just now, and keeps its WAL from being repaired")
        self._wal = self._files.open(f"{self._path}-wal")

    def insert(self, connection: Connection, partition_id: int, base_offset: int, rows: Rows) -> None:
        """Insert the rows with the offsets `base_offset` and up, within the transaction of `connection`."""
        columns: tuple[Sequence[Any], ...] = (rows.timestamps, rows.crcs, rows.payloads)
        kind = "plain"
        if rows.attributes is not None and rows.keys is not None and rows.headers is not None:
            columns = (*columns, rows.attributes, rows.keys, rows.headers)
            kind = "full"
        # Past SQLAlchemy's cursor, which costs as much as ten rows: a batch of 100 is four statements.
        driver: Any = connection.connection.dbapi_connection
        done = 0
        for size in INSERT_SIZES:
            statement = INSERTS[kind, size]
            while len(rows) - done >= size:
                values = chain.from_iterable(zip(*(column[done : done + size] for column in columns), strict=True))
                driver.execute(statement, (partition_id, base_offset + done, *values)).close()
                done += size
        self._unmoved_bytes += rows.size_bytes


def _insert_statement(kind: str, size: int) -> str:
    """Return the INSERT of `size` rows: partition and first offset are given once, then each row's columns."""
    names, width, default = ("timestamp, crc, payload, attributes", 3, ", 0")
    if kind == "full":
        names, width, default = ("timestamp, crc, payload, attributes, key, headers", 6, "")
    rows = [
        f"(?1, ?2 + {number}, {', '.join(f'?{3 + number * width + column}' for column in range(width))}{default})"
        for number in range(size)
    ]
    return f'INSERT INTO records (partition_id, "offset", {names}) VALUES {", ".join(rows)}'  # noqa: S608  # names alone


INSERTS = {(kind, size): _insert_statement(kind, size) for kind in ("plain", "full") for size in INSERT_SIZES}


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not where the driver thinks
    for pragma in (
        f"page_size = {PAGE_BYTES}",  # of a new file
        "journal_mode = WAL",
        "synchronous = NORMAL",
        f"wal_autocheckpoint = {WAL_PAGES_MAX}",
        "cache_size = -16384",  # KiB
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: Connection) -> None:
    # A write takes the lock at once: one that begins as a read and then writes can be refused without a wait.
    immediate = connection.get_execution_options().get("babelbus_write")
    driver: Any = connection.connection.dbapi_connection
    driver.execute("BEGIN IMMEDIATE" if immediate else "BEGIN").close()


def _checkpoint(connection: Connection, mode: str) -> bool:
    """Move the WAL into the database; return whether another program kept it from finishing."""
    driver = connection.connection.dbapi_connection
    assert driver is not None
    cursor = driver.cursor()  # outside of a transaction, in which SQLite does not do it
    try:
        cursor.execute(f"PRAGMA wal_checkpoint({mode})")
        row = cursor.fetchone()
        assert row is not None  # the pragma always gives one
        return bool(row[0])
    finally:
        cursor.close()
