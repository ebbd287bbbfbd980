"""The state as it was: exact, or refused with the earliest moment that is known."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.core.state.differences import Revision
from babelbus.core.state.history import AsOf, History, HistoryGoneError
from babelbus.core.state.key_index import KeyPattern
from babelbus.core.state.tree import NoSuchKeyError, State, Testament
from babelbus.records.format import CorruptRecordError
from babelbus.storage.errors import OffsetOutOfRangeError
from tests.core.state.test_key_index import keys as some_keys
from tests.core.state.test_key_index import pattern, patterns
from tests.core.state.test_tree import Stored, raw
from tests.storage.faults import FaultyFiles
from tests.support.bus import NOW, Bus, done, in_loop

EVERYTHING = KeyPattern((), rest=True)
SECOND = 1000


def history_of(bus: Bus) -> History:
    return History(bus.broker.topic("$state"))


async def commit(state: State, source: str = "me") -> None:
    (receipt,) = await done([state.commit(source)])
    assert receipt.error is None


async def told() -> Bus:
    """A bus whose key `k` became 0, 1, 2, ... a second each, was deleted, and became a value with a version."""
    bus = Bus()
    state = bus.open_state()
    for number in range(4):
        state.set("k", b"%d" % number)
        await commit(state, f"source-{number}")
        bus.clock.advance(1)
    state.set("a/b", b"1")
    state.delete("k")
    await commit(state)
    bus.clock.advance(1)
    state.compare_and_set("k", b"9", 0)
    state.set("$SYS/x", b"1")
    state.set_testament("me", Testament((), (("will", raw("1")),)))
    await commit(state)
    return bus


@in_loop
@pytest.mark.parametrize("checkpoint", [True, False])
async def test_keys_secret_to_some_processes_that_an_older_version_kept_are_not_shown(checkpoint: bool) -> None:
    bus = Bus()
    state, secret = bus.open_state(), "!/cred/1/2/3/x"
    for number in range(2):
        state.set(secret, b"%d" % number)  # today no door lets it through
        state.set("open", b"%d" % number)
        await commit(state)
    if checkpoint:
        await bus.broker.close()
    else:
        await bus.die()
    again = Bus(bus.files, clock=bus.clock)
    state, history = again.open_state(), history_of(again)
    assert [key for key, _ in state.match(EVERYTHING)] == ["open"]
    assert state.children(None) == ["open"]
    moment = AsOf(offset=1)
    assert await history.match(None, moment) == await history.match(EVERYTHING, moment) == [("open", b"0", 0)]
    with pytest.raises(NoSuchKeyError):
        await history.get(secret, moment)
    assert (await history.revisions(secret))[0] == []
    differences = await history.differences(EVERYTHING, moment, None, count=10)
    assert [row.key for row in differences.rows] == ["open"]
    assert again.broker.topic("$state").partitions[0].next_offset == 4  # the records are left alone
    await again.broker.close()


@in_loop
async def test_a_value_is_what_it_was_after_each_offset() -> None:
    history = history_of(await told())
    for number in range(4):
        assert await history.get("k", AsOf(offset=number)) == (b"%d" % number, 0)
    with pytest.raises(NoSuchKeyError):
        await history.get("k", AsOf(offset=5))
    assert await history.get("k", AsOf(offset=6)) == (b"9", 1)
    with pytest.raises(NoSuchKeyError):
        await history.get("a/b", AsOf(offset=3))
    assert await history.get("a/b", AsOf(offset=4)) == (b"1", 0)


@in_loop
async def test_a_value_is_what_it_was_at_each_time() -> None:
    history = history_of(await told())
    with pytest.raises(NoSuchKeyError):
        await history.get("k", AsOf(time_ms=NOW - 1))
    for number in range(4):
        for within in (0, 1, 999):
            assert await history.get("k", AsOf(time_ms=NOW + number * SECOND + within)) == (b"%d" % number, 0)
    with pytest.raises(NoSuchKeyError):
        await history.get("k", AsOf(time_ms=NOW + 4 * SECOND))
    assert await history.get("k", AsOf(time_ms=NOW + 10_000 * SECOND)) == (b"9", 1)


@in_loop
async def test_a_pattern_and_the_tree_show_what_there_was() -> None:
    history = history_of(await told())
    assert await history.match(None, AsOf(offset=3)) == [("k", b"3", 0)]
    assert sorted(await history.match(None, AsOf(offset=4))) == [("a/b", b"1", 0), ("k", b"3", 0)]
    assert await history.match(pattern("a/#"), AsOf(offset=4)) == [("a/b", b"1", 0)]
    assert await history.match(pattern("?"), AsOf(offset=6)) == [("k", b"9", 1)]
    assert await history.match(pattern("x/?"), AsOf(offset=6)) == []


@in_loop
async def test_all_changes_of_a_key_are_told_with_time_version_and_source() -> None:
    history = history_of(await told())
    found, complete_from = await history.revisions("k")
    assert complete_from == 0
    assert found == [
        *(Revision(at, NOW + at * SECOND, b"%d" % at, 0, f"source-{at}") for at in range(4)),
        Revision(5, NOW + 4 * SECOND, None, 0, "me"),
        Revision(6, NOW + 5 * SECOND, b"9", 1, "me"),
    ]
    assert await history.revisions("nothing") == ([], 0)


@in_loop
async def test_changes_of_a_key_come_the_newest_pages_first(monkeypatch: pytest.MonkeyPatch) -> None:
    history = history_of(await told())
    page, _ = await history.revisions("k", count_max=2)
    assert [one.offset for one in page] == [5, 6]
    page, _ = await history.revisions("k", before=page[0].offset, count_max=3)
    assert [one.offset for one in page] == [1, 2, 3]
    monkeypatch.setattr("babelbus.core.state.history.REVISIONS_BYTES_MAX", 2)
    page, _ = await history.revisions("k", before=4)
    assert [one.offset for one in page] == [2, 3]


@pytest.mark.parametrize("offset", [-1, 8, 100])
@in_loop
async def test_an_offset_that_has_not_come_yet_is_refused(offset: int) -> None:
    history = history_of(await told())
    with pytest.raises(OffsetOutOfRangeError):
        await history.get("k", AsOf(offset=offset))


@pytest.mark.parametrize("both", [{}, {"offset": 1, "time_ms": 1}])
def test_a_moment_is_an_offset_or_a_time(both: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="as of"):
        AsOf(**both)


@in_loop
async def test_what_compaction_has_gone_past_is_refused_with_the_earliest_moment_that_is_known() -> None:
    bus = Bus()
    state = bus.open_state(segment_bytes=1024)
    for number in range(100):
        state.set("k", b"%d" % number)
        await commit(state)
        bus.clock.advance(1)
    history = history_of(bus)
    assert await history.earliest() == (-1, NOW)
    assert await history.get("k", AsOf(offset=7)) == (b"7", 0)
    await bus.broker.clean()
    earliest, time_ms = await history.earliest()
    assert (earliest, time_ms) == (99, NOW + 99 * SECOND)
    for asked in (
        history.get("k", AsOf(offset=7)),
        history.get("k", AsOf(offset=98)),
        history.match(None, AsOf(time_ms=NOW + 98 * SECOND)),
        history.match(EVERYTHING, AsOf(time_ms=NOW - 1)),
    ):
        with pytest.raises(HistoryGoneError, match=r"earliest is offset 99 \(2023-11-14T22:14:59\+00:00\)") as caught:
            await asked
        assert (caught.value.offset, caught.value.time_ms) == (99, time_ms)
    assert await history.match(None, AsOf(time_ms=NOW + 99 * SECOND)) == [("k", b"99", 0)]
    found, complete_from = await history.revisions("k")
    assert complete_from == 100
    assert [one.offset for one in found][-1] == 99
    again = await bus.restart()
    again.open_state(segment_bytes=1024)
    with pytest.raises(HistoryGoneError):
        await history_of(again).get("k", AsOf(offset=98))


@in_loop
async def test_what_is_younger_than_the_setting_can_be_asked_for_after_compaction() -> None:
    bus = Bus()
    state = bus.open_state(segment_bytes=1024, compact_after_seconds=60.0)
    for number in range(200):
        state.set("k", b"%d" % number)
        await commit(state)
        bus.clock.advance(1)
    await bus.broker.clean()
    history = history_of(bus)
    earliest, _ = await history.earliest()
    assert 100 < earliest < 140
    for number in range(earliest, 200):
        assert await history.get("k", AsOf(offset=number)) == (b"%d" % number, 0)
        assert await history.get("k", AsOf(time_ms=NOW + number * SECOND)) == (b"%d" % number, 0)
    with pytest.raises(HistoryGoneError):
        await history.get("k", AsOf(offset=earliest - 1))


@in_loop
async def test_compaction_that_comes_past_while_an_answer_is_read_makes_it_a_refusal() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state(segment_bytes=1024)
    for number in range(100):
        state.set("k", b"%d" % number)
        await commit(state)
    log = bus.broker.topic("$state").partition(0).log
    cleaned = False

    def clean_once(operation: str, path: str) -> None:
        nonlocal cleaned
        if operation == "pread" and not cleaned:
            cleaned = True
            log.clean(NOW)

    files.before_call = clean_once
    with pytest.raises(HistoryGoneError):
        await history_of(bus).get("k", AsOf(offset=90))
    assert cleaned


@in_loop
async def test_a_damaged_record_that_may_be_the_one_is_not_passed_over() -> None:
    bus = await told()
    files = bus.files
    assert isinstance(files, FaultyFiles)
    (path,) = [path for path in files.paths() if path.endswith(".log")]
    content = files.content(path)
    content[content.index(b"source-2")] ^= 1
    history = history_of(bus)
    with pytest.raises(CorruptRecordError):
        await history.get("k", AsOf(offset=6))
    with pytest.raises(CorruptRecordError):
        await history.revisions("k")
    assert await history.get("k", AsOf(offset=1)) == (b"1", 0)


@in_loop
async def test_only_what_is_durable_is_history() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state()
    state.set("k", b"1")
    await commit(state)
    files.fail("flush", suffix=".log", drop=True)
    state.set("k", b"2")
    await done([state.commit("me")])
    history = history_of(bus)
    assert (await history.revisions("k"))[0] == [Revision(0, NOW, b"1", 0, "me")]
    with pytest.raises(OffsetOutOfRangeError):
        await history.get("k", AsOf(offset=1))


Step = tuple[str, bytes | None, int]


@given(
    st.lists(st.tuples(some_keys, st.none() | st.binary(min_size=1, max_size=80), st.integers(0, 2)), max_size=60),
    st.lists(st.integers(1, 60), max_size=2),
    st.sampled_from([None, 5.0]),
    st.integers(-1, 70),
    patterns,
)
@settings(deadline=None, max_examples=60)
def test_every_answer_is_what_was_true_or_a_refusal(
    steps: list[Step], cleanings: list[int], compact_after_seconds: float | None, asked: int, wanted: KeyPattern
) -> None:
    async def run() -> None:
        bus = Bus()
        state = bus.open_state(segment_bytes=1024, compact_after_seconds=compact_after_seconds, ack="written")
        model: Stored = {}
        after: list[Stored] = []  # by offset
        times: list[int] = []
        for number, (key, value, version) in enumerate(steps):
            if value is not None:
                state.put(key, value, version)
                model[key] = (value, version)
            elif key in model:
                state.delete(key)
                del model[key]
            if state._pending:
                after.append(dict(model))
                times.append(bus.clock.now_ms())
            state.commit("me")
            bus.clock.advance(version)
            if number in cleanings:
                await bus.broker.clean()
        history = history_of(bus)
        earliest, _ = await history.earliest()
        for moment, at in [
            (AsOf(offset=asked), asked),
            (AsOf(time_ms=NOW + asked * SECOND), sum(time <= NOW + asked * SECOND for time in times) - 1),
        ]:
            if moment.offset is not None and not 0 <= asked < len(after):
                with pytest.raises(OffsetOutOfRangeError):
                    await history.match(None, moment)
                continue
            questions: list[Coroutine[Any, Any, Any]] = [history.match(None, moment), history.match(wanted, moment)]
            answers = await asyncio.gather(*questions, return_exceptions=True)
            if at < earliest:
                assert all(isinstance(answer, HistoryGoneError) for answer in answers)
                continue
            then = after[at] if at >= 0 else {}
            whole, matching = answers
            assert isinstance(whole, list)
            assert isinstance(matching, list)
            assert {key: (value, version) for key, value, version in whole} == then
            assert {key for key, _, _ in matching} == {key for key in then if wanted.matches(key)}
            for key in {key for key, _, _ in steps[:5]}:
                if key in then:
                    assert await history.get(key, moment) == then[key]
                else:
                    with pytest.raises(NoSuchKeyError):
                        await history.get(key, moment)
        await bus.die()

    asyncio.run(run())
