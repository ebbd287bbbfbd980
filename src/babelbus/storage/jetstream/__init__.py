"""Engine `jetstream`: topics, and the data folder, in a cluster of NATS (docs/cluster.md)."""

from babelbus.storage.jetstream.cleaner import StreamLog
from babelbus.storage.jetstream.files import MOVING_NAME, ReplicatedFiles
from babelbus.storage.jetstream.lease import Held, Lease
from babelbus.storage.jetstream.membership import Membership, join, read_small_file
from babelbus.storage.jetstream.ownership import Ownership
from babelbus.storage.jetstream.presence import Members, Presence
from babelbus.storage.jetstream.store import JetstreamStore

__all__ = [
    "MOVING_NAME",
    "Held",
    "JetstreamStore",
    "Lease",
    "Members",
    "Membership",
    "Ownership",
    "Presence",
    "ReplicatedFiles",
    "StreamLog",
    "join",
    "read_small_file",
]
