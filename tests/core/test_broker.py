"""Topics come, change, go and come back after a restart; events find the topic that records them."""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Sequence

import pytest

from babelbus.core.access import SERVER, AccessRefusedError, Identity, Rights
from babelbus.core.catalog import TopicExistsError, UnknownTopicError
from babelbus.core.partition import TopicClosedError
from babelbus.core.publish import NO_PRODUCER, Bodies, Content, Publication
from babelbus.core.receipt import DONE, Promise
from babelbus.core.record import Event
from babelbus.core.settings import InvalidSettingError, TopicSettings
from babelbus.core.subject import EVERYTHING, exactly
from babelbus.core.topic import ClosedTopicError, event_of
from babelbus.errors import InvalidTopicNameError, StorageError
from babelbus.records.columns import decode_chunk, iterate
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import batch_bodies, encode_batch
from babelbus.records.record import Record
from babelbus.storage.contract import PARTITIONS_MAX, Fit, LogSettings, Store
from babelbus.storage.disk.store import SETTINGS_NAME, FolderStore
from babelbus.storage.errors import DiskError, DiskFullError, TooManyFilesError
from babelbus.storage.memory import MemoryFiles
from tests.storage.faults import FaultyFiles
from tests.support.bus import (
    NOW,
    SAFETY_NET_SECONDS,
    Bus,
    Gate,
    batch,
    done,
    events,
    in_loop,
    payloads,
    publish,
    publish_payloads,
    read,
    turns,
)
from tests.support.clock import ManualClock

# -- making ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_topic_is_there_after_a_restart_with_its_settings_and_records() -> None:
    bus = Bus()
    topic = bus.topic("a/b", 2, ack="written", retention_bytes=10_000, cleanup="compact")
    await done(publish(topic, events(b"0", b"1", b"2", subject="a/b")))
    stored = [payloads(one) for one in topic.partitions]
    bus = await bus.restart()
    topic = bus.broker.topic("a/b")
    assert topic.settings == TopicSettings(ack="written", retention_bytes=10_000, cleanup="compact")
    assert [payloads(one) for one in topic.partitions] == stored
    await bus.broker.close()


@in_loop
async def test_what_is_too_long_for_a_key_is_recorded_and_not_retained() -> None:
    bus = Bus()
    state = bus.open_state(key_bytes_max=300)
    bus.topic("kept", retain="last")
    fits, over = "kept/" + "x" * 295, "kept/" + "x" * 296
    receipts = publish(bus.broker, [Event(fits, b"1"), Event(over, b"2")])
    await done(receipts)
    assert (state.find(fits), state.find(over)) == (b'"1"', None)
    assert [event_of("kept", record).subject for record in read(bus.broker.topic("kept").partitions[0])] == [fits, over]
    await bus.broker.close()


@in_loop
async def test_a_topic_is_made_with_the_defaults_unless_told_otherwise() -> None:
    bus = Bus(defaults=TopicSettings(ack="accepted", segment_bytes=4096), default_partitions=3)
    topic = bus.broker.create_topic("a", principal=SERVER).result()
    assert (topic.settings.ack, topic.settings.segment_bytes, len(topic.partitions)) == ("accepted", 4096, 3)
    other = bus.broker.create_topic("b", 1, {"ack": "flushed"}, principal=SERVER).result()
    assert (other.settings.ack, other.settings.segment_bytes, len(other.partitions)) == ("flushed", 4096, 1)
    await bus.broker.close()


@in_loop
async def test_what_cannot_be_a_topic_is_refused_and_leaves_nothing() -> None:
    bus = Bus()
    bus.topic("news")
    with pytest.raises(TopicExistsError):
        bus.topic("news")
    with pytest.raises(InvalidTopicNameError):
        bus.topic("a,b")
    for partitions in (0, -1, PARTITIONS_MAX + 1):
        with pytest.raises(InvalidSettingError):
            bus.topic("a", partitions)
    with pytest.raises(InvalidSettingError):
        bus.topic("a", ack="soon")
    with pytest.raises(UnknownTopicError):
        bus.broker.topic("a")
    assert bus.disk.topics() == ["news"]
    await bus.broker.close()


