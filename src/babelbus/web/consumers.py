"""Consumers over the administration endpoint: a member of a group for as long as an answer is open.

    GET /api/topics/TOPIC/groups/GROUP/consume       JSON lines: {"consumer": id, ...}, then {"deliveries": [...]}
    POST /api/consumers/ID/ack   {"numbers": [...]}
    POST /api/consumers/ID/nack  {"numbers": [...], "reason": "...", "delay_seconds": 5, "final": false}
    POST /api/consumers/ID/leave {}

The answer is the membership: when the answer ends, for whatever reason, its unacked records are delivered to other
members at once. Unless the consumer sent `leave` before, that counts as an attempt of these records, which may be why
the consumer is gone. A consumer gets one more record for each record that it has answered (ack or nack), so it never
has more than its window, also when leases end meanwhile. An empty line says that no record has come for
`HEARTBEAT_SECONDS`: each side notices when the other is gone.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from babelbus.core.access import Identity
from babelbus.core.broker import Broker
from babelbus.core.groups import Delivery, Group
from babelbus.core.request import STOPS
from babelbus.core.rooted import relative_event, relative_headers, relative_key
from babelbus.core.topic import event_of
from babelbus.errors import BabelbusError
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.record import Record
from babelbus.units import MIB
from babelbus.web.answers import answer, read_body, read_number
from babelbus.web.callers import is_caller
from babelbus.web.calls import Answer, Call, Lines, Route
from babelbus.web.errors import UnknownConsumerError
from babelbus.web.feed import came
from babelbus.web.groups import check_sees, names
from babelbus.web.lines import IDLE, Answered, ConsumeLine, ConsumerHead, DeliveryLine
from babelbus.web.record_lines import line_of
from babelbus.web.slots import check_share

HEARTBEAT_SECONDS = 10.0
CONSUMERS_MAX = 256
"""Most open consumers: each may hold `QUEUE_BYTES_MAX`, and a turn of its group more."""
CONSUMERS_PER_PRINCIPAL_MAX = 128
"""Most open consumers of one principal, so that nobody keeps out the others; the administrator may have all."""
WINDOW = 100
WINDOW_MAX = 10_000
QUEUE_BYTES_MAX = 8 * MIB


class AckBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of deliveries that are done."""

    numbers: list[int]


class NackBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of deliveries that failed; `delay_seconds` is null for the group's back-off, `final` a dead letter."""

    numbers: list[int]
    reason: str = ""
    delay_seconds: float | None = None
    final: bool = False


class LeaveBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a leave, which has no fields."""


class Left(msgspec.Struct, frozen=True):
    """The number of records that go to other members now."""

    returned: int


LEFT = "left"
encode = msgspec.json.Encoder().encode


class Consumer:
    """The member of one answer. `deliver` comes from the group, `take` from the answer's task.

    Raises:
        GroupClosedError: the group was removed.
        GroupOwnedError: a member has the group for itself.
        UnknownFilterError: no protocol of this server speaks the language of the group's filter.
    """

    def __init__(self, group: Group, window: int, count_max: int | None, principal: Identity, address: str) -> None:
        self.principal = principal
        self._explicit = group.settings.ack == "explicit"
        self._topic = group.topic.name
        first = window if count_max is None else min(window, count_max)
        self._left = None if count_max is None else count_max - first
        self._held: dict[int, Delivery] = {}
        self._lines: list[DeliveryLine] = []
        self._size_bytes = 0
        self._number = 0
        self._something = asyncio.Event()
        self._end = ""
        self._answered = False
        self.member = group.join(
            self.deliver,
            credit=first,
            on_closed=self._closed,
            owner=self,
            held=True,
            principal=principal,
            address=address,
        )

    @property
    def busy(self) -> bool:
        """Whether the consumer holds unanswered records."""
        return bool(self._held)

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Append the deliveries of one turn of the group."""
        for delivery in deliveries:
            self._number += 1
            self._held[self._number] = delivery.without_content()
            self._lines.append(self._line(delivery))
            self._size_bytes += 300 + len(delivery.payload or b"")
        if self._size_bytes >= QUEUE_BYTES_MAX:
            self.member.hold()
        self._something.set()

    def _line(self, delivery: Delivery) -> DeliveryLine:
        event, key, root = event_of(self._topic, delivery), delivery.key, self.principal.root
        headers = tuple(pair for pair in delivery.headers if pair[0] != SUBJECT_HEADER)
        if root is not None:
            event, key, headers = relative_event(event, root), relative_key(key, root), relative_headers(headers, root)
        subject = event.subject.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        shown = Record(
            delivery.payload,
            key,
            headers,
            delivery.timestamp,
            delivery.attributes,
            delivery.offset,
        )
        return DeliveryLine(self._number, delivery.attempt, subject, line_of(shown, delivery.partition))

    async def take(self, seconds: float) -> ConsumeLine | None:
        """Wait up to `seconds` for records or the end; `None` if neither came."""
        if not self._lines and not self._end:
            self._something.clear()
            if not await came(self._something, seconds):
                return None
        if self._end:
            return ConsumeLine(end=self._end)
        lines, self._lines, self._size_bytes = self._lines, [], 0
        self.member.resume()
        return ConsumeLine(lines) if lines else None

    def ack(self, numbers: Iterable[int]) -> Answered:
        """Acknowledge records, and request as many new ones.

        Raises:
            GroupClosedError: the group is gone.
        """
        found, unknown = self._pop(numbers)
        done = self.member.ack(found) if self._explicit else len(found)
        self._grant(len(found))
        return Answered(done, len(found) - done + unknown)

    def nack(self, body: NackBody) -> Answered:
        """Reject records, and request as many new ones.

        Raises:
            GroupClosedError: the group is gone, or takes no acks.
        """
        if not self._explicit:
            self.member.nack(())  # raises: the group takes no acks
        found, unknown = self._pop(body.numbers)
        if body.final:
            done = self.member.reject(found, reason=body.reason)
        else:
            done = self.member.nack(found, reason=body.reason, delay_seconds=body.delay_seconds)
        self._grant(len(found))
        return Answered(done, len(found) - done + unknown)

    def leave(self) -> Left:
        """End the membership in order: held records are returned as if they had not been delivered."""
        returned = self.member.in_flight if self._explicit else 0
        self.member.leave()
        self._held.clear()
        self._lines.clear()
        self._end = self._end or LEFT
        self._something.set()
        return Left(returned)

    def answered(self) -> bool:
        """Return whether records were answered since the last call."""
        answered, self._answered = self._answered, False
        return answered

    def _pop(self, numbers: Iterable[int]) -> tuple[list[Delivery], int]:
        asked = list(numbers)
        held = [delivery for number in asked if (delivery := self._held.pop(number, None)) is not None]
        return held, len(asked) - len(held)

    def _grant(self, count: int) -> None:
        if self._left is not None:
            count = min(count, self._left)
            self._left -= count
        if count:
            self.member.add_credit(count)
        self._answered = True
        self._something.set()

    def _closed(self, error: BabelbusError) -> None:
        self.close(self.principal.relative_text(str(error)))

    def close(self, reason: str) -> None:
        """End the answer with a reason."""
        self._end = self._end or reason
        self._something.set()


