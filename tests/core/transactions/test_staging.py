"""Staged, atomic appends: invisible until the commit, all or nothing after any crash, once however often asked."""

import asyncio
import errno
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from babelbus.config import StagingLimits
from babelbus.core.access import SERVER
from babelbus.core.partition import TopicClosedError
from babelbus.core.receipt import Receipt
from babelbus.core.settings import TopicSettings
from babelbus.core.subject import EVERYTHING
from babelbus.core.topic import ReservedTopicError, UnknownPartitionError
from babelbus.core.transactions.model import (
    STATE_SUFFIX,
    CommitPendingError,
    CommitReceipt,
    FailedPartError,
    MissingTopicError,
    NoStateError,
    PartRef,
    StagedRecordsMissingError,
    StagingFullError,
    StagingRefusedError,
    TransactionDamagedError,
    TransactionOwnerError,
    UnknownPartError,
    token_of,
)
from babelbus.core.transactions.part_file import FRAME
from babelbus.core.transactions.parts import find_damage
from babelbus.core.transactions.staging import Staging
from babelbus.errors import BabelbusError, StorageError
from babelbus.records.envelope import SUBJECT_HEADER
from babelbus.records.format import InvalidRecordError, encode_batch
from babelbus.records.record import Record, RecordBatch
from babelbus.storage.errors import DiskError, DiskFullError
from tests.storage.faults import FaultyFiles
from tests.support.bus import NOW, Bus, batch, done, in_loop, payloads, publish_batch, turns

FOLDER = "data/staging"


class Stage:
    """A bus with staging on it; a topic `news` with two partitions and a topic `log` with one."""

    def __init__(self, files: FaultyFiles | None = None, settings: StagingLimits | None = None) -> None:
        self.files = files or FaultyFiles()
        self.bus = Bus(self.files)
        for name, partitions in (("news", 2), ("log", 1)):
            if not self.bus.broker.has_topic(name):
                self.bus.topic(name, partitions)
        self.settings = settings
        self.staging = Staging(
            self.files,
            FOLDER,
            topics=self.bus.broker._topics,
            publish=self.bus.broker.publish,
            flusher=self.bus.broker._backend("disk").flusher,
            clock=self.bus.clock,
            loop=asyncio.get_running_loop(),
            settings=settings,
        )
        self.staging.open()
        self.first: dict[tuple[str, int, str], int] = {}

    async def close(self) -> None:
        await self.staging.close()
        await self.bus.broker.close()

    async def restart(self) -> "Stage":
        await self.close()
        return await Stage(self.files, self.settings).settled()

    async def settled(self) -> "Stage":
        await self.staging.settle()
        return self

    def stage(
        self,
        part: str,
        *values: bytes,
        batch_id: int = 0,
        topic: str = "log",
        partition: int = 0,
        transaction: str = "t",
        first_record: int | None = None,
    ) -> Receipt:
        place = (transaction, batch_id, part)
        first = self.first.get(place, 0) if first_record is None else first_record
        receipt = self.staging.stage(
            transaction, batch_id, part, topic, batch(*values), first_record=first, partition=partition
        )
        self.first[place] = first + len(values)
        return receipt

    async def staged(self, part: str, *values: bytes, **how: object) -> None:
        (receipt,) = await done([self.stage(part, *values, **how)])  # type: ignore[arg-type]
        assert receipt.error is None

    def commit(self, *parts: tuple[str, int], batch_id: int = 0, owner: str = "") -> CommitReceipt:
        return self.staging.commit("t", batch_id, [PartRef(*part) for part in parts], owner=owner)

    async def committed(self, *parts: tuple[str, int], batch_id: int = 0, owner: str = "") -> CommitReceipt:
        receipt = self.commit(*parts, batch_id=batch_id, owner=owner)
        await done([receipt])
        if receipt.error is not None:
            raise receipt.error
        await self.staging.settle()
        return receipt

    def seen(self) -> dict[str, list[bytes | None]]:
        """What readers see, by topic and partition."""
        return {
            f"{name}/{partition.number}": payloads(partition)
            for name, topic in self.bus.broker._topics.items()
            for partition in topic.partitions
        }

    def part_files(self) -> list[str]:
        return [path for path in self.files.paths() if path.startswith(FOLDER) and path.endswith(".part")]


