"""One sbus bus: where a packet goes, found once for each key (docs/protocols/sbus.md, "One bus").

Packets go from sbus to sbus as they are, at once and in order, whether or not a topic records them; the core gets them
as events for topics and for the clients of other protocols, and hands theirs back through `receiver`, one event once.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from babelbus.config import SbusSettings
from babelbus.core.access import Identity
from babelbus.core.fanout import Fan, Fanout
from babelbus.core.publish import Publication, Publish
from babelbus.core.receipt import DONE, Promise, Receipt
from babelbus.core.record import Event
from babelbus.core.router import Route, Router, Subscription
from babelbus.protocols.sbus.codec import MSG
from babelbus.protocols.sbus.credentials import SECRET, Credentials, secret_fields
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from babelbus.protocols.sbus.patterns import key_of, subject_of
from babelbus.protocols.sbus.ports import Port, Send
from babelbus.wire.packets import Packets

if TYPE_CHECKING:
    from babelbus.metrics import Metrics, Traffic

log = logging.getLogger(__name__)

PROTOCOL = "sbus"
Identify = Callable[[Credentials], Identity]


class Client(Protocol):
    """A session of the bus, as the hub sees it. `number` orders the clients by when they connected."""

    number: int
    credentials: Credentials
    port: Port

    @property
    def send(self) -> Send:
        """Sends packets as `Port.send` does, with the keys as the client knows them."""


Sessions = tuple[Client, ...]


def source_of(credentials: Credentials) -> str:
    """Return where the events of a client come from."""
    return f"{PROTOCOL}:uid={credentials.uid},gid={credentials.gid},pid={credentials.pid}"


def identity_of(credentials: Credentials) -> Identity:
    """Return the identity of a client while nobody is asked for rights."""
    return Identity(source_of(credentials), f"uid={credentials.uid}", None)


class HeadFan(Fan[Client]):
    """Where the packets of one head go: to the sessions, in the order in which they connected, and to the core."""

    __slots__ = ("outward", "retaining", "subject")

    def __init__(self, route: Route, sessions: Sessions, subject: str, outward: bool, retaining: str | None) -> None:
        super().__init__(route, sessions)
        self.subject = subject
        self.outward = outward
        self.retaining = retaining
        """The topic that keeps the event as a value of the state, which rows may deny; `None` if none does."""


class Hub:
    """The state that all sbus clients of one server share.

    `publish` takes events to the core, `topic_of` says which topic records a subject, and `retains` whether the topic
    keeps its events as state; without them there are only sbus clients. `subscribe` registers a subscription, or
    refuses it, and `identify` says which principal a process is.
    """

    def __init__(
        self,
        router: Router,
        metrics: "Metrics",
        settings: SbusSettings,
        *,
        publish: Publish | None = None,
        subscribe: Callable[..., Subscription] | None = None,
        identify: Identify = identity_of,
        topic_of: Callable[[str], str | None] = lambda subject: None,
        retains: Callable[[str], bool] = lambda subject: False,
    ) -> None:
        self.router = router
        self.settings = settings
        self.fanout: Fanout[bytes, Client, HeadFan] = Fanout(self._make_fan)
        self.receiver = self._hear  # one object: the router compares by identity
        self.received: Traffic = metrics.live_received(PROTOCOL)
        self.delivered: Traffic = metrics.live_delivered(PROTOCOL)
        self._metrics = metrics
        self.subscribe = subscribe or router.add
        self.identify = identify
        self._publish = publish
        self._topic_of = topic_of
        self._retains = retains
        self._joined = 0

    def next_number(self) -> int:
        """Return the number of a client that connects."""
        self._joined += 1
        return self._joined

    def topics_changed(self) -> None:
        """Find again which topic records which key."""
        self.fanout.clear()

    def drop(self, reason: str, count: int = 1) -> None:
        """Count packets that do not reach a client."""
        self._metrics.live_dropped_total.labels(PROTOCOL, reason).inc(count)

    # -- from sbus ---------------------------------------------------------------------------------------------------

    def _make_fan(self, head: bytes) -> HeadFan:
        """Return where packets with this head (`MSG ` and the key) go."""
        key = head[len(MSG) :]
        subject = subject_of(key)
        route = self.router.route_of(subject)
        secret = secret_fields(key)
        members = {cast("Client", one.owner) for one in route.subscriptions if one.receiver is self.receiver}
        if secret is not None and not self.settings.open_cred:
            members = {one for one in members if one.credentials.fit(secret)}
        ordered = tuple(sorted(members, key=lambda one: one.number))
        others = any(one.receiver is not self.receiver for one in route.subscriptions)
        topic = self._topic_of(subject)
        outward = not _is_internal(key) and (others or topic is not None)
        return HeadFan(route, ordered, subject, outward, topic if outward and self._retains(subject) else None)

    def publish(self, principal: Identity, events: list[Event]) -> Promise:
        """Publish the events of a client to the core."""
        if self._publish is None:
            return DONE
        receipt = self._publish(Publication(principal, PROTOCOL, events))
        receipt.when_done(self._note_receipt)
        return receipt

    def _note_receipt(self, receipt: Receipt) -> None:
        # sbus has no answer that could tell its publisher: the operator is told.
        if receipt.error is not None:
            log.warning("sbus: events were not recorded: %s", receipt.error)

    # -- from the core -----------------------------------------------------------------------------------------------

    def _hear(self, events: Sequence[Event]) -> None:
        """Send what other protocols published: one packet for each event, made once."""
        heads: list[bytes] = []
        packets: list[bytes] = []
        for event in events:
            key = key_of(event.subject)
            payload = event.payload or b""
            if key is None or len(MSG) + len(key) + 1 + len(payload) > PACKET_BYTES_MAX:
                self.drop("inexpressible")
                continue
            head = MSG + key
            heads.append(head)
            packets.append(b"%b\0%b" % (head, payload))
        for run, sessions in self.fanout.runs(packets, heads):
            self._send(run, sessions)

    def _send(self, run: list[bytes], sessions: Sessions) -> None:
        packets = Packets.of(run)
        count, size_bytes = len(run), sum(packets.sizes)
        for session in sessions:
            session.send(packets, 0, count, stoppable=False)
        self.delivered.inc(count * len(sessions), size_bytes * len(sessions))


def _is_internal(key: bytes) -> bool:
    """Return whether a key stays on the bus.

    Other protocols know nothing of credentials, so what is secret is not shown to them and not recorded. `$` begins the
    names of topics that the server keeps for itself.
    """
    return key.startswith((SECRET, b"$"))
