"""One stream of EventMesh over gRPC: what it subscribes to, and what waits to be written to it (specification, 7.4)."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

from babelbus.core.access import Identity
from babelbus.core.groups import Delivery, Member
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.request import Question, Reply, reads_too_slowly
from babelbus.core.work import Work, settled
from babelbus.errors import BabelbusError
from babelbus.protocols.eventmesh.callers import Caller, Given
from babelbus.protocols.eventmesh.dialects import (
    ACL_ERROR,
    SUBSCRIBE_ERROR,
    SUCCESS,
    Answered,
    Dialect,
    RefusedError,
    Wanted,
    code_of,
)
from babelbus.protocols.eventmesh.hub import CORRELATION, PROTOCOL, Hub, correlation, without_correlation
from babelbus.protocols.eventmesh.records import InvalidMessageError
from babelbus.protocols.eventmesh.subscriptions import Subscribed
from babelbus.records.record import Headers

log = logging.getLogger(__name__)

WRITTEN_MAX = 64
"""Deliveries that are written and acknowledged together; other connections have their turn after them."""
ANSWERS_MAX = 16
"""Answers to subscriptions that wait for a stream; no further subscription of the stream is read meanwhile."""
REQUEST_BYTES = 512
"""Memory of a message that came and is not handled, beside its bytes: a message may be empty."""
WAITING_BYTES_MAX = 4 * 2**20
"""Records that wait for a stream; its groups are held from then on, and live events are dropped."""

Waiting = tuple[str, bytes | None, Headers, dict[str, str], Member | None, Delivery | None]
"""A delivery that waits for its stream: topic, payload, headers, further properties, and whom to tell it is written."""


def _weigh(payload: bytes | None, headers: Headers) -> int:
    """Return the memory of a record."""
    return len(payload or b"") + sum(len(name) + len(value or b"") for name, value in headers)


class Standing(Enum):
    """The standing of a stream after a change of the table."""

    SAME = "same"
    LESS = "less"
    """A topic is not for the client any more."""
    GONE = "gone"
    """The client must prove again who it is."""


class Stream:
    """The subscriptions of one stream, the requests that came on it, and what waits to be written to it."""

    def __init__(
        self,
        hub: Hub,
        dialect: Dialect,
        read: Callable[[bytes], Any],
        wake: Callable[[], None],
        identify: Callable[[Given], Caller | Work[Caller]],
        address: str,
    ) -> None:
        self._identify = identify
        self._address = address
        self._caller: Caller | None = None
        """The caller of the last subscription, while the gate is on."""
        self.read = read
        """Reads a message of the stream."""
        self.waiting: deque[Waiting] = deque()
        self.client = ""
        self.subscribed: dict[tuple[str, str], Subscribed] = {}
        """By group and topic."""
        self.requests: deque[tuple[Any, int, int]] = deque()
        """Messages that came and are not handled, how many bytes the client may send more then, and their memory."""
        self.request_bytes = 0
        """Memory of `requests`."""
        self.finished = False
        """Whether the client sends no more."""
        self.ending = False
        """Whether the server stops, or has refused a subscription: what waits in `waiting` is not written."""
        self._hub = hub
        self._dialect = dialect
        self._wake = wake
        self._answers: deque[bytes] = deque()
        self._group_bytes = 0
        """Records of groups that wait or are written and not acknowledged."""
        self._live_bytes = 0
        """Events and questions that wait."""
        self._partial: tuple[Member, Delivery] | None = None
        """The delivery of which a part waits for the window of the client."""
        self._subscribing = False
        self._closed = False
        self._asked: dict[str, None] = {}
        """Ids of questions that the client has not answered and whose requesters wait."""

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(self, message: Any, window_bytes: int, size_bytes: int) -> None:
        """Add a subscription or a reply."""
        memory_bytes = REQUEST_BYTES + size_bytes
        self.requests.append((message, window_bytes, memory_bytes))
        self.request_bytes += memory_bytes

    def advance(self) -> int:
        """Handle what came, as far as answers have room; return how many bytes the client may send more."""
        handled = 0
        while self.requests and not (self._subscribing or self.ending) and len(self._answers) < ANSWERS_MAX:
            message, window_bytes, memory_bytes = self.requests.popleft()
            handled += window_bytes
            self.request_bytes -= memory_bytes
            try:
                found = self._dialect.read_subscription(message)
                if isinstance(found, Answered):
                    self._respond(found)
                    continue
            except InvalidMessageError as error:
                log.info("%s: a reply cannot be read: %s", PROTOCOL, error)
                continue
            except BabelbusError as error:
                self._acknowledge(message, error)
                continue
            self._subscribing = True
            Work(self._subscribe(found, message)).when_done(partial(self._subscribed, message))
        return handled

    @property
    def over(self) -> bool:
        """Whether the stream ends: nothing that must be written can come any more."""
        return not self._answers and (self.ending or (self.finished and not self.requests and not self._subscribing))

    def _subscribed(self, message: Any, done: Promise) -> None:
        self._subscribing = False
        self._acknowledge(message, done.error)
        self._wake()

    def _acknowledge(self, message: Any, error: BabelbusError | None) -> None:
        code, text = SUCCESS, "subscribe success"
        if error is not None:
            code, text = code_of(error, SUBSCRIBE_ERROR), str(error)
            if self._caller is not None:
                text = self._caller.principal.relative_text(text)
            self.ending = True
        self._answers.append(self._dialect.acknowledgement(message, code, text).SerializeToString())

    def _respond(self, answered: Answered) -> None:
        name = answered.properties.get(CORRELATION, "")
        reply = Reply(answered.event.payload, without_correlation(answered.event.headers))
        self._hub.respond(name, reply, self._identity)

    @property
    def _identity(self) -> Identity | None:
        return None if self._caller is None else self._caller.principal

    @property
    def principal(self) -> str | None:
        """Name of the principal of the last subscription, `None` while the gate is off."""
        return None if self._caller is None else self._caller.principal.name

    async def _prove(self, wanted: Wanted, message: Any) -> Caller:
        """Return who sends a subscription.

        Raises:
            InvalidProofError, TooManyProofsError: see `Callers.identify`.
        """
        if not self._hub.callers.enforcing:
            return self._hub.callers.unasked(wanted.group, self._dialect.credentials(message))
        found = self._identify(self._dialect.credentials(message))
        if isinstance(found, Work):
            await settled(found)
            found = found.result()
        if self._caller is not None and self._caller.principal.name != found.principal.name:
            raise RefusedError(ACL_ERROR, "the subscriptions of a stream belong to one principal")
        self._caller = found
        return found

    async def _subscribe(self, wanted: Wanted, message: Any) -> None:
        """Add topics.

        Raises:
            BabelbusError: a topic or the group cannot be, or the principal may not subscribe.
        """
        caller = await self._prove(wanted, message)
        self.client = wanted.client
        for item in wanted.items:
            key = wanted.group, item.topic
            before = self.subscribed.get(key)
            if before is not None and before.item == item and not before.is_over:
                continue
            if before is None and len(self.subscribed) >= self._hub.settings.subscriptions_max:
                raise RefusedError(SUBSCRIBE_ERROR, f"{self._hub.settings.subscriptions_max} topics are the limit")
            await self._hub.ensure_place(item, wanted.group, caller.principal)
            if self._closed:
                return
            if before is not None:
                before.end(self._hub)
            subscribed = self.subscribed[key] = Subscribed(item, caller, self._address)
            subscribed.begin(self._hub, wanted.group, self._deliver, self._broadcast, self._ask)

    def access_changed(self, renew: Callable[[Caller], Caller | None]) -> Standing:
        """Check again who the client is, and what it may be sent; return what has become of it."""
        standing = Standing.SAME
        for (group, topic), subscribed in list(self.subscribed.items()):
            caller = renew(subscribed.caller)
            if caller is None:
                return Standing.GONE
            is_new = subscribed.caller.principal.rights is not caller.principal.rights
            subscribed.caller = caller
            if self._caller is not None or self._hub.callers.enforcing:
                self._caller = caller
            try:
                if is_new:
                    subscribed.end(self._hub)
                    subscribed.begin(self._hub, group, self._deliver, self._broadcast, self._ask)
                is_lost = subscribed.is_revoked(self._hub)
            except BabelbusError:
                is_lost = True
            if is_lost:
                standing = Standing.LESS
                member = subscribed.member
                self.unsubscribe(group, [topic])
                self._forget(topic, member)
        return standing

    def _forget(self, topic: str, member: Member | None) -> None:
        """Drop what waits of a topic for a client that may not have it any more; the group has it again."""
        kept = deque(one for one in self.waiting if one[0] != topic or one[4] is not member)
        size_bytes = sum(_weigh(one[1], one[2]) for one in self.waiting if one[0] == topic and one[4] is member)
        if member is None:
            self._live_bytes -= size_bytes
        else:
            self._group_bytes -= size_bytes
        self.waiting = kept

    @property
    def proof_is_over(self) -> bool:
        """Whether what the client has proved does not hold any more."""
        return self._caller is not None and not self._hub.callers.holds(self._caller)

    def unsubscribe(self, group: str, topics: Sequence[str]) -> None:
        """End subscriptions."""
        for topic in topics:
            subscribed = self.subscribed.pop((group, topic), None)
            if subscribed is not None:
                subscribed.end(self._hub)

    # -- deliveries --------------------------------------------------------------------------------------------------

    @property
    def has_output(self) -> bool:
        """Whether messages wait to be written."""
        return bool(self._answers or self._partial or (self.waiting and not self.ending))

    def encode(self, room_bytes: int) -> tuple[list[bytes], list[tuple[Member, Delivery]], bool]:
        """Return messages until a number of bytes is passed.

        With them come the deliveries to acknowledge once the messages are written, and whether the last message is
        the last of these deliveries.
        """
        messages: list[bytes] = []
        done: list[tuple[Member, Delivery]] = []
        is_last = False
        waiting, number, encode = self.waiting, self._hub.next_number, self._dialect.delivery
        while room_bytes > 0 and len(messages) < WRITTEN_MAX:
            if self._answers:
                message = self._answers.popleft()
                is_last = False
            elif waiting and not self.ending:
                topic, payload, headers, more, member, delivery = waiting.popleft()
                message = encode(topic, payload, headers, more, number())
                is_last = member is not None
                if member is not None and delivery is not None:
                    done.append((member, delivery))
                else:
                    self._live_bytes -= _weigh(payload, headers)
                    if not more:  # a question has properties for its reply
                        self._hub.delivered.inc(1, len(message))
            else:
                break
            messages.append(message)
            room_bytes -= len(message)
        return messages, done, is_last

    def hold(self, partial: tuple[Member, Delivery]) -> None:
        """Keep the delivery of which a part waits for the window of the client."""
        self._partial = partial

    def settle(self) -> None:
        """Acknowledge the delivery of which a part waited: all of it is written."""
        if self._partial is not None:
            partial, self._partial = self._partial, None
            self.written([partial])

    def written(self, done: Sequence[tuple[Member, Delivery]]) -> None:
        """Acknowledge deliveries: gRPC's clients send no acknowledgement (7.4)."""
        by_member: dict[Member, list[Delivery]] = {}
        was_full = self._group_bytes > WAITING_BYTES_MAX
        for member, delivery in done:
            by_member.setdefault(member, []).append(delivery)
            self._group_bytes -= _weigh(delivery.payload, delivery.headers)
        if was_full and self._group_bytes <= WAITING_BYTES_MAX:
            for subscribed in self.subscribed.values():
                if subscribed.member is not None:
                    subscribed.member.resume()
        for member, deliveries in by_member.items():
            if not member.closed:
                member.ack(deliveries)

    def close(self) -> None:
        """End all subscriptions."""
        self._closed = True
        self.requests.clear()
        self.request_bytes = 0
        for subscribed in self.subscribed.values():
            subscribed.end(self._hub, lost=not self._hub.stopping)
        self.subscribed.clear()
        self.waiting.clear()
        self._hub.forget(self._asked)

    def _deliver(self, subscribed: Subscribed, deliveries: Sequence[Delivery]) -> None:
        member, topic = subscribed.member, subscribed.item.topic
        self._group_bytes += sum(_weigh(one.payload, one.headers) for one in deliveries)
        if self._group_bytes > WAITING_BYTES_MAX and member is not None:
            member.hold()
        self._add([(topic, one.payload, one.headers, {}, member, one) for one in deliveries])

    def _broadcast(self, subscribed: Subscribed, events: Sequence[Event]) -> None:
        taken: list[Waiting] = []
        for one in events:
            if not self._has_room(len(taken)):
                self._hub.metrics.live_dropped_total.labels(PROTOCOL, "slow").inc(len(events) - len(taken))
                break
            self._live_bytes += _weigh(one.payload, one.headers)
            taken.append((subscribed.item.topic, one.payload, one.headers, {}, None, None))
        self._add(taken)

    def _has_room(self, more: int = 0) -> bool:
        """Return whether one more event or question may wait, behind some more than there are."""
        return len(self.waiting) + more < self._hub.settings.window and self._live_bytes <= WAITING_BYTES_MAX

    def _ask(self, subscribed: Subscribed, question: Question) -> BabelbusError | None:
        if not self._has_room():
            self._hub.metrics.live_dropped_total.labels(PROTOCOL, "slow").inc()
            return reads_too_slowly(question)
        name = self._hub.remember(question, subscribed.caller.principal, lambda name: self._asked.pop(name, None))
        self._asked[name] = None
        more = correlation(name)
        self._live_bytes += _weigh(question.payload, question.headers)
        self._add([(subscribed.item.topic, question.payload, question.headers, more, None, None)])
        return None

    def _add(self, waiting: Sequence[Waiting]) -> None:
        self.waiting += waiting
        self._wake()
