"""The listeners of each protocol."""

from typing import Annotated, Literal

import msgspec

from babelbus.config.listeners import Connections, SpeaksTls
from babelbus.config.settings import of
from babelbus.units import MIB


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
