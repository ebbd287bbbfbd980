"""The meaning of the packets of one sbus client (docs/specifications/sbus.md, sections 5 to 9)."""

from functools import partial

import msgspec

from babelbus.core.access import ANONYMOUS, AccessRefusedError, Action, Identity, Narrowing, has_lost, refusal
from babelbus.core.flow_policy import Flow
from babelbus.core.quotas import QuotaExceededError
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.router import Subscription
from babelbus.core.subject import exactly
from babelbus.errors import RemoteProtocolError
from babelbus.protocols.sbus import messages
from babelbus.protocols.sbus.codec import MSG, decode_head, encode_whoami
from babelbus.protocols.sbus.credentials import Credentials, patterns_of
from babelbus.protocols.sbus.hub import Hub, Sessions, source_of
from babelbus.protocols.sbus.patterns import SbusPattern, subject_of
from babelbus.protocols.sbus.ports import Port, Send
from babelbus.protocols.sbus.rooted import Edge
from babelbus.records.envelope import SOURCE_HEADER
from babelbus.units import MIB
from babelbus.wire.packets import Packets

UNSTORED_BYTES_MAX = 8 * MIB
"""Packets of one client that wait for the disk: sbus acknowledges nothing, so nothing else slows a publisher down."""


class _Held(msgspec.Struct):
    """A pattern of the client: how many times it is stored, and the subscriptions that stand for it in the router."""

    count: int
    subscriptions: list[Subscription]