@in_loop
async def test_a_topic_that_a_full_disk_refused_does_not_come_up_later() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    files.fail("open", errno.ENOSPC, suffix=".log")
    with pytest.raises(StorageError):
        bus.topic("news", 2)
    assert not bus.broker.has_topic("news")
    bus = await bus.restart()
    assert bus.broker.topics() == []
    topic = bus.topic("news")
    await done(publish(topic, events(b"x")))
    assert payloads(topic.partitions[0]) == [b"x"]
    await bus.broker.close()


@in_loop
async def test_a_folder_without_settings_is_a_topic_with_the_defaults() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    await done(publish(bus.topic("news", 2), events(b"0", b"1")))
    await bus.broker.close()
    files.unlink(f"data/topics/news/{SETTINGS_NAME}")
    again = Bus(files)
    assert sorted(payloads(one) for one in again.broker.topic("news").partitions) == [[b"0"], [b"1"]]
    await again.broker.close()


@in_loop
async def test_a_topic_whose_creation_a_crash_cut_short_is_none_and_gets_the_settings_of_the_next_creation() -> None:
    files = FaultyFiles()
    files.open(f"data/topics/news/{SETTINGS_NAME}.new", create=True)
    bus = Bus(files)
    assert bus.broker.topic_names() == []
    assert len(bus.topic("news", 3, cleanup="compact").partitions) == 3
    await bus.broker.close()
    again = Bus(files).broker
    topic = again.topic("news")
    assert (len(topic.partitions), topic.settings.cleanup) == (3, "compact")
    await again.close()


@pytest.mark.parametrize("mask", [0x80, 0x01])
def test_damaged_settings_take_out_their_topic_alone_and_its_name_stays_taken(mask: int) -> None:
    @in_loop
    async def test() -> None:
        files = FaultyFiles()
        bus = Bus(files)
        await done(publish(bus.topic("news", 2), events(b"0", b"1")))
        bus.topic("log")
        await bus.broker.close()
        settings = files.content(f"data/topics/news/{SETTINGS_NAME}")
        settings[20] ^= mask
        bus = Bus(files)
        broker = bus.broker
        assert broker.topic_names() == ["log"]
        assert list(broker.damaged_topics) == ["news"]
        with pytest.raises(ClosedTopicError, match=r"is closed: settings\.json of topic 'news' is damaged .*put"):
            broker.topic("news")
        with pytest.raises(TopicExistsError, match="cannot be opened"):
            bus.topic("news")
        (receipt,) = publish(broker, events(b"2", subject="news/sport"))
        assert isinstance(receipt.error, ClosedTopicError)
        stranger = Identity("stranger", "stranger", Rights("stranger"))
        for topic, content, hidden in (
            (None, events(b"2", subject="news/sport"), AccessRefusedError),
            ("news", events(b"2"), UnknownTopicError),
        ):
            for client, error in ((SERVER, ClosedTopicError), (stranger, hidden)):
                assert type(broker.publish(Publication(client, "test", content, topic)).error) is error
        await done(publish(broker, events(b"x", subject="log")))
        await broker.close()
        settings[20] ^= mask
        bus = Bus(files)
        assert sorted(payloads(one) for one in bus.broker.topic("news").partitions) == [[b"0"], [b"1"]]
        await bus.broker.close()

    test()


@in_loop
async def test_a_topic_is_made_again_when_its_removal_is_noted() -> None:
    """A crash in between would leave a list with the partitions of the old topic: those of the new one look lost."""
    bus = Bus()
    bus.topic("news", 3)
    noted = Promise()
    bus.broker.on_topics_changed = lambda name: noted
    bus.broker.remove_topic("news", SERVER).result()
    made = bus.broker.create_topic("news", 2, principal=SERVER)
    assert not made.done
    assert not bus.files.exists("data/topics/news")
    noted.resolve()
    assert len((await made).partitions) == 2
    await bus.broker.close()


@in_loop
async def test_a_start_that_runs_out_of_files_blames_no_topic_for_it() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic("news")
    await bus.broker.close()
    for suffix in ("settings.json", ".log"):
        files.fail("open", errno.EMFILE, suffix=suffix)
        with pytest.raises(TooManyFilesError, match="Too many open files"):
            Bus(files)


