"""Engine `jetstream`: topics, and the data folder, in a cluster of NATS (docs/cluster.md)."""

from babelbus.storage.jetstream.cleaner import StreamLog
from babelbus.storage.jetstream.files import ReplicatedFiles
from babelbus.storage.jetstream.membership import Membership, join
from babelbus.storage.jetstream.ownership import Ownership
from babelbus.storage.jetstream.store import JetstreamStore

__all__ = ["JetstreamStore", "Membership", "Ownership", "ReplicatedFiles", "StreamLog", "join"]
