"""Watches of the state: who hears of a change, what a receiver of its own bug costs others, and what a watch costs."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.state import store_pattern
from babelbus.core.state.log import Change, Commit, Kind
from babelbus.core.state.watches import Watch, Watches
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus, Gate, done, in_loop

elements = st.sampled_from(["a", "b", "", "c"])
keys = st.lists(elements, min_size=1, max_size=4).map("/".join)
patterns = st.builds(
    lambda parts, rest: "/".join([*parts, "#"] if rest else parts),
    st.lists(st.one_of(elements, st.just("?")), min_size=1, max_size=4),
    st.booleans(),
)


def change(key: str, kind: Kind = Kind.SET) -> Change:
    return kind, key, b"1", None, 0


class Ear:
    """A receiver that keeps the keys that it heard, and the source."""

    def __init__(self) -> None:
        self.keys: list[str | None] = []
        self.sources: list[str] = []

    def __call__(self, changes: Sequence[Change], source: str) -> None:
        self.keys += [one[1] for one in changes]
        self.sources.append(source)


@given(st.lists(patterns, max_size=12), st.lists(keys, max_size=8))
def test_a_watch_hears_what_its_pattern_matches_in_order_and_once(texts: list[str], changed: list[str]) -> None:
    watches, ears = Watches(), [Ear() for _ in texts]
    for text, ear in zip(texts, ears, strict=True):
        watches.add(Watch(store_pattern(text), ear, 0, None))
    watches.hear([change(key) for key in changed], Commit(1, "jebp:me"))
    for text, ear in zip(texts, ears, strict=True):
        assert ear.keys == [key for key in changed if store_pattern(text).matches(key)]
        assert len(ear.sources) <= 1


def test_a_watch_hears_only_later_commits_only_values_and_only_what_may_be_seen() -> None:
    watches, ear = Watches(), Ear()
    watches.add(Watch(store_pattern("#"), ear, 3, lambda key: key != "secret"))
    watches.hear([change("early")], Commit(3, "s"))
    watches.hear([change("secret"), change("a", Kind.PUBLISHED), (Kind.CHILDREN, None, b"", None, 0)], Commit(4, "s"))
    assert (ear.keys, ear.sources) == ([], [])
    watches.hear([change("a"), change("b", Kind.DELETED), change("c", Kind.RETAINED)], Commit(5, "s"))
    assert (ear.keys, ear.sources) == (["a", "b", "c"], ["s"])


def test_a_watch_that_has_ended_hears_nothing_and_leaves_nothing() -> None:
    watches, ear = Watches(), Ear()
    watch = Watch(store_pattern("a/#"), ear, 0, None)
    watches.add(watch)
    watches.hear([change("a")], Commit(1, "s"))
    watches.remove(watch)
    watches.remove(watch)
    watches.hear([change("a")], Commit(2, "s"))
    assert (ear.keys, len(watches)) == (["a"], 0)


def test_the_bug_of_one_receiver_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watches, ear = Watches(), Ear()

    def fail(changes: Sequence[Change], source: str) -> None:
        raise RuntimeError("a bug")

    watches.add(Watch(store_pattern("a"), fail, 0, None))
    watches.add(Watch(store_pattern("a"), ear, 0, None))
    watches.hear([change("a")], Commit(1, "s"))
    assert ear.keys == ["a"]
    assert "a receiver of a watch failed" in caplog.text


@in_loop
async def test_a_watch_that_began_with_values_that_a_flush_lost_is_told_what_holds() -> None:
    files = FaultyFiles()
    bus, gate, ear = Bus(files), Gate(files), Ear()
    state = bus.open_state()
    state.set("a", b"1")
    await state.commit("one").wait()
    files.fail("flush", suffix=".log", drop=True)
    gate.shut()
    state.set("a", b"2")
    receipt = state.commit("two")
    state.watch(store_pattern("a"), ear)
    assert state.get("a") == b"2"
    await gate.reached()
    gate.open()
    await done([receipt])
    assert receipt.error is not None
    assert (state.get("a"), ear.keys) == (b"1", ["a"])
    await bus.die()


@in_loop
async def test_a_watch_of_the_state_begins_with_the_next_commit() -> None:
    state, ear = Bus().open_state(), Ear()
    state.set("a", b"1")
    await state.commit("one").wait()
    watch = state.watch(store_pattern("#"), ear)
    state.set("b", b"2")
    await state.commit("two").wait()
    state.end_watch(watch)
    state.set("c", b"3")
    await state.commit("three").wait()
    assert (ear.keys, ear.sources) == (["b"], ["two"])
