import errno
import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from babelbus.cli import program
from babelbus.storage import notes
from tests.cli.shell import Served, Shell


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A data folder with 100 records, its server stopped; each test damages a copy."""
    server = Served(tmp_path_factory.mktemp("filled"))
    server.run("topics", "create", "a", "--segment-bytes", "2KiB")
    for _ in range(5):
        server.run("publish", "a", input="\n".join(f"record {n:20}" for n in range(20)))
    assert server.stop() == 0
    return server


@pytest.fixture
def stopped(filled: Shell, tmp_path: Path) -> Shell:
    """A copy of that folder."""
    shutil.copytree(filled.data, tmp_path / filled.data.name)
    return Shell(tmp_path)


def damage(shell: Shell) -> Path:
    log = min(shell.data.glob("topics/a/0/*.log"))
    content = bytearray(log.read_bytes())
    content[200] ^= 1
    log.write_bytes(content)
    return log


def test_a_whole_folder_is_clean(stopped: Shell) -> None:
    assert "100 records" in stopped.run("check")
    assert stopped.rows("check", str(stopped.data), "--json")[-1]["problems"] == 0


def test_a_flipped_byte_is_told_with_file_and_offset_and_repaired(stopped: Shell) -> None:
    log = damage(stopped)
    done = stopped.run_raw("check")
    assert done.returncode == 1
    assert str(log) in done.stdout
    assert "offset" in done.stdout
    assert "babelbus repair" in done.stderr
    before = log.read_bytes()
    assert stopped.run_raw("repair", "--dry-run").returncode == 1
    assert log.read_bytes() == before
    done = stopped.run_raw("repair", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[0])["kind"] == "damaged"
    assert json.loads(done.stdout.splitlines()[-1])["left"] == 0
    assert list(log.parent.glob("*.damaged-*"))
    assert "all is well" in stopped.run("check")


def test_repair_leaves_a_folder_alone_that_a_server_has(served: Served) -> None:
    assert f"in use by process {served.ready['pid']}" in served.run("repair", code=1)
    assert "all is well" in served.run("check")


@pytest.mark.parametrize("command", ["check", "repair"])
def test_a_folder_of_another_user_is_not_called_no_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    really = os.stat

    def refuse(path: str, *args: Any, **options: Any) -> os.stat_result:  # the tests may run as root, who may all
        if path == str(tmp_path / "topics"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really(path, *args, **options)

    monkeypatch.setattr(os, "stat", refuse)
    result = CliRunner().invoke(program, [command, str(tmp_path)])
    assert result.exit_code == 1
    assert f"{tmp_path}: Permission denied; run this as the user of the server" in result.output


def test_a_folder_of_something_else_is_not_called_clean(shell: Shell) -> None:
    assert "is no data folder" in shell.run("check", ".", code=1)
    assert "there is no data folder" in shell.run("check", code=1)


@pytest.fixture(scope="module")
def filled_database(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A data folder with 20 records in a database, its server stopped; each test damages a copy."""
    server = Served(tmp_path_factory.mktemp("database"))
    server.run("topics", "create", "rows", "--engine", "db")
    server.run("publish", "rows", input="\n".join(f"record {n}" for n in range(20)))
    assert server.rows("check", "--json")[-1]["records"] == 20  # beside the server
    assert server.stop() == 0
    return server


@pytest.fixture
def in_database(filled_database: Shell, tmp_path: Path) -> Shell:
    """A copy of that folder."""
    shutil.copytree(filled_database.data, tmp_path / filled_database.data.name)
    return Shell(tmp_path)


def other_database(shell: Shell) -> str:
    """A configuration that names another database than the server had."""
    (shell.folder / "other.toml").write_text(f'[db]\nurl = "sqlite:///{shell.folder}/other.sqlite"\n')
    return "other.toml"


def test_a_database_is_checked_and_what_is_wrong_in_it_is_named_and_left(in_database: Shell) -> None:
    assert "20 records in" in in_database.run("check", str(in_database.data))
    path = in_database.data / "db.sqlite"
    with sqlite3.connect(path) as connection:
        batches = connection.execute("SELECT base_offset, data FROM batches").fetchall()
        ((base, data),) = [batch for batch in batches if b"record 3" in batch[1]]  # a slow publisher makes several
        changed = data.replace(b"record 3", b"record #")
        connection.execute("UPDATE batches SET data = ? WHERE base_offset = ?", (changed, base))
    connection.close()
    told = in_database.run_raw("check", "--config", other_database(in_database))
    assert told.returncode == 1
    assert "topic 'rows': missing: 1 partitions are not in the database" in told.stdout
    told = in_database.run_raw("check")
    assert told.returncode == 1
    assert f"sqlite:///{path}, topic 'rows', partition 0, offset 3 to 3: damaged" in told.stdout
    assert "restore its rows from a backup" in told.stderr
    assert "babelbus repair" not in told.stderr
    for words in (("repair", "--dry-run"), ("repair",)):
        told = in_database.run_raw(*words)
        assert told.returncode == 1
        assert "a database is never changed by repair" in told.stderr
    assert "still wrong: sqlite:" in told.stdout


def test_a_database_that_cannot_be_reached_is_a_problem_and_the_folder_is_checked_all_the_same(stopped: Shell) -> None:
    (stopped.folder / "babelbus.toml").write_text('[db]\nurl = "postgresql://me@127.0.0.1:1/nowhere"\n')
    told = stopped.run_raw("check")
    assert told.returncode == 1
    assert "100 records" in told.stdout
    assert "postgresql://127.0.0.1:1/nowhere" in told.stdout


