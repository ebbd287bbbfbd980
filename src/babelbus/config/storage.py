"""Storage: logs, topics, engines, the cluster, groups, staged records and the state."""

from typing import Annotated, Literal

import msgspec

from babelbus.config.settings import of
from babelbus.units import MIB, TIB

Engine = Literal["disk", "memory", "db", "jetstream"]
Ack = Literal["accepted", "written", "flushed", "replicated"]
Cleanup = Literal["delete", "compact"]


class DataSettings(msgspec.Struct, frozen=True):
    """The folder of all data."""

    folder: Annotated[str, of("folder with topics, keys and access lists; relative to where the server starts")] = (
        "data"
    )


class StorageSettings(msgspec.Struct, frozen=True):
    """The layout of logs on disk."""

    segment_bytes: Annotated[
        int,
        of(
            "a log rolls to a new segment at this size; retention and compaction work on whole ones",
            "bytes",
            ge=1024,
            le=TIB,
        ),
    ] = 128 * MIB
    checkpoint_bytes: Annotated[
        int,
        of("how much of each partition a start after a kill may have to read: smaller starts faster", "bytes", ge=4096),
    ] = 64 * MIB
    tail_cache_bytes: Annotated[
        int,
        of(
            "what all topics together keep of their newest records in memory, for readers at the tail; 0 is off",
            "bytes",
            ge=0,
        ),
    ] = 64 * MIB
    cleaner_interval_seconds: Annotated[
        float, of("how often retention and compaction look for work", "seconds", gt=0)
    ] = 60.0


class LogLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the log of a partition; `None` means no bound. Bases of `[topics]`, of a topic and of a log."""

    retention_seconds: (
        Annotated[float, of("segments whose newest record is older than this are removed", "seconds", gt=0)] | None
    ) = None
    retention_records: (
        Annotated[int, of("oldest segments go while the rest has at least so many records", "count", ge=1)] | None
    ) = None
    retention_bytes: (
        Annotated[int, of("oldest segments are removed while a partition is larger than this", "bytes", ge=1)] | None
    ) = None
    cleanup: Annotated[
        Cleanup, of("delete removes old segments; compact keeps the last record of each key instead")
    ] = "delete"
    segment_seconds: (
        Annotated[float, of("a segment also rolls at this age, so that retention by age can free it", "seconds", gt=0)]
        | None
    ) = None
    tombstone_seconds: Annotated[
        float,
        of("how long a compacted topic still shows that a key was removed, for readers that lag", "seconds", ge=0),
    ] = 86_400.0
    compact_after_seconds: (
        Annotated[
            float,
            of("compaction leaves what is younger alone, so that readers see every change meanwhile", "seconds", gt=0),
        ]
        | None
    ) = None


class TopicLayout(LogLayout, frozen=True, kw_only=True):
    """How one topic is kept."""

    engine: Annotated[
        Engine,
        of("disk survives restarts, memory does not and is bounded by retention alone, db is an SQL database, "
           "jetstream is a cluster of NATS"),
    ] = "disk"  # fmt: skip
    ack: Annotated[
        Ack,
        of("a publisher is answered when its record is accepted (in memory), written (survives a killed process), "
           "flushed (survives loss of power) or replicated (a quorum of engine jetstream has it)"),
    ] = "flushed"  # fmt: skip
    retain: Annotated[
        Literal["none", "last"],
        of("last also keeps the last event of each subject as state, whatever protocol it came from"),
    ] = "none"

    def __post_init__(self) -> None:
        """Check that the engine has the ack level."""
        if self.ack == "replicated" and self.engine != "jetstream":
            raise ValueError(f"ack replicated needs engine jetstream, the engine is {self.engine}")


class TopicDefaults(TopicLayout, frozen=True, kw_only=True):
    """Settings of a new topic, unless its creator chooses others; each topic keeps its own copy."""

    partitions: Annotated[
        int,
        of("ordered logs of a topic; more let more readers share it; can grow, never shrink", "count", ge=1, le=1024),
    ] = 1
    segment_bytes: (
        Annotated[
            int, of("size at which this topic's logs roll; none is storage.segment_bytes", "bytes", ge=1024, le=TIB)
        ]
        | None
    ) = None


class DbSettings(msgspec.Struct, frozen=True):
    """The database of the topics with engine db."""

    url: (
        Annotated[
            str,
            of("SQLAlchemy URL of SQLite or PostgreSQL (a password belongs into PGPASSWORD or a .pgpass file); "
               "none is db.sqlite in the data folder"),
        ]
        | None
    ) = None  # fmt: skip


class JetstreamSettings(msgspec.Struct, frozen=True):
    """The cluster of NATS of the topics with engine jetstream (docs/cluster.md)."""

    servers: (
        Annotated[
            str, of("addresses with commas between: nats://HOST:PORT or tls://HOST:PORT; none is no engine jetstream")
        ]
        | None
    ) = None
    credentials_file: Annotated[str, of("credentials of a user (.creds), as nsc makes them")] | None = None
    user: Annotated[str, of("name of a user with a password")] | None = None
    password_file: Annotated[str, of("file with the password of jetstream.user")] | None = None
    ca_file: Annotated[str, of("certificates in PEM of those who sign the certificates of NATS")] | None = None
    prefix: Annotated[
        str, of("streams are called PREFIX-0 and up, their subjects begin with PREFIX; letters, digits, _ and -")
    ] = "bb"
    shards: Annotated[
        int, of("streams that the topics are spread over; can grow, never shrink", "count", ge=1, le=64)
    ] = 8
    replicas: Annotated[
        int, of("servers of NATS that keep each record; 1 survives no loss of a server", "count", ge=1, le=5)
    ] = 3
    lease_seconds: Annotated[
        float,
        of(
            "a second server with this prefix and installation waits until the owner was silent for so long, which is "
            "longer than an election of NATS; 0: the server that starts last takes over at once",
            "seconds",
            ge=0,
        ),
    ] = 10.0
    timeout_seconds: Annotated[
        float,
        of("how long a publisher waits at most while NATS does not answer: longer than an election", "seconds", gt=0),
    ] = 15.0


class ClusterSettings(msgspec.Struct, frozen=True):
    """Several servers on one cluster of NATS, of which one owns the data at a time (docs/cluster.md)."""

    enabled: Annotated[
        bool, of("the server is a member of a cluster: all that is kept of topics, groups and state is in NATS")
    ] = False
    name: Annotated[str, of("name of this member, unique in its cluster; none is the name of the host")] | None = None
    host: Annotated[str, of("address that the other members reach this one at")] = "127.0.0.1"
    port: Annotated[int, of("TCP port for other members; 0 lets the system choose", "port", ge=0, le=65535)] = 5330
    advertise: (
        Annotated[str, of("HOST:PORT that the other members are told; none is cluster.host and the port")] | None
    ) = None
    cert_file: (
        Annotated[str, of("certificate chain in PEM of this member, for TLS between members; needed off loopback")]
        | None
    ) = None
    key_file: Annotated[str, of("its private key in PEM, which nobody but the owner may read (mode 0600)")] | None = (
        None
    )
    ca_file: Annotated[str, of("certificates in PEM of those who sign the certificates of members")] | None = None


class GroupsSettings(msgspec.Struct, frozen=True):
    """Consumer groups: durable cursors on topics, shared by their members."""

    commit_seconds: Annotated[
        float,
        of("how far cursors on disk may lag behind: after a crash, records of this time come again", "seconds", gt=0),
    ] = 1.0
    read_ahead_bytes: Annotated[
        int, of("records that all groups together hold in memory to hand them out", "bytes", ge=1_048_576)
    ] = 64 * MIB


class StagingLimits(msgspec.Struct, frozen=True):
    """Records that writers stage until a commit makes them visible, all or none (docs/pipeline.md)."""

    transaction_bytes_max: Annotated[int, of("most that one transaction stages", "bytes", ge=65536)] = 4 * 1024 * MIB
    bytes_max: Annotated[int, of("most that all together stage", "bytes", ge=65536)] = 16 * 1024 * MIB
    parts_max: Annotated[
        int, of("parts (one a writing task) of all transactions; each costs about 1 KiB of memory", "count", ge=1)
    ] = 100_000
    part_seconds: Annotated[
        float, of("a part that no commit named and that has not grown for this time is dropped", "seconds", gt=0)
    ] = 86_400.0
    transactions_max: Annotated[
        int, of("transaction ids that are remembered, to know a commit that comes again", "count", ge=1)
    ] = 100_000
    transaction_seconds: Annotated[
        float, of("a transaction id without a commit for this time is forgotten", "seconds", gt=0)
    ] = 30 * 86_400.0


class StateSettings(msgspec.Struct, frozen=True):
    """State: the last value of each key, kept in the topic $state (docs/state.md)."""

    ack: Annotated[
        Literal["accepted", "written", "flushed"],
        of("a change is answered when it is accepted (in memory), written (survives a killed process) "
           "or flushed (survives loss of power)"),
    ] = "written"  # fmt: skip
    checkpoint_bytes: Annotated[
        int,
        of("a checkpoint of all values is written when the log has grown by this much: smaller starts faster",
           "bytes", ge=4096),
    ] = 64 * MIB  # fmt: skip
    key_bytes_max: Annotated[
        int,
        of("longest key or pattern that clients of Wörterbuch and of the administration API may use", "bytes", ge=256),
    ] = 4096
    history_seconds: (
        Annotated[
            float,
            of("how far back the state can be asked for as it was; none is as far as compaction has not come yet",
               "seconds", gt=0),
        ]
        | None
    ) = 604_800.0  # fmt: skip
