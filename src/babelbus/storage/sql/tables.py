"""The tables of engine `db`, the same in SQLite and PostgreSQL (docs/storage.md).

`records` holds one row a record, so that SQL can ask for them beside the bus:

    SELECT r."offset", r.payload FROM records r JOIN partitions p ON p.id = r.partition_id
    JOIN topics t ON t.id = p.topic_id WHERE t.name = 'news' AND t.removed = '' ORDER BY p.number, r."offset"

A `range` is a run of a partition's records, about 1 MiB: what is known of it (greatest time, size) stands in one row,
so that retention and a search by time look at ranges and not at records. The last one of a partition is open.
"""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    inspect,
    select,
)

from babelbus.errors import StorageError

SCHEMA_VERSION = 1

metadata = MetaData()
_STRICT: dict[str, Any] = {"sqlite_strict": True}
_Big = BigInteger().with_variant(Integer, "sqlite")
_Small = SmallInteger().with_variant(Integer, "sqlite")

meta = Table(
    "babelbus", metadata, Column("name", Text, primary_key=True), Column("value", _Big, nullable=False), **_STRICT
)
topics = Table(
    "topics",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("removed", Text, nullable=False, default=""),
    Column("settings", LargeBinary),
    UniqueConstraint("name", "removed"),
    **_STRICT,
)
partitions = Table(
    "partitions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("topic_id", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    # Records in front of this offset may be missing because compaction looked at them.
    Column("compacted_until", _Big, nullable=False, default=0),
    UniqueConstraint("topic_id", "number"),
    **_STRICT,
)
ranges = Table(
    "ranges",
    metadata,
    Column("partition_id", Integer, primary_key=True, autoincrement=False),
    Column("base_offset", _Big, primary_key=True, autoincrement=False),
    # Of the open range only the base is kept: the rest is counted at the start, and costs nothing at an append.
    Column("next_offset", _Big),
    Column("greatest_timestamp", _Big, nullable=False),
    Column("size_bytes", _Big, nullable=False),
    Column("gaps", _Small, nullable=False),
    sqlite_with_rowid=False,
    **_STRICT,
)
records = Table(
    "records",
    metadata,
    Column("partition_id", Integer, primary_key=True, autoincrement=False),
    Column("offset", _Big, primary_key=True, autoincrement=False),
    Column("timestamp", _Big, nullable=False),
    Column("attributes", _Small, nullable=False),
    Column("crc", _Big, nullable=False),
    Column("key", LargeBinary),
    Column("payload", LargeBinary),
    Column("headers", LargeBinary),
    sqlite_with_rowid=False,
    **_STRICT,
)
producers = Table(
    "producers",
    metadata,
    Column("partition_id", Integer, primary_key=True, autoincrement=False),
    Column("base_offset", _Big, primary_key=True, autoincrement=False),
    Column("producer_id", _Big, nullable=False),
    Column("first_sequence", _Big, nullable=False),
    Column("count", Integer, nullable=False),
    sqlite_with_rowid=False,
    **_STRICT,
)


class SchemaVersionError(StorageError):
    """The tables were made by a newer Babelbus, or are none of ours."""


def make_tables(connection: Connection, name: str) -> None:
    """Build the tables in an empty database, or see that those which are there are ours.

    Raises:
        SchemaVersionError: they are not, or of another version; nothing was changed.
    """
    if not find_tables(connection, name):
        metadata.create_all(connection)
        connection.execute(meta.insert(), [{"name": "schema", "value": SCHEMA_VERSION}, {"name": "flush", "value": 0}])


def find_tables(connection: Connection, name: str) -> bool:
    """Return whether our tables are there.

    Raises:
        SchemaVersionError: tables of these names are there and not ours, or of another version.
    """
    found = set(inspect(connection).get_table_names())
    if meta.name not in found:
        strangers = sorted(found & set(metadata.tables))
        if strangers:
            raise SchemaVersionError(f"{name} has a table {strangers[0]!r} that is not ours; use another database")
        return False
    version = connection.execute(select(meta.c.value).where(meta.c.name == "schema")).scalar()
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"the tables in {name} have version {version}, this Babelbus knows version {SCHEMA_VERSION};"
            " they were made by another release, which can read them"
        )
    return True
