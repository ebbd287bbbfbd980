"""Engine `disk`: topics as folders of segment files (docs/storage.md)."""
