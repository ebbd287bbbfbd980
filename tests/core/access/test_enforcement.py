"""The broker asks: each thing that it does or shows, for principals with and without the right, also after a change."""

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import chain

import pytest

from babelbus.core.access import (
    SERVER,
    AccessRefusedError,
    Action,
    Effect,
    Identity,
    Narrowing,
    Principal,
    Row,
    owner_of,
)
from babelbus.core.access.gate import Gate
from babelbus.core.access.table import edits_for
from babelbus.core.groups import GroupSettings, at_offset
from babelbus.core.publish import Bodies, Content, Payloads, Publication
from babelbus.core.record import Event
from babelbus.core.request import NoRespondersError, Question, Reply
from babelbus.core.state import AsOf, KeyPattern, NoSuchKeyError, Testament
from babelbus.core.subject import EVERYTHING, PathPattern, below, exactly
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import encode_batch
from babelbus.records.record import Record
from tests.support.bus import NOW, Bus, in_loop, turns
from tests.support.clock import ManualClock

BOSS = Identity("admin", "boss", None)
DENY = Effect.DENY


class House:
    """A bus whose gate is on, with the principals alice and bob."""

    def __init__(self, *rows: tuple[str, str, str] | tuple[str, str, str, str], wildcards: str = "narrow") -> None:
        self.bus = Bus(clock=ManualClock(NOW))
        self.gate: Gate = self.bus.open_gate("enforce", wildcards)  # type: ignore[arg-type]
        self.broker = self.bus.broker
        self.set(*rows)
        self.alice = self.gate.identity("test:alice", "alice")
        self.bob = self.gate.identity("test:bob", "bob")

    def set(self, *rows: tuple[str, ...]) -> None:
        """Replace the rows."""
        made = [Row(row[0], row[1], row[2], DENY if len(row) > 3 else Effect.ALLOW) for row in rows]
        self.gate.import_entries("test", [Principal("alice"), Principal("bob"), *made])


def events_of(*subjects: str) -> list[Event]:
    return [Event(subject, b"1") for subject in subjects]


@in_loop
async def test_publishing_needs_the_right_to_the_subject() -> None:
    house = House(("alice", "publish", "plant/a/#"))
    house.bus.topic("plant")
    publish = house.broker.publish
    assert publish(Publication(house.alice, "test", events_of("plant/a/x"))).error is None
    assert isinstance(publish(Publication(house.alice, "test", events_of("plant/b"))).error, AccessRefusedError)
    assert isinstance(publish(Publication(house.bob, "test", events_of("plant/a/x"))).error, AccessRefusedError)
    assert isinstance(
        publish(Publication(house.alice, "test", Payloads([b"1"], [NOW]), "plant")).error, AccessRefusedError
    )
    assert isinstance(publish(Publication(house.alice, "test", events_of("live/x"))).error, AccessRefusedError)
    house.set(("alice", "publish", "#"))
    assert publish(Publication(house.alice, "test", events_of("live/x"))).error is None


@in_loop
async def test_a_batch_cannot_carry_a_subject_that_is_not_granted() -> None:
    house = House(("alice", "publish", "plant"), ("alice", "publish", "plant/a"))
    topic = house.bus.topic("plant")

    def publish(subject: str) -> object:
        batch = encode_batch([Record(b"1", None, ((SUBJECT_HEADER, subject.encode()),), NOW)])
        bodies = Bodies([bytes(batch.data)[16:]], [NOW], 1)
        errors = {
            type(house.broker.publish(Publication(house.alice, "test", content, "plant")).error)
            for content in (batch, bodies, events_of(subject))
        }
        (error,) = errors
        return error

    assert publish("plant/a") is type(None)
    assert publish("plant/b") is AccessRefusedError
    topic.flush()


