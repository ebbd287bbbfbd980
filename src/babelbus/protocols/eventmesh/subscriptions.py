"""One topic of a client that listens: the member of its group, its live subscription, its place among responders."""

from collections.abc import Callable, Sequence
from functools import partial

from babelbus.core.access import Action, may
from babelbus.core.groups import Delivery, Member
from babelbus.core.record import Event
from babelbus.core.request import Question
from babelbus.core.router import Subscription as Live
from babelbus.core.subject import exactly
from babelbus.errors import BabelbusError
from babelbus.protocols.eventmesh import messages as m
from babelbus.protocols.eventmesh.callers import Caller
from babelbus.protocols.eventmesh.hub import Hub
from babelbus.protocols.eventmesh.messages import SubscriptionItem


class Subscribed:
    """A topic that a client has subscribed to, and what the client is to the topic while it listens."""

    __slots__ = ("address", "caller", "item", "live", "member", "responder")

    def __init__(self, item: SubscriptionItem, caller: Caller, address: str) -> None:
        self.item = item
        self.address = address
        self.caller = caller
        self.member: Member | None = None
        self.live: Live | None = None
        self.responder: Live | None = None

    @property
    def topic(self) -> str:
        """The topic; `item` has its name as the client knows it."""
        return self.caller.principal.absolute(self.item.topic)

    @property
    def push(self) -> str:
        """The command of a push (3.7)."""
        if self.item.mode == "BROADCASTING":
            return m.PUSH_BROADCAST
        return m.PUSH_REQUEST if self.item.type == "SYNC" else m.PUSH_ASYNC

    def begin(
        self,
        hub: Hub,
        group: str,
        deliver: "Callable[[Subscribed, Sequence[Delivery]], None]",
        broadcast: "Callable[[Subscribed, Sequence[Event]], None]",
        ask: "Callable[[Subscribed, Question], BabelbusError | None]",
        *,
        held: bool = False,
    ) -> None:
        """Deliver what comes to the topic from now on.

        Raises:
            AccessRefusedError: the principal may not subscribe.
            BabelbusError: the group cannot be.
        """
        principal = self.caller.principal
        subject = exactly(self.topic)
        if self.item.mode == "BROADCASTING":
            self.live = hub.broker.subscribe(subject, partial(broadcast, self), principal)
            return
        joined = hub.group(self.item.topic, group, principal)
        handle = partial(self._deliver, hub, deliver)
        self.member = joined.join(
            handle,
            window=hub.settings.window,
            owner=self,
            held=held,
            principal=principal,
            address=self.address,
        )
        if self.item.type == "SYNC":
            self.responder = hub.broker.responders.add(subject, partial(ask, self), group, principal, counted=False)

    def is_revoked(self, hub: Hub) -> bool:
        """Return whether the principal has lost the right to what it subscribed to."""
        principal, topic, broker = self.caller.principal, self.topic, hub.broker
        if self.responder is not None and not may(principal, Action.SUBSCRIBE, topic):
            return True
        if self.live is not None and not broker.router.may_hear(principal, topic):
            return True
        return self.member is not None and not broker.may_topic(principal, Action.CONSUME, topic)

    @property
    def is_over(self) -> bool:
        """Whether its topic or its group was removed: the client gets nothing until it subscribes again."""
        return self.member is not None and self.member.closed

    def _deliver(
        self, hub: Hub, deliver: "Callable[[Subscribed, Sequence[Delivery]], None]", deliveries: Sequence[Delivery]
    ) -> None:
        assert self.member is not None
        fresh = hub.fresh(self.member, deliveries)
        if fresh:
            deliver(self, fresh)

    def end_questions(self, hub: Hub) -> None:
        """Remove the client from the responders of the topic."""
        if self.responder is not None:
            hub.broker.responders.remove(self.responder)
            self.responder = None

    def end(self, hub: Hub, *, lost: bool = False) -> Member | None:
        """End deliveries; return the member that has left. `lost` says that the client did not ask for it."""
        if self.live is not None:
            hub.broker.unsubscribe(self.live)
            self.live = None
        self.end_questions(hub)
        member, self.member = self.member, None
        if member is not None:
            member.leave(lost=lost)
        return member