class ConsumerRoutes:
    """The requests of consumers."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups = broker.groups
        self._consumers: dict[str, Consumer] = {}

    @property
    def routes(self) -> Sequence[Route]:
        """Method, path, and who answers."""
        return (
            ("GET", "/api/topics/{topic}/groups/{group}/consume", self._consume),
            ("POST", "/api/consumers/{id}/ack", self._ack),
            ("POST", "/api/consumers/{id}/nack", self._nack),
            ("POST", "/api/consumers/{id}/leave", self._leave),
        )

    def close(self) -> None:
        """End all answers in good order."""
        for consumer in self._consumers.values():
            consumer.close(STOPS)

    async def _consume(self, call: Call) -> Answer:
        """Deliver records while the answer is open; `idle_ms` without a record ends the answer."""
        window = min(read_number(call, "window", 1) or WINDOW, WINDOW_MAX)
        count_max, idle_ms = read_number(call, "max", 1), read_number(call, "idle_ms", 1)
        if len(self._consumers) >= CONSUMERS_MAX:
            raise web.HTTPServiceUnavailable(text=f"{CONSUMERS_MAX} consumers are open already, which is the limit")
        topic, group_name = names(call)
        principal = call.principal
        holders = (one.principal for one in self._consumers.values())
        check_share(principal, holders, CONSUMERS_PER_PRINCIPAL_MAX, "consumers")
        check_sees(self._broker, principal, topic)
        group = self._groups.get(topic, group_name)
        consumer, name = Consumer(group, window, count_max, principal, call.address), secrets.token_hex(16)
        self._consumers[name] = consumer
        try:
            response = await call.begin_lines()
            await _write(response, ConsumerHead(name, group.settings.ack, group.settings.ack_seconds, group.paused))
            consumer.member.resume()
            await _pass_on(consumer, response, None if idle_ms is None else idle_ms / 1000)
            return response
        finally:
            consumer.member.leave(lost=True)  # unless it has left, or was idle, which holds nothing
            del self._consumers[name]

    async def _ack(self, call: Call) -> web.Response:
        consumer = self._consumer(call)
        return answer(consumer.ack((await read_body(call, AckBody)).numbers))

    async def _nack(self, call: Call) -> web.Response:
        consumer = self._consumer(call)
        return answer(consumer.nack(await read_body(call, NackBody)))

    async def _leave(self, call: Call) -> web.Response:
        consumer = self._consumer(call)
        await read_body(call, LeaveBody)
        return answer(consumer.leave())

    def _consumer(self, call: Call) -> Consumer:
        found = self._consumers.get(call.path_values["id"])
        if found is None or not is_caller(call, found.principal):
            raise UnknownConsumerError("this consumer is not connected any more; its records go to other members")
        return found


async def _pass_on(consumer: Consumer, response: Lines, idle_seconds: float | None) -> None:
    """Write deliveries until the group or the idle time ends."""
    loop = asyncio.get_running_loop()
    spoken = loop.time()
    while True:
        wait = HEARTBEAT_SECONDS
        if idle_seconds is not None and not consumer.busy:
            wait = min(wait, max(spoken + idle_seconds - loop.time(), 0.0))
        line = await consumer.take(wait)
        if line is not None:
            await _write(response, line)
            if line.end:
                return
            spoken = loop.time()
        elif consumer.answered():
            spoken = loop.time()
        elif idle_seconds is not None and not consumer.busy and loop.time() >= spoken + idle_seconds:
            await _write(response, ConsumeLine(end=IDLE))
            return
        elif wait == HEARTBEAT_SECONDS:
            await response.write(b"\n")


async def _write(response: Lines, line: Any) -> None:
    await response.write(encode(line) + b"\n")
