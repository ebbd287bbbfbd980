import json
import os
import socket
from pathlib import Path

import msgspec
from click.testing import CliRunner

from babelbus.cli import program
from babelbus.config import Config, describe
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
