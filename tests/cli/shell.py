"""A server of the real command line, one for each module of tests, and the commands against it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.bus import SAFETY_NET_SECONDS

COMMAND = [sys.executable, "-c", "from babelbus.cli import main; main()"]
SERVER = [COMMAND[0], "-c", f"from babelbus.web import server; server.SLOW_FLUSH_SECONDS = 3_600.0; {COMMAND[2]}"]
"""A server whose health does not depend on what others do with its disk."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("BABELBUS_")}
ENVIRONMENT["XDG_CONFIG_HOME"] = "/nonexistent"
"""Without the contexts of the developer; tests that make contexts give a folder of their own."""


class Shell:
    """What a person at the server's machine has: the commands, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._started: list[subprocess.Popen[str]] = []

    def kill_started(self) -> None:
        """Kill what a failed test left running: it would hold its pipes, and what reads them, for ever."""
        for process in self._started:
            process.kill()
            process.wait()
            for stream in filter(None, (process.stdout, process.stderr, process.stdin)):
                stream.close()

    def start(self, *args: str, command: Sequence[str] = COMMAND, **options: Any) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [*command, *args],
            cwd=self.folder,
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        self._started.append(process)
        return process

    def run(self, *args: str, input: str = "", code: int = 0) -> str:  # noqa: A002 - the name that subprocess has
        done = self.run_raw(*args, input=input)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout if code == 0 else done.stderr

    def run_raw(self, *args: str, input: str = "") -> "subprocess.CompletedProcess[str]":  # noqa: A002 - the same
        return subprocess.run(
            [*COMMAND, *args],
            cwd=self.folder,
            env=ENVIRONMENT,
            input=input,
            text=True,
            capture_output=True,
            check=False,
        )

    def rows(self, *args: str, input: str = "") -> list[dict[str, Any]]:  # noqa: A002 - the same
        return [json.loads(line) for line in self.run(*args, input=input).splitlines()]


class Served(Shell):
    """A shell with a server on its data folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        given = ("--server-any-port", "--json", "--log-level", "error", *options)
        self.process = self.start("serve", *given, command=SERVER)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.ready = json.loads(line)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, told = self.process.communicate(timeout=SAFETY_NET_SECONDS)
        if self.process.returncode:
            sys.stderr.write(told)  # a failing test shows it
        return self.process.returncode
