"""The registry of groups: making, finding and removing them, and cursors that survive a stop, a crash and bad disks."""

import asyncio
import errno
import heapq
import tempfile
import threading
from collections.abc import Callable

import msgspec
import pytest

from babelbus.core.access import SERVER
from babelbus.core.catalog import UnknownTopicError
from babelbus.core.groups.cursor_files import GroupFile, StoredCursor, StoredGroup
from babelbus.core.groups.registry import Groups
from babelbus.core.groups.settings import (
    BEGINNING,
    END,
    GroupClosedError,
    GroupExistsError,
    GroupSettings,
    InvalidGroupNameError,
    UnknownFilterError,
    UnknownGroupError,
    at_offset,
)
from babelbus.core.receipt import Promise
from babelbus.core.settings import InvalidSettingError
from babelbus.core.work import Writer
from babelbus.errors import StorageError
from babelbus.storage.contract import Fit
from babelbus.storage.files import LocalFiles
from babelbus.storage.notes import DamagedNoteError
from tests.core.groups.support import EXPLICIT, Crew, Taker, take
from tests.storage.faults import FaultyFiles
from tests.support.bus import SAFETY_NET_SECONDS, Bus, disk_log, in_loop, publish_payloads, turns
from tests.support.clock import ManualClock

ON_DELIVERY = GroupSettings()


@in_loop
async def test_a_group_is_made_found_and_removed() -> None:
    crew = Crew()
    group = crew.groups.create("work", "g", EXPLICIT, principal=SERVER)
    with pytest.raises(GroupExistsError):
        crew.groups.create("work", "g", principal=SERVER)
    crew.bus.topic("other")
    crew.groups.create("other", "g", principal=SERVER)
    assert crew.groups.get("work", "g") is group
    assert crew.groups.ensure("work", "g", ON_DELIVERY, principal=SERVER) is group
    assert [one.topic.name for one in crew.groups.all()] == ["other", "work"]
    assert crew.groups.on_topic("work") == [group]
    taker = Taker(group)
    crew.groups.remove("work", "g", principal=SERVER)
    assert [type(error) for error in taker.errors] == [GroupClosedError]
    with pytest.raises(GroupClosedError):
        Taker(group)
    with pytest.raises(UnknownGroupError):
        crew.groups.get("work", "g")
    assert crew.groups.find("work", "g") is None
    await crew.groups.commit()
    again = await crew.crash()
    assert [one.topic.name for one in again.groups.all()] == ["other"]
    await again.close()


@in_loop
async def test_what_a_group_cannot_be_is_refused() -> None:
    crew = Crew()
    with pytest.raises(UnknownTopicError):
        crew.groups.create("nowhere", "g", principal=SERVER)
    for name in ("", "a\nb", "x" * 250):
        with pytest.raises(InvalidGroupNameError):
            crew.groups.create("work", name, principal=SERVER)
    with pytest.raises(UnknownFilterError):
        crew.groups.create("work", "g", GroupSettings(filter="a.*", filter_kind="unheard of"), principal=SERVER)
    with pytest.raises(InvalidSettingError):
        crew.groups.create("work", "g", GroupSettings(dead_letter_topic="work"), principal=SERVER)
    with pytest.raises(InvalidSettingError):
        crew.groups.create("work", "g", GroupSettings(dead_letter_topic="a,b"), principal=SERVER)
    for name in ("$state", "$new"):
        with pytest.raises(InvalidSettingError, match="server's own"):
            crew.groups.create("work", "g", GroupSettings(dead_letter_topic=name), principal=SERVER)
    assert crew.groups.all() == []
    await crew.close()