@pytest.mark.parametrize("suffix", ["settings.json.new", ".log"])
@in_loop
async def test_damaged_settings_of_the_state_and_a_full_disk_do_not_take_the_state(suffix: str) -> None:
    files = FaultyFiles()
    bus = Bus(files)
    state = bus.open_state()
    state.set("a", b"1")
    await done([state.commit("test")])
    await bus.broker.close()
    files.content(f"data/topics/%24state/{SETTINGS_NAME}")[20] ^= 1
    files.content("data/topics/%24state/0/checkpoint")[20] ^= 1  # so that a start writes
    bus = Bus(files)
    for operation in ("open", "pwrite"):
        files.fail(operation, errno.ENOSPC, suffix=suffix, times=2)
    with contextlib.suppress(StorageError):
        bus.open_state()
    files.faults.clear()
    await bus.broker.close()
    bus = Bus(files)
    assert bus.open_state().find("a") == b"1"
    await bus.broker.close()


@in_loop
async def test_settings_of_the_time_before_checksums_are_read_and_written_anew_with_one() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    bus.topic("news", 2, ack="written")
    await bus.broker.close()
    path = f"data/topics/news/{SETTINGS_NAME}"
    files.replace_file(path, bytes(files.content(path)[9:]))
    bus = Bus(files)
    assert bus.broker.topic("news").settings.ack == "written"
    bus.broker.alter_topic("news", {"ack": "flushed"}, principal=SERVER).result()
    await bus.broker.close()
    assert files.content(path)[8:10] == b"\n{"
    bus = Bus(files)
    assert bus.broker.topic("news").settings.ack == "flushed"
    await bus.broker.close()


@in_loop
async def test_a_topic_in_memory_keeps_its_settings_but_not_its_records() -> None:
    bus = Bus()
    topic = bus.topic("news", 2, engine="memory")
    receipts = publish_payloads(topic, [b"0", b"1"], [NOW] * 2)
    topic.flush()
    assert all(receipt.done for receipt in receipts)  # memory is as durable as it gets
    assert [payloads(one) for one in topic.partitions] == [[b"0"], [b"1"]]
    bus = await bus.restart()
    topic = bus.broker.topic("news")
    assert (topic.settings.engine, len(topic.partitions)) == ("memory", 2)
    assert [payloads(one) for one in topic.partitions] == [[], []]
    bus.broker.remove_topic("news", principal=SERVER).result()
    bus.topic("news", engine="memory")
    await bus.broker.close()


@in_loop
async def test_a_topic_in_memory_is_empty_when_it_is_made_again() -> None:
    bus = Bus()
    await done(publish(bus.topic("news", engine="memory"), events(b"x")))
    bus.broker.remove_topic("news", principal=SERVER).result()
    topic = bus.topic("news", engine="memory")
    assert payloads(topic.partitions[0]) == []
    await bus.broker.close()


# -- changing --------------------------------------------------------------------------------------------------------


@in_loop
async def test_settings_change_while_the_topic_is_used_and_stay_changed() -> None:
    bus = Bus()
    topic = bus.topic("news")
    await done(publish(topic, events(b"0")))
    assert bus.broker.alter_topic("news", {"ack": "written", "retention_bytes": 77}, principal=SERVER).result() is topic
    (receipt,) = publish(topic, events(b"1"))
    assert receipt.done
    bus = await bus.restart()
    topic = bus.broker.topic("news")
    assert (topic.settings.ack, topic.settings.retention_bytes) == ("written", 77)
    assert payloads(topic.partitions[0]) == [b"0", b"1"]
    await bus.broker.close()


@in_loop
async def test_a_smaller_segment_holds_from_the_next_record_on() -> None:
    bus = Bus()
    topic = bus.topic("news", ack="written")
    for _ in range(3):
        publish(topic, events(b"x" * 1000))
    assert topic.partitions[0].log.part_count == 1
    bus.broker.alter_topic("news", {"segment_bytes": 1024}, principal=SERVER).result()
    for _ in range(3):
        publish(topic, events(b"x" * 1000))
    assert topic.partitions[0].log.part_count > 1
    await bus.broker.close()


