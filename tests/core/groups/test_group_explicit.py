"""Explicit mode: acks in any order, redelivery, order per key, fencing, dead letters."""

import asyncio

import pytest

from babelbus.core.access import SERVER
from babelbus.core.groups import dead_letters
from babelbus.core.groups.in_flight import SPENT_LEASES_MAX
from babelbus.core.groups.settings import GroupClosedError, GroupSettings
from babelbus.core.record import Record
from tests.core.groups.support import Crew, Taker
from tests.storage.faults import FaultyFiles
from tests.support.bus import in_loop, read, turns

NO_ORDER = GroupSettings(ack="explicit", order="none", ack_seconds=30)


def committed(crew: Crew) -> int:
    return crew.group().info().cursors[0].committed


def dead(crew: Crew, name: str = "dead-letters/g") -> list[Record]:
    topic = crew.broker.find_topic(name)
    return read(topic.partitions[0]) if topic is not None else []


# -- acks ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_the_committed_cursor_is_the_lowest_record_that_was_not_acked() -> None:
    crew = Crew()
    taker = Taker(crew.group())
    crew.publish(*range(6))
    await turns()
    assert committed(crew) == 0
    zero, one, two, three, four, five = taker.got
    assert taker.member.ack([three, one, five]) == 3
    assert committed(crew) == 0
    assert taker.member.ack([zero]) == 1
    assert committed(crew) == 2
    assert taker.member.ack([zero, two]) == 1
    assert committed(crew) == 4
    assert taker.member.ack([four]) == 1
    assert (committed(crew), crew.group().counts.stale) == (6, 1)
    await crew.close()


@in_loop
async def test_acks_by_lease_are_acks() -> None:
    crew = Crew()
    taker, other = Taker(crew.group()), Taker(crew.group(), credit=0)
    crew.publish(0, 1, key=b"k")
    crew.publish(2, 3)
    await turns()
    lease = taker.got[0].lease
    assert lease is not None
    assert other.member.ack_offsets(lease, [0]) == 0  # another's
    assert taker.member.ack_offsets(lease, [1, 9]) == 1
    assert committed(crew) == 0
    for delivery in taker.got:
        assert delivery.lease is not None
        taker.member.ack_offsets(delivery.lease, [delivery.offset])
    counts = crew.group().counts
    assert (committed(crew), counts.acknowledged, counts.stale, taker.member.in_flight) == (4, 4, 3, 0)
    crew.publish(4, key=b"k")  # nothing of the key is left behind
    await turns()
    assert taker.numbers == [0, 1, 2, 3, 4]
    await crew.close()


@in_loop
async def test_records_that_are_extended_keep_their_member_and_no_others() -> None:
    crew = Crew()
    group = crew.group(NO_ORDER)
    taker, other = Taker(group), Taker(group, credit=0)
    crew.publish(0, 1, 2)
    await turns()
    lease = taker.got[0].lease
    assert lease is not None
    await crew.pass_time(group, 20)
    assert other.member.extend(lease, [1]) is None
    extended = taker.member.extend(lease, [1, 9])
    assert extended is not None
    await crew.pass_time(group, 11)
    await crew.pass_time(group, 1)
    assert [(one.offset, one.attempt) for one in taker.got[3:]] == [(0, 2), (2, 2)]
    assert taker.member.ack_offsets(lease, [1]) == 0
    assert taker.member.ack_offsets(extended, [1]) == 1
    assert taker.member.extend(extended, [1]) is None
    await crew.close()


@in_loop
async def test_a_window_opens_with_each_ack() -> None:
    crew = Crew()
    taker = Taker(crew.group(), window=2)
    crew.publish(*range(5))
    await turns()
    assert taker.numbers == [0, 1]
    taker.member.ack(taker.got[1:])
    await turns()
    assert taker.numbers == [0, 1, 2]
    taker.member.ack(taker.got)
    await turns()
    assert taker.numbers == [0, 1, 2, 3, 4]
    await crew.close()


@in_loop
async def test_what_a_group_has_in_flight_is_bounded() -> None:
    crew = Crew()
    taker = Taker(crew.group(GroupSettings(ack="explicit", in_flight_max=3)))
    crew.publish(*range(10))
    await turns()
    assert taker.numbers == [0, 1, 2]
    taker.ack_all()
    await turns()
    assert taker.numbers == [3, 4, 5]
    await crew.close()