@in_loop
async def test_the_event_loop_goes_round_while_a_disk_holds_a_change_of_groups() -> None:
    files, gate = FaultyFiles(), threading.Event()
    crew = Crew(files)
    taker = Taker(crew.group(name="other"))
    await crew.groups.commit()
    crew.bus.disk.fit = Fit(reads_wait=True)  # as a real disk

    def hold(operation: str, path: str) -> None:
        assert "groups." not in path or gate.wait(SAFETY_NET_SECONDS)

    files.before_call = hold
    for change in (
        lambda: crew.groups.create("work", "g", principal=SERVER),
        lambda: crew.groups.alter("work", "g", {"ack_seconds": 7.0}, principal=SERVER),
        lambda: crew.groups.get("work", "g").seek(BEGINNING, SERVER),
        lambda: crew.groups.remove("work", "g", principal=SERVER),
    ):
        gate.clear()
        change()
        saved = crew.groups.saved()
        crew.publish(1)
        await turns()
        assert (taker.clear(), saved.done) == ([1], False)
        gate.set()
        await saved.wait()
    await crew.close()


@in_loop
async def test_settings_are_altered_durably_and_the_mode_is_not() -> None:
    crew = Crew()
    group = crew.group(EXPLICIT)
    taker = Taker(group)
    crew.publish(1, 2)
    await turns()
    with pytest.raises(InvalidSettingError):
        crew.groups.alter("work", "g", {"ack": "on_delivery"}, principal=SERVER)
    with pytest.raises(InvalidSettingError):
        crew.groups.alter("work", "g", {"attempts_max": 0}, principal=SERVER)
    with pytest.raises(InvalidSettingError):
        crew.groups.alter("work", "g", {"color": "red"}, principal=SERVER)
    crew.groups.alter("work", "g", {"filter": "", "filter_kind": "odd", "labels": {"zbus.mask": "2"}}, principal=SERVER)
    crew.publish(3, 4)
    await turns()
    assert taker.numbers == [1, 2, 3]
    await crew.groups.commit()
    again = await crew.crash()
    settings = again.group().settings
    assert (settings.filter_kind, settings.labels, settings.ack) == ("odd", {"zbus.mask": "2"}, "explicit")
    await again.close()


@in_loop
async def test_a_stop_in_order_brings_nothing_again_and_skips_nothing() -> None:
    crew = Crew(partitions=2)
    explicit, simple = crew.group(EXPLICIT), crew.group(ON_DELIVERY, name="s")
    taker, other = Taker(explicit), Taker(simple, credit=7)
    crew.publish(*range(20))
    await turns(6)
    done = [one for one in taker.got if int(one.payload or b"") % 3]
    taker.member.ack(done)
    again = await crew.restart()
    taker, rest = Taker(again.group()), Taker(again.group(name="s"))
    again.publish(20)
    await turns(6)
    assert sorted(taker.numbers) == [0, 3, 6, 9, 12, 15, 18, 20]
    assert sorted(other.numbers + rest.numbers) == list(range(21))
    await again.close()


@in_loop
async def test_a_crash_brings_again_what_was_acked_since_the_last_commit_and_nothing_else() -> None:
    crew = Crew()
    group = crew.group(EXPLICIT)
    taker = Taker(group)
    crew.publish(*range(10))
    await turns()
    taker.member.ack(taker.got[:4])
    taker.member.ack(taker.got[6:7])
    await crew.groups.commit()
    taker.member.ack(taker.got[4:6])
    again = await crew.crash()
    taker = Taker(again.group())
    await turns()
    assert taker.numbers == [4, 5, 7, 8, 9]
    assert again.group().info().cursors[0].committed == 4
    await again.close()


@in_loop
async def test_acks_out_of_order_are_kept_over_two_crashes() -> None:
    crew = Crew()
    taker = Taker(crew.group(EXPLICIT))
    crew.publish(*range(6))
    await turns()
    taker.member.ack(taker.got[2:3] + taker.got[4:5])
    await crew.groups.commit()
    for _ in range(2):
        crew = await crew.crash()
        taker = Taker(crew.group(), window=1)  # the chunk is read, and handed out in part
        await turns()
        assert taker.numbers == [0]
        assert crew.group().info().lag == 4
        await crew.groups.commit()
    taker = Taker(crew.group())
    await turns()
    assert taker.numbers == [1, 3, 5]
    await crew.close()


