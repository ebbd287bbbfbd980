"""Every setting: its unit, default and reason. `settings.py` reads settings from file, environment and flags.

One frozen struct per section; a field is the key `section.field` in babelbus.toml, `BABELBUS_SECTION_FIELD` in the
environment. The texts here are the ones that `babelbus config`, `--help` and docs/settings.md show.
"""

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Literal, Protocol, runtime_checkable
from urllib.parse import unquote_plus

import msgspec

from babelbus import settings
from babelbus.errors import ConfigError
from babelbus.settings import Setting, of
from babelbus.units import MIB, TIB

__all__ = [
    "Config",
    "ConfigError",
    "Setting",
    "TopicDefaults",
    "describe",
    "is_loopback",
    "load",
    "read_topic_changes",
    "render",
    "speaks_tls",
]

Engine = Literal["disk", "memory", "db", "jetstream"]
Ack = Literal["accepted", "written", "flushed", "replicated"]
Cleanup = Literal["delete", "compact"]
Connections = Annotated[
    int, of("open connections; further ones are closed at once, so descriptors are left for files", "count", ge=1)
]
SpeaksTls = Annotated[
    bool, of("true needs TLS, false has none on these TCP ports; none is TLS as soon as tls.cert_file is set")
]


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


@runtime_checkable
class Listening(Protocol):
    """A section whose listeners other machines may reach."""

    @property
    def enabled(self) -> bool:
        """Whether there are listeners."""

    @property
    def host(self) -> str:
        """Address of the listeners."""

    @property
    def exposure(self) -> str | None:
        """How strangers get in who reach a listener; `None` if each client proves who it is."""

    @property
    def overheard(self) -> str | None:
        """The harm that others on the way can do if the listener does not speak TLS; `None` for no harm."""


class TlsSettings(msgspec.Struct, frozen=True):
    """The certificate of all TCP listeners (docs/security.md, "TLS"); jebp has an encryption of its own."""

    cert_file: (
        Annotated[str, of("certificate chain in PEM: with it, all TCP listeners but that of jebp speak TLS alone")]
        | None
    ) = None
    key_file: Annotated[str, of("its private key in PEM, which nobody but the owner may read (mode 0600)")] | None = (
        None
    )
    client_ca_file: (
        Annotated[str, of("certificates in PEM of those who sign certificates of clients; goes with the next")] | None
    ) = None
    client_certificates: Annotated[
        Literal["none", "optional", "required"],
        of("whether clients are asked for a certificate; required closes connections of clients that show none"),
    ] = "none"
    minimum_version: Annotated[Literal["1.2", "1.3"], of("oldest version of TLS that clients may use")] = "1.2"
    reload_seconds: Annotated[
        float, of("how often the server looks for new files; SIGHUP looks at once", "seconds", gt=0)
    ] = 60.0


class QuotaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The most that one principal may use, over all its connections; an unknown client is its protocol and address."""

    publish_bytes_per_second: (
        Annotated[int, of("bytes that its clients send; over it, the server reads later from them", "bytes", ge=1)]
        | None
    ) = None
    read_bytes_per_second: (
        Annotated[
            float,
            of("bytes that its clients are sent; over it, they wait like clients that read late", "bytes", ge=1),
        ]
        | None
    ) = None
    connections: Annotated[int, of("open connections; further ones are closed", "count", ge=1)] | None = None
    subscriptions: (
        Annotated[
            int, of("live subscriptions, responders and memberships of groups; further ones are refused", "count", ge=1)
        ]
        | None
    ) = None
    topics: Annotated[int, of("topics that it owns; it makes no further ones", "count", ge=1)] | None = None
    requests: (
        Annotated[int, of("requests that wait for their reply; further ones are refused", "count", ge=1)] | None
    ) = None


class JebpSettings(msgspec.Struct, frozen=True):
    """The jebp listener (docs/protocols/jebp.md)."""

    enabled: Annotated[bool, of("whether the server speaks jebp")] = True
    host: Annotated[str, of("address to listen on; 0.0.0.0 is every IPv4 address of the machine")] = "127.0.0.1"
    port: Annotated[int, of("TCP port; 0 lets the system choose", "port", ge=0, le=65535)] = 5320
    status: Annotated[
        Literal["command", "table"],
        of("which of the document's two lists of status codes wins: the command's own or the general table"),
    ] = "command"
    bare_records: Annotated[
        bool, of("also take create-record requests whose topic name has no length in front, found by checksum")
    ] = False
    bare_certificates: Annotated[
        bool, of("also take certificates without proof of their key; they can be replayed by an eavesdropper")
    ] = False
    frame_bytes_max: Annotated[
        int,
        of("a longer message closes its connection before memory is reserved for it", "bytes", ge=1024, le=2**31 - 1),
    ] = 16 * MIB
    handshake_seconds: Annotated[
        float, of("a handshake that takes longer is closed: dead connections must not pile up", "seconds", gt=0)
    ] = 10.0
    connections_max: Connections = 10_000

    @property
    def exposure(self) -> str | None:
        """How strangers get in: an eavesdropper can replay a bare certificate."""
        return "with bare certificates" if self.bare_certificates else None

    @property
    def overheard(self) -> None:
        """The harm by others on the way: none, jebp encrypts by itself."""
        return


class SbusSettings(msgspec.Struct, frozen=True):
    """The sbus sockets (docs/protocols/sbus.md)."""

    enabled: Annotated[bool, of("whether the server speaks sbus, to the processes of this machine")] = True
    address: (
        Annotated[
            str,
            of("a path, /dev/unix/abstract (a name is made up) or /dev/unix/abstract/HEX; "
               "none is run/sbus.socket in the data folder"),
        ]
        | None
    ) = None  # fmt: skip
    group: Annotated[bool, of("whether the group of the socket's file may connect")] = False
    others: Annotated[bool, of("whether everybody on this machine may connect")] = False
    users: (
        Annotated[
            str,
            of("serve only these users and the server's own: names or numbers, with commas between; none asks the file "
               "mode alone, which abstract addresses do not have"),
        ]
        | None
    ) = None  # fmt: skip
    more_doors: (
        Annotated[
            str, of("further addresses of the same bus, with blanks between: ADDRESS[,group][,others][,user=NAME]...")
        ]
        | None
    ) = None
    soft: Annotated[
        Literal["queue", "discard", "block", "error"],
        of("what happens to packets that a client does not take at once, unless the client chooses otherwise"),
    ] = "queue"
    hard: Annotated[
        Literal["discard", "block", "error"],
        of("what happens when the queue of a client is full: drop the packet, stop the publisher or disconnect"),
    ] = "block"
    order: Annotated[Literal["queue", "stack", "random"], of("order of its queue: oldest, newest or largest first")] = (
        "queue"
    )
    queue_bytes_max: Annotated[int, of("what waits for one client before its queue is full", "bytes", ge=0)] = 8 * MIB
    queue_packets_max: Annotated[int, of("the same in packets", "count", ge=0)] = 65_536
    patterns_max: Annotated[
        int, of("subscriptions of one client; over it, the client is disconnected", "count", ge=1)
    ] = 100_000
    patterns_bytes_max: Annotated[int, of("the same in bytes of their patterns", "bytes", ge=1)] = 64 * MIB
    connections_max: Connections = 10_000
    open_cred: Annotated[
        bool, of("deliver secret keys (!/cred/...) to every client whose pattern matches, as the reference daemon does")
    ] = False

    @property
    def has_guests(self) -> bool:
        """Whether other users of this machine may connect."""
        return self.group or self.others or self.more_doors is not None


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


class WorterbuchSettings(msgspec.Struct, frozen=True):
    """The Wörterbuch listeners (docs/protocols/worterbuch.md)."""

    enabled: Annotated[bool, of("whether the server speaks Wörterbuch")] = True
    host: Annotated[str, of("address of both TCP listeners; 0.0.0.0 is every IPv4 address of the machine")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int,
        of("port of WebSocket (/ws), REST and server-sent events; 0 lets the system choose", "port", ge=0, le=65535),
    ] = 8080
    tcp_port: Annotated[int, of("port of JSON lines over TCP; 0 lets the system choose", "port", ge=0, le=65535)] = 9090
    unix_path: Annotated[str, of("path of a unix socket for JSON lines; none is no socket")] | None = None
    more_endpoints: (
        Annotated[
            str,
            of("endpoints for clients of one old version, with blanks between: tcp:PORT=VERSION or /ws/PATH=VERSION, "
               "as in tcp:8082=0.10 /ws/0.6=0.6; behind a colon the characters of keys, as in /ws/old=0.3:.*>"),
        ]
        | None
    ) = None  # fmt: skip
    handshake_wait_seconds: Annotated[
        float,
        of("how long to wait for the first message of a client of 0.3 to 0.6 before the greeting; 0 greets at once",
           "seconds", ge=0),
    ] = 0.0  # fmt: skip
    handshake_seconds: Annotated[
        float,
        of("a client whose first HTTP request, or token where one is needed, takes longer is closed", "seconds", gt=0),
    ] = 10.0
    auth_key_file: (
        Annotated[
            str, of("file with the key of clients' tokens: an HMAC secret, or a public key in PEM; none lets all in")
        ]
        | None
    ) = None
    auth_key_set: (
        Annotated[
            str,
            of("https url or file of a key set (JWKS) with the public keys of clients' tokens, in place of the file"),
        ]
        | None
    ) = None
    auth_issuer: Annotated[str, of("claim iss that tokens must have; none takes every issuer's")] | None = None
    auth_audience: (
        Annotated[str, of("name that the claim aud of tokens must have; none refuses tokens for an audience")] | None
    ) = None
    auth_claim: Annotated[str, of("claim of tokens that names the principal of the table of access")] = "sub"
    instance_name: Annotated[str, of("shown to clients as $SYS/name")] | None = None
    extended_monitoring: Annotated[bool, of("show each client's subscriptions and locks below $SYS")] = True
    slow: Annotated[
        Literal["disconnect", "discard"],
        of("what happens to a client that does not read its events: it is disconnected, or events are dropped"),
    ] = "disconnect"
    subscriptions_max: Annotated[
        int,
        of(
            "subscriptions of one client, to keys, patterns and lists; so many locks and bound publish ids, too; "
            "further ones are refused",
            "count",
            ge=1,
        ),
    ] = 10_000
    queue_bytes_max: Annotated[
        int, of("events that wait for one client before it counts as one that does not read", "bytes", ge=65536)
    ] = 64 * MIB
    message_bytes_max: Annotated[
        int, of("a longer message closes its connection before memory is reserved for it", "bytes", ge=1024)
    ] = 64 * MIB
    connections_max: Connections = 10_000
    tls: SpeaksTls | None = None
    deflate: Annotated[bool, of("compress WebSocket messages for clients that offer it; costs processor time")] = False
    cors_origins: (
        Annotated[str, of("web pages of these origins may use REST and WebSocket, with commas between")] | None
    ) = None
    web_root: Annotated[str, of("folder of static files that GET serves beside the API")] | None = None
    export_name: Annotated[str, of("name of exported files, without .json.gz")] = "export"
    sse_double_encoding: Annotated[
        bool, of("send JSON inside a JSON string in server-sent events, as upstream does since 1.3.8")
    ] = False

    @property
    def exposure(self) -> str | None:
        """How strangers get in: without a key for tokens, everybody may do everything."""
        if self.auth_key_file is None and self.auth_key_set is None:
            return "without worterbuch.auth_key_file"
        return None

    @property
    def overheard(self) -> str | None:
        """The harm by others on the way."""
        return None if self.auth_key_file is None and self.auth_key_set is None else "read the tokens of clients"


class ZbusSettings(msgspec.Struct, frozen=True):
    """The zbus listeners (docs/protocols/zbus.md)."""

    enabled: Annotated[bool, of("whether the server speaks zbus")] = True
    host: Annotated[str, of("address of the listeners; 0.0.0.0 is every IPv4 address of the machine")] = "127.0.0.1"
    port: Annotated[int, of("port of HTTP and WebSocket; 0 lets the system choose", "port", ge=0, le=65535)] = 15555
    monitor_port: (
        Annotated[
            int,
            of("port of the list of queues, for browsers; none is no such listener, 0 lets the system choose",
               "port", ge=0, le=65535),
        ]
        | None
    ) = None  # fmt: skip
    auth_file: (
        Annotated[str, of("file with lines of apiKey and secretKey: every message must be signed; none lets all in")]
        | None
    ) = None
    partial_sign_fields: Annotated[
        bool,
        of("accept signatures whose signFields leave body, url or headers unsigned, as newer Python clients send them"),
    ] = False
    auth_excluded: (
        Annotated[
            str,
            of("paths that need no signature, with blanks between, a * at the end for any ending: services and files "
               "for browsers, never commands; goes with auth_file"),
        ]
        | None
    ) = None  # fmt: skip
    replay_window_seconds: (
        Annotated[
            float,
            of("a signed message is refused if it was seen within this time; none accepts it again",
               "seconds", gt=0),
        ]
        | None
    ) = None  # fmt: skip
    tls: SpeaksTls | None = None
    tls_cert_file: (
        Annotated[
            str, of("certificate chain in PEM in place of tls.cert_file: the listeners speak https and wss alone")
        ]
        | None
    ) = None
    tls_key_file: Annotated[str, of("its private key in PEM, mode 0600")] | None = None
    package_bytes_max: Annotated[
        int, of("a longer message is refused before memory is reserved for it", "bytes", ge=1024)
    ] = 64 * MIB
    web_root: (
        Annotated[
            str, of("folder of static files that GET serves where no url is a service's, up to package_bytes_max")
        ]
        | None
    ) = None
    web_cache_seconds: Annotated[
        int,
        of("how long browsers may use a static file without asking whether it has changed", "seconds", ge=0),
    ] = 0
    cors_origins: (
        Annotated[str, of("web pages of these origins may use the port, with commas between; * lets all of them")]
        | None
    ) = None
    cors_methods: Annotated[str, of("methods that such pages may use, with commas between")] = (
        "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
    )
    cors_headers: Annotated[str, of("headers that such pages may send, with commas between; * is any")] = "*"
    cors_expose_headers: Annotated[str, of("headers that such pages may read, with commas between; * is any")] = "*"
    rpc_timeout_seconds: Annotated[
        float,
        of("a caller over plain HTTP is answered 504 if its service has not answered for this time", "seconds", gt=0),
    ] = 10.0
    rpc_keep_expired: Annotated[
        bool, of("hand calls to their service even if nobody waits for the answer any more")
    ] = False
    handshake_seconds: Annotated[
        float, of("a client whose TLS handshake, or then its first request, takes longer is closed", "seconds", gt=0)
    ] = 10.0
    idle_seconds: Annotated[
        float, of("a connection without traffic in either direction for this time is closed", "seconds", gt=0)
    ] = 180.0
    connections_max: Connections = 10_000

    @property
    def exposure(self) -> str | None:
        """How strangers get in: without a file of keys, everybody may do everything."""
        return "without zbus.auth_file" if self.auth_file is None else None

    @property
    def overheard(self) -> str:
        """The harm by others on the way: a signature says no time."""
        return "send the signed messages of clients again"


class EventmeshSettings(msgspec.Struct, frozen=True):
    """The EventMesh listener (docs/protocols/eventmesh.md)."""

    enabled: Annotated[bool, of("whether the server speaks EventMesh")] = True
    host: Annotated[str, of("address of the listener; 0.0.0.0 is every IPv4 address of the machine")] = "127.0.0.1"
    tcp_port: Annotated[int, of("port of the TCP protocol; 0 lets the system choose", "port", ge=0, le=65535)] = 10000
    http_port: Annotated[int, of("port of the HTTP protocol; 0 lets the system choose", "port", ge=0, le=65535)] = 10105
    grpc_port: Annotated[int, of("port of the gRPC protocol; 0 lets the system choose", "port", ge=0, le=65535)] = 10205
    admin_port: (
        Annotated[
            int,
            of("port of the paths of EventMesh's admin server, which is 10106 there; 0 lets the system choose, none is "
               "no such listener", "port", ge=0, le=65535),
        ]
        | None
    ) = None  # fmt: skip
    webhook_networks: (
        Annotated[
            str,
            of("networks of this machine or private ones that webhooks may be in, with blanks between, as in "
               "127.0.0.0/8 10.1.0.0/16; public addresses may always be called"),
        ]
        | None
    ) = None  # fmt: skip
    webhook_consent: Annotated[
        bool, of("ask a webhook by OPTIONS whether it wants to be called, before it is subscribed")
    ] = True
    content_bytes_max: Annotated[
        int, of("a longer content of a message over TCP or HTTP is refused", "bytes", ge=1000)
    ] = 16 * MIB
    retcodes: Annotated[
        Literal["current", "seed"],
        of("the numbers of HTTP errors: those since version 1.6, or those of the first document"),
    ] = "current"
    body_bytes_max: Annotated[
        int, of("a longer HTTP request is refused before memory is reserved for it", "bytes", ge=1024)
    ] = 64 * MIB
    grpc_bytes_max: Annotated[
        int, of("a longer message over gRPC is refused before memory is reserved for it", "bytes", ge=1024)
    ] = 4 * MIB
    expire: Annotated[
        Literal["none", "explicit", "all"],
        of("messages older than their property ttl that no group member gets any more: none, those that were not "
           "published over gRPC, where each must name a ttl, or all"),
    ] = "explicit"  # fmt: skip
    window: Annotated[
        int, of("messages that are pushed to one session for one topic without an acknowledgement", "count", ge=1)
    ] = 1000
    ack_seconds: Annotated[
        float, of("a pushed message without an acknowledgement for this time goes to another session", "seconds", gt=0)
    ] = 60.0
    streams_max: Annotated[int, of("open calls and streams of one gRPC connection", "count", ge=1)] = 1000
    calls_max: Annotated[
        int, of("open calls and streams of all gRPC connections; further ones are refused", "count", ge=1)
    ] = 4000
    subscriptions_max: Annotated[
        int,
        of("topics of one session and of one `topic/create`, and webhooks of one principal for topics", "count", ge=1),
    ] = 10_000
    handshake_seconds: Annotated[
        float, of("a client that has not proved who it is after this time is closed", "seconds", gt=0)
    ] = 10.0
    idle_seconds: Annotated[
        float, of("a client that has sent nothing for this time, not even a heartbeat, is closed", "seconds", gt=0)
    ] = 120.0
    connections_max: Annotated[
        int, of("open connections; further ones are closed at once, so descriptors are left for files", "count", ge=1)
    ] = 10_000
    tls: SpeaksTls | None = None

    @property
    def exposure(self) -> str | None:
        """How strangers get in: nobody proves who it is."""
        return "without access control"

    @property
    def overheard(self) -> str:
        """The harm by others on the way."""
        return "read the passwords and tokens of clients"


class AdminSettings(msgspec.Struct, frozen=True):
    """The administration endpoint: metrics, health and the API of the command line."""

    enabled: Annotated[bool, of("whether the endpoint is there; the command line needs it")] = True
    host: Annotated[
        str,
        of("address to listen on; beyond loopback it needs TLS, and access.mode = enforce or certificates of clients"),
    ] = "127.0.0.1"
    port: Annotated[int, of("TCP port; 0 lets the system choose", "port", ge=0, le=65535)] = 8600

    handshake_seconds: Annotated[
        float,
        of("a client whose first request takes longer is closed: dead connections must not pile up", "seconds", gt=0),
    ] = 10.0
    connections_max: Connections = 1_000
    tls: SpeaksTls | None = None
    docs_folder: (
        Annotated[
            str,
            of("folder of the built documentation that GET /docs/ serves; none is that of the package, if it has one"),
        ]
        | None
    ) = None
    console: Annotated[bool, of("whether the endpoint serves the console, with its log-in")] = True
    session_seconds: Annotated[float, of("how long a log-in at the console lasts at the most", "seconds", gt=0)] = (
        604_800.0
    )
    session_idle_seconds: Annotated[
        float, of("how long a log-in at the console lasts without a request", "seconds", gt=0)
    ] = 28_800.0
    sessions_max: Annotated[
        int, of("browsers that are logged in; the one that was not used for the longest time gives way", "count", ge=1)
    ] = 1_000
    sessions_per_principal_max: Annotated[int, of("the same of one principal", "count", ge=1)] = 20
    open_metrics: Annotated[
        bool, of("whether metrics and the reasons of /health need no right to read $metrics while the gate is on")
    ] = False

    @property
    def exposure(self) -> str | None:
        """How strangers get in: the metrics need no token; without TLS, the token of the API is sent unencrypted."""
        return "with metrics that need no token, and over plain HTTP if there is no TLS"

    @property
    def overheard(self) -> str:
        """The harm by others on the way."""
        return "read the passwords and tokens of clients"


class AccessSettings(msgspec.Struct, frozen=True):
    """The gate: who may do what, in one table for all protocols (docs/access.md)."""

    mode: Annotated[
        Literal["off", "enforce"],
        of("off asks nobody, unless `babelbus access enable` has turned the gate on; enforce lets principals do what "
           "the table grants, and nothing else"),
    ] = "off"  # fmt: skip
    wildcards: Annotated[
        Literal["narrow", "refuse"],
        of("a subscription to a pattern that is granted in part gets that part, or is refused"),
    ] = "narrow"
    password_strength: Annotated[
        Literal["interactive", "moderate"],
        of("cost of a new password and of an unknown user: interactive is 64 MiB, moderate 256 MiB and slower"),
    ] = "interactive"  # noqa: S105  # no password
    password_threads: Annotated[int, of("passwords that are checked at the same time", "count", ge=1, le=64)] = 1
    passwords_waiting_max: Annotated[
        int, of("passwords that may wait to be checked; further ones are refused", "count", ge=1, le=100_000)
    ] = 64
    file: (
        Annotated[
            str,
            of("TOML file with rows and principals that is applied at each start; if it has an error, the table stays "
               "as it was"),
        ]
        | None
    ) = None  # fmt: skip
    accept_version: (
        Annotated[
            int,
            of("version at which the table is accepted although later changes of it are lost; the error at the start "
               "names the version. Remove it after that start", ge=0),
        ]
        | None
    ) = None  # fmt: skip


class AuditSettings(msgspec.Struct, frozen=True):
    """The audit: logins, refusals and changes of the table, in the topic $audit (docs/access.md)."""

    retention_seconds: (
        Annotated[float, of("records of the audit older than this are removed", "seconds", gt=0)] | None
    ) = 90 * 86_400.0
    retention_bytes: (
        Annotated[int, of("oldest records of the audit are removed while it is larger than this", "bytes", ge=65536)]
        | None
    ) = 1024 * MIB


class ServerSettings(msgspec.Struct, frozen=True):
    """Settings of all protocols."""

    insecure: Annotated[bool, of("allow to listen beyond loopback where nothing controls access")] = False
    plain_text: Annotated[
        bool,
        of("allow to listen beyond loopback without TLS where clients send passwords, tokens or signed messages, which "
           "others on the way can then read or send again: for a proxy in front that speaks TLS"),
    ] = False  # fmt: skip
    host_names: (
        Annotated[
            str,
            of("names by which clients reach the HTTP listeners, with commas between; IP addresses, localhost and the "
               "name of this machine need not be listed"),
        ]
        | None
    ) = None  # fmt: skip
    allowed_origins: (
        Annotated[str, of("web pages of these origins may use every HTTP and WebSocket listener, with commas between")]
        | None
    ) = None
    any_port: Annotated[
        bool, of("let the system choose every port that is not set; the server tells them when it has started")
    ] = False
    drain_seconds: Annotated[
        float, of("how long a stop waits for answers that are under way before it closes connections", "seconds", ge=0)
    ] = 5.0
    outbox_bytes_max: Annotated[
        int, of("unsent answers of one connection; above it the server reads no more from that peer", "bytes", ge=65536)
    ] = 8 * MIB
    unfinished_bytes_max: Annotated[
        int,
        of("messages of all connections that have not come whole; above it the longest loses its connection", "bytes",
           ge=65536),
    ] = 256 * MIB  # fmt: skip
    unfinished_bytes_per_address_max: Annotated[
        int,
        of("the same for the connections of one address; all unix sockets count as one", "bytes", ge=65536),
    ] = 128 * MIB
    unauthenticated_bytes_max: Annotated[
        int,
        of("the same for one client that must prove who it is and has not", "bytes", ge=4096),
    ] = 65_536
    connections_per_address_max: Annotated[
        int,
        of("open connections of one address on all TCP listeners together; a network of IPv6 (/64) counts as one",
           "count", ge=1),
    ] = 2_000  # fmt: skip
    handshakes_per_address_max: Annotated[
        int,
        of(
            "the same for connections whose client has not proved who it is or not sent its first request",
            "count",
            ge=1,
        ),
    ] = 500
    uncounted_networks: (
        Annotated[
            str,
            of("networks that are not counted by address, with blanks between, as that of a proxy in front"),
        ]
        | None
    ) = "127.0.0.0/8 ::1/128"
    processes: Annotated[
        int,
        of(
            "processes that accept the TCP clients, speak TLS with them and pass their bytes to the process of the "
            "data; 1 is one process for everything",
            "count",
            ge=1,
            le=64,
        ),
    ] = 1
    busy_poll_us: Annotated[
        int,
        of(
            "how long the server looks for the next request without sleep when a single client asks again right after "
            "each answer; 0 sleeps always",
            "microseconds",
            ge=0,
            le=1000,
        ),
    ] = 100
    uvloop: Annotated[bool, of("use uvloop where it is installed; asyncio's own loop is slower")] = True


class LogSettings(msgspec.Struct, frozen=True):
    """Messages of the server to its operator, on standard error."""

    level: Annotated[Literal["debug", "info", "warning", "error"], of("the least important level that is shown")] = (
        "info"
    )
    format: Annotated[Literal["text", "json"], of("text for people, json (one object a line) for collectors")] = "text"


class Config(msgspec.Struct, frozen=True):
    """The whole configuration of a server."""

    data: DataSettings = DataSettings()
    storage: StorageSettings = StorageSettings()
    topics: TopicDefaults = TopicDefaults()
    db: DbSettings = DbSettings()
    jetstream: JetstreamSettings = JetstreamSettings()
    cluster: ClusterSettings = ClusterSettings()
    groups: GroupsSettings = GroupsSettings()
    staging: StagingLimits = StagingLimits()
    jebp: JebpSettings = JebpSettings()
    sbus: SbusSettings = SbusSettings()
    state: StateSettings = StateSettings()
    worterbuch: WorterbuchSettings = WorterbuchSettings()
    zbus: ZbusSettings = ZbusSettings()
    eventmesh: EventmeshSettings = EventmeshSettings()
    admin: AdminSettings = AdminSettings()
    tls: TlsSettings = TlsSettings()
    quotas: QuotaSettings = QuotaSettings()
    access: AccessSettings = AccessSettings()
    audit: AuditSettings = AuditSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()


def load(
    path: str | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> Config:
    """Load the configuration: defaults, then the file, then the environment, then the flags.

    `path` is the file of `--config`; without it BABELBUS_CONFIG names one, or `babelbus.toml` in the current folder
    is read if it exists. `environment` is what the command line passes from `os.environ`; `flags` are dotted keys,
    and a value of None means that the flag was not given.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or two settings conflict; the message names key and source.
    """
    values = settings.collect(Config, path, environment or {}, flags or {})
    of_cluster = {key: value for key, value in values.items() if key.startswith("cluster.")}
    if settings.build(Config, of_cluster).cluster.enabled:
        values.setdefault("topics.engine", settings.Value("jetstream", "cluster.enabled", False))
    config = settings.build(Config, values)
    if config.cluster.enabled:
        _check_cluster(config, values)
    if config.server.any_port:
        config = _choose_ports(config, values)
    _refuse_open_doors(config, values)
    return config


def _choose_ports(config: Config, values: Mapping[str, settings.Value]) -> Config:
    """Return the configuration with port 0 for every port that is not set."""
    changed = {}
    for section in Config.__struct_fields__:
        struct = getattr(config, section)
        named = [name for name in struct.__struct_fields__ if name == "port" or name.endswith("_port")]
        ports = [name for name in named if getattr(struct, name) is not None]  # None: no such listener
        free = {name: 0 for name in ports if name != "any_port" and f"{section}.{name}" not in values}
        if free:
            changed[section] = msgspec.structs.replace(struct, **free)
    return msgspec.structs.replace(config, **changed)


def read_topic_changes(changes: Mapping[str, object], *, source: str = "the request") -> dict[str, object]:
    """Check settings of one topic (keys of [topics], without the section) and return them as plain values.

    Sizes and durations may be text with a unit ("7d"); None or "none" clears an optional setting.

    Raises:
        ConfigError: a key is unknown or a value wrong; the message names key and `source`.
    """
    return settings.read(TopicDefaults, changes, source=source)


def describe() -> list[Setting]:
    """Return every setting, in the order of the sections, as documentation, help and `babelbus config` show them."""
    return settings.describe(Config)


def render(config: Config, *, comments: bool = False) -> str:
    """Return `config` as a babelbus.toml; with `comments`, the meaning of each key above it."""
    return settings.render(config, comments=comments)


def is_loopback(host: str) -> bool:
    """Return whether a listener on `host` can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may resolve to another machine