def seen(log: Iterable[bytes] = (), news: tuple[Iterable[bytes], Iterable[bytes]] = ((), ())) -> dict[str, list[bytes]]:
    return {"log/0": list(log), "news/0": list(news[0]), "news/1": list(news[1])}


# -- what it does ----------------------------------------------------------------------------------------------------


@in_loop
async def test_staged_records_are_seen_after_the_commit_and_not_before() -> None:
    stage = Stage()
    await stage.staged("p", b"a", b"b")
    await stage.staged("p", b"c", topic="news", partition=1)
    assert stage.seen() == seen()
    assert stage.staging.transaction("t").staged_bytes > 0
    receipt = await stage.committed(("p", 3))
    assert (receipt.batch_id, receipt.count, receipt.again) == (0, 3, False)
    assert stage.seen() == seen([b"a", b"b"], ([], [b"c"]))
    assert stage.part_files() == []
    assert stage.staging.staged_bytes == 0
    await stage.close()


@in_loop
async def test_parts_are_appended_in_the_order_of_the_commit() -> None:
    stage = Stage()
    for part in (b"3", b"1", b"2"):
        await stage.staged(part.decode(), part)
    await stage.committed(("1", 1), ("2", 1), ("3", 1))
    assert stage.seen() == seen([b"1", b"2", b"3"])
    await stage.close()


@in_loop
async def test_a_batch_is_committed_once_also_after_a_restart() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    await stage.committed(("p", 1))
    for _ in range(2):
        receipt = await stage.committed(("p", 1))
        assert (receipt.count, receipt.again) == (1, True)
        stage = await stage.restart()
    info = stage.staging.transaction("t")
    assert (info.last_batch_id, info.last_records, info.pending_batch_id) == (0, 1, -1)
    assert stage.seen() == seen([b"a"])
    await stage.close()


@in_loop
async def test_a_batch_below_the_last_one_was_committed_and_staging_for_it_keeps_nothing() -> None:
    stage = Stage()
    await stage.staged("p", b"a", batch_id=5)
    await stage.committed(("p", 1), batch_id=5)
    await stage.staged("q", b"again", batch_id=5)
    await stage.staged("q", b"older", batch_id=4)
    assert stage.part_files() == []
    assert (await stage.committed(("q", 1), batch_id=5)).again
    older = await stage.committed(("q", 1), batch_id=4)
    assert (older.count, older.again) == (-1, True)
    assert stage.seen() == seen([b"a"])
    await stage.close()


@in_loop
async def test_parts_that_the_commit_leaves_out_are_dropped_and_later_batches_stay() -> None:
    stage = Stage()
    await stage.staged("old", b"o", batch_id=0)
    await stage.staged("slow", b"s", batch_id=1)
    await stage.staged("fast", b"f", batch_id=1)
    await stage.staged("next", b"n", batch_id=2)
    await stage.committed(("fast", 1), batch_id=1)
    assert len(stage.part_files()) == 1
    await stage.committed(("next", 1), batch_id=2)
    assert stage.seen() == seen([b"f", b"n"])
    await stage.close()


@in_loop
async def test_a_batch_without_parts_is_committed() -> None:
    stage = Stage()
    assert (await stage.committed()).count == 0
    stage = await stage.restart()
    assert stage.staging.transaction("t").last_batch_id == 0
    await stage.close()


@in_loop
async def test_a_resend_of_staged_records_is_answered_and_kept_once() -> None:
    stage = Stage()
    await stage.staged("p", b"a", b"b")
    (receipt,) = await done([stage.stage("p", b"a", b"b", first_record=0)])
    assert (receipt.error, receipt.base_offset, receipt.count) == (None, 0, 2)
    await stage.staged("p", b"c")
    await stage.committed(("p", 3))
    assert stage.seen() == seen([b"a", b"b", b"c"])
    await stage.close()


@in_loop
async def test_a_writer_that_leaves_records_out_is_refused() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    with pytest.raises(StagedRecordsMissingError):
        stage.stage("p", b"c", first_record=2)
    with pytest.raises(StagingRefusedError):
        stage.stage("p", b"a", b"b", first_record=0)
    await stage.close()


@in_loop
async def test_a_commit_names_parts_that_are_staged_whole_and_once() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    for parts in ([("q", 1)], [("p", 2)], [("p", 1), ("p", 1)]):
        with pytest.raises(UnknownPartError):
            stage.commit(*parts)
    assert stage.staging.transaction("t").pending_batch_id == -1
    await stage.close()


