"""Handing records out: who of a group's members gets which, a chunk at a time unless keys bind records to members.

If no key is in play, the records of a chunk are dealt together; else each record is offered to one member after the
other. A member gets its share of a chunk as a `Run`. Records that come again go first, as lists.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from babelbus.core.groups.delivery_rows import Rows, Run, even, pick
from babelbus.core.groups.in_flight import DUE, Counts, CursorFlight, Delivery, Entry, Flight, Holder, KeyState, Lease
from babelbus.core.groups.member import Member, share
from babelbus.core.groups.partition_cursor import NotLoadedError, PartitionCursor
from babelbus.core.groups.settings import GroupClosedError, GroupSettings, RecordFilter
from babelbus.core.receipt import Promise
from babelbus.core.record import Record
from babelbus.errors import StorageError
from babelbus.records.headers import Numbers

log = logging.getLogger(__name__)

AGAIN_MAX = 1024
"""Most records that are handed out again in a turn: each may cost a read."""


class Dispatcher:
    """Chooses the member of each record. Positions are in the cursors, outstanding deliveries in the flight."""

    def __init__(
        self, settings: GroupSettings, counts: Counts, flight: Flight | None, watch: Callable[[PartitionCursor], None]
    ) -> None:
        self.settings = settings
        self.filter: RecordFilter | None = None
        self.cursors: list[PartitionCursor] = []
        self.members: list[Member] = []
        self.stopped = False
        """Set while nothing may be handed out: the group is paused, or gone."""
        self._counts = counts
        self._flight = flight
        self._watch = watch
        self._returned: deque[tuple[PartitionCursor, Record]] = deque()
        """Handed out in mode `on_delivery`, but the member left before it heard of them."""
        self._next_member = 0
        self._next_cursor = 0

    def remove(self, member: Member) -> None:
        """Remove a member from the rotation."""
        number = self.members.index(member)
        del self.members[number]
        if number < self._next_member:
            self._next_member -= 1

    def forget(self, cursors: list[PartitionCursor]) -> None:
        """Drop the returned records of cursors that were moved."""
        self._returned = deque(pair for pair in self._returned if pair[0] not in cursors)

    def hand_out(self, taker: Member | None, bytes_max: int) -> bool:
        """Deliver records until nobody takes more, nothing is there, or about `bytes_max` were looked through.

        They go to `taker` alone if there is one. Returns whether there is more to do at once.

        Raises:
            DiskError: the disk refused a read; what was read before was handed out.
        """
        members = self._open_members(taker)
        if members and not self.stopped:
            self._hand_out_again(members)
        cursors = self.cursors
        idle = 0
        while idle < len(cursors) and not self.stopped:
            if bytes_max <= 0:
                return True
            members = self._open_members(taker)
            if not members or self._room() <= 0:
                break
            cursor = cursors[self._next_cursor % len(cursors)]
            self._next_cursor = (self._next_cursor + 1) % len(cursors)
            position = cursor.position
            rows = cursor.rows()
            self._watch(cursor)
            if rows is None:
                idle = 0 if cursor.position != position else idle + 1
                continue
            idle = 0
            bytes_max -= rows.size_bytes
            if self._flight is not None and self.settings.order == "key" and not rows.keyless:
                self._deal_by_key(self._flight, cursor, rows, members)
            else:
                self._deal(cursor, rows, members)
        flight = self._flight
        if flight is None:
            return bool(self._returned) and bool(self._open_members(taker))
        if self.loading is not None:  # the group is woken when it is there
            return False
        return any(flight.due or member.pending for member in self._open_members(taker))

    @property
    def loading(self) -> Promise | None:
        """The read under way for a cursor, if there is one; done when the group has more to deliver."""
        return next((load for cursor in self.cursors if (load := cursor.loading) is not None), None)

    def _open_members(self, taker: Member | None) -> list[Member]:
        """Return the members that take more, in the order of their turns."""
        if taker is not None:
            return [taker] if taker.capacity else []
        at = self._next_member
        return [member for member in (*self.members[at:], *self.members[:at]) if member.capacity]

    def _room(self) -> int:
        """Return how many more records may be handed out before others are acked."""
        if self._flight is None:
            return 2**62
        return self.settings.in_flight_max - self._flight.count

    # -- a chunk at a time -------------------------------------------------------------------------------------------

    def _deal(self, cursor: PartitionCursor, rows: Rows, members: list[Member]) -> None:
        """Deliver the records of a chunk that the group wants to members in turn, all at once."""
        wanted: Numbers = range(rows.at, rows.count)
        if self.filter is not None:
            flags = rows.chosen_by(self.filter)
            wanted = [number for number in wanted if flags[number]]
        if any(member.filter is not None for member in members):
            shares, passed, following = self._share_by_filters(rows, wanted, members)
        else:
            count = min(len(wanted), self._room())
            slices, passed, turn = share(count, [member.capacity for member in members])
            following = members[turn]
            shares = {
                member: wanted[parts[0]] if len(parts) == 1 else [*chain.from_iterable(wanted[part] for part in parts)]
                for member, parts in zip(members, slices, strict=True)
                if parts
            }
        flight = self._flight
        if flight is not None:
            dealt = next(iter(shares.values())) if len(shares) == 1 else sorted(chain(*shares.values()))
            flight.reserve(cursor.flight, pick(rows.offsets, dealt))
        runs = []
        for member, numbers in shares.items():
            lease = None
            if flight is not None:
                lease = flight.lease_all(cursor.flight, member, pick(rows.offsets, numbers))
            if member.credit is not None:
                member.credit -= len(numbers)
            runs.append((member, Run(rows, numbers, cursor.number, lease)))
        at = wanted[passed] if passed < len(wanted) else rows.count
        self._counts.filtered += at - rows.at - passed
        cursor.passed(rows, at)
        if following is not None:
            self._turn_to(following)
        for member, run in runs:
            self._send(member, run)

    def _share_by_filters(
        self, rows: Rows, wanted: Numbers, members: list[Member]
    ) -> tuple[Mapping[Member, Numbers], int, Member | None]:
        """Return what each member gets, how many of the records are passed, and whose turn is next.

        Records go to members in turn, each record to the next member that wants it, or to nobody.
        """
        queue = deque((member, None if member.filter is None else rows.chosen_by(member.filter)) for member in members)
        left = {member: member.capacity for member in members}
        shares: dict[Member, list[int]] = {}
        room = self._room()
        for passed, number in enumerate(wanted):
            if not queue or not room:
                return shares, passed, queue[0][0] if queue else None
            for _ in range(len(queue)):
                member, flags = queue[0]
                queue.rotate(-1)
                if flags is None or flags[number]:
                    shares.setdefault(member, []).append(number)
                    room -= 1
                    left[member] -= 1
                    if not left[member]:
                        queue.pop()
                    break
            else:
                self._counts.dropped += 1
        return shares, len(wanted), queue[0][0] if queue else None

    # -- one by one --------------------------------------------------------------------------------------------------

    def _deal_by_key(self, flight: Flight, cursor: PartitionCursor, rows: Rows, members: list[Member]) -> None:
        """Deliver a chunk's records one by one: filters and keys say who may have which."""
        wanted = None if self.filter is None else rows.chosen_by(self.filter)
        queue = deque(_Turn(member, cursor.flight, rows) for member in members)
        turns: dict[Holder, _Turn] = {turn.member: turn for turn in queue}
        keys, offsets, states, claim = rows.keys, rows.offsets, cursor.flight.keys, flight.claim
        room, filtered, at = self._room(), 0, rows.at
        while at < rows.count and queue:
            if wanted is not None and not wanted[at]:
                filtered += 1
                at += 1
                continue
            if room <= 0:
                break
            key = keys[at]
            state = None if key is None else states.get(key)
            turn = _next_turn(queue, at) if state is None else _turn_of(turns, state, at)
            if turn is not None:
                claim(turn.lease, offsets[at], key, state)
                turn.numbers.append(at)
                room -= 1
                turn.left -= 1
                if not turn.left:
                    queue.remove(turn)
            elif key is not None and state is not None:
                flight.hold(cursor.flight, offsets[at], key)
                cursor.keep(rows.record(at))
                room -= 1
            else:
                self._counts.dropped += 1
            at += 1
        self._counts.filtered += filtered
        runs = [(turn.member, turn.begin(flight, rows, cursor.number)) for turn in turns.values() if turn.numbers]
        cursor.passed(rows, at)
        if queue:
            self._turn_to(queue[0].member)
        for member, run in runs:
            self._send(member, run)

    def _hand_out_again(self, members: list[Member]) -> None:
        """Deliver what comes again, before anything new."""
        table, flight = _Table(members), self._flight
        try:
            if flight is None:
                self._hand_out_returned(table)
            else:
                self._hand_out_due(flight, table)
        finally:
            if table.batches and table.queue:  # else a member that never acknowledges gets the same record for ever
                self._turn_to(table.queue[0])
            self._send_all(table)

    def _hand_out_returned(self, table: "_Table") -> None:
        while self._returned and table.queue:
            cursor, record = self._returned.popleft()
            member = table.find(record)
            if member is None:
                self._counts.dropped += 1
            else:
                table.give(member, _delivery(record, cursor.number))

    def _hand_out_due(self, flight: Flight, table: "_Table") -> None:
        for _ in range(AGAIN_MAX):
            holder = next((member for member in table.queue if member.pending), None)
            entries = holder.pending if holder else flight.due
            if not table.queue or not entries:
                return
            entry = entries.popleft()
            if not flight.is_ready(entry, holder or DUE):
                continue
            try:
                record = self.cursors[entry[0].number].fetch(entry[2])
            except NotLoadedError:
                entries.appendleft(entry)
                return
            except StorageError:
                entries.appendleft(entry)
                raise
            if record is None:
                flight.finish(entry[0], entry[2])
            else:
                self._give_again(flight, table, entry, record, holder)

    def _give_again(self, flight: Flight, table: "_Table", entry: Entry, record: Record, holder: Member | None) -> None:
        """Deliver one record again: to the member that must have it, or to the next member that wants it."""
        if holder is not None and not _wants(holder, record):
            flight.put_off(entry)
            return
        member = holder or table.find(record)
        if member is None:
            self._counts.dropped += 1
            flight.finish(entry[0], entry[2])
            return
        self._counts.redelivered += entry[2] in entry[0].attempts  # else it was held back behind others of its key
        table.give(member, _delivery(record, entry[0].number, flight.grant_again(entry[0], member, entry[2])))

    # -- members -----------------------------------------------------------------------------------------------------

    def _turn_to(self, member: Member) -> None:
        if not member.closed and member in self.members:
            self._next_member = self.members.index(member)

    def _send_all(self, table: "_Table") -> None:
        for member, batch in table.batches.items():
            self._send(member, batch)

    def _send(self, member: Member, batch: Sequence[Delivery]) -> None:
        if member.closed:  # another member's `deliver` ended it; in explicit mode its records wait already
            if self._flight is None:
                self._returned += [(self.cursors[one.partition], one) for one in batch]
            return
        self._counts.delivered += len(batch)
        try:
            member.deliver(batch)
        except Exception as error:  # one session's bug must not stop the others
            log.exception("a member of group %r failed", member.group.name)
            member.leave(lost=True)  # what it held may be why
            member.on_closed(GroupClosedError(f"the member failed: {error}"))


