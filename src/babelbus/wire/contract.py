"""A session as its connection sees it, and the connection as sessions of HTTP and WebSocket send through it."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from babelbus.errors import RemoteProtocolError


class Outbox(Protocol):
    """Answers of one connection, sent in order (`protocols.contract.Outbox`)."""

    bytes_max: int
    """Bound of what waits to be sent."""

    @property
    def full(self) -> bool:
        """Whether no more requests should be carried out for now."""

    @property
    def waiting(self) -> int:
        """Answers that are not written yet."""

    def answer(self, encode: Callable[[], bytes], weight: int = 0) -> None:
        """Send the bytes that `encode` returns, behind all earlier answers; `weight` of them count for the bound."""


class Continuation(NamedTuple):
    """The part of a session that another server needs to continue it."""

    owner: str
    """The name of the client as the owner of its testament and its locks."""
    content: bytes
    """In the form of the protocol."""
    consumes: bool = False
    """Whether the client is handed records of consumer groups."""


class Session(Protocol):
    """The meaning of the bytes of one connection. Every call comes from the event loop and may not block."""

    def receive_data(self, data: bytes) -> None:
        """Receive the bytes of one read, and carry out each request that is complete.

        Raises:
            RemoteProtocolError: the peer broke the protocol; close the connection.
            PeerLeavesError: the peer has said its last word.
        """

    def resume(self) -> None:
        """Continue with requests that were put off while the outbox was full."""

    @property
    def busy(self) -> bool:
        """Whether requests are put off."""

    @property
    def established(self) -> bool:
        """Whether the peer has proved who it is; one that does not within the time limit loses its connection."""

    @property
    def unfinished_bytes(self) -> int:
        """Memory of messages that have not come whole, and of a message that was decompressed and is put off."""
        return 0

    @property
    def trusted(self) -> bool:
        """Whether the peer may send more than a small part of a message: it has proved who it is, or need not."""
        return self.established

    @property
    def principal(self) -> str | None:
        """Name of the principal that the client is; `None` while that is unknown."""
        return None

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The patterns that the client reads live, and of each whether only a part of it is granted."""
        return []

    @property
    def is_encrypted(self) -> bool:
        """Whether the protocol itself encrypts what is sent."""
        return False

    def refuse_unfinished(self, text: str, *, later: bool) -> None:
        """Drop the message that has not come whole; answer with the protocol's error if it has one.

        With `later`, the client may send the message again.

        Raises:
            RemoteProtocolError: everything is answered; close the connection.
        """
        raise RemoteProtocolError(text)

    def close(self) -> None:
        """Release everything that the session holds: the connection is gone."""

    @property
    def is_portable(self) -> bool:
        """Whether another server can continue the session, once nothing of it is under way."""
        return False

    def stay(self) -> None:
        """Handle that the session may go on at another server: this one stops, and reads nothing more of the client.

        If the session ends here after all, `end_waits` is called.
        """
        return

    def continuation(self) -> Continuation | None:
        """Return what another server needs to continue the session; `None` if no other can.

        No request of the client is unfinished and no answer outstanding. Everything that the client is to hear of this
        server is sent.
        """
        return None

    @property
    def is_copyable(self) -> bool:
        """Whether a continuation that is made now has no effect here, and stays true until a byte comes or goes.

        Another server continues the copy if this one dies: see `server.copies`.
        """
        return False

    def leave(self) -> None:
        """Release everything that the session holds, without an end: another server continues it."""
        self.close()

    def release(self) -> None:
        """Resume deliveries: the outbox may have room again."""
        return

    def access_changed(self) -> bool:
        """Check the rights of the client again: the table of access changed.

        Returns whether the client may hear or read less than before: what it does not take is not for it any more.
        """
        return False

    def end_waits(self) -> None:
        """Answer requests that wait for events with what there is: the server stops."""
        return

    def end_fetches(self) -> None:
        """Answer requests that wait for records with what there is: the client sends nothing more."""
        return
