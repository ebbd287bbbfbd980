"""The log behind the state: what a start loads, with and without a checkpoint, and when a checkpoint is believed."""

import errno
import logging

import msgspec
import pytest

from babelbus.core.receipt import Promise, Receipt
from babelbus.core.state.key_index import KeyPattern
from babelbus.core.state.log import Kept, Kind
from babelbus.core.state.tree import State, Testament
from babelbus.errors import StorageError
from babelbus.storage.contract import Fit
from babelbus.storage.disk import FolderStore
from babelbus.storage.memory import MemoryFiles
from tests.storage.faults import FaultyFiles
from tests.support.bus import NOW, Bus, Gate, disk_log, done, in_loop, read, turns
from tests.support.clock import ManualClock

CHECKPOINT = "data/state/checkpoint"
TREE = {"a/b": (b"1", 0), "versioned": (b'"two"', 2), "ü": (b"{}", 0)}
WILL = Testament((KeyPattern(("goods",)),), (("will", msgspec.Raw(b"1")),))


def tree(state: State) -> dict[str, tuple[bytes, int]]:
    return {key: (value, version) for key, value, version in state.entries(KeyPattern((), rest=True))}


async def settle(state: State) -> Promise:
    return (await done([state.commit("test")]))[0]


async def filled(files: FaultyFiles, **settings: object) -> Bus:
    """A bus whose state is `TREE`, one key of it changed again and again."""
    bus = Bus(files)
    state = bus.open_state(**settings)  # type: ignore[arg-type]
    for number in range(20):
        state.set("gone", b"%d" % number)
        await settle(state)
    state.delete("gone")
    for key, (value, version) in TREE.items():
        state.put(key, value, version)
    state.set("$SYS/x", b"1")
    await settle(state)
    return bus


async def reopened(bus: Bus, *, files: FaultyFiles | None = None) -> tuple[Bus, State]:
    """Kill the server and start it again."""
    await bus.die()
    kept = files or bus.files
    assert isinstance(kept, FaultyFiles)
    kept.kill()
    again = Bus(kept)
    return again, again.open_state()


@in_loop
async def test_records_have_the_source_and_the_version_as_headers_and_transient_keys_have_none() -> None:
    bus = await filled(FaultyFiles())
    records = read(bus.broker.topic("$state").partition(0))[20:]
    assert [(one.key, one.payload, one.headers) for one in records] == [
        (b"gone", None, ((b"ce_source", b"test"),)),
        (b"a/b", b"1", ((b"ce_source", b"test"),)),
        (b"versioned", b'"two"', ((b"ce_source", b"test"), (b"version", b"2"))),
        ("ü".encode(), b"{}", ((b"ce_source", b"test"),)),
    ]


@in_loop
async def test_plain_changes_are_stored_as_others_are() -> None:
    bus = Bus()
    state = bus.open_state()
    for number in range(40):
        state.set(f"k/{number}", b"%d" % number)
    await settle(state)
    state.set("k/0", b"again")
    state.set("$not-transient", b"1")
    await settle(state)
    records = read(bus.broker.topic("$state").partition(0))
    assert [one.offset for one in records] == list(range(42))
    assert {one.headers for one in records} == {((b"ce_source", b"test"),)}
    assert [one.key for one in records[:40]] == [b"k/%d" % number for number in range(40)]
    before = tree(state)
    _, state = await reopened(bus)
    assert tree(state) == before


@in_loop
async def test_a_kill_loses_nothing_with_and_without_a_checkpoint() -> None:
    bus = await filled(FaultyFiles())
    bus, state = await reopened(bus)
    assert tree(state) == TREE
    await bus.broker.close()
    assert CHECKPOINT in bus.files.paths()  # type: ignore[attr-defined]
    bus = Bus(bus.files)
    state = bus.open_state()
    assert tree(state) == TREE
    assert state._log._bytes_since == 0
    state.set("behind", b"1")
    state.delete("ü")
    await settle(state)
    _, state = await reopened(bus)
    assert tree(state) == {key: one for key, one in TREE.items() if key != "ü"} | {"behind": (b"1", 0)}