class _Turn:
    """A member that is offered the records of a chunk one by one, and the numbers of those that it gets."""

    __slots__ = ("flags", "lease", "left", "member", "numbers")

    def __init__(self, member: Member, cursor: CursorFlight, rows: Rows) -> None:
        self.member = member
        self.flags = None if member.filter is None else rows.chosen_by(member.filter)
        self.lease = Lease(cursor, member, 1, 0.0, [])
        self.left = member.capacity
        self.numbers: list[int] = []

    def begin(self, flight: Flight, rows: Rows, partition: int) -> Run:
        """Begin the lease of the records that the member gets, and return them."""
        numbers = even(self.numbers)
        flight.begin(self.lease, pick(rows.offsets, numbers))
        if self.member.credit is not None:
            self.member.credit -= len(numbers)
        return Run(rows, numbers, partition, self.lease)


def _next_turn(queue: deque[_Turn], number: int) -> _Turn | None:
    """Return the next turn of a member that wants a record; each that was asked goes to the end of the queue."""
    turn = queue[0]
    queue.rotate(-1)
    if turn.flags is None or turn.flags[number]:
        return turn
    for _ in range(len(queue) - 1):
        turn = queue[0]
        queue.rotate(-1)
        if turn.flags is None or turn.flags[number]:
            return turn
    return None


