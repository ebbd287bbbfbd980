"""A consumer group as an operator sees it: its members, the oldest records in flight, and why records wait.

Nothing here changes a group. A look at the records in flight ends after `SCAN_MAX` of them, so that it does not hold
the event loop; what lies behind is left out.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal, Protocol

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import AccessRefusedError, Identity
from babelbus.core.groups.in_flight import BURYING, READY, WAITING, Flight, Holder, Lease
from babelbus.core.groups.member import Member
from babelbus.core.groups.partition_cursor import PartitionCursor
from babelbus.core.groups.settings import GroupSettings
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError, StorageError

SCAN_MAX = 10_000
"""Most records in flight that one look goes through."""
MEMBERS_SHOWN = 100
OLDEST_SHOWN = 20
SLOW_ACK_SECONDS = 1.0
"""A record that a member has held for less is at work, and no reason to wait."""

Kind = Literal[
    "paused", "disk", "filter", "beyond_end", "no_members", "no_right", "in_flight_max", "members_full",
    "redelivery", "dead_letter", "key_order", "not_acked",
]  # fmt: skip
Full = Literal["", "connection", "credit", "window"]
Where = Literal["delivered", "ready", "waiting", "held_back", "dead_letter"]


class Obstacle(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reason why records of a group wait. `at_ms` is when the reason ends, if the server knows that."""

    kind: Kind
    text: str
    partition: int | None = None
    offset: int | None = None
    at_ms: int | None = None


class MemberInfo(msgspec.Struct, frozen=True):
    """A member of a group. Times are milliseconds since 1970."""

    protocol: str
    principal: str | None
    address: str | None
    """Principal and address are `None` for readers who may not know them."""
    since_ms: int
    in_flight: int
    window: int | None
    """The most that it may hold; `None`: no limit."""
    capacity: int | None
    """How many records it takes now; `None`: no limit."""
    full: Full
    """Why it takes no more."""
    oldest_ms: int | None
    """When it got the oldest of the records that it has not acked."""


class InFlightInfo(msgspec.Struct, frozen=True):
    """A record in flight. Times are milliseconds since 1970."""

    partition: int
    offset: int
    where: Where
    attempts: int
    """How often it was delivered."""
    member: int | None
    """The number of the member that has it, in the list of members."""
    since_ms: int | None
    """When it was delivered."""
    again_ms: int | None
    """When it is delivered again, unless a member acks it before."""
    behind: int | None
    """The offset of the earlier record of its key that it is held back behind."""


class Inspection(msgspec.Struct, frozen=True):
    """The state of a group at one moment."""

    obstacles: tuple[Obstacle, ...]
    members: tuple[MemberInfo, ...]
    oldest: tuple[InFlightInfo, ...]
    """The oldest records in flight."""
    attempts: int
    """The most deliveries of a record that failed and is in flight."""
    next_redelivery_ms: int | None


class Departure(msgspec.Struct, frozen=True):
    """The member that left last, when, and whether its connection broke or it had lost its right."""

    principal: Identity
    address: str
    at_ms: int
    lost: bool = False
    revoked: bool = False


class _Group(Protocol):
    """A group, as far as it is looked at; `group.Group` documents the attributes."""

    topic: Topic
    settings: GroupSettings
    paused: bool
    members: list[Member]
    cursors: list[PartitionCursor]
    flight: Flight | None
    stall: StorageError | None
    filter_error: BabelbusError | None
    letter_error: BabelbusError | None
    departure: Departure | None

    def check_consumed(self, principal: Identity) -> None: ...


def inspect(group: _Group, clock: Clock, *, names: bool = True, members_max: int, oldest_max: int) -> Inspection:
    """Return what a group does now; without `names`, nothing says who its members are."""
    look = _Look(group, clock, names)
    return Inspection(
        tuple(look.obstacles()),
        tuple(map(look.member, islice(group.members, members_max))),
        tuple(islice(look.oldest(), oldest_max)),
        look.attempts(),
        look.next_redelivery_ms(),
    )


