"""The connections of engine `db`: who writes, who reads, what makes commits durable, and what errors mean.

One connection writes, so that one lock keeps the order of commits and one session owns the database. A commit survives
a killed Babelbus; `make_durable` is what survives a loss of power, and is shared by all that was committed before it
began (group commit): it runs in the flusher's thread and holds up no writer. How, `database_sqlite` and
`database_postgresql` say.
"""

import logging
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from babelbus.storage.errors import DiskError, DiskFullError
from babelbus.storage.files import disk_error
from babelbus.storage.sql.rows import Row, Rows
from babelbus.storage.sql.tables import make_tables

log = logging.getLogger(__name__)

DRIVER_ERRORS = (sqlite3.Error, psycopg.Error)
SECRET_OPTIONS = ("password", "sslpassword", "passfile", "sslkey")
DISK_FULL_STATE = "53100"


class Database(ABC):
    """One database. All calls may come from any thread.

    `name` is the URL without user, password and options, for logs and errors. `failures` grows whenever it is unknown
    what of the last commits is there: a lost connection, a failed flush. Who wrote then asks `repair` and looks again.
    """

    select = ""

    def __init__(self, url: URL, name: str) -> None:
        self.name = name
        self.failures = 0
        options = [url.query.get(key) for key in SECRET_OPTIONS]
        self._secrets = [value for value in (url.password, *options) if isinstance(value, str) and value]
        self._url = url
        self._engine = self._make_engine()
        self._writing = threading.RLock()
        self._flushing = threading.RLock()
        self._writer: Connection | None = None
        self._broken = False
        self._closed = True
        self._commits = 0
        self._durable_commits = -1

    # -- what SQLite and PostgreSQL do in their own ways -------------------------------------------------------------

    @abstractmethod
    def _make_engine(self) -> Engine:
        """Build the engine of SQLAlchemy."""

    @abstractmethod
    def _take(self) -> None:
        """Connect the writer, as the only one."""

    @abstractmethod
    def _leave(self) -> None:
        """Give up what `_take` took."""

    @abstractmethod
    def _flush(self) -> None:
        """Make durable what is committed."""

    @abstractmethod
    def _restore(self) -> None:
        """Put the connections right after a failure."""

    def is_there(self) -> bool:
        """Return whether anything can be stored there already."""
        return True

    @abstractmethod
    def insert(self, connection: Connection, partition_id: int, base_offset: int, rows: Rows) -> None:
        """Insert the rows with the offsets `base_offset` and up, within the transaction of `connection`."""

    # -- transactions ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect, own the database, make the tables.

        Raises:
            FolderLockedError: another server owns it.
            SchemaVersionError: the tables are of another version.
            DiskError: it cannot be reached.
        """
        try:
            with self._translated("opening"):
                self._take()
            self._closed = False
            with self.write() as connection:
                make_tables(connection, self.name)
            self.make_durable()
        except BaseException:
            self.close()
            raise

    def look(self) -> None:
        """Let `read` and `fetch` be used beside the server that owns the database, until `close`."""
        self._closed = False

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Run a transaction: all of the block or nothing. One at a time; another thread waits.

        Raises:
            DiskFullError, DiskError: nothing of it was done; or, if `failures` has grown, this is unknown.
        """
        with self._writing:
            if self._broken or self._writer is None:
                raise DiskError(f"{self.name}: the connection was lost, or a flush failed; it is not repaired yet")
            with self._translated("write"):
                try:
                    with self._writer.begin():
                        yield self._writer
                except (SQLAlchemyError, *DRIVER_ERRORS) as error:
                    if self._is_lost(self._writer) or _is_conflict(error):
                        self._fail()
                    raise
            self._commits += 1

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Lend a connection that sees one state of the database.

        Raises:
            DiskError: it cannot be read.
        """
        with self._translated("read"), self._engine.connect() as connection, connection.begin():
            yield connection
        if self._closed:  # who reads after the end leaves no connection behind
            self._engine.dispose()

    def fetch(self, partition_id: int, offset: int, end_offset: int, limit: int) -> Sequence[Row]:
        """Give up to `limit` records of a partition with offsets in [`offset`, `end_offset`), in order.

        Raises:
            DiskError: they cannot be read.
        """
        with self.read() as connection:
            found = connection.exec_driver_sql(self.select, (partition_id, offset, end_offset, limit))
            rows: Sequence[Row] = found.cursor.fetchall()  # plain tuples cost half of SQLAlchemy's rows
            return rows

    # -- durability --------------------------------------------------------------------------------------------------

    def make_durable(self) -> None:
        """Return when everything committed before survives a loss of power.

        Raises:
            DiskError: what of it does is unknown; `failures` has grown.
        """
        with self._flushing:
            if self._broken:
                raise DiskError(f"{self.name}: a flush failed, or the connection was lost")
            target = self._commits
            if self._durable_commits >= target:
                return
            with self._translated("flush"):
                try:
                    self._flush()
                except (OSError, SQLAlchemyError, *DRIVER_ERRORS):
                    self._fail()
                    raise
            self._durable_commits = target

    def _fail(self) -> None:
        self._broken = True
        self.failures += 1

    def repair(self) -> None:
        """After `failures` has grown: connect again. What is in the database then is all that there is.

        Raises:
            StorageError: it does not work yet; try again later.
        """
        with self._flushing, self._writing:
            if self._broken:
                with self._translated("repair"):
                    self._restore()
                self._broken = False
                self._durable_commits = -1  # nothing is vouched for any more
                log.warning("%s: works again", self.name)

    def close(self) -> None:
        """Give the database back; what was committed is committed, whatever fails here."""
        with self._flushing, self._writing:
            self._closed = True
            try:
                self._leave()
            except (SQLAlchemyError, *DRIVER_ERRORS) as error:
                log.warning("closing %s: %s", self.name, self._text(error))
            self._engine.dispose()

    # -- errors ------------------------------------------------------------------------------------------------------

    def _is_lost(self, connection: Connection) -> bool:
        """Return whether the connection is gone, and with it the word on the last commit."""
        if connection.closed or connection.invalidated:
            return True
        return bool(getattr(connection.connection.dbapi_connection, "closed", False))

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        """Raise errors of ours for those of the drivers, without statements, values and secrets."""
        try:
            yield
        except (SQLAlchemyError, *DRIVER_ERRORS) as error:
            text = f"{doing} of {self.name}: {self._text(error)}"
            raise (DiskFullError(text) if _is_full(_cause(error)) else DiskError(text)) from None
        except OSError as error:
            raise disk_error(error, f"{doing} of {self.name}") from error

    def _text(self, error: Exception) -> str:
        text = " ".join(str(_cause(error)).split()) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


def _cause(error: BaseException) -> BaseException:
    """Return the driver's error behind one of SQLAlchemy's."""
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def _is_full(error: BaseException) -> bool:
    if isinstance(error, psycopg.Error):
        return error.sqlstate == DISK_FULL_STATE
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _is_conflict(error: BaseException) -> bool:
    """Return whether a record of this offset is there already: a commit that was in doubt did happen."""
    return isinstance(_cause(error), psycopg.errors.UniqueViolation | sqlite3.IntegrityError)
