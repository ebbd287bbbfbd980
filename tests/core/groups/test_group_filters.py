"""Filters that choose from a whole chunk at once: members get what they get when each record is asked for by itself."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.groups.delivery_rows import Rows, RowsFilter, Run
from babelbus.core.groups.group import Group
from babelbus.core.groups.settings import GroupSettings, RecordFilter
from babelbus.core.record import Record
from tests.core.groups.support import Crew, Taker
from tests.support.bus import in_loop, turns

ON_DELIVERY = GroupSettings()
tags = st.sampled_from("abc")
wanted_tags = st.sets(tags, min_size=1).map("".join)
members = st.lists(st.tuples(st.none() | wanted_tags, st.none() | st.integers(0, 4)), min_size=1, max_size=4)


class OfTags(RowsFilter):
    """Wants records whose header `tag` is one of some letters."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.chunks = 0

    def __call__(self, record: Record) -> bool:
        return (dict(record.headers)[b"tag"] or b"").decode() in self.letters

    def choose(self, rows: Rows) -> list[bool]:
        self.chunks += 1
        return [self(rows.record(number)) for number in range(rows.count)]


def one_by_one(letters: str) -> RecordFilter:
    wants = OfTags(letters)
    return lambda record: wants(record)


@given(members, st.lists(st.lists(tags, max_size=9), max_size=4), st.lists(st.integers(0, 5), max_size=4))
@in_loop
async def test_members_with_filters_get_the_same_either_way(
    members: list[tuple[str | None, int | None]], published: list[list[str]], refills: list[int]
) -> None:
    crew = Crew()

    def join(group: Group, make: Callable[[str], RecordFilter], *, runs: bool) -> list[Taker]:
        return [
            Taker(group, credit=credit, wanted=None if letters is None else make(letters), runs=runs)
            for letters, credit in members
        ]

    ways: list[tuple[Callable[[str], RecordFilter], bool]] = [(one_by_one, False), (OfTags, False), (OfTags, True)]
    groups = [crew.group(ON_DELIVERY, name=f"g{number}") for number in range(len(ways))]
    takers = [join(group, make, runs=runs) for group, (make, runs) in zip(groups, ways, strict=True)]
    number = 0
    for step in range(max(len(published), len(refills))):
        for tag in published[step] if step < len(published) else ():
            crew.publish(number, tag=tag.encode())
            number += 1
        await turns(6)
        if step < len(refills):
            for some in takers:
                member = some[refills[step] % len(some)].member
                if member.credit is not None:
                    member.set_credit(refills[step])
        await turns(6)
        told = [[(taker.numbers, taker.member.credit) for taker in some] for some in takers]
        assert told[0] == told[1] == told[2]
        counts = [group.info().counts for group in groups]
        assert counts[0] == counts[1] == counts[2]
    await crew.close()


@given(wanted_tags, st.lists(tags, max_size=20), st.lists(st.integers(1, 7), max_size=6))
@in_loop
async def test_what_a_group_does_not_want_is_skipped_the_same_either_way(
    letters: str, published: list[str], takes: list[int]
) -> None:
    crew = Crew()
    crew.groups.register_filter("one by one", one_by_one)
    crew.groups.register_filter("columns", OfTags)
    groups = [
        crew.group(GroupSettings(filter=letters, filter_kind=kind), name=kind) for kind in ("one by one", "columns")
    ]
    for number, tag in enumerate(published):
        crew.publish(number, tag=tag.encode())
    for count in [*takes, 20]:
        some, same = ([int(one.payload or b"") for one in group.take(count)] for group in groups)
        assert some == same
    assert groups[0].info().counts == groups[1].info().counts
    assert [group.info().lag for group in groups] == [0, 0]
    assert groups[0].info().counts.filtered == sum(tag not in letters for tag in published)
    await crew.close()


@in_loop
async def test_a_filter_looks_at_a_chunk_once_however_often_its_member_takes_from_it() -> None:
    crew, wants = Crew(), OfTags("a")
    group = crew.group(ON_DELIVERY)
    for number in range(20):
        crew.publish(number, tag=b"ab"[number % 2 :][:1])
    taker = Taker(group, credit=1, wanted=wants, runs=True)
    for _ in range(9):
        await turns(6)
        taker.member.set_credit(1)
    await turns(6)
    assert taker.numbers == list(range(0, 20, 2))
    assert wants.chunks == 1
    await crew.close()


@in_loop
async def test_a_member_that_takes_runs_gets_one_for_what_needs_no_filter_and_others_get_lists() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    kinds: list[type] = []
    Taker(group, then=lambda _, batch: kinds.append(type(batch)), runs=True)
    Taker(group, then=lambda _, batch: kinds.append(type(batch)))
    crew.publish(*range(6))
    await turns(6)
    assert kinds == [Run, list]
    crew.publish(*range(4))
    assert [[type(some), len(some)] for some in group.take_runs(3)] == [[Run, 3]]
    assert len(group.take(3)) == 1
    await crew.close()