@in_loop
async def test_partitions_can_grow_and_never_shrink() -> None:
    bus = Bus()
    topic = bus.topic("news", 2, ack="written")
    publish(topic, events(b"0", b"1"))
    bus.broker.alter_topic("news", {"partitions": 4}, principal=SERVER).result()
    publish(topic, events(b"2", b"3", b"4", b"5"))
    assert sum(len(payloads(one)) for one in topic.partitions) == 6
    for partitions in (3, 0, PARTITIONS_MAX + 1, "5"):
        with pytest.raises(InvalidSettingError):
            bus.broker.alter_topic("news", {"partitions": partitions}, principal=SERVER).result()
    bus = await bus.restart()
    assert len(bus.broker.topic("news").partitions) == 4
    await bus.broker.close()


@in_loop
async def test_a_change_that_is_refused_changes_nothing() -> None:
    bus = Bus()
    topic = bus.topic("news")
    for changes in ({"engine": "memory"}, {"colour": "red"}, {"ack": "written", "retention_bytes": -1}):
        with pytest.raises(InvalidSettingError):
            bus.broker.alter_topic("news", changes, principal=SERVER).result()
    with pytest.raises(UnknownTopicError):
        bus.broker.alter_topic("olds", {"ack": "written"}, principal=SERVER).result()
    assert topic.settings == TopicSettings()
    bus = await bus.restart()
    assert bus.broker.topic("news").settings == TopicSettings()
    await bus.broker.close()


@in_loop
async def test_who_keeps_a_list_of_topics_is_told_of_each_change() -> None:
    bus = Bus()
    told: list[tuple[str, dict[str, int]]] = []

    def note(name: str) -> Promise:
        told.append((name, {topic.name: len(topic.partitions) for topic in bus.broker.topics()}))
        return DONE

    bus.broker.on_topics_changed = note
    bus.topic("a")
    bus.broker.alter_topic("a", {"partitions": 2}, principal=SERVER).result()
    bus.broker.remove_topic("a", principal=SERVER).result()
    assert told == [("a", {"a": 1}), ("a", {"a": 2}), ("a", {})]
    await bus.broker.close()


# -- removing --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_topic_made_again_begins_at_offset_0() -> None:
    bus = Bus()
    await done(publish(bus.topic("news"), events(b"old")))
    bus.broker.remove_topic("news", principal=SERVER).result()
    with pytest.raises(UnknownTopicError):
        bus.broker.topic("news")
    topic = bus.topic("news")
    (receipt,) = await done(publish(topic, events(b"new")))
    assert receipt.base_offset == 0
    assert payloads(topic.partitions[0]) == [b"new"]
    bus = await bus.restart()
    assert payloads(bus.broker.topic("news").partitions[0]) == [b"new"]
    assert bus.finished_removals == {}  # the old records were erased before the stop
    await bus.broker.close()


@in_loop
async def test_publishers_who_wait_are_told_when_their_topic_is_removed() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic, gate = bus.topic("news", 2), Gate(files)
    gate.shut()
    receipts = publish(topic, events(b"0", b"1"))
    await gate.reached()
    removing = threading.Timer(0, gate.open)  # the removal waits for the flush that is under way
    removing.start()
    bus.broker.remove_topic("news", principal=SERVER).result()
    removing.join()
    assert all(isinstance(receipt.error, TopicClosedError) for receipt in receipts)
    await bus.broker.close()


@in_loop
async def test_what_was_gathered_for_a_removed_topic_is_refused() -> None:
    bus = Bus()
    (receipt,) = publish_payloads(bus.topic("news"), [b"x"], [NOW])
    bus.broker.remove_topic("news", principal=SERVER).result()
    await turns()
    assert isinstance(receipt.error, TopicClosedError)
    await bus.broker.close()


