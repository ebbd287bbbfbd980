import json
from pathlib import Path

import pytest

from tests.cli.shell import Served, Shell


@pytest.fixture
def stopped(tmp_path: Path) -> Shell:
    """A data folder with 100 records, its server stopped."""
    server = Served(tmp_path)
    server.run("topics", "create", "a", "--segment-bytes", "2KiB")
    for _ in range(5):
        server.run("publish", "a", input="\n".join(f"record {n:20}" for n in range(20)))
    assert server.stop() == 0
    return server


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


def test_a_folder_of_something_else_is_not_called_clean(shell: Shell) -> None:
    assert "is no data folder" in shell.run("check", ".", code=1)
    assert "there is no data folder" in shell.run("check", code=1)
