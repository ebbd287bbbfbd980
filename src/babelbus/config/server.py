"""The server as a whole: administration, access, limits of all protocols, its messages."""

from typing import Annotated, Literal

import msgspec

from babelbus.config.listeners import SpeaksTls
from babelbus.config.settings import of
from babelbus.units import MIB


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
    connections_max: Annotated[
        int,
        of("open connections; a client that has proved nothing gives way to a new one, else that is closed at once",
           "count", ge=1),
    ] = 1_000  # fmt: skip
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
