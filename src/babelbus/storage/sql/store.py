"""Engine `db`: the topics of one SQL database, SQLite or PostgreSQL, through SQLAlchemy Core (docs/storage.md).

Several topics share a database; one server owns it. `tables` is the schema, `database` the connections and durability,
`log` a partition, `queue` the appends that wait in front of it.
"""

import secrets
import threading
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Select, delete, func, insert, make_url, select, update
from sqlalchemy.exc import ArgumentError

from babelbus.clock import Clock
from babelbus.errors import StorageError
from babelbus.storage.contract import Fit, LogSettings
from babelbus.storage.files import FileSystem
from babelbus.storage.room import QUEUE_BYTES_MAX, Room
from babelbus.storage.sql.database import Database
from babelbus.storage.sql.queue import QueuedLog
from babelbus.storage.sql.sqlite import SqliteDatabase
from babelbus.storage.sql.tables import batches, make_tables, partitions, producers, topics

if TYPE_CHECKING:
    from babelbus.storage.sql.postgresql import PostgresqlDatabase

GRAVE_PREFIX = "removed-"
ERASED_TOGETHER = 50
"""Batches that one transaction erases."""
EXAMPLES = "sqlite:////var/lib/babelbus/db.sqlite, postgresql://user@host/database (its password in PGPASSWORD)"


class DatabaseUrlError(StorageError):
    """The URL of the database is malformed, or names a database that Babelbus does not speak to."""


class DatabaseStore:
    """The topics of one database; see `contract.Store`.

    Nothing is opened or made before a topic is: a server without topics of this engine has no file of it.
    """

    fit = Fit(appends_wait=True)

    def __init__(self, url: str, files: FileSystem, clock: Clock, *, queue_bytes_max: int = QUEUE_BYTES_MAX) -> None:
        """Check the URL of the database: `sqlite:///` and a path, or `postgresql://user@host/database`.

        Raises:
            DatabaseUrlError: the URL is malformed, or of another kind of database.
        """
        self._database = choose_database(url, files, clock)
        self._opening = threading.Lock()
        self._is_open = False
        self.name = self._database.name
        """The URL without user, password and options."""
        self._room = Room(queue_bytes_max)
        self._writers: dict[tuple[str, int], QueuedLog] = {}

    def _open(self) -> Database:
        with self._opening:
            if not self._is_open:
                try:
                    self._database.open()
                    with self._database.write() as connection:
                        make_tables(connection, self._database.name)
                    self._database.make_durable()  # a killed server may have left commits that are not
                except BaseException:
                    self._database.close()
                    raise
                self._is_open = True
        return self._database

    def _ask(self, query: Select[Any]) -> list[Any]:
        """Return the rows that a query finds; none, when nothing was ever stored."""
        if not self._is_open and not self._database.is_there():
            return []
        with self._open().read() as connection:
            return list(connection.execute(query).all())

    # -- topics ------------------------------------------------------------------------------------------------------

    def removed(self) -> dict[str, str]:
        """Return the topics whose removal was cut short by a crash: token for `erase` -> name of the topic."""
        return dict(self._ask(select(topics.c.removed, topics.c.name).where(topics.c.removed != "")))

    def partition_count(self, topic: str) -> int:
        """Return how many partitions of a topic are stored."""
        (found,) = self._ask(
            select(func.max(partitions.c.number))
            .join(topics, topics.c.id == partitions.c.topic_id)
            .where(topics.c.name == topic, topics.c.removed == "")
        ) or [(None,)]
        return 0 if found[0] is None else int(found[0]) + 1

    def open_partition(self, topic: str, partition: int, settings: LogSettings) -> QueuedLog:
        """Open a partition as its only writer, or make it; see `contract.Store`."""
        before = self._writers.get((topic, partition))
        if before is not None:
            before.fence_off()
        opened = QueuedLog(self._room, *self._claim(topic, partition), settings)
        self._writers[topic, partition] = opened
        return opened

    def _claim(self, topic: str, partition: int) -> tuple[Database, str, int, int, int]:
        """Register a writer of a partition by its next epoch; return what `DatabaseLog` begins with."""
        database = self._open()
        with database.write() as connection:
            topic_id = _topic_id(connection, topic)
            here = (partitions.c.topic_id == topic_id) & (partitions.c.number == partition)
            claim = update(partitions).where(here).values(epoch=partitions.c.epoch + 1)
            made = insert(partitions).values(topic_id=topic_id, number=partition, epoch=1)
            columns = (partitions.c.id, partitions.c.epoch)
            row = connection.execute(claim.returning(*columns)).one_or_none()
            number, epoch = row or connection.execute(made.returning(*columns)).one()
        if row is None:
            database.make_durable()
        return database, topic, partition, int(number), int(epoch)

    def hide(self, topic: str) -> str:
        """Remove a topic at once and durably; see `contract.Store`."""
        token = GRAVE_PREFIX + secrets.token_hex(8)
        database = self._open()
        for number in range(self.partition_count(topic)):  # else a new topic of this name would seem to lack records
            database.ends.remove(topic, number)
        with database.write() as connection:
            connection.execute(
                update(topics).where(topics.c.name == topic, topics.c.removed == "").values(removed=token)
            )
        database.make_durable()
        return token

    def erase(self, token: str) -> None:
        """Delete what `hide` took away, some batches at a time, so that nobody waits long."""
        database = self._open()
        of_topic = select(topics.c.id).where(topics.c.removed == token, topics.c.removed != "")
        for (number,) in self._ask(select(partitions.c.id).where(partitions.c.topic_id.in_(of_topic))):
            of_partition = batches.c.partition_id == number
            step = select(batches.c.base_offset).where(of_partition).order_by(batches.c.base_offset)
            while rows := self._ask(step.offset(ERASED_TOGETHER).limit(1)):
                with database.write() as connection:
                    connection.execute(delete(batches).where(of_partition, batches.c.base_offset < rows[0][0]))
            with database.write() as connection:
                for table in (batches, producers):
                    connection.execute(delete(table).where(table.c.partition_id == number))
                connection.execute(delete(partitions).where(partitions.c.id == number))
        with database.write() as connection:
            connection.execute(delete(topics).where(topics.c.id.in_(of_topic)))
        database.make_durable()

    def close(self) -> None:
        """Close the connections and return the database to whom wants it next."""
        with self._opening:
            self._is_open = False
            self._database.close()