@in_loop
async def test_records_that_cannot_be_appended_later_are_refused_when_they_are_staged() -> None:
    stage = Stage()
    with pytest.raises(MissingTopicError):
        stage.stage("p", b"a", topic="nope")
    with pytest.raises(UnknownPartitionError):
        stage.stage("p", b"a", partition=1)
    with pytest.raises(NoStateError, match=r"'log' keeps no state.*`babelbus topics alter log --retain last`"):
        stage.staging.stage("t", 0, "p", "log", batch(b"a"), first_record=0, to_state=True)
    stage.bus.broker.open_reserved("$own", TopicSettings())
    with pytest.raises(ReservedTopicError):
        stage.stage("p", b"a", topic="$own")
    stage.bus.topic("!")
    secret = encode_batch([Record(b"", headers=((SUBJECT_HEADER, b"!/cred/1/2/3/x"),), timestamp=NOW)])
    with pytest.raises(StagingRefusedError, match="secret"):
        stage.staging.stage("t", 0, "p", "!", secret, first_record=0)
    many = encode_batch([Record(b"", headers=((b"h", None),) * 127, timestamp=NOW)])
    with pytest.raises(InvalidRecordError):
        stage.staging.stage("t", 0, "p", "log", many, first_record=0)
    with pytest.raises(InvalidRecordError):
        stage.staging.stage("t", 0, "p", "log", RecordBatch(b"", [], [], 0), first_record=0)
    for wrong in ("", "x" * 1025):
        with pytest.raises(StagingRefusedError):
            stage.stage(wrong, b"a")
    assert stage.part_files() == []
    await stage.close()


@in_loop
async def test_records_that_set_the_state_are_staged_for_a_topic_that_retains_them() -> None:
    stage = Stage()
    stage.bus.topic("plant", retain="last")
    (receipt,) = await done(
        [stage.staging.stage("t", 0, "p", "plant", batch(b"a"), first_record=0, partition=0, to_state=True)]
    )
    assert receipt.error is None
    await stage.committed(("p", 1))
    assert stage.seen()["plant/0"] == [b"a"]
    await stage.close()


@in_loop
async def test_a_commit_sent_right_behind_its_records_waits_for_them() -> None:
    stage = Stage()
    staged = stage.stage("p", b"a")
    receipt = stage.commit(("p", 1))
    assert not staged.done
    await done([receipt])
    assert receipt.error is None
    assert stage.seen() == seen([b"a"])
    await stage.close()


@in_loop
async def test_the_server_gives_batches_without_a_partition_turns_and_a_resend_the_same_one() -> None:
    stage = Stage()
    places = []
    for number in range(4):
        (receipt,) = await done([stage.stage("p", b"%d" % number, topic="news", partition=-1)])
        (again,) = await done([stage.stage("p", b"", topic="news", partition=-1, first_record=number)])
        assert (again.partition, again.base_offset) == (receipt.partition, number)
        places.append(receipt.partition)
    assert places in ([0, 1, 0, 1], [1, 0, 1, 0])
    await stage.committed(("p", 4))
    turns_of = [[b"%d" % number for number in range(4) if places[number] == lane] for lane in range(2)]
    assert stage.seen() == seen([], (turns_of[0], turns_of[1]))
    await stage.close()


@in_loop
async def test_live_subscribers_hear_of_records_when_they_are_committed() -> None:
    stage = Stage()
    heard: list[bytes | None] = []

    stage.bus.broker.subscribe(
        EVERYTHING, lambda events: heard.extend(event.payload for event in events), principal=SERVER
    )
    await stage.staged("p", b"a")
    assert heard == []
    await stage.committed(("p", 1))
    assert heard == [b"a"]
    await stage.close()


# -- owners, limits, giving up ---------------------------------------------------------------------------------------


@in_loop
async def test_somebody_elses_transaction_is_refused_and_forgetting_it_frees_the_id() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    await stage.committed(("p", 1), owner="query 1")
    stage = await stage.restart()
    assert stage.staging.transaction("t").owner == "query 1"
    with pytest.raises(TransactionOwnerError):
        stage.commit(("p", 1), owner="query 2")
    await stage.staging.forget("t")
    stage = await stage.restart()
    await stage.staged("p", b"b")
    await stage.committed(("p", 1), owner="query 2")
    assert stage.seen() == seen([b"a", b"b"])
    await stage.close()


