"""The messages of Wörterbuch's clients (docs/specifications/worterbuch.md, sections 4, 5 and 13).

A value is its JSON text as the client wrote it, in bytes of its own. Transaction ids are below 2^64. A flag that the
client left out is `None`.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

TransactionId = Annotated[int, msgspec.Meta(ge=0)]
Version = tuple[int, int]
"""(major, minor)"""


class ClientMessage(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The root of all messages of clients."""


class Request(ClientMessage, frozen=True):
    """A message that is answered under its transaction id."""

    transaction_id: TransactionId


class KeyRequest(Request, frozen=True):
    """A request for one key."""

    key: str


class PatternRequest(Request, frozen=True):
    """A request for all keys that match a pattern."""

    pattern: str = msgspec.field(name="requestPattern")


class ParentRequest(Request, frozen=True, omit_defaults=True):
    """A request for the names below a key, `None` for the first elements of all keys."""

    parent: str | None = None


class ProtocolSwitch(ClientMessage, frozen=True):
    """Speak the newest version of this major number from now on."""

    version: TransactionId


class Token(ClientMessage, frozen=True):
    """A proof of the client's rights."""

    token: str = msgspec.field(name="authToken")


class Authorization(Token, frozen=True):
    """The JWT with the client's privileges."""


class Authentication(Token, frozen=True):
    """The hash of the client's id and the shared secret (servers 0.42)."""


class Handshake(ClientMessage, frozen=True):
    """The first message of 0.3 to 0.6: the versions that the client speaks, and its testament."""

    versions: tuple[Version, ...]
    last_will: tuple[tuple[str, bytes], ...] = ()
    grave_goods: tuple[str, ...] = ()


class Get(KeyRequest, frozen=True):
    """Return the value of a key."""


class CGet(KeyRequest, frozen=True):
    """Return the value of a key and its version."""


class PGet(PatternRequest, frozen=True):
    """Return all keys that match, with their values."""


class Set(KeyRequest, frozen=True):
    """Set a key."""

    value: bytes


class SetRun(msgspec.Struct, frozen=True):
    """A chunk of nothing but `Set` messages by columns, in their order; a chunk holds nothing beside its run."""

    transaction_ids: list[int]
    keys: list[str]
    values: list[bytes]

    def messages(self) -> list[ClientMessage]:
        """Return the messages one by one."""
        return list(map(Set, self.transaction_ids, self.keys, self.values))


class CSet(KeyRequest, frozen=True):
    """Set a key if it has this version."""

    value: bytes
    version: TransactionId


class SPubInit(KeyRequest, frozen=True):
    """Bind this transaction id to a key, for `SPub`."""


class SPub(Request, frozen=True):
    """Publish to the key that is bound to this transaction id."""

    value: bytes


class Publish(KeyRequest, frozen=True):
    """Publish to the subscribers of a key, and store nothing."""

    value: bytes


class Subscribe(KeyRequest, frozen=True):
    """Subscribe to a key; with `unique` only to other values, with `live_only` without the value that it has now."""

    unique: bool | None = None
    live_only: bool | None = None


class PSubscribe(PatternRequest, frozen=True):
    """Subscribe to all keys that match; `aggregate_ms` collects events for so many milliseconds."""

    unique: bool | None = None
    aggregate_ms: TransactionId | None = msgspec.field(name="aggregateEvents", default=None)
    live_only: bool | None = None


class Unsubscribe(Request, frozen=True):
    """End the subscription with this transaction id."""


class Delete(KeyRequest, frozen=True):
    """Delete a key."""


class PDelete(PatternRequest, frozen=True):
    """Delete all keys that match; with `quiet` the answer does not list them."""

    quiet: bool | None = None


class Ls(ParentRequest, frozen=True):
    """List the names below a key."""


class PLs(Request, frozen=True, omit_defaults=True):
    """List the names below all keys that match."""

    parent_pattern: str | None = None


class SubscribeLs(ParentRequest, frozen=True):
    """Subscribe to the names below a key."""


class UnsubscribeLs(Request, frozen=True):
    """End the ls subscription with this transaction id."""


class Lock(KeyRequest, frozen=True):
    """Lock a key, or fail."""


class AcquireLock(KeyRequest, frozen=True):
    """Lock a key as soon as it is free."""


class ReleaseLock(KeyRequest, frozen=True):
    """Unlock a key."""


class Transform(KeyRequest, frozen=True):
    """Reserved; no server has it."""

    template: bytes


class Export(Request, frozen=True):
    """Write a file on the server (0.3 to 0.6); refused."""

    path: str


class Import(Request, frozen=True):
    """Read a file on the server (0.3 to 0.6); refused."""

    path: str


class Keepalive(ClientMessage, frozen=True):
    """The client still lives (servers 0.37.1 to 0.46, both directions)."""


def _leaves(kind: type[ClientMessage]) -> list[type[ClientMessage]]:
    below = [leaf for derived in kind.__subclasses__() for leaf in _leaves(derived)]
    return below or [kind]


KINDS = _leaves(ClientMessage)


def name_of(kind: type[ClientMessage]) -> str:
    """Return the name of a message, which is the one member of its JSON object."""
    name = kind.__name__[0].lower() + kind.__name__[1:]
    return f"{name}Request" if kind in (ProtocolSwitch, Authorization, Authentication, Handshake) else name


def handlers_of(requests: object) -> dict[type, Callable[[Any], bytes]]:
    """Return the methods of an object that have the name of a message, in lower case, by message."""
    methods = {kind: getattr(requests, kind.__name__.lower(), None) for kind in KINDS}
    return {kind: method for kind, method in methods.items() if method is not None}


class ServerInfo(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    """The server in `welcome` and `/info`; the profile decides which members there are (section 13.2)."""

    version: str | None = None
    supported_protocol_versions: tuple[Version, ...] | None = None
    protocol_version: str
    authorization_required: bool | None = None
    authentication_required: bool | None = None