@in_loop
async def test_a_removal_that_a_crash_cut_short_is_finished_at_the_next_start() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    await done(publish(bus.topic("news"), events(b"x")))
    bus.topic("kept")
    await bus.broker.close()
    # The crash comes after the rename and before anything else: the list of topics still has it.
    token = FolderStore(files, "data", bus.clock).hide("news")
    again = Bus(files)
    assert again.finished_removals == {token: "news"}
    assert again.broker.topic_names() == ["kept"]
    # A crash before the list of topics is written finds the removal again.
    assert FolderStore(files, "data", bus.clock).removed() == {token: "news"}
    again.broker.erase_removed()
    assert not any("news" in path for path in files.paths())
    topic = again.topic("news")
    assert payloads(topic.partitions[0]) == []
    await again.broker.close()


@in_loop
async def test_records_of_another_engine_that_this_folder_does_not_know_are_left_alone() -> None:
    files = FaultyFiles()
    elsewhere = FolderStore(files, "elsewhere", ManualClock(NOW))
    elsewhere.open_partition("news", 0, LogSettings()).append(batch(b"precious"))
    bus = Bus(files, others={"db": elsewhere})
    with pytest.raises(StorageError, match="does not know"):
        bus.topic("news", engine="db")
    assert not bus.broker.has_topic("news")
    assert elsewhere.partition_count("news") == 1
    assert bus.topic("news", engine="disk").name == "news"
    await bus.broker.close()


class Away(FolderStore):
    """An engine that may refuse to hide a topic."""

    away = False

    def hide(self, topic: str) -> str:
        if self.away:
            raise DiskError("the database is away")
        return super().hide(topic)


@in_loop
@pytest.mark.parametrize("starts", [0, 1])
async def test_what_another_engine_holds_of_a_removed_topic_goes_when_the_engine_can_be_asked(starts: int) -> None:
    files = FaultyFiles()
    elsewhere = Away(files, "elsewhere", ManualClock(NOW))
    bus = Bus(files, others={"db": elsewhere})
    await done(publish(bus.topic("news", engine="db"), events(b"old")))
    elsewhere.away = True  # a crash between the two steps of the removal leaves the same
    bus.broker.remove_topic("news", principal=SERVER).result()
    await bus.broker.close()
    for _ in range(starts):
        bus = Bus(files, others={"db": elsewhere})
        assert bus.broker.topic_names() == []
        await bus.broker.close()
    assert elsewhere.partition_count("news") == 1
    elsewhere.away = False
    bus = Bus(files, others={"db": elsewhere})
    assert elsewhere.partition_count("news") == 0
    bus.broker.erase_removed()
    assert not any("news" in path for path in files.paths())
    assert payloads(bus.topic("news", engine="db").partitions[0]) == []
    await bus.broker.close()


@in_loop
async def test_a_removal_that_is_finished_late_leaves_the_topic_alone_that_took_its_name() -> None:
    files = FaultyFiles()
    elsewhere = FolderStore(files, "elsewhere", ManualClock(NOW))
    bus = Bus(files, others={"db": elsewhere})
    bus.topic("news", engine="db")
    bus.disk.erase = lambda token: None  # type: ignore[method-assign]  # the crash comes before this
    bus.broker.remove_topic("news", principal=SERVER).result()
    await done(publish(bus.topic("news", engine="db"), events(b"new")))
    await bus.broker.close()
    again = Bus(files, others={"db": elsewhere})
    assert len(again.finished_removals) == 1
    log = again.broker.topic("news").partitions[0].log
    assert [record.payload for record in iterate(decode_chunk(log.read(0, 2**20).data))] == [b"new"]
    await again.broker.close()


@in_loop
async def test_a_removal_that_the_disk_refuses_leaves_the_topic_in_use() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    await done(publish(bus.topic("news"), events(b"0")))
    files.fail("rename", suffix="/news")
    with pytest.raises(StorageError):
        bus.broker.remove_topic("news", principal=SERVER).result()
    topic = bus.broker.topic("news")
    await done(publish(topic, events(b"1")))
    assert payloads(topic.partitions[0]) == [b"0", b"1"]
    bus.broker.remove_topic("news", principal=SERVER).result()
    assert bus.broker.topics() == []
    await bus.broker.close()


