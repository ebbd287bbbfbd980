import asyncio

import msgspec
import pytest

from babelbus.core.access import SERVER
from babelbus.core.groups.dead_letter_topics import (
    FAILURES_MAX,
    REPLAY_GROUP,
    TAKE_COUNT,
    AmbiguousGroupError,
    DeadLetterTopics,
    LettersWaitingError,
    NoDeadLetterTopicError,
)
from babelbus.core.groups.settings import GroupOwnedError
from babelbus.core.record import Event
from babelbus.core.topic import UnknownPartitionError
from tests.core.groups.support import EXPLICIT, Crew, take
from tests.storage.faults import FaultyFiles
from tests.support.bus import Gate, in_loop, payloads, publish, turns

DEAD = "dead-letters/g"


def box(crew: Crew) -> DeadLetterTopics:
    return DeadLetterTopics(crew.broker, crew.groups)


async def bury(crew: Crew, *sent: bytes | int) -> None:
    """Publish records that group `g` gives up at once."""
    group = crew.group()
    crew.publish(*sent)
    member = group.join(lambda _: None, credit=0, principal=SERVER)
    while taken := take(group, 1000, member):
        member.reject(taken, reason="no use")
    member.leave()
    await turns()


def work(crew: Crew) -> list[bytes | None]:
    return payloads(crew.broker.topic("work").partitions[0])


@in_loop
async def test_each_letter_is_replayed_once_to_where_it_came_from() -> None:
    crew = Crew()
    await bury(crew, *range(TAKE_COUNT + 3))
    done = await box(crew).replay(DEAD, principal=SERVER)
    assert (done.replayed, done.failed, done.waiting) == (TAKE_COUNT + 3, 0, 0)
    assert work(crew) == [b"%d" % n for n in range(TAKE_COUNT + 3)] * 2
    assert (await box(crew).replay("g", principal=SERVER)).replayed == 0
    await crew.close()


@in_loop
async def test_some_are_replayed_the_oldest_first_or_those_that_are_named() -> None:
    crew = Crew()
    await bury(crew, b"a", b"b", b"c", b"d")
    assert (await box(crew).replay(DEAD, places=[(0, 2)], principal=SERVER)).waiting == 3
    assert (await box(crew).replay(DEAD, count_max=2, principal=SERVER)).waiting == 1
    assert work(crew)[4:] == [b"c", b"a", b"b"]
    letters = await box(crew).read(DEAD, 0, 0, 10, principal=SERVER)
    assert [letter.replayed for letter in letters] == [True, True, True, False]
    again = await box(crew).replay(DEAD, places=[(0, 2), (0, 99)], principal=SERVER)
    assert (again.replayed, [one.offset for one in again.failures]) == (0, [2, 99])
    await crew.close()


@in_loop
async def test_what_was_replayed_is_known_after_a_restart() -> None:
    crew = Crew()
    await bury(crew, 1, 2, 3)
    await box(crew).replay(DEAD, places=[(0, 1)], principal=SERVER)
    crew = await crew.restart()
    assert (await box(crew).replay(DEAD, principal=SERVER)).replayed == 2
    assert work(crew) == [b"1", b"2", b"3", b"2", b"1", b"3"]
    await crew.close()


@in_loop
async def test_a_letter_that_cannot_go_back_waits_and_the_others_go() -> None:
    crew = Crew()
    crew.bus.topic("other")
    group = crew.groups.create("other", "g", EXPLICIT, principal=SERVER)
    publish(crew.broker, [Event("other", b"x")])
    member = group.join(lambda _: None, credit=0, principal=SERVER)
    member.reject(take(group, 1, member))
    await turns()
    publish(crew.broker, [Event(DEAD, b"somebody else's")])
    await bury(crew, 1)
    crew.broker.remove_topic("other", principal=SERVER).result()
    done = await box(crew).replay(DEAD, principal=SERVER)
    assert (done.replayed, done.failed, done.waiting) == (1, 2, 2)
    assert "there is no topic 'other'" in done.failures[0].reason
    assert "no dead letter" in done.failures[1].reason
    letters = await box(crew).read(DEAD, 0, 0, 10, principal=SERVER)
    assert [letter.letter is None for letter in letters] == [False, True, False]
    crew.bus.topic("other")
    assert (await box(crew).replay(DEAD, principal=SERVER)).replayed == 1
    await crew.close()


FORGED = (
    (b"dead-reason", b"x"),
    (b"dead-attempts", b"1"),
    (b"dead-partition", b"0"),
    (b"dead-offset", b"0"),
    (b"dead-group", b"g"),
    (b"dead-time", b"1"),
)


@in_loop
async def test_a_letter_that_no_group_sent_is_not_replayed_whatever_its_headers_say() -> None:
    crew = Crew()
    for name in ("secret", "failed"):
        crew.bus.topic(name)
    claims = [Event("failed", b"forged", None, (*FORGED, (b"dead-topic", name))) for name in (b"work", b"secret")]
    publish(crew.broker, claims)  # before and after the topic gets letters
    crew.group(msgspec.structs.replace(EXPLICIT, dead_letter_topic="failed"))
    await bury(crew, 1)
    publish(crew.broker, claims[1:])
    for _ in range(2):
        done = await box(crew).replay("failed", principal=SERVER)
        assert done.failed == 3
        assert "no group has sent" in done.failures[0].reason
        assert (work(crew), payloads(crew.broker.topic("secret").partitions[0])) == ([b"1", b"1"], [])
        crew = await crew.restart()
    await crew.close()


