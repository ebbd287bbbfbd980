"""A server in a process of its own, that can be killed, stopped, starved of room and started again on its folder.

Run as a program it serves: `python -m tests.support.child CONFIG`, the configuration as JSON; it prints its address.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from babelbus.config import Config
from babelbus.protocols.jebp.identity import Identity
from babelbus.server.process import Running, run
from babelbus.web import server as web_server
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.jebp import Caller

ROOT = Path(__file__).parent.parent.parent


class Child:
    """One run of a server. Leave it with `kill` or `stop`; `with` kills what is left."""

    def __init__(self, config: Config, *, file_bytes_max: int | None = None) -> None:
        self.folder = Path(config.data.folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.child", msgspec.json.encode(config).decode()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._said: list[str] = []
        self._news = threading.Condition()
        assert self._process.stdout is not None
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()
        # A child that cannot start closes its output; one that hangs is ended by the safety net.
        guard = threading.Timer(SAFETY_NET_SECONDS, self._process.kill)
        guard.start()
        line = self._process.stdout.readline()
        guard.cancel()
        if not line:
            self._process.wait()
            self._listening.join()
            raise AssertionError(f"the server did not start:\n{self.said}")
        self.addresses: dict[str, str] = json.loads(line)
        self.address = self.addresses["jebp"]
        if file_bytes_max is not None:
            self.limit_files(file_bytes_max)

    def _listen(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._news:
                self._said.append(line)
                self._news.notify_all()

    def has_said(self, text: str) -> bool:
        """Say whether it has logged this: what it did before it answered may come through its pipe a little later."""
        with self._news:
            return self._news.wait_for(lambda: text in self.said, SAFETY_NET_SECONDS)

    @property
    def said(self) -> str:
        """What it has logged so far."""
        return "".join(self._said)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def admin(self) -> Identity:
        return Identity.load(self.folder / "conf" / "admin_key")

    def caller(self) -> Caller:
        return Caller(self.address, self.admin).connect()

    def limit_files(self, size: int) -> None:
        """Let no file of the server grow beyond `size` bytes, as a full disk would; -1 takes the limit away."""
        hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, hard))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: not one more instruction."""
        self._process.kill()
        self._process.wait()
        self._listening.join()

    def stop(self) -> int:
        """SIGTERM, and wait until it is gone; gives the exit code."""
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        code = self._process.wait(SAFETY_NET_SECONDS)
        self._listening.join()
        return code

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def _ready(server: Running) -> None:
    print(json.dumps(server.addresses), flush=True)


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    web_server.SLOW_FLUSH_SECONDS = SAFETY_NET_SECONDS  # others use the disk, too
    config = msgspec.json.decode(sys.argv[1], type=Config)
    if config.cluster.enabled:  # a member may get no processor for long
        from babelbus.server import copies, handover, member

        copies.GATHER_SECONDS = member.WAITING_SECONDS = SAFETY_NET_SECONDS
        handover.PAUSE_SECONDS = handover.END_SECONDS = SAFETY_NET_SECONDS
    run(config, _ready)