@in_loop
async def test_acks_of_a_group_that_wants_none_are_refused() -> None:
    crew = Crew()
    taker = Taker(crew.group(GroupSettings()))
    crew.publish(1)
    await turns()
    with pytest.raises(GroupClosedError):
        taker.ack_all()
    await crew.close()


# -- redelivery ------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_record_that_is_handed_out_again_goes_to_the_next_member_in_turn() -> None:
    crew = Crew()
    group = crew.group()
    lazy = Taker(group)
    crew.publish(7)
    await turns()
    other = Taker(group)
    for seconds in (30, 1, 30, 2):  # the lease, and what the record waits
        await crew.pass_time(group, seconds)
    assert (len(lazy.got), len(other.got)) == (2, 1)
    await crew.close()


@in_loop
async def test_a_member_that_always_answers_keeps_its_records_for_as_long_as_it_takes() -> None:
    crew = Crew()
    group = crew.group()
    steady = Taker(group, credit=2, expires=False)
    crew.publish(1, 2)
    await turns()
    other = Taker(group)
    crew.publish(3)
    for _ in range(3):
        await crew.pass_time(group, 31)
    assert (steady.numbers, {one.attempt for one in steady.got}) == ([1, 2], {1})
    assert set(other.numbers) == {3}
    assert len(other.got) > 1
    assert steady.ack_all() == 2
    await crew.close()


@in_loop
async def test_a_record_that_is_not_acked_in_time_is_handed_out_again_later_and_later() -> None:
    crew = Crew()
    group = crew.group()
    taker = Taker(group)
    crew.publish(7)
    await turns()
    await crew.pass_time(group, 29)
    assert len(taker.got) == 1
    await crew.pass_time(group, 1)  # the lease ends; the record waits one second
    assert len(taker.got) == 1
    await crew.pass_time(group, 1)
    assert [one.attempt for one in taker.got] == [1, 2]
    await crew.pass_time(group, 30)
    await crew.pass_time(group, 1.9)
    assert len(taker.got) == 2
    await crew.pass_time(group, 0.1)
    assert [one.attempt for one in taker.got] == [1, 2, 3]
    assert group.counts.redelivered == 2
    assert taker.member.ack(taker.got[:2]) == 0  # of leases that ended
    assert taker.member.ack(taker.got[2:]) == 1
    assert committed(crew) == 1
    await crew.close()


@in_loop
async def test_the_timer_of_a_group_does_what_tick_does() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(ack="explicit", retry_seconds=0.001))
    done = asyncio.get_running_loop().create_future()

    def note(taker: Taker, _: object) -> None:
        if len(taker.got) == 1:
            taker.member.nack(taker.got)
            crew.clock.advance(1)
        else:
            done.set_result(taker.got[1].attempt)

    Taker(group, then=note)
    crew.publish(1)
    assert await done == 2
    await crew.close()


@in_loop
async def test_a_nack_says_when_a_record_comes_again() -> None:
    crew = Crew()
    group = crew.group()
    taker = Taker(group)
    crew.publish(1, 2)
    await turns()
    first, second = taker.got
    assert taker.member.nack([first], delay_seconds=10) == 1
    assert taker.member.nack([second], delay_seconds=0) == 1
    assert taker.member.nack([second]) == 0
    await turns()
    assert taker.numbers == [1, 2, 2]
    await crew.pass_time(group, 10)
    assert taker.numbers == [1, 2, 2, 1]
    await crew.close()


@in_loop
async def test_what_a_member_held_when_it_left_goes_to_another_at_once_and_its_late_ack_changes_nothing() -> None:
    crew = Crew()
    group = crew.group()
    gone = Taker(group)
    crew.publish(*range(4))
    await turns()
    gone.member.ack(gone.got[2:3])
    gone.member.leave()
    other = Taker(group)
    await turns()
    assert other.numbers == [0, 1, 3]
    with pytest.raises(GroupClosedError):
        gone.member.ack(gone.got)
    assert other.member.ack(gone.got) == 0
    assert group.info().in_flight == 3
    assert other.ack_all() == 3
    assert committed(crew) == 4
    await crew.close()


