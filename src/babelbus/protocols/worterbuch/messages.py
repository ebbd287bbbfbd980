"""What can be said in Wörterbuch (docs/specifications/worterbuch.md, sections 4, 5, 6 and 13).

A value is its JSON text as the client wrote it, in bytes of its own. Transaction ids are below 2^64.
"""

from typing import Annotated

import msgspec

TransactionId = Annotated[int, msgspec.Meta(ge=0)]
Version = tuple[int, int]
"""(major, minor)"""


class ProtocolSwitch(msgspec.Struct, frozen=True, gc=False):
    """Speak the newest version of this major number from now on."""

    version: TransactionId


class Authorization(msgspec.Struct, frozen=True, gc=False, rename={"token": "authToken"}):
    """This JWT says what I may do."""

    token: str


class Authentication(msgspec.Struct, frozen=True, gc=False, rename={"token": "authToken"}):
    """The hash of my client id and the shared secret (servers 0.42)."""

    token: str


class Handshake(msgspec.Struct, frozen=True, gc=False):
    """The first message of 0.3 to 0.6: the versions that the client speaks, and what it leaves behind."""

    versions: tuple[Version, ...]
    last_will: tuple[tuple[str, bytes], ...] = ()
    grave_goods: tuple[str, ...] = ()


class Get(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Return the value of a key."""

    transaction_id: TransactionId
    key: str


class CGet(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Return the value of a key and its version."""

    transaction_id: TransactionId
    key: str


_PATTERN = {
    "transaction_id": "transactionId",
    "pattern": "requestPattern",
    "aggregate_ms": "aggregateEvents",
    "live_only": "liveOnly",
}


class PGet(msgspec.Struct, frozen=True, gc=False, rename=_PATTERN):
    """Return all keys that match, with their values."""

    transaction_id: TransactionId
    pattern: str


class Set(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Set a key."""

    transaction_id: int
    key: str
    value: bytes


class SetRun(msgspec.Struct, frozen=True):
    """Many `Set` messages in their order, by columns: what a client sends that loads or feeds the tree."""

    transaction_ids: list[int]
    keys: list[str]
    values: list[bytes]

    def messages(self) -> list[Set]:
        """Return them one by one."""
        return list(map(Set, self.transaction_ids, self.keys, self.values))


class CSet(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Set a key if it has this version."""

    transaction_id: int
    key: str
    value: bytes
    version: int


class SPubInit(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Bind this transaction id to a key, for `SPub`."""

    transaction_id: TransactionId
    key: str


class SPub(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Publish to the key that is bound to this transaction id."""

    transaction_id: int
    value: bytes


class Publish(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Tell the subscribers of a key, and store nothing."""

    transaction_id: int
    key: str
    value: bytes


class Subscribe(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Tell me of a key; with `unique` only when its value changes, with `live_only` not what it holds now."""

    transaction_id: int
    key: str
    unique: bool = False
    live_only: bool = False


class PSubscribe(msgspec.Struct, frozen=True, gc=False, rename=_PATTERN):
    """Tell me of all keys that match; `aggregate_ms` collects events for so many milliseconds."""

    transaction_id: int
    pattern: str
    unique: bool = False
    aggregate_ms: int | None = None
    live_only: bool = False


class Unsubscribe(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """End the subscription with this transaction id."""

    transaction_id: TransactionId


class Delete(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Delete a key."""

    transaction_id: TransactionId
    key: str


class PDelete(msgspec.Struct, frozen=True, gc=False, rename=_PATTERN):
    """Delete all keys that match; with `quiet` the answer does not list them."""

    transaction_id: int
    pattern: str
    quiet: bool = False


class Ls(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """List the names below a key, `None` for the first elements of all keys."""

    transaction_id: TransactionId
    parent: str | None = None


class PLs(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={"transaction_id": "transactionId", "parent_pattern": "parentPattern"},
    omit_defaults=True,
):
    """List the names below all keys that match."""

    transaction_id: TransactionId
    parent_pattern: str | None = None


class SubscribeLs(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True):
    """Tell me of the names below a key."""

    transaction_id: TransactionId
    parent: str | None = None


class UnsubscribeLs(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """End the ls subscription with this transaction id."""

    transaction_id: TransactionId


class Lock(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Lock a key, or fail."""

    transaction_id: TransactionId
    key: str


class AcquireLock(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Lock a key as soon as it is free."""

    transaction_id: TransactionId
    key: str


class ReleaseLock(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Unlock a key."""

    transaction_id: TransactionId
    key: str


class Transform(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Reserved; no server has it."""

    transaction_id: int
    key: str
    template: bytes


class Export(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Write a file on the server (0.3 to 0.6); refused."""

    transaction_id: TransactionId
    path: str


class Import(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Read a file on the server (0.3 to 0.6); refused."""

    transaction_id: TransactionId
    path: str


class Keepalive(msgspec.Struct, frozen=True, gc=False):
    """I am still here (servers 0.37.1 to 0.46, both directions)."""


ClientMessage = (
    ProtocolSwitch
    | Authorization
    | Authentication
    | Handshake
    | Get
    | CGet
    | PGet
    | Set
    | CSet
    | SPubInit
    | SPub
    | Publish
    | Subscribe
    | PSubscribe
    | Unsubscribe
    | Delete
    | PDelete
    | Ls
    | PLs
    | SubscribeLs
    | UnsubscribeLs
    | Lock
    | AcquireLock
    | ReleaseLock
    | Transform
    | Export
    | Import
    | Keepalive
)


class ServerInfo(msgspec.Struct, frozen=True, gc=False, rename="camel", omit_defaults=True, kw_only=True):
    """What `welcome` and `/info` tell of the server; which members there are depends on the profile (section 13.2)."""

    version: str | None = None
    supported_protocol_versions: tuple[Version, ...] | None = None
    protocol_version: str
    authorization_required: bool | None = None
    authentication_required: bool | None = None
