"""Consumer groups over calls: `consume` makes the caller a member for as long as the stream is open.

Deliveries are stored records as they stand in the log; the client decodes them. It names a record by the number of its
delivery and the place in it, so an ack of a thousand records is three numbers. A member that stops reading is held,
and when the stream ends, however it ends, its unanswered records go to other members at once: as an attempt if the
connection broke, not if the client left.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from babelbus.core.access import AccessRefusedError, Action
from babelbus.core.groups import (
    BEGINNING,
    END,
    Delivery,
    Group,
    GroupClosedError,
    Lease,
    Member,
    Place,
    Run,
    at_offset,
    pick,
)
from babelbus.core.rooted import relative_chunk, relative_record
from babelbus.core.settings import change_settings
from babelbus.core.work import Work, settled
from babelbus.errors import BabelbusError
from babelbus.protocols.jebp.call_messages import (
    DELIVERY,
    Ack,
    Consume,
    ConsumeMessage,
    Extend,
    Joined,
    Nack,
    Window,
)
from babelbus.protocols.jebp.calls.call import Call, Method, Stream
from babelbus.protocols.jebp.calls.errors import CallRefusedError
from babelbus.protocols.jebp.messages import PROTOCOL, Data
from babelbus.records.format import encode_batch

WINDOW_MAX: Final = 100_000
EXTENDING_SECONDS: Final = 0.1
"""In this time a member extends at most `WINDOW_MAX` records, the most it can hold; unlike an ack, it can ask again."""
SENT_MAX: Final = 64
"""So many deliveries may be without all their answers before those that are over are looked for."""
_decode: Final = msgspec.msgpack.Decoder(ConsumeMessage).decode


class _Sent:
    """A delivery: which records it carried, and by which leases the member holds them."""

    __slots__ = ("attempt", "leases", "left", "offsets", "partition")

    def __init__(self, partition: int, attempt: int, offsets: list[int], leases: Lease | list[Lease | None]) -> None:
        self.partition = partition
        self.attempt = attempt
        self.offsets = offsets
        self.leases = leases
        """One for all, or one for each record."""
        self.left = len(offsets)

    @property
    def is_over(self) -> bool:
        """Whether the member holds none of the records any more, whoever ended that."""
        leases = [self.leases] if isinstance(self.leases, Lease) else self.leases
        return not any(lease is not None and lease.left for lease in leases)

    def lease_of(self, place: int) -> Lease | None:
        """Return the lease of one record."""
        return self.leases if isinstance(self.leases, Lease) else self.leases[place]


class Consumer(Stream):
    """The member of one stream."""

    def __init__(self, call: Call, request: Consume) -> None:
        if not 1 <= request.window <= WINDOW_MAX:
            raise CallRefusedError(
                "bad_argument", f"a window of {request.window} records, 1 to {WINDOW_MAX} are possible"
            )
        self._call = call
        self._request = request
        self._member: Member | None = None
        self._explicit = True
        self._sent: dict[int, _Sent] = {}
        self._sent_max = SENT_MAX
        self._number = 0
        self._extended = 0
        """Records that were extended since `_extended_at`."""
        self._extended_at = 0.0
        self._topic = call.principal.absolute(request.topic)
        self._root = call.principal.root
        self._fetched = call.metrics.topic_fetched(PROTOCOL, self._topic)
        self._closed = False
        Work(self._join())

    @property
    def subscriptions(self) -> list[tuple[str, bool]]:
        """The topic."""
        return [(self._topic, False)]

    async def _join(self) -> None:
        try:
            group = await self._group()
            await settled(group.saved)
            if group.saved.error is not None:
                raise group.saved.error
            if self._closed:
                return
            self._enter(group)
        except Exception as error:
            self._call.fail_by(error)

    async def _group(self) -> Group:
        request, groups, principal = self._request, self._call.broker.groups, self._call.principal
        topic = self._topic
        self._call.broker.check_topic(principal, Action.CONSUME, topic)
        self._call.broker.topic(topic)  # an unknown topic is another error than an unknown group
        if not request.create:
            return groups.get(topic, request.group)
        known = groups.find(topic, request.group)
        start = END if known is not None else await self._place()
        settings = msgspec.structs.replace(groups.defaults, ack="explicit")
        changes = dict(request.settings)
        if isinstance(letters := changes.get("dead_letter_topic"), str):
            changes["dead_letter_topic"] = principal.absolute(letters)
        settings = change_settings(settings, changes, of="a group")
        return groups.ensure(topic, request.group, settings, start=start, principal=principal)

    async def _place(self) -> Place:
        request = self._request
        if request.start == "beginning":
            return BEGINNING
        if request.start == "offset":
            return at_offset(request.value)
        if request.start == "time":
            return await self._call.broker.groups.at_time(self._topic, request.value)
        return END

    def _enter(self, group: Group) -> None:
        request, settings = self._request, group.settings
        self._explicit = settings.ack == "explicit"
        self._member = group.join(
            self._deliver,
            credit=None if self._explicit else request.window,
            window=request.window if self._explicit else None,
            on_closed=self._left,
            owner=self,
            exclusive=request.exclusive,
            principal=self._call.principal,
            address=self._call.address,
        )
        joined = Joined(settings.ack, settings.ack_seconds, settings.order, group.paused)
        self._call.send(msgspec.msgpack.encode(joined))

    def _left(self, error: BabelbusError) -> None:
        self._call.fail(error if isinstance(error, AccessRefusedError) else GroupClosedError(str(error)))

    # -- deliveries --------------------------------------------------------------------------------------------------

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Send what one turn of the group brings."""
        if isinstance(deliveries, Run):
            self._send_run(deliveries)
        else:
            for delivery in deliveries:
                record = delivery if self._root is None else relative_record(delivery, self._root)
                data = encode_batch([record], delivery.offset).data
                self._send(delivery.partition, delivery.attempt, [delivery.offset], delivery.lease, [data])
        member = self._member
        if member is not None and self._call.full:
            member.hold()

    def _send_run(self, run: Run) -> None:
        records: Sequence[Data] = run.rows.stored(run.numbers)
        if self._root is not None:
            records = [relative_chunk(record, self._root) for record in records]
        if len(run) > 1 and DELIVERY.size + sum(map(len, records)) > self._call.body_bytes_max:
            half = len(run) // 2
            self._send_run(run.only(run.numbers[:half]))
            self._send_run(run.only(run.numbers[half:]))
            return
        self._send(run.partition, 1, pick(run.rows.offsets, run.numbers), run.lease, records)

    def _send(
        self, partition: int, attempt: int, offsets: list[int], lease: Lease | None, records: Sequence[Data]
    ) -> None:
        size = sum(map(len, records))
        if DELIVERY.size + size > self._call.body_bytes_max:
            reason = f"a record of {size} bytes is over the frame limit of jebp, {self._call.body_bytes_max}"
            if self._member is not None and lease is not None:
                held = Delivery(None, None, (), 0, 0, offsets[0], partition, attempt, lease)
                self._member.reject([held], reason=reason)
            return
        self._number = number = (self._number + 1) & 0xFFFFFFFF
        if lease is not None:
            if len(self._sent) >= self._sent_max:
                self._forget()
            self._sent[number] = _Sent(partition, attempt, offsets, lease)
        self._call.send(DELIVERY.pack(number, partition, attempt), *records)
        self._fetched.inc(len(offsets), size)

    def _forget(self) -> None:
        """Drop the deliveries whose records are all another's by now: their answers would change nothing."""
        for number in [number for number, sent in self._sent.items() if sent.is_over]:
            del self._sent[number]
        self._sent_max = max(
            SENT_MAX, 2 * len(self._sent)
        )  # so that each delivery costs the same, however many there are

    # -- answers -----------------------------------------------------------------------------------------------------

    def receive(self, body: Data) -> None:
        """Handle an ack, a nack, an extension or another window."""
        message = _decode(body)
        member = self._member
        if member is None:
            return
        if isinstance(message, Window):
            self._set_window(member, message.window)
            return
        if len(message.ranges) % 3:
            raise CallRefusedError("bad_argument", "ranges are threes: delivery, first record, count")
        if isinstance(message, Extend):
            self._begin_extending()
        numbers = iter(message.ranges)
        for number, first, count in zip(numbers, numbers, numbers, strict=True):
            if not self._explicit:
                if not isinstance(message, Extend):
                    member.add_credit(max(count, 0))
                continue
            sent = self._sent.get(number)
            if sent is not None and first >= 0 and count > 0:
                self._answer(member, number, sent, range(first, min(first + count, len(sent.offsets))), message)

    def _answer(self, member: Member, number: int, sent: _Sent, places: range, message: Ack | Nack | Extend) -> None:
        if isinstance(message, Extend):
            self._extend(member, sent, places)
            return
        offsets, leases = sent.offsets[places.start : places.stop], sent.leases
        if isinstance(message, Nack):
            failed = [
                Delivery(None, None, (), 0, 0, sent.offsets[place], sent.partition, sent.attempt, sent.lease_of(place))
                for place in places
            ]
            if message.final:
                member.reject(failed, reason=message.reason)
            else:
                member.nack(failed, reason=message.reason, delay_seconds=message.delay_seconds)
        elif isinstance(leases, Lease):
            member.ack_offsets(leases, offsets)
        else:
            for offset, lease in zip(offsets, leases[places.start : places.stop], strict=True):
                if lease is not None:
                    member.ack_offsets(lease, [offset])
        sent.left -= len(places)
        if sent.left <= 0:
            self._sent.pop(number, None)

    def _begin_extending(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._extended_at > EXTENDING_SECONDS:
            self._extended, self._extended_at = 0, now

    def _extend(self, member: Member, sent: _Sent, places: range) -> None:
        self._extended += len(places)
        if self._extended > WINDOW_MAX:
            raise CallRefusedError("quota", f"more than {WINDOW_MAX} records were extended in {EXTENDING_SECONDS} s")
        if isinstance(sent.leases, Lease):
            extended = member.extend(sent.leases, sent.offsets[places.start : places.stop])
            if len(places) == len(sent.offsets):
                sent.leases = extended or sent.leases
                return
            sent.leases = [sent.leases] * len(sent.offsets)
            sent.leases[places.start : places.stop] = [extended] * len(places)
            return
        for place in places:
            lease = sent.leases[place]
            sent.leases[place] = None if lease is None else member.extend(lease, [sent.offsets[place]])

    def _set_window(self, member: Member, window: int) -> None:
        _check_window(window, 0)
        if self._explicit:
            member.window = window
            member.group.wake()
        else:
            member.set_credit(window)

    # -- the call ----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume deliveries."""
        if self._member is not None:
            self._member.resume()

    def access_changed(self) -> None:
        """End the membership if the client may not consume the topic any more."""
        member = self._member
        if member is not None and not member.closed:
            member.principal = self._call.principal
            try:
                self._call.broker.check_topic(member.principal, Action.CONSUME, self._topic)
            except AccessRefusedError as error:
                self._call.fail(error)

    def close(self, *, lost: bool) -> None:
        """End the membership."""
        self._closed = True
        if self._member is not None:
            self._member.leave(lost=lost)
        self._sent.clear()


def _check_window(window: int, least: int) -> None:
    if not least <= window <= WINDOW_MAX:
        text = f"a window of {window} records, {least} to {WINDOW_MAX} are possible"
        raise CallRefusedError("bad_argument", text)


METHODS: Final = {"consume": Method(Consume, Consumer)}
