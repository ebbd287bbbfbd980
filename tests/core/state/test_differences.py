"""The differences between two moments, against the whole states of both."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.core.state import AsOf, Difference, InvalidMomentsError, KeyPattern, TooManyChangesError, differences
from babelbus.core.state.tree import State
from tests.core.state.test_history import EVERYTHING, commit, history_of, told
from tests.support.bus import Bus, in_loop

KEYS = st.sampled_from(["a", "a/b", "a/c", "b", "b/x/y", "c"])
CHANGES = st.lists(st.tuples(KEYS, st.none() | st.integers(0, 2), st.booleans()), max_size=30)


def change(state: State, key: str, value: int | None, versioned: bool) -> None:
    if value is not None:
        state.put(key, b"%d" % value, 3 if versioned else 0)
    elif state.find(key) is not None:
        state.delete(key)


@settings(deadline=None)
@given(CHANGES, st.integers(0, 30), st.integers(0, 30), st.integers(1, 4), st.sampled_from([(), ("a",), ("b", None)]))
def test_the_pages_have_exactly_what_two_whole_states_differ_in(
    changes: list[tuple[str, int | None, bool]], one: int, other: int, count: int, elements: tuple[str | None, ...]
) -> None:
    async def run() -> None:
        bus = Bus()
        state = bus.open_state()
        for changed in changes:
            change(state, *changed)
            await commit(state)
        history, pattern = history_of(bus), KeyPattern(elements, rest=True)
        end = bus.broker.topic("$state").partition(0).high_watermark
        if not end:
            return
        first, second = sorted((min(one, end - 1), min(other, end - 1)))
        moments = AsOf(offset=first), AsOf(offset=second)
        before, after = [{key: entry for key, *entry in await history.match(pattern, one)} for one in moments]
        wanted: dict[str, Difference] = {}
        for key in sorted(before | after):
            if before.get(key) != after.get(key):
                wanted[key] = (
                    Difference.ADDED if key not in before
                    else Difference.REMOVED if key not in after
                    else Difference.CHANGED
                )  # fmt: skip
        rows: list[Any] = []
        position = None
        while True:
            page = await history.differences(pattern, *moments, after=position, count=count)
            assert len(page.rows) <= count
            rows += page.rows
            position = page.next_after
            if position is None:
                break
        assert {row.key: row.difference for row in rows} == wanted
        assert [row.key for row in rows] == list(wanted)
        assert page.counts == {one: list(wanted.values()).count(one) for one in Difference}
        for row in rows:
            assert shown(row.before) == before.get(row.key)
            assert shown(row.after) == after.get(row.key)

    in_loop(run)()


def shown(revision: Any) -> list[Any] | None:
    return None if revision is None or revision.value is None else [revision.value, revision.version]


@in_loop
async def test_a_row_says_when_and_by_whom_a_key_was_changed() -> None:
    history = history_of(await told())
    page = await history.differences(KeyPattern(("k",)), AsOf(offset=0), AsOf(offset=2), count=9)
    (row,) = page.rows
    assert row.before is not None
    assert row.after is not None
    assert (row.before.source, row.after.source) == ("source-0", "source-2")
    assert row.after.timestamp - row.before.timestamp == 2000


@in_loop
async def test_moments_in_the_wrong_order_are_refused() -> None:
    history = history_of(await told())
    with pytest.raises(InvalidMomentsError):
        await history.differences(EVERYTHING, AsOf(offset=3), AsOf(offset=1), count=1)


@in_loop
async def test_more_keys_than_are_compared_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences, "KEYS_MAX", 1)
    history = history_of(await told())
    with pytest.raises(TooManyChangesError):
        await history.differences(EVERYTHING, AsOf(offset=0), None, count=1)
    assert (await history.differences(KeyPattern(("k",)), AsOf(offset=0), None, count=1)).rows


@settings(deadline=None)
@given(st.lists(KEYS, max_size=40), st.integers(1, 8), st.integers(1, 8))
def test_the_last_changes_are_the_same_whatever_windows_the_log_is_read_in(
    keys: list[str], count: int, window: int
) -> None:
    async def run() -> None:
        bus = Bus()
        state = bus.open_state()
        for number, key in enumerate(keys):
            state.set(key, b"%d" % number)
            await commit(state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("babelbus.core.state.history.WINDOW", window)
            revisions, _ = await history_of(bus).revisions("a", count_max=count)
        values = [number for number, key in enumerate(keys) if key == "a"]
        assert [int(one.value or b"") for one in revisions] == values[-count:]

    in_loop(run)()