def speaks_tls(section: object, tls: TlsSettings) -> bool:
    """Return whether the TCP listeners of a section speak TLS; jebp has no setting for it."""
    chosen: bool | None = getattr(section, "tls", False)
    own = getattr(section, "tls_cert_file", None)
    return own is not None or (tls.cert_file is not None if chosen is None else chosen)


_PASSWORD = re.compile(r"[^/]+:\s*//[^@?]*:[^@]+@")
_PASSWORD_WORD = re.compile(r"password\s*=", re.IGNORECASE)


def _has_password(url: str) -> bool:
    """Return whether a URL has a password, in front of the host or as an option."""
    return bool(_PASSWORD.match(url) or _PASSWORD_WORD.search(unquote_plus(unquote_plus(url))))


def _refuse_open_doors(config: Config, values: Mapping[str, settings.Value]) -> None:
    """Refuse settings that would let strangers in by mistake (docs/design/design.md, section 6)."""
    if config.db.url is not None and _has_password(config.db.url):
        raise ConfigError("db.url has a password in it, which would be shown; put it into PGPASSWORD or a .pgpass file")
    if config.worterbuch.auth_key_set is not None and _has_password(config.worterbuch.auth_key_set):
        raise ConfigError("worterbuch.auth_key_set has a password in it, which would be shown; key sets are public")
    if config.server.insecure:
        return
    enforced = config.access.mode == "enforce"
    for name in config.__struct_fields__:
        section = getattr(config, name)
        if not isinstance(section, Listening) or not section.enabled or is_loopback(section.host):
            continue
        has_tls = speaks_tls(section, config.tls)
        place = f"{name}.host = {section.host!r} (from {_source_of(f'{name}.host', values)})"
        # The table says what strangers may do; but a bare certificate is a proof that others can repeat.
        is_guarded = enforced and not getattr(section, "bare_certificates", False)
        is_guarded |= config.tls.client_certificates == "required" and has_tls  # each client proves who it is
        if section.exposure is not None and not is_guarded:
            advice = (
                f"turn {name}.bare_certificates off"
                if enforced
                else 'set access.mode = "enforce", so that principals do what the table grants (a gate that only '
                "'babelbus access enable' turned on does not count: it can be turned off while the server listens)"
            )
            raise ConfigError(
                f"{place} would be reachable from other machines {section.exposure}; {advice}; "
                f"or server.insecure = true if a firewall or proxy protects it"
            )
        if section.overheard is not None and not has_tls and not config.server.plain_text:
            has_choice = getattr(section, "tls", None)
            raise ConfigError(
                f"{place} has no TLS, so others on the way could {section.overheard}; set "
                f"tls.cert_file and tls.key_file{'' if has_choice is None else f', and no {name}.tls'}; "
                f"or server.plain_text = true if a proxy in front speaks TLS"
            )