@in_loop
async def test_more_than_the_limits_is_refused_until_there_is_room() -> None:
    stage = Stage(settings=StagingLimits(transaction_bytes_max=5_000, bytes_max=8_000, parts_max=3))
    await stage.staged("p", bytes(2_500))
    with pytest.raises(StagingFullError, match="a transaction"):
        stage.stage("p", bytes(2_500))
    await stage.staged("p", bytes(2_500), transaction="u")
    with pytest.raises(StagingFullError, match="all transactions"):
        stage.stage("p", bytes(1_000), transaction="v")
    assert stage.staging.abort("u", 0) == 1
    await stage.staged("a", b"", transaction="v")
    await stage.staged("b", b"", transaction="v")
    with pytest.raises(StagingFullError, match="parts"):
        stage.stage("c", b"", transaction="v")
    await stage.close()


@in_loop
async def test_aborted_parts_are_gone_and_aborting_again_is_no_error() -> None:
    stage = Stage()
    for part in ("p", "q"):
        await stage.staged(part, b"a")
    assert stage.staging.abort("t", 0, "p") == 1
    with pytest.raises(UnknownPartError):
        stage.commit(("p", 1))
    assert stage.staging.abort("t", 0) == 1
    assert stage.staging.abort("t", 0) == 0
    assert stage.staging.staged_bytes == 0
    await stage.staging.settle()
    assert stage.part_files() == []
    assert stage.staging._transactions == {}
    await stage.close()


@in_loop
async def test_a_part_that_is_aborted_while_the_disk_is_at_it_is_refused() -> None:
    stage = Stage()
    receipt = stage.stage("p", b"a")
    stage.staging.abort("t", 0)
    await done([receipt])
    assert receipt.error is not None
    await stage.close()


@in_loop
async def test_parts_that_nobody_commits_are_dropped_after_a_while_and_idle_transactions_forgotten() -> None:
    stage = Stage(settings=StagingLimits(part_seconds=100, transaction_seconds=1_000))
    await stage.staged("p", b"a")
    await stage.committed(("p", 1))
    await stage.staged("early", b"a", batch_id=1)
    stage.bus.clock.advance(60)
    await stage.staged("late", b"a", batch_id=1)
    stage.bus.clock.advance(60)
    assert await stage.staging.expire() == 1
    await stage.committed(("late", 1), batch_id=1)
    stage.bus.clock.advance(990)
    await stage.staging.expire()
    assert stage.staging.transaction("t").last_batch_id == 1
    stage.bus.clock.advance(20)
    await stage.staging.expire()
    assert stage.staging._transactions == {}
    assert stage.seen() == seen([b"a", b"a"])
    await stage.close()


@in_loop
async def test_nothing_is_taken_after_the_stop() -> None:
    stage = Stage()
    await stage.close()
    with pytest.raises(TopicClosedError):
        stage.stage("p", b"a")


@in_loop
async def test_many_parts_keep_few_files_open() -> None:
    stage = Stage()
    await done([stage.stage(f"p{number}", b"a") for number in range(100)])
    for number in range(100):
        await stage.staged(f"p{number}", b"b")
    assert sum(part._file is not None for part in stage.staging._parts.of("t")) <= 65
    await stage.committed(*((f"p{number}", 2) for number in range(100)))
    assert stage.seen()["log/0"] == [b"a", b"b"] * 100
    await stage.close()


# -- bad days --------------------------------------------------------------------------------------------------------


@in_loop
async def test_staged_parts_survive_a_restart_and_can_grow_and_be_committed_then() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    first = stage.first
    stage = await stage.restart()
    stage.first = first
    await stage.staged("p", b"b")
    await stage.committed(("p", 2))
    assert stage.seen() == seen([b"a", b"b"])
    await stage.close()


@in_loop
async def test_a_full_disk_refuses_to_stage_and_takes_the_records_when_there_is_room() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    stage.files.bytes_max = stage.files.bytes_used + 60
    with pytest.raises(DiskFullError):
        stage.stage("p", bytes(100))
    with pytest.raises(DiskFullError):
        stage.stage("q", bytes(100))
    stage.files.bytes_max = 2**40
    await stage.staged("p", b"b")
    await stage.staged("q", b"c")
    stage = await stage.restart()
    await stage.committed(("p", 2), ("q", 1))
    assert stage.seen() == seen([b"a", b"b", b"c"])
    await stage.close()