@in_loop
@pytest.mark.parametrize("engine", ["disk", "db"])
@pytest.mark.parametrize("failures", [1, 2])
async def test_a_removal_that_cannot_be_noted_gives_the_space_back_and_is_known_to_the_next_start(
    engine: str, failures: int
) -> None:
    files = FaultyFiles()
    others: dict[str, Store] = {"db": FolderStore(files, "db", ManualClock(NOW))}
    bus = Bus(files, others=others)
    await done(publish(bus.topic("news", 2, engine=engine), events(b"x", b"y")))
    answers = [Promise.refused(DiskFullError("the disk is full"))] * failures
    bus.broker.on_topics_changed = lambda name: answers.pop() if answers else DONE
    bus.broker.remove_topic("news", principal=SERVER).result()
    await bus.broker.close()
    assert not any(".log" in path for path in files.paths())
    again = Bus(files, others=others)
    assert list(again.finished_removals.values()) == ["news"] * (failures == 2)
    assert again.broker.topic_names() == []
    await again.broker.close()


def fail_behind_the_rename(files: FaultyFiles, fail: Callable[[], None]) -> None:
    """Call `fail` when the folder of a topic is about to be renamed: what comes before a removal flushes, too."""

    def arm(operation: str, path: str) -> None:
        if operation == "rename" and path.endswith("topics/news"):
            files.before_call = lambda operation, path: None
            fail()

    files.before_call = arm


@in_loop
@pytest.mark.parametrize("skip", [0, 1])
async def test_a_removal_that_the_disk_does_not_make_durable_leaves_the_topic_and_its_records(skip: int) -> None:
    files = FaultyFiles()
    bus = Bus(files)
    await done(publish(bus.topic("news"), events(b"0", b"1")))
    fail_behind_the_rename(files, lambda: files.fail("flush_folder", skip=skip))
    with pytest.raises(StorageError, match="could not be removed"):
        bus.broker.remove_topic("news", principal=SERVER).result()
    await done(publish(bus.broker.topic("news"), events(b"2")))
    assert payloads(bus.broker.topic("news").partitions[0]) == [b"0", b"1", b"2"]
    files.power_loss(1)
    bus = Bus(files)
    assert payloads(bus.broker.topic("news").partitions[0]) == [b"0", b"1", b"2"]
    assert not any(bus.finished_removals.values())
    await bus.broker.close()


@in_loop
async def test_a_topic_that_the_disk_neither_removes_nor_gives_back_is_closed_and_not_begun_anew() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    await done(publish(bus.topic("news"), events(b"0")))

    def fail() -> None:
        files.fail("flush_folder")
        files.fail("rename", skip=1)

    fail_behind_the_rename(files, fail)
    with pytest.raises(StorageError, match="could not be removed"):
        bus.broker.remove_topic("news", principal=SERVER).result()
    with pytest.raises(ClosedTopicError):
        bus.broker.topic("news")
    assert not any("topics/news" in path for path in files.paths())
    await bus.broker.close()


# -- secret subjects -------------------------------------------------------------------------------------------------

SECRET = "!/cred/1/2/3/x"


@in_loop
@pytest.mark.parametrize("topics", [[], ["!"]])
async def test_nobody_publishes_under_subjects_that_are_secret_to_some_processes(topics: list[str]) -> None:
    bus = Bus()
    state = bus.open_state()
    for name in topics:
        bus.topic(name, retain="last")
    heard: list[Event] = []
    bus.broker.subscribe(EVERYTHING, heard.extend, principal=SERVER)
    contents: list[Content] = [events(b"x", subject=SECRET), [Event("open", b"1"), Event(SECRET, b"1")]]
    headers = ((SUBJECT_HEADER, SECRET.encode()),)
    stored = encode_batch([Record(b"x", headers=headers, timestamp=NOW)])
    bodies = Bodies(list(batch_bodies(stored, NO_PRODUCER, 0)), [NOW], 1)
    for content in (*contents, *((stored, bodies) if topics else ())):
        place = None if isinstance(content, list) else topics[0]
        receipt = bus.broker.publish(Publication(SERVER, "test", content, place))
        assert isinstance(receipt.error, AccessRefusedError)
        assert SECRET in str(receipt.error)
    await turns()
    assert [event.subject for event in heard] == (["open"] if topics else [])  # else it is of the same batch
    assert (state.find(SECRET), len(state)) == (None, 0)
    for name in topics:
        assert bus.broker.topic(name).partitions[0].next_offset == 0
        await done([bus.broker.publish(Publication(SERVER, "test", events(b"x", subject=name)))])
        assert bus.broker.topic(name).partitions[0].next_offset == 1
    await bus.broker.close()


