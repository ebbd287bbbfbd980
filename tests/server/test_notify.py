"""What systemd is told, on a socket like its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from babelbus.server.notify import READY, Supervisor
from tests.support.bus import SAFETY_NET_SECONDS

COMMAND = [sys.executable, "-c", "from babelbus.cli import main; main()", "serve", "--server-any-port", "--json"]


@contextmanager
def systemd(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(SAFETY_NET_SECONDS)
        listener.bind(address)
        yield listener


def hear(listener: socket.socket) -> str:
    return listener.recv(4096).decode()


def hear_next(listener: socket.socket) -> str:
    """The next message that is no sign of life."""
    while (message := hear(listener)) == "WATCHDOG=1":
        pass
    return message


def test_a_server_tells_systemd_when_it_is_ready_alive_reloads_and_stops(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    variables = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000"}
    with systemd(address) as listener:
        process = subprocess.Popen(
            [*COMMAND, "--data-folder", str(tmp_path / "data")],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with process:
            assert process.stdout is not None
            assert hear(listener) == READY
            assert (tmp_path / "data" / "conf" / "addresses").exists()
            assert [hear(listener) for _ in range(3)] == ["WATCHDOG=1"] * 3
            process.send_signal(signal.SIGHUP)
            reloading, moment = hear_next(listener).split("\n")
            assert reloading == "RELOADING=1"
            assert moment.removeprefix("MONOTONIC_USEC=").isdecimal()
            assert hear_next(listener) == READY
            process.terminate()
            assert hear_next(listener) == "STOPPING=1"
            assert process.wait(SAFETY_NET_SECONDS) == 0
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(4096)


def test_an_address_with_an_at_sign_is_abstract() -> None:
    name = f"babelbus-test-{os.getpid()}"
    with systemd(f"\0{name}") as listener:
        Supervisor({"NOTIFY_SOCKET": f"@{name}"}).send(READY, "STATUS=serving")
        assert hear(listener) == "READY=1\nSTATUS=serving"


def test_without_systemd_nothing_is_sent_and_a_lost_socket_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Supervisor({}).send(READY)
    assert not caplog.messages
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "gone")}).send(READY)
    assert "was not told READY=1: No such file or directory" in caplog.text


def test_the_watchdog_of_another_process_is_not_ours(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with systemd(address) as listener:
        Supervisor({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}).watch()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.recv(4096)