@in_loop
async def test_a_commit_that_the_disk_has_no_room_for_is_answered_with_an_error_and_goes_on_when_there_is_room() -> (
    None
):
    stage = Stage()
    for number in range(10):
        await stage.staged("p", *(bytes([number]) * 400 for _ in range(5)))
    stage.files.bytes_max = stage.files.bytes_used + 8_000
    with pytest.raises(DiskFullError):
        await stage.committed(("p", 50))
    with pytest.raises(CommitPendingError):
        stage.staging.abort("t", 0)
    with pytest.raises(CommitPendingError):
        stage.commit(batch_id=1)
    with pytest.raises(CommitPendingError):
        stage.stage("p", b"late")
    stage.first["t", 0, "p"] = 50
    with pytest.raises(CommitPendingError):
        await stage.staging.forget("t")
    with pytest.raises(DiskFullError):
        await stage.committed(("p", 50))
    stage.files.bytes_max = 2**40
    receipt = await stage.committed(("p", 50))
    assert receipt.count == 50
    assert stage.seen() == seen([bytes([number]) * 400 for number in range(10) for _ in range(5)])
    await stage.close()


@in_loop
async def test_a_failed_flush_of_a_part_refuses_the_part_alone() -> None:
    stage = Stage()
    await stage.staged("q", b"q")
    stage.files.fail("flush", suffix=".part")
    (receipt,) = await done([stage.stage("p", b"a")])
    assert isinstance(receipt.error, DiskError)
    with pytest.raises(FailedPartError):
        stage.stage("p", b"b")
    with pytest.raises(UnknownPartError):
        stage.commit(("p", 1))
    await stage.committed(("q", 1))
    assert stage.seen() == seen([b"q"])
    await stage.close()


@in_loop
async def test_a_commit_behind_a_part_that_the_disk_loses_is_refused_and_leaves_nothing() -> None:
    stage = Stage()
    stage.files.fail("flush", suffix=".part", drop=True)
    stage.stage("p", b"a")
    with pytest.raises(UnknownPartError):
        await stage.committed(("p", 1))
    assert stage.staging.transaction("t").pending_batch_id == -1
    assert stage.staging.abort("t", 0) == 1
    stage = await stage.restart()
    assert stage.seen() == seen()
    await stage.close()


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("skip", range(4))
@pytest.mark.parametrize("ack", ["flushed", "written", "accepted"])
@in_loop
async def test_a_failed_flush_of_a_topic_in_the_middle_of_a_commit_leaves_each_record_once(
    drop: bool, skip: int, ack: str
) -> None:
    stage = Stage()
    stage.bus.broker.alter_topic("log", {"ack": ack}, principal=SERVER).result()
    expected = []
    for number in range(80):  # three windows
        values = [b"%d-%d-" % (number, place) + bytes(100) for place in range(3)]
        expected += values
        await stage.staged("p", *values)
    stage.files.fail("flush", suffix=".log", skip=skip, drop=drop)
    try:
        await stage.committed(("p", 240))
    except StorageError:
        await stage.committed(("p", 240))
    assert sorted(filter(None, stage.seen()["log/0"])) == sorted(expected)
    stage = await stage.restart()
    assert sorted(filter(None, stage.seen()["log/0"])) == sorted(expected)
    await stage.close()


@in_loop
async def test_a_topic_that_goes_away_before_the_commit_refuses_it_and_during_it_takes_its_records_along() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    await stage.staged("p", b"b", topic="news")
    stage.bus.broker.remove_topic("news", principal=SERVER).result()
    with pytest.raises(MissingTopicError):
        stage.commit(("p", 2))
    stage.bus.topic("news", 2)
    receipt = stage.commit(("p", 2))
    await turns(1)
    stage.bus.broker.remove_topic("news", principal=SERVER).result()
    await done([receipt])
    assert receipt.error is None
    assert stage.seen() == {"log/0": [b"a"]}
    await stage.close()


@in_loop
async def test_a_commit_with_a_part_that_decayed_is_refused_before_anything_is_published() -> None:
    stage = Stage()
    await stage.staged("p", b"p")
    await stage.staged("q", bytes(5_000))
    (path,) = [path for path in stage.part_files() if path.endswith("-1.part")]
    stage.files.content(path)[-5] ^= 1
    with pytest.raises(UnknownPartError, match="damaged"):
        await stage.committed(("p", 1), ("q", 1))
    assert stage.seen() == seen()
    assert stage.staging.abort("t", 0, "q") == 1
    stage = await stage.restart()
    await stage.committed(("p", 1))
    assert stage.seen() == seen([b"p"])
    await stage.close()


