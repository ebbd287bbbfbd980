"""A consumer group on a topic: a cursor for each partition, members, and the turns that hand records out.

Promises of a group:

- Every record of the topic goes to one member; members that take more get records in turn (strict alternation).
- Mode `on_delivery`: a record is done when it is handed out, so at most once while the server lives. After a crash the
  group goes on at the last cursors that were saved (groups.py), and hands out again what came behind them.
- Mode `explicit`: at least once. A record is handed out again when its member leaves, nacks it, or is silent for
  `ack_seconds`; after `attempts_max` deliveries, those to members that left in order not counted, it becomes a dead
  letter. The committed cursor is the lowest offset that is not done, and never runs ahead of an ack; acks may come in
  any order. Attempts are counted anew after a restart.
- Order: each member gets the records of a partition in the order of offsets, but for those that come again. With
  `order = "key"` (explicit mode) two records of one key in one partition are never with two members at once, and none
  is handed out while an earlier one waits to come again: so each key's records are acked in order, if members handle
  what they hold in order. Records that a member already holds behind a record that it nacks stay with it.
- A member that left, or whose record was taken from it, is fenced: its ack changes nothing and is counted.

A turn hands out at most `TURN_BYTES` and then lets the event loop go round, however large the backlog. There is no task
and no timer for a record: one timer a group, for the next lease or retry that ends.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from babelbus.clock import Clock
from babelbus.core.access import NOBODY, SERVER, AccessRefusedError, Action, Identity, refusal
from babelbus.core.groups.cursor_files import StoredCursor, StoredGroup
from babelbus.core.groups.dead_letters import DeadLetter, DeadLetters, topic_name
from babelbus.core.groups.dispatcher import Dispatcher
from babelbus.core.groups.in_flight import Counts, CursorFlight, Delivery, Flight, Lease
from babelbus.core.groups.inspection import MEMBERS_SHOWN, OLDEST_SHOWN, Departure, Inspection, inspect
from babelbus.core.groups.member import Deliver, Member, OnClosed
from babelbus.core.groups.partition_cursor import CursorInfo, NotLoadedError, PartitionCursor, ReadAhead, SeekPreview
from babelbus.core.groups.settings import (
    GroupClosedError,
    GroupOwnedError,
    GroupSettings,
    Place,
    RecordFilter,
    at_offset,
)
from babelbus.core.quotas import Quotas
from babelbus.core.receipt import DONE, Promise, Receipt
from babelbus.core.topic import Topic
from babelbus.errors import BabelbusError, StorageError

log = logging.getLogger(__name__)

TURN_BYTES = 2**20
"""About so much is read and handed out before the event loop goes round."""
TAKE_BYTES = 8 * 2**20
"""So much is looked through by one `take`, which answers at once even if a filter wants nothing of it."""
DISK_RETRY_SECONDS = 1.0


class GroupInfo(msgspec.Struct, frozen=True):
    """The settings and figures of a group."""

    topic: str
    name: str
    settings: GroupSettings
    paused: bool
    created_ms: int
    members: int
    lag: int
    in_flight: int
    cursors: tuple[CursorInfo, ...] = msgspec.field(name="lanes")
    counts: Counts


class Group:
    """One group. All calls come from the event loop; `Groups` makes it."""

    def __init__(
        self,
        topic: Topic,
        stored: StoredGroup,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        read_ahead: ReadAhead,
        dead_letters: DeadLetters,
        make_filter: Callable[[GroupSettings], RecordFilter | None],
        on_changed: Callable[["Group"], None],
        on_lost: Callable[["Group"], None],
        may_manage: Callable[[Identity, str, str], bool],
        check_topic: Callable[[Identity, Action, str], None],
        quotas: Quotas | None,
    ) -> None:
        self.name = stored.name
        self.owner = stored.owner
        """The principal that made the group, and may manage it."""
        self._may_manage = may_manage
        self._check_topic = check_topic
        self._quotas = quotas
        self.topic = topic
        self.settings = settings = stored.settings
        self.created_ms = stored.created_ms
        self.paused = stored.paused
        self.closed = False
        self.saved: Promise = DONE
        """The save of the last change of the group (`Groups.create`, `Groups.alter`)."""
        self.counts = Counts()
        self._clock = clock
        self._loop = loop
        self._read_ahead = read_ahead
        self._dead_letters = dead_letters
        self._make_filter = make_filter
        self._filter_known = False
        self._on_changed = on_changed
        self._on_lost = on_lost
        self.flight = Flight(clock, self.counts, self._bury, settings) if settings.ack == "explicit" else None
        self._dispatcher = Dispatcher(settings, self.counts, self.flight, self._watch)
        self._dispatcher.stopped = self.paused
        self.cursors = self._dispatcher.cursors
        self.members = self._dispatcher.members
        self._scheduled = False
        self.stall: StorageError | None = None
        """Why the disk refused a read just now; deliveries wait a moment."""
        self.filter_error: BabelbusError | None = None
        """Why the filter cannot be used, so that nothing is delivered."""
        self.letter_error: BabelbusError | None = None
        """Why the last dead letter could not be written."""
        self.departure: Departure | None = None
        """The member that left last, while nobody has joined since."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._add_cursors(stored.cursors)

    @property
    def cursor_count(self) -> int:
        """How many partitions it reads."""
        return len(self.cursors)

    # -- members -----------------------------------------------------------------------------------------------------

    def join(
        self,
        deliver: Deliver,
        *,
        credit: int | None = None,
        window: int | None = None,
        on_closed: OnClosed = lambda error: None,
        wanted: RecordFilter | None = None,
        owner: object = None,
        exclusive: bool = False,
        held: bool = False,
        principal: Identity = NOBODY,
        expires: bool = True,
        address: str = "",
    ) -> Member:
        """Add a member; records come to `deliver` from the next turn of the event loop on, unless it is `held`.

        `owner` is whatever the session wants to find again. A member with `credit=0` is handed nothing by itself and
        may `take`. `wanted` sees the records that the group's filter lets through; a record that no member with room
        wants is dropped for the group. A member that always acks or nacks what it gets, such as the server's own code,
        sets `expires` to false: `ack_seconds` is not for its records. `address` is shown to operators.

        Raises:
            AccessRefusedError: the principal may not consume everything that the topic holds.
            GroupOwnedError: `exclusive` was asked for and there are members, or one of them has it.
            GroupClosedError: the group is gone.
            QuotaExceededError: the principal has as many subscriptions and memberships as it may.
            UnknownFilterError: nobody here can read the group's filter.
        """
        self._require_open()
        self.check_consumed(principal)
        self._load_filter()
        if self.members and (exclusive or any(member.exclusive for member in self.members)):
            raise GroupOwnedError(f"group {self.name!r} on topic {self.topic.name!r} has an exclusive member")
        member = Member(
            self, deliver, on_closed,
            credit=credit, window=window, wanted=wanted, owner=owner, exclusive=exclusive, held=held,
            principal=principal,
            expires=expires, address=address, joined_at=self._clock.monotonic(),
        )  # fmt: skip
        if self._quotas is not None:
            member.quota = self._quotas.take_for(principal, "subscriptions")
        self.members.append(member)
        self.departure = None
        self.wake()
        return member

    def leave(self, member: Member, *, lost: bool = False) -> None:
        """End a membership; see `Member.leave`."""
        if member.closed:
            return
        member.close()
        self._dispatcher.remove(member)
        self.departure = Departure(member.principal, member.address, self._clock.now_ms(), lost)
        if self.flight is not None:
            self.flight.leave(member, lost=lost)
            self._changed()
        self.wake()

    def ack(self, member: Member, deliveries: Iterable[Delivery]) -> int:
        """Acknowledge records; see `Member.ack`."""
        flight = self._require_flight(member)
        done = flight.ack(member, deliveries)
        if done:
            self._changed()
            self.wake()
        return done

    def ack_offsets(self, member: Member, lease: Lease, offsets: list[int]) -> int:
        """Acknowledge records of one lease; see `Member.ack_offsets`."""
        done = self._require_flight(member).ack_offsets(member, lease, offsets)
        if done:
            self._changed()
            self.wake()
        return done

    def extend(self, member: Member, lease: Lease, offsets: list[int]) -> Lease | None:
        """Return a new lease of records that a member holds; see `Member.extend`."""
        return self._require_flight(member).extend(member, lease, offsets)

    def nack(
        self, member: Member, deliveries: Iterable[Delivery], reason: str, delay_seconds: float | None, *, final: bool
    ) -> int:
        """Return or reject records; see `Member.nack` and `Member.reject`."""
        flight = self._require_flight(member)
        done = flight.nack(member, deliveries, reason, delay_seconds, final=final)
        self._changed()
        self._arm()
        self.wake()
        return done

    # -- access ------------------------------------------------------------------------------------------------------

    def may_manage(self, principal: Identity) -> bool:
        """Return whether a principal may manage the group: its owner may, and who may manage the topic."""
        return self._may_manage(principal, self.topic.name, self.owner)

    def check_managed(self, principal: Identity) -> None:
        """Check that a principal may manage the group: its owner may, and who may manage the topic.

        Raises:
            AccessRefusedError: it may not.
        """
        if not self.may_manage(principal):
            raise refusal(principal, Action.MANAGE, self.topic.name)

    def check_consumed(self, principal: Identity) -> None:
        """Check that a principal may consume the topic.

        Raises:
            AccessRefusedError: it may not.
        """
        self._check_topic(principal, Action.CONSUME, self.topic.name)

    def access_changed(self) -> None:
        """Close the memberships of principals that may not consume the topic any more."""
        for member in list(self.members):
            try:
                self.check_consumed(member.principal)
            except AccessRefusedError as error:
                member.leave()
                self.departure = Departure(member.principal, member.address, self._clock.now_ms(), revoked=True)
                member.on_closed(error)

    # -- cursors -----------------------------------------------------------------------------------------------------

    def seek(self, place: Place, principal: Identity = NOBODY) -> None:
        """Move the cursors. Outstanding deliveries are dropped; later acks for them count as stale.

        Raises:
            AccessRefusedError: the principal may not manage the group.
            UnknownPartitionError: the place names a partition that there is not.
        """
        cursors = self._sought(place, principal)
        for cursor in cursors:
            if self.flight is not None:
                self.flight.reset(cursor.flight)
            cursor.seek(place)
        self._dispatcher.forget(cursors)
        self._changed()
        self.wake()

    def preview_seek(self, place: Place, principal: Identity = NOBODY) -> list[SeekPreview]:
        """Return the effect that `seek` would have in each partition.

        Raises: as `seek`.
        """
        return [cursor.preview(place) for cursor in self._sought(place, principal)]

    def _sought(self, place: Place, principal: Identity) -> list[PartitionCursor]:
        """Return the cursors that a seek moves."""
        self._require_open()
        self.check_managed(principal)
        if len(self.cursors) != len(self.topic.partitions):
            self._add_cursors({})
        return self.cursors if place.partition is None else [self._cursor(place.partition)]

    def catch_up(self) -> None:
        """Move cursors that are behind the oldest record kept by the topic's `retention_records` to that record."""
        for cursor in list(self.cursors):
            oldest = cursor.partition.oldest
            if cursor.stored().committed < oldest:
                self.seek(at_offset(oldest, cursor.number), SERVER)

    def pause(self, principal: Identity = NOBODY) -> None:
        """Stop all deliveries, pushed and taken, until `resume`, also after a restart; acks still count."""
        self._set_paused(True, principal)

    def resume(self, principal: Identity = NOBODY) -> None:
        """Resume deliveries."""
        self._set_paused(False, principal)

    def _set_paused(self, paused: bool, principal: Identity) -> None:
        self._require_open()
        self.check_managed(principal)
        if self.paused != paused:
            self.paused = self._dispatcher.stopped = paused
            self._changed()
            self.wake()

    def alter(self, settings: GroupSettings) -> None:
        """Replace the settings (`Groups.alter` checks and saves them); a new filter is for records not read yet."""
        self.settings = settings
        self._filter_known = False
        self._dispatcher.settings = settings
        if self.flight is not None:
            self.flight.settings = settings
        self._arm()
        self.wake()

    def info(self) -> GroupInfo:
        """Return what the group is and does."""
        cursors = tuple(cursor.info() for cursor in self.cursors)
        return GroupInfo(
            self.topic.name,
            self.name,
            self.settings,
            self.paused,
            self.created_ms,
            len(self.members),
            sum(cursor.lag for cursor in cursors),
            sum(cursor.in_flight for cursor in cursors),
            cursors,
            msgspec.structs.replace(self.counts),
        )

    def inspect(
        self, *, names: bool = True, members_max: int = MEMBERS_SHOWN, oldest_max: int = OLDEST_SHOWN
    ) -> Inspection:
        """Return what the group does now, and why records wait; without `names`, not who its members are."""
        return inspect(self, self._clock, names=names, members_max=members_max, oldest_max=oldest_max)

    def stored(self) -> dict[int, StoredCursor]:
        """Return what is to be kept of the cursors."""
        return {cursor.number: cursor.stored() for cursor in self.cursors}

    def to_store(self) -> StoredGroup:
        """Return the stored form of the group."""
        topic, cursors = self.topic.name, self.stored()
        return StoredGroup(topic, self.name, self.settings, self.paused, self.created_ms, cursors, self.owner)

    # -- pulling -----------------------------------------------------------------------------------------------------

    def take(self, count: int, member: Member | None = None, principal: Identity = NOBODY) -> list[Sequence[Delivery]]:
        """Fetch up to `count` records now, in competition with the members; an empty list when nothing is there.

        The records come as a member gets them, see `Deliver`. `take` never waits: if `loading` is not `None`
        afterwards, more comes when that is done. It looks through `TAKE_BYTES` at most: with a filter that wants little
        it may return nothing although there are records further on, and the next call continues from there.

        Raises:
            AccessRefusedError: the principal may not consume everything that the topic holds.
            GroupClosedError: the group is gone, or mode `explicit` asks for a member (who acks).
            UnknownFilterError: nobody here can read the group's filter.
        """
        self._require_open()
        if member is None:
            if self.flight is not None:
                raise GroupClosedError(f"group {self.name!r} wants acks: join it to take from it")
            self.check_consumed(principal)
            member = Member(self, lambda _: None, credit=count, principal=principal)
        elif member.closed:
            raise GroupClosedError("the member has left its group")
        if self.paused or self.stall is not None:
            return []
        self._load_filter()
        taken: list[Sequence[Delivery]] = []
        kept = member.deliver, member.credit, member.held
        member.deliver, member.credit, member.held = taken.append, count, False
        try:
            self._dispatcher.hand_out(member, TAKE_BYTES)
        except StorageError as error:
            self._stall(error)
        finally:
            member.deliver, member.credit, member.held = kept
        self._changed()
        self._arm()
        return taken

    @property
    def loading(self) -> Promise | None:
        """The read that `take` would have to wait for to find more; `None` when no read is under way."""
        return self._dispatcher.loading

    # -- turns -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Deliver records in the next turn of the event loop."""
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self.closed or self.paused or self.stall is not None or not self.members:
            return
        if len(self.cursors) != len(self.topic.partitions):
            self._add_cursors({})
        try:
            self._load_filter()
        except BabelbusError as error:  # the filter was altered to one that its protocol reads no more
            self.filter_error = error
            log.error("group %r on topic %r stands still: %s", self.name, self.topic.name, error)
            return
        try:
            more = self._dispatcher.hand_out(None, TURN_BYTES)
        except StorageError as error:
            more = False
            self._stall(error)
        self._changed()
        self._arm()
        if more:
            self.wake()

    def _stall(self, error: StorageError) -> None:
        """Stop deliveries for a while: the disk refused a read."""
        log.warning("group %r on topic %r: %s", self.name, self.topic.name, error)
        self.stall = error
        self._loop.call_later(DISK_RETRY_SECONDS, self._go_on)

    def _go_on(self) -> None:
        self.stall = None
        self.wake()

    # -- time, the topic and the end ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Run due work: end leases that were not acked, deliver waiting records. The group's timer calls it."""
        if self.closed or self.flight is None:
            return
        self.flight.tick()
        self._arm()
        self.wake()

    def _arm(self) -> None:
        """Start the one timer, for the next lease or retry that ends."""
        at = self.flight.next_at() if self.flight is not None and not self.closed else None
        if at is None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(at - self._clock.monotonic(), 0.001), self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer = None
        self.tick()

    def _bury(self, flight_cursor: CursorFlight, offset: int, attempts: int, reason: str) -> None:
        """Publish a record as a dead letter; the record is passed when that is durable."""
        flight, cursor = self.flight, self._cursor(flight_cursor.number)
        assert flight is not None
        entry = (flight_cursor, flight_cursor.epoch, offset)

        def settle(letter: Receipt) -> None:
            self.letter_error = letter.error
            if letter.error is not None:
                log.warning("group %r on topic %r: a dead letter waits: %s", self.name, self.topic.name, letter.error)
            flight.buried(entry, done=letter.error is None)
            self._changed()
            self._arm()
            self.wake()

        try:
            record = cursor.fetch(offset)
        except NotLoadedError:
            load = cursor.loading
            assert load is not None
            load.when_done(lambda _: self._bury(flight_cursor, offset, attempts, reason))
            return
        except StorageError as error:
            settle(Receipt.refused(error))
            return
        if record is None:
            flight.finish(flight_cursor, offset)
            return
        now_ms = self._clock.now_ms()
        letter = DeadLetter(self.topic.name, cursor.number, offset, self.name, attempts, reason, now_ms)
        name = self.settings.dead_letter_topic or topic_name(self.name)
        self._dead_letters.send(name, record, letter).when_done(settle)

    def _watch(self, cursor: PartitionCursor) -> None:
        """Follow the partition of a cursor without records, and wake up when a record comes."""
        if cursor.has_more or cursor.watching is not None:
            return
        partition, offset, inside = cursor.partition, cursor.position, True

        def call() -> None:
            cursor.watching = None
            if inside and partition.high_watermark <= offset:  # called at once with nothing there: it was closed
                self._loop.call_soon(self._on_lost, self)
            else:  # there is something, or readers were stepped back, or the topic went away: the turn will see
                self.wake()

        cursor.watching = _nothing
        cancel = partition.watch(offset, call)
        inside = False
        if cursor.watching is not None:
            cursor.watching = cancel

    def _add_cursors(self, stored: Mapping[int, StoredCursor]) -> None:
        """Add cursors for the new partitions, at the stored places or else at the beginning."""
        for partition in self.topic.partitions[len(self.cursors) :]:
            kept = stored.get(partition.number, StoredCursor(partition.log.first_offset))
            # What the disk lost is nobody's; a cursor is never trusted against the log.
            position = min(kept.committed, partition.high_watermark)
            done = [(start, end) for start, end in kept.done if end <= partition.high_watermark]
            self.cursors.append(PartitionCursor(partition, position, self._read_ahead, self.counts, done, self.wake))

    def topic_changed(self, topic: Topic) -> None:
        """Continue in the partitions of a topic that grew, or was opened again."""
        if topic is not self.topic:
            self.topic = topic
            for cursor in self.cursors:
                cursor.rebind(topic.partitions[cursor.number])
        if len(self.cursors) != len(topic.partitions):
            self._add_cursors({})
            self._changed()
        self.wake()

    def close(self, error: BabelbusError) -> None:
        """End the group for all its members, and tell them. The registry stores that."""
        if self.closed:
            return
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for cursor in self.cursors:
            cursor.leave()
        self._dispatcher.stopped = True
        members = list(self.members)
        self.members.clear()
        for member in members:
            member.close()
            try:
                member.on_closed(error)
            except Exception:  # the others must hear of it too
                log.exception("telling a member of group %r that it ended failed", self.name)

    def _changed(self) -> None:
        self._on_changed(self)

    def _cursor(self, partition: int) -> PartitionCursor:
        self.topic.partition(partition)
        if partition >= len(self.cursors):
            self._add_cursors({})
        return self.cursors[partition]

    def _load_filter(self) -> None:
        if not self._filter_known:
            self._dispatcher.filter = self._make_filter(self.settings)
            self._filter_known, self.filter_error = True, None

    def _require_open(self) -> None:
        if self.closed:
            raise GroupClosedError(f"group {self.name!r} on topic {self.topic.name!r} is gone")

    def _require_flight(self, member: Member) -> Flight:
        self._require_open()
        if member.closed:
            raise GroupClosedError("the member has left its group")
        if self.flight is None:
            raise GroupClosedError(f"group {self.name!r} takes no acks: a record is done when it is handed out")
        return self.flight


def _nothing() -> None:
    """End a watch that has not begun."""