@in_loop
async def test_a_member_that_leaves_in_order_uses_up_no_attempt_and_one_that_is_lost_does() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(ack="explicit", attempts_max=2))
    crew.publish(1)
    crew.publish(2, 3, key=b"k")
    attempts = []
    for lost in (False, False, True, False, False):
        taker = Taker(group)
        await turns()
        assert sorted(taker.numbers) == [1, 2, 3]
        attempts.append({one.attempt for one in taker.got})
        taker.member.leave(lost=lost)
    assert attempts == [{1}, {1}, {1}, {2}, {2}]
    assert group.counts.redelivered == 12  # also those that did not count
    last = Taker(group)
    await turns()
    last.member.leave(lost=True)
    await turns()
    assert sorted(letter.payload or b"" for letter in dead(crew)) == [b"1", b"2", b"3"]
    await crew.close()


@in_loop
async def test_a_record_that_was_given_back_after_its_attempts_were_lowered_has_still_one_to_go() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(ack="explicit", attempts_max=9, retry_seconds=0))
    taker = Taker(group)
    crew.publish(1)
    for _ in range(4):
        await turns()
        taker.member.nack(taker.got[-1:])
    await turns()
    crew.groups.alter("work", "g", {"attempts_max": 2}, principal=SERVER)
    taker.member.leave()
    other = Taker(group)
    await turns()
    assert [one.attempt for one in other.got] == [5]
    other.member.nack(other.got)
    await turns()
    assert dead_letters.read(dead(crew)[0]).attempts == 5
    await crew.close()


@in_loop
async def test_leases_that_are_over_do_not_pile_up() -> None:
    crew = Crew()
    group = crew.group()
    taker = Taker(group)
    crew.publish(0)
    await turns()
    stuck = taker.got.pop()
    for number in range(4 * SPENT_LEASES_MAX):
        crew.publish(number)
        await turns()
        taker.ack_all()
    assert group.flight is not None
    assert len(group.flight.leases) <= SPENT_LEASES_MAX + 2
    assert taker.member.ack([stuck]) == 1
    await crew.close()


@in_loop
async def test_a_record_that_retention_removed_while_it_waited_is_passed() -> None:
    crew = Crew()
    group = crew.group()
    taker = Taker(group, credit=1)
    for number in range(300):
        crew.publish(number)
    await turns()
    taker.member.nack(taker.got)
    crew.broker.alter_topic("work", {"retention_bytes": 1}, principal=SERVER).result()
    await crew.broker.clean()
    taker.member.set_credit(None)
    await crew.pass_time(group, 1)
    assert 0 not in taker.numbers[1:]
    taker.ack_all()
    assert group.info().lag == 0
    await crew.close()


# -- order per key ---------------------------------------------------------------------------------------------------


@in_loop
async def test_later_records_of_a_key_wait_while_an_earlier_one_waits_to_come_again() -> None:
    crew = Crew()
    group = crew.group()
    first, second = Taker(group), Taker(group)
    crew.publish(1, key=b"k")
    await turns()
    first.member.nack(first.got)
    first.clear()
    crew.publish(2, 3, key=b"k")
    crew.publish(10, 11)
    await turns()
    assert sorted(first.numbers + second.numbers) == [10, 11]
    await crew.pass_time(group, 1)
    assert (first.numbers + second.numbers)[-3:] == [1, 2, 3] or sorted(
        [n for n in first.numbers if n < 10] or [n for n in second.numbers if n < 10]
    ) == [1, 2, 3]
    holders = [taker for taker in (first, second) if 1 in taker.numbers]
    assert [number for number in holders[0].numbers if number < 10] == [1, 2, 3]
    await crew.close()


@in_loop
async def test_records_of_a_key_go_to_who_holds_earlier_ones() -> None:
    crew = Crew()
    group = crew.group()
    first, second = Taker(group), Taker(group)
    for number in range(4):
        crew.publish(number, key=b"a")
        crew.publish(10 + number, key=b"b")
    await turns()
    assert (first.numbers, second.numbers) == ([0, 1, 2, 3], [10, 11, 12, 13])
    first.ack_all()
    second.ack_all()
    await crew.close()


@in_loop
async def test_records_held_back_go_to_another_when_their_holder_dies_in_order() -> None:
    crew = Crew()
    group = crew.group()
    first, second = Taker(group, window=2), Taker(group)
    crew.publish(*range(5), key=b"k")
    await turns()
    assert (first.numbers, second.numbers) == ([0, 1], [])
    first.member.leave()
    await turns()
    assert second.numbers == [0, 1, 2, 3, 4]
    second.ack_all()
    assert (group.info().lag, committed(crew)) == (0, 5)
    assert group.cursors[0].flight.keys == {}
    await crew.close()