@in_loop
async def test_a_commit_that_began_and_lost_a_part_says_so_and_goes_no_further() -> None:
    stage = Stage()
    await stage.staged("p", b"p")
    stage.files.fail("pwrite", suffix=".log", times=9)
    with pytest.raises(StorageError):
        await stage.committed(("p", 1))
    await die(stage)
    stage.files.faults.clear()
    stage.files.unlink(stage.part_files()[0])
    stage = await Stage(stage.files).settled()
    with pytest.raises(TransactionDamagedError, match="are gone"):
        await stage.committed(("p", 1))
    await stage.close()


@in_loop
async def test_a_commit_into_a_topic_with_damaged_settings_waits_until_it_is_there_again() -> None:
    stage = Stage()
    stage.bus.topic("late")
    await stage.staged("p", b"p", topic="late")
    stage.files.fail("pwrite", suffix=".log")
    with pytest.raises(StorageError):
        await stage.committed(("p", 1))
    await die(stage)
    settings = stage.files.content("data/topics/late/settings.json")
    settings[20] ^= 0x80
    stage = await Stage(stage.files).settled()
    assert stage.staging.transaction("t").pending_batch_id == 0
    await stage.close()
    settings[20] ^= 0x80
    stage = await Stage(stage.files).settled()
    assert payloads(stage.bus.broker.topic("late").partitions[0]) == [b"p"]
    assert stage.staging.transaction("t").last_batch_id == 0
    await stage.close()


@in_loop
async def test_records_behind_a_hole_that_power_loss_left_in_a_commit_are_not_there_twice() -> None:
    files = FaultyFiles()
    await Stage(files).close()
    stage = Stage(files)
    values = [b"%d" % number + bytes(1_500) for number in range(12)]
    await stage.staged("p", *values)
    files.fail("rename", suffix=STATE_SUFFIX + ".new", skip=1)  # the marker comes, the note of the end does not
    with pytest.raises(DiskError):
        await stage.committed(("p", 12))
    await die(stage)
    content = files.content("data/topics/log/0/00000000000000000000.log")
    content[4096:8192] = bytes(4096)
    files.unlink("data/topics/log/0/checkpoint")
    files.settle()
    stage = await Stage(files).settled()
    assert stage.seen() == seen(values)
    await stage.close()


@in_loop
async def test_a_damaged_state_refuses_its_transaction_alone_until_it_is_forgotten() -> None:
    stage = Stage()
    await stage.staged("p", b"a")
    await stage.committed(("p", 1))
    await stage.staged("left", b"a", batch_id=1)
    await stage.close()
    (path,) = [path for path in stage.files.paths() if path.endswith(STATE_SUFFIX)]
    stage.files.content(path)[20] ^= 1
    stage = Stage(stage.files)
    with pytest.raises(TransactionDamagedError):
        stage.stage("p", b"a", batch_id=1)
    with pytest.raises(TransactionDamagedError):
        stage.commit(batch_id=1)
    with pytest.raises(TransactionDamagedError):
        stage.staging.transaction("t")
    await stage.staged("p", b"u", transaction="u")
    await stage.staging.forget("t")
    assert stage.staging.transaction("t").last_batch_id == -1
    assert len(stage.part_files()) == 1
    await stage.close()


@in_loop
async def test_a_part_whose_head_is_damaged_is_named_and_left_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    await stage.staged("a", b"1")
    await stage.staged("b", b"2", transaction="u")
    await stage.close()
    [path] = [f"{FOLDER}/{name}" for name in stage.files.list_folder(FOLDER) if name.startswith(token_of("t"))]
    assert find_damage(stage.files, path) == ""
    stage.files.content(path)[FRAME.size + 2] ^= 1
    assert "damaged at byte 0" in find_damage(stage.files, path)
    stage = await stage.restart()
    assert path in caplog.text
    assert stage.files.exists(path)
    assert stage.staging.places("u", 0) == {("log", 0)}
    await stage.close()


@in_loop
async def test_a_file_that_the_disk_refuses_at_the_start_is_named() -> None:
    stage = Stage()
    await stage.close()
    stage.files.replace_file(f"{FOLDER}/backup", b"")
    stage.files.fail("unlink", errno.EISDIR)
    with pytest.raises(DiskError, match=f"opening {FOLDER}/backup: Is a directory"):
        stage.staging.open()


