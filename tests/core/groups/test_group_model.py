"""A group in explicit mode against a model: members come, go, ack and nack, time passes, the server stops and crashes.

The model knows which records exist, who holds which, and what was acked when the cursors were saved last. It asks: no
record is skipped, none that was acked comes again (but after a crash, what was acked since the last commit), no cursor
runs ahead, and records of one key never overtake each other.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from babelbus.core.access import SERVER
from babelbus.core.groups.dead_letters import read as read_letter
from babelbus.core.groups.group import Group
from babelbus.core.groups.in_flight import Delivery
from babelbus.core.groups.settings import BEGINNING, GroupSettings
from tests.core.groups.support import Crew, Taker, take
from tests.support.bus import read, turns

ACK_SECONDS = 30.0
Place = tuple[int, int]
"""Partition and offset."""


class Held:
    """A record in a member's hands."""

    def __init__(self, delivery: Delivery, taker: Taker, until: float) -> None:
        self.delivery, self.taker, self.until = delivery, taker, until


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.takers: list[Taker] = []
        self.held: dict[Place, Held] = {}
        self.keys: dict[Place, bytes | None] = {}
        self.acked: set[Place] = set()
        self.acked_when_saved: set[Place] = set()
        self.forgotten: Counter[Place] = Counter()
        """Dead letters that a crash made the group forget: they come again."""
        self.broken: list[str] = []
        self.number = 0
        self.crew: Crew
        self.group: Group

    def run(self, job: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(job)

    async def _open(self, crew: Crew) -> None:
        self.crew = crew
        crew.groups.read_ahead.bytes_max = self.read_ahead_bytes
        self.group = crew.groups.ensure("work", "g", self.settings, start=BEGINNING, principal=SERVER)
        await turns()

    @initialize(
        attempts_max=st.sampled_from([None, 2, 4]),
        in_flight_max=st.sampled_from([4, 1000]),
        read_ahead_bytes=st.sampled_from([1, 2**20]),  # with 1, a cursor that reads takes the others' chunks
    )
    def begin(self, attempts_max: int | None, in_flight_max: int, read_ahead_bytes: int) -> None:
        self.read_ahead_bytes = read_ahead_bytes
        self.settings = GroupSettings(
            ack="explicit", ack_seconds=ACK_SECONDS, attempts_max=attempts_max, in_flight_max=in_flight_max
        )

        async def begin() -> None:
            await self._open(Crew(partitions=2))
            self.crew.bus.topic("dead-letters/g")

        self.run(begin())

    # -- what is delivered -------------------------------------------------------------------------------------------

    def deliver(self, taker: Taker, deliveries: Sequence[Delivery]) -> None:
        if self.group.paused:
            self.broken.append("a paused group handed records out")
        for one in deliveries:
            place = (one.partition, one.offset)
            if place in self.finished:
                self.broken.append(f"{place} is done and came again")
            if place in self.held:
                self.broken.append(f"{place} is with two members")
            if one.key is not None:
                for other, key in self.keys.items():
                    if key != one.key or other[0] != one.partition or other >= place or other in self.finished:
                        continue
                    if other not in self.held or self.held[other].taker is not taker:
                        self.broken.append(f"{place} overtook {other}")
            self.held[place] = Held(one, taker, self.crew.clock.monotonic() + ACK_SECONDS)

    @property
    def finished(self) -> set[Place]:
        return self.acked | self.dead

    @property
    def dead(self) -> set[Place]:
        topic = self.crew.broker.topic("dead-letters/g")
        letters = [read_letter(record) for record in read(topic.partitions[0])]
        return set(Counter((letter.partition, letter.offset) for letter in letters) - self.forgotten)

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(keys=st.lists(st.sampled_from([None, None, b"a", b"b", b"c"]), min_size=1, max_size=12))
    def publish(self, keys: list[bytes | None]) -> None:
        async def publish() -> None:
            for key in keys:
                self.crew.publish(self.number, key=key)
                self.number += 1
            for partition in self.crew.broker.topic("work").partitions:
                for record in read(partition):
                    self.keys[partition.number, record.offset] = record.key
            await turns(6)

        self.run(publish())

    @rule(window=st.sampled_from([None, 1, 3]), credit=st.sampled_from([None, 2, 10]))
    def join(self, window: int | None, credit: int | None) -> None:
        async def join() -> None:
            self.takers.append(Taker(self.group, window=window, credit=credit, then=self.deliver))
            await turns(6)

        if len(self.takers) < 4:
            self.run(join())

    @precondition(lambda self: self.takers)
    @rule(data=st.data(), lost=st.booleans())
    def leave(self, data: st.DataObject, lost: bool) -> None:
        async def leave() -> None:
            taker = data.draw(st.sampled_from(self.takers))
            self.takers.remove(taker)
            self.held = {place: held for place, held in self.held.items() if held.taker is not taker}
            taker.member.leave(lost=lost)
            await turns(6)

        self.run(leave())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        async def ack() -> None:
            places = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
            for place in places:
                held = self.held.pop(place)
                self.acked.add(place)
                assert held.taker.member.ack([held.delivery]) == 1
            await turns(6)

        self.run(ack())

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay=st.sampled_from([None, 0.0, 0.5, 20.0]))
    def nack(self, data: st.DataObject, delay: float | None) -> None:
        async def nack() -> None:
            for place in data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, max_size=3, unique=True)):
                held = self.held.pop(place)
                assert held.taker.member.nack([held.delivery], delay_seconds=delay) == 1
            await turns(6)

        self.run(nack())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reject(self, data: st.DataObject) -> None:
        async def reject() -> None:
            place = data.draw(st.sampled_from(sorted(self.held)))
            held = self.held.pop(place)
            assert held.taker.member.reject([held.delivery]) == 1
            await turns(6)
            assert place in self.dead

        self.run(reject())

    @precondition(lambda self: self.takers)
    @rule(data=st.data(), count=st.sampled_from([1, 3, 100]))
    def take(self, data: st.DataObject, count: int) -> None:
        async def take_now() -> None:
            taker = data.draw(st.sampled_from(self.takers))
            taken = take(self.group, count, taker.member)
            if taken:
                self.deliver(taker, taken)
            await turns(6)

        self.run(take_now())

    @rule()
    def pause_or_resume(self) -> None:
        async def change() -> None:
            (self.group.resume if self.group.paused else self.group.pause)(SERVER)
            await turns(6)

        self.run(change())

    @precondition(lambda self: self.takers)
    @rule(data=st.data(), credit=st.sampled_from([None, 1, 5]))
    def set_credit(self, data: st.DataObject, credit: int | None) -> None:
        async def set_credit() -> None:
            data.draw(st.sampled_from(self.takers)).member.set_credit(credit)
            await turns(6)

        self.run(set_credit())

    @rule(seconds=st.sampled_from([0.5, 3.0, 29.0, 31.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        async def pass_time() -> None:
            self.crew.clock.advance(seconds)
            now = self.crew.clock.monotonic()
            self.held = {place: held for place, held in self.held.items() if held.until > now}
            self.group.tick()
            await turns(6)

        self.run(pass_time())

    @rule()
    def save(self) -> None:
        self.run(self.crew.groups.commit())
        self.acked_when_saved = self.finished

    @rule(clean=st.booleans())
    def start_again(self, clean: bool) -> None:
        finished = self.finished
        self.takers, self.held = [], {}
        if clean:
            crew = self.run(self.crew.restart())
        else:
            crew = self.run(self.crew.crash())
            self.forgotten.update(self.dead - self.acked_when_saved)
            self.acked &= self.acked_when_saved
        self.run(self._open(crew))
        if clean:
            self.acked_when_saved = finished

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_was_broken(self) -> None:
        assert self.broken == []

    @precondition(lambda self: hasattr(self, "group"))
    @invariant()
    def no_cursor_runs_ahead(self) -> None:
        finished = self.finished
        for cursor in self.group.info().cursors:
            ahead = {(cursor.partition, offset) for offset in range(cursor.committed)} - finished
            assert ahead == set()

    @precondition(lambda self: hasattr(self, "group"))
    @invariant()
    def lag_is_what_is_not_done(self) -> None:
        assert self.group.info().lag == self.number - len(self.finished)

    def teardown(self) -> None:
        """Let one member finish everything: nothing was skipped."""
        if not hasattr(self, "group"):
            self.loop.close()
            return
        self.group.resume(principal=SERVER)
        self.takers.append(Taker(self.group, then=self.deliver))
        for _ in range(200):
            if not self.group.info().lag:
                break
            self.pass_time(400.0)
            for place, held in list(self.held.items()):
                del self.held[place]
                self.acked.add(place)
                held.taker.member.ack([held.delivery])
            self.run(turns(6))
        self.nothing_was_broken()
        assert len(self.finished) == self.number
        self.run(self.crew.close())
        self.loop.close()


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