@in_loop
async def test_an_event_sets_no_value_of_the_state_that_a_row_denies() -> None:
    rows = (("alice", "publish", "#"), ("*", "write-state", "kept/secret/#", "deny"))
    house = House(*rows)
    state = house.bus.open_state()
    for topic in ("kept", "plain"):
        house.bus.topic(topic, retain="last" if topic == "kept" else "none")

    def publish(subject: str, topic: str) -> bool:
        """Publish in each form; return whether all of them were taken."""
        batch = encode_batch([Record(b"1", None, ((SUBJECT_HEADER, subject.encode()),), NOW)])
        contents: list[Content] = [batch, Bodies([bytes(batch.data)[16:]], [NOW], 1), events_of(subject)]
        if subject == topic:
            contents.append(Payloads([b"1"], [NOW]))
        receipts = [house.broker.publish(Publication(house.alice, "test", each, topic)) for each in contents]
        receipts.append(house.broker.publish(Publication(house.alice, "test", events_of(subject))))
        (error,) = {type(receipt.error) for receipt in receipts}
        house.broker.topic(topic).flush()
        assert error in (type(None), AccessRefusedError)
        return error is type(None)

    assert [publish(f"kept{end}", "kept") for end in ("", "/a", "/secret", "/secret/k")] == [True, True, False, False]
    assert publish("plain/a", "plain")
    house.set(*rows[:1], ("alice", "write-state", "kept", "deny"))
    assert [publish(f"kept{end}", "kept") for end in ("", "/secret/k")] == [False, True]
    house.set(*rows[:1], ("alice", "*", "plain/#", "deny"), ("alice", "publish", "kept/secret", "deny"))
    assert [publish(f"kept{end}", "kept") for end in ("", "/secret", "/secret/k")] == [True, False, True]
    house.set(*rows[:1], ("alice", "write-state", "plain/#", "deny"))
    assert publish("plain/a", "plain")
    assert state.find("kept/a") is None  # its flush is under way
    await house.broker.close()


@in_loop
async def test_a_live_subscription_gets_what_is_granted_and_shrinks_at_once() -> None:
    house = House(("alice", "subscribe", "a/1"), ("alice", "subscribe", "b/#"))
    heard: list[str] = []

    def hear(events: Sequence[Event]) -> None:
        heard.extend(event.subject for event in events)

    def send(*subjects: str) -> list[str]:
        heard.clear()
        house.broker.publish(Publication(BOSS, "test", events_of(*subjects)))
        return list(heard)

    subscription = house.broker.subscribe(EVERYTHING, hear, house.alice)
    narrowing = [subscription.narrowing]
    assert send("a/1", "a/2", "b/x", "c") == ["a/1", "b/x"]
    house.set(("alice", "subscribe", "a/#"), ("alice", "subscribe", "b/#"), ("alice", "*", "b/x", "deny"))
    assert send("a/1", "a/2", "b/x", "c") == ["a/1", "a/2"]
    house.set(("alice", "subscribe", "#"))
    narrowing.append(subscription.narrowing)
    assert narrowing == [Narrowing.PART, Narrowing.WHOLE]
    assert send("a/1", "c") == ["a/1", "c"]
    house.set()
    assert send("a/1", "c") == []
    with pytest.raises(AccessRefusedError):
        house.broker.subscribe(EVERYTHING, hear, house.alice)


@in_loop
async def test_a_shared_receiver_gets_the_event_while_one_of_its_clients_may_have_it() -> None:
    house = House(("alice", "subscribe", "a"))

    def hear(events: Sequence[Event]) -> None:
        raise AssertionError

    for principal in (house.alice, house.bob):
        house.broker.router.add(exactly("a"), hear, shared=True, owner=principal, principal=principal)
    assert [one.owner for one in house.broker.router.route_of("a").subscriptions] == [house.alice]


@in_loop
async def test_patterns_that_are_granted_in_part_can_be_refused() -> None:
    house = House(("alice", "subscribe", "a/1"), ("alice", "subscribe", "b/#"), wildcards="refuse")
    with pytest.raises(AccessRefusedError, match=r"no right to subscribe 'a/\?'"):
        house.broker.subscribe(PathPattern(("a", None)), lambda _: None, house.alice)
    house.broker.subscribe(below("b"), lambda _: None, house.alice)


