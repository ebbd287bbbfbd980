"""Messages that are pushed to a client over TCP, and its acknowledgements (docs/specifications/eventmesh.md, 3.7)."""

from collections.abc import Collection, Sequence

from babelbus.core.groups import Delivery, Holder, Member
from babelbus.core.record import Event
from babelbus.protocols.contract import Outbox
from babelbus.protocols.eventmesh import messages as m
from babelbus.protocols.eventmesh.frames import (
    FRAME_BYTES_MAX,
    OLD,
    TAILS,
    TOO_LARGE,
    FrameDecoder,
    begin_header,
    encode_head,
)
from babelbus.protocols.eventmesh.hub import PROTOCOL, Hub
from babelbus.protocols.eventmesh.records import encode_body
from babelbus.protocols.eventmesh.requests import Requests
from babelbus.protocols.eventmesh.subscriptions import Subscribed


class Pushes:
    """The pushes to one client: records of groups, which the client acknowledges, and live events."""

    def __init__(
        self, hub: Hub, outbox: Outbox, decoder: FrameDecoder, requests: Requests, subscribed: Collection[str]
    ) -> None:
        """Begin with nothing; `decoder` has the framing of the client, `subscribed` its topics at each moment."""
        self._hub = hub
        self._outbox = outbox
        self._decoder = decoder
        self._requests = requests
        self._subscribed = subscribed
        self._held: dict[str, Delivery] = {}
        """Pushes that the client has not acknowledged, by their `seq`; without payloads."""
        self._done: dict[Holder, list[Delivery]] = {}
        """Deliveries that the client has acknowledged, until `settle`."""

    @property
    def are_held(self) -> bool:
        """Whether the client has not acknowledged all of them."""
        return bool(self._held)

    def deliver(self, subscribed: Subscribed, deliveries: Sequence[Delivery]) -> None:
        """Send records of a group."""
        member = subscribed.member
        assert member is not None
        held, name, topic, surplus = self._held, subscribed.push, subscribed.item.topic, self._decoder.answer_surplus
        next_number, strict, more = self._hub.next_number, surplus == OLD, dict[str, str]()
        begin, tails = begin_header(name) + b'0,"seq":"', TAILS
        parts: list[bytes] = []
        too_large: list[Delivery] = []
        for one in deliveries:
            seq = str(next_number())
            flavour, body = encode_body(topic, one.payload, one.headers, more, strict=strict)
            head = encode_head(surplus, begin + seq.encode() + tails[flavour], len(body))
            if len(head) + len(body) > FRAME_BYTES_MAX:  # the client would close the connection, each time (3.1)
                too_large.append(one.without_content())
                continue
            parts += head, body
            held[seq] = one.without_content()
        if too_large:
            self._hub.reject(member, too_large, TOO_LARGE)
        self._send(b"".join(parts))
        if self._outbox.full:
            member.hold()

    def broadcast(self, subscribed: Subscribed, events: Sequence[Event]) -> None:
        """Send live events; events that the client does not take are dropped."""
        for event in events:
            if self._outbox.full:
                self._hub.metrics.live_dropped_total.labels(PROTOCOL, "slow").inc()
                continue
            seq, topic = b'"%d"' % self._hub.next_number(), subscribed.item.topic
            push = self._requests.encode(m.PUSH_BROADCAST, seq, topic, event.payload, event.headers)
            if len(push) > FRAME_BYTES_MAX:
                self._hub.metrics.live_dropped_total.labels(PROTOCOL, "too_large").inc()
            else:
                self._send(push)
                self._hub.delivered.inc(1, len(push))

    def _send(self, data: bytes) -> None:
        self._outbox.answer(lambda: data, len(data))

    def acknowledged(self, seq: str | int | None) -> None:
        """Handle the acknowledgement of a push, or of what may be a question; `settle` tells the groups."""
        name = str(seq)
        found = self._held.pop(name, None)
        if found is None:
            self._requests.acknowledged(name, subscribes=bool(self._subscribed))
        elif found.lease is not None:
            done, member = self._done, found.lease.member
            if member in done:
                done[member].append(found)
            else:
                done[member] = [found]

    def settle(self) -> None:
        """Acknowledge the deliveries that the client has acknowledged."""
        if not self._done:
            return
        done, self._done = self._done, {}
        for member, deliveries in done.items():
            assert isinstance(member, Member)
            if not member.closed:
                member.ack(deliveries)

    def forget(self, member: Member | None) -> None:
        """Drop what a member that has left was pushed."""
        for seq in [seq for seq, one in self._held.items() if one.lease is not None and one.lease.member is member]:
            del self._held[seq]

    def clear(self) -> None:
        """Drop all pushes: the connection is gone."""
        self._held.clear()
