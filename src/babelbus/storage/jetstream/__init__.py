"""Engine `jetstream`: topics in a cluster of NATS (docs/cluster.md)."""

from babelbus.storage.jetstream.cleaner import StreamLog
from babelbus.storage.jetstream.store import JetstreamStore

__all__ = ["JetstreamStore", "StreamLog"]