@in_loop
async def test_reading_a_topic_needs_all_of_its_subjects() -> None:
    house = House(("alice", "read", "orders/#"), ("bob", "read", "orders"))
    house.bus.topic("orders")
    assert house.broker.may_topic(house.alice, Action.READ, "orders")
    assert not house.broker.may_topic(house.bob, Action.READ, "orders")
    assert not house.broker.may_topic(house.alice, Action.CONSUME, "orders")


@in_loop
async def test_topics_need_manage_and_their_owner_may_manage_them() -> None:
    house = House(("alice", "manage", "a/#"))
    with pytest.raises(AccessRefusedError):
        await house.broker.create_topic("b", principal=house.alice)
    with pytest.raises(AccessRefusedError):
        await house.broker.create_topic("a", principal=house.bob)
    topic = await house.broker.create_topic("a", principal=house.alice)
    assert topic.owner == "alice"
    house.set()
    await house.broker.alter_topic("a", {"retention_records": 5}, house.alice)
    for change in (
        house.broker.alter_topic("a", {"retention_records": 6}, house.bob),
        house.broker.remove_topic("a", house.bob),
    ):
        assert isinstance(change.error, AccessRefusedError)
    house.set(("alice", "manage", "a", "deny"))
    assert isinstance(house.broker.remove_topic("a", house.alice).error, AccessRefusedError)
    house.set()
    again = await house.bus.restart()
    assert again.broker.topic("a").owner == "alice"
    assert again.broker.topic("a").settings.retention_records == 5
    await again.broker.close()


@in_loop
async def test_what_a_stranger_made_belongs_to_no_stranger() -> None:
    house = House(("anonymous", "manage", "a/#"))
    first, second = (house.broker.gate.anonymous(source) for source in ("zbus:1", "zbus:2"))
    await house.broker.create_topic("a", principal=first)
    house.set()
    assert isinstance(house.broker.remove_topic("a", second).error, AccessRefusedError)
    await house.broker.close()


@in_loop
async def test_groups_need_consume_and_their_owner_may_manage_them() -> None:
    house = House(("alice", "consume", "work/#"))
    house.bus.topic("work")
    groups = house.broker.open_groups(house.bus.files, "data")
    with pytest.raises(AccessRefusedError):
        groups.create("work", "g", principal=house.bob)
    group = groups.create("work", "g", GroupSettings(), principal=house.alice)
    with pytest.raises(AccessRefusedError):
        group.join(lambda _: None, principal=house.bob)
    with pytest.raises(AccessRefusedError):
        groups.ensure("work", "g", principal=house.bob)
    with pytest.raises(AccessRefusedError):
        group.take(1, principal=house.bob)
    group.seek(at_offset(0), house.alice)
    group.pause(house.alice)
    for forbidden in (
        lambda: group.seek(at_offset(0), house.bob),
        lambda: group.pause(house.bob),
        lambda: group.resume(house.bob),
        lambda: groups.alter("work", "g", {}, house.bob),
        lambda: groups.remove("work", "g", house.bob),
    ):
        with pytest.raises(AccessRefusedError):
            forbidden()
    ended: list[object] = []
    member = group.join(lambda _: None, principal=house.alice, on_closed=ended.append)
    house.set()
    assert member.closed
    assert isinstance(ended[0], AccessRefusedError)
    with pytest.raises(AccessRefusedError):
        groups.alter("work", "g", {"dead_letter_topic": "elsewhere"}, house.alice)
    await groups.close()
    again = await house.bus.restart()
    assert again.broker.open_groups(house.bus.files, "data").get("work", "g").owner == "alice"
    await again.broker.close()


