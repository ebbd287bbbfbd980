"""A message that a member of a consumer group holds, and how its answers reach the server."""

import weakref
from collections.abc import Iterator
from math import inf
from operator import length_hint
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from babelbus.clients.jebp.calls import Stream
from babelbus.clients.jebp.errors import ClientError
from babelbus.protocols.jebp.call_messages import DELIVERY, Ack, Extend, Joined, Nack, Window
from babelbus.protocols.jebp.messages import Data
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.plain import decode_each
from babelbus.records.record import Record

if TYPE_CHECKING:
    from babelbus.clients.jebp.connection import Link
    from babelbus.protocols.jebp.call_messages import Consume

SOON: Final = 256
"""So many answers leave at once, before the turn of the event loop is over."""
EXTEND_SECONDS_MAX: Final = 20.0
"""The longest time between extensions: the group's `ack_seconds` may become less while the member is there."""
UNREAD_BYTES_MAX: Final = 16 * 2**20
"""So many bytes wait for the program before the server is told to stop, whatever the window is."""
_decode_joined: Final = msgspec.msgpack.Decoder(Joined).decode


def _of_no_delivery() -> "Delivery":
    raise TypeError("a message comes from a delivery")


class Message(Record, frozen=True, gc=False, eq=False):
    """A record that a group has handed to this member; answer it with `ack`, `nack` or `reject`.

    Attributes:
        payload: the bytes; `None` removes the key.
        key, headers, timestamp, offset: as of every record; the time is in milliseconds.
    """

    delivery: "Delivery" = msgspec.field(default_factory=_of_no_delivery)
    """The records that came together with it."""
    number: int = 0
    """Its place among these."""

    @property
    def topic(self) -> str:
        """The topic."""
        return self.delivery.membership.topic

    @property
    def group(self) -> str:
        """The consumer group."""
        return self.delivery.membership.group

    @property
    def partition(self) -> int:
        """The partition of the topic; with topic and offset it names the record for good."""
        return self.delivery.partition

    @property
    def attempt(self) -> int:
        """How often the record was delivered, this time included."""
        return self.delivery.attempt

    @property
    def subject(self) -> str:
        """The subject that it was published under; the topic's name if it was published to the topic."""
        for name, value in self.headers:
            if name == SUBJECT_HEADER and value is not None:
                return value.decode("utf-8", "surrogateescape")
        return self.topic

    @property
    def held(self) -> bool:
        """Whether the member holds it still: it was not answered, and the connection that it came over lives."""
        return not self.delivery.answered[self.number] and not self.delivery.membership.ended_now

    def ack(self) -> None:
        """Acknowledge: the record is done. Leaves with all answers of this turn of the event loop.

        Nothing happens if it was answered before, or its connection was lost: then it is delivered again.
        """
        delivery, number = self.delivery, self.number
        if delivery.answered[number]:
            return
        delivery.answered[number] = 1
        delivery.membership.ack(delivery, number)

    def nack(self, *, delay: float | None = None, reason: str = "") -> None:
        """Return the record: it is delivered again after `delay` seconds, by default after the group's back-off.

        After the group's `attempts_max` deliveries it becomes a dead letter with this reason.
        """
        self._answer(reason, delay, final=False)

    def reject(self, *, reason: str = "") -> None:
        """Reject the record, which becomes a dead letter at once: no other attempt would help."""
        self._answer(reason, None, final=True)

    def _answer(self, reason: str, delay: float | None, *, final: bool) -> None:
        delivery, number = self.delivery, self.number
        if not delivery.answered[number]:
            delivery.answered[number] = 1
            delivery.membership.nack(delivery, number, reason, delay, final=final)

    def extend(self) -> None:
        """Start the group's `ack_seconds` anew: the record is still worked on."""
        if not self.delivery.answered[self.number]:
            self.delivery.membership.extend([self.delivery.id, self.number, 1])


class Holder(Protocol):
    """The way of a message's answers: a membership, or what stands for it in other threads."""

    topic: str
    group: str

    @property
    def ended_now(self) -> bool:
        """Whether no answer counts any more."""

    def ack(self, delivery: "Delivery", number: int) -> None:
        """Send an ack."""

    def nack(self, delivery: "Delivery", number: int, reason: str, delay: float | None, *, final: bool) -> None:
        """Send a nack."""

    def extend(self, ranges: list[int]) -> None:
        """Send extensions."""