@in_loop
async def test_a_torn_end_of_a_part_is_no_damage() -> None:
    stage = Stage()
    await stage.staged("a", b"1")
    await stage.close()
    [path] = [f"{FOLDER}/{name}" for name in stage.files.list_folder(FOLDER)]
    whole = bytes(stage.files.content(path))
    for end in (b"\0" * 99, b"\0\0\0\x09", b"\0\0\0\x02\0\0\0\0xx"):
        stage.files.replace_file(path, whole + end)
        assert find_damage(stage.files, path) == ""
    stage.files.replace_file(path, whole + b"\0\0\0\x02\0\0\0\0xx" + whole[-9:])
    assert f"damaged at byte {len(whole)}" in find_damage(stage.files, path)


# -- crashes ---------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


async def die(stage: Stage) -> None:
    """End everything of a process without a word to the disk."""
    broker = stage.bus.broker
    await stage.staging._parts.settle()
    for one in stage.staging._transactions.values():
        if one.retry is not None:
            one.retry.cancel()
        if one.task is not None:
            one.task.cancel()
            await asyncio.wait([one.task])
    await asyncio.get_running_loop().run_in_executor(None, broker._backend("disk").flusher.stop)


class Guillotine:
    """Lets every call from number `at` on fail, as it is when there is no process any more."""

    def __init__(self, files: FaultyFiles, at: int) -> None:
        self.left = at
        self.fell = False
        files.before_call = self._count

    def _count(self, operation: str, path: str) -> None:
        self.left -= 1
        if self.left < 0:
            self.fell = True
            raise OSError(errno.EIO, "the process is dead")


async def run_to_the_crash(files: FaultyFiles, at: int) -> tuple[bool, bool]:
    """Stage and commit a batch; give whether the process lived to the end, and whether it was told of success."""
    stage = Stage(files)
    guillotine = Guillotine(files, at)
    told = False
    try:
        parts = [("p", 0), ("q", 0)]
        for _ in range(3):
            for number, (part, count) in enumerate(parts):
                values = [b"%s%d" % (part.encode(), count + place) + bytes(700) for place in range(4)]
                topic = "news" if number else "log"
                await stage.staged(part, *values, topic=topic)
                parts[number] = (part, count + 4)
        receipt = stage.commit(*parts)
        await done([receipt])
        told = receipt.error is None
    except (BabelbusError, AssertionError, OSError):
        pass
    files.before_call = lambda operation, path: None
    await die(stage)
    return not guillotine.fell, told


def check_all_or_nothing(stage: Stage, told: bool) -> None:
    found = stage.seen()
    p = [b"p%d" % number + bytes(700) for number in range(12)]
    q = [b"q%d" % number + bytes(700) for number in range(12)]
    everything, nothing = seen(p, (q, [])), seen()
    assert found in (everything, nothing)
    committed = stage.staging.transaction("t").last_batch_id == 0
    assert (found == everything) == committed
    assert committed or not told


