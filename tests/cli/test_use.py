"""What the second trial met in use: errors that say which of several causes it was, and what to do."""

import http.client
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest

from babelbus.cli.api_http import HttpTransport
from babelbus.cli.command import CommandError
from babelbus.cli.serve import _advice
from babelbus.config import Config
from tests.cli.shell import COMMAND, ENVIRONMENT, Served, Shell
from tests.support.bus import SAFETY_NET_SECONDS


def test_a_refused_record_is_told_apart_from_an_unknown_topic_and_partition_and_a_missing_right(
    served: Served, tmp_path: Path
) -> None:
    served.run("topics", "create", "small")
    told = served.run("publish", "nobody", "x", code=1)
    assert "there is no topic 'nobody'" in told
    told = served.run("publish", "small", "x", "--partition", "7", code=1)
    assert "topic 'small' has 1 partition, from 0 on: there is no 7" in told
    (guest,) = served.rows("clients", "add", "guest", "--json")
    as_guest = ("--server", served.ready["addresses"]["jebp"], "--identity", guest["key_file"],
                "--server-fingerprint", guest["server_fingerprint"])  # fmt: skip
    served.run("access", "enable", "--yes")
    try:
        served.run("access", "deny", "guest", "publish", "small")
        assert "no right to publish to topic 'small'" in served.run("publish", "small", "x", *as_guest, code=1)
    finally:
        served.run("access", "enable", "--off", "--yes")
    told = served.run("publish", "$state", "x", code=1)
    assert "topic '$state' is the server's own" in told


def test_a_disk_that_refuses_is_named_with_how_many_were_stored(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))  # refuses as a full disk does

    shell = Shell(tmp_path)
    try:
        server = shell.start("serve", "--server-any-port", "--json", "--log-level", "error", preexec_fn=limit)
        assert server.stdout is not None
        assert server.stdout.readline()
        shell.run("topics", "create", "orders")
        told = shell.run("publish", "orders", input=("x" * 1_000 + "\n") * 3_000, code=1)
        assert "the server cannot store records of topic 'orders' now: " in told
        assert re.search(r"; [\d,]+ of [\d,]+ records stored", told)
        assert "waiting, for the server cannot store" in told
        shown = shell.run_raw("status", "--interval", "100ms")
        assert shown.returncode == 1
        assert "degraded" in shown.stdout
        assert "topic orders" in shown.stdout
    finally:
        shell.kill_started()


def test_another_protocol_on_the_port_is_told_without_a_traceback(served: Served) -> None:
    told = served.run("fetch", "t", "--server", served.ready["addresses"]["zbus"], code=1)
    assert "this may be the port of another protocol" in told


@pytest.mark.parametrize(
    ("problem", "flags"),
    [
        ("address ('127.0.0.1', 8080): in use", ["--worterbuch-port", "--worterbuch-host"]),
        ("address ('::1', 5320, 0, 0): in use", ["--jebp-port", "--jebp-host"]),
        ("address ('0.0.0.0', 8600): in use", ["--admin-port", "--admin-host"]),
        ("in use", ["--server-any-port"]),
    ],
)
def test_a_taken_port_is_answered_with_its_own_flags(problem: str, flags: list[str]) -> None:
    assert sorted(set(re.findall(r"--[a-z-]+", _advice(Config(), problem)))) == sorted(flags)


def test_one_is_singular_and_large_numbers_have_separators(served: Served) -> None:
    served.run("topics", "create", "counted")
    assert served.run("publish", "counted", input="a\n").startswith("1 record published")
    assert served.run("publish", "counted", input="a\n" * 1_500).startswith("1,500 records published")
    (row,) = served.rows("publish", "counted", "--json", input='{"payload": "a"}\n' * 1_500)
    assert row["records"] == 1_500
    assert "with 3,001 records" in served.run("topics", "remove", "counted", "--yes")


def test_the_list_of_clients_has_the_fingerprint_of_the_server(served: Served) -> None:
    rows = served.rows("clients", "list", "--json")
    assert {row["server_fingerprint"] for row in rows} == {served.ready["server_fingerprint"]}
    assert served.ready["server_fingerprint"] in served.run("clients", "list")


def test_key_files_are_named_once_with_what_to_do(served: Served, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.key", tmp_path):
        told = served.run("fetch", "t", "--identity", str(path), code=1)
        assert told.count(str(path)) == 1
        assert "--identity" in told or "name" in told


def test_tables_fit_the_terminal(served: Served) -> None:
    served.run("topics", "create", "orders/europe")
    served.run("publish", "orders/europe", input="a\n" * 10_002)
    served.run("groups", "create", "orders/europe", "billing", "--from", "beginning")
    for width in (60, 80, 200):
        text = on_terminal(served, width, "groups", "list")
        assert "10,002" in text.split()
        assert "Redelivered" in text.split()
        assert max(map(len, text.splitlines())) <= width
    assert "\x1b[1m" in on_terminal(served, 200, "groups", "list", plain=False)
    assert "\x1b[" not in on_terminal(served, 200, "groups", "list", plain=False, NO_COLOR="1")


def on_terminal(shell: Shell, width: int, *args: str, plain: bool = True, **variables: str) -> str:
    """Return what a command prints on a terminal of this width."""
    ours, theirs = os.openpty()
    environment = ENVIRONMENT | {"COLUMNS": str(width), "TERM": "xterm"} | variables
    environment.pop("NO_COLOR", None) if "NO_COLOR" not in variables else None
    with subprocess.Popen([*COMMAND, *args], cwd=shell.folder, env=environment, stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 65_536):
                output += chunk
        except OSError:  # the terminal is closed
            pass
        assert process.wait(SAFETY_NET_SECONDS) == 0
    os.close(ours)
    text = output.decode().replace("\r\n", "\n")
    return re.sub(r"\x1b\[\d*m", "", text) if plain else text


def test_a_server_that_ends_while_a_command_connects_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(_: http.client.HTTPConnection) -> None:
        raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect)
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:1 does not answer: Connection reset by peer"):
        HttpTransport("127.0.0.1:1", "Bearer token").ask("GET", "/api/topics", None, 1.0)


def test_the_token_of_a_folder_that_nobody_named_goes_to_this_machine_alone(served: Served) -> None:
    assert (served.data / "conf" / "admin_token").exists()
    here = served.ready["addresses"]["admin"]
    served.run("topics", "list", "--admin", here)
    elsewhere = ("topics", "list", "--admin", "bus.invalid:8600")
    said = served.run(*elsewhere, code=1)
    assert "nothing says who asks bus.invalid:8600" in said
    assert "--token-file, --user or --client-cert" in said
    assert "bus.invalid" in served.run(*elsewhere, "--data-folder", "data", code=1)  # it is asked, and not there
