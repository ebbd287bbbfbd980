"""The records that a group in explicit mode handed out and that are not acked: leases, redelivery, order per key.

A record is *unfinished* from when it is handed out (or held back) until it is acked, dropped or a dead letter. Its
entry says where it is: a `Lease` of a member, `WAITING` for its time, `READY` to be handed out, `BURYING` until its
dead letter is durable. Entries of a cursor stand in the order of offsets, so the first one is the committed cursor.
Nothing here waits or reads: the group asks, and `tick` does what its time has come for.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

import msgspec

from babelbus.clock import Clock
from babelbus.core.groups.settings import GroupSettings
from babelbus.core.record import Record

SPENT_LEASES_MAX = 256
"""So many leases that are over may stand between live ones before they are cleared away."""


class Delivery(Record, frozen=True, gc=False):
    """A record as a member gets it. `attempt` counts from 1; `lease` says whose it is, for `ack` and `nack`."""

    partition: int = -1
    attempt: int = 1
    lease: "Lease | None" = None

    def without_content(self) -> "Delivery":
        """Return what an ack needs: the content may be most of the memory of a delivery that waits for its ack."""
        return Delivery(None, None, (), 0, 0, self.offset, self.partition, self.attempt, self.lease)


class Counts(msgspec.Struct):
    """The records that a group handled since the server started."""

    delivered: int = 0
    """Handed to members, again or not."""
    acknowledged: int = 0
    redelivered: int = 0
    """Of `delivered`, those that had been before."""
    dead_lettered: int = 0
    filtered: int = 0
    """Skipped because the group's filter does not want them."""
    dropped: int = 0
    """Passed because no open member's filter wants them."""
    removed: int = 0
    """Offsets that retention removed before the group was done with them."""
    corrupt: int = 0
    """Passed because they are damaged; each was logged."""
    stale: int = 0
    """Acks and nacks of records that were finished or another's by then."""


class Holder:
    """A member, as far as this module knows one."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Records that it has and did not ack."""
        self.expires = True
        """Whether what it does not ack in time is handed out again."""
        self.pending: deque[Entry] = deque()
        """Records that only it may have, because it holds earlier ones of their keys."""


class Lease:
    """Records of a cursor that were delivered to a member together."""

    __slots__ = ("attempt", "cursor", "left", "member", "offsets", "since")

    def __init__(self, cursor: "CursorFlight", member: Holder, attempt: int, since: float, offsets: list[int]) -> None:
        self.cursor = cursor
        self.member = member
        self.attempt = attempt
        self.since = since
        self.offsets = offsets
        self.left = len(offsets)


class CursorFlight:
    """The unfinished records of one partition."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = 0
        """How often the cursor was moved; deliveries from before are dropped, and acks of them are stale."""
        self.unfinished: dict[int, Lease] = {}
        self.attempts: dict[int, int] = {}
        """How many attempts records have used up; those that were not handed out yet have no entry."""
        self.burials: dict[int, tuple[int, str]] = {}
        """Attempts and reason of those that are to be dead letters."""
        self.keys: dict[bytes, KeyState] = {}
        self.key_of: dict[int, bytes] = {}

    def committed(self, position: int) -> int:
        """Return the lowest offset that is not done, for a cursor at `position`."""
        return next(iter(self.unfinished), position)

    def done(self, position: int, spans_max: int) -> list[tuple[int, int]]:
        """Return what is done between the committed offset and `position`, as [start, end) in order."""
        spans: list[tuple[int, int]] = []
        last = -1
        for offset in self.unfinished:
            if last >= 0 and offset > last + 1:
                spans.append((last + 1, offset))
                if len(spans) == spans_max:
                    return spans
            last = offset
        if last >= 0 and position > last + 1:
            spans.append((last + 1, position))
        return spans


_NONE: list[int] = []
_NOBODY = Holder()
_NOWHERE = CursorFlight(-1)
WAITING = Lease(_NOWHERE, _NOBODY, 0, 0.0, [])
READY = Lease(_NOWHERE, _NOBODY, 0, 0.0, [])
BURYING = Lease(_NOWHERE, _NOBODY, 0, 0.0, [])
DUE = Holder()
"""Stands for "any member" where a key's next record was offered."""

Entry = tuple[CursorFlight, int, int]
"""Cursor, its epoch, offset: a record to deliver (again)."""


class KeyState(msgspec.Struct, eq=False):
    """The unfinished records of one key: `in_flight` with one member, the others held back behind each other."""

    member: Holder
    in_flight: int = 1
    held: list[int] = []
    """Heap of offsets; the first is the next to go."""
    offered: tuple[int, Holder] | None = None
    """Which one stands in whose queue."""


