"""The stored form of records, the only place that knows its bytes (docs/specifications/jebp.md, section 5)."""