class Delivery:
    """Records that came in one item; `data` is decoded when they are read."""

    __slots__ = ("__weakref__", "answered", "attempt", "data", "id", "membership", "messages", "partition", "unread")

    def __init__(self, membership: Holder, body: Data) -> None:
        numbers: tuple[int, int, int] = DELIVERY.unpack_from(body)
        self.id, self.partition, self.attempt = numbers
        self.membership = membership
        self.data: Data = body[DELIVERY.size :]
        self.answered = bytearray()
        self.messages: list[Message] = []
        self.unread: Iterator[Message] = iter(self.messages)

    def decode(self) -> Iterator[Message]:
        """Return the records as messages; about 1 us each.

        Raises:
            CorruptRecordError: a record is not the one that was written.
        """
        self.messages = decode_each(bytes(self.data), Message, self)
        self.data = b""
        self.answered = bytearray(len(self.messages))
        self.unread = iter(self.messages)
        return self.unread

    def drop(self) -> None:
        """Drop the messages that were not read, also for who iterates over them."""
        self.messages.clear()


def _keep(membership: "weakref.ref[Membership]", seconds: float) -> None:
    alive = membership()
    if alive is not None:
        alive.keep(seconds)


class Membership(Stream):
    """One stream of `consume`: from a join until the stream or the connection ends."""

    def __init__(self, link: "Link", request: "Consume") -> None:
        self.topic, self.group = request.topic, request.group
        self.window = request.window
        self.joined: Joined | None = None
        self.current: Delivery | None = None
        """The delivery that the program reads at present. Messages are not seen by the cycle collector, so a delivery
        holds on to them for as long as it is this one."""
        self._acks: list[int] = []
        self._acked = 0
        self._scheduled = False
        self._unread_bytes = 0
        self._full = False
        """Whether the server was told to send nothing more, because too many bytes wait for the program."""
        super().__init__("consume", link, request)

    def item(self, body: Data) -> None:
        """Append a delivery; the first item says how the group works."""
        if self.joined is None:
            self.deadline = inf
            self.joined = joined = _decode_joined(body)
            self.wake()
            if joined.ack == "explicit":
                seconds = min(joined.ack_seconds / 3, EXTEND_SECONDS_MAX)
                self._keep_later(seconds)
        else:
            super().item(body)
            self._unread_bytes += len(body)
            if self._unread_bytes >= UNREAD_BYTES_MAX and not self._full:
                self._full = True
                self.send(Window(0))

    def lost(self, error: ClientError) -> None:
        """Drop what was not read: it is delivered again."""
        self.drop()
        super().lost(error)

    def drop(self) -> None:
        """Drop the messages that were not read."""
        self.items.clear()
        self._unread_bytes = 0
        if self.current is not None:
            self.current.drop()
            self.current = None

    def next_item(self) -> Data:
        """Return the next delivery; the server goes on when enough of them were read."""
        body = self.items.popleft()
        self._unread_bytes -= len(body)
        if self._full and self._unread_bytes < UNREAD_BYTES_MAX // 2:
            self._full = False
            self.send(Window(self.window))
        return body

    def begin(self, delivery: Delivery) -> Iterator[Message]:
        """Return the messages of the next delivery that the program reads."""
        if self.current is not None:
            self.current.messages = []
        self.current = delivery
        return delivery.decode()

    def _keep_later(self, seconds: float) -> None:
        # By a weak reference: the timer of a membership that has ended does not hold its messages until it fires.
        self._loop.call_later(seconds, _keep, weakref.ref(self), seconds)

    def keep(self, seconds: float) -> None:
        """Send extensions of the messages that the program has not read yet: no handler is late with them."""
        if self.ended_now:
            return
        ranges: list[int] = []
        if self.current is not None:
            left = length_hint(self.current.unread)
            if left:
                ranges += (self.current.id, len(self.current.answered) - left, left)
        for body in self.items:
            ranges += (DELIVERY.unpack_from(body)[0], 0, 2**31)
        if ranges:
            self.extend(ranges)
        self._keep_later(seconds)

    def ack(self, delivery: Delivery, number: int) -> None:
        """Add an ack to those of this turn; acks in order are one range."""
        acks = self._acks
        if acks and acks[-3] == delivery.id and acks[-2] + acks[-1] == number:
            acks[-1] += 1
        else:
            acks += (delivery.id, number, 1)
        self._acked += 1
        if self._acked >= SOON:
            self.flush_acks()
        elif not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._scheduled = False
        self.flush_acks()

    def flush_acks(self) -> None:
        """Send the acks that were collected."""
        if self._acks:
            acks, self._acks, self._acked = self._acks, [], 0
            self.send(Ack(acks))

    def nack(self, delivery: Delivery, number: int, reason: str, delay: float | None, *, final: bool) -> None:
        """Send a nack."""
        self.send(Nack([delivery.id, number, 1], reason, delay, final))

    def extend(self, ranges: list[int]) -> None:
        """Send extensions."""
        self.send(Extend(ranges))

    def set_window(self, window: int) -> None:
        """Send another window; 0 pauses the member."""
        self.window = window
        if not self._full:
            self.send(Window(window))

    def close(self) -> None:
        """End the membership, without waiting for the server."""
        self.drop()
        self.flush_acks()
        super().close()
