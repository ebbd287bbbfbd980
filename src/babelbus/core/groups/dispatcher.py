"""Handing records out: who of a group's members gets which, a chunk at a time where nothing depends on the record.

Where there are no filters and no keys in play, a chunk is dealt by the number of its records alone; else each record is
offered to one member after the other. What comes again goes first.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from babelbus.core.groups.delivery_rows import Rows, RowsFilter, Run, pick
from babelbus.core.groups.in_flight import DUE, Counts, Delivery, Entry, Flight, KeyState, Lease
from babelbus.core.groups.member import Member, share
from babelbus.core.groups.partition_cursor import NotLoadedError, PartitionCursor
from babelbus.core.groups.settings import GroupClosedError, GroupSettings, RecordFilter
from babelbus.core.receipt import Promise
from babelbus.core.record import Record
from babelbus.errors import StorageError
from babelbus.records.headers import Numbers

log = logging.getLogger(__name__)

AGAIN_MAX = 1024
"""So many records are handed out again in a turn: each may cost a read."""


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
        """Take a member out of the rotation."""
        number = self.members.index(member)
        del self.members[number]
        if number < self._next_member:
            self._next_member -= 1

    def forget(self, cursors: list[PartitionCursor]) -> None:
        """Forget the returned records of cursors that were moved."""
        self._returned = deque(pair for pair in self._returned if pair[0] not in cursors)

    def hand_out(self, taker: Member | None, bytes_max: int) -> bool:
        """Hand records out until nobody takes more, nothing is there, or about `bytes_max` were looked through.

        They go to `taker` alone if there is one. Gives whether there is more to do at once.

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
            if self._is_simple(rows, members):
                self._give(cursor, rows, members, range(rows.at, rows.count))
            elif not self._choose(cursor, rows, members):
                self._offer(cursor, rows, members)
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
        """How many more records may be handed out before others are acked."""
        if self._flight is None:
            return 2**62
        return self.settings.in_flight_max - self._flight.count

    def _is_simple(self, rows: Rows, members: list[Member]) -> bool:
        """Return whether records can be dealt by their number alone."""
        if self.filter is not None or any(member.filter is not None for member in members):
            return False
        return self._flight is None or self.settings.order == "none" or rows.keyless

    def _give(self, cursor: PartitionCursor, rows: Rows, members: list[Member], wanted: Numbers) -> None:
        """Deal those of a chunk's records that are wanted to members in turn, all at once."""
        flight = self._flight
        shares, count, following = share(min(len(wanted), self._room()), [member.capacity for member in members])
        if flight is not None:
            flight.reserve(cursor.flight, pick(rows.offsets, wanted[:count]))
        batches: list[tuple[Member, Sequence[Delivery]]] = []
        for member, parts in zip(members, shares, strict=True):
            if not parts:
                continue
            numbers = wanted[parts[0]] if len(parts) == 1 else [*chain.from_iterable(wanted[part] for part in parts)]
            lease: Lease | None = None
            if flight is not None:
                lease = flight.lease_all(cursor.flight, member, pick(rows.offsets, numbers))
            run = Run(rows, numbers, cursor.number, lease)
            if member.credit is not None:
                member.credit -= len(run)
            batches.append((member, run if member.runs else run.deliveries()))
        at = wanted[count] if count < len(wanted) else rows.count
        self._counts.filtered += at - rows.at - count
        cursor.passed(rows, at)
        self._turn_to(members[following])
        for member, batch in batches:
            self._send(member, batch)

    def _choose(self, cursor: PartitionCursor, rows: Rows, members: list[Member]) -> bool:
        """Deal a chunk's records by filters that say for all of them at once what they want; `False`: not these."""
        filters = [self.filter, *(member.filter for member in members)]
        if self._flight is not None or not all(one is None or isinstance(one, RowsFilter) for one in filters):
            return False
        flags, *flags_of_members = [_wanted_by(one, rows) for one in filters]
        wanted: Numbers = range(rows.at, rows.count)
        if flags is not None:
            wanted = [number for number in wanted if flags[number]]
        if any(one is not None for one in flags_of_members):
            self._deal(cursor, rows, wanted, deque(zip(members, flags_of_members, strict=True)))
        else:
            self._give(cursor, rows, members, wanted)
        return True

    def _deal(
        self, cursor: PartitionCursor, rows: Rows, wanted: Numbers, queue: "deque[tuple[Member, list[bool] | None]]"
    ) -> None:
        """Deal records one by one to members in turn, each to the next that wants it."""
        room = {member: member.capacity for member, _ in queue}
        shares: dict[Member, list[int]] = {}
        count, at = 0, rows.count
        for number in wanted:
            if not queue:
                at = number
                break
            count += 1
            for _ in range(len(queue)):
                member, flags = queue[0]
                queue.rotate(-1)
                if flags is None or flags[number]:
                    shares.setdefault(member, []).append(number)
                    room[member] -= 1
                    if not room[member]:
                        queue.pop()
                    break
            else:
                self._counts.dropped += 1
        self._counts.filtered += at - rows.at - count
        cursor.passed(rows, at)
        if queue:
            self._turn_to(queue[0][0])
        for member, numbers in shares.items():
            if member.credit is not None:
                member.credit -= len(numbers)
        for member, numbers in shares.items():
            run = Run(rows, numbers, cursor.number, None)
            self._send(member, run if member.runs else run.deliveries())

    def _offer(self, cursor: PartitionCursor, rows: Rows, members: list[Member]) -> None:
        """Hand a chunk's records out one by one: filters and keys say who may have which."""
        at, flight = rows.at, self._flight
        wanted = self.filter
        keyed = flight is not None and self.settings.order == "key"
        table = _Table(members)
        rows.load()
        leases: dict[Member, Lease] = {}
        while at < rows.count and table.queue:
            record = rows.record(at)
            if wanted is not None and not wanted(record):
                self._counts.filtered += 1
                at += 1
                continue
            if flight is None:
                self._give_one(cursor, record, table)
                at += 1
                continue
            if flight.count >= self.settings.in_flight_max:
                break
            key = record.key if keyed else None
            state = cursor.flight.keys.get(key) if key is not None else None
            found = table.find(record) if state is None else table.holder(state, record)
            if found is None and key is not None and state is not None:
                flight.hold(cursor.flight, record.offset, key)
                cursor.keep(record)
                at += 1
                continue
            at += 1
            if found is None:
                self._counts.dropped += 1
                continue
            lease = leases.get(found)
            if lease is None:
                lease = leases[found] = flight.open_lease(cursor.flight, found)
            flight.add(lease, record.offset, key)
            table.give(found, _first_delivery(record, cursor.number, lease))
        cursor.passed(rows, at)
        if table.queue:
            self._turn_to(table.queue[0])
        for member, batch in table.batches.items():
            self._send(member, batch)

    def _hand_out_again(self, members: list[Member]) -> None:
        """Hand out what comes again, before anything new."""
        if self._flight is None:
            self._hand_out_returned(members)
            return
        flight, table = self._flight, _Table(members)
        left = AGAIN_MAX
        refused: StorageError | None = None
        while left > 0 and table.queue:
            holder = next((member for member in table.queue if member.pending), None)
            if holder is None and not flight.due:
                break
            left -= 1
            entry = holder.pending.popleft() if holder else flight.due.popleft()
            if not flight.is_ready(entry, holder or DUE):
                continue
            try:
                record = self.cursors[entry[0].number].fetch(entry[2])
            except (StorageError, NotLoadedError) as error:
                (holder.pending if holder else flight.due).appendleft(entry)
                refused = error if isinstance(error, StorageError) else None
                break
            if record is None:
                flight.finish(entry[0], entry[2])
                continue
            self._give_again(flight, table, entry, record, holder)
        for member, batch in table.batches.items():
            self._send(member, batch)
        if refused is not None:
            raise refused

    def _give_again(self, flight: Flight, table: "_Table", entry: Entry, record: Record, holder: Member | None) -> None:
        """Hand one record out again: to the member that must have it, or to the next that wants it."""
        if holder is not None and not _wants(holder, record):
            flight.put_off(entry)
            return
        found = holder or table.find(record)
        if found is None:
            self._counts.dropped += 1
            flight.finish(entry[0], entry[2])
            return
        self._counts.redelivered += entry[2] in entry[0].attempts  # else it was held back behind others of its key
        lease = flight.grant_again(entry[0], found, entry[2])
        table.give(
            found,
            Delivery(
                record.payload, record.key, record.headers, record.timestamp, record.attributes, record.offset,
                entry[0].number, lease.attempt, lease,
            ),
        )  # fmt: skip

    def _hand_out_returned(self, members: list[Member]) -> None:
        table = _Table(members)
        while self._returned and table.queue:
            self._give_one(*self._returned.popleft(), table)
        for member, batch in table.batches.items():
            self._send(member, batch)

    def _give_one(self, cursor: PartitionCursor, record: Record, table: "_Table") -> None:
        """Hand one record to the next member that wants it, in mode `on_delivery`."""
        found = table.find(record)
        if found is None:
            self._counts.dropped += 1
        else:
            table.give(found, _first_delivery(record, cursor.number, None))

    def _turn_to(self, member: Member) -> None:
        if not member.closed and member in self.members:
            self._next_member = self.members.index(member)

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

    def holder(self, state: KeyState, record: Record) -> Member | None:
        """Return the member that may have a record of a key: who holds earlier ones, if it takes more and none
        waits.
        """
        if state.held:
            return None
        return next((one for one in self.queue if one is state.member and _wants(one, record)), None)

    def give(self, member: Member, delivery: Delivery) -> None:
        """Put a record into what a member gets; it leaves the queue when it takes no more."""
        batch = self.batches.get(member)
        if batch is None:
            batch = self.batches[member] = []
        batch.append(delivery)
        if member.credit is not None:
            member.credit -= 1
        if not member.capacity:
            self.queue.remove(member)


def _wanted_by(wanted: RecordFilter | None, rows: Rows) -> list[bool] | None:
    return rows.made(wanted.choose) if isinstance(wanted, RowsFilter) else None


def _wants(member: Member, record: Record) -> bool:
    return member.filter is None or member.filter(record)


def _first_delivery(record: Record, partition: int, lease: Lease | None) -> Delivery:
    return Delivery(
        record.payload, record.key, record.headers, record.timestamp, record.attributes, record.offset,
        partition, 1, lease,
    )  # fmt: skip