def _turn_of(turns: dict[Holder, _Turn], state: KeyState, number: int) -> _Turn | None:
    """Return the turn of the member that holds a key, if it takes more and no record of the key waits."""
    turn = None if state.held else turns.get(state.member)
    if turn is None or not turn.left or (turn.flags is not None and not turn.flags[number]):
        return None
    return turn


class _Table:
    """The members that are offered records one by one, in the order of their turns, and what each gets."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.queue = deque(member for member in members if member.capacity)
        self.batches: dict[Member, list[Delivery]] = {}

    def find(self, record: Record) -> Member | None:
        """Return the next member that wants a record; each that was asked goes to the end of the queue."""
        queue = self.queue
        for _ in range(len(queue)):
            member = queue[0]
            queue.rotate(-1)
            if _wants(member, record):
                return member
        return None

    def give(self, member: Member, delivery: Delivery) -> None:
        """Add a record to what a member gets; the member leaves the queue when it takes no more."""
        self.batches.setdefault(member, []).append(delivery)
        if member.credit is not None:
            member.credit -= 1
        if not member.capacity:
            self.queue.remove(member)


def _wants(member: Member, record: Record) -> bool:
    return member.filter is None or member.filter(record)


def _delivery(record: Record, partition: int, lease: Lease | None = None) -> Delivery:
    return Delivery(
        record.payload, record.key, record.headers, record.timestamp, record.attributes, record.offset,
        partition, lease.attempt if lease else 1, lease,
    )  # fmt: skip
