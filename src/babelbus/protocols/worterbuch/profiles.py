"""The dialects of Wörterbuch: what each client age says and understands.

Specification: docs/specifications/worterbuch.md, 1, 11 and 13.

Store, subscriptions and `$SYS` are the same for all; a profile only decides which messages there are and how they look.
"""

from collections.abc import Iterable
from enum import Enum

import msgspec
from msgspec.structs import replace

from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.errors import ErrorCode
from babelbus.protocols.worterbuch.messages import ServerInfo, Version
from babelbus.protocols.worterbuch.names import USUAL, Symbols

Kinds = frozenset[type[m.ClientMessage]]


class Greeting(Enum):
    """The first message of a connection."""

    HANDSHAKE = "handshake"
    """The client's `handshakeRequest`; the server is silent until then."""
    WELCOME = "welcome"
    """The server's `welcome`."""


class InfoForm(Enum):
    """Which members `info` has in `welcome`: strict clients take no other (section 13.2)."""

    VERSIONS = "versions"
    """All versions and the one that worterbuch-js looks for (main profile)."""
    EXACT = "exact"
    """One version."""
    HASHED = "hashed"
    """Server 0.42: one version, and `authenticationRequired`."""
    EITHER = "either"
    """All members of `EXACT` and of `HASHED`, for clients of both that take more than they know."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One dialect."""

    name: str
    """By which the configuration chooses it."""
    version: Version
    kinds: Kinds
    """The client messages that it has."""
    error_code_max: int
    """The highest code, besides 255, that its clients read; the Rust ones leave at an unknown one."""
    greeting: Greeting = Greeting.WELCOME
    info_form: InfoForm = InfoForm.EXACT
    pairs: bool = False
    """Whether `state` carries the key beside the value."""
    keepalive: bool = False
    """Whether the server must say something every second, a keepalive if there is nothing else."""
    deletions: bool = True
    """Whether its clients read events of deletions."""
    historic_wildcards: bool = False
    """Whether errors are those of servers 0.30 to 0.34: 0 for any wildcard in `set`, 2 for a second `#`."""

    @property
    def protocol_version(self) -> str:
        """The version as clients write it."""
        return "{}.{}".format(*self.version)

    def refusal(self, message: m.ClientMessage) -> ErrorCode | None:
        """Return the error that answers a message which this dialect does not have, `None` for one that it has.

        `NOT_IMPLEMENTED` is followed by the end of the connection (section 4), `OTHER` (`export`, `import`) is not.
        """
        if type(message) in self.kinds:
            return None
        if self.greeting is Greeting.HANDSHAKE and isinstance(message, m.Export | m.Import):
            return ErrorCode.OTHER
        return ErrorCode.NOT_IMPLEMENTED

    def error_code(self, code: int) -> int:
        """Return the code that tells this client of an error: for one that it does not know 255, for 14 rather 10."""
        if code <= self.error_code_max:
            return code
        if code == ErrorCode.UNAUTHORIZED and self.error_code_max >= ErrorCode.AUTHORIZATION_FAILED:
            return ErrorCode.AUTHORIZATION_FAILED
        return ErrorCode.OTHER

    def info(self, server_version: str, *, authorization: bool) -> ServerInfo:
        """Return what `welcome` tells of the server; `authorization`: whether a token is needed."""
        form = self.info_form
        hashed = form in (InfoForm.HASHED, InfoForm.EITHER)
        return ServerInfo(
            version=None if form is InfoForm.HASHED else server_version,
            supported_protocol_versions=MAIN_VERSIONS if form is InfoForm.VERSIONS else None,
            # worterbuch-js compares it literally, and knows 0.11.
            protocol_version="0.11" if form is InfoForm.VERSIONS else self.protocol_version,
            authorization_required=None if form is InfoForm.HASHED else authorization,
            authentication_required=authorization if hashed else None,
        )


MAIN_VERSIONS: tuple[Version, ...] = ((0, 11), (1, 1))

_IN_0_3: Kinds = frozenset((m.Handshake, m.Get, m.PGet, m.Set, m.Subscribe, m.PSubscribe, m.Unsubscribe, m.Keepalive))
_IN_0_4: Kinds = _IN_0_3 | {m.Delete, m.PDelete}
_IN_0_5: Kinds = _IN_0_4 | {m.Publish}
_IN_0_6: Kinds = _IN_0_5 | {m.Ls, m.SubscribeLs, m.UnsubscribeLs}
_IN_0_7: Kinds = (_IN_0_6 - {m.Handshake}) | {m.Authorization}
_IN_0_9: Kinds = _IN_0_7 | {m.PLs}
_IN_0_10: Kinds = _IN_0_9 | {m.SPubInit, m.SPub}
_IN_0_11: Kinds = _IN_0_10 - {m.Keepalive}
_SWITCHED: Kinds = _IN_0_11 | {m.ProtocolSwitch}
_IN_1_1: Kinds = _SWITCHED | {m.CGet, m.CSet, m.Lock, m.AcquireLock, m.ReleaseLock}