class Session:
    """One client: what it subscribed to, who it is, whether it hears itself."""

    def __init__(self, hub: Hub, port: Port, credentials: Credentials) -> None:
        self.number = hub.next_number()
        self.port = port
        self.credentials = credentials
        self._hub = hub
        self._held: dict[bytes, _Held] = {}
        self._stored = 0
        self.received_bytes = 0
        self._pattern_bytes = 0
        self._echo = True
        self._unstored_bytes = 0
        self._headers = ((SOURCE_HEADER, source_of(credentials).encode()),)
        self.principal = hub.identify(credentials)
        root = self.principal.root
        self._edge = None if root is None else Edge(root)
        self.send: Send = port.send if root is None else self._send_outward

    def receive(self, packets: Packets, first: int, last: int) -> None:
        """Handle packets `first` to `last` in their order.

        Packets that follow each other and have the same receivers are one run, which each receiver gets with one call.

        Raises:
            RemoteProtocolError: the client broke the protocol; what came before it was done.
        """
        hub = self._hub
        if self._edge is not None:
            count = last - first
            packets = self._edge.inward(packets, first, last)
            first, last = 0, len(packets)
            if last < count:
                hub.drop("inexpressible", count - last)
        size_bytes = sum(packets.sizes[first:last])
        self.received_bytes += size_bytes
        hub.received.inc(last - first, size_bytes)
        fan_of = hub.fanout.fans.get
        data, starts, sizes = packets.data, packets.starts, packets.sizes
        find = data.find
        events: list[Event] = []
        unstored = first
        sessions: Sessions = ()
        rights = self.principal.rights
        try:
            for number in range(first, last):
                start = starts[number]
                end = start + sizes[number]
                nul = find(b"\0", start, end)
                head = data[start : end if nul < 0 else nul]
                fan = fan_of(head)
                if fan is None or not fan.route.valid:
                    if not head.startswith(MSG):  # takes effect exactly between its neighbours (section 6)
                        self._send(packets, first, number, sessions)
                        first = number + 1
                        if events:
                            self._store(events, sum(sizes[unstored:number]))
                            events = []
                        unstored = number + 1
                        self._command(head)
                        continue
                    fan = hub.fanout.find(head)
                if rights is not None and (
                    not rights.may(Action.PUBLISH, fan.subject)
                    or (
                        fan.retaining is not None
                        and rights.denies_topic(Action.WRITE_STATE, fan.retaining)
                        and rights.denies(Action.WRITE_STATE, exactly(fan.subject))
                    )
                ):
                    self._send(packets, first, number, sessions)
                    first = number + 1
                    may_publish = rights.may(Action.PUBLISH, fan.subject)
                    refusal(self.principal, Action.WRITE_STATE if may_publish else Action.PUBLISH, fan.subject)
                    hub.drop("refused")
                    continue
                if fan.receivers is not sessions:
                    self._send(packets, first, number, sessions)
                    first = number
                    sessions = fan.receivers
                if fan.outward:
                    payload = b"" if nul < 0 else data[nul + 1 : end]
                    events.append(Event(fan.subject, payload, None, self._headers, 0, hub.receiver))
            self._send(packets, first, last, sessions)
        finally:
            if events:
                self._store(events, sum(sizes[unstored:last]))

    def _store(self, events: list[Event], size_bytes: int) -> None:
        """Publish events to the core; read no more while much is not stored: a flood would delay every flush."""
        receipt = self._hub.publish(self.principal, events)
        if receipt.done:
            return
        self._unstored_bytes += size_bytes
        self.port.hold(self._unstored_bytes > UNSTORED_BYTES_MAX)

        def stored(_receipt: Promise) -> None:
            self._unstored_bytes -= size_bytes
            self.port.hold(self._unstored_bytes > UNSTORED_BYTES_MAX)

        receipt.when_done(stored)

    def _send(self, packets: Packets, first: int, last: int, sessions: Sessions) -> None:
        """Send one run to its receivers; wait for those who cannot take it."""
        if first == last or not sessions:
            return
        port = self.port
        for session in sessions:
            if session is self and not self._echo:
                continue
            if session.send(packets, first, last, stoppable=True):
                port.wait_for(session.port)
        receivers = len(sessions) - (not self._echo and self in sessions)
        self._hub.delivered.inc((last - first) * receivers, sum(packets.sizes[first:last]) * receivers)

    def _send_outward(self, packets: Packets, first: int, last: int, *, stoppable: bool) -> bool:
        """Send packets with the keys as the client knows them; see `Port.send`."""
        assert self._edge is not None
        return self.port.send(self._edge.outward(packets, first, last), 0, last - first, stoppable=stoppable)

    def _command(self, head: bytes) -> None:
        match decode_head(head):
            case messages.Subscribe(pattern):
                self._subscribe(pattern)
            case messages.Unsubscribe(pattern):
                self._unsubscribe(pattern)
            case messages.Control(key):
                self._control(key)

    def _subscribe(self, pattern: bytes) -> None:
        settings = self._hub.settings
        if self._edge is not None:
            pattern = self._edge.absolute(pattern)
        if self._stored >= settings.patterns_max:
            raise RemoteProtocolError(f"more than {settings.patterns_max} subscriptions")
        self._stored += 1
        held = self._held.get(pattern)
        if held is not None:
            held.count += 1
            return
        if self._pattern_bytes + len(pattern) > settings.patterns_bytes_max:
            raise RemoteProtocolError(f"patterns of more than {settings.patterns_bytes_max} bytes")
        self._pattern_bytes += len(pattern)
        hub = self._hub
        held = self._held[pattern] = _Held(1, [])
        for text in patterns_of(pattern, self.credentials):
            try:
                subscription = hub.subscribe(
                    SbusPattern(text), hub.receiver, shared=True, owner=self, principal=self.principal
                )
            except (AccessRefusedError, QuotaExceededError) as error:  # the answer of sbus is to disconnect
                raise RemoteProtocolError(str(error)) from error
            held.subscriptions.append(subscription)

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The patterns of the client, and of each whether only a part of it is granted."""
        return [
            (pattern.decode("utf-8", "replace"), any(one.narrowing is Narrowing.PART for one in held.subscriptions))
            for pattern, held in self._held.items()
        ]

    def access_changed(self) -> bool:
        """Update the principal after a change of the table; return whether the client has to go.

        A client that proved nothing, or was not asked, becomes the principal that the process is now. If the process
        was another principal, or had another root, the client has to go.
        """
        before, now = self.principal, self._hub.identify(self.credentials)
        if has_lost(before, now):
            self.port.keep(partial(self._may_hear, now))
        if now == before:
            return False
        if now.root != before.root:
            return True
        if before.rights is not None and now.rights is not None and before.name not in (now.name, ANONYMOUS):
            return True
        self.principal = now
        for held in self._held.values():
            for subscription in held.subscriptions:
                subscription.principal = now
        return False

    def _may_hear(self, principal: Identity, packet: bytes) -> bool:
        """Return whether a packet that waits for the client is for it."""
        key = packet[len(MSG) :].partition(b"\0")[0]
        if self._edge is not None:
            key = self._edge.absolute(key)
        return self._hub.router.may_hear(principal, subject_of(key))

    def _unsubscribe(self, pattern: bytes) -> None:
        if self._edge is not None:
            pattern = self._edge.absolute(pattern)
        held = self._held.get(pattern)
        if held is None:  # the document lets the server disconnect; nobody does
            return
        self._stored -= 1
        held.count -= 1
        if not held.count:
            del self._held[pattern]
            self._pattern_bytes -= len(pattern)
            for subscription in held.subscriptions:
                self._hub.router.remove(subscription)

    def _control(self, key: bytes) -> None:
        """Handle a control message; an unknown one is ignored (section 7)."""
        port = self.port
        if key == messages.WHOAMI:
            own = self.credentials
            port.reply(encode_whoami(own.gid, own.uid, own.pid))
        elif key in (messages.ECHO_ON, messages.ECHO_OFF):
            self._echo = key == messages.ECHO_ON
        else:
            flow = _changed(port.flow, key)
            if flow is not None:
                port.flow = flow
                port.flow_changed()

    def close(self) -> None:
        """Remove the subscriptions of the client."""
        for held in self._held.values():
            for subscription in held.subscriptions:
                self._hub.router.remove(subscription)
        self._held.clear()
        self._stored = self._pattern_bytes = 0


def _changed(flow: Flow, key: bytes) -> Flow | None:
    for field, keys in (("soft", messages.SOFT_MODES), ("hard", messages.HARD_MODES), ("order", messages.ORDERS)):
        if key in keys:
            return msgspec.structs.replace(flow, **{field: keys[key]})
    return None
