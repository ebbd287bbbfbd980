"""Why records of a group wait: each reason as a sentence with its facts; and the records in flight."""

from typing import Any

import pytest

from babelbus.core.access import NOBODY, SERVER, Identity
from babelbus.core.groups.group import Group
from babelbus.core.groups.inspection import Obstacle, _span
from babelbus.core.groups.settings import BEGINNING, GroupSettings, at_offset
from tests.core.groups.support import Crew, Taker
from tests.storage.faults import FaultyFiles
from tests.support.bus import in_loop, turns
from tests.support.clock import ManualClock

ALICE = Identity("jebp:alice", "alice", None)
LOST = Identity("zbus:bob", "bob", NOBODY.rights)
HOW: Any = {"principal": ALICE, "address": "10.0.0.7:4000"}
MEMBER = "member alice (jebp 10.0.0.7:4000)"


def told(group: Group, **how: bool) -> list[tuple[str, str]]:
    return [(obstacle.kind, obstacle.text) for obstacle in group.inspect(**how).obstacles]


def only(group: Group, kind: str) -> Obstacle:
    (obstacle,) = [one for one in group.inspect().obstacles if one.kind == kind]
    return obstacle


@in_loop
async def test_nothing_waits_if_all_is_done_or_on_its_way() -> None:
    crew = Crew()
    group = crew.group()
    assert told(group) == []
    crew.publish(0)
    taker = Taker(group)
    await turns()
    assert told(group) == []
    taker.ack_all()
    taker.member.leave()
    assert told(group) == []
    await crew.close()


@in_loop
async def test_a_paused_group_says_so_first() -> None:
    crew = Crew()
    group = crew.group()
    group.pause(SERVER)
    crew.publish(0)
    assert told(group) == [
        ("paused", "The group is paused: nothing is delivered until it is resumed."),
        ("no_members", "The group has no members."),
    ]
    await crew.close()


@in_loop
async def test_a_group_without_members_says_who_was_there_last_and_how_it_left() -> None:
    crew = Crew(clock=ManualClock())
    group = crew.group()
    crew.publish(0)
    Taker(group, **HOW).member.leave()
    crew.clock.advance(42)
    left = f"The group has no members: the last member left 42 s ago ({MEMBER})."
    assert told(group) == [("no_members", left)]
    assert "alice" not in told(group, names=False)[0][1]
    Taker(group, **HOW).member.leave(lost=True)
    crew.clock.advance(180)
    lost = f"The group has no members: the connection of the last member broke 3 min ago ({MEMBER})."
    assert told(group) == [("no_members", lost)]
    await crew.close()


@in_loop
async def test_a_member_that_lost_its_right_is_named() -> None:
    crew = Crew(clock=ManualClock())
    group = crew.group()
    crew.publish(0)
    taker = Taker(group, **HOW)
    taker.member.principal = LOST
    group.access_changed()
    crew.clock.advance(5)
    no_right = "The group has no members: member bob (zbus 10.0.0.7:4000) has no right to consume since 5.0 s."
    assert told(group) == [("no_right", no_right)]
    left = Taker(group, **HOW).member
    left.principal = LOST
    left.leave()  # its session was told first
    assert [kind for kind, _ in told(group)] == ["no_right"]
    await crew.close()


@in_loop
async def test_a_full_group_names_its_limit() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(ack="explicit", in_flight_max=3))
    Taker(group)
    crew.publish(*range(9))
    await turns()
    assert told(group) == [("in_flight_max", "3 records are in flight, as many as in_flight_max allows.")]
    await crew.close()


@in_loop
async def test_members_that_take_no_more_say_why() -> None:
    crew = Crew()
    group = crew.group()
    crew.publish(*range(9))
    one = Taker(group, window=2, **HOW)
    await turns()
    window = "holds as many records without an ack as its window allows"
    assert told(group) == [("members_full", f"No member takes more records: {MEMBER} {window}.")]
    two = Taker(group, credit=1)
    await turns()
    credit = "has used up its credit and asks for no more"
    assert told(group) == [("members_full", f"No member takes more records: each of 2 members {credit} or {window}.")]
    one.member.leave()
    two.member.hold()
    (held,) = group.inspect().obstacles
    assert held.text.endswith("does not read what the server has sent.")
    await crew.close()


@in_loop
async def test_a_record_that_failed_says_which_delivery_comes_when() -> None:
    crew = Crew(clock=ManualClock())
    group = crew.group()
    crew.publish(0, 1)
    taker = Taker(group)
    await turns()
    taker.member.nack(taker.got, delay_seconds=8)
    text = "Record 0 of partition 0 waits for delivery 2 of 3, in 8.0 s. Another record waits, too."
    assert only(group, "redelivery") == Obstacle("redelivery", text, 0, 0, crew.clock.now_ms() + 8000)
    assert group.inspect().next_redelivery_ms == crew.clock.now_ms() + 8000
    assert group.inspect().attempts == 1
    await crew.pass_time(group, 8)
    assert told(group) == []
    await crew.close()


@in_loop
async def test_records_held_back_behind_a_record_of_their_key_name_it() -> None:
    crew = Crew(clock=ManualClock())
    group = crew.group()
    crew.publish(0, 1, 2, key=b"k")
    crew.publish(3)
    taker = Taker(group, credit=1, **HOW)
    other = Taker(group)
    await turns()
    assert (taker.numbers, other.numbers) == ([0], [3])
    text = (
        "2 records are held back behind record 0 of partition 0, which has the same key, because order is per key: "
        f"{MEMBER} has not acked it for 0.0 s."
    )
    assert only(group, "key_order").text == text
    assert [(one.offset, one.where, one.behind) for one in group.inspect().oldest] == [
        (0, "delivered", None),
        (1, "held_back", 0),
        (2, "held_back", 0),
        (3, "delivered", None),
    ]
    taker.member.nack(taker.got, delay_seconds=20)
    assert only(group, "key_order").text.endswith("it waits for delivery 2 of 3, in 20 s.")
    assert only(group, "key_order").at_ms == crew.clock.now_ms() + 20_000
    await crew.close()