def _check_cluster(config: Config, values: Mapping[str, settings.Value]) -> None:
    cluster = config.cluster
    if config.jetstream.servers is None:
        raise ConfigError("cluster.enabled needs jetstream.servers: the addresses of your NATS servers")
    if not config.jetstream.lease_seconds:
        raise ConfigError("cluster.enabled needs jetstream.lease_seconds above 0: the lease says which member owns")
    if config.topics.engine in ("disk", "db"):
        raise ConfigError(
            f"topics.engine = {config.topics.engine!r} (from {_source_of('topics.engine', values)}) would keep topics"
            " where other members of the cluster cannot read them; set jetstream, or memory for what may be lost"
        )
    files = (cluster.cert_file, cluster.key_file, cluster.ca_file)
    if any(files) and not all(files):
        raise ConfigError("cluster.cert_file, cluster.key_file and cluster.ca_file go together: set all three or none")
    if cluster.advertise is not None and not cluster.advertise.rpartition(":")[2].isdecimal():
        raise ConfigError(f"cluster.advertise = {cluster.advertise!r} is no HOST:PORT")
    advertised = cluster.host if cluster.advertise is None else cluster.advertise.rpartition(":")[0].strip("[]")
    if not all(files) and not (is_loopback(cluster.host) and is_loopback(advertised)):
        raise ConfigError(
            f"cluster.host = {cluster.host!r} (from {_source_of('cluster.host', values)}) would be reachable from other"
            " machines without TLS; set cluster.cert_file, cluster.key_file and cluster.ca_file"
        )


def _source_of(key: str, values: Mapping[str, settings.Value]) -> str:
    return values[key].source if key in values else "the default"