class _Look:
    """One look at a group."""

    def __init__(self, group: _Group, clock: Clock, names: bool) -> None:
        self._group = group
        self._names = names
        self._now, self._now_ms = clock.monotonic(), clock.now_ms()
        self._oldest_of: dict[Holder, Lease] = {}
        """The oldest lease of each member."""
        self._retries: dict[tuple[int, int], float] = {}
        """When (monotonic seconds) records at (partition, offset) come again."""
        flight = group.flight
        if flight is not None:
            for lease in islice(flight.leases, SCAN_MAX):
                if lease.left:
                    self._oldest_of.setdefault(lease.member, lease)
            for at, cursor, offset in islice(flight.retries(), SCAN_MAX):
                self._retries[cursor.number, offset] = at

    # -- figures -----------------------------------------------------------------------------------------------------

    def member(self, member: Member) -> MemberInfo:
        """Return the figures of a member."""
        lease = self._oldest_of.get(member)
        is_open = member.credit is None and member.window is None and not member.held
        return MemberInfo(
            _protocol(member.principal),
            member.principal.name if self._names else None,
            member.address if self._names else None,
            self._wall(member.joined_at),
            member.in_flight,
            member.window,
            None if is_open else member.capacity,
            _full(member),
            None if lease is None else self._wall(lease.since),
        )

    def oldest(self) -> Iterator[InFlightInfo]:
        """Yield the records in flight, partition by partition, the oldest of each first."""
        numbers: dict[Holder, int] = {member: number for number, member in enumerate(self._group.members)}
        for cursor in self._group.cursors:
            flight, first_of = cursor.flight, dict[bytes, int]()
            for offset, lease in flight.unfinished.items():
                key = flight.key_of.get(offset)
                behind = None if key is None else first_of.setdefault(key, offset)
                attempts, since, again = flight.attempts.get(offset, 0), None, None
                where: Where = "ready"
                if lease is WAITING:
                    where, again = "waiting", self._retries.get((cursor.number, offset))
                if lease is BURYING or offset in flight.burials:
                    where = "dead_letter"
                elif lease is READY and behind not in (None, offset):
                    where = "held_back"
                elif lease is not READY and lease is not WAITING:
                    where, attempts, since = "delivered", lease.attempt, lease.since
                    again = self._ends_at(lease)
                yield InFlightInfo(
                    cursor.number,
                    offset,
                    where,
                    attempts,
                    numbers.get(lease.member),
                    None if since is None else self._wall(since),
                    None if again is None else self._wall(again),
                    behind if where == "held_back" else None,
                )

    def attempts(self) -> int:
        """Return the most deliveries of a record that failed and is in flight."""
        counts = (islice(cursor.flight.attempts.values(), SCAN_MAX) for cursor in self._group.cursors)
        return max((max(some, default=0) for some in counts), default=0)

    def next_redelivery_ms(self) -> int | None:
        """Return when the next record that waits is delivered again."""
        at = min(self._retries.values(), default=None)
        return None if at is None else self._wall(at)

    # -- why records wait --------------------------------------------------------------------------------------------

    def obstacles(self) -> Iterator[Obstacle]:
        """Yield the reasons: those that stop the whole group first."""
        group = self._group
        if group.paused:
            yield Obstacle("paused", "The group is paused: nothing is delivered until it is resumed.")
        yield from self._disk()
        if group.filter_error is not None:
            yield Obstacle("filter", f"The filter of the group cannot be used: {group.filter_error}.")
        yield from self._beyond_end()
        if not any(cursor.info().lag for cursor in group.cursors):
            return
        flight, most = group.flight, group.settings.in_flight_max
        if not group.members:
            yield self._no_members()
        elif flight is not None and flight.count >= most:
            yield Obstacle("in_flight_max", f"{most:,} records are in flight, as many as in_flight_max allows.")
        elif not any(member.capacity for member in group.members):
            yield self._members_full()
        if flight is not None:
            yield from self._waiting()
            yield from self._held_back()
            yield from self._not_acked()

    def _disk(self) -> Iterator[Obstacle]:
        stall = self._group.stall
        if stall is not None:
            yield Obstacle("disk", f"The disk refuses to read, the server tries again every second: {stall}.")
        for partition in self._group.topic.partitions:
            if partition.failing is not None:
                text = f"The disk refuses records of partition {partition.number}: {partition.failing}."
                yield Obstacle("disk", text, partition.number)
                return

    def _beyond_end(self) -> Iterator[Obstacle]:
        for cursor in self._group.cursors:
            end = cursor.partition.high_watermark
            if cursor.position > end and not cursor.flight.unfinished:
                text = (
                    f"Partition {cursor.number} ends at offset {end}: the group skips new records there until offset "
                    f"{cursor.position}."
                )
                yield Obstacle("beyond_end", text, cursor.number, cursor.position)
                return

    def _no_members(self) -> Obstacle:
        departure = self._group.departure
        if departure is None:
            return Obstacle("no_members", "The group has no members.")
        name, ago = self._name(departure), _span((self._now_ms - departure.at_ms) / 1000)
        if departure.revoked or not self._may_consume(departure.principal):
            return Obstacle("no_right", f"The group has no members: {name} has no right to consume since {ago}.")
        how = "the connection of the last member broke" if departure.lost else "the last member left"
        return Obstacle("no_members", f"The group has no members: {how} {ago} ago ({name}).")

    def _may_consume(self, principal: Identity) -> bool:
        try:
            self._group.check_consumed(principal)
        except AccessRefusedError:
            return False
        return True

    def _members_full(self) -> Obstacle:
        members = self._group.members
        who = self._name(members[0]) if len(members) == 1 else f"each of {len(members):,} members"
        texts: dict[Full, str] = {
            "connection": "does not read what the server has sent",
            "credit": "has used up its credit and asks for no more",
            "window": "holds as many records without an ack as its window allows",
        }
        reasons = sorted({_full(member) for member in members})
        text = " or ".join(texts[reason] for reason in reasons if reason)
        return Obstacle("members_full", f"No member takes more records: {who} {text}.")

    def _waiting(self) -> Iterator[Obstacle]:
        """Yield the first record that waits for its next delivery, and the first that cannot become a dead letter."""
        cursors = self._group.cursors
        at_times = sorted((at, *place) for place, at in self._retries.items())
        buried = [entry for entry in at_times if entry[2] in cursors[entry[1]].flight.burials]
        waiting = [entry for entry in at_times if entry[2] not in cursors[entry[1]].flight.burials]
        if buried:
            at, number, offset = buried[0]
            error = self._group.letter_error
            text = (
                f"The dead letter of {_record(number, offset)} cannot be written"
                f"{'' if error is None else f' ({error})'}: the server tries again {self._until(at)}."
            )
            yield Obstacle("dead_letter", text, number, offset, self._wall(at))
        if waiting:
            at, number, offset = waiting[0]
            attempt = self._attempt(cursors[number].flight.attempts.get(offset, 0) + 1)
            count = len(waiting) - 1
            others = f"{'at least ' if len(self._retries) >= SCAN_MAX else ''}{count:,}"
            more = {0: "", 1: " Another record waits, too."}.get(count, f" Of the others, {others} wait, too.")
            text = f"Record {offset} of partition {number} waits for {attempt}, {self._until(at)}.{more}"
            yield Obstacle("redelivery", text, number, offset, self._wall(at))

    def _held_back(self) -> Iterator[Obstacle]:
        """Yield the record of each partition that holds back most others of its key."""
        for cursor in self._group.cursors:
            flight, first_of = cursor.flight, dict[bytes, int]()
            for offset in islice(flight.unfinished, SCAN_MAX):
                key = flight.key_of.get(offset)
                if key is not None:
                    first_of.setdefault(key, offset)
            counts = {}
            for key, offset in first_of.items():
                held = flight.keys[key].held
                counts[offset] = len(held) - (held[:1] == [offset])
            first = max(counts, key=lambda offset: counts[offset], default=-1)
            if first < 0 or not counts[first]:
                continue
            count = f"{counts[first]:,} records are" if counts[first] > 1 else "1 record is"
            state = self._state(cursor, first)
            text = (
                f"{count} held back behind {_record(cursor.number, first)}, which has the same key, because order is "
                f"per key: {state}."
            )
            at = self._comes_at(cursor, first)
            yield Obstacle("key_order", text, cursor.number, first, None if at is None else self._wall(at))

    def _state(self, cursor: PartitionCursor, offset: int) -> str:
        """Return what an unfinished record waits for, as the end of a sentence."""
        flight = cursor.flight
        lease = flight.unfinished[offset]
        if lease is BURYING or offset in flight.burials:
            return "it becomes a dead letter first"
        if lease is READY:
            return "it waits for a member that takes it"
        if lease is WAITING:
            at = self._retries.get((cursor.number, offset), self._now)
            return f"it waits for {self._attempt(flight.attempts.get(offset, 0) + 1)}, {self._until(at)}"
        assert isinstance(lease.member, Member)
        return f"{self._name(lease.member)} has not acked it for {_span(self._now - lease.since)}"

    def _comes_at(self, cursor: PartitionCursor, offset: int) -> float | None:
        """Return when (monotonic seconds) an unfinished record is delivered again."""
        lease = cursor.flight.unfinished[offset]
        if lease in (READY, WAITING, BURYING):
            return self._retries.get((cursor.number, offset))
        return self._ends_at(lease)

    def _not_acked(self) -> Iterator[Obstacle]:
        """Yield the record that a member has held longest without an ack."""
        lease = min(self._oldest_of.values(), key=lambda lease: lease.since, default=None)
        if lease is None or self._now - lease.since < SLOW_ACK_SECONDS:
            return
        unfinished = lease.cursor.unfinished
        offset = next((offset for offset in lease.offsets if unfinished.get(offset) is lease), None)
        if offset is None:
            return
        assert isinstance(lease.member, Member)
        number, at = lease.cursor.number, self._ends_at(lease)
        text = (
            f"{self._name(lease.member)} has not acked {_record(number, offset)} for {_span(self._now - lease.since)}"
        )
        if at is not None:
            most = self._group.settings.attempts_max
            is_last = most is not None and lease.attempt >= most
            then = "it becomes a dead letter" if is_last else f"{self._attempt(lease.attempt + 1)} follows"
            text += f"; without an ack {then} {self._until(at)}"
        yield Obstacle(
            "not_acked", f"{text[0].upper()}{text[1:]}.", number, offset, None if at is None else self._wall(at)
        )

    # -- words -------------------------------------------------------------------------------------------------------

    def _name(self, member: Member | Departure) -> str:
        if not self._names:
            return "a member"
        name, place = member.principal.name, f"{_protocol(member.principal)} {member.address}".strip()
        return f"member {name} ({place})" if name else f"a member ({place})"

    def _attempt(self, attempt: int) -> str:
        most = self._group.settings.attempts_max
        return f"delivery {attempt}" if most is None else f"delivery {attempt} of {most}"

    def _ends_at(self, lease: Lease) -> float | None:
        """Return when (monotonic seconds) a lease ends; `None` for a member whose leases do not end."""
        return lease.since + self._group.settings.ack_seconds if lease.member.expires else None

    def _until(self, at: float) -> str:
        return f"in {_span(at - self._now)}" if at > self._now else "now"

    def _wall(self, at: float) -> int:
        """Return a moment of the monotonic clock in milliseconds since 1970."""
        return self._now_ms + round((at - self._now) * 1000)


def _full(member: Member) -> Full:
    """Return why a member takes no more records."""
    if member.capacity:
        return ""
    if member.held:
        return "connection"
    if member.credit is not None and member.credit <= 0:
        return "credit"
    return "window"


def _protocol(principal: Identity) -> str:
    """Return the protocol that a client speaks."""
    return principal.source.partition(":")[0]


def _record(partition: int, offset: int) -> str:
    return f"record {offset} of partition {partition}"


def _span(seconds: float) -> str:
    """Return a time as people say it: 0.4 s, 12 s, 3 min, 5 h, 2 d."""
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