def _topic_id(connection: Connection, name: str) -> int:
    """Return the number of a topic, which is made if it is new."""
    found = connection.execute(select(topics.c.id).where(topics.c.name == name, topics.c.removed == "")).scalar()
    if found is None:
        made = insert(topics).values(name=name, removed="").returning(topics.c.id)
        found = connection.execute(made).scalar_one()
    return int(found)


def choose_database(url: str, files: FileSystem, clock: Clock) -> Database:
    """Return the database of a URL, not yet opened.

    Raises:
        DatabaseUrlError: it is no URL, or of a database that Babelbus does not speak to.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise DatabaseUrlError("the URL of the database is malformed; examples: " + EXAMPLES) from None
    kind = parsed.drivername.partition("+")[0]
    if kind == "sqlite":
        if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
            raise DatabaseUrlError("SQLite needs the path of a file; for topics in memory there is the engine 'memory'")
        return SqliteDatabase(parsed.set(drivername="sqlite+pysqlite"), f"sqlite:///{parsed.database}", files, clock)
    if kind in ("postgresql", "postgres"):
        host = parsed.host or ""
        name = f"postgresql://{host}{f':{parsed.port}' if parsed.port else ''}/{parsed.database or ''}"
        return _postgresql_database()(parsed.set(drivername="postgresql+psycopg"), name, clock)
    raise DatabaseUrlError(f"there is no database {kind!r}; examples: {EXAMPLES}")


def _postgresql_database() -> "type[PostgresqlDatabase]":
    try:
        from babelbus.storage.sql.postgresql import PostgresqlDatabase
    except ModuleNotFoundError as error:
        raise DatabaseUrlError(
            f"PostgreSQL needs the package {error.name}, which is not installed: pip install 'babelbus[postgres]'"
        ) from error
    return PostgresqlDatabase