@in_loop
async def test_dead_letters_are_written_by_who_may_publish_to_their_sources() -> None:
    house = House(("alice", "publish", "failed"), ("alice", "publish", "dead-letters/#"), ("bob", "publish", "#"))
    for name in ("secret", "failed", "dead-letters/g"):
        house.bus.topic(name)
    publish = house.broker.publish
    assert publish(Publication(house.alice, "test", events_of("failed"))).error is None
    house.broker.add_source("failed", "secret").result()
    for topic in ("failed", "dead-letters/g"):  # where letters come from whose sources nobody knows
        assert isinstance(publish(Publication(house.alice, "test", events_of(topic))).error, AccessRefusedError)
        assert publish(Publication(house.bob, "test", events_of(topic))).error is None
    house.set(("alice", "publish", "failed"), ("alice", "publish", "secret/#"))
    assert publish(Publication(house.alice, "test", events_of("failed"))).error is None


@in_loop
async def test_who_may_set_values_writes_to_no_topic_of_dead_letters() -> None:
    house = House(("alice", "write-state", "#"), ("alice", "subscribe", "#"))
    house.bus.open_state()
    for name in ("secret", "failed", "dead-letters/g", "plain"):
        house.bus.topic(name)
    house.broker.add_source("failed", "secret").result()
    heard: list[Event] = []
    house.broker.subscribe(EVERYTHING, heard.extend, house.alice)
    state = house.broker.state_for(house.alice)
    for key in ("failed", "dead-letters/g", "plain"):
        state.set(key, b"1")
    await state.commit("alice").wait()
    assert [event.subject for event in heard] == ["failed", "dead-letters/g", "plain"]
    ends = {topic.name: topic.partitions[0].next_offset for topic in house.broker.topics()}
    assert (ends["failed"], ends["dead-letters/g"], ends["plain"]) == (0, 0, 1)


@in_loop
async def test_groups_of_one_name_on_topics_of_two_tenants_share_no_dead_letters() -> None:
    house = House(("alice", "*", "a/#"), ("bob", "*", "b/#"))
    for name in ("a/work", "b/work"):
        house.bus.topic(name)
    groups = house.bus.broker.open_groups(house.bus.files, "data")
    settings = GroupSettings(ack="explicit", retry_seconds=0, attempts_max=1)
    first = groups.create("a/work", "g", settings, principal=house.alice)
    second = groups.create("b/work", "g", settings, principal=house.bob)
    assert [one.settings.dead_letter_topic for one in (first, second)] == [None, "dead-letters/g%40b/work"]
    groups.alter("b/work", "g", {"dead_letter_topic": None}, house.bob)
    assert second.settings.dead_letter_topic == "dead-letters/g%40b/work"
    for group, principal in ((first, house.alice), (second, house.bob)):
        await house.broker.publish(Publication(BOSS, "test", events_of(group.topic.name))).wait()
        member = group.join(lambda _: None, credit=0, principal=principal)
        taken = [*chain.from_iterable(member.take(1))]
        assert taken
        member.reject(taken)
        await turns()
        house.bus.clock.advance(1)
        group.tick()
        await groups.commit()
        member.leave()
    sources = [house.broker.topic(f"dead-letters/{name}").sources for name in ("g", "g%40b/work")]
    assert sources == [("a/work",), ("b/work",)]
    groups.remove("a/work", "g", principal=SERVER)
    third = groups.create("b/work", "h", settings, principal=house.bob)
    house.bus.topic("b/more")
    again = groups.create("b/more", "g", settings, principal=house.bob)  # letters outlive their group
    assert (third.settings.dead_letter_topic, again.settings.dead_letter_topic) == (None, "dead-letters/g%40b/more")
    await groups.close()