@in_loop
async def test_a_member_that_does_not_ack_is_named_with_what_follows() -> None:
    crew = Crew(clock=ManualClock())
    group = crew.group()
    crew.publish(0)
    Taker(group, **HOW)
    await turns()
    crew.clock.advance(12)
    start = "Member alice (jebp 10.0.0.7:4000) has not acked record 0 of partition 0 for 12 s"
    (obstacle,) = group.inspect().obstacles
    assert obstacle.text == f"{start}; without an ack delivery 2 of 3 follows in 18 s."
    assert (obstacle.offset, obstacle.at_ms) == (0, crew.clock.now_ms() + 18_000)
    group.alter(GroupSettings(ack="explicit", ack_seconds=30, attempts_max=1))
    assert told(group) == [("not_acked", f"{start}; without an ack it becomes a dead letter in 18 s.")]
    await crew.close()


@in_loop
async def test_a_member_whose_leases_do_not_end_is_named_without_an_end() -> None:
    crew = Crew(clock=ManualClock())
    group = crew.group()
    crew.publish(0)
    Taker(group, expires=False, **HOW)
    await turns()
    crew.clock.advance(3)
    (obstacle,) = group.inspect().obstacles
    assert (obstacle.text[-6:], obstacle.at_ms) == ("3.0 s.", None)
    await crew.close()


@in_loop
async def test_a_dead_letter_that_cannot_be_written_names_the_fault() -> None:
    files = FaultyFiles()
    crew = Crew(files, clock=ManualClock())
    group = crew.group()
    crew.publish(0, 1)
    taker = Taker(group)
    await turns()
    files.bytes_max = files.bytes_used
    taker.member.reject(taker.got[:1])
    await turns()
    assert group.inspect().oldest[0].where == "dead_letter"
    obstacle = only(group, "dead_letter")
    assert obstacle.text.startswith("The dead letter of record 0 of partition 0 cannot be written (")
    assert obstacle.text.endswith("): the server tries again in 1.0 s.")
    files.bytes_max = 2**62
    await crew.close()


@in_loop
async def test_a_disk_that_refuses_to_read_is_named() -> None:
    files = FaultyFiles()
    crew = Crew(files, tail_cache_bytes=0)
    group = crew.group()
    crew.publish(0)
    files.fail("pread", suffix=".log")
    Taker(group)
    await turns()
    (obstacle,) = group.inspect().obstacles
    assert obstacle.kind == "disk"
    assert obstacle.text.startswith("The disk refuses to read, the server tries again every second: ")
    group._go_on()  # what its timer calls
    await turns()
    assert told(group) == []
    await crew.close()


@in_loop
async def test_a_partition_that_the_disk_refuses_records_of_is_named() -> None:
    crew = Crew()
    group = crew.group()
    crew.broker.topic("work").partitions[0].failing = OSError("no space")  # type: ignore[assignment]
    assert told(group) == [("disk", "The disk refuses records of partition 0: no space.")]
    await crew.close()


@in_loop
async def test_a_filter_that_nobody_reads_is_named() -> None:
    crew = Crew()
    group = crew.group()
    Taker(group)
    group.alter(GroupSettings(ack="explicit", filter="x", filter_kind="lost"))
    crew.publish(0)
    await turns()
    assert told(group) == [
        ("filter", "The filter of the group cannot be used: no protocol here reads filters of the kind 'lost'.")
    ]
    await crew.close()


@in_loop
async def test_a_group_that_stands_beyond_the_end_says_until_where_it_skips() -> None:
    crew = Crew()
    group = crew.group()
    crew.publish(0)
    group.seek(at_offset(10), SERVER)
    text = "Partition 0 ends at offset 1: the group skips new records there until offset 10."
    assert told(group) == [("beyond_end", text)]
    await crew.close()


@in_loop
async def test_members_are_shown_with_what_they_hold() -> None:
    crew = Crew(clock=ManualClock())
    group = crew.group()
    crew.publish(*range(5))
    began = crew.clock.now_ms()
    Taker(group, window=2, **HOW)
    crew.clock.advance(1)
    await turns()
    (member,) = group.inspect().members
    assert (member.protocol, member.principal, member.address) == ("jebp", "alice", "10.0.0.7:4000")
    assert (member.since_ms, member.oldest_ms) == (began, began + 1000)
    assert (member.in_flight, member.window, member.capacity, member.full) == (2, 2, 0, "window")
    (hidden,) = group.inspect(names=False).members
    assert (hidden.protocol, hidden.principal, hidden.address) == ("jebp", None, None)
    one, two = group.inspect().oldest
    assert (one.where, one.attempts, one.member, one.since_ms) == ("delivered", 1, 0, began + 1000)
    assert (two.offset, two.again_ms) == (1, began + 31_000)
    await crew.close()


@in_loop
async def test_a_group_without_acks_has_members_and_nothing_in_flight() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(), start=BEGINNING)
    crew.publish(0, 1)
    Taker(group, credit=1)
    await turns()
    assert [kind for kind, _ in told(group)] == ["members_full"]
    inspection = group.inspect()
    assert (inspection.oldest, inspection.attempts, inspection.next_redelivery_ms) == ((), 0, None)
    await crew.close()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (0.42, "0.4 s"), (9.96, "10 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_spans_have_two_digits(seconds: float, text: str) -> None:
    assert _span(seconds) == text