def test_a_missing_version_of_the_groups_is_named(stopped: Shell) -> None:
    for missing, left in (("groups.0", "groups.1"), ("groups.1", "groups.0")):
        (stopped.data / missing).unlink(missing_ok=True)
        (stopped.data / left).write_bytes(notes.encode({"format": 1, "sequence": 1, "groups": []}))
        assert "all is well" in stopped.run("check")  # the first version has no other
        (stopped.data / left).write_bytes(notes.encode({"format": 1, "sequence": 2, "groups": []}))
        for command in ("check", "repair"):
            done = stopped.run_raw(command)
            assert done.returncode == 1
            assert f"{stopped.data / missing}: note: missing: version 2 is in {left}" in done.stdout


@pytest.mark.parametrize(
    "name", ["topics/a/settings.json", "groups.0", "zbus.json", "staging/ab.state", "staging/ab-0.part"]
)
def test_a_damaged_note_is_named_with_what_to_do(stopped: Shell, name: str) -> None:
    path = stopped.data / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"00000000\n{}" if name[-4:] != "part" else b"\0\0\0\1\0\0\0\0xmore")
    for command in ("check", "repair"):
        done = stopped.run_raw(command)
        assert done.returncode == 1
        assert f"{path}: note: " in done.stdout
        assert "(repair leaves it: put a copy of the file back" in done.stdout
        assert "nothing: " not in done.stdout


def test_what_cannot_be_read_or_repaired_is_named_and_the_rest_is_repaired(stopped: Shell) -> None:
    topics = stopped.data / "topics"
    shutil.copytree(topics / "a", topics / "b")
    (topics / "b/0/checkpoint").unlink()
    (topics / "b/0/checkpoint").mkdir()
    shutil.copytree(topics / "a", topics / "c")
    shutil.rmtree(topics / "c/0")
    (topics / "c/0").write_text("")
    (topics / "stray").write_text("")
    log = damage(stopped)
    told = stopped.run_raw("check").stdout
    for line in (
        f"{topics}/stray: unreadable: the disk refuses it: Not a directory",
        f"{topics}/c/0: unreadable: the disk refuses it: Not a directory",
        f"{topics}/b/0/checkpoint: checkpoint: ",
        f"{log}, byte ",
    ):
        assert line in told
    done = stopped.run_raw("repair")
    assert done.returncode == 1
    left = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("still wrong: ")]
    assert {line.partition(": ")[0] for line in left} == {
        f"{topics}/{path}" for path in ("stray", "c/0", "b/0", "b/0/checkpoint")
    }
    refused = "unreadable: the disk refused the repair: Is a directory (to do: mend the disk, then repair again)"
    assert f"still wrong: {topics}/b/0: {refused}" in done.stdout
    assert list(log.parent.glob("*.damaged-*"))
    assert str(log) not in stopped.run_raw("check").stdout


@pytest.mark.parametrize("keep_settings", [True, False])
def test_a_partition_that_is_missing_is_named_and_begins_anew(stopped: Shell, keep_settings: bool) -> None:
    stopped.run("repair")
    partition = stopped.data / "topics/a/0"
    shutil.copytree(partition, partition.with_name("1"))
    (stopped.data / "conf/topics").write_text("a 3\n")
    settings = partition.with_name("settings.json")
    settings.write_bytes(notes.encode({"partitions": 3, "settings": {}}))
    if not keep_settings:
        settings.unlink()
    shutil.rmtree(partition)
    done = stopped.run_raw("check")
    assert done.returncode == 1
    missing = [line.partition(": ")[0] for line in done.stdout.splitlines() if "the partition is missing" in line]
    assert missing == [str(partition), str(partition.with_name("2"))]
    stopped.run("repair")
    assert "all is well" in stopped.run("check")


def test_a_topic_of_the_list_without_a_folder_is_named(stopped: Shell) -> None:
    shutil.rmtree(stopped.data / "topics/a")
    for command in ("check", "repair"):
        done = stopped.run_raw(command)
        assert done.returncode == 1
        assert "topic 'a': missing: it is in conf/topics and has no folder" in done.stdout
    (stopped.data / "conf/topics").write_text("a ten\nb 5000\n")
    assert f"{stopped.data}/conf/topics: note: " in stopped.run_raw("check").stdout


def test_settings_that_hide_where_the_records_are_are_named(in_database: Shell) -> None:
    settings = in_database.data / "topics/rows/settings.json"
    settings.unlink()
    for command in ("check", "repair"):
        done = in_database.run_raw(command)
        assert done.returncode == 1
        assert f"{settings}: missing: " in done.stdout
    in_memory = in_database.data / "topics/%24state/settings.json"
    in_memory.write_bytes(notes.encode({"partitions": 1, "settings": {"engine": "memory"}}))
    assert f"{in_memory}: note: it names engine memory" in in_database.run_raw("check").stdout


def test_a_topic_of_the_database_with_other_settings_is_named_and_not_begun_anew(in_database: Shell) -> None:
    settings = in_database.data / "topics/rows/settings.json"
    for engine in ("disk", "memory"):
        settings.write_bytes(notes.encode({"partitions": 1, "settings": {"engine": engine}}))
        for command in ("check", "repair"):
            done = in_database.run_raw(command)
            assert done.returncode == 1
            told = f"{settings}: note: it names engine {engine}, and the database has partitions of the topic"
            assert done.stdout.count("topics/rows") == done.stdout.count(told) > 0
    assert not settings.with_name("0").exists()
