"""Engine `db`: topics in SQLite or PostgreSQL (docs/storage.md)."""
