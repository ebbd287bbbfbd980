"""The state: what each operation does, who hears of it, what a restart and a failing disk leave of it."""

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from babelbus.core.access import SERVER
from babelbus.core.receipt import Promise
from babelbus.core.record import Event
from babelbus.core.state.key_index import KeyPattern
from babelbus.core.state.log import Change, Kind
from babelbus.core.state.tree import (
    InvalidKeyError,
    NoSuchKeyError,
    State,
    Testament,
    VersionedError,
    VersionMismatchError,
)
from babelbus.core.subject import PathPattern, below
from babelbus.storage.errors import DiskError, DiskFullError
from tests.core.state.test_key_index import children_of, pattern
from tests.storage.faults import FaultyFiles
from tests.support.bus import Bus, Gate, done, in_loop, payloads, publish, read, turns

EVERYTHING = KeyPattern((), rest=True)
Told = tuple[Kind, str | None, bytes]


class Ear:
    """A listener that keeps what it heard, without the children unless it wants them."""

    def __init__(self, state: State) -> None:
        self.heard: list[Change] = []
        self.numbers: list[int] = []
        state.listeners.append(self)

    def __call__(self, changes: Sequence[Change], commit: Any) -> None:
        self.heard += changes
        self.numbers.append(commit.number)

    @property
    def told(self) -> list[Told]:
        return [(kind, key, value) for kind, key, value, _, _ in self.heard]


def tree(state: State) -> dict[str, tuple[bytes, int]]:
    return {key: (value, version) for key, value, version in state.entries(EVERYTHING)}


def raw(text: str) -> msgspec.Raw:
    return msgspec.Raw(text.encode())


# -- operations --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_value_can_be_read_at_once_and_is_told_when_the_log_has_it() -> None:
    files = FaultyFiles()
    bus, gate = Bus(files), Gate(files)
    state = bus.open_state()
    ear = Ear(state)
    gate.shut()
    state.set("a/b", b"1")
    receipt = state.commit("one")
    await gate.reached()
    assert state.get("a/b") == b"1"
    assert (receipt.done, ear.told) == (False, [])
    gate.open()
    await done([receipt])
    assert (receipt.error, ear.told) == (None, [(Kind.SET, "a/b", b"1")])


@in_loop
async def test_what_is_not_there_is_an_error_that_names_it() -> None:
    state = Bus().open_state()
    for ask in (state.get, state.get_version, state.delete, state.children):
        with pytest.raises(NoSuchKeyError, match="nothing stored under 'a/b'"):
            ask("a/b")
    assert state.find("a/b") is None


@in_loop
async def test_compare_and_set_counts_versions_and_refuses_another_one() -> None:
    state = Bus().open_state()
    state.set("plain", b"1")
    for key in ("new", "plain"):
        with pytest.raises(VersionMismatchError):
            state.compare_and_set(key, b"2", 1)
        assert state.compare_and_set(key, b"2", 0) == 1
        with pytest.raises(VersionMismatchError) as caught:
            state.compare_and_set(key, b"3", 0)
        assert (caught.value.wanted, caught.value.found) == (0, 1)
        assert state.compare_and_set(key, b"3", 1) == 2
        assert state.get_version(key) == (b"3", 2)
        with pytest.raises(VersionedError):
            state.set(key, b"4")
        assert state.get(key) == b"3"
        assert state.delete(key) == b"3"


@in_loop
async def test_a_put_replaces_what_has_a_version() -> None:
    state = Bus().open_state()
    state.compare_and_set("k", b"1", 0)
    state.put("k", b"2")
    assert state.get_version("k") == (b"2", 0)


@in_loop
async def test_deleting_by_a_pattern_takes_the_node_itself_too_and_spares_transient_keys_under_a_wildcard() -> None:
    state = Bus().open_state()
    for key in ("a", "a/b", "x", "$SYS/clients"):
        state.set(key, b"1")
    assert sorted(state.delete_matching(pattern("a/#"))) == [("a", b"1"), ("a/b", b"1")]
    assert state.delete_matching(pattern("#")) == [("x", b"1")]
    assert state.delete_matching(pattern("?/clients")) == []
    assert state.delete_matching(pattern("$SYS/#")) == [("$SYS/clients", b"1")]


