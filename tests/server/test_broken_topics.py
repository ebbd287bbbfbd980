"""Starts on a data folder in which the files of one topic are broken: that topic is refused, the others are served."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from babelbus.core.access import SERVER, AccessRefusedError, Principal
from babelbus.core.broker import Broker
from babelbus.core.catalog import TopicExistsError
from babelbus.core.receipt import Receipt
from babelbus.errors import StorageError
from babelbus.server.app import Server
from babelbus.storage.errors import DiskError, DiskFullError
from babelbus.storage.files import File, LocalFiles
from babelbus.web.server import health_reasons
from tests.support.bus import done, events, in_loop, publish
from tests.support.server import configure, running

SETTINGS = "settings.json"
LOG = "00000000000000000000.log"


async def write(broker: Broker, name: str) -> list[Receipt]:
    """Publish a record to every partition of a topic."""
    return await done(publish(broker, events(*(b"%d" % number for number in range(100)), subject=name)))


async def fill(folder: Path) -> None:
    """Make topics of engine disk and db with records, and stop the server."""
    async with running(configure(folder)) as server:
        for name, partitions, engine in (("bad", 3, "disk"), ("good", 1, "disk"), ("rows", 1, "db")):
            topic = await server.broker.create_topic(name, partitions, {"engine": engine}, principal=SERVER)
            await write(server.broker, name)
            assert all(partition.next_offset for partition in topic.partitions)


async def check_closed(server: Server, name: str, reason: str, others: set[str]) -> None:
    """Check that one topic is refused with a reason that says what to do, and that the other ones take records."""
    broker = server.broker
    assert list(broker.damaged_topics) == [name]
    (told,) = health_reasons(server)
    assert told.startswith(f"topic {name} is not open: ")
    assert reason in told
    assert told.endswith("start again")
    with pytest.raises(TopicExistsError, match="cannot be opened"):
        await broker.create_topic(name, principal=SERVER)
    (refused,) = await write(broker, name)
    assert isinstance(refused.error, StorageError)
    assert refused.error.retriable  # a publisher that gave it up would lose it, and a copy may be put back
    for other in others:
        assert not any(receipt.error for receipt in await write(broker, other))


def put_file(path: Path) -> None:
    """Put a file in the place of a folder."""
    shutil.rmtree(path)
    path.write_text("")


def put_folder(path: Path) -> None:
    """Put a folder in the place of a file."""
    path.unlink()
    path.mkdir()


def put_loop(path: Path) -> None:
    """Put a symbolic link that leads nowhere in the place of a folder."""
    shutil.rmtree(path)
    path.symlink_to(path)


def clear(path: Path) -> None:
    """Remove the files of a folder."""
    for each in path.iterdir():
        each.unlink()


def lose_log(path: Path) -> None:
    """Remove the log of a partition and damage its checkpoint, which tells how far the log went."""
    (path / LOG).unlink()
    (path / "checkpoint").write_text("damaged")


@pytest.mark.parametrize(
    ("do", "path", "reason"),
    [
        (put_file, "bad", "reading topics/bad/settings.json: Not a directory"),
        (put_loop, "bad", "reading topics/bad/settings.json: Too many levels"),
        (put_folder, f"bad/{SETTINGS}", "reading topics/bad/settings.json: Is a directory"),
        (put_file, "bad/0", "opening topics/bad/0: Not a directory"),
        (put_folder, f"bad/1/{LOG}", f"topics/bad/1/{LOG}: Is a directory"),
        (shutil.rmtree, "bad/0", "topics/bad/0 is missing"),
        (shutil.rmtree, "bad/2", "topics/bad/2 is missing"),
        (clear, "bad/1", "topics/bad/1 is missing or has no log"),
        (lose_log, "bad/1", "topics/bad/1 is missing or has no log"),
    ],
)
def test_a_topic_that_cannot_be_opened_is_refused_and_the_others_are_served(
    tmp_path: Path, do: Callable[[Path], None], path: str, reason: str
) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        broken, copy = tmp_path / "topics" / "bad", tmp_path / "copy"
        shutil.copytree(broken, copy)
        do(tmp_path / "topics" / path)
        for _ in range(2):  # the first start makes nothing that the second takes for the topic
            async with running(configure(tmp_path)) as server:
                await check_closed(server, "bad", reason, {"good", "rows"})
        if broken.is_dir() and not broken.is_symlink():
            shutil.rmtree(broken)
        else:
            broken.unlink()
        shutil.move(copy, broken)
        async with running(configure(tmp_path)) as server:
            assert not server.broker.damaged_topics
            assert sum(partition.next_offset for partition in server.broker.topic("bad").partitions) == 100

    test()


def move_database(folder: Path, target: Path) -> None:
    """Move a database of SQLite with the files beside it."""
    for path in folder.glob("db.sqlite*"):
        path.rename(target / path.name)


def test_a_topic_without_its_settings_is_not_taken_for_one_of_another_engine(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        (tmp_path / "topics/rows" / SETTINGS).unlink()
        async with running(configure(tmp_path)) as server:
            await check_closed(server, "rows", "settings.json of topic 'rows' is missing", {"good", "bad"})

    test()


def test_a_topic_that_is_not_in_its_database_stays_closed_until_it_is_there_again_or_given_up(tmp_path: Path) -> None:
    """Perhaps it is the wrong database: publishers would fill it, and offsets be given again."""

    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        elsewhere, wrong = tmp_path / "elsewhere", tmp_path / "wrong"
        elsewhere.mkdir()
        wrong.mkdir()
        move_database(tmp_path, elsewhere)
        async with running(configure(tmp_path)) as server:
            await check_closed(server, "rows", "engine db has 0 of its 1 partitions", {"good", "bad"})
        move_database(tmp_path, wrong)
        move_database(elsewhere, tmp_path)
        async with running(configure(tmp_path)) as server:
            assert not server.broker.damaged_topics
            assert server.broker.topic("rows").partition(0).next_offset
        move_database(tmp_path, elsewhere)
        async with running(configure(tmp_path)) as server:
            with pytest.raises(AccessRefusedError):
                await server.broker.remove_topic("rows")
            await server.broker.remove_topic("rows", SERVER)
            assert not health_reasons(server)
            (partition,) = (await server.broker.create_topic("rows", 1, {"engine": "db"}, principal=SERVER)).partitions
            assert partition.next_offset == 0
            assert not any(receipt.error for receipt in await write(server.broker, "rows"))
        async with running(configure(tmp_path)) as server:
            assert not server.broker.damaged_topics
            assert server.broker.topic("rows").partition(0).next_offset

    test()


def test_a_topic_that_has_lost_a_partition_may_be_removed(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        shutil.rmtree(tmp_path / "topics/bad/1")
        async with running(configure(tmp_path)) as server:
            await server.broker.remove_topic("bad", SERVER)
            assert not health_reasons(server)
        async with running(configure(tmp_path)) as server:
            assert not server.broker.damaged_topics
            assert server.broker.topic_names()[-2:] == ["good", "rows"]

    test()


def test_the_groups_of_a_topic_that_is_given_up_do_not_come_back_with_a_new_topic_of_its_name(tmp_path: Path) -> None:
    """Their places are of other records: they would skip the new ones."""

    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        async with running(configure(tmp_path)) as server:
            server.broker.groups.create("bad", "readers", principal=SERVER)
        shutil.rmtree(tmp_path / "topics/bad/1")
        async with running(configure(tmp_path)) as server:
            await server.broker.remove_topic("bad", SERVER)
            await server.broker.create_topic("bad", 3, principal=SERVER)
            await write(server.broker, "bad")
        async with running(configure(tmp_path)) as server:
            assert server.broker.groups.find("bad", "readers") is None

    test()


def test_settings_of_another_topic_do_not_hide_its_records(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        good, rows = tmp_path / "topics/good" / SETTINGS, tmp_path / "topics/rows" / SETTINGS
        kept = good.read_bytes(), rows.read_bytes()
        rows.write_bytes(kept[0])
        good.write_bytes(kept[1])
        async with running(configure(tmp_path)) as server:
            assert "names engine db, which has none of its records" in str(server.broker.damaged_topics["good"])
            assert "names engine disk, which has none of its records" in str(server.broker.damaged_topics["rows"])
        good.write_bytes(kept[0])
        rows.write_bytes(kept[1])
        async with running(configure(tmp_path)) as server:
            ends = [server.broker.topic(name).partition(0).next_offset for name in ("good", "rows")]
            assert ends == [100, 100]

    test()


def test_settings_of_a_topic_in_memory_do_not_hide_records_either(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        async with running(configure(tmp_path)) as server:
            await server.broker.create_topic("short", 1, {"engine": "memory"}, principal=SERVER)
        rows, short = (tmp_path / "topics" / name / SETTINGS for name in ("rows", "short"))
        kept = rows.read_bytes()
        rows.write_bytes(short.read_bytes())
        short.write_bytes(kept)
        async with running(configure(tmp_path)) as server:
            assert "engine db has 0 of its 1 partitions" in str(server.broker.damaged_topics["short"])
            await server.broker.remove_topic("short", SERVER)
            await check_closed(server, "rows", "names engine memory, which has none of its records", {"good", "bad"})

    test()


@pytest.mark.parametrize("do", [shutil.rmtree, clear])
def test_a_topic_whose_making_a_crash_cut_short_is_no_loss(tmp_path: Path, do: Callable[[Path], None]) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        listed = tmp_path / "conf/topics"
        before = listed.read_text()
        async with running(configure(tmp_path)) as server:
            await server.broker.create_topic("half", 2, principal=SERVER)
            await server.broker.alter_topic("bad", {"partitions": 4}, SERVER)
        listed.write_text(before)  # the crash came before the list was written
        do(tmp_path / "topics/half/1")
        do(tmp_path / "topics/bad/3")
        (tmp_path / "topics/unmade").mkdir()
        async with running(configure(tmp_path)) as server:
            assert not server.broker.damaged_topics
            topics = {topic.name: len(topic.partitions) for topic in server.broker.topics() if not topic.reserved}
            assert topics == {"bad": 4, "good": 1, "half": 2, "rows": 1}
            assert not any(receipt.error for receipt in await write(server.broker, "half"))

    test()


class FullDisk(LocalFiles):
    """Has no room for the third partition of a topic."""

    def open(self, path: str, *, create: bool = False, write: bool = True) -> File:
        if create and "topics/good/2/" in path:
            raise OSError(errno.ENOSPC, "no space left", path)
        return super().open(path, create=create, write=write)


def test_a_topic_that_the_disk_did_not_let_grow_grows_at_the_next_start(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        listed = tmp_path / "conf/topics"
        listed.write_text(listed.read_text().replace("good 1", "good 3"))
        with pytest.raises(DiskFullError):
            await Server(configure(tmp_path), files=FullDisk()).start()
        async with running(configure(tmp_path)) as server:
            assert not server.broker.damaged_topics
            assert [partition.next_offset for partition in server.broker.topic("good").partitions] == [100, 0, 0]

    test()


def test_names_that_no_topic_has_and_copies_beside_partitions_are_left_alone(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        topics = tmp_path / "topics"
        for name in ("a b", "x" * 100 + "!" * 150, "%zz"):
            (topics / name).mkdir()
        os.mkdir(os.fsencode(topics) + b"/\xff")
        (topics / ".removed-1").write_text("")
        shutil.copytree(topics / "good/0", topics / "good/20261124")
        async with running(configure(tmp_path)) as server:
            assert not server.broker.damaged_topics
            assert [topic.name for topic in server.broker.topics() if not topic.reserved] == ["bad", "good", "rows"]
            assert len(server.broker.topic("good").partitions) == 1
        assert sorted(os.listdir(topics / "good")) == ["0", "20261124", SETTINGS]

    test()


def test_a_start_without_the_state_or_the_table_of_access_ends_with_what_to_do(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        await fill(tmp_path)
        async with running(configure(tmp_path)) as server:
            await server.gate.put([Principal("alice")], SERVER)
        for path, do, reason in (
            ("%24access/0", put_file, r"topic '\$access' cannot be opened: opening topics/%24access/0"),
            ("%24access/0", shutil.rmtree, r"topic '\$access' cannot be opened: topics/%24access/0 is missing"),
            ("%24state", put_file, r"topic '\$state' cannot be opened: reading topics/%24state/settings.json: Not"),
        ):
            broken, copy = tmp_path / "topics" / path, tmp_path / "copy"
            shutil.copytree(broken, copy)
            do(broken)
            with pytest.raises(StorageError, match=reason + ".* start again"):
                async with running(configure(tmp_path)):
                    pass
            broken.unlink(missing_ok=True)
            shutil.move(copy, broken)
        async with running(configure(tmp_path)) as server:
            assert server.gate.table.principal("alice") is not None

    test()


async def log_in(server: Server) -> None:
    """Write a record to the audit."""
    server.gate.audit.login("alice", "web")
    flushed = server.gate.audit.flush()
    assert flushed is not None
    await flushed.wait()


def test_the_audit_goes_on_with_new_settings_and_is_not_named_any_more(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        async with running(configure(tmp_path)) as server:
            await log_in(server)
        (tmp_path / "topics/%24audit" / SETTINGS).write_text("damaged")
        async with running(configure(tmp_path)) as server:
            assert list(server.broker.damaged_topics) == ["$audit"]
            await log_in(server)
            assert server.broker.topic("$audit").partition(0).next_offset == 2
            assert not health_reasons(server)

    test()


def test_an_audit_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    @in_loop
    async def test() -> None:
        async with running(configure(tmp_path)) as server:
            await log_in(server)
        put_file(tmp_path / "topics/%24audit")
        async with running(configure(tmp_path)) as server:
            with pytest.raises(DiskError, match=r"topic '\$audit' could not be stored: Not a directory"):
                await log_in(server)
            assert list(server.broker.damaged_topics) == ["$audit"]

    test()
