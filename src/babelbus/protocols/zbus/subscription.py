"""A subscription of one connection to one channel: what its member of the group is handed becomes deliveries."""

from collections.abc import Sequence
from typing import Protocol

from babelbus.core.access import Action, Identity
from babelbus.core.groups import Delivery, Group, Member, RecordFilter
from babelbus.errors import BabelbusError
from babelbus.protocols.zbus.calls import taker_of
from babelbus.protocols.zbus.codec import delivery_tail, encode_deliveries
from babelbus.protocols.zbus.filters import Matches, TagFilter, without
from babelbus.protocols.zbus.hub import Hub
from babelbus.protocols.zbus.messages import Mask, Message


class Receiver(Protocol):
    """The connection that gets the deliveries."""

    def deliver(self, texts: list[bytes]) -> None:
        """Send frames with these texts."""

    def push(self, message: Message) -> bool:
        """Send a message that is no delivery; `False`: the connection does not take what it is sent."""

    @property
    def held(self) -> bool:
        """Whether it takes nothing for now."""


class Subscription:
    """One subscription; see `hub.Subscriber`. `member` is `None` while the channel does not exist (4.5)."""

    def __init__(
        self,
        hub: Hub,
        receiver: Receiver,
        mq: str,
        channel: str,
        *,
        session_id: str,
        address: str,
        principal: Identity,
        proof: str | None,
    ) -> None:
        self.principal = principal
        self.proof = proof
        """The apiKey by which the principal has proved who it is; `None` if the connection alone says who."""
        self.session_id = session_id
        self.address = address
        self.mq = mq
        self.channel = channel
        self.filter: str | None = None
        self.member: Member | None = None
        self._hub = hub
        self._receiver = receiver
        self._tail = delivery_tail(channel)
        self._matches: Matches | None = None
        self._window: int | None = None

    @property
    def window(self) -> int | None:
        """How many more messages it takes."""
        return self._window if self.member is None else self.member.credit

    def set(self, window: int | None, wanted: str | None, matches: Matches | None) -> None:
        """Set another window, and another filter if `wanted` names one."""
        self._window = window
        changed = wanted is not None and (wanted or None) != self.filter  # a refill of a window may name it again
        if changed:
            self.filter = wanted or None
            self._matches = matches if wanted else None
        member = self.member
        if member is not None:
            if changed:
                member.set_filter(self._record_filter())
            member.set_credit(window)

    def join(self, group: Group) -> None:
        """Add the subscription to the group of the channel.

        Raises:
            GroupOwnedError: it belongs to somebody else.
        """
        mask = self._hub.channel_mask(group)
        if mask & Mask.TAKEOVER:
            for other in list(group.members):
                other.leave()
                if isinstance(other.owner, Subscription):
                    other.owner.taken_over()
        self.member = group.join(
            self._deliver,
            credit=self._window,
            wanted=self._record_filter(),
            owner=self,
            exclusive=bool((mask | self._hub.mask_of(self.mq)) & Mask.EXCLUSIVE),
            held=self._receiver.held,
            on_closed=self._closed,
            principal=self.principal,
            address=self.address.removeprefix("/"),
        )

    def taken_over(self) -> None:
        """Handle the loss of the channel: another connection has taken it."""
        self._closed(None)

    def _closed(self, _error: BabelbusError | None) -> None:
        if self.member is not None:
            self._window = self.member.credit
            self.member = None

    def access_changed(self, principal: Identity) -> bool:
        """Update the rights of the principal; return `False` if it may not consume the MQ any more."""
        self.principal = principal
        if self.member is not None:
            self.member.principal = principal
        return self._hub.broker.may_topic(principal, Action.CONSUME, self.mq)

    @property
    def is_copyable(self) -> bool:
        """Whether the subscription has its channel, which no other client takes over: no message tells of either."""
        if self.member is None:
            return False
        group = self._hub.groups.find(self.mq, self.channel)
        return group is not None and not self._hub.channel_mask(group) & Mask.TAKEOVER

    def leave(self) -> None:
        """End the subscription."""
        member, self.member = self.member, None
        if member is not None:
            member.leave()
        self._hub.unsubscribed(self)

    def _record_filter(self) -> RecordFilter | None:
        return None if self._matches is None else TagFilter(self._matches)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        member = self.member
        assert member is not None
        credit = member.credit
        calls = self._hub.calls
        if calls.are_waiting(self.mq):
            taker = taker_of(self.principal, self.session_id, self.address, is_pushed=True)
            calls.handed_out(deliveries, taker)
        given_up = calls.abandoned(self.mq)
        if given_up:
            wanted = without(deliveries, given_up)
            if len(wanted) != len(deliveries):
                member.add_credit(len(deliveries) - len(wanted))
                credit, deliveries = member.credit, wanted
        heads = self._hub.heads(self.mq, self.principal.root).of(deliveries)
        self._receiver.deliver(encode_deliveries(heads, self._tail, credit))
        if member.group.settings.ack == "explicit":
            member.ack(deliveries)  # made by another protocol; here a message is done when it is handed out
