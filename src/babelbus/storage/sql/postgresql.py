"""PostgreSQL for engine `db`: a schema of a database, owned through an advisory lock of the writer's session.

The writer's session has `synchronous_commit = off`: a commit survives a killed Babelbus, and waits for no disk.
`make_durable` commits one small change in a session that waits for the disk (and for synchronous standbys, if there
are any), and with it all that was committed before. Both sessions live as long as each other: if PostgreSQL crashes
and loses commits, no flush can say that they are durable.
"""

import logging
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine
from sqlalchemy.exc import OperationalError

from babelbus.clock import Clock
from babelbus.storage.errors import FolderLockedError
from babelbus.storage.memory import MemoryFiles
from babelbus.storage.sql.database import Database
from babelbus.storage.sql.ends import Ends
from babelbus.storage.sql.tables import meta

log = logging.getLogger(__name__)

CONNECT_SECONDS = 5
LOCK_SECONDS = 2
"""How long a start waits for the owner: a server that has just stopped may not be gone yet."""
DISK_FULL_STATE = "53100"
LOCK_KEY = 1_650_549_365
"""First half of the key of the advisory lock; the second is the schema."""


class _BinaryCursor(psycopg.Cursor[Any]):
    """A cursor whose results come as bytes: a batch as text is twice as large, and is decoded twice."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.format = psycopg.pq.Format.BINARY


class PostgresqlDatabase(Database):
    """A schema of a PostgreSQL database, owned by one server through an advisory lock of the writer's session."""

    driver_error = psycopg.Error

    @staticmethod
    def _is_full(error: BaseException) -> bool:
        return isinstance(error, psycopg.Error) and error.sqlstate == DISK_FULL_STATE

    @staticmethod
    def _is_conflict(error: BaseException) -> bool:
        return isinstance(error, psycopg.errors.UniqueViolation)

    def __init__(self, url: URL, name: str, clock: Clock) -> None:
        self._syncer: Connection | None = None
        super().__init__(url, name, Ends(MemoryFiles(), "ends", clock))

    def _make_engine(self) -> Engine:
        wanted: dict[str, Any] = {
            "connect_timeout": CONNECT_SECONDS,
            "keepalives_idle": 30,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            "application_name": "babelbus",
            "cursor_factory": _BinaryCursor,
        }
        return create_engine(
            self._url,
            hide_parameters=True,
            pool_pre_ping=True,
            max_overflow=-1,
            connect_args={key: value for key, value in wanted.items() if key not in self._url.query},
        )

    def _take(self) -> None:
        self._writer = self._engine.connect()
        with self._writer.begin():
            self._lock(self._writer)
            self._writer.exec_driver_sql("SET synchronous_commit = off")
            # Publishers are told within this time when somebody has locked a table.
            self._writer.exec_driver_sql(f"SET lock_timeout = '{LOCK_SECONDS}s'")
            # So that the server notices soon when our machine is gone, and gives the lock back.
            for setting, value in (("idle", 30), ("interval", 5), ("count", 3)):
                self._writer.exec_driver_sql(f"SET tcp_keepalives_{setting} = {value}")
        self._syncer = self._engine.connect()
        with self._syncer.begin():
            self._syncer.exec_driver_sql("SET synchronous_commit = on")
            if self._syncer.exec_driver_sql("SHOW fsync").scalar() != "on":
                log.warning("%s: its server runs with fsync = off: nothing survives a loss of power", self.name)

    def _lock(self, connection: Connection) -> None:
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
        try:
            connection.exec_driver_sql(
                f"SELECT pg_advisory_lock({LOCK_KEY}, hashtext(coalesce(current_schema(), '')))"
            ).fetchall()
        except OperationalError as error:
            if not isinstance(error.orig, psycopg.errors.LockNotAvailable):
                raise
            raise FolderLockedError(f"{self.name} is in use by another server; one server owns a database") from None

    def _leave(self) -> None:
        for connection in (self._writer, self._syncer):
            if connection is not None:
                connection.invalidate()  # the session ends, and the lock with it
                connection.close()
        self._writer = self._syncer = None

    def _restore(self) -> None:
        """Begin new sessions. The lock says that the old ones are gone, so that no commit of theirs can follow."""
        self._leave()
        self._engine.dispose()
        self._take()

    def _flush(self) -> None:
        # The session is as old as the writer's: had the server lost commits since, this one would be lost as well.
        assert self._syncer is not None
        with self._syncer.begin():
            self._syncer.execute(meta.update().where(meta.c.name == "flush").values(value=meta.c.value + 1))