@in_loop
async def test_cursors_are_saved_by_themselves_and_only_when_something_changed() -> None:
    files = FaultyFiles()
    crew = Crew(files)
    crew.groups = Groups(
        crew.broker, files, "data", clock=crew.clock, loop=asyncio.get_running_loop(), commit_seconds=0.001
    )
    crew.groups.create("work", "g", start=BEGINNING, principal=SERVER)
    saved = asyncio.Event()
    loop = asyncio.get_running_loop()
    writes: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "rename" and "groups." in path:
            writes.append(path)
            loop.call_soon_threadsafe(saved.set)

    await crew.groups.commit()
    files.before_call = note
    Taker(crew.groups.get("work", "g"))
    crew.publish(1)
    await saved.wait()
    await crew.groups.commit()
    count = len(writes)
    await crew.groups.commit()
    assert len(writes) == count
    await crew.close()


class PacedLoop:
    """An event loop whose timers, and writes of `write_seconds`, end when a test advances the clock."""

    def __init__(self, clock: ManualClock, write_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._write_seconds = write_seconds
        self._due: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)

    def call_later(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        at = self._clock.monotonic() + seconds
        handle = asyncio.TimerHandle(at, call, (), self._loop)
        self._count += 1
        heapq.heappush(self._due, (at, self._count, handle))
        return handle

    def run_in_executor(self, _: None, work: Callable[[], None]) -> "asyncio.Future[None]":
        future = self._loop.create_future()

        def finish() -> None:
            work()
            future.set_result(None)

        self.call_later(self._write_seconds, finish)
        return future

    async def advance(self, seconds: float) -> None:
        end = self._clock.monotonic() + seconds
        while self._due and self._due[0][0] <= end:
            at, _, handle = heapq.heappop(self._due)
            self._clock.advance(at - self._clock.monotonic())
            if not handle.cancelled():
                handle._run()
            await turns(3)
        self._clock.advance(end - self._clock.monotonic())


@in_loop
async def test_an_ack_is_durable_within_commit_seconds_if_a_write_takes_less_than_half_of_that() -> None:
    crew = Crew()
    loop = PacedLoop(crew.clock, write_seconds=0.45)
    crew.broker.writer = lambda what, prepare: Writer(what, prepare, lambda write: loop.run_in_executor(None, write))  # type: ignore[method-assign]
    crew.groups = Groups(crew.broker, crew.files, "data", clock=crew.clock, loop=loop, commit_seconds=1.0)  # type: ignore[arg-type]
    taker = Taker(crew.group(EXPLICIT))
    crew.publish(*range(200))
    await turns()
    await loop.advance(2)
    acked_at: list[float] = []
    for delivery in taker.got:
        acked_at.append(crew.clock.monotonic())
        taker.member.ack([delivery])
        await loop.advance(0.031)
        (stored,) = GroupFile(crew.files, "data").load()[1]
        late = crew.clock.monotonic() - 1.0
        assert stored.cursors[0].committed >= sum(at <= late for at in acked_at)
    closing = asyncio.ensure_future(crew.close())
    while not closing.done():
        await loop.advance(1)
        await turns()


@in_loop
async def test_a_disk_that_refuses_a_commit_is_tried_again() -> None:
    files = FaultyFiles()
    crew = Crew(files)
    Taker(crew.group(ON_DELIVERY))
    await crew.groups.commit()
    changed_at = asyncio.get_running_loop().time()
    assert crew.groups.saved_at >= changed_at
    crew.publish(1)
    await turns()
    files.fail("flush", suffix=".new")
    with pytest.raises(StorageError):
        await crew.groups.commit()
    assert crew.groups.saved_at < changed_at
    await crew.groups.commit()
    assert crew.groups.saved_at >= changed_at
    again = await crew.crash()
    assert again.group().info().lag == 0
    await again.close()


@in_loop
async def test_a_group_that_cannot_be_saved_is_not_made_and_not_removed() -> None:
    files = FaultyFiles()
    crew = Crew(files)
    crew.group(name="kept")
    crew.publish(1, 2)
    operations: tuple[Callable[[], Promise], ...] = (
        lambda: crew.groups.create("work", "new", principal=SERVER).saved,
        lambda: crew.groups.remove("work", "kept", principal=SERVER),
        lambda: crew.groups.alter("work", "kept", {"ack_seconds": 7.0}, principal=SERVER).saved,
    )
    for operation in operations:
        await crew.groups.commit()
        files.fail("flush", suffix=".new")
        with pytest.raises(StorageError):
            await operation().wait()
    [kept] = crew.groups.all()
    assert (kept.name, kept.closed, kept.settings.ack_seconds, kept.info().lag) == ("kept", False, 30, 2)
    again = await crew.restart()
    assert [group.name for group in again.groups.all()] == ["kept"]
    await again.close()


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_file_that_cannot_be_read_leaves_the_one_before_it(damaged: int, refused: bool) -> None:
    @in_loop
    async def test() -> None:
        files = FaultyFiles()
        crew = Crew(files)
        taker = Taker(crew.group(EXPLICIT))
        crew.publish(*range(4))
        for _ in range(2):
            await turns()
            taker.member.ack(taker.got[:1])
            del taker.got[0]
            await crew.groups.commit()
        await crew.close()
        if refused:
            files.fail("open", errno.EIO, suffix=f"groups.{damaged}")
        else:
            files.content(f"data/groups.{damaged}")[-7] ^= 1
        again = Crew(files)
        assert again.group().info().cursors[0].committed in (1, 2)
        await again.groups.commit()
        await again.close()
        assert Crew(files).group().info().cursors[0].committed in (1, 2)

    test()


@in_loop
async def test_two_damaged_files_stop_the_start_and_are_named() -> None:
    files = FaultyFiles()
    crew = Crew(files)
    crew.group()
    crew.group(name="h")
    await crew.close()
    for name in crew.saved():
        files.content(f"data/{name}")[-7] ^= 1
    with pytest.raises(DamagedNoteError, match=r"groups\.0 and data/groups\.1"):
        Crew(files)


@in_loop
async def test_the_groups_of_a_topic_with_damaged_settings_are_kept_until_it_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = FaultyFiles()
    crew = Crew(files)
    crew.bus.topic("other")
    crew.groups.create("other", "h", principal=SERVER)
    taker = Taker(crew.group())
    crew.publish(1, 2, 3)
    await turns()
    taker.member.ack(taker.got[:2])
    await crew.close()
    settings = bytes(files.content("data/topics/work/settings.json"))
    files.content("data/topics/work/settings.json")[20] ^= 0x80
    broken = Bus(files)
    groups = Groups(broken.broker, files, "data", clock=broken.clock, loop=broken.broker._loop)
    groups.open()
    with monkeypatch.context() as patch:
        patch.delattr("babelbus.core.groups.registry._encode")  # for each write would be too often
        groups.remove("other", "h", principal=SERVER)  # so all are written anew
        await groups.close()
    await broken.broker.close()
    files.replace_file("data/topics/work/settings.json", settings)
    again = Crew(files)
    assert again.groups.find("other", "h") is None
    assert again.groups.get("work", "g").info().cursors[0].committed == 2
    await again.close()


@in_loop
async def test_a_loss_of_power_leaves_the_cursors_of_a_commit() -> None:
    for seed in range(20):
        files = FaultyFiles()
        crew = Crew(files)
        taker = Taker(crew.group(EXPLICIT))
        crew.publish(*range(6))
        await turns()
        taker.member.ack(taker.got[:2])
        await crew.groups.commit()
        taker.member.ack(taker.got[2:4])
        files.fail("rename", suffix=".new")
        with pytest.raises(StorageError):
            await crew.groups.commit()
        files.power_loss(seed)
        again = Crew(files)
        # The records were `written` alone: those that the power took are not waited for.
        end = again.broker.topic("work").partitions[0].high_watermark
        assert again.group().info().cursors[0].committed == min(2, end)


@in_loop
async def test_cursors_are_not_trusted_against_a_log_that_lost_its_end() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    taker = Taker(group)
    crew.publish(*range(5))
    await turns()
    await crew.groups.commit()
    disk_log(crew.broker.topic("work").partitions[0]).truncate(3)
    again = await crew.crash()
    taker = Taker(again.group())
    again.publish(9)
    await turns()
    assert taker.numbers == [9]
    await again.close()


@in_loop
async def test_readers_that_were_stepped_back_do_not_miss_what_comes_then() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    taker = Taker(group)
    crew.publish(*range(5))
    await turns()
    partition = crew.broker.topic("work").partitions[0]
    disk_log(partition).truncate(3)
    partition.flushed(-1, StorageError("the flush failed"))
    group.wake()
    await turns()
    crew.publish(7, 8)
    await turns()
    assert taker.numbers == [0, 1, 2, 3, 4, 7, 8]
    await crew.close()


@in_loop
async def test_a_topic_in_memory_begins_anew_and_so_do_its_cursors() -> None:
    files = FaultyFiles()
    crew = Crew(files)
    crew.bus.topic("fleeting", engine="memory")
    group = crew.groups.create("fleeting", "g", start=BEGINNING, principal=SERVER)
    publish_payloads(crew.broker.topic("fleeting"), [b"1", b"2"], [0, 0])
    assert len(take(group, 2)) == 2
    again = await crew.restart()
    group = again.groups.get("fleeting", "g")
    publish_payloads(again.broker.topic("fleeting"), [b"3"], [0])
    assert [one.payload for one in take(group, 5)] == [b"3"]
    await again.close()


@in_loop
async def test_a_group_whose_protocol_is_switched_off_stands_still_and_keeps_its_place() -> None:
    crew = Crew()
    group = crew.group(GroupSettings(filter="", filter_kind="odd"))
    crew.publish(*range(4))
    await turns()
    assert [int(one.payload or b"") for one in take(group, 1)] == [1]
    again = await crew.restart()
    del again.groups._factories["odd"]
    with pytest.raises(UnknownFilterError):
        Taker(again.group())
    with pytest.raises(UnknownFilterError):
        take(again.group(), 1)
    assert again.group().info().cursors[0].position == 3  # the next record that the filter wants
    await again.close()


@in_loop
async def test_totals_count_groups_that_are_gone() -> None:
    crew = Crew()
    group = crew.group(ON_DELIVERY)
    crew.publish(*range(3))
    take(group, 2)
    crew.groups.remove("work", "g", principal=SERVER)
    take(crew.group(ON_DELIVERY, start=at_offset(1)), 1)
    assert crew.groups.totals().delivered == 3
    await crew.close()


@in_loop
async def test_groups_on_real_files_survive_a_stop() -> None:
    with tempfile.TemporaryDirectory() as folder:
        crew, files, loop = Crew(), LocalFiles(), asyncio.get_running_loop()
        groups = Groups(crew.broker, files, folder, clock=crew.clock, loop=loop)
        groups.create("work", "g", EXPLICIT, start=END, principal=SERVER)
        await groups.close()
        again = Groups(crew.broker, files, folder, clock=crew.clock, loop=loop)
        again.open()
        assert again.get("work", "g").settings == EXPLICIT
        await again.close()
        await crew.close()


def test_the_stored_form_of_a_group_keeps_its_field_names() -> None:
    group = StoredGroup("work", "g", ON_DELIVERY, paused=False, created_ms=1, cursors={0: StoredCursor(2, [(3, 4)])})
    content = msgspec.json.decode(msgspec.json.encode(group))
    assert list(content) == ["topic", "name", "settings", "paused", "created_ms", "lanes", "owner"]
    assert content["lanes"] == {"0": [2, [[3, 4]]]}