@pytest.mark.parametrize("seed", [None, 0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_a_crash_at_any_call_leaves_all_or_nothing(seed: int | None) -> None:
    """`None` is a killed process, a number a loss of power with this seed."""

    async def one_crash(at: int) -> bool:
        files = FaultyFiles()
        first = Stage(files)
        await first.close()  # the topics are there
        lived, told = await run_to_the_crash(files, at)
        if seed is None:
            files.kill()
        else:
            files.power_loss(seed * 1_000 + at)
        stage = await Stage(files).settled()
        check_all_or_nothing(stage, told)
        # What was staged can be committed yet, or the batch is staged anew by another attempt.
        if stage.staging.transaction("t").last_batch_id < 0:
            await stage.staged("r", b"r")
            await stage.committed(("r", 1))
            assert stage.seen() == seen([b"r"])
        else:
            assert (await stage.committed(("p", 12))).again
        stage = await stage.restart()
        assert stage.part_files() == []
        await stage.close()
        return lived

    async def every_crash() -> None:
        at = 0
        while not await one_crash(at):
            at += 1
        assert at > 20

    in_loop(every_crash)()


def test_a_crash_of_the_recovery_of_a_crash_leaves_all_of_it_in_the_end() -> None:
    async def two_crashes(at: int) -> bool:
        files = FaultyFiles()
        await Stage(files).close()
        stage = Stage(files)
        for part, topic in (("p", "log"), ("q", "news")):
            for start in range(0, 12, 4):
                values = [b"%s%d" % (part.encode(), start + place) + bytes(700) for place in range(4)]
                await stage.staged(part, *values, topic=topic)
        files.fail("pwrite", suffix="news/0/00000000000000000000.log")
        with pytest.raises(DiskError):
            await stage.committed(("p", 12), ("q", 12))
        await die(stage)
        files.power_loss(at)
        stage = Stage(files)
        guillotine = Guillotine(files, at)
        await stage.staging.settle()
        files.before_call = lambda operation, path: None
        await die(stage)
        files.power_loss(at + 1)
        stage = await Stage(files).settled()
        check_all_or_nothing(stage, told=False)
        assert stage.staging.transaction("t").last_batch_id == 0
        await stage.close()
        return not guillotine.fell

    async def every_crash() -> None:
        at = 0
        while not await two_crashes(at):
            at += 1
        assert at > 8

    in_loop(every_crash)()


# -- a model ---------------------------------------------------------------------------------------------------------

steps = st.one_of(
    st.tuples(st.just("stage"), st.integers(0, 2), st.sampled_from("pq"), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.just("commit"), st.integers(0, 2), st.sets(st.sampled_from("pq"))),
    st.tuples(st.just("abort"), st.integers(0, 2), st.sampled_from(["p", "q", None])),
    st.tuples(st.just("publish"), st.integers(0, 2)),
    st.tuples(st.just("restart")),
    st.tuples(st.just("kill")),
    st.tuples(st.just("power"), st.integers(0, 1_000)),
)
PLACES = [("log", 0), ("news", 0), ("news", 1)]


@settings(deadline=None)
@given(st.lists(steps, max_size=14))
def test_any_interleaving_of_staging_commits_aborts_and_crashes_is_what_the_model_says(plan: list[tuple]) -> None:  # type: ignore[type-arg]
    async def play() -> None:
        files = FaultyFiles()
        await Stage(files).close()
        stage = Stage(files)
        parts: dict[tuple[int, str], list[tuple[int, bytes]]] = {}
        expected: list[list[bytes]] = [[], [], []]
        last, serial = -1, 0
        for kind, *how in plan:
            if kind == "stage":
                batch_id, part, place, count = how
                values = [b"%d" % (serial + number) for number in range(count)]
                serial += count
                known = parts.get((batch_id, part), [])
                receipt = stage.stage(
                    part,
                    *values,
                    batch_id=batch_id,
                    topic=PLACES[place][0],
                    partition=PLACES[place][1],
                    first_record=len(known),
                )
                await done([receipt])
                assert receipt.error is None
                if batch_id > last:
                    parts.setdefault((batch_id, part), []).extend((place, value) for value in values)
            elif kind == "commit":
                batch_id, names = how
                chosen = sorted(names)
                refs = [(name, len(parts.get((batch_id, name), []))) for name in chosen]
                if batch_id > last and any((batch_id, name) not in parts for name in chosen):
                    with pytest.raises(UnknownPartError):
                        stage.commit(*refs, batch_id=batch_id)
                    continue
                committed = await stage.committed(*refs, batch_id=batch_id)
                assert committed.again == (batch_id <= last)
                if batch_id > last:
                    for name in chosen:
                        for place, value in parts[batch_id, name]:
                            expected[place].append(value)
                    last = batch_id
                    parts = {key: records for key, records in parts.items() if key[0] > last}
            elif kind == "abort":
                batch_id, name = how
                gone = [key for key in parts if key[0] == batch_id and name in (None, key[1])]
                assert stage.staging.abort("t", batch_id, name) == len(gone)
                for key in gone:
                    del parts[key]
                await stage.staging.settle()
                files.settle()  # that a part comes back after a loss of power is not what this is about
            elif kind == "publish":
                topic, number = PLACES[how[0]]
                value = b"other %d" % serial
                serial += 1
                target = stage.bus.broker.topic(topic)
                await done([publish_batch(target, batch(value), partition=number)])
                expected[how[0]].append(value)
            elif kind == "restart":
                stage = await stage.restart()
            else:
                await die(stage)
                files.kill() if kind == "kill" else files.power_loss(how[0])
                stage = await Stage(files).settled()
            assert stage.seen() == seen(expected[0], (expected[1], expected[2]))
            assert stage.staging.transaction("t").last_batch_id == last
        await stage.close()

    in_loop(play)()