def _handshaken(minor: int, kinds: Kinds, error_code_max: int) -> Profile:
    return Profile(
        name=f"0.{minor}",
        version=(0, minor),
        kinds=kinds,
        error_code_max=error_code_max,
        greeting=Greeting.HANDSHAKE,
        pairs=True,
        keepalive=minor >= 6,  # of later 0.6 servers; older clients know none
        deletions=minor >= 4,
        historic_wildcards=minor <= 5,
    )


V0_3 = _handshaken(3, _IN_0_3, ErrorCode.PROTOCOL_NEGOTIATION_FAILED)
V0_4 = _handshaken(4, _IN_0_4, ErrorCode.READ_ONLY_KEY)
V0_5 = _handshaken(5, _IN_0_5, ErrorCode.READ_ONLY_KEY)
V0_6 = _handshaken(6, _IN_0_6, ErrorCode.READ_ONLY_KEY)

V0_7_OF_0_43 = Profile(
    name="0.7-0.43",
    version=(0, 7),
    kinds=_IN_0_7,
    error_code_max=ErrorCode.UNAUTHORIZED,
    pairs=True,
    keepalive=True,
)
"""As server 0.43 spoke it, for clients that take no unknown member (Java)."""
V0_7 = replace(
    V0_7_OF_0_43,
    name="0.7",
    kinds=_IN_0_7 | {m.Authentication},
    error_code_max=ErrorCode.MISSING_VALUE,
    info_form=InfoForm.EITHER,
)
"""For clients of server 0.42 and of 0.43 that take unknown members of `welcome` (JavaScript, Rust)."""
V0_7_OF_0_42 = replace(V0_7, name="0.7-0.42", kinds=V0_7.kinds - {m.Authorization}, info_form=InfoForm.HASHED)
"""As server 0.42 spoke it, for clients that take no unknown member (Java)."""
V0_8 = replace(V0_7_OF_0_43, name="0.8", version=(0, 8))
V0_9 = replace(V0_8, name="0.9", version=(0, 9), kinds=_IN_0_9)
V0_10 = Profile(name="0.10", version=(0, 10), kinds=_IN_0_10, error_code_max=ErrorCode.NO_PUB_STREAM, keepalive=True)
V0_11 = Profile(name="0.11", version=(0, 11), kinds=_IN_0_11, error_code_max=ErrorCode.NO_PUB_STREAM)
"""For endpoints of strict clients; main endpoints have `MAJOR_0`."""

MAJOR_0 = Profile(
    name="main-0",
    version=(0, 11),
    kinds=_SWITCHED,
    error_code_max=ErrorCode.NO_PUB_STREAM,
    info_form=InfoForm.VERSIONS,
)
"""A connection to a main endpoint after a switch to major 0."""
MAIN = Profile(
    name="main",
    version=(1, 1),
    kinds=_IN_1_1,
    # Newer codes came inside 1.1, which says nothing of a client's age; 22 is only sent to who sent `acquireLock`.
    error_code_max=ErrorCode.LOCK_ACQUISITION_CANCELLED,
    info_form=InfoForm.VERSIONS,
)
"""A connection to a main endpoint, as it begins and after a switch to major 1."""

HANDSHAKES = (V0_6, V0_5, V0_4, V0_3)
"""The profiles that a handshake may choose, best first."""
PROFILES = {
    one.name: one for one in (MAIN, *reversed(HANDSHAKES), V0_7, V0_7_OF_0_42, V0_7_OF_0_43, V0_8, V0_9, V0_10, V0_11)
}
"""The profiles that an endpoint may be configured to speak, by name."""


def choose_handshake(versions: Iterable[Version]) -> Profile | None:
    """Return the highest of 0.3 to 0.6 that a handshake offers, `None` if it offers none."""
    offered = set(versions)
    return next((one for one in HANDSHAKES if one.version in offered), None)


def for_major(version: int) -> Profile | None:
    """Return what a main endpoint speaks after a switch to a major version, `None` if it has none."""
    return {0: MAJOR_0, 1: MAIN}.get(version)


class Endpoint(msgspec.Struct, frozen=True):
    """The dialect of a port or path, and the characters of its keys."""

    profile: Profile
    symbols: Symbols = USUAL
