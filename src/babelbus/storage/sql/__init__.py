"""Engine `db`: topics in SQLite or PostgreSQL (docs/storage.md)."""

from babelbus.storage.sql.check import check_database
from babelbus.storage.sql.store import DatabaseStore

__all__ = ["DatabaseStore", "check_database"]