@in_loop
async def test_records_held_back_come_when_the_window_of_their_holder_opens() -> None:
    crew = Crew()
    group = crew.group()
    first, second = Taker(group, window=2), Taker(group)
    crew.publish(*range(5), key=b"k")
    await turns()
    first.member.ack(first.got[:1])
    await turns()
    assert first.numbers == [0, 1, 2]
    first.member.ack(first.got)
    first.member.ack(first.got[1:])
    await turns(6)
    assert second.numbers + first.numbers[3:] == [3, 4]
    await crew.close()


@in_loop
async def test_without_order_keys_are_shared_like_all_records() -> None:
    crew = Crew()
    group = crew.group(NO_ORDER)
    first, second = Taker(group), Taker(group)
    crew.publish(*range(4), key=b"k")
    await turns()
    assert (first.numbers, second.numbers) == ([0, 2], [1, 3])
    await crew.close()


@in_loop
async def test_a_holder_that_does_not_want_the_next_record_of_its_key_blocks_it_only_while_it_holds_some() -> None:
    crew = Crew()
    group = crew.group()
    picky = Taker(group, wanted=lambda record: record.payload == b"0")
    other = Taker(group, wanted=lambda record: record.payload != b"0")
    crew.publish(0, 1, key=b"k")
    await turns()
    assert (picky.numbers, other.numbers) == ([0], [])
    picky.ack_all()
    await turns()
    assert other.numbers == [1]
    await crew.close()


# -- dead letters ----------------------------------------------------------------------------------------------------


@in_loop
async def test_a_record_that_fails_too_often_becomes_a_dead_letter_with_reason_and_origin() -> None:
    crew = Crew()
    group = crew.group()
    taker = Taker(group)
    crew.publish(41)
    crew.publish(42, key=b"k", tag=b"t")
    await turns()
    taker.member.ack(taker.got[:1])
    for attempt in range(1, 4):
        assert taker.got[-1].attempt == attempt
        taker.member.nack(taker.got[-1:], reason="no such account", delay_seconds=0)
        await turns()
    (letter,) = dead(crew)
    assert (letter.payload, letter.key, letter.headers[0]) == (b"42", b"k", (b"tag", b"t"))
    told = dead_letters.read(letter)
    assert (told.topic, told.partition, told.offset, told.group) == ("work", 0, 1, "g")
    assert (told.attempts, told.reason, told.time_ms) == (3, "no such account", crew.clock.now_ms())
    assert (committed(crew), group.counts.dead_lettered, len(taker.got)) == (2, 1, 4)
    await crew.close()


@in_loop
async def test_a_rejected_record_is_a_dead_letter_at_once() -> None:
    crew = Crew()
    taker = Taker(crew.group(GroupSettings(ack="explicit", dead_letter_topic="refused")))
    crew.publish(1)
    await turns()
    assert taker.member.reject(taker.got, reason="not JSON") == 1
    (letter,) = dead(crew, "refused")
    assert dead_letters.read(letter).reason == "not JSON"
    assert committed(crew) == 1
    await crew.close()


@in_loop
async def test_the_origin_is_passed_only_when_its_dead_letter_is_durable() -> None:
    files = FaultyFiles()
    crew = Crew(files)
    group = crew.group()
    taker = Taker(group)
    crew.publish(*range(1, 3), key=b"k")
    await turns()
    files.bytes_max = files.bytes_used
    first, second = taker.got
    taker.clear()
    taker.member.reject([first])
    taker.member.nack([second], delay_seconds=0)
    await turns()
    assert (committed(crew), dead(crew), taker.numbers) == (0, [], [])
    files.bytes_max = 2**62
    await crew.pass_time(group, 1)
    assert [one.payload for one in dead(crew)] == [b"1"]
    await turns()
    assert taker.numbers == [2]
    assert committed(crew) == 1
    await crew.close()


@in_loop
async def test_a_member_that_dies_with_its_last_attempt_leaves_a_dead_letter() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(ack="explicit", attempts_max=2))
    crew.publish(1)
    for _ in range(2):
        taker = Taker(group)
        await turns()
        assert taker.numbers == [1]
        taker.member.leave(lost=True)
    await turns()
    (letter,) = dead(crew)
    assert dead_letters.read(letter).reason == "its member was lost"
    await crew.close()
