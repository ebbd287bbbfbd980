"""The form in which a session goes from one server to the next (docs/cluster.md, "Sessions that go on")."""

import msgspec

from babelbus.protocols.worterbuch.names import Symbols
from babelbus.protocols.worterbuch.privileges import Privileges


class KeptSubscription(msgspec.Struct, frozen=True, array_like=True):
    """A subscription to a key or a pattern: the arguments of a `Subscriber`."""

    transaction_id: int
    subject: str
    pattern: str | None
    unique: bool
    aggregate_ms: int | None


class KeptNames(msgspec.Struct, frozen=True, array_like=True):
    """A subscription to the names below a key, and the names that were sent last."""

    transaction_id: int
    parent: str | None
    names: list[str] | None


class KeptWait(msgspec.Struct, frozen=True, array_like=True):
    """The waits for a lock, and the number of their place in its queue; see `Locks.waits`."""

    key: str
    place: int
    waits: tuple[int, ...]


class KeptSession(msgspec.Struct, frozen=True):
    """Everything that a client has told its session, or proved."""

    client_id: str
    transport_name: str
    """"TCP" or "WS"."""
    profile: str
    symbols: Symbols
    privileges: Privileges | None
    locked: bool
    """Whether the client still has to show a token."""
    greeted: bool
    sends_keepalives: bool
    subscriptions: list[KeptSubscription]
    names: list[KeptNames]
    shown: list[tuple[str, bytes]]
    """Values that the client itself has shown below `$SYS`, and the version that it speaks."""
    streams: dict[int, str]
    """The keys that `sPubInit` has bound to transaction ids."""
    locks: list[str]
    waits: list[KeptWait]
    has_testament: bool = False
    """Whether the state has a testament of the client."""


encode_session = msgspec.msgpack.Encoder().encode
decode_session = msgspec.msgpack.Decoder(KeptSession).decode
