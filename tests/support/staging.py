"""A server with staged batches, in this process or in its own (`python -m tests.support.staging CONFIG`)."""

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec

from babelbus.config import Config
from babelbus.protocols.jebp.identity import Identity
from babelbus.server.process import Running, run
from tests.support.bus import SAFETY_NET_SECONDS

ROOT = Path(__file__).parent.parent.parent


class StagingChild:
    """One run in a process of its own. Leave it with `kill`; `with` does."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.data.folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.staging", msgspec.json.encode(config).decode()],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        guard = threading.Timer(SAFETY_NET_SECONDS, self._process.kill)
        guard.start()
        line = self._process.stdout.readline()
        guard.cancel()
        assert line, "the server did not start"
        self.address: str = json.loads(line)["jebp"]

    @property
    def admin(self) -> Identity:
        return Identity.load(self.folder / "conf" / "admin_key")

    def kill(self) -> None:
        """SIGKILL: not one more instruction."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "StagingChild":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _ready(server: Running) -> None:
    print(json.dumps(server.addresses), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    run(msgspec.json.decode(sys.argv[1], type=Config), _ready)
