"""The tables of engine `db`, the same in SQLite and PostgreSQL (docs/storage.md): one row holds one batch of records.

Invariant: the rows of a partition follow each other without a hole, each from its `base_offset` to its `next_offset`;
a hole is damage. The row in `partitions` changes with each append in the same transaction: it fences stale writers by
its `epoch`, and its `next_offset` tells where the last batch must end.
"""

from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    event,
    inspect,
    select,
)

from babelbus.errors import StorageError

SCHEMA_VERSION = 2

metadata = MetaData()
STRICT: dict[str, Any] = {"sqlite_strict": True}
Big = BigInteger().with_variant(Integer, "sqlite")

meta = Table(
    "babelbus", metadata, Column("name", Text, primary_key=True), Column("value", Big, nullable=False), **STRICT
)
topics = Table(
    "topics",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("removed", Text, nullable=False, default=""),
    Column("settings", LargeBinary),
    UniqueConstraint("name", "removed"),
    **STRICT,
)
partitions = Table(
    "partitions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("topic_id", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    # Records in front of this offset may be missing because compaction removed them.
    Column("compacted_until", Big, nullable=False, default=0),
    # Opening a partition increments the epoch; a writer with a lower one is refused.
    Column("epoch", Big, nullable=False, server_default="0"),
    Column("first_offset", Big, nullable=False, server_default="0"),
    Column("next_offset", Big, nullable=False, server_default="0"),
    Column("size_bytes", Big, nullable=False, server_default="0"),
    UniqueConstraint("topic_id", "number"),
    **STRICT,
)
batches = Table(
    "batches",
    metadata,
    Column("partition_id", Integer, primary_key=True, autoincrement=False),
    Column("base_offset", Big, primary_key=True, autoincrement=False),
    Column("next_offset", Big, nullable=False),
    # Fewer records than offsets: compaction removed the others.
    Column("count", Integer, nullable=False),
    Column("least_timestamp", Big, nullable=False),
    Column("greatest_timestamp", Big, nullable=False),
    # The greatest timestamp of this batch and all batches in front of it: a search by time needs no scan.
    Column("latest_timestamp", Big, nullable=False),
    Column("size_bytes", Big, nullable=False),
    # CRC-32C of `data`; NULL: only the CRCs of the records tell which records are good.
    Column("sum", Big),
    # The records in the stored form of records.format.
    Column("data", LargeBinary, nullable=False),
    Index("batches_by_time", "partition_id", "latest_timestamp", "base_offset"),
    **STRICT,
)
# Compressing each batch costs more than writing it.
_UNCOMPRESSED = DDL("ALTER TABLE batches ALTER COLUMN data SET STORAGE EXTERNAL")  # type: ignore[no-untyped-call]
event.listen(batches, "after_create", _UNCOMPRESSED.execute_if(dialect="postgresql"))
producers = Table(
    "producers",
    metadata,
    Column("partition_id", Integer, primary_key=True, autoincrement=False),
    Column("base_offset", Big, primary_key=True, autoincrement=False),
    Column("producer_id", Big, nullable=False),
    Column("first_sequence", Big, nullable=False),
    Column("count", Integer, nullable=False),
    sqlite_with_rowid=False,
    **STRICT,
)


class SchemaVersionError(StorageError):
    """The tables belong to another program or to another release."""


def make_tables(connection: Connection, name: str) -> None:
    """Build the tables in an empty database; check the version in another one.

    Raises:
        SchemaVersionError: the tables are not ours, or of another version; nothing was changed.
    """
    if not has_tables(connection, name):
        metadata.create_all(connection)
        connection.execute(meta.insert(), [{"name": "schema", "value": SCHEMA_VERSION}, {"name": "flush", "value": 0}])


def has_tables(connection: Connection, name: str) -> bool:
    """Return whether the database has tables of ours.

    Raises:
        SchemaVersionError: tables of these names belong to another program, or have another version.
    """
    names = set(inspect(connection).get_table_names())
    if meta.name not in names:
        strangers = sorted(names & metadata.tables.keys())
        if strangers:
            raise SchemaVersionError(f"{name} has a table {strangers[0]!r} that is not ours; use another database")
        return False
    version = connection.execute(select(meta.c.value).where(meta.c.name == "schema")).scalar()
    if version != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"the tables in {name} have version {version}, this Babelbus knows version {SCHEMA_VERSION}: export the"
            " topics with the Babelbus that made them, and import them into another database"
        )
    return True
