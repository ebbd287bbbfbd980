"""One group: who is handed what, credit and windows, filters, cursors, and a topic that changes under it."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access import SERVER
from babelbus.core.groups.member import UNLIMITED, share
from babelbus.core.groups.partition_cursor import READ_BYTES
from babelbus.core.groups.settings import (
    BEGINNING,
    END,
    GroupClosedError,
    GroupOwnedError,
    GroupSettings,
    at_offset,
    header_filter,
)
from babelbus.core.settings import InvalidSettingError
from babelbus.core.topic import UnknownPartitionError
from babelbus.storage.contract import Chunk
from tests.core.groups.support import EXPLICIT, Crew, Taker, take
from tests.storage.faults import FaultyFiles
from tests.support.bus import in_loop, publish_payloads, turns

ON_DELIVERY = GroupSettings()


# -- sharing ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_two_members_without_a_limit_get_records_in_strict_alternation() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    first, second = Taker(group), Taker(group)
    for number in range(7):
        crew.publish(number)
        await turns()
    crew.publish(*range(7, 12))
    await turns()
    assert first.numbers == [0, 2, 4, 6, 8, 10]
    assert second.numbers == [1, 3, 5, 7, 9, 11]
    await crew.close()


@in_loop
async def test_each_group_gets_a_copy() -> None:
    crew = Crew()
    takers = [Taker(crew.group(ON_DELIVERY, name=name)) for name in ("a", "b")]
    crew.publish(1, 2, 3)
    await turns()
    assert [taker.numbers for taker in takers] == [[1, 2, 3], [1, 2, 3]]
    await crew.close()


@in_loop
async def test_a_member_gets_as_many_as_its_credit_says_and_more_when_it_is_set_or_added_to() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    taker = Taker(group, credit=2)
    crew.publish(*range(10))
    await turns()
    assert (taker.numbers, taker.member.credit) == ([0, 1], 0)
    taker.member.set_credit(3)
    await turns()
    assert taker.clear() == [0, 1, 2, 3, 4]
    taker.member.add_credit(1)
    await turns()
    assert taker.clear() == [5]
    taker.member.set_credit(None)
    await turns()
    assert taker.clear() == [6, 7, 8, 9]
    await crew.close()


@in_loop
async def test_members_with_room_get_what_those_without_leave() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    small, large = Taker(group, credit=1), Taker(group, credit=5)
    crew.publish(*range(10))
    await turns()
    assert small.numbers == [0]
    assert large.numbers == [1, 2, 3, 4, 5]
    assert group.info().lag == 4
    await crew.close()


@in_loop
async def test_a_member_that_is_held_gets_nothing_until_it_resumes() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    taker = Taker(group, held=True)
    crew.publish(1, 2)
    await turns()
    assert taker.numbers == []
    taker.member.resume()
    await turns()
    assert taker.numbers == [1, 2]
    await crew.close()


@in_loop
async def test_a_record_is_not_handed_out_inside_the_publish_that_brought_it() -> None:
    crew = Crew()
    taker = Taker(crew.group(ON_DELIVERY))
    await turns()
    crew.publish(1)
    assert taker.numbers == []  # the publisher's answer is written first
    await turns()
    assert taker.numbers == [1]
    await crew.close()


@in_loop
async def test_records_of_one_turn_come_together() -> None:
    crew = Crew()
    taker = Taker(crew.group(ON_DELIVERY))
    crew.publish(*range(50))
    await turns()
    assert taker.batches == [50]
    await crew.close()


@in_loop
async def test_what_a_member_leaves_goes_to_the_next_one() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    taker = Taker(group, credit=2)
    crew.publish(*range(4))
    await turns()
    taker.member.leave()
    taker.member.leave()
    other = Taker(group)
    await turns()
    assert (taker.numbers, other.numbers) == ([0, 1], [2, 3])
    await crew.close()


@in_loop
async def test_records_of_a_member_that_ends_in_the_same_turn_go_to_others() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    first = Taker(group, then=lambda taker, _: second.member.leave())
    second, third = Taker(group), Taker(group)
    crew.publish(*range(3))
    await turns(6)
    assert second.numbers == []
    assert sorted(first.numbers + third.numbers) == [0, 1, 2]
    assert group.counts.delivered == 3
    await crew.close()


@in_loop
async def test_a_member_that_fails_loses_its_membership_and_nobody_else_does() -> None:
    def fail(taker: Taker, _: object) -> None:
        raise RuntimeError("a bug")

    crew = Crew()
    group = crew.group()
    bad, good = Taker(group, then=fail), Taker(group)
    crew.publish(0, 1)
    await turns(6)
    assert [type(error) for error in bad.errors] == [GroupClosedError]
    assert sorted(good.numbers) == [0, 1]  # explicit: what the other had comes again
    await crew.close()


@in_loop
async def test_an_exclusive_member_is_alone() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    owner = Taker(group, exclusive=True)
    with pytest.raises(GroupOwnedError):
        Taker(group)
    owner.member.leave()
    Taker(group)
    with pytest.raises(GroupOwnedError):
        Taker(group, exclusive=True)
    await crew.close()


@given(st.integers(0, 60), st.lists(st.sampled_from([0, 1, 2, 5, 17, UNLIMITED]), min_size=1, max_size=6))
def test_dealing_at_once_is_dealing_one_by_one(count: int, capacities: list[int]) -> None:
    shares, dealt, following = share(count, capacities)
    expected: list[list[int]] = [[] for _ in capacities]
    left, order = list(capacities), list(range(len(capacities)))
    number = 0
    while number < count and any(left):
        member = order.pop(0)
        order.append(member)
        if left[member]:
            left[member] -= 1
            expected[member].append(number)
            number += 1
    assert [[at for part in parts for at in range(count)[part]] for parts in shares] == expected
    assert dealt == number
    assert following == next((member for member in order if left[member]), 0)


# -- taking ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_take_gives_what_is_there_and_competes_with_members() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(5))
    assert [int(one.payload or b"") for one in take(group, 2)] == [0, 1]
    taker = Taker(group, credit=1)
    await turns()
    assert taker.numbers == [2]
    assert [int(one.payload or b"") for one in take(group, 10)] == [3, 4]
    assert take(group, 10) == []
    await crew.close()


@in_loop
async def test_take_from_several_partitions_takes_from_all() -> None:
    crew = Crew(partitions=3)
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(30))
    assert sorted(int(one.payload or b"") for one in take(group, 100)) == list(range(30))
    await crew.close()


@in_loop
async def test_take_in_explicit_mode_needs_a_member_who_acks() -> None:
    crew = Crew()
    group = crew.group(EXPLICIT)
    crew.publish(1, 2)
    with pytest.raises(GroupClosedError):
        take(group, 1)
    puller = Taker(group, credit=0)
    (one,) = take(group, 1, puller.member)
    assert group.info().in_flight == 1
    assert puller.member.ack([one]) == 1
    assert group.info().lag == 1
    assert puller.got == []
    await crew.close()


# -- filters ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_the_groups_filter_skips_records_for_members_and_takes_alike() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(filter="", filter_kind="odd"))
    taker = Taker(group, credit=2)
    crew.publish(*range(10))
    await turns()
    assert taker.numbers == [1, 3]
    assert [int(one.payload or b"") for one in take(group, 9)] == [5, 7, 9]
    assert (group.counts.filtered, group.info().lag) == (5, 0)
    await crew.close()


@in_loop
async def test_a_record_is_offered_to_every_open_member_before_it_is_dropped() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    red = Taker(group, wanted=header_filter("tag=red"))
    blue = Taker(group, wanted=header_filter("tag=blue"))
    for number in range(6):
        crew.publish(number, tag=[b"blue", b"red", b"green"][number % 3])
    await turns()
    assert (blue.numbers, red.numbers) == ([0, 3], [1, 4])
    assert group.counts.dropped == 2
    red.member.set_filter(None)
    crew.publish(6, tag=b"green")
    await turns()
    assert red.numbers[-1] == 6
    await crew.close()


def test_a_header_filter_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidSettingError):
        header_filter("=x")


# -- cursors ---------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_group_begins_where_it_is_told() -> None:
    crew = Crew()
    for number in range(6):
        crew.publish(number)
        crew.clock.advance(1)
    last = crew.clock.now_ms()
    places = {"a": (BEGINNING, 6), "b": (END, 0), "c": (at_offset(4), 2)}
    places["d"] = (await crew.groups.at_time("work", last - 3000), 3)
    places["e"] = (await crew.groups.at_time("work", last + 10_000), 0)
    for name, (start, lag) in places.items():
        assert crew.group(ON_DELIVERY, start=start, name=name).info().lag == lag
    with pytest.raises(UnknownPartitionError):
        crew.group(ON_DELIVERY, start=at_offset(0, 7), name="f")
    await crew.close()


@in_loop
async def test_an_offset_beyond_the_end_waits_until_the_log_gets_there() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY, start=at_offset(3))
    taker = Taker(group)
    for number in range(5):
        crew.publish(number)
        await turns()
    assert taker.numbers == [3, 4]
    await crew.close()


@in_loop
async def test_seek_goes_on_elsewhere_and_makes_old_acks_stale() -> None:
    crew = Crew()
    group = crew.group(EXPLICIT)
    taker = Taker(group)
    crew.publish(*range(4))
    await turns()
    old = list(taker.got)
    taker.clear()
    group.seek(at_offset(1), principal=SERVER)
    await turns()
    assert taker.numbers == [1, 2, 3]
    assert taker.member.in_flight == 3
    assert taker.member.ack(old) == 0
    assert (group.counts.stale, group.info().in_flight) == (4, 3)
    assert taker.ack_all() == 3
    assert group.info().cursors[0].committed == 4
    await crew.close()


@in_loop
async def test_a_paused_group_hands_nothing_out_but_takes_acks() -> None:
    crew = Crew()
    group = crew.group(EXPLICIT)
    taker = Taker(group)
    crew.publish(1)
    await turns()
    group.pause(principal=SERVER)
    crew.publish(2)
    await turns()
    assert taker.numbers == [1]
    assert take(crew.group(), 1, taker.member) == []
    assert taker.ack_all() == 1
    again = await crew.restart()
    group = again.group()
    assert group.paused
    taker = Taker(group)
    await turns()
    assert taker.numbers == []
    group.resume(principal=SERVER)
    await turns()
    assert taker.numbers == [2]
    await again.close()


@in_loop
async def test_what_retention_removed_is_passed_and_counted() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    for number in range(300):
        crew.publish(number)
    crew.broker.alter_topic("work", {"retention_bytes": 1}, principal=SERVER).result()
    await crew.broker.clean()
    first = crew.broker.topic("work").partitions[0].log.first_offset
    assert first > 0
    taker = Taker(group)
    await turns(6)
    assert taker.numbers == list(range(first, 300))
    assert group.counts.removed == first
    await crew.close()


@pytest.mark.parametrize(("bad", "named"), [([7], [7]), ([3, 4, 5, 6, 10, 11], [3, 10])])
def test_damaged_records_are_passed_and_counted_and_a_run_is_one_line_of_the_log(
    bad: list[int], named: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    @in_loop
    async def test() -> None:
        files = FaultyFiles()
        crew = Crew(files, tail_cache_bytes=0)
        group = crew.group(ON_DELIVERY)
        for number in range(20):
            crew.publish(b"%d" % (1000 + number))
        path = next(path for path in files.paths() if path.endswith(".log") and "work" in path)
        content = files.content(path)
        for number in bad:
            content[content.find(b"%d" % (1000 + number))] ^= 1
        taker = Taker(group)
        await turns(20)
        assert taker.numbers == [1000 + number for number in range(20) if number not in bad]
        assert group.counts.corrupt == len(bad)
        lines = [one.message for one in caplog.records if "a group passes" in one.message]
        assert len(lines) == len(named)
        assert all(f"(offset {offset})" in line for offset, line in zip(named, lines, strict=True))
        await crew.close()

    test()


@in_loop
async def test_segments_that_are_lost_are_passed_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FaultyFiles()
    crew = Crew(files)
    crew.group(ON_DELIVERY)
    for start in range(0, 20_000, 1000):
        crew.publish(*range(start, start + 1000))
    await crew.groups.close()
    await crew.broker.close()
    logs = [path for path in files.paths() if "/work/" in path and path.endswith(".log")]
    assert len(logs) > 3
    for path in logs[1:-1]:
        for suffix in (".log", ".index", ".timeindex", ".blocks"):
            files.unlink(path.removesuffix(".log") + suffix)
    crew = Crew(files)
    log, asked = crew.broker.topic("work").partitions[0].log, list[int]()
    read = log.read

    def note(offset: int, bytes_max: int, end_offset: int | None = None) -> Chunk:
        asked.append(offset)
        return read(offset, bytes_max, end_offset)

    monkeypatch.setattr(log, "read", note)
    group = crew.group(ON_DELIVERY)
    taker = Taker(group)
    await turns(20)
    kept = [int(logs[at].rpartition("/")[2].removesuffix(".log")) for at in (1, -1)]
    assert taker.numbers == [*range(kept[0]), *range(kept[1], 20_000)]
    assert group.counts.corrupt == kept[1] - kept[0] > 10_000
    assert len(asked) < 100
    await crew.close()


@in_loop
async def test_a_disk_that_refuses_a_read_stops_nobody_for_good() -> None:
    files = FaultyFiles()
    crew = Crew(files, tail_cache_bytes=0)
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(3))
    files.fail("pread", suffix=".log")
    taker = Taker(group)
    await turns()
    assert taker.numbers == []
    group._go_on()  # what its timer calls
    await turns()
    assert taker.numbers == [0, 1, 2]
    await crew.close()


@in_loop
async def test_a_record_larger_than_a_chunk_is_handed_out() -> None:
    crew = Crew()
    taker = Taker(crew.group(ON_DELIVERY))
    large = b"1" * (3 * READ_BYTES)
    crew.publish(1, large, 2)
    await turns(6)
    assert [one.payload for one in taker.got] == [b"1", large, b"2"]
    await crew.close()


# -- a topic that changes --------------------------------------------------------------------------------------------


@in_loop
async def test_partitions_that_a_topic_grows_are_taken_up_from_their_beginning() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY, start=END)
    taker = Taker(group)
    await turns()
    crew.broker.alter_topic("work", {"partitions": 3}, principal=SERVER).result()
    crew.publish(*range(9))
    await turns(6)
    assert sorted(taker.numbers) == list(range(9))
    assert len(group.info().cursors) == 3
    await crew.close()


@in_loop
async def test_a_topic_that_is_removed_takes_its_groups_along_durably() -> None:
    crew = Crew()
    group = crew.group()
    taker = Taker(group)
    crew.publish(1)
    await turns()
    crew.broker.remove_topic("work", principal=SERVER).result()
    assert [type(error) for error in taker.errors] == [GroupClosedError]
    assert group.closed
    with pytest.raises(GroupClosedError):
        taker.member.ack(taker.got)
    taker.member.leave()
    crew.bus.topic("work")
    assert crew.groups.all() == []
    again = await crew.crash()
    assert again.groups.all() == []
    await again.close()


@in_loop
async def test_a_topic_that_could_not_be_removed_is_read_on() -> None:
    files = FaultyFiles()
    crew = Crew(files, tail_cache_bytes=0)
    group = crew.group(ON_DELIVERY)
    taker = Taker(group)
    crew.publish(1)
    await turns()
    files.fail("rename", suffix="topics/work")
    with pytest.raises(Exception, match="could not be removed"):
        crew.broker.remove_topic("work", principal=SERVER).result()
    await turns()
    crew.publish(2)
    await turns()
    assert taker.numbers == [1, 2]
    assert taker.errors == []
    await crew.close()


# -- backlogs --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_backlog_lets_others_have_the_event_loop() -> None:
    crew = Crew()
    topic = crew.broker.topic("work")
    payload = b"7" * 1000
    for _ in range(20):
        publish_payloads(topic, [payload] * 500, [0] * 500)
    seen: list[int] = []
    taker = Taker(crew.group(ON_DELIVERY))

    def look() -> None:
        seen.append(len(taker.got))
        if len(taker.got) < 10_000:
            asyncio.get_running_loop().call_soon(look)

    look()
    await turns(60)
    assert seen[-1] == 10_000
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 1500
    await crew.close()


@in_loop
async def test_chunks_of_members_without_credit_are_given_up_when_all_of_them_are_too_much() -> None:
    crew = Crew()
    crew.groups.read_ahead.bytes_max = 3 * READ_BYTES
    topic = crew.broker.topic("work")
    publish_payloads(topic, [b"7" * 1000] * 1000, [0] * 1000)
    takers = [Taker(crew.group(ON_DELIVERY, name=str(number)), credit=1) for number in range(20)]
    await turns()
    assert [len(taker.got) for taker in takers] == [1] * 20
    assert crew.groups.read_ahead.bytes_held <= 3 * READ_BYTES
    for taker in takers:
        taker.member.set_credit(None)
    await turns(200)
    assert {tuple(one.offset for one in taker.got) for taker in takers} == {tuple(range(1000))}
    assert crew.groups.read_ahead.bytes_held == 0
    await crew.close()