@in_loop
async def test_what_is_published_is_told_in_order_and_not_stored() -> None:
    state = Bus().open_state()
    ear = Ear(state)
    state.set("k", b"1")
    state.note("k", b"2")
    state.delete("k")
    await done([state.commit("one")])
    assert ear.told == [(Kind.SET, "k", b"1"), (Kind.PUBLISHED, "k", b"2"), (Kind.DELETED, "k", b"1")]
    state.note("k", b"3")
    await done([state.commit("one")])
    assert ear.told[3:] == [(Kind.PUBLISHED, "k", b"3")]
    assert "k" not in tree(state)


@in_loop
async def test_a_listener_that_fails_costs_nobody_else_anything() -> None:
    state = Bus().open_state()

    def fail(changes: Sequence[Change], commit: object) -> None:
        raise ZeroDivisionError

    state.listeners.append(fail)
    ear = Ear(state)
    state.set("k", b"1")
    (receipt,) = await done([state.commit("one")])
    assert receipt.error is None
    assert len(ear.told) == 1


@in_loop
async def test_commits_are_told_in_order_also_those_that_log_nothing() -> None:
    state = Bus().open_state()
    ear = Ear(state)
    receipts = []
    for number in range(6):
        state.note("k", b"%d" % number) if number % 2 else state.set("k", b"%d" % number)
        receipts.append(state.commit("one"))
    await done(receipts)
    assert [value for _, _, value in ear.told] == [b"%d" % number for number in range(6)]
    assert ear.numbers == sorted(ear.numbers)
    assert state.commit_number == ear.numbers[-1]


@in_loop
async def test_a_commit_of_nothing_waits_for_what_was_changed_before() -> None:
    files = FaultyFiles()
    bus, gate = Bus(files), Gate(files)
    state = bus.open_state()
    assert state.commit("one").done
    gate.shut()
    state.set("k", b"1")
    first = state.commit("one")
    second = state.commit("two")
    await gate.reached()
    assert not second.done
    gate.open()
    await done([first, second])


@given(st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map("/".join))))
@settings(deadline=None, max_examples=50)
def test_children_are_told_exactly_when_they_change(steps: list[tuple[bool, str]]) -> None:
    @in_loop
    async def run() -> None:
        bus = Bus()
        state = bus.open_state(ack="written")
        state.watches_children = True
        ear = Ear(state)
        stored: set[str] = set()
        for add, key in steps:
            before = children_of(stored)
            if add:
                state.set(key, b"1")
                stored.add(key)
            elif key in stored:
                state.delete(key)
                stored.discard(key)
            after = children_of(stored)
            changed = {
                "/".join(node) if node else None
                for node in before.keys() | after.keys()
                if before.get(node, set()) != after.get(node, set())
            }
            ear.heard.clear()
            state.commit("one")
            told = [name for kind, name, _ in ear.told if kind == Kind.CHILDREN]
            assert sorted(told, key=str) == sorted(changed, key=str)
            kinds = [kind for kind, _, _ in ear.told]
            assert kinds == sorted(kinds, reverse=True)  # children first
        await bus.die()

    run()


# -- testaments --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_testament_deletes_first_then_sets_and_ends() -> None:
    state = Bus().open_state()
    ear = Ear(state)
    state.set("goods/1", b"1")
    state.compare_and_set("will", b"1", 0)
    state.set_testament("one", Testament((pattern("goods/#"),), (("will", raw('"gone"')), ("goods/2", raw("2")))))
    state.execute("one")
    state.execute("one")
    state.execute("nobody")
    await done([state.commit("one")])
    assert tree(state) == {"will": (b'"gone"', 0), "goods/2": (b"2", 0)}
    told = [one for one in ear.told if one[0] != Kind.TESTAMENT]
    assert told[2:] == [(Kind.DELETED, "goods/1", b"1"), (Kind.SET, "will", b'"gone"'), (Kind.SET, "goods/2", b"2")]


@in_loop
async def test_a_testament_takes_no_transient_key_and_leaves_none() -> None:
    state = Bus().open_state()
    state.set("$SYS/version", b"1")
    state.set_testament("one", Testament((pattern("#"), pattern("$SYS/#")), (("$SYS/x", raw("1")), ("x", raw("1")))))
    state.execute("one")
    assert tree(state) == {"$SYS/version": (b"1", 0), "x": (b"1", 0)}


