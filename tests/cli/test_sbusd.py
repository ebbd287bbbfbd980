"""`sbusd` as a process: options, exit codes and habits of the reference daemon.

Specification: docs/specifications/sbus.md, 13 to 17.
"""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from babelbus.cli.sbusd import Arguments, parse
from babelbus.clients.sbus import Client
from babelbus.protocols.sbus.packets.listeners import ABSTRACT
from tests.support.bus import SAFETY_NET_SECONDS

COMMAND = [sys.executable, "-c", "import sys; from babelbus.cli.sbusd import main; main(sys.argv[1:])"]
SECONDS = SAFETY_NET_SECONDS


def start(*arguments: str, cwd: Path | None = None) -> tuple[subprocess.Popen[str], str]:
    """Run it in the foreground; give it and what it said before it was ready, which is when it closes its output."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, cwd=cwd)
    assert process.stdout is not None
    with process.stdout:
        return process, process.stdout.read().strip()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)


def test_options_may_be_joined_and_values_attached() -> None:
    assert parse([]) == Arguments()
    assert parse(["-fa/x", "-crgo", "-u1", "-u", "b", "-p", "/p"]) == Arguments(
        "/x", True, True, True, True, "/p", True, ("1", "b")
    )
    assert parse(["-f", "--"]) == Arguments(foreground=True)


@pytest.mark.parametrize("arguments", [["-h"], ["operand"], ["-x"], ["--help"], ["-a"], ["-f", "--", "operand"]])
def test_what_is_no_option_prints_the_usage_and_fails(arguments: list[str]) -> None:
    assert parse(arguments) is None


def test_the_usage_goes_to_standard_error_with_exit_code_1() -> None:
    done = run("-h")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("usage:")


def test_in_the_foreground_it_tells_its_abstract_address_and_ends_with_its_last_client() -> None:
    process, address = start("-fa/dev/unix/abstract", "-c")
    assert address.startswith(f"{ABSTRACT}/00")
    again, said = start(f"-fa{address[:-2]}ff", "-cr")
    assert said == ""
    for number, name in enumerate((address, f"{address[:-2]}ff")):
        with Client(name, timeout_seconds=SECONDS) as one, Client(name, timeout_seconds=SECONDS) as other:
            one.subscribe(b"a/")
            one.whoami()
            for turn in range(100):
                other.publish(b"a/b", b"%d %d" % (number, turn))
            packets = [one.receive_packet() for _ in range(100)]
            assert packets == [b"MSG a/b\0%d %d" % (number, turn) for turn in range(100)]
    assert process.wait(SECONDS) == 0
    assert again.wait(SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_right_after_it_is_ready_ends_it_and_removes_its_file(tmp_path: Path, number: int) -> None:
    process, _ = start("-f", "-a", "socket", "-go", cwd=tmp_path)
    assert stat.S_IMODE(os.stat(tmp_path / "socket").st_mode) == 0o777
    process.send_signal(number)
    assert process.wait(SECONDS) == 0
    assert not (tmp_path / "socket").exists()


def test_an_address_that_is_taken_is_a_failure_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.touch()
    failed = run("-fa", str(path))
    assert failed.returncode == 1
    assert str(path) in failed.stderr
    process, _ = start("-rfa", str(path))
    process.terminate()
    assert process.wait(SECONDS) == 0


@pytest.mark.parametrize("arguments", [["-fa", ""], ["-fu", "nobody-of-this-name", "-a/x/y"], ["-fa", "/" + "x" * 200]])
def test_what_cannot_be_done_ends_with_exit_code_1(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 1


def test_as_a_daemon_it_returns_when_it_serves_and_keeps_a_pid_file(tmp_path: Path) -> None:
    path, pid_file = tmp_path / "socket", tmp_path / "pid"
    # It keeps its standard error, so whoever waited for the end of that would wait for the daemon's.
    command = [*COMMAND, "-a", str(path), "-p", str(pid_file)]
    ran = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=SECONDS, check=False, umask=0o077)
    assert ran.returncode == 0
    pid = int(pid_file.read_text())
    assert stat.S_IMODE(pid_file.stat().st_mode) == 0o644
    client = Client(str(path), timeout_seconds=SECONDS)
    assert client.whoami()
    assert os.getsid(pid) not in (os.getsid(0), pid)  # a session of its own, whose leader has gone
    second = run("-ra", str(tmp_path / "other"), "-p", str(pid_file))
    assert second.returncode == 1
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ConnectionResetError):
        client.receive_packet()
    client.close()


def test_the_command_of_babelbus_is_the_same() -> None:
    command = [sys.executable, "-c", "from babelbus.cli import main; main()", "sbusd", "-h"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("usage:")