@in_loop
async def test_no_topic_is_made_for_secret_subjects() -> None:
    bus = Bus()
    for name in ("!/cred", "!/cred/1", SECRET):
        with pytest.raises(InvalidTopicNameError, match="secret"):
            bus.topic(name)
    bus.topic("!/credit")
    await bus.broker.close()


# -- events ----------------------------------------------------------------------------------------------------------


@in_loop
async def test_an_event_is_recorded_by_the_nearest_topic_above_it_alone() -> None:
    bus = Bus()
    plant, line = bus.topic("plant"), bus.topic("plant/line1")
    receipts = publish(
        bus.broker,
        [Event("plant", b"0"), Event("plant/line1/temp", b"1"), Event("plant/line2", b"2"), Event("else", b"3")],
    )
    await done(receipts)
    assert payloads(plant.partitions[0]) == [b"0", b"2"]
    assert payloads(line.partitions[0]) == [b"1"]
    await bus.broker.close()


@in_loop
async def test_a_subject_without_a_topic_is_live_only() -> None:
    bus = Bus()
    heard: list[Event] = []
    subscription = bus.broker.subscribe(exactly("nowhere"), heard.extend, principal=SERVER)
    assert publish(bus.broker, events(b"x", subject="nowhere")) == []
    assert heard == [Event("nowhere", b"x", None, (), NOW)]
    bus.broker.unsubscribe(subscription)
    publish(bus.broker, events(b"y", subject="nowhere"))
    assert len(heard) == 1
    await bus.broker.close()


@in_loop
async def test_a_new_topic_records_a_subject_that_was_live_only_until_then() -> None:
    bus = Bus()
    assert publish(bus.broker, events(b"0", subject="a/b")) == []
    topic = bus.topic("a")
    await done(publish(bus.broker, events(b"1", subject="a/b")))
    assert payloads(topic.partitions[0]) == [b"1"]
    bus.broker.remove_topic("a", principal=SERVER).result()
    assert publish(bus.broker, events(b"2", subject="a/b")) == []
    await bus.broker.close()


@in_loop
async def test_a_receiver_may_publish_again_while_it_is_called() -> None:
    bus = Bus()
    bus.topic("echo")

    def answer(got: Sequence[Event]) -> None:
        publish(bus.broker, [Event("echo", event.payload) for event in got])

    bus.broker.subscribe(exactly("news"), answer, principal=SERVER)
    await done(publish(bus.topic("news"), events(b"x")))
    await bus.broker.topic("echo").partitions[0].wait(0)
    assert payloads(bus.broker.topic("echo").partitions[0]) == [b"x"]
    await bus.broker.close()


@in_loop
async def test_subscriptions_of_many_partitions_and_topics_hear_each_event_once() -> None:
    bus = Bus()
    bus.topic("a", 3)
    bus.topic("b", ack="accepted")
    heard: list[bytes | None] = []
    bus.broker.subscribe(EVERYTHING, lambda got: heard.extend(event.payload for event in got), principal=SERVER)
    sent = [Event("ab"[number % 2], b"%d" % number, b"%d" % number) for number in range(60)]
    await done(publish(bus.broker, sent))
    assert sorted(heard, key=str) == sorted((event.payload for event in sent), key=str)
    await bus.broker.close()


# -- care ------------------------------------------------------------------------------------------------------------


@in_loop
async def test_cleaning_frees_what_retention_says() -> None:
    bus = Bus()
    topic = bus.topic("news", ack="written", segment_bytes=1024, retention_bytes=1024)
    for _ in range(10):
        publish(topic, events(b"x" * 600))
    freed = await bus.broker.clean()
    assert freed > 0
    partition = topic.partitions[0]
    assert partition.log.first_offset > 0
    assert len(read(partition, partition.log.first_offset)) == 10 - partition.log.first_offset
    await bus.broker.close()


