"""The connections of a server as its console shows them, whatever their protocol."""

from typing import Protocol

import msgspec


class SubscriptionInfo(msgspec.Struct, frozen=True):
    """A pattern, or a topic, that a client reads live; `is_narrowed` says that only a part of it is granted."""

    pattern: str
    is_narrowed: bool = False


class ConnectionInfo(msgspec.Struct, frozen=True):
    """One connection at this moment. `sent_bytes` is `None` where nobody counts them."""

    open_seconds: float
    received_bytes: int
    sent_bytes: int | None
    queue_bytes: int
    is_encrypted: bool
    subscriptions: list[SubscriptionInfo]
    edge: str | None = None
    """Name of the edge that the client is connected to; `None` for a client of this process."""


class Connected(Protocol):
    """One open connection."""

    number: int
    """Counts the connections of the protocol, so that no two have one number."""

    @property
    def peer(self) -> str:
        """The address of the client, or its process."""

    @property
    def principal_name(self) -> str | None:
        """Name of the principal; `None` while that is unknown."""

    def describe(self) -> ConnectionInfo:
        """Return the figures of now."""

    def abort(self) -> None:
        """Close at once."""