@in_loop
async def test_a_new_principal_owns_nothing_that_a_former_one_of_its_name_has_made() -> None:
    house = House(wildcards="narrow")
    groups = house.broker.open_groups(house.bus.files, "data")
    boss = Principal("carol", ("sensors",))
    await house.gate.put([boss, Row("carol", "*", "mine/#")], BOSS)
    carol = house.gate.identity("test:carol", "carol")
    await house.broker.create_topic("mine/a", principal=carol)
    groups.create("mine/a", "g", principal=carol)
    await house.gate.put([Principal("carol", ("others",)), Row("carol", "consume", "mine/#")], BOSS)
    await house.gate.remove([Row("carol", "*", "mine/#")], BOSS)
    await house.broker.alter_topic("mine/a", {"ack": "written"}, carol)  # who has other roles is the same
    owner = house.broker.topic("mine/a").owner
    assert house.gate.owner("test", owner).rights is carol.rights
    await house.gate.remove([boss], BOSS)
    await house.gate.put([boss], BOSS)
    for principal in (carol, house.gate.identity("test:carol", "carol")):
        with pytest.raises(AccessRefusedError):
            await house.broker.alter_topic("mine/a", {"ack": "flushed"}, principal)
        with pytest.raises(AccessRefusedError):
            groups.remove("mine/a", "g", principal)
    rights = house.gate.owner("test", owner).rights
    assert rights is not None
    assert not rights.may(Action.CONSUME, "mine/a")
    await groups.close()
    again = await house.bus.restart()
    gate = again.open_gate("enforce")
    assert again.broker.topic("mine/a").owner == owner
    assert gate.owner("test", owner).rights is not gate.table.rights("carol")
    await again.broker.close()


@in_loop
async def test_owners_of_before_there_were_ids_are_known_by_their_names() -> None:
    house = House(("alice", "consume", "a"))
    house.gate.table.apply(edits_for([Principal("dave")]))  # as an old table has it
    dave = house.gate.identity("test:dave", "dave")
    assert owner_of(dave) == "dave"
    await house.gate.put([Principal("dave", ("sensors",))], BOSS)
    assert (owner_of(dave), house.gate.owner("test", "dave").rights) == ("dave", dave.rights)
    await house.gate.remove([Principal("dave")], BOSS)
    await house.gate.put([Principal("dave")], BOSS)
    assert owner_of(dave) != "dave"
    assert house.gate.owner("test", "").name == "anonymous"


@in_loop
async def test_requests_need_publish_and_who_answers_subscribe() -> None:
    house = House(("alice", "publish", "ask/#"), ("bob", "subscribe", "ask/#"))
    responders = house.broker.responders
    with pytest.raises(AccessRefusedError):
        responders.add(exactly("ask/time"), lambda question: None, "", house.alice)

    def answer(question: Question) -> None:
        responders.requests.respond(question.key, Reply(b"12"))

    responders.add(exactly("ask/time"), answer, "", house.bob)
    deadline = house.bus.clock.monotonic() + 10
    asked = house.broker.request("ask/time", b"", (), deadline, house.alice)
    assert asked.reply == Reply(b"12")
    assert isinstance(house.broker.request("ask/time", b"", (), deadline, house.bob).error, AccessRefusedError)
    house.set(("alice", "publish", "ask/#"))
    assert isinstance(house.broker.request("ask/time", b"", (), deadline, house.alice).error, NoRespondersError)


@in_loop
async def test_a_responder_of_a_pattern_that_is_granted_in_part_can_be_refused() -> None:
    for wildcards in ("narrow", "refuse"):
        house = House(("bob", "subscribe", "ask/time"), wildcards=wildcards)
        responders = house.broker.responders
        responders.add(exactly("ask/time"), lambda question: None, "", house.bob)
        if wildcards == "narrow":
            responders.add(below("ask"), lambda question: None, "", house.bob)
            continue
        with pytest.raises(AccessRefusedError, match="no right to subscribe 'ask/#'"):
            responders.add(below("ask"), lambda question: None, "", house.bob)