@in_loop
async def test_testaments_of_a_server_that_was_killed_are_executed_at_the_start() -> None:
    bus = Bus()
    state = bus.open_state()
    state.set("goods", b"1")
    state.set_testament("one", Testament((pattern("goods"),), (("will", raw("1")),)))
    state.set_testament("two", Testament((), (("other", raw("2")),)))
    state.set_testament("two", Testament())
    await done([state.commit("one")])
    await bus.die()
    again = Bus(bus.files)
    assert tree(again.open_state()) == {"will": (b"1", 0)}
    await again.die()
    again.files.kill()  # type: ignore[attr-defined]
    once_more = Bus(bus.files)
    assert tree(once_more.open_state()) == {"will": (b"1", 0)}


@in_loop
async def test_testaments_are_executed_when_the_server_stops() -> None:
    bus = Bus()
    state = bus.open_state()
    state.set_testament("one", Testament((), (("will", raw("1")),)))
    again = await bus.restart()
    assert tree(again.open_state()) == {"will": (b"1", 0)}


@pytest.fixture
def small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a testament delete two keys, and look at one name, in one turn of the event loop."""
    monkeypatch.setattr("babelbus.core.state.tree.DELETIONS_AT_ONCE", 2)
    monkeypatch.setattr("babelbus.core.state.key_index.NAMES_AT_ONCE", 1)


@pytest.mark.parametrize("goods", [["goods/?"], [f"goods/{number}" for number in range(6)]])
@pytest.mark.usefixtures("small_turns")
@in_loop
async def test_a_long_testament_takes_turns_with_others(goods: list[str]) -> None:
    state = Bus().open_state()
    for number in range(6):
        state.set(f"goods/{number}", b"1")
    state.set_testament("one", Testament(tuple(map(pattern, goods)), (("will", raw("1")),)))
    await done([state.commit("one")])
    left: list[int] = []
    over = asyncio.Event()
    state.execute_in_turns("one", "one", over.set)
    while not over.is_set():
        left.append(len(tree(state)))
        await asyncio.sleep(0)
    assert left == [6, 6, 4, 2]
    assert tree(state) == {"will": (b"1", 0)}


@pytest.mark.parametrize("deleted", ["goods/0", "goods/5"])
@pytest.mark.usefixtures("small_turns")
@in_loop
async def test_what_others_do_between_the_turns_of_a_testament_stands(deleted: str) -> None:
    state = Bus().open_state()
    for number in range(6):
        state.set(f"goods/{number}", b"1")
    state.set_testament("one", Testament((pattern("goods/?"),)))
    over = asyncio.Event()
    state.execute_in_turns("one", "one", over.set)
    await turns(2)
    with contextlib.suppress(NoSuchKeyError):
        state.delete(deleted)
    state.set("goods/new", b"2")
    await over.wait()
    assert tree(state) == {"goods/new": (b"2", 0)}


@in_loop
async def test_grave_goods_are_deleted_in_the_order_of_their_patterns() -> None:
    state = Bus().open_state()
    ear = Ear(state)
    for key in ("a", "a/b", "c", "c/d"):
        state.set(key, b"1")
    state.set_testament("one", Testament(tuple(map(pattern, ("c/d", "?/b", "c/#", "#")))))
    await done([state.commit("one")])
    ear.heard.clear()
    state.execute("one")
    await done([state.commit("one")])
    assert [key for kind, key, _ in ear.told if kind == Kind.DELETED] == ["c/d", "a/b", "c", "a"]


@pytest.mark.usefixtures("small_turns")
@in_loop
async def test_a_long_testament_ends_when_its_owner_is_back_or_the_server_stops() -> None:
    bus = Bus()
    state = bus.open_state()
    goods = (pattern("goods/?"),)
    for number in range(6):
        state.set(f"goods/{number}", b"1")
    for owner in ("back", "gone"):
        state.set_testament(owner, Testament(goods, ((owner, raw("1")),)))
    over: list[str] = []
    for owner in ("back", "gone"):
        state.execute_in_turns(owner, owner, partial(over.append, owner))
    state.set_testament("back", Testament((), (("will", raw("2")),)))
    again = await bus.restart()
    assert sorted(over) == ["back", "gone"]
    assert tree(again.open_state()) == {"gone": (b"1", 0), "will": (b"2", 0)}


# -- failing disks -----------------------------------------------------------------------------------------------------


@in_loop
async def test_a_full_disk_takes_all_changes_of_the_commit_back() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state()
    ear = Ear(state)
    state.set("plain", b"1")
    state.compare_and_set("versioned", b"1", 0)
    state.set_testament("one", Testament((), (("will", raw("1")),)))
    await done([state.commit("one")])
    before = tree(state)
    files.bytes_max = files.bytes_used
    state.set("plain", b"2")
    state.set("plain", b"3")
    state.compare_and_set("versioned", b"2", 1)
    state.delete("plain")
    state.set("new/key", b"1")
    state.set("$SYS/x", b"1")
    state.delete("versioned")
    state.set("versioned/child", b"1")
    state.execute("one")
    (receipt,) = await done([state.commit("one")])
    assert isinstance(receipt.error, DiskFullError)
    assert tree(state) == before
    assert sorted(state.children(None)) == ["plain", "versioned"]
    assert len(ear.numbers) == 1
    files.bytes_max = 2**62
    state.execute("one")
    (receipt,) = await done([state.commit("one")])
    assert receipt.error is None
    assert tree(state) == before | {"will": (b"1", 0)}


@pytest.mark.usefixtures("small_turns")
@in_loop
async def test_a_long_testament_that_the_disk_refuses_in_between_is_executed_at_the_next_start() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state()
    for number in range(3):
        state.set(f"goods/{number}", b"1")
    state.set_testament("one", Testament((pattern("goods/?"),), (("will", raw("1")),)))
    await done([state.commit("one")])
    before = tree(state)
    files.bytes_max = files.bytes_used
    over: list[int] = []
    state.execute_in_turns("one", "one", lambda: over.append(len(tree(state))))
    await turns(3)
    files.bytes_max = 2**62
    await turns()
    assert over == [len(before)]
    assert tree(state) == before
    again = await bus.restart()
    assert tree(again.open_state()) == {"will": (b"1", 0)}


@pytest.mark.parametrize("drop", [False, True])
@in_loop
async def test_after_a_failed_flush_memory_is_what_a_restart_shows_and_listeners_know_it(drop: bool) -> None:
    files = FaultyFiles()
    bus, gate = Bus(files), Gate(files)
    state = bus.open_state()
    state.watches_children = True
    ear = Ear(state)
    state.set("kept", b"1")
    state.set("$SYS/x", b"1")
    await done([state.commit("one")])
    files.fail("flush", suffix=".log", drop=drop)
    gate.shut()
    receipts = []
    for key, value in (("kept", b"2"), ("a/b", b"1"), ("a/b", b"2")):
        state.set(key, value)
        state.set("$SYS/x", b"2")
        receipts.append(state.commit("one"))
    await gate.reached()
    gate.open()
    await done(receipts)
    assert all(receipt.error is not None for receipt in receipts)
    told = {key: value for kind, key, value in ear.told if kind == Kind.SET}
    assert told == {key: value for key, (value, _) in tree(state).items()}
    assert tree(state)["$SYS/x"] == (b"2", 0)
    kept = {key: one for key, one in tree(state).items() if key != "$SYS/x"}
    assert kept == ({"kept": (b"1", 0)} if drop else {"kept": (b"2", 0), "a/b": (b"2", 0)})
    await bus.die()
    files.kill()
    assert tree(Bus(files).open_state()) == kept


@in_loop
async def test_what_was_answered_as_written_and_then_lost_by_a_flush_is_written_again() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state(ack="written")
    state.set("durable", b"1")
    state.set("gone", b"1")
    state.set_testament("one", Testament((), (("old", raw("1")),)))
    await done([state.commit("one")])
    partition = bus.broker.topic("$state").partition(0)
    partition.log.durable()
    state.set("lost", b"2")
    state.compare_and_set("versioned", b"2", 0)
    state.delete("gone")
    state.set_testament("one", Testament())
    state.set_testament("two", Testament((), (("will", raw("1")),)))
    (receipt,) = await done([state.commit("one")])
    assert receipt.error is None
    files.fail("flush", suffix=".log", drop=True)
    with pytest.raises(DiskError):
        partition.flush_log()
    assert partition.next_offset == 3
    state.set("$SYS/x", b"1")
    files.fail("pwrite", suffix=".log", skip=1)
    state.set("first", b"3")
    await done([state.commit("one")])
    state.set("second", b"3")
    await done([state.commit("one")])
    expected = dict.fromkeys(("durable", "will"), (b"1", 0)) | {"lost": (b"2", 0), "versioned": (b"2", 1)}
    await bus.die()
    files.kill()
    assert tree(Bus(files).open_state()) == expected | {"first": (b"3", 0), "second": (b"3", 0)}


@in_loop
async def test_a_commit_that_replaces_all_that_a_flush_lost_is_stored_and_told() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state(ack="written")
    ear = Ear(state)
    state.set("k", b"1")
    await done([state.commit("one")])
    files.fail("flush", suffix=".log", drop=True)
    with pytest.raises(DiskError):
        bus.broker.topic("$state").partition(0).flush_log()
    state.set("k", b"2")
    (receipt,) = await done([state.commit("one")])
    assert receipt.error is None
    assert ear.told[-1] == (Kind.SET, "k", b"2")
    assert tree(state) == {"k": (b"2", 0)}


@in_loop
async def test_a_failed_commit_is_not_the_answer_to_who_changed_nothing_afterwards() -> None:
    files = FaultyFiles()
    state = Bus(files).open_state()
    files.fail("flush", suffix=".log")
    state.set("k", b"1")
    (failed,) = await done([state.commit("one")])
    assert failed.error is not None
    assert state.commit("two").error is None
    state.note("k", b"2")
    (receipt,) = await done([state.commit("two")])
    assert receipt.error is None


@in_loop
async def test_a_key_that_is_no_unicode_is_refused_with_its_commit() -> None:
    state = Bus().open_state()
    state.set("k", b"1")
    state.set("\udcff", b"1")
    (receipt,) = await done([state.commit("one")])
    assert isinstance(receipt.error, InvalidKeyError)
    assert tree(state) == {}


# -- events ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_change_is_an_event_for_live_subscriptions_and_for_the_topic_that_covers_the_key() -> None:
    bus = Bus()
    state = bus.open_state()
    topic = bus.topic("a")
    heard: list[Event] = []
    bus.broker.subscribe(below("a"), heard.extend, principal=SERVER)
    state.set("a/b", b"1")
    state.set("other", b"2")
    state.note("a/b", b"3")
    state.set("$SYS/x", b"4")
    state.delete("a/b")
    (receipt,) = await done([state.commit("me")])
    assert receipt.error is None
    assert [(event.subject, event.payload, event.key) for event in heard] == [
        ("a/b", b"1", b"a/b"),
        ("a/b", b"3", b"a/b"),
        ("a/b", None, b"a/b"),
    ]
    assert dict(heard[0].headers) == {b"content-type": b"application/json", b"ce_source": b"me"}
    assert payloads(topic.partition(0)) == [b"1", b"3", None]


@in_loop
async def test_who_hears_the_state_itself_gets_no_event_of_it() -> None:
    bus = Bus()
    state = bus.open_state()
    heard: list[Event] = []
    bus.broker.state_receiver = heard.extend
    bus.broker.router.add(PathPattern((), rest=True), bus.broker.state_receiver, shared=True, principal=SERVER)
    bus.topic("a")
    state.set("a/b", b"1")
    state.set("x", b"1")
    await done([state.commit("me")])
    assert heard == []
    await done(publish(bus.broker, [Event("a/b", b"2")]))
    assert [event.payload for event in heard] == [b"2"]


@in_loop
async def test_a_topic_that_refuses_the_event_is_an_error_although_the_state_has_changed() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state()
    bus.topic("a")
    files.fail("pwrite", errno.ENOSPC, skip=1, suffix=".log")
    state.set("a/b", b"1")
    (receipt,) = await done([state.commit("me")])
    assert isinstance(receipt.error, DiskFullError)
    assert state.get("a/b") == b"1"


@in_loop
async def test_the_log_and_the_topic_get_a_change_in_one_turn_and_the_answer_waits_for_both() -> None:
    files = FaultyFiles()
    bus, gate = Bus(files), Gate(files)
    state = bus.open_state(ack="flushed")
    topic = bus.topic("a", ack="flushed")
    gate.shut()
    state.set("a/b", b"1")
    receipt = state.commit("me")
    assert topic.partition(0).next_offset == 1  # not only when the log is flushed
    await gate.reached()
    assert not receipt.done
    gate.open()
    await receipt.wait()
    assert payloads(topic.partition(0)) == [b"1"]


@in_loop
async def test_a_change_that_a_failed_flush_takes_from_the_log_is_corrected_in_the_topic() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state(ack="flushed")
    topic = bus.topic("a", ack="written")
    state.set("a/b", b"1")
    await state.commit("me").wait()
    files.fail("flush", drop=True, suffix=".log")
    state.set("a/b", b"2")
    (receipt,) = await done([state.commit("me")])
    await turns()
    assert receipt.error is not None
    assert state.get("a/b") == b"1"
    assert payloads(topic.partition(0)) == [b"1", b"2", b"1"]


@in_loop
async def test_a_topic_gets_at_the_start_what_a_crash_has_kept_from_it_and_nothing_twice() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state()
    bus.topic("a", 2, ack="written")
    for key, value in (("a/both", b"1"), ("a/gone", b"1"), ("other", b"1")):
        state.set(key, value)
    await state.commit("me").wait()
    files.fail("pwrite", errno.ENOSPC, skip=1, suffix=".log")  # the process ends between the two writes
    state.set("a/lost", b"2")
    state.delete("a/gone")
    await done([state.commit("me")])
    await bus.die()
    again = Bus(files)
    again.open_state()
    await turns()
    found = [record for partition in again.broker.topic("a").partitions for record in read(partition)]
    assert Counter((record.key, record.payload) for record in found) == {
        (b"a/both", b"1"): 1,
        (b"a/gone", b"1"): 1,
        (b"a/gone", None): 1,
        (b"a/lost", b"2"): 1,
    }
    third = await again.restart()
    third.open_state()
    assert sum(partition.next_offset for partition in third.broker.topic("a").partitions) == len(found)


@in_loop
async def test_a_topic_that_retains_the_last_keeps_each_subject_as_state() -> None:
    bus = Bus()
    state = bus.open_state()
    bus.topic("a", retain="last")
    bus.topic("b")
    ear = Ear(state)
    json = ((b"content-type", b"application/json"),)
    events = [Event("a/x", b"text"), Event("a/y", b"[1]", headers=json), Event("a/x", b"last"), Event("b", b"no")]
    await done(publish(bus.broker, events))
    await done([state.commit("wait")])
    assert tree(state) == {"a/x": (b'"last"', 0), "a/y": (b"[1]", 0)}
    assert {kind for kind, _, _ in ear.told} == {Kind.RETAINED}
    again = await bus.restart()
    assert tree(again.open_state()) == {"a/x": (b'"last"', 0), "a/y": (b"[1]", 0)}


@in_loop
async def test_a_topic_that_retains_the_last_gets_nothing_twice_at_a_start_after_a_crash() -> None:
    bus = Bus()
    state = bus.open_state()
    topic = bus.topic("a", 4, retain="last", ack="written")
    json = ((b"content-type", b"application/json"),)
    events = [
        Event("a/text", b"text"), Event("a/empty", b""), Event("a/bytes", b"\xff"),
        Event("a/lines", b"[\n1]", headers=json),
        *(Event("a/keys", b"%d" % number, key=b"%d" % number) for number in range(8)),
        Event("a/gone", b"text"), Event("a/gone", None),
    ]  # fmt: skip
    for event in events:
        await done(publish(bus.broker, [event]))
    await done([state.commit("wait")])
    values = tree(state)
    assert values["a/keys"] == (b'"7"', 0)
    recorded = [payloads(partition) for partition in topic.partitions]
    await bus.die()
    again = Bus(bus.files)
    assert tree(again.open_state()) == values
    await turns()
    assert [payloads(partition) for partition in again.broker.topic("a").partitions] == recorded


@in_loop
async def test_an_event_that_was_retained_may_take_the_value_away_again() -> None:
    bus = Bus()
    state = bus.open_state()
    ear = Ear(state)
    state.put("k", b"1", kind=Kind.RETAINED)
    assert state.delete("k", Kind.RETAINED) == b"1"
    state.put("j", b"1", kind=Kind.RETAINED)
    await done([state.commit("retained")])
    assert ear.told == [(Kind.RETAINED, "k", b"1"), (Kind.RETAINED, "k", b""), (Kind.RETAINED, "j", b"1")]
    await bus.die()
    assert tree(Bus(bus.files).open_state()) == {"j": (b"1", 0)}


# -- anything, in any order --------------------------------------------------------------------------------------------

some_keys = st.lists(st.sampled_from(["a", "b", ""]), min_size=1, max_size=3).map("/".join) | st.just("$SYS/x")
some_values = st.sampled_from([b"1", b'"two"', b"null"])
some_patterns = st.sampled_from(["#", "a/#", "?", "?/b", "b", "$SYS/#"]).map(pattern)
Stored = dict[str, tuple[bytes, int]]


class StateMachine(RuleBasedStateMachine):
    """The state against a dictionary, with restarts and disks that fail."""

    @initialize(checkpoint_bytes=st.sampled_from([300, 2**20]))
    def begin(self, checkpoint_bytes: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.files = FaultyFiles()
        self.checkpoint_bytes = checkpoint_bytes
        self.now: Stored = {}
        self.committed: Stored = {}
        self.wills: dict[str, Testament] = {}
        self.committed_wills: dict[str, Testament] = {}
        self.bus: Bus
        self.state: State
        self.start()

    def start(self) -> None:
        async def run() -> None:
            self.bus = Bus(self.files)
            self.state = self.bus.open_state(checkpoint_bytes=self.checkpoint_bytes, segment_bytes=1024)
            self.ear = Ear(self.state)
            await done([self.state.commit("settle")])

        self.loop.run_until_complete(run())
        self.ear.heard.clear()  # testaments that the start executed: they are in what was committed
        self.told: Stored = dict(self.committed)

    def execute(self, owner: str) -> None:
        will = self.wills.pop(owner, Testament())
        for goods in will.grave_goods:
            for key in [key for key in self.now if goods.matches(key) and not key.startswith("$SYS")]:
                del self.now[key]
        for key, value in will.last_will:
            if not key.startswith("$SYS"):
                self.now[key] = (bytes(value), 0)

    def settle(self) -> None:
        self.committed, self.committed_wills = dict(self.now), dict(self.wills)

    def take_back(self) -> None:
        self.now, self.wills = dict(self.committed), dict(self.committed_wills)

    def lose_process(self) -> None:
        """What a start after a kill makes of what was committed."""
        self.take_back()
        self.now = {key: entry for key, entry in self.now.items() if not key.startswith("$SYS")}
        for owner in list(self.wills):
            self.execute(owner)
        self.settle()

    @rule(key=some_keys, value=some_values)
    def set(self, key: str, value: bytes) -> None:
        if self.now.get(key, (b"", 0))[1]:
            with pytest.raises(VersionedError):
                self.state.set(key, value)
        else:
            self.state.set(key, value)
            self.now[key] = (value, 0)

    @rule(key=some_keys, value=some_values, version=st.integers(0, 2))
    def put(self, key: str, value: bytes, version: int) -> None:
        self.state.put(key, value, version)
        self.now[key] = (value, version)

    @rule(key=some_keys, value=some_values, version=st.integers(0, 2))
    def compare_and_set(self, key: str, value: bytes, version: int) -> None:
        found = self.now.get(key, (b"", 0))[1]
        if version == found:
            assert self.state.compare_and_set(key, value, version) == version + 1
            self.now[key] = (value, version + 1)
        else:
            with pytest.raises(VersionMismatchError):
                self.state.compare_and_set(key, value, version)

    @rule(key=some_keys)
    def delete(self, key: str) -> None:
        if key in self.now:
            assert self.state.delete(key) == self.now.pop(key)[0]
        else:
            with pytest.raises(NoSuchKeyError):
                self.state.delete(key)

    @rule(wanted=some_patterns)
    def delete_matching(self, wanted: KeyPattern) -> None:
        spared = not wanted.elements or wanted.elements[0] is None
        expected = [key for key in self.now if wanted.matches(key) and not (spared and key.startswith("$SYS"))]
        assert sorted(self.state.delete_matching(wanted)) == sorted((key, self.now.pop(key)[0]) for key in expected)

    @rule(key=some_keys, value=some_values)
    def note(self, key: str, value: bytes) -> None:
        self.state.note(key, value)

    @rule(
        owner=st.sampled_from("xy"),
        goods=st.lists(some_patterns, max_size=2),
        will=st.dictionaries(some_keys, some_values),
    )
    def set_testament(self, owner: str, goods: list[KeyPattern], will: dict[str, bytes]) -> None:
        made = Testament(tuple(goods), tuple((key, msgspec.Raw(value)) for key, value in will.items()))
        self.state.set_testament(owner, made)
        self.wills.pop(owner, None)
        if made != Testament():
            self.wills[owner] = made

    @rule(owner=st.sampled_from("xy"))
    def carry_out(self, owner: str) -> None:
        self.state.execute(owner)
        self.execute(owner)

    def commit_and_wait(self) -> Promise:
        async def run() -> Promise:
            return (await done([self.state.commit("test")]))[0]

        return self.loop.run_until_complete(run())

    @rule()
    def commit(self) -> None:
        assert self.commit_and_wait().error is None
        self.settle()
        for kind, key, value, _, version in self.ear.heard:
            assert key is not None
            if kind == Kind.SET:
                self.told[key] = (value, version)
            elif kind == Kind.DELETED:
                del self.told[key]
        self.ear.heard.clear()
        assert self.told == self.committed

    @rule()
    def commit_to_a_full_disk(self) -> None:
        self.files.bytes_max = self.files.bytes_used
        receipt = self.commit_and_wait()
        self.files.bytes_max = 2**62
        if receipt.error is not None:
            self.take_back()
        else:  # nothing that is logged, or only to the place of what was cut
            assert not self.ear.heard or self.now == tree(self.state)
            self.settle()

    @rule(drop=st.booleans())
    def commit_with_a_failing_flush(self, drop: bool) -> None:
        self.files.fail("flush", suffix=".log", drop=drop)
        receipt = self.commit_and_wait()
        self.files.faults.clear()
        found = tree(self.state)
        if receipt.error is None:
            self.settle()
            return
        lost = {key: entry for key, entry in self.committed.items() if not key.startswith("$SYS")}
        lost |= {key: entry for key, entry in self.now.items() if key.startswith("$SYS")}
        assert found in (self.now, lost)
        if found == self.now and found != lost:
            self.settle()
        elif found == lost:
            loaded = self.state._log.load()
            assert loaded.testaments == self.state._testaments
            self.now = dict(lost)
            self.wills = {
                owner: made
                for wills in (self.committed_wills, self.wills)
                for owner, made in wills.items()
                if loaded.testaments.get(owner) == msgspec.json.encode(made)
            }
            self.settle()

    @rule()
    def be_killed(self) -> None:
        self.loop.run_until_complete(self.bus.die())
        self.files.kill()
        self.lose_process()
        self.start()

    @rule()
    def stop_and_start(self) -> None:
        for owner in list(self.wills):
            self.execute(owner)
        self.settle()
        self.loop.run_until_complete(self.bus.broker.close())
        self.lose_process()
        self.start()

    @rule(days=st.integers(0, 3))
    def clean(self, days: int) -> None:
        self.bus.clock.advance(days * 86_400.0)
        self.loop.run_until_complete(self.bus.broker.clean())

    @precondition(lambda self: "data/state/checkpoint" in self.files.paths())
    @rule(content=st.sampled_from([b"", b"\0" * 20, None]))
    def damage_the_checkpoint(self, content: bytes | None) -> None:
        if content is None:
            self.files.unlink("data/state/checkpoint")
        else:
            self.files.content("data/state/checkpoint")[:] = content

    @invariant()
    def memory_is_the_model(self) -> None:
        assert tree(self.state) == self.now
        assert len(self.state) == len(self.now)
        for node, names in children_of(set(self.now)).items():
            assert sorted(self.state.children("/".join(node) if node else None)) == sorted(names)

    def teardown(self) -> None:
        self.loop.run_until_complete(self.bus.die())
        self.loop.close()


TestAnything = StateMachine.TestCase
TestAnything.settings = settings(
    deadline=None, max_examples=25, stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
