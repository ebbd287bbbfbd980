"""The connections of engine `db`: one writer, readers, durability, and errors without secrets.

One connection writes, so that one lock keeps the order of commits and one session owns the database. A commit survives
a killed Babelbus. `make_durable` makes all commits before it survive a loss of power (group commit): it runs in the
flusher's thread and holds up no writer. `sqlite` and `postgresql` implement both.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL, Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from babelbus.storage.errors import DiskError, DiskFullError
from babelbus.storage.files import disk_error
from babelbus.storage.sql.ends import Ends

log = logging.getLogger(__name__)

SECRET_OPTIONS = ("password", "sslpassword", "passfile", "sslkey")


class Database(ABC):
    """One database. All methods may be called from any thread.

    `name` is the URL without user, password and options, for logs and errors. `failures` grows whenever the last
    commits are in doubt: after a lost connection or a failed flush. Writers then call `repair` and load again.
    """

    def __init__(self, url: URL, name: str, ends: Ends) -> None:
        self.name = name
        self.ends = ends
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
        self._written_bytes = 0
        self._durable_commits = -1

    # -- what SQLite and PostgreSQL do in their own ways -------------------------------------------------------------

    driver_error: type[Exception]
    """The class of all errors of the driver."""

    @staticmethod
    @abstractmethod
    def _is_full(error: BaseException) -> bool:
        """Return whether the driver's error says that the disk is full."""

    @staticmethod
    @abstractmethod
    def _is_conflict(error: BaseException) -> bool:
        """Return whether a record of this offset is there already: a commit that was in doubt did happen."""

    @abstractmethod
    def _make_engine(self) -> Engine:
        """Build the engine of SQLAlchemy."""

    @abstractmethod
    def _take(self) -> None:
        """Connect the writer, as the only one."""

    @abstractmethod
    def _leave(self) -> None:
        """Release what `_take` took."""

    @abstractmethod
    def _flush(self) -> None:
        """Flush what is committed."""

    @abstractmethod
    def _restore(self) -> None:
        """Repair the connections after a failure."""

    def is_there(self) -> bool:
        """Return whether anything can be stored there already."""
        return True

    def settle(self) -> None:
        """Flush everything and tidy up when it is time; the cleaner calls this now and then."""
        self.make_durable()

    # -- transactions ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect and own the database.

        Raises:
            FolderLockedError: another server owns it.
            DiskError: it cannot be reached.
        """
        with self._translated("opening"):
            self._take()
        self._closed = False

    def look(self) -> None:
        """Open the database for `read` alone, beside the server that owns it, until `close`."""
        self._closed = False

    @contextmanager
    def write(self, size_bytes: int = 0) -> Iterator[Connection]:
        """Run a transaction: all of the block or nothing. One at a time; another thread waits.

        `size_bytes` is about what the transaction writes.

        Raises:
            DiskFullError, DiskError: nothing was written; or, if `failures` has grown, this is unknown.
        """
        with self._writing:
            if self._broken or self._writer is None:
                raise DiskError(f"{self.name}: the connection was lost, or a flush failed; it is not repaired yet")
            with self._translated("write"):
                try:
                    with self._writer.begin():
                        yield self._writer
                except (SQLAlchemyError, self.driver_error) as error:
                    if self._is_lost(self._writer) or self._is_conflict(_cause(error)):
                        self._fail()
                    raise
            self._commits += 1
            self._written_bytes += size_bytes

    def doubt(self) -> None:
        """Record that the database is not as its writer knows it; `repair` must follow."""
        with self._writing:
            self._fail()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a connection that sees one state of the database.

        Raises:
            DiskError: it cannot be read.
        """
        with self._translated("read"), self._engine.connect() as connection, connection.begin():
            yield connection
        if self._closed:  # a read behind the end leaves no connection
            self._engine.dispose()

    # -- durability --------------------------------------------------------------------------------------------------

    def make_durable(self) -> None:
        """Return when everything committed before survives a loss of power.

        Raises:
            DiskError: it is unknown which commits do; `failures` has grown.
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
                except (OSError, SQLAlchemyError, self.driver_error):
                    self._fail()
                    raise
            self._durable_commits = target

    def _fail(self) -> None:
        self._broken = True
        self.failures += 1

    def repair(self) -> None:
        """Connect again after `failures` has grown. Commits that the database does not show then are lost.

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
        """Release the database; what was committed is committed, whatever fails here."""
        with self._flushing, self._writing:
            self._closed = True
            try:
                self._leave()
            except (SQLAlchemyError, self.driver_error) as error:
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
        except (SQLAlchemyError, self.driver_error) as error:
            text = f"{doing} of {self.name}: {self._text(error)}"
            raise (DiskFullError(text) if self._is_full(_cause(error)) else DiskError(text)) from None
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