@in_loop
async def test_the_state_shows_and_takes_what_is_granted() -> None:
    house = House(
        ("alice", "subscribe", "a/#"), ("alice", "subscribe", "a/secret/#", "deny"), ("alice", "write-state", "a/w/#")
    )
    state = house.bus.open_state()
    for key in ("a/x", "a/secret/k", "b/x", "a/w/old"):
        state.set(key, b"1")
    state.locks.lock("a/locked", "bob")
    mine, other = house.broker.state_for(house.alice), house.broker.state_for(house.bob)
    everything = KeyPattern((), rest=True)
    assert sorted(key for key, _ in mine.match(everything)) == ["a/w/old", "a/x"]
    assert mine.get("a/x") == b"1"
    assert mine.children(None) == ["a"]
    assert sorted(mine.children("a")) == ["w", "x"]
    assert sorted(mine.children_matching(KeyPattern((None,)))) == ["w", "x"]
    with pytest.raises(NoSuchKeyError):
        mine.children("b")
    for forbidden in (
        lambda: mine.get("a/secret/k"),
        lambda: mine.find("b/x"),
        lambda: mine.match(KeyPattern(("b",), rest=True)),
        lambda: mine.set("a/x", b"2"),
        lambda: mine.set_all(["a/w/1", "a/x"], [b"2", b"2"]),
        lambda: mine.compare_and_set("a/x", b"2", 0),
        lambda: mine.put_all([("a/w/1", b"2", 0), ("a/x", b"2", 0)]),
        lambda: mine.delete("a/x"),
        lambda: mine.delete_matching(KeyPattern(("b",), rest=True)),
        lambda: mine.note("a/x", b"2"),
        lambda: mine.locks.lock("a/x", "alice"),
        lambda: mine.locks.acquire("a/x", "alice", 1),
        lambda: mine.locks.release("a/x", "alice"),
        lambda: mine.locks.release("a/locked", "alice"),
        lambda: other.get("a/x"),
        lambda: other.match(everything),
    ):
        with pytest.raises(AccessRefusedError):
            forbidden()
    assert mine.set_all(["a/w/1", "a/w/2"], [b"2", b"2"])
    assert sorted(key for key, _ in mine.delete_matching(everything)) == ["a/w/1", "a/w/2", "a/w/old"]
    assert state.find("b/x") == b"1"
    assert house.broker.state_for(BOSS) is state
    await house.broker.close()


@in_loop
@pytest.mark.parametrize(
    ("rows", "sees"),
    [
        ([("alice", "subscribe", "$SYS/#"), ("alice", "subscribe", "a/#")], False),
        ([("alice", "*", "#"), ("alice", "subscribe", "a/secret", "deny")], False),
        ([("alice", "*", "#")], True),
    ],
)
async def test_keys_that_show_keys_of_others_are_there_for_who_may_see_all_keys(
    rows: list[tuple[str, str, str]], sees: bool
) -> None:
    house = House(*rows)
    state = house.bus.open_state()
    state.shows_keys = lambda key: key.startswith("$SYS/locks")
    lock, system, everything = "$SYS/locks/a/secret", KeyPattern(("$SYS",), rest=True), KeyPattern((), rest=True)
    for key in (lock, "$SYS/name", "a/x"):
        state.put(key, b"1")
    await state.commit("test").wait()
    mine = house.broker.state_for(house.alice)
    assert mine.find("$SYS/name") == b"1"
    answers = (mine.find(lock), mine.find_entry(lock), mine.may_see(lock), mine.may_list("$SYS/locks"))
    assert [bool(answer) for answer in answers] == [sees] * 4
    assert [lock in dict(mine.match(one)) for one in (system, everything)] == [sees] * 2
    assert ["locks" in mine.children("$SYS"), bool(mine.child_count("$SYS/locks"))] == [sees] * 2
    assert [mine.sees_below("$SYS"), mine.sees_below(None), mine.sees_all(system)] == [sees] * 3
    for read, key in ((mine.get, lock), (mine.get_version, lock), (mine.children, "$SYS/locks/a")):
        with contextlib.nullcontext() if sees else pytest.raises(NoSuchKeyError):
            read(key)
    heard: list[str | None] = []
    mine.watch(everything, lambda changes, source: heard.extend(change[1] for change in changes))
    state.delete(lock)
    state.put("$SYS/name", b"2")
    await state.commit("test").wait()
    assert heard == ([lock, "$SYS/name"] if sees else ["$SYS/name"])
    await house.broker.close()