@in_loop
async def test_a_topic_whose_cleaning_fails_does_not_keep_the_others_from_theirs() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    for name in ("a", "b"):
        topic = bus.topic(name, ack="written", segment_bytes=1024, retention_bytes=1024)
        for _ in range(10):
            publish(topic, events(b"x" * 600, subject=name))
    files.fail("unlink", suffix=".log")
    assert await bus.broker.clean() > 0
    assert bus.broker.topic("b").partitions[0].log.first_offset > 0
    await bus.broker.close()


@in_loop
async def test_a_stop_waits_for_the_cleaning_that_is_under_way() -> None:
    files = FaultyFiles()
    bus = Bus(files)
    topic = bus.topic("news", ack="written", segment_bytes=1024, retention_bytes=1024)
    for _ in range(10):
        publish(topic, events(b"x" * 600))
    reached, let_on = threading.Event(), threading.Event()

    def hold(operation: str, path: str) -> None:
        if operation == "unlink" and not reached.is_set():
            reached.set()
            assert let_on.wait(SAFETY_NET_SECONDS)

    files.before_call = hold
    cleaning = asyncio.ensure_future(bus.broker.clean())
    await asyncio.get_running_loop().run_in_executor(None, reached.wait, SAFETY_NET_SECONDS)
    cleaning.cancel()
    threading.Timer(0, let_on.set).start()  # while the stop waits
    await bus.broker.close()
    assert not bus.broker._cleaning


@in_loop
async def test_nothing_is_made_any_more_once_the_broker_is_closed() -> None:
    bus = Bus(MemoryFiles())
    topic = bus.topic("news")
    await bus.broker.close()
    with pytest.raises(TopicClosedError):
        bus.topic("late")
    (receipt,) = publish(topic, events(b"late"))
    assert isinstance(receipt.error, TopicClosedError)


@in_loop
async def test_a_topic_whose_engine_refuses_to_remove_it_is_gone_and_can_be_made_again() -> None:
    files = FaultyFiles()
    bus = Bus(others={"db": FolderStore(files, "db", ManualClock(NOW), Fit(reads_wait=False))})
    await done(publish(bus.topic("news", engine="db"), events(b"x")))
    files.fail("rename", suffix="topics/news")
    bus.broker.remove_topic("news", principal=SERVER).result()
    assert not bus.broker.has_topic("news")
    assert bus.broker.topic_of("news/sport") is None
    assert bus.topic("news", engine="db").partitions[0].next_offset == 0
    await bus.broker.close()


@in_loop
async def test_a_thousand_changes_of_one_topic_that_wait_for_each_other_all_end() -> None:
    bus = Bus()
    bus.broker._catalog.fit = Fit()  # its calls wait: each change is made in a thread
    changes = await done([bus.broker.create_topic("a", principal=SERVER) for _ in range(1000)])
    assert [change.error for change in changes if not isinstance(change.error, TopicExistsError)] == [None]
    await bus.broker.close()


@in_loop
async def test_changes_of_one_topic_are_made_in_the_order_in_which_they_were_asked_for() -> None:
    clock = ManualClock(NOW)
    bus = Bus()
    bus.broker._catalog.fit = Fit()  # its calls wait: each change is made in a thread
    changes: list[Promise] = [
        bus.broker.create_topic("a", principal=SERVER),
        bus.broker.alter_topic("a", {"partitions": 2}, principal=SERVER),
        bus.broker.create_topic("a", principal=SERVER),
        bus.broker.remove_topic("a", principal=SERVER),
        bus.broker.alter_topic("a", {"partitions": 3}, principal=SERVER),
        bus.broker.create_topic("a", 4, principal=SERVER),
    ]
    assert not bus.broker.has_topic("a")
    await done(changes)
    errors = [type(change.error) for change in changes]
    assert errors == [type(None), type(None), TopicExistsError, type(None), UnknownTopicError, type(None)]
    assert len(bus.broker.topic("a").partitions) == 4
    late = bus.broker.create_topic("late", principal=SERVER)
    await bus.broker.close()
    assert late.done
    assert type((await done([bus.broker.create_topic("later", principal=SERVER)]))[0].error) is TopicClosedError
    assert Bus(bus.files, clock=clock).broker.topic_names() == ["a", "late"]
