"""A real server in a temporary folder, for the tests of a program: `with Server() as server`.

With pytest the fixtures `babelbus_server` and `babelbus_fresh_server` do that (`babelbus.testing.plugin`).
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from babelbus.client import BlockingClient, Client, Identity
from babelbus.errors import BabelbusError
from babelbus.testing.ports import free_ports

START: str = "from babelbus.cli import main; main()"
STOP_SECONDS = 30.0


class ServerFailedError(BabelbusError):
    """The server did not start; its last words are in the message."""


class Server:
    """A `babelbus serve` process on free ports, with an administrator's identity.

    It can be stopped, killed and started again with its data, on the same port for jebp, as a program under test would
    live through it. Use it with `with`, or `start` and `close`.

    Args:
        settings: further options of `babelbus serve`, such as `{"topics-partitions": 4}`.
        folder: where the data is; a temporary folder by default, which `close` removes.

    Raises:
        ServerFailedError: (from `start`) it did not start.
    """

    def __init__(self, settings: dict[str, Any] | None = None, folder: Path | None = None) -> None:
        self.addresses: dict[str, str] = {}
        """Name of a listener (`jebp`, `worterbuch`, `zbus`, `admin` and others) -> `host:port`."""
        self._settings = settings or {}
        self._temporary = contextlib.ExitStack()
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._port: int | None = None

    @property
    def folder(self) -> Path:
        """The data folder."""
        if self._folder is None:
            self._folder = Path(self._temporary.enter_context(tempfile.TemporaryDirectory(prefix="babelbus-"))) / "data"
        return self._folder

    @property
    def address(self) -> str:
        """`host:port` of the jebp listener, which `Client` connects to."""
        return self.addresses["jebp"]

    @property
    def identity(self) -> Identity:
        """The administrator's identity."""
        return Identity.load(self.folder / "conf" / "admin_key")

    def client(self, **options: Any) -> Client:
        """Return a client of the administrator, to be used with `async with`; the options are those of `Client`."""
        return Client(self.address, identity=self.identity, **options)

    def blocking_client(self, **options: Any) -> BlockingClient:
        """Return a blocking client of the administrator, to be used with `with`."""
        return BlockingClient(self.address, identity=self.identity, **options)

    def start(self) -> None:
        """Start the server, and return when it listens; a second start takes the port of the first for jebp."""
        assert self._process is None, "the server runs"
        self._port = self._port or free_ports(1)[0]
        command = [sys.executable, "-c", START, "serve", "--json", "--data-folder", str(self.folder)]
        command += ["--log-level", "error"]
        command += ["--jebp-port", str(self._port), "--server-any-port"]
        for name, value in self._settings.items():
            command += [f"--{name}", str(value)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)  # noqa: S603  # our own
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            self._process = None
            raise ServerFailedError(f"the server did not start: {errors[-2_000:].strip()}")
        self.addresses = json.loads(line)["addresses"]

    def stop(self) -> None:
        """Stop the server in order, as SIGTERM does."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server at once, as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            try:
                process.communicate(timeout=STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def restart(self) -> None:
        """Stop the server and start it again on the same port, with the same data."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop the server and remove its temporary folder."""
        self.kill() if self._folder is None else self.stop()
        self._temporary.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()
