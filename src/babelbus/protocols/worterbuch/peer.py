"""A client as the hub sees it: who it is, what it subscribed to, and how what it did not ask for reaches it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from babelbus.core.state import Change
from babelbus.protocols.contract import Sender
from babelbus.protocols.worterbuch.hub import Hub
from babelbus.protocols.worterbuch.subscriber import Framing, Subscriber


class Peer(ABC):
    """One client of the hub, whatever it speaks. `source` names it in what it changes."""

    framing: Framing

    def __init__(
        self,
        hub: Hub,
        outbox: Sender,
        close: Callable[[], None],
        *,
        client_id: str,
        transport_name: str,
        address: str | None,
    ) -> None:
        self.client_id = client_id
        self.transport_name = transport_name
        self.address = address
        self.source = f"worterbuch:{client_id}"
        self.subscribers: dict[int, Subscriber] = {}
        self.ls_subscribers: dict[int, Subscriber] = {}
        self.counted = 0
        """Subscriptions that `$SYS` shows."""
        self._hub = hub
        self._outbox = outbox
        self._close = close
        self._pushed: list[bytes] = []
        self._pushed_bytes = 0
        self.sent = False
        """Whether anything was sent since the last tick."""
        self._over = False

    @property
    @abstractmethod
    def form(self) -> str:
        """Clients of an equal form get the same bytes for the same change and subscription."""

    @abstractmethod
    def encode_run(self, subscriber: Subscriber, changes: Sequence[Change]) -> list[bytes]:
        """Return the messages that a run of changes is for a subscriber of this client, one each."""

    @abstractmethod
    def encode_collected(self, subscriber: Subscriber, changes: Sequence[Change]) -> bytes:
        """Return the one message that changes are which were collected: all are deletions, or none is."""

    @abstractmethod
    def encode_names(self, subscriber: Subscriber, names: Sequence[str]) -> bytes:
        """Return the message that tells an ls subscriber the names below its parent."""

    @abstractmethod
    def tick(self) -> None:
        """A second has passed."""

    def push(self, texts: Sequence[bytes]) -> None:
        """Send messages that answer no request with the next `flush`."""
        self.push_bytes(self.framing.encode(texts))

    def push_bytes(self, data: bytes) -> None:
        """Do the same with messages in their frames."""
        self._pushed.append(data)
        self._pushed_bytes += len(data)

    def flush(self) -> None:
        """Send what was pushed, behind the answers that were promised before; who does not read has a bound."""
        pushed = self._pushed
        if not pushed:
            return
        self._pushed = []
        size, self._pushed_bytes = self._pushed_bytes, 0
        if self._over:
            return
        outbox, settings = self._outbox, self._hub.settings
        if outbox.size_bytes + size > settings.queue_bytes_max and outbox.size_bytes:
            self._hub.drop("slow", len(pushed))
            if settings.slow == "disconnect":
                self._over = True
                self._close()
            return
        self.sent = True
        data = pushed[0] if len(pushed) == 1 else b"".join(pushed)
        outbox.answer(lambda: data, size)
