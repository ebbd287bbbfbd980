"""SQLite for engine `db`: one file with its WAL, owned through a lock file beside it.

`synchronous = NORMAL` writes a commit to the WAL and does not flush it. `make_durable` calls `fdatasync` on the WAL
through the file layer, which needs no lock of SQLite and serves all commits before it. SQLite itself flushes what it
folds from the WAL into the database before it uses the space of the WAL again.
"""

import logging
import sqlite3
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import QueuePool

from babelbus.clock import Clock
from babelbus.storage.errors import DiskError, FolderLockedError
from babelbus.storage.files import File, FileSystem
from babelbus.storage.sql.database import Database
from babelbus.storage.sql.ends import Ends

log = logging.getLogger(__name__)

BUSY_SECONDS = 2.0
"""How long a write waits for another program that writes to the same file."""
PAGE_BYTES = 8192
FOLD_BYTES = 8 * 2**20
"""When this much was written, the next flush folds the WAL into the database."""
FOLD_SECONDS = 60.0
"""After this time, a flush or the cleaner folds the WAL although less was written."""
WAL_PAGES_MAX = 64 * 2**20 // PAGE_BYTES
"""At this size the writer folds the WAL, if no flush did."""


class SqliteDatabase(Database):
    """A file of SQLite, owned by one server through a lock file beside it; other programs may read it meanwhile."""

    driver_error = sqlite3.Error

    @staticmethod
    def _is_full(error: BaseException) -> bool:
        return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL

    @staticmethod
    def _is_conflict(error: BaseException) -> bool:
        return isinstance(error, sqlite3.IntegrityError)

    def __init__(self, url: URL, name: str, files: FileSystem, clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._path = url.database or ""
        self._lock: File | None = None
        self._wal: File | None = None
        self._folded = (0, 0)
        self._folded_at = clock.monotonic()
        super().__init__(url, name, Ends(files, f"{self._path}.ends", clock))

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
        self.ends.load()
        self._files.open(self._path, create=True).close()  # SQLite gives the file, WAL and index the mode of the file
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
            self.ends.close()
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _flush(self) -> None:
        assert self._wal is not None
        commits, written_bytes = self._commits, self._written_bytes
        self._wal.flush()
        if written_bytes - self._folded[1] >= FOLD_BYTES or self._fold_is_due():
            self._fold(commits, written_bytes)

    def settle(self) -> None:
        """Flush everything, and fold the WAL into the database if the last time is long ago."""
        super().settle()
        with self._flushing:
            if not self._broken and self._fold_is_due():
                self._fold(self._commits, self._written_bytes)

    def _fold_is_due(self) -> bool:
        return self._commits > self._folded[0] and self._clock.monotonic() - self._folded_at >= FOLD_SECONDS

    def _fold(self, commits: int, written_bytes: int) -> None:
        self._folded, self._folded_at = (commits, written_bytes), self._clock.monotonic()
        try:
            with self._engine.connect() as connection:
                _checkpoint(connection, "PASSIVE")
        except (SQLAlchemyError, sqlite3.Error) as error:  # everything is durable in the WAL, which only grows
            log.warning("%s: its WAL is not folded into the database: %s", self.name, error)

    def _restore(self) -> None:
        """Move what the system still gives back of the WAL into the database, and begin the WAL anew.

        The system may drop pages of a failed flush without an error, so the WAL is not used beyond that point. The
        CRCs of the records tell whether what came back is what was written.
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
    """Move the WAL into the database; return whether another program kept the move from finishing."""
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
