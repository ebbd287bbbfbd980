"""Filters that choose from a whole chunk at once: members get what they get when each record is asked for by itself."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.groups.delivery_rows import Rows, RowsFilter, Run
from babelbus.core.groups.group import Group
from babelbus.core.groups.settings import GroupSettings, RecordFilter
from babelbus.core.record import Record
from tests.core.groups.support import EXPLICIT, Crew, Taker, take
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


WAYS: list[tuple[GroupSettings, Callable[[str], RecordFilter]]] = [
    (ON_DELIVERY, one_by_one),
    (ON_DELIVERY, OfTags),
    (GroupSettings(ack="explicit"), OfTags),  # the records have no key
    (GroupSettings(ack="explicit", order="none"), one_by_one),
]


@given(members, st.lists(st.lists(tags, max_size=9), max_size=4), st.lists(st.integers(0, 5), max_size=4))
@in_loop
async def test_members_with_filters_get_the_same_either_way(
    members: list[tuple[str | None, int | None]], published: list[list[str]], refills: list[int]
) -> None:
    crew = Crew()

    def join(group: Group, make: Callable[[str], RecordFilter]) -> list[Taker]:
        return [
            Taker(group, credit=credit, wanted=None if letters is None else make(letters))
            for letters, credit in members
        ]

    groups = [crew.group(settings, name=f"g{number}") for number, (settings, _) in enumerate(WAYS)]
    takers = [join(group, make) for group, (_, make) in zip(groups, WAYS, strict=True)]
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
        assert told == told[:1] * len(WAYS)
        counts = [group.info().counts for group in groups]
        assert counts == counts[:1] * len(WAYS)
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
        some, same = ([int(one.payload or b"") for one in take(group, count)] for group in groups)
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
    taker = Taker(group, credit=1, wanted=wants)
    for _ in range(9):
        await turns(6)
        taker.member.set_credit(1)
    await turns(6)
    assert taker.numbers == list(range(0, 20, 2))
    assert wants.chunks == 1
    await crew.close()


@in_loop
async def test_a_member_gets_fresh_records_as_a_run_with_and_without_keys() -> None:
    crew = Crew()
    kinds: list[type] = []
    for settings in (ON_DELIVERY, EXPLICIT):
        group = crew.group(settings, name=settings.ack)
        Taker(group, then=lambda _, batch: kinds.append(type(batch)))
        Taker(group, then=lambda _, batch: kinds.append(type(batch)), wanted=OfTags("b"))
    crew.publish(*range(6), tag=b"b")
    await turns(6)
    assert kinds == [Run] * 4
    crew.publish(*range(4), key=b"k", tag=b"b")
    await turns(6)
    assert kinds[4:] == [Run] * 3
    await crew.close()