@in_loop
async def test_a_checkpoint_torn_or_changed_at_any_byte_is_not_believed() -> None:
    bus = await filled(FaultyFiles())
    bus.broker.state.set_testament("x", WILL)
    await settle(bus.broker.state)
    state_log = bus.broker.state._log
    state_log.begin_checkpoint(bus.broker.state._values, bus.broker.state._testaments)
    assert state_log._writing is not None
    await state_log._writing
    files = bus.files
    assert isinstance(files, FaultyFiles)
    whole = bytes(files.content(CHECKPOINT))
    logging.disable(logging.WARNING)
    try:
        for at in range(len(whole)):
            for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
                files.content(CHECKPOINT)[:] = damaged
                loaded = state_log.load()
                assert loaded.values == {key: Kept(*one) if one[1] else one[0] for key, one in TREE.items()}
                assert loaded.testaments == {"x": msgspec.json.encode(WILL)}
                assert state_log._bytes_since == state_log._partition.log.size_bytes
    finally:
        logging.disable(logging.NOTSET)
    files.content(CHECKPOINT)[:] = whole
    assert state_log.load().testaments == {"x": msgspec.json.encode(WILL)}
    assert state_log._bytes_since == 0


@in_loop
async def test_a_checkpoint_of_another_format_or_ahead_of_the_log_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = FaultyFiles()
    bus = await filled(files)
    state_log = bus.broker.state._log
    monkeypatch.setattr("babelbus.core.state.log.CHECKPOINT_FORMAT", 2)
    await bus.broker.close()
    monkeypatch.undo()
    bus = Bus(files)
    state = bus.open_state()
    assert tree(state) == TREE
    await bus.broker.close()
    bus = Bus(files)
    state = bus.open_state()
    state_log = state._log
    assert state_log._bytes_since == 0
    disk_log(state_log._partition).truncate(5)
    assert state_log.load().values == {"gone": b"4"}
    await bus.die()


