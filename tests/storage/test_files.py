"""The file layer on real files; what only a second process or a limit of the system can show runs in a subprocess."""

import errno
import fcntl
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.clock import SystemClock
from babelbus.config import JetstreamSettings
from babelbus.storage.errors import DiskError, DiskFullError, FolderLockedError
from babelbus.storage.files import File, FileSystem, LocalFiles, disk_error
from babelbus.storage.memory import MemoryFiles
from tests.storage.faults import FaultyFiles
from tests.support.nats import NatsServer

_prefixes = itertools.count()


@pytest.fixture(params=["local", "memory", "faulty", "replicated"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FileSystem]:
    made: dict[str, FileSystem] = {"local": LocalFiles(), "memory": MemoryFiles(), "faulty": FaultyFiles()}
    if request.param in made:
        yield made[request.param]
        return
    from babelbus.storage.jetstream import Ownership, ReplicatedFiles

    server: NatsServer = request.getfixturevalue("nats")
    settings = JetstreamSettings(server.url, prefix=f"f{next(_prefixes)}", replicas=1, lease_seconds=0)
    ownership = Ownership(settings, LocalFiles(), str(tmp_path), SystemClock())
    ownership.connect("tests")
    yield ReplicatedFiles(ownership, LocalFiles(), str(tmp_path), SystemClock())
    ownership.close()


@pytest.fixture
def folder(files: FileSystem, tmp_path: Path) -> str:
    files.make_folder(f"{tmp_path}/a/b")
    return f"{tmp_path}/a/b"


def test_bytes_stand_where_they_were_written(files: FileSystem, folder: str) -> None:
    file = files.open(f"{folder}/x", create=True)
    file.pwrite(b"abc", 0)
    file.pwrite(memoryview(bytearray(b"XYZ")), 5)
    assert (file.size(), file.pread(100, 0)) == (8, b"abc\0\0XYZ")
    assert file.pread(3, 6) == b"YZ"
    assert file.pread(3, 8) == b""
    file.truncate(2)
    file.truncate(4)
    file.flush()
    file.close()
    assert files.read_file(f"{folder}/x") == b"ab\0\0"


def test_a_missing_file_is_told_from_an_empty_one(files: FileSystem, folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(f"{folder}/none")
    with pytest.raises(FileNotFoundError):
        files.read_file(f"{folder}/none")
    with pytest.raises(FileNotFoundError):
        files.rename(f"{folder}/none", f"{folder}/other")
    files.unlink(f"{folder}/none")
    files.open(f"{folder}/empty", create=True).close()
    assert files.read_file(f"{folder}/empty") == b""
    assert (files.exists(f"{folder}/empty"), files.exists(f"{folder}/none")) == (True, False)


def test_a_replaced_file_is_whole_and_leaves_nothing_beside_it(files: FileSystem, folder: str) -> None:
    files.replace_file(f"{folder}/x", b"one")
    files.replace_file(f"{folder}/x", b"two!")
    assert files.read_file(f"{folder}/x") == b"two!"
    assert files.list_folder(folder) == ["x"]


def test_files_and_folders_are_listed_moved_and_removed(files: FileSystem, folder: str) -> None:
    for name in ("2", "1"):
        files.replace_file(f"{folder}/{name}", b"x")
    parent = folder.rpartition("/")[0]
    files.make_folder(folder)
    files.rename(folder, f"{parent}/c")
    files.rename(f"{parent}/c/1", f"{parent}/c/2")
    files.flush_folder(f"{parent}/c")
    assert files.list_folder(parent) == ["c"]
    assert files.list_folder(f"{parent}/c") == ["2"]
    files.remove_tree(f"{parent}/c")
    files.remove_tree(f"{parent}/c")
    assert files.list_folder(parent) == files.list_folder(folder) == []


def test_a_lock_is_held_until_it_is_closed(files: FileSystem, folder: str) -> None:
    lock = files.lock(f"{folder}/lock")
    with pytest.raises(FolderLockedError):
        files.lock(f"{folder}/lock")
    lock.close()
    files.lock(f"{folder}/lock").close()


def test_a_replaced_file_has_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "key.new").write_bytes(b"left by a crash")
    LocalFiles().replace_file(f"{tmp_path}/key", b"secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_the_owner_may_read_what_is_made(tmp_path: Path) -> None:
    files = LocalFiles()
    files.make_folder(f"{tmp_path}/a/b")
    files.open(f"{tmp_path}/a/b/log", create=True).close()
    files.replace_file(f"{tmp_path}/a/b/settings", b"")
    files.lock(f"{tmp_path}/a/lock").close()
    assert [mode_of(tmp_path / "a"), mode_of(tmp_path / "a/b")] == [0o700, 0o700]
    assert [mode_of(tmp_path / name) for name in ("a/b/log", "a/b/settings", "a/lock")] == [0o600] * 3


def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    root, names = tmp_path / "data", ("topics", "conf", "lock", "groups.*")
    for name in ("topics/t/0", "conf", "run"):
        (root / name).mkdir(parents=True)
        (root / name / "file").touch()
    for name in ("lock", "groups.0", "letter"):
        (root / name).touch()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (root / "topics/elsewhere").symlink_to(tmp_path)
    LocalFiles().close_to_others(str(root), names)
    assert {mode_of(root / name) for name in (".", "topics", "topics/t", "topics/t/0", "conf")} == {0o700}
    assert {mode_of(root / name) for name in ("lock", "groups.0")} == {0o600}
    assert [mode_of(root / name) for name in ("run", "run/file", "letter")] == [0o755, 0o644, 0o644]
    (root / "conf").chmod(0o755)
    LocalFiles().close_to_others(str(root), names, mode=0o711)
    assert (mode_of(root), mode_of(root / "conf")) == (0o711, 0o700)


def test_a_file_that_cannot_be_replaced_stays_and_takes_no_room(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="directory"):
        LocalFiles().replace_file(f"{tmp_path}/x", b"new")
    assert (tmp_path / "x").is_dir()


def test_a_file_system_without_locks_is_not_told_as_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    path = str(tmp_path / "lock")
    with pytest.raises(OSError, match="No locks available") as failure:
        LocalFiles().lock(path)
    assert failure.value.filename == path


def test_a_lock_keeps_out_a_second_process_and_names_the_first(tmp_path: Path) -> None:
    lock = LocalFiles().lock(f"{tmp_path}/lock")
    code = "import sys; from babelbus.storage.files import LocalFiles; LocalFiles().lock(sys.argv[1])"
    command = [sys.executable, "-c", code, f"{tmp_path}/lock"]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"in use by process {os.getpid()}" in second.stderr
    lock.close()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


LIMITED = """
import resource, sys
from babelbus.clock import SystemClock
from babelbus.storage.contract import LogSettings
from babelbus.storage.files import LocalFiles
from babelbus.storage.errors import DiskFullError
from babelbus.records.format import encode_payloads
from babelbus.storage.disk.log import Log

log = Log(LocalFiles(), sys.argv[1], LogSettings(), SystemClock())
append = lambda: log.append(encode_payloads([bytes(100)] * 50, [1] * 50, log.next_offset))
append()
size = log.size_bytes
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        append()
        sys.exit("a write over the limit worked")
    except DiskFullError:
        pass
assert log.next_offset == 50 and log.size_bytes == size
assert log.read(0, 2**20).next_offset == 50
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
append()
assert log.flush() == 100
log.close()
log = Log(LocalFiles(), sys.argv[1], LogSettings(), SystemClock())
assert log.next_offset == 100 and not log.recovery.bad and not log.recovery.cut_bytes
"""


def test_a_write_cut_short_by_the_file_size_limit_stores_nothing_and_later_ones_work(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, f"{tmp_path}/p"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DiskFullError),
        (errno.EDQUOT, DiskFullError),
        (errno.EFBIG, DiskFullError),
        (errno.EIO, DiskError),
        (errno.EROFS, DiskError),
    ],
)
def test_errors_of_the_system_become_ours_and_say_what_was_done(number: int, kind: type[Exception]) -> None:
    error = disk_error(OSError(number, os.strerror(number)), "write of x.log")
    assert type(error) is kind
    assert str(error) == f"write of x.log: {os.strerror(number)}"


def test_a_short_read_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    file: File = LocalFiles().open(f"{tmp_path}/x")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, position: real(descriptor, min(size, 7), position))
    assert file.pread(50, 3) == bytes(range(3, 53))
    assert file.pread(500, 60) == bytes(range(60, 100))