@in_loop
async def test_only_the_first_failures_are_told_one_by_one() -> None:
    crew = Crew()
    await bury(crew, 1)
    done = await box(crew).replay(DEAD, places=[(0, n) for n in range(1, FAILURES_MAX + 51)], principal=SERVER)
    assert (done.failed, len(done.failures)) == (FAILURES_MAX + 50, FAILURES_MAX)
    await crew.close()


@in_loop
async def test_a_replay_that_is_given_up_has_noted_what_it_published() -> None:
    files = FaultyFiles()
    gate, crew = Gate(files), Crew(files)
    await bury(crew, 1, 2)
    crew.broker.alter_topic("work", {"ack": "flushed"}, principal=SERVER).result()
    gate.shut()
    replaying = asyncio.ensure_future(box(crew).replay(DEAD, principal=SERVER))
    await gate.reached()
    with pytest.raises(GroupOwnedError):
        await box(crew).replay(DEAD, principal=SERVER)
    replaying.cancel()
    await turns()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await replaying
    assert (await box(crew).replay(DEAD, principal=SERVER)).replayed == 0
    assert work(crew) == [b"1", b"2"] * 2
    await crew.close()


@in_loop
async def test_purge_removes_what_was_replayed_and_the_rest_when_that_is_meant() -> None:
    crew = Crew()
    await bury(crew, 1, 2)
    with pytest.raises(LettersWaitingError, match="2 of the 2"):
        await box(crew).purge(DEAD, principal=SERVER)
    await box(crew).replay(DEAD, principal=SERVER)
    assert (await box(crew).purge(DEAD, principal=SERVER)).letters == 2
    assert not crew.broker.has_topic(DEAD)
    assert crew.groups.find(DEAD, REPLAY_GROUP) is None
    await bury(crew, 3)  # and those that came back
    assert (await box(crew).purge("g", everything=True, principal=SERVER)).waiting == 3
    assert box(crew).all() == []
    await crew.close()


@in_loop
async def test_no_other_topic_is_taken_for_one_of_dead_letters() -> None:
    crew = Crew()
    crew.group()
    for name in ("work", "g", "nobody"):
        with pytest.raises(NoDeadLetterTopicError):
            await box(crew).purge(name, everything=True, principal=SERVER)
    await bury(crew, 1)
    with pytest.raises(UnknownPartitionError):
        await box(crew).read(DEAD, 1, 0, 10, principal=SERVER)
    await crew.close()


@in_loop
async def test_a_topic_that_a_group_names_is_one_too_and_says_who_sends_there() -> None:
    crew = Crew()
    crew.bus.topic("sick-bay", 2)
    crew.groups.create("work", "nurses", EXPLICIT, principal=SERVER)
    crew.groups.alter("work", "nurses", {"dead_letter_topic": "sick-bay"}, principal=SERVER)
    info = box(crew).info("nurses", SERVER)
    assert (info.topic, info.partitions, info.letters) == ("sick-bay", 2, 0)
    assert [(one.topic, one.group, one.dead_lettered) for one in info.senders] == [("work", "nurses", 0)]
    await crew.close()


@in_loop
async def test_a_group_of_several_topics_is_ambiguous_if_their_letters_are_apart() -> None:
    crew = Crew()
    for topic in ("other", "third", "sick-bay"):
        crew.bus.topic(topic)
    await bury(crew, 1)
    crew.groups.create("other", "g", EXPLICIT, principal=SERVER)
    assert box(crew).info("g", SERVER).topic == DEAD  # both send there
    crew.groups.create("third", "g", EXPLICIT, principal=SERVER)
    crew.groups.alter("third", "g", {"dead_letter_topic": "sick-bay"}, principal=SERVER)
    dead = box(crew)
    for ask in (
        lambda: dead.read("g", 0, 0, 10, principal=SERVER),
        lambda: dead.replay("g", principal=SERVER),
        lambda: dead.purge("g", everything=True, principal=SERVER),
    ):
        with pytest.raises(AmbiguousGroupError, match="name the topic: 'dead-letters/g', 'sick-bay'"):
            await ask()
    assert {dead.info(name, SERVER).topic for name in (DEAD, "sick-bay")} == {DEAD, "sick-bay"}
    assert dead.info(DEAD, SERVER).letters == 1
    await crew.close()


@in_loop
async def test_letters_are_read_from_an_offset_on_also_behind_what_retention_removed() -> None:
    crew = Crew()
    await bury(crew, *(b"%d" % n * 1000 for n in range(10)))
    letters = await box(crew).read(DEAD, 0, 8, 10, principal=SERVER)
    assert [letter.record.offset for letter in letters] == [8, 9]
    crew.broker.alter_topic(DEAD, {"retention_bytes": 1}, principal=SERVER).result()
    await crew.broker.clean()
    first = crew.broker.topic(DEAD).partitions[0].log.first_offset
    assert first > 0
    assert (await box(crew).read(DEAD, 0, 0, 2, principal=SERVER))[0].record.offset == first
    assert (await box(crew).replay(DEAD, principal=SERVER)).replayed == 10 - first
    await crew.close()