@in_loop
async def test_a_testament_is_checked_when_it_is_set_and_when_it_is_executed() -> None:
    house = House(("alice", "write-state", "a/#"))
    state = house.bus.open_state()
    for key in ("a/1", "a/2", "b/1"):
        state.set(key, b"1")
    mine = house.broker.state_for(house.alice)
    below_b = Testament(grave_goods=(KeyPattern(("b",), rest=True),))
    with pytest.raises(AccessRefusedError):
        mine.set_testament("c1", below_b)
    mine.set_testament("c1", Testament(grave_goods=(KeyPattern((), rest=True),)))
    house.set(("alice", "write-state", "a/1"))
    state.execute("c1")
    assert (state.find("a/1"), state.find("a/2"), state.find("b/1")) == (None, b"1", b"1")
    state.set_testament("before the gate", below_b)
    state.execute("before the gate")
    assert state.find("b/1") == b"1"
    await house.broker.close()


@in_loop
async def test_the_past_is_a_right_of_its_own() -> None:
    house = House(("alice", "subscribe", "#"), ("bob", "read", "a/#"))
    state = house.bus.open_state()
    state.set("a/1", b"1")
    state.set("b/1", b"1")
    await state.commit("test").wait()
    moment = AsOf(offset=1)
    theirs = house.broker.history_for(house.bob)
    assert [key for key, _, _ in await theirs.match(None, moment)] == ["a/1"]
    assert (await theirs.get("a/1", moment))[0] == b"1"
    for forbidden in (
        theirs.get("b/1", moment),
        theirs.revisions("b/1"),
        house.broker.history_for(house.alice).match(None, moment),
    ):
        with pytest.raises(AccessRefusedError):
            await forbidden
    await house.broker.close()


@in_loop
async def test_dead_letters_need_the_rights_of_where_they_come_from() -> None:
    house = House(("alice", "read", "dead-letters/#"), ("alice", "subscribe", "dead-letters/#"))
    house.bus.topic("work")
    groups = house.broker.open_groups(house.bus.files, "data")
    heard: list[str] = []
    house.broker.subscribe(
        below("dead-letters"), lambda events: heard.extend(one.subject for one in events), house.alice
    )
    state = house.bus.open_state()
    house.bus.topic("dead-letters/g", retain="last")
    house.bus.topic("plain-letters", retain="last")
    settings = GroupSettings(ack="explicit", dead_letter_topic="plain-letters")
    other = groups.create("work", "other", settings, start=at_offset(0), principal=SERVER)
    others = other.join(lambda _: None, credit=0, principal=SERVER)
    group = groups.create("work", "g", GroupSettings(ack="explicit"), start=at_offset(0), principal=SERVER)
    member = group.join(lambda _: None, credit=0, principal=SERVER)

    async def reject() -> None:
        house.broker.publish(Publication(BOSS, "test", events_of("work")))
        house.broker.topic("work").flush()
        while not (taken := member.take(1)):  # noqa: ASYNC110
            await asyncio.sleep(0)
        member.reject(taken[0])
        while not (taken := others.take(1)):  # noqa: ASYNC110
            await asyncio.sleep(0)
        others.reject(taken[0])
        while not _letters(house):  # noqa: ASYNC110
            await asyncio.sleep(0)

    await reject()
    assert house.broker.topic("dead-letters/g").sources == ("work",)
    assert not house.broker.may_topic(house.alice, Action.READ, "dead-letters/g")
    assert heard == []
    while not house.broker.topic("plain-letters").partition(0).high_watermark:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert (state.find("dead-letters/g"), state.find("plain-letters")) == (None, None)
    house.set(
        ("alice", "read", "dead-letters/#"), ("alice", "read", "work/#"),
        ("alice", "subscribe", "dead-letters/#"), ("alice", "subscribe", "work/#"),
    )  # fmt: skip
    assert house.broker.may_topic(house.alice, Action.READ, "dead-letters/g")
    await groups.close()
    again = await house.bus.restart()
    assert again.broker.topic("dead-letters/g").sources == ("work",)
    await again.broker.close()


def _letters(house: House) -> int:
    topic = house.broker.find_topic("dead-letters/g")
    return 0 if topic is None else topic.partition(0).high_watermark