@in_loop
async def test_a_checkpoint_that_cannot_be_read_costs_time_and_no_value(caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    bus = await filled(files)
    await bus.broker.close()
    bus = Bus(files)
    files.fail("pread", errno.EIO, suffix="/checkpoint", times=1)
    assert tree(bus.open_state()) == TREE
    assert "cannot be read" in caplog.text


@in_loop
async def test_a_checkpoint_is_written_after_so_many_bytes_and_holds_only_what_is_durable() -> None:
    files = FaultyFiles()
    bus, gate = Bus(files), Gate(files)
    state = bus.open_state(checkpoint_bytes=200)
    gate.shut()
    state.set("k", b"1" * 300)
    receipt = state.commit("test")
    await gate.reached()
    writing = state._log._writing
    assert writing is not None
    assert CHECKPOINT not in files.paths()
    gate.open()
    await done([receipt])
    await writing
    files.power_loss(1)
    await bus.die()
    again = Bus(files).open_state()
    assert tree(again) == {"k": (b"1" * 300, 0)}
    assert again._log._bytes_since == 0


@in_loop
async def test_a_checkpoint_of_what_a_failed_flush_lost_is_not_written() -> None:
    files = FaultyFiles()
    bus, gate = Bus(files), Gate(files)
    state = bus.open_state(checkpoint_bytes=200)
    gate.shut()
    files.fail("flush", suffix=".log", drop=True)
    state.set("k", b"1" * 300)
    receipt = state.commit("test")
    writing = state._log._writing
    assert writing is not None
    await gate.reached()
    gate.open()
    await done([receipt])
    await writing
    assert receipt.error is not None
    assert CHECKPOINT not in files.paths()
    assert tree(state) == {}


@pytest.mark.parametrize("keys", [1, 2, 3])
@in_loop
async def test_a_checkpoint_of_many_blocks_holds_all_values_also_when_a_block_has_only_transient_keys(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("babelbus.core.state.log.BLOCK_KEYS", keys)
    bus = await filled(FaultyFiles())
    state = bus.broker.state
    state_log = state._log
    state_log.begin_checkpoint(state._values, {})
    writing = state_log._writing
    assert writing is not None
    state.set("a/b", b"2")  # after the snapshot: a start reads the change in the log
    await settle(state)
    await writing
    loaded = state_log._load_checkpoint()
    assert loaded is not None
    assert loaded.values == {key: Kept(*one) if one[1] else one[0] for key, one in TREE.items()}
    _, state = await reopened(bus)
    assert tree(state) == TREE | {"a/b": (b"2", 0)}


@in_loop
async def test_a_checkpoint_waits_for_the_answer_to_what_it_holds_for_lost_offsets_are_given_again() -> None:
    files = FaultyFiles()
    state = Bus(files).open_state()
    state.set("k", b"1")
    await settle(state)
    state_log = state._log
    for error in (StorageError("lost"), None):
        state_log._last = receipt = Receipt(0, 0, 1)
        state_log.begin_checkpoint(state._values, {})
        writing = state_log._writing
        assert writing is not None
        await turns()
        assert not writing.done()
        receipt.resolve(error)
        await writing
        assert (CHECKPOINT in files.paths()) is (error is None)


@pytest.mark.parametrize("operation", ["pwrite", "flush", "rename", "open"])
@in_loop
async def test_a_checkpoint_that_the_disk_refuses_leaves_nothing_and_the_last_one_stands(operation: str) -> None:
    files = FaultyFiles()
    bus = await filled(files)
    await bus.broker.close()
    whole = bytes(files.content(CHECKPOINT))
    bus = Bus(files)
    state = bus.open_state()
    state.set("k", b"1")
    await settle(state)
    files.fail(operation, errno.ENOSPC, suffix="state/checkpoint.new")
    await bus.broker.close()
    assert not files.faults
    assert files.content(CHECKPOINT) == whole
    assert f"{CHECKPOINT}.new" not in files.paths()
    assert tree(Bus(files).open_state()) == TREE | {"k": (b"1", 0)}


@in_loop
async def test_a_key_whose_tombstone_was_compacted_away_does_not_come_back_with_an_old_checkpoint() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state()
    state.set("gone", b"1")
    await bus.broker.close()  # with a checkpoint that has the key
    bus = Bus(files)
    state = bus.open_state(segment_bytes=1024)
    state.delete("gone")
    for number in range(60):
        state.set("k", b"%d" % number)
        await settle(state)
    bus.clock.advance(2 * 86_400)
    await bus.broker.clean()
    assert not any(one.key == b"gone" for one in read(bus.broker.topic("$state").partition(0)))
    assert state._log.wants_checkpoint
    _, state = await reopened(bus)
    assert tree(state) == {"k": (b"59", 0)}


@in_loop
async def test_damaged_records_are_left_out_and_the_rest_is_served(caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    bus = await filled(files)
    await bus.die()
    (path,) = [path for path in files.paths() if path.endswith(".log")]
    content = files.content(path)
    content[content.index(b"versioned") + 1] ^= 0xFF
    state = Bus(files).open_state()
    assert tree(state) == {key: one for key, one in TREE.items() if key != "versioned"}
    assert "1 damaged records were left out" in caplog.text


@in_loop
async def test_a_value_larger_than_a_chunk_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("babelbus.core.state.log.READ_BYTES", 100)
    bus = Bus()
    state = bus.open_state()
    for key in ("a", "b"):
        state.set(key, b"1" * 500)
    await settle(state)
    _, state = await reopened(bus)
    assert tree(state) == {"a": (b"1" * 500, 0), "b": (b"1" * 500, 0)}


@in_loop
async def test_testaments_are_records_that_no_key_can_be_taken_for() -> None:
    bus = Bus()
    state = bus.open_state()
    state.set_testament("x", WILL)
    await settle(state)
    state.set_testament("x", Testament())
    await settle(state)
    first, second = read(bus.broker.topic("$state").partition(0))
    assert (first.key, second.key) == (b"\xffx", b"\xffx")
    assert second.payload is None
    assert state._log.load().testaments == {}


@in_loop
async def test_a_checkpoint_of_a_member_is_not_believed_when_the_log_holds_other_records() -> None:
    def member(logs: MemoryFiles) -> tuple[Bus, State]:
        remote = FolderStore(logs, "logs", ManualClock(NOW), Fit(reads_wait=False))
        bus = Bus(files, others={"jetstream": remote})
        return bus, bus.open_state(engine="jetstream")

    files, lost = FaultyFiles(), MemoryFiles()
    bus, state = member(lost)
    state.set("k", b"1")
    await settle(state)
    await bus.broker.close()
    bus, state = member(lost)
    assert (tree(state), state._log._bytes_since) == ({"k": (b"1", 0)}, 0)
    await bus.broker.close()
    kept = bytes(files.content(CHECKPOINT))
    files.unlink(CHECKPOINT)
    other = MemoryFiles()  # what a majority of NATS forgot, another owner wrote otherwise
    bus, state = member(other)
    state.set("k", b"2")
    await settle(state)
    await bus.die()
    files.replace_file(CHECKPOINT, kept)
    _, state = member(other)
    assert tree(state) == {"k": (b"2", 0)}


@in_loop
async def test_changes_from_an_offset_on_are_remembered_with_the_entry_before_each() -> None:
    bus = await filled(FaultyFiles())
    since = bus.broker.state.told_offset
    state = bus.broker.state
    state.set("a/b", b"2")
    state.set_testament("x", WILL)
    state.compare_and_set("versioned", b"3", 2)
    state.delete("a/b")
    state.delete("versioned")
    state.set("new", b"4")
    await settle(state)
    assert state.told_offset == since + 6
    await bus.die()
    again = Bus(bus.files).open_state(since=since)
    assert again.unheard == [
        (since, (Kind.SET, "a/b", b"2", b"1", 0)),
        (since + 2, (Kind.SET, "versioned", b"3", Kept(b'"two"', 2), 3)),
        (since + 3, (Kind.DELETED, "a/b", b"2", b"2", 0)),
        (since + 4, (Kind.DELETED, "versioned", b"3", Kept(b"3", 3), 0)),
        (since + 5, (Kind.SET, "new", b"4", None, 0)),
    ]
    assert tree(again) == {"new": (b"4", 0), "ü": (b"{}", 0)}


@in_loop
async def test_a_checkpoint_behind_the_first_remembered_change_is_not_used() -> None:
    bus = await filled(FaultyFiles())
    since = bus.broker.state.told_offset
    bus.broker.state.set("a/b", b"2")
    await bus.broker.close()  # writes a checkpoint
    bus = Bus(bus.files)
    state = bus.open_state()
    state.set("a/b", b"3")
    await settle(state)
    end = state.told_offset
    await bus.die()
    for first in (since, since + 1, end):
        expected = [
            (since, (Kind.SET, "a/b", b"2", b"1", 0)),
            (since + 1, (Kind.SET, "a/b", b"3", b"2", 0)),
        ]
        loaded = state._log.load(first)
        assert loaded.unheard == expected[first - since :]
        assert loaded.values["a/b"] == b"3"


@in_loop
async def test_changes_that_the_log_has_not_or_too_many_of_them_are_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = await filled(FaultyFiles())
    state_log = bus.broker.state._log
    end = bus.broker.state.told_offset
    assert state_log.load(end).unheard == []
    assert state_log.load(end + 1).unheard is None
    assert state_log.load(end - 3).unheard != []
    monkeypatch.setattr("babelbus.core.state.log.UNHEARD_MAX", 2)
    assert state_log.load(end - 3).unheard is None
    assert len(state_log.load(end - 2).unheard or ()) == 2
    assert bus.broker.state.unheard == []


@in_loop
async def test_changes_that_compaction_has_looked_at_are_not_remembered() -> None:
    bus = Bus(FaultyFiles())
    state = bus.open_state(segment_bytes=1024)
    for number in range(60):
        state.set("k", b"%d" % number)
        await settle(state)
    bus.clock.advance(2 * 86_400)
    await bus.broker.clean()
    until = state._log._partition.log.compacted_until
    assert until > 0
    assert state._log.load(until - 1).unheard is None
    unheard = state._log.load(until).unheard
    assert unheard is not None
    assert [offset for offset, _ in unheard] == list(range(until, 60))


@in_loop
async def test_a_damaged_record_among_the_changes_ends_them(caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    bus = await filled(files)
    end = bus.broker.state.told_offset
    await bus.die()
    (path,) = [path for path in files.paths() if path.endswith(".log")]
    content = files.content(path)
    content[content.index(b"versioned") + 1] ^= 0xFF
    state = Bus(files).open_state(since=end - 3)
    assert state.unheard is None
    loaded = state._log.load(end - 1)
    assert [offset for offset, _ in loaded.unheard or ()] == [end - 1]


@in_loop
async def test_what_is_appended_and_not_told_is_not_below_the_told_offset() -> None:
    files = FaultyFiles()
    bus, gate = Bus(files), Gate(files)
    state = bus.open_state()
    state.set("a", b"1")
    await settle(state)
    assert state.told_offset == 1
    seen: list[int] = []
    state.listeners.append(lambda changes, commit: seen.append(state.told_offset))
    gate.shut()
    state.set("pending", b"1")
    receipts = [state.commit("test")]
    await gate.reached()
    state.set("b", b"1")
    receipts.append(state.commit("test"))
    assert state.told_offset == 1
    gate.open()
    await done(receipts)
    assert state.told_offset == 3
    assert seen == [1, 2]


@in_loop
async def test_all_testaments_wait_for_who_comes_back_when_changes_are_remembered() -> None:
    bus = Bus(FaultyFiles())
    state = bus.open_state()
    for owner in ("here", "gone"):
        state.set_testament(owner, Testament((), ((owner, msgspec.Raw(b"1")),)))
    await settle(state)
    end = state.told_offset
    await bus.die()
    state = Bus(bus.files).open_state(since=end)
    assert tree(state) == {}
    assert state.away == {"here", "gone"}
    heard: list[str | None] = []
    state.listeners.append(lambda changes, commit: heard.extend(change[1] for change in changes if change[0] == 0))
    state.call_back({"here"})
    await settle(state)
    assert tree(state) == {"gone": (b"1", 0)}
    assert heard == ["gone"]
    assert list(state.testaments()) == ["here"]