Bury = Callable[[CursorFlight, int, int, str], None]
"""Cursor, offset, attempts, reason: make a dead letter of it, then call `buried`."""


class Flight:
    """The unfinished records of a whole group."""

    def __init__(self, clock: Clock, counts: Counts, bury: Bury, settings: GroupSettings) -> None:
        self.settings = settings
        self.count = 0
        """All unfinished records."""
        self.due: deque[Entry] = deque()
        """Records that any member may have."""
        self._clock = clock
        self._counts = counts
        self._bury = bury
        self.leases: deque[Lease] = deque()
        """In the order in which they began; those without a record left are over."""
        self._spent = 0
        self._retries: list[tuple[float, int, Entry]] = []
        self._retry_count = 0

    # -- handing out -------------------------------------------------------------------------------------------------

    def reserve(self, cursor: CursorFlight, offsets: list[int]) -> None:
        """Add fresh records without a key, in the order of offsets; `lease_all` follows."""
        cursor.unfinished.update(dict.fromkeys(offsets, READY))
        self.count += len(offsets)

    def lease_all(self, cursor: CursorFlight, member: Holder, offsets: list[int]) -> Lease:
        """Return records that were reserved to a member."""
        lease = Lease(cursor, member, 1, self._clock.monotonic(), offsets)
        cursor.unfinished.update(dict.fromkeys(offsets, lease))
        member.in_flight += len(offsets)
        self.leases.append(lease)
        return lease

    def claim(self, lease: Lease, offset: int, key: bytes | None, state: "KeyState | None") -> None:
        """Add a fresh record to a lease that `begin` starts afterwards, before anything else happens.

        `state` is the state of its key. No other member holds records of the key, and none is held back.
        """
        cursor = lease.cursor
        cursor.unfinished[offset] = lease
        if key is not None:
            if state is None:
                cursor.keys[key] = KeyState(lease.member)
            else:
                state.in_flight += 1
            cursor.key_of[offset] = key

    def begin(self, lease: Lease, offsets: list[int]) -> None:
        """Start the lease of records that were claimed."""
        lease.offsets, lease.left, lease.since = offsets, len(offsets), self._clock.monotonic()
        lease.member.in_flight += len(offsets)
        self.count += len(offsets)
        self.leases.append(lease)

    def hold(self, cursor: CursorFlight, offset: int, key: bytes) -> None:
        """Keep a fresh record back behind the unfinished records of its key."""
        state = cursor.keys[key]
        cursor.unfinished[offset] = READY
        cursor.key_of[offset] = key
        self.count += 1
        heappush(state.held, offset)
        self._offer(cursor, key, state)

    def grant_again(self, cursor: CursorFlight, member: Holder, offset: int) -> Lease:
        """Record that a record that was `READY` goes to a member."""
        lease = Lease(cursor, member, cursor.attempts.get(offset, 0) + 1, self._clock.monotonic(), [offset])
        cursor.unfinished[offset] = lease
        member.in_flight += 1
        self.leases.append(lease)
        key = cursor.key_of.get(offset)
        if key is not None:
            state = cursor.keys[key]
            heappop(state.held)  # it is the first: nothing else of its key was on offer
            state.offered = None
            state.member = member
            state.in_flight += 1
            self._offer(cursor, key, state)
        return lease

    def is_ready(self, entry: Entry, queue: Holder) -> bool:
        """Return whether an entry of a queue (`DUE`, or of a member) may still be handed out."""
        cursor, epoch, offset = entry
        if cursor.epoch != epoch or cursor.unfinished.get(offset) is not READY:
            return False
        key = cursor.key_of.get(offset)
        return key is None or cursor.keys[key].offered == (offset, queue)

    def put_off(self, entry: Entry) -> None:
        """Wait with a record that its only possible member does not want, until the member holds none of the key."""
        cursor, _, offset = entry
        cursor.keys[cursor.key_of[offset]].offered = None

    # -- acks --------------------------------------------------------------------------------------------------------

    def ack(self, member: Holder, deliveries: Iterable[Delivery]) -> int:
        """Acknowledge records of a member; return how many it held. Others are counted as stale."""
        done = stale = 0
        for delivery in deliveries:
            lease = delivery.lease
            offset = delivery.offset
            if lease is None or lease.member is not member or lease.cursor.unfinished.get(offset) is not lease:
                stale += 1
                continue
            cursor = lease.cursor
            del cursor.unfinished[offset]
            lease.left -= 1
            done += 1
            if not lease.left:
                lease.offsets = _NONE
                self._spent += 1
            if cursor.attempts:
                cursor.attempts.pop(offset, None)
            if cursor.key_of:
                self._finish_key(cursor, offset)
        self.count -= done
        member.in_flight -= done
        self._counts.acknowledged += done
        self._counts.stale += stale
        self._sweep()
        return done

    def ack_offsets(self, member: Holder, lease: Lease, offsets: list[int]) -> int:
        """Acknowledge records of one lease, as `ack`; about 0.2 us each."""
        unfinished = lease.cursor.unfinished
        cursor, held = lease.cursor, [offset for offset in offsets if unfinished.get(offset) is lease]
        done = len(held) if lease.member is member else 0
        self._counts.stale += len(offsets) - done
        if not done:
            return 0
        for offset in held:
            del unfinished[offset]
        if cursor.attempts:
            for offset in held:
                cursor.attempts.pop(offset, None)
        if cursor.key_of:
            for offset in held:
                self._finish_key(cursor, offset)
        lease.left -= done
        if not lease.left:
            lease.offsets = _NONE
            self._spent += 1
        self.count -= done
        member.in_flight -= done
        self._counts.acknowledged += done
        self._sweep()
        return done

    def extend(self, member: Holder, lease: Lease, offsets: list[int]) -> Lease | None:
        """Return a new lease of records that a member holds by another lease, or `None` if it holds none of them."""
        unfinished = lease.cursor.unfinished
        held = [offset for offset in offsets if unfinished.get(offset) is lease]
        if lease.member is not member or not held:
            return None
        extended = Lease(lease.cursor, member, lease.attempt, self._clock.monotonic(), held)
        unfinished.update(dict.fromkeys(held, extended))
        lease.left -= len(held)
        if not lease.left:
            lease.offsets = _NONE
            self._spent += 1
        self.leases.append(extended)
        self._sweep()
        return extended

    def _sweep(self) -> None:
        """Remove the leases that are over, if they are many."""
        if self._spent > SPENT_LEASES_MAX and 2 * self._spent > len(self.leases):
            self.leases = deque(lease for lease in self.leases if lease.left)
            self._spent = 0

    def finish(self, cursor: CursorFlight, offset: int) -> None:
        """Remove a record that no member holds."""
        del cursor.unfinished[offset]
        self.count -= 1
        cursor.attempts.pop(offset, None)
        cursor.burials.pop(offset, None)
        key = cursor.key_of.get(offset)
        if key is not None:
            state = cursor.keys[key]
            state.held.remove(offset)
            heapify(state.held)
            state.in_flight += 1  # as if it had been handed out
            self._finish_key(cursor, offset)

    def _finish_key(self, cursor: CursorFlight, offset: int) -> None:
        key = cursor.key_of.pop(offset, None)
        if key is not None:
            state = cursor.keys[key]
            state.in_flight -= 1
            if state.held:
                self._offer(cursor, key, state)
            elif not state.in_flight:
                del cursor.keys[key]

    # -- failures ----------------------------------------------------------------------------------------------------

    def nack(
        self, member: Holder, deliveries: Iterable[Delivery], reason: str, delay_seconds: float | None, *, final: bool
    ) -> int:
        """Return records of a member to the group, and return how many the member held.

        They are handed out again after `delay_seconds` (`None`: the back-off of their attempt), or become dead letters
        at once if `final`.
        """
        done = 0
        for delivery in deliveries:
            lease = delivery.lease
            if lease is None or lease.member is not member or lease.cursor.unfinished.get(delivery.offset) is not lease:
                self._counts.stale += 1
                continue
            self._fail(lease, delivery.offset, reason, delay_seconds, final=final)
            done += 1
        return done

    def _fail(
        self,
        lease: Lease,
        offset: int,
        reason: str,
        delay_seconds: float | None,
        *,
        final: bool = False,
        counts: bool = True,
    ) -> None:
        """End the lease of one record; unless it `counts`, its next delivery has the same number as this one."""
        cursor, attempt = lease.cursor, lease.attempt if counts else lease.attempt - 1
        lease.left -= 1
        if not lease.left:
            self._spent += 1
        lease.member.in_flight -= 1
        cursor.attempts[offset] = attempt
        cursor.unfinished[offset] = WAITING
        key = cursor.key_of.get(offset)
        if key is not None:
            state = cursor.keys[key]
            state.in_flight -= 1
            heappush(state.held, offset)
        most = self.settings.attempts_max
        if final or (counts and most is not None and attempt >= most):
            self._begin_burial(cursor, offset, attempt, reason)
        else:
            delay = self.settings.retry_delay(attempt) if delay_seconds is None else delay_seconds
            self._wait(cursor, offset, delay)
        if key is not None:
            self._offer(cursor, key, state)

    def _wait(self, cursor: CursorFlight, offset: int, delay_seconds: float) -> None:
        entry = (cursor, cursor.epoch, offset)
        if delay_seconds <= 0:
            self._make_ready(entry)
            return
        cursor.unfinished[offset] = WAITING
        self._retry_count += 1
        heappush(self._retries, (self._clock.monotonic() + delay_seconds, self._retry_count, entry))

    def _make_ready(self, entry: Entry) -> None:
        cursor, _, offset = entry
        cursor.unfinished[offset] = READY
        key = cursor.key_of.get(offset)
        if key is None:
            self.due.append(entry)
        else:
            self._offer(cursor, key, cursor.keys[key])

    def _begin_burial(self, cursor: CursorFlight, offset: int, attempts: int, reason: str) -> None:
        cursor.unfinished[offset] = BURYING
        cursor.burials[offset] = attempts, reason
        self._bury(cursor, offset, attempts, reason)

    def buried(self, entry: Entry, *, done: bool) -> None:
        """Handle the outcome of a dead letter: it is durable, or could not be made and is tried again later."""
        cursor, epoch, offset = entry
        if cursor.epoch != epoch or cursor.unfinished.get(offset) is not BURYING:
            return
        if done:
            self._counts.dead_lettered += 1
            self.finish(cursor, offset)
        else:
            self._wait(cursor, offset, max(self.settings.retry_seconds, 1.0))

    def leave(self, member: Holder, *, lost: bool) -> None:
        """Return what a member holds to the group, to be handed out at once; an attempt if the member was `lost`."""
        for lease in list(self.leases):
            if lease.member is member and lease.left:
                for offset in lease.offsets:
                    if lease.cursor.unfinished.get(offset) is lease:
                        self._fail(lease, offset, "its member was lost", 0.0, counts=lost)
        member.pending.clear()

    def reset(self, cursor: CursorFlight) -> None:
        """Drop all records of a cursor that is moved."""
        for lease in cursor.unfinished.values():
            if lease is not WAITING and lease is not READY and lease is not BURYING:
                lease.left -= 1
                lease.member.in_flight -= 1
                self._spent += not lease.left
        self.count -= len(cursor.unfinished)
        cursor.unfinished.clear()
        cursor.attempts.clear()
        cursor.burials.clear()
        cursor.keys.clear()
        cursor.key_of.clear()
        cursor.epoch += 1

    # -- time --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """End leases that were not acked in time, and make ready what has waited long enough."""
        now = self._clock.monotonic()
        leases, seconds = self.leases, self.settings.ack_seconds
        while leases and (not leases[0].left or leases[0].since + seconds <= now):
            lease = leases.popleft()
            if not lease.left:
                self._spent = max(self._spent - 1, 0)
                continue
            if not lease.member.expires:
                lease.since = now
                leases.append(lease)
                continue
            for offset in lease.offsets:
                if lease.cursor.unfinished.get(offset) is lease:
                    self._fail(lease, offset, f"not acked within {seconds:g} seconds", None)
        retries = self._retries
        while retries and retries[0][0] <= now:
            entry = heappop(retries)[2]
            cursor, epoch, offset = entry
            if cursor.epoch != epoch or cursor.unfinished.get(offset) is not WAITING:
                continue
            if offset in cursor.burials:  # its dead letter could not be made
                self._begin_burial(cursor, offset, *cursor.burials[offset])
            else:
                self._make_ready(entry)

    def next_at(self) -> float | None:
        """Return when (monotonic seconds) `tick` has something to do, `None` when nothing is to come."""
        while self.leases and not self.leases[0].left:
            self.leases.popleft()
            self._spent = max(self._spent - 1, 0)
        times = [self.leases[0].since + self.settings.ack_seconds] if self.leases else []
        times += [self._retries[0][0]] if self._retries else []
        return min(times, default=None)

    def retries(self) -> Iterator[tuple[float, CursorFlight, int]]:
        """Yield when (monotonic seconds) records are made ready again, about the first of them first."""
        for at, _, (cursor, epoch, offset) in self._retries:
            if cursor.epoch == epoch and cursor.unfinished.get(offset) is WAITING:
                yield at, cursor, offset

    # -- order per key -----------------------------------------------------------------------------------------------

    def _offer(self, cursor: CursorFlight, key: bytes, state: KeyState) -> None:
        """Add the next record of a key to the queue of the member that holds the key, or of all if no member does."""
        if not state.held:
            return
        head = state.held[0]
        if cursor.unfinished[head] is not READY:
            state.offered = None  # a later one that was on offer must wait for it
            return
        target = state.member if state.in_flight else DUE
        if state.offered == (head, target):
            return
        state.offered = (head, target)
        (self.due if target is DUE else target.pending).append((cursor, cursor.epoch, head))
