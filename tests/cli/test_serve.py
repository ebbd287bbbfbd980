import errno
import json
import os
import socket
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from babelbus.cli import program
from babelbus.config import Config, describe
from babelbus.server import process
from babelbus.server.access import AccessLists
from tests.cli.shell import Served, Shell


def test_a_server_says_where_it_listens_once_it_is_ready_and_stops_with_code_0(tmp_path: Path) -> None:
    server = Served(tmp_path)
    mesh = {"eventmesh-tcp", "eventmesh-http", "eventmesh-grpc"}
    assert set(server.ready["addresses"]) == {"jebp", "sbus", "worterbuch", "worterbuch-tcp", "zbus", "admin", *mesh}
    assert server.ready["first_start"]
    assert os.path.exists(server.ready["admin_key"])
    host, _, port = server.ready["addresses"]["jebp"].rpartition(":")
    socket.create_connection((host, int(port))).close()
    assert server.stop() == 0
    assert not (server.data / "conf" / "addresses").exists()
    again = Served(tmp_path)
    assert not again.ready["first_start"]
    assert again.ready["server_fingerprint"] == server.ready["server_fingerprint"]
    assert again.stop() == 0


def test_a_second_server_on_the_folder_is_told_who_has_it(served: Served) -> None:
    told = served.run("serve", "--server-any-port", code=1)
    assert f"in use by process {served.ready['pid']}" in told


def test_a_taken_port_is_told_with_the_flags_that_choose_another(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = shell.run("serve", "--jebp-port", str(taken.getsockname()[1]), "--server-any-port", code=1)
    assert "babelbus: cannot listen" in told
    assert "choose another port with --jebp-port (0: any), another address with --jebp-host" in told


@pytest.mark.parametrize(
    ("number", "file", "told"),
    [
        (errno.EACCES, "bus/lock", "bus/lock: Permission denied; let this user write there, or choose another folder"),
        (errno.EROFS, "bus", "bus: Read-only file system; let this user write there, or choose another folder"),
        (errno.EPERM, "", "Operation not permitted; let this user write there, or choose another folder"),
        (errno.ENOSPC, None, "bus: No space left on device; make room there, or choose another folder"),
        (errno.EDQUOT, "bus/topics", "bus/topics: Disk quota exceeded; make room there, or choose another folder"),
        (errno.ENOTDIR, "bus", "bus: Not a directory; choose a folder that can be made with --data-folder"),
        (errno.ENOLCK, "bus/lock", "bus/lock: No locks available; the file system has no locks; choose a folder"),
        (
            errno.EADDRNOTAVAIL,
            None,
            "cannot listen: Cannot assign requested address; choose an address of this machine",
        ),
    ],
)
def test_a_start_that_the_machine_refuses_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, file: str | None, told: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), None if file is None else str(tmp_path / file))

    monkeypatch.setattr(process, "run", fail)
    result = CliRunner().invoke(program, ["serve", "--data-folder", str(tmp_path / "bus")])
    assert (result.exit_code, told in result.output) == (1, True), result.output


def test_a_start_without_room_for_the_list_of_topics_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(AccessLists, "write_topics", fail)
    result = CliRunner().invoke(program, ["serve", "--data-folder", str(tmp_path / "bus"), "--server-any-port"])
    assert result.exit_code == 1
    advice = "No space left on device; make room there, or choose another folder"
    assert f"babelbus: {tmp_path / 'bus'}: {advice}" in result.output


def test_a_host_without_an_address_is_told_with_the_flags_that_choose_another(shell: Shell) -> None:
    told = shell.run("serve", "--server-any-port", "--server-insecure", "--zbus-host", "no.such.host.invalid", code=1)
    assert "babelbus: cannot listen: " in told
    assert "choose an address of this machine with the flags that end in -host" in told


def test_a_data_folder_below_a_file_is_told_with_the_flag_that_chooses_another(shell: Shell) -> None:
    (shell.folder / "file").touch()
    told = shell.run("serve", "--server-any-port", "--data-folder", "file/data", code=1)
    assert f"babelbus: {shell.folder}/file/data: Not a directory; choose a folder that can be made" in told


def test_a_killed_server_is_not_taken_for_a_running_one(tmp_path: Path) -> None:
    server = Served(tmp_path)
    server.process.kill()
    server.process.communicate()
    told = server.run("topics", "list", "--admin", server.ready["addresses"]["admin"], code=1)
    assert "nothing listens on" in told
    assert "babelbus serve" in told


def test_every_setting_is_a_flag_of_serve() -> None:
    text = CliRunner().invoke(program, ["serve", "--help"]).output
    assert [one.key for one in describe() if "--" + one.key.replace(".", "-").replace("_", "-") not in text] == []


def test_config_shows_what_flags_and_environment_make_of_it(tmp_path: Path) -> None:
    (tmp_path / "bus.toml").write_text('[log]\nformat = "json"\nlevel = "error"\n')
    args = ["config", "--json", "--no-server-uvloop", "--jebp-port", "7", "--config", str(tmp_path / "bus.toml")]
    result = CliRunner().invoke(program, args, env={"BABELBUS_LOG_LEVEL": "debug"})
    made = json.loads(result.output)
    assert (made["server"]["uvloop"], made["jebp"]["port"]) == (False, 7)
    assert made["log"] == {"level": "debug", "format": "json"}


def test_the_defaults_of_config_are_a_file_that_serve_reads(tmp_path: Path) -> None:
    path = tmp_path / "bus.toml"
    path.write_text(CliRunner().invoke(program, ["config", "--defaults"]).output)
    result = CliRunner().invoke(program, ["config", "--config", str(path), "--json"])
    assert msgspec.json.decode(result.output, type=Config) == Config()


def test_a_wrong_setting_is_one_line_that_names_it_and_its_place() -> None:
    result = CliRunner().invoke(program, ["config", "--jebp-port", "many"])
    assert result.exit_code == 1
    assert result.stderr.startswith("babelbus: jebp.port = 'many' (from the command line)")
    assert result.stderr.count("\n") == 1


def test_the_variables_of_the_command_line_are_no_misspelt_settings() -> None:
    environment = {"BABELBUS_ADMIN": "127.0.0.1:1", "BABELBUS_SERVER": "127.0.0.1:1"}
    assert CliRunner().invoke(program, ["config"], env=environment).exit_code == 0
